"""`fp8_attn_fwd`: attention over packed tensors, and which kernel, tile and split it takes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from helion_attn import calls
from helion_attn.compiler.buffers import sm_count
from helion_attn.configs import (
    LargeTileConfig,
    TileConfig,
    attention_tile_config,
    large_tile_config,
    scheduling,
    uses_large_d,
)
from helion_attn.ops import flops
from helion_attn.ops.declare import Operation
from helion_attn.problem import AttentionArgs, Softmax
from helion_attn.types import Recipe

Outputs = tuple[torch.Tensor, torch.Tensor]


class Choice(NamedTuple):
    """Which kernel a call takes, and how its work is cut.

    Attributes:
        tile: a `LargeTileConfig` runs `attention_large_d`, another `attention`.
        splits: runs of a program's key blocks; their parts are merged if there are several.
        pack_gqa: the heads of a group share tiles.
    """

    tile: TileConfig | LargeTileConfig
    splits: int
    pack_gqa: bool


@functools.lru_cache(4096)
def _tile(d: int, d_v: int, causal: bool, bits: tuple[int, int], load: float) -> TileConfig | LargeTileConfig:
    if uses_large_d(d, d_v, bits):
        return large_tile_config(d, d_v, causal, load)
    return attention_tile_config(d, d_v, causal, bits, load)


class Shape(NamedTuple):
    """Sizes and options by which a kernel, its config and its splits are chosen.

    Attributes:
        heads: B * H and B * H_kv.
        blocks: packed blocks of a head's queries, and of its keys.
        m_len: and the rest, as in `AttentionArgs`.
        block_sparse: there is a block mask.
    """

    heads: tuple[int, int]
    blocks: tuple[int, int]
    m_len: int
    d: int
    d_v: int
    softmax: Softmax
    recipe: Recipe
    num_splits: int | None
    block_sparse: bool


def shape_of(a: AttentionArgs) -> Shape:
    """Return the shape of packed tensors."""
    q8, k8 = a.packed.q8, a.packed.k8
    return Shape(
        heads=(q8.size(0), k8.size(0)),
        blocks=(q8.size(1), k8.size(1)),
        m_len=a.m_len,
        d=a.d,
        d_v=a.d_v,
        softmax=a.softmax,
        recipe=a.recipe,
        num_splits=a.num_splits,
        block_sparse=a.block_mask.block_sparse,
    )


def choose(shape: Shape, sm_count: int) -> Choice:
    """The kernel, tile and split of a call on a GPU of `sm_count` SMs; the interpreter counts as one."""
    load = scheduling.query_blocks_per_sm(shape.heads[0], shape.blocks[0], sm_count)
    tile = _tile(shape.d, shape.d_v, shape.softmax.right >= 0, shape.recipe.bits, load)
    if isinstance(tile, LargeTileConfig):
        return Choice(tile, splits=1, pack_gqa=False)
    if shape.block_sparse:
        # How many key blocks a row block visits, and which heads visit the same, is on the GPU alone.
        return Choice(tile, splits=1 if shape.num_splits is None else shape.num_splits, pack_gqa=False)
    pack_gqa, splits = scheduling.schedule(
        tile, shape.heads, shape.blocks, shape.m_len, shape.softmax.left, shape.softmax.right, sm_count
    )
    return Choice(tile, splits if shape.num_splits is None else shape.num_splits, pack_gqa)


def empty_out_and_lse(
    like: torch.Tensor, rows: tuple[int, int, int], d_v: int, bshd: bool, dtype: torch.dtype
) -> Outputs:
    """`out` and fp32 `lse` for [B, H, M] rows."""
    B, H, M = rows
    shape = (B, M, H, d_v) if bshd else (B, H, M, d_v)
    return like.new_empty(shape, dtype=dtype), like.new_empty(rows, dtype=torch.float32)


def empty_outputs(a: AttentionArgs) -> Outputs:
    """`out` and `lse`."""
    B, H = a.packed.q_descale.shape[:2]
    return empty_out_and_lse(a.packed.q_descale, (B, H, a.m_len), a.d_v, a.bshd, a.out_dtype)


def _launch(a: AttentionArgs) -> Outputs:
    return launch_choice(a, choose(shape_of(a), sm_count(a.packed.q8)))


def launch_choice(a: AttentionArgs, choice: Choice) -> Outputs:
    """`out` and `lse` of packed tensors."""
    from helion_attn.kernels import attention, attention_large_d

    out, lse = empty_outputs(a)
    if isinstance(choice.tile, LargeTileConfig):
        attention_large_d.launch(choice.tile, a, out, lse)
    else:
        attention.launch(choice.tile, a, out, lse, splits=choice.splits, pack_gqa=choice.pack_gqa)
    return out, lse


attention = Operation(
    "fp8_attn_fwd", AttentionArgs, 2, _launch, empty_outputs, flops=flops.of_packed, call=calls.of_packed
)
