"""The rounding model: exact where 8 bits are, off by their rounding elsewhere, changed by what a bug would change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from devtools.inputs import INPUT_KINDS, make_qkv
from helion_attn import reference
from helion_attn.configs import padded_head_dim, tile_config
from helion_attn.numerics import DESCALE_MIN, FORMAT_MAX, SAMPLED_HEADROOM, SAMPLED_KEYS, takes_bits
from helion_attn.options import ScoreOptions
from helion_attn.reference import RoundedQKV, rounding_model
from helion_attn.testing import error_budget, relative_error
from helion_attn.types import ACCURATE, BALANCED, FAST, Recipe, Rope
from helpers.cases import IN_E4M3, PLAIN, Tensors

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FP32_EPS = torch.finfo(torch.float32).eps
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

#: Largest relative error of one rounding: half of the spacing.
ROUNDOFF = {E4M3: 2.0**-4, E5M2: 2.0**-3}

INT8_BLOCKS = replace(IN_E4M3, qk_dtype=INT8, center_v=False)

RECIPES = {
    "plain": PLAIN,
    "fast": FAST,
    "balanced": BALANCED,
    "accurate": ACCURATE,
    "q_block": replace(IN_E4M3, q_scales="block"),
    "int8": replace(IN_E4M3, qk_dtype=INT8, q_scales="block"),
    "int8_smooth": replace(IN_E4M3, qk_dtype=INT8, smooth_k=True),
    "rotated_smooth": replace(IN_E4M3, hadamard=True, hadamard_seed=3, smooth_k=True),
    "reflected_smooth": replace(IN_E4M3, reflect=True, smooth_k=True),
    "e5m2": replace(IN_E4M3, pv_dtype=E5M2, v_scales="channel"),
    "smooth": replace(IN_E4M3, smooth_k=True),
    "p_offset_4": replace(IN_E4M3, p_offset_log2=4),
}


#: What mixes channels of Q and K.
MIXING = {"none": IN_E4M3, "hadamard": replace(IN_E4M3, hadamard=True), "reflect": replace(IN_E4M3, reflect=True)}


def dequantized(r: RoundedQKV, recipe: Recipe) -> Tensors:
    """fp64 Q, K and V as the model's attention sees them, not rotated."""
    q, k = r.q8.double() * r.q_descale.unsqueeze(3), r.k8.double() * r.k_descale.unsqueeze(3)
    if recipe.hadamard:
        inverse = reference.hadamard_matrix(q.size(3), recipe.hadamard_seed).mT
        q, k = q @ inverse, k @ inverse
    if recipe.resolved.reflect:
        q, k = reference.reflect(q), reference.reflect(k)
    v = r.v8.double() * r.v_descale.unsqueeze(2)
    return q, k + r.k_mean.unsqueeze(2), v + r.v_mean.unsqueeze(2)


def total_error(qkv: Tensors, recipe: Recipe) -> float:
    out = reference.fp8_attention(*qkv, recipe=recipe, out_dtype=torch.float32)
    return relative_error(out, reference.attention(*qkv))


# ---------------------------------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_hot_rows_are_exact(dtype: torch.dtype) -> None:
    q, k, v = one_hot_problem(dtype)
    for recipe in (PLAIN, INT8_BLOCKS, replace(PLAIN, hadamard=True)):
        out = reference.fp8_attention(q, k, v, sm_scale=4.0, recipe=recipe)
        assert out.dtype == dtype
        assert torch.equal(out, v[:, :, torch.arange(16) * 3 % 16])


def test_equal_scores_are_exact() -> None:
    v = e4m3_integers(1, 2, 256, 16)
    q, k = torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 256, 16)
    out = reference.fp8_attention(q, k, v, recipe=PLAIN)
    assert torch.equal(out, v.mean(2, keepdim=True).expand_as(out))


