"""Q and K to FP8: amax per head, cast to e4m3, pack block-major. Two passes over the user's strided tensor.

    descale = max(amax / 448, 2**-126);  x8 = e4m3(x / descale)

A NaN or infinity in a head makes its descale NaN or infinity, and so every score of that head NaN: nothing saturates.
"""

from __future__ import annotations

import functools

import torch

from helion_attn.kernels.helion_compat import compiled, helion, hl, interpreted
from helion_attn.kernels.inline_asm import maximum
from helion_attn.numerics import DESCALE_MIN, E4M3_MAX
from helion_attn.preprocess.strided import strided_rows

#: Elements that one step of the first pass reads: four 16-byte loads of bf16 a thread.
STEP_ELEMENTS = 4096

#: Programs of the first pass, about: 8 on each of an H200's 132 SMs fill the memory system.
FIRST_PASS_PROGRAMS = 1056

#: Programs per head in the first pass, at most: each program of the second pass reduces their results itself.
MAX_PARTIALS = 32


def load_rows(
    flat: torch.Tensor,
    row_offset: int,
    rows: torch.Tensor,  # [n]
    cols: torch.Tensor,  # [D_tile]
    row_step: int,
    d_step: int,
    size: int,
    d: int,
) -> torch.Tensor:
    """Rows of one head as fp32 [n, D_tile], zero outside `size` x `d`."""
    offsets = row_offset + rows.unsqueeze(1) * row_step + cols.unsqueeze(0) * d_step
    keep = (rows < size).unsqueeze(1) & (cols < d).unsqueeze(0)
    return hl.load(flat, [offsets], extra_mask=keep).to(torch.float32)


def amax_kernel(
    flat: torch.Tensor,
    partials: torch.Tensor,  # [B * H, MAX_PARTIALS], written
    n_partials: int,
    heads: int,
    size: int,
    b_step: int,
    h_step: int,
    s_step: int,
    d: hl.constexpr,
    d_pad: hl.constexpr,
    d_step: hl.constexpr,
    unit: hl.constexpr,
    step: hl.constexpr,
    inline_asm: hl.constexpr,
) -> None:
    """amax of every head, in `n_partials` parts, `step` rows at a time."""
    hl.specialize(flat.stride(0))
    n_tiles = (size + step - 1) // step
    tiles_per_part = (n_tiles + n_partials - 1) // n_partials
    for bh, part in hl.grid([partials.size(0), n_partials]):
        row_offset = ((bh // heads) * b_step + (bh % heads) * h_step) * unit
        cols = hl.arange(d_pad)
        # Maxima stay per element until the end: one reduction across lanes a program, not one a step.
        # [step, d_pad]
        amax = hl.zeros([step, d_pad], dtype=torch.float32)
        for tile in hl.grid(part * tiles_per_part, min(n_tiles, (part + 1) * tiles_per_part)):
            rows = tile * step + hl.arange(step)
            # [step, d_pad]
            x = load_rows(flat, row_offset, rows, cols, s_step * unit, d_step, size, d)
            amax = maximum(amax, torch.abs(x), inline_asm)
        partials[bh, part] = torch.amax(torch.amax(amax, 1), 0)


def pack_rows_kernel(
    flat: torch.Tensor,
    partials: torch.Tensor,  # [B * H, MAX_PARTIALS]
    x8: torch.Tensor,  # [B * H * blocks, block, d_pad], written
    descale: torch.Tensor,  # [B * H], written
    blocks: int,
    n_partials: int,
    heads: int,
    size: int,
    b_step: int,
    h_step: int,
    s_step: int,
    d: hl.constexpr,
    d_step: hl.constexpr,
    unit: hl.constexpr,
) -> None:
    """Scale, cast and pack one block of rows a program."""
    block = hl.specialize(x8.size(1))
    d_pad = hl.specialize(x8.size(2))
    max_partials = hl.specialize(partials.size(1))
    hl.specialize((flat.stride(0), partials.stride(0), partials.stride(1), x8.stride(0), x8.stride(1), x8.stride(2)))
    for bh, grid_i in hl.grid([descale.size(0), blocks]):
        i = blocks - 1 - grid_i  # what the first pass read last is still in L2
        row_offset = ((bh // heads) * b_step + (bh % heads) * h_step) * unit
        # [block, d_pad]
        x = load_rows(flat, row_offset, i * block + hl.arange(block), hl.arange(d_pad), s_step * unit, d_step, size, d)
        part = hl.arange(max_partials)
        amax = torch.amax(hl.load(partials, [bh, part], extra_mask=part < n_partials), 0)
        head_descale = torch.clamp_min(amax * (1.0 / E4M3_MAX), DESCALE_MIN)
        x8[bh * blocks + i, :, :] = (x * (1.0 / head_descale)).to(torch.float8_e4m3fn)
        if i == 0:
            descale[bh] = head_descale


@functools.cache
def kernels(is_cuda: bool, block: int) -> tuple[helion.Kernel[None], helion.Kernel[None]]:
    """`(amax, pack)` for the device.

    A kernel object each for Q's block size and K's: Helion's dispatch is 300 us slower for an object whose
    specialisation changes from call to call.
    """
    if not is_cuda:
        return interpreted(amax_kernel), interpreted(pack_rows_kernel)
    config = helion.Config(num_warps=4, num_stages=3, indexing="pointer")
    return compiled(amax_kernel, config), compiled(pack_rows_kernel, config)


def first_pass_split(heads: int, size: int, d_pad: int) -> tuple[int, int]:
    """Rows of a step, and programs per head, of the first pass over `heads` heads of `size` rows."""
    step = STEP_ELEMENTS // d_pad
    return step, max(1, min(MAX_PARTIALS, FIRST_PASS_PROGRAMS // heads, -(-size // step)))


def quantize_rows(x: torch.Tensor, block: int, d_pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise Q or K per head and pack it block-major.

    Args:
        x: [B, H, S, D], bf16, fp16 or fp32, any strides.
        block: rows of a block.
        d_pad: padded head dim.

    Returns:
        e4m3 [B * H, ceil(S / block), block, d_pad], zero-padded, and its fp32 descale [B, H].
    """
    B, H, S, D = x.shape
    rows = strided_rows(x)
    amax, pack = kernels(x.is_cuda, block)
    step, parts = first_pass_split(B * H, S, d_pad)
    partials = x.new_empty((B * H, MAX_PARTIALS), dtype=torch.float32)
    blocks = -(-S // block)
    x8 = x.new_empty((B * H * blocks, block, d_pad), dtype=torch.float8_e4m3fn)
    descale = x.new_empty((B, H), dtype=torch.float32)
    steps = (H, S, rows.b_step, rows.h_step, rows.s_step)
    amax(rows.flat, partials, parts, *steps, D, d_pad, rows.d_step, rows.unit, step, x.is_cuda)
    pack(rows.flat, partials, x8, descale.view(-1), blocks, parts, *steps, D, rows.d_step, rows.unit)
    return x8.view(B * H, blocks, block, d_pad), descale
