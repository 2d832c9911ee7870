"""Which query rows a program has, one function a layout; inlined into the attention kernels.

Rows come in blocks of one head; or packed, the sequences of a batch one after the other; or in tiles that the heads of
a group share; or in chunks, of several ranks; or in the order of the lists of a `BlockMask`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.configs import MASK_BLOCK
from helion_attn.kernels.lib.scalars import Int, imax, int32, quotient
from helion_attn.kernels.lib.specs import AttentionSpec
from helion_attn.problem import ListSteps, RankChunks


class Rows(NamedTuple):
    """The query rows of a program."""

    bh: Int  # their head; where a group's heads share tiles, that of K
    kv: Int  # the head of K and V
    m_block: Int  # their block, of all of a head's
    begin: Int  # the first row, and so `end`: in the output
    end: Int  # where the rows of the head, the chunk or the sequence end
    diagonal: Int  # the key that a causal mask shows the first row last
    queries: Int  # how many queries there are at most
    mean_row: Int  # the row of V's mean
    descale_row: Int  # the row of V's descale, and of K's if a head has one
    key_end: Int  # where the keys of the head, of all chunks or of the sequence end
    first_key_block: Int  # of packed sequences, the first packed block of keys
    keys: Int  # of packed sequences, how many there are; negative if the rows are of no sequence
    first_entry: Int  # where the entries of their list begin
    num_kv_blocks: Int  # how many key blocks the list has


def rows_of(
    q_blocks: torch.Tensor,  # [M_blocks, Q_FIELDS] if varlen
    lists: torch.Tensor,  # [lists * 2] if block_sparse
    grid_head: int,
    grid_block: int,
    heads: int,
    blocks: int,
    kv_heads: int,
    n_blocks: int,
    head_group: int,
    group: int,
    m_len: int,
    n_len: int,
    bm: int,
    bn: int,
    m_blocks: int,
    chunks: RankChunks,
    steps: ListSteps,
    spec: AttentionSpec,
) -> Rows:
    """The rows of a program, in the layout that the spec says.

    Args:
        q_blocks: of `PackedVarlen`.
        lists: of `BlockMask`.
        grid_head: the program's head, and with `is_split_kv` its split.
        grid_block: the program's block, in the order of the grid.
        heads: of the grid, without splits.
        blocks: of a head.
        kv_heads: of K and V.
        n_blocks: of a head's keys.
        head_group: as in the kernel, and so the rest.
    """
    if spec.varlen:
        program = grid_head * blocks + grid_block
        return rows_of_sequence(q_blocks, program, heads, kv_heads, n_blocks, head_group, group, bm, bn, spec)
    if spec.multi_rank:
        return rows_of_chunk(grid_head, grid_block, blocks, group, m_len, n_len, bm, chunks, spec)
    # Heads that share K and V come one after the other, in the same split.
    bh = grid_head % heads if spec.is_split_kv else grid_head
    if spec.block_sparse:
        return rows_of_list(lists, bh, grid_block, group, m_blocks, m_len, n_len, bm, steps)
    m_block = in_order(grid_block, blocks, spec)
    if spec.pack_gqa:
        return rows_of_shared_tile(bh, m_block, m_len, n_len, bm, spec.group_log2)
    return rows_of_block(bh, m_block, group, m_len, n_len, bm)


def in_order(grid_block: int, blocks: int, spec: AttentionSpec) -> int:
    """A program's block: with causality long rows come first."""
    return blocks - 1 - grid_block if spec.scores.has_right else grid_block


def rows_of_block(bh: int, m_block: int, group: int, m_len: int, n_len: int, bm: int) -> Rows:
    """The rows of a block of one head."""
    kv = bh // group
    begin = m_block * bm
    return Rows(bh, kv, m_block, begin, m_len, begin + n_len - m_len, bm, kv, kv, n_len, 0, 0, 0, 0)