def test_zero_sm_scale_with_a_mask() -> None:
    _, _, v = one_hot_problem(torch.float32)
    q, k, _ = make_qkv("randn", 1, 2, 2, 16, 16, 16)
    out = reference.fp8_attention(q, k, v, causal=True, sm_scale=0.0, recipe=PLAIN, out_dtype=torch.float32)
    expected = v.cumsum(2) / torch.arange(1, 17).unsqueeze(1)
    assert relative_error(out, expected) < 1e-6


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", INPUT_KINDS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_error_on_dequantized_inputs_is_that_of_p(recipe: Recipe, kind: str, causal: bool) -> None:
    q, k, v = make_qkv(kind, 1, 4, 2, 100, 300, 64)
    r = rounding_model.quantize(q, k, v, recipe)
    out, lse = reference.fp8_attention(q, k, v, causal=causal, recipe=recipe, return_lse=True, out_dtype=torch.float32)
    ref, ref_lse = reference.attention(*dequantized(r, recipe), causal=causal, return_lse=True)
    # On the rounded inputs what is left is P's rounding, unbiased and averaged over keys.
    assert 0 < relative_error(out, ref) < ROUNDOFF[recipe.pv_dtype]
    # A smoothed K's mean meets the exact q in the model, and here the rounded one.
    k_mean = r.k_mean.double().repeat_interleave(2, 1).unsqueeze(3)
    ref_lse = ref_lse + ((q.double() - dequantized(r, recipe)[0]) @ k_mean).squeeze(3) * 64**-0.5
    off = (lse.double() - ref_lse).abs()
    if takes_bits(recipe.pv_dtype, 64):
        # It holds P as rounded: no row's sum is off by more than one P may be, and most rows have many.
        assert off.max() < ROUNDOFF[recipe.pv_dtype]
        assert off.square().mean().sqrt() < ROUNDOFF[recipe.pv_dtype] / 8
    else:
        assert off.max() < 1e-4


@pytest.mark.parametrize("block_n", [64, 128])
def test_block_size_changes_only_noise(block_n: int) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 64, 300, 64)
    ref = reference.attention(q, k, v)
    one_block = relative_error(reference.fp8_attention(q, k, v, block_n=300), ref)
    blocked = relative_error(reference.fp8_attention(q, k, v, block_n=block_n), ref)
    assert blocked <= error_budget(one_block, q.dtype)


@pytest.mark.parametrize(("pv_dtype", "D"), [(E4M3, 64), (E5M2, 64), (E4M3, 160), (torch.bfloat16, 64)], ids=str)
def test_promotion_decides_what_p_is_relative_to(pv_dtype: torch.dtype, D: int) -> None:
    """8-bit P in sums that are rescaled in every block, and not where they stay in the tensor core."""
    qkv = make_qkv("randn", 1, 2, 2, 64, 300, D)
    recipe = replace(IN_E4M3, pv_dtype=pv_dtype, v_scales="head" if pv_dtype.itemsize == 1 else "none")
    whole = 1 if pv_dtype.itemsize == 1 else 0
    default, same, other = (
        reference.fp8_attention(*qkv, recipe=replace(recipe, promote_every=n), out_dtype=torch.float32)
        for n in (None, whole, 0)
    )
    assert torch.equal(default, same)
    assert torch.equal(default, other) == (whole == 0)
    # A single block's own maximum is the running one: then P's bits are all that differs.
    default, other = (
        reference.fp8_attention(*qkv, recipe=replace(recipe, promote_every=n), block_n=300) for n in (whole, 0)
    )
    assert torch.equal(default, other) != takes_bits(pv_dtype, D)


def a_loud_key_before_many_quiet_ones() -> Tensors:
    """Key 0 has a logit 10 * ln 2 above the rest: each of the others has a probability near 2**-11, all 2000 a half."""
    q, k = torch.zeros(1, 1, 4, 16), torch.zeros(1, 1, 2001, 16)
    q[..., 0], k[:, :, 0, 0] = 7, 7
    v = 1 + torch.rand(1, 1, 2001, 16, generator=torch.Generator().manual_seed(0))
    v[:, :, 0] *= -1
    return q, k, v


