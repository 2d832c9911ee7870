"""The rounding model of attention over a KV cache: as `rounding_model`, with pages that are open, and that close."""

from __future__ import annotations

import torch

from helion_attn.configs import page_packing
from helion_attn.numerics import (
    E4M3_BITS_OF_ONE,
    E4M3_MAX,
    E4M3_STEPS,
    FORMAT_MAX,
    INT8_MAX,
    LN2,
    LOG2E,
    MAX_P_OFFSET_LOG2,
    MAX_V_DESCALE_LOG2,
    MIN_K_DESCALE_LOG2,
    PAGE_REFERENCE_REACH_LOG2,
    takes_bits,
)
from helion_attn.reference.rounding_model import below, e4m3_of_line, to_descale
from helion_attn.reference.shapes import default_sm_scale, hide_keys
from helion_attn.types import CACHE_RECIPE, Recipe, RecipeName, as_cache_recipe

E4M3 = torch.float8_e4m3fn


def row_descale(x: torch.Tensor, largest: float) -> torch.Tensor:
    """[..., D] to [..., 1]: of rows of Q, or int8 keys, whose largest magnitude becomes `largest`."""
    return to_descale(x.float().abs().amax(-1, keepdim=True), largest)


def to_format(x: torch.Tensor, descale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of `dtype` that x [..., D] becomes by descales [..., 1], in fp32."""
    scaled = x * (1.0 / descale)
    return scaled.round() if dtype == torch.int8 else scaled.to(dtype).float()


def power_of_key(x: torch.Tensor, least_log2: int) -> torch.Tensor:
    """[..., D] to [..., 1]: largest magnitudes over 448, rounded up to powers of two, at least 2**least_log2."""
    amax = x.float().abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(torch.where(amax < float("inf"), amax, 0.0) * (1.0 / E4M3_MAX))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp_min(least_log2)
    return torch.ldexp(torch.ones_like(amax), torch.where(amax > 0, exponent, least_log2))


def k_descales(k: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Descales of K in open pages, [..., N, D] to [..., N, 1]; int8 or e4m3."""
    return row_descale(k, INT8_MAX) if dtype == torch.int8 else power_of_key(k, MIN_K_DESCALE_LOG2)


def v_descales(v: torch.Tensor) -> torch.Tensor:
    """Descales of V in open pages, [..., N, D_v] to [..., N, 1]."""
    return power_of_key(v, -MAX_V_DESCALE_LOG2)


def closed(x8: torch.Tensor, descale: torch.Tensor, page: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [..., N, D] and descales [..., N, 1] of an open page's keys, once full pages of them are closed."""
    full = x8.size(-2) // page * page
    own = descale[..., :full, :].unflatten(-2, (-1, page))
    of_page = own.amax(-2, keepdim=True).expand_as(own)
    moved = x8[..., :full, :] * (own * (1.0 / of_page)).flatten(-3, -2)
    moved = moved.round() if dtype == torch.int8 else moved.to(dtype).float()
    return (
        torch.cat((moved, x8[..., full:, :]), -2),
        torch.cat((of_page.flatten(-3, -2), descale[..., full:, :]), -2),
    )


def e4m3_value(bits: torch.Tensor) -> torch.Tensor:
    """The number that an integer stands for as bits of e4m3, with exponents that e4m3 does not have."""
    octave = torch.floor(bits / E4M3_STEPS)
    return torch.exp2((octave - 7).clamp_min(-126)) * (1 + bits / E4M3_STEPS - octave) * (octave > -120)


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
    own_pages_open: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a cache to which k and v were appended, as the kernel rounds it, in one run of pages.

    The rounding points are the casts of Q, K and V, rows by descales of their own; those of K and V again, by a
    descale a page, where pages are full; and of P, against the largest weight of the row in its page, or 2**-72 of that
    up to its page. Up to head dim 128 P's bits are a line of the score, and row sums are of the rounded P. In an open
    page P is a key's whole weight, with V's descale, and row sums are without it. Sums are fp32. V is finite and below
    2**34.

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
        own_pages_open: a causal query sees the page of its own key open, as if it were not full.

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
    page, bits = packing.page_size, takes_bits(E4M3, max(packing.D_pad, packing.D_v_pad))
    # [1, H_kv, 1, D]
    mean = (k.new_zeros(k.size(1), D) if k_mean is None else k_mean).float()[None, :, None]
    factors = torch.ones_like(mean) if channel_factors is None else channel_factors.float()[None, :, None]
    k = (k.float() - mean) / factors
    equalised_q = q.float() * factors.repeat_interleave(group, 1)
    q_scale = row_descale(equalised_q, FORMAT_MAX[qk_dtype])
    q8 = to_format(equalised_q, q_scale, qk_dtype)
    k_scale, v_scale = k_descales(k, qk_dtype), v_descales(v)
    k8, v8 = to_format(k, k_scale, qk_dtype), to_format(v.float(), v_scale, E4M3)
    forms = (k8, k_scale, v8, v_scale), (*closed(k8, k_scale, page, qk_dtype), *closed(v8, v_scale, page, E4M3))
    # Each [B, H, N, ...]: K and its descales, V and its descales.
    opened, full = (tuple(x.repeat_interleave(group, 1) for x in form) for form in forms)
    mean = mean.repeat_interleave(group, 1)
    scale_log2 = default_sm_scale(sm_scale, D) * LOG2E
    # [B, H, M, 1]
    q_scale_log2, shift_log2 = q_scale * scale_log2, (q.float() @ mean.mT) * scale_log2

    m_i = m_run = q.new_full((B, H, M, 1), float("-inf"), dtype=torch.float32)
    l_i = q.new_zeros((B, H, M, 1), dtype=torch.float32)
    acc = q.new_zeros((B, H, M, D_v), dtype=torch.float32)

    # The page of each query's own key, [M, 1]; with a right edge beyond that every full page is seen closed.
    right = -1 if window is None else window[1]
    own_page = (torch.arange(N - M, N, device=q.device) // page).unsqueeze(1)
    if not (own_pages_open and causal and right <= 0):
        own_page = torch.full_like(own_page, N // page)

    def add(j: int, form: tuple[torch.Tensor, ...], is_open: bool, rows: torch.Tensor) -> None:
        """Page j in a form, for some rows, [M, 1]."""
        nonlocal m_i, m_run, l_i, acc
        keys = slice(j * page, (j + 1) * page)
        k8, k_scale, v8, v_scale = (x[:, :, keys] for x in form)
        # [B, H, M, page]
        t = (q8 @ k8.mT) * (k_scale.mT * q_scale_log2)
        if softcap is not None:
            t = softcap * LOG2E * torch.tanh((t + shift_log2) * (LN2 / softcap))
        v_log2 = torch.log2(v_scale).mT
        t = hide_keys(t + v_log2, 0, j * page, M, N, causal, window).masked_fill(~rows, float("-inf"))
        top = below(t.amax(3, keepdim=True), MAX_P_OFFSET_LOG2[E4M3])
        no_key = top == float("-inf")
        m_run = torch.maximum(m_run, top)
        m_new = torch.where(no_key, m_i, torch.maximum(top, m_run - PAGE_REFERENCE_REACH_LOG2))
        m_ref = torch.where(m_new == float("-inf"), 0.0, m_new)
        line = (t - m_ref) * E4M3_STEPS + E4M3_BITS_OF_ONE
        if bits:
            p8 = e4m3_of_line(line)
            steps = line.clamp_min(-4096.0).half().float().round() - v_log2 * E4M3_STEPS
            p = e4m3_value(steps) * (steps > -960) if is_open else p8 / v_scale.mT
        else:
            p = torch.exp2(t - m_ref)
            p8 = p.to(E4M3).float()
            p = p / v_scale.mT
        alpha = torch.exp2(m_i - m_ref)
        l_i = l_i * alpha + p.sum(3, keepdim=True)
        acc = acc * alpha + p8 @ v8
        m_i = m_new

    for j in range(-(-N // page)):
        is_full = (j + 1) * page <= N
        add(j, full, not is_full, own_page > j if is_full else own_page == j)
        if is_full:
            add(j, opened, True, own_page == j)
    lse = (m_i + torch.log2(l_i) + (shift_log2 if softcap is None else 0.0)) * LN2
    key_share = torch.ones_like(lse)
    if sinks is not None:
        key_lse = lse
        lse = torch.logaddexp(lse, sinks.float().view(1, H, 1, 1))
        key_share = torch.exp(key_lse - lse)
    return torch.where(l_i == 0, 0.0, acc / l_i * key_share), lse.squeeze(3)
