"""The patterns that `helion_attn.masks` has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from helion_attn.configs import MASK_BLOCK
from helion_attn.masks.blocks import BlockMask, Rule
from helion_attn.ops.block_mask import top_blocks as choose_blocks
from helion_attn.preprocess.mask_bits import IN_PART, UNSEEN, WHOLE
from helion_attn.problem import TopBlocksArgs
from helion_attn.types import Layout
from helion_attn.validate.block_mask import MAX_TOKENS, check_int
from helion_attn.validate.dense import check_flag
from helion_attn.validate.masks import check_grid, check_ids, check_number, check_sizes, check_top_blocks


class Reordered(NamedTuple):
    """A mask of tokens in another order than theirs: of `q[:, :, order]` and `k[:, :, order]`.

    Attributes:
        mask: a `BlockMask`.
        order: int64 [tokens], of each place the token that goes there.
        inverse: int64 [tokens], what brings outputs back: `out[:, :, inverse]`.

    Example:
        q, k, v = torch.randn(3, 1, 2, 64, 64, dtype=torch.bfloat16)
        m = ha.masks.sliding_tile((4, 4, 4), (2, 2, 2), (1, 1, 1))
        assert isinstance(m, ha.masks.Reordered)
        q, k, v = (x[:, :, m.order] for x in (q, k, v))
        out = ha.attention(q, k, v, block_mask=m.mask)[:, :, m.inverse]
    """

    mask: BlockMask
    order: torch.Tensor
    inverse: torch.Tensor


def documents(ids: torch.Tensor, *, causal: bool = False) -> BlockMask:
    """Tokens see the tokens of their own document: several documents packed into one sequence.

    `documents(torch.tensor([0, 0, 0, 1, 1, -1]))` are documents of three and two tokens, and padding. Documents need
    not lie together, but where they do not, blocks are evaluated that see nothing.

    Args:
        ids: int32 or int64 [S] or [B, S], the document of each token; a negative one is padding, which sees nothing and
            is not seen.
        causal: a token sees no later one.

    Returns:
        A mask of S queries and S keys, for the heads alike.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        mask = ha.masks.documents(torch.tensor([0] * 60 + [1] * 40), causal=True)
        out = ha.attention(q, k, v, block_mask=mask)
    """
    check_ids("ids", ids, (1, 2), "[S] or [B, S]")
    check_flag(causal, "causal")
    # [B, S]
    ids = ids.view(-1, ids.size(-1)).long()
    S = ids.size(1)
    padding = ids < 0
    # [B, blocks]
    least, most = _by_blocks(ids)
    low, high = _by_blocks(ids.masked_fill(padding, torch.iinfo(ids.dtype).max))[0], most
    at_q, at_k = (slice(None), slice(None), None), (slice(None), None)
    some = torch.maximum(low[at_q], low[at_k]) <= torch.minimum(high[at_q], high[at_k])
    is_one = (least == most) & (least >= 0)
    whole = is_one[at_q] & is_one[at_k] & (least[at_q] == least[at_k])
    if causal:
        first, last = _ends(S, ids.device)
        some, whole = some & (first <= last.unsqueeze(1)), whole & (last <= first.unsqueeze(1))

    def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        of_q = ids[b, q]
        seen = (of_q == ids[b, k]) & (of_q >= 0)
        return seen & (k <= q) if causal else seen

    return BlockMask._of_rule(S, S, _kinds(some, whole).unsqueeze(1), rule)


def prefix(
    n: int | torch.Tensor, M: int, N: int | None = None, *, device: torch.device | str | None = None
) -> BlockMask:
    """All queries see the first n keys, and otherwise no later key: the mask of a prefix language model.

    Query i sees key j if j < n or j <= i + N - M. `prefix(576, 4096)` lets the tokens of an image see each other.

    Args:
        n: keys of the prefix; an int32 or int64 tensor [B] has one for each sequence.
        M: queries.
        N: keys; None for as many.
        device: of the mask; None for that of `n`, or PyTorch's default.

    Returns:
        A mask of M queries and N keys, for the heads alike, and without a tensor `n` for the sequences.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        out = ha.attention(q, k, v, block_mask=ha.masks.prefix(20, 100))
    """
    N = M if N is None else N
    check_int("M", M, 1, MAX_TOKENS)
    check_int("N", N, 1, MAX_TOKENS)
    if isinstance(n, torch.Tensor):
        check_ids("n", n, (1,), "[B]")
        length = n.to(device=device or n.device, dtype=torch.int64)
    else:
        check_int("n", n, 0, MAX_TOKENS)
        length = torch.full((1,), n, device=device)
    (first_q, last_q), (first_k, last_k) = _ends(M, length.device), _ends(N, length.device)
    # [B, 1, 1]
    length = length[:, None, None]
    # [B, M_blocks, N_blocks]: up to where the first and the last query of a block see.
    some = first_k < torch.maximum(length, (last_q + N - M + 1).unsqueeze(1))
    whole = last_k < torch.maximum(length, (first_q + N - M + 1).unsqueeze(1))

    def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k < length[b.flatten()]) | (k <= q + N - M)

    return BlockMask._of_rule(M, N, _kinds(some, whole).unsqueeze(1), rule)


def sliding_tile(
    grid: Sequence[int],
    tile: Sequence[int],
    window: Sequence[int],
    *,
    before: int = 0,
    text: int = 0,
    device: torch.device | str | None = None,
) -> Reordered:
    """Tokens of a video see the tiles around their own (Sliding Tile Attention, arXiv:2502.04507).

    The video is cut into tiles, and its tokens are reordered so that those of a tile lie together. A token sees a
    window of tiles with its own in the middle; at the video's edges the window is moved inward and keeps its size.

    `m = sliding_tile((21, 45, 80), (3, 5, 8), (3, 5, 5))` is for Wan's 75,600 tokens;
    `attention(q[:, :, m.order], k[:, :, m.order], v[:, :, m.order], block_mask=m.mask)[:, :, m.inverse]`.

    Args:
        grid: frames, height and width in tokens, which lie in this order, the width fastest.
        tile: frames, height and width of a tile. The last tile of a dimension may be smaller. Tiles whose tokens are a
            multiple of 128 leave no block seen in part.
        window: tiles that a token sees in each dimension. With an even number, the one more lies before.
        before: tokens ahead of the video's, such as text and sound, which see all and are seen by all.
        text: tokens behind the video's, which see all and are seen by all.
        device: of the tensors; None for PyTorch's default.

    Returns:
        The mask of the reordered tokens, and their order.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.

    Example:
        q, k, v = torch.randn(3, 1, 2, 64, 64, dtype=torch.bfloat16)
        m = ha.masks.sliding_tile((4, 4, 4), (2, 2, 2), (1, 1, 1))
        q, k, v = (x[:, :, m.order] for x in (q, k, v))
        out = ha.attention(q, k, v, block_mask=m.mask)[:, :, m.inverse]
    """
    check_grid(grid, tile, before, text)
    tiles = [-(-size // of) for size, of in zip(grid, tile, strict=True)]
    check_sizes("window", window, tiles)
    # [frames, height, width]: of each token its tile's number.
    at = [torch.arange(size, device=device) // of for size, of in zip(grid, tile, strict=True)]
    tile_of = ((at[0][:, None, None] * tiles[1] + at[1][:, None]) * tiles[2] + at[2]).flatten()
    count = math.prod(tiles)
    tile_of = torch.cat([tile_of.new_full((before,), count), tile_of, tile_of.new_full((text,), count)])
    group, order = tile_of.sort(stable=True)
    seen = torch.ones((1, 1), dtype=torch.bool, device=device)
    for size, of in zip(tiles, window, strict=True):
        # [size, size] in this dimension; [tiles, tiles] of those up to it.
        near = torch.arange(size, device=device)
        first = (near - of // 2).clamp(0, size - of).unsqueeze(1)
        seen = torch.kron(seen, (first <= near) & (near < first + of))
    seen = torch.nn.functional.pad(seen, (0, 1, 0, 1), value=True)
    return Reordered(_of_groups(group, seen), order, order.argsort())


def radial(
    frames: int,
    tokens: int,
    *,
    decay: float = 1.0,
    narrowest: int = MASK_BLOCK,
    sink_frames: int = 1,
    text: int = 0,
    device: torch.device | str | None = None,
) -> BlockMask:
    """A token of a video sees less of a frame the further away that is (Radial Attention, arXiv:2506.19852).

    It sees all of its own frame and of the next on both sides. Of a frame at distance d, 2**r <= d < 2**(r + 1), it
    sees the tokens that are nearer to its own place than `width = decay * tokens / 2**r`. Where that is below
    `narrowest`, they are as near as that, and only frames are seen whose distance is a multiple of
    `ceil(narrowest / width)`.

    `radial(21, 3600)` is for Wan's 75,600 tokens, and `BlockMask(mask.blocks, mask.M, mask.N)` sees the blocks whole.

    Args:
        frames: of the video; tokens lie frame by frame.
        tokens: of a frame.
        decay: of the width; 1 is the paper's.
        narrowest: 1 is the paper's formula; a block is what its implementation has.
        sink_frames: first frames, which all tokens see whole.
        text: tokens behind those of the video, which see all and are seen by all.
        device: of the mask; None for PyTorch's default.

    Returns:
        A mask of `frames * tokens + text` queries and as many keys, for sequences and heads alike.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        out = ha.attention(q, k, v, block_mask=ha.masks.radial(5, 20))
    """
    check_int("frames", frames, 1, MAX_TOKENS)
    check_int("tokens", tokens, 1, MAX_TOKENS // frames)
    check_number("decay", decay, "a finite number above 0", isinstance(decay, (int, float)) and 0 < decay < math.inf)
    check_int("narrowest", narrowest, 1, MAX_TOKENS)
    check_int("sink_frames", sink_frames, 0, frames)
    check_int("text", text, 0, MAX_TOKENS - frames * tokens)
    video, S = frames * tokens, frames * tokens + text
    widths, steps = [tokens] * min(frames, 2), [1] * min(frames, 2)
    narrowest = min(narrowest, tokens)
    for distance in range(2, frames):
        width = decay * tokens / 2 ** (distance.bit_length() - 1)
        widths.append(min(tokens, math.ceil(max(width, narrowest))))
        steps.append(math.ceil(max(1.0, narrowest / width)))
    # [frames]: how near a token must be to be seen, or 0.
    near = [0 if d % step else w for d, (w, step) in enumerate(zip(widths, steps, strict=True))]
    reach = torch.tensor(near, device=device)

    def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        of_q, of_k = (x.div(tokens, rounding_mode="floor").clamp_max(frames - 1) for x in (q, k))
        near = (q - of_q * tokens - k + of_k * tokens).abs() < reach[(of_q - of_k).abs()]
        return near | (of_k < sink_frames) | (q >= video) | (k >= video)

    def runs() -> Iterable[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Yield, frame by frame and then for the text, the keys that each query sees."""
        q = torch.arange(S, device=reach.device)
        of_q, is_text = q // tokens, q >= video
        for frame in range(frames):
            first, end = frame * tokens, (frame + 1) * tokens
            far = reach[(of_q - frame).abs().clamp_max(frames - 1)]
            at = q - of_q * tokens + first
            all_ = is_text | (frame < sink_frames)
            begin = torch.where(all_, first, (at - far + 1).clamp_min(first))
            yield first, end, begin, torch.where(all_, end, (at + far).clamp_max(end))
        if text:
            yield video, S, torch.full_like(q, video), torch.full_like(q, S)

    return _of_runs(S, S, runs(), rule)


