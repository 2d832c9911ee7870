"""The rounding model: exact where FP8 is, off by FP8's rounding elsewhere, and changed by what a bug would change."""

from __future__ import annotations

import pytest
import torch
from cases import Tensors, single

import helion_attn as ha
from helion_attn import reference
from helion_attn.reference import rounding_model
from helion_attn.testing import INPUT_KINDS, error_budget, make_qkv, relative_error

#: Largest relative error of one rounding to e4m3: half of the spacing 2**-3.
E4M3_ROUNDOFF = 2.0**-4


def e4m3_integers(*shape: int) -> torch.Tensor:
    """Integers -7..7, 7 among them, per head: with descale 7 / 448 = 2**-6 all of them are exact in e4m3."""
    x = torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(0)).float()
    x[:, :, 0, 0] = 7
    return x


def one_hot_problem(dtype: torch.dtype) -> Tensors:
    """Query i attends to key (3 * i) % 16 alone: the other probabilities underflow."""
    k = torch.eye(16).expand(1, 2, 16, 16) * 7
    q = k[:, :, torch.arange(16) * 3 % 16]
    return q.to(dtype), k.to(dtype), e4m3_integers(1, 2, 16, 16).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_one_hot_rows_are_exact(dtype: torch.dtype) -> None:
    q, k, v = one_hot_problem(dtype)
    out = single(reference.fp8_attention(q, k, v, sm_scale=4.0, recipe=ha.FAST))
    assert out.dtype == dtype
    assert torch.equal(out, v[:, :, torch.arange(16) * 3 % 16])


def test_equal_scores_are_exact() -> None:
    v = e4m3_integers(1, 2, 256, 16)
    q, k = torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 256, 16)
    out = single(reference.fp8_attention(q, k, v, recipe=ha.FAST))
    assert torch.equal(out, v.mean(2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_error_is_that_of_e4m3(kind: str, causal: bool) -> None:
    q, k, v = make_qkv(kind, 1, 4, 2, 100, 300, 64)
    r = rounding_model.quantize(q, k, v)
    rounded = (
        r.q8 * r.q_descale[:, :, None, None],
        r.k8 * r.k_descale[:, :, None, None],
        r.v8 * r.v_descale[:, :, None, None] + r.v_mean.unsqueeze(2),
    )
    out = single(reference.fp8_attention(q, k, v, causal=causal, out_dtype=torch.float32))
    # On the rounded inputs what is left is P's rounding, unbiased and averaged over keys.
    kernel_error = relative_error(out, reference.attention(*rounded, causal=causal))
    assert 0 < kernel_error < E4M3_ROUNDOFF


@pytest.mark.parametrize("block_n", [64, 128])
def test_block_size_changes_only_noise(block_n: int) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 64, 300, 64)
    ref = reference.attention(q, k, v)
    one_block = relative_error(single(reference.fp8_attention(q, k, v, block_n=300)), ref)
    blocked = relative_error(single(reference.fp8_attention(q, k, v, block_n=block_n)), ref)
    assert blocked <= error_budget(one_block, q.dtype)


def test_centring_helps_a_biased_v() -> None:
    q, k, v = make_qkv("biased_v", 1, 2, 2, 64, 1000, 64)
    ref = reference.attention(q, k, v)
    errors = [
        relative_error(single(reference.fp8_attention(q, k, v, recipe=recipe, out_dtype=torch.float32)), ref)
        for recipe in (ha.BALANCED, ha.FAST)
    ]
    assert errors[0] < errors[1] / 2


def a_loud_key_before_many_quiet_ones() -> Tensors:
    """Key 0 has a logit 10 * ln 2 above the rest: each of the others has a probability near 2**-11, all 2000 a half."""
    q, k = torch.zeros(1, 1, 4, 16), torch.zeros(1, 1, 2001, 16)
    q[..., 0], k[:, :, 0, 0] = 7, 7
    v = 1 + torch.rand(1, 1, 2001, 16, generator=torch.Generator().manual_seed(0))
    return q, k, v


def test_without_p_offset_quiet_keys_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = a_loud_key_before_many_quiet_ones()
    v[:, :, 0] *= -1
    sm_scale = 10 * 0.6931471805599453 / 49
    ref = reference.attention(q, k, v, sm_scale=sm_scale)

    def error() -> float:
        return relative_error(single(reference.fp8_attention(q, k, v, sm_scale=sm_scale, recipe=ha.FAST)), ref)

    healthy = error()
    monkeypatch.setattr(rounding_model, "P_OFFSET_LOG2", 0.0)
    assert error() > error_budget(healthy, torch.float32)


@pytest.mark.parametrize(("a", "b"), [("q_descale", "v_descale"), ("k_descale", "v_descale")])
def test_swapped_descales_are_detected(a: str, b: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 64, 100, 64)
    v = v * 5
    ref = reference.attention(q, k, v)
    healthy = relative_error(single(reference.fp8_attention(q, k, v)), ref)
    r = rounding_model.quantize(q, k, v)
    swapped = r._replace(**{a: getattr(r, b), b: getattr(r, a)})
    monkeypatch.setattr(rounding_model, "quantize", lambda *_: swapped)
    assert relative_error(single(reference.fp8_attention(q, k, v)), ref) > error_budget(healthy, q.dtype)
