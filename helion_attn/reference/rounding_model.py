"""The rounding model: the kernels' arithmetic in plain PyTorch, with its rounding points and none of its tricks.

Every stage (the norm, RoPE, the mean, the rotation or reflection, the scale) ends in fp32. The norm, RoPE, the rotation
and the reflection are computed in fp64 before that, so that the order of the kernels' fp32 sums is all that they may
differ in.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import torch
from typing_extensions import Unpack

from helion_attn.configs import MASK_BLOCK, TAIL_COUNT_LOG2, packing
from helion_attn.names import with_scores
from helion_attn.numerics import (
    DESCALE_MIN,
    E4M3_BITS_OF_ONE,
    E4M3_STEPS,
    FORMAT_MAX,
    FP16_LARGE,
    LN2,
    LOG2E,
    MAX_CHANNEL_FACTOR_LOG2,
    MAX_HADAMARD_BLOCK,
    MAX_ROW_SUM,
    RECENTRED_KEYS,
    REFERENCE_REACH_LOG2,
    ROUNDS_TO_LARGEST,
    SAMPLED_HEADROOM,
    SAMPLED_KEYS,
    SIGNIFICANT_MEAN,
    SIGNIFICANT_RATIO_LOG2,
    equalised_queries,
    equalised_rows,
    first_block_max,
    takes_bits,
)
from helion_attn.options import ModelOptions, ScoreKwargs, ScoreOptions
from helion_attn.reference.hadamard import hadamard
from helion_attn.reference.norm import rms_norm
from helion_attn.reference.reflect import reflect
from helion_attn.reference.rope import apply_rope_qk
from helion_attn.reference.shapes import (
    block_means,
    counted_blocks,
    default_sm_scale,
    hide_keys,
    to_bhsd,
    visible_scores,
)
from helion_attn.types import BALANCED, BlockMask, Recipe, RMSNorm, Rope, as_recipe, check_quantises

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask


class RoundedQKV(NamedTuple):
    """What `helion_attn.quantize` computes, fp32 and unpacked.

    Attributes:
        q8: [B, H, M, D], values of `recipe.qk_dtype` held in fp32; rotated if `recipe.hadamard`,
            reflected if `recipe.reflect`.
        k8: [B, H_kv, N, D], likewise.
        v8: [B, H_kv, N, D_v], values of `recipe.pv_dtype` held in fp32.
        q_descale: [B, H, M], one a row whatever `recipe.q_scales`.
        k_descale: [B, H_kv, N], one a key whatever `recipe.k_scales`.
        v_descale: [B, H_kv, D_v], one a channel whatever `recipe.v_scales`.
        v_mean: [B, H_kv, D_v], what is to be added to the dequantised V; zeros if V was not centred.
        k_mean: [B, H_kv, D], not rotated; zeros if K was not smoothed.
        channel_factors: [B, H_kv, D], what Q was multiplied by, and K without its mean divided by; ones if the recipe
            does not equalise.
        lse_shift: [B, H, M], each query's product with `k_mean`, which no score holds; zeros if K was not smoothed.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        rounded = ha.reference.quantize(q, k, v)
        assert isinstance(rounded, ha.reference.RoundedQKV)
        k2 = rounded.k8 * rounded.k_descale[..., None]  # reflected, without its mean
    """

    q8: torch.Tensor
    k8: torch.Tensor
    v8: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    v_mean: torch.Tensor
    k_mean: torch.Tensor
    channel_factors: torch.Tensor
    lse_shift: torch.Tensor


def to_descale(stat: torch.Tensor, largest: float) -> torch.Tensor:
    """The multiplier that dequantises, when `stat` becomes `largest`; NaN of infinity."""
    return (stat * (1.0 / largest) + (stat - stat)).clamp_min(DESCALE_MIN)


def _cast(x: torch.Tensor, descale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 x / descale rounded to dtype, to nearest, ties to even; held in fp32, in which int8 too keeps a NaN."""
    scaled = x * (1.0 / descale)
    return scaled.round() if dtype == torch.int8 else scaled.to(dtype).float()


