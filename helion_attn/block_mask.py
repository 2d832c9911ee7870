"""Which scores attention sees: lists of key blocks, and a bit a score for blocks that are seen in part."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor

from helion_attn.configs import MASK_BLOCK
from helion_attn.ops.mask_bits import mask_bits
from helion_attn.preprocess.mask_bits import IN_PART, UNSEEN, WHOLE, WORD, MaskBitsProblem
from helion_attn.types import _OfTensors
from helion_attn.validate.block_mask import check_blocks, check_dense, check_flex
from helion_attn.validate.dense import described

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

#: Whether a query sees a key: index tensors of sequences, heads, queries and keys, which broadcast, to bool.
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

#: Blocks whose scores are evaluated at once: 2**24 scores.
EVALUATED_BLOCKS = 1024


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

    @classmethod
    def from_dense(cls, mask: torch.Tensor, capacity: int | None = None) -> BlockMask:
        """Make it of a mask by scores.

        One kernel reads the mask once. How many different blocks are seen in part is then read on the host, unless
        `capacity` says how many there may be; more of them fail an assertion on the device, as an index out of range
        does in PyTorch.

        Args:
            mask: bool [M, N], [H or 1, M, N] or [B or 1, H or 1, M, N], True where a query sees a key. Any strides; of
                a batch or of heads that are expanded one is read. It is copied where rows do not begin at multiples of
                4 bytes.
            capacity: tiles that there is room for, each 2 KB. Needed in torch.compile and in CUDA graphs.

        Raises:
            TypeError, ValueError: naming the argument, its value and what is accepted.
            RuntimeError: `capacity` is needed.
        """
        check_dense(mask, capacity)
        # [B or 1, H or 1, M, N]
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask[tuple(slice(1) if step == 0 else slice(None) for step in mask.stride()[:2])]
        M, N = mask.shape[2:]
        bits, kinds, hashes = mask_bits(MaskBitsProblem(mask, N))
        return cls._of_kinds(M, N, *_stored_once(bits, kinds, hashes, capacity))

    @classmethod
    def from_flex(cls, mask: FlexMask) -> BlockMask:
        """Make it of PyTorch's `torch.nn.attention.flex_attention.BlockMask`, of blocks of any size.

        Its `mask_mod` is evaluated now, for blocks that are seen in part, and the host waits for that.

        Args:
            mask: from `create_block_mask` or `BlockMask.from_kv_blocks`.

        Raises:
            TypeError, ValueError: naming what is wrong with it, and what is accepted.
        """
        check_flex(mask)
        M, N = mask.seq_lengths
        sizes = mask.BLOCK_SIZE
        part = _listed(mask.kv_num_blocks, mask.kv_indices, -(-N // sizes[1]))
        whole = torch.zeros_like(part)
        if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
            whole = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, -(-N // sizes[1]))
        mask_mod = torch.vmap(mask.mask_mod, (None, None, None, 0))
        mask_mod = torch.vmap(torch.vmap(mask_mod, (None, None, 0, None)))

        def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            at = (b, h, q // sizes[0], k // sizes[1])
            seen = mask_mod(b.flatten(), h.flatten(), q.flatten(1), k.flatten(1)).bool()
            return whole[at] | (part[at] & seen)

        some = _regrouped(part | whole, sizes, M, N, torch.any)
        all_ = _regrouped(whole, sizes, M, N, torch.all)
        kinds = torch.where(all_, WHOLE, torch.where(some, IN_PART, UNSEEN)).to(torch.int32)
        return cls._of_rule(M, N, kinds, rule)

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

    @classmethod
    def _of_rule(cls, M: int, N: int, kinds: torch.Tensor, rule: Rule) -> BlockMask:
        """The mask of int32 [B, H, M_blocks, N_blocks], `WHOLE`, `UNSEEN` or `IN_PART`, and of a rule for the last.

        Blocks that the rule sees whole or not at all become that. The rule gets [n, 1, 1] sequences and heads,
        [n, 128, 1] queries and [n, 1, 128] keys, and none past M or N.
        """
        at = (kinds == IN_PART).nonzero()
        if at.size(0) == 0:
            return cls._of_kinds(M, N, kinds, None)
        ahead = torch.arange(MASK_BLOCK, device=kinds.device)
        found = []
        for blocks in at.split(EVALUATED_BLOCKS):
            # [n, 1, 1]
            b, h, m_block, n_block = blocks[:, :, None, None].unbind(1)
            # What does not exist is as the last that does, which leaves a whole block whole and an unseen one unseen.
            q = (m_block * MASK_BLOCK + ahead.unsqueeze(1)).clamp_max(M - 1)
            k = (n_block * MASK_BLOCK + ahead).clamp_max(N - 1)
            seen = rule(b, h, q, k).expand(-1, MASK_BLOCK, MASK_BLOCK)
            found.append(mask_bits(MaskBitsProblem(seen.unsqueeze(1), MASK_BLOCK)))
        # [blocks, 1, 1, 1, ..]
        bits, of_part, hashes = (torch.cat(each) for each in zip(*found, strict=True))
        of_part, tiles = _stored_once(bits, of_part, hashes, None)
        return cls._of_kinds(M, N, kinds.index_put(at.unbind(1), of_part.flatten()), tiles)

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

    def _of_first_keys(self, N: int) -> BlockMask:
        """The mask of the first N keys."""
        kinds = self._kinds()[..., : -(-N // MASK_BLOCK)]
        return self._of_kinds(self.M, N, kinds.to(torch.int32), self.tiles)

    def to_dense(self) -> torch.Tensor:
        """The mask by scores: bool [B, H, M, N]."""
        bits = torch.arange(WORD, dtype=torch.int32, device=self.device)
        # [T, 128, 128]
        tiles = (self.tiles.unsqueeze(3) >> bits & 1).bool().flatten(2)
        tiles = torch.cat([tiles, torch.zeros_like(tiles[:1]), torch.ones_like(tiles[:1])])
        # `UNSEEN` and `WHOLE` are the last two.
        scores = tiles[self._kinds()].transpose(3, 4).flatten(4, 5).flatten(2, 3)
        return scores[:, :, : self.M, : self.N].contiguous()

    def _seen_by(self, b: int, h: int, rows: torch.Tensor) -> torch.Tensor:
        """Which keys some queries of a head see: bool [rows, N]."""
        # [rows, N_blocks]
        kinds = self._kinds()[b % self.B, h % self.H][rows // MASK_BLOCK]
        # [rows, N_blocks, words of a row]
        words = self.tiles[kinds.clamp_min(0), (rows % MASK_BLOCK).unsqueeze(1)]
        words = torch.where(kinds.unsqueeze(2) < 0, (kinds.unsqueeze(2) == WHOLE) * -1, words)
        bits = torch.arange(WORD, dtype=torch.int32, device=self.device)
        return (words.unsqueeze(3) >> bits & 1).bool().flatten(1)[:, : self.N]

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


#: What PyTorch's masks became, by their identity.
_OF_FLEX: dict[int, tuple[weakref.ref[FlexMask], BlockMask]] = {}


def as_block_mask(mask: BlockMask | FlexMask | None) -> BlockMask | None:
    """A mask as attention takes it; one of PyTorch's is converted once, and must not be changed then.

    Raises:
        TypeError, ValueError: naming `block_mask` and what is accepted.
        RuntimeError: it is to be converted in torch.compile.
    """
    if mask is None or isinstance(mask, BlockMask):
        return mask
    if torch.compiler.is_compiling():
        raise RuntimeError("block_mask is not a helion_attn.BlockMask; in torch.compile it must be one, made outside")
    known = _OF_FLEX.get(id(mask))
    if known is not None and known[0]() is mask:
        return known[1]
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    if not isinstance(mask, FlexMask):
        raise TypeError(
            f"block_mask is {described(mask)}; it must be a helion_attn.BlockMask, which any bool mask becomes by "
            f"BlockMask.from_dense, or a torch.nn.attention.flex_attention.BlockMask"
        )
    made = BlockMask.from_flex(mask)
    key = id(mask)
    _OF_FLEX[key] = weakref.ref(mask, lambda _: _OF_FLEX.pop(key, None)), made
    return made


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


def _stored_once(
    bits: torch.Tensor, kinds: torch.Tensor, hashes: torch.Tensor, capacity: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `BlockMask._of_kinds` takes, from what `preprocess.mask_bits` finds."""
    in_part = kinds == IN_PART
    # Blocks that are not seen in part come first, after one more that makes sure of that.
    least = torch.iinfo(torch.int64).min
    keys = torch.where(in_part, hashes.clamp_min(least + 1), least).flatten()
    keys, order = torch.cat([keys.new_full((1,), least), keys]).sort(stable=True)
    is_new = keys[1:] != keys[:-1]
    tile, block = is_new.cumsum(0) - 1, order[1:] - 1
    exact = capacity is None
    if capacity is None:
        capacity = int(tile[-1]) + 1
        if capacity == 0:
            return kinds, None
    else:
        torch._assert_async(tile[-1] < capacity, f"more than capacity={capacity} different blocks are seen in part")
    # What is no tile's first block, or has no room, goes to a place that is cut off.
    first = block.new_zeros(capacity + 1).scatter_(0, torch.where(is_new, tile.clamp_max(capacity), capacity), block)
    tiles = bits.flatten(0, 3)[first[:capacity]]
    if not exact:
        # Room that is left has the bits of some block, which may be undefined.
        used = torch.arange(capacity, device=tile.device) <= tile[-1]
        tiles = tiles.masked_fill(~used[:, None, None], 0)
    of_block = torch.empty_like(tile).scatter_(0, block, tile).view_as(kinds)
    return torch.where(in_part, of_block.to(torch.int32), kinds), tiles


