"""The packed format, undone: what the attention kernel is given, as plain fp32 tensors."""

from __future__ import annotations

import torch

from helion_attn.numerics import REFLECTED_GROUP
from helion_attn.preprocess.lib.hadamard import hadamard_matrix
from helion_attn.types import QuantizedQKV


def _unpack_rows(x8: torch.Tensor, descale: torch.Tensor, size: int, D: int) -> torch.Tensor:
    """[B * H, blocks, block, D_pad] to fp32 [B, H, size, D]; descales [B, H, blocks or 1, block or 1]."""
    B, H = descale.shape[:2]
    x = x8.float().view(B, H, *x8.shape[1:]) * descale.unsqueeze(4)
    return x.flatten(2, 3)[:, :, :size, :D]


def _reflect(x: torch.Tensor) -> torch.Tensor:
    """Undo the reflection of rows, fp32 [..., D]: it is its own inverse."""
    whole = x.size(-1) // REFLECTED_GROUP * REFLECTED_GROUP
    groups = x[..., :whole].unflatten(-1, (-1, REFLECTED_GROUP))
    return torch.cat([(groups - groups.sum(-1, keepdim=True) / 2).flatten(-2), x[..., whole:]], -1)


def dequantize(qkv: QuantizedQKV) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V as the attention kernel sees them.

    Held against these, an output shows the kernel's own error; held against the unquantised tensors, the total one.

    Args:
        qkv: from `helion_attn.quantize` or `helion_attn.pack`.

    Returns:
        fp32 q [B, H, M, D], k [B, H_kv, N, D] and v [B, H_kv, N, D_v]: a rotation or reflection and channel
        factors undone, means added back; RoPE stays. Always BHSD.

    Raises:
        TypeError: `qkv` is no QuantizedQKV.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        q2, k2, v2 = ha.dequantize(ha.quantize(q, k, v))
        lost = (k2 - k).norm() / k.norm()
    """
    if not isinstance(qkv, QuantizedQKV):
        raise TypeError(f"qkv is a {type(qkv).__name__}; it must be a helion_attn.QuantizedQKV")
    v8 = qkv.v8.float()
    if qkv.v8.itemsize == 1:
        bh, blocks, d_pad, bn = v8.shape
        # [..., bn / 16, t, a, b] back to [..., bn / 16, a, t, b]
        interleaved = v8.view(bh, blocks, d_pad, bn // 16, 4, 2, 2)
        v8 = interleaved.transpose(4, 5).reshape(bh, blocks, d_pad, bn).mT.contiguous()
    v_means, v_descale = (x[:, :, None, : qkv.D_v] for x in (qkv.v_mean, qkv.v_descale))
    v = _unpack_rows(v8, torch.ones_like(qkv.k_descale[:, :, :1, None]), qkv.N, qkv.D_v) * v_descale + v_means
    q = _unpack_rows(qkv.q8, qkv.q_descale, qkv.M, qkv.D)
    k = _unpack_rows(qkv.k8, qkv.k_descale.unsqueeze(3), qkv.N, qkv.D)
    if qkv.recipe.hadamard:
        inverse = hadamard_matrix(qkv.D, qkv.recipe.hadamard_seed).to(q.device).T
        q, k = q @ inverse, k @ inverse
    if qkv.recipe.reflect:
        q, k = _reflect(q), _reflect(k)
    if qkv.channel_factors is not None:
        group = qkv.q_descale.size(1) // qkv.k_descale.size(1)
        factors = qkv.channel_factors[:, :, None, : qkv.D]
        q, k = q / factors.repeat_interleave(group, 1), k * factors
    if qkv.k_mean is not None:
        k = k + qkv.k_mean[:, :, None, : qkv.D]
    return q, k, v
