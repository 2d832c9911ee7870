"""K and V to the packed format: block-major, 8-bit V also transposed and interleaved.

    K:  x = rope(x) - k_mean; x = hadamard(x) or reflect(x);  k8 = cast(x / descale)
        bf16 K to 8 bits, no RoPE, head dims up to 128: x = hadamard(x) - hadamard(k_mean), which is rounded less
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
from typing import Any

import torch

from helion_attn.compiler.helion_adapter import MAX_REGISTERS, Config, helion, hl
from helion_attn.compiler.kernels import Runner, compiled, interpreted
from helion_attn.kernels.lib.inline_asm import maximum
from helion_attn.kernels.lib.rotate import rotate_mean
from helion_attn.kernels.lib.row_layout import row_tile, rows_descale, rows_to_dtype, store_tile
from helion_attn.kernels.lib.strided import row_channels
from helion_attn.preprocess.lib.v_layout import lost_in_rounding, v_block, v_descales
from helion_attn.preprocess.sequences import key_source


def pack_kv(
    k: torch.Tensor,  # flat
    v: torch.Tensor,  # flat
    k_amax: torch.Tensor,  # [B * H_kv, MAX_PARTS]
    v_amax: torch.Tensor,  # [B * H_kv, D_row]
    k_mean: torch.Tensor,  # [B * H_kv, D_row]
    v_mean: torch.Tensor,  # [B * H_kv, D_v_pad]
    cos: torch.Tensor,  # [table_rows * rotary / 2]
    sin: torch.Tensor,  # [table_rows * rotary / 2]
    k_positions: torch.Tensor,  # [N]
    signs: torch.Tensor,  # [D_row]
    rotation_matrix: torch.Tensor,  # [side, side]
    k_blocks: torch.Tensor,  # [N_blocks, K_FIELDS] if varlen
    k8: torch.Tensor,  # [B * H_kv * n_tiles, k_tile, D_pad], written
    v8: torch.Tensor,  # [B * H_kv * N_blocks * d_tiles, d_tile, bn], or [B * H_kv * N_blocks, bn, D_v_pad], written
    k_descale: torch.Tensor,  # [B * H_kv, n_tiles or 1], written
    v_descale: torch.Tensor,  # [B * H_kv, D_v_pad], written
    v_lost: torch.Tensor,  # [B * H_kv * N_blocks, D_v_pad], written if sum_lost
    v_peak: torch.Tensor,  # [B * H_kv * N_blocks, d_tiles], written if note_peak
    n_tiles: int,
    k_parts: int,
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
    factor: float,
    norm: float,
    k_d_step: hl.constexpr,
    v_d_step: hl.constexpr,
    unit: hl.constexpr,
    d: hl.constexpr,
    d_v: hl.constexpr,
    d_row: hl.constexpr,
    d_tile: hl.constexpr,
    bn: hl.constexpr,
    k_run: hl.constexpr,
    rotary: hl.constexpr,
    pairing: hl.constexpr,
    explicit_k_positions: hl.constexpr,
    k_unscaled: hl.constexpr,
    k_per_tile: hl.constexpr,
    k_per_block: hl.constexpr,
    v_unscaled: hl.constexpr,
    v_per_channel: hl.constexpr,
    sum_lost: hl.constexpr,
    note_peak: hl.constexpr,
    smooth_k: hl.constexpr,
    hadamard: hl.constexpr,
    rotate_first: hl.constexpr,
    two_terms: hl.constexpr,
    reflected: hl.constexpr,
    qk_largest: hl.constexpr,
    v_largest: hl.constexpr,
    cap_registers: hl.constexpr,
    varlen: hl.constexpr,
    wide: hl.constexpr,
    is_cuda: hl.constexpr,
) -> None:
    """See the module's docstring. Tiles run from the last to the first: what `first_pass` read last is still in L2.

    With `varlen` every block of a head is a "head" of its own, with one block: N is that of a block, and `k_blocks`, of
    `sequences`, says what it holds.
    """
    if cap_registers:
        # Only then: told of any maximum, be it 255, ptxas takes half as many registers again for the other kernels. The
        # name is for Helion, whose code for this branch would be empty.
        _max_registers = hl.register_tunable(MAX_REGISTERS, helion.autotuner.IntegerFragment(24, 255, 255))
    k_tile = hl.specialize(k8.size(1))
    d_pad = hl.specialize(k8.size(2))
    side = hl.specialize(rotation_matrix.size(0))
    max_parts = hl.specialize(k_amax.size(1))
    d_tiles = hl.specialize(v_descale.size(1)) // d_tile
    hl.specialize((k.stride(0), v.stride(0), k_amax.stride(0), k_amax.stride(1)))
    # Known strides keep the loads 16 bytes wide.
    hl.specialize((k_mean.stride(0), k_mean.stride(1), v_mean.stride(0), v_mean.stride(1)))
    hl.specialize((v_amax.stride(0), v_amax.stride(1)))
    # Known strides keep the stores 16 bytes wide.
    hl.specialize((k8.stride(0), k8.stride(1), k8.stride(2)))
    hl.specialize((cos.stride(0), sin.stride(0), signs.stride(0)))
    hl.specialize((v8.size(1), v8.size(2), rotation_matrix.stride(0), rotation_matrix.stride(1)))
    hl.specialize((v8.stride(0), v8.stride(1), v8.stride(2)))
    n_blocks = (N + bn - 1) // bn
    k_channels = row_channels(d, d_at_run_time, k_d_step)
    v_channels = row_channels(d_v, d_v_at_run_time, v_d_step)
    for bh, from_end in hl.grid([v_descale.size(0), n_blocks * d_tiles]):
        v_index = n_blocks * d_tiles - 1 - from_end
        i = v_index // d_tiles
        d_index = v_index % d_tiles
        v_head, v_keys, offset = key_source(
            k_blocks, bh, H_kv, N, v_b_step, v_h_step, v_s_step, unit, varlen, wide, is_cuda
        )
        channel_descale = v_descales(v_amax, v_head, d_index, d_row, d_tile, v_largest, v_unscaled, v_per_channel)
        centred, scaled, tile = v_block(
            v, v_mean, channel_descale, v_head, i, d_index, offset, v_s_step * unit, v_d_step, v_keys, v_channels, bn,
            d_tile, v8.dtype,
        )  # fmt: skip
        if v8.dtype.itemsize == 1:
            v8[bh * n_blocks * d_tiles + v_index, :, :] = tile.transpose(0, 1)
        else:
            hl.store(v8, [bh * n_blocks + i, hl.arange(bn), d_index * d_tile + hl.arange(d_tile)], tile)
        if sum_lost:
            lost = lost_in_rounding(scaled, tile, channel_descale)
            hl.store(v_lost, [bh * n_blocks + i, d_index * d_tile + hl.arange(d_tile)], lost)
        if note_peak:
            largest = torch.amax(torch.amax(torch.abs(centred), 1), 0)
            v_peak[bh * n_blocks + i, d_index] = largest / torch.amax(channel_descale, 0)
        if i == 0:
            hl.store(v_descale, [bh, d_index * d_tile + hl.arange(d_tile)], channel_descale)

    for kv, from_end in hl.grid([k_descale.size(0), (n_tiles + k_run - 1) // k_run]):
        k_index = (n_tiles + k_run - 1) // k_run - 1 - from_end
        k_end = min(n_tiles, (k_index + 1) * k_run)
        k_head, keys, offset = key_source(
            k_blocks, kv, H_kv, N, k_b_step, k_h_step, k_s_step, unit, varlen, wide, is_cuda
        )
        row_step = k_s_step * unit
        matrix = hl.load(rotation_matrix, [hl.arange(side), hl.arange(side)])
        # [D_row], loaded once: in the loops it would take registers for addresses, or barriers, for every tile.
        mean = hl.zeros([d_row], dtype=torch.float32)
        if smooth_k:
            mean = hl.load(k_mean, [k_head, hl.arange(d_row)])
        if rotate_first:
            mean = rotate_mean(mean, matrix, norm)
        # [k_tile], what the block's descale must hold
        peak = hl.zeros([k_tile], dtype=torch.float32)
        if k_per_block:
            for k_i in hl.grid(k_index * k_run, k_end):
                rows = k_i * k_tile + hl.arange(k_tile)
                x, _ = row_tile(
                    k, cos, sin, k_positions, mean, signs, matrix, offset, rows, row_step, k_d_step,
                    keys, k_channels, 0, table_rows, norm, k_tile, d_row, rotary, side, pairing, explicit_k_positions,
                    smooth_k, False, hadamard, rotate_first, two_terms, reflected, is_cuda,
                )  # fmt: skip
                peak = maximum(peak, torch.amax(torch.abs(x), 1), is_cuda)
        for k_tile_index in hl.grid(k_index * k_run, k_end):
            rows = k_tile_index * k_tile + hl.arange(k_tile)
            x, _ = row_tile(
                k, cos, sin, k_positions, mean, signs, matrix, offset, rows, row_step, k_d_step,
                keys, k_channels, 0, table_rows, norm, k_tile, d_row, rotary, side, pairing, explicit_k_positions,
                smooth_k, False, hadamard, rotate_first, two_terms, reflected, is_cuda,
            )  # fmt: skip
            descale = rows_descale(
                x, peak, k_amax, k_mean, k_head, k_parts, max_parts, k_tile, d_row, factor, qk_largest, k_unscaled,
                False, k_per_tile, k_per_block, smooth_k,
            )  # fmt: skip
            store_tile(
                k8,
                kv * n_tiles + k_tile_index,
                rows_to_dtype(x, 1.0 / descale, k8.dtype, is_cuda),
                k_tile,
                d_pad,
                d_row,
            )
            if k_per_tile:
                k_descale[kv, k_tile_index] = torch.amax(descale, 0)
            elif k_per_block:
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
