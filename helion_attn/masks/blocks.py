"""Which scores attention sees: lists of key blocks, and a bit a score for blocks that are seen in part."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from helion_attn import types
from helion_attn.configs import MASK_BLOCK
from helion_attn.ops.block_mask import mask_bits, mask_lists
from helion_attn.preprocess.mask_bits import IN_PART, NO_KEY, UNSEEN, WHOLE, WORD
from helion_attn.problem import MaskBitsArgs, MaskListsArgs
from helion_attn.validate.block_mask import check_blocks, check_dense, check_flex
from helion_attn.validate.dense import check_flag, described

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

#: Whether a query sees a key: index tensors of sequences, heads, queries and keys, which broadcast, to bool.
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

#: Blocks whose scores are evaluated at once: 2**24 scores.
EVALUATED_BLOCKS = 1024


@dataclass(frozen=True, eq=False, repr=False, init=False)
class BlockMask(types.BlockMask):
    """Any boolean mask, as attention reads it: by blocks of 128 queries and 128 keys.

    A block that no query of it sees costs nothing. One that is seen in part has one bit a score, 2 KB; blocks with the
    same bits share them. B or H is 1 where all sequences or all heads have the same mask. It has a tensor's
    `to(device)`, `device` and `nbytes`.

    `BlockMask(blocks, M, N)` makes it of whole blocks, bool [B or 1, H or 1, ceil(M / 128), ceil(N / 128)]. With
    `tail=True` a key block that a row block does not visit, and that all of its queries may see, counts as one key: the
    mean of its keys, with log 128 added to the score, and the mean of its values (Sol-Attn, arXiv:2607.24027). A last
    block of fewer than 128 keys is then visited by all. Such a mask is for `attention` without gradients.

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
        tail: int32 [B, H, M_blocks, 4 * tail_blocks], or None: bit b of word w says whether key block 32 w + b counts
            by its means, of which blocks of 128 follow the key blocks: each row block's `entries` end with them.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        mask = ha.BlockMask.from_dense(torch.rand(100, 100) < 0.5)
        out = ha.attention(q, k, v, block_mask=mask)
    """

    def __init__(self, blocks: torch.Tensor, M: int, N: int, *, tail: bool = False) -> None:
        check_blocks(blocks, M, N)
        check_flag(tail, "tail")
        self._fill(M, N, *(_lists_with_tail(blocks, N) if tail else _lists_of(blocks)))

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
        bits, kinds, keys = mask_bits(MaskBitsArgs(mask, N))
        kinds, found = _numbered(bits, kinds, keys, capacity)
        return cls._of_found(M, N, kinds, found, capacity)

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

    def _fill(self, M: int, N: int, *tensors: torch.Tensor | None) -> None:
        """Set the fields; the last tensor, `tail`, may be left out."""
        fields = (field.name for field in dataclasses.fields(self))
        for name, value in zip_longest(fields, (M, N, *tensors)):
            object.__setattr__(self, name, value)

    @classmethod
    def _of_lists(
        cls,
        M: int,
        N: int,
        lists: torch.Tensor,
        entries: torch.Tensor,
        tile_of: torch.Tensor,
        tiles: torch.Tensor,
        tail: torch.Tensor | None = None,
    ) -> BlockMask:
        """The mask that has these fields."""
        made = cls.__new__(cls)
        made._fill(M, N, lists, entries, tile_of, tiles, tail)
        return made

    @classmethod
    def _of_kinds(cls, M: int, N: int, kinds: torch.Tensor, tiles: torch.Tensor) -> BlockMask:
        """The mask of int32 [B, H, M_blocks, N_blocks]: for each block the number of its tile, `WHOLE` or `UNSEEN`."""
        lists, entries, tile_of = mask_lists(MaskListsArgs(kinds.contiguous()))
        return cls._of_lists(M, N, lists, entries, tile_of, tiles)

    @classmethod
    def _of_found(cls, M: int, N: int, kinds: torch.Tensor, found: Found, capacity: int | None) -> BlockMask:
        """The mask of what `_of_kinds` takes, and of tiles that are found but not counted yet."""
        lists, entries, tile_of = mask_lists(MaskListsArgs(kinds.contiguous()))
        # All that needs no count is queued: here the host may wait.
        tiles = found.tiles(capacity)
        if tiles is None:
            tile_of, tiles = kinds.new_zeros((1, 1, 1, 1)), _no_tiles(kinds)
        return cls._of_lists(M, N, lists, entries, tile_of, tiles)

    @classmethod
    def _of_rule(cls, M: int, N: int, kinds: torch.Tensor, rule: Rule) -> BlockMask:
        """The mask of int32 [B, H, M_blocks, N_blocks], `WHOLE`, `UNSEEN` or `IN_PART`, and of a rule for the last.

        Blocks that the rule sees whole or not at all become that. The rule gets [n, 1, 1] sequences and heads,
        [n, 128, 1] queries and [n, 1, 128] keys, and none past M or N.
        """
        at = (kinds == IN_PART).nonzero()
        if at.size(0) == 0:
            return cls._of_lists(M, N, *_lists_of(kinds != UNSEEN))
        ahead = torch.arange(MASK_BLOCK, device=kinds.device)
        evaluated = []
        for blocks in at.split(EVALUATED_BLOCKS):
            # [n, 1, 1]
            b, h, m_block, n_block = blocks[:, :, None, None].unbind(1)
            # What does not exist is as the last that does, which leaves a whole block whole and an unseen one unseen.
            q = (m_block * MASK_BLOCK + ahead.unsqueeze(1)).clamp_max(M - 1)
            k = (n_block * MASK_BLOCK + ahead).clamp_max(N - 1)
            seen = rule(b, h, q, k).expand(-1, MASK_BLOCK, MASK_BLOCK)
            evaluated.append(mask_bits(MaskBitsArgs(seen.unsqueeze(1), MASK_BLOCK)))
        # [blocks, 1, 1, 1, ..]
        bits, of_part, keys = (torch.cat(each) for each in zip(*evaluated, strict=True))
        of_part, found = _numbered(bits, of_part, keys, None)
        return cls._of_found(M, N, kinds.index_put(at.unbind(1), of_part.flatten()), found, None)

    @property
    def blocks(self) -> torch.Tensor:
        """The blocks that are seen, in part or whole: bool [B, H, M_blocks, N_blocks]."""
        return self._kinds() != UNSEEN

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> BlockMask:
        """The same on another device."""
        moved = {name: x.to(device, non_blocking=non_blocking) for name, x in self._tensors().items()}
        return self._of_lists(self.M, self.N, **moved)

    def _of_first_keys(self, N: int) -> BlockMask:
        """The mask of the first N keys."""
        if self.tail is not None:
            return BlockMask(self.blocks[..., : -(-N // MASK_BLOCK)], self.M, N, tail=True)
        kinds = self._kinds()[..., : -(-N // MASK_BLOCK)]
        return self._of_kinds(self.M, N, kinds.to(torch.int32), self.tiles)

    def _of_sequence(self, b: int) -> BlockMask:
        """The mask of one sequence of a batch."""
        if self.B == 1:
            return self
        rows = slice(b, b + 1)
        # Of one 0 for all sequences each has the same.
        tile_of = self.tile_of if self.tile_of.size(0) == 1 else self.tile_of[rows]
        tail = None if self.tail is None else self.tail[rows]
        return self._of_lists(self.M, self.N, self.lists[rows], self.entries[rows], tile_of, self.tiles, tail)

    def to_dense(self) -> torch.Tensor:
        """The mask by scores: bool [B, H, M, N]. A tail is left out."""
        bits = torch.arange(WORD, dtype=torch.int32, device=self.device)
        # [T, 128, 128]
        tiles = (self.tiles.unsqueeze(3) >> bits & 1).bool().flatten(2)
        tiles = torch.cat([tiles, torch.zeros_like(tiles[:1]), torch.ones_like(tiles[:1])])
        # `UNSEEN` and `WHOLE` are the last two.
        scores = tiles[self._kinds()].transpose(3, 4).flatten(4, 5).flatten(2, 3)
        return scores[:, :, : self.M, : self.N].contiguous()

    def _seen_by(self, rows: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        """Which keys some queries see, bool [.., rows, N]; `kinds` [.., M_blocks, N_blocks] are of some heads."""
        # [.., rows, N_blocks, 1]
        kinds = kinds[..., rows // MASK_BLOCK, :].unsqueeze(-1)
        # [.., rows, N_blocks, words of a row]
        words = self.tiles[kinds.squeeze(-1).clamp_min(0), (rows % MASK_BLOCK).unsqueeze(1)]
        words = torch.where(kinds < 0, (kinds == WHOLE) * -1, words)
        bits = torch.arange(WORD, dtype=torch.int32, device=self.device)
        return (words.unsqueeze(-1) >> bits & 1).bool().flatten(-3)[..., : self.N]

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
        return filled[..., : -(-self.N // MASK_BLOCK)]

    def _tail_counts(self) -> torch.Tensor:
        """The key blocks that count by their means: bool [B, H, M_blocks, N_blocks]."""
        if self.tail is None:
            return torch.zeros_like(self.blocks)
        bits = torch.arange(WORD, dtype=torch.int32, device=self.device)
        return (self.tail.unsqueeze(4) >> bits & 1).bool().flatten(3)[..., : -(-self.N // MASK_BLOCK)]

    def __repr__(self) -> str:
        shape = f"B={self.B}, H={self.H}, M={self.M}, N={self.N}"
        if isinstance(self.entries, FakeTensor) or self.device.type == "meta":
            return f"BlockMask({shape})"
        density = self.blocks.double().mean().item()
        in_part = (self.entries < 0).double().mean().item()
        tail = "" if self.tail is None else ", the others by their means"
        return (
            f"BlockMask({shape}: {density:.2%} of the blocks{tail}, {in_part:.2%} in part, {self.tiles.size(0)} tiles, "
            f"{self.nbytes} bytes on {self.device})"
        )


#: What PyTorch's masks became, by their identity.
_OF_FLEX: dict[int, tuple[weakref.ref[FlexMask], BlockMask]] = {}


def as_block_mask(mask: types.BlockMask | FlexMask | None) -> BlockMask | None:
    """A mask as attention takes it; one of PyTorch's is converted once, and must not be changed then.

    Raises:
        TypeError, ValueError: naming `block_mask` and what is accepted.
        RuntimeError: it is to be converted in torch.compile.
    """
    if mask is None or isinstance(mask, BlockMask):
        return mask
    if torch.compiler.is_compiling():
        raise RuntimeError("block_mask is not a helion_attn.BlockMask; in torch.compile it must be one, made outside")
    cached = _OF_FLEX.get(id(mask))
    if cached is not None and cached[0]() is mask:
        return cached[1]
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


class Found(NamedTuple):
    """Tiles among the bits of blocks.

    Attributes:
        bits: [blocks, 128, 4], of blocks that are seen in part.
        block_of: [at least tiles + 1], past one number a block that has the bits of each tile.
        total: how many tiles there are.
    """

    bits: torch.Tensor
    block_of: torch.Tensor
    total: torch.Tensor

    def tiles(self, capacity: int | None) -> torch.Tensor | None:
        """The tiles, with zeros up to `capacity` or, without it, none but these, for which the host waits."""
        if capacity is None:
            tiles = int(self.total)
            return self.bits[self.block_of[1 : tiles + 1]] if tiles else None
        torch._assert_async(self.total <= capacity, f"more than capacity={capacity} different blocks are seen in part")
        # Room that is left has the bits of some block, which may be undefined.
        is_left = torch.arange(capacity, device=self.total.device) >= self.total
        return self.bits[self.block_of[1 : capacity + 1]].masked_fill(is_left[:, None, None], 0)


def _no_tiles(like: torch.Tensor) -> torch.Tensor:
    """The field `tiles` of a mask that no block is seen in part of."""
    return like.new_zeros((1, MASK_BLOCK, MASK_BLOCK // WORD), dtype=torch.int32)


def _lists_of(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The fields `lists`, `entries`, `tile_of` and `tiles` of whole blocks, bool [B, H, M_blocks, N_blocks]."""
    return *mask_lists(MaskListsArgs(blocks.contiguous())), _no_tiles(blocks)


