"""RMSNorm of the rows that a preprocessing kernel has loaded, in fp32, before they are rotated."""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.strided import load_rows

#: Which channels share a mean of squares, as the kernels are told: a head's, or a token's of all heads. Kernels compare
#: `normed` with the numbers: to Helion a module's ints are run-time symbols.
NO_NORM, BY_HEAD, OVER_HEADS = 0, 1, 2


class Norm(NamedTuple):
    """An RMSNorm of Q or K, or its absence, as the kernels take it.

    Attributes:
        weight: [D], or [heads * D] if over heads.
        factors: fp32 [B * S] if over heads: `1 / sqrt(mean of squares + eps)` of each token.
        normed: NO_NORM, BY_HEAD or OVER_HEADS.
        eps: what is added to the mean of squares.
    """

    weight: torch.Tensor
    factors: torch.Tensor
    normed: int
    eps: float


class Norms(NamedTuple):
    """Those of Q and K."""

    q: Norm
    k: Norm


def no_norms(unused: torch.Tensor) -> Norms:
    """Neither; `unused` stands for tensors that are not read."""
    norm = Norm(unused, unused, NO_NORM, 1.0)
    return Norms(norm, norm)


def row_factors(
    flat: torch.Tensor,
    factors: torch.Tensor,  # [B * S] if over heads
    head_offset: int,
    first_factor: int,
    rows: torch.Tensor,  # [n]
    row_step: int,
    d_step: int,
    size: int,
    d: int,
    d_row: int,
    in_halves: hl.constexpr,
    normed: hl.constexpr,
    eps: hl.constexpr,
) -> torch.Tensor:
    """What rows are multiplied by, fp32 [n, 1]. Inlined into kernels.

    A norm by head reads the rows once more, of which L1 has them for the kernel: of one read all numbers of a row would
    wait in registers for their sum. `in_halves`: by tiles of half a row, or of a whole one; those of the kernel are the
    others, or the compiler would make one of both reads.
    """
    if normed == 2:  # OVER_HEADS
        return hl.load(factors, [first_factor + rows], extra_mask=rows < size).unsqueeze(1)
    if in_halves:
        # [n, D_row / 2] each
        cols = hl.arange(d_row // 2)
        a = load_rows(flat, head_offset, rows, cols, row_step, d_step, size, d)
        b = load_rows(flat, head_offset, rows, cols + d_row // 2, row_step, d_step, size, d)
        squares = a * a + b * b
    else:
        # [n, D_row]
        x = load_rows(flat, head_offset, rows, hl.arange(d_row), row_step, d_step, size, d)
        squares = x * x
    return torch.rsqrt(squares.sum(1) * (1.0 / d) + eps).unsqueeze(1)


def channel_weights(
    weight: torch.Tensor,
    first_weight: int,
    cols: torch.Tensor,  # [n]
    end: int,
) -> torch.Tensor:
    """Weights of channels 0 .. end - 1 of a head, fp32 [1, n]; 0 of others. Inlined into kernels."""
    inside = (cols >= 0) & (cols < end)
    return hl.load(weight, [first_weight + cols], extra_mask=inside).to(torch.float32).unsqueeze(0)
