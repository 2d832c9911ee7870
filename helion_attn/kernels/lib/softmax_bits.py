"""P in e4m3 straight from scores, with no exponential: inlined into the attention kernels.

e4m3's bits, read as an integer, are 8 * (exponent + 7) + 8 * mantissa: linear in the logarithm but for the mantissa's
log2(1 + f) - f, at most 0.086. So P = 2**x has, rounded, the bits

    y = 8 * x + 55.54                     one FMA from a score; 55.54 is `numerics.E4M3_BITS_OF_ONE`

which is what Schraudolph (Neural Computation 11(4), 1999) does for floats. Rounding P to three bits of mantissa loses
as much as that line does. The row sums are of the same P, so what is too large in P V is too large in them.
"""

from __future__ import annotations

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.inline_asm import e4m3_of_bits
from helion_attn.numerics import E4M3_BITS_OF_ONE, E4M3_STEPS


def largest_scores(
    s: torch.Tensor,  # [bm, bn]
    bias: hl.constexpr,
) -> torch.Tensor:
    """The largest score of a row, [bm], `bias` too large as they are."""
    if bias:
        # Positive, and so in the order of their bits: of integers, an instruction compares three.
        return torch.amax(s.view(torch.int32), 1).view(torch.float32)
    return torch.amax(s, 1)


def bits_of_wide_scores(
    s: torch.Tensor,  # [bm, bn]
    largest: torch.Tensor,  # [bm]
    scale_log2: torch.Tensor,  # [bm] or []
    below_reference: torch.Tensor,  # [bm]
    q_row_descales: hl.constexpr,
) -> torch.Tensor:
    """y of scores whose scale is too large for one FMA: what they are below the largest is exact.

    `below_reference`: the largest, in base 2, less P's reference.
    """
    # A row that sees no key of this block.
    known = torch.where(largest == float("-inf"), 0.0, largest)
    below = (s - known.unsqueeze(1)) * columns(scale_log2, q_row_descales)
    return (below + below_reference.unsqueeze(1)) * E4M3_STEPS + E4M3_BITS_OF_ONE


def p_of_bits(
    s: torch.Tensor,  # [bm, bn]
    bias: float,
    scale_log2: torch.Tensor,  # [bm] or []
    m_ref: torch.Tensor,  # [bm]
    wide: torch.Tensor,  # []
    bm: int,
    bn: int,
    q_row_descales: hl.constexpr,
    is_cuda: hl.constexpr,
) -> torch.Tensor:
    """P = 2**((s - bias) * scale_log2 - m_ref) in e4m3, [bm, bn], its keys in V's order; if `wide`, s is y already."""
    scale = torch.where(wide > 0, 1.0, scale_log2 * E4M3_STEPS)
    offset = torch.where(wide > 0, 0.0, E4M3_BITS_OF_ONE - (m_ref + bias * scale_log2) * E4M3_STEPS)
    y = s * columns(scale, q_row_descales) + offset.unsqueeze(1)
    # [bm, bn / 16, 4, 2, 2]: last the four scores of a row that one register of P holds, see `interleave_keys`.
    even, odd = hl.split(y.reshape(bm, bn // 16, 2, 4, 2).permute(0, 1, 3, 2, 4))
    (low_even, high_even), (low_odd, high_odd) = hl.split(even), hl.split(odd)
    fours = hl.join(hl.join(low_even, high_even), hl.join(low_odd, high_odd))
    return e4m3_of_bits(fours, is_cuda).reshape(bm, bn)


def columns(scale: torch.Tensor, of_rows: hl.constexpr) -> torch.Tensor:
    """A scale of rows, [bm], as [bm, 1]; one of a block, [], as it is."""
    if of_rows:
        return scale.unsqueeze(1)
    return scale


def row_sums(p8: torch.Tensor) -> torch.Tensor:
    """Sums of P's rows, [bm, bn] to fp32 [bm]. A pass has P V's product make them: `passes.row_sums`."""
    return p8.to(torch.float32).sum(1)
