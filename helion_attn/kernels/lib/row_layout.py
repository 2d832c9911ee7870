"""How a tile of rows of Q or K becomes 8- or 16-bit numbers. Inlined into `pack_kv`, `pack_q` and `fp8_attn_fwd`."""

from __future__ import annotations

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.inline_asm import to_int8
from helion_attn.kernels.lib.reflect import reflect_rows
from helion_attn.kernels.lib.rope import rope_rows
from helion_attn.kernels.lib.rotate import rotate_rows
from helion_attn.kernels.lib.scalars import inverse_of_power
from helion_attn.kernels.lib.steps import to_descale
from helion_attn.kernels.lib.strided import load_rows


def store_tile(
    x8: torch.Tensor,  # [tiles, n, D_pad], written
    tile: int,
    x: torch.Tensor,  # [n, D_row]
    n: int,
    d_pad: int,
    d_row: int,
) -> None:
    """Store a tile of rows; D_row holds D_pad and may be wider."""
    cols = hl.arange(d_row)
    if d_pad < d_row:
        hl.store(x8, [tile, hl.arange(n), cols], x, extra_mask=(cols < d_pad).unsqueeze(0))
    else:
        hl.store(x8, [tile, hl.arange(n), cols], x)


def rows_scale(factor: torch.Tensor, descale: torch.Tensor, normed: hl.constexpr) -> torch.Tensor:
    """`factor / descale`, [n], for the cast of rows. A norm's factor is large for a row of zeros: it stays finite."""
    scale = factor / descale
    if normed:
        scale = torch.where(scale > 1e38, 1e38, scale)
    return scale


def rows_to_dtype(
    x: torch.Tensor,  # [n, D_row]
    scale: torch.Tensor,  # [n]
    dtype: torch.dtype,
    is_cuda: hl.constexpr,
) -> torch.Tensor:
    """Rows times their scales, to nearest even. What becomes int8 is of magnitude 127 or less."""
    if dtype == torch.int8:
        return to_int8(x, scale.unsqueeze(1), is_cuda)
    return (x * scale.unsqueeze(1)).to(dtype)


def row_tile(
    flat: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    means: torch.Tensor,  # flat, of K
    channel_factors: torch.Tensor,  # flat, if equalise
    first_channel: int,  # of the head in both
    mean: torch.Tensor,  # [D_row], if vectors_first; rotated if rotate_first
    channel_factor: torch.Tensor,  # [D_row], if vectors_first; inverse if divide
    signs: torch.Tensor,  # [D_row], with the factors, if hadamard
    matrix: torch.Tensor,  # [side, side]
    weight: torch.Tensor,  # of `Norm`, and so factors
    factors: torch.Tensor,
    head_offset: int,
    first_weight: int,
    first_factor: int,
    rows: torch.Tensor,  # [n]
    row_step: int,
    size: int,
    d: int,
    first_position: int,
    table_rows: int,
    norm: float,
    n: int,
    side: int,
    spec: hl.constexpr,  # RowSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of a head, transformed but not scaled, fp32 [n, D_row], `lse_shift` [n], and factors [n].

    Rows are still to be multiplied by their factors, as `rope_rows` has them; `lse_shift` is of rows times factors.
    With `rotate_first` the rotated mean is subtracted from rotated rows. The rotation is linear, and so rows of
    bf16 go to the tensor core as they are, which is exact. Channels are equalised once their products with the mean
    are taken, or the mean is subtracted; with `hadamard`, `signs` or the matrix has their factors.
    """
    d_row = spec.d_row
    if spec.pairing or spec.normed:
        x, factor = rope_rows(
            flat, cos, sin, positions, weight, factors, head_offset, first_weight, first_factor, rows, row_step,
            spec.d_step, size, d, first_position, table_rows, n, d_row, spec.rotary, spec.pairing,
            spec.explicit_positions, spec.normed, spec.eps,
        )  # fmt: skip
    else:
        x = load_rows(flat, head_offset, rows, hl.arange(d_row), row_step, spec.d_step, size, d)
        factor = hl.full([n], 1.0, dtype=torch.float32)
    if spec.hadamard and (spec.pairing or spec.normed):
        # That rotation rounds rows.
        x = x * factor.unsqueeze(1)
        factor = hl.full([n], 1.0, dtype=torch.float32)
    # After the rows, which are under way meanwhile: to reach the threads that have them, vectors take barriers.
    if (spec.has_lse_shift or spec.subtract_mean) and not spec.vectors_first:
        mean = hl.load(means, [first_channel + hl.arange(d_row)])
    if spec.equalise and not spec.vectors_first:
        channel_factor = hl.load(channel_factors, [first_channel + hl.arange(d_row)])
        if spec.divide:
            channel_factor = inverse_of_power(channel_factor)
    if spec.has_lse_shift:
        lse_shift = (x * mean.unsqueeze(0)).sum(1) * factor
    else:
        lse_shift = hl.zeros([n], dtype=torch.float32)
    if spec.rotate_first:
        x = rotate_rows(x, signs, matrix, norm, n, d_row, side, spec.two_terms, spec.is_cuda)
    if spec.subtract_mean and spec.normed and not spec.hadamard:
        x = x - (1.0 / factor).unsqueeze(1) * mean.unsqueeze(0)
    elif spec.subtract_mean and spec.hadamard and not spec.rotate_first:
        # Rows past the end stay 0, for an FMA: the factor below would keep more in registers than there are.
        x = x - (rows < size).to(torch.float32).unsqueeze(1) * mean.unsqueeze(0)
    elif spec.subtract_mean:
        x = x - mean.unsqueeze(0)
    if spec.equalise and not spec.hadamard:
        x = x * channel_factor.unsqueeze(0)
    if spec.hadamard and not spec.rotate_first:
        x = rotate_rows(x, signs, matrix, norm, n, d_row, side, spec.two_terms, spec.is_cuda)
    if spec.reflected:
        x = reflect_rows(x, n, d_row, spec.reflected)
    if spec.subtract_mean and (spec.rotate_first or not spec.hadamard):
        # Rows past the end have become the mean, and are 0 once they are multiplied.
        factor = torch.where(rows < size, factor, 0.0)
    return x, lse_shift, factor


def rows_descale(
    x: torch.Tensor,  # [n, D_row]
    factor: torch.Tensor,  # [n]
    peak: torch.Tensor,  # [n]
    n: int,
    largest: float,
    unscaled: hl.constexpr,
    per_row: hl.constexpr,
    per_tile: hl.constexpr,
) -> torch.Tensor:
    """Descales of n rows times their factors, [n]: ones, or of each row, of the tile, or of the block.

    The amax of a block is that of `peak`.
    """
    if unscaled:
        return hl.full([n], 1.0, dtype=torch.float32)
    if per_row:
        amax = torch.amax(torch.abs(x), 1) * factor
    elif per_tile:
        amax = torch.amax(torch.amax(torch.abs(x), 1) * factor, 0) + hl.zeros([n], dtype=torch.float32)
    else:
        amax = torch.amax(peak, 0) + hl.zeros([n], dtype=torch.float32)
    return to_descale(amax, largest)
