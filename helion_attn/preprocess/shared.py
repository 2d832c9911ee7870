"""What ranks that hold parts of one sequence tell each other of their keys before they quantise them.

One launch attends to the keys of all ranks, so K's smoothing constant must be one for all of them; a kernel has one
descale of V a head, so that must be one as well; and V's centre is made one, so that it comes back as that of a single
process does, by rows that sum to 1. Any constant is exact (`sample` says why), so it need not be V's or K's mean, but
it must be the same number on all ranks: each computes it from what all told, in the same order.

Where K and V are read once (`Recipe.reads_once`), a rank tells its share of the `SAMPLED_KEYS` keys, evenly spaced:
rows of K, rotated, and of V, in the dtype that they came in. Put together these are the sample that a single process
would have taken. It also tells the largest magnitude of its V, for one more read of V: a sample's headroom that is too
little, which a single process mends in `recentre`, could only be mended by all ranks together.

For other recipes a rank tells its `statistics`, and each channel's least and largest entry of V. K's and V's mean are
then those of all keys, and descales those of a single process.
"""

from __future__ import annotations

import torch

from helion_attn.configs import Packing
from helion_attn.kernels.lib.arguments import NO_ROPE_ARGUMENTS, RopeArguments
from helion_attn.kernels.lib.rope import rope_tables
from helion_attn.kernels.lib.strided import strided_qkv
from helion_attn.preprocess import pack, sample, statistics, transform_rows
from helion_attn.preprocess.lib.arguments import (
    DescribePartArguments,
    QuantizePartArguments,
    TransformArguments,
)
from helion_attn.preprocess.statistics import MAX_PARTS, Statistics
from helion_attn.types import Recipe

#: Channels of a told row are padded to multiples of so many: 16 bytes of 16-bit numbers.
CHANNELS = 8


