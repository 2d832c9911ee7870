"""Shape steps that every reference needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helion_attn.configs import MASK_BLOCK
from helion_attn.masks.blocks import as_block_mask
from helion_attn.types import BlockMask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask


def to_bhsd(x: torch.Tensor, layout: str) -> torch.Tensor:
    """View as [B, H, S, D]; its own inverse for an output."""
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f"layout is {layout!r}; it must be 'bhsd' or 'bshd'")
    return x.transpose(1, 2) if layout == "bshd" else x


def default_sm_scale(sm_scale: float | None, D: int) -> float:
    """1 / sqrt(D) unless given."""
    return D**-0.5 if sm_scale is None else sm_scale


def hide_keys(
    s: torch.Tensor, first_row: int, first_key: int, M: int, N: int, causal: bool, window: tuple[int, int] | None
) -> torch.Tensor:
    """Scores [..., rows, keys] with -inf where the mask hides them.

    Row i sees keys i + N - M - left .. i + N - M + right (bottom-right aligned), -1 is unlimited, and causal is a right
    of 0.
    """
    rows = torch.arange(first_row, first_row + s.size(-2), device=s.device)
    return hide_keys_of_rows(s, rows, first_key, M, N, causal, window)


def hide_keys_of_rows(
    s: torch.Tensor, rows: torch.Tensor, first_key: int, M: int, N: int, causal: bool, window: tuple[int, int] | None
) -> torch.Tensor:
    """`hide_keys` of any rows, int [rows]."""
    left, right = window or (-1, -1)
    right = 0 if causal else right
    key = torch.arange(first_key, first_key + s.size(-1), device=s.device).unsqueeze(0)
    from_diagonal = key - (rows.unsqueeze(1) + N - M)
    if right >= 0:
        s = s.masked_fill(from_diagonal > right, float("-inf"))
    if left >= 0:
        s = s.masked_fill(from_diagonal < -left, float("-inf"))
    return s


def visible_scores(mask: BlockMask | FlexMask | torch.Tensor | None, B: int, H: int) -> torch.Tensor | None:
    """A block mask by scores, bool [B, H, M, N], or None. Such a tensor is returned as it is."""
    if isinstance(mask, torch.Tensor):
        return mask
    made = as_block_mask(mask)
    return None if made is None else made.to_dense().expand(B, H, -1, -1)


def counted_blocks(
    mask: BlockMask | FlexMask | torch.Tensor | None,
    causal: bool,
    window: tuple[int, int] | None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The key blocks that count by their means for queries, all or int64 [rows]: bool [B, H, rows, N_blocks].

    None without a tail. All queries of a row block see all of such a block.
    """
    made = None if isinstance(mask, torch.Tensor) else as_block_mask(mask)
    if made is None or made.tail is None:
        return None
    rows = torch.arange(made.M, device=made.device) if rows is None else rows
    left, right = window or (-1, -1)
    right = 0 if causal else right
    row_block = rows // MASK_BLOCK
    first = (row_block * MASK_BLOCK + made.N - made.M).unsqueeze(1)
    last = ((row_block + 1) * MASK_BLOCK - 1).clamp_max(made.M - 1).unsqueeze(1) + made.N - made.M
    counts = made._tail_counts()[:, :, row_block]
    key = torch.arange(counts.size(3), device=made.device) * MASK_BLOCK
    if right >= 0:
        counts = counts & (key + MASK_BLOCK - 1 <= first + right)
    if left >= 0:
        counts = counts & (key >= last - left)
    return counts


def block_means(x: torch.Tensor) -> torch.Tensor:
    """The means of key blocks of K or V, [..., N, D] to [..., N_blocks, D], a ragged last one with zeros."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.size(-2) % MASK_BLOCK)).unflatten(-2, (-1, MASK_BLOCK)).mean(-2)


def hide_future_keys(s: torch.Tensor) -> torch.Tensor:
    """`hide_keys` of a causal mask, for all scores [..., M, N]: row i sees keys j <= i + N - M."""
    return hide_keys(s, 0, 0, s.size(-2), s.size(-1), True, None)