def _to_16_bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 x as the rotation reads it, in fp32: rounded to bf16; of fp16 and fp32 inputs, the sum of two bf16 terms."""
    hi = x.bfloat16().float()
    if dtype == torch.bfloat16:
        return hi
    return hi + (x - hi).bfloat16().float()


def _row_descales(
    x: torch.Tensor,  # [B, H, S, D]
    scales: str,
    block: int,
    largest: float,
) -> torch.Tensor:
    """The descale of every row of Q or K, [B, H, S]."""
    B, H, S, _ = x.shape
    if scales == "none":
        return x.new_ones(B, H, S)
    if scales == "token":
        stat = x.abs().amax(3)
    else:
        blocks = x.split(block, 2)
        stat = torch.cat([b.abs().amax((2, 3)).unsqueeze(2).expand(B, H, b.size(2)) for b in blocks], 2)
    return to_descale(stat, largest)


def _sample(x: torch.Tensor, rows: int = SAMPLED_KEYS) -> torch.Tensor:
    """The rows of x [B, H, S, D] that are known before all are read: at most `rows`, evenly spaced."""
    count = min(x.size(2), rows)
    return x[:, :, torch.arange(count, device=x.device) * (x.size(2) // count)]


def _sampled_mean(x: torch.Tensor, subtract: bool) -> torch.Tensor:
    """The means of the channels of x [B, H, S, D] that stand out of the noise of a sample, [B, H, D]; 0 of the others.

    Zeros if they are not to be subtracted.
    """
    sample = _sample(x)
    mean = sample.mean(2) if subtract else torch.zeros_like(x[:, :, 0])
    least = (sample.amax(2) - sample.amin(2)) * (SIGNIFICANT_MEAN / math.sqrt(sample.size(2)))
    return torch.where(mean.abs() <= least, 0.0, mean)


def _channel_factors(q: torch.Tensor, k: torch.Tensor, smooth_k: bool, rows: int) -> torch.Tensor:
    """The powers of two that give channels of Q [B, H, M, D] and K [B, H_kv, N, D] like sizes, [B, H_kv, D].

    Sizes are fourth roots of sums of fourth powers, of every second row alone, the smaller: of rows of Q, in turn from
    the first heads of a group, and, where its mean is subtracted, of differences of K's.
    """
    H_kv, N = k.shape[1:3]
    group = q.size(1) // H_kv
    members, most = equalised_queries(group, rows)
    # [B, H_kv, members, queries, D]
    queries = _sample(q, most).unflatten(1, (H_kv, group))[:, :, :members]
    pairs = min(N // 2, rows)
    # [B, H_kv, 2, pairs, D]
    count = min(N, SAMPLED_KEYS)
    every = N // count * (count // max(2 * pairs, 1))
    keys = k[:, :, torch.arange(2 * pairs, device=k.device) * every].unflatten(2, (2, pairs))
    differences = keys[:, :, 0] - keys[:, :, 1] if smooth_k else keys[:, :, 0]
    # [B, H_kv, D]
    fourth = (x.square().square() for x in (differences.unsqueeze(2), queries))
    finite = (torch.where(x < math.inf, x, 0.0) for x in fourth)
    k_size, q_size = (torch.minimum(x[..., ::2, :].sum((2, 3)), x[..., 1::2, :].sum((2, 3))) for x in finite)
    known = (k_size > 0) & (q_size > 0) & k_size.isfinite() & q_size.isfinite()
    # As the bits of floats have it: linear between powers of two.
    distance = (k_size.view(torch.int32) - q_size.view(torch.int32)).float() * 2.0**-25
    ratio = torch.where(known, distance, 0.0)
    mean = ratio.sum(2, keepdim=True) / known.sum(2, keepdim=True).clamp_min(1)
    apart = ratio - mean
    significant = known & (apart.abs() * min(pairs, members * queries.size(3)) >= SIGNIFICANT_RATIO_LOG2)
    exponent = (apart / 2).round().clamp(-MAX_CHANNEL_FACTOR_LOG2, MAX_CHANNEL_FACTOR_LOG2)
    return torch.where(significant, exponent, 0.0).exp2()


def _channel_descales(x: torch.Tensor, scales: str, dtype: torch.dtype) -> torch.Tensor:
    """The descale of every channel of V, [B, H, D]; x [B, H, S, D] has been centred.

    With room above the sample's amax, or, where that is too little, of V's amax.
    """
    # [B, H, D]
    sampled, true = _sample(x).abs().amax(2), x.abs().amax(2)
    if scales == "none":
        return torch.ones_like(true)
    if scales == "head":
        sampled, true = (stat.amax(2, keepdim=True).expand_as(stat) for stat in (sampled, true))
    room = to_descale(sampled * SAMPLED_HEADROOM[scales], FORMAT_MAX[dtype])
    fits = true <= room * (FORMAT_MAX[dtype] * ROUNDS_TO_LARGEST)
    return torch.where(fits, room, to_descale(true, FORMAT_MAX[dtype]))


def below(top: torch.Tensor, p_offset: int) -> torch.Tensor:
    """A maximum's reference: `p_offset` below it, so that the largest p is 2**p_offset.

    Or the true one, where fp32 would round to less: p must not pass the largest number of its dtype.
    """
    m = top - p_offset
    return torch.where(top - m > p_offset, top, m)


def e4m3_of_line(y: torch.Tensor) -> torch.Tensor:
    """The e4m3 numbers, in fp32, whose bits are y: rounded to fp16, then to an integer, to even of two; 0 below."""
    bits = y.clamp_min(0.0).half().float().round()
    return torch.where(y == y, bits, 127.0).to(torch.uint8).view(torch.float8_e4m3fn).float()


class Transformed(NamedTuple):
    """Q, K and V before they are scaled and cast, fp32.

    Attributes:
        q: [B, H, M, D], rotated or reflected.
        k: [B, H_kv, N, D], rotated or reflected, without `k_mean`.
        v: [B, H_kv, N, D_v], without `v_mean`.
        k_mean: as in `RoundedQKV`, and `channel_factors`, `lse_shift`.
        v_mean: [B, H_kv, D_v], what was subtracted.
        channel_factors: as in `RoundedQKV`.
        lse_shift: as in `RoundedQKV`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_mean: torch.Tensor
    v_mean: torch.Tensor
    channel_factors: torch.Tensor
    lse_shift: torch.Tensor


