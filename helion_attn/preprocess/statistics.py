"""What quantisation must know of a whole head before it can round: maxima, and means over keys. Two kernels.

1. `first_pass`: after RoPE, amax of every head of K, unless its blocks have descales of their own, or none, and of Q,
   unless its rows or blocks have; with smooth_k, the sum of every channel of K; of V, unless it is neither scaled nor
   centred, sum, minimum and maximum of every channel. With the mean they give the amax of the *centred* channel, so
   that centring needs no pass of its own.
2. `means`: the means, and the amax of V's channels without them. Small.

All statistics are `D_row` channels wide, a power of two; the channels past a head dim are those of zeros.

The three tensors are top-level loops of one kernel, which Helion makes one launch: a launch of 64 MB costs 4 of its
22 us to start and drain. A NaN or infinity makes the statistics of its head NaN or infinity.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import helion, hl
from helion_attn.compiler.kernels import Runner, compiled, interpreted
from helion_attn.kernels.lib.inline_asm import maximum, minimum
from helion_attn.preprocess.lib.rope import NO_ROPE, RopeTables, rope_rows
from helion_attn.preprocess.lib.strided import StridedQKV, load_rows
from helion_attn.preprocess.sequences import Sequences, key_source
from helion_attn.types import Recipe

#: Elements that one step of the first pass reads: four 16-byte loads of bf16 a thread.
STEP_ELEMENTS = 4096

#: Programs per tensor in the first pass, about: four on each of an H200's 132 SMs, three steps in flight each.
FIRST_PASS_PROGRAMS = 528

#: Parts of a head in the first pass, at most: every program of the second pass reduces their results itself.
MAX_PARTS = 32

#: Channels of a program of `means`.
MEAN_CHANNELS = 32


def last_key(keys: torch.Tensor, size: int | torch.Tensor, varlen: hl.constexpr) -> torch.Tensor:
    """Keys, those past the end made the last one; 0 of no keys, which only a block of no sequence has."""
    last = torch.clamp_max(keys, size - 1)
    return torch.clamp_min(last, 0) if varlen else last


def first_pass(
    q: torch.Tensor,  # flat
    k: torch.Tensor,  # flat
    v: torch.Tensor,  # flat
    q_amax: torch.Tensor,  # [B * H, MAX_PARTS], written
    k_amax: torch.Tensor,  # [B * H_kv, MAX_PARTS], written
    k_sum: torch.Tensor,  # [B * H_kv, MAX_PARTS, D_row], written if smooth_k
    v_stats: torch.Tensor,  # [B * H_kv, 3, MAX_PARTS, D_row], written
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    k_blocks: torch.Tensor,  # [N_blocks, K_FIELDS] if varlen
    q_parts: int,
    k_parts: int,
    v_parts: int,
    q_run: int,  # tiles of a part; here a `max` would be that of the first call
    k_run: int,
    v_run: int,
    H: int,
    H_kv: int,
    M: int,
    N: int,
    q_b_step: int,
    q_h_step: int,
    q_s_step: int,
    k_b_step: int,
    k_h_step: int,
    k_s_step: int,
    v_b_step: int,
    v_h_step: int,
    v_s_step: int,
    table_rows: int,
    q_d_step: hl.constexpr,
    k_d_step: hl.constexpr,
    v_d_step: hl.constexpr,
    unit: hl.constexpr,
    d: hl.constexpr,
    d_v: hl.constexpr,
    step: hl.constexpr,
    smooth_k: hl.constexpr,
    rotary: hl.constexpr,
    q_pairing: hl.constexpr,
    k_pairing: hl.constexpr,
    explicit_q_positions: hl.constexpr,
    explicit_k_positions: hl.constexpr,
    varlen: hl.constexpr,
    wide: hl.constexpr,
    is_cuda: hl.constexpr,
) -> None:
    """See the module's docstring; the steps are those of `StridedRows`, the RoPE arguments those of `rope_rows`.

    With `varlen` a block of a head of K or V is a "head" of its own, as in `pack.pack`.
    """
    d_row = hl.specialize(v_stats.size(3))
    hl.specialize((q.stride(0), k.stride(0), v.stride(0), cos.stride(0), sin.stride(0)))
    hl.specialize((v_stats.stride(1), v_stats.stride(2), v_stats.stride(3)))
    q_tiles = (M + step - 1) // step
    kv_tiles = (N + step - 1) // step
    # A tensor that needs no statistics has no parts, and its loop no programs.
    for bh, part in hl.grid([q_amax.size(0), q_parts]):
        offset = ((bh // H) * q_b_step + (bh % H) * q_h_step) * unit
        # Maxima stay per element until the end: one reduction across lanes a program, not one a step.
        # [step, D_row]
        q_max = hl.zeros([step, d_row], dtype=torch.float32)
        for q_tile in hl.grid(part * q_run, min(q_tiles, (part + 1) * q_run)):
            rows = q_tile * step + hl.arange(step)
            if q_pairing:
                x = rope_rows(
                    q, cos, sin, q_positions, offset, rows, q_s_step * unit, q_d_step, M, d, N - M, table_rows,
                    step, d_row, rotary, q_pairing, explicit_q_positions,
                )  # fmt: skip
            else:
                x = load_rows(q, offset, rows, hl.arange(d_row), q_s_step * unit, q_d_step, M, d)
            q_max = maximum(q_max, torch.abs(x), is_cuda)
        q_amax[bh, part] = torch.amax(torch.amax(q_max, 1), 0)

    for bh, part in hl.grid([k_amax.size(0), k_parts]):
        _, keys_of_head, offset = key_source(
            k_blocks, bh, H_kv, N, k_b_step, k_h_step, k_s_step, unit, varlen, wide, is_cuda
        )
        k_max = hl.zeros([step, d_row], dtype=torch.float32)
        k_total = hl.zeros([step, d_row], dtype=torch.float32)
        for k_tile in hl.grid(part * k_run, min(kv_tiles, (part + 1) * k_run)):
            rows = k_tile * step + hl.arange(step)
            if k_pairing:
                x = rope_rows(
                    k, cos, sin, k_positions, offset, rows, k_s_step * unit, k_d_step, keys_of_head, d, 0, table_rows,
                    step, d_row, rotary, k_pairing, explicit_k_positions,
                )  # fmt: skip
            else:
                x = load_rows(k, offset, rows, hl.arange(d_row), k_s_step * unit, k_d_step, keys_of_head, d)
            k_max = maximum(k_max, torch.abs(x), is_cuda)
            if smooth_k:
                k_total = k_total + x
        k_amax[bh, part] = torch.amax(torch.amax(k_max, 1), 0)
        if smooth_k:
            k_sum[bh, part, :] = k_total.sum(0)

    for bh, part in hl.grid([v_stats.size(0), v_parts]):
        _, v_keys, offset = key_source(k_blocks, bh, H_kv, N, v_b_step, v_h_step, v_s_step, unit, varlen, wide, is_cuda)
        v_sum = hl.zeros([step, d_row], dtype=torch.float32)
        v_min = hl.full([step, d_row], float("inf"), dtype=torch.float32)
        v_max = hl.full([step, d_row], float("-inf"), dtype=torch.float32)
        for v_tile in hl.grid(part * v_run, min(kv_tiles, (part + 1) * v_run)):
            keys = v_tile * step + hl.arange(step)
            # Keys past the end repeat the last one: no change to minimum and maximum, left out of the sum.
            last = last_key(keys, v_keys, varlen)
            x = load_rows(v, offset, last, hl.arange(d_row), v_s_step * unit, v_d_step, v_keys, d_v)
            v_sum = v_sum + torch.where((keys < v_keys).unsqueeze(1), x, 0.0)
            v_min = minimum(v_min, x, is_cuda)
            v_max = maximum(v_max, x, is_cuda)
        v_stats[bh, 0, part, :] = v_sum.sum(0)
        v_stats[bh, 1, part, :] = torch.amin(v_min, 0)
        v_stats[bh, 2, part, :] = torch.amax(v_max, 0)


def means(
    k_sum: torch.Tensor,  # [B * H_kv, MAX_PARTS, D_row]
    v_stats: torch.Tensor,  # [B * H_kv, 3, MAX_PARTS, D_row]
    k_mean: torch.Tensor,  # [B * H_kv, D_row], written if smooth_k
    v_mean: torch.Tensor,  # [B * H_kv, D_v_pad], written
    v_amax: torch.Tensor,  # [B * H_kv, D_row], written
    k_parts: int,
    v_parts: int,
    N: int,
    d_tile: hl.constexpr,
    smooth_k: hl.constexpr,
    center_v: hl.constexpr,
) -> None:
    """See the module's docstring."""
    max_parts = hl.specialize(v_stats.size(2))
    d_row = hl.specialize(v_amax.size(1))
    d_v_pad = hl.specialize(v_mean.size(1))
    d_tiles = d_row // d_tile
    hl.specialize((v_stats.stride(1), v_stats.stride(2), v_stats.stride(3), v_mean.stride(0), v_mean.stride(1)))
    for bh, d_index in hl.grid([v_stats.size(0), d_tiles]):
        cols = d_index * d_tile + hl.arange(d_tile)
        part = hl.arange(max_parts)
        written = (part < v_parts).unsqueeze(1)
        # [max_parts, d_tile] each, then [d_tile]
        v_sum = torch.where(written, hl.load(v_stats, [bh, 0, part, cols]), 0.0).sum(0)
        v_min = torch.amin(torch.where(written, hl.load(v_stats, [bh, 1, part, cols]), float("inf")), 0)
        v_max = torch.amax(torch.where(written, hl.load(v_stats, [bh, 2, part, cols]), float("-inf")), 0)
        if center_v:
            mean = v_sum / N
        else:
            mean = hl.zeros([d_tile], dtype=torch.float32)
        if d_v_pad < d_row:
            hl.store(v_mean, [bh, cols], mean, extra_mask=cols < d_v_pad)
        else:
            hl.store(v_mean, [bh, cols], mean)
        hl.store(v_amax, [bh, cols], torch.maximum(v_max - mean, mean - v_min))
        if smooth_k:
            total = torch.where((part < k_parts).unsqueeze(1), hl.load(k_sum, [bh, part, cols]), 0.0).sum(0)
            hl.store(k_mean, [bh, cols], total / N)


