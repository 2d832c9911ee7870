"""Which scores attention sees: lists of key blocks, and a bit a score for blocks that are seen in part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

from helion_attn.configs import MASK_BLOCK
from helion_attn.types import _OfTensors
from helion_attn.validate.block_mask import check_blocks

#: What a block is in `BlockMask._of_kinds`, if not the number of its tile.
WHOLE, UNSEEN = -1, -2

#: Bits of a word of a tile.
WORD = 32


@dataclass(frozen=True, eq=False, repr=False, init=False)
class BlockMask(_OfTensors):
    """Any boolean mask, as attention reads it: by blocks of 128 queries and 128 keys.

    A block that no query of it sees costs nothing. One that is seen in part has one bit a score, 2 KB; blocks with the
    same bits share them. B or H is 1 where all sequences or all heads have the same mask. It has a tensor's
    `to(device)`, `device` and `nbytes`.

    `BlockMask(blocks, M, N)` makes it of whole blocks, bool [B or 1, H or 1, ceil(M / 128), ceil(N / 128)].

    Attributes:
        M: queries.
        N: keys.
        lists: int32 [B, H, M_blocks, 2], row blocks in the order in which programs take them, the one with the most key
            blocks first, and how many key blocks each visits.
        entries: int32 [B, H, M_blocks, N_blocks], the key blocks that a row block visits, ascending; -1 - block where
            it is seen in part; past the row block's count: 0.
        tile_of: int32 [B, H, M_blocks, N_blocks], beside an entry that is seen in part: which of `tiles` has its bits.
            One 0, [1, 1, 1, 1], if there is no such entry.
        tiles: int32 [T, 128, 4]: bit b of word w of row r says whether the row block's query r sees the key block's key
            32 w + b. Bits past M or N mean nothing.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
    """

    M: int
    N: int
    lists: torch.Tensor
    entries: torch.Tensor
    tile_of: torch.Tensor
    tiles: torch.Tensor

    def __init__(self, blocks: torch.Tensor, M: int, N: int) -> None:
        check_blocks(blocks, M, N)
        self._fill(M, N, *_lists_of(blocks.to(torch.int32) + UNSEEN, None))

    def _fill(
        self, M: int, N: int, lists: torch.Tensor, entries: torch.Tensor, tile_of: torch.Tensor, tiles: torch.Tensor
    ) -> None:
        fields = {"M": M, "N": N, "lists": lists, "entries": entries, "tile_of": tile_of, "tiles": tiles}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def _of_lists(
        cls, M: int, N: int, lists: torch.Tensor, entries: torch.Tensor, tile_of: torch.Tensor, tiles: torch.Tensor
    ) -> BlockMask:
        """The mask that has these fields."""
        made = cls.__new__(cls)
        made._fill(M, N, lists, entries, tile_of, tiles)
        return made

    @classmethod
    def _of_kinds(cls, M: int, N: int, kinds: torch.Tensor, tiles: torch.Tensor | None) -> BlockMask:
        """The mask of int32 [B, H, M_blocks, N_blocks]: for each block the number of its tile, `WHOLE` or `UNSEEN`.

        Without tiles no block is seen in part.
        """
        return cls._of_lists(M, N, *_lists_of(kinds, tiles))

    @property
    def B(self) -> int:
        """Sequences, or 1."""
        return self.entries.size(0)

    @property
    def H(self) -> int:
        """Heads, or 1."""
        return self.entries.size(1)

    @property
    def blocks(self) -> torch.Tensor:
        """The blocks that are seen, in part or whole: bool [B, H, M_blocks, N_blocks]."""
        return self._kinds() != UNSEEN

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> BlockMask:
        """The same on another device."""
        fields = ("lists", "entries", "tile_of", "tiles")
        moved = (getattr(self, name).to(device, non_blocking=non_blocking) for name in fields)
        return self._of_lists(self.M, self.N, *moved)

    def to_dense(self) -> torch.Tensor:
        """The mask by scores: bool [B, H, M, N]."""
        bits = torch.arange(WORD, dtype=torch.int32, device=self.device)
        # [T, 128, 128]
        tiles = (self.tiles.unsqueeze(3) >> bits & 1).bool().flatten(2)
        tiles = torch.cat([tiles, torch.zeros_like(tiles[:1]), torch.ones_like(tiles[:1])])
        # `UNSEEN` and `WHOLE` are the last two.
        scores = tiles[self._kinds()].transpose(3, 4).flatten(4, 5).flatten(2, 3)
        return scores[:, :, : self.M, : self.N].contiguous()

    def _kinds(self) -> torch.Tensor:
        """What `_of_kinds` takes, int64."""
        order, counts = self.lists.long().unbind(3)
        # [B, H, M_blocks]: of row blocks in their own order.
        counts = torch.empty_like(counts).scatter_(2, order, counts)
        entries = self.entries.long()
        in_part = entries < 0
        kinds = torch.where(in_part, self.tile_of, WHOLE).long()
        n_blocks = entries.size(3)
        listed = torch.arange(n_blocks, device=self.device) < counts.unsqueeze(3)
        # What lies past the count goes to a place that is cut off.
        at = torch.where(listed, torch.where(in_part, -1 - entries, entries), n_blocks)
        filled = kinds.new_full((*entries.shape[:3], n_blocks + 1), UNSEEN).scatter_(3, at, kinds)
        return filled[..., :n_blocks]

    def __repr__(self) -> str:
        shape = f"B={self.B}, H={self.H}, M={self.M}, N={self.N}"
        if isinstance(self.entries, FakeTensor) or self.device.type == "meta":
            return f"BlockMask({shape})"
        density = self.lists[..., 1].double().mean().item() / self.entries.size(3)
        in_part = (self.entries < 0).double().mean().item()
        return (
            f"BlockMask({shape}: {density:.2%} of the blocks, {in_part:.2%} in part, {self.tiles.size(0)} tiles, "
            f"{self.nbytes} bytes on {self.device})"
        )


# What `torch.load` takes with its default, `weights_only=True`.
torch.serialization.add_safe_globals([BlockMask])


def _lists_of(
    kinds: torch.Tensor, tiles: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields `lists`, `entries`, `tile_of` and `tiles` of what `_of_kinds` takes."""
    n_blocks = kinds.size(3)
    seen = kinds != UNSEEN
    behind = seen.cumsum(3, dtype=torch.int32)
    # A block that is not seen goes to a place that is cut off.
    at = torch.where(seen, behind - 1, n_blocks).long()
    block = torch.arange(n_blocks, dtype=torch.int32, device=kinds.device).expand_as(kinds)

    def compacted(values: torch.Tensor) -> torch.Tensor:
        room = values.new_zeros((*values.shape[:3], n_blocks + 1))
        return room.scatter_(3, at, values)[..., :n_blocks].contiguous()

    entries = compacted(block if tiles is None else torch.where(kinds >= 0, -1 - block, block))
    if tiles is None:
        tile_of, tiles = kinds.new_zeros((1, 1, 1, 1)), kinds.new_zeros((1, MASK_BLOCK, MASK_BLOCK // WORD))
    else:
        tile_of = compacted(kinds.clamp_min(0))
    counts = behind[..., -1]
    order = counts.argsort(dim=2, descending=True, stable=True)
    lists = torch.stack([order.to(torch.int32), counts.gather(2, order)], 3)
    return lists, entries, tile_of, tiles
