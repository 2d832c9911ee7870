"""Which query rows and key blocks a program of an attention kernel has, inlined into it.

That is of packed sequences, of heads that share tiles, and of keys that are split; otherwise the grid says it.
"""

from __future__ import annotations

from typing import Any

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.specs import AttentionSpec
from helion_attn.kernels.lib.steps import int32, quotient


def key_blocks_of_sequence(
    diagonal: torch.Tensor,  # [], like those that follow
    first_key_block: torch.Tensor,
    key_end: torch.Tensor,
    left: int,
    right: int,
    bm: int,
    bn: int,
    spec: AttentionSpec,
) -> tuple[Any, Any, Any, Any]:
    """`(n_begin, n_left, n_full, n_end)` of the kernel, of keys from those of `first_key_block` up to `key_end`."""
    key_begin = first_key_block * bn
    n_first_row, n_last_row = key_end, key_end
    if spec.has_right:
        n_first_row = torch.minimum(key_end, diagonal + int32(right) + 1)
        n_last_row = torch.minimum(key_end, diagonal + int32(right) + bm)
    n_begin, n_left = first_key_block, first_key_block
    if spec.has_left:
        n_begin = torch.maximum(key_begin, diagonal - int32(left)) >> spec.bn_log2
        n_left = (torch.maximum(key_begin, diagonal - int32(left) + bm - 1) + bn - 1) >> spec.bn_log2
    return n_begin, n_left, n_first_row >> spec.bn_log2, (n_last_row + bn - 1) >> spec.bn_log2


def run_of_key_blocks(
    n_begin: torch.Tensor,  # [], like the next
    n_end: torch.Tensor,
    run: int,
    splits: int,
) -> tuple[Any, Any]:
    """The key blocks of a run, from `n_begin` up to `n_end`: as many as any other run has, or one less."""
    # Where no row sees a key, n_end may lie before n_begin.
    key_blocks = torch.clamp_min(n_end - n_begin, 0)
    begin = n_begin + quotient(key_blocks * int32(run), int32(splits))
    end = n_begin + quotient(key_blocks * int32(run + 1), int32(splits))
    return begin, end


def rows_of_group(row_begin: int, group_log2: hl.constexpr, bm: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The query [bm] of each row of a tile that a group's heads share, and its head within the group [bm]."""
    rows = row_begin + hl.arange(bm)
    return rows >> group_log2, rows & ((1 << group_log2) - 1)


def program_of_sequence(
    q_blocks: torch.Tensor,  # [M_blocks, Q_FIELDS]
    program: int,
    heads: int,
    group_programs: int,
    has_right: hl.constexpr,
) -> tuple[Any, ...]:
    """What a program does, of all sequences of a packed batch: they come in the order of `q_blocks`.

    Scalars: head, packed query block, the same counted from the sequence's first; the sequence, its first token and
    its rows; its first packed key block and its keys.
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
    if has_right:
        # As many heads at once as have so many programs; the last group may have fewer.
        at_once = torch.minimum(torch.clamp_min(quotient(int32(group_programs), blocks), 1), int32(heads))
        first = quotient(of_sequence, at_once * blocks) * at_once
        of_group = of_sequence - first * blocks
        members = torch.minimum(at_once, int32(heads) - first)
        rank = quotient(of_group, members)
        head = first + of_group - rank * members
    else:
        head = quotient(of_sequence, blocks)
        rank = of_sequence - head * blocks
    block = blocks - 1 - rank  # long rows first
    return head, first_block + block, block, sequence, first_token, rows, first_key_block, keys
