"""RMSNorm of the rows that a preprocessing kernel has loaded, in fp32, before they are rotated."""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import hl

#: Which channels share a mean of squares, as the kernels are told: a head's, or a token's of all heads. Kernels compare
#: `normed` with the numbers: to Helion a module's ints are run-time symbols.
NO_NORM, BY_HEAD, OVER_HEADS = 0, 1, 2


class Norm(NamedTuple):
    """An RMSNorm of Q or K, or its absence, as the kernels take it."""

    weight: torch.Tensor  # [D], or [heads * D] if over heads
    factors: torch.Tensor  # fp32 [B * S] if over heads: `1 / sqrt(mean of squares + eps)` of each token
    normed: int  # NO_NORM, BY_HEAD or OVER_HEADS
    eps: float  # what is added to the mean of squares


class Norms(NamedTuple):
    """The norms of Q and K."""

    q: Norm
    k: Norm


def no_norms(unused: torch.Tensor) -> Norms:
    """Return what stands for no norm of rows; `unused` stands for tensors that are not read."""
    norm = Norm(unused, unused, NO_NORM, 1.0)
    return Norms(norm, norm)


def row_factors(
    factors: torch.Tensor,  # [B * S] if over heads
    squares: torch.Tensor,  # [n, any], whose sum counts; not read if over heads
    first_factor: int,
    rows: torch.Tensor,  # [n]
    size: int,
    d: int,
    normed: hl.constexpr,
    eps: hl.constexpr,
) -> torch.Tensor:
    """Factors that normalise rows, fp32 [n]; rows past the end have one with an inverse. Inlined into kernels."""
    if normed == 2:  # OVER_HEADS
        return hl.load(factors, [first_factor + rows], extra_mask=rows < size) + (rows >= size).to(torch.float32)
    return torch.rsqrt(squares.sum(1) * (1.0 / d) + eps)


def channel_weights(
    weight: torch.Tensor,
    first_weight: int,
    cols: torch.Tensor,  # [n]
    end: int,
) -> torch.Tensor:
    """Weights of channels 0 .. end - 1 of a head, fp32 [1, n]; 0 of others. Inlined into kernels."""
    inside = (cols >= 0) & (cols < end)
    return hl.load(weight, [first_weight + cols], extra_mask=inside).to(torch.float32).unsqueeze(0)
