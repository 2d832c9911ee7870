"""V to FP8: centre, cast, transpose, interleave, pack. Two passes over the user's strided tensor.

The first pass takes sum, minimum and maximum of every channel: with the mean they give the amax of the *centred*
channel, so that centring needs no pass of its own.

    v8 = e4m3((v - mean) / descale), descale = max(max_channels(max(v_max - mean, mean - v_min)) / 448, 2**-126)
"""

from __future__ import annotations

import functools

import torch

from helion_attn.kernels.helion_compat import compiled, helion, hl, interpreted
from helion_attn.kernels.inline_asm import maximum, minimum
from helion_attn.numerics import DESCALE_MIN, E4M3_MAX
from helion_attn.preprocess.quantize import MAX_PARTIALS, first_pass_split, load_rows
from helion_attn.preprocess.strided import strided_rows

#: Channels of a program of the reduction between the passes: the smallest D_pad.
MEAN_CHANNELS = 32

#: Channels of a tile of the packing pass.
PACK_CHANNELS = 64


def v_stats_kernel(
    flat: torch.Tensor,
    partials: torch.Tensor,  # [B * H_kv, 3, MAX_PARTIALS, d_pad], written: sum, min, max
    n_partials: int,
    heads: int,
    size: int,
    b_step: int,
    h_step: int,
    s_step: int,
    d: hl.constexpr,
    d_step: hl.constexpr,
    unit: hl.constexpr,
    step: hl.constexpr,
    inline_asm: hl.constexpr,
) -> None:
    """Sum, minimum and maximum of every channel, in `n_partials` parts, `step` rows at a time."""
    d_pad = hl.specialize(partials.size(3))
    hl.specialize((flat.stride(0), partials.stride(1), partials.stride(2), partials.stride(3)))
    n_tiles = (size + step - 1) // step
    tiles_per_part = (n_tiles + n_partials - 1) // n_partials
    for bh, part in hl.grid([partials.size(0), n_partials]):
        row_offset = ((bh // heads) * b_step + (bh % heads) * h_step) * unit
        cols = hl.arange(d_pad)
        # [step, d_pad]
        v_sum = hl.zeros([step, d_pad], dtype=torch.float32)
        v_min = hl.full([step, d_pad], float("inf"), dtype=torch.float32)
        v_max = hl.full([step, d_pad], float("-inf"), dtype=torch.float32)
        for tile in hl.grid(part * tiles_per_part, min(n_tiles, (part + 1) * tiles_per_part)):
            rows = tile * step + hl.arange(step)
            # Rows past the end repeat the last one: no change to minimum and maximum, left out of the sum.
            # [step, d_pad]
            x = load_rows(flat, row_offset, torch.clamp_max(rows, size - 1), cols, s_step * unit, d_step, size, d)
            v_sum = v_sum + torch.where((rows < size).unsqueeze(1), x, 0.0)
            v_min = minimum(v_min, x, inline_asm)
            v_max = maximum(v_max, x, inline_asm)
        partials[bh, 0, part, :] = v_sum.sum(0)
        partials[bh, 1, part, :] = torch.amin(v_min, 0)
        partials[bh, 2, part, :] = torch.amax(v_max, 0)


def v_mean_kernel(
    partials: torch.Tensor,  # [B * H_kv, 3, MAX_PARTIALS, d_pad]
    mean: torch.Tensor,  # [B * H_kv, d_pad], written
    amax: torch.Tensor,  # [B * H_kv, d_pad / d_tile], written
    n_partials: int,
    size: int,
    d_tile: hl.constexpr,
    center: hl.constexpr,
) -> None:
    """Reduce the parts of `d_tile` channels to their means and to the amax of what is left without them."""
    max_partials = hl.specialize(partials.size(2))
    d_tiles = hl.specialize(amax.size(1))
    hl.specialize((partials.stride(1), partials.stride(2), partials.stride(3), mean.stride(0), mean.stride(1)))
    for bh, d_index in hl.grid([partials.size(0), d_tiles]):
        cols = d_index * d_tile + hl.arange(d_tile)
        part = hl.arange(max_partials)
        written = (part < n_partials).unsqueeze(1)
        # [max_partials, d_tile] each, then [d_tile]
        v_sum = torch.where(written, hl.load(partials, [bh, 0, part, cols]), 0.0).sum(0)
        v_min = torch.amin(torch.where(written, hl.load(partials, [bh, 1, part, cols]), float("inf")), 0)
        v_max = torch.amax(torch.where(written, hl.load(partials, [bh, 2, part, cols]), float("-inf")), 0)
        if center:
            v_mean = v_sum / size
        else:
            v_mean = hl.zeros([d_tile], dtype=torch.float32)
        hl.store(mean, [bh, cols], v_mean)
        amax[bh, d_index] = torch.amax(torch.maximum(v_max - v_mean, v_mean - v_min), 0)


def pack_v_kernel(
    flat: torch.Tensor,
    mean: torch.Tensor,  # [B * H_kv, d_pad]
    amax: torch.Tensor,  # [B * H_kv, parts]
    descale: torch.Tensor,  # [B * H_kv], written
    v8: torch.Tensor,  # [B * H_kv * N_blocks * d_tiles, d_tile, bn], written
    blocks: int,
    heads: int,
    size: int,
    b_step: int,
    h_step: int,
    s_step: int,
    d: hl.constexpr,
    d_step: hl.constexpr,
    unit: hl.constexpr,
) -> None:
    """Centre, scale, cast, transpose and interleave `bn` keys of `d_tile` channels a program."""
    d_tile = hl.specialize(v8.size(1))
    bn = hl.specialize(v8.size(2))
    d_tiles = hl.specialize(mean.size(1)) // d_tile
    hl.specialize((amax.size(1), flat.stride(0), mean.stride(1), v8.stride(0), v8.stride(1), v8.stride(2)))
    for bh, grid_i, d_index in hl.grid([descale.size(0), blocks, d_tiles]):
        i = blocks - 1 - grid_i  # what the first pass read last is still in L2
        row_offset = ((bh // heads) * b_step + (bh % heads) * h_step) * unit
        cols = d_index * d_tile + hl.arange(d_tile)
        # Position 4t + 2a + b of each 16 holds key 8a + 2t + b: the permutation is in the addresses of the loads.
        position = hl.arange(bn)
        in_group = position % 16
        key_in_group = (in_group // 2 % 2) * 8 + (in_group // 4) * 2 + in_group % 2
        keys = i * bn + position - in_group + key_in_group
        # [bn, d_tile]
        x = load_rows(flat, row_offset, keys, cols, s_step * unit, d_step, size, d)
        head_descale = torch.clamp_min(torch.amax(amax[bh, :], 0) * (1.0 / E4M3_MAX), DESCALE_MIN)
        centred = x - hl.load(mean, [bh, cols]).unsqueeze(0)
        is_key = (keys < size).unsqueeze(1)
        scaled = torch.where(is_key, centred * (1.0 / head_descale), 0.0)
        v8[(bh * blocks + i) * d_tiles + d_index, :, :] = scaled.to(torch.float8_e4m3fn).transpose(0, 1)
        if i + d_index == 0:
            descale[bh] = head_descale


@functools.cache
def kernels(is_cuda: bool) -> tuple[helion.Kernel[None], helion.Kernel[None], helion.Kernel[None]]:
    """`(stats, mean, pack)` for the device."""
    if not is_cuda:
        return interpreted(v_stats_kernel), interpreted(v_mean_kernel), interpreted(pack_v_kernel)
    config = helion.Config(num_warps=4, num_stages=3, indexing="pointer")
    return compiled(v_stats_kernel, config), compiled(v_mean_kernel, config), compiled(pack_v_kernel, config)


def quantize_v(v: torch.Tensor, bn: int, d_pad: int, center: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise V per head and pack it transposed and key-interleaved.

    Args:
        v: [B, H_kv, N, D], bf16, fp16 or fp32, any strides.
        bn: keys of a block.
        d_pad: padded head dim.
        center: subtract every channel's mean over the N keys first.

    Returns:
        e4m3 [B * H_kv, ceil(N / bn), d_pad, bn], zero-padded; its fp32 descale [B, H_kv]; and the fp32 mean
        [B, H_kv, d_pad], zeros when not centred.
    """
    B, H_kv, N, D = v.shape
    rows = strided_rows(v)
    stats, to_mean, pack = kernels(v.is_cuda)
    step, parts = first_pass_split(B * H_kv, N, d_pad)
    blocks = -(-N // bn)
    partials = v.new_empty((B * H_kv, 3, MAX_PARTIALS, d_pad), dtype=torch.float32)
    amax = v.new_empty((B * H_kv, d_pad // MEAN_CHANNELS), dtype=torch.float32)
    v8 = v.new_empty((B * H_kv, blocks, d_pad, bn), dtype=torch.float8_e4m3fn)
    descale = v.new_empty((B, H_kv), dtype=torch.float32)
    mean = v.new_empty((B, H_kv, d_pad), dtype=torch.float32)
    steps = (H_kv, N, rows.b_step, rows.h_step, rows.s_step, D, rows.d_step, rows.unit)
    flat_mean = mean.view(-1, d_pad)
    stats(rows.flat, partials, parts, *steps, step, v.is_cuda)
    to_mean(partials, flat_mean, amax, parts, N, MEAN_CHANNELS, center)
    tiles = v8.view(-1, min(d_pad, PACK_CHANNELS), bn)
    pack(rows.flat, flat_mean, amax, descale.view(-1), tiles, blocks, *steps)
    return v8, descale, mean
