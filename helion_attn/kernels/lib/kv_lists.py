"""The key blocks that a `BlockMask` lists, inlined into `fp8_attn_fwd`.

A list is of `MASK_BLOCK` query rows, of which a program has all or a part. Its entries are key blocks of as many keys,
ascending; of a block of which only a part of the scores is seen, the entry is -1 - block, and a tile has a bit a score.
The kernel's loop counts entries, through the lists of all row blocks and heads.

Lists of a mask with a tail end with blocks of means: a row of them is the mean of a key block. A list has one bit a
key block besides, whether its mean counts.
"""

from __future__ import annotations

from typing import Any

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.configs import MASK_BLOCK
from helion_attn.kernels.lib.scalars import Int, imin, int32, quotient
from helion_attn.kernels.lib.specs import AttentionSpec
from helion_attn.problem import ListSteps

#: A block before every key: its number of keys before them fits 32 bits.
FAR_LEFT = -(2**23)

#: Words of 32 bits for as many bits as a block has keys.
WORDS = MASK_BLOCK // 32


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


def block_at_edge(entry_idx: Int, entry: Any, key_blocks: Int, spec: AttentionSpec) -> Int:
    """`block_of_entry` by other operations: the same ones would have the loop carry what it has copied by.

    A block of means is far to the left of all edges, so that they hide none of it.
    """
    if not spec.block_sparse:
        return entry_idx
    if spec.has_tail:
        return torch.where(entry < int32(key_blocks), entry, FAR_LEFT)
    return torch.maximum(entry, -1 - entry)


def within_list(
    visible: torch.Tensor,  # [bm, bn] or [1, bn]
    tile_of: torch.Tensor,  # [lists * N_blocks] if block_sparse, or one
    tiles: torch.Tensor,  # [T * MASK_BLOCK * words of a row] if block_sparse
    tail: torch.Tensor,  # [lists * words of a list] if has_tail
    entry_idx: int,
    entry: Any,
    first_entry: Any,
    row_begin: Int,
    diagonal: Int,
    n_len: int,
    left: int,
    right: int,
    bm: int,
    bn: int,
    steps: ListSteps,
    spec: AttentionSpec,
) -> torch.Tensor:
    """[bm, bn] or [1, bn]: what is visible of a block, and of which its list sees the score."""
    if not spec.block_sparse:
        return visible
    if spec.has_tail:
        return within_tail(visible, tail, first_entry, entry, row_begin, diagonal, n_len, left, right, bn, steps, spec)
    return within_tile(visible, tile_of, tiles, entry_idx, entry, row_begin, bm, bn)


def within_tile(
    visible: torch.Tensor,  # [bm, bn] or [1, bn]
    tile_of: torch.Tensor,  # [lists * N_blocks], or one
    tiles: torch.Tensor,  # [T * MASK_BLOCK * words of a row]
    entry_idx: int,
    entry: torch.Tensor,  # []
    row_begin: Int,
    bm: int,
    bn: int,
) -> torch.Tensor:
    """[bm, bn]: what is visible of a key block and has its bit set, if its entry says that it is seen in part."""
    in_part = (entry < 0).to(torch.int32)
    tile = hl.load(tile_of, [int32(entry_idx) * in_part])
    rows = tile * MASK_BLOCK + (row_begin & (MASK_BLOCK - 1)) + hl.arange(bm)
    keys = hl.arange(bn).unsqueeze(0)
    # A row's words one by one, whose layout may then be that of scores. All bits are set of a block seen whole. [bm, 1]
    words = [(hl.load(tiles, [rows * WORDS + i]) | (in_part - 1)).unsqueeze(1) for i in range(WORDS)]
    return visible & bits_of_words(words, keys)


def within_tail(
    visible: torch.Tensor,  # [bm, bn] or [1, bn]
    tail: torch.Tensor,  # [lists * words of a list]
    first_entry: torch.Tensor,  # []
    entry: torch.Tensor,  # []
    row_begin: Int,
    diagonal: Int,
    n_len: int,
    left: int,
    right: int,
    bn: int,
    steps: ListSteps,
    spec: AttentionSpec,
) -> torch.Tensor:
    """[bm, bn] or [1, bn]: of a block of means those that count, and of a block of keys `visible`."""
    key_blocks = (n_len + bn - 1) // bn
    tail_blocks = int32((key_blocks + MASK_BLOCK - 1) // MASK_BLOCK)
    tail_block = torch.clamp_min(entry - int32(key_blocks), 0)
    first_word = (quotient(first_entry, int32(steps.key_blocks)) * tail_blocks + tail_block) * WORDS
    # The key blocks of which all queries of the row block, and the program may have half of it, may see all.
    diagonal_of_first = int32(diagonal) - (int32(row_begin) & (MASK_BLOCK - 1))
    begin, stop = int32(0), int32(n_len // bn)
    if spec.scores.has_left:
        # The last query's diagonal ends at the last key.
        diagonal_of_last = torch.minimum(diagonal_of_first + (MASK_BLOCK - 1), int32(n_len - 1))
        begin = quotient(torch.clamp_min(diagonal_of_last - int32(left), 0) + (bn - 1), int32(bn))
    if spec.scores.has_right:
        stop = torch.minimum(stop, quotient(torch.clamp_min(diagonal_of_first + int32(right + 1), 0), int32(bn)))
    words = []
    for i in range(WORDS):
        first = tail_block * bn + 32 * i
        word = hl.load(tail, [first_word + i]) & bits_below(stop - first)
        word = word & (bits_below(begin - first) ^ -1) if spec.scores.has_left else word
        # All bits are set of a block of keys.
        words.append(torch.where(entry < int32(key_blocks), -1, word))
    counts = bits_of_words(words, hl.arange(bn).unsqueeze(0))
    if spec.scores.has_left:
        return torch.where(entry < int32(key_blocks), visible, counts)
    return visible & counts


def bits_below(n: torch.Tensor) -> torch.Tensor:
    """A word whose first n bits are set, []: none for n below 0, all from 32 on."""
    # Two shifts, since one by 32 does nothing.
    half = torch.clamp_max(torch.clamp_min(n, 0), 32) >> 1
    odd = torch.clamp_max(torch.clamp_min(n, 0), 32) - half
    return ((hl.full([], -1, dtype=torch.int32) << half) << odd) ^ -1


def bits_of_words(words: list[torch.Tensor], keys: torch.Tensor) -> torch.Tensor:
    """Whether each key's bit is set, [bm, bn], or [1, bn] of words [], for keys [1, bn]."""
    a, b, c, d = words
    of_key = torch.where(keys < 64, torch.where(keys < 32, a, b), torch.where(keys < 96, c, d))
    # A thread's keys differ in the bits of 25, which are then known when the kernel is compiled.
    return (of_key >> (keys & 6)) & (hl.full([], 1, dtype=torch.int32) << (keys & 25)) != 0
