"""Which kernel attention takes, and how its work is cut: decided here alone, with the reasons."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch

from helion_attn.configs import (
    LargeTileConfig,
    TileConfig,
    attention_tile_config,
    large_tile_config,
    scheduling,
    uses_large_d,
)
from helion_attn.kernels.lib.strided import WIDEST_LOAD
from helion_attn.options import ScoreOptions
from helion_attn.problem import AttentionArgs, Choice, DenseArgs, RopeArgs
from helion_attn.types import Recipe


class Shape(NamedTuple):
    """Sizes and options by which a kernel, its config and its splits are chosen."""

    heads: tuple[int, int]  # B * H and B * H_kv
    blocks: tuple[int, int]  # packed blocks of a head's queries, and of its keys
    m_len: int  # and the rest, as in `AttentionArgs`
    d: int
    d_v: int
    scores: ScoreOptions
    recipe: Recipe
    num_splits: int | None
    block_sparse: bool  # there is a block mask
    # Dense tensors; or "varlen", sequences that follow each other, or "ranks", keys of several ranks: these run
    # `fp8_attn_fwd`, keys are not split and heads share no tiles.
    of: Literal["dense", "varlen", "ranks"] = "dense"


def shape_of(a: AttentionArgs, of: Literal["dense", "varlen", "ranks"] = "dense") -> Shape:
    """Return the shape of packed tensors."""
    q8, k8 = a.packed.q8, a.packed.k8
    return Shape(
        heads=(q8.size(0), k8.size(0)),
        blocks=(q8.size(1), k8.size(1)),
        m_len=a.m_len,
        d=a.d,
        d_v=a.d_v,
        scores=a.scores,
        recipe=a.recipe,
        num_splits=a.num_splits,
        block_sparse=a.block_mask.lists is not None,
        of=of,
    )


def shape_of_dense(a: DenseArgs) -> Shape:
    """Return the shape of tensors that are not packed yet."""
    (B, H, M, D), (H_kv, N) = a.q.shape, a.k.shape[1:3]
    tile = a.packing
    return Shape(
        heads=(B * H, B * H_kv),
        blocks=(-(-M // tile.bm), -(-N // tile.bn)),
        m_len=M,
        d=D,
        d_v=a.v.size(3),
        scores=a.scores,
        recipe=a.recipe,
        num_splits=a.num_splits,
        block_sparse=a.block_mask.lists is not None,
    )


@functools.lru_cache(4096)
def _tile(
    of: str, d: int, d_v: int, has_right: bool, bits: tuple[int, int], load: float
) -> TileConfig | LargeTileConfig:
    if of == "dense" and uses_large_d(d, d_v, bits):
        return large_tile_config(d, d_v, has_right, load)
    return attention_tile_config(d, d_v, has_right, bits, load)


def choose(shape: Shape, sm_count: int, unpacked: DenseArgs | None = None) -> Choice:
    """The kernel of a call and how its work is cut, on a GPU of `sm_count` SMs; the interpreter counts as one.

    Args:
        shape: of the call.
        sm_count: SMs of the GPU.
        unpacked: the call, if its Q is not packed yet.
    """
    scores = shape.scores
    load = shape.heads[0] * shape.blocks[0] / sm_count
    choice = Choice(_tile(shape.of, shape.d, shape.d_v, scores.right >= 0, shape.recipe.bits, load))
    if shape.of == "dense" and not isinstance(choice.tile, LargeTileConfig):
        splits, pack_gqa = 1, False
        # How many key blocks a row block of a mask visits, and which heads visit the same, is on the GPU alone.
        if not shape.block_sparse:
            pack_gqa, splits = scheduling.schedule(
                choice.tile, shape.heads, shape.blocks, shape.m_len, scores.left, scores.right, sm_count
            )
        choice = Choice(choice.tile, splits if shape.num_splits is None else shape.num_splits, pack_gqa)
    if unpacked is not None and unpacked.norm.q_weight is None:
        # A norm in the attention kernel would come on top of what it has no registers for.
        in_kernel = quantises_q(unpacked.q, unpacked.rope, shape.recipe, choice)
        choice = choice._replace(quantises_q=in_kernel)
    return choice._replace(head_group=head_group(shape, choice, sm_count))


#: The largest padded head dim whose attention kernel quantises Q. Its instructions come on top of those that bind the
#: kernel: at 64 that takes less than packing Q, at 128 the same or 2% of a call more, at 256 up to 3%.
MAX_QUANTISED_D = 64


def quantises_q(q: torch.Tensor, rope: RopeArgs, recipe: Recipe, choice: Choice) -> bool:
    """Whether the attention kernel quantises Q, a tile in each program, so that Q is read once and never written.

    Not where several programs share a tile (splits of the keys, or V in pieces: `fp8_attn_fwd_large_d`), or a tile has
    rows of several heads; nor a rotation, whose matrix takes 32 KB of shared memory; nor descales of more than a row.
    A 16-bit P is scaled in a layout of its own, to which every key block would convert the descales. Loads must be 16
    bytes wide, and addresses fit 32 bits: the kernel has no registers to spare.
    """
    tile = choice.tile
    if isinstance(tile, LargeTileConfig) or tile.D_pad > MAX_QUANTISED_D or choice.splits > 1 or choice.pack_gqa:
        return False
    if recipe.q_scales != "token" or recipe.hadamard or recipe.pv_dtype.itemsize != 1:
        return False
    # fp32 rows, and angles beside channels that are not rotated, would spill. Triton keeps shorter rotated rows in
    # registers, and loads them in every key block.
    if q.itemsize != 2 or (rope.cos is not None and not 2 * rope.cos.size(1) == tile.D_pad == MAX_QUANTISED_D):
        return False
    aligned = q.data_ptr() % WIDEST_LOAD == 0
    wide = aligned and q.stride(3) == 1 and not any(stride * q.itemsize % WIDEST_LOAD for stride in q.stride()[:3])
    last = sum((size - 1) * stride for size, stride in zip(q.shape, q.stride(), strict=True))
    return wide and last < 2**31


def _programs(a: Shape, choice: Choice) -> tuple[int, int]:
    """Heads of a launch's grid, and programs of each, before keys are split."""
    q_heads, kv_heads = a.heads
    if choice.pack_gqa:
        return kv_heads, scheduling.gqa_query_blocks(a.m_len, q_heads // kv_heads, choice.tile.bm)
    if isinstance(choice.tile, LargeTileConfig):
        return q_heads, a.blocks[0] * -(-a.d_v // choice.tile.v_tile)
    return q_heads, -(-a.m_len // choice.tile.bm)


def head_group(a: Shape, choice: Choice, sm_count: int) -> int:
    """How many heads come at once; of sequences that follow each other, the programs of those."""
    if not (a.scores.rows_differ or a.block_sparse) or choice.splits > 1:
        return 1
    if a.of == "varlen":
        return scheduling.group_programs(sm_count, choice.tile.ctas_per_sm)
    return scheduling.head_group(*_programs(a, choice), sm_count, choice.tile.ctas_per_sm)


def reasons(a: Shape, choice: Choice, sm_count: int, device: str) -> tuple[str, ...]:
    """Say why not others, a sentence each: on the kernel, the tile, the splits, the groups and the channels."""
    return (
        _why_kernel(a, choice),
        _why_tile(choice, device),
        _why_splits(a, choice, sm_count),
        _why_groups(a, choice),
        _why_channels(a.recipe),
    )


def _why_kernel(a: Shape, choice: Choice) -> str:
    of = f"D {a.d}, D_v {a.d_v}"
    if isinstance(choice.tile, LargeTileConfig):
        return f"fp8_attn_fwd is not taken: {of} would be padded beyond what it has registers for, or to more work"
    if a.recipe.bits != (8, 8):
        return "fp8_attn_fwd_large_d is not taken: it has 8-bit numbers only"
    return f"fp8_attn_fwd_large_d is not taken: {of} fits fp8_attn_fwd"


def _why_tile(choice: Choice, device: str) -> str:
    tile = choice.tile
    load = tile.max_query_blocks_per_sm
    size = "of any size" if load == float("inf") else f"of up to {load} query blocks an SM"
    text = f"the tile is the one that was fastest on {tile.measured_on} for launches {size}"
    if tile.measured_on not in (None, device) and "CPU" not in device:
        text += f", and was not timed on {device}"
    return text


def _why_splits(a: Shape, choice: Choice, sm_count: int) -> str:
    tile = choice.tile
    if isinstance(tile, LargeTileConfig):
        return "keys are not split: fp8_attn_fwd_large_d has no split-KV"
    if a.num_splits is not None:
        return f"keys are {'split' if choice.splits > 1 else 'not split'}: num_splits says so"
    if a.block_sparse:
        return "keys are not split: how many blocks of them a program visits is not known here"
    heads, of_each = _programs(a, choice)
    programs, resident = heads * of_each, sm_count * tile.ctas_per_sm
    of_all = f"{programs} programs for the {resident} that the GPU holds at once"
    if choice.splits > 1:
        return f"keys are split: {of_all} leave a part of it idle"
    seen = scheduling.visible_key_blocks(a.blocks[1], a.scores.left, a.scores.right, tile.bm, tile.bn)
    seen = min(seen, scheduling.mean_key_blocks(a.blocks[1], a.m_len, a.scores.right, tile.bn))
    if seen < (fewest := scheduling.MIN_SPLITS * scheduling.MIN_SPLIT_BLOCKS):
        return f"keys are not split: a program sees {seen} blocks of them, and merging pays from {fewest} on"
    return f"keys are not split: there are {of_all}, and splits would not be {scheduling.SPLIT_GAIN} times as fast"


def _why_groups(a: Shape, choice: Choice) -> str:
    q_heads, kv_heads = a.heads
    group = q_heads // kv_heads
    if choice.pack_gqa:
        return f"heads share tiles: {a.m_len} queries of {group} heads fill fewer tiles together"
    if group == 1:
        return "heads do not share tiles: every query head has a KV head of its own"
    if a.block_sparse:
        return "heads do not share tiles: a block mask may differ among them"
    if isinstance(choice.tile, LargeTileConfig):
        return "heads do not share tiles: fp8_attn_fwd_large_d has a tile for each"
    return f"heads do not share tiles: {a.m_len} queries of {group} heads would not fill an eighth fewer tiles together"


def _why_channels(recipe: Recipe) -> str:
    if recipe.equalise:
        return (
            "channels of Q and K are equalised before they are rounded, where two queries and four keys or more show "
            "that sizes differ: helion_attn.check says what that leaves of them"
        )
    why = "the recipe has equalise=False" if recipe.bits[0] == 8 else "Q and K have 16 bits"
    return f"channels of Q and K are not equalised: {why}"
