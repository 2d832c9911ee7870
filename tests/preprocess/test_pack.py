"""`pack`: e4m3 tensors and descales from elsewhere, moved and not touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.numerics import MAX_BITS_D
from helion_attn.reference.shapes import hide_future_keys
from helion_attn.testing import relative_error
from helpers.cases import GIVEN, PLAIN, Tensors
from helpers.packing import unpack_descales, unpack_values

E4M3 = torch.float8_e4m3fn
B, H, H_KV = 2, 4, 2

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])

#: Shapes that a descale may have; None is a plain number.
Q_SHAPES: dict[str, Any] = {
    "number": None,
    "scalar": (),
    "heads": (B, H),
    "kv_heads": (B, H_KV),
    "rows": (B, H, 70),
}
K_SHAPES: dict[str, Any] = {"number": None, "scalar": (), "kv_heads": (B, H_KV)}
V_SHAPES: dict[str, Any] = {"number": None, "scalar": (), "kv_heads": (B, H_KV), "channels": (B, H_KV, 48)}


def e4m3_qkv(device: str, M: int = 70, N: int = 200, D: int = 48, H_kv: int = H_KV, heads: int = H) -> Tensors:
    generator = torch.Generator(device).manual_seed(0)

    def make(heads: int, S: int) -> torch.Tensor:
        return torch.randn(B, heads, S, D, device=device, generator=generator).to(E4M3)

    return make(heads, M), make(H_kv, N), make(H_kv, N)


def make_descale(shape: tuple[int, ...] | None, device: str) -> float | torch.Tensor:
    if shape is None:
        return 0.75
    return 0.25 + torch.rand(shape, device=device, generator=torch.Generator(device).manual_seed(1))


def multiplied(x8: torch.Tensor, descale: float | torch.Tensor) -> torch.Tensor:
    """`x8 * descale`, fp32, the descale broadcast from its left."""
    if not isinstance(descale, torch.Tensor) or descale.dim() == 0:
        return x8.float() * descale
    if descale.size(1) != x8.size(1):
        descale = descale.repeat_interleave(x8.size(1) // descale.size(1), 1)
    if descale.dim() == 2:
        descale = descale[:, :, None, None]
    elif descale.size(2) == x8.size(2):
        descale = descale.unsqueeze(3)
    else:
        descale = descale.unsqueeze(2)
    return x8.float() * descale


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("q_shape", "k_shape", "v_shape"),
    [
        *((q, "kv_heads", "kv_heads") for q in Q_SHAPES),
        *(("heads", k, "kv_heads") for k in K_SHAPES if k != "kv_heads"),
        *(("heads", "kv_heads", v) for v in V_SHAPES if v != "kv_heads"),
    ],
)
def test_dequantize_is_exact(q_shape: str, k_shape: str, v_shape: str, layout: str, device: str) -> None:
    q, k, v = e4m3_qkv(device)
    shapes = {"q": Q_SHAPES[q_shape], "k": K_SHAPES[k_shape], "v": V_SHAPES[v_shape]}
    descales = {name: make_descale(shape, device) for name, shape in shapes.items()}
    given = [x.transpose(1, 2).contiguous() if layout == "bshd" else x for x in (q, k, v)]
    packed = ha.pack(*given, **{f"{name}_descale": x for name, x in descales.items()}, layout=layout)  # type: ignore[arg-type]
    for x, x8, descale in zip(ha.dequantize(packed), (q, k, v), descales.values(), strict=True):
        assert torch.equal(x, multiplied(x8, descale))
    assert (packed.layout, packed.dtype) == (layout, torch.bfloat16)
    v_scales = "channel" if v_shape == "channels" else "head"
    assert packed.recipe == replace(GIVEN, v_scales=v_scales)
    for name, x in unpack_values(packed).items():
        S = packed.M if name == "q8" else packed.N
        assert torch.all(x[:, :, S:] == 0)
        assert torch.all(x[..., 48:] == 0)
    assert {name: x.shape for name, x in unpack_descales(packed).items()} == {
        "q_descale": (B, H, 70),
        "k_descale": (B, H_KV, 200),
        "v_descale": (B, H_KV, 48),
    }


def test_every_e4m3_value_survives(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    x = codes.view(E4M3).view(1, 1, 16, 16)
    packed = ha.pack(x, x, x, q_descale=1.0, k_descale=1.0, v_descale=1.0)
    finite = ~x.float().isnan()
    assert finite.sum() == 254
    for name, value in unpack_values(packed).items():
        assert torch.equal(value[:, :, :16, :16][finite], x.float()[finite]), name
        assert value[:, :, :16, :16][~finite].isnan().all(), name


@CAUSAL
@pytest.mark.parametrize("D", [48, 64, 128, 192, 256])
def test_attention(D: int, causal: bool, device: str) -> None:
    qkv = e4m3_qkv(device, D=D)
    descales = make_descale((B, H, 70), device), make_descale((B, H_KV), device), make_descale((B, H_KV, D), device)
    packed = ha.pack(*qkv, q_descale=descales[0], k_descale=descales[1], v_descale=descales[2], dtype=torch.float16)
    out, lse = ha.attention_quantized(packed, causal=causal, return_lse=True)
    assert out.dtype == torch.float16
    q, k, v = (multiplied(x8, descale) for x8, descale in zip(qkv, descales, strict=True))
    oracle, oracle_lse = ha.reference.attention(q, k, v, causal=causal, return_lse=True)
    # Only P is rounded: by at most 2**-4, unbiased, and averaged over keys.
    assert relative_error(out, oracle) < 2**-5
    # A tensor core keeps about 14 bits of a score's sum. A sum of up to 70 P whose bits are a line of the score, each
    # off by some 3%, is off by .5%, and its logarithm, some 5, by 2**-10.
    budget = 1e-5 + (2.0**-14 if device == "cuda" else 0.0) + (2.0**-10 if D <= MAX_BITS_D else 0.0)
    assert relative_error(lse, oracle_lse) < budget


def test_what_quantize_packs_packs_the_same(device: str) -> None:
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, 2, 70, 64, device=device, generator=generator) for _ in range(3))
    # K has one block, whose descale is the head's.
    quantized = ha.quantize(q, k, v, recipe=PLAIN)
    assert quantized.k_descale.size(2) == 1
    descales = {f"{name}_descale": getattr(quantized, f"{name}_descale")[:, :, 0] for name in "kv"}
    descales["q_descale"] = quantized.q_descale.flatten(2)[:, :, :70]
    values = (x[:, :, :70, :64].to(E4M3) for x in unpack_values(quantized).values())
    packed = ha.pack(*values, **descales, dtype=torch.float32)
    assert torch.equal(ha.attention_quantized(packed), ha.attention_quantized(quantized))


def rounded_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """bf16 PyTorch operations, with P rounded to e4m3."""
    group = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ (k * q.size(3) ** -0.5).mT
    if causal:
        s = hide_future_keys(s)
    p = torch.softmax(s, 3).nan_to_num(0.0)  # rows without a key
    return p.to(E4M3).to(p.dtype) @ v


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize(("H_kv", "causal"), [(6, False), (2, True), (1, False), (1, True)])
@pytest.mark.parametrize(("M", "N", "D"), [(64, 128, 64), (113, 203, 128), (108, 256, 256)])
def test_criterion_of_flash_attention_3(M: int, N: int, D: int, H_kv: int, causal: bool, device: str) -> None:
    """Its tests' inputs, and bound: max|out - ref| <= 2 max|out_pt - ref| + atol."""
    q8, k8, v8 = e4m3_qkv(device, M, N, D, H_kv, heads=6)
    generator = torch.Generator(device).manual_seed(2)
    q_descale, k_descale, v_descale = (torch.rand(B, H_kv, device=device, generator=generator) * 2 for _ in range(3))
    q, k, v = multiplied(q8, q_descale), multiplied(k8, k_descale), multiplied(v8, v_descale)
    ref = ha.reference.attention(q, k, v, causal=causal).bfloat16()
    atol = 2 * (ref + 0.3 - 0.3 - ref).abs().max()
    out_pt = rounded_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal)
    packed = ha.pack(q8, k8, v8, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    out = ha.attention_quantized(packed, causal=causal)
    bound = 2 * (out_pt - ref).abs().max() + atol
    assert (out - ref).abs().max() <= bound
    assert (torch.zeros_like(out) - ref).abs().max() > bound
    # Descales of another head do not pass.
    wrong = ha.pack(q8, k8, v8, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale.roll(1))
    assert (ha.attention_quantized(wrong, causal=causal) - ref).abs().max() > bound


BAD: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "q_bf16": ({"q": torch.zeros(2, 4, 5, 32)}, TypeError, ["q has dtype torch.float32", "float8_e4m3fn"]),
    "k_e5m2": (
        {"k": torch.zeros(2, 2, 7, 32).to(torch.float8_e5m2)},
        TypeError,
        ["k has dtype torch.float8_e5m2", "float8_e4m3fn"],
    ),
    "q_descale_of_one_head": ({"q_descale": torch.ones(2, 1)}, ValueError, ["q_descale has shape (2, 1)", "(2, 4)"]),
    "q_descale_per_block": ({"q_descale": torch.ones(2, 4, 1)}, ValueError, ["q_descale has shape (2, 4, 1)"]),
    "k_descale_per_query_head": ({"k_descale": torch.ones(2, 4)}, ValueError, ["k_descale has shape (2, 4)", "(2, 2)"]),
    "k_descale_per_key": ({"k_descale": torch.ones(2, 2, 7)}, ValueError, ["k_descale has shape (2, 2, 7)"]),
    "v_descale_per_key": ({"v_descale": torch.ones(2, 2, 7)}, ValueError, ["v_descale has shape (2, 2, 7)", "32"]),
    "one_element": ({"v_descale": torch.ones(1)}, ValueError, ["v_descale has shape (1,)"]),
    "dtype": ({"k_descale": torch.ones(2, 2).bfloat16()}, TypeError, ["k_descale has dtype torch.bfloat16", "float32"]),
    "device": ({"k_descale": torch.ones(2, 2, device="meta")}, ValueError, ["k_descale is on meta", "cpu"]),
    "list": ({"k_descale": [1.0]}, TypeError, ["k_descale is a list", "float32 tensor"]),
    "none": ({"v_descale": None}, TypeError, ["v_descale is a NoneType"]),
    "zero": ({"q_descale": 0.0}, ValueError, ["q_descale", "finite and positive", "0.0"]),
    "negative": ({"k_descale": torch.tensor([[1.0, -2.0]] * 2)}, ValueError, ["k_descale", "positive", "-2.0"]),
    "nan": ({"v_descale": float("nan")}, ValueError, ["v_descale", "finite", "nan"]),
    "inf": ({"v_descale": torch.tensor([[1.0, float("inf")]] * 2)}, ValueError, ["v_descale", "finite", "inf"]),
    "out_dtype": ({"dtype": torch.int8}, TypeError, ["dtype is torch.int8", "bfloat16"]),
    "layout": ({"layout": "sbhd"}, ValueError, ["layout is 'sbhd'", "('bhsd', 'bshd')"]),
    "heads": ({"v": torch.zeros(2, 4, 7, 32).to(E4M3)}, ValueError, ["v has 4 heads and k has 2"]),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments(what: str) -> None:
    bad, error, parts = BAD[what]
    q, k = torch.zeros(2, 4, 5, 32).to(E4M3), torch.zeros(2, 2, 7, 32).to(E4M3)
    good: dict[str, Any] = {"q": q, "k": k, "v": k, "q_descale": 1.0, "k_descale": 1.0, "v_descale": 1.0}
    with pytest.raises(error) as raised:
        ha.pack(**(good | bad))
    assert type(raised.value) is error
    for part in parts:
        assert part in str(raised.value)
