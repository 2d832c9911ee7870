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
    e4m3_of_bits,
    e4m3_of_half_line,
    fma,
    halves_of_pair,
    largest_of_pairs,
    line_of_pairs,
    maximum,
    minimum,
    pair_of_halves,
)
from helion_attn.kernels.lib.specs import AttentionSpec
from helion_attn.numerics import E4M3_BITS_OF_ONE, E4M3_STEPS, FP16_LARGE, FP16_TINY, FP32_TINY


def in_fp16_steps(scale_log2: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """A scale, [bm] or [], as `E4M3_STEPS` of it are in fp16: scores in fp16 are multiplied by these."""
    steps = minimum(scale_log2 * E4M3_STEPS, hl.full([], FP16_LARGE, dtype=torch.float32), is_cuda)
    rounded = steps.to(torch.float16).to(torch.float32) * (1.0 / E4M3_STEPS)
    return maximum(rounded, hl.full([], FP32_TINY, dtype=torch.float32), is_cuda)


def pack_half2(s: torch.Tensor, bm: int, bn: int, is_cuda: hl.constexpr) -> torch.Tensor:
    """Scores in fp16, [bm, bn], as int32 [bm, bn / 2]: what a branch gives is then registers, not their halves."""
    if is_cuda:
        return pair_of_halves(*hl.split(s.reshape(bm, bn // 2, 2)))
    return s


def unpack_half2(s: torch.Tensor, bm: int, bn: int, half: hl.constexpr, is_cuda: hl.constexpr) -> torch.Tensor:
    """Scores one by one, [bm, bn], which with `half` are `pack_half2`."""
    if half and is_cuda:
        return hl.join(*halves_of_pair(s)).reshape(bm, bn)
    return s


def largest_scores(
    s: torch.Tensor,  # [bm, bn], or with half_scores `pack_half2`
    bm: int,
    bn: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """The largest score of a row, fp32 [bm], `softmax_bias` too large as they are."""
    if spec.softmax_bias:
        # Positive, and so in the order of their bits: of integers, an instruction compares three.
        return torch.amax(s.view(torch.int32), 1).view(torch.float32)
    if spec.half_scores and spec.is_cuda:
        pairs = bn // 2
        while pairs > 4:
            pairs //= 4
            s = largest_of_pairs(
                [x for both in column_halves(s, bm, 2 * pairs) for x in column_halves(both, bm, pairs)]
            )
        s = unpack_half2(s, bm, 2 * pairs, spec.half_scores, spec.is_cuda)
    return torch.amax(s.to(torch.float32), 1)


def column_halves(
    x: torch.Tensor,  # [bm, 2 * columns]
    bm: int,
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first half of the columns, and the other."""
    return hl.split(x.reshape(bm, 2, columns).permute(0, 2, 1))


def wide_scores(
    s: torch.Tensor,  # [bm, bn], or with half_scores `pack_half2`
    scale_log2: torch.Tensor,  # [bm] or []
    largest: torch.Tensor,  # [bm]
    top: torch.Tensor,  # [bm]
    m_i: torch.Tensor,  # [bm]
    bm: int,
    bn: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Scores in base 2 less m_i, from what they are below their row's largest, which is exact near it.

    The largest is `p_offset_log2` above its own reference `top`, or less, where fp32 has no such difference. Inline
    assembly keeps LLVM from computing this where it is not asked for.
    """
    # Of a row that sees no key of the block, the largest is -inf, and so are all.
    finite_largest = torch.where(largest == float("-inf"), 0.0, largest)
    above = fma(finite_largest - spec.softmax_bias, scale_log2, -top, spec.is_cuda)
    above = maximum(above, hl.full([], 0.0, dtype=torch.float32), spec.is_cuda)
    above = minimum(above, hl.full([], spec.p_offset_log2, dtype=torch.float32), spec.is_cuda) + (top - m_i)
    scale, above = columns(scale_log2, spec.softmax_row_descales), above.unsqueeze(1)
    if spec.half_scores and spec.is_cuda:
        rows = (finite_largest.unsqueeze(1), in_layout_of(scale, m_i.unsqueeze(1)), above)
        finite_largest, scale, above = (x.to(torch.float16).expand(bm, bn // 2) for x in rows)
        return line_of_pairs(
            s,
            pair_of_halves(finite_largest, finite_largest),
            pair_of_halves(scale, scale),
            pair_of_halves(above, above),
        )
    below = s.to(torch.float32) - finite_largest.unsqueeze(1)
    return fma(below, scale, above, spec.is_cuda).to(s.dtype)


def p_of_scores(
    s: torch.Tensor,  # [bm, bn], or with half_scores `pack_half2`
    scale_log2: torch.Tensor,  # [bm] or []
    m_i: torch.Tensor,  # [bm]
    wide: torch.Tensor,  # []
    bm: int,
    bn: int,
    spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(P, m_i)`: 2**((s - softmax_bias) * scale_log2 - m_i) in e4m3, [bm, bn], keys in V's order, and its reference.

    If `wide`, s are `wide_scores`. Scores in fp16 take a line in fp16, whose offset is rounded: the reference with it.
    """
    half, is_cuda = spec.half_scores, spec.is_cuda
    offset = E4M3_BITS_OF_ONE - (m_i + spec.softmax_bias * scale_log2) * E4M3_STEPS
    offset = torch.where(wide > 0, E4M3_BITS_OF_ONE, offset)
    scale = torch.where(wide > 0, 1.0, scale_log2) * E4M3_STEPS
    if half:
        # Where a row's other blocks are far above this one, or it has seen no key, P is 0.
        offset = maximum(offset, hl.full([], -FP16_LARGE, dtype=torch.float32), is_cuda)
        offset = minimum(offset, hl.full([], FP16_LARGE, dtype=torch.float32), is_cuda)
        rounded = offset.to(torch.float16).to(torch.float32)
        m_i = m_i + (offset - rounded) * (1.0 / E4M3_STEPS)
        offset = rounded
        # So that masked scores stay -inf.
        scale = maximum(scale, hl.full([], FP16_TINY, dtype=torch.float32), is_cuda)
    return p_of_line(s, scale, offset, bm, bn, spec), m_i


def p_of_line(
    s: torch.Tensor,  # [bm, bn], or with half_scores `pack_half2`
    scale: torch.Tensor,  # [bm] or []
    offset: torch.Tensor,  # [bm]
    bm: int,
    bn: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """P in e4m3, [bm, bn], keys in V's order: its bits are s * scale + offset, with `half_scores` numbers of fp16."""
    half, is_cuda = spec.half_scores, spec.is_cuda
    scale = columns(scale, spec.softmax_row_descales)
    offset = offset.unsqueeze(1)
    if half and is_cuda:
        fours, scale, offset = (
            by_fours(x.expand(bm, bn), bm, bn)
            for x in (unpack_half2(s, bm, bn, half, is_cuda), in_layout_of(scale, offset), offset)
        )
        p8 = e4m3_of_half_line(fours, scale, offset)
    else:
        p8 = e4m3_of_bits(by_fours(s * scale + offset, bm, bn), is_cuda)
    return p8.reshape(bm, bn)


def in_layout_of(scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A scale, [bm, 1] or [], as [bm, 1]; a sum has one layout, that of `rows`, which are finite or all is NaN.

    Triton would convert the scale of rows that the kernel quantises in every block, through shared memory.
    """
    return scale + rows * 0.0


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
