"""The packed format, undone: what the attention kernel is given, as plain fp32 tensors."""

from __future__ import annotations

import torch

from helion_attn.numerics import REFLECTED_GROUP
from helion_attn.preprocess.lib.hadamard import hadamard_matrix
from helion_attn.types import PackedTensors, QuantizedQKV, Recipe


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


def unmix(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Undo the rotation or reflection of rows of Q or K, fp32 [..., D]."""
    if recipe.hadamard:
        x = x @ hadamard_matrix(x.size(-1), recipe.hadamard_seed).to(x.device).T
    return _reflect(x) if recipe.reflect else x


def unpack_v(v8: torch.Tensor) -> torch.Tensor:
    """Blocks of V as fp32 rows, [heads, blocks, bn, D_v_pad]."""
    if v8.itemsize > 1:
        return v8.float()
    heads, blocks, d_pad, bn = v8.shape
    # [..., bn / 16, t, a, b] back to [..., bn / 16, a, t, b]
    interleaved = v8.float().view(heads, blocks, d_pad, bn // 16, 4, 2, 2)
    return interleaved.transpose(4, 5).reshape(heads, blocks, d_pad, bn).mT.contiguous()


def unpack(
    packed: PackedTensors, M: int, N: int, D: int, D_v: int, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Undo the packed format of dense tensors, but for K's mean.

    Returns:
        fp32 q [B, H, M, D], k [B, H_kv, N, D] less its mean, and v [B, H_kv, N, D_v] with its own.
    """
    v8 = unpack_v(packed.v8)
    v_mean, v_descale = (x[:, :, None, :D_v] for x in (packed.v_mean, packed.v_descale))
    v = _unpack_rows(v8, torch.ones_like(packed.k_descale[:, :, :1, None]), N, D_v) * v_descale + v_mean
    q = unmix(_unpack_rows(packed.q8, packed.q_descale, M, D), recipe)
    k = unmix(_unpack_rows(packed.k8, packed.k_descale.unsqueeze(3), N, D), recipe)
    if packed.channel_factors is not None:
        group = packed.q_descale.size(1) // packed.k_descale.size(1)
        factors = packed.channel_factors[:, :, None, :D]
        q, k = q / factors.repeat_interleave(group, 1), k * factors
    return q, k, v


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
    q, k, v = unpack(qkv, qkv.M, qkv.N, qkv.D, qkv.D_v, qkv.recipe)
    return q, k if qkv.k_mean is None else k + qkv.k_mean[:, :, None, : qkv.D], v
