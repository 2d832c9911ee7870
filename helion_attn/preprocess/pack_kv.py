"""K and V to the packed format: block-major, 8-bit V also transposed and interleaved.

    K:  x = (rope(norm(x)) - k_mean) / channel_factors; x = hadamard(x) or reflect(x);  k8 = cast(x / descale)
        bf16 K to 8 bits, neither norm nor RoPE, head dims up to 128: rotated before the mean is subtracted, which
        rounds less
    V:  v8 = cast((v - v_mean) / descale)
    descale = max(amax / largest, 2**-126)

Tensors that are 8-bit already are moved, not scaled, and what becomes 16-bit has a descale of 1. A NaN or infinity in
what shares a descale makes that NaN, and so every score, or every output, that depends on it NaN: nothing
saturates.

Both are loops of one kernel, since a launch of 64 MB spends 4 us starting and draining. Where rows are plain 16-bit
ones a program packs a block, 64 elements a thread, all of which are on their way at once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import MAX_REGISTERS, Config, helion, hl
from helion_attn.compiler.runners import Runner, compiled, interpreted
from helion_attn.kernels.lib.inline_asm import maximum
from helion_attn.kernels.lib.rotate import rotate_mean, with_factors
from helion_attn.kernels.lib.row_layout import row_tile, rows_descale, rows_scale, rows_to_dtype, store_tile
from helion_attn.kernels.lib.scalars import inverse_of_power
from helion_attn.kernels.lib.specs import RowSpec
from helion_attn.kernels.lib.strided import row_channels
from helion_attn.preprocess.lib.v_layout import lost_in_rounding, v_block, v_descales
from helion_attn.preprocess.sequences import key_source


class PackKVSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    v_d_step: int  # of V
    unit: int  # what steps but those of channels are multiples of
    d: int  # head dim of K
    d_v: int  # of V
    d_tile: int  # channels of V that a program packs
    bn: int  # keys of a block
    k_run: int  # tiles of K that a program packs
    k_unscaled: bool  # K has no scale
    k_per_tile: bool  # K has a descale a tile, which is a block
    k_per_block: bool  # K has a descale a block of several tiles
    v_unscaled: bool  # V has no scale
    v_per_channel: bool  # V has a descale a channel; otherwise a head
    sum_lost: bool  # what rounding takes from V is summed
    note_peak: bool  # V's largest entries are noted
    qk_largest: float  # the largest magnitude that K becomes
    v_largest: float  # that V becomes
    cap_registers: bool  # registers of a thread have a maximum
    varlen: bool  # the sequences of a batch follow each other
    wide: bool  # addresses need 64 bits
    rows: RowSpec  # what is done to rows of K before they are scaled


def pack_kv(
    k: torch.Tensor,  # flat
    v: torch.Tensor,  # flat
    v_amax: torch.Tensor,  # [B * H_kv, D_row]
    k_mean: torch.Tensor,  # [B * H_kv * D_row]
    channel_factors: torch.Tensor,  # [B * H_kv * D_row] if equalise
    v_mean: torch.Tensor,  # [B * H_kv, D_v_pad]
    cos: torch.Tensor,  # [table_rows * rotary / 2]
    sin: torch.Tensor,  # [table_rows * rotary / 2]
    k_positions: torch.Tensor,  # [N]
    signs: torch.Tensor,  # [D_row]
    rotation_matrix: torch.Tensor,  # [side, side]
    weight: torch.Tensor,  # [D or H_kv * D] if normed
    factors: torch.Tensor,  # [B * N] if normed over heads
    k_blocks: torch.Tensor,  # [N_blocks, K_FIELDS] if varlen
    k8: torch.Tensor,  # [B * H_kv * n_tiles, k_tile, D_pad], written
    v8: torch.Tensor,  # [B * H_kv * N_blocks * d_tiles, d_tile, bn], or [B * H_kv * N_blocks, bn, D_v_pad], written
    k_descale: torch.Tensor,  # [B * H_kv, n_tiles or 1], written
    v_descale: torch.Tensor,  # [B * H_kv, D_v_pad], written
    v_lost: torch.Tensor,  # [B * H_kv * N_blocks, D_v_pad], written if sum_lost
    v_peak: torch.Tensor,  # [B * H_kv * N_blocks, d_tiles], written if note_peak
    n_tiles: int,
    H_kv: int,
    N: int,
    k_b_step: int,
    k_h_step: int,
    k_s_step: int,
    v_b_step: int,
    v_h_step: int,
    v_s_step: int,
    table_rows: int,
    d_at_run_time: int,
    d_v_at_run_time: int,
    norm: float,
    spec: hl.constexpr,  # PackKVSpec
) -> None:
    """Write blocks of K and V, and their descales.

    With `varlen` every block of a head is a "head" of its own, with one block: N is that of a block, and `k_blocks`, of
    `sequences`, says what it holds.
    """
    if spec.cap_registers:
        # Only then: told of any maximum, be it 255, ptxas takes half as many registers again for the other kernels. The
        # name is for Helion, whose code for this branch would be empty.
        _max_registers = hl.register_tunable(MAX_REGISTERS, helion.autotuner.IntegerFragment(24, 255, 255))
    k_tile = hl.specialize(k8.size(1))
    d_pad = hl.specialize(k8.size(2))
    side = hl.specialize(rotation_matrix.size(0))
    d_tiles = hl.specialize(v_descale.size(1)) // spec.d_tile
    hl.specialize((k.stride(0), v.stride(0)))
    # Known strides keep the loads 16 bytes wide.
    hl.specialize((k_mean.stride(0), channel_factors.stride(0), v_mean.stride(0), v_mean.stride(1)))
    hl.specialize((v_amax.stride(0), v_amax.stride(1)))
    # Known strides keep the stores 16 bytes wide.
    hl.specialize((k8.stride(0), k8.stride(1), k8.stride(2)))
    hl.specialize((cos.stride(0), sin.stride(0), signs.stride(0), weight.stride(0), factors.stride(0)))
    hl.specialize((v8.size(1), v8.size(2), rotation_matrix.stride(0), rotation_matrix.stride(1)))
    hl.specialize((v8.stride(0), v8.stride(1), v8.stride(2)))
    of_rows = spec.rows
    n_blocks = (N + spec.bn - 1) // spec.bn
    k_channels = row_channels(spec.d, d_at_run_time, of_rows.d_step)
    v_channels = row_channels(spec.d_v, d_v_at_run_time, spec.v_d_step)
    for bh, v_index in hl.grid([v_descale.size(0), n_blocks * d_tiles]):
        i = v_index // d_tiles
        d_index = v_index % d_tiles
        v_head, v_keys, offset = key_source(
            k_blocks, bh, H_kv, N, v_b_step, v_h_step, v_s_step, spec.unit, spec.varlen, spec.wide, of_rows.is_cuda
        )
        channel_descale = v_descales(
            v_amax, v_head, d_index, of_rows.d_row, spec.d_tile, spec.v_largest, spec.v_unscaled, spec.v_per_channel
        )
        scaled, tile = v_block(
            v, v_mean, channel_descale, v_head, i, d_index, offset, v_s_step * spec.unit, spec.v_d_step, v_keys,
            v_channels, spec.bn, spec.d_tile, v8.dtype,
        )  # fmt: skip
        # First: after the stores the numbers would still take registers.
        if spec.note_peak:
            v_peak[bh * n_blocks + i, d_index] = torch.amax(torch.amax(torch.abs(scaled), 1), 0)
        if v8.dtype.itemsize == 1:
            v8[bh * n_blocks * d_tiles + v_index, :, :] = tile.transpose(0, 1)
        else:
            hl.store(v8, [bh * n_blocks + i, hl.arange(spec.bn), d_index * spec.d_tile + hl.arange(spec.d_tile)], tile)
        if spec.sum_lost:
            lost = lost_in_rounding(scaled, tile, channel_descale)
            hl.store(v_lost, [bh * n_blocks + i, d_index * spec.d_tile + hl.arange(spec.d_tile)], lost)
        if i == 0:
            hl.store(v_descale, [bh, d_index * spec.d_tile + hl.arange(spec.d_tile)], channel_descale)

    for kv, k_index in hl.grid([k_descale.size(0), (n_tiles + spec.k_run - 1) // spec.k_run]):
        k_end = min(n_tiles, (k_index + 1) * spec.k_run)
        k_head, keys, offset = key_source(
            k_blocks, kv, H_kv, N, k_b_step, k_h_step, k_s_step, spec.unit, spec.varlen, spec.wide, of_rows.is_cuda
        )
        row_step = k_s_step * spec.unit
        first_weight = (kv % H_kv) * spec.d if of_rows.normed == 2 else 0
        first_factor = (kv // H_kv) * N if of_rows.normed == 2 else 0
        matrix = hl.load(rotation_matrix, [hl.arange(side), hl.arange(side)])
        first_channel = k_head * of_rows.d_row
        # [D_row]
        mean = hl.zeros([of_rows.d_row], dtype=torch.float32)
        of_channel = hl.zeros([of_rows.d_row], dtype=torch.float32)
        sign = hl.zeros([of_rows.d_row], dtype=torch.bfloat16)
        if of_rows.vectors_first and of_rows.subtract_mean:
            mean = hl.load(k_mean, [first_channel + hl.arange(of_rows.d_row)])
        if of_rows.vectors_first and of_rows.equalise:
            of_q = hl.load(channel_factors, [first_channel + hl.arange(of_rows.d_row)])
            of_channel = inverse_of_power(of_q)
        if of_rows.hadamard:
            matrix, sign = with_factors(matrix, signs, of_channel, of_rows.d_row, side, of_rows.equalise)
        if of_rows.rotate_first:
            mean = rotate_mean(mean, matrix, norm)
        # [k_tile], what the block's descale must hold
        peak = hl.zeros([k_tile], dtype=torch.float32)
        if spec.k_per_block:
            for k_i in hl.grid(k_index * spec.k_run, k_end):
                rows = k_i * k_tile + hl.arange(k_tile)
                x, _, factor = row_tile(
                    flat=k,
                    cos=cos,
                    sin=sin,
                    positions=k_positions,
                    means=k_mean,
                    channel_factors=channel_factors,
                    first_channel=first_channel,
                    mean=mean,
                    channel_factor=of_channel,
                    signs=sign,
                    matrix=matrix,
                    weight=weight,
                    factors=factors,
                    head_offset=offset,
                    first_weight=first_weight,
                    first_factor=first_factor,
                    rows=rows,
                    row_step=row_step,
                    size=keys,
                    d=k_channels,
                    first_position=0,
                    table_rows=table_rows,
                    norm=norm,
                    n=k_tile,
                    side=side,
                    spec=of_rows,
                )
                peak = maximum(peak, torch.amax(torch.abs(x), 1) * factor, of_rows.is_cuda)
        for k_tile_index in hl.grid(k_index * spec.k_run, k_end):
            rows = k_tile_index * k_tile + hl.arange(k_tile)
            x, _, factor = row_tile(
                flat=k,
                cos=cos,
                sin=sin,
                positions=k_positions,
                means=k_mean,
                channel_factors=channel_factors,
                first_channel=first_channel,
                mean=mean,
                channel_factor=of_channel,
                signs=sign,
                matrix=matrix,
                weight=weight,
                factors=factors,
                head_offset=offset,
                first_weight=first_weight,
                first_factor=first_factor,
                rows=rows,
                row_step=row_step,
                size=keys,
                d=k_channels,
                first_position=0,
                table_rows=table_rows,
                norm=norm,
                n=k_tile,
                side=side,
                spec=of_rows,
            )
            descale = rows_descale(x, factor, peak, k_tile, spec.qk_largest, spec.k_unscaled, False, spec.k_per_tile)
            store_tile(
                k8,
                kv * n_tiles + k_tile_index,
                rows_to_dtype(x, rows_scale(factor, descale, of_rows.normed), k8.dtype, of_rows.is_cuda),
                k_tile,
                d_pad,
                of_rows.d_row,
            )
            if spec.k_per_tile:
                k_descale[kv, k_tile_index] = torch.amax(descale, 0)
            elif spec.k_per_block:
                k_descale[kv, k_index] = torch.amax(descale, 0)
            else:
                if k_tile_index == 0:
                    k_descale[kv, 0] = torch.amax(descale, 0)


@functools.cache
def kernel(is_cuda: bool, num_warps: int, max_registers: int | None, in_flight: int, k_per_block: bool) -> Runner:
    """The kernel for the device."""
    if not is_cuda:
        return interpreted(pack_kv)
    stages = [0, 0, *[in_flight] * (2 if k_per_block else 1)]
    registers: dict[str, Any] = {} if max_registers is None else {MAX_REGISTERS: max_registers}
    return compiled(pack_kv, Config(num_warps=num_warps, indexing="pointer", range_num_stages=stages, **registers))
