"""Means of blocks of rows, in fp32: each element is read once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import by_device
from helion_attn.configs import MASK_BLOCK
from helion_attn.kernels.lib.strided import common_unit, load_rows, strided_rows
from helion_attn.problem import BlockMeansArgs

#: Elements of a step: 64 a thread.
STEP_ELEMENTS = 8192


class BlockMeansSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    d_step: int  # from a channel to the next
    unit: int  # what the other steps are multiples of
    block: int  # rows of a block
    step: int  # rows of a step
    d: int  # channels
    d_tile: int  # the power of two that holds them


def block_means(
    x: torch.Tensor,  # flat
    means: torch.Tensor,  # [heads * blocks, D], written
    heads: int,
    blocks: int,
    H: int,
    S: int,
    b_step: int,
    h_step: int,
    s_step: int,
    spec: hl.constexpr,  # BlockMeansSpec
) -> None:
    """Write the mean of each block of rows; the steps are those of `StridedRows`."""
    hl.specialize((x.stride(0), means.stride(0), means.stride(1)))
    for bh, block in hl.grid([heads, blocks]):
        # A tensor may have more than 2**31 elements.
        b = hl.full([], bh // H, dtype=torch.int64)
        h = hl.full([], bh % H, dtype=torch.int64)
        first = hl.full([], block * spec.block, dtype=torch.int64)
        offset = (b * b_step + h * h_step + first * s_step) * spec.unit
        left = S - block * spec.block
        cols = hl.arange(spec.d_tile)
        # [step, d_tile]
        total = hl.zeros([spec.step, spec.d_tile], dtype=torch.float32)
        for part in hl.grid(spec.block // spec.step):
            rows = part * spec.step + hl.arange(spec.step)
            total = total + load_rows(x, offset, rows, cols, s_step * spec.unit, spec.d_step, left, spec.d)
        count = torch.clamp_max(hl.full([], left, dtype=torch.int32), spec.block)
        hl.store(means, [bh * blocks + block, cols], total.sum(0) / count, extra_mask=cols < spec.d)


kernel = by_device(block_means, Config(num_warps=4, indexing="pointer"))


def launch(a: BlockMeansArgs) -> torch.Tensor:
    """Return the means, fp32 [B, H, blocks, D]."""
    means = empty_means(a)
    B, H, S, D = a.x.shape
    unit = common_unit(a.x)
    source = strided_rows(a.x, unit)
    d_tile = 1 << (D - 1).bit_length()
    kernel(a.x.is_cuda).run(
        {
            "x": source.flat,
            "means": means.view(-1, D),
            "heads": B * H,
            "blocks": means.size(2),
            "H": H,
            "S": S,
            "b_step": source.b_step,
            "h_step": source.h_step,
            "s_step": source.s_step,
            "spec": BlockMeansSpec(
                d_step=source.d_step,
                unit=unit,
                block=MASK_BLOCK,
                step=max(1, min(MASK_BLOCK, STEP_ELEMENTS // d_tile)),
                d=D,
                d_tile=d_tile,
            ),
        }
    )
    return means


def empty_means(a: BlockMeansArgs) -> torch.Tensor:
    """Allocate what `launch` returns."""
    B, H, S, D = a.x.shape
    return a.x.new_empty((B, H, -(-S // MASK_BLOCK), D), dtype=torch.float32)
