"""Which key blocks a program has and where they lie, one function a layout; inlined into the kernels.

Blocks are of one head; or of all sequences of a packed batch, one after the other; or of several ranks' chunks; or
those that a list of a `BlockMask` names. In split-KV, a program has a split of them. In a paged cache a page is a
block, and a table lists pages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.rank_chunks import (
    block_address,
    blocks_before,
    chunk_of_block,
    edge_of_chunk,
    keys_of_block,
)
from helion_attn.kernels.lib.rows import Rows
from helion_attn.kernels.lib.scalars import Int, imax, imin, int32, quotient
from helion_attn.kernels.lib.specs import AttentionSpec
from helion_attn.problem import RankChunks


class Keys(NamedTuple):
    """The key blocks of a program. Blocks from `left` up to `full` are seen whole by all of its rows."""

    begin: Int  # the first block that some row sees
    left: Int  # the first block after the left edge of every row
    full: Int  # the first block with the right edge of some row
    stop: Int  # the first block that no row sees any more
    head_first: Int  # of chunks, where the head's blocks begin on a rank
    first_descale: Int  # of chunks, where the head's descales of blocks begin


def keys_of(
    block_bounds: torch.Tensor,  # [M_blocks, 4] if row_ranges
    rows: Rows,
    grid_head: int,
    heads: int,
    splits: int,
    n_len: int,
    left: int,
    right: int,
    bm: int,
    bn: int,
    chunks: RankChunks,
    spec: AttentionSpec,
) -> Keys:
    """The key blocks of a program, in the layout that the spec says; with `is_split_kv` of its split alone."""
    if spec.multi_rank:
        return keys_of_chunks(block_bounds, rows, n_len, left, right, bm, bn, chunks, spec)
    if spec.varlen:
        return keys_of_sequence(rows, left, right, bm, bn, spec)
    keys = keys_of_head(rows, n_len, left, right, bn, spec)
    if spec.block_sparse:
        # In entries of the list; the edges stay those of blocks. Entries ascend: no more of them lie before a block, or
        # behind it, than there are blocks. Of a list of all blocks that leaves those that rows see.
        num_kv_blocks = rows.num_kv_blocks
        # A tail's entries come last.
        if spec.scores.has_right and not spec.has_tail:
            num_kv_blocks = torch.clamp_min(torch.minimum(num_kv_blocks, int32(keys.stop)), 0)
        begin = rows.first_entry
        if spec.scores.has_left and not spec.has_tail:
            unseen = torch.clamp_min(int32(keys.begin - (n_len + bn - 1) // bn) + rows.num_kv_blocks, 0)
            begin = begin + torch.minimum(unseen, num_kv_blocks)
        keys = keys._replace(begin=begin, stop=rows.first_entry + num_kv_blocks)
        if spec.is_split_kv:
            begin, stop = split_kv_range(keys.begin, keys.stop, grid_head // heads, splits)
            return keys._replace(begin=begin, stop=stop)
        return keys
    if spec.is_split_kv:
        begin, stop = split_kv_range(int32(keys.begin), int32(keys.stop), grid_head // heads, splits)
        return keys._replace(begin=begin, stop=stop)
    return keys


def keys_of_head(rows: Rows, n_len: int, left: int, right: int, bn: int, spec: AttentionSpec) -> Keys:
    """The key blocks of a head that rows see."""
    # Helion substitutes these expressions into each other, and a min or max writes each argument three times: they are
    # kept flat, and not limited to 0 where a loop that ends before it begins does the same.
    n_first_row, n_last_row = n_len, n_len
    if spec.scores.has_right:
        n_first_row = imin(n_len, rows.diagonal + right + 1)
        n_last_row = imin(n_len, rows.diagonal + right + rows.queries)
    n_full, n_end = n_first_row // bn, (n_last_row + bn - 1) // bn
    n_begin, n_left = 0, 0
    if spec.scores.has_left:
        n_begin = imax(0, rows.diagonal - left) // bn
        n_left = (imax(0, rows.diagonal - left + rows.queries - 1) + bn - 1) // bn
    return Keys(begin=n_begin, left=n_left, full=n_full, stop=n_end, head_first=0, first_descale=0)


def keys_of_sequence(rows: Rows, left: int, right: int, bm: int, bn: int, spec: AttentionSpec) -> Keys:
    """The key blocks of a sequence that rows see, as if the keys of all sequences were one row of blocks."""
    first, key_end = rows.first_key_block, rows.key_end
    key_begin = first * bn
    n_first_row, n_last_row = key_end, key_end
    if spec.scores.has_right:
        n_first_row = torch.minimum(key_end, rows.diagonal + int32(right) + 1)
        n_last_row = torch.minimum(key_end, rows.diagonal + int32(right) + bm)
    n_begin, n_left = first, first
    if spec.scores.has_left:
        n_begin = torch.maximum(key_begin, rows.diagonal - int32(left)) >> spec.bn_log2
        n_left = (torch.maximum(key_begin, rows.diagonal - int32(left) + bm - 1) + bn - 1) >> spec.bn_log2
    n_full, n_end = n_first_row >> spec.bn_log2, (n_last_row + bn - 1) >> spec.bn_log2
    return Keys(begin=n_begin, left=n_left, full=n_full, stop=n_end, head_first=0, first_descale=0)


def keys_of_chunks(
    block_bounds: torch.Tensor,  # [M_blocks, 4] if row_ranges
    rows: Rows,
    n_len: int,
    left: int,
    right: int,
    bm: int,
    bn: int,
    chunks: RankChunks,
    spec: AttentionSpec,
) -> Keys:
    """The key blocks of several ranks' chunks that rows see."""
    head_first = int32(rows.kv) * int32(chunks.head_blocks)
    first_descale = int32(rows.kv) * int32(chunks.key_chunks * chunks.key_chunk_blocks)
    if spec.row_ranges:
        n_begin, n_left, n_full, n_end = (hl.load(block_bounds, [rows.m_block, i]) for i in range(4))
    else:
        n_first_row, n_last_row = int32(n_len), int32(n_len)
        if spec.scores.has_right:
            n_first_row = torch.minimum(n_first_row, rows.diagonal + int32(right + 1))
            n_last_row = torch.minimum(n_last_row, rows.diagonal + int32(right + bm))
        n_begin, n_left = int32(0), int32(0)
        if spec.scores.has_left:
            n_begin = blocks_before(rows.diagonal - int32(left), chunks, 0, spec.bn_log2)
            n_left = blocks_before(rows.diagonal + int32(bm - 1 - left), chunks, bn - 1, spec.bn_log2)
        n_full = blocks_before(n_first_row, chunks, 0, spec.bn_log2)
        n_end = blocks_before(n_last_row, chunks, bn - 1, spec.bn_log2)
    return Keys(n_begin, n_left, n_full, n_end, head_first, first_descale)