def sequence_means(
    k_part_amax: torch.Tensor,  # [H_kv * N_blocks, 1]
    k_sum: torch.Tensor,  # [H_kv * N_blocks, 1, D_row]
    v_stats: torch.Tensor,  # [H_kv * N_blocks, 3, 1, D_row]
    sequences: torch.Tensor,  # [B, SEQUENCE_FIELDS]
    k_amax: torch.Tensor,  # [B * H_kv, MAX_PARTS], of which the first is written
    k_mean: torch.Tensor,  # [B * H_kv, D_row], written if smooth_k
    v_mean: torch.Tensor,  # [B * H_kv, D_v_pad], written
    v_amax: torch.Tensor,  # [B * H_kv, D_row], written
    n_blocks: int,
    H_kv: int,
    bn: hl.constexpr,
    chunk: hl.constexpr,
    d_tile: hl.constexpr,
    has_k: hl.constexpr,
    has_v: hl.constexpr,
    smooth_k: hl.constexpr,
    center_v: hl.constexpr,
) -> None:
    """`means`, and the amax of K, of the sequences of a packed batch, from their blocks' results."""
    d_row = hl.specialize(v_amax.size(1))
    d_v_pad = hl.specialize(v_mean.size(1))
    d_tiles = d_row // d_tile
    hl.specialize((v_stats.stride(1), v_stats.stride(2), v_stats.stride(3), v_mean.stride(0), v_mean.stride(1)))
    for head, d_index in hl.grid([v_amax.size(0), d_tiles]):
        first = hl.load(sequences, [head // H_kv, 0])
        keys = hl.load(sequences, [head // H_kv, 1])
        count = (keys + bn - 1) // bn
        cols = d_index * d_tile + hl.arange(d_tile)
        # [chunk, d_tile] each
        v_sum = hl.zeros([chunk, d_tile], dtype=torch.float32)
        v_min = hl.full([chunk, d_tile], float("inf"), dtype=torch.float32)
        v_max = hl.full([chunk, d_tile], float("-inf"), dtype=torch.float32)
        k_total = hl.zeros([chunk, d_tile], dtype=torch.float32)
        k_max = hl.zeros([chunk], dtype=torch.float32)
        for c in hl.grid((count + chunk - 1) // chunk):
            block = c * chunk + hl.arange(chunk)
            part = (head % H_kv) * n_blocks + first + block
            inside = block < count
            own = inside.unsqueeze(1)
            if has_v:
                v_sum = v_sum + hl.load(v_stats, [part, 0, 0, cols], extra_mask=own)
                v_min = torch.minimum(
                    v_min, torch.where(own, hl.load(v_stats, [part, 1, 0, cols], extra_mask=own), float("inf"))
                )
                v_max = torch.maximum(
                    v_max, torch.where(own, hl.load(v_stats, [part, 2, 0, cols], extra_mask=own), float("-inf"))
                )
            if has_k:
                k_max = torch.maximum(k_max, hl.load(k_part_amax, [part, 0], extra_mask=inside))
            if smooth_k:
                k_total = k_total + hl.load(k_sum, [part, 0, cols], extra_mask=own)
        # Of no keys the means are 0: rows without a key give that, and lse -inf.
        divisor = torch.clamp_min(keys, 1)
        # [d_tile]
        if center_v:
            mean = v_sum.sum(0) / divisor
        else:
            mean = hl.zeros([d_tile], dtype=torch.float32)
        if d_v_pad < d_row:
            hl.store(v_mean, [head, cols], mean, extra_mask=cols < d_v_pad)
        else:
            hl.store(v_mean, [head, cols], mean)
        hl.store(v_amax, [head, cols], torch.maximum(torch.amax(v_max, 0) - mean, mean - torch.amin(v_min, 0)))
        if has_k:  # noqa: SIM102 - Helion resolves this one when it compiles, the next when it runs
            if d_index == 0:
                k_amax[head, 0] = torch.amax(k_max, 0)
        if smooth_k:
            hl.store(k_mean, [head, cols], k_total.sum(0) / divisor)


@functools.cache
def kernels(is_cuda: bool, pipelined: bool) -> tuple[Runner, Runner]:
    """`(first_pass, means)` for the device."""
    if not is_cuda:
        return interpreted(first_pass), interpreted(means)
    # Three steps in flight in each of the three loops; unpipelined, 22 us of loads take 28. With RoPE the same would
    # take 180 KB of shared memory.
    in_flight = 3 if pipelined else 1
    stages = [0, in_flight, 0, in_flight, 0, 3]
    config = helion.Config(num_warps=4 if pipelined else 8, indexing="pointer", range_num_stages=stages)
    return compiled(first_pass, config), compiled(means, helion.Config(num_warps=4, indexing="pointer"))


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
    config = helion.Config(num_warps=4, indexing="pointer", range_num_stages=[0, 1, 0, 3, 0, 3])
    return compiled(first_pass, config), compiled(sequence_means, helion.Config(num_warps=4, indexing="pointer"))


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
            "q_amax": k_part_amax,
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
