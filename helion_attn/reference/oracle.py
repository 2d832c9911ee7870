"""The fp64 oracle."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, overload

import torch
from typing_extensions import Unpack

from helion_attn.configs import MASK_BLOCK
from helion_attn.names import with_scores
from helion_attn.options import OracleOptions, ScoreKwargs, ScoreOptions
from helion_attn.reference.shapes import (
    block_means,
    counted_blocks,
    default_sm_scale,
    hide_keys,
    to_bhsd,
    visible_scores,
)
from helion_attn.types import BlockMask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

#: Scores held at once, in elements: bounds the memory at any length.
_SCORES_AT_ONCE = 2**26


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[OracleOptions],
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True], **options: Unpack[OracleOptions]
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool, **options: Unpack[OracleOptions]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@with_scores
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bhsd",
    block_mask: BlockMask | FlexMask | None = None,
    return_lse: bool = False,
    **options: Unpack[ScoreKwargs],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * sm_scale) v in fp64, the textbook way, a run of query rows of one head at a time.

    Args:
        q: [B, H, M, D], any floating dtype and device; with layout="bshd", H and M swapped; k and v likewise.
        k: [B, H_kv, N, D]; H is a multiple of H_kv.
        v: [B, H_kv, N, D_v].
        causal: row i sees keys j <= i + N - M. A row that sees none gives 0, and lse -inf.
        sm_scale: multiplies q k^T; 1 / sqrt(D) by default.
        layout: "bhsd" or "bshd".
        window: (left, right): row i sees keys i + N - M - left .. i + N - M + right; -1 is unlimited, and with causal
            right is 0.
        softcap: scaled scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118).
        sinks: [H], one more logit of the softmax for each head, with no value (gpt-oss). A row that sees no key gives
            0 still, and lse its sink.
        block_mask: which scores there are besides, as `helion_attn.attention` has it.
        return_lse: also return the log-sum-exp of the scores as the softmax sees them, sinks included, natural log.

    Returns:
        fp64 out, shaped as q with D_v for D, and fp64 lse [B, H, M] if asked for.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        exact = ha.reference.attention(q, k, v, causal=True)
        error = (ha.attention(q, k, v, causal=True) - exact).norm() / exact.norm()
    """
    q, k, v = (to_bhsd(x, layout) for x in (q, k, v))
    B, H, M, D = q.shape
    H_kv, N = k.shape[1], k.shape[2]
    given = ScoreOptions(**options)
    scale, sinks = default_sm_scale(given.sm_scale, D), given.sinks
    out = q.new_empty((B, H, M, v.shape[3]), dtype=torch.float64)
    lse = q.new_empty((B, H, M), dtype=torch.float64)
    rows = max(1, _SCORES_AT_ONCE // N)
    visible = visible_scores(block_mask, B, H)
    counted = counted_blocks(block_mask, given.causal, given.window)
    if counted is not None:
        counted = counted.expand(B, H, -1, -1)
    for b in range(B):
        for h_kv in range(H_kv):
            k64, v64 = k[b, h_kv].double(), v[b, h_kv].double()
            if counted is not None:
                mean_k, v64 = block_means(k64), torch.cat([v64, block_means(v64)])
            for h in range(h_kv * (H // H_kv), (h_kv + 1) * (H // H_kv)):
                for i in range(0, M, rows):
                    q64 = q[b, h, i : i + rows].double()
                    # [rows, N]
                    s = given.capped(q64 @ k64.mT * scale)
                    s = hide_keys(s, i, 0, M, N, given.causal, given.window)
                    if visible is not None:
                        s = s.masked_fill(~visible[b, h, i : i + rows], float("-inf"))
                    if counted is not None:
                        # [rows, N_blocks]
                        of_means = given.capped(q64 @ mean_k.mT * scale) + math.log(MASK_BLOCK)
                        of_means = of_means.masked_fill(~counted[b, h, i : i + rows], float("-inf"))
                        s = torch.cat([s, of_means], 1)
                    sink = s.new_tensor(float("-inf")) if sinks is None else sinks[h].double()
                    # [rows]. Not by the lse: of large scores its last digit is more than the logarithm of a count.
                    top = torch.maximum(s.amax(1), sink)
                    top = torch.where(top == float("-inf"), 0.0, top)
                    p = torch.exp(s - top.unsqueeze(1))
                    total = p.sum(1) + torch.exp(sink - top)
                    normaliser = torch.where(total == 0, 1.0, total)
                    out[b, h, i : i + rows] = (p / normaliser.unsqueeze(1)) @ v64
                    lse[b, h, i : i + rows] = top + total.log()
    out = to_bhsd(out, layout)
    return (out, lse) if return_lse else out
