"""The backward pass in PyTorch, in fp32, a run of query rows at a time: for what no kernel takes, and for the CPU.

With P = exp(S - lse) and delta = rowsum(dO * O) - dlse:

    dV = P^T dO    dP = dO V^T    dS = P * (dP - delta)    dQ = scale dS K    dK = scale dS^T Q

With a softcap S = cap t, t = tanh(scale Q K^T / cap), and dS is multiplied by 1 - t^2. Nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from helion_attn.options import ScoreOptions

#: Scores held at once, in elements: bounds the memory at any length.
SCORES_AT_ONCE = 2**25


class Gradients(NamedTuple):
    """Gradients of Q, K and V, and a softcap's share of the sums of dS."""

    dq: torch.Tensor  # [B, H, M, D]
    dk: torch.Tensor  # [B, H_kv, N, D]
    dv: torch.Tensor  # [B, H_kv, N, D_v]
    capped: torch.Tensor | None  # fp32 [B, H, M], what a softcap takes from each row's sum of dS; None without one


def hidden_scores(
    first_row: int,
    last_row: int,
    first_key: int,
    last_key: int,
    offset: int,
    scores: ScoreOptions,
    device: torch.device,
) -> torch.Tensor | None:
    """Which scores of some rows and keys `scores` hides, bool [rows, keys]; None if none. `offset` is N - M."""
    if scores.left < 0 and scores.right < 0:
        return None
    rows, keys = (torch.arange(*ends, device=device) for ends in ((first_row, last_row), (first_key, last_key)))
    from_diagonal = keys - (rows.unsqueeze(1) + offset)
    hidden = torch.zeros_like(from_diagonal, dtype=torch.bool)
    if scores.right >= 0:
        hidden |= from_diagonal > scores.right
    if scores.left >= 0:
        hidden |= from_diagonal < -scores.left
    return hidden


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_out: torch.Tensor,
    delta: torch.Tensor,
    lse: torch.Tensor,
    lse_shift: torch.Tensor | None,
    scores: ScoreOptions,
    visible: Callable[[int, int], torch.Tensor] | None,
) -> Gradients:
    """Compute the gradients.

    Args:
        q: fp32 [B, H, M, D].
        k: fp32 [B, H_kv, N, D].
        v: fp32 [B, H_kv, N, D_v].
        d_out: fp32 [B, H, M, D_v].
        delta: fp32 [B, H, M].
        lse: fp32 [B, H, M]; inf of a row that sees no key.
        lse_shift: fp32 [B, H, M], what scores have besides `q k^T`; only a softcap can tell. Or None.
        scores: which scores there are, and how they are scaled.
        visible: gives which of these there are, bool [B, H, rows, N], for a first and a last row; None for all.
    """
    (B, H, M, _), (H_kv, N) = q.shape, k.shape[1:3]
    scale, cap = scores.scale, scores.softcap
    # [B, H_kv, G, M, ...]; K and V [B, H_kv, 1, N, ...]
    q, d_out, delta, lse = (x.unflatten(1, (H_kv, H // H_kv)) for x in (q, d_out, delta, lse))
    if lse_shift is not None:
        lse_shift = lse_shift.unflatten(1, (H_kv, H // H_kv))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    capped = None if cap is None else torch.zeros_like(lse)
    rows = max(1, SCORES_AT_ONCE // (B * H * N))
    for i in range(0, M, rows):
        j = min(i + rows, M)
        first = 0 if scores.left < 0 else max(0, i + N - M - scores.left)
        last = N if scores.right < 0 else min(N, j + N - M + scores.right)
        if first >= last:
            continue
        k_i, v_i = (x[:, :, None, first:last] for x in (k, v))
        q_i, d_out_i = q[:, :, :, i:j], d_out[:, :, :, i:j]
        # [B, H_kv, G, rows, keys]
        s = q_i @ k_i.mT * scale
        if cap is not None:
            if lse_shift is not None:
                s = s + scale * lse_shift[:, :, :, i:j, None]
            t = torch.tanh(s / cap)
            s = cap * t
        p = torch.exp(s - lse[:, :, :, i:j, None])
        d_s = d_out_i @ v_i.mT - delta[:, :, :, i:j, None]
        hidden = hidden_scores(i, j, first, last, N - M, scores, q.device)
        if visible is not None:
            unseen = ~visible(i, j)[..., first:last].unflatten(1, (H_kv, H // H_kv))
            hidden = unseen if hidden is None else hidden | unseen
        if hidden is not None:  # what is hidden may be anything, NaN included
            p, d_s = p.masked_fill(hidden, 0.0), d_s.masked_fill(hidden, 0.0)
        d_s = p * d_s
        if cap is not None and capped is not None:
            capped[:, :, :, i:j] = (d_s * t * t).sum(4)
            d_s = d_s * (1 - t * t)
        dq[:, :, :, i:j] = d_s @ k_i * scale
        # [B, H_kv, G * rows, ...]: products sum over the group.
        dk[:, :, first:last] += d_s.flatten(2, 3).mT @ q_i.flatten(2, 3) * scale
        dv[:, :, first:last] += p.flatten(2, 3).mT @ d_out_i.flatten(2, 3)
    return Gradients(dq.flatten(1, 2), dk, dv, None if capped is None else capped.flatten(1, 2))
