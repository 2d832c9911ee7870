"""Equalised channels: powers of two between those of K and Q change no bit, in every form of attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.testing import relative_error
from helpers.cases import Tensors, make_case
from helpers.rotations import tables as rope_tables

#: Query heads, KV heads, queries, keys.
H, H_KV, M, N = 4, 2, 40, 200

#: Of K's channels, and of Q's the inverse: their sum is 0, as then the geometric mean of all stays.
EXPONENT = 4


def powers(D: int, device: str) -> torch.Tensor:
    """2**4 in two channels that RoPE may turn as a pair, 2**-4 in two others, and 1: [D]."""
    exponents = torch.zeros(D, device=device)
    exponents[[1, 1 + D // 2]], exponents[[7, 7 + D // 2]] = EXPONENT, -EXPONENT
    return exponents.exp2()


def scaled(qkv: Tensors) -> Tensors:
    """Exactly: of bf16 tensors, by powers of two."""
    q, k, v = qkv
    factors = powers(q.size(-1), q.device.type).to(q.dtype)
    return q / factors, k * factors, v


def scaled_norm(norm: ha.RMSNorm, exponent: int) -> ha.RMSNorm:
    """Of weights for a head or all heads."""
    factors = powers(64, norm.weight.device.type) ** exponent
    return dataclasses.replace(norm, weight=(norm.weight.unflatten(0, (-1, 64)) * factors).flatten())


def weights(heads: int, device: str) -> ha.RMSNorm:
    generator = torch.Generator().manual_seed(heads)
    return ha.RMSNorm((1 + 0.3 * torch.randn(64 * heads, generator=generator)).to(device))


def options_of(form: str, D: int, device: str) -> dict[str, Any]:
    """The options of a form of attention."""
    if form == "rope":
        return {"rope": rope_tables(N, D, device=device)}
    if form == "block_mask":
        blocks = torch.ones(1, 1, 1, 2, dtype=torch.bool, device=device)
        blocks[..., 0] = False
        return {"block_mask": ha.BlockMask(blocks, M, N)}
    return {"causal": True} if form == "causal" else {}


#: Forms of a call and their head dims, by preset; HYBRID has 16-bit products, which end at 256.
FORMS = [
    (form, D, recipe)
    for recipe in (ha.BALANCED, ha.FAST, ha.ACCURATE, ha.HYBRID)
    for form, D in (("plain", 64), ("plain", 256), ("plain", 576), ("causal", 128), ("rope", 64), ("block_mask", 64))
    if D <= 256 or recipe != ha.HYBRID
]


@pytest.mark.thorough(but=6)
@pytest.mark.parametrize(("form", "D", "recipe"), FORMS, ids=str)
def test_powers_of_two_change_no_bit(form: str, D: int, recipe: ha.Recipe, device: str) -> None:
    # Of few rows, as wide ones have, only large ratios give factors: theirs are large from the start.
    qkv = scaled(make_qkv("k_lognormal", 1, H, H_KV, M, N, D, device=device))
    options = options_of(form, D, device)
    out, lse = ha.attention(*qkv, recipe=recipe, return_lse=True, **options)
    same, same_lse = ha.attention(*scaled(qkv), recipe=recipe, return_lse=True, **options)
    assert torch.equal(same, out)
    assert torch.equal(same_lse, lse)
    unequalised = dataclasses.replace(recipe, equalise=False)
    assert not torch.equal(ha.attention(*scaled(qkv), recipe=unequalised, **options), out)


@pytest.mark.parametrize("span", ["head", "heads"])
def test_powers_of_two_in_norms_change_no_bit(span: str, device: str) -> None:
    qkv = make_qkv("k_lognormal", 1, H, H_KV, M, N, 64, device=device)
    norms = [weights(heads if span == "heads" else 1, device) for heads in (H, H_KV)]
    q_norm, k_norm = scaled_norm(norms[0], -1), scaled_norm(norms[1], 1)
    rope = rope_tables(N, 64, device=device)
    out = ha.attention(*qkv, rope=rope, q_norm=q_norm, k_norm=k_norm)
    same = ha.attention(*qkv, rope=rope, q_norm=scaled_norm(q_norm, -1), k_norm=scaled_norm(k_norm, 1))
    assert torch.equal(same, out)


def test_powers_of_two_in_packed_sequences_change_no_bit(device: str) -> None:
    """Each sequence has factors of its own: those of one are the inverse of the other's."""
    lengths = torch.tensor([0, 40, 100], dtype=torch.int32, device=device)
    bhsd = make_qkv("k_lognormal", 1, H, H_KV, 100, 100, 64, device=device)
    factors = powers(64, device).to(torch.bfloat16)
    of_tokens = torch.cat([factors.expand(40, 1, 64), (1 / factors).expand(60, 1, 64)])
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in bhsd)
    q, k = q / of_tokens, k * of_tokens
    out = ha.attention_varlen(q, k, v, lengths, lengths)
    assert torch.equal(ha.attention_varlen(q / of_tokens, k * of_tokens, v, lengths, lengths), out)