def _listed(counts: torch.Tensor, indices: torch.Tensor, n_blocks: int) -> torch.Tensor:
    """The blocks that a mask of PyTorch lists: bool [B, H, .., n_blocks]."""
    counts, indices = (x[(None,) * (4 - indices.dim())] for x in (counts, indices))
    past = torch.arange(indices.size(3), device=indices.device) >= counts.unsqueeze(3)
    room = past.new_zeros((*indices.shape[:3], n_blocks + 1))
    return room.scatter_(3, indices.long().masked_fill(past, n_blocks), True)[..., :n_blocks]


def _regrouped(
    blocks: torch.Tensor, sizes: tuple[int, int], M: int, N: int, reduce: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """What `reduce`, any or all, says of blocks of 128 x 128, from what is known of blocks of other sizes."""
    for dim, size, length in ((2, sizes[0], M), (3, sizes[1], N)):
        # Pieces of which blocks of both sizes are made, as many as there are tokens for.
        piece = math.gcd(size, MASK_BLOCK)
        blocks = blocks.repeat_interleave(size // piece, dim).narrow(dim, 0, -(-length // piece))
        missing = -blocks.size(dim) % (MASK_BLOCK // piece)
        if missing:
            # The last again, which changes neither any nor all.
            last = blocks.narrow(dim, blocks.size(dim) - 1, 1)
            blocks = torch.cat([blocks, last.expand([missing if i == dim else -1 for i in range(4)])], dim)
        blocks = reduce(blocks.unflatten(dim, (-1, MASK_BLOCK // piece)), dim + 1)
    return blocks