def transform(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    recipe: Recipe,
    rope: Rope | None,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
) -> Transformed:
    """All of `quantize` that comes before descales."""
    recipe = recipe.resolved
    tile = packing(q.size(3), v.size(3), recipe.bits)
    # [B, H, M, D] and [B, H_kv, N, D], fp32
    q_rope, k_rope = (
        x.float() if norm is None else rms_norm(x, norm).float() for x, norm in ((q, q_norm), (k, k_norm))
    )
    if rope is not None:
        q_rope, k_rope = (x.float() for x in apply_rope_qk(q_rope, k_rope, rope))
    k_mean = _sampled_mean(k_rope, recipe.smooth_k)
    group, D_row = q.size(1) // k.size(1), tile.D_row
    factors = torch.ones_like(k_mean)
    if recipe.equalise:
        over_heads = q_norm is not None and q_norm.weight.size(0) > q.size(3)
        # Norms over all heads have weights of a head's own: there one head's rows are the sample.
        sampled = q_rope[:, ::group] if over_heads else q_rope
        rows = equalised_rows(D_row, rope is not None or k_norm is not None)
        factors = _channel_factors(sampled, k_rope, recipe.smooth_k, rows)
    q_rotated = q_rope * factors.repeat_interleave(group, 1).unsqueeze(2)
    k_rotated = (k_rope - k_mean.unsqueeze(2)) / factors.unsqueeze(2)
    if recipe.hadamard:
        q_rotated = hadamard(_to_16_bits(q_rotated, q.dtype), recipe.hadamard_seed).float()
        # Rows of bf16 that are one row of the rotation's matrix are rotated before the mean is subtracted.
        one_row = D_row <= MAX_HADAMARD_BLOCK
        bf16_to_8_bits = k.dtype == torch.bfloat16 and recipe.bits[0] == 8
        exact = recipe.smooth_k and bf16_to_8_bits and rope is None and k_norm is None and one_row
        if not exact:
            k_rotated = _to_16_bits(k_rotated, k.dtype)
        k_rotated = hadamard(k_rotated, recipe.hadamard_seed).float()
    if recipe.reflect:
        q_rotated, k_rotated = reflect(q_rotated).float(), reflect(k_rotated).float()
    v_mean = _sampled_mean(v.float(), recipe.center_v)
    lse_shift = q_rope.new_zeros(q_rope.shape[:3])
    if recipe.smooth_k:
        lse_shift = (q_rope @ k_mean.repeat_interleave(group, 1).unsqueeze(3)).squeeze(3)
    return Transformed(q_rotated, k_rotated, v.float() - v_mean.unsqueeze(2), k_mean, v_mean, factors, lse_shift)


