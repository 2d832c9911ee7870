"""Samples Q, K and V before they are read whole: means, maxima and sizes of every head, in one small kernel.

    key i * (keys // n) for i < n, n = min(keys, `SAMPLED_KEYS`)

softmax(q (k - c)) is the same for any constant c, and so is P (v - c) + c for rows of P that sum to 1: the mean of a
sample leaves as little to round as the whole mean (SageAttention, arXiv:2410.02367, subtracts that from K). Means that
do not stand out of the sample's noise are 0: subtracting them would add to small entries, such as V's at an attention
sink. From fewer rows of Q and K come the factors of channels (`lib.equalise`). V's descales, of a head or its channels,
fit entries of `SAMPLED_HEADROOM` times the sample's amax; `recentre` sees to larger ones. A NaN in the sample makes the
mean of its channel NaN, and so all that it is subtracted from. One infinity does not stand out of its own range; it
makes the descale NaN.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import Runner, compiled, interpreted
from helion_attn.kernels.lib.inline_asm import maximum, minimum
from helion_attn.kernels.lib.norm import NO_NORM, OVER_HEADS, Norms
from helion_attn.kernels.lib.rope import NO_ROPE, RopeTables, rope_rows
from helion_attn.kernels.lib.strided import StridedQKV, load_rows
from helion_attn.numerics import (
    SAMPLED_HEADROOM,
    SAMPLED_KEYS,
    SIGNIFICANT_MEAN,
    equalised_queries,
    equalised_rows,
)
from helion_attn.preprocess.lib.equalise import channel_factors_of, channel_sizes
from helion_attn.preprocess.sequences import Sequences, fields_of, key_source, offset_of
from helion_attn.types import Recipe

#: Channels of a program, and elements of a step: all that it samples, 64 a thread, on their way at once.
CHANNELS, STEP_ELEMENTS = 64, 16384

#: With RoPE, whose partners are any channels of a row, or a norm: 16 elements a thread.
ROW_STEP_ELEMENTS = 4096


class Sampled(NamedTuple):
    """What `pack` needs to know of Q, K and V."""

    # fp32 [B * H_kv, D_row], what V's descales are to hold of the centred channels; of no meaning where V becomes
    # 16-bit, or descales are given.
    v_amax: torch.Tensor
    k_mean: torch.Tensor  # fp32 [B * H_kv, D_row] with smooth_k, otherwise [1, 1] of no meaning
    v_mean: torch.Tensor  # fp32 [B * H_kv, D_v_pad], zeros without center_v
    channel_factors: torch.Tensor  # fp32 [B * H_kv, D_row] with equalise, otherwise [1, 1] of no meaning


def sampled_head(
    sequences: torch.Tensor,  # [B, SEQUENCE_FIELDS] if varlen
    k_blocks: torch.Tensor,  # [N_blocks, K_FIELDS] if varlen
    head: int,
    heads: int,
    size: int,
    count: int,
    every: int,
    b_step: int,
    h_step: int,
    s_step: int,
    samples: hl.constexpr,
    runs: hl.constexpr,
    unit: hl.constexpr,
    varlen: hl.constexpr,
    wide: hl.constexpr,
    is_cuda: hl.constexpr,
) -> tuple[Any, Any, Any, Any]:
    """Keys of a head, where they begin in memory, how many of each of `runs` equal runs are sampled, and the step."""
    if not varlen:
        _, keys, offset = key_source(k_blocks, head, heads, size, b_step, h_step, s_step, unit, varlen, wide, is_cuda)
        return keys, offset, count, every
    first, keys = fields_of(sequences, head // heads, (0, 1), is_cuda)
    n_blocks = k_blocks.size(0)
    known: Any
    if is_cuda:
        # A sequence without a key may be without a block.
        known = torch.clamp_max(first, n_blocks - 1)
        own_count = torch.clamp_max(torch.div(keys, runs, rounding_mode="trunc"), samples)
        sampled = torch.clamp_min(torch.clamp_max(keys, SAMPLED_KEYS), 1)
        own_every = torch.div(keys, sampled, rounding_mode="trunc")
        own_every = own_every * torch.div(sampled, torch.clamp_min(own_count * runs, 1), rounding_mode="trunc")
    else:
        known, own_count = min(first, n_blocks - 1), min(keys // runs, samples)
        sampled = max(min(keys, SAMPLED_KEYS), 1)
        own_every = keys // sampled * (sampled // max(own_count * runs, 1))
    block = (head % heads) * n_blocks + known
    _, _, offset = key_source(k_blocks, block, heads, size, b_step, h_step, s_step, unit, varlen, wide, is_cuda)
    return keys, offset, own_count, own_every


def sampled_queries(
    sequences: torch.Tensor,  # [B, SEQUENCE_FIELDS] if varlen
    kv: int,
    H_kv: int,
    members: int,
    group: int,
    M: int,
    count: int,
    every: int,
    b_step: int,
    h_step: int,
    s_step: int,
    rows: hl.constexpr,
    unit: hl.constexpr,
    varlen: hl.constexpr,
    wide: hl.constexpr,
    is_cuda: hl.constexpr,
) -> tuple[Any, Any, Any, Any]:
    """Return a group's sampled queries: how many a head has, how many are taken of it, where heads begin, rows.

    Rows come in turn from the group's first heads, `members` of them, and are past the end where there are no more.
    Every second row is a head's every second query.
    """
    first_head = (kv % H_kv) * group
    size: Any = M
    own_count: Any = count
    own_every: Any = every
    if varlen:
        first, size = fields_of(sequences, kv // H_kv, (2, 3), is_cuda)
        offset = offset_of(first, first_head, h_step, s_step, unit, wide, is_cuda)
        if is_cuda:
            own_count = torch.clamp_max(size, count)
            own_every = torch.div(size, torch.clamp_min(own_count, 1), rounding_mode="trunc")
        else:
            own_count = min(size, count)
            own_every = size // max(own_count, 1)
    else:
        offset = ((kv // H_kv) * b_step + first_head * h_step) * unit
    i = hl.arange(rows)
    pair = torch.div(i >> 1, members, rounding_mode="trunc")
    of_head = pair * 2 + (i & 1)
    member = (i >> 1) - pair * members
    if wide:
        member = member.to(torch.int64)
    rows_of_heads = torch.where(of_head < own_count, of_head * own_every, size)
    return size, own_count, offset + member * h_step * unit, rows_of_heads


def transformed_rows(
    flat: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    factors: torch.Tensor,
    head_offset: Any,
    first_weight: int,
    first_factor: int,
    rows: torch.Tensor,  # [n]
    row_step: int,
    d_step: int,
    size: Any,
    d: int,
    first_position: int,
    table_rows: int,
    n: int,
    d_row: int,
    rotary: int,
    pairing: hl.constexpr,
    explicit: hl.constexpr,
    normed: hl.constexpr,
    eps: hl.constexpr,
) -> torch.Tensor:
    """Rows of Q or K, normalised and rotated, fp32 [n, D_row]. The arguments are those of `rope_rows`."""
    if pairing or normed:
        x, factor = rope_rows(
            flat, cos, sin, positions, weight, factors, head_offset, first_weight, first_factor, rows, row_step, d_step,
            size, d, first_position, table_rows, n, d_row, rotary, pairing, explicit, normed, eps,
        )  # fmt: skip
        return x * factor.unsqueeze(1)
    return load_rows(flat, head_offset, rows, hl.arange(d_row), row_step, d_step, size, d)


def at_least_1(count: Any, varlen: hl.constexpr, is_cuda: hl.constexpr) -> Any:
    """`count`, or 1 in place of 0, which only a sequence of a packed batch has."""
    if not varlen:
        return count
    return torch.clamp_min(count, 1) if is_cuda else max(count, 1)


def significant_mean(
    total: torch.Tensor,  # [d]
    least: torch.Tensor,  # [d]
    most: torch.Tensor,  # [d]
    count: Any,
    threshold: float,
    varlen: hl.constexpr,
    is_cuda: hl.constexpr,
) -> torch.Tensor:
    """The means of channels, from the sum and the range of `count` entries; 0 where noise has as large ones."""
    known = at_least_1(count, varlen, is_cuda) + hl.zeros([], dtype=torch.float32)
    mean = total / known
    # Not "more than noise", since a NaN is neither.
    return torch.where(torch.abs(mean) <= (most - least) * (threshold / torch.sqrt(known)), 0.0, mean)


class SampleSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    q_d_step: int  # from a channel of Q to the next
    k_d_step: int  # of K
    v_d_step: int  # of V
    unit: int  # what the other steps are multiples of
    d: int  # head dim of Q and K
    d_v: int  # of V
    d_tile: int  # channels of a program
    step: int  # keys that a program reads at once
    samples: int  # keys of a sample, at most
    equalised_rows: int  # rows of Q, and pairs of rows of K, that give the factors of channels
    headroom: float  # what V's maxima are multiplied by
    threshold: float  # of significant means, as `SIGNIFICANT_MEAN` has it
    smooth_k: bool  # K's mean is subtracted
    center_v: bool  # V's mean is found
    rotary: int  # channels of Q and K that are rotated
    pairing: int  # how, as `lib.rope` has it
    explicit_q_positions: bool  # Q has positions of its own
    explicit_k_positions: bool  # K has
    q_normed: int  # which channels of Q share a mean of squares, as `lib.norm` has it
    q_eps: float  # what is added to that
    normed: int  # of K
    eps: float  # of K
    varlen: bool  # the sequences of a batch follow each other
    wide: bool  # addresses need 64 bits
    is_cuda: bool  # the kernel is compiled; otherwise interpreted


def sample(
    q: torch.Tensor,  # flat
    k: torch.Tensor,  # flat
    v: torch.Tensor,  # flat
    k_mean: torch.Tensor,  # [B * H_kv, D_row], written; of no head without smooth_k
    v_mean: torch.Tensor,  # [B * H_kv, D_v_pad], written
    v_amax: torch.Tensor,  # [B * H_kv, D_row], written: what a descale is to hold of a channel
    channel_factors: torch.Tensor,  # [B * H_kv, D_row], written; of no head without equalise
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    q_weight: torch.Tensor,  # [D or H * D] if q_normed
    q_factors: torch.Tensor,  # [B * M] if q_normed over heads
    weight: torch.Tensor,  # [D or H_kv * D] if normed
    factors: torch.Tensor,  # [B * N] if normed over heads
    sequences: torch.Tensor,  # [B, SEQUENCE_FIELDS] if varlen
    k_blocks: torch.Tensor,  # [N_blocks, K_FIELDS] if varlen
    k_heads: int,
    v_heads: int,
    equalised_heads: int,
    group: int,
    members: int,
    H_kv: int,
    M: int,
    N: int,
    count: int,
    every: int,
    equalised_pairs: int,
    equalised_every: int,
    q_count: int,
    q_every: int,
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
    spec: hl.constexpr,  # SampleSpec
) -> None:
    """Write what a sample says of a head. Steps are those of `StridedRows`, RoPE's arguments those of `rope_rows`."""
    d_row = hl.specialize(v_amax.size(1))
    d_v_pad = hl.specialize(v_mean.size(1))
    hl.specialize((q.stride(0), k.stride(0), v.stride(0), cos.stride(0), sin.stride(0)))
    hl.specialize((channel_factors.stride(1), q_weight.stride(0), q_factors.stride(0)))
    hl.specialize((k_mean.stride(1), v_mean.stride(1), v_amax.stride(1), weight.stride(0), factors.stride(0)))
    d_tiles = d_row // spec.d_tile
    for kv, k_part in hl.grid([k_heads, d_tiles]):
        keys, offset, k_count, k_every = sampled_head(
            sequences, k_blocks, kv, H_kv, N, count, every, k_b_step, k_h_step, k_s_step, spec.samples, 1, spec.unit,
            spec.varlen, spec.wide, spec.is_cuda,
        )  # fmt: skip
        first_weight = (kv % H_kv) * spec.d if spec.normed == 2 else 0
        first_factor = (kv // H_kv) * N if spec.normed == 2 else 0
        # [d_tile], [step, d_tile]
        k_cols = k_part * spec.d_tile + hl.arange(spec.d_tile)
        k_total = hl.zeros([spec.step, spec.d_tile], dtype=torch.float32)
        k_min = hl.full([spec.step, spec.d_tile], float("inf"), dtype=torch.float32)
        k_max = hl.full([spec.step, spec.d_tile], float("-inf"), dtype=torch.float32)
        for k_tile in hl.grid(spec.samples // spec.step):
            i = k_tile * spec.step + hl.arange(spec.step)
            # Past the sample a row is past the end, and 0.
            rows = torch.where(i < k_count, i * k_every, keys)
            if spec.pairing or spec.normed:
                x, factor = rope_rows(
                    k, cos, sin, k_positions, weight, factors, offset, first_weight, first_factor, rows,
                    k_s_step * spec.unit, spec.k_d_step, keys, spec.d, 0, table_rows, spec.step, d_row, spec.rotary,
                    spec.pairing, spec.explicit_k_positions, spec.normed, spec.eps,
                )  # fmt: skip
                x = x * factor.unsqueeze(1)
            else:
                x = load_rows(k, offset, rows, k_cols, k_s_step * spec.unit, spec.k_d_step, keys, spec.d)
            k_total = k_total + x
            inside = (i < k_count).unsqueeze(1)
            k_min = minimum(k_min, torch.where(inside, x, float("inf")), spec.is_cuda)
            k_max = maximum(k_max, torch.where(inside, x, float("-inf")), spec.is_cuda)
        # The means of no keys are 0.
        of_k = significant_mean(
            k_total.sum(0),
            torch.amin(k_min, 0),
            torch.amax(k_max, 0),
            k_count,
            spec.threshold,
            spec.varlen,
            spec.is_cuda,
        )
        hl.store(k_mean, [kv, k_cols], of_k)

    for eq, _ in hl.grid([equalised_heads, 1]):
        k_known, k_offset, pairs, apart = sampled_head(
            sequences, k_blocks, eq, H_kv, N, equalised_pairs, equalised_every, k_b_step, k_h_step, k_s_step,
            spec.equalised_rows, 2, spec.unit, spec.varlen, spec.wide, spec.is_cuda,
        )  # fmt: skip
        q_known, q_sampled, q_offset, q_rows = sampled_queries(
            sequences, eq, H_kv, members, group, M, q_count, q_every, q_b_step, q_h_step, q_s_step,
            spec.equalised_rows, spec.unit, spec.varlen, spec.wide, spec.is_cuda,
        )  # fmt: skip
        nth = hl.arange(spec.equalised_rows)
        own_weight = (eq % H_kv) * spec.d if spec.normed == 2 else 0
        own_factor = (eq // H_kv) * N if spec.normed == 2 else 0
        # [equalised_rows, D_row]
        x = transformed_rows(
            k, cos, sin, k_positions, weight, factors, k_offset, own_weight, own_factor,
            torch.where(nth < pairs, nth * apart, k_known), k_s_step * spec.unit, spec.k_d_step, k_known, spec.d, 0,
            table_rows, spec.equalised_rows, d_row, spec.rotary, spec.pairing, spec.explicit_k_positions, spec.normed,
            spec.eps,
        )  # fmt: skip
        if spec.smooth_k:
            x = x - transformed_rows(
                k, cos, sin, k_positions, weight, factors, k_offset, own_weight, own_factor,
                torch.where(nth < pairs, (pairs + nth) * apart, k_known), k_s_step * spec.unit, spec.k_d_step, k_known,
                spec.d, 0, table_rows, spec.equalised_rows, d_row, spec.rotary, spec.pairing, spec.explicit_k_positions,
                spec.normed, spec.eps,
            )  # fmt: skip
        y = transformed_rows(
            q, cos, sin, q_positions, q_weight, q_factors, q_offset.unsqueeze(1),
            (eq % H_kv) * group * spec.d if spec.q_normed == 2 else 0, (eq // H_kv) * M if spec.q_normed == 2 else 0,
            q_rows, q_s_step * spec.unit, spec.q_d_step, q_known, spec.d, N - M, table_rows, spec.equalised_rows, d_row,
            spec.rotary, spec.pairing, spec.explicit_q_positions, spec.q_normed, spec.q_eps,
        )  # fmt: skip
        k_size, q_size = channel_sizes(x, y, spec.equalised_rows, d_row)
        none = hl.zeros([], dtype=torch.int32)
        both = torch.minimum(pairs + none, (q_sampled + none) * members).to(torch.float32)
        hl.store(channel_factors, [eq, hl.arange(d_row)], channel_factors_of(k_size, q_size, both))

    for head, v_part in hl.grid([v_heads, d_tiles]):
        v_keys, offset, v_count, v_every = sampled_head(
            sequences, k_blocks, head, H_kv, N, count, every, v_b_step, v_h_step, v_s_step, spec.samples, 1, spec.unit,
            spec.varlen, spec.wide, spec.is_cuda,
        )  # fmt: skip
        # [d_tile], [step, d_tile]
        cols = v_part * spec.d_tile + hl.arange(spec.d_tile)
        v_sum = hl.zeros([spec.step, spec.d_tile], dtype=torch.float32)
        v_min = hl.full([spec.step, spec.d_tile], float("inf"), dtype=torch.float32)
        v_max = hl.full([spec.step, spec.d_tile], float("-inf"), dtype=torch.float32)
        for v_tile in hl.grid(spec.samples // spec.step):
            i = v_tile * spec.step + hl.arange(spec.step)
            inside = (i < v_count).unsqueeze(1)
            rows = torch.where(i < v_count, i * v_every, v_keys)
            x = load_rows(v, offset, rows, cols, v_s_step * spec.unit, spec.v_d_step, v_keys, spec.d_v)
            v_sum = v_sum + x
            v_min = minimum(v_min, torch.where(inside, x, float("inf")), spec.is_cuda)
            v_max = maximum(v_max, torch.where(inside, x, float("-inf")), spec.is_cuda)
        if spec.center_v:
            mean = significant_mean(
                v_sum.sum(0),
                torch.amin(v_min, 0),
                torch.amax(v_max, 0),
                v_count,
                spec.threshold,
                spec.varlen,
                spec.is_cuda,
            )
        else:
            mean = hl.zeros([spec.d_tile], dtype=torch.float32)
        if d_v_pad < d_row:
            hl.store(v_mean, [head, cols], mean, extra_mask=cols < d_v_pad)
        else:
            hl.store(v_mean, [head, cols], mean)
        amax = torch.maximum(torch.amax(v_max, 0) - mean, mean - torch.amin(v_min, 0))
        hl.store(v_amax, [head, cols], amax * spec.headroom)


@functools.cache
def kernel(is_cuda: bool, whole_rows: bool) -> Runner:
    """The kernel for the device."""
    if not is_cuda:
        return interpreted(sample)
    stages = 3 if whole_rows else 1
    config = Config(num_warps=8, indexing="pointer", range_num_stages=[0, stages, 0, 0, stages])
    return compiled(sample, config)


def launch(
    source: StridedQKV, norms: Norms, rope: RopeTables, recipe: Recipe, sequences: Sequences | None = None
) -> Sampled:
    """Return what samples say of Q, K and V; without a kernel if nothing of them must be known.

    Args:
        source: Q, K and V.
        norms: and `rope`: what is done to Q and K first.
        rope: as above.
        recipe: what is to be subtracted.
        sequences: where those of a packed batch lie, or None. Then K and V are [1, heads, tokens, head dim], and there
            are means of every sequence.
    """
    like = source.flat[0].new_empty(0, dtype=torch.float32)
    heads = (source.B if sequences is None else sequences.sequences.size(0)) * source.H_kv
    of_v = recipe.center_v or (recipe.bits[1] == 8 and not recipe.is_given)
    k_mean = like.new_empty((heads, source.D_row) if recipe.smooth_k else (1, 1))
    v_amax = like.new_empty(heads, source.D_row)
    v_mean = like.new_empty(heads, source.D_v_pad) if of_v else like.new_zeros(heads, source.D_v_pad)
    channel_factors = like.new_empty((heads, source.D_row) if recipe.equalise else (1, 1))
    unused = like.new_empty(1, 1)
    found = Sampled(v_amax, k_mean, v_mean, channel_factors)
    if not (recipe.smooth_k or recipe.equalise or of_v):
        return found
    count = min(source.N, SAMPLED_KEYS)
    whole_rows = rope.pairing != NO_ROPE or norms.k.normed != NO_NORM
    rows = equalised_rows(source.D_row, whole_rows)
    pairs, group = min(source.N // 2, rows), source.H // source.H_kv
    # Norms over all heads have weights of a head's own: there one head's rows are the sample.
    members, q_most = equalised_queries(1 if norms.q.normed == OVER_HEADS else group, rows)
    q_count = min(source.M, q_most)
    d_tile = source.D_row if whole_rows else min(source.D_row, CHANNELS)
    elements = ROW_STEP_ELEMENTS if whole_rows else STEP_ELEMENTS
    kernel(like.is_cuda, whole_rows).run(
        {
            **source.arguments("qkv"),
            "k_mean": k_mean,
            "v_mean": v_mean,
            "v_amax": v_amax,
            "channel_factors": channel_factors,
            "cos": rope.cos,
            "sin": rope.sin,
            "q_positions": rope.q_positions,
            "k_positions": rope.k_positions,
            "q_weight": norms.q.weight,
            "q_factors": norms.q.factors,
            "weight": norms.k.weight,
            "factors": norms.k.factors,
            "sequences": unused if sequences is None else sequences.sequences,
            "k_blocks": unused if sequences is None else sequences.k_blocks,
            "k_heads": heads if recipe.smooth_k else 0,
            "v_heads": heads if of_v else 0,
            "equalised_heads": heads if recipe.equalise else 0,
            "group": group,
            "members": members,
            "H_kv": source.H_kv,
            "M": source.M,
            "N": source.N,
            "count": count,
            "every": source.N // count,
            "equalised_pairs": pairs,
            "equalised_every": (source.N // count) * (count // max(2 * pairs, 1)),
            "q_count": q_count,
            "q_every": source.M // max(q_count, 1),
            "table_rows": rope.table_rows,
            "spec": SampleSpec(
                q_d_step=source.d_steps[0],
                k_d_step=source.d_steps[1],
                v_d_step=source.d_steps[2],
                unit=source.unit,
                d=source.D,
                d_v=source.D_v,
                d_tile=d_tile,
                step=min(SAMPLED_KEYS, elements // d_tile),
                samples=SAMPLED_KEYS,
                equalised_rows=rows,
                headroom=SAMPLED_HEADROOM.get(recipe.v_scales, 1.0),
                threshold=SIGNIFICANT_MEAN,
                smooth_k=recipe.smooth_k,
                center_v=recipe.center_v,
                rotary=rope.rotary,
                pairing=rope.pairing,
                explicit_q_positions=rope.explicit[0],
                explicit_k_positions=rope.explicit[1],
                q_normed=norms.q.normed,
                q_eps=norms.q.eps,
                normed=norms.k.normed,
                eps=norms.k.eps,
                varlen=sequences is not None,
                wide=source.wide,
                is_cuda=like.is_cuda,
            ),
        }
    )
    return found
