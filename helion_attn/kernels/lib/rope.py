"""Rotary position embedding: of the rows that a preprocessing kernel has loaded, and as a function of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.norm import channel_weights, row_factors
from helion_attn.kernels.lib.strided import load_rows
from helion_attn.problem import RopeArgs

#: How channels are paired, as the kernels are told: (i, i + R / 2), where the R rotated channels fill a tile's row;
#: (2i, 2i + 1); and (i, i + R / 2) where channels follow that are not rotated, or padding. Kernels compare `pairing`
#: with the numbers: to Helion a module's ints are run-time symbols.
NO_ROPE, HALF_SPLIT, INTERLEAVED, PART_SPLIT = 0, 1, 2, 3


class RopeTables(NamedTuple):
    """A `Rope`, or its absence, as the kernels take it."""

    cos: torch.Tensor  # [table_rows * rotary / 2]
    sin: torch.Tensor  # shaped as cos
    q_positions: torch.Tensor  # [M], or anything if not `explicit[0]`
    k_positions: torch.Tensor  # [N], or anything if not `explicit[1]`
    explicit: tuple[bool, bool]  # whether Q and K have positions of their own
    pairing: int  # NO_ROPE, HALF_SPLIT, INTERLEAVED or PART_SPLIT
    rotary: int  # channels that are rotated
    table_rows: int  # positions in the table

    def arguments(self) -> dict[str, Any]:
        """Return all of it, by the names of kernels' arguments."""
        return {
            "cos": self.cos,
            "sin": self.sin,
            "q_positions": self.q_positions,
            "k_positions": self.k_positions,
            "explicit_q_positions": self.explicit[0],
            "explicit_k_positions": self.explicit[1],
            "pairing": self.pairing,
            "rotary": self.rotary,
            "table_rows": self.table_rows,
        }


def rope_tables(rope: RopeArgs, D_row: int, unused: torch.Tensor) -> RopeTables:
    """`rope` for kernels whose tiles are `D_row` wide; `unused` stands for tensors that are not read."""
    cos, sin, q_positions, k_positions, interleaved = rope
    explicit = (q_positions is not None, k_positions is not None)
    q_at = unused if q_positions is None else q_positions
    k_at = unused if k_positions is None else k_positions
    if cos is None or sin is None:
        return RopeTables(unused, unused, q_at, k_at, explicit, NO_ROPE, 0, 0)
    rotary = 2 * cos.size(1)
    pairing = INTERLEAVED if interleaved else HALF_SPLIT if rotary == D_row else PART_SPLIT
    return RopeTables(cos.view(-1), sin.view(-1), q_at, k_at, explicit, pairing, rotary, cos.size(0))


