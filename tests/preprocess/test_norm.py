"""RMSNorm of Q and K, by head and over all heads, before RoPE: against fp64, and in the rounding model."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.reference.hadamard import hadamard_block
from helion_attn.reference.norm import rms_norm
from helion_attn.reference.rope import apply_rope_qk
from helion_attn.testing import relative_error
from helpers.cases import RECIPES, make_case
from helpers.packing import assert_same_values, unpack_descales, unpack_values
from helpers.rotations import tables

#: Which channels share a mean, of Q and of K.
SPANS = pytest.mark.parametrize("span", ["head", "heads", "of_q", "of_k", "mixed"])


def norms(
    span: str, H: int, H_kv: int, D: int, dtype: torch.dtype = torch.float32, eps: float = 1e-6, *, device: str
) -> dict[str, Any]:
    """Weights around 1 that differ from channel to channel, and in sign."""
    generator = torch.Generator().manual_seed(5)

    def norm(channels: int) -> ha.RMSNorm:
        weight = 1 + 0.5 * torch.randn(channels, generator=generator)
        return ha.RMSNorm(weight.to(device, dtype), eps)

    return {
        "q_norm": None if span == "of_k" else norm(D if span == "head" else H * D),
        "k_norm": None if span == "of_q" else norm(D if span in ("head", "mixed") else H_kv * D),
    }


@pytest.mark.thorough(but=9)
@SPANS
@pytest.mark.parametrize(
    ("D", "M", "N", "pairing"),
    [(48, 65, 200, None), (64, 1, 130, "halves"), (48, 63, 129, "part"), (128, 63, 129, "interleaved")],
)
def test_attention(D: int, M: int, N: int, pairing: str | None, span: str, device: str) -> None:
    rope = None
    if pairing is not None:
        rotary = D // 4 * 2 if pairing == "part" else D
        rope = tables(N, rotary, interleaved=pairing == "interleaved", device=device)
    qkv = make_qkv("outlier", 2, 4, 2, M, N, D, device=device)
    case = make_case(qkv, True, rope=rope, **norms(span, 4, 2, D, device=device))
    out, lse = case.run(torch.float32)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)


@pytest.mark.thorough(but=9)
@pytest.mark.parametrize("span", ["head", "heads"])
@pytest.mark.parametrize("name", ["balanced", "accurate", "hybrid", "q_block", "fp16_hadamard_smooth_k"])
@pytest.mark.parametrize("pairing", [None, "interleaved"])
def test_values(pairing: str | None, name: str, span: str, device: str) -> None:
    """What is packed, to the last bit but where fp32 sums differ in theirs."""
    D, rope = 64, None
    if pairing is not None:
        rope = tables(130, D, dtype=torch.bfloat16, interleaved=pairing == "interleaved", device=device)
    qkv = make_qkv("outlier", 1, 4, 2, 65, 130, D, device=device)
    given = norms(span, 4, 2, D, torch.bfloat16, device=device)
    packed = ha.quantize(*qkv, recipe=RECIPES[name], rope=rope, **given)
    model = ha.reference.quantize(*qkv, RECIPES[name], rope, **given)
    for field, value in unpack_values(packed).items():
        expected = getattr(model, field)
        dtype, apart = getattr(packed, field).dtype, 0.0
        if RECIPES[name].hadamard and field != "v8" and dtype.itemsize == 2:
            # As in `test_rope.test_values`.
            apart = 2.0**-7 * expected.norm(dim=-1, keepdim=True) * hadamard_block(D) ** -0.5
        assert_same_values(value[:, :, : expected.size(2), :D], expected, dtype, exact=False, apart=apart)
    # A channel that goes the other way moves the largest of its rotated row by as much, at most.
    rtol = 2.0**-8 if RECIPES[name].hadamard else 1e-5
    for field, descale in unpack_descales(packed).items():
        torch.testing.assert_close(descale, getattr(model, field), rtol=rtol, atol=0)


@pytest.mark.parametrize("span", ["head", "heads"])
def test_rows_of_zeros_stay_zeros(span: str, device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 70, 130, 64, device=device)
    q[:, :, 5], k[:, :, 7] = 0, 0
    given = norms(span, 2, 2, 64, device=device)
    case = make_case((q, k, v), **given)
    out, _ = case.run(torch.float32)
    case.assert_within_budget(out)
    packed = unpack_values(ha.quantize(q, k, v, **given, recipe=RECIPES["plain"]))
    assert not packed["q8"][:, :, 5].any()
    assert not packed["k8"][:, :, 7].any()


@pytest.mark.parametrize("span", ["head", "heads"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_rows(value: float, span: str, device: str) -> None:
    """As in models: infinity over infinity. It is in the row's own outputs, of its head or, over heads, of all."""
    q, k, v = make_qkv("randn", 1, 2, 2, 70, 130, 64, device=device)
    # Factors of channels are of all rows.
    given: dict[str, Any] = {**norms(span, 2, 2, 64, device=device), "recipe": replace(ha.BALANCED, equalise=False)}
    clean = ha.attention(q, k, v, **given)
    q[0, 1, 5, 3] = value
    out = ha.attention(q, k, v, **given)
    hit = torch.zeros(2, 70, dtype=torch.bool, device=device)
    hit[1, 5] = True
    if value != value and span == "heads":
        hit[0, 5] = True
    assert out[0][hit].isnan().all()
    other = ~hit
    other[:, 5] &= span == "head"
    assert torch.equal(out[0][other], clean[0][other])
    k[0, 1, 9, 3] = value
    assert ha.attention(q, k, v, **given)[0, 1].isnan().all()


