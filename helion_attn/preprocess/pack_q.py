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
from helion_attn.compiler.kernels import Runner, compiled, interpreted
from helion_attn.kernels.lib.inline_asm import maximum
from helion_attn.kernels.lib.rotate import with_factors
from helion_attn.kernels.lib.row_layout import row_tile, rows_descale, rows_scale, rows_to_dtype, store_tile
from helion_attn.kernels.lib.strided import row_channels
from helion_attn.preprocess.sequences import query_source


class PackQSpec(NamedTuple):
    """Constants that the kernel is compiled for.

    Attributes:
        q_d_step: from a channel of Q to the next.
        unit: what the other steps are multiples of.
        d: head dim of Q.
        d_row: the power of two that holds a row.
        q_run: tiles that a program packs.
        rotary: channels that are rotated.
        pairing: how, as `lib.rope` has it.
        explicit_q_positions: Q has positions of its own.
        q_unscaled: Q has no scale.
        q_per_row: Q has a descale a row.
        q_per_tile: Q has a descale a tile, which is a block.
        q_per_block: Q has a descale a block of several tiles.
        equalise: Q's channels are multiplied by their factors.
        vectors_first: mean and factors are loaded before rows, once for all tiles.
        shift_lse: rows' products with K's mean are stored.
        hadamard: Q is rotated by a Hadamard matrix.
        two_terms: rows are two terms of bf16 in that rotation.
        reflected: channels that are reflected, or 0.
        normed: which channels of Q share a mean of squares, as `lib.norm` has it.
        eps: what is added to that.
        qk_largest: the largest magnitude that Q becomes.
        cap_registers: ptxas is told of a maximum.
        varlen: the sequences of a batch follow each other.
        wide: addresses need 64 bits.
        is_cuda: the kernel is compiled; otherwise interpreted.
    """

    q_d_step: int
    unit: int
    d: int
    d_row: int
    q_run: int
    rotary: int
    pairing: int
    explicit_q_positions: bool
    q_unscaled: bool
    q_per_row: bool
    q_per_tile: bool
    q_per_block: bool
    equalise: bool
    vectors_first: bool
    shift_lse: bool
    hadamard: bool
    two_terms: bool
    reflected: int
    normed: int
    eps: float
    qk_largest: float
    cap_registers: bool
    varlen: bool
    wide: bool
    is_cuda: bool


def pack_q(
    q: torch.Tensor,  # flat
    k_mean: torch.Tensor,  # [B * H_kv * D_row] if shift_lse
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
    lse_shift: torch.Tensor,  # [B * H, m_tiles * q_tile], written if shift_lse
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
    """See the module's docstring.

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
    group = H // H_kv
    q_channels = row_channels(spec.d, d_at_run_time, spec.q_d_step)
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
            spec.is_cuda,
        )
        row_step = q_s_step * spec.unit
        first_weight = (q_bh % H) * spec.d if spec.normed == 2 else 0
        first_factor = (q_bh // H) * M if spec.normed == 2 else 0
        matrix = hl.load(rotation_matrix, [hl.arange(side), hl.arange(side)])
        first_channel = q_kv * spec.d_row
        # [D_row]
        mean = hl.zeros([spec.d_row], dtype=torch.float32)
        of_channel = hl.zeros([spec.d_row], dtype=torch.float32)
        sign = hl.zeros([spec.d_row], dtype=torch.bfloat16)
        if spec.vectors_first and spec.shift_lse:
            mean = hl.load(k_mean, [first_channel + hl.arange(spec.d_row)])
        if spec.vectors_first and spec.equalise:
            of_channel = hl.load(channel_factors, [first_channel + hl.arange(spec.d_row)])
        if spec.hadamard:
            matrix, sign = with_factors(matrix, signs, of_channel, spec.d_row, side, spec.equalise)
        # [q_tile], what the block's descale must hold
        peak = hl.zeros([q_tile], dtype=torch.float32)
        if spec.q_per_block:
            for q_i in hl.grid(q_index * spec.q_run, q_end):
                rows = q_i * q_tile + hl.arange(q_tile)
                x, _, factor = row_tile(
                    q, cos, sin, q_positions, k_mean, channel_factors, first_channel, mean, of_channel, sign, matrix,
                    weight, factors, offset, first_weight, first_factor, rows, row_step, spec.q_d_step, queries,
                    q_channels, N - M, table_rows, norm, q_tile, spec.d_row, spec.rotary, side, spec.pairing,
                    spec.explicit_q_positions, spec.vectors_first, False, spec.shift_lse, spec.equalise, False,
                    spec.hadamard, False, spec.two_terms, spec.reflected, spec.normed, spec.eps, spec.is_cuda,
                )  # fmt: skip
                peak = maximum(peak, torch.amax(torch.abs(x), 1) * factor, spec.is_cuda)
        for q_tile_index in hl.grid(q_index * spec.q_run, q_end):
            rows = q_tile_index * q_tile + hl.arange(q_tile)
            x, product, factor = row_tile(
                q, cos, sin, q_positions, k_mean, channel_factors, first_channel, mean, of_channel, sign, matrix,
                weight, factors, offset, first_weight, first_factor, rows, row_step, spec.q_d_step, queries, q_channels,
                N - M, table_rows, norm, q_tile, spec.d_row, spec.rotary, side, spec.pairing, spec.explicit_q_positions,
                spec.vectors_first, False, spec.shift_lse, spec.equalise, False, spec.hadamard, False, spec.two_terms,
                spec.reflected, spec.normed, spec.eps, spec.is_cuda,
            )  # fmt: skip
            descale = rows_descale(
                x, factor, peak, q_tile, spec.qk_largest, spec.q_unscaled, spec.q_per_row, spec.q_per_tile
            )
            store_tile(
                q8,
                q_bh * m_tiles + q_tile_index,
                rows_to_dtype(x, rows_scale(factor, descale, spec.normed), q8.dtype, spec.is_cuda),
                q_tile,
                d_pad,
                spec.d_row,
            )
            hl.store(q_descale, [q_bh, rows], descale)
            if spec.shift_lse:
                hl.store(lse_shift, [q_bh, rows], product)


@functools.cache
def kernel(is_cuda: bool, num_warps: int, max_registers: int | None, in_flight: int, q_per_block: bool) -> Runner:
    """The kernel for the device."""
    if not is_cuda:
        return interpreted(pack_q)
    stages = [0, *[in_flight] * (2 if q_per_block else 1)]
    registers: dict[str, Any] = {} if max_registers is None else {MAX_REGISTERS: max_registers}
    return compiled(pack_q, Config(num_warps=num_warps, indexing="pointer", range_num_stages=stages, **registers))
