"""docs/support.md: its tables are what the functions take and refuse, and what they take can be combined."""

from __future__ import annotations

import importlib
import inspect
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import helion_attn as ha

PAGE = Path(__file__).parents[2] / "docs" / "support.md"


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PAGE.parents[1] / "scripts"))
    return importlib.import_module("support_matrix")


def test_tables_are_the_checks(matrix: ModuleType) -> None:
    page = PAGE.read_text()
    assert page == matrix.with_tables(page), "run scripts/support_matrix.py"


#: Options, and two values or more that functions with these take.
COMBINED: dict[str, tuple[Any, ...]] = {
    "recipe": (ha.FAST, ha.BALANCED, ha.ACCURATE, ha.HYBRID, ha.BF16),
    "rope": (None, ha.Rope(*torch.zeros(2, 16, 32))),
    "layout": ("bhsd", "bshd"),
    "causal": (False, True),
    "window": (None, (3, 2)),
    "softcap": (None, 30.0),
    "sinks": (None, torch.zeros(4)),
    "return_lse": (False, True),
    "out_dtype": (None, torch.float32),
}


@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("H_kv", [4, 1])
@pytest.mark.parametrize("function", ["attention", "attention_varlen", "attention_kvcache"])
def test_what_is_taken_combines(matrix: ModuleType, function: str, H_kv: int, D: int) -> None:
    values = {name: COMBINED[name] for name in inspect.signature(getattr(ha, function)).parameters if name in COMBINED}
    assert len(values) >= 7
    for dtype, *chosen in itertools.product((torch.float16, torch.float32), *values.values()):
        options = dict(zip(values, chosen, strict=True))
        assert matrix.refusal(function, matrix.Call(dtype=dtype, D=D, D_v=D, H_kv=H_kv, options=options)) is None, (
            options
        )
