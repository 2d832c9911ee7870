"""Samples that ranks with parts of one sequence exchange before they quantise them.

One launch attends to the keys of all ranks, so K's smoothing constant must be one for all of them, and so must the
factors of channels, for all keys and all queries that meet them; a kernel has one descale of V a head, so that must be
one as well; and V's centre is made one, so that it comes back as that of a single process does, by rows that sum to 1.
Any constant is exact (`sample` says why), so it need not be V's or K's mean, but it must be the same number on all
ranks: each computes it from all samples, in the same order.

A rank tells its share of the `SAMPLED_KEYS` keys, evenly spaced: rows of K, rotated, and of V, in the dtype that they
came in. With `recipe.equalise` it tells its share of the sampled queries as well: rows of Q, rotated, a row for each
head of a KV head's group. Put together in the order of the sequence these are the sample that a single process would
have taken. Sizes of K's channels are of every other sampled key, which may not be those that a single process takes: a
factor may then be twice or half of its. In one more row a rank tells the largest magnitude of each channel of its V,
for one more read of V: a sample's headroom that is too little, which a single process mends in `recentre`, could only
be mended by all ranks together.

    rows of a rank: K and V of k_rows keys | Q of q_rows queries, of each head in turn | V's largest magnitudes

A row has K's or Q's channels, then V's. Every rank has room for the most that any tells; `in_order` leaves out the
zeros of those with fewer.
"""

from __future__ import annotations

import torch

from helion_attn.configs import Packing
from helion_attn.kernels.lib.norm import no_norms
from helion_attn.kernels.lib.rope import rope_tables
from helion_attn.kernels.lib.strided import strided_qkv
from helion_attn.numerics import equalised_queries, equalised_rows
from helion_attn.preprocess import pack, sample, transform_rows
from helion_attn.preprocess.sample import Sampled
from helion_attn.problem import (
    NO_ROPE_ARGUMENTS,
    DescribeRankArgs,
    QuantizeRankArgs,
    RopeArgs,
    SampledTokens,
    TransformRowsArgs,
)
from helion_attn.types import PackedTensors, Recipe

#: Channels of a sampled row are padded to multiples of so many: 16 bytes of 16-bit numbers.
CHANNELS = 8