def _columns(D: int, D_v: int) -> tuple[int, int, int]:
    """Where K, V and V's largest magnitude end in a told row."""
    of_k = -(-D // CHANNELS) * CHANNELS
    of_v = of_k + -(-D_v // CHANNELS) * CHANNELS
    return of_k, of_v, of_v + CHANNELS


def told_shape(a: DescribePartArguments) -> tuple[int, ...]:
    """The shape of what a rank tells; (0,) if nothing is shared."""
    (B, H_kv), D, D_v = a.k.shape[:2], a.k.size(3), a.v.size(3)
    if not shares(a.recipe):
        return (0,)
    if a.recipe.reads_once:
        return a.rows, B, H_kv, _columns(D, D_v)[2]
    D_row = strided_qkv(a.q, a.k, a.v, a.packing.D_pad, a.packing.D_v_pad).D_row
    return B * H_kv, 2 + 3 * D_row + a.packing.D_v_pad


def shares(recipe: Recipe) -> bool:
    """Whether anything must be known of all ranks' keys."""
    return recipe.smooth_k or recipe.center_v or recipe.samples_v or not recipe.reads_once


def _sampled(x: torch.Tensor, a: DescribePartArguments) -> torch.Tensor:
    """Those of x [N, ...] that are of the sample, a view unless they come from two runs."""
    rows = x[a.first :: a.every][: a.first_count]
    if a.second_count:
        rows = torch.cat([rows, x[a.second :: a.every][: a.second_count]])
    return rows


def v_largest(told: torch.Tensor, D: int, D_v: int) -> torch.Tensor:
    """V's largest magnitude of all ranks, [B, H_kv], of what they told, [ranks, rows, B, H_kv, columns]."""
    return told[:, 0, :, :, _columns(D, D_v)[1]].amax(0)


def describe(a: DescribePartArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank tells, of `told_shape`; and Q's amax [B * H, MAX_PARTS], if its descales need that."""
    heads = a.q.size(0) * a.q.size(1)
    q_amax = a.q.new_zeros((heads, MAX_PARTS), dtype=torch.float32)
    told = a.q.new_zeros(told_shape(a), dtype=a.q.dtype if a.recipe.reads_once else torch.float32)
    if not shares(a.recipe):
        return told, q_amax
    if a.recipe.reads_once:
        end_of_k, end_of_v, _ = _columns(a.k.size(3), a.v.size(3))
        # [rows, B, H_kv, D]
        k = _sampled(a.k.permute(2, 0, 1, 3), a)
        if a.rope.cos is not None and k.size(0):
            assert a.rope.k_positions is not None
            at = _sampled(a.rope.k_positions, a).contiguous()
            rope = RopeArguments(a.rope.cos, a.rope.sin, at, None, a.rope.interleaved)
            of_heads = k.permute(1, 2, 0, 3)
            rotated = of_heads.new_empty(of_heads.shape)
            transform_rows.launch(TransformArguments(of_heads, rope, None, False, False), rotated)
            k = rotated.permute(2, 0, 1, 3)
        told[: k.size(0), ..., : k.size(3)] = k
        told[: k.size(0), ..., end_of_k : end_of_k + a.v.size(3)] = _sampled(a.v.permute(2, 0, 1, 3), a)
        told[0, ..., end_of_v] = torch.linalg.vector_norm(a.v, torch.inf, (2, 3))
        return told, q_amax
    source = strided_qkv(a.q, a.k, a.v, a.packing.D_pad, a.packing.D_v_pad)
    rope_of_all = rope_tables(a.rope, source.D_row, a.q.new_empty(1, dtype=torch.float32))
    own = statistics.launch(source, rope_of_all, a.recipe)
    if own.q_parts:
        q_amax += own.q_amax[:, : own.q_parts].amax(1, keepdim=True)
    D_row = source.D_row
    told[:, 0] = source.N
    if own.k_parts:
        told[:, 1] = own.k_amax[:, : own.k_parts].amax(1)
    least, largest = torch.aminmax(a.v, dim=2)
    told[:, 2 : 2 + source.D_v] = least.flatten(0, 1)
    told[:, 2 + D_row : 2 + D_row + source.D_v] = largest.flatten(0, 1)
    if a.recipe.smooth_k:
        told[:, 2 + 2 * D_row : 2 + 3 * D_row] = own.k_mean
    told[:, 2 + 3 * D_row :] = own.v_mean
    return told, q_amax


def of_samples(
    told: torch.Tensor, largest: torch.Tensor, D: int, D_v: int, packing: Packing, recipe: Recipe
) -> Statistics:
    """What all ranks know of K and V that are read once; told [rows, B, H_kv, columns]."""
    end_of_k = _columns(D, D_v)[0]
    # [B, H_kv, rows, columns]
    rows = told.permute(1, 2, 0, 3)
    k, v = rows[..., :D], rows[..., end_of_k : end_of_k + D_v]
    source = strided_qkv(k, k, v, packing.D_pad, packing.D_v_pad)
    rope = rope_tables(NO_ROPE_ARGUMENTS, source.D_row, told.new_empty(1, dtype=torch.float32))
    found = sample.launch(source, rope, recipe)
    if not recipe.samples_v:
        return found
    # As `recentre` does it for a single process, of which this is the descale; a NaN is not within.
    largest = largest.flatten().float() + found.v_mean.abs().amax(1)
    room = found.v_amax.amax(1)
    known = torch.where(largest <= room, room, largest)
    return found._replace(v_amax=known.unsqueeze(1).repeat(1, source.D_row))


def of_statistics(told: torch.Tensor, q_amax: torch.Tensor, D_row: int, recipe: Recipe) -> Statistics:
    """What all ranks know of K and V that are read twice; told [ranks, B * H_kv, columns]."""
    D_v_pad = told.size(2) - 2 - 3 * D_row
    keys, k_amax, least, largest, k_means, v_means = told.split([1, 1, D_row, D_row, D_row, D_v_pad], 2)
    weights = keys / keys.sum(0)
    k_mean, v_mean = (weights * k_means).sum(0), (weights * v_means).sum(0)
    mean = torch.nn.functional.pad(v_mean, (0, D_row - D_v_pad))
    v_amax = torch.maximum(largest.amax(0) - mean, mean - least.amin(0))
    k_amax = k_amax.amax(0).repeat(1, MAX_PARTS)
    if recipe.q_scales == "tensor":
        q_amax = q_amax.amax().expand_as(q_amax).contiguous()
    if recipe.k_scales == "tensor":
        k_amax.fill_(k_amax.amax())
    if recipe.v_scales == "tensor":
        v_amax.fill_(v_amax.amax())
    return Statistics(q_amax, k_amax, v_amax, k_mean.contiguous(), v_mean.contiguous(), 1, 1)


def quantize(a: QuantizePartArguments) -> tuple[torch.Tensor, ...]:
    """A rank's Q, K and V in the packed format, with the constants of all ranks: as `preprocess.quantize_qkv`."""
    source = strided_qkv(a.q, a.k, a.v, a.packing.D_pad, a.packing.D_v_pad)
    rope = rope_tables(a.rope, source.D_row, a.q.new_empty(1, dtype=torch.float32))
    if not shares(a.recipe):
        stats = sample.launch(source, rope, a.recipe)
    elif a.recipe.reads_once:
        stats = of_samples(a.told, a.v_largest, source.D, source.D_v, a.packing, a.recipe)
    else:
        stats = of_statistics(a.told, a.q_amax, source.D_row, a.recipe)
    packing = a.packing
    packed = pack.launch(
        source, rope, stats, packing.bm, packing.bn, a.recipe, a.shift_lse, all_keys=a.all_keys
    )  # fmt: skip
    return packed.tensors()
