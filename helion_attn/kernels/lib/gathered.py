"""Where keys and rows lie whose parts come from several ranks, inlined into `fp8_attn_fwd`.

A position is a key's index in the whole sequence, counted from the first key of the call. Keys come in `key_parts`
parts of `key_part_len`; the last may be shorter. Part c begins at position `c * key_step` and has `key_part_blocks`
blocks, of which the last may hold fewer keys than others. The kernel's loop counts the blocks of all parts in the order
of their positions.

In memory every rank has one run of blocks, `head_blocks` a head. Part c is that of rank c. With `mirrored`, zigzag,
a rank has two parts, one behind the other: part c of `2 * ranks` is the first of rank c, or the second of rank
`2 * ranks - 1 - c`. Consecutive ranks lie `k_rank_step` blocks of K and `v_rank_step` of V apart, which are the same
number with `same_places`. So a block is found by a multiplication or two: a loaded index would add barriers to the
loop. K's descales lie in the order of the parts, `key_parts * key_part_blocks` a head.

Rows come in parts of `row_part_blocks` blocks that hold `row_part_len` rows. Row i of part p has its diagonal, the key
that a causal mask shows it last, at position `row_first + p * row_step + i`.
"""

from __future__ import annotations

from typing import Any

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.inline_asm import high_product
from helion_attn.kernels.lib.scalars import int32, quotient
from helion_attn.kernels.lib.specs import AttentionSpec
from helion_attn.problem import GatheredParts


def blocks_before(
    position: torch.Tensor,  # []
    parts: GatheredParts,
    round_up: int,
    bn_log2: int,
) -> torch.Tensor:
    """Blocks whose keys all lie before a position; with a `round_up` of bn - 1, those of which any does."""
    known = torch.clamp_min(position, 0)
    part = torch.minimum(quotient(known, int32(parts.key_step)), int32(parts.key_parts - 1))
    inside = (known - part * int32(parts.key_step) + int32(round_up)) >> bn_log2
    return part * int32(parts.key_part_blocks) + torch.minimum(inside, int32(parts.key_part_blocks))


def part_of_block(
    j: torch.Tensor,  # []
    key_part_blocks: int,
    key_magic: int,
    is_cuda: hl.constexpr,
) -> torch.Tensor:
    """`j // key_part_blocks`, by `key_magic` = (2**32 - 1) // key_part_blocks: `magic` says up to where."""
    if is_cuda:
        return high_product(j + int32(1), int32(key_magic))
    return quotient(j, int32(key_part_blocks))


def placed(
    j: torch.Tensor,  # []
    part: torch.Tensor,  # []
    head_first: torch.Tensor,  # []
    rank_step: int,
    parts: GatheredParts,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Where block j, of `part`, lies among the blocks of all ranks, of a head that begins at `head_first`."""
    if spec.mirrored:
        # Parts from the middle on are those of descending ranks, each behind the rank's first part.
        back = part >= parts.ranks
        rank = torch.where(back, int32(2 * parts.ranks - 1) - part, part)
        behind = torch.where(back, int32(parts.key_part_blocks), 0)
        return head_first + rank * int32(rank_step) + behind - part * int32(parts.key_part_blocks) + j
    return head_first + part * int32(rank_step - parts.key_part_blocks) + j


def edge_of_part(
    j: torch.Tensor,  # []
    part: torch.Tensor,  # []
    parts: GatheredParts,
    bn_log2: int,
) -> torch.Tensor:
    """Positive for a part's last block if that is not full."""
    return j - part * int32(parts.key_part_blocks) - int32((parts.key_part_len >> bn_log2) - 1)


def keys_of_block(
    j: torch.Tensor,  # []
    part: torch.Tensor,  # []
    key_end: torch.Tensor,  # []
    parts: GatheredParts,
    bn: int,
) -> tuple[Any, Any]:
    """The position of a block's first key, and where its part's keys end."""
    part_begin = part * int32(parts.key_step)
    first = part_begin + (j - part * int32(parts.key_part_blocks)) * int32(bn)
    return first, torch.minimum(key_end, part_begin + int32(parts.key_part_len))