def split_kv_range(
    n_begin: torch.Tensor,  # [], like the next
    n_end: torch.Tensor,
    split_idx: Int,
    splits: Int,
) -> tuple[Any, Any]:
    """The key blocks of a split, from `n_begin` up to `n_end`: as many as any other split has, or one less."""
    # Where no row sees a key, n_end may lie before n_begin.
    key_blocks = torch.clamp_min(n_end - n_begin, 0)
    begin = n_begin + quotient(key_blocks * int32(split_idx), int32(splits))
    end = n_begin + quotient(key_blocks * int32(split_idx + 1), int32(splits))
    return begin, end


def known_keys(
    cache_seqlens: torch.Tensor,  # [B]
    b: Int,
    max_pages: int,
    bn: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys of a sequence in a paged cache, [], and whether they are known: otherwise none are read.

    A length that the block table cannot have must not pass for another.
    """
    given = hl.load(cache_seqlens, [b])
    known = (given >= 0) & (given <= int32(max_pages * bn))
    return torch.where(known, given, int32(0)), known


def queries_of_sequence(
    cu_seqlens: torch.Tensor,  # [B + 1]
    seqlens: torch.Tensor,  # [B]
    b: Int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token of a sequence of a packed batch, and how many it has, []: none if it is padding."""
    first, keys = hl.load(cu_seqlens, [b]), hl.load(seqlens, [b])
    return first, torch.where(keys > 0, hl.load(cu_seqlens, [b + 1]) - first, 0)


def queries_of_batch(
    cu_seqlens: torch.Tensor,  # [B + 1]
    seqlens: torch.Tensor,  # [B]
    B: int,
    batch: hl.constexpr,
) -> torch.Tensor:
    """The tokens of all sequences of a packed batch, [batch]."""
    b = hl.arange(batch)
    there = b < B
    first, end = hl.load(cu_seqlens, [b], extra_mask=there), hl.load(cu_seqlens, [b + 1], extra_mask=there)
    return torch.where(there & (hl.load(seqlens, [b], extra_mask=there) > 0), end - first, 0)


def keys_of_batch(
    seqlens: torch.Tensor,  # [B]
    B: int,
    batch: hl.constexpr,
) -> torch.Tensor:
    """The keys of all sequences of a packed batch, [batch]."""
    b = hl.arange(batch)
    return hl.load(seqlens, [b], extra_mask=b < B)


def sequence_of(
    counts: torch.Tensor,  # [batch]
    at: Int,
    batch: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whose program number `at` is if each sequence has so many: the sequence, and the number among its own, [].

    Behind the last one: `batch`, and -1.
    """
    before = (hl.cumsum(counts, 0).to(torch.int32) <= int32(at)).to(torch.int32)
    b = before.sum(0).to(torch.int32)
    own = int32(at) - (before * counts).sum(0).to(torch.int32)
    return b, torch.where(b < batch, own, -1)


class SplitLists(NamedTuple):
    """The splits of all sequences, which do not have as many, one after the other: from `kernels.dynamic_splits`."""

    sequence_of_split: torch.Tensor  # int32, of each split its sequence; -1 behind the last one
    first_split: torch.Tensor  # int32 [B], where a sequence's begin
    own_splits: torch.Tensor  # int32 [B], how many it has


def split_at(
    sequence_of_split: torch.Tensor,  # [all_splits]
    first_split: torch.Tensor,  # [B]
    own_splits: torch.Tensor,  # [B]
    at: Int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Whether index `at` of `SplitLists` is a split; its sequence, its number there, and that one's splits, [] each.

    Where there is none, the rest is of some sequence.
    """
    listed = hl.load(sequence_of_split, [at])
    b = torch.clamp_min(listed, 0)
    number = int32(at) - hl.load(first_split, [b])
    return listed >= 0, b, number, torch.clamp_min(hl.load(own_splits, [b]), 1)


def page_of(
    block_table: torch.Tensor,  # [B * max_pages]
    at: Int,
    num_pages: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A page of a paged cache, [], and whether it is known: one that is not in the pool must not pass for another."""
    return page_of_entry(hl.load(block_table, [at]), num_pages)


def page_of_entry(listed: torch.Tensor, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`page_of`, of an entry of the block table."""
    known = (listed >= 0) & (listed < int32(num_pages))
    return torch.where(known, listed, int32(0)), known


def page_by_bits(listed: torch.Tensor, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`page_of_entry` by operations on bits: by the same ones a loop would carry the page that copies have, too."""
    # All ones, or 0.
    known = ((listed >> 31) ^ -1) & ((listed - int32(num_pages)) >> 31)
    return listed & known, known != 0


def first_descale_of(kv: Int, first_descale: Int, n_blocks: int, spec: AttentionSpec) -> Int:
    """Where the descales of a head's blocks begin."""
    if spec.multi_rank:
        return first_descale
    if spec.block_sparse:
        return int32(kv) * int32(n_blocks)
    return kv * int32(n_blocks) if spec.varlen or spec.is_split_kv else kv * n_blocks


def k_descale_of(
    k_descale: torch.Tensor,  # [B * H_kv * N_blocks] if k_block_descales
    block: int,
    kv: Int,
    first_descale: Int,
    n_blocks: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """K's descale of a block, []."""
    first = first_descale_of(kv, first_descale, n_blocks, spec)
    return hl.load(k_descale, [first + (int32(block) if isinstance(first, torch.Tensor) else block)])


def first_k_descale(
    k_descale: torch.Tensor,  # [B * H_kv * N_blocks] if k_block_descales
    split_begin: Int,
    kv: Int,
    first_descale: Int,
    n_blocks: int,
    chunks: RankChunks,
    spec: AttentionSpec,
) -> torch.Tensor:
    """K's descale of a program's first block, [], or of the last of all where the program has none."""
    first = first_descale_of(kv, first_descale, n_blocks, spec)
    if spec.multi_rank:
        blocks = chunks.key_chunks * chunks.key_chunk_blocks
        return hl.load(k_descale, [first + torch.minimum(split_begin, int32(blocks - 1))])
    return hl.load(k_descale, [first + imin(split_begin, n_blocks - 1)])


def next_k_descale(
    k_descale: torch.Tensor,  # [B * H_kv * N_blocks] if k_block_descales
    j: int,
    split_end: Int,
    kv: Int,
    first_descale: Int,
    n_blocks: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """K's descale of the block after block j, [], or of the program's last; of a list, of block j."""
    first = first_descale_of(kv, first_descale, n_blocks, spec)
    if spec.block_sparse:
        return hl.load(k_descale, [first + j])
    return hl.load(k_descale, [first + imin(split_end - 1, j + 1)])


def first_unmasked_block(keys: Keys, spec: AttentionSpec) -> Int:
    """The first block from which on the left edge masks none, nor does a reference come from any.

    References come from blocks up to the first that all rows see.
    """
    if not spec.first_block_max:
        return keys.left
    if spec.varlen or spec.is_split_kv or spec.multi_rank:
        return torch.maximum(int32(keys.left), int32(keys.begin)) + 1
    return keys.left + 1


def block_of_keys(
    k8: torch.Tensor,
    v8: torch.Tensor,
    j: int,
    kv: Int,
    head_first: Int,
    key_magic: int,
    chunks: RankChunks,
    spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor, Any, Int]:
    """Block j of K [bn, D_pad] and V, V's other half or None, and its chunk.

    V is [d_v_tile, bn], or of 16 bits [bn, D_v_pad]. With nothing between the loads, not even a transposition, Triton
    gives them one barrier, and the warps are not held up between Q K^T and the softmax.
    """
    whole = slice(None)
    chunk: Int = 0
    head: Int = kv
    k_at: Int = j
    v_at: Int = j
    if spec.multi_rank:
        chunk = chunk_of_block(int32(j), chunks.key_chunk_blocks, key_magic, spec.is_cuda)
        head = 0
        k_at = v_at = block_address(int32(j), chunk, head_first, chunks.k_rank_step, chunks, spec)
        if not spec.same_kv_layout:
            v_at = block_address(int32(j), chunk, head_first, chunks.v_rank_step, chunks, spec)
    k_block = hl.load(k8, [head, k_at, whole, whole])
    if spec.split_v:
        v_block = hl.load(v8, [head, v_at * 2, whole, whole])
        return k_block, v_block, hl.load(v8, [head, v_at * 2 + 1, whole, whole]), chunk
    return k_block, hl.load(v8, [head, v_at, whole, whole]), None, chunk


def at_edge(
    j: Int, chunk: Any, entry: Any, n_unmasked: Int, n_full: Int, chunks: RankChunks, spec: AttentionSpec
) -> Int:
    """Positive for a block to mask, at an edge of what is visible, and for one that references come from; otherwise 0.

    So for one whose entry in a list says that it is seen in part. Two maxima, of which one has a negated argument,
    would not do: ptxas 12.8 makes one instruction of them and loses the sign.
    """
    if spec.block_sparse:
        edge = entry + 1 - int32(n_full)
        if spec.scores.has_left:
            edge = torch.maximum(edge, int32(n_unmasked) - entry)
            return torch.clamp_min(torch.where(entry < 0, 1, edge), 0)
        return torch.clamp_min(torch.maximum(-entry, edge), 0)
    if not (spec.multi_rank or spec.varlen or (spec.is_split_kv and spec.first_block_max)):
        return imax(n_unmasked - j, j + 1 - n_full, 0)
    edge = int32(j + 1) - n_full
    if spec.scores.has_left or spec.row_ranges or spec.first_block_max:
        edge = torch.maximum(n_unmasked - int32(j), edge)
    # Zigzag's chunks are whole blocks.
    if spec.multi_rank and not spec.zigzag:
        edge = torch.maximum(edge, edge_of_chunk(int32(j), chunk, chunks, spec.bn_log2))
    return torch.clamp_min(edge, 0)


def first_key_of_block(
    j: int, chunk: Any, key_end: Int, bn: int, chunks: RankChunks, spec: AttentionSpec
) -> tuple[Any, Any]:
    """The position of block j's first key, and where the keys of its chunk end."""
    if spec.multi_rank:
        return keys_of_block(int32(j), chunk, int32(key_end), chunks, bn)
    return j * bn, key_end
