"""The rounding model of attention over a KV cache: as `rounding_model`, with descales of keys."""

from __future__ import annotations

import torch

from helion_attn.configs import page_packing
from helion_attn.numerics import (
    BEYOND_FP16_LOG2,
    E4M3_BITS_OF_ONE,
    E4M3_MAX,
    E4M3_STEPS,
    FP16_LARGE,
    FP16_TINY,
    INT8_MAX,
    K_AMAX_IN_BASE,
    LEAST_AMAX_IN_BASE,
    LEAST_HALF_PAGE_REFERENCE,
    LN2,
    LOG2E,
    MAX_HALF_PAGE_SCORE_LOG2,
    MAX_K_BASE_LOG2,
    MAX_P_OFFSET_LOG2,
    MAX_V_DESCALE_LOG2,
    MIN_K_DESCALE_LOG2,
    PAGE_REFERENCE_REACH_LOG2,
    largest_q_of_cache,
    most_amax_in_base,
    takes_bits,
    takes_half_scores,
)
from helion_attn.reference.rounding_model import below, e4m3_of_line, to_descale
from helion_attn.reference.shapes import default_sm_scale, hide_keys
from helion_attn.types import CACHE_RECIPE, Recipe, RecipeName, as_cache_recipe

E4M3 = torch.float8_e4m3fn


def row_descale(x: torch.Tensor, largest: float) -> torch.Tensor:
    """[..., D] to [..., 1]: of rows of Q, whose largest magnitude becomes `largest`, or int8 keys but for two bits."""
    return to_descale(x.float().abs().amax(-1, keepdim=True), largest)


