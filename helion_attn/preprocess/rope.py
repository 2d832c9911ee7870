"""Rotary position embedding: of the rows that a preprocessing kernel has loaded, and as a function of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.kernels.helion_compat import hl

#: How channels are paired, as the kernels are told.
NO_ROPE, HALF_SPLIT, INTERLEAVED = 0, 1, 2


class RopeTables(NamedTuple):
    """A `Rope`, or its absence, as the kernels take it.

    Attributes:
        cos: [table_rows * rotary / 2].
        sin: likewise.
        q_positions: [M], or anything if not `explicit[0]`.
        k_positions: [N], or anything if not `explicit[1]`.
        explicit: whether Q and K have positions of their own.
        pairing: NO_ROPE, HALF_SPLIT or INTERLEAVED.
        rotary: channels that are rotated.
        table_rows: positions in the table.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    q_positions: torch.Tensor
    k_positions: torch.Tensor
    explicit: tuple[bool, bool]
    pairing: int
    rotary: int
    table_rows: int


def rope_tables(
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_positions: torch.Tensor | None,
    k_positions: torch.Tensor | None,
    interleaved: bool,
    unused: torch.Tensor,
) -> RopeTables:
    """The fields of a `Rope`, or None for each, for the kernels; `unused` stands where there is no tensor."""
    explicit = (q_positions is not None, k_positions is not None)
    q_at = unused if q_positions is None else q_positions
    k_at = unused if k_positions is None else k_positions
    if cos is None or sin is None:
        return RopeTables(unused, unused, q_at, k_at, explicit, NO_ROPE, 0, 0)
    pairing = INTERLEAVED if interleaved else HALF_SPLIT
    return RopeTables(cos.view(-1), sin.view(-1), q_at, k_at, explicit, pairing, 2 * cos.size(1), cos.size(0))


def rope_angles(
    cos: torch.Tensor,  # [table_rows * rotary / 2]
    sin: torch.Tensor,  # [table_rows * rotary / 2]
    positions: torch.Tensor,  # [size], or anything
    rows: torch.Tensor,  # [n]
    first_position: int,
    size: int,
    table_rows: int,
    n: int,
    d_pad: int,
    rotary: int,
    pairing: hl.constexpr,
    explicit: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What channels of rows are multiplied by: they, and their partners. fp32 [n, D_pad] each. Inlined into kernels.

    Row i is at `positions[i]` if `explicit`, otherwise at `first_position + i`. Outside the table the factors are NaN.
    """
    half = rotary // 2
    if explicit:
        at = hl.load(positions, [rows], extra_mask=rows < size).to(torch.int32)
    else:
        at = rows + first_position
    known = ((rows < size) & (at >= 0) & (at < table_rows)).unsqueeze(1)
    base = at.unsqueeze(1) * half
    if pairing == 2:
        i = hl.arange(d_pad // 2)
        inside = (i < half).unsqueeze(0)
        # [n, D_pad / 2]
        c = hl.load(cos, [base + i.unsqueeze(0)], extra_mask=known & inside).to(torch.float32)
        s = hl.load(sin, [base + i.unsqueeze(0)], extra_mask=known & inside).to(torch.float32)
        c = c + (i >= half).unsqueeze(0).to(torch.float32)
        c, s = hl.join(c, c).reshape(n, d_pad), hl.join(-s, s).reshape(n, d_pad)
    else:
        # Channels d and d + half share an angle: two loads, of which one gives 0, each of whole aligned pieces.
        d = hl.arange(d_pad)
        lower, upper = known & (d < half).unsqueeze(0), known & ((d >= half) & (d < rotary)).unsqueeze(0)
        to_lower, to_upper = base + d.unsqueeze(0), base + (d - half).unsqueeze(0)
        c = hl.load(cos, [to_lower], extra_mask=lower).to(torch.float32)
        c = c + hl.load(cos, [to_upper], extra_mask=upper).to(torch.float32)
        c = c + (d >= rotary).unsqueeze(0).to(torch.float32)
        s = hl.load(sin, [to_upper], extra_mask=upper).to(torch.float32)
        s = s - hl.load(sin, [to_lower], extra_mask=lower).to(torch.float32)
    # A position that is not in the table must not pass for one that is.
    unknown = ((rows < size) & ((at < 0) | (at >= table_rows))).unsqueeze(1)
    return torch.where(unknown, float("nan"), c), s


def rope_rows(
    x: torch.Tensor,  # [n, D_pad]
    flat: torch.Tensor,
    by_self: torch.Tensor,  # [n, D_pad]
    by_partner: torch.Tensor,  # [n, D_pad]
    head_offset: int,
    rows: torch.Tensor,  # [n]
    row_step: int,
    d_step: int,
    size: int,
    n: int,
    d_pad: int,
    rotary: int,
    pairing: hl.constexpr,
) -> torch.Tensor:
    """`x`, which is rows of `flat`, times the factors of `rope_angles`; fp32 [n, D_pad]. Inlined into kernels."""
    if pairing == 2:
        even, odd = hl.split(x.reshape(n, d_pad // 2, 2))
        partner = hl.join(odd, even).reshape(n, d_pad)
    else:
        # The partner of channel d is d + half or d - half: two loads, of which one gives 0, both from L1.
        half = rotary // 2
        d = hl.arange(d_pad)
        inside = (rows < size).unsqueeze(1)
        lower, upper = inside & (d < half).unsqueeze(0), inside & ((d >= half) & (d < rotary)).unsqueeze(0)
        row = head_offset + rows.unsqueeze(1) * row_step
        partner = hl.load(flat, [row + (d + half).unsqueeze(0) * d_step], extra_mask=lower).to(torch.float32)
        partner = partner + hl.load(flat, [row + (d - half).unsqueeze(0) * d_step], extra_mask=upper).to(torch.float32)
    return x * by_self + partner * by_partner