def cast(
    t: Transformed,
    q_descale: torch.Tensor,  # [B, H, M]
    k_descale: torch.Tensor,  # [B, H_kv, N]
    v_descale: torch.Tensor,  # [B, H_kv, D_v]
    recipe: Recipe,
) -> RoundedQKV:
    """All of `quantize` that comes after descales."""
    v8, v_mean = _cast(t.v, v_descale.unsqueeze(2), recipe.pv_dtype), t.v_mean
    if recipe.resolved.center_v and recipe.bits[1] == 8 and t.v.size(2) >= RECENTRED_KEYS:
        v_mean = v_mean + (t.v - v8 * v_descale.unsqueeze(2)).mean(2)
    return RoundedQKV(
        q8=_cast(t.q, q_descale.unsqueeze(3), recipe.qk_dtype),
        k8=_cast(t.k, k_descale.unsqueeze(3), recipe.qk_dtype),
        v8=v8,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        v_mean=v_mean,
        k_mean=t.k_mean,
        channel_factors=t.channel_factors,
        lse_shift=t.lse_shift,
    )


def quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    recipe: Recipe | str = BALANCED,
    rope: Rope | None = None,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
) -> RoundedQKV:
    """What `helion_attn.quantize` computes, without packing.

    The norms, RoPE, then of K and V the means, then of Q and K the factors of channels and the rotation or the
    reflection, then scale and cast. The
    rotation's input is rounded to bf16, or, if q and k are fp16 or fp32, to the sum of two bf16 terms. With
    `recipe.smooth_k`, keys in bf16 that become 8-bit, without norm and RoPE, of head dims up to 128 (V's too), are
    rotated as they came, and their mean's rotation is subtracted after: of them nothing is rounded.

    A descale is `stat / largest number of the format` (of Q and K, `Recipe.qk_largest`), and at least 2**-126. For a
    token or a block (of the packed format), the stat is the largest magnitude of what is cast. For a head of V, or a
    channel, it is `SAMPLED_HEADROOM` times the largest of a sample, or, if V has larger ones, V's largest. A NaN in any
    of these makes the descale NaN.

    With `recipe.center_v`, 8 bits and `RECENTRED_KEYS` keys or more, `v_mean` is the mean that was subtracted and that
    of what rounding took, so that `v8 * v_descale + v_mean` has V's mean.

    The means are those of a sample of at most `SAMPLED_KEYS` keys, where they are significant (`SIGNIFICANT_MEAN`).

    Args:
        q: [B, H, M, D], bf16, fp16 or fp32, any device.
        k: [B, H_kv, N, D].
        v: [B, H_kv, N, D_v].
        recipe: as in `helion_attn.quantize`.
        rope: applied to q and k first.
        q_norm: applied to q before that.
        k_norm: applied to k before that.

    Raises:
        ValueError: the recipe is of tensors that `helion_attn.pack` was given; the table of `rope` is too small, or it
            has no `q_positions` and M is more than N.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        rounded = ha.reference.quantize(q, k, v, recipe="accurate")
        values = rounded.v8 * rounded.v_descale[:, :, None] + rounded.v_mean[:, :, None]
    """
    recipe = as_recipe(recipe)
    check_quantises(recipe)
    tile, largest = packing(q.size(3), v.size(3), recipe.bits), recipe.qk_largest(q.size(3), v.size(3))
    t = transform(q, k, v, recipe, rope, q_norm, k_norm)
    q_descale = _row_descales(t.q, recipe.q_scales, tile.bm, largest)
    k_descale = _row_descales(t.k, recipe.k_scales, tile.bn, largest)
    return cast(t, q_descale, k_descale, _channel_descales(t.v, recipe.v_scales, recipe.pv_dtype), recipe)


