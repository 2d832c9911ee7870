"""Q, K and V to FP8, straight from the user's strided tensors to the packed format, in three kernels.

1. `first_pass`: amax of every head of Q and K; sum, minimum and maximum of every channel of V. With the mean they give
   the amax of the *centred* channel, so that centring needs no pass of its own.
2. `v_means`: V's means, and the amax of V without them. Small.
3. `pack`: scale, cast and pack Q and K block-major; centre, scale, cast, transpose, interleave and pack V.

    descale = max(amax / 448, 2**-126);  x8 = e4m3(x / descale), v8 = e4m3((v - mean) / descale)

Each kernel handles the three tensors in top-level loops of its own, which Helion makes one launch: a launch of 64 MB
costs 4 of its 22 us to start and drain. A NaN or infinity in a head makes its descale NaN or infinity, and so every
score, or every output, of that head NaN: nothing saturates.
"""

from __future__ import annotations

import functools

import torch

from helion_attn.kernels.helion_compat import compiled, helion, hl, interpreted
from helion_attn.kernels.inline_asm import maximum, minimum
from helion_attn.preprocess.row_layout import row_block
from helion_attn.preprocess.strided import common_unit, load_rows, strided_rows
from helion_attn.preprocess.v_layout import v_block

#: Elements that one step of the first pass reads: four 16-byte loads of bf16 a thread.
STEP_ELEMENTS = 4096

#: Programs per tensor in the first pass, about: four on each of an H200's 132 SMs, three steps in flight each.
FIRST_PASS_PROGRAMS = 528

#: Parts of a head in the first pass, at most: every program of the second pass reduces their results itself.
MAX_PARTS = 32

#: Channels of a program of `v_means`.
MEAN_CHANNELS = 32

#: Elements of Q or K that a program packs: 64 a thread. Packed blocks lie one after the other, so that a program may
#: take a part of one.
PACK_ELEMENTS = 8192

#: Channels of V that a program packs.
PACK_CHANNELS = 64