def top_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    keep: float | None = None,
    mass: float | None = None,
    sink_blocks: int = 1,
    local_blocks: int = 2,
    causal: bool = False,
    sm_scale: float | None = None,
    layout: Layout = "bhsd",
    tail: bool = False,
) -> BlockMask:
    """The blocks that hold most of the probability, as the means of their queries and keys have it.

    Means over blocks of 128, their products, softmax over key blocks: the idea of MInference (arXiv:2407.02490) and
    SpargeAttention (arXiv:2502.18137). It is an estimate: `check` says what it costs. It takes a few launches and the
    host reads nothing, so that it works in torch.compile and CUDA graphs.

    `attention(q, k, v, causal=True, block_mask=top_blocks(q, k, keep=0.25, causal=True))`: blocks are whole, and what
    is hidden inside of them is for `attention` to hide.

    Args:
        q: [B, H, M, D], or with layout="bshd" [B, M, H, D]; of any floating-point dtype.
        k: [B, H_kv, N, D], or [B, N, H_kv, D].
        keep: the share of the key blocks that a row block keeps, of those that it may see; at least one is kept.
        mass: or the share of the probability that it keeps, in as few blocks as hold it.
        sink_blocks: so many first key blocks are kept as well.
        local_blocks: so many key blocks are kept on either side of the diagonal, counting the one that it is in.
        causal: blocks behind the diagonal, which ends at the last query and key, are not kept.
        sm_scale: of the scores; None for 1 / sqrt(D). It matters to `mass`.
        layout: "bhsd" or "bshd".
        tail: blocks that are not kept count as one key each, as `BlockMask` says: for broad attention to smooth keys,
            such as a video's in the order of tiles. In language models it gains little (docs/masks.md).

    Returns:
        A mask of whole blocks for every sequence and head.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.

    Example:
        q, k, v = torch.randn(3, 1, 2, 300, 64, dtype=torch.bfloat16)
        mask = ha.masks.top_blocks(q, k, keep=0.25, causal=True)
        out = ha.attention(q, k, v, causal=True, block_mask=mask)
    """
    check_top_blocks(q, k, keep, mass, sm_scale, layout)
    check_int("sink_blocks", sink_blocks, 0, MAX_TOKENS)
    check_int("local_blocks", local_blocks, 0, MAX_TOKENS)
    check_flag(causal, "causal")
    if layout == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    scale = q.size(3) ** -0.5 if sm_scale is None else float(sm_scale)
    asked = TopBlocksArgs(q.detach(), k.detach(), keep, mass, sink_blocks, local_blocks, bool(causal), scale)
    return BlockMask(choose_blocks(asked), q.size(2), k.size(2), tail=tail)


