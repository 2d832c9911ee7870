"""Inputs that break careless softmax and careless quantisation."""

from __future__ import annotations

import math

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.reference import rounding_model
from helion_attn.testing import TENSOR_CORE_ERROR, relative_error
from helpers.cases import LADDER, PLAIN, PRESETS, Tensors, make_case


def e4m3_integers(*shape: int, device: str) -> torch.Tensor:
    """Integers -7..7, 7 in every head: with descale 7 / 448 = 2**-6 they are exact in e4m3, and so are their sums."""
    x = torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(0)).float()
    x[:, :, 0, 0] = 7
    return x.to(device)


def exp2_noise(lse: torch.Tensor) -> float:
    """The relative error of an exponential whose argument, as large as the scores, is rounded to fp32."""
    return torch.finfo(torch.float32).eps * (1 + lse.abs().max().item())


@pytest.mark.parametrize("what", ["q_is_0", "k_is_constant", "sm_scale_is_0"])
def test_equal_scores_give_the_mean(what: str, device: str) -> None:
    q, k, _ = make_qkv("randn", 1, 2, 2, 70, 256, 32, torch.float32, device)
    v = e4m3_integers(1, 2, 256, 32, device=device)
    if what == "q_is_0":
        q = torch.zeros_like(q)
    elif what == "k_is_constant":
        k = torch.ones_like(k)
    sm_scale = 0.0 if what == "sm_scale_is_0" else None
    out, lse = ha.attention(q, k, v, sm_scale=sm_scale, recipe=PLAIN, return_lse=True)
    expected = v.mean(2, keepdim=True).expand_as(out)
    # P is 2**8 everywhere but for exp2's argument, and the sums of integers are exact.
    assert relative_error(out, expected) <= exp2_noise(lse)
    if what != "k_is_constant":
        assert relative_error(lse, torch.full_like(lse, 256).log()) <= torch.finfo(torch.float32).eps


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_one_hot_rows_copy_v(causal: bool, device: str) -> None:
    # Query i looks at key i alone: the other probabilities are below e4m3's smallest.
    k = torch.eye(32, device=device).expand(1, 2, 32, 32) * 7
    v = e4m3_integers(1, 2, 32, 32, device=device)
    out, lse = ha.attention(k, k, v, causal=causal, sm_scale=1.0, recipe=PLAIN, return_lse=True)
    assert relative_error(out, v) <= exp2_noise(lse)


@pytest.mark.thorough(but=17)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("factor", [-30.0, 1e-4, 30.0, 1e4, 1e7, 1e8, 1e12], ids=lambda factor: f"{factor:g}")
@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
def test_logit_range(recipe: ha.Recipe, factor: float, causal: bool, device: str) -> None:
    """From all but equal scores to a softmax that is one-hot, of scores between which fp32 has steps of 1 to 1e5."""
    q, k, v = make_qkv("randn", 1, 2, 2, 70, 200, 32, torch.float32, device)
    case = make_case((q * factor, k, v), causal, recipe=recipe)
    out, _ = case.run()
    case.assert_within_budget(out)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("recipe", "D"), [(ha.HYBRID, 32), (ha.BF16, 32), (ha.FAST, 320), (ha.BALANCED, 320)])
def test_scores_of_1e9(recipe: ha.Recipe, D: int, causal: bool, device: str) -> None:
    """One-hot, or with 16-bit Q and K, whose scores the kernel cannot tell apart, NaN: never a wrong number."""
    q, k, v = make_qkv("randn", 1, 2, 2, 70, 200, D, torch.float32, device)
    q[:, :, ::2] *= 1e9
    case = make_case((q, k, v), causal, recipe=recipe)
    out, _ = case.run()
    lost = out.isnan().any(3)
    assert not lost[:, :, 1::2].any()
    assert torch.equal(lost[:, :, ::2], torch.full_like(lost[:, :, ::2], recipe == ha.BF16))
    if recipe != ha.BF16:
        case.assert_within_budget(out)


def in_a_tensor_core(q8: torch.Tensor, k8: torch.Tensor) -> torch.Tensor:
    """Q K^T as Hopper sums e4m3, fp64 [..., M, N]: 32 products and the sum so far, of the largest's 14 bits.

    So many bits are what arXiv:2412.19437, section 3.3.2, has measured.
    """
    total = q8.new_zeros((*q8.shape[:-1], k8.size(-2), 1), dtype=torch.float64)
    for q, k in zip(q8.double().split(32, -1), k8.double().split(32, -1), strict=True):
        terms = torch.cat([q.unsqueeze(-2) * k.unsqueeze(-3), total], -1)
        unit = torch.exp2(terms.abs().amax(-1, keepdim=True).log2().floor() - 13)
        total = ((terms / unit).trunc() * unit).sum(-1, keepdim=True)
    return total.squeeze(-1)


