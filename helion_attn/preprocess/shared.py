"""What ranks that hold parts of one sequence tell each other of their keys before they quantise them.

One launch attends to the keys of all ranks, so K's smoothing constant must be one for all of them; a kernel has one
descale of V a head, so that must be one as well; and V's centre is made one, so that it comes back as that of a single
process does, by rows that sum to 1. Any constant is exact (`sample` says why), so it need not be V's or K's mean, but
it must be the same number on all ranks: each computes it from what all told, in the same order.

A rank tells its share of the `SAMPLED_KEYS` keys, evenly spaced: rows of K, rotated, and of V, in the dtype that they
came in. Put together these are the sample that a single process would have taken. In one more row it tells the largest
magnitude of each channel of its V, for one more read of V: a sample's headroom that is too little, which a single
process mends in `recentre`, could only be mended by all ranks together.
"""

from __future__ import annotations

import torch

from helion_attn.configs import Packing
from helion_attn.kernels.lib.norm import no_norms
from helion_attn.kernels.lib.rope import rope_tables
from helion_attn.kernels.lib.strided import strided_qkv
from helion_attn.preprocess import pack, sample, transform_rows
from helion_attn.preprocess.sample import Sampled
from helion_attn.problem import (
    NO_ROPE_ARGUMENTS,
    DescribePartProblem,
    QuantizePartProblem,
    RopeArguments,
    TransformProblem,
)
from helion_attn.types import Recipe

#: Channels of a told row are padded to multiples of so many: 16 bytes of 16-bit numbers.
CHANNELS = 8


def _columns(D: int, D_v: int) -> tuple[int, int]:
    """Where K and V end in a told row."""
    of_k = -(-D // CHANNELS) * CHANNELS
    return of_k, of_k + -(-D_v // CHANNELS) * CHANNELS


def told_shape(a: DescribePartProblem) -> tuple[int, ...]:
    """The shape of what a rank tells; (0,) if nothing is shared."""
    if not shares(a.recipe):
        return (0,)
    return a.rows + 1, *a.k.shape[:2], _columns(a.k.size(3), a.v.size(3))[1]


def shares(recipe: Recipe) -> bool:
    """Whether anything must be known of all ranks' keys."""
    return recipe.smooth_k or recipe.center_v or recipe.bits[1] == 8


def _sampled(x: torch.Tensor, a: DescribePartProblem) -> torch.Tensor:
    """Those of x [N, ...] that are of the sample, a view unless they come from two runs."""
    rows = x[a.first :: a.every][: a.first_count]
    if a.second_count:
        rows = torch.cat([rows, x[a.second :: a.every][: a.second_count]])
    return rows


def v_largest(told: torch.Tensor, D: int, D_v: int) -> torch.Tensor:
    """The largest magnitudes of V of all ranks, [B, H_kv, D_v], of what they told, [ranks, rows + 1, B, H_kv, ..]."""
    end_of_k = _columns(D, D_v)[0]
    return told[:, -1, ..., end_of_k : end_of_k + D_v].amax(0)


def describe(a: DescribePartProblem) -> torch.Tensor:
    """What a rank tells, of `told_shape`."""
    told = a.q.new_zeros(told_shape(a))
    if not shares(a.recipe):
        return told
    of_k = slice(a.k.size(3))
    end_of_k = _columns(a.k.size(3), a.v.size(3))[0]
    of_v = slice(end_of_k, end_of_k + a.v.size(3))
    # [rows, B, H_kv, D]
    k = _sampled(a.k.permute(2, 0, 1, 3), a)
    if a.rope.cos is not None and k.size(0):
        assert a.rope.k_positions is not None
        at = _sampled(a.rope.k_positions, a).contiguous()
        rope = RopeArguments(a.rope.cos, a.rope.sin, at, None, a.rope.interleaved)
        of_heads = k.permute(1, 2, 0, 3)
        rotated = of_heads.new_empty(of_heads.shape)
        transform_rows.launch(TransformProblem(of_heads, rope, None, False, False), rotated)
        k = rotated.permute(2, 0, 1, 3)
    told[: k.size(0), ..., of_k] = k
    told[: k.size(0), ..., of_v] = _sampled(a.v.permute(2, 0, 1, 3), a)
    told[-1, ..., of_v] = torch.linalg.vector_norm(a.v, torch.inf, 2)
    return told


def of_all_ranks(
    told: torch.Tensor, v_largest: torch.Tensor, D: int, D_v: int, packing: Packing, recipe: Recipe
) -> Sampled:
    """What all ranks know of K and V; told [rows, B, H_kv, columns], v_largest [B, H_kv, D_v]."""
    end_of_k = _columns(D, D_v)[0]
    # [B, H_kv, rows, columns]
    rows = told.permute(1, 2, 0, 3)
    k, v = rows[..., :D], rows[..., end_of_k : end_of_k + D_v]
    source = strided_qkv(k, k, v, packing.D_pad, packing.D_v_pad)
    unused = told.new_empty(1, dtype=torch.float32)
    rope = rope_tables(NO_ROPE_ARGUMENTS, source.D_row, unused)
    found = sample.launch(source, no_norms(unused).k, rope, recipe)
    if recipe.bits[1] == 16:
        return found
    # As `recentre` does it for a single process, of which this is the descale; a NaN is not within. [B * H_kv, D_row]
    room = found.v_amax
    largest = torch.zeros_like(room)
    largest[:, :D_v] = v_largest.flatten(0, 1) + found.v_mean[:, :D_v].abs()
    if recipe.v_scales == "head":
        room, largest = (x.amax(1, keepdim=True).expand_as(x) for x in (room, largest))
    return found._replace(v_amax=torch.where(largest <= room, room, largest))


def quantize(a: QuantizePartProblem) -> tuple[torch.Tensor, ...]:
    """A rank's Q, K and V in the packed format, with the constants of all ranks: as `preprocess.quantize_qkv`."""
    source = strided_qkv(a.q, a.k, a.v, a.packing.D_pad, a.packing.D_v_pad)
    unused = a.q.new_empty(1, dtype=torch.float32)
    norms, rope = no_norms(unused), rope_tables(a.rope, source.D_row, unused)
    if shares(a.recipe):
        known = of_all_ranks(a.told, a.v_largest, source.D, source.D_v, a.packing, a.recipe)
    else:
        known = sample.launch(source, norms.k, rope, a.recipe)
    packed = pack.launch(
        source, norms, rope, known, a.packing.bm, a.packing.bn, a.recipe, a.shift_lse, all_keys=a.all_keys
    )  # fmt: skip
    return packed.tensors()
