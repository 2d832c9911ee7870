"""Rotary position embedding: of the rows that a preprocessing kernel has loaded, and as a function of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.norm import channel_weights, row_factors
from helion_attn.kernels.lib.strided import load_rows
from helion_attn.problem import RopeArguments

#: How channels are paired, as the kernels are told: (i, i + R / 2), where the R rotated channels fill a tile's row;
#: (2i, 2i + 1); and (i, i + R / 2) where channels follow that are not rotated, or padding. Kernels compare `pairing`
#: with the numbers: to Helion a module's ints are run-time symbols.
NO_ROPE, HALF_SPLIT, INTERLEAVED, PART_SPLIT = 0, 1, 2, 3


class RopeTables(NamedTuple):
    """A `Rope`, or its absence, as the kernels take it.

    Attributes:
        cos: [table_rows * rotary / 2].
        sin: likewise.
        q_positions: [M], or anything if not `explicit[0]`.
        k_positions: [N], or anything if not `explicit[1]`.
        explicit: whether Q and K have positions of their own.
        pairing: NO_ROPE, HALF_SPLIT, INTERLEAVED or PART_SPLIT.
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

    def arguments(self) -> dict[str, Any]:
        """All of it, as the kernels name it."""
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


def rope_tables(rope: RopeArguments, D_row: int, unused: torch.Tensor) -> RopeTables:
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


def rope_angles(
    cos: torch.Tensor,  # [table_rows * rotary / 2]
    sin: torch.Tensor,  # [table_rows * rotary / 2]
    positions: torch.Tensor,  # [size], or anything
    rows: torch.Tensor,  # [n]
    first_position: int,
    size: int,
    table_rows: int,
    n: int,
    d_row: int,
    rotary: int,
    pairing: hl.constexpr,
    explicit: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of rows, fp32: of pairs [n, D_row / 2] for HALF_SPLIT, otherwise of channels [n, D_row].

    Row i is at `positions[i]` if `explicit`, otherwise at `first_position + i`. Outside the table cosines are NaN. A
    channel's sine has the sign that its partner is multiplied by. Inlined into kernels.
    """
    half = rotary // 2
    if explicit:
        # Before 64 bits become 32, where 2**32 would be 0.
        listed = hl.load(positions, [rows], extra_mask=rows < size)
        at = torch.where((listed >= 0) & (listed < table_rows), listed, -1).to(torch.int32)
    else:
        at = rows + first_position
    known = ((rows < size) & (at >= 0) & (at < table_rows)).unsqueeze(1)
    base = at.unsqueeze(1) * half
    if pairing == 3:  # PART_SPLIT
        # Channels d and d + half share an angle: two loads, of which one gives 0, each of whole aligned pieces.
        d = hl.arange(d_row)
        lower, upper = known & (d < half).unsqueeze(0), known & ((d >= half) & (d < rotary)).unsqueeze(0)
        to_lower, to_upper = base + d.unsqueeze(0), base + (d - half).unsqueeze(0)
        c = hl.load(cos, [to_lower], extra_mask=lower).to(torch.float32)
        c = c + hl.load(cos, [to_upper], extra_mask=upper).to(torch.float32)
        c = c + (d >= rotary).unsqueeze(0).to(torch.float32)
        s = hl.load(sin, [to_upper], extra_mask=upper).to(torch.float32)
        s = s - hl.load(sin, [to_lower], extra_mask=lower).to(torch.float32)
    else:
        i = hl.arange(d_row // 2)
        inside = known & (i < half).unsqueeze(0)
        # [n, D_row / 2]
        c = hl.load(cos, [base + i.unsqueeze(0)], extra_mask=inside).to(torch.float32)
        s = hl.load(sin, [base + i.unsqueeze(0)], extra_mask=inside).to(torch.float32)
        c = c + (i >= half).unsqueeze(0).to(torch.float32)
        if pairing == 2:  # INTERLEAVED
            c, s = hl.join(c, c).reshape(n, d_row), hl.join(-s, s).reshape(n, d_row)
    # A position that is not in the table must not pass for one that is.
    unknown = ((rows < size) & ((at < 0) | (at >= table_rows))).unsqueeze(1)
    return torch.where(unknown, float("nan"), c), s


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
) -> torch.Tensor:
    """What `load_rows` gives, normalised and rotated: fp32 [n, D_row]. Inlined into kernels."""
    half = rotary // 2
    if normed:
        # [n, 1]
        factor = row_factors(
            flat, factors, head_offset, first_factor, rows, row_step, d_step, size, d, d_row, pairing != 1, normed, eps
        )
    if pairing == 1:  # HALF_SPLIT
        # Both halves are tiles of their own, in one layout: partners meet in a thread's registers.
        # [n, D_row / 2] each
        i = hl.arange(half)
        a = load_rows(flat, head_offset, rows, i, row_step, d_step, size, d)
        b = load_rows(flat, head_offset, rows, i + half, row_step, d_step, size, d)
        if normed:
            a = a * channel_weights(weight, first_weight, i, d)
            b = b * channel_weights(weight, first_weight, i + half, d)
    else:
        x = load_rows(flat, head_offset, rows, hl.arange(d_row), row_step, d_step, size, d)
        if normed:
            x = x * channel_weights(weight, first_weight, hl.arange(d_row), d)
    if not pairing:
        return x * factor
    c, s = rope_angles(cos, sin, positions, rows, first_position, size, table_rows, n, d_row, rotary, pairing, explicit)
    if pairing == 1:  # HALF_SPLIT
        rotated = hl.join(a * c - b * s, b * c + a * s).permute(0, 2, 1).reshape(n, d_row)
    else:
        if pairing == 2:  # INTERLEAVED
            even, odd = hl.split(x.reshape(n, d_row // 2, 2))
            partner = hl.join(odd, even).reshape(n, d_row)
            if rotary < d_row:
                # Channels that are not rotated have a sine of 0, and 0 times a neighbour's NaN is NaN.
                partner = torch.where((hl.arange(d_row) < rotary).unsqueeze(0), partner, 0.0)
        else:
            # The partner of channel d is d + half or d - half: two loads, of which one gives 0, both from L1.
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
        # Last, so that no angle waits for a row's sum: a rotation takes a row's factor along.
        rotated = rotated * factor
    return rotated