@overload
def fp8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[ModelOptions],
) -> torch.Tensor: ...
@overload
def fp8_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True], **options: Unpack[ModelOptions]
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def fp8_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool, **options: Unpack[ModelOptions]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@with_scores
def fp8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bhsd",
    recipe: Recipe | str = BALANCED,
    rope: Rope | None = None,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
    block_mask: BlockMask | FlexMask | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    block_n: int | None = None,
    **options: Unpack[ScoreKwargs],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """FP8 attention as the kernel rounds it, on any device: the error that this design has, before any bug.

    The rounding points are those of `quantize`, P * 2**p_offset_log2 in `recipe.pv_dtype`, and the output's cast. An
    8-bit P that is summed in two levels is relative to its key block's own maximum, or to 2**40 below the running one,
    any other to the running one. Up to head dim 128 the bits of a P in e4m3 are a line of the score, rounded to fp16
    and then to an integer, and row sums are of that P; elsewhere P is cast, and sums are of P as it was. Where
    `numerics.first_block_max` has it, P is cast against the maximum of the first block that its row sees, if its sum
    does not pass `MAX_ROW_SUM`. (In the kernel no sum of a program's rows may, and each run of split keys has its own
    first block: P differs by a rounding.) Sums are fp32, and those of int8 products exact. On a GPU the kernel has an
    FMA for `score * scale - maximum`, unless the scale is large: from scores of 1e5 on, where fp32 moves in steps of
    2**-7, P differs by that.
    `recipe.promote_every` says what P is relative to; where the kernel sums P V changes nothing here.

    Args:
        q: [B, H, M, D], bf16, fp16 or fp32; with layout="bshd", H and M swapped; k and v likewise.
        k: [B, H_kv, N, D].
        v: [B, H_kv, N, D_v].
        causal: row i sees keys j <= i + N - M.
        sm_scale: multiplies q k^T; 1 / sqrt(D) by default.
        layout: "bhsd" or "bshd".
        recipe: as in `helion_attn.attention`.
        rope: applied to q and k first.
        q_norm: applied to q before that.
        k_norm: applied to k before that.
        window: (left, right): row i sees keys i + N - M - left .. i + N - M + right; -1 is unlimited, and with causal
            right is 0.
        softcap: scaled scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118).
        sinks: [H], one more logit of the softmax for each head, with no value (gpt-oss). A row that sees no key gives
            0 still, and lse its sink.
        block_mask: which scores there are besides, as `helion_attn.attention` has it.
        return_lse: also return the fp32 lse [B, H, M], natural log.
        out_dtype: the output's; q's by default.
        block_n: keys of a block; `bn` of the kernel's config by default.

    Raises:
        ValueError: layout is another; or as `quantize`.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        model = ha.reference.fp8_attention(q, k, v, recipe="fast")
        exact = ha.reference.attention(q, k, v)
        error = (model - exact).norm() / exact.norm()  # what FAST cannot do without
    """
    chosen = as_recipe(recipe)
    q, k, v = (to_bhsd(x, layout) for x in (q, k, v))
    rounded = quantize(q, k, v, chosen, rope, q_norm, k_norm)
    out, lse = attend(rounded, chosen, ScoreOptions(**options), block_mask, block_n)
    out = to_bhsd(out.to(out_dtype or q.dtype), layout)
    return (out, lse) if return_lse else out


def _with_means(r: RoundedQKV, recipe: Recipe) -> RoundedQKV:
    """K and V with the means of their key blocks behind them, as many as blocks of means have places."""
    k_means, v_means = block_means(r.k8 * r.k_descale.unsqueeze(3)), block_means(r.v8)
    k_means, v_means = (torch.nn.functional.pad(x, (0, 0, 0, -x.size(2) % MASK_BLOCK)) for x in (k_means, v_means))
    largest = recipe.qk_largest(r.k8.size(3), r.v8.size(3))
    k_descale = _row_descales(k_means, recipe.resolved.k_scales, MASK_BLOCK, largest)
    return r._replace(
        k8=torch.cat([r.k8, _cast(k_means, k_descale.unsqueeze(3), recipe.qk_dtype)], 2),
        v8=torch.cat([r.v8, v_means.to(recipe.pv_dtype).float()], 2),
        k_descale=torch.cat([r.k_descale, k_descale], 2),
    )