def test_powers_of_two_change_no_bit_of_split_keys(device: str) -> None:
    qkv = scaled(make_qkv("k_lognormal", 1, H, H_KV, 16, 520, 64, device=device))
    for splits in (2, 3):
        out = ha.attention(*qkv, num_splits=splits)
        assert torch.equal(ha.attention(*scaled(qkv), num_splits=splits), out)


@pytest.mark.parametrize("recipe", [ha.BALANCED, ha.FAST, ha.ACCURATE], ids=str)
def test_dequantize_undoes_factors(recipe: ha.Recipe, device: str) -> None:
    """And K's small channels keep their resolution beside the large."""
    qkv = make_qkv("k3x30", 1, H, H_KV, M, N, 64, device=device)
    found, same = (ha.dequantize(ha.quantize(*x, recipe=recipe)) for x in (qkv, scaled(qkv)))
    for x, y in zip(scaled(found), same, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    k = qkv[1].float()
    small = k.square().mean((0, 1, 2)) < 4
    unequalised = ha.dequantize(ha.quantize(*qkv, recipe=dataclasses.replace(recipe, equalise=False)))[1]
    errors = [relative_error(x[..., small], k[..., small]) for x in (found[1], unequalised)]
    assert errors[0] < 0.06
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.thorough(but=11)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["randn", "k3x30", "k2x100q", "k8x10b", "k_pairs", "k_lognormal", "sink"])
@pytest.mark.parametrize("D", [64, 256])
def test_factors_are_the_models(D: int, kind: str, dtype: torch.dtype, device: str) -> None:
    """Sizes lie within ulps of the model's, and so does what is rounded to a power of two."""
    qkv = make_qkv(kind, 2, H, H_KV, M, N, D, dtype, device=device)
    packed, model = ha.quantize(*qkv), ha.reference.quantize(*qkv)
    assert packed.channel_factors is not None
    ratio = packed.channel_factors[..., :D] / model.channel_factors
    assert (ratio != 1).double().mean() <= (0 if device == "cpu" else 0.01)
    assert torch.equal(ratio.log2(), ratio.log2().round())
    assert (ratio.log2().abs() <= 1).all()
    assert (packed.channel_factors[..., D:] == 1).all()
    assert (kind in ("randn", "sink")) == bool((model.channel_factors <= 2).all())


def factors_of(qkv: Tensors) -> torch.Tensor:
    """[B, H_kv, D]; the kernel's, which are the model's."""
    found = ha.quantize(*qkv).channel_factors
    assert found is not None
    found = found[..., : qkv[0].size(-1)]
    assert torch.equal(found, ha.reference.quantize(*qkv, ha.BALANCED).channel_factors)
    return found