def rope_positions(
    positions: torch.Tensor,  # [size], or anything
    rows: torch.Tensor,  # [n]
    first_position: int,
    size: int,
    table_rows: int,
    explicit: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows' positions, whether these have angles, and what rotated rows are to be multiplied by, [n] each.

    Row i is at `positions[i]` if `explicit`, otherwise at `first_position + i`. What a row outside the table is
    multiplied by is NaN, of others it is 1. Inlined into kernels.
    """
    if explicit:
        # Before 64 bits become 32, where 2**32 would be 0.
        listed = hl.load(positions, [rows], extra_mask=rows < size)
        at = torch.where((listed >= 0) & (listed < table_rows), listed, -1).to(torch.int32)
    else:
        at = rows + first_position
    known = (at >= 0) & (at < table_rows)
    # A position that is not in the table must not pass for one that is.
    factor = torch.where((rows < size) & ((at < 0) | (at >= table_rows)), float("nan"), 1.0)
    return at, (rows < size) & known, factor


def pair_angles(
    cos: torch.Tensor,  # [table_rows * rotary / 2]
    sin: torch.Tensor,  # [table_rows * rotary / 2]
    at: torch.Tensor,  # [n]
    known: torch.Tensor,  # [n]
    pairs: torch.Tensor,  # [m]
    half: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of pairs of channels, fp32 [n, m]; 0 of rows without angles. Inlined into kernels."""
    inside = known.unsqueeze(1) & (pairs < half).unsqueeze(0)
    index = at.unsqueeze(1) * half + pairs.unsqueeze(0)
    c = hl.load(cos, [index], extra_mask=inside).to(torch.float32)
    s = hl.load(sin, [index], extra_mask=inside).to(torch.float32)
    return c, s


def rotate_neighbours(
    x: torch.Tensor,  # [n, width]
    c: torch.Tensor,  # [n, width / 2]
    s: torch.Tensor,  # [n, width / 2]
    first: int,
    n: int,
    width: int,
    rotary: int,
    d_row: int,
) -> torch.Tensor:
    """Channels `first` to `first + width` of rows, of which those below `rotary` are rotated in interleaved pairs."""
    even, odd = hl.split(x.reshape(n, width // 2, 2))
    rotated = hl.join(even * c - odd * s, odd * c + even * s).reshape(n, width)
    if rotary < d_row:
        rotated = torch.where((first + hl.arange(width) < rotary).unsqueeze(0), rotated, x)
    return rotated


def channel_angles(
    cos: torch.Tensor,  # [table_rows * rotary / 2]
    sin: torch.Tensor,  # [table_rows * rotary / 2]
    at: torch.Tensor,  # [n]
    known: torch.Tensor,  # [n]
    d_row: int,
    rotary: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of channels for PART_SPLIT, fp32 [n, D_row]. Inlined into kernels.

    A channel's sine has the sign that its partner is multiplied by.
    """
    # Channels d and d + half share an angle: two loads, of which one gives 0, each of whole aligned pieces.
    half, d = rotary // 2, hl.arange(d_row)
    inside, base = known.unsqueeze(1), at.unsqueeze(1) * half
    lower, upper = inside & (d < half).unsqueeze(0), inside & ((d >= half) & (d < rotary)).unsqueeze(0)
    to_lower, to_upper = base + d.unsqueeze(0), base + (d - half).unsqueeze(0)
    c = hl.load(cos, [to_lower], extra_mask=lower).to(torch.float32)
    c = c + hl.load(cos, [to_upper], extra_mask=upper).to(torch.float32)
    c = c + (d >= rotary).unsqueeze(0).to(torch.float32)
    s = hl.load(sin, [to_upper], extra_mask=upper).to(torch.float32)
    s = s - hl.load(sin, [to_lower], extra_mask=lower).to(torch.float32)
    return c, s


def rope_rows(
    flat: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    factors: torch.Tensor,
    head_offset: int,
    first_weight: int,
    first_factor: int,
    rows: torch.Tensor,  # [n]
    row_step: int,
    d_step: int,
    size: int,
    d: int,
    first_position: int,
    table_rows: int,
    n: int,
    d_row: int,
    rotary: int,
    pairing: hl.constexpr,
    explicit: hl.constexpr,
    normed: hl.constexpr,
    eps: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `load_rows` gives, times a norm's weights and rotated, fp32 [n, D_row], and the rows' factors, [n].

    Rows are still to be multiplied by these: no number of a row waits for their sum of squares. Inlined into kernels.
    """
    half, width = rotary // 2, d_row // 2
    if pairing == 1 or pairing == 2:  # HALF_SPLIT, INTERLEAVED
        # Both halves are tiles of their own, in one layout: partners meet in a thread's registers.
        # [n, D_row / 2] each
        i = hl.arange(width)
        a = load_rows(flat, head_offset, rows, i, row_step, d_step, size, d)
        b = load_rows(flat, head_offset, rows, i + width, row_step, d_step, size, d)
        if normed:
            # [n]
            factor = row_factors(factors, a * a + b * b, first_factor, rows, size, d, normed, eps)
            a = a * channel_weights(weight, first_weight, i, d)
            b = b * channel_weights(weight, first_weight, i + width, d)
    else:
        x = load_rows(flat, head_offset, rows, hl.arange(d_row), row_step, d_step, size, d)
        if normed:
            factor = row_factors(factors, x * x, first_factor, rows, size, d, normed, eps)
            x = x * channel_weights(weight, first_weight, hl.arange(d_row), d)
    if not pairing:
        return x, factor
    at, known, of_position = rope_positions(positions, rows, first_position, size, table_rows, explicit)
    if pairing == 1 or pairing == 2:
        c, s = pair_angles(cos, sin, at, known, hl.arange(width), half)
    if pairing == 1:  # HALF_SPLIT
        a, b = a * c - b * s, b * c + a * s
    elif pairing == 2:  # INTERLEAVED
        # One load of both halves' angles, which is wide also of few rows in 16 bits.
        c_a, c_b = hl.split(c.reshape(n, 2, width // 2).permute(0, 2, 1))
        s_a, s_b = hl.split(s.reshape(n, 2, width // 2).permute(0, 2, 1))
        a = rotate_neighbours(a, c_a, s_a, 0, n, width, rotary, d_row)
        b = rotate_neighbours(b, c_b, s_b, width, n, width, rotary, d_row)
    if pairing == 1 or pairing == 2:
        rotated = hl.join(a, b).permute(0, 2, 1).reshape(n, d_row)
    else:
        # The partner of channel d is d + half or d - half: two loads, of which one gives 0, both from L1.
        c, s = channel_angles(cos, sin, at, known, d_row, rotary)
        j = hl.arange(d_row)
        inside = (rows < size).unsqueeze(1)
        lower, upper = inside & (j < half).unsqueeze(0), inside & ((j >= half) & (j < rotary)).unsqueeze(0)
        row = head_offset + rows.unsqueeze(1) * row_step
        above, below = row + (j + half).unsqueeze(0) * d_step, row + (j - half).unsqueeze(0) * d_step
        partner = hl.load(flat, [above], extra_mask=lower).to(torch.float32)
        partner = partner + hl.load(flat, [below], extra_mask=upper).to(torch.float32)
        if normed:
            # The last of these are of channels that are not rotated, whose sine is 0.
            of_partner = channel_weights(weight, first_weight, torch.where(j < half, j + half, j - half), rotary)
            partner = partner * of_partner
        rotated = x * c + partner * s
    if normed:
        of_position = of_position * factor
    return rotated, of_position