def test_what_a_tensor_core_cannot_tell_apart() -> None:
    """It takes another key than the exact sums only where `Case.tie_noise` counts with that."""
    q, k, v = make_qkv("randn", 1, 1, 1, 1000, 200, 320, torch.float32)
    case = make_case((q * 1e7, k, v), recipe=ha.FAST)
    r = rounding_model.quantize(*case.qkv, ha.FAST)
    exact, summed = r.q8.double() @ r.k8.double().mT, in_a_tensor_core(r.q8, r.k8)
    assert relative_error(summed, exact) < TENSOR_CORE_ERROR
    rows = (exact.argmax(3) != summed.argmax(3)).squeeze()
    assert 0 < rows.sum() < 20
    largest = exact.abs().amax(3).squeeze()[rows]
    two = exact.squeeze()[rows].topk(2).values
    assert torch.all(two[:, 0] - two[:, 1] < TENSOR_CORE_ERROR * largest)
    out = torch.where(rows[:, None], v[0, 0][summed.squeeze().argmax(1)], case.model)
    assert relative_error(out, case.oracle) <= math.hypot(case.budget(), case.tie_noise())
    assert case.tie_noise() > 0
    assert make_case((q, k, v), recipe=ha.FAST).tie_noise() == 0
    assert make_case((q * 1e7, k, v), recipe=ha.BALANCED).tie_noise() == 0


def all_scores_far_from_0(sign: int, device: str) -> Tensors:
    """Scores of about sign * 100, a few apart."""
    q, k, v = make_qkv("randn", 1, 2, 2, 70, 200, 32, torch.float32, device)
    q[..., 0], k[..., 0] = sign * 24.0, 24.0
    return q, k, v


@pytest.mark.parametrize("sign", [1, -1], ids=["plus", "minus"])
def test_all_scores_far_from_0(sign: int, device: str) -> None:
    case = make_case(all_scores_far_from_0(sign, device))
    out, lse = case.run()
    case.assert_within_budget(out)
    assert relative_error(lse, case.oracle_lse) < 1e-2


@pytest.mark.parametrize("position", [0, 100, 199])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_one_huge_key(causal: bool, position: int, device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 70, 200, 32, device=device)
    k[:, :, position] *= 50
    case = make_case((q, k, v), causal)
    out, _ = case.run()
    case.assert_within_budget(out)


HARD = ("zero_q_rows", "zero_k_head", "zero_v_head", "constant_k", "large_logits", "one_outlier", "outlier_channel")


def make_hard(what: str, device: str) -> Tensors:
    q, k, v = make_qkv("randn", 1, 4, 2, 70, 300, 64, device=device)
    if what == "zero_q_rows":
        q[:, 1, ::3] = 0
    elif what == "zero_k_head":
        k[:, 1] = 0
    elif what == "zero_v_head":
        v[:, 1] = 0
    elif what == "constant_k":
        k[:] = k[:, :, :1]
    elif what == "large_logits":
        q *= 30
    elif what == "one_outlier":
        for x in (q, k, v):
            x[0, 1, 13, 7] = 1000
    elif what == "outlier_channel":
        q[..., 3] *= 20
        k[..., 3] += 50
    return q, k, v


@pytest.mark.thorough(but=9)
@pytest.mark.parametrize(("what", "causal"), [(what, i % 2 == 1) for i, what in enumerate(HARD)], ids=str)
@pytest.mark.parametrize("recipe", LADDER.values(), ids=LADDER)
def test_hard_inputs(recipe: ha.Recipe, what: str, causal: bool, device: str) -> None:
    """With a causal mask or without; `test_recipe` has every recipe with both."""
    case = make_case(make_hard(what, device), causal, recipe=recipe)
    out, lse = case.run(torch.float32)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)


@pytest.mark.parametrize("recipe", LADDER.values(), ids=LADDER)
def test_zero_sm_scale_with_a_mask(recipe: ha.Recipe, device: str) -> None:
    """Every row is the mean of the values that it sees."""
    q, k, v = make_qkv("randn", 1, 2, 1, 130, 200, 32, torch.float32, device)
    case = make_case((q, k, v), True, sm_scale=0.0, recipe=recipe)
    out, lse = case.run()
    case.assert_within_budget(out)
    seen = torch.arange(71, 201, device=device).float()
    torch.testing.assert_close(lse, seen.log().expand_as(lse), rtol=1e-6, atol=1e-6)


def test_ascending_and_descending_scores(device: str) -> None:
    """The running maximum moves at every block, or never after the first."""
    for flip in (False, True):
        q, k, v = make_qkv("randn", 1, 2, 2, 70, 1000, 32, torch.float32, device)
        q[..., 0] = 4.0
        ramp = torch.linspace(-20, 20, 1000, device=device)
        k[..., 0] = ramp.flip(0) if flip else ramp
        case = make_case((q, k, v))
        case.assert_within_budget(case.run()[0])


def test_v_far_from_0(device: str) -> None:
    """Centring keeps what varies; without it e4m3 would keep 1 / 16 of 100."""
    q, k, v = make_qkv("randn", 1, 2, 2, 70, 200, 32, torch.float32, device)
    case = make_case((q, k, v + 100))
    out, _ = case.run()
    case.assert_within_budget(out)
    assert relative_error(out - 100, case.oracle - 100) < 0.1


def test_overflow_of_e4m3_is_nan(device: str) -> None:
    """464 ties down to 448, the largest; what is larger has no e4m3 value."""
    values = [0.0, 1.0, 448.0, 460.0, 464.0, 465.0, 470.0, 1000.0, -448.0, -463.0, -470.0, -1e6, 3.0, 30.0, 300.0, 5e4]
    v = torch.tensor(values, device=device).view(1, 1, 1, 16)
    out = ha.attention(torch.ones_like(v), torch.ones_like(v), v, out_dtype=torch.float8_e4m3fn).float()
    assert torch.equal(out.isnan(), v.abs() > 464)
    assert torch.equal(out[~out.isnan()], v[v.abs() <= 464].to(torch.float8_e4m3fn).float())
