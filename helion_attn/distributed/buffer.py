"""A rank's packed keys as one run of bytes, so that they travel in one collective and are read where they arrive.

    K's blocks | V's blocks | K's descales | V's mean, if corrected for its rounding | what else travels | padding

K's and V's blocks are those of `QuantizedQKV`, head by head. The padding makes the bytes of a rank a multiple of a
block of K and of one of V: the blocks of all ranks then lie on one grid, on which the attention kernel finds them by
arithmetic. It is less than one block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from helion_attn.configs import Packing
from helion_attn.distributed.cut import Cut
from helion_attn.preprocess.pack import recentres
from helion_attn.problem import RankChunks
from helion_attn.types import PackedTensors, Recipe

#: Bytes that a section begins at a multiple of.
ALIGNMENT = 16


class Buffer(NamedTuple):
    """Where everything lies, for so many heads and blocks."""

    heads: int  # B * H_kv
    blocks: int  # of a head, for which every rank has room
    k_block: int  # bytes of a block of K
    v_block: int  # bytes of a block of V
    descales: int  # of K, a head
    v_offset: int  # bytes before V's blocks
    descale_offset: int  # bytes before K's descales
    mean_offset: int  # bytes before V's mean
    mean_channels: int  # of V's mean, 0 if it is the same on all ranks
    rest_offset: int  # bytes before what else travels
    size: int  # bytes of all


def aligned(offset: int, to: int = ALIGNMENT) -> int:
    """The least multiple of `to` from `offset` on."""
    return -(-offset // to) * to


def buffer_for(heads: int, blocks: int, keys: int, packing: Packing, recipe: Recipe, rest: int = 0) -> Buffer:
    """The layout for `heads` heads of `blocks` blocks each, of `keys` keys of all ranks; `rest` bytes more."""
    k_block = packing.bn * packing.D_pad * recipe.qk_dtype.itemsize
    v_block = packing.bn * packing.D_v_pad * recipe.pv_dtype.itemsize
    descales = blocks if recipe.k_scales == "block" else 1
    mean_channels = packing.D_v_pad if recentres(recipe, keys) else 0
    v_offset = heads * blocks * k_block
    descale_offset = v_offset + heads * blocks * v_block
    mean_offset = aligned(descale_offset + 4 * heads * descales)
    rest_offset = aligned(mean_offset + 4 * heads * mean_channels)
    size = aligned(rest_offset + rest, math.lcm(k_block, v_block))
    return Buffer(
        heads,
        blocks,
        k_block,
        v_block,
        descales,
        v_offset,
        descale_offset,
        mean_offset,
        mean_channels,
        rest_offset,
        size,
    )


def section(rows: torch.Tensor, offset: int, *shape: int) -> torch.Tensor:
    """A view of bytes `offset` on of every row of uint8 [ranks, size], as [ranks, *shape]."""
    return rows[:, offset : offset + math.prod(shape)].view(rows.size(0), *shape)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, its last dimension as many times wider."""
    return x.view(torch.uint8)


def write_keys(rows: torch.Tensor, b: Buffer, packed: PackedTensors) -> None:
    """Write the keys of `packed` into uint8 [1, size]."""
    blocks = packed.k8.size(1)
    section(rows, 0, b.heads, b.blocks, b.k_block)[0, :, :blocks] = as_bytes(packed.k8).flatten(2)
    section(rows, b.v_offset, b.heads, b.blocks, b.v_block)[0, :, :blocks] = as_bytes(packed.v8).flatten(2)
    descales = as_bytes(packed.k_descale).view(b.heads, -1)
    section(rows, b.descale_offset, b.heads, 4 * b.descales)[0, :, : descales.size(1)] = descales
    if b.mean_channels:
        mean = as_bytes(packed.v_mean).view(b.heads, -1)
        section(rows, b.mean_offset, b.heads, 4 * b.mean_channels)[0] = mean


def descales_in_order(rows: torch.Tensor, b: Buffer, chunks: RankChunks, recipe: Recipe) -> torch.Tensor:
    """K's descales of all ranks: one a block, fp32 [heads * key blocks] in the order of the chunks, or [heads]."""
    # [ranks, heads, descales]
    found = section(rows.view(torch.float32), b.descale_offset // 4, b.heads, b.descales)
    if recipe.k_scales != "block":
        return found[0].reshape(-1)
    n = chunks.key_chunk_blocks
    if chunks.zigzag:
        found = torch.cat([found[..., :n], found[..., n : 2 * n].flip(0)])
    return found[..., :n].transpose(0, 1).reshape(-1)


def mean_of_all(rows: torch.Tensor, b: Buffer, cut: Cut, own: torch.Tensor) -> torch.Tensor:
    """V's mean of all ranks, shaped as `own`, [B, H_kv, D_v_pad].

    All subtract the same mean c, and what rounding took from a rank's keys has the mean l_r. What comes back is
    c + sum(N_r l_r) / N: the mean of the ranks' corrected means, by their keys; as one process has it.
    """
    if not b.mean_channels:
        return own
    means = section(rows, b.mean_offset, 4 * b.heads * b.mean_channels).contiguous().view(torch.float32)
    total = means.sum(0) * cut.room
    for mean, length in zip(means, cut.lengths, strict=True):
        # Few ranks have fewer keys.
        if length != cut.room:
            total = total + mean * (length - cut.room)
    return (total / cut.total).view_as(own)