def _lists_with_tail(blocks: torch.Tensor, N: int) -> tuple[torch.Tensor, ...]:
    """`_lists_of`, and the field `tail`: blocks of means follow the key blocks, and all row blocks visit them."""
    n_blocks = blocks.size(3)
    if N % MASK_BLOCK:
        last = torch.arange(n_blocks, device=blocks.device) == n_blocks - 1
        blocks = blocks | last
    # [B, H, M_blocks, tail_blocks * MASK_BLOCK]
    counts = torch.nn.functional.pad(~blocks, (0, -n_blocks % MASK_BLOCK))
    bits = torch.arange(WORD, dtype=torch.int32, device=blocks.device)
    tail = (counts.unflatten(3, (-1, WORD)).to(torch.int32) << bits).sum(4).to(torch.int32)
    listed = torch.nn.functional.pad(blocks, (0, counts.size(3) // MASK_BLOCK), value=True)
    return *_lists_of(listed), tail


def _numbered(
    bits: torch.Tensor, kinds: torch.Tensor, keys: torch.Tensor, capacity: int | None
) -> tuple[torch.Tensor, Found]:
    """What `BlockMask._of_kinds` takes, and the tiles, from what `preprocess.mask_bits` finds."""
    # One more that is not seen in part makes sure that such come first.
    keys, block = torch.nn.functional.pad(keys.flatten(), (0, 1), value=NO_KEY).sort(stable=True)
    block = block[1:]
    # Of tiles, from 1; 0 of what is not seen in part.
    number = (keys[1:] != keys[:-1]).cumsum(0)
    # Blocks of a number have the same bits: any will do.
    block_of = block.new_zeros(max(kinds.numel(), capacity or 0) + 1).scatter_(0, number, block)
    # The block that came first is not seen in part, and has no number.
    of_block = number.new_empty(kinds.numel() + 1).scatter_(0, block, number)[:-1].view_as(kinds) - 1
    kinds = torch.where(kinds == IN_PART, of_block, kinds).to(torch.int32)
    return kinds, Found(bits.flatten(0, 3), block_of, number[-1])


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