def test_the_reference_is_torch_s() -> None:
    x = torch.randn(2, 3, 5, 16, dtype=torch.float64)
    weight = torch.randn(48, dtype=torch.float64)
    by_head = torch.nn.functional.rms_norm(x, (16,), weight[:16], 1e-3)
    tokens = torch.nn.functional.rms_norm(x.transpose(1, 2).flatten(2), (48,), weight, 1e-3)
    torch.testing.assert_close(rms_norm(x, ha.RMSNorm(weight[:16], 1e-3)), by_head)
    torch.testing.assert_close(
        rms_norm(x, ha.RMSNorm(weight, 1e-3)), tokens.unflatten(2, (3, 16)).transpose(1, 2)
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"norm\.weight has shape \(47,\); it must be \(16,\), or \(48,\)"):
        rms_norm(x, ha.RMSNorm(weight[:47]))


@pytest.mark.parametrize("span", ["head", "heads"])
@pytest.mark.parametrize("what", ["no_norm", "other_span", "large_eps", "after_rope"])
def test_wrong_norms_exceed_the_budget(what: str, span: str, device: str) -> None:
    rope = tables(200, 64, device=device)
    # Heads of different sizes, or both spans would be nearly one.
    q, k, v = make_qkv("randn", 1, 2, 2, 70, 200, 64, torch.float32, device)
    sizes = torch.tensor([0.5, 2.0], device=device).view(1, 2, 1, 1)
    given = norms(span, 2, 2, 64, device=device)
    healthy = make_case((q * sizes, k * sizes, v), rope=rope, **given)
    healthy.assert_within_budget(ha.attention(*healthy.qkv, rope=rope, **given, out_dtype=torch.float32))
    options: dict[str, Any] = {"rope": rope, **given}
    qkv = healthy.qkv
    for name, norm in given.items():
        if what == "no_norm":
            options[name] = None
        elif what == "other_span":
            weight = norm.weight.repeat(2) if span == "head" else norm.weight[:64]
            options[name] = ha.RMSNorm(weight, norm.eps)
        elif what == "large_eps":
            options[name] = ha.RMSNorm(norm.weight, 1.0)
    if what == "after_rope":
        rotated = apply_rope_qk(*qkv[:2], rope)
        qkv, options["rope"] = (rotated[0].float(), rotated[1].float(), v), None
    with pytest.raises(AssertionError, match="budget"):
        healthy.assert_within_budget(ha.attention(*qkv, **options, out_dtype=torch.float32))


def test_plan_and_check(device: str) -> None:
    rope = tables(200, 64, device=device)
    q, k, v = make_qkv("randn", 1, 4, 2, 70, 200, 64, device=device)
    given: dict[str, Any] = {"rope": rope, **norms("heads", 4, 2, 64, device=device)}
    plan = ha.plan(q, k, v, causal=True, **given)
    out, planned = ha.attention(q, k, v, causal=True, **given), plan(q, k, v, **given)
    assert isinstance(planned, torch.Tensor)
    assert torch.equal(planned, out)
    with pytest.raises(
        ValueError, match=r"the plan is for q_norm of RMSNorm\(.* eps=1e-06\), and q_norm is .* eps=0.001\)"
    ):
        plan(q, k, v, **given | {"q_norm": dataclasses.replace(given["q_norm"], eps=1e-3)})
    for options in (given, norms("head", 4, 2, 64, device=device)):
        found = ha.check(q, k, v, causal=True, **options)
        case = make_case((q, k, v), True, **options)
        error = relative_error(ha.attention(q, k, v, causal=True, **options), case.oracle)
        # Of 64 of 70 rows of each head.
        assert abs(found.errors["BALANCED"].total - error) < 0.1 * error
        # The reference is normalised too, or 16 bits would be far off.
        assert found.sixteen_bits.total < 0.01