def first_pass(
    q: torch.Tensor,  # flat
    k: torch.Tensor,  # flat
    v: torch.Tensor,  # flat
    q_amax: torch.Tensor,  # [B * H, MAX_PARTS], written
    k_amax: torch.Tensor,  # [B * H_kv, MAX_PARTS], written
    v_stats: torch.Tensor,  # [B * H_kv, 3, MAX_PARTS, D_pad], written
    q_parts: int,
    kv_parts: int,
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
    q_d_step: hl.constexpr,
    k_d_step: hl.constexpr,
    v_d_step: hl.constexpr,
    unit: hl.constexpr,
    d: hl.constexpr,
    step: hl.constexpr,
    inline_asm: hl.constexpr,
) -> None:
    """See the module's docstring; the steps are those of `StridedRows`."""
    d_pad = hl.specialize(v_stats.size(3))
    hl.specialize((q.stride(0), k.stride(0), v.stride(0)))
    hl.specialize((v_stats.stride(1), v_stats.stride(2), v_stats.stride(3)))
    q_tiles = (M + step - 1) // step
    kv_tiles = (N + step - 1) // step
    q_run = (q_tiles + q_parts - 1) // q_parts
    kv_run = (kv_tiles + kv_parts - 1) // kv_parts
    for bh, part in hl.grid([q_amax.size(0), q_parts]):
        offset = ((bh // H) * q_b_step + (bh % H) * q_h_step) * unit
        # Maxima stay per element until the end: one reduction across lanes a program, not one a step.
        # [step, D_pad]
        q_max = hl.zeros([step, d_pad], dtype=torch.float32)
        for q_tile in hl.grid(part * q_run, min(q_tiles, (part + 1) * q_run)):
            x = load_rows(q, offset, q_tile * step + hl.arange(step), hl.arange(d_pad), q_s_step * unit, q_d_step, M, d)
            q_max = maximum(q_max, torch.abs(x), inline_asm)
        q_amax[bh, part] = torch.amax(torch.amax(q_max, 1), 0)

    for bh, part in hl.grid([k_amax.size(0), kv_parts]):
        offset = ((bh // H_kv) * k_b_step + (bh % H_kv) * k_h_step) * unit
        k_max = hl.zeros([step, d_pad], dtype=torch.float32)
        for k_tile in hl.grid(part * kv_run, min(kv_tiles, (part + 1) * kv_run)):
            x = load_rows(k, offset, k_tile * step + hl.arange(step), hl.arange(d_pad), k_s_step * unit, k_d_step, N, d)
            k_max = maximum(k_max, torch.abs(x), inline_asm)
        k_amax[bh, part] = torch.amax(torch.amax(k_max, 1), 0)

    for bh, part in hl.grid([v_stats.size(0), kv_parts]):
        offset = ((bh // H_kv) * v_b_step + (bh % H_kv) * v_h_step) * unit
        v_sum = hl.zeros([step, d_pad], dtype=torch.float32)
        v_min = hl.full([step, d_pad], float("inf"), dtype=torch.float32)
        v_max = hl.full([step, d_pad], float("-inf"), dtype=torch.float32)
        for v_tile in hl.grid(part * kv_run, min(kv_tiles, (part + 1) * kv_run)):
            keys = v_tile * step + hl.arange(step)
            # Keys past the end repeat the last one: no change to minimum and maximum, left out of the sum.
            x = load_rows(v, offset, torch.clamp_max(keys, N - 1), hl.arange(d_pad), v_s_step * unit, v_d_step, N, d)
            v_sum = v_sum + torch.where((keys < N).unsqueeze(1), x, 0.0)
            v_min = minimum(v_min, x, inline_asm)
            v_max = maximum(v_max, x, inline_asm)
        v_stats[bh, 0, part, :] = v_sum.sum(0)
        v_stats[bh, 1, part, :] = torch.amin(v_min, 0)
        v_stats[bh, 2, part, :] = torch.amax(v_max, 0)


def v_means(
    v_stats: torch.Tensor,  # [B * H_kv, 3, MAX_PARTS, D_pad]
    v_mean: torch.Tensor,  # [B * H_kv, D_pad], written
    v_amax: torch.Tensor,  # [B * H_kv, D_pad / MEAN_CHANNELS], written
    kv_parts: int,
    N: int,
    d_tile: hl.constexpr,
    center: hl.constexpr,
) -> None:
    """See the module's docstring."""
    max_parts = hl.specialize(v_stats.size(2))
    d_tiles = hl.specialize(v_amax.size(1))
    hl.specialize((v_stats.stride(1), v_stats.stride(2), v_stats.stride(3), v_mean.stride(0), v_mean.stride(1)))
    for bh, d_index in hl.grid([v_stats.size(0), d_tiles]):
        cols = d_index * d_tile + hl.arange(d_tile)
        part = hl.arange(max_parts)
        written = (part < kv_parts).unsqueeze(1)
        # [max_parts, d_tile] each, then [d_tile]
        v_sum = torch.where(written, hl.load(v_stats, [bh, 0, part, cols]), 0.0).sum(0)
        v_min = torch.amin(torch.where(written, hl.load(v_stats, [bh, 1, part, cols]), float("inf")), 0)
        v_max = torch.amax(torch.where(written, hl.load(v_stats, [bh, 2, part, cols]), float("-inf")), 0)
        if center:
            mean = v_sum / N
        else:
            mean = hl.zeros([d_tile], dtype=torch.float32)
        hl.store(v_mean, [bh, cols], mean)
        v_amax[bh, d_index] = torch.amax(torch.maximum(v_max - mean, mean - v_min), 0)


def pack(
    q: torch.Tensor,  # flat
    k: torch.Tensor,  # flat
    v: torch.Tensor,  # flat
    q_amax: torch.Tensor,  # [B * H, MAX_PARTS]
    k_amax: torch.Tensor,  # [B * H_kv, MAX_PARTS]
    v_amax: torch.Tensor,  # [B * H_kv, D_pad / MEAN_CHANNELS]
    v_mean: torch.Tensor,  # [B * H_kv, D_pad]
    q8: torch.Tensor,  # [B * H * m_tiles, q_tile, D_pad], written
    k8: torch.Tensor,  # [B * H_kv * n_tiles, k_tile, D_pad], written
    v8: torch.Tensor,  # [B * H_kv * N_blocks * d_tiles, d_tile, bn], written
    q_descale: torch.Tensor,  # [B * H], written
    k_descale: torch.Tensor,  # [B * H_kv], written
    v_descale: torch.Tensor,  # [B * H_kv], written
    m_tiles: int,
    n_tiles: int,
    q_parts: int,
    kv_parts: int,
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
    q_d_step: hl.constexpr,
    k_d_step: hl.constexpr,
    v_d_step: hl.constexpr,
    unit: hl.constexpr,
    d: hl.constexpr,
) -> None:
    """See the module's docstring. Tiles run from the last to the first: what `first_pass` read last is still in L2."""
    q_tile = hl.specialize(q8.size(1))
    k_tile = hl.specialize(k8.size(1))
    d_pad = hl.specialize(q8.size(2))
    d_tile = hl.specialize(v8.size(1))
    bn = hl.specialize(v8.size(2))
    max_parts = hl.specialize(q_amax.size(1))
    d_tiles = d_pad // d_tile
    amax_tiles = hl.specialize(v_amax.size(1))
    hl.specialize((q.stride(0), k.stride(0), v.stride(0), v_mean.stride(1), k8.size(2)))
    hl.specialize((q_amax.stride(0), q_amax.stride(1), k_amax.stride(0), k_amax.stride(1), k_amax.size(1)))
    # Known strides keep the stores 16 bytes wide.
    hl.specialize((q8.stride(0), q8.stride(1), q8.stride(2), k8.stride(0), k8.stride(1), k8.stride(2)))
    hl.specialize((v8.stride(0), v8.stride(1), v8.stride(2)))
    n_blocks = (N + bn - 1) // bn
    for bh, from_end in hl.grid([v_descale.size(0), n_blocks * d_tiles]):
        v_index = n_blocks * d_tiles - 1 - from_end
        i = v_index // d_tiles
        d_index = v_index % d_tiles
        offset = ((bh // H_kv) * v_b_step + (bh % H_kv) * v_h_step) * unit
        tile, descale = v_block(
            v, v_mean, v_amax, bh, i, d_index, amax_tiles, offset, v_s_step * unit, v_d_step, N, d, bn, d_tile
        )
        v8[bh * n_blocks * d_tiles + v_index, :, :] = tile
        if v_index == 0:
            v_descale[bh] = descale

    for bh, from_end in hl.grid([k_descale.size(0), n_tiles]):
        i = n_tiles - 1 - from_end
        offset = ((bh // H_kv) * k_b_step + (bh % H_kv) * k_h_step) * unit
        tile, descale = row_block(
            k, k_amax, bh, i, kv_parts, max_parts, offset, k_s_step * unit, k_d_step, N, d, k_tile, d_pad
        )
        k8[bh * n_tiles + i, :, :] = tile
        if i == 0:
            k_descale[bh] = descale

    for bh, from_end in hl.grid([q_descale.size(0), m_tiles]):
        i = m_tiles - 1 - from_end
        offset = ((bh // H) * q_b_step + (bh % H) * q_h_step) * unit
        tile, descale = row_block(
            q, q_amax, bh, i, q_parts, max_parts, offset, q_s_step * unit, q_d_step, M, d, q_tile, d_pad
        )
        q8[bh * m_tiles + i, :, :] = tile
        if i == 0:
            q_descale[bh] = descale


@functools.cache
def kernels(is_cuda: bool) -> tuple[helion.Kernel[None], helion.Kernel[None], helion.Kernel[None]]:
    """`(first_pass, v_means, pack)` for the device."""
    if not is_cuda:
        return interpreted(first_pass), interpreted(v_means), interpreted(pack)
    plain = helion.Config(num_warps=4, indexing="pointer")
    # Three steps in flight in each of the three loops; unpipelined, 22 us of loads take 28.
    pipelined = helion.Config(num_warps=4, indexing="pointer", range_num_stages=[0, 3, 0, 3, 0, 3])
    return compiled(first_pass, pipelined), compiled(v_means, plain), compiled(pack, plain)


def _parts(heads: int, size: int, step: int) -> int:
    """Programs per head of the first pass."""
    return max(1, min(MAX_PARTS, FIRST_PASS_PROGRAMS // heads, -(-size // step)))


def quantize_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bm: int, bn: int, D_pad: int, center_v: bool
) -> tuple[torch.Tensor, ...]:
    """Quantise per head and pack.

    Args:
        q: [B, H, M, D], bf16, fp16 or fp32, any strides.
        k: [B, H_kv, N, D], same dtype.
        v: [B, H_kv, N, D], same dtype.
        bm: rows of a block of Q.
        bn: keys of a block of K and V.
        D_pad: padded head dim.
        center_v: subtract every channel's mean over the N keys of V first.

    Returns:
        q8, k8, v8, q_descale, k_descale, v_descale and v_mean of `QuantizedQKV`.
    """
    (B, H, M, D), (H_kv, N) = q.shape, k.shape[1:3]
    unit = common_unit(q, k, v)
    rows = [strided_rows(x, unit) for x in (q, k, v)]
    step = STEP_ELEMENTS // D_pad
    m_blocks, n_blocks = -(-M // bm), -(-N // bn)
    q_tile, k_tile = (min(block, PACK_ELEMENTS // D_pad) for block in (bm, bn))
    m_tiles, n_tiles, d_tile = m_blocks * bm // q_tile, n_blocks * bn // k_tile, min(D_pad, PACK_CHANNELS)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return q.new_empty(shape, dtype=dtype)

    e4m3 = torch.float8_e4m3fn
    q8 = empty(B * H * m_tiles, q_tile, D_pad, dtype=e4m3)
    k8 = empty(B * H_kv * n_tiles, k_tile, D_pad, dtype=e4m3)
    v8 = empty(B * H_kv * n_blocks * (D_pad // d_tile), d_tile, bn, dtype=e4m3)
    q_descale, k_descale, v_descale = empty(B * H), empty(B * H_kv), empty(B * H_kv)
    v_mean = empty(B * H_kv, D_pad)
    q_amax, k_amax = empty(B * H, MAX_PARTS), empty(B * H_kv, MAX_PARTS)
    v_stats, v_amax = empty(B * H_kv, 3, MAX_PARTS, D_pad), empty(B * H_kv, D_pad // MEAN_CHANNELS)

    flat = [r.flat for r in rows]
    parts = (_parts(B * H, M, step), _parts(B * H_kv, N, step))
    steps = [s for r in rows for s in (r.b_step, r.h_step, r.s_step)]
    d_steps = [r.d_step for r in rows]
    shape = (*parts, H, H_kv, M, N, *steps, *d_steps, unit, D)
    run_first_pass, run_v_means, run_pack = kernels(q.is_cuda)
    run_first_pass(*flat, q_amax, k_amax, v_stats, *shape, step, q.is_cuda)
    run_v_means(v_stats, v_mean, v_amax, parts[1], N, MEAN_CHANNELS, center_v)
    packed = (q8, k8, v8, q_descale, k_descale, v_descale)
    run_pack(*flat, q_amax, k_amax, v_amax, v_mean, *packed, m_tiles, n_tiles, *shape)
    return (
        q8.view(B * H, m_blocks, bm, D_pad),
        k8.view(B * H_kv, n_blocks, bn, D_pad),
        v8.view(B * H_kv, n_blocks, D_pad, bn),
        q_descale.view(B, H),
        k_descale.view(B, H_kv),
        v_descale.view(B, H_kv),
        v_mean.view(B, H_kv, D_pad),
    )