@pytest.mark.thorough(but=5)
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["q", "k"])
def test_channels_without_a_size_have_no_factor(name: str, value: float, device: str) -> None:
    """Nor do they change those of the others, but for the mean that they are left out of."""
    q, k, v = make_qkv("k3x30", 1, H, H_KV, 128, N, 64, device=device)
    before = factors_of((q, k, v))
    (q if name == "q" else k)[..., 5] = value
    after = factors_of((q, k, v))
    assert (after[..., 5] == 1).all()
    kept = torch.arange(64, device=device) != 5
    assert ((after / before)[..., kept].log2().abs() <= 1).all()
    case = make_case((q, k, v), False)
    out, _ = case.run(torch.float32)
    assert out.isfinite().all() == (value == 0)
    if value == 0:
        case.assert_within_budget(out)


@pytest.mark.parametrize("keys", [1, 2, 3])
def test_few_keys(keys: int, device: str) -> None:
    """One key has no difference from another, and so no size; its V is the answer."""
    q, k, v = make_qkv("k3x30", 1, H, H_KV, 5, keys, 64, device=device)
    factors = factors_of((q, k, v))
    if keys < 4:  # of one pair the largest difference is the only one
        assert (factors == 1).all()
    case = make_case((q, k, v), False)
    out, lse = case.run(torch.float32)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)


@pytest.mark.parametrize(("size", "least", "most"), [(2.0**27, 22, 28), (1e30, 0, 0)])
def test_sizes_in_fp32(size: float, least: int, most: int, device: str) -> None:
    """Fourth powers leave its range where nothing would be left of the other channels anyway: then a factor is 1."""
    q, k, v = make_qkv("randn", 1, H, H_KV, 128, N, 64, torch.float32, device=device)
    k[..., 3] *= size
    q[..., 3] /= size
    exponent = factors_of((q, k, v))[..., 3].log2()
    assert ((least <= exponent) & (exponent <= most)).all()


@pytest.mark.parametrize("recipe", [ha.BALANCED, ha.FAST, ha.ACCURATE], ids=str)
def test_normal_numbers_have_the_bits_that_they_have_without(recipe: ha.Recipe, device: str) -> None:
    qkv = make_qkv("randn", 1, H, H_KV, 128, N, 64, device=device)
    assert (factors_of(qkv) == 1).all()
    without = dataclasses.replace(recipe, equalise=False)
    assert torch.equal(ha.attention(*qkv, recipe=recipe), ha.attention(*qkv, recipe=without))


@pytest.mark.thorough(but=5)
@pytest.mark.parametrize("queries", [1, 2, 5, 16, 128])
@pytest.mark.parametrize("D", [64, 256])
def test_noise_gives_no_factor(D: int, queries: int, device: str) -> None:
    """Of few rows, as wide ones with RoPE and of a short query have."""
    qkv = make_qkv("randn", 2, H, H_KV, queries, N, D, device=device)
    found = ha.quantize(*qkv, rope=rope_tables(N, D, device=device)).channel_factors
    assert found is not None
    assert (found != 1).double().mean() <= 1e-3


@pytest.mark.parametrize("size", [0.0, 0.1])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_small_heads_of_a_group_decide_nothing(heads: int, size: float, device: str) -> None:
    """The others' queries tell sizes, whichever heads they are."""
    q, k, v = make_qkv("k3x30", 1, 4, 1, 128, N, 64, device=device)
    before = factors_of((q, k, v))
    for first in range(4 - heads + 1):
        small = q.clone()
        small[:, first : first + heads] *= size
        assert ((factors_of((small, k, v)) / before).log2().abs() <= 1).all()


@pytest.mark.parametrize("queries", [2, 5])
def test_few_queries(queries: int, device: str) -> None:
    """A ratio of 2**9 stands out of eight rows: two queries of four heads."""
    q, k, v = make_qkv("randn", 1, 4, 1, queries, N, 64, device=device)
    k[..., 3] *= 512
    factors = factors_of((q, k, v))
    assert (factors[..., 3] >= 8).all()
    case = make_case((q, k, v), False)
    out, _ = case.run(torch.float32)
    case.assert_within_budget(out)
