"""Elementwise steps that are one instruction when spelt in PTX and several when spelt in PyTorch.

Kernels take `is_cuda: hl.constexpr` and pass it on: Helion's interpreter has no inline assembly and runs the PyTorch
expression, which gives the same numbers.
"""

from __future__ import annotations

import torch

from helion_attn.compiler.helion_adapter import hl


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """`a * b + c`. In the attention kernel, 160 registers at D = 128 instead of 217: three programs an SM, not two."""
    if is_cuda:
        return hl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=torch.float32, is_pure=True, pack=1
        )
    return a * b + c


def fma_up(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """`a * b + c`, rounded up, which takes nothing more. Without a GPU `c` is not positive, and few are rounded up."""
    if is_cuda:
        return hl.inline_asm_elementwise(
            "fma.rp.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=torch.float32, is_pure=True, pack=1
        )
    product = a * b
    rounded = product + c
    return torch.where(rounded - product < c, product, rounded)


def maximum(a: torch.Tensor, b: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """`max(a, b)`, NaN if either is. PyTorch's spelling compiles to two comparisons and a select."""
    if is_cuda:
        return hl.inline_asm_elementwise(
            "max.NaN.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=torch.float32, is_pure=True, pack=1
        )
    return torch.maximum(a, b)


def minimum(a: torch.Tensor, b: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """`min(a, b)`, NaN if either is."""
    if is_cuda:
        return hl.inline_asm_elementwise(
            "min.NaN.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=torch.float32, is_pure=True, pack=1
        )
    return torch.minimum(a, b)


def high_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The high 32 bits of the product of int32 scalars, both taken as unsigned; on the GPU alone."""
    return hl.inline_asm_elementwise(
        "mul.hi.u32 $0, $1, $2;", "=r,r,r", [a, b], dtype=torch.int32, is_pure=True, pack=1
    )


def to_int8(x: torch.Tensor, scale: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """`x * scale`, of magnitude 127 or less, to the nearest int8, to even of two; of NaN anything.

    1.5 * 2**23 + x * scale has the integer in its lowest byte: an FMA, and three instructions pack four. PyTorch's
    spelling is a product, four conversions, at a quarter of an addition's rate, and twelve instructions.
    """
    if is_cuda:
        return hl.inline_asm_elementwise(
            """
            {
            .reg .f32 sum<4>;
            .reg .b32 bits<4>, low, high;
            fma.rn.f32 sum0, $1, $5, 0f4B400000;
            fma.rn.f32 sum1, $2, $6, 0f4B400000;
            fma.rn.f32 sum2, $3, $7, 0f4B400000;
            fma.rn.f32 sum3, $4, $8, 0f4B400000;
            mov.b32 bits0, sum0;
            mov.b32 bits1, sum1;
            mov.b32 bits2, sum2;
            mov.b32 bits3, sum3;
            prmt.b32 low, bits0, bits1, 0x0040;
            prmt.b32 high, bits2, bits3, 0x0040;
            prmt.b32 $0, low, high, 0x5410;
            }
            """,
            "=r,f,f,f,f,f,f,f,f",
            [x, scale],
            dtype=torch.int8,
            is_pure=True,
            pack=4,
        )
    return torch.round(x * scale).to(torch.int8)


def e4m3_of_bits(y: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """The e4m3 numbers whose bits are y, up to 126, to the nearest, to even of two; 0 below, NaN of NaN.

    fp16 has integers as its steps from 1024 on: rounded there, a number has its bits in its low byte.
    """
    if is_cuda:
        return hl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, integers;
            mov.b32 integers, 0x64006400;
            cvt.rn.relu.f16x2.f32 low, $2, $1;
            cvt.rn.relu.f16x2.f32 high, $4, $3;
            add.rn.f16x2 low, low, integers;
            add.rn.f16x2 high, high, integers;
            prmt.b32 $0, low, high, 0x6420;
            }
            """,
            "=r,f,f,f,f",
            [y],
            dtype=torch.float8_e4m3fn,
            is_pure=True,
            pack=4,
        )
    bits = torch.round(torch.clamp_min(y, 0.0).to(torch.float16).to(torch.float32))
    return torch.where(y == y, bits, 127.0).to(torch.uint8).view(torch.float8_e4m3fn)


def e4m3_of_half_line(s: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """`e4m3_of_bits(s * scale + offset)` of scores in fp16, two at a time; on the GPU alone.

    Scale and offset, in fp32, are numbers of fp16, of one row in every four.
    """
    return hl.inline_asm_elementwise(
        """
        {
        .reg .b32 scale, offset, low, high, integers;
        mov.b32 integers, 0x64006400;
        cvt.rn.f16x2.f32 scale, $3, $3;
        cvt.rn.f16x2.f32 offset, $7, $7;
        fma.rn.relu.f16x2 low, $1, scale, offset;
        fma.rn.relu.f16x2 high, $2, scale, offset;
        add.rn.f16x2 low, low, integers;
        add.rn.f16x2 high, high, integers;
        prmt.b32 $0, low, high, 0x6420;
        }
        """,
        "=r,r,r,f,f,f,f,f,f,f,f",
        [s, scale, offset],
        dtype=torch.float8_e4m3fn,
        is_pure=True,
        pack=4,
    )


def pair_of_halves(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Two numbers in fp16 as the int32 that a register has them in; on the GPU alone."""
    return hl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=torch.int32, is_pure=True, pack=1
    )


def halves_of_pair(pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two numbers of `pair_of_halves`; on the GPU alone."""
    return hl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], dtype=(torch.float16, torch.float16), is_pure=True, pack=1
    )


def line_of_pairs(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """`(a - b) * scale + offset` of `pair_of_halves`; on the GPU alone."""
    return hl.inline_asm_elementwise(
        "{ .reg .b32 below; sub.rn.f16x2 below, $1, $2; fma.rn.f16x2 $0, below, $3, $4; }",
        "=r,r,r,r,r",
        [a, b, scale, offset],
        dtype=torch.int32,
        is_pure=True,
        pack=1,
    )


def largest_of_pairs(pairs: list[torch.Tensor]) -> torch.Tensor:
    """The largest of four `pair_of_halves`, low and high ones apart: three in one instruction; on the GPU alone."""
    return hl.inline_asm_elementwise(
        """
        {
        .reg .b32 largest;
        max.f16x2 largest, $1, $2;
        max.f16x2 largest, largest, $3;
        max.f16x2 $0, largest, $4;
        }
        """,
        "=r,r,r,r,r",
        pairs,
        dtype=torch.int32,
        is_pure=True,
        pack=1,
    )


def tanh(x: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """`tanh(x)`, on the GPU with a relative error of up to 2**-11 (PTX ISA, `tanh.approx.f32`): one MUFU."""
    if is_cuda:
        return hl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=torch.float32, is_pure=True, pack=1
        )
    return torch.tanh(x)


def exp2(x: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """`2**x`; without a GPU correctly rounded, since PyTorch's last digit depends on where an element lies."""
    if is_cuda:
        return torch.exp2(x)
    return torch.exp2(x.to(torch.float64)).to(torch.float32)


def computed_once(x: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """`x`, which is not computed again in another layout: see the pass of that name."""
    if is_cuda:
        return hl.inline_asm_elementwise(
            "mov.b32 $0, $1; // computed once", "=f,f", [x], dtype=torch.float32, is_pure=True, pack=1
        )
    return x


def in_new_registers(x: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """`x`, in other registers: what follows needs more, and ptxas would keep one value in memory all its life.

    Not by a move, which ptxas propagates.
    """
    if is_cuda:
        return hl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $1, $1, 0xFE;", "=f,f", [x], dtype=torch.float32, is_pure=False, pack=1
        )
    return x


def opaque_copy(x: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """`x` of int32, as a value that compilers do not trace back: what is computed from it is computed anew.

    So no result from before a loop stays in registers through it. Not a move, which ptxas propagates.
    """
    if is_cuda:
        return hl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $1, $1, 0xFE;", "=r,r", [x], dtype=torch.int32, is_pure=False, pack=1
        )
    return x


def dot_fp32(a: torch.Tensor, b: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """`a @ b` of 16-bit tensors with an fp32 result. On the CPU, PyTorch rounds such a product to 16 bits."""
    if is_cuda:
        return hl.dot(a, b, out_dtype=torch.float32)
    return a.to(torch.float32) @ b.to(torch.float32)
