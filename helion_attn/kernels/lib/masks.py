"""Which keys a row sees, and scores without the others, inlined into the attention kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.specs import AttentionSpec
from helion_attn.options import ScoreSpec


class Bounds(NamedTuple):
    """From and up to which position each row sees keys, as `MultiRankArgs` has it."""

    rows: torch.Tensor  # int32 [2, M_blocks * bm]
    blocks: torch.Tensor  # int32 [M_blocks, 4]


def visible_keys(
    keys: torch.Tensor,  # [bn]
    on_diagonal: torch.Tensor,  # [bm]: with as many queries as keys, the row's own
    n_len: int | torch.Tensor,  # [], like the next two
    left: int | torch.Tensor,
    right: int | torch.Tensor,
    spec: ScoreSpec,
) -> torch.Tensor:
    """Which keys of a block each row sees: [bm, bn], or [1, bn] if all see the same, without a window or causality."""
    keys = keys.unsqueeze(0)
    if spec.has_right:
        last = on_diagonal + right
        visible = keys <= torch.where(last < n_len, last, n_len - 1).unsqueeze(1)
    else:
        visible = keys < n_len
    if spec.has_left:
        visible = visible & (keys >= (on_diagonal - left).unsqueeze(1))
    return visible


def bounds_of_rows(
    row_bounds: torch.Tensor,  # [2, M_blocks * bm] if row_ranges
    m_block: int,
    bm: int,
    row_ranges: hl.constexpr,
) -> tuple[Any, Any]:
    """From and up to which position each row of a block sees keys, [bm] both; 0 unless `row_ranges`."""
    if not row_ranges:
        return 0, 0
    rows = m_block * bm + hl.arange(bm)
    return hl.load(row_bounds, [0, rows]), hl.load(row_bounds, [1, rows])


def within_bounds(
    visible: torch.Tensor,  # [bm, bn] or [1, bn]
    keys: torch.Tensor,  # [bn]
    keys_from: torch.Tensor,  # [bm] if row_ranges
    keys_up_to: torch.Tensor,  # [bm] if row_ranges
    row_ranges: hl.constexpr,
) -> torch.Tensor:
    """[bm, bn]: what is visible of a key block, with `row_ranges` to rows that see a range of positions."""
    if not row_ranges:
        return visible
    at = keys.unsqueeze(0)
    return visible & (at >= keys_from.unsqueeze(1)) & (at < keys_up_to.unsqueeze(1))


def masked_scores(
    s: torch.Tensor,  # [bm, bn], or with half_scores `schraudolph.pack_half2`
    visible: torch.Tensor,  # [bm, bn] or [1, bn]
    bm: int,
    bn: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Scores, -inf where they are not visible."""
    if spec.half_scores and spec.is_cuda:
        low, high = hl.split(visible.expand(bm, bn).to(torch.int32).reshape(bm, bn // 2, 2))
        # The bits of fp16's -inf are 0xFC00.
        if spec.block_sparse:
            s = torch.where(low > 0, s, s & -0x10000 | 0xFC00)
            return torch.where(high > 0, s, s & 0xFFFF | -0x4000000)
        return s & (low * 0xFFFF | high * -0x10000) | (1 - low) * 0xFC00 | (1 - high) * -0x4000000
    return torch.where(visible, s, float("-inf"))