def _columns(D: int, D_v: int) -> tuple[int, int]:
    """Where K and V end in a sampled row."""
    of_k = -(-D // CHANNELS) * CHANNELS
    return of_k, of_k + -(-D_v // CHANNELS) * CHANNELS


def kv_sample_shape(a: DescribeRankArgs) -> tuple[int, ...]:
    """The shape of what a rank tells; (0,) if nothing is shared."""
    if not shares(a.recipe):
        return (0,)
    B, H_kv = a.k.shape[:2]
    of_q = a.q_rows * sampled_queries(a.q.size(1) // H_kv, a.packing)[1] if a.recipe.equalise else 0
    return a.k_rows + of_q + 1, B, H_kv, _columns(a.k.size(3), a.v.size(3))[1]


def shares(recipe: Recipe) -> bool:
    """Whether anything must be known of all ranks' parts."""
    return recipe.smooth_k or recipe.equalise or recipe.center_v or recipe.bits[1] == 8


def sampled_queries(group: int, packing: Packing) -> tuple[int, int]:
    """How many queries are sampled, at most, and of how many heads of a group: those that `sample` takes."""
    rows = equalised_rows(packing.D_row, False)
    members, queries = equalised_queries(group, rows)
    return queries, members


def _sampled(x: torch.Tensor, of: SampledTokens) -> torch.Tensor:
    """Rows of x [S, ...] that are of the sample, a view unless they come from two runs."""
    rows = x[of.first :: of.every][: of.first_count]
    if of.second_count:
        rows = torch.cat([rows, x[of.second :: of.every][: of.second_count]])
    return rows


def _rotated(x: torch.Tensor, positions: torch.Tensor | None, of: SampledTokens, rope: RopeArgs) -> torch.Tensor:
    """Sampled rows of x [B, H, S, D], rotated where there is RoPE, [rows, B, H, D]."""
    rows = _sampled(x.permute(2, 0, 1, 3), of)
    if rope.cos is None or not rows.size(0):
        return rows
    assert positions is not None
    at = _sampled(positions, of).contiguous()
    rows_bhsd = rows.permute(1, 2, 0, 3)
    rotated = rows_bhsd.new_empty(rows_bhsd.shape)
    angles = RopeArgs(rope.cos, rope.sin, at, None, rope.interleaved)
    transform_rows.launch(TransformRowsArgs(rows_bhsd, angles, None, False, False), rotated)
    return rotated.permute(2, 0, 1, 3)


def in_order(kv_sample: torch.Tensor, samples: list[SampledTokens]) -> torch.Tensor:
    """The ranks' sampled tokens, [ranks, rows, ...], in the order of the sequence, [tokens, ...].

    Second runs are those of zigzag: they follow all first ones, the last rank's first.
    """
    first = [rows[: of.first_count] for rows, of in zip(kv_sample, samples, strict=True)]
    second = [rows[of.first_count : of.size] for rows, of in zip(kv_sample, samples, strict=True)]
    return torch.cat([*first, *reversed(second)])


def queries_in_order(q_sample: torch.Tensor, samples: list[SampledTokens]) -> torch.Tensor:
    """The ranks' sampled queries, [ranks, rows, ...], as `sample` reads rows of a group, [rows, ...].

    Every second row is a head's every second query; zeros follow an odd number of them.
    """
    queries = max(sample.size for sample in samples)
    # [queries, members, ...]
    rows = in_order(q_sample.unflatten(1, (queries, -1)), samples)
    padded = torch.cat([rows, torch.zeros_like(rows[: rows.size(0) % 2])])
    return padded.unflatten(0, (-1, 2)).transpose(1, 2).flatten(0, 2)


def v_largest(kv_sample: torch.Tensor, D: int, D_v: int) -> torch.Tensor:
    """The largest magnitudes of V of all ranks, [B, H_kv, D_v], of their samples, [ranks, rows, B, H_kv, columns]."""
    end_of_k = _columns(D, D_v)[0]
    return kv_sample[:, -1, ..., end_of_k : end_of_k + D_v].amax(0)


def describe(a: DescribeRankArgs) -> torch.Tensor:
    """Return the sample of a rank, of `kv_sample_shape`."""
    kv_sample = a.q.new_zeros(kv_sample_shape(a))
    if not shares(a.recipe):
        return kv_sample
    of_k = slice(a.k.size(3))
    end_of_k = _columns(a.k.size(3), a.v.size(3))[0]
    of_v = slice(end_of_k, end_of_k + a.v.size(3))
    keys = a.k_sample.size
    kv_sample[:keys, ..., of_k] = _rotated(a.k, a.rope.k_positions, a.k_sample, a.rope)
    kv_sample[:keys, ..., of_v] = _sampled(a.v.permute(2, 0, 1, 3), a.k_sample)
    if a.recipe.equalise:
        H_kv = a.k.size(1)
        group = a.q.size(1) // H_kv
        members = sampled_queries(group, a.packing)[1]
        # [queries, B, H_kv, members, D]
        q = _rotated(a.q, a.rope.q_positions, a.q_sample, a.rope).unflatten(2, (H_kv, group))[:, :, :, :members]
        of_q = kv_sample[a.k_rows : -1, ..., of_k].unflatten(0, (a.q_rows, members))
        of_q[: a.q_sample.size] = q.permute(0, 3, 1, 2, 4)
    kv_sample[-1, ..., of_v] = torch.linalg.vector_norm(a.v, torch.inf, 2)
    return kv_sample


def of_all_ranks(
    kv_sample: torch.Tensor,
    q_sample: torch.Tensor | None,
    v_largest: torch.Tensor,
    D: int,
    D_v: int,
    packing: Packing,
    recipe: Recipe,
) -> Sampled:
    """Merge the ranks' samples of Q, K and V into one; the tensors are fields of `QuantizeRankArgs`."""
    end_of_k = _columns(D, D_v)[0]
    # [B, H_kv, rows, columns]
    rows = kv_sample.permute(1, 2, 0, 3)
    k, v = rows[..., :D], rows[..., end_of_k : end_of_k + D_v]
    # Without `recipe.equalise` no Q is read.
    q = k if q_sample is None else q_sample.permute(1, 2, 0, 3)[..., :D]
    source = strided_qkv(q, k, v, packing)
    unused = kv_sample.new_empty(1, dtype=torch.float32)
    rope = rope_tables(NO_ROPE_ARGUMENTS, source.D_row, unused)
    found = sample.launch(source, no_norms(unused), rope, recipe)
    if recipe.bits[1] == 16:
        return found
    # As `recentre` does it for a single process, of which this is the descale; a NaN is not within. [B * H_kv, D_row]
    room = found.v_amax
    largest = torch.zeros_like(room)
    largest[:, :D_v] = v_largest.flatten(0, 1) + found.v_mean[:, :D_v].abs()
    if recipe.v_scales == "head":
        room, largest = (x.amax(1, keepdim=True).expand_as(x) for x in (room, largest))
    return found._replace(v_amax=torch.where(largest <= room, room, largest))


def quantize(a: QuantizeRankArgs) -> PackedTensors:
    """A rank's Q, K and V in the packed format, with the constants of all ranks: as `pipeline.quantize_qkv`."""
    source = strided_qkv(a.q, a.k, a.v, a.packing)
    unused = a.q.new_empty(1, dtype=torch.float32)
    norms, rope = no_norms(unused), rope_tables(a.rope, source.D_row, unused)
    if shares(a.recipe):
        known = of_all_ranks(a.kv_sample, a.q_sample, a.v_largest, source.D, source.D_v, a.packing, a.recipe)
    else:
        known = sample.launch(source, norms, rope, a.recipe)
    return pack.launch(
        source, norms, rope, known, a.packing.bm, a.packing.bn, a.recipe, a.needs_lse_shift, all_keys=a.all_keys
    )  # fmt: skip
