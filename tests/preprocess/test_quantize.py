"""What `quantize` packs: the rounding model's values at the positions that the design fixes."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from devtools.workloads import WORKLOADS, Workload, tagged
from helion_attn.numerics import (
    DESCALE_MIN,
    E4M3_MAX,
    RECENTRED_KEYS,
    ROUNDS_TO_LARGEST,
    SAMPLED_HEADROOM,
    SAMPLED_KEYS,
    SIGNIFICANT_MEAN,
)
from helion_attn.reference import rounding_model
from helion_attn.testing import relative_error
from helion_attn.types import Layout
from helpers.cases import IN_E4M3, PLAIN, PRESETS, RECIPES
from helpers.packing import SPACING, assert_same_values, stored_at, unpack_descales, unpack_values

FP32_EPS = torch.finfo(torch.float32).eps
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


Poisoned = Callable[[], AbstractContextManager[None]]


def assert_fp32_close(actual: torch.Tensor, expected: torch.Tensor, ulps: int = 4) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected.double(), rtol=ulps * FP32_EPS, atol=0)


def assert_packs_the_model(
    packed: ha.QuantizedQKV, model: ha.reference.RoundedQKV, *, exact: bool, descale_ulps: int = 4
) -> None:
    """Values and descales are those of `reference.quantize`, and padding is 0."""
    dtypes = {"q8": packed.recipe.qk_dtype, "k8": packed.recipe.qk_dtype, "v8": packed.recipe.pv_dtype}
    for name, value in unpack_values(packed).items():
        assert getattr(packed, name).dtype == dtypes[name]
        expected = getattr(model, name)
        S, D = expected.shape[2:]
        assert_same_values(value[:, :, :S, :D], expected, dtypes[name], exact=exact)
        assert torch.all(value[:, :, S:] == 0), f"{name}: padded rows are not 0"
        assert torch.all(value[..., D:] == 0), f"{name}: padded columns are not 0"
    for name, descale in unpack_descales(packed).items():
        assert_fp32_close(descale, getattr(model, name), descale_ulps)


@pytest.mark.parametrize("w", tagged("ci"), ids=lambda w: w.name)
def test_values_of_every_shape(w: Workload, device: str, poisoned: Poisoned) -> None:
    qkv = make_qkv("outlier", w.B, w.H, w.H_kv, w.M, w.N, w.D, device=device)
    with poisoned():
        packed = ha.quantize(*qkv, recipe=PLAIN)
    assert_packs_the_model(packed, ha.reference.quantize(*qkv, PLAIN), exact=device == "cpu")
    count = min(w.N, SAMPLED_KEYS)
    q, k, v = (x.double().abs() for x in qkv)
    room = SAMPLED_HEADROOM["head"] * v[:, :, : w.N // count * count : w.N // count].amax((2, 3))
    largest = v.amax((2, 3))
    stats = {
        "q_descale": q.amax(3),
        "k_descale": torch.cat(
            [x.amax((2, 3))[..., None].expand(x.shape[:3]) for x in k.split(packed.k8.size(2), 2)], 2
        ),
        "v_descale": torch.where(largest <= ROUNDS_TO_LARGEST * room, room, largest)[..., None],
    }
    for name, descale in unpack_descales(packed).items():
        assert_fp32_close(descale, (stats[name] / E4M3_MAX).expand_as(descale))
    assert torch.all(packed.v_mean == 0)
    assert packed.k_mean is None
    assert packed.lse_shift is None
    assert (packed.M, packed.N, packed.D, packed.dtype, packed.layout) == (w.M, w.N, w.D, qkv[0].dtype, "bhsd")
    assert packed.recipe == PLAIN


@pytest.mark.thorough(but=42)
@pytest.mark.parametrize("name", ["gqa", "d48", "d80_causal", "ragged", "d256"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_values_of_every_recipe(recipe: ha.Recipe, name: str, device: str, poisoned: Poisoned) -> None:
    w = next(w for w in WORKLOADS if w.name == name)
    q, k, v = make_qkv("outlier", w.B, w.H, w.H_kv, w.M, w.N, w.D, device=device)
    k, v = k + 2 * k[:, :, :1], v + 1
    with poisoned():
        packed = ha.quantize(q, k, v, recipe=recipe)
    model = ha.reference.quantize(q, k, v, recipe)
    sums = recipe.hadamard or recipe.resolved.reflect or recipe.resolved.smooth_k or recipe.resolved.center_v
    # Of a sum the last bits differ, and with them a maximum's of what it was subtracted from.
    exact = device == "cpu" and not sums
    assert_packs_the_model(packed, model, exact=exact, descale_ulps=64 if sums else 4)
    for mean, expected, x in ((packed.v_mean, model.v_mean, v), (packed.k_mean, model.k_mean, k)):
        if mean is not None:
            assert torch.all((mean[..., : w.D] - expected).abs() <= 32 * FP32_EPS * x.float().abs().mean(2))
            assert torch.all(mean[..., w.D :] == 0)
    assert (packed.lse_shift is not None) == (packed.k_mean is not None) == recipe.resolved.smooth_k
    if packed.lse_shift is not None:
        shift = packed.lse_shift.flatten(2)[:, :, : w.M]
        assert relative_error(shift, model.lse_shift) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
def test_values_of_every_dtype(recipe: ha.Recipe, dtype: torch.dtype, device: str) -> None:
    qkv = make_qkv("outlier", 1, 4, 2, 65, 200, 96, dtype, device)
    packed = ha.quantize(*qkv, recipe=recipe)
    assert_packs_the_model(packed, ha.reference.quantize(*qkv, recipe), exact=False, descale_ulps=64)


@pytest.mark.parametrize("w", tagged("ci"), ids=lambda w: w.name)
def test_centred_v(w: Workload, device: str, poisoned: Poisoned) -> None:
    q, k, v = make_qkv("biased_v", w.B, w.H, w.H_kv, w.M, w.N, w.D, device=device)
    with poisoned():
        packed = ha.quantize(q, k, v)
    count = min(w.N, SAMPLED_KEYS)
    every = w.N // count
    # [B, H_kv, count, D]; a biased V's means stand out, but where a channel has few keys
    sample = v[:, :, : count * every : every].float()
    mean, mean_abs = sample.double().mean(2), sample.double().abs().mean(2)
    least = SIGNIFICANT_MEAN * (sample.amax(2) - sample.amin(2)) / count**0.5
    mean = torch.where(mean.abs() > least, mean, 0.0)
    assert torch.all((packed.v_mean[..., : w.D] - mean).abs() <= 32 * FP32_EPS * mean_abs)
    assert torch.all(packed.v_mean[..., w.D :] == 0)
    # From here on with the mean that was in fact subtracted.
    centred = v.float() - packed.v_mean[:, :, None, : w.D]
    known = sample - packed.v_mean[:, :, None, : w.D]
    descale = (SAMPLED_HEADROOM["head"] * known.abs().amax((2, 3)).double() / E4M3_MAX).clamp_min(DESCALE_MIN)
    assert_fp32_close(packed.v_descale, descale.unsqueeze(2).expand_as(packed.v_descale))
    value = unpack_values(packed)["v8"]
    expected = (centred * (1 / packed.v_descale)[:, :, None, : w.D]).to(torch.float8_e4m3fn).float()
    assert_same_values(value[:, :, : w.N, : w.D], expected, torch.float8_e4m3fn, exact=device == "cpu")
    assert torch.all(value[:, :, w.N :] == 0)
    assert torch.all(value[..., w.D :] == 0)


LONG_V = {
    "head": PLAIN,
    "channel": ha.ACCURATE,
    "e5m2": replace(IN_E4M3, pv_dtype=torch.float8_e5m2),
}


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize(
    ("name", "D_v", "offset"), [*((name, 24, 1.0) for name in LONG_V), ("head", 24, 0.0), ("head", 300, 0.0)]
)
def test_many_keys_keep_the_mean_of_v(name: str, D_v: int, offset: float, device: str, poisoned: Poisoned) -> None:
    """What rounding does to it is taken out of the mean that is added back."""
    recipe = dataclasses.replace(LONG_V[name], center_v=True)
    keys = RECENTRED_KEYS + 57
    heads = 2 if D_v == 24 else 1  # the interpreter takes seconds a head
    q, k, v = make_qkv("randn", 1, heads, heads, 1, keys, 24, D_v=D_v, device=device)
    v = (v + offset).to(v.dtype)
    with poisoned():
        packed = ha.quantize(q, k, v, recipe=recipe)
    model = ha.reference.quantize(q, k, v, recipe)
    mean = v.double().mean(2)
    noise = 32 * FP32_EPS * v.double().abs().mean(2)
    kept = ha.dequantize(packed)[2].double().mean(2)
    assert torch.all((kept - mean).abs() <= noise)
    assert torch.all(packed.v_mean[..., D_v:] == 0)
    # The mean that was subtracted would not do.
    moved = packed.v_mean[..., :D_v] - mean
    assert moved.abs().mean() > 10 * noise.mean()
    # Where the subtracted means differ in the last bit, a few keys round to the model's neighbour.
    step = packed.v_descale[..., :D_v] * packed.v8.float().abs().amax() * SPACING[recipe.pv_dtype][0]
    assert torch.all((packed.v_mean[..., :D_v] - model.v_mean).abs() <= noise + step * 2**-10)


@pytest.mark.parametrize("recipe", [ha.BALANCED, ha.ACCURATE], ids=["balanced", "accurate"])
def test_few_keys_have_the_mean_that_was_subtracted(recipe: ha.Recipe, device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 1, RECENTRED_KEYS - 1, 24, device=device)
    v = v + torch.arange(24, device=device, dtype=v.dtype) / 8
    packed = ha.quantize(q, k, v, recipe=recipe)
    error = packed.v_mean[..., :24] - ha.reference.quantize(q, k, v, recipe).v_mean
    assert torch.all(error.abs() <= 32 * FP32_EPS * v.double().abs().mean(2))
    known = v[:, :, :: v.size(2) // SAMPLED_KEYS][:, :, :SAMPLED_KEYS]
    large = known.double().mean(2)[..., 8:]
    assert torch.all((packed.v_mean[..., 8:24] - large).abs() <= 32 * FP32_EPS * large.abs())


@pytest.mark.parametrize("keys", [600, RECENTRED_KEYS + 57])
@pytest.mark.parametrize("scales", ["head", "channel"])
def test_v_beyond_the_room_of_its_sample(scales: str, keys: int, device: str, poisoned: Poisoned) -> None:
    """Entries of keys that no sample has, one in each tile of channels of the first head, are not cut off."""
    recipe = dataclasses.replace(ha.BALANCED, v_scales=scales)
    q, k, v = make_qkv("biased_v", 1, 2, 2, 1, keys, 32, D_v=96, device=device)
    clean = ha.quantize(q, k, v, recipe=recipe)
    v[0, 0, 7, 3], v[0, 0, keys - 2, 90] = 1000.0, -700.0
    with poisoned():
        packed = ha.quantize(q, k, v, recipe=recipe)
    model = ha.reference.quantize(q, k, v, recipe)
    assert_packs_the_model(packed, model, exact=False, descale_ulps=64)
    changed = packed.v_descale != clean.v_descale
    assert changed[0, 0, :96].sum() == (96 if scales == "head" else 2)
    assert not changed[0, 1].any()
    restored = ha.dequantize(packed)[2]
    assert restored[0, 0, 7, 3].item() == pytest.approx(1000.0, rel=2.0**-4)
    assert restored[0, 0, keys - 2, 90].item() == pytest.approx(-700.0, rel=2.0**-4)
    if keys >= RECENTRED_KEYS:
        noise = 32 * FP32_EPS * v.double().abs().mean(2)
        assert torch.all((restored.double().mean(2) - v.double().mean(2)).abs() <= noise)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("scales", ["head", "channel"])
def test_nonfinite_v_that_its_sample_missed(scales: str, value: float, device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 1, 600, 32, D_v=96, device=device)
    v[0, 0, 7, 3] = value
    packed = ha.quantize(q, k, v, recipe=dataclasses.replace(ha.BALANCED, v_scales=scales))
    hit = torch.zeros(1, 2, 96, dtype=torch.bool, device=device)
    hit[0, 0, slice(None) if scales == "head" else 3] = True
    assert torch.equal(packed.v_descale[..., :96].isnan(), hit)
    assert ha.dequantize(packed)[2].mT.isfinite().all(3).equal(~hit)


def test_key_interleave(device: str) -> None:
    """Channel d of V is zero but at key d."""
    q = torch.ones(1, 1, 1, 64, device=device)
    v = torch.eye(64, device=device)[None, None]
    packed = ha.quantize(q, v, v, recipe=PLAIN)
    # [D_pad, bn]
    v8 = packed.v8[0, 0].float()
    keys = torch.arange(64, device=device)
    assert torch.equal(v8.argmax(1), stored_at(keys))
    assert torch.equal(v8.sum(1), torch.full_like(v8[:, 0], E4M3_MAX / SAMPLED_HEADROOM["head"]))
    assert stored_at(keys)[:16].tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]


DEQUANTIZED = {
    name: RECIPES[name]
    for name in (*PRESETS, "plain", "e5m2", "hadamard_smooth_k", "hadamard_seed_3", "hybrid", "fp16_hadamard_smooth_k")
}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("recipe", DEQUANTIZED.values(), ids=DEQUANTIZED)
def test_dequantize(recipe: ha.Recipe, layout: Layout, device: str) -> None:
    qkv = make_qkv("biased_v", 2, 4, 2, 65, 200, 48, device=device)
    given = [x.transpose(1, 2) for x in qkv] if layout == "bshd" else qkv
    packed = ha.quantize(*given, recipe=recipe, layout=layout)
    assert packed.layout == layout
    model = rounding_model.quantize(*qkv, recipe)
    q, k = model.q8 * model.q_descale.unsqueeze(3), model.k8 * model.k_descale.unsqueeze(3)
    if recipe.hadamard:
        inverse = ha.reference.hadamard_matrix(48, recipe.hadamard_seed).mT.float().to(device)
        q, k = q @ inverse, k @ inverse
    if recipe.resolved.reflect:
        q, k = ha.reference.reflect(q).float(), ha.reference.reflect(k).float()
    v = model.v8 * model.v_descale.unsqueeze(2) + model.v_mean.unsqueeze(2)
    for actual, value in zip(ha.dequantize(packed), (q, k + model.k_mean.unsqueeze(2), v), strict=True):
        assert actual.dtype == torch.float32
        assert relative_error(actual, value) < 1e-3


@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_zero_head(name: str, dtype: torch.dtype, recipe: ha.Recipe, device: str) -> None:
    qkv = dict(zip("qkv", make_qkv("randn", 1, 2, 2, 20, 30, 32, dtype, device), strict=True))
    clean = ha.quantize(*qkv.values(), recipe=recipe)
    qkv[name][:, 0] = 0
    packed = ha.quantize(*qkv.values(), recipe=recipe)
    x8, descale = getattr(packed, f"{name}8"), getattr(packed, f"{name}_descale")
    assert torch.all(x8[0].float() == 0)
    assert torch.all(descale[0, 0] == DESCALE_MIN)
    assert torch.equal(x8[1].float(), getattr(clean, f"{name}8")[1].float())
    assert torch.equal(descale[0, 1], getattr(clean, f"{name}_descale")[0, 1])


@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [(torch.bfloat16, 100), (torch.bfloat16, -100), (torch.float32, 100), (torch.float32, -100), (torch.float16, 12)],
    ids=lambda value: str(value),
)
def test_magnitude_is_only_in_the_descale(dtype: torch.dtype, exponent: int, recipe: ha.Recipe, device: str) -> None:
    qkv = make_qkv("randn", 1, 2, 1, 20, 30, 32, dtype, device)
    scale = 2.0**exponent
    packed, scaled = ha.quantize(*qkv, recipe=recipe), ha.quantize(*(x * scale for x in qkv), recipe=recipe)
    for name in ("q8", "k8", "v8"):
        assert torch.equal(getattr(scaled, name).float(), getattr(packed, name).float())
    for name, descale in unpack_descales(packed).items():
        assert_fp32_close(unpack_descales(scaled)[name], descale.double() * scale)
    for name in ("v_mean", "k_mean") if recipe.resolved.smooth_k else ("v_mean",):
        assert_fp32_close(getattr(scaled, name), getattr(packed, name).double() * scale)


@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
def test_smallest_magnitudes(recipe: ha.Recipe, device: str) -> None:
    """Below 2**-126 * 448 the descale stays at its least and values lose bits; none becomes NaN or infinite."""
    qkv = [x * 2.0**-124 for x in make_qkv("randn", 1, 2, 1, 20, 30, 32, torch.float32, device)]
    packed = ha.quantize(*qkv, recipe=recipe)
    assert torch.all(packed.q_descale == DESCALE_MIN)
    for name in ("q8", "k8", "v8", "v_mean"):
        assert getattr(packed, name).float().isfinite().all()


@pytest.mark.thorough(but=9)
@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nonfinite_stays_in_its_head(name: str, value: float, recipe: ha.Recipe, device: str) -> None:
    qkv = dict(zip("qkv", make_qkv("randn", 2, 3, 3, 70, 300, 32, device=device), strict=True))
    clean = ha.quantize(*qkv.values(), recipe=recipe)
    qkv[name][1, 1, 13, 5] = value
    packed = ha.quantize(*qkv.values(), recipe=recipe)
    hit = torch.zeros(2, 3, dtype=torch.bool, device=device)
    hit[1, 1] = True
    descale, clean_descale = getattr(packed, f"{name}_descale"), getattr(clean, f"{name}_descale")
    assert torch.equal((~descale.isfinite()).flatten(2).any(2), hit)
    assert torch.equal(descale[~hit], clean_descale[~hit])
    x8, clean_x8 = getattr(packed, f"{name}8").float(), getattr(clean, f"{name}8").float()
    assert torch.equal(x8[~hit.flatten()], clean_x8[~hit.flatten()])
    if name == "q":
        # No other row or block is hit.
        assert (~descale.isfinite()).sum() == (packed.q8.size(2) if recipe.resolved.q_scales == "block" else 1)
        assert not descale.flatten(2)[1, 1, 13].isfinite()


@hypothesis.settings(deadline=None, max_examples=12, derandomize=True)
@hypothesis.given(
    B=st.integers(1, 2),
    H=st.integers(1, 3),
    S=st.integers(1, 300),
    D=st.sampled_from([16, 40, 64]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    bshd=st.booleans(),
    center=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rounding_is_to_nearest(
    device: str, B: int, H: int, S: int, D: int, dtype: torch.dtype, bshd: bool, center: bool, seed: int
) -> None:
    q, k, v = make_qkv("outlier", B, H, H, S, S, D, dtype, device, seed)
    given = [x.transpose(1, 2).contiguous() if bshd else x for x in (q, k, v)]
    packed = ha.quantize(*given, layout="bshd" if bshd else "bhsd", recipe=replace(IN_E4M3, center_v=center))
    restored, descales = ha.dequantize(packed), unpack_descales(packed)
    for name, x, x_restored in zip("qkv", (q, k, v), restored, strict=True):
        descale = descales[f"{name}_descale"].double().unsqueeze(2 if name == "v" else 3)
        mean = packed.v_mean[:, :, None, :D].double() if name == "v" else 0.0
        value = x.double() - mean
        # Half a spacing of e4m3, which is 2**-3 of the value's power of two, or 2**-9 among the subnormals.
        half_spacing = torch.maximum(value.abs() * 2**-4, descale * 2**-10)
        noise = 4 * FP32_EPS * (x.double().abs() + value.abs())
        assert torch.all((x_restored.double() - x.double()).abs() <= half_spacing * (1 + 1e-6) + noise)


def kept(device: str) -> list[ha.QuantizedQKV | ha.PagedKVCache]:
    q, k, v = make_qkv("randn", 1, 2, 1, 20, 30, 32, device=device)
    cache = ha.paged_kv_cache(2, 1, 32, device=device, k_mean=k[0, :, 0], channel_factors=k[0, :, 1])
    return [ha.quantize(q, k, v), ha.quantize(q, k, v, recipe=ha.BF16), cache]


def test_packed_tensors_are_moved(device: str) -> None:
    for there in kept(device):
        tensors = {name: x for name, x in vars(there).items() if isinstance(x, torch.Tensor)}
        assert there.device == tensors["k8"].device
        assert there.nbytes == sum(x.numel() * x.element_size() for x in tensors.values())
        moved = there.to("meta")
        assert type(moved) is type(there)
        for name, x in vars(moved).items():
            if isinstance(x, torch.Tensor):
                assert (x.device.type, x.dtype, x.shape) == ("meta", tensors[name].dtype, tensors[name].shape)
            else:
                assert x == getattr(there, name)
        with pytest.raises(TypeError, match=r"device is torch\.bfloat16; it must be a torch\.device"):
            there.to(torch.bfloat16)  # type: ignore[arg-type]


def test_packed_tensors_are_loaded_by_default(device: str) -> None:
    """`torch.load` takes weights only, unless it is told otherwise."""
    for there in kept(device):
        file = io.BytesIO()
        torch.save(there, file)
        file.seek(0)
        loaded = torch.load(file)
        for name, x in vars(there).items():
            if isinstance(x, torch.Tensor):
                assert torch.equal(getattr(loaded, name).view(torch.uint8), x.view(torch.uint8))
            else:
                assert getattr(loaded, name) == x
