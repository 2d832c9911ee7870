"""Blocks of means behind the packed blocks of K and V, for the key blocks that a mask leaves out.

A mean is of what attention reads of a key block: 8-bit K and V, dequantised. All that packing does to rows but its
rounding is linear, so that it is the mean of the block's keys, normed and rotated, and of its values. 128 means are a
block like any other: K has one descale for it, and V, whose descales are a head's, has them as they are.

Two kernels, since a block of means is of many key blocks: `copy_blocks` reads K and V once, and `pack_means` the means.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import by_device
from helion_attn.kernels.lib.row_layout import rows_descale, rows_to_dtype
from helion_attn.preprocess.lib.v_layout import key_stored_at
from helion_attn.types import PackedTensors, Recipe

#: Channels that a program copies, at most.
CHANNELS = 64


class TailSpec(NamedTuple):
    """Constants that the kernels are compiled for."""

    k_tile: int  # channels of K that a program copies
    v_tile: int  # of V
    k_block_descales: bool  # K has a descale a block; otherwise none
    v_transposed: bool  # V is of 8 bits
    largest: float  # the largest magnitude that K becomes
    is_cuda: bool  # the kernels are compiled; otherwise interpreted


def copy_blocks(
    k8: torch.Tensor,  # [B * H_kv * N_blocks, bn, D_pad]
    v8: torch.Tensor,  # [B * H_kv * N_blocks, D_v_pad, bn], or of 16 bits [B * H_kv * N_blocks, bn, D_v_pad]
    k_descale: torch.Tensor,  # [B * H_kv * N_blocks] if k_block_descales
    k8_with_tail: torch.Tensor,  # [B * H_kv * (N_blocks + tail_blocks), bn, D_pad], written, and so the rest
    v8_with_tail: torch.Tensor,
    k_descale_with_tail: torch.Tensor,  # [B * H_kv * (N_blocks + tail_blocks)] if k_block_descales
    k_means: torch.Tensor,  # [B * H_kv * tail_blocks * bn, D_pad]
    v_means: torch.Tensor,  # [B * H_kv * tail_blocks * bn, D_v_pad]
    heads: int,  # B * H_kv
    n_blocks: int,
    tail_blocks: int,
    spec: hl.constexpr,  # TailSpec
) -> None:
    """Copy each block, and write its means in fp32; those of the last block are of its padding, too.

    A program has some channels of a block of K or of V.
    """
    bn, d_pad = hl.specialize((k8.size(1), k8.size(2)))
    d_v_pad = hl.specialize(v_means.size(1))
    # Known strides make loads and stores wide.
    hl.specialize((k8.stride(0), k8.stride(1), k8.stride(2), v8.size(1), v8.size(2)))
    hl.specialize((v8.stride(0), v8.stride(1), v8.stride(2), k_means.stride(0), k_means.stride(1)))
    hl.specialize((k8_with_tail.stride(0), k8_with_tail.stride(1), k8_with_tail.stride(2)))
    hl.specialize((v8_with_tail.stride(0), v8_with_tail.stride(1), v8_with_tail.stride(2)))
    hl.specialize((v_means.stride(0), v_means.stride(1), k_descale.stride(0), k_descale_with_tail.stride(0)))
    k_tiles, v_tiles = d_pad // spec.k_tile, d_v_pad // spec.v_tile
    for k_head, k_index in hl.grid([heads, n_blocks * k_tiles]):
        k_block = k_index // k_tiles
        k_at, k_to = k_head * n_blocks + k_block, k_head * (n_blocks + tail_blocks) + k_block
        cols = k_index % k_tiles * spec.k_tile + hl.arange(spec.k_tile)
        # [bn, k_tile]
        k = hl.load(k8, [k_at, hl.arange(bn), cols])
        hl.store(k8_with_tail, [k_to, hl.arange(bn), cols], k)
        k_mean = k.to(torch.float32).sum(0) * (1.0 / bn)
        if spec.k_block_descales:
            descale = k_descale[k_at]
            k_descale_with_tail[k_to] = descale
            k_mean = k_mean * descale
        hl.store(k_means, [k_head * tail_blocks * bn + k_block, cols], k_mean)

    for v_head, v_index in hl.grid([heads, n_blocks * v_tiles]):
        v_block = v_index // v_tiles
        v_at, v_to = v_head * n_blocks + v_block, v_head * (n_blocks + tail_blocks) + v_block
        channels = v_index % v_tiles * spec.v_tile + hl.arange(spec.v_tile)
        # [v_tile, bn], or [bn, v_tile]
        if spec.v_transposed:
            v = hl.load(v8, [v_at, channels, hl.arange(bn)])
            hl.store(v8_with_tail, [v_to, channels, hl.arange(bn)], v)
            v_sum = v.to(torch.float32).sum(1)
        else:
            v = hl.load(v8, [v_at, hl.arange(bn), channels])
            hl.store(v8_with_tail, [v_to, hl.arange(bn), channels], v)
            v_sum = v.to(torch.float32).sum(0)
        hl.store(v_means, [v_head * tail_blocks * bn + v_block, channels], v_sum * (1.0 / bn))


def pack_means(
    k_means: torch.Tensor,  # [B * H_kv * tail_blocks * bn, D_pad]
    v_means: torch.Tensor,  # [B * H_kv * tail_blocks * bn, D_v_pad]
    k8_with_tail: torch.Tensor,  # [B * H_kv * (N_blocks + tail_blocks), bn, D_pad], written, and so the rest
    v8_with_tail: torch.Tensor,
    k_descale_with_tail: torch.Tensor,  # [B * H_kv * (N_blocks + tail_blocks)] if k_block_descales
    heads: int,  # B * H_kv
    n_blocks: int,
    tail_blocks: int,
    spec: hl.constexpr,  # TailSpec
) -> None:
    """Pack the means as blocks of keys; where there is no key block they are 0."""
    bn, d_pad = hl.specialize((k8_with_tail.size(1), k8_with_tail.size(2)))
    d_v_pad = hl.specialize(v_means.size(1))
    hl.specialize((k8_with_tail.stride(0), k8_with_tail.stride(1), k8_with_tail.stride(2)))
    hl.specialize((v8_with_tail.stride(0), v8_with_tail.stride(1), v8_with_tail.stride(2)))
    hl.specialize((v8_with_tail.size(1), v8_with_tail.size(2), k_descale_with_tail.stride(0)))
    hl.specialize((k_means.stride(0), k_means.stride(1), v_means.stride(0), v_means.stride(1)))
    for head, tail_block in hl.grid([heads, tail_blocks]):
        # [bn]
        first = tail_block * bn
        key_block = first + hl.arange(bn)
        is_block = (key_block < n_blocks).unsqueeze(1)
        to = head * (n_blocks + tail_blocks) + n_blocks + tail_block
        # [bn, D_pad]
        k = hl.load(k_means, [head * tail_blocks * bn + key_block, hl.arange(d_pad)], extra_mask=is_block)
        ones = hl.full([bn], 1.0, dtype=torch.float32)
        descale = rows_descale(
            k, ones, ones, bn, spec.largest, unscaled=not spec.k_block_descales, per_row=False, per_tile=True
        )
        k8_with_tail[to, :, :] = rows_to_dtype(k, 1.0 / descale, k8_with_tail.dtype, spec.is_cuda)
        if spec.k_block_descales:
            k_descale_with_tail[to] = torch.amax(descale, 0)
        if spec.v_transposed:
            key_block = first + key_stored_at(hl.arange(bn))
            is_block = (key_block < n_blocks).unsqueeze(1)
        # [bn, D_v_pad]
        v = hl.load(v_means, [head * tail_blocks * bn + key_block, hl.arange(d_v_pad)], extra_mask=is_block)
        v = v.to(v8_with_tail.dtype)
        if spec.v_transposed:
            v8_with_tail[to, :, :] = v.transpose(0, 1)
        else:
            v8_with_tail[to, :, :] = v


copy_kernel = by_device(copy_blocks, Config(num_warps=8, indexing="pointer"))
pack_kernel = by_device(pack_means, Config(num_warps=8, indexing="pointer"))


def launch(packed: PackedTensors, recipe: Recipe, d: int, d_v: int) -> PackedTensors:
    """Return packed tensors whose K and V have blocks of means behind their own.

    Args:
        packed: of dense tensors, in key blocks of `MASK_BLOCK` keys.
        recipe: how they were quantised.
        d: head dim of Q and K.
        d_v: of V.
    """
    k8, v8, like = packed.k8, packed.v8, packed.v_mean
    heads, n_blocks, bn, D_pad = k8.shape
    tail_blocks = -(-n_blocks // bn)
    all_blocks = n_blocks + tail_blocks
    v_transposed = v8.dtype.itemsize == 1
    D_v_pad = v8.size(2 if v_transposed else 3)
    k8_with_tail = k8.new_empty((heads, all_blocks, bn, D_pad))
    v8_with_tail = v8.new_empty((heads, all_blocks, *v8.shape[2:]))
    k_block_descales = recipe.k_scales == "block"
    k_descale_with_tail = like.new_empty((heads, all_blocks)) if k_block_descales else packed.k_descale
    shared = {
        "k8_with_tail": k8_with_tail.view(-1, bn, D_pad),
        "v8_with_tail": v8_with_tail.view(-1, *v8.shape[2:]),
        "k_descale_with_tail": k_descale_with_tail.view(-1),
        "k_means": like.new_empty((heads * tail_blocks * bn, D_pad)),
        "v_means": like.new_empty((heads * tail_blocks * bn, D_v_pad)),
        "heads": heads,
        "n_blocks": n_blocks,
        "tail_blocks": tail_blocks,
        "spec": TailSpec(
            k_tile=min(CHANNELS, D_pad),
            v_tile=min(CHANNELS, D_v_pad),
            k_block_descales=k_block_descales,
            v_transposed=v_transposed,
            largest=recipe.qk_largest(d, d_v),
            is_cuda=k8.is_cuda,
        ),
    }
    copied = {"k8": k8.view(-1, bn, D_pad), "v8": v8.view(-1, *v8.shape[2:]), "k_descale": packed.k_descale.view(-1)}
    copy_kernel(k8.is_cuda).run({**copied, **shared})
    pack_kernel(k8.is_cuda).run(shared)
    B, H_kv = packed.k_descale.shape[:2]
    return dataclasses.replace(
        packed, k8=k8_with_tail, v8=v8_with_tail, k_descale=k_descale_with_tail.view(B, H_kv, -1)
    )
