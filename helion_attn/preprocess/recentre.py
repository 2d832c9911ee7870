"""What `pack` could not know of V before it had read it: one small kernel, from what it noted of every block.

1. *V's mean.* `v_mean += what rounding took from V / keys`. What was cast need not have had a mean of 0, and its
   rounded values do not. And if V's mean is small, subtracting it moves all keys that share one 16-bit value to the
   same side of an 8-bit rounding boundary, so that their errors add up. Few keys do not need it: `RECENTRED_KEYS`.
2. *V's largest entries*, which may lie beyond the room of the sample's descale. A head that has any is packed again,
   with the descale of its true amax, or, of descales by channel, with those of the channels that have any. One program
   does so for 64 channels of a head: it is slow, and hardly ever needed.

Every row of P is the uniform row, 1 / N, plus a rest, and 1 makes the uniform row's product exact. If V's rounding
errors have a variance of e**2, a row of P that sums to 1 has an error of variance e**2 * sum(p**2); without their mean,
e**2 * (sum(p**2) - 1 / N). Statisticians call the uniform row's error a control variate (Glasserman, Monte Carlo
Methods in Financial Engineering, 2004, section 4.1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import by_device
from helion_attn.kernels.lib.inline_asm import maximum
from helion_attn.kernels.lib.steps import to_descale
from helion_attn.kernels.lib.strided import StridedQKV, row_channels
from helion_attn.numerics import FORMAT_MAX, RECENTRED_KEYS, ROUNDS_TO_LARGEST
from helion_attn.preprocess.lib.v_layout import lost_in_rounding, v_block
from helion_attn.preprocess.sequences import Sequences, fields_of, key_source
from helion_attn.types import Recipe

#: Blocks that one step reads.
STEP_BLOCKS = 64


class RecentreSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    v_d_step: int  # from a channel of V to the next
    unit: int  # what the other steps are multiples of
    d_v: int  # head dim of V
    max_tiles: int  # the power of two that holds a row's tiles
    chunk: int  # blocks that a step reads
    largest: float  # the format's largest number
    room: float  # what still rounds to that
    per_channel: bool  # V has a descale a channel; otherwise a head
    center: bool  # V's mean is corrected
    least: int  # keys of a sequence whose mean is corrected, at least
    varlen: bool  # the sequences of a batch follow each other
    wide: bool  # addresses need 64 bits
    is_cuda: bool  # the kernel is compiled; otherwise interpreted


def recentre(
    v: torch.Tensor,  # flat
    v_lost: torch.Tensor,  # [B * H_kv * N_blocks, D_v_pad], or [H_kv * N_blocks, D_v_pad] if varlen; if center
    v_peak: torch.Tensor,  # likewise, [.., d_tiles]
    sequences: torch.Tensor,  # [B, SEQUENCE_FIELDS] if varlen
    k_blocks: torch.Tensor,  # [N_blocks, K_FIELDS] if varlen
    v8: torch.Tensor,  # [B * H_kv * N_blocks * d_tiles, d_tile, bn], written where a sample had too little room
    v_descale: torch.Tensor,  # [B * H_kv, D_v_pad], or [H_kv * N_blocks, D_v_pad] if varlen; likewise
    v_mean: torch.Tensor,  # [B * H_kv, D_v_pad], what was subtracted
    corrected: torch.Tensor,  # [B * H_kv, D_v_pad], what is added back; written if center
    n_blocks: int,
    H_kv: int,
    N: int,
    v_b_step: int,
    v_h_step: int,
    v_s_step: int,
    d_v_at_run_time: int,
    spec: hl.constexpr,  # RecentreSpec
) -> None:
    """Write what is added to V, and pack heads of V again whose entries had no room.

    `n_blocks` are those of a head; with `varlen`, those of all sequences. With `varlen` sequences of fewer than `least`
    keys keep the mean that was subtracted. `room` is what still rounds to the format's largest number.
    """
    d_tile, bn = hl.specialize((v8.size(1), v8.size(2)))
    d_tiles = hl.specialize(v_peak.size(1))
    hl.specialize((v.stride(0), v8.stride(0), v8.stride(1), v8.stride(2)))
    hl.specialize((v_lost.stride(0), v_lost.stride(1), v_mean.stride(0), v_mean.stride(1)))
    hl.specialize((v_descale.stride(0), v_descale.stride(1), corrected.stride(0), corrected.stride(1)))
    v_channels = row_channels(spec.d_v, d_v_at_run_time, spec.v_d_step)
    # Tensors with `varlen`, ints without.
    count: Any
    divisor: Any
    for head, d_index in hl.grid([v_mean.size(0), d_tiles]):
        if spec.varlen:
            fields = fields_of(sequences, head // H_kv, (0, 1), spec.is_cuda)
            first = fields[0] + (head % H_kv) * n_blocks
            keys = fields[1]
            count = (keys + bn - 1) // bn
            divisor = torch.clamp_min(keys + hl.zeros([], dtype=torch.int32), 1)
        else:
            first = head * n_blocks
            count = n_blocks
            divisor = N
        cols = d_index * d_tile + hl.arange(d_tile)
        # [chunk, d_tile], [chunk, max_tiles]
        total = hl.zeros([spec.chunk, d_tile], dtype=torch.float32)
        noted = hl.zeros([spec.chunk, spec.max_tiles], dtype=torch.float32)
        for step in hl.grid((count + spec.chunk - 1) // spec.chunk):
            block = step * spec.chunk + hl.arange(spec.chunk)
            inside = (block < count).unsqueeze(1)
            if spec.center:
                total = total + hl.load(v_lost, [first + block, cols], extra_mask=inside)
            own = inside & (hl.arange(spec.max_tiles) < d_tiles).unsqueeze(0)
            noted = maximum(
                noted, hl.load(v_peak, [first + block, hl.arange(spec.max_tiles)], extra_mask=own), spec.is_cuda
            )
        # [d_tile]
        lost = total.sum(0)
        # Not "beyond", since a NaN is not within.
        fits = (torch.amax(torch.amax(noted, 1), 0) <= spec.room).to(torch.int32)
        if fits < 1:
            ones = hl.full([d_tile], 1.0, dtype=torch.float32)
            if spec.per_channel:
                # [d_tile]
                amax = hl.zeros([d_tile], dtype=torch.float32)
                for i in hl.grid(count):
                    v_head, size, offset = key_source(
                        k_blocks, first + i if spec.varlen else head, H_kv, N, v_b_step, v_h_step, v_s_step, spec.unit,
                        spec.varlen, spec.wide, spec.is_cuda,
                    )  # fmt: skip
                    centred, _ = v_block(
                        v, v_mean, ones, v_head, 0 if spec.varlen else i, d_index, offset, v_s_step * spec.unit,
                        spec.v_d_step, size, v_channels, bn, d_tile, v8.dtype,
                    )  # fmt: skip
                    amax = maximum(amax, torch.amax(torch.abs(centred), 0), spec.is_cuda)
                sampled = hl.load(v_descale, [first if spec.varlen else head, cols])
                descale = torch.where(amax <= sampled * spec.room, sampled, to_descale(amax, spec.largest))
            else:
                # [bn]
                peaks = hl.zeros([bn], dtype=torch.float32)
                for i in hl.grid(count):
                    v_head, size, offset = key_source(
                        k_blocks, first + i if spec.varlen else head, H_kv, N, v_b_step, v_h_step, v_s_step, spec.unit,
                        spec.varlen, spec.wide, spec.is_cuda,
                    )  # fmt: skip
                    for any_index in hl.grid(d_tiles):
                        centred, _ = v_block(
                            v, v_mean, ones, v_head, 0 if spec.varlen else i, any_index, offset, v_s_step * spec.unit,
                            spec.v_d_step, size, v_channels, bn, d_tile, v8.dtype,
                        )  # fmt: skip
                        peaks = maximum(peaks, torch.amax(torch.abs(centred), 1), spec.is_cuda)
                descale = to_descale(torch.amax(peaks, 0), spec.largest) + hl.zeros([d_tile], dtype=torch.float32)
            again = hl.zeros([d_tile], dtype=torch.float32)
            for i in hl.grid(count):
                v_head, size, offset = key_source(
                    k_blocks, first + i if spec.varlen else head, H_kv, N, v_b_step, v_h_step, v_s_step, spec.unit,
                    spec.varlen, spec.wide, spec.is_cuda,
                )  # fmt: skip
                scaled, tile = v_block(
                    v, v_mean, descale, v_head, 0 if spec.varlen else i, d_index, offset, v_s_step * spec.unit,
                    spec.v_d_step, size, v_channels, bn, d_tile, v8.dtype,
                )  # fmt: skip
                v8[(first + i) * d_tiles + d_index, :, :] = tile.transpose(0, 1)
                again = again + lost_in_rounding(scaled, tile, descale)
                if spec.varlen:
                    hl.store(v_descale, [first + i, cols], descale)
            if not spec.varlen:
                hl.store(v_descale, [head, cols], descale)
            lost = again
        if spec.center:
            mean = hl.load(v_mean, [head, cols])
            if spec.varlen:
                hl.store(corrected, [head, cols], torch.where(divisor >= spec.least, mean + lost / divisor, mean))
            else:
                hl.store(corrected, [head, cols], mean + lost / divisor)


kernel = by_device(recentre, Config(num_warps=8, indexing="pointer"))


def launch(
    source: StridedQKV,
    v_lost: torch.Tensor,
    v_peak: torch.Tensor,
    v8: torch.Tensor,
    v_descale: torch.Tensor,
    v_mean: torch.Tensor,
    recipe: Recipe,
    center: bool,
    sequences: Sequences | None = None,
) -> torch.Tensor:
    """Return what V's dequantised entries are added to, shaped as `v_mean`; pack V again where it had no room.

    Args:
        source: of V.
        v_lost: what rounding took from every block, of `pack`, from `RECENTRED_KEYS` keys on.
        v_peak: the largest magnitudes of tiles, in units of their descales.
        v8: and `v_descale`: flat, as `pack` has them; written.
        v_mean: what was subtracted from V. Programs of a head read all of it, so that it is not written.
        recipe: how V was packed.
        center: whether `v_lost` was written.
        sequences: where those of a packed batch lie, or None.
    """
    unused = v_mean
    corrected = v_mean.new_empty(v_mean.shape) if center else v_mean
    bn = v8.size(2)
    kernel(v_mean.is_cuda).run(
        {
            **source.arguments("v"),
            "v_lost": v_lost,
            "v_peak": v_peak,
            "sequences": unused if sequences is None else sequences.sequences,
            "k_blocks": unused if sequences is None else sequences.k_blocks,
            "v8": v8,
            "v_descale": v_descale,
            "v_mean": v_mean,
            "corrected": corrected,
            "n_blocks": -(-source.N // bn) if sequences is None else sequences.k_blocks.size(0),
            "H_kv": source.H_kv,
            "N": source.N,
            "d_v_at_run_time": source.D_v,
            "spec": RecentreSpec(
                v_d_step=source.d_steps[2],
                unit=source.unit,
                d_v=source.D_v,
                max_tiles=1 << (v_peak.size(1) - 1).bit_length(),
                chunk=STEP_BLOCKS,
                largest=FORMAT_MAX[recipe.pv_dtype],
                room=FORMAT_MAX[recipe.pv_dtype] * ROUNDS_TO_LARGEST,
                per_channel=recipe.v_scales == "channel",
                center=center,
                least=RECENTRED_KEYS,
                varlen=sequences is not None,
                wide=sequences is not None and source.wide,
                is_cuda=v_mean.is_cuda,
            ),
        }
    )
    return corrected
