"""FP8 attention from two `torch._scaled_mm` calls a head: what a user without a kernel would write."""

from __future__ import annotations

import torch

from helion_attn.numerics import E4M3_MAX
from helion_attn.reference.shapes import default_sm_scale, hide_future_keys


def _to_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x to e4m3 with one descale, as `torch._scaled_mm` takes it."""
    descale = (x.float().abs().amax() / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return (x.float() / descale).to(torch.float8_e4m3fn), descale


def scaled_mm_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
) -> torch.Tensor:
    """softmax(q k^T * sm_scale) v with both products in FP8, a head at a time, the scores in memory.

    `torch._scaled_mm` multiplies a row-major e4m3 matrix by a column-major one: k^T is one already, v is made one. P is
    quantised with a descale of 1 / 448, since it lies in 0..1.

    Args:
        q: [B, H, M, D] on a GPU, M and D multiples of 16.
        k: [B, H_kv, N, D], N a multiple of 16.
        v: [B, H_kv, N, D].
        causal: row i sees keys j <= i + N - M.
        sm_scale: multiplies q k^T; 1 / sqrt(D) by default.

    Returns:
        out [B, H, M, D] in q's dtype.

    Raises:
        NotImplementedError: on a device without FP8 matrix units.

    Example:
        q, k, v = torch.randn(3, 1, 2, 128, 64, dtype=torch.bfloat16, device="cuda")
        out = ha.reference.scaled_mm_attention(q, k, v, causal=True)
    """
    if not q.is_cuda:
        raise NotImplementedError(f"q is on {q.device}; scaled_mm_attention needs a CUDA device with FP8 matrix units")
    B, H, _M, D = q.shape
    H_kv = k.size(1)
    out = torch.empty_like(q)
    p_descale = torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32, device=q.device)
    for b in range(B):
        for h in range(H):
            q8, q_descale = _to_e4m3(q[b, h])
            k8, k_descale = _to_e4m3(k[b, h // (H // H_kv)])
            v8, v_descale = _to_e4m3(v[b, h // (H // H_kv)])
            # [M, N]
            s = torch._scaled_mm(q8, k8.t(), q_descale, k_descale, out_dtype=torch.float32)
            s = s * default_sm_scale(sm_scale, D)
            if causal:
                s = hide_future_keys(s)
            p8 = (torch.softmax(s, 1) * E4M3_MAX).to(torch.float8_e4m3fn)
            v8_column_major = v8.t().contiguous().t()
            out[b, h] = torch._scaled_mm(p8, v8_column_major, p_descale, v_descale, out_dtype=torch.bfloat16)
    return out