@pytest.mark.parametrize(("pv_dtype", "lost"), [(E4M3, True), (E5M2, False)], ids=["e4m3", "e5m2"])
def test_without_p_offset_e4m3_loses_quiet_keys(pv_dtype: torch.dtype, lost: bool) -> None:
    q, k, v = a_loud_key_before_many_quiet_ones()
    sm_scale = 10 * 0.6931471805599453 / 49
    ref, ref_lse = reference.attention(q, k, v, sm_scale=sm_scale, return_lse=True)

    recipe = replace(PLAIN, pv_dtype=pv_dtype)
    (out, lse), (without, lse_without) = (
        reference.fp8_attention(q, k, v, sm_scale=sm_scale, recipe=x, return_lse=True)
        for x in (recipe, replace(recipe, p_offset_log2=0))
    )
    error = relative_error(out, ref)
    assert (relative_error(without, ref) > error_budget(error, torch.float32)) == lost
    torch.testing.assert_close(lse.double(), ref_lse, rtol=0, atol=1e-5)
    # Its sum is of P as rounded: the quiet keys of the loud one's block, 127 of 2000, are no part of it.
    share = torch.tensor(1 - 127 / (2**10 + 2000)).log() if lost else torch.zeros(())
    torch.testing.assert_close(lse_without.double(), ref_lse + share, rtol=0, atol=1e-5)


@pytest.mark.parametrize("field", ["q_descale", "k_descale", "v_descale", "v_mean", "lse_shift"])
def test_fields_of_another_head_are_detected(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv("biased_v", 1, 2, 2, 64, 100, 64)
    magnitude = torch.tensor([0.5, 2.0])[:, None, None]
    q, k, v = ((x * magnitude).to(q.dtype) for x in (q, k + 1, v))
    recipe = replace(IN_E4M3, smooth_k=True)
    ref, ref_lse = reference.attention(q, k, v, return_lse=True)
    healthy, healthy_lse = reference.fp8_attention(q, k, v, recipe=recipe, return_lse=True)
    r = rounding_model.quantize(q, k, v, recipe)
    monkeypatch.setattr(rounding_model, "quantize", lambda *_: r._replace(**{field: getattr(r, field).flip(1)}))
    out, lse = reference.fp8_attention(q, k, v, recipe=recipe, return_lse=True)
    assert relative_error(lse, ref_lse) > 2 * relative_error(healthy_lse, ref_lse) or field.startswith("v")
    assert relative_error(out, ref) > error_budget(relative_error(healthy, ref), q.dtype) or field == "lse_shift"


# ---------------------------------------------------------------------------------------------------------------------
# What each recipe is for
# ---------------------------------------------------------------------------------------------------------------------


def test_order_of_the_recipes_with_outliers() -> None:
    seeds = [make_qkv("outlier", 1, 2, 2, 256, 512, 128, seed=seed) for seed in range(4)]
    recipes = IN_E4M3, replace(IN_E4M3, hadamard=True), replace(IN_E4M3, qk_dtype=INT8, hadamard=True)
    plain, rotated, int8_rotated = (sum(total_error(qkv, recipe) for qkv in seeds) for recipe in recipes)
    assert rotated < 0.85 * plain
    assert int8_rotated < 0.75 * rotated


def test_e5m2_is_worse_than_e4m3() -> None:
    qkv = make_qkv("randn", 1, 2, 2, 64, 300, 64)
    assert total_error(qkv, replace(IN_E4M3, pv_dtype=E5M2)) > 1.3 * total_error(qkv, IN_E4M3)


def test_centring_helps_a_biased_v() -> None:
    qkv = make_qkv("biased_v", 1, 2, 2, 64, 1000, 64)
    assert total_error(qkv, replace(IN_E4M3, center_v=True)) < 0.7 * total_error(qkv, replace(IN_E4M3, center_v=False))


@pytest.mark.parametrize("qk_dtype", [E4M3, INT8], ids=["e4m3", "int8"])
def test_smoothing_helps_a_biased_k(qk_dtype: torch.dtype) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 64, 300, 64)
    k = (k.float() + 16 * torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(1))).to(k.dtype)
    recipe = replace(IN_E4M3, qk_dtype=qk_dtype)
    assert total_error((q, k, v), replace(recipe, smooth_k=True)) < total_error((q, k, v), recipe) / 2


