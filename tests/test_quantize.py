"""What `quantize` packs: the rounding model's values at the positions that the design fixes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from packing import stored_at, unpack_rows, unpack_v

import helion_attn as ha
from helion_attn.numerics import DESCALE_MIN, E4M3_MAX
from helion_attn.reference import rounding_model
from helion_attn.testing import make_qkv, relative_error
from helion_attn.workloads import Workload, tagged

FP32_EPS = torch.finfo(torch.float32).eps
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

Poisoned = Callable[[], AbstractContextManager[None]]


def assert_same_e4m3(actual: torch.Tensor, expected: torch.Tensor, *, exact: bool) -> None:
    """Equal; or, where a divisor or a mean may differ in its last bit, all but one value in a thousand."""
    assert actual.shape == expected.shape
    differ = actual != expected
    assert not (differ.any() if exact else differ.float().mean() > 1e-3)
    # Neighbours in e4m3 are at most 2**-3 apart, or 2**-9 among the subnormals.
    assert torch.all((actual - expected).abs() <= torch.maximum(expected.abs() * 2**-3, expected.new_tensor(2**-9)))


def assert_fp32_close(actual: torch.Tensor, expected: torch.Tensor, ulps: int = 4) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected.double(), rtol=ulps * FP32_EPS, atol=0)


@pytest.mark.parametrize("w", tagged("ci"), ids=lambda w: w.name)
def test_values(w: Workload, device: str, poisoned: Poisoned) -> None:
    q, k, v = make_qkv("outlier", w.B, w.H, w.H_kv, w.M, w.N, w.D, device=device)
    with poisoned():
        packed = ha.quantize(q, k, v, recipe=ha.FAST)
    model = rounding_model.quantize(q, k, v, ha.FAST)
    exact = device == "cpu"
    values = {
        "q8": unpack_rows(packed.q8, w.B),
        "k8": unpack_rows(packed.k8, w.B),
        "v8": unpack_v(packed.v8, w.B),
    }
    for name, value in values.items():
        expected = getattr(model, name)
        S, D = expected.shape[2:]
        assert_same_e4m3(value[:, :, :S, :D], expected, exact=exact)
        assert torch.all(value[:, :, S:] == 0), f"{name}: padded rows are not 0"
        assert torch.all(value[..., D:] == 0), f"{name}: padded columns are not 0"
    for name, x in (("q_descale", q), ("k_descale", k), ("v_descale", v)):
        assert_fp32_close(getattr(packed, name), x.double().abs().amax((2, 3)) / E4M3_MAX)
    assert torch.all(packed.v_mean == 0)
    assert (packed.M, packed.N, packed.D, packed.dtype, packed.layout) == (w.M, w.N, w.D, q.dtype, "bhsd")


@pytest.mark.parametrize("w", tagged("ci"), ids=lambda w: w.name)
def test_centred_v(w: Workload, device: str, poisoned: Poisoned) -> None:
    q, k, v = make_qkv("biased_v", w.B, w.H, w.H_kv, w.M, w.N, w.D, device=device)
    with poisoned():
        packed = ha.quantize(q, k, v)
    mean, mean_abs = v.double().mean(2), v.double().abs().mean(2)
    assert torch.all((packed.v_mean[..., : w.D] - mean).abs() <= 32 * FP32_EPS * mean_abs)
    assert torch.all(packed.v_mean[..., w.D :] == 0)
    # From here on with the mean that was in fact subtracted.
    centred = v.float() - packed.v_mean[:, :, None, : w.D]
    assert_fp32_close(packed.v_descale, (centred.abs().amax((2, 3)).double() / E4M3_MAX).clamp_min(DESCALE_MIN))
    value = unpack_v(packed.v8, w.B)
    expected = (centred * (1 / packed.v_descale)[:, :, None, None]).to(torch.float8_e4m3fn).float()
    assert_same_e4m3(value[:, :, : w.N, : w.D], expected, exact=device == "cpu")
    assert torch.all(value[:, :, w.N :] == 0)
    assert torch.all(value[..., w.D :] == 0)


def test_key_interleave(device: str) -> None:
    """Channel d of V is zero but at key d."""
    q = torch.ones(1, 1, 1, 64, device=device)
    v = E4M3_MAX * torch.eye(64, device=device)[None, None]
    packed = ha.quantize(q, v, v, recipe=ha.FAST)
    # [D_pad, bn]
    v8 = packed.v8[0, 0].float()
    keys = torch.arange(64, device=device)
    assert torch.equal(v8.argmax(1), stored_at(keys))
    assert torch.equal(v8.sum(1), torch.full_like(v8[:, 0], E4M3_MAX))
    assert stored_at(keys)[:16].tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=["fast", "balanced"])
def test_dequantize(recipe: ha.Recipe, layout: str, device: str) -> None:
    qkv = make_qkv("biased_v", 2, 4, 2, 65, 200, 48, device=device)
    given = [x.transpose(1, 2) for x in qkv] if layout == "bshd" else qkv
    packed = ha.quantize(*given, recipe=recipe, layout=layout)
    assert packed.layout == layout
    model = rounding_model.quantize(*qkv, recipe)
    expected = (
        model.q8 * model.q_descale[:, :, None, None],
        model.k8 * model.k_descale[:, :, None, None],
        model.v8 * model.v_descale[:, :, None, None] + model.v_mean.unsqueeze(2),
    )
    for actual, value in zip(ha.dequantize(packed), expected, strict=True):
        assert actual.dtype == torch.float32
        assert relative_error(actual, value) < 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_zero_head(name: str, dtype: torch.dtype, device: str) -> None:
    qkv = dict(zip("qkv", make_qkv("randn", 1, 2, 2, 20, 30, 32, dtype, device), strict=True))
    clean = ha.quantize(*qkv.values(), recipe=ha.FAST)
    qkv[name][:, 0] = 0
    packed = ha.quantize(*qkv.values(), recipe=ha.FAST)
    x8, descale = getattr(packed, f"{name}8"), getattr(packed, f"{name}_descale")
    assert torch.all(x8[0].float() == 0)
    assert descale[0, 0] == DESCALE_MIN
    assert torch.equal(x8[1].float(), getattr(clean, f"{name}8")[1].float())
    assert descale[0, 1] == getattr(clean, f"{name}_descale")[0, 1]


@pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=["fast", "balanced"])
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
    for name in ("q_descale", "k_descale", "v_descale", "v_mean"):
        assert_fp32_close(getattr(scaled, name), getattr(packed, name).double() * scale)


@pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=["fast", "balanced"])
def test_smallest_magnitudes(recipe: ha.Recipe, device: str) -> None:
    """Below 2**-126 * 448 the descale stays at its least and values lose bits; none becomes NaN or infinite."""
    qkv = [x * 2.0**-124 for x in make_qkv("randn", 1, 2, 1, 20, 30, 32, torch.float32, device)]
    packed = ha.quantize(*qkv, recipe=recipe)
    assert torch.all(packed.q_descale == DESCALE_MIN)
    for name in ("q8", "k8", "v8", "v_mean"):
        assert getattr(packed, name).float().isfinite().all()


@pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=["fast", "balanced"])
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
    assert torch.equal(~descale.isfinite(), hit)
    assert torch.equal(descale[~hit], clean_descale[~hit])
    x8, clean_x8 = getattr(packed, f"{name}8").float(), getattr(clean, f"{name}8").float()
    assert torch.equal(x8[~hit.flatten()], clean_x8[~hit.flatten()])


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
    packed = ha.quantize(*given, layout="bshd" if bshd else "bhsd", recipe=ha.Recipe(center_v=center))
    restored = ha.dequantize(packed)
    for name, x, x_restored in zip("qkv", (q, k, v), restored, strict=True):
        descale = getattr(packed, f"{name}_descale").double()[:, :, None, None]
        mean = packed.v_mean[:, :, None, :D].double() if name == "v" else 0.0
        value = x.double() - mean
        # Half a spacing of e4m3, which is 2**-3 of the value's power of two, or 2**-9 among the subnormals.
        half_spacing = torch.maximum(value.abs() * 2**-4, descale * 2**-10)
        noise = 4 * FP32_EPS * (x.double().abs() + value.abs())
        assert torch.all((x_restored.double() - x.double()).abs() <= half_spacing * (1 + 1e-6) + noise)
