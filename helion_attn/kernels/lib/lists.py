"""The key blocks that a `BlockMask` lists, inlined into `fp8_attn_fwd`.

A list is of `MASK_BLOCK` query rows, of which a program has all or a part. Its entries are key blocks of as many keys,
ascending; of a block of which only a part of the scores is seen, the entry is `~block`, and a tile has a bit a score.
"""

from __future__ import annotations

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.configs import MASK_BLOCK
from helion_attn.kernels.lib.rows import Rows
from helion_attn.kernels.lib.scalars import Int, least
from helion_attn.kernels.lib.specs import AttentionSpec
from helion_attn.problem import MaskArguments


def first_entry_of(
    entries: torch.Tensor,  # [lists * N_blocks] if listed
    run_begin: torch.Tensor,  # []
    n_blocks: int,
    rows: Rows,
) -> torch.Tensor:
    """The entry of a program's first place, []; any where it has none."""
    return hl.load(entries, [rows.first_entry + least(run_begin, n_blocks - 1)])


def next_entry_of(
    entries: torch.Tensor,  # [lists * N_blocks] if listed
    place: int,
    run_end: torch.Tensor,  # []
    first_entry: Int,
) -> torch.Tensor:
    """The entry of the place after `place`, [], or of the program's last.

    Loaded in the iteration that uses it, it would be sent through shared memory.
    """
    return hl.load(entries, [first_entry + least(run_end - 1, place + 1)])


def block_of_entry(entry: torch.Tensor) -> torch.Tensor:
    """The key block of an entry, []."""
    return entry ^ (entry >> 31)


def seen_in_part(entry: torch.Tensor) -> torch.Tensor:
    """1 if an entry is of a block of which only a part of the scores is seen, else 0; []."""
    return -(entry >> 31)


def within_tile(
    visible: torch.Tensor,  # [bm, bn] or [1, bn]
    tile_of: torch.Tensor,  # [lists * N_blocks] if listed, or one
    tiles: torch.Tensor,  # [T * MASK_BLOCK, words of a row] if listed
    place: int,
    in_part: torch.Tensor,  # []
    first_entry: Int,
    row_begin: Int,
    bm: int,
    bn: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """[bm, bn]: what is visible of a key block and has its bit set, if the block is seen `in_part`."""
    if not spec.listed:
        return visible
    tile = hl.load(tile_of, [(first_entry + place) * in_part])
    rows = tile * MASK_BLOCK + (row_begin & (MASK_BLOCK - 1)) + hl.arange(bm)
    keys = hl.arange(bn).unsqueeze(0)
    # A row's words one by one, whose layout may then be that of scores. [bm, 1]
    first, second, third, fourth = (hl.load(tiles, [rows, i]).unsqueeze(1) for i in range(4))
    # [bm, bn]
    words = torch.where(keys < 64, torch.where(keys < 32, first, second), torch.where(keys < 96, third, fourth))
    return visible & (((words >> (keys & 31)) | (in_part - 1)) & 1 != 0)


def list_arguments(mask: MaskArguments, unused: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the kernel takes of a mask, or of its absence, by name."""
    if mask.lists is None or mask.entries is None or mask.tile_of is None or mask.tiles is None:
        return dict.fromkeys(("lists", "entries", "tile_of", "tiles"), unused)
    return {
        "lists": mask.lists.view(-1, 2),
        "entries": mask.entries.view(-1),
        "tile_of": mask.tile_of.view(-1),
        "tiles": mask.tiles.view(-1, mask.tiles.size(2)),
    }