def test_a_descale_a_head_keeps_a_quiet_head() -> None:
    """The second head is 2**-18 of the first."""
    q, k, v = make_qkv("randn", 1, 2, 2, 64, 300, 64, torch.float32)
    quiet = torch.tensor([1.0, 2.0**-18])[:, None, None]
    expected = reference.attention(q, k, v)[:, 1]

    t = rounding_model.transform(q * quiet, k * quiet, v * quiet, IN_E4M3, None)
    own = rounding_model.quantize(q * quiet, k * quiet, v * quiet, IN_E4M3)
    descales = {name: getattr(own, name) for name in ("q_descale", "k_descale", "v_descale")}

    def error(**coarse: torch.Tensor) -> float:
        r = rounding_model.cast(t, recipe=IN_E4M3, **(descales | coarse))
        out, _ = rounding_model.attend(r, IN_E4M3, ScoreOptions(sm_scale=2.0**33))
        return relative_error(out[:, 1] * 2.0**18, expected)

    assert error() < 0.06
    for name, found in descales.items():
        assert error(**{name: found.amax().expand_as(found)}) > 0.3


def test_a_descale_a_channel_keeps_a_quiet_channel() -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 64, 300, 64, torch.float32)
    v[..., 7] *= 2.0**-18
    ref = reference.attention(q, k, v)[..., 7]

    def error(recipe: Recipe) -> float:
        return relative_error(reference.fp8_attention(q, k, v, recipe=recipe)[..., 7], ref)

    assert error(replace(IN_E4M3, v_scales="channel")) < 0.07
    assert error(replace(IN_E4M3, v_scales="head")) > 0.3


# ---------------------------------------------------------------------------------------------------------------------
# Descales
# ---------------------------------------------------------------------------------------------------------------------


def amax_by(x: torch.Tensor, groups: str, block: int) -> torch.Tensor:
    """fp64 amax of x [B, H, S, D] over each group, in every element of the group; element by element, for clarity."""
    expected = torch.empty_like(x, dtype=torch.float64)
    B, H, S, D = x.shape
    whole = slice(None)
    parts: list[tuple[int | slice, ...]]
    if groups == "head":
        parts = [(b, h, whole, whole) for b in range(B) for h in range(H)]
    elif groups == "block":
        starts = range(0, S, block)
        parts = [(b, h, slice(i, i + block), whole) for b in range(B) for h in range(H) for i in starts]
    elif groups == "token":
        parts = [(b, h, i, whole) for b in range(B) for h in range(H) for i in range(S)]
    else:
        parts = [(b, h, whole, d) for b in range(B) for h in range(H) for d in range(D)]
    for part in parts:
        expected[part] = x[part].double().abs().max()
    assert expected.unique().numel() == len(parts)  # so that no group's descale passes for another's
    return expected


def assert_descale(actual: torch.Tensor, stat: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), stat / FORMAT_MAX[dtype], rtol=4 * FP32_EPS, atol=0)


@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize(
    ("scales", "qk_dtype"),
    [("block", E4M3), ("token", E4M3), ("block", INT8), ("token", INT8)],
    ids=["block-e4m3", "token-e4m3", "block-int8", "token-int8"],
)
def test_descales_of_q_and_k(scales: str, qk_dtype: torch.dtype, D: int) -> None:
    q, k, v = make_qkv("randn", 2, 4, 2, 150, 300, D, torch.float32)
    tile = tile_config(padded_head_dim(D), has_right=False)
    recipe = replace(IN_E4M3, qk_dtype=qk_dtype, q_scales=scales)
    r = reference.quantize(q, k, v, recipe)
    assert_descale(r.q_descale, amax_by(q, scales, tile.bm)[..., 0], qk_dtype)
    assert_descale(r.k_descale, amax_by(k, "block", tile.bn)[..., 0], qk_dtype)
    for x8 in (r.q8, r.k8):
        assert x8.abs().max() == FORMAT_MAX[qk_dtype]
    assert torch.all(r.k_mean == 0)
    assert torch.all(r.lse_shift == 0)


@pytest.mark.parametrize("scales", ["block", "token"])
def test_exact_descales_are_of_what_is_cast(scales: str) -> None:
    q, k, v = make_qkv("randn", 2, 4, 2, 150, 300, 64, torch.float32)
    k = k + 2
    recipe = replace(IN_E4M3, q_scales=scales, hadamard=True, smooth_k=True)
    r = reference.quantize(q, k, v, recipe)
    q_rotated = reference.hadamard(q)
    k_rotated = reference.hadamard(k - k[:, :, :SAMPLED_KEYS].mean(2, keepdim=True))
    # The rotation reads fp32 as two bf16 terms, 16 bits: stats may be off by that.
    for descale, x, groups, block in (
        (r.q_descale, q_rotated, scales, 64),
        (r.k_descale, k_rotated, "block", 128),
    ):
        expected = amax_by(x, groups, block)[..., 0] / FORMAT_MAX[E4M3]
        torch.testing.assert_close(descale.double(), expected, rtol=2.0**-14, atol=0)


