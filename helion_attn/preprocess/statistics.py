"""What quantisation must know of a whole head before it can round: maxima, and means over keys. Two kernels.

1. `first_pass`: after RoPE, amax of every head of K, unless its blocks have descales of their own, or none, and of Q,
   unless its rows or blocks have; with smooth_k, the sum of every channel of K; of V, unless it is neither scaled nor
   centred, sum, minimum and maximum of every channel. With the mean they give the amax of the *centred* channel, so
   that centring needs no pass of its own.
2. `means`: the means, and the amax of V's channels without them. Small.

All statistics are `D_row` channels wide, a power of two; the channels past a head dim are those of zeros.

The three tensors are top-level loops of one kernel, which Helion makes one launch, so that it starts and drains once
(docs/notes/preprocessing.md). A NaN or infinity makes the statistics of its head NaN or infinity.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config
from helion_attn.compiler.kernels import Runner, compiled, interpreted
from helion_attn.kernels.lib.rope import NO_ROPE, RopeTables
from helion_attn.kernels.lib.strided import StridedQKV
from helion_attn.preprocess.first_pass import first_pass
from helion_attn.preprocess.means import means, sequence_means
from helion_attn.preprocess.sequences import Sequences
from helion_attn.types import Recipe

#: Elements that one step of the first pass reads: four 16-byte loads of bf16 a thread.
STEP_ELEMENTS = 4096

#: Programs per tensor in the first pass, about: four on each of an H200's 132 SMs, three steps in flight each.
FIRST_PASS_PROGRAMS = 528

#: Parts of a head in the first pass, at most: every program of the second pass reduces their results itself.
MAX_PARTS = 32

#: Channels of a program of `means`.
MEAN_CHANNELS = 32


@functools.cache
def kernels(is_cuda: bool, pipelined: bool) -> tuple[Runner, Runner]:
    """`(first_pass, means)` for the device."""
    if not is_cuda:
        return interpreted(first_pass), interpreted(means)
    # Three steps in flight in each of the three loops. With RoPE they would take 180 KB of shared memory.
    in_flight = 3 if pipelined else 1
    stages = [0, in_flight, 0, in_flight, 0, 3]
    config = Config(num_warps=4 if pipelined else 8, indexing="pointer", range_num_stages=stages)
    return compiled(first_pass, config), compiled(means, Config(num_warps=4, indexing="pointer"))


class Statistics(NamedTuple):
    """What `pack` needs of whole heads.

    Attributes:
        q_amax: fp32 [B * H, MAX_PARTS], of which the first `q_parts` are valid.
        k_amax: fp32 [B * H_kv, MAX_PARTS], of which the first `k_parts` are valid.
        v_amax: fp32 [B * H_kv, D_row], of the centred channels.
        k_mean: fp32 [B * H_kv, D_row] with smooth_k, otherwise [1, 1] of no meaning.
        v_mean: fp32 [B * H_kv, D_v_pad].
        q_parts: 0 if rows or tiles of Q have descales of their own, or none.
        k_parts: likewise.
    """

    q_amax: torch.Tensor
    k_amax: torch.Tensor
    v_amax: torch.Tensor
    k_mean: torch.Tensor
    v_mean: torch.Tensor
    q_parts: int
    k_parts: int


def constant(source: StridedQKV, amax: float | None) -> Statistics:
    """Statistics of tensors that need none: the same amax everywhere, or None where it is not read; no mean."""
    like = source.flat[0].new_empty(0, dtype=torch.float32)
    heads, kv_heads = source.B * source.H, source.B * source.H_kv

    def everywhere(*shape: int) -> torch.Tensor:
        return like.new_empty(shape) if amax is None else like.new_full(shape, amax)

    q_amax, k_amax = everywhere(heads, MAX_PARTS), everywhere(kv_heads, MAX_PARTS)
    v_amax, v_mean = everywhere(kv_heads, source.D_row), like.new_zeros(kv_heads, source.D_v_pad)
    return Statistics(q_amax, k_amax, v_amax, like.new_empty(1, 1), v_mean, 1, 1)


def _parts(heads: int, size: int, step: int) -> int:
    """Programs per head of the first pass."""
    return max(1, min(MAX_PARTS, FIRST_PASS_PROGRAMS // heads, -(-size // step)))


def launch(source: StridedQKV, rope: RopeTables, recipe: Recipe) -> Statistics:
    """Run both kernels, for what a recipe must know."""
    smooth_k, center_v = recipe.smooth_k, recipe.center_v
    like = source.flat[0].new_empty(0, dtype=torch.float32)
    heads, kv_heads, D_row = source.B * source.H, source.B * source.H_kv, source.D_row
    step = STEP_ELEMENTS // D_row
    kv_parts = _parts(kv_heads, source.N, step)
    q_parts = 0 if recipe.q_scales in ("block", "token", "none") else _parts(heads, source.M, step)
    k_parts = 0 if recipe.k_scales in ("block", "none") and not smooth_k else kv_parts
    v_parts = 0 if recipe.v_scales == "none" and not center_v else kv_parts
    if not q_parts + k_parts + v_parts:
        return constant(source, None)
    tiles = [-(-size // step) for size in (source.M, source.N, source.N)]
    q_run, k_run, v_run = (-(-n // max(parts, 1)) for n, parts in zip(tiles, (q_parts, k_parts, v_parts), strict=True))
    q_amax, k_amax = like.new_empty(heads, MAX_PARTS), like.new_empty(kv_heads, MAX_PARTS)
    v_stats = like.new_empty(kv_heads, 3, MAX_PARTS, D_row)
    k_sum = like.new_empty((kv_heads, MAX_PARTS, D_row) if smooth_k else (1, 1, 1))
    v_mean, v_amax = like.new_empty(kv_heads, source.D_v_pad), like.new_empty(kv_heads, D_row)
    k_mean = like.new_empty((kv_heads, D_row) if smooth_k else (1, 1))
    is_cuda = v_mean.is_cuda
    run_first_pass, run_means = kernels(is_cuda, rope.pairing == NO_ROPE)
    run_first_pass.run(
        {
            **source.arguments(),
            **_rope_arguments(rope),
            "q_amax": q_amax,
            "k_amax": k_amax,
            "k_sum": k_sum,
            "v_stats": v_stats,
            # There are no packed sequences to read of.
            "k_blocks": k_amax,
            "q_parts": q_parts,
            "k_parts": k_parts,
            "v_parts": v_parts,
            "q_run": q_run,
            "k_run": k_run,
            "v_run": v_run,
            "H": source.H,
            "H_kv": source.H_kv,
            "M": source.M,
            "N": source.N,
            "d": source.D,
            "d_v": source.D_v,
            "step": step,
            "smooth_k": smooth_k,
            "q_pairing": rope.pairing if q_parts else NO_ROPE,
            "k_pairing": rope.pairing if k_parts else NO_ROPE,
            "varlen": False,
            "wide": False,
            "is_cuda": is_cuda,
        }
    )
    run_means.run(
        {
            "k_sum": k_sum,
            "v_stats": v_stats,
            "k_mean": k_mean,
            "v_mean": v_mean,
            "v_amax": v_amax,
            "k_parts": k_parts,
            "v_parts": v_parts,
            "N": source.N,
            "d_tile": MEAN_CHANNELS,
            "smooth_k": smooth_k,
            "center_v": center_v,
        }
    )
    if recipe.q_scales == "tensor":
        q_amax.fill_(q_amax[:, :q_parts].amax())
    if recipe.k_scales == "tensor":
        k_amax.fill_(k_amax[:, :k_parts].amax())
    if recipe.v_scales == "tensor":
        v_amax.fill_(v_amax.amax())
    return Statistics(q_amax, k_amax, v_amax, k_mean, v_mean, q_parts, k_parts)


def _rope_arguments(rope: RopeTables) -> dict[str, Any]:
    """Those of `first_pass`, which rotates Q and K each or not."""
    return {name: value for name, value in rope.arguments().items() if name != "pairing"}


@functools.cache
def sequence_kernels(is_cuda: bool) -> tuple[Runner, Runner]:
    """`(first_pass, sequence_means)` for the device, as in `kernels`."""
    if not is_cuda:
        return interpreted(first_pass), interpreted(sequence_means)
    config = Config(num_warps=4, indexing="pointer", range_num_stages=[0, 1, 0, 3, 0, 3])
    return compiled(first_pass, config), compiled(sequence_means, Config(num_warps=4, indexing="pointer"))


def launch_of_sequences(
    source: StridedQKV,
    rope: RopeTables,
    sequences: Sequences,
    bn: int,
    recipe: Recipe,
) -> Statistics:
    """Run `first_pass` on every block of K and V, and `sequence_means`; Q has descales of rows or blocks, or none.

    Args:
        source: Q, K and V [1, heads, tokens, head dim].
        rope: none.
        sequences: where they lie.
        bn: keys of a block.
        recipe: what is to be known of them.
    """
    smooth_k, center_v = recipe.smooth_k, recipe.center_v
    like = source.flat[0].new_empty(0, dtype=torch.float32)
    B, n_blocks, H_kv, D_row = sequences.sequences.size(0), sequences.k_blocks.size(0), source.H_kv, source.D_row
    heads, parts = B * H_kv, H_kv * n_blocks
    has_k = recipe.k_scales == "head" or smooth_k
    has_v = recipe.v_scales != "none" or center_v
    k_amax, k_mean = like.new_empty(heads, MAX_PARTS), like.new_empty((heads, D_row) if smooth_k else (1, 1))
    if not has_k and not has_v:
        v_amax, v_mean = like.new_ones(heads, D_row), like.new_zeros(heads, source.D_v_pad)
        return Statistics(k_amax, k_amax, v_amax, k_mean, v_mean, 0, 0)
    k_part_amax = like.new_empty(parts, 1)
    k_sum = like.new_empty((parts, 1, D_row) if smooth_k else (1, 1, 1))
    v_stats = like.new_empty(parts, 3, 1, D_row)
    v_mean, v_amax = like.new_empty(heads, source.D_v_pad), like.new_empty(heads, D_row)
    step = min(bn, STEP_ELEMENTS // D_row)
    run = -(-bn // step)
    is_cuda = v_mean.is_cuda
    run_first_pass, run_means = sequence_kernels(is_cuda)
    run_first_pass.run(
        {
            **source.arguments(),
            **_rope_arguments(rope),
            # Not K's, of which Helion would take the one loop to wait for the other.
            "q_amax": like.new_empty(1, 1),
            "k_amax": k_part_amax,
            "k_sum": k_sum,
            "v_stats": v_stats,
            "k_blocks": sequences.k_blocks,
            "q_parts": 0,
            "k_parts": int(has_k),
            "v_parts": int(has_v),
            "q_run": 0,
            "k_run": run,
            "v_run": run,
            "H": source.H,
            "H_kv": H_kv,
            "M": 0,
            "N": bn,
            "d": source.D,
            "d_v": source.D_v,
            "step": step,
            "smooth_k": smooth_k,
            "q_pairing": NO_ROPE,
            "k_pairing": NO_ROPE,
            "varlen": True,
            "wide": source.wide,
            "is_cuda": is_cuda,
        }
    )
    run_means.run(
        {
            "k_part_amax": k_part_amax,
            "k_sum": k_sum,
            "v_stats": v_stats,
            "sequences": sequences.sequences,
            "k_amax": k_amax,
            "k_mean": k_mean,
            "v_mean": v_mean,
            "v_amax": v_amax,
            "n_blocks": n_blocks,
            "H_kv": H_kv,
            "bn": bn,
            "chunk": MAX_PARTS,
            "d_tile": MEAN_CHANNELS,
            "has_k": has_k,
            "has_v": has_v,
            "smooth_k": smooth_k,
            "center_v": center_v,
        }
    )
    return Statistics(k_amax, k_amax, v_amax, k_mean, v_mean, 0, int(has_k))
