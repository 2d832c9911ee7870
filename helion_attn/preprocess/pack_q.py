"""Q to the packed format: block-major.

    x = rope(norm(x)) * channel_factors; x = hadamard(x) or reflect(x)
    q8 = cast(x / descale);  descale = max(amax / largest, 2**-126)

Descales are as `pack_kv` has them. `fp8_attn_fwd` does the same itself where it is given Q as it is.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import MAX_REGISTERS, Config, helion, hl
from helion_attn.compiler.runners import Runner, compiled, interpreted
from helion_attn.kernels.lib.inline_asm import maximum
from helion_attn.kernels.lib.rotate import with_factors
from helion_attn.kernels.lib.row_layout import row_tile, rows_descale, rows_scale, rows_to_dtype, store_tile
from helion_attn.kernels.lib.specs import RowSpec
from helion_attn.kernels.lib.strided import row_channels
from helion_attn.preprocess.sequences import query_source


class PackQSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    unit: int  # what steps but those of channels are multiples of
    d: int  # head dim of Q
    q_run: int  # tiles that a program packs
    q_unscaled: bool  # Q has no scale
    q_per_row: bool  # Q has a descale a row
    q_per_tile: bool  # Q has a descale a tile, which is a block
    q_per_block: bool  # Q has a descale a block of several tiles
    qk_largest: float  # the largest magnitude that Q becomes
    cap_registers: bool  # registers of a thread have a maximum
    varlen: bool  # the sequences of a batch follow each other
    wide: bool  # addresses need 64 bits
    rows: RowSpec  # what is done to rows before they are scaled; with `has_lse_shift` `lse_shift` is stored


def pack_q(
    q: torch.Tensor,  # flat
    k_mean: torch.Tensor,  # [B * H_kv * D_row] if has_lse_shift
    channel_factors: torch.Tensor,  # [B * H_kv * D_row] if equalise
    cos: torch.Tensor,  # [table_rows * rotary / 2]
    sin: torch.Tensor,  # [table_rows * rotary / 2]
    q_positions: torch.Tensor,  # [M]
    signs: torch.Tensor,  # [D_row]
    rotation_matrix: torch.Tensor,  # [side, side]
    weight: torch.Tensor,  # [D or H * D] if normed
    factors: torch.Tensor,  # [B * M] if normed over heads
    q_blocks: torch.Tensor,  # [M_blocks, Q_FIELDS] if varlen
    q8: torch.Tensor,  # [B * H * m_tiles, q_tile, D_pad], written
    q_descale: torch.Tensor,  # [B * H, m_tiles * q_tile], written
    lse_shift: torch.Tensor,  # [B * H, m_tiles * q_tile], written if has_lse_shift
    m_tiles: int,
    H: int,
    H_kv: int,
    M: int,
    N: int,
    q_b_step: int,
    q_h_step: int,
    q_s_step: int,
    table_rows: int,
    d_at_run_time: int,
    norm: float,
    spec: hl.constexpr,  # PackQSpec
) -> None:
    """Write blocks of Q, and their rows' descales.

    With `varlen` every block of a head is a "head" of its own, with one block: M is that of a block, and `q_blocks`, of
    `sequences`, says what it holds.
    """
    if spec.cap_registers:
        # As in `pack_kv`.
        _max_registers = hl.register_tunable(MAX_REGISTERS, helion.autotuner.IntegerFragment(24, 255, 255))
    q_tile = hl.specialize(q8.size(1))
    d_pad = hl.specialize(q8.size(2))
    side = hl.specialize(rotation_matrix.size(0))
    hl.specialize((q.stride(0), k_mean.stride(0), channel_factors.stride(0)))
    # Known strides keep the stores 16 bytes wide.
    hl.specialize((q8.stride(0), q8.stride(1), q8.stride(2)))
    hl.specialize((cos.stride(0), sin.stride(0), signs.stride(0), weight.stride(0), factors.stride(0)))
    hl.specialize((rotation_matrix.stride(0), rotation_matrix.stride(1)))
    of_rows = spec.rows
    group = H // H_kv
    q_channels = row_channels(spec.d, d_at_run_time, of_rows.d_step)
    for q_bh, q_index in hl.grid([q_descale.size(0), (m_tiles + spec.q_run - 1) // spec.q_run]):
        q_end = min(m_tiles, (q_index + 1) * spec.q_run)
        q_kv, queries, offset = query_source(
            q_blocks,
            q_bh,
            H,
            group,
            M,
            q_b_step,
            q_h_step,
            q_s_step,
            spec.unit,
            q_tile * m_tiles,
            spec.varlen,
            spec.wide,
            of_rows.is_cuda,
        )
        row_step = q_s_step * spec.unit
        first_weight = (q_bh % H) * spec.d if of_rows.normed == 2 else 0
        first_factor = (q_bh // H) * M if of_rows.normed == 2 else 0
        matrix = hl.load(rotation_matrix, [hl.arange(side), hl.arange(side)])
        first_channel = q_kv * of_rows.d_row
        # [D_row]
        mean = hl.zeros([of_rows.d_row], dtype=torch.float32)
        of_channel = hl.zeros([of_rows.d_row], dtype=torch.float32)
        sign = hl.zeros([of_rows.d_row], dtype=torch.bfloat16)
        if of_rows.vectors_first and of_rows.has_lse_shift:
            mean = hl.load(k_mean, [first_channel + hl.arange(of_rows.d_row)])
        if of_rows.vectors_first and of_rows.equalise:
            of_channel = hl.load(channel_factors, [first_channel + hl.arange(of_rows.d_row)])
        if of_rows.hadamard:
            matrix, sign = with_factors(matrix, signs, of_channel, of_rows.d_row, side, of_rows.equalise)
        # [q_tile], what the block's descale must hold
        peak = hl.zeros([q_tile], dtype=torch.float32)
        if spec.q_per_block:
            for q_i in hl.grid(q_index * spec.q_run, q_end):
                rows = q_i * q_tile + hl.arange(q_tile)
                x, _, factor = row_tile(
                    flat=q,
                    cos=cos,
                    sin=sin,
                    positions=q_positions,
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
                    size=queries,
                    d=q_channels,
                    first_position=N - M,
                    table_rows=table_rows,
                    norm=norm,
                    n=q_tile,
                    side=side,
                    spec=of_rows,
                )
                peak = maximum(peak, torch.amax(torch.abs(x), 1) * factor, of_rows.is_cuda)
        for q_tile_index in hl.grid(q_index * spec.q_run, q_end):
            rows = q_tile_index * q_tile + hl.arange(q_tile)
            x, row_lse_shift, factor = row_tile(
                flat=q,
                cos=cos,
                sin=sin,
                positions=q_positions,
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
                size=queries,
                d=q_channels,
                first_position=N - M,
                table_rows=table_rows,
                norm=norm,
                n=q_tile,
                side=side,
                spec=of_rows,
            )
            descale = rows_descale(
                x, factor, peak, q_tile, spec.qk_largest, spec.q_unscaled, spec.q_per_row, spec.q_per_tile
            )
            store_tile(
                q8,
                q_bh * m_tiles + q_tile_index,
                rows_to_dtype(x, rows_scale(factor, descale, of_rows.normed), q8.dtype, of_rows.is_cuda),
                q_tile,
                d_pad,
                of_rows.d_row,
            )
            hl.store(q_descale, [q_bh, rows], descale)
            if of_rows.has_lse_shift:
                hl.store(lse_shift, [q_bh, rows], row_lse_shift)


@functools.cache
def kernel(is_cuda: bool, num_warps: int, max_registers: int | None, in_flight: int, q_per_block: bool) -> Runner:
    """The kernel for the device."""
    if not is_cuda:
        return interpreted(pack_q)
    stages = [0, *[in_flight] * (2 if q_per_block else 1)]
    registers: dict[str, Any] = {} if max_registers is None else {MAX_REGISTERS: max_registers}
    return compiled(pack_q, Config(num_warps=num_warps, indexing="pointer", range_num_stages=stages, **registers))
