"""Stages of `pack` as a kernel of their own: rows of any strides, rotated by position or by a Hadamard
matrix, or reflected.

The row helpers are those of `pack`, so what this returns is what `quantize` casts to 8 bits, rounded to x's dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from helion_attn.compiler.helion_adapter import helion, hl
from helion_attn.compiler.kernels import compiled, interpreted
from helion_attn.configs import packing, row_width
from helion_attn.preprocess.lib.hadamard import rotation
from helion_attn.preprocess.lib.reflect import reflected_channels
from helion_attn.preprocess.lib.rope import rope_tables
from helion_attn.preprocess.lib.row_layout import row_tile
from helion_attn.preprocess.lib.strided import common_unit, strided_rows
from helion_attn.preprocess.pack import PACK_ELEMENTS, ROTATED_TILES


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
    d_step: hl.constexpr,
    unit: hl.constexpr,
    n: hl.constexpr,
    d_row: hl.constexpr,
    run: hl.constexpr,
    rotary: hl.constexpr,
    pairing: hl.constexpr,
    explicit_positions: hl.constexpr,
    hadamard: hl.constexpr,
    two_terms: hl.constexpr,
    reflected: hl.constexpr,
    is_cuda: hl.constexpr,
) -> None:
    """See the module's docstring; the steps are those of `StridedRows`, and those of `out` count rows."""
    d = hl.specialize(out.size(1))
    side = hl.specialize(rotation_matrix.size(0))
    hl.specialize((x.stride(0), cos.stride(0), sin.stride(0), signs.stride(0)))
    hl.specialize((out.stride(0), out.stride(1), rotation_matrix.stride(0), rotation_matrix.stride(1)))
    for bh, part in hl.grid([heads, (tiles + run - 1) // run]):
        offset = ((bh // H) * b_step + (bh % H) * h_step) * unit
        out_offset = (bh // H) * out_b_rows + (bh % H) * out_h_rows
        matrix = hl.load(rotation_matrix, [hl.arange(side), hl.arange(side)])
        for tile in hl.grid(part * run, min(tiles, (part + 1) * run)):
            rows = tile * n + hl.arange(n)
            # [n, D_row]
            y, _ = row_tile(
                x, cos, sin, positions, signs, signs, matrix, offset, rows, s_step * unit, d_step, S, d, 0,
                table_rows, norm, n, d_row, rotary, side, pairing, explicit_positions, False, False, hadamard,
                False, two_terms, reflected, is_cuda,
            )  # fmt: skip
            cols = hl.arange(d_row)
            inside = (rows < S).unsqueeze(1) & (cols < d).unsqueeze(0)
            hl.store(out, [out_offset + rows * out_s_rows, cols], y.to(out.dtype), extra_mask=inside)


@functools.cache
def kernel(is_cuda: bool) -> Callable[..., None]:
    """The kernel for the device."""
    if not is_cuda:
        return interpreted(transform)
    return compiled(transform, helion.Config(num_warps=8, indexing="pointer"))


def transform_rows(
    x: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    interleaved: bool,
    hadamard_seed: int | None,
    reflect: bool,
    bshd: bool,
) -> torch.Tensor:
    """Run the kernel.

    Args:
        x: [B, H, S, D], bf16, fp16 or fp32, any strides.
        cos: and the three that follow: of a `Rope`, with the positions of x, or None.
        hadamard_seed: of the rotation's signs, or None for no rotation.
        reflect: whether channels are reflected.
        bshd: layout of the result.

    Returns:
        Contiguous [B, H, S, D], or with `bshd` [B, S, H, D], in x's dtype.
    """
    B, H, S, D = x.shape
    padded = packing(D, D)
    D_row = row_width(padded.D_pad, padded.D_v_pad)
    n = PACK_ELEMENTS // D_row
    tiles = -(-S // n)
    unit = common_unit(x)
    source = strided_rows(x, unit)
    unused = x.new_empty(1, dtype=torch.float32)
    rope = rope_tables(cos, sin, positions, None, interleaved, D_row, unused)
    signs, matrix, norm = unused, unused.view(1, 1), 1.0
    if hadamard_seed is not None:
        signs, matrix, norm = rotation(D, D_row, hadamard_seed, x.device)
    run = 1 if hadamard_seed is None else ROTATED_TILES
    two_terms = hadamard_seed is not None and x.dtype != torch.bfloat16
    out = x.new_empty((B, S, H, D) if bshd else (B, H, S, D))
    out_rows = (S * H, 1, H) if bshd else (H * S, S, 1)
    specialisations = (
        source.d_step, unit, n, D_row, run, rope.rotary, rope.pairing, rope.explicit[0], hadamard_seed is not None,
        two_terms, reflected_channels(D) if reflect else 0, x.is_cuda,
    )  # fmt: skip
    kernel(x.is_cuda)(
        source.flat, rope.cos, rope.sin, rope.q_positions, signs, matrix, out.view(-1, D), B * H, tiles, H, S,
        source.b_step, source.h_step, source.s_step, *out_rows, rope.table_rows, norm, *specialisations,
    )  # fmt: skip
    return out
