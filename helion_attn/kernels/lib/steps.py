"""The steps of the attention kernels, inlined into them: scores, masks, the online softmax, P V, the epilogue.

`fp8_attn_fwd` says what they are for; the other attention kernels take them as well.
"""

from __future__ import annotations

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.block_max import finite, update_block_max
from helion_attn.kernels.lib.inline_asm import computed_once, dot_fp32, exp2, fma, fma_up, maximum, tanh
from helion_attn.kernels.lib.schraudolph import pack_half2
from helion_attn.kernels.lib.specs import AttentionSpec, PagedSpec
from helion_attn.numerics import DESCALE_MIN, E4M3_OVERFLOW, LN2, MAX_FUSED_SCORE_LOG2, MAX_ROW_SUM
from helion_attn.options import ScoreScales


def to_descale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The multiplier that dequantises: `amax / largest`, large enough to have a finite reciprocal.

    NaN of infinity: infinite scores would be finite behind a softcap.
    """
    return torch.clamp_min(amax * (1.0 / largest) + (amax - amax), DESCALE_MIN)


def interleave_keys(p8: torch.Tensor, bm: int, bn: int) -> torch.Tensor:
    """Give P's columns the order in which V's keys are stored: key (a, t, b) of each 16 moves to (t, a, b)."""
    return p8.reshape(bm, bn // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(bm, bn)


def scores(
    q_tile: torch.Tensor,  # [bm, D_pad]
    k_tile: torch.Tensor,  # [D_pad, bn]
    bm: int,
    bn: int,
    half: hl.constexpr,
    is_cuda: hl.constexpr,
) -> torch.Tensor:
    """`q_tile @ k_tile` as fp32 [bm, bn], or with `half` as fp16 `pack_half2`.

    Of int8 on the GPU it is `INT8_SCORE_BIAS` too large. The float 1.5 * 2**23 + n has n in its low bits, for
    |n| < 2**22, and int8 products stay below 127**2 * 256. So an int32 sum that starts at the bits of 1.5 * 2**23 is
    that float: the conversion costs no instruction of its own.
    """
    if q_tile.dtype == torch.int8:
        if is_cuda:
            bias = hl.full([bm, bn], 0x4B400000, dtype=torch.int32)
            return hl.dot(q_tile, k_tile, acc=bias).view(torch.float32)
        return q_tile.to(torch.float32) @ k_tile.to(torch.float32)
    if q_tile.dtype.itemsize == 2:
        return dot_fp32(q_tile, k_tile, is_cuda)
    if half:
        return pack_half2(dot_fp16_acc(q_tile, k_tile, is_cuda), bm, bn, is_cuda)
    return hl.dot(q_tile, k_tile)


def scores_of_pieces(q_pieces: list[torch.Tensor], k_pieces: list[torch.Tensor], is_cuda: hl.constexpr) -> torch.Tensor:
    """Scores of channels in pieces, [bm, d] and [d, bn] each, as fp32 [bm, bn].

    Sums of int8 products are converted one by one, exactly, for 127**2 * 1024 is below 2**24. Those of more than 260
    channels may pass 2**22, and cannot be read as floats as in `scores`.
    """
    pairs = list(zip(q_pieces, k_pieces, strict=True))
    if q_pieces[0].dtype == torch.int8 and not is_cuda:
        # PyTorch has no int8 product.
        products = [q.to(torch.float32) @ k.to(torch.float32) for q, k in pairs]
        return torch.stack(products).sum(0)
    s = hl.dot(*pairs[0])
    for q, k in pairs[1:]:
        s = hl.dot(q, k, acc=s)
    return s.to(torch.float32)


def dot_fp16_acc(a: torch.Tensor, b: torch.Tensor, is_cuda: hl.constexpr) -> torch.Tensor:
    """`a @ b` in fp16, of e4m3. Without a GPU its sums are fp32, rounded once."""
    if is_cuda:
        return hl.dot(a, b, out_dtype=torch.float16)
    return hl.dot(a, b).to(torch.float16)


def keys_first(v_block: torch.Tensor) -> torch.Tensor:
    """A packed block of V as [bn, D_v_pad]."""
    return v_block.transpose(0, 1) if v_block.dtype.itemsize == 1 else v_block


def scaled(s: torch.Tensor, qk_scale_log2: torch.Tensor, q_row_descales: hl.constexpr) -> torch.Tensor:
    """Scores [bm, bn] times a scale, a row's [bm] or the block's []."""
    if q_row_descales:
        return s * qk_scale_log2.unsqueeze(1)
    return s * qk_scale_log2


def softmax_input(
    s: torch.Tensor,  # [bm, bn]
    qk_scale: torch.Tensor,  # [bm] or []
    scales: ScoreScales,
    lse_shift_scaled: torch.Tensor,  # [bm]
    spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, and what they are still to be multiplied by: as they are, or with a softcap their tanh."""
    if spec.scores.is_linear:
        return s, qk_scale
    if spec.s_bias:
        s = s - spec.s_bias
    s = scaled(s, qk_scale, spec.q_row_descales)
    if spec.scores.has_lse_shift:
        s = s + lse_shift_scaled.unsqueeze(1)
    return tanh(s, spec.is_cuda), hl.full([], scales.tanh_scale, dtype=torch.float32)


