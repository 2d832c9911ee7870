"""P against the maximum of a row's first block, where P is bf16 and scores have 8 bits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn import numerics, plans
from helion_attn.compiler.passes import computed_once
from helion_attn.kernels import attention
from helion_attn.kernels.lib import steps
from helpers.cases import IN_E4M3, RECIPES, Case, make_case

#: By how much, in base 2, the scores of later blocks lie above those of the first. "much" is within `MAX_ROW_SUM`; with
#: "too_much" the sum passes it, and "infinite" is more than fp32 has exponents.
RISES = {"little": 10.0, "much": 50.0, "too_much": 90.0, "infinite": 300.0}


def rising(rise: float, D: int, causal: bool, recipe: ha.Recipe, device: str) -> Case:
    """Scores that lie about `rise` higher from key 200 on for every other query, and as much lower for the rest."""
    q, k, v = make_qkv("randn", 2, 4, 2, 300, 500, D, torch.bfloat16, device)
    sign = torch.tensor([1.0, -1.0], device=device).repeat(150)[:, None]
    q[..., 0] = (sign * 8.0)[:, 0]
    k[..., 0] = 0.0
    k[:, :, 200:, 0] = rise * numerics.LN2 * D**0.5 / 8.0
    return make_case((q, k, v), causal, recipe=recipe)


# The tensor core's sums of e4m3 products have too few bits for larger scores, whatever the reference.
RISING = [*itertools.product(["hybrid"], RISES), ("hybrid_e4m3", "little")]


@pytest.mark.thorough(but=7)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("name", "rise"), RISING)
def test_scores_that_rise(name: str, rise: str, causal: bool, D: int, device: str) -> None:
    case = rising(RISES[rise], D, causal, RECIPES[name], device)
    out, lse = case.run(torch.float32)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)


#: With 7 keys to the left, the first key of row 63, the last of its tile, is the first of a block.
WINDOWS = [(70, 30), (0, 0), (300, -1), (-1, 5), (129, 128), (7, -1), (7, 300)]


@pytest.mark.parametrize("window", WINDOWS)
def test_every_row_has_a_reference(window: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as it has a score, and so no row is walked again for want of one."""
    qkv = make_qkv("randn", 1, 4, 2, 300, 500, 64)
    case = make_case(qkv, recipe=ha.HYBRID, window=window)
    step, without = steps.online_softmax_step, []

    def watched(s: torch.Tensor, bias: Any, scale: Any, m_run: Any, m_i: torch.Tensor, *rest: Any) -> Any:
        *_, spec = rest
        without.append(spec.first_block_max and bool(((m_i == float("-inf")) & (s > float("-inf")).any(1)).any()))
        return step(s, bias, scale, m_run, m_i, *rest)

    monkeypatch.setattr(attention, "online_softmax_step", watched)
    out, lse = case.run(torch.float32)
    assert without
    assert not any(without)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)


def test_such_scores_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second walk the test above would fail."""
    case = rising(RISES["infinite"], 64, causal=False, recipe=ha.HYBRID, device="cpu")
    monkeypatch.setattr(steps, "MAX_ROW_SUM", float("inf"))
    out, _ = case.run(torch.float32)
    assert not out.isfinite().all()


@pytest.mark.parametrize("rise", RISES)
def test_is_the_running_maximum_past_the_limit(rise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; and not where no row's sum passes it."""
    case = rising(RISES[rise], 64, causal=False, recipe=ha.HYBRID, device="cpu")
    out, lse = case.run(torch.float32)
    monkeypatch.setattr(attention, "first_block_max", lambda *of: False)
    plans.forget()
    exact, exact_lse = case.run(torch.float32)
    again = RISES[rise] > 64
    assert torch.equal(out, exact) == again
    assert torch.equal(lse, exact_lse) == again


@pytest.mark.parametrize(
    ("recipe", "D", "kept"),
    [
        (ha.HYBRID, 64, True),
        (ha.HYBRID, 128, True),
        (ha.HYBRID, 256, False),
        (replace(IN_E4M3, pv_dtype=torch.float16, v_scales="none"), 64, False),
        (ha.BF16, 64, False),
        (ha.BALANCED, 64, False),
    ],
)
def test_which_keep_it(recipe: ha.Recipe, D: int, kept: bool) -> None:
    assert numerics.first_block_max(recipe.qk_dtype, recipe.pv_dtype, D) == kept


ASM = '%{} = tt.elementwise_inline_asm "mov.b32 $0, $1; // computed once" {{pure = true}} %{} : {} -> {}'
MMA, DOT = "tensor<64x128xf32, #mma>", "tensor<64x128xf32, #ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 2}>>"


@pytest.mark.parametrize("product_first", [False, True])
def test_one_is_converted(product_first: bool) -> None:
    of_sums, of_product = ASM.format("a", "x", MMA, MMA), ASM.format("b", "y", DOT, DOT)
    before = [of_product, of_sums] if product_first else [of_sums, of_product]
    converted = f"  %b = ttg.convert_layout %a : {MMA} -> {DOT}"
    text = "\n".join(["scf.for %j = %a to %b", *(f"  {line}" for line in before), "}"])
    assert computed_once.with_one(text).text.split("\n") == ["scf.for %j = %a to %b", f"  {of_sums}", converted, "}"]


@pytest.mark.parametrize("types", [[], [MMA], [MMA, DOT, DOT], [MMA, MMA]])
def test_other_texts_stay(types: list[str]) -> None:
    marked = [f"  {ASM.format(i, 'x', MMA, to)}" for i, to in enumerate(types)]
    text = "\n".join(["scf.for %j = %a to %b", *marked, "}"])
    outcome = computed_once.with_one(text)
    assert not outcome.applied
    assert outcome.text == text
    assert (outcome.reason == computed_once.ALIKE) == (types == [MMA, MMA])