def to_format(x: torch.Tensor, descale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of `dtype` that x [..., D] becomes by descales [..., 1], in fp32."""
    scaled = x * (1.0 / descale)
    return scaled.round() if dtype == torch.int8 else scaled.to(dtype).float()


def _powers(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent, exactly."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def _largest(x: torch.Tensor) -> torch.Tensor:
    """[..., D] to [..., 1], largest magnitudes; NaN and infinity count as 0."""
    amax = x.float().abs().amax(-1, keepdim=True)
    return torch.where(amax < float("inf"), amax, 0.0)


def _descales(
    amax: torch.Tensor, bases: torch.Tensor, page: int, most: float, least_log2: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(descales, bases)` of keys, [..., N, 1]: a key has its page's base unless that takes it out of 2**-3..`most`.

    Args:
        amax: largest magnitudes of keys.
        bases: [..., pages, 1].
        page: keys of a page.
        most: the largest magnitude over its base.
        least_log2: descales that are not the base are at least two to this.
    """
    base = bases.repeat_interleave(page, -2)[..., : amax.size(-2), :]
    mantissa, exponent = torch.frexp(amax * (1.0 / E4M3_MAX))
    own = _powers(torch.where(mantissa == 0.5, exponent - 1, exponent).clamp_min(least_log2))
    in_base = amax * (1.0 / base)
    fits = (amax == 0) | ((in_base >= LEAST_AMAX_IN_BASE) & (in_base <= most))
    return torch.where(fits, base, own), base


def k_descales(
    k: torch.Tensor, page: int, dtype: torch.dtype, most: float = E4M3_MAX
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_descales` of K as it is rounded, [..., N, D]: a page's base takes its first key's largest magnitude to 3.5.

    Int8 keys have their own, of 22 bits, and no base.
    """
    if dtype == torch.int8:
        own = (row_descale(k, INT8_MAX).view(torch.int32) & -4).view(torch.float32)
        return own, own
    amax = _largest(k)
    first = amax[..., ::page, :]
    bases = (first * (1.0 / K_AMAX_IN_BASE)).clamp(2.0**-MAX_K_BASE_LOG2, 2.0**MAX_K_BASE_LOG2)
    return _descales(amax, torch.where(first > 0, bases, 1.0), page, most, MIN_K_DESCALE_LOG2)


def v_descales(v: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`_descales` of V, [..., N, D_v]: bases are powers of two, and take first keys' largest magnitudes to 2..4."""
    amax = _largest(v)
    first = amax[..., ::page, :]
    # Of a number from 1 to 2, frexp's exponent is 1.
    exponents = (torch.frexp(first).exponent - 2).clamp(-MAX_V_DESCALE_LOG2, MAX_V_DESCALE_LOG2)
    return _descales(amax, _powers(torch.where(first > 0, exponents, 0)), page, E4M3_MAX, -MAX_V_DESCALE_LOG2)


def fp8_attention_kvcache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    sm_scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    recipe: Recipe | RecipeName = CACHE_RECIPE,
    k_mean: torch.Tensor | None = None,
    channel_factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a cache to which k and v were appended, as the kernel rounds it, in one run of pages.

    The rounding points are the casts of Q, a row by its own descale, of K and V, a row of each by `k_descales` and
    `v_descales`, and of P, against the largest weight of the row in its page, or 2**-72 of that up to its page. Up
    to head dim 128 P's bits are a line of the score, and row sums are of the rounded P. There, without a softcap,
    scores of e4m3 keys with their page's base are fp16, but for rows whose largest lies further than
    `MAX_HALF_PAGE_SCORE_LOG2` from 0. Keys with descales of their own come last, page by page, those of a page that
    have the same as if they were a page of their own. Sums are fp32. V is finite and below 2**34.

    Args:
        q: [B, H, M, D], bf16, fp16 or fp32, any device.
        k: [B, H_kv, N, D].
        v: [B, H_kv, N, D_v].
        causal: row i sees keys j <= i + N - M.
        sm_scale: multiplies q k^T; 1 / sqrt(D) by default.
        window: and softcap, sinks, as in `fp8_attention`.
        recipe: of the cache.
        k_mean: of the cache, [H_kv, D], if it has one.
        channel_factors: of the cache, [H_kv, D], powers of two, if it has some.

    Returns:
        fp32 out [B, H, M, D_v] and lse [B, H, M], natural log.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        model, lse = ha.reference.fp8_attention_kvcache(q[:, :, -1:], k, v)
    """
    B, H, M, D = q.shape
    N, D_v, group = k.shape[2], v.size(3), H // k.shape[1]
    packing = page_packing(D, D_v)
    qk_dtype = as_cache_recipe(recipe).qk_dtype
    page, larger_d = packing.page_size, max(packing.D_pad, packing.D_v_pad)
    bits, half = takes_bits(E4M3, larger_d), takes_half_scores(qk_dtype, larger_d, softcap is not None)
    # [1, H_kv, 1, D]
    mean = (k.new_zeros(k.size(1), D) if k_mean is None else k_mean).float()[None, :, None]
    factors = torch.ones_like(mean) if channel_factors is None else channel_factors.float()[None, :, None]
    k = (k.float() - mean) / factors
    equalised_q = q.float() * factors.repeat_interleave(group, 1)
    q_scale = row_descale(equalised_q, largest_q_of_cache(qk_dtype, D, half))
    k_scale, k_base = k_descales(k, page, qk_dtype, most_amax_in_base(larger_d))
    v_scale, v_base = v_descales(v, page)
    q8, k8 = to_format(equalised_q, q_scale, qk_dtype), to_format(k, k_scale, qk_dtype)
    v8 = to_format(v.float(), v_scale, E4M3)
    k8, v8, k_scale, v_scale, k_base, v_base, mean = (
        x.repeat_interleave(group, 1) for x in (k8, v8, k_scale, v_scale, k_base, v_base, mean)
    )
    scale_log2 = default_sm_scale(sm_scale, D) * LOG2E
    # [B, H, M, 1]
    q_scale_log2, shift_log2 = q_scale * scale_log2, (q.float() @ mean.mT) * scale_log2

    m_i = m_run = q.new_full((B, H, M, 1), float("-inf"), dtype=torch.float32)
    l_i = q.new_zeros((B, H, M, 1), dtype=torch.float32)
    acc = q.new_zeros((B, H, M, D_v), dtype=torch.float32)

    def add(j: int, taken: torch.Tensor, half: bool) -> None:
        """Keys of a page that are `taken`, [B, H, page], or [B, H, M, page]; with scores in fp16 or not."""
        nonlocal m_i, m_run, l_i, acc
        keys = slice(j, j + page)
        # [B, H, M, page]
        s, s_scale_log2 = q8 @ k8[:, :, keys].mT, k_scale[:, :, keys].mT * q_scale_log2
        if half:
            s = s.half().float()
            steps = (s_scale_log2 * E4M3_STEPS).clamp(FP16_TINY, FP16_LARGE).half().float()
            s_scale_log2 = steps / E4M3_STEPS
        t = s * s_scale_log2
        if softcap is not None:
            t = softcap * LOG2E * torch.tanh((t + shift_log2) * (LN2 / softcap))
        v_log2 = torch.log2(v_scale[:, :, keys]).mT
        t = hide_keys(t + v_log2, 0, j, M, N, causal, window)
        t = t.masked_fill(~taken, float("-inf"))
        top = below(t.amax(3, keepdim=True), MAX_P_OFFSET_LOG2[E4M3])
        no_key = top == float("-inf")
        if half:
            top = top.masked_fill(((steps >= FP16_LARGE) & (t > float("-inf"))).any(3, keepdim=True), BEYOND_FP16_LOG2)
        m_run = torch.maximum(m_run, top)
        m_new = torch.maximum(top, m_run - PAGE_REFERENCE_REACH_LOG2)
        if half:
            m_new = m_new.clamp_min(LEAST_HALF_PAGE_REFERENCE)
            # Of a row that has all again, anything.
            one = E4M3_BITS_OF_ONE + v_log2[..., :1] * E4M3_STEPS
            offset = (one - m_new * E4M3_STEPS).clamp(-FP16_LARGE, FP16_LARGE).half().float()
            m_new = (one - offset) / E4M3_STEPS
        m_new = torch.where(no_key, m_i, m_new)
        m_ref = torch.where(m_new == float("-inf"), 0.0, m_new)
        if bits:
            p = p8 = e4m3_of_line((t - m_ref) * E4M3_STEPS + E4M3_BITS_OF_ONE)
        else:
            p = torch.exp2(t - m_ref)
            p8 = p.to(E4M3).float()
        alpha = torch.exp2(m_i - m_ref)
        l_i = l_i * alpha + (p / v_scale[:, :, keys].mT).sum(3, keepdim=True)
        acc = acc * alpha + p8 @ v8[:, :, keys]
        m_i = m_new

    # [B, H, N]: a number for each pair of descales, of int8 keys for each of V's.
    of_k = torch.zeros_like(k_scale) if qk_dtype == torch.int8 else torch.log2(k_scale)
    pairs = (of_k * 1024 + torch.log2(v_scale)).squeeze(3)
    escapes = ((k_scale != k_base) | (v_scale != v_base)).squeeze(3)
    for j in range(0, N, page):
        add(j, ~escapes[:, :, None, j : j + page], half)
    # [B, H, M, 1]
    wide = (m_run.abs() > MAX_HALF_PAGE_SCORE_LOG2) & m_run.isfinite() & half
    m_run, m_i = (x.masked_fill(wide, float("-inf")) for x in (m_run, m_i))
    l_i, acc = (x.masked_fill(wide, 0.0) for x in (l_i, acc))
    for j in range(0, N, page):
        rest = escapes[:, :, j : j + page].clone()
        if wide.any():
            add(j, ~rest.unsqueeze(2) & wide, False)
        while rest.any():
            # Of each head, the first that is left, and all with its descales.
            of_first = pairs[:, :, j : j + page].gather(2, rest.int().argmax(2, keepdim=True))
            taken = rest & (pairs[:, :, j : j + page] == of_first)
            add(j, taken.unsqueeze(2), False)
            rest &= ~taken
    lse = (m_i + torch.log2(l_i) + (shift_log2 if softcap is None else 0.0)) * LN2
    key_share = torch.ones_like(lse)
    if sinks is not None:
        key_lse = lse
        lse = torch.logaddexp(lse, sinks.float().view(1, H, 1, 1))
        key_share = torch.exp(key_lse - lse)
    return torch.where(l_i == 0, 0.0, acc / l_i * key_share), lse.squeeze(3)
