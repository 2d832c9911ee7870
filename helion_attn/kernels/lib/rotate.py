"""The Hadamard rotation of rows that a preprocessing kernel has loaded. Inlined into kernels."""

from __future__ import annotations

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.inline_asm import dot_fp32


def multiply_rows(
    x: torch.Tensor,  # [n, side]
    matrix: torch.Tensor,  # [side, side]
    two_terms: hl.constexpr,
    is_cuda: hl.constexpr,
) -> torch.Tensor:
    """`x @ matrix` in fp32, of x rounded to the matrix's dtype, or as two terms of it."""
    high = x.to(matrix.dtype)
    y = dot_fp32(high, matrix, is_cuda)
    if two_terms:
        y = y + dot_fp32((x - high.to(torch.float32)).to(matrix.dtype), matrix, is_cuda)
    return y


def rotate_rows(
    x: torch.Tensor,  # [n, D_row]
    signs: torch.Tensor,  # [D_row], loaded
    matrix: torch.Tensor,  # [side, side], loaded
    norm: float,
    n: int,
    d_row: int,
    side: int,
    two_terms: hl.constexpr,
    is_cuda: hl.constexpr,
) -> torch.Tensor:
    """Rows of fp32 rotated, fp32 [n, D_row]. Inlined into kernels.

    Args:
        signs: what channels are multiplied by first, as `with_factors` has it.
        two_terms: x is rounded to two terms of the matrix's dtype, not one: for tensors that are not bf16.
    """
    # A row of 256 channels is two rows of 128.
    chunks = d_row // side
    if chunks > 1:
        x = x * signs.to(torch.float32).unsqueeze(0)
    y = multiply_rows(x.reshape(n * chunks, side), matrix, two_terms, is_cuda)
    return y.reshape(n, d_row) * norm


def with_factors(
    matrix: torch.Tensor,  # [side, side], loaded
    signs: torch.Tensor,  # [D_row]
    channel_factor: torch.Tensor,  # [D_row], loaded, if equalise
    d_row: int,
    side: int,
    equalise: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a head's matrix and signs, loaded, that multiply channels by its factors first: exact in bf16. Inlined.

    A matrix that mixes all channels has their factors, so that rows need no product.
    """
    of_channels = channel_factor
    if side < d_row:
        of_channels = hl.load(signs, [hl.arange(d_row)])
        if equalise:
            of_channels = of_channels * channel_factor
    elif equalise:
        matrix = (matrix.to(torch.float32) * channel_factor.unsqueeze(1)).to(matrix.dtype)
    return matrix, of_channels.to(matrix.dtype)


def rotate_mean(
    mean: torch.Tensor,  # [side]
    matrix: torch.Tensor,  # [side, side], loaded
    norm: float,
) -> torch.Tensor:
    """A mean rotated in fp32 throughout, [side]; of rows that are one row of the matrix. Inlined into kernels."""
    return (mean.unsqueeze(1) * matrix.to(torch.float32)).sum(0) * norm
