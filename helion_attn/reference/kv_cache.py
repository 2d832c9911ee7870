"""The rounding model of attention over a KV cache: as `rounding_model`, with a descale for every key."""

from __future__ import annotations

import torch

from helion_attn.configs import page_packing
from helion_attn.numerics import (
    DESCALE_MIN,
    E4M3_MAX,
    LN2,
    LOG2E,
    MAX_P_OFFSET_LOG2,
    MAX_V_DESCALE_LOG2,
    PAGE_REFERENCE_REACH_LOG2,
)
from helion_attn.reference.rounding_model import below
from helion_attn.reference.shapes import default_sm_scale, hide_keys

E4M3 = torch.float8_e4m3fn


def row_descale(x: torch.Tensor) -> torch.Tensor:
    """[..., D] to [..., 1]: of rows of Q and K."""
    return (x.float().abs().amax(-1, keepdim=True) * (1.0 / E4M3_MAX)).clamp_min(DESCALE_MIN)


def value_descale(v: torch.Tensor) -> torch.Tensor:
    """[..., D_v] to [..., 1]: of rows of V, powers of two."""
    least = v.float().abs().amax(-1, keepdim=True) * (1.0 / E4M3_MAX)
    mantissa, exponent = torch.frexp(least)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp_min(-MAX_V_DESCALE_LOG2)
    return torch.where(least > 0, torch.exp2(exponent.float()), 2.0**-MAX_V_DESCALE_LOG2)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a cache to which k and v were appended, as the kernel rounds it, in one run of pages.

    The rounding points are the casts of Q, K and V, a row of each by its own descale, and of P times V's descale,
    against the largest such weight of the row in its page, or 2**-20 of that up to its page. Sums are fp32. V is finite
    and below 2**68.

    Args:
        q: [B, H, M, D], bf16, fp16 or fp32, any device.
        k: [B, H_kv, N, D].
        v: [B, H_kv, N, D_v].
        causal: row i sees keys j <= i + N - M.
        sm_scale: multiplies q k^T; 1 / sqrt(D) by default.
        window: and softcap, sinks, as in `fp8_attention`.

    Returns:
        fp32 out [B, H, M, D_v] and lse [B, H, M], natural log.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        model, lse = ha.reference.fp8_attention_kvcache(q[:, :, -1:], k, v)
    """
    B, H, M, D = q.shape
    N, group = k.shape[2], H // k.shape[1]
    q_scale, k_scale, v_scale = row_descale(q), row_descale(k), value_descale(v)
    q8, k8, v8 = (
        (x.float() * (1.0 / scale)).to(E4M3).float() for x, scale in ((q, q_scale), (k, k_scale), (v, v_scale))
    )
    k8, v8, k_scale, v_scale = (x.repeat_interleave(group, 1) for x in (k8, v8, k_scale, v_scale))
    q_scale_log2 = q_scale * (default_sm_scale(sm_scale, D) * LOG2E)
    page = page_packing(D, v.size(3)).page_size

    m_i = m_run = q.new_full((B, H, M, 1), float("-inf"), dtype=torch.float32)
    l_i = q.new_zeros((B, H, M, 1), dtype=torch.float32)
    acc = q.new_zeros((B, H, M, v.size(3)), dtype=torch.float32)
    for j in range(0, N, page):
        keys = slice(j, j + page)
        # [B, H, M, page]
        t = (q8 @ k8[:, :, keys].mT) * k_scale[:, :, keys].mT * q_scale_log2
        if softcap is not None:
            t = softcap * LOG2E * torch.tanh(t * (LN2 / softcap))
        t = hide_keys(t + torch.log2(v_scale[:, :, keys]).mT, 0, j, M, N, causal, window)
        top = below(t.amax(3, keepdim=True), MAX_P_OFFSET_LOG2[E4M3])
        m_run = torch.maximum(m_run, top)
        m_new = torch.maximum(top, m_run - PAGE_REFERENCE_REACH_LOG2)
        m_ref = torch.where(m_new == float("-inf"), 0.0, m_new)
        p, alpha = torch.exp2(t - m_ref), torch.exp2(m_i - m_ref)
        l_i = l_i * alpha + (p / v_scale[:, :, keys].mT).sum(3, keepdim=True)
        acc = acc * alpha + p.to(E4M3).float() @ v8[:, :, keys]
        m_i = m_new
    lse = (m_i + torch.log2(l_i)) * LN2
    key_share = torch.ones_like(lse)
    if sinks is not None:
        key_lse = lse
        lse = torch.logaddexp(lse, sinks.float().view(1, H, 1, 1))
        key_share = torch.exp(key_lse - lse)
    return torch.where(l_i == 0, 0.0, acc / l_i * key_share), lse.squeeze(3)
