"""The rounding model: the kernel's arithmetic in plain PyTorch, with its rounding points and none of its tricks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.numerics import DESCALE_MIN, E4M3_MAX, LN2, LOG2E, P_OFFSET_LOG2
from helion_attn.reference.shapes import default_sm_scale, hide_future_keys, to_bhsd
from helion_attn.types import BALANCED, Recipe


class RoundedQKV(NamedTuple):
    """e4m3 values held in fp32, unpacked [B, H, S, D]; descales [B, H]; `v_mean` [B, H_kv, D]."""

    q8: torch.Tensor
    k8: torch.Tensor
    v8: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    v_mean: torch.Tensor


def _round_per_head(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 x [B, H, S, D] to e4m3 values in fp32, and the descale [B, H]."""
    descale = (x.abs().amax((2, 3)) * (1.0 / E4M3_MAX)).clamp_min(DESCALE_MIN)
    x8 = (x * (1.0 / descale)[:, :, None, None]).to(torch.float8_e4m3fn).float()
    return x8, descale


def quantize(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Recipe = BALANCED) -> RoundedQKV:
    """What `helion_attn.quantize` computes, without packing. q, k, v are [B, H, S, D]."""
    q8, q_descale = _round_per_head(q.float())
    k8, k_descale = _round_per_head(k.float())
    v_mean = v.float().mean(2) if recipe.center_v else torch.zeros_like(v[:, :, 0], dtype=torch.float32)
    v8, v_descale = _round_per_head(v.float() - v_mean.unsqueeze(2))
    return RoundedQKV(q8, k8, v8, q_descale, k_descale, v_descale, v_mean)


def fp8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    layout: str = "bhsd",
    recipe: Recipe = BALANCED,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    block_n: int = 128,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """FP8 attention as the kernel rounds it, on any device: the error that this design has, before any bug.

    The rounding points are the casts of q, k and v to e4m3, the cast of P * 2**8 to e4m3 against the running maximum
    of its key block, and the output's cast. Sums are fp32.

    Args:
        q: [B, H, M, D], bf16, fp16 or fp32; with layout="bshd", H and M swapped; k and v likewise.
        k: [B, H_kv, N, D].
        v: [B, H_kv, N, D].
        causal: row i sees keys j <= i + N - M.
        sm_scale: multiplies q k^T; 1 / sqrt(D) by default.
        layout: "bhsd" or "bshd".
        recipe: as in `helion_attn.attention`.
        return_lse: also return the fp32 lse [B, H, M], natural log.
        out_dtype: the output's; q's by default.
        block_n: keys of a block, `bn` of the kernel's config.
    """
    q, k, v = (to_bhsd(x, layout) for x in (q, k, v))
    B, H, M, D = q.shape
    H_kv, N = k.shape[1], k.shape[2]
    r = quantize(q, k, v, recipe)
    group = H // H_kv
    k8, v8 = r.k8.repeat_interleave(group, 1), r.v8.repeat_interleave(group, 1)
    k_descale, v_descale, v_mean = (x.repeat_interleave(group, 1) for x in (r.k_descale, r.v_descale, r.v_mean))
    # [B, H, 1, 1]
    qk_scale_log2 = (r.q_descale * k_descale * (default_sm_scale(sm_scale, D) * LOG2E))[:, :, None, None]

    m_i = q.new_full((B, H, M, 1), float("-inf"), dtype=torch.float32)
    l_i = q.new_zeros((B, H, M, 1), dtype=torch.float32)
    acc = q.new_zeros((B, H, M, D), dtype=torch.float32)
    for j in range(0, N, block_n):
        # [B, H, M, block_n]
        s = r.q8 @ k8[:, :, j : j + block_n].mT
        if causal:
            s = hide_future_keys(s, 0, j, M, N)
        m_new = torch.maximum(m_i, s.amax(3, keepdim=True) * qk_scale_log2 - P_OFFSET_LOG2)
        m_ref = torch.where(m_new == float("-inf"), 0.0, m_new)
        p = torch.exp2(s * qk_scale_log2 - m_ref)
        alpha = torch.exp2(m_i - m_ref)
        l_i = l_i * alpha + p.sum(3, keepdim=True)
        acc = acc * alpha + p.to(torch.float8_e4m3fn).float() @ v8[:, :, j : j + block_n]
        m_i = m_new
    out = acc / l_i * v_descale[:, :, None, None] + v_mean.unsqueeze(2)
    out = torch.where(l_i == 0, 0.0, out).to(out_dtype or q.dtype)
    lse = ((m_i + torch.log2(l_i)) * LN2).squeeze(3)
    out = to_bhsd(out, layout)
    return (out, lse) if return_lse else out
