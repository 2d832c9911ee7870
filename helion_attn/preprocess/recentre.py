"""Take out of V's mean what rounding has put into V: afterwards the dequantised V has the mean that V had.

    v_mean -= v_descale * mean of v8 over the keys

What was cast had a mean of 0; its rounded values do not. And if V's mean is small, subtracting it moves all keys that
share one 16-bit value to the same side of an 8-bit rounding boundary, so that their errors add up. Few keys do not need
it: see `RECENTRED_KEYS`.

Every row of P is the uniform row, 1 / N, plus a rest, and this makes the uniform row's product exact. If V's rounding
errors have a variance of e**2, a row of P that sums to 1 has an error of variance e**2 * sum(p**2); without their mean,
e**2 * (sum(p**2) - 1 / N). Statisticians call the uniform row's error a control variate (Glasserman, Monte Carlo
Methods in Financial Engineering, 2004, section 4.1).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from helion_attn.compiler.helion_adapter import helion, hl
from helion_attn.compiler.kernels import Runner, compiled, interpreted
from helion_attn.numerics import RECENTRED_KEYS
from helion_attn.preprocess.sequences import Sequences
from helion_attn.types import Recipe

#: Channels of a program: with blocks of 128 keys, 1 KB that lie one after the other. One head of 64 channels has eight
#: programs then.
CHANNELS = 8

#: Elements that one step reads: 64 bytes a thread.
STEP_ELEMENTS = 16384


def recentre(
    v8: torch.Tensor,  # [B * H_kv * N_blocks, D_v_pad, bn], or [H_kv * N_blocks, D_v_pad, bn] if varlen
    v_descale: torch.Tensor,  # [B * H_kv, D_v_pad], or [H_kv * N_blocks, D_v_pad] if varlen
    sequences: torch.Tensor,  # [B, SEQUENCE_FIELDS] if varlen
    v_mean: torch.Tensor,  # [B * H_kv, D_v_pad], read and written
    n_blocks: int,
    H_kv: int,
    N: int,
    least: hl.constexpr,
    d_tile: hl.constexpr,
    chunk: hl.constexpr,
    varlen: hl.constexpr,
) -> None:
    """See the module's docstring. `n_blocks` are those of a head; with `varlen`, those of all sequences.

    With `varlen` sequences of fewer than `least` keys stay as they are.
    """
    d_v_pad, bn = hl.specialize((v8.size(1), v8.size(2)))
    hl.specialize((v8.stride(0), v8.stride(1), v8.stride(2)))
    hl.specialize((v_mean.stride(0), v_mean.stride(1), v_descale.stride(0), v_descale.stride(1)))
    # Tensors with `varlen`, ints without.
    count: Any
    descale_row: Any
    divisor: Any
    for head, d_index in hl.grid([v_mean.size(0), d_v_pad // d_tile]):
        if varlen:
            first = hl.load(sequences, [head // H_kv, 0]) + (head % H_kv) * n_blocks
            keys = hl.load(sequences, [head // H_kv, 1])
            count = torch.where(keys >= least, (keys + bn - 1) // bn, 0)
            # A short sequence may be without a block; and what it reads in place of it may be NaN.
            descale_row = torch.where(keys >= least, first, 0)
            divisor = torch.clamp_min(keys, 1)
        else:
            first = head * n_blocks
            count = n_blocks
            descale_row = head
            divisor = N
        cols = d_index * d_tile + hl.arange(d_tile)
        # [chunk, d_tile, bn]
        total = hl.zeros([chunk, d_tile, bn], dtype=torch.float32)
        for step in hl.grid((count + chunk - 1) // chunk):
            block = step * chunk + hl.arange(chunk)
            inside = (block < count).unsqueeze(1).unsqueeze(2)
            # Padding is 0.
            total = total + hl.load(v8, [first + block, cols, hl.arange(bn)], extra_mask=inside).to(torch.float32)
        # [d_tile]
        moved = total.sum(2).sum(0) / divisor * hl.load(v_descale, [descale_row, cols])
        if varlen:
            moved = torch.where(keys >= least, moved, 0.0)
        hl.store(v_mean, [head, cols], hl.load(v_mean, [head, cols]) - moved)


@functools.cache
def kernel(is_cuda: bool) -> Runner:
    """The kernel for the device."""
    if not is_cuda:
        return interpreted(recentre)
    return compiled(recentre, helion.Config(num_warps=8, indexing="pointer", range_num_stages=[0, 3]))


def launch(
    v8: torch.Tensor,
    v_descale: torch.Tensor,
    v_mean: torch.Tensor,
    N: int,
    recipe: Recipe,
    sequences: Sequences | None = None,
) -> None:
    """Run the kernel, if V was centred and has 8 bits, and there are keys enough.

    Args:
        v8: [B * H_kv, N_blocks, D_v_pad, bn]; with `sequences` without B.
        v_descale: a row of D_v_pad a head; with `sequences` a row a block.
        v_mean: written.
        N: keys. With `sequences`, those of all together: below `RECENTRED_KEYS` none can be long, and otherwise the
            kernel checks each.
        recipe: how V was packed.
        sequences: where those of a packed batch lie, or None.
    """
    # 16 bits round far less.
    if not recipe.center_v or v8.itemsize == 2 or N < RECENTRED_KEYS:
        return
    _, n_blocks, D_v_pad, bn = v8.shape
    kernel(v8.is_cuda).run(
        {
            "v8": v8.view(-1, D_v_pad, bn),
            "v_descale": v_descale.view(-1, D_v_pad),
            "sequences": v_mean if sequences is None else sequences.sequences,
            "v_mean": v_mean.view(-1, D_v_pad),
            "n_blocks": n_blocks,
            "H_kv": v_mean.size(1),
            "N": N,
            "least": RECENTRED_KEYS,
            "d_tile": CHANNELS,
            "chunk": STEP_ELEMENTS // (CHANNELS * bn),
            "varlen": sequences is not None,
        }
    )