def attend(
    r: RoundedQKV,
    recipe: Recipe,
    scores: ScoreOptions,
    block_mask: BlockMask | FlexMask | torch.Tensor | None = None,
    block_n: int | None = None,
    counted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of `fp8_attention`, fp32, BHSD, from what is quantised.

    Beside a mask by scores, `counted` says which key blocks count by their means, bool [B, H, M, N_blocks].
    """
    B, H, M, D = r.q8.shape
    H_kv, N, D_v = r.v8.shape[1:]
    scale, softcap, sinks = default_sm_scale(scores.sm_scale, D), scores.softcap, scores.sinks
    bn = packing(D, D_v, recipe.bits).bn if block_n is None else block_n
    blocks = [(j, min(j + bn, N)) for j in range(0, N, bn)]
    counted = counted_blocks(block_mask, scores.causal, scores.window) if counted is None else counted
    if counted is not None:
        # [B or 1, H or 1, M, tail_blocks * bn]
        counted = torch.nn.functional.pad(counted, (0, -counted.size(3) % MASK_BLOCK))
        blocks += [(N + j, N + j + MASK_BLOCK) for j in range(0, counted.size(3), MASK_BLOCK)]
        r = _with_means(r, recipe)
    k8, v8, k_descale, v_descale, v_mean = (
        x.repeat_interleave(H // H_kv, 1) for x in (r.k8, r.v8, r.k_descale, r.v_descale, r.v_mean)
    )
    # [B, H, M, 1]
    q_scale_log2 = (r.q_descale * (scale * LOG2E)).unsqueeze(3)

    own = recipe.bits[1] == 8 and recipe.promote_every != 0
    bits = own and takes_bits(recipe.pv_dtype, max(D, D_v))
    half = bits and recipe.half_scores and scores.is_linear
    visible = visible_scores(block_mask, B, H)

    def walk(keeps: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`(m_i, l_i, acc)` of all keys; with `keeps` against the maximum of a row's first block."""
        m_i = m_run = r.q8.new_full((B, H, M, 1), float("-inf"))
        l_i = r.q8.new_zeros((B, H, M, 1))
        acc = r.q8.new_zeros((B, H, M, D_v))
        for j, end in blocks:
            # [B, H, M, bn]
            s = r.q8 @ k8[:, :, j:end].mT
            s_scale_log2 = q_scale_log2 * k_descale[:, :, None, j:end]
            if half:
                s = s.half().float()
                s_scale_log2 = (s_scale_log2 * E4M3_STEPS).clamp_max(FP16_LARGE).half().float() / E4M3_STEPS
            s = s * s_scale_log2
            if softcap is not None:
                # tanh is not linear: it must see what smooth-K took from a row's scores.
                s = s * LN2 + scale * r.lse_shift.unsqueeze(3)
                s = softcap * LOG2E * torch.tanh(s / softcap)
            count_log2 = 0.0
            if counted is not None and j >= N:
                count_log2 = TAIL_COUNT_LOG2
                s = s.masked_fill(~counted[..., j - N : end - N], float("-inf"))
            else:
                s = hide_keys(s, 0, j, M, N, scores.causal, scores.window)
                if visible is not None:
                    s = s.masked_fill(~visible[..., j:end], float("-inf"))
            # A block of means has P as if its scores were larger: its reference is.
            top = below(s.amax(3, keepdim=True), recipe.p_offset) + count_log2
            m_run = torch.maximum(m_run, top)
            if own:
                m_new = torch.maximum(top, m_run - REFERENCE_REACH_LOG2)
            else:
                m_new = torch.where(m_i == float("-inf"), top, m_i) if keeps else m_run
            m_ref = torch.where(m_new == float("-inf"), 0.0, m_new) - count_log2
            if half:
                # A larger one is that of scores below their row's largest, which is small.
                offset = E4M3_BITS_OF_ONE - m_ref * E4M3_STEPS
                moved = torch.where(offset.abs() <= 2.0**14, (offset - offset.half().float()) / E4M3_STEPS, 0.0)
                m_new, m_ref = m_new + moved, m_ref + moved
            if bits:
                p = p8 = e4m3_of_line((s - m_ref) * E4M3_STEPS + E4M3_BITS_OF_ONE)
            else:
                p = torch.exp2(s - m_ref)
                p8 = p.to(recipe.pv_dtype).float()
            alpha = torch.exp2(m_i - (m_ref + count_log2))
            l_i = l_i * alpha + p.sum(3, keepdim=True)
            acc = acc * alpha + p8 @ v8[:, :, j:end]
            m_i = m_new
        return m_i, l_i, acc

    keeps = first_block_max(recipe.qk_dtype, recipe.pv_dtype, max(D, D_v)) and visible is None
    m_i, l_i, acc = walk(keeps)
    if keeps:
        again = l_i > MAX_ROW_SUM
        m_i, l_i, acc = (torch.where(again, x, kept) for x, kept in zip(walk(False), (m_i, l_i, acc), strict=True))
    # [B, H, M, 1]. The lse of the keys alone, then with the sink; keys hold `key_share` of the probability.
    lse = (m_i + torch.log2(l_i)) * LN2
    if scores.is_linear:
        lse = lse + scale * r.lse_shift.unsqueeze(3)
    key_share = torch.ones_like(lse)
    if sinks is not None:
        key_lse = lse
        lse = torch.logaddexp(lse, sinks.float().view(1, H, 1, 1))
        key_share = torch.exp(key_lse - lse)
    out = (acc / l_i * v_descale.unsqueeze(2) + v_mean.unsqueeze(2)) * key_share
    return torch.where(l_i == 0, 0.0, out), lse.squeeze(3)
