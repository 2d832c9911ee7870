"""Factors that give Q and K channels of like size: q[c] * s_c and k[c] / s_c, with the same Q K^T.

    size of q_c = (sum q_c**4)**(1/4) over sampled rows; of k_c, whose mean is subtracted, of k_c - k'_c over pairs of
                  rows; each of every second row alone, the smaller
    r_c = size of k_c / size of q_c, divided by its geometric mean over channels;  s_c = 2**round(log2(r_c) / 2)
    log2 of a size is linear between powers of two; s_c = 1 where |log2(r_c)| < SIGNIFICANT_RATIO_LOG2 / rows

Rows share one 8-bit scale, which a few large channels of K would take for themselves. The scale follows a row's largest
entries, as fourth powers do, which count for nothing from 2**32 on and are 0 below 2**-37. SmoothQuant
(arXiv:2211.10438) moves such scales from activations to weights; between Q and K both sides have them. Powers of two
leave 16-bit numbers exact. One huge key, such as an attention sink, decides nothing, since half of the rows are without
it.
"""

from __future__ import annotations

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.numerics import MAX_CHANNEL_FACTOR_LOG2, SIGNIFICANT_RATIO_LOG2


def finite_fourth_power(x: torch.Tensor) -> torch.Tensor:
    """Return x**4, 0 of what is not finite, so that a row with a NaN moves no factor much. Inlined into kernels."""
    square = x * x
    fourth = square * square
    return torch.where(fourth < float("inf"), fourth, 0.0)


def channel_sizes(
    k: torch.Tensor,  # [n, D_row]
    q: torch.Tensor,  # [n, D_row]
    n: int,
    d_row: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fourth powers of sizes of channels, [D_row] each, of differences of K's rows and of Q's rows. Inlined."""
    # [n, D_row, 2]: one exchange between warps for both.
    both = hl.join(finite_fourth_power(k), finite_fourth_power(q))
    return hl.split(torch.amin(both.reshape(n // 2, 2, d_row, 2).sum(0), 0))


def channel_factors_of(
    k_size: torch.Tensor,  # [D_row], its fourth power, and so of Q
    q_size: torch.Tensor,  # [D_row]
    rows: torch.Tensor,  # [], that the sizes are of
) -> torch.Tensor:
    """Return the factors s_c, [D_row]; 1 where a size is 0 or not finite. Inlined into kernels."""
    infinite = float("inf")
    known = (k_size > 0.0) & (q_size > 0.0) & (k_size < infinite) & (q_size < infinite)
    # The bits of a float are its log2, times 2**23, but for .09 at most: of a fourth power four times that of the size.
    distance = (k_size.view(torch.int32) - q_size.view(torch.int32)).to(torch.float32) * 2.0**-25
    ratio = torch.where(known, distance, 0.0)
    mean = ratio.sum(0) / torch.clamp_min(known.to(torch.float32).sum(0), 1.0)
    apart = ratio - mean
    significant = known & (torch.abs(apart) * rows >= SIGNIFICANT_RATIO_LOG2)
    exponent = torch.where(significant, torch.round(apart * 0.5), 0.0)
    exponent = torch.clamp(exponent, -MAX_CHANNEL_FACTOR_LOG2, MAX_CHANNEL_FACTOR_LOG2)
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
