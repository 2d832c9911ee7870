"""Where keys and rows lie whose chunks come from several ranks, inlined into `fp8_attn_fwd`.

A position is a key's index in the whole sequence, counted from the first key of the call. Keys come in `key_chunks`
chunks of `key_chunk_len`; the last may be shorter. Chunk c begins at position `c * key_step` and has `key_chunk_blocks`
blocks, of which the last may hold fewer keys than others. The kernel's loop counts the blocks of all chunks in the
order of their positions.

In memory every rank has its blocks together, `head_blocks` a head. Chunk c is that of rank c. With `zigzag`, zigzag,
a rank has two chunks, one behind the other: chunk c of `2 * ranks` is the first of rank c, or the second of rank
`2 * ranks - 1 - c`. Consecutive ranks lie `k_rank_step` blocks of K and `v_rank_step` of V apart, which are the same
number with `same_kv_layout`. So a block is found by a multiplication or two: a loaded index would add barriers to the
loop. K's descales lie in the order of the chunks, `key_chunks * key_chunk_blocks` a head.

Rows come in chunks of `row_chunk_blocks` blocks that hold `row_chunk_len` rows. Row i of chunk p has its diagonal, the
key that a causal mask shows it last, at position `row_first + p * row_step + i`.
"""

from __future__ import annotations

from typing import Any

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.inline_asm import high_product
from helion_attn.kernels.lib.scalars import int32, quotient
from helion_attn.kernels.lib.specs import AttentionSpec
from helion_attn.problem import RankChunks


def blocks_before(
    position: torch.Tensor,  # []
    chunks: RankChunks,
    round_up: int,
    bn_log2: int,
) -> torch.Tensor:
    """Blocks whose keys all lie before a position; with a `round_up` of bn - 1, those of which any does."""
    clamped = torch.clamp_min(position, 0)
    chunk = torch.minimum(quotient(clamped, int32(chunks.key_step)), int32(chunks.key_chunks - 1))
    inside = (clamped - chunk * int32(chunks.key_step) + int32(round_up)) >> bn_log2
    return chunk * int32(chunks.key_chunk_blocks) + torch.minimum(inside, int32(chunks.key_chunk_blocks))


def chunk_of_block(
    j: torch.Tensor,  # []
    key_chunk_blocks: int,
    key_magic: int,
    is_cuda: hl.constexpr,
) -> torch.Tensor:
    """`j // key_chunk_blocks`, by `key_magic` = (2**32 - 1) // key_chunk_blocks: `magic` says up to where."""
    if is_cuda:
        return high_product(j + int32(1), int32(key_magic))
    return quotient(j, int32(key_chunk_blocks))


def block_address(
    j: torch.Tensor,  # []
    chunk: torch.Tensor,  # []
    head_first: torch.Tensor,  # []
    rank_step: int,
    chunks: RankChunks,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Where block j, of `chunk`, lies among the blocks of all ranks, of a head that begins at `head_first`."""
    if spec.zigzag:
        # Chunks from the middle on are those of descending ranks, each behind the rank's first chunk.
        back = chunk >= chunks.ranks
        rank = torch.where(back, int32(2 * chunks.ranks - 1) - chunk, chunk)
        behind = torch.where(back, int32(chunks.key_chunk_blocks), 0)
        return head_first + rank * int32(rank_step) + behind - chunk * int32(chunks.key_chunk_blocks) + j
    return head_first + chunk * int32(rank_step - chunks.key_chunk_blocks) + j


def edge_of_chunk(
    j: torch.Tensor,  # []
    chunk: torch.Tensor,  # []
    chunks: RankChunks,
    bn_log2: int,
) -> torch.Tensor:
    """Positive for a chunk's last block if that is not full."""
    return j - chunk * int32(chunks.key_chunk_blocks) - int32((chunks.key_chunk_len >> bn_log2) - 1)


def keys_of_block(
    j: torch.Tensor,  # []
    chunk: torch.Tensor,  # []
    key_end: torch.Tensor,  # []
    chunks: RankChunks,
    bn: int,
) -> tuple[Any, Any]:
    """The position of a block's first key, and where its chunk's keys end."""
    chunk_begin = chunk * int32(chunks.key_step)
    first = chunk_begin + (j - chunk * int32(chunks.key_chunk_blocks)) * int32(bn)
    return first, torch.minimum(key_end, chunk_begin + int32(chunks.key_chunk_len))
