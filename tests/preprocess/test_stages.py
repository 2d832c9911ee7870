"""The public stages of preprocessing, `apply_rope`, `hadamard` and `reflect`, against their fp64 references."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from devtools.sm90 import Sm90Kernel, compile_for_sm90, fake_cuda
from helpers.layouts import LAYOUTS, make_x
from helpers.offline import assert_sound, launching, widths
from helpers.refused import assert_raises
from helpers.rotations import PAIRING, tables

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
SHAPES = pytest.mark.parametrize(
    ("D", "S"),
    [(16, 1), (32, 300), (48, 63), (80, 65), (96, 129), (128, 7), (192, 33), (256, 66), (320, 9), (1024, 10)],
)


def assert_rounds(out: torch.Tensor, expected: torch.Tensor, unrounded: float) -> None:
    """`out` is `expected` [..., D], in fp64, rounded once; before that a row may be off by `unrounded` of its norm."""
    assert out.is_contiguous()
    assert out.shape == expected.shape
    half_an_ulp = torch.finfo(out.dtype).eps / 2
    allowed = half_an_ulp * expected.abs() + (1 + half_an_ulp) * unrounded * expected.norm(dim=-1, keepdim=True)
    # Subnormal fp16 has steps of 2**-24.
    allowed = allowed + torch.finfo(out.dtype).smallest_normal * half_an_ulp
    excess = (out.double() - expected).abs() - allowed
    assert torch.all(excess <= 0), f"off by {excess.max().item():.3g} more than a rounding"


#: What the arithmetic before the rounding may add, of a row's norm: two products and a sum in fp32; the rotation's sum
#: of up to 128 products in fp32; what two terms of bf16 leave of other dtypes; and the reflection's four additions.
ROPE_ERROR, HADAMARD_ERROR, TWO_TERMS_ERROR, REFLECT_ERROR = 2.0**-22, 2.0**-19, 2.0**-18, 2.0**-22


def hadamard_error(dtype: torch.dtype) -> float:
    return HADAMARD_ERROR + (0.0 if dtype == torch.bfloat16 else TWO_TERMS_ERROR)


@pytest.mark.thorough(but=10)
@DTYPES
@SHAPES
def test_rope(
    D: int,
    S: int,
    dtype: torch.dtype,
    device: str,
    poisoned: Callable[[], AbstractContextManager[None]],
) -> None:
    x = make_qkv("outlier", 2, 3, 1, S, 1, D, dtype, device)[0]
    # Each pairing with all channels in one dtype at least, and with half of them in another.
    all_interleaved = dtype == torch.float16
    for rotary, interleaved in ((D, all_interleaved), (D // 2, not all_interleaved)):
        rope = tables(S + 3, rotary, norm=1.4, interleaved=interleaved, device=device)
        with poisoned():
            out = ha.apply_rope(x, rope)
        assert out.dtype == dtype
        assert_rounds(out, ha.reference.apply_rope(x, rope.cos, rope.sin, interleaved), ROPE_ERROR)


@pytest.mark.thorough(but=13)
@pytest.mark.parametrize("seed", [0, 2**63 - 1])
@DTYPES
@SHAPES
def test_hadamard(
    D: int,
    S: int,
    dtype: torch.dtype,
    seed: int,
    device: str,
    poisoned: Callable[[], AbstractContextManager[None]],
) -> None:
    x = make_qkv("outlier", 2, 3, 1, S, 1, D, dtype, device)[0]
    with poisoned():
        out = ha.hadamard(x, seed=seed)
    assert out.dtype == dtype
    assert_rounds(out, ha.reference.hadamard(x, seed), hadamard_error(dtype))


@pytest.mark.thorough(but=13)
@DTYPES
@SHAPES
def test_reflect(
    D: int,
    S: int,
    dtype: torch.dtype,
    device: str,
    poisoned: Callable[[], AbstractContextManager[None]],
) -> None:
    x = make_qkv("outlier", 2, 3, 1, S, 1, D, dtype, device)[0]
    with poisoned():
        out = ha.reflect(x)
    assert out.dtype == dtype
    assert_rounds(out, ha.reference.reflect(x), REFLECT_ERROR)


@pytest.mark.parametrize("D", [17, 18, 19, 43])
def test_channels_of_no_group_are_not_reflected(D: int, device: str) -> None:
    x = make_qkv("randn", 1, 2, 1, 5, 1, D, device=device)[0]
    out = ha.reflect(x)
    assert_rounds(out, ha.reference.reflect(x), REFLECT_ERROR)
    assert torch.equal(out[..., D // 4 * 4 :], x[..., D // 4 * 4 :])
    assert not torch.any(out[..., : D // 4 * 4] == x[..., : D // 4 * 4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, dtype: torch.dtype, device: str) -> None:
    """What may be read in place gives the same as its copy; the rest is refused."""
    x = make_x(layout, dtype, device)
    rope = tables(x.size(2), 32, device=device)
    aligned = x.stride(3) == 1 and all(stride % 4 == 0 for stride in x.stride()[:3])
    if dtype == torch.bfloat16 or aligned:
        assert torch.equal(ha.hadamard(x), ha.hadamard(x.contiguous()))
        assert torch.equal(ha.reflect(x), ha.reflect(x.contiguous()))
    else:
        with pytest.raises(ValueError, match=r"x is float32 with strides"):
            ha.hadamard(x)
    if x.stride(3) == 1 and (dtype == torch.bfloat16 or aligned):
        assert torch.equal(ha.apply_rope(x, rope), ha.apply_rope(x.contiguous(), rope))
    else:
        with pytest.raises(ValueError, match=r"x is float32 with strides|x has a last-dimension stride of"):
            ha.apply_rope(x, rope)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@PAIRING
def test_positions(interleaved: bool, dtype: torch.dtype, device: str) -> None:
    x = make_qkv("randn", 1, 2, 1, 70, 1, 32, device=device)[0]
    rope = tables(90, 32, interleaved=interleaved, device=device)
    at = torch.randperm(90, generator=torch.Generator().manual_seed(0))[:70].to(device, dtype)
    expected = ha.reference.apply_rope(x, rope.cos, rope.sin, interleaved, at.long())
    assert_rounds(ha.apply_rope(x, rope, positions=at), expected, ROPE_ERROR)
    default = torch.arange(70, device=device, dtype=dtype)
    assert torch.equal(ha.apply_rope(x, rope, positions=default), ha.apply_rope(x, rope))
    for outside in (-1, 90):
        moved = at.clone()
        moved[13] = outside
        nan = ha.apply_rope(x, rope, positions=moved).isnan()
        assert nan[:, :, 13].all()
        assert nan.sum() == nan[:, :, 13].sum()


@pytest.mark.thorough(but=7)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@PAIRING
@pytest.mark.parametrize(("D", "rotary"), [(32, 32), (48, 32), (64, 16)])
def test_rope_of_nonfinite(D: int, rotary: int, interleaved: bool, value: float, device: str) -> None:
    for channel in (1, rotary - 1, D - 1):
        x = make_qkv("randn", 1, 2, 1, 70, 1, D, device=device)[0]
        x[0, 1, 33, channel] = value
        rope = tables(70, rotary, interleaved=interleaved, device=device)
        expected = ha.reference.apply_rope(x, rope.cos, rope.sin, interleaved)
        out = ha.apply_rope(x, rope)
        assert not expected.isfinite().all()
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.isinf(), expected.isinf())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("D", [32, 48, 256])
def test_hadamard_of_nonfinite(D: int, value: float, device: str) -> None:
    x = make_qkv("randn", 1, 2, 1, 70, 1, D, device=device)[0]
    clean = ha.hadamard(x)
    x[0, 1, 33, 5] = value
    finite = ha.hadamard(x).isfinite()
    mixed = min(D & -D, 128)
    assert not finite[0, 1, 33, :mixed].any()
    rows = finite.all(3)
    assert (~rows).sum() == 1
    assert torch.equal(ha.hadamard(x)[rows], clean[rows])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("D", [32, 48, 50])
def test_reflection_of_nonfinite(D: int, value: float, device: str) -> None:
    x = make_qkv("randn", 1, 2, 1, 70, 1, D, device=device)[0]
    clean = ha.reflect(x)
    for channel, mixed in ((5, slice(4, 8)), (D - 1, slice(D // 4 * 4, D) if D % 4 else slice(D - 4, D))):
        y = x.clone()
        y[0, 1, 33, channel] = value
        out = ha.reflect(y)
        of_group = torch.zeros_like(y, dtype=torch.bool)
        of_group[0, 1, 33, mixed] = True
        assert not out[0, 1, 33, channel].isfinite()
        if D % 4 == 0 or channel == 5:
            assert not out[of_group].isfinite().any()
        assert torch.equal(out[~of_group], clean[~of_group])


@pytest.mark.thorough(but=1)
@DTYPES
def test_opcheck(dtype: torch.dtype, device: str) -> None:
    x = make_x("bhsd", dtype, device).transpose(1, 2).contiguous().transpose(1, 2)
    rope = tables(x.size(2), 32, device=device)
    at = torch.arange(x.size(2), device=device)
    op = torch.ops.helion_attn.transform_rows.default
    for arguments in (
        (x, None, None, None, None, False, 3, False, False),
        (x, None, None, None, None, False, None, True, False),
        (x, rope.cos, rope.sin, None, None, True, None, False, True),
        (x, rope.cos, rope.sin, at, None, False, None, False, False),
    ):
        torch.library.opcheck(op, arguments)


NO_LAUNCH = pytest.mark.usefixtures("no_launch")


def table(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


GOOD: dict[str, Any] = {"x": torch.zeros(1, 2, 5, 32), "rope": ha.Rope(table(5, 16), table(5, 16))}
POSITIONS = torch.zeros(5, dtype=torch.int64)

#: Arguments that replace good ones.
BAD: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "x_list": ({"x": [1.0]}, TypeError, ["x is a list", "torch.Tensor"]),
    "x_rank": ({"x": table(5, 32)}, ValueError, ["x has shape (5, 32)", "4 dimensions, [B, H, S, D]"]),
    "x_double": ({"x": table(1, 2, 5, 32).double()}, TypeError, ["x has dtype torch.float64", "bfloat16, float16"]),
    "x_empty": ({"x": table(1, 0, 5, 32)}, ValueError, ["x has shape (1, 0, 5, 32)", "at least 1"]),
    "x_small": ({"x": table(1, 2, 5, 8)}, ValueError, ["x has head dim 8", "16..1024"]),
    "x_meta": ({"x": table(1, 2, 5, 32).to("meta")}, NotImplementedError, ["x is on meta", "9.0"]),
    "x_grad": ({"x": table(1, 2, 5, 32).requires_grad_()}, RuntimeError, ["x requires grad"]),
}
BAD_ROPE: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "layout": ({"layout": "sbhd"}, ValueError, ["layout is 'sbhd'", "bshd"]),
    "bshd_is_longer": (
        {"x": table(1, 6, 2, 32), "layout": "bshd"},
        ValueError,
        ["rope.cos has 5 positions", "at least S = 6"],
    ),
    "not_a_rope": ({"rope": (1, 2)}, TypeError, ["rope is a tuple", "helion_attn.Rope"]),
    "too_wide": (
        {"rope": ha.Rope(table(5, 17), table(5, 17))},
        ValueError,
        ["rope.cos has shape (5, 17)", "R <= 32"],
    ),
    "q_positions": (
        {"rope": dataclasses.replace(GOOD["rope"], q_positions=POSITIONS)},
        ValueError,
        ["rope.q_positions is a tensor", "None", "positions of x"],
    ),
    "positions_of_floats": (
        {"positions": table(5)},
        TypeError,
        ["positions is a Tensor of torch.float32", "int32 or int64"],
    ),
    "positions_too_many": (
        {"positions": torch.zeros(6, dtype=torch.int32)},
        ValueError,
        ["positions has shape (6,)", "(5,)"],
    ),
}


@NO_LAUNCH
@pytest.mark.parametrize("what", BAD | BAD_ROPE)
def test_bad_rope(what: str) -> None:
    arguments, error, parts = (BAD | BAD_ROPE)[what]
    assert_raises(ha.apply_rope, GOOD | arguments, error, parts)


@NO_LAUNCH
@pytest.mark.parametrize("what", BAD)
def test_bad_hadamard_and_reflect(what: str) -> None:
    arguments, error, parts = BAD[what]
    assert_raises(ha.hadamard, arguments, error, parts)
    assert_raises(ha.reflect, arguments, error, parts)


@NO_LAUNCH
@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, None, True])
def test_bad_seed(seed: Any) -> None:
    with pytest.raises(ValueError, match=rf"seed is {re.escape(repr(seed))}; it must be an int in 0\.\.2\*\*63 - 1"):
        ha.hadamard(GOOD["x"], seed=seed)
    with pytest.raises(ValueError, match=rf"seed is {re.escape(repr(seed))}; it must be an int in 0\.\.2\*\*63 - 1"):
        ha.hadamard_matrix(32, seed)


@NO_LAUNCH
@pytest.mark.parametrize("D", [17, 81, 1023])
def test_hadamard_of_odd_head_dim(D: int) -> None:
    """Whose largest power of two is 1: nothing would be mixed."""
    with pytest.raises(ValueError, match=rf"x has head dim {D}; it must be even"):
        ha.hadamard(table(1, 2, 5, D).bfloat16())
    with pytest.raises(ValueError, match=rf"D is {D}; it must be even"):
        ha.hadamard_matrix(D)


def compile_stage(D: int, dtype: torch.dtype, stage: Callable[[torch.Tensor], object]) -> Sm90Kernel:
    def launch() -> None:
        with launching():
            stage(fake_cuda(2, 4, 1000, D, dtype=dtype))

    (kernel,) = compile_for_sm90(launch)
    return kernel


@pytest.mark.thorough(but=1)
@PAIRING
@pytest.mark.parametrize("D", [64, 256])
def test_rope_on_sm_90(D: int, interleaved: bool) -> None:
    def stage(x: torch.Tensor) -> None:
        ha.apply_rope(x, ha.Rope(fake_cuda(4096, D // 2), fake_cuda(4096, D // 2), interleaved))

    kernel = compile_stage(D, torch.bfloat16, stage)
    assert_sound(kernel)
    assert widths(kernel, "LDG|LDGSTS") == {16}
    assert widths(kernel, "STG") == {16}
    if not interleaved:
        # Of 8192 bf16 elements and as many bytes of angles again, twice, on 256 threads: nothing is loaded twice.
        assert kernel.opcodes["LDG"] == 8192 * (2 + 2 + 2) // 256 // 16
