"""P in e4m3 straight from scores, with no exponential: inlined into the attention kernels.

e4m3's bits, read as an integer, are 8 * (exponent + 7) + 8 * mantissa: linear in the logarithm but for the mantissa's
log2(1 + f) - f, at most 0.086. So P = 2**x has, rounded, the bits

    y = 8 * x + 55.56                     one FMA from a score; 55.56 is `numerics.E4M3_BITS_OF_ONE`

which is what Schraudolph (Neural Computation 11(4), 1999) does for floats. Rounding P to three bits of mantissa loses
as much as that line does. The row sums are of the same P, so what is too large in P V is too large in them.
"""

from __future__ import annotations

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.inline_asm import (
    difference_of_pairs,
    e4m3_of_bits,
    e4m3_of_half_line,
    halves_of_pair,
    largest_of_pairs,
    maximum,
    minimum,
    pair_of_halves,
)
from helion_attn.numerics import E4M3_BITS_OF_ONE, E4M3_STEPS, FP16_LARGE, FP16_TINY, FP32_TINY


def in_fp16_steps(scale_log2: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """A scale, [bm] or [], as `E4M3_STEPS` of it are in fp16: scores in fp16 are multiplied by these."""
    steps = minimum(scale_log2 * E4M3_STEPS, hl.full([], FP16_LARGE, dtype=torch.float32), is_cuda)
    rounded = steps.to(torch.float16).to(torch.float32) * (1.0 / E4M3_STEPS)
    return maximum(rounded, hl.full([], FP32_TINY, dtype=torch.float32), is_cuda)


def in_pairs(s: torch.Tensor, bm: int, bn: int, is_cuda: hl.constexpr) -> torch.Tensor:
    """Scores in fp16, [bm, bn], as int32 [bm, bn / 2]: what a branch gives is then registers, not their halves."""
    if is_cuda:
        return pair_of_halves(*hl.split(s.reshape(bm, bn // 2, 2)))
    return s


def in_halves(s: torch.Tensor, bm: int, bn: int, half: hl.constexpr, is_cuda: hl.constexpr) -> torch.Tensor:
    """Scores one by one, [bm, bn], which with `half` are `in_pairs`."""
    if half and is_cuda:
        return hl.join(*halves_of_pair(s)).reshape(bm, bn)
    return s


def hidden(
    s: torch.Tensor,  # [bm, bn], or with half `in_pairs`
    visible: torch.Tensor,  # [bm, bn] or [1, bn]
    bm: int,
    bn: int,
    half: hl.constexpr,
    is_cuda: hl.constexpr,
) -> torch.Tensor:
    """Scores, -inf where they are not visible."""
    if half and is_cuda:
        low, high = hl.split(visible.expand(bm, bn).to(torch.int32).reshape(bm, bn // 2, 2))
        # The bits of fp16's -inf are 0xFC00.
        return s & (low * 0xFFFF | high * -0x10000) | (1 - low) * 0xFC00 | (1 - high) * -0x4000000
    return torch.where(visible, s, float("-inf"))


def largest_scores(
    s: torch.Tensor,  # [bm, bn], or with half `in_pairs`
    bias: hl.constexpr,
    bm: int,
    bn: int,
    half: hl.constexpr,
    is_cuda: hl.constexpr,
) -> torch.Tensor:
    """The largest score of a row, fp32 [bm], `bias` too large as they are."""
    if bias:
        # Positive, and so in the order of their bits: of integers, an instruction compares three.
        return torch.amax(s.view(torch.int32), 1).view(torch.float32)
    if half and is_cuda:
        pairs = bn // 2
        while pairs > 4:
            pairs //= 4
            s = largest_of_pairs([x for both in parted(s, bm, 2 * pairs) for x in parted(both, bm, pairs)])
        s = in_halves(s, bm, 2 * pairs, half, is_cuda)
    return torch.amax(s.to(torch.float32), 1)


def parted(
    x: torch.Tensor,  # [bm, 2 * columns]
    bm: int,
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first half of the columns, and the other."""
    return hl.split(x.reshape(bm, 2, columns).permute(0, 2, 1))


def below_largest(
    s: torch.Tensor,  # [bm, bn], or with half `in_pairs`
    largest: torch.Tensor,  # [bm]
    bm: int,
    bn: int,
    half: hl.constexpr,
    is_cuda: hl.constexpr,
) -> torch.Tensor:
    """Scores less their row's largest, exact near it; of a row that sees no key of the block -inf, as they are."""
    known = torch.where(largest == float("-inf"), 0.0, largest)
    if half and is_cuda:
        known = known.to(torch.float16).unsqueeze(1).expand(bm, bn // 2)
        return difference_of_pairs(s, pair_of_halves(known, known))
    return s - known.to(s.dtype).unsqueeze(1)


def p_of_scores(
    s: torch.Tensor,  # [bm, bn], or with half `in_pairs`
    bias: float,
    scale_log2: torch.Tensor,  # [bm] or []
    m_i: torch.Tensor,  # [bm]
    above: torch.Tensor,  # [bm]
    wide: torch.Tensor,  # []
    bm: int,
    bn: int,
    q_row_descales: hl.constexpr,
    half: hl.constexpr,
    is_cuda: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(P, m_i)`: 2**((s - bias) * scale_log2 - m_i) in e4m3, [bm, bn], keys in V's order, and its reference.

    If `wide`, s is below its row's largest, which is `above` m_i. Scores in fp16 take a line in fp16, whose offset is
    rounded: the reference with it.
    """
    scale = scale_log2 * E4M3_STEPS
    offset = E4M3_BITS_OF_ONE - (m_i + bias * scale_log2) * E4M3_STEPS
    offset = torch.where(wide > 0, E4M3_BITS_OF_ONE + above * E4M3_STEPS, offset)
    if half:
        # Where a row's other blocks are far above this one, or it has seen no key, P is 0.
        offset = maximum(offset, hl.full([], -FP16_LARGE, dtype=torch.float32), is_cuda)
        offset = minimum(offset, hl.full([], FP16_LARGE, dtype=torch.float32), is_cuda)
        rounded = offset.to(torch.float16).to(torch.float32)
        m_i = m_i + (offset - rounded) * (1.0 / E4M3_STEPS)
        offset = rounded
        # So that masked scores stay -inf.
        scale = maximum(scale, hl.full([], FP16_TINY, dtype=torch.float32), is_cuda)
    scale = columns(scale, q_row_descales)
    offset = offset.unsqueeze(1)
    if half and is_cuda:
        fours = by_fours(in_halves(s, bm, bn, half, is_cuda), bm, bn)
        scale = by_fours((scale + torch.zeros_like(offset)).expand(bm, bn), bm, bn)
        p8 = e4m3_of_half_line(fours, scale, by_fours(offset.expand(bm, bn), bm, bn))
    else:
        p8 = e4m3_of_bits(by_fours(s * scale + offset, bm, bn), is_cuda)
    return p8.reshape(bm, bn), m_i


def by_fours(x: torch.Tensor, bm: int, bn: int) -> torch.Tensor:
    """[bm, bn] as [bm, bn / 16, 4, 2, 2], in V's order of keys: last the four of a row that one register of P holds."""
    even, odd = hl.split(x.reshape(bm, bn // 16, 2, 4, 2).permute(0, 1, 3, 2, 4))
    (low_even, high_even), (low_odd, high_odd) = hl.split(even), hl.split(odd)
    return hl.join(hl.join(low_even, high_even), hl.join(low_odd, high_odd))


def columns(scale: torch.Tensor, of_rows: hl.constexpr) -> torch.Tensor:
    """A scale of rows, [bm], as [bm, 1]; one of a block, [], as it is."""
    if of_rows:
        return scale.unsqueeze(1)
    return scale


def row_sums(p8: torch.Tensor) -> torch.Tensor:
    """Sums of P's rows, [bm, bn] to fp32 [bm]. A pass has P V's product make them: `passes.row_sums`."""
    return p8.to(torch.float32).sum(1)
