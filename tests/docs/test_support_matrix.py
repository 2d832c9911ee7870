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
from helion_attn import configs, types
from helion_attn.validate import dense, varlen

PAGE = Path(__file__).parents[2] / "docs" / "support.md"


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PAGE.parents[1] / "scripts"))
    return importlib.import_module("support_matrix")


def test_tables_are_the_checks(matrix: ModuleType) -> None:
    page = PAGE.read_text()
    assert page == matrix.with_tables(page), "run scripts/support_matrix.py"


def line(table: str, beginning: str) -> str:
    (found,) = (line for line in table.splitlines() if line.startswith(beginning))
    return found


def test_tables_follow_the_checks(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    functions, refusals, choices = matrix.functions_table(), matrix.refusals_table(), matrix.choices_table()
    monkeypatch.setattr(dense, "MAX_D", 768)
    monkeypatch.setattr(dense, "LAYOUTS", ("bhsd",))
    changed = matrix.functions_table()
    assert line(functions, "| head dim D |") == "| head dim D | 16..1024 | 16..1024 | 16..256 | 16..512 | 16..512 |"
    assert line(changed, "| head dim D |") == "| head dim D | 16..768 | 16..768 | 16..256 | 16..512 | 16..512 |"
    assert line(functions, "| `layout`: bshd |") == "| `layout`: bshd | yes | yes | - | yes | yes |"
    assert line(changed, "| `layout`: bshd |") == "| `layout`: bshd | raises | raises | - | raises | raises |"
    assert "in 16..768`" in matrix.refusals_table()
    assert "in 16..768`" not in refusals
    monkeypatch.setitem(types.RECIPE_CHOICES, "smooth_k", (False,))
    changed = matrix.choices_table()
    assert "| `smooth_k` True |" in choices
    assert "| `smooth_k` True |" not in changed
    assert line(choices, "| `k_scales` 'head' |").endswith(" raises |")
    assert line(choices, "| `k_scales` 'block' |").endswith(" yes |")


def test_sizes_are_where_anything_changes(matrix: ModuleType) -> None:
    widths = {tile.D_pad for tile in configs.TILE_CONFIGS}
    widths |= {width for tile in configs.LARGE_TILE_CONFIGS for width in (tile.D_pad, tile.v_tile)}
    bounds = {
        dense.MIN_D,
        dense.MAX_D,
        configs.MAX_PAGE_D,
        varlen.MAX_VARLEN_D,
    }
    for size in widths | bounds:
        assert size % 16 == 0
        assert {size - 1, size, size + 1} <= set(matrix.SIZES)


def test_attention_takes_every_recipe(matrix: ModuleType) -> None:
    recipes = matrix.all_recipes()
    assert set(matrix.PRESETS.values()) <= set(recipes)
    for recipe in recipes:
        call = matrix.Call(D=128, D_v=128, options={"recipe": recipe})
        assert (matrix.refusal("attention", call) is not None) == recipe.is_given, recipe


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