@pytest.mark.parametrize("pv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("center_v", [False, True], ids=["", "centred"])
@pytest.mark.parametrize("scales", ["head", "channel"])
def test_descales_of_v(scales: str, center_v: bool, pv_dtype: torch.dtype) -> None:
    q, k, v = make_qkv("biased_v", 2, 4, 2, 50, 2 * SAMPLED_KEYS, 64, torch.float32)
    r = reference.quantize(q, k, v, replace(IN_E4M3, pv_dtype=pv_dtype, v_scales=scales, center_v=center_v))
    sample = v[:, :, ::2]
    mean = sample.mean(2) if center_v else torch.zeros(2, 2, 64)
    torch.testing.assert_close(r.v_mean, mean, rtol=4 * FP32_EPS, atol=0)
    room = SAMPLED_HEADROOM[scales] * amax_by(sample - r.v_mean.unsqueeze(2), scales, 0)[:, :, 0]
    assert_descale(r.v_descale, room, pv_dtype)
    assert FORMAT_MAX[pv_dtype] / SAMPLED_HEADROOM[scales] <= r.v8.abs().max() < FORMAT_MAX[pv_dtype]


@pytest.mark.parametrize("scales", ["head", "channel"])
def test_descales_of_v_that_a_sample_missed(scales: str) -> None:
    """An entry beyond the sample's room is the largest of what shares its descale; nothing else changes."""
    q, k, v = make_qkv("randn", 1, 2, 2, 5, 2 * SAMPLED_KEYS, 64, torch.float32)
    recipe = replace(IN_E4M3, v_scales=scales)
    clean = reference.quantize(q, k, v, recipe)
    v[0, 1, 7, 3] = 1000.0
    r = reference.quantize(q, k, v, recipe)
    hit = torch.zeros(1, 2, 64, dtype=torch.bool)
    hit[0, 1, slice(None) if scales == "head" else 3] = True
    assert torch.equal(r.v_mean, clean.v_mean)
    largest = 1000.0 - r.v_mean[0, 1, 3].double()
    assert_descale(r.v_descale[hit], largest.expand(int(hit.sum())), E4M3)
    assert r.v8[0, 1, 7, 3] == FORMAT_MAX[E4M3]
    assert torch.equal(r.v_descale[~hit], clean.v_descale[~hit])
    assert torch.equal(r.v8.mT[~hit], clean.v8.mT[~hit])


def test_zeros_have_the_smallest_descale() -> None:
    zeros = torch.zeros(1, 2, 10, 64)
    for recipe in (FAST, BALANCED, ACCURATE):
        r = reference.quantize(zeros, zeros, zeros, recipe)
        for name in ("q", "k", "v"):
            assert torch.all(getattr(r, f"{name}8") == 0)
            assert torch.all(getattr(r, f"{name}_descale") == DESCALE_MIN)


@pytest.mark.parametrize("exponent", [-100, 100])
def test_magnitude_is_only_in_the_descale(exponent: int) -> None:
    qkv = make_qkv("randn", 1, 2, 1, 20, 30, 64)
    for recipe in (FAST, BALANCED, ACCURATE):
        q, k, v = (x * 2.0**exponent for x in qkv)
        r, scaled = reference.quantize(*qkv, recipe), reference.quantize(q, k, v, recipe)
        for name in ("q8", "k8", "v8"):
            assert torch.equal(getattr(scaled, name), getattr(r, name))
        for name in ("q_descale", "k_descale", "v_descale", "v_mean", "k_mean"):
            torch.testing.assert_close(getattr(scaled, name), getattr(r, name) * 2.0**exponent, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("transform", ["none", "hadamard", "reflect", "smooth_k"])
@pytest.mark.parametrize("row", [131, 290], ids=["sampled", "missed"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nonfinite_stays_in_its_group(name: str, row: int, transform: str, value: float) -> None:
    """One element spoils the descale of its group, no other group, and never passes for a finite number."""
    S, D = 300, 64
    head, channel = (slice(1, 2), slice(1, 2)), 5
    whole = slice(None)
    block = 64 if name == "q" else 128
    members: dict[str, tuple[slice, ...]] = {
        "head": (*head, whole, whole),
        "block": (*head, slice(row // block * block, (row // block + 1) * block), whole),
        "token": (*head, slice(row, row + 1), whole),
        "channel": (*head, whole, slice(channel, channel + 1)),
    }
    for scales in {"q": ("block", "token"), "k": ("block",), "v": ("head", "channel")}[name]:
        recipe = replace(
            IN_E4M3,
            q_scales=scales if name == "q" else "token",
            v_scales=scales if name == "v" else "head",
            hadamard=transform == "hadamard",
            reflect=transform == "reflect",
            smooth_k=transform == "smooth_k",
        )
        q, k, v = make_qkv("randn", 2, 2, 2, S, S, D)
        clean = reference.quantize(q, k, v, recipe)
        {"q": q, "k": k, "v": v}[name][1, 1, row, channel] = value
        r = reference.quantize(q, k, v, recipe)
        hit = torch.zeros(2, 2, S, D, dtype=torch.bool)
        # The mean of a sample takes it to every key of its head, if it is in the sample and no infinity, whose range
        # is as large; and only "channel" keeps it in its channel.
        spread = name == "k" and transform == "smooth_k" and row < SAMPLED_KEYS and value != value
        hit[members["head" if spread else scales]] = True
        hit = hit[:, :, 0] if name == "v" else hit[..., 0]
        descale = getattr(r, f"{name}_descale")
        assert torch.equal(~descale.isfinite(), hit), scales
        assert torch.equal(descale[~hit], getattr(clean, f"{name}_descale")[~hit]), scales
        if value != value:
            assert descale[hit].isnan().all()
        # Dequantised, the whole group is NaN or infinite, or 0 * inf.
        restored = getattr(r, f"{name}8") * descale.unsqueeze(2 if name == "v" else 3)
        assert restored.isfinite().logical_not().equal(hit.unsqueeze(2 if name == "v" else 3).expand_as(restored))


# ---------------------------------------------------------------------------------------------------------------------
# Casts
# ---------------------------------------------------------------------------------------------------------------------


def test_int8_rounds_half_to_even() -> None:
    # The first channel makes the descale 1.
    row = torch.tensor([127, 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 125.5, 126.5, -126.5, 0.49, 0.51, -127, 0, 1])
    expected = torch.tensor([127, 0, 2, 2, 4, 0, -2, -2, 126, 126, -126, 0, 1, -127, 0, 1]).float()
    q = row.expand(1, 1, 1, 16)
    r = reference.quantize(q, q, q, INT8_BLOCKS)
    for descale, x8 in ((r.q_descale, r.q8), (r.k_descale, r.k8)):
        assert torch.all(descale == 1)
        assert torch.equal(x8[0, 0, 0], expected)


def test_int8_products_are_exact() -> None:
    r = reference.quantize(*make_qkv("randn", 1, 1, 1, 40, 50, 256), INT8_BLOCKS)
    # The kernel's int32 sum; int64 here.
    exact = r.q8.long() @ r.k8.long().mT
    assert torch.equal(r.q8, r.q8.to(INT8).float())
    assert torch.equal(r.k8, r.k8.to(INT8).float())
    assert torch.equal((r.q8 @ r.k8.mT).long(), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_rotation_reads_16_bits(dtype: torch.dtype) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 50, 60, 64, dtype)
    recipe = replace(IN_E4M3, qk_dtype=INT8, hadamard=True, hadamard_seed=2, smooth_k=True)
    r = reference.quantize(q, k, v, recipe)
    centred = k.float() - r.k_mean.unsqueeze(2)
    read = centred.double()  # of bf16 tensors K itself is read, and its mean subtracted after
    if dtype != torch.bfloat16:
        hi = centred.bfloat16()
        read = hi.double() + (centred - hi.float()).bfloat16().double()
        assert 0 < relative_error(read, centred) < 2.0**-16

    def cast(x: torch.Tensor) -> torch.Tensor:
        return (reference.hadamard(x, 2).float() * (1 / r.k_descale.unsqueeze(3))).round()

    assert torch.equal(r.k8, cast(read))
    assert torch.equal(r.k8, cast(centred))  # two bf16 terms are as good as fp32
    assert not torch.equal(r.k8, cast(centred.bfloat16()))


# ---------------------------------------------------------------------------------------------------------------------
# Invariance
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("D", [16, 18, 48, 80, 96, 192])
@pytest.mark.parametrize("smooth_k", [False, True], ids=["", "smooth"])
@pytest.mark.parametrize("transform", ["none", "hadamard", "reflect"])
def test_scores_are_invariant(transform: str, smooth_k: bool, D: int) -> None:
    """Mixed and smoothed or not, q8 k8^T with its descales and shift is q k^T up to 8 bits; so is lse."""
    q, k, v = make_qkv("randn", 1, 2, 1, 40, 50, D)
    k = k + 1
    recipe = replace(MIXING[transform], qk_dtype=INT8, smooth_k=smooth_k)
    r = reference.quantize(q, k, v, recipe)
    scores = (r.q8 @ r.k8.mT) * r.q_descale.unsqueeze(3) * r.k_descale.unsqueeze(2) + r.lse_shift.unsqueeze(3)
    exact = q.double() @ k.double().mT
    assert relative_error(scores, exact) < 0.02
    out, lse = reference.fp8_attention(q, k, v, recipe=recipe, return_lse=True)
    ref, ref_lse = reference.attention(q, k, v, return_lse=True)
    assert relative_error(lse, ref_lse) < 0.005
    assert relative_error(out, ref) < 0.06


@pytest.mark.parametrize("transform", ["none", "hadamard", "reflect"])
def test_a_constant_added_to_keys_only_shifts_lse(transform: str) -> None:
    """On integers, whose sums are exact, not a bit of the output changes."""
    generator = torch.Generator().manual_seed(0)
    q, v = torch.randn(1, 4, 30, 64, generator=generator), torch.randn(1, 2, 64, 64, generator=generator)
    # Means of all channels stand out of the sample's noise.
    k = torch.randint(-7, 8, (1, 2, 64, 64), generator=generator).float() + 40
    constant = torch.randint(-20, 21, (1, 2, 1, 64), generator=generator).float()
    recipe = replace(MIXING[transform], smooth_k=True)
    out, lse = reference.fp8_attention(q, k, v, recipe=recipe, return_lse=True)
    moved_out, moved_lse = reference.fp8_attention(q, k + constant, v, recipe=recipe, return_lse=True)
    assert torch.equal(moved_out, out)
    shift = (q @ constant.repeat_interleave(2, 1).mT).squeeze(3) / 8
    assert shift.abs().max() > 10
    torch.testing.assert_close(moved_lse - lse, shift, rtol=1e-5, atol=1e-4)
    without = replace(recipe, smooth_k=False)
    assert not torch.equal(reference.fp8_attention(q, k + constant, v, recipe=without), out)


@pytest.mark.parametrize("D", [17, 40, 100])
def test_every_head_dim_can_be_rotated(D: int) -> None:
    qkv = make_qkv("outlier", 1, 2, 2, 30, 70, D)
    r = reference.quantize(*qkv, replace(IN_E4M3, hadamard=True))
    assert relative_error(r.q8 * r.q_descale.unsqueeze(3), reference.hadamard(qkv[0])) < 0.04
    assert relative_error(r.q8 * r.q_descale.unsqueeze(3), qkv[0]) > 1


# ---------------------------------------------------------------------------------------------------------------------
# RoPE
# ---------------------------------------------------------------------------------------------------------------------


def make_rope(positions: int, R: int, interleaved: bool = False) -> Rope:
    angle = torch.arange(positions).unsqueeze(1) * 100.0 ** -(torch.arange(R // 2) / (R // 2))
    return Rope(angle.cos(), angle.sin(), interleaved)


#: Whose descales are exact, so that it does not matter whether RoPE has been applied already.
EXACT_RECIPES = {
    "plain": replace(IN_E4M3),
    "rotated": replace(IN_E4M3, hadamard=True),
    "reflected": replace(IN_E4M3, reflect=True),
    "int8_rotated_smooth": replace(IN_E4M3, qk_dtype=INT8, hadamard=True, smooth_k=True),
}


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", EXACT_RECIPES.values(), ids=EXACT_RECIPES)
def test_rope_comes_first(recipe: Recipe, dtype: torch.dtype, interleaved: bool) -> None:
    q, k, v = make_qkv("randn", 1, 4, 2, 30, 50, 64, dtype)
    rope = make_rope(60, 32, interleaved)
    r = reference.quantize(q, k, v, recipe, rope)
    q_rope, k_rope = (
        reference.apply_rope(x, rope.cos, rope.sin, interleaved, positions).float()
        for x, positions in ((q, torch.arange(20, 50)), (k, None))
    )
    # From here on it is as if they had come in fp32; but a rotation of bf16 tensors rounds Q, and K after its mean is
    # subtracted, to bf16.
    rounds = recipe.hadamard and dtype == torch.bfloat16
    given = (q_rope.to(dtype), k_rope, v) if rounds else (q_rope, k_rope, v.float())
    expected = reference.quantize(*given, recipe)
    same = {"q8", "q_descale", "k_mean", "v8", "v_descale", "v_mean"} if rounds else set(RoundedQKV._fields)
    for name in same:
        assert torch.equal(getattr(r, name), getattr(expected, name)), name
    out, lse = reference.fp8_attention(q, k, v, causal=True, recipe=recipe, rope=rope, return_lse=True)
    ref, ref_lse = reference.attention(q_rope, k_rope, v, causal=True, return_lse=True)
    assert relative_error(out, ref) < 0.08
    assert relative_error(lse, ref_lse) < 0.02
    assert relative_error(out, reference.attention(q, k, v, causal=True)) > 0.2


def test_rope_positions() -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 5, 4, 32, torch.float32)
    q_positions, k_positions = torch.tensor([3, 3, 0, 59, 7]), torch.tensor([58, 1, 2, 0])
    rope = replace(make_rope(60, 32), q_positions=q_positions, k_positions=k_positions)
    recipe = EXACT_RECIPES["plain"]
    r = reference.quantize(q, k, v, recipe, rope)
    q_rope, k_rope = (
        reference.apply_rope(x, rope.cos, rope.sin, False, positions).float()
        for x, positions in ((q, q_positions), (k, k_positions))
    )
    expected = reference.quantize(q_rope, k_rope, v, recipe)
    assert torch.equal(r.q8, expected.q8)
    assert torch.equal(r.k8, expected.k8)
    default = reference.quantize(q[:, :, :4], k, v, recipe, make_rope(60, 32))
    assert not torch.equal(default.q8, expected.q8[:, :, :4])
    assert not torch.equal(default.k8, expected.k8)


@pytest.mark.parametrize("outside", [-1, 60])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_rope_outside_the_table_is_nan(recipe: Recipe, outside: int) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 5, 6, 32)
    positions = torch.tensor([0, outside, 2, 3, 4, 5])
    rope = make_rope(60, 32)
    out = reference.fp8_attention(q, k, v, recipe=recipe, rope=replace(rope, q_positions=positions[:5]))
    assert out[:, :, 1].isnan().all()
    if recipe.resolved.q_scales == "token":
        assert out[:, :, [0, 2, 3, 4]].isfinite().all()
    out = reference.fp8_attention(q, k, v, recipe=recipe, rope=replace(rope, k_positions=positions))
    assert out.isnan().all()


def test_rope_without_positions_needs_a_table_that_holds_them() -> None:
    q, k, v = make_qkv("randn", 1, 1, 1, 4, 8, 32)
    reference.quantize(q, k, v, FAST, make_rope(8, 32))
    with pytest.raises(ValueError, match=r"rope.cos has 7 positions and the last query is at 7"):
        reference.quantize(q, k, v, FAST, make_rope(7, 32))
    with pytest.raises(ValueError, match=r"cos has 7 positions and x 8 rows"):
        reference.quantize(q, k, v, FAST, replace(make_rope(7, 32), q_positions=torch.arange(4)))
    with pytest.raises(ValueError, match=r"q_positions is None, M is 8 and N 4"):
        reference.quantize(k, q, q, FAST, make_rope(8, 32))
