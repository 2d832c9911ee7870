"""Norms and RoPE by PyTorch, for autograd: where Q or K has a gradient they are not fused into quantising."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from helion_attn.problem import NO_ROPE_ARGUMENTS, DenseArgs, RopeArgs, norm_arguments


def over_heads(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a norm of x [B, heads, S, D] is over all heads of a token."""
    return weight.size(0) != x.size(3)


def unweighted(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of fp32 x [B, heads, S, D] without its weight, and the factors that are x's in it."""
    squares = x.square().mean((1, 3) if over_heads(x, weight) else 3, keepdim=True)
    factor = torch.rsqrt(squares + eps)
    return x * factor, factor


def by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A norm's weight in fp32, as x [B, heads, S, D] is multiplied by it."""
    return weight.float().view(x.size(1), 1, x.size(3)) if over_heads(x, weight) else weight.float()


def normalised(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm of fp32 x [B, heads, S, D], by head or, of a weight of all heads, over all heads of a token."""
    return x if weight is None else unweighted(x, weight, eps)[0] * by_head(x, weight)


class Rotations(NamedTuple):
    """The rotations of rows."""

    cos: torch.Tensor  # fp32 [S, R / 2]
    sin: torch.Tensor  # fp32 [S, R / 2]
    outside: torch.Tensor  # bool [S, 1], rows at no position of the table
    interleaved: bool  # whether pairs are neighbours


def rotations_of(
    S: int, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, positions: torch.Tensor | None, first: int
) -> Rotations:
    """Return the rotations of S rows; row i is at `positions[i]`, or else at `first + i`."""
    table = cos.size(0)
    at = torch.arange(first, first + S, device=cos.device) if positions is None else positions
    row = at.clamp(0, table - 1)
    outside = ((at < 0) | (at >= table)).unsqueeze(1)
    return Rotations(cos.float()[row], sin.float()[row], outside, interleaved)


def rotate(x: torch.Tensor, by: Rotations, back: bool = False) -> torch.Tensor:
    """Rotate fp32 x [B, heads, S, D], or rotate it back."""
    pairs = by.cos.size(1)
    cos, sin = by.cos, -by.sin if back else by.sin
    rotating, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    shape, side = ((pairs, 2), 4) if by.interleaved else ((2, pairs), 3)
    a, b = rotating.unflatten(3, shape).unbind(side)
    return torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], side).flatten(3), rest], 3)


def rotated(x: torch.Tensor, rope: RopeArgs, positions: torch.Tensor | None, first: int) -> torch.Tensor:
    """fp32 x [B, heads, S, D], rotated; row i is at `positions[i]`, or else at `first + i`. NaN outside the table."""
    if rope.cos is None or rope.sin is None:
        return x
    by = rotations_of(x.size(2), rope.cos, rope.sin, rope.interleaved, positions, first)
    return rotate(x, by).masked_fill(by.outside, float("nan"))


class Prologue(torch.autograd.Function):
    """`rotated` of `normalised`, in x's dtype. A norm keeps x, and RoPE nothing; autograd would keep both's fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        interleaved: bool,
        positions: torch.Tensor | None,
        first: int,
    ) -> torch.Tensor:
        """x [B, heads, S, D], normalised and rotated."""
        ctx.save_for_backward(None if weight is None else x, weight, cos, sin, positions)
        ctx.eps, ctx.interleaved, ctx.first, ctx.dtype = eps, interleaved, first, x.dtype
        rope = RopeArgs(cos=cos, sin=sin, q_positions=None, k_positions=None, interleaved=interleaved)
        return rotated(normalised(x.float(), weight, eps), rope, positions, first).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *of_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x and of the norm's weight."""
        x, weight, cos, sin, positions = ctx.saved_tensors
        d = of_outputs[0].float()
        if cos is not None:
            by = rotations_of(d.size(2), cos, sin, ctx.interleaved, positions, ctx.first)
            d = rotate(d.masked_fill(by.outside, 0.0), by, back=True)
        d_weight = None
        if weight is not None:
            x = x.float()
            n, factor = unweighted(x, weight, ctx.eps)
            if ctx.needs_input_grad[1]:
                of_heads = (d * n).sum((0, 2))
                d_weight = (of_heads.flatten() if over_heads(x, weight) else of_heads.sum(0)).to(weight.dtype)
            d = d * by_head(x, weight)
            d = factor * (d - n * (d * n).mean((1, 3) if over_heads(x, weight) else 3, keepdim=True))
        return d.to(ctx.dtype), d_weight, None, None, None, None, None, None


def prepared(x: torch.Tensor, *constants: Any) -> torch.Tensor:
    """`Prologue` of x, with what else it takes, some of which `torch.inference_mode` may have made."""
    given = (x, *constants)
    if not torch.compiler.is_compiling():
        given = tuple(y.clone() if isinstance(y, torch.Tensor) and y.is_inference() else y for y in given)
    out: torch.Tensor = Prologue.apply(*given)
    return out


def without_prologue(a: DenseArgs) -> DenseArgs:
    """The same attention of Q and K that are normalised and rotated, in their dtype."""
    rope, norm = a.rope, a.norm
    M, N = a.q.size(2), a.k.size(2)
    table = rope.cos, rope.sin, rope.interleaved
    q, k = a.q, a.k
    if rope.cos is not None or norm.q_weight is not None:
        q = prepared(q, norm.q_weight, norm.q_eps, *table, rope.q_positions, N - M)
    if rope.cos is not None or norm.k_weight is not None:
        k = prepared(k, norm.k_weight, norm.k_eps, *table, rope.k_positions, 0)
    return a._replace(q=q, k=k, rope=NO_ROPE_ARGUMENTS, norm=norm_arguments(None, None))
