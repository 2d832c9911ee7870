"""The first kernel of `statistics`: what is known of a part of a head, or of a block of packed sequences."""

from __future__ import annotations

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.inline_asm import maximum, minimum
from helion_attn.kernels.lib.rope import rope_rows
from helion_attn.kernels.lib.strided import load_rows
from helion_attn.preprocess.sequences import key_source


def last_key(keys: torch.Tensor, size: int | torch.Tensor, varlen: hl.constexpr) -> torch.Tensor:
    """Keys, those past the end made the last one; 0 of no keys, which only a block of no sequence has."""
    last = torch.clamp_max(keys, size - 1)
    return torch.clamp_min(last, 0) if varlen else last


def first_pass(
    q: torch.Tensor,  # flat
    k: torch.Tensor,  # flat
    v: torch.Tensor,  # flat
    q_amax: torch.Tensor,  # [B * H, MAX_PARTS], written
    k_amax: torch.Tensor,  # [B * H_kv, MAX_PARTS], written
    k_sum: torch.Tensor,  # [B * H_kv, MAX_PARTS, D_row], written if smooth_k
    v_stats: torch.Tensor,  # [B * H_kv, 3, MAX_PARTS, D_row], written
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    k_blocks: torch.Tensor,  # [N_blocks, K_FIELDS] if varlen
    q_parts: int,
    k_parts: int,
    v_parts: int,
    q_run: int,  # tiles of a part; here a `max` would be that of the first call
    k_run: int,
    v_run: int,
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
    q_d_step: hl.constexpr,
    k_d_step: hl.constexpr,
    v_d_step: hl.constexpr,
    unit: hl.constexpr,
    d: hl.constexpr,
    d_v: hl.constexpr,
    step: hl.constexpr,
    smooth_k: hl.constexpr,
    rotary: hl.constexpr,
    q_pairing: hl.constexpr,
    k_pairing: hl.constexpr,
    explicit_q_positions: hl.constexpr,
    explicit_k_positions: hl.constexpr,
    varlen: hl.constexpr,
    wide: hl.constexpr,
    is_cuda: hl.constexpr,
) -> None:
    """See `statistics`; the steps are those of `StridedRows`, the RoPE arguments those of `rope_rows`.

    With `varlen` a block of a head of K or V is a "head" of its own, as in `pack.pack`.
    """
    d_row = hl.specialize(v_stats.size(3))
    hl.specialize((q.stride(0), k.stride(0), v.stride(0), cos.stride(0), sin.stride(0)))
    hl.specialize((v_stats.stride(1), v_stats.stride(2), v_stats.stride(3)))
    q_tiles = (M + step - 1) // step
    kv_tiles = (N + step - 1) // step
    # A tensor that needs no statistics has no parts, and its loop no programs.
    for bh, part in hl.grid([q_amax.size(0), q_parts]):
        offset = ((bh // H) * q_b_step + (bh % H) * q_h_step) * unit
        # Maxima stay per element until the end: one reduction across lanes a program, not one a step.
        # [step, D_row]
        q_max = hl.zeros([step, d_row], dtype=torch.float32)
        for q_tile in hl.grid(part * q_run, min(q_tiles, (part + 1) * q_run)):
            rows = q_tile * step + hl.arange(step)
            if q_pairing:
                x = rope_rows(
                    q, cos, sin, q_positions, offset, rows, q_s_step * unit, q_d_step, M, d, N - M, table_rows,
                    step, d_row, rotary, q_pairing, explicit_q_positions,
                )  # fmt: skip
            else:
                x = load_rows(q, offset, rows, hl.arange(d_row), q_s_step * unit, q_d_step, M, d)
            q_max = maximum(q_max, torch.abs(x), is_cuda)
        q_amax[bh, part] = torch.amax(torch.amax(q_max, 1), 0)

    for bh, part in hl.grid([k_amax.size(0), k_parts]):
        _, keys_of_head, offset = key_source(
            k_blocks, bh, H_kv, N, k_b_step, k_h_step, k_s_step, unit, varlen, wide, is_cuda
        )
        k_max = hl.zeros([step, d_row], dtype=torch.float32)
        k_total = hl.zeros([step, d_row], dtype=torch.float32)
        for k_tile in hl.grid(part * k_run, min(kv_tiles, (part + 1) * k_run)):
            rows = k_tile * step + hl.arange(step)
            if k_pairing:
                x = rope_rows(
                    k, cos, sin, k_positions, offset, rows, k_s_step * unit, k_d_step, keys_of_head, d, 0, table_rows,
                    step, d_row, rotary, k_pairing, explicit_k_positions,
                )  # fmt: skip
            else:
                x = load_rows(k, offset, rows, hl.arange(d_row), k_s_step * unit, k_d_step, keys_of_head, d)
            k_max = maximum(k_max, torch.abs(x), is_cuda)
            if smooth_k:
                k_total = k_total + x
        k_amax[bh, part] = torch.amax(torch.amax(k_max, 1), 0)
        if smooth_k:
            k_sum[bh, part, :] = k_total.sum(0)

    for bh, part in hl.grid([v_stats.size(0), v_parts]):
        _, v_keys, offset = key_source(k_blocks, bh, H_kv, N, v_b_step, v_h_step, v_s_step, unit, varlen, wide, is_cuda)
        v_sum = hl.zeros([step, d_row], dtype=torch.float32)
        v_min = hl.full([step, d_row], float("inf"), dtype=torch.float32)
        v_max = hl.full([step, d_row], float("-inf"), dtype=torch.float32)
        for v_tile in hl.grid(part * v_run, min(kv_tiles, (part + 1) * v_run)):
            keys = v_tile * step + hl.arange(step)
            # Keys past the end repeat the last one: no change to minimum and maximum, left out of the sum.
            last = last_key(keys, v_keys, varlen)
            x = load_rows(v, offset, last, hl.arange(d_row), v_s_step * unit, v_d_step, v_keys, d_v)
            v_sum = v_sum + torch.where((keys < v_keys).unsqueeze(1), x, 0.0)
            v_min = minimum(v_min, x, is_cuda)
            v_max = maximum(v_max, x, is_cuda)
        v_stats[bh, 0, part, :] = v_sum.sum(0)
        v_stats[bh, 1, part, :] = torch.amin(v_min, 0)
        v_stats[bh, 2, part, :] = torch.amax(v_max, 0)
