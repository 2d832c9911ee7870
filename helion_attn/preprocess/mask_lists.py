"""The key blocks that each row block visits, of what is known of blocks."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import by_device
from helion_attn.preprocess import list_order
from helion_attn.preprocess.mask_bits import UNSEEN
from helion_attn.problem import MaskListsArgs

#: Rows of a program, and blocks of a row that are read at once, at most: 16 numbers a thread.
ROWS, MOST_AT_ONCE = 4, 512


class MaskListsSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    n: int  # rows of a program
    step: int  # blocks of a row that are read at once
    added: int  # to what `kinds` has
    unseen: int  # what a block is that is not seen
    has_tiles: bool  # blocks may be seen in part


def mask_lists(
    kinds: torch.Tensor,  # [rows * n_blocks]
    entries: torch.Tensor,  # [rows * n_blocks], written
    tile_of: torch.Tensor,  # [rows * n_blocks], written with `has_tiles`
    counts: torch.Tensor,  # [rows], written
    rows: int,
    n_blocks: int,
    spec: hl.constexpr,  # MaskListsSpec
) -> None:
    """Write the lists: blocks that are seen move to the front of their row, in their order, and zeros follow."""
    hl.specialize((kinds.stride(0), entries.stride(0), tile_of.stride(0), counts.stride(0)))
    for part in hl.grid((rows + spec.n - 1) // spec.n):
        # [n]
        row = part * spec.n + hl.arange(spec.n)
        # [n, 1]
        is_row, first = (row < rows).unsqueeze(1), (row * n_blocks).unsqueeze(1)
        count = hl.zeros([spec.n], dtype=torch.int32)
        for step in hl.grid((n_blocks + spec.step - 1) // spec.step):
            # [1, step]
            block = (step * spec.step + hl.arange(spec.step)).unsqueeze(0)
            # [n, step]
            inside = is_row & (block < n_blocks)
            kind = hl.load(kinds, [first + block], extra_mask=inside).to(torch.int32) + spec.added
            seen = inside & (kind != spec.unseen)
            behind = hl.cumsum(seen.to(torch.int32), 1).to(torch.int32)
            place = first + count.unsqueeze(1) + behind - 1
            whole = block + torch.zeros_like(kind)
            if spec.has_tiles:
                hl.store(entries, [place], torch.where(kind >= 0, -1 - whole, whole), extra_mask=seen)
                hl.store(tile_of, [place], torch.where(kind >= 0, kind, 0), extra_mask=seen)
            else:
                hl.store(entries, [place], whole, extra_mask=seen)
            count = count + seen.to(torch.int32).sum(1).to(torch.int32)
        for rest in hl.grid((n_blocks + spec.step - 1) // spec.step):
            left = (rest * spec.step + hl.arange(spec.step)).unsqueeze(0)
            zero = hl.zeros([spec.n, spec.step], dtype=torch.int32)
            past = is_row & (left < n_blocks) & (left >= count.unsqueeze(1))
            hl.store(entries, [first + left], zero, extra_mask=past)
            if spec.has_tiles:
                hl.store(tile_of, [first + left], zero, extra_mask=past)
        hl.store(counts, [row], count, extra_mask=row < rows)


kernel = by_device(mask_lists, Config(num_warps=4, indexing="pointer"))


def launch(a: MaskListsArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the lists of the key blocks that row blocks visit.

    Returns:
        The fields `lists`, `entries` and `tile_of` of a `BlockMask`.
    """
    lists, entries, tile_of = empty_lists(a)
    by_block = a.kinds.dtype == torch.bool
    n_blocks = a.kinds.size(3)
    counts = lists.new_empty(lists.shape[:3])
    kernel(a.kinds.is_cuda).run(
        {
            "kinds": (a.kinds.view(torch.uint8) if by_block else a.kinds).view(-1),
            "entries": entries.view(-1),
            "tile_of": tile_of.view(-1),
            "counts": counts.view(-1),
            "rows": counts.numel(),
            "n_blocks": n_blocks,
            "spec": MaskListsSpec(
                n=ROWS,
                step=min(MOST_AT_ONCE, 1 << (n_blocks - 1).bit_length()),
                added=UNSEEN if by_block else 0,
                unseen=UNSEEN,
                has_tiles=not by_block,
            ),
        }
    )
    list_order.launch(counts, lists)
    return lists, entries, tile_of


def empty_lists(a: MaskListsArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate what `launch` returns."""
    by_block = a.kinds.dtype == torch.bool
    new = functools.partial(a.kinds.new_empty, dtype=torch.int32)
    tile_of = a.kinds.new_zeros((1, 1, 1, 1), dtype=torch.int32) if by_block else new(a.kinds.shape)
    return new((*a.kinds.shape[:3], 2)), new(a.kinds.shape), tile_of