def _ends(S: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last token of each block, int64 [blocks]."""
    first = torch.arange(0, S, MASK_BLOCK, device=device)
    return first, (first + MASK_BLOCK - 1).clamp_max(S - 1)


def _by_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest of each block of [B, S], [B, blocks] both."""
    missing = -x.size(1) % MASK_BLOCK
    blocks = torch.cat([x, x[:, -1:].expand(-1, missing)], 1).unflatten(1, (-1, MASK_BLOCK))
    return blocks.amin(2), blocks.amax(2)


def _kinds(some: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What `BlockMask._of_rule` takes, of blocks in which some scores may be seen, and in which all are."""
    return torch.where(whole, WHOLE, torch.where(some, IN_PART, UNSEEN)).to(torch.int32)


def _of_groups(group: torch.Tensor, seen: torch.Tensor) -> BlockMask:
    """A mask by groups of tokens.

    Args:
        group: int64 [S], ascending.
        seen: bool [groups, groups], whether a group's queries see a group's keys.
    """
    S = group.size(0)
    first, last = (group[ends] for ends in _ends(S, group.device))
    # [groups + 1, groups + 1]: how many pairs before these are seen.
    before = torch.nn.functional.pad(seen.long().cumsum(0).cumsum(1), (1, 0, 1, 0))

    def corner(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return before[rows.unsqueeze(1), columns]

    # [blocks, blocks]: of the pairs of groups that a block has tokens of, how many are seen.
    count = corner(last + 1, last + 1) - corner(first, last + 1) - corner(last + 1, first) + corner(first, first)
    groups = last - first + 1
    kinds = _kinds(count > 0, count == groups.unsqueeze(1) * groups)

    def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return seen[group[q], group[k]]

    return BlockMask._of_rule(S, S, kinds[None, None], rule)


def _of_runs(M: int, N: int, runs: Iterable[tuple[int, int, torch.Tensor, torch.Tensor]], rule: Rule) -> BlockMask:
    """A mask of which each query sees runs of keys.

    Args:
        M: queries.
        N: keys.
        runs: between which keys they lie, and where each query's begins and ends, int64 [M] both; an empty one may end
            before it begins. They do not overlap.
        rule: what `runs` says, by score.
    """
    counts: torch.Tensor | None = None
    for first, end, begin_of, end_of in runs:
        blocks = slice(first // MASK_BLOCK, -(-end // MASK_BLOCK))
        at = torch.arange(blocks.start, blocks.stop, device=begin_of.device) * MASK_BLOCK
        # [M, blocks]: how many keys each query sees of a block.
        here = torch.minimum(end_of.unsqueeze(1), at + MASK_BLOCK) - torch.maximum(begin_of.unsqueeze(1), at)
        here = torch.nn.functional.pad(here.clamp_min(0), (0, 0, 0, -M % MASK_BLOCK))
        here = here.unflatten(0, (-1, MASK_BLOCK)).sum(1)
        if counts is None:
            counts = here.new_zeros((here.size(0), -(-N // MASK_BLOCK)))
        counts[:, blocks] += here
    assert counts is not None
    rows, keys = (last - first + 1 for first, last in (_ends(M, counts.device), _ends(N, counts.device)))
    kinds = _kinds(counts > 0, counts == rows.unsqueeze(1) * keys)
    return BlockMask._of_rule(M, N, kinds[None, None], rule)
