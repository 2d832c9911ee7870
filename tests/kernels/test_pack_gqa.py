"""Heads of a group that share tiles of query rows: the answers of heads that do not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn import plans
from helion_attn.configs import packing, scheduling
from helion_attn.kernels import attention
from helion_attn.kernels.lib import rows
from helion_attn.kernels.lib.rows import rows_of_group
from helion_attn.numerics import LOG2E, MAX_FUSED_SCALE_LOG2
from helpers.cases import LADDER, RECIPES, Case, make_case

Poisoned = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Afterwards no heads share tiles."""

    def set_apart() -> None:
        monkeypatch.setattr(scheduling, "gqa_query_blocks", lambda *_: 10**9)
        plans.forget()

    return set_apart


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every launch, of which a call on a GPU has several, whether heads share tiles."""
    seen: list[bool] = []
    launch = attention.launch

    def record(*args: Any, **options: Any) -> None:
        seen.append(args[0].pack_gqa)
        launch(*args, **options)

    monkeypatch.setattr(attention, "launch", record)
    return seen


#: (B, H, H_kv, M, N, D) and the masks. Some tiles end in the middle of a query, some groups are no power of two.
PROBLEMS: dict[str, tuple[tuple[int, int, int, int, int, int], dict[str, Any]]] = {
    "one_query": ((2, 4, 1, 1, 300, 64), {"causal": True}),
    "three_heads": ((2, 6, 2, 7, 300, 64), {"causal": True}),
    "more_heads_than_rows": ((1, 80, 1, 3, 140, 16), {"causal": True}),
    "two_tiles": ((1, 8, 2, 17, 200, 64), {}),
    "half_a_tile_saved": ((1, 4, 2, 70, 260, 128), {"causal": True}),
    "d48": ((1, 5, 1, 12, 130, 48), {"causal": True}),
    "d256": ((1, 4, 1, 20, 200, 256), {"causal": True}),
    "window": ((1, 4, 2, 30, 400, 64), {"window": (100, 30)}),
    "window_causal": ((1, 4, 1, 30, 400, 64), {"window": (130, -1), "causal": True}),
    "softcap": ((1, 4, 2, 5, 200, 64), {"softcap": 5.0}),
    "sinks": ((2, 3, 1, 5, 200, 64), {"causal": True, "sinks": [-1.0, 3.0, float("-inf")]}),
    # The first 15 rows see no key.
    "more_queries": ((1, 4, 2, 30, 15, 64), {"causal": True}),
}


def problem(name: str, device: str, recipe: ha.Recipe = ha.BALANCED) -> Case:
    sizes, masks = PROBLEMS[name]
    sinks = torch.tensor(masks["sinks"], device=device) if "sinks" in masks else None
    return make_case(make_qkv("biased_v", *sizes, device=device), recipe=recipe, **masks | {"sinks": sinks})


@pytest.mark.thorough(but=8)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", PROBLEMS)
def test_problems(
    name: str, splits: int, device: str, asked: list[bool], poisoned: Poisoned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "key_splits", lambda *_: splits)
    case = problem(name, device)
    with poisoned():
        out, lse = case.run(torch.float32)
    assert set(asked) == {True}
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)


@pytest.mark.parametrize("name", [*LADDER, "plain", "q_block", "int8_smooth_k"])
def test_the_same_bits(name: str, device: str, asked: list[bool], apart: Callable[[], None]) -> None:
    """Without a mask, a large scale or splits, a row's blocks are the same whatever tile it is in, and its numbers."""
    recipe = RECIPES[name]
    q, k, v = make_qkv("outlier", 1, 6, 2, 21, 150, 64, device=device)
    q = q / 32
    packed = ha.quantize(q, k, v, recipe=recipe)
    largest_scale = packed.q_descale.max() * packed.k_descale.max() * 64**-0.5 * LOG2E
    assert largest_scale <= MAX_FUSED_SCALE_LOG2[recipe.qk_dtype], "a large scale"
    options: dict[str, Any] = {"recipe": recipe, "return_lse": True, "out_dtype": torch.float32}
    together = ha.attention(q, k, v, **options)
    apart()
    one_by_one = ha.attention(q, k, v, **options)
    assert (asked[0], asked[-1]) == (True, False)
    for a, b in zip(together, one_by_one, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", [ha.BALANCED, ha.FAST], ids=["balanced", "fast"])
def test_heads_of_different_scales(recipe: ha.Recipe, device: str, asked: list[bool]) -> None:
    """Some of a tile's rows have scores of thousands, which take a path of their own, and its others with them."""
    q, k, v = make_qkv("randn", 1, 4, 1, 5, 300, 64, device=device)
    scales = torch.tensor([0.01, 1.0, 30.0, 1000.0], device=device).view(4, 1, 1)
    case = make_case(((q * scales).bfloat16(), k, v), causal=True, recipe=recipe)
    out, lse = case.run(torch.float32)
    assert set(asked) == {True}
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("recipe", [ha.BALANCED, ha.FAST, ha.BF16], ids=["balanced", "fast", "bf16"])
def test_nonfinite_stays_in_its_head(
    recipe: ha.Recipe, value: float, device: str, asked: list[bool], apart: Callable[[], None]
) -> None:
    q, k, v = make_qkv("randn", 1, 4, 2, 5, 150, 64, device=device)
    clean = ha.attention(q, k, v, recipe=recipe)
    q[0, 1, 3, 7] = value
    out = ha.attention(q, k, v, recipe=recipe)
    assert set(asked) == {True}
    assert not out[0, 1, 3].isfinite().any()
    assert torch.equal(out[:, [0, 2, 3]], clean[:, [0, 2, 3]])
    apart()
    assert torch.equal(out.isfinite(), ha.attention(q, k, v, recipe=recipe).isfinite())


@pytest.mark.once  # the kernel does not run
@pytest.mark.parametrize(
    ("H", "H_kv", "M", "shares"),
    [
        (4, 4, 1, False),  # nothing to share
        (4, 2, 1, True),
        (8, 1, 8, True),
        (4, 2, 32, True),
        (4, 2, 64, False),  # a tile is full
        (4, 2, 65, True),  # three tiles for four
        (6, 2, 16, True),
        (6, 2, 64, False),  # a query of three heads takes four rows
        (4, 2, 1000, False),
        (4, 2, 1030, False),  # 33 tiles for 34
    ],
)
def test_who_shares(
    H: int, H_kv: int, M: int, shares: bool, asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads share tiles where they need fewer."""
    assert packing(64, 64).bm == 64
    monkeypatch.setattr(attention.interpreted_kernel, "run", lambda arguments: None)
    qkv = ha.quantize(*make_qkv("randn", 1, H, H_kv, M, 40, 64))
    ha.attention_quantized(qkv)
    assert set(asked) == {shares}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is compiled as it is")
def test_another_order_of_rows_exceeds_the_budget(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the checks above can fail: the rows of a query taken for those of its heads in turn."""

    def heads_in_turn(row_begin: int, group_log2: int, bm: int) -> tuple[torch.Tensor, torch.Tensor]:
        query, member = rows_of_group(row_begin, group_log2, bm)
        return query, (member + query) % 2**group_log2

    case = problem("two_tiles", device)
    launches = iter([rows_of_group, heads_in_turn])
    case.assert_within_budget(case.run(torch.float32)[0])
    monkeypatch.setattr(rows, "rows_of_group", lambda *args: next(launches, heads_in_turn)(*args))
    with pytest.raises(AssertionError, match="budget"):
        case.assert_within_budget(case.run(torch.float32)[0])
