"""The second kernel of `statistics`: means over keys, and the amax of V's channels without them."""

from __future__ import annotations

import torch

from helion_attn.compiler.helion_adapter import hl


def means(
    k_sum: torch.Tensor,  # [B * H_kv, MAX_PARTS, D_row]
    v_stats: torch.Tensor,  # [B * H_kv, 3, MAX_PARTS, D_row]
    k_mean: torch.Tensor,  # [B * H_kv, D_row], written if smooth_k
    v_mean: torch.Tensor,  # [B * H_kv, D_v_pad], written
    v_amax: torch.Tensor,  # [B * H_kv, D_row], written
    k_parts: int,
    v_parts: int,
    N: int,
    d_tile: hl.constexpr,
    smooth_k: hl.constexpr,
    center_v: hl.constexpr,
) -> None:
    """See `statistics`."""
    max_parts = hl.specialize(v_stats.size(2))
    d_row = hl.specialize(v_amax.size(1))
    d_v_pad = hl.specialize(v_mean.size(1))
    d_tiles = d_row // d_tile
    hl.specialize((v_stats.stride(1), v_stats.stride(2), v_stats.stride(3), v_mean.stride(0), v_mean.stride(1)))
    for bh, d_index in hl.grid([v_stats.size(0), d_tiles]):
        cols = d_index * d_tile + hl.arange(d_tile)
        part = hl.arange(max_parts)
        written = (part < v_parts).unsqueeze(1)
        # [max_parts, d_tile] each, then [d_tile]
        v_sum = torch.where(written, hl.load(v_stats, [bh, 0, part, cols]), 0.0).sum(0)
        v_min = torch.amin(torch.where(written, hl.load(v_stats, [bh, 1, part, cols]), float("inf")), 0)
        v_max = torch.amax(torch.where(written, hl.load(v_stats, [bh, 2, part, cols]), float("-inf")), 0)
        if center_v:
            mean = v_sum / N
        else:
            mean = hl.zeros([d_tile], dtype=torch.float32)
        if d_v_pad < d_row:
            hl.store(v_mean, [bh, cols], mean, extra_mask=cols < d_v_pad)
        else:
            hl.store(v_mean, [bh, cols], mean)
        hl.store(v_amax, [bh, cols], torch.maximum(v_max - mean, mean - v_min))
        if smooth_k:
            total = torch.where((part < k_parts).unsqueeze(1), hl.load(k_sum, [bh, part, cols]), 0.0).sum(0)
            hl.store(k_mean, [bh, cols], total / N)


def sequence_means(
    k_part_amax: torch.Tensor,  # [H_kv * N_blocks, 1]
    k_sum: torch.Tensor,  # [H_kv * N_blocks, 1, D_row]
    v_stats: torch.Tensor,  # [H_kv * N_blocks, 3, 1, D_row]
    sequences: torch.Tensor,  # [B, SEQUENCE_FIELDS]
    k_amax: torch.Tensor,  # [B * H_kv, MAX_PARTS], of which the first is written
    k_mean: torch.Tensor,  # [B * H_kv, D_row], written if smooth_k
    v_mean: torch.Tensor,  # [B * H_kv, D_v_pad], written
    v_amax: torch.Tensor,  # [B * H_kv, D_row], written
    n_blocks: int,
    H_kv: int,
    bn: hl.constexpr,
    chunk: hl.constexpr,
    d_tile: hl.constexpr,
    has_k: hl.constexpr,
    has_v: hl.constexpr,
    smooth_k: hl.constexpr,
    center_v: hl.constexpr,
) -> None:
    """`means`, and the amax of K, of the sequences of a packed batch, from their blocks' results."""
    d_row = hl.specialize(v_amax.size(1))
    d_v_pad = hl.specialize(v_mean.size(1))
    d_tiles = d_row // d_tile
    hl.specialize((v_stats.stride(1), v_stats.stride(2), v_stats.stride(3), v_mean.stride(0), v_mean.stride(1)))
    for head, d_index in hl.grid([v_amax.size(0), d_tiles]):
        first = hl.load(sequences, [head // H_kv, 0])
        keys = hl.load(sequences, [head // H_kv, 1])
        count = (keys + bn - 1) // bn
        cols = d_index * d_tile + hl.arange(d_tile)
        # [chunk, d_tile] each
        v_sum = hl.zeros([chunk, d_tile], dtype=torch.float32)
        v_min = hl.full([chunk, d_tile], float("inf"), dtype=torch.float32)
        v_max = hl.full([chunk, d_tile], float("-inf"), dtype=torch.float32)
        k_total = hl.zeros([chunk, d_tile], dtype=torch.float32)
        k_max = hl.zeros([chunk], dtype=torch.float32)
        for c in hl.grid((count + chunk - 1) // chunk):
            block = c * chunk + hl.arange(chunk)
            part = (head % H_kv) * n_blocks + first + block
            inside = block < count
            own = inside.unsqueeze(1)
            if has_v:
                v_sum = v_sum + hl.load(v_stats, [part, 0, 0, cols], extra_mask=own)
                v_min = torch.minimum(
                    v_min, torch.where(own, hl.load(v_stats, [part, 1, 0, cols], extra_mask=own), float("inf"))
                )
                v_max = torch.maximum(
                    v_max, torch.where(own, hl.load(v_stats, [part, 2, 0, cols], extra_mask=own), float("-inf"))
                )
            if has_k:
                k_max = torch.maximum(k_max, hl.load(k_part_amax, [part, 0], extra_mask=inside))
            if smooth_k:
                k_total = k_total + hl.load(k_sum, [part, 0, cols], extra_mask=own)
        # The means of no keys are 0: rows without a key give that, and lse -inf.
        divisor = torch.clamp_min(keys, 1)
        # [d_tile]
        if center_v:
            mean = v_sum.sum(0) / divisor
        else:
            mean = hl.zeros([d_tile], dtype=torch.float32)
        if d_v_pad < d_row:
            hl.store(v_mean, [head, cols], mean, extra_mask=cols < d_v_pad)
        else:
            hl.store(v_mean, [head, cols], mean)
        hl.store(v_amax, [head, cols], torch.maximum(torch.amax(v_max, 0) - mean, mean - torch.amin(v_min, 0)))
        if has_k:  # noqa: SIM102 - Helion resolves this one when it compiles, the next when it runs
            if d_index == 0:
                k_amax[head, 0] = torch.amax(k_max, 0)
        if smooth_k:
            hl.store(k_mean, [head, cols], k_total.sum(0) / divisor)