def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


#: Norms of Q [1, 4, 5, 32], and what is said of them.
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "tensor": (weight(32), TypeError, r"q_norm is a Tensor of torch.bfloat16 \(32,\); it must be None or a .*RMSNorm"),
    "module": (
        torch.nn.RMSNorm(32),
        TypeError,
        r"q_norm is a module, RMSNorm\(\(32,\), .*; it must be None or a helion_attn.RMSNorm: pass helion_attn.RMSN",
    ),
    "list": (ha.RMSNorm([1.0]), TypeError, r"q_norm.weight is a list; it must be a torch.Tensor"),  # type: ignore[arg-type]
    "dtype": (
        ha.RMSNorm(weight(32, dtype=torch.float64)),
        TypeError,
        r"q_norm.weight has dtype torch.float64; it must be one of bfloat16, float16, float32",
    ),
    "size": (
        ha.RMSNorm(weight(64)),
        ValueError,
        r"q_norm.weight has shape \(64,\); it must be \(32,\), for every head of q, or \(128,\), for its 4 heads",
    ),
    "rank": (ha.RMSNorm(weight(4, 32)), ValueError, r"q_norm.weight has shape \(4, 32\); it must be \(32,\)"),
    "strided": (ha.RMSNorm(weight(32, 2)[:, 0]), ValueError, r"q_norm.weight has strides \(2,\) on cpu; it must be"),
    "device": (ha.RMSNorm(weight(32).to("meta")), ValueError, r"q_norm.weight has strides .* on meta; .* on cpu"),
    "eps_type": (ha.RMSNorm(weight(32), None), TypeError, r"q_norm.eps is a NoneType; it must be a float"),  # type: ignore[arg-type]
    "eps_bool": (ha.RMSNorm(weight(32), True), TypeError, r"q_norm.eps is a bool; it must be a float"),
    "no_eps": (ha.RMSNorm(weight(32), 0.0), ValueError, r"q_norm.eps is 0.0; it must lie in 1e-12..1"),
    "large_eps": (ha.RMSNorm(weight(32), 2.0), ValueError, r"q_norm.eps is 2.0; it must lie in 1e-12..1"),
    "nan_eps": (ha.RMSNorm(weight(32), float("nan")), ValueError, r"q_norm.eps is nan"),
}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("what", BAD)
def test_bad_norms(what: str, layout: Any) -> None:
    norm, error, message = BAD[what]
    q, k = torch.zeros(1, 4, 5, 32), torch.zeros(1, 2, 7, 32)
    if layout == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    for call in (ha.attention, ha.quantize):
        with pytest.raises(error, match=message) as raised:
            call(q, k, k, q_norm=norm, layout=layout)
        assert type(raised.value) is error


def test_quantising_has_no_gradient_of_a_weight() -> None:
    q, k = torch.zeros(1, 4, 5, 32), torch.zeros(1, 2, 7, 32)
    with pytest.raises(RuntimeError, match=r"q_norm.weight requires grad"):
        ha.quantize(q, k, k, q_norm=ha.RMSNorm(weight(32).requires_grad_()))


def test_norm_of_k_counts_its_own_heads() -> None:
    q, k = torch.zeros(1, 4, 5, 32), torch.zeros(1, 2, 7, 32)
    with pytest.raises(
        ValueError, match=r"k_norm.weight has shape \(128,\); .* every head of k, or \(64,\), for its 2"
    ):
        ha.attention(q, k, k, k_norm=ha.RMSNorm(weight(128)))
    ha.quantize(q, k, k, k_norm=ha.RMSNorm(weight(64)))


def test_strided_channels_are_refused() -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 20, 30, 32)
    with pytest.raises(ValueError, match=r"k has a last-dimension stride of 30; with k_norm it must be 1"):
        ha.quantize(q, k.mT.contiguous().mT, v, k_norm=ha.RMSNorm(weight(32)))


def test_prints_short() -> None:
    assert repr(ha.RMSNorm(weight(32), 1e-5)) == "RMSNorm(weight=bfloat16[32], eps=1e-05)"
