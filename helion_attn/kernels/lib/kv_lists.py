"""The key blocks that a `BlockMask` lists, inlined into `fp8_attn_fwd`.

A list is of `MASK_BLOCK` query rows, of which a program has all or a part. Its entries are key blocks of as many keys,
ascending; of a block of which only a part of the scores is seen, the entry is -1 - block, and a tile has a bit a score.
The kernel's loop counts entries, through the lists of all row blocks and heads.
"""

from __future__ import annotations

from typing import Any

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.configs import MASK_BLOCK
from helion_attn.kernels.lib.scalars import Int, imin, int32
from helion_attn.kernels.lib.specs import AttentionSpec


def first_entry_of(
    entries: torch.Tensor,  # [lists * N_blocks] if block_sparse
    split_begin: Int,
    spec: AttentionSpec,
) -> Any:
    """A program's first entry, []; any where it has none. 0 unless `block_sparse`."""
    if not spec.block_sparse:
        return 0
    return hl.load(entries, [imin(split_begin, entries.size(0) - 1)])


def next_entry_of(
    entries: torch.Tensor,  # [lists * N_blocks] if block_sparse
    entry_idx: int,
    split_end: torch.Tensor,  # []
) -> torch.Tensor:
    """The entry after that of index `entry_idx`, [], or of the program's last.

    Loaded in the iteration that uses it, it would be sent through shared memory.
    """
    return hl.load(entries, [imin(split_end - 1, entry_idx + 1)])


def block_of_entry(entry_idx: Int, entry: Any, spec: AttentionSpec) -> Int:
    """The key block of `entry`, of index `entry_idx`; without lists the index itself."""
    if not spec.block_sparse:
        return entry_idx
    return entry ^ (entry >> 31)


def block_at_edge(entry_idx: Int, entry: Any, spec: AttentionSpec) -> Int:
    """`block_of_entry` by other operations: the same ones would have the loop carry what it has copied by."""
    if not spec.block_sparse:
        return entry_idx
    return torch.maximum(entry, -1 - entry)


def within_tile(
    visible: torch.Tensor,  # [bm, bn] or [1, bn]
    tile_of: torch.Tensor,  # [lists * N_blocks] if block_sparse, or one
    tiles: torch.Tensor,  # [T * MASK_BLOCK * words of a row] if block_sparse
    entry_idx: int,
    entry: Any,
    row_begin: Int,
    bm: int,
    bn: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """[bm, bn]: what is visible of a key block and has its bit set, if its entry says that it is seen in part."""
    if not spec.block_sparse:
        return visible
    in_part = (entry < 0).to(torch.int32)
    tile = hl.load(tile_of, [int32(entry_idx) * in_part])
    rows = tile * MASK_BLOCK + (row_begin & (MASK_BLOCK - 1)) + hl.arange(bm)
    keys = hl.arange(bn).unsqueeze(0)
    # A row's words one by one, whose layout may then be that of scores. All bits are set of a block seen whole. [bm, 1]
    a, b, c, d = ((hl.load(tiles, [rows * 4 + i]) | (in_part - 1)).unsqueeze(1) for i in range(4))
    # [bm, bn]
    words = torch.where(keys < 64, torch.where(keys < 32, a, b), torch.where(keys < 96, c, d))
    # A thread's keys differ in the bits of 25, which are then known when the kernel is compiled.
    return visible & ((words >> (keys & 6)) & (hl.full([], 1, dtype=torch.int32) << (keys & 25)) != 0)
