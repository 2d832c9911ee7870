"""Gradients of the fp64 oracle's formula, and inputs for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from helion_attn.reference.shapes import hide_keys

Tensors = tuple[torch.Tensor, ...]


def inputs(kind: str, H: int, H_kv: int, M: int, N: int, D: int, seed: int = 0, B: int = 1) -> Tensors:
    """Q, K, V and dO, bf16.

    Args:
        kind: "randn"; "biased_k", whose channels have means of deviation 3; "outlier", FlashAttention-3's; "wide",
            scores of deviation 3; "wider", of 30; "large_channels", three of K are 30 times as large.
        H: query heads.
        H_kv: KV heads.
        M: queries.
        N: keys.
        D: head dim.
        seed: of the random numbers.
        B: sequences.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v, d_out = randn(B, H, M, D), randn(B, H_kv, N, D), randn(B, H_kv, N, D), randn(B, H, M, D)
    if kind == "biased_k":
        k = k + 3 * randn(B, H_kv, 1, D)
    elif kind == "outlier":
        for x in (q, k, v):
            x += 10 * randn(*x.shape) * (torch.rand(x.shape, generator=generator) < 0.001)
    elif kind in ("wide", "wider"):
        q = q * (3 if kind == "wide" else 30)
    elif kind == "large_channels":
        k[..., 5:48:16] *= 30
        q[..., 5:48:16] /= 30**0.5
    return tuple(x.to(torch.bfloat16) for x in (q, k, v, d_out))


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of attention in fp64, differentiable; BHSD. A row without a key gives 0, and lse -inf or its sink."""
    group, (M, N) = q.size(1) // k.size(1), (q.size(2), k.size(2))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.mT * q.size(3) ** -0.5
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = hide_keys(s, 0, 0, M, N, causal, window)
    if visible is not None:
        s = s.masked_fill(~visible, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], 3)
    # A row of -inf has NaN for a gradient: it is made one of zeros, and its result is not used.
    empty = (s[..., :N] == -math.inf).all(3, keepdim=True)
    p = s.masked_fill(empty & (sinks is None), 0.0).softmax(3)[..., :N].masked_fill(empty, 0.0)
    lse = s.masked_fill(empty & (sinks is None), 0.0).logsumexp(3)
    return p @ v, lse.masked_fill(empty[..., 0], -math.inf) if sinks is None else lse


def exact_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, **options: Any) -> Tensors:
    """dQ, dK and dV in fp64, and dsinks if there are any."""
    given = [x.detach().double().requires_grad_() for x in (q, k, v)]
    sinks = options.get("sinks")
    if sinks is not None:
        options["sinks"] = sinks.detach().double().requires_grad_()
        given.append(options["sinks"])
    out, _ = exact(*given[:3], **options)
    return torch.autograd.grad(out, given, d_out.double())


def errors(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[float]:
    """||x - ref|| / ||ref|| of each."""
    return [((x.double().cpu() - y.cpu()).norm() / y.cpu().norm()).item() for x, y in zip(found, expected, strict=True)]
