"""Elementwise steps that are one instruction when spelt in PTX and several when spelt in PyTorch.

Kernels take `is_cuda: hl.constexpr` and pass it on: Helion's interpreter has no inline assembly and runs the PyTorch
expression, which gives the same numbers.
"""

from __future__ import annotations

import torch

from helion_attn.kernels.helion_compat import hl


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


def tanh(x: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """`tanh(x)`, on the GPU with a relative error of up to 2**-11 (PTX ISA, `tanh.approx.f32`): one MUFU."""
    if is_cuda:
        return hl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=torch.float32, is_pure=True, pack=1
        )
    return torch.tanh(x)


def dot_fp32(a: torch.Tensor, b: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """`a @ b` of 16-bit tensors with an fp32 result. On the CPU, PyTorch rounds such a product to 16 bits."""
    if is_cuda:
        return hl.dot(a, b, out_dtype=torch.float32)
    return a.to(torch.float32) @ b.to(torch.float32)
