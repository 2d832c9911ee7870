"""Stages of `pack` as a kernel of their own: rows of any strides, rotated by position or by a Hadamard
matrix, or reflected.

The row helpers are those of `pack`, so what this returns is what `quantize` casts to 8 bits, rounded to x's dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import by_device
from helion_attn.configs import packing
from helion_attn.kernels.lib.norm import NO_NORM
from helion_attn.kernels.lib.rope import rope_tables
from helion_attn.kernels.lib.rotate import with_factors
from helion_attn.kernels.lib.row_layout import row_tile
from helion_attn.kernels.lib.specs import RowSpec
from helion_attn.kernels.lib.strided import common_unit, strided_rows
from helion_attn.numerics import reflected_channels
from helion_attn.preprocess.lib.hadamard import rotation
from helion_attn.preprocess.lib.tiling import PACK_ELEMENTS, ROTATED_TILES
from helion_attn.problem import TransformRowsArgs


class TransformSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    unit: int  # what steps but those of channels are multiples of
    n: int  # rows of a tile
    run: int  # tiles of a program
    rows: RowSpec  # what is done to rows


def transform(
    x: torch.Tensor,  # flat
    cos: torch.Tensor,  # [table_rows * rotary / 2]
    sin: torch.Tensor,  # [table_rows * rotary / 2]
    positions: torch.Tensor,  # [S]
    signs: torch.Tensor,  # [D_row]
    rotation_matrix: torch.Tensor,  # [side, side]
    out: torch.Tensor,  # [B * H * S, D], written
    heads: int,
    tiles: int,
    H: int,
    S: int,
    b_step: int,
    h_step: int,
    s_step: int,
    out_b_rows: int,
    out_h_rows: int,
    out_s_rows: int,
    table_rows: int,
    norm: float,
    spec: hl.constexpr,  # TransformSpec
) -> None:
    """Write rows, transformed; the steps are those of `StridedRows`, and those of `out` count rows."""
    d = hl.specialize(out.size(1))
    side = hl.specialize(rotation_matrix.size(0))
    hl.specialize((x.stride(0), cos.stride(0), sin.stride(0), signs.stride(0)))
    hl.specialize((out.stride(0), out.stride(1), rotation_matrix.stride(0), rotation_matrix.stride(1)))
    for bh, part in hl.grid([heads, (tiles + spec.run - 1) // spec.run]):
        offset = ((bh // H) * b_step + (bh % H) * h_step) * spec.unit
        out_offset = (bh // H) * out_b_rows + (bh % H) * out_h_rows
        matrix = hl.load(rotation_matrix, [hl.arange(side), hl.arange(side)])
        # [D_row]
        no_vector = hl.zeros([spec.rows.d_row], dtype=torch.float32)
        sign = hl.zeros([spec.rows.d_row], dtype=torch.bfloat16)
        if spec.rows.hadamard:
            matrix, sign = with_factors(matrix, signs, no_vector, spec.rows.d_row, side, False)
        for tile in hl.grid(part * spec.run, min(tiles, (part + 1) * spec.run)):
            rows = tile * spec.n + hl.arange(spec.n)
            # [n, D_row]
            y, _, factor = row_tile(
                flat=x,
                cos=cos,
                sin=sin,
                positions=positions,
                means=signs,
                channel_factors=signs,
                first_channel=0,
                mean=no_vector,
                channel_factor=no_vector,
                signs=sign,
                matrix=matrix,
                weight=signs,
                factors=signs,
                head_offset=offset,
                first_weight=0,
                first_factor=0,
                rows=rows,
                row_step=s_step * spec.unit,
                size=S,
                d=d,
                first_position=0,
                table_rows=table_rows,
                norm=norm,
                n=spec.n,
                side=side,
                spec=spec.rows,
            )
            y = y * factor.unsqueeze(1)
            cols = hl.arange(spec.rows.d_row)
            inside = (rows < S).unsqueeze(1) & (cols < d).unsqueeze(0)
            hl.store(out, [out_offset + rows * out_s_rows, cols], y.to(out.dtype), extra_mask=inside)


kernel = by_device(transform, Config(num_warps=8, indexing="pointer"))


def launch(a: TransformRowsArgs, out: torch.Tensor) -> None:
    """Write `out`, contiguous, in x's dtype and the layout that `a` asks for."""
    x, hadamard = a.x, a.hadamard_seed is not None
    B, H, S, D = x.shape
    padded = packing(D, D)
    D_row = padded.D_row
    n = PACK_ELEMENTS // D_row
    unit = common_unit(x)
    source = strided_rows(x, unit)
    unused = x.new_empty(1, dtype=torch.float32)
    rope = rope_tables(a.rope, D_row, unused)
    signs, matrix, norm = unused, unused.view(1, 1), 1.0
    if a.hadamard_seed is not None:
        signs, matrix, norm = rotation(D, D_row, a.hadamard_seed, x.device)
    out_b_rows, out_h_rows, out_s_rows = (S * H, 1, H) if a.bshd else (H * S, S, 1)
    kernel(x.is_cuda).run(
        {
            "x": source.flat,
            "cos": rope.cos,
            "sin": rope.sin,
            "positions": rope.q_positions,
            "signs": signs,
            "rotation_matrix": matrix,
            "out": out.view(-1, D),
            "heads": B * H,
            "tiles": -(-S // n),
            "H": H,
            "S": S,
            "b_step": source.b_step,
            "h_step": source.h_step,
            "s_step": source.s_step,
            "out_b_rows": out_b_rows,
            "out_h_rows": out_h_rows,
            "out_s_rows": out_s_rows,
            "table_rows": rope.table_rows,
            "norm": norm,
            "spec": TransformSpec(
                unit=unit,
                n=n,
                run=ROTATED_TILES if hadamard else 1,
                rows=RowSpec(
                    d_row=D_row,
                    d_step=source.d_step,
                    rotary=rope.rotary,
                    pairing=rope.pairing,
                    explicit_positions=rope.explicit[0],
                    normed=NO_NORM,
                    eps=1.0,
                    has_lse_shift=False,
                    subtract_mean=False,
                    equalise=False,
                    divide=False,
                    vectors_first=hadamard,
                    hadamard=hadamard,
                    rotate_first=False,
                    two_terms=hadamard and x.dtype != torch.bfloat16,
                    reflected=reflected_channels(D) if a.reflect else 0,
                    is_cuda=x.is_cuda,
                ),
            ),
        }
    )
