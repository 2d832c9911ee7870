"""The packed format, undone: what the attention kernel is given, as plain fp32 tensors."""

from __future__ import annotations

import torch

from helion_attn.types import QuantizedQKV


def _unpack_rows(x8: torch.Tensor, descale: torch.Tensor, size: int, D: int) -> torch.Tensor:
    """[B * H, blocks, block, D_pad] to fp32 [B, H, size, D]."""
    B, H = descale.shape
    x = x8.float().view(B, H, -1, x8.size(3))[:, :, :size, :D]
    return x * descale[:, :, None, None]


def dequantize(qkv: QuantizedQKV) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V as the attention kernel sees them.

    Held against these, an output shows the kernel's own error; held against the unquantised tensors, the total one.

    Args:
        qkv: from `helion_attn.quantize`.

    Returns:
        fp32 q [B, H, M, D], k [B, H_kv, N, D] and v [B, H_kv, N, D], V's mean added back. Always BHSD.
    """
    bh, blocks, d_pad, bn = qkv.v8.shape
    # [..., bn / 16, t, a, b] back to [..., bn / 16, a, t, b]
    interleaved = qkv.v8.float().view(bh, blocks, d_pad, bn // 16, 4, 2, 2)
    v8 = interleaved.transpose(4, 5).reshape(bh, blocks, d_pad, bn).mT
    v = _unpack_rows(v8.contiguous(), qkv.v_descale, qkv.N, qkv.D) + qkv.v_mean[:, :, None, : qkv.D]
    q = _unpack_rows(qkv.q8, qkv.q_descale, qkv.M, qkv.D)
    k = _unpack_rows(qkv.k8, qkv.k_descale, qkv.N, qkv.D)
    return q, k, v
