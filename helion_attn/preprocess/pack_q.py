"""Q to the packed format: block-major.

    x = rope(x); x = hadamard(x) or reflect(x);  q8 = cast(x / descale);  descale = max(amax / largest, 2**-126)

Descales are as `pack_kv` has them. `fp8_attn_fwd` does the same itself where it is given Q as it is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from helion_attn.compiler.helion_adapter import MAX_REGISTERS, Config, helion, hl
from helion_attn.compiler.kernels import Runner, compiled, interpreted
from helion_attn.kernels.lib.inline_asm import maximum
from helion_attn.kernels.lib.row_layout import row_tile, rows_descale, rows_to_dtype, store_tile
from helion_attn.kernels.lib.strided import row_channels
from helion_attn.preprocess.sequences import query_source


def pack_q(
    q: torch.Tensor,  # flat
    q_amax: torch.Tensor,  # [B * H, MAX_PARTS]
    k_mean: torch.Tensor,  # [B * H_kv, D_row] if shift_lse
    cos: torch.Tensor,  # [table_rows * rotary / 2]
    sin: torch.Tensor,  # [table_rows * rotary / 2]
    q_positions: torch.Tensor,  # [M]
    signs: torch.Tensor,  # [D_row]
    rotation_matrix: torch.Tensor,  # [side, side]
    q_blocks: torch.Tensor,  # [M_blocks, Q_FIELDS] if varlen
    q8: torch.Tensor,  # [B * H * m_tiles, q_tile, D_pad], written
    q_descale: torch.Tensor,  # [B * H, m_tiles * q_tile], written
    lse_shift: torch.Tensor,  # [B * H, m_tiles * q_tile], written if shift_lse
    m_tiles: int,
    q_parts: int,
    H: int,
    H_kv: int,
    M: int,
    N: int,
    q_b_step: int,
    q_h_step: int,
    q_s_step: int,
    table_rows: int,
    d_at_run_time: int,
    factor: float,
    norm: float,
    q_d_step: hl.constexpr,
    unit: hl.constexpr,
    d: hl.constexpr,
    d_row: hl.constexpr,
    q_run: hl.constexpr,
    rotary: hl.constexpr,
    pairing: hl.constexpr,
    explicit_q_positions: hl.constexpr,
    q_unscaled: hl.constexpr,
    q_per_row: hl.constexpr,
    q_per_tile: hl.constexpr,
    q_per_block: hl.constexpr,
    shift_lse: hl.constexpr,
    hadamard: hl.constexpr,
    two_terms: hl.constexpr,
    reflected: hl.constexpr,
    qk_largest: hl.constexpr,
    cap_registers: hl.constexpr,
    varlen: hl.constexpr,
    wide: hl.constexpr,
    is_cuda: hl.constexpr,
) -> None:
    """See the module's docstring. Tiles run from the last to the first: what `first_pass` read last is still in L2.

    With `varlen` every block of a head is a "head" of its own, with one block: M is that of a block, and `q_blocks`, of
    `sequences`, says what it holds.
    """
    if cap_registers:
        # As in `pack_kv`.
        _max_registers = hl.register_tunable(MAX_REGISTERS, helion.autotuner.IntegerFragment(24, 255, 255))
    q_tile = hl.specialize(q8.size(1))
    d_pad = hl.specialize(q8.size(2))
    side = hl.specialize(rotation_matrix.size(0))
    max_parts = hl.specialize(q_amax.size(1))
    hl.specialize((q.stride(0), k_mean.stride(1), q_amax.stride(0), q_amax.stride(1)))
    # Known strides keep the stores 16 bytes wide.
    hl.specialize((q8.stride(0), q8.stride(1), q8.stride(2)))
    hl.specialize((cos.stride(0), sin.stride(0), signs.stride(0)))
    hl.specialize((rotation_matrix.stride(0), rotation_matrix.stride(1)))
    group = H // H_kv
    q_channels = row_channels(d, d_at_run_time, q_d_step)
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
                x, peak, q_amax, k_mean, q_bh, q_parts, max_parts, q_tile, d_row, factor, qk_largest, q_unscaled,
                q_per_row, q_per_tile, q_per_block, False,
            )  # fmt: skip
            store_tile(
                q8,
                q_bh * m_tiles + q_tile_index,
                rows_to_dtype(x, 1.0 / descale, q8.dtype, is_cuda),
                q_tile,
                d_pad,
                d_row,
            )
            hl.store(q_descale, [q_bh, rows], descale)
            if shift_lse:
                hl.store(lse_shift, [q_bh, rows], product)


@functools.cache
def kernel(is_cuda: bool, num_warps: int, max_registers: int | None, in_flight: int, q_per_block: bool) -> Runner:
    """The kernel for the device."""
    if not is_cuda:
        return interpreted(pack_q)
    stages = [0, *[in_flight] * (2 if q_per_block else 1)]
    registers: dict[str, Any] = {} if max_registers is None else {MAX_REGISTERS: max_registers}
    return compiled(pack_q, Config(num_warps=num_warps, indexing="pointer", range_num_stages=stages, **registers))
