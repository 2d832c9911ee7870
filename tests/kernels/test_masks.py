"""Windows, softcaps and sinks against the fp64 oracle, and against what they are by definition."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.testing import relative_error
from helpers.cases import LADDER, PLAIN, Case, make_case

Window = tuple[int, int]

#: (M, N, window, causal): a query block has 64 rows and a key block 128.
WINDOWS: dict[str, tuple[int, int, Window, bool]] = {
    "own_key_only": (200, 200, (0, 0), False),
    "own_key_only_more_keys": (70, 400, (0, 0), True),
    "both_sides": (300, 400, (30, 40), False),
    "both_sides_wider_than_a_block": (200, 600, (200, 150), False),
    "left_causal": (300, 400, (130, -1), True),
    "left_causal_right_ignored": (150, 400, (130, 77), True),
    "left_only": (70, 300, (40, -1), False),
    "right_only": (200, 500, (-1, 5), False),
    "unlimited": (70, 200, (-1, -1), False),
    "larger_than_everything": (70, 200, (10**12, 10**12), False),
    "one_row": (1, 300, (17, 3), False),
    "rows_without_a_key": (400, 150, (20, 30), False),
    "rows_without_a_key_causal": (300, 100, (10, -1), True),
    "whole_query_block_ends_on_a_block": (128, 256, (128, 0), False),
}


def gqa(M: int, N: int, device: str, D: int = 32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """V off centre, so that a mean that comes back wrongly shows."""
    return make_qkv("biased_v", 1, 4, 2, M, N, D, device=device)


def sinks_of(values: list[float], device: str) -> torch.Tensor:
    return torch.tensor(values, device=device)


def assert_within_budget(case: Case) -> None:
    out, lse = case.run(torch.float32)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)
    sees_a_key = visible(case).any(1)
    assert torch.all(out[:, :, ~sees_a_key] == 0)


def visible(case: Case) -> torch.Tensor:
    """[M, N], from the definition."""
    M, N = case.qkv[0].size(2), case.qkv[1].size(2)
    left, right = case.window or (-1, -1)
    right = 0 if case.causal else right
    from_diagonal = torch.arange(N)[None, :] - (torch.arange(M)[:, None] + N - M)
    mask = torch.ones(M, N, dtype=torch.bool)
    if left >= 0:
        mask &= from_diagonal >= -left
    if right >= 0:
        mask &= from_diagonal <= right
    return mask.to(case.oracle.device)


@pytest.mark.thorough(but=7)
@pytest.mark.parametrize("name", WINDOWS)
def test_every_row_sees_its_keys_and_no_other(name: str, device: str) -> None:
    """With equal scores, lse counts keys and out says which, with nothing rounded on the way."""
    M, N, window, causal = WINDOWS[name]
    q, k = (torch.ones(1, 1, S, 64, device=device) for S in (M, N))
    # Key j has a one in channel j % 61: with 61, blocks that are swapped show.
    v = torch.nn.functional.one_hot(torch.arange(N, device=device) % 61, 64).float()[None, None]
    case = make_case((q, k, v), causal, 0.0, PLAIN, window=window)
    out, lse = case.run(torch.float32)
    counts = visible(case).double() @ v[0, 0].double()
    total = counts.sum(1)
    assert (lse[0, 0].exp() - total).abs().max() <= 1e-5 * total.max()
    assert (out[0, 0] * total.unsqueeze(1) - counts).abs().max() <= 1e-5 * counts.max()


def test_causal_is_a_right_edge_of_zero(device: str) -> None:
    qkv = gqa(70, 200, device)
    expected = ha.attention(*qkv, causal=True)
    assert torch.equal(ha.attention(*qkv, window=(-1, 0)), expected)
    assert torch.equal(ha.attention(*qkv, causal=True, window=(-1, 9)), expected)


@pytest.mark.parametrize("window", [(0, 0), (100, 0), (-1, 50), (40, -1)], ids=str)
def test_blocks_outside_a_window_are_not_read(window: Window, device: str) -> None:
    case = make_case(gqa(320, 512, device), window=window)
    packed = ha.quantize(*case.qkv)
    bm, bn = packed.q8.size(2), packed.k8.size(2)
    # [key blocks], of the first query block
    used = visible(case)[:bm].view(bm, -1, bn).any(2).any(0)
    assert 0 < used.sum() < len(used)

    def poisoned(x8: torch.Tensor) -> torch.Tensor:
        as_bytes = x8.view(torch.int8).clone()
        as_bytes[:, ~used] = 0x7F  # NaN
        return as_bytes.view(x8.dtype)

    # int8 has no NaN: a block of K is poisoned through its descale.
    k_descale = torch.where(used, packed.k_descale, float("nan"))
    holed = dataclasses.replace(packed, k_descale=k_descale, v8=poisoned(packed.v8))
    out, expected = (ha.attention_quantized(x, window=window) for x in (holed, packed))
    assert torch.equal(out[:, :, :bm], expected[:, :, :bm])


SINKS = {
    "like_scores": [0.5, -1.0, 2.0, 0.0],
    # e**-80 is still a normal fp32; the GPU flushes what is smaller to 0.
    "large": [30.0, 1e4, 1e30, 80.0],
    "negligible": [-30.0, -1e4, -1e30, float("-inf")],
}


def test_a_sink_is_a_key_without_a_value(device: str) -> None:
    q, k, v = (x.double() for x in gqa(70, 200, device))
    sinks = sinks_of(SINKS["like_scores"], device)
    s = q @ k.repeat_interleave(2, 1).mT * 32**-0.5
    p = torch.cat([s, sinks.double().view(1, 4, 1, 1).expand(1, 4, 70, 1)], 3).softmax(3)[..., :-1]
    expected = p @ v.repeat_interleave(2, 1)
    assert relative_error(ha.reference.attention(q, k, v, sinks=sinks), expected) < 1e-12
    assert relative_error(ha.attention(*gqa(70, 200, device), sinks=sinks), expected) < 0.05


def test_sink_that_is_minus_infinity_is_none(device: str) -> None:
    qkv = gqa(70, 200, device)
    out, lse = ha.attention(*qkv, return_lse=True)
    same, same_lse = ha.attention(*qkv, sinks=sinks_of([float("-inf")] * 4, device), return_lse=True)
    assert relative_error(same, out) < 1e-6
    assert relative_error(same_lse, lse) < 1e-6


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_sink_that_is_not_a_number_stays_one(value: float, device: str) -> None:
    for shape in ((70, 200), (200, 70)):
        out, lse = ha.attention(
            *gqa(*shape, device), causal=True, sinks=sinks_of([0.0, value, 0.0, 0.0], device), return_lse=True
        )
        assert out[:, 1].isnan().all()
        assert lse[:, 1].isnan().all()
        assert out[:, [0, 2, 3]].isfinite().all()
        assert lse[:, [0, 2, 3]].isfinite().all()


def test_largest_sinks(device: str) -> None:
    """Up to 2**127 they are right, and what overflows in base 2 is not finite."""
    M, N = 70, 200
    sinks = sinks_of([2.0**127, -(2.0**127), 3e38, 0.0], device)
    case = make_case(gqa(M, N, device), sinks=sinks)
    out, lse = case.run(torch.float32)
    assert torch.all(out[:, 0] == 0)
    assert torch.all((lse[:, 0] / 2.0**127 - 1).abs() <= torch.finfo(torch.float32).eps)
    without, lse_without = ha.attention(*case.qkv, return_lse=True, out_dtype=torch.float32)
    assert relative_error(out[:, 1], without[:, 1]) < 1e-6
    assert relative_error(lse[:, 1], lse_without[:, 1]) < 1e-6
    assert not out[:, 2].isfinite().any()
    assert not lse[:, 2].isfinite().any()


@pytest.mark.thorough(but=11)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("recipe", LADDER.values(), ids=LADDER)
def test_never_becomes_finite(recipe: ha.Recipe, name: str, value: float, device: str) -> None:
    """tanh(inf) is 1, and would hide an infinity. Of 16-bit scores that is what a softcap says."""
    options: dict[str, Any] = {"window": (60, 20), "softcap": 5.0, "sinks": sinks_of([1.0] * 4, device)}
    qkv = dict(zip("qkv", gqa(70, 200, device), strict=True))
    clean = ha.attention(*qkv.values(), recipe=recipe, **options)
    qkv[name][0, 1, 40 if name == "q" else 170, 5] = value
    out = ha.attention(*qkv.values(), recipe=recipe, **options)
    hit = slice(1, 2) if name == "q" else slice(2, 4)
    # Key 170 is at the diagonal of row 40, and rows from 20 on see it.
    rows = slice(40, 41) if name == "q" else slice(20, None)
    if recipe == ha.BF16 and name != "v" and math.isinf(value):
        make_case((qkv["q"], qkv["k"], qkv["v"]), recipe=recipe, **options).assert_within_budget(out)
    else:
        # A channel of V without others to share its descale stays alone.
        channels = slice(5, 6) if name == "v" and recipe.resolved.v_scales in ("none", "channel") else slice(None)
        assert not out[:, hit, rows, channels].isfinite().any()
    others = [h for h in range(4) if h not in range(4)[hit]]
    assert torch.equal(out[:, others], clean[:, others])


MUTATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "left_edge_one_less": lambda o: o | {"window": (o["window"][0] - 1, o["window"][1])},
    "left_edge_one_more": lambda o: o | {"window": (o["window"][0] + 1, o["window"][1])},
    "right_edge_one_less": lambda o: o | {"window": (o["window"][0], o["window"][1] - 1)},
    "right_edge_one_more": lambda o: o | {"window": (o["window"][0], o["window"][1] + 1)},
    "window_forgotten": lambda o: o | {"window": None},
    "softcap_forgotten": lambda o: o | {"softcap": None},
    "softcap_doubled": lambda o: o | {"softcap": 2 * o["softcap"]},
    "softcap_before_scaling": lambda o: o | {"softcap": o["softcap"] * 64**-0.5},
    "sinks_forgotten": lambda o: o | {"sinks": None},
    "sinks_of_other_heads": lambda o: o | {"sinks": o["sinks"].roll(1)},
    "sinks_in_base_2": lambda o: o | {"sinks": o["sinks"] * 0.6931471805599453},
}


@pytest.mark.parametrize("recipe", [ha.BALANCED, ha.ACCURATE], ids=["balanced", "accurate"])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_exceeds_the_budget(mutation: str, recipe: ha.Recipe, device: str) -> None:
    q, k, v = make_qkv("randn", 1, 4, 2, 65, 300, 64, torch.float32, device)
    options: dict[str, Any] = {"window": (7, 5), "softcap": 3.0, "sinks": sinks_of([0.5, 1.5, 2.5, 1.0], device)}
    healthy = make_case((q * 2, k, v), recipe=recipe, **options)
    packed = ha.quantize(*healthy.qkv, recipe=recipe)
    healthy.assert_within_budget(ha.attention_quantized(packed, **options))
    out = ha.attention_quantized(packed, **MUTATIONS[mutation](options))
    with pytest.raises(AssertionError, match="budget"):
        healthy.assert_within_budget(out)
    _, lse = ha.attention_quantized(packed, **MUTATIONS[mutation](options), return_lse=True)
    with pytest.raises(AssertionError, match="budget"):
        healthy.assert_lse_within_budget(lse)


@pytest.mark.parametrize(("sink", "largest"), [(None, 0.0), (float("-inf"), 0.0), (-300.0, 1e-100), (2.0, 2.0**-19)])
def test_share_noise_is_of_fp32(sink: float | None, largest: float, device: str) -> None:
    """What the budget adds for a sink: nothing where that has no share, and no more than logits' last digits."""
    sinks = None if sink is None else torch.full((2,), sink, device=device)
    case = make_case(make_qkv("randn", 1, 2, 2, 30, 70, 32, device=device), sinks=sinks)
    noise = case.share_noise()
    assert 0 <= noise <= largest
    assert (noise > 0) == (sink is not None and sink > float("-inf"))


def test_run_noise_is_of_fp32(device: str) -> None:
    """What the budget adds for keys in runs: no more than the last digits of an lse, and nothing without runs."""
    case = make_case(make_qkv("randn", 1, 2, 2, 30, 70, 32, device=device), causal=True)
    largest = case.oracle_lse[case.oracle_lse > float("-inf")].abs().max().item()
    assert 0 < case.run_noise() <= 2.0**-23 * largest < 2.0**-20
    assert case.budget(splits=1) < case.budget(splits=2) == case.budget(splits=1) + case.run_noise()
