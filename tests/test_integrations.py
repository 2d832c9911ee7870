"""docs/integrations.md: its examples run, and its tables are the code's."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[1] / "docs" / "integrations.md"

EXAMPLES = re.findall(r"^## (.*?)$(?:(?!^## ).)*?```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


def run_example(title: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(dict(EXAMPLES)[title], f"{PAGE.name}: {title}", "exec"), names)
    return names


def test_every_section_has_an_example() -> None:
    assert len(EXAMPLES) == PAGE.read_text().count("\n## ") == 5


def test_flash_attn() -> None:
    names = run_example("flash-attn")
    assert names["out"].shape == names["out8"].shape == (1, 100, 4, 64)
    assert names["lse"].shape == (1, 4, 100)
    assert not torch.equal(names["out"], names["out8"])


def test_flash_attn_varlen() -> None:
    names = run_example("flash-attn with sequences of different lengths")
    assert names["out"].shape == (120, 4, 64)
    assert names["lse"].shape == (4, 120)
    assert not names["out"].isnan().any()


def test_flash_attn_with_kvcache() -> None:
    names = run_example("flash-attn with a KV cache")
    assert names["out"].shape == (2, 1, 8, 64)
    assert names["cache_seqlens"].tolist() == [3, 3]
    assert not names["out"].isnan().any()


def test_kv_cache() -> None:
    page = PAGE.with_name("kv_cache.md")
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, page.name, "exec"), names)
    assert names["out"].shape == (2, 8, 1, 64)
    assert names["seqlens"].tolist() == [152, 152]
    assert not names["out"].isnan().any()


def test_sdpa() -> None:
    names = run_example("PyTorch's scaled_dot_product_attention")
    assert names["out"].shape == names["causal"].shape == (1, 4, 50, 64)
    assert not torch.equal(names["out"], names["causal"])


def test_transformers() -> None:
    pytest.importorskip("transformers")
    names = run_example("transformers")
    assert names["generated"].shape == (2, 9)


def test_tables_are_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PAGE.parents[1] / "scripts"))
    with_tables = importlib.import_module("integrations").with_tables
    page = PAGE.read_text()
    assert page == with_tables(page), "run scripts/integrations.py"
    assert with_tables(page.replace("`sm_margin`", "`sm`")) == page
    with pytest.raises(ValueError, match="0 blocks sdpa"):
        with_tables(page.replace("unsupported:sdpa", "unsupported"))