def rows_of_list(
    lists: torch.Tensor,  # [lists * 2]
    bh: int,
    grid_block: int,
    group: int,
    m_blocks: int,
    m_len: int,
    n_len: int,
    bm: int,
    steps: ListSteps,
) -> Rows:
    """The rows of a list, or a part of them, one part after the other: the longest list first.

    Of a part without rows no block is packed: it takes the last one's.
    """
    parts = MASK_BLOCK // bm
    head = quotient(int32(bh), int32(steps.shared))
    first_list = (head - quotient(head, int32(steps.heads)) * int32(steps.heads)) * int32(steps.row_blocks)
    at = first_list + int32(grid_block // parts)
    row_block, num_kv_blocks = hl.load(lists, [2 * at]), hl.load(lists, [2 * at + 1])
    m_block = row_block * parts + grid_block % parts
    begin = m_block * bm
    if parts > 1:
        num_kv_blocks = torch.where(begin < int32(m_len), num_kv_blocks, 0)
        m_block = torch.minimum(m_block, int32(m_blocks - 1))
    kv = bh // group
    first_entry = (first_list + row_block) * int32(steps.key_blocks)
    diagonal = begin + int32(n_len - m_len)
    return Rows(bh, kv, m_block, begin, m_len, diagonal, bm, kv, kv, n_len, 0, 0, first_entry, num_kv_blocks)


def rows_of_shared_tile(kv: int, m_block: int, m_len: int, n_len: int, bm: int, group_log2: int) -> Rows:
    """The rows of a tile that a group's heads share."""
    begin = m_block * bm
    diagonal = (begin >> group_log2) + n_len - m_len
    return Rows(kv, kv, m_block, begin, m_len, diagonal, imax(1, bm >> group_log2), kv, kv, n_len, 0, 0, 0, 0)


def rows_of_chunk(
    bh: int,
    grid_block: int,
    blocks: int,
    group: int,
    m_len: int,
    n_len: int,
    bm: int,
    chunks: RankChunks,
    spec: AttentionSpec,
) -> Rows:
    """The rows of a block of several ranks' chunks."""
    kv = bh // group
    m_block = in_order(grid_block, blocks, spec)
    chunk = quotient(int32(m_block), int32(chunks.row_chunk_blocks))
    in_chunk = (int32(m_block) - chunk * int32(chunks.row_chunk_blocks)) * int32(bm)
    chunk_begin = chunk * int32(chunks.row_chunk_len)
    end = torch.minimum(chunk_begin + int32(chunks.row_chunk_len), int32(m_len))
    begin = chunk_begin + in_chunk
    diagonal = chunk * int32(chunks.row_step) + in_chunk + int32(chunks.row_first)
    return Rows(bh, kv, m_block, begin, end, diagonal, bm, kv, kv, n_len, 0, 0, 0, 0)


def rows_of_sequence(
    q_blocks: torch.Tensor,  # [M_blocks, Q_FIELDS]
    program: int,
    heads: int,
    kv_heads: int,
    n_blocks: int,
    group_programs: int,
    group: int,
    bm: int,
    bn: int,
    spec: AttentionSpec,
) -> Rows:
    """The rows of a block of a packed batch. Programs come in the order of the sequences in `q_blocks`.

    As many heads of a sequence come at once as have `group_programs` programs, or one. The diagonal counts as if the
    keys of all sequences were one row of blocks.
    """
    entry = program // heads
    sequence = hl.load(q_blocks, [entry, 0])
    first_token = hl.load(q_blocks, [entry, 1])
    rows = hl.load(q_blocks, [entry, 2])
    first_key_block = hl.load(q_blocks, [entry, 3])
    keys = hl.load(q_blocks, [entry, 4])
    first_block = hl.load(q_blocks, [entry, 5])
    blocks = hl.load(q_blocks, [entry, 6])
    of_sequence = int32(program) - first_block * int32(heads)
    if spec.scores.has_right:
        # The last group may have fewer.
        at_once = torch.minimum(torch.clamp_min(quotient(int32(group_programs), blocks), 1), int32(heads))
        first = quotient(of_sequence, at_once * blocks) * at_once
        of_group = of_sequence - first * blocks
        members = torch.minimum(at_once, int32(heads) - first)
        rank = quotient(of_group, members)
        bh = first + of_group - rank * members
    else:
        bh = quotient(of_sequence, blocks)
        rank = of_sequence - bh * blocks
    block = blocks - 1 - rank  # long rows first
    m_block = first_block + block
    kv = quotient(bh, int32(group))
    begin, end = first_token + block * bm, first_token + rows
    mean_row = sequence * int32(kv_heads) + kv
    descale_row = kv * int32(n_blocks) + first_key_block
    key_end = first_key_block * bn + keys
    diagonal = block * bm + key_end - rows
    return Rows(bh, kv, m_block, begin, end, diagonal, bm, mean_row, descale_row, key_end, first_key_block, keys, 0, 0)


def rows_of_group(row_begin: int, group_log2: int, bm: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The query [bm] of each row of a tile that a group's heads share, and its head within the group [bm]."""
    rows = row_begin + hl.arange(bm)
    return rows >> group_log2, rows & ((1 << group_log2) - 1)


def first_packed_row(rows: Rows, m_blocks: int, bm: int, spec: AttentionSpec) -> Int:
    """Where a block's first row lies among the packed rows of all heads."""
    if spec.varlen:
        return (rows.bh * int32(m_blocks) + rows.m_block) * bm
    return (rows.bh * m_blocks + rows.m_block) * bm


def packed_rows_of(rows: Rows, m_blocks: int, group: int, m_len: int, bm: int, spec: AttentionSpec) -> torch.Tensor:
    """[bm]: where rows lie among the packed rows of all heads."""
    if spec.pack_gqa:
        query, member = rows_of_group(rows.begin, spec.group_log2, bm)
        # Rows of no query, or of no head, take another's.
        known_head = rows.kv * group + torch.clamp_max(member, group - 1)
        return known_head * (m_blocks * bm) + torch.clamp_max(query, m_len - 1)
    return first_packed_row(rows, m_blocks, bm, spec) + hl.arange(bm)


def rows_on_diagonal(row_begin: Int, diagonal: Int, more_keys: int, bm: int, spec: AttentionSpec) -> torch.Tensor:
    """[bm]: of each row of a tile, the key that a causal mask shows it last."""
    if spec.pack_gqa:
        query, _member = rows_of_group(row_begin, spec.group_log2, bm)
        return query + more_keys
    return diagonal + hl.arange(bm)


def queries_of_rows(
    rows: Rows, grid_head: int, group: int, bm: int, spec: AttentionSpec
) -> tuple[torch.Tensor, Any, Any, torch.Tensor]:
    """Four tensors of a tile's rows, [bm]: query, head in the output, head in the splits, and "is a row".

    The two heads are scalars where a tile has one head.
    """
    if spec.pack_gqa:
        query, member = rows_of_group(rows.begin, spec.group_log2, bm)
        in_range = (query < rows.end) & (member < group)
        return query, rows.kv * group + member, grid_head * group + member, in_range
    query = rows.begin + hl.arange(bm)
    return query, rows.bh, grid_head, query < rows.end


def out_rows_of(
    query: torch.Tensor,  # [bm]
    head: Any,  # [bm] or a scalar, and so split_head
    split_head: Any,
    heads: int,
    m_len: int,
    out_head_step: int,
    out_row_step: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """[bm]: where rows lie in the output."""
    if spec.varlen:
        return head + query * int32(out_row_step)
    if spec.is_split_kv:
        return split_head * m_len + query
    first = (head // heads) * heads * m_len + (head % heads) * out_head_step
    return first + query * (int32(out_row_step) if spec.multi_rank else out_row_step)
