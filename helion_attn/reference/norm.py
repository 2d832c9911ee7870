"""RMSNorm (arXiv:1910.07467), in fp64."""

from __future__ import annotations

import torch

from helion_attn.types import RMSNorm


def rms_norm(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight, by head or, of a weight of all heads, over all heads of a token.

    Args:
        x: [B, heads, S, D], any floating dtype and device.
        norm: as `helion_attn.attention` takes it.

    Returns:
        fp64, shaped as x.

    Raises:
        ValueError: the weight has neither D nor heads * D channels.

    Example:
        y = ha.reference.rms_norm(torch.randn(1, 2, 100, 64), ha.RMSNorm(torch.ones(64)))
    """
    heads, D = x.size(1), x.size(3)
    if tuple(norm.weight.shape) not in ((D,), (heads * D,)):
        raise ValueError(
            f"norm.weight has shape {tuple(norm.weight.shape)}; it must be ({D},), or ({heads * D},) for {heads} heads"
        )
    x, weight = x.double(), norm.weight.double()
    if norm.weight.size(0) == D:
        return x * torch.rsqrt(x.square().mean(3, keepdim=True) + norm.eps) * weight
    return x * torch.rsqrt(x.square().mean((1, 3), keepdim=True) + norm.eps) * weight.view(heads, 1, D)