def scaled_largest(
    largest: torch.Tensor,  # [bm]
    qk_scale_log2: torch.Tensor,  # [bm] or []
    spec: AttentionSpec,
) -> torch.Tensor:
    """The reference that a row's largest score gives, [bm]: rounded up, so that P never passes 2**p_offset_log2.

    The scale is positive, so the maximum commutes with it: a multiply per row, and exp2's argument is an FMA.
    """
    return fma_up(largest, qk_scale_log2, hl.full([], -spec.p_offset_log2, dtype=torch.float32), spec.is_cuda)


def online_softmax_step(
    s: torch.Tensor,  # [bm, bn]
    bias: torch.Tensor | float,  # []
    qk_scale_log2: torch.Tensor,  # [bm] or []
    m_run: torch.Tensor,  # [bm]
    m_i: torch.Tensor,  # [bm]
    l_i: torch.Tensor,  # [bm, l_lanes]
    bm: int,
    bn: int,
    l_lanes: int,
    pv_dtype: torch.dtype,
    spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores still to be scaled, `bias` too large, -inf where masked, to `(p8, alpha, m_run, m_i, l_i)`.

    P is relative to m_i: the running maximum, with `block_max` the block's own beside m_run, and with
    `first_block_max` what it is.
    """
    biased = spec.softmax_bias != 0.0
    if spec.first_block_max:
        m_new = m_i
        m_ref = finite(m_i, spec.rows_may_be_empty)
    else:
        largest = torch.amax(s, 1)
        if biased:
            largest = largest - bias
        top = scaled_largest(largest, qk_scale_log2, spec)
        if spec.block_max:
            m_run, m_new = update_block_max(top, m_run, spec.is_cuda)
            m_ref = m_new
        else:
            m_new = maximum(m_i, top, spec.is_cuda)
            m_ref = finite(m_new, spec.rows_may_be_empty)
    reference = m_ref
    if biased:
        reference = reference + bias * qk_scale_log2
    p = torch.exp2(scaled(s, qk_scale_log2, spec.softmax_row_descales) - reference.unsqueeze(1))
    if spec.marks_p:
        p = computed_once(p, spec.is_cuda)
    alpha = torch.exp2(m_i - m_ref)
    # Unrounded p.
    block_sum = p.reshape(bm, bn // l_lanes, l_lanes).sum(1)
    if spec.first_block_max:
        l_i = l_i + block_sum
    else:
        l_i = l_i * alpha.unsqueeze(1) + block_sum
    p8 = p.to(pv_dtype)
    if pv_dtype.itemsize == 1:
        p8 = interleave_keys(p8, bm, bn)
    return p8, alpha.unsqueeze(1), m_run, m_new, l_i


def accumulate(
    acc: torch.Tensor,  # [bm, D_v_pad]
    alpha: torch.Tensor,  # [bm, 1]
    p8: torch.Tensor,  # [bm, bn]
    v_tile: torch.Tensor,  # [bn, D_v_pad]
    spec: AttentionSpec | PagedSpec,
) -> torch.Tensor:
    """`acc * alpha + p8 @ v_tile`: with the sum in fp32, or inside the tensor core.

    With `first_block_max` alpha is 1, or acc 0 or NaN.
    """
    if spec.first_block_max and spec.is_cuda:
        return hl.dot(p8, v_tile, acc=acc)
    if spec.two_level:
        return fma(acc, alpha, hl.dot(p8, v_tile), spec.is_cuda)
    if p8.dtype.itemsize == 2 and not spec.is_cuda:
        return acc * alpha + dot_fp32(p8, v_tile, spec.is_cuda)
    return hl.dot(p8, v_tile, acc=acc * alpha)


def row_sum_overflows(row_sum: torch.Tensor) -> torch.Tensor:
    """1 if a sum of a row's P, [bm], is more than `MAX_ROW_SUM`, else 0, also of NaN: no reference mends it."""
    return torch.amax((row_sum > MAX_ROW_SUM).to(torch.int32), 0)


def add_sink(
    m_i: torch.Tensor,  # [bm]
    row_sum: torch.Tensor,  # [bm]
    sink_log2: torch.Tensor,  # [bm]
    spec: AttentionSpec | PagedSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(alpha, m_i, row_sum)` with one more logit in the sum. A key block would do the same to `acc`."""
    m_new = maximum(m_i, sink_log2 - spec.p_offset_log2, spec.is_cuda)
    m_ref = torch.where(m_new == float("-inf"), 0.0, m_new)
    alpha = exp2(m_i - m_ref, spec.is_cuda)
    return alpha, m_ref, row_sum * alpha + exp2(sink_log2 - m_ref, spec.is_cuda)


def store_lse(
    lse: torch.Tensor,  # [B * H * M]
    m_i: torch.Tensor,  # [bm]
    total: torch.Tensor,  # [bm]
    lse_shift_scaled: torch.Tensor,  # [bm]
    lse_rows: torch.Tensor,  # [bm]
    keep: torch.Tensor,  # [bm]
    lse_shift_in_lse: hl.constexpr,
) -> None:
    """The log of the sum of `total` times two to `m_i`, and to `lse_shift_scaled` if that is not in it yet."""
    lse_log2 = m_i + torch.log2(total)
    if lse_shift_in_lse:
        lse_log2 = lse_log2 + lse_shift_scaled
    hl.store(lse, [lse_rows], lse_log2 * LN2, extra_mask=keep)


def v_rows(
    v_mean: torch.Tensor,  # [B * H_kv * D_v_pad]
    v_descale: torch.Tensor,  # [B * H_kv * D_v_pad]
    mean_row: int | torch.Tensor,  # []
    descale_row: int | torch.Tensor,  # []
    first: int,
    d_tile: int,
    d_pad: int,
    spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """V's mean and descale for `store_out`: of `d_tile` channels of `d_pad`, from `first`; or a head's descale."""
    d = first + hl.arange(d_tile)
    if spec.v_channel_descales:
        descale = hl.load(v_descale, [descale_row * d_pad + d])
    else:
        descale = hl.load(v_descale, [descale_row * d_pad])
    return hl.load(v_mean, [mean_row * d_pad + d]), descale


def to_out_dtype(o: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`o`, cast; what overflows e4m3 is NaN."""
    if dtype == torch.float8_e4m3fn:
        # The instruction saturates; an overflow must not pass for a finite number.
        o = torch.where(torch.abs(o) > E4M3_OVERFLOW, float("nan"), o)
    return o.to(dtype)


def store_out(
    out: torch.Tensor,  # [B * H * M, D_v]
    acc: torch.Tensor,  # [bm, d_tile]
    mean: torch.Tensor,  # [d_tile]
    descale: torch.Tensor,  # [d_tile] if v_channel_descales, else []
    m_keys: torch.Tensor,  # [bm], the last reference of the keys, -inf without one
    row_sum: torch.Tensor,  # [bm], of the keys
    alpha: torch.Tensor,  # [bm], the rescale of acc and row_sum that the sink asks for, if has_sinks
    total: torch.Tensor,  # [bm], row_sum * alpha, and the sink's part
    out_rows: torch.Tensor,  # [bm]
    row_in_range: torch.Tensor,  # [bm]
    first: int,
    d_tile: int,
    d_pad: int,
    d_out: int,
    spec: AttentionSpec,
) -> None:
    """Normalise, put V's mean back, cast, store: `d_tile` channels of `d_pad`, from `first`."""
    d = first + hl.arange(d_tile)
    # [bm]
    normaliser = 1.0 / row_sum
    if spec.scores.has_sinks:
        normaliser = alpha / total
    if spec.v_channel_descales:
        o = acc * normaliser.unsqueeze(1) * descale.unsqueeze(0)
    else:
        o = acc * (normaliser * descale).unsqueeze(1)
    # [1, d_tile]
    mean = mean.unsqueeze(0)
    if spec.scores.has_sinks:
        # The mean is that of real keys, and comes back times the probability that they hold.
        mean = (row_sum * normaliser).unsqueeze(1) * mean
    # [bm, d_tile]
    o = o + mean
    if spec.all_fused:
        o = torch.where((torch.abs(m_keys) > MAX_FUSED_SCORE_LOG2).unsqueeze(1), float("nan"), o)
    if spec.out_may_be_empty:
        no_key = m_keys == float("-inf")
        if spec.totals_may_be_nan:
            no_key = no_key & (total == total)
        o = torch.where(no_key.unsqueeze(1), 0.0, o)
    keep = row_in_range.unsqueeze(1)
    if d_out < d_pad:
        keep = keep & (d < d_out).unsqueeze(0)
    hl.store(out, [out_rows, d], to_out_dtype(o, out.dtype), extra_mask=keep)
