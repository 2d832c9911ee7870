"""Norms and RoPE by PyTorch, for autograd: where Q or K has a gradient they are not fused into quantising."""

from __future__ import annotations

import torch

from helion_attn.problem import NO_ROPE_ARGUMENTS, DenseArgs, RopeArgs, norm_arguments


def normalised(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm of fp32 x [B, heads, S, D], by head or, of a weight of all heads, over all heads of a token."""
    if weight is None:
        return x
    heads, D = x.size(1), x.size(3)
    over_heads = weight.size(0) != D
    squares = x.square().mean((1, 3) if over_heads else 3, keepdim=True)
    weight = weight.float().view(heads, 1, D) if over_heads else weight.float()
    return x * torch.rsqrt(squares + eps) * weight


def rotated(x: torch.Tensor, rope: RopeArgs, positions: torch.Tensor | None, first: int) -> torch.Tensor:
    """fp32 x [B, heads, S, D], rotated; row i is at `positions[i]`, or else at `first + i`. NaN outside the table."""
    if rope.cos is None or rope.sin is None:
        return x
    table, pairs = rope.cos.shape
    at = torch.arange(first, first + x.size(2), device=x.device) if positions is None else positions
    # [S, R / 2]
    cos, sin = (angles.float()[at.clamp(0, table - 1)] for angles in (rope.cos, rope.sin))
    outside = ((at < 0) | (at >= table)).unsqueeze(1)
    turning, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    shape, side = ((pairs, 2), 4) if rope.interleaved else ((2, pairs), 3)
    a, b = turning.unflatten(3, shape).unbind(side)
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], side).flatten(3)
    return torch.cat([turned, rest], 3).masked_fill(outside, float("nan"))


def without_prologue(a: DenseArgs) -> DenseArgs:
    """The same attention of Q and K that are normalised and rotated, in their dtype."""
    if a.rope.cos is None and a.norm.q_weight is None and a.norm.k_weight is None:
        return a
    M, N = a.q.size(2), a.k.size(2)
    q = rotated(normalised(a.q.float(), a.norm.q_weight, a.norm.q_eps), a.rope, a.rope.q_positions, N - M)
    k = rotated(normalised(a.k.float(), a.norm.k_weight, a.norm.k_eps), a.rope, a.rope.k_positions, 0)
    return a._replace(q=q.to(a.q.dtype), k=k.to(a.k.dtype), rope=NO_ROPE_ARGUMENTS, norm=norm_arguments(None, None))
