"""The pass that writes the packed format: Q, K and V block-major, 8-bit V also transposed and interleaved.

    Q, K:  x = rope(x); K: x -= k_mean; x = hadamard(x) or reflect(x);  x8 = cast(x / descale)
           bf16 K to 8 bits, no RoPE, head dims up to 128: x = hadamard(x) - hadamard(k_mean), which is rounded less
    V:     v8 = cast((v - v_mean) / descale)
    descale = max(amax / largest, 2**-126)

Tensors that are 8-bit already are moved, not scaled, and what becomes 16-bit has a descale of 1. A NaN or infinity in
what shares a descale makes that NaN, and so every score, or every output, that depends on it NaN: nothing
saturates.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from helion_attn.compiler.helion_adapter import MAX_REGISTERS, IntegerFragment, helion, hl
from helion_attn.compiler.kernels import Runner, compiled, interpreted
from helion_attn.kernels.lib.inline_asm import maximum
from helion_attn.numerics import FORMAT_MAX, RECENTRED_KEYS, REFLECTED_GROUP
from helion_attn.preprocess import recentre
from helion_attn.preprocess.lib.hadamard import hadamard_block, rotation
from helion_attn.preprocess.lib.reflect import reflected_channels
from helion_attn.preprocess.lib.rope import RopeTables
from helion_attn.preprocess.lib.rotate import rotate_mean
from helion_attn.preprocess.lib.row_layout import row_tile, rows_descale, to_dtype
from helion_attn.preprocess.lib.strided import StridedQKV, row_channels
from helion_attn.preprocess.lib.tiling import tiling
from helion_attn.preprocess.lib.v_layout import lost_in_rounding, v_block, v_descales
from helion_attn.preprocess.sequences import Sequences, key_source, query_source
from helion_attn.preprocess.statistics import Statistics
from helion_attn.types import PackedTensors, Recipe


def store_tile(
    x8: torch.Tensor,  # [tiles, n, D_pad], written
    tile: int,
    x: torch.Tensor,  # [n, D_row]
    n: int,
    d_pad: int,
    d_row: int,
) -> None:
    """Store a tile of rows; D_row holds D_pad and may be wider. Inlined into the kernel."""
    cols = hl.arange(d_row)
    if d_pad < d_row:
        hl.store(x8, [tile, hl.arange(n), cols], x, extra_mask=(cols < d_pad).unsqueeze(0))
    else:
        hl.store(x8, [tile, hl.arange(n), cols], x)


def pack(
    q: torch.Tensor,  # flat
    k: torch.Tensor,  # flat
    v: torch.Tensor,  # flat
    q_amax: torch.Tensor,  # [B * H, MAX_PARTS]
    k_amax: torch.Tensor,  # [B * H_kv, MAX_PARTS]
    v_amax: torch.Tensor,  # [B * H_kv, D_row]
    k_mean: torch.Tensor,  # [B * H_kv, D_row]
    v_mean: torch.Tensor,  # [B * H_kv, D_v_pad]
    cos: torch.Tensor,  # [table_rows * rotary / 2]
    sin: torch.Tensor,  # [table_rows * rotary / 2]
    q_positions: torch.Tensor,  # [M]
    k_positions: torch.Tensor,  # [N]
    signs: torch.Tensor,  # [D_row]
    rotation_matrix: torch.Tensor,  # [side, side]
    q_blocks: torch.Tensor,  # [M_blocks, Q_FIELDS] if varlen
    k_blocks: torch.Tensor,  # [N_blocks, K_FIELDS] if varlen
    q8: torch.Tensor,  # [B * H * m_tiles, q_tile, D_pad], written
    k8: torch.Tensor,  # [B * H_kv * n_tiles, k_tile, D_pad], written
    v8: torch.Tensor,  # [B * H_kv * N_blocks * d_tiles, d_tile, bn], or [B * H_kv * N_blocks, bn, D_v_pad], written
    q_descale: torch.Tensor,  # [B * H, m_tiles * q_tile], written
    k_descale: torch.Tensor,  # [B * H_kv, n_tiles or 1], written
    v_descale: torch.Tensor,  # [B * H_kv, D_v_pad], written
    v_lost: torch.Tensor,  # [B * H_kv * N_blocks, D_v_pad], written if sum_lost
    v_peak: torch.Tensor,  # [B * H_kv * N_blocks, d_tiles], written if note_peak
    lse_shift: torch.Tensor,  # [B * H, m_tiles * q_tile], written if shift_lse
    m_tiles: int,
    n_tiles: int,
    q_parts: int,
    k_parts: int,
    H: int,
    H_kv: int,
    M: int,
    N: int,
    q_b_step: int,
    q_h_step: int,
    q_s_step: int,
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
    q_d_step: hl.constexpr,
    k_d_step: hl.constexpr,
    v_d_step: hl.constexpr,
    unit: hl.constexpr,
    d: hl.constexpr,
    d_v: hl.constexpr,
    d_row: hl.constexpr,
    d_tile: hl.constexpr,
    bn: hl.constexpr,
    q_run: hl.constexpr,
    k_run: hl.constexpr,
    rotary: hl.constexpr,
    pairing: hl.constexpr,
    explicit_q_positions: hl.constexpr,
    explicit_k_positions: hl.constexpr,
    qk_unscaled: hl.constexpr,
    q_per_row: hl.constexpr,
    q_per_tile: hl.constexpr,
    q_per_block: hl.constexpr,
    k_per_tile: hl.constexpr,
    k_per_block: hl.constexpr,
    v_unscaled: hl.constexpr,
    v_per_channel: hl.constexpr,
    sum_lost: hl.constexpr,
    note_peak: hl.constexpr,
    smooth_k: hl.constexpr,
    shift_lse: hl.constexpr,
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

    With `varlen` every block of a head is a "head" of its own, with one block: M and N are those of a block, and
    `q_blocks` and `k_blocks`, of `sequences`, say what it holds.
    """
    if cap_registers:
        # Only then: told of any maximum, be it 255, ptxas takes half as many registers again for the other kernels. The
        # name is for Helion, whose code for this branch would be empty.
        _max_registers = hl.register_tunable(MAX_REGISTERS, IntegerFragment(24, 255, 255))
    q_tile = hl.specialize(q8.size(1))
    k_tile = hl.specialize(k8.size(1))
    d_pad = hl.specialize(q8.size(2))
    side = hl.specialize(rotation_matrix.size(0))
    max_parts = hl.specialize(q_amax.size(1))
    d_tiles = hl.specialize(v_descale.size(1)) // d_tile
    hl.specialize((q.stride(0), k.stride(0), v.stride(0), v_mean.stride(1), k_mean.stride(1), k8.size(2)))
    hl.specialize((q_amax.stride(0), q_amax.stride(1), k_amax.stride(0), k_amax.stride(1), k_amax.size(1)))
    # Known strides keep the stores 16 bytes wide.
    hl.specialize((q8.stride(0), q8.stride(1), q8.stride(2), k8.stride(0), k8.stride(1), k8.stride(2)))
    hl.specialize((cos.stride(0), sin.stride(0), signs.stride(0)))
    hl.specialize((v8.size(1), v8.size(2), rotation_matrix.stride(0), rotation_matrix.stride(1)))
    hl.specialize((v8.stride(0), v8.stride(1), v8.stride(2)))
    n_blocks = (N + bn - 1) // bn
    group = H // H_kv
    q_channels = row_channels(d, d_at_run_time, q_d_step)
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
        scaled, tile = v_block(
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
            v_peak[bh * n_blocks + i, d_index] = torch.amax(torch.amax(torch.abs(scaled), 1), 0)
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
                x, peak, k_amax, k_mean, k_head, k_parts, max_parts, k_tile, d_row, factor, qk_largest, qk_unscaled,
                False, k_per_tile, k_per_block, smooth_k,
            )  # fmt: skip
            store_tile(
                k8,
                kv * n_tiles + k_tile_index,
                to_dtype(x * (1.0 / descale).unsqueeze(1), k8.dtype, is_cuda),
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

    for q_bh, from_end in hl.grid([q_descale.size(0), (m_tiles + q_run - 1) // q_run]):
        q_index = (m_tiles + q_run - 1) // q_run - 1 - from_end
        q_end = min(m_tiles, (q_index + 1) * q_run)
        q_kv, queries, offset = query_source(
            q_blocks, q_bh, H, group, M, q_b_step, q_h_step, q_s_step, unit, q_tile * m_tiles, varlen, wide, is_cuda
        )
        row_step = q_s_step * unit
        matrix = hl.load(rotation_matrix, [hl.arange(side), hl.arange(side)])
        mean = hl.zeros([d_row], dtype=torch.float32)
        if shift_lse:
            mean = hl.load(k_mean, [q_kv, hl.arange(d_row)])
        # [q_tile], what the block's descale must hold
        peak = hl.zeros([q_tile], dtype=torch.float32)
        if q_per_block:
            for q_i in hl.grid(q_index * q_run, q_end):
                rows = q_i * q_tile + hl.arange(q_tile)
                x, _ = row_tile(
                    q, cos, sin, q_positions, mean, signs, matrix, offset, rows, row_step, q_d_step,
                    queries, q_channels, N - M, table_rows, norm, q_tile, d_row, rotary, side, pairing,
                    explicit_q_positions, False, shift_lse, hadamard, False, two_terms, reflected, is_cuda,
                )  # fmt: skip
                peak = maximum(peak, torch.amax(torch.abs(x), 1), is_cuda)
        for q_tile_index in hl.grid(q_index * q_run, q_end):
            rows = q_tile_index * q_tile + hl.arange(q_tile)
            x, product = row_tile(
                q, cos, sin, q_positions, mean, signs, matrix, offset, rows, row_step, q_d_step,
                queries, q_channels, N - M, table_rows, norm, q_tile, d_row, rotary, side, pairing,
                explicit_q_positions, False, shift_lse, hadamard, False, two_terms, reflected, is_cuda,
            )  # fmt: skip
            descale = rows_descale(
                x, peak, q_amax, k_mean, q_bh, q_parts, max_parts, q_tile, d_row, factor, qk_largest, qk_unscaled,
                q_per_row, q_per_tile, q_per_block, False,
            )  # fmt: skip
            store_tile(
                q8,
                q_bh * m_tiles + q_tile_index,
                to_dtype(x * (1.0 / descale).unsqueeze(1), q8.dtype, is_cuda),
                q_tile,
                d_pad,
                d_row,
            )
            hl.store(q_descale, [q_bh, rows], descale)
            if shift_lse:
                hl.store(lse_shift, [q_bh, rows], product)


@functools.cache
def kernel(
    is_cuda: bool,
    num_warps: int,
    max_registers: int | None,
    k_in_flight: int,
    q_in_flight: int,
    q_per_block: bool,
    k_per_block: bool,
) -> Runner:
    """The kernel for the device."""
    if not is_cuda:
        return interpreted(pack)
    k_loops = [k_in_flight] * (2 if k_per_block else 1)
    q_loops = [q_in_flight] * (2 if q_per_block else 1)
    stages = [0, 0, *k_loops, 0, *q_loops]
    registers: dict[str, Any] = {} if max_registers is None else {MAX_REGISTERS: max_registers}
    config = helion.Config(num_warps=num_warps, indexing="pointer", range_num_stages=stages, **registers)
    return compiled(pack, config)


def largest_factor(recipe: Recipe, D: int) -> float:
    """A head's largest magnitude times this bounds what the rotation or reflection makes of its rows."""
    if recipe.reflect:
        return math.sqrt(REFLECTED_GROUP)
    return math.sqrt(hadamard_block(D)) if recipe.hadamard else 1.0


def recentres(recipe: Recipe, keys: int) -> bool:
    """Whether the mean that is added to V of so many keys is corrected for its rounding."""
    return recipe.center_v and recipe.pv_dtype.itemsize == 1 and keys >= RECENTRED_KEYS


def launch(
    source: StridedQKV,
    rope: RopeTables,
    stats: Statistics,
    bm: int,
    bn: int,
    recipe: Recipe,
    shift_lse: bool,
    sequences: Sequences | None = None,
    all_keys: int | None = None,
) -> PackedTensors:
    """Run the kernel.

    Args:
        source: Q, K and V.
        rope: and `stats`: what is done to them, and what is known of them.
        bm: rows of a block of Q.
        bn: keys of a block of K and V.
        recipe: how they become 8- or 16-bit numbers.
        shift_lse: whether somebody sees what smooth_k takes from the scores.
        sequences: where those of a packed batch lie, or None. Then Q, K and V are [1, heads, tokens, head dim], and
            `stats` has every sequence's.
        all_keys: how many keys attention has of which these are a part, or None if they are all.

    Returns:
        What is shaped as in `QuantizedQKV`, or as in `PackedVarlen`; k_mean and lse_shift empty without smooth_k,
        lse_shift also without shift_lse.
    """
    B, H, H_kv, D = source.B, source.H, source.H_kv, source.D
    D_pad, D_v_pad, D_row = source.D_pad, source.D_v_pad, source.D_row
    like, smooth_k = stats.v_mean, recipe.smooth_k

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return like.new_empty(shape, dtype=dtype)

    t = tiling(source, rope, bm, bn, recipe)
    m_blocks, n_blocks = -(-source.M // bm), -(-source.N // bn)
    heads, kv_heads, M, N = B * H, B * H_kv, source.M, source.N
    unused = like.new_empty((1, 1), dtype=torch.int32)
    q_blocks, k_blocks = unused, unused
    if sequences is not None:
        q_blocks, k_blocks = sequences.q_blocks, sequences.k_blocks
        heads, kv_heads = H * q_blocks.size(0), H_kv * k_blocks.size(0)
        m_blocks, n_blocks, M, N = 1, 1, bm, bn
    m_tiles, n_tiles = m_blocks * bm // t.q_tile, n_blocks * bn // t.k_tile
    q8 = empty(heads * m_tiles, t.q_tile, D_pad, dtype=recipe.qk_dtype)
    k8 = empty(kv_heads * n_tiles, t.k_tile, D_pad, dtype=recipe.qk_dtype)
    transposed = recipe.pv_dtype.itemsize == 1
    v_blocks = (n_blocks * (D_v_pad // t.d_tile), t.d_tile, bn) if transposed else (n_blocks, bn, D_v_pad)
    v8 = empty(kv_heads * v_blocks[0], *v_blocks[1:], dtype=recipe.pv_dtype)
    q_descale, v_descale = empty(heads, m_blocks * bm), empty(kv_heads, D_v_pad)
    k_descale = empty(kv_heads, n_blocks if recipe.k_scales == "block" else 1)
    # Few keys lose less by their rounding than the sum of it costs.
    sum_lost = recentres(recipe, source.N if all_keys is None else all_keys)
    note_peak = recipe.samples_v
    v_lost = empty(kv_heads * n_blocks if sum_lost else 1, D_v_pad)
    v_peak = empty(kv_heads * n_blocks if note_peak else 1, D_v_pad // t.d_tile)
    shift_lse = shift_lse and smooth_k
    lse_shift = empty(heads, m_blocks * bm) if shift_lse else empty(1, 1)
    signs, matrix, norm = empty(1), empty(1, 1), 1.0
    if recipe.hadamard:
        signs, matrix, norm = rotation(D, D_row, recipe.hadamard_seed, like.device)
    run = kernel(
        like.is_cuda,
        t.num_warps,
        t.max_registers,
        t.k_in_flight,
        t.q_in_flight,
        t.q_per_block,
        t.k_per_block,
    )
    run.run(
        {
            **source.arguments(),
            **rope.arguments(),
            "q_amax": stats.q_amax,
            "k_amax": stats.k_amax,
            "v_amax": stats.v_amax,
            "k_mean": stats.k_mean,
            "v_mean": stats.v_mean,
            "signs": signs,
            "rotation_matrix": matrix,
            "q_blocks": q_blocks,
            "k_blocks": k_blocks,
            "q8": q8,
            "k8": k8,
            "v8": v8,
            "q_descale": q_descale,
            "k_descale": k_descale,
            "v_descale": v_descale,
            "v_lost": v_lost,
            "v_peak": v_peak,
            "lse_shift": lse_shift,
            "m_tiles": m_tiles,
            "n_tiles": n_tiles,
            "q_parts": stats.q_parts,
            "k_parts": stats.k_parts,
            "H": H,
            "H_kv": H_kv,
            "M": M,
            "N": N,
            "d_at_run_time": D,
            "d_v_at_run_time": source.D_v,
            "factor": largest_factor(recipe, D),
            "norm": norm,
            "d": D,
            "d_v": source.D_v,
            "d_row": D_row,
            "d_tile": t.d_tile,
            "bn": bn,
            "q_run": t.q_run,
            "k_run": t.k_run,
            "qk_unscaled": recipe.q_scales == "none",
            "q_per_row": recipe.q_scales == "token",
            "q_per_tile": recipe.q_scales == "block" and not t.q_per_block,
            "q_per_block": t.q_per_block,
            "k_per_tile": recipe.k_scales == "block" and not t.k_per_block,
            "k_per_block": t.k_per_block,
            "v_unscaled": recipe.v_scales == "none",
            # Of a sample every channel is told the head's.
            "v_per_channel": recipe.v_scales == "channel" or recipe.samples_v,
            "sum_lost": sum_lost,
            "note_peak": note_peak,
            "smooth_k": smooth_k,
            "shift_lse": shift_lse,
            "hadamard": recipe.hadamard,
            "rotate_first": t.rotate_first,
            "two_terms": t.two_terms,
            "reflected": reflected_channels(D) if recipe.reflect else 0,
            "qk_largest": FORMAT_MAX.get(recipe.qk_dtype, 1.0),
            "v_largest": FORMAT_MAX.get(recipe.pv_dtype, 1.0),
            "cap_registers": t.max_registers is not None,
            "varlen": sequences is not None,
            "wide": sequences is not None and source.wide,
            "is_cuda": like.is_cuda,
        }
    )
    if sum_lost or note_peak:
        recentre.launch(source, v_lost, v_peak, v8, v_descale, stats.v_mean, recipe, sum_lost, sequences)
    if sequences is not None:
        m_blocks, n_blocks = q_blocks.size(0), k_blocks.size(0)
    return PackedTensors(
        q8=q8.view(B * H, m_blocks, bm, D_pad),
        k8=k8.view(B * H_kv, n_blocks, bn, D_pad),
        v8=v8.view(B * H_kv, n_blocks, *((D_v_pad, bn) if transposed else (bn, D_v_pad))),
        q_descale=q_descale.view(B, H, m_blocks, bm),
        k_descale=k_descale.view(B, H_kv, -1),
        v_descale=v_descale.view(B, H_kv, -1),
        v_mean=stats.v_mean.view(-1, H_kv, D_v_pad),
        k_mean=stats.k_mean.view(-1, H_kv, D_row) if smooth_k else empty(0),
        lse_shift=lse_shift.view(B, H, m_blocks, bm) if shift_lse else empty(0),
    )
