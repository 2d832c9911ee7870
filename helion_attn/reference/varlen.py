"""The fp64 oracle and the rounding model of a packed batch: a loop over its sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import Unpack

from helion_attn.configs import varlen_packing
from helion_attn.names import with_scores
from helion_attn.options import ScoreKwargs
from helion_attn.reference.oracle import attention
from helion_attn.reference.rounding_model import fp8_attention
from helion_attn.types import BALANCED, Recipe, as_recipe

Attention = Callable[..., Any]


def _each_sequence(
    function: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    dtype: torch.dtype,
    *,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of `function` on every sequence; NaN for tokens of none."""
    (M, H, _), D_v = q.shape, v.size(2)
    out = q.new_full((M, H, D_v), float("nan"), dtype=dtype)
    lse = q.new_full((H, M), float("nan"), dtype=dtype)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        if rows.start == rows.stop:
            continue
        if keys.start == keys.stop:
            out[rows] = 0.0
            lse[:, rows] = float("-inf") if sinks is None else sinks.to(dtype).unsqueeze(1)
            continue
        qkv = (x.unsqueeze(0) for x in (q[rows], k[keys], v[keys]))
        one, one_lse = function(*qkv, layout="bshd", sinks=sinks, return_lse=True, **options)
        out[rows], lse[:, rows] = one[0], one_lse[0]
    return out, lse


@with_scores
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    **options: Unpack[ScoreKwargs],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attention` of every sequence.

    Args:
        q: [tokens, H, D], any floating dtype and device.
        k: [tokens, H_kv, D].
        v: [tokens, H_kv, D_v].
        cu_seqlens_q: int [B + 1], ascending; read on the host.
        cu_seqlens_k: likewise.
        causal: and the rest, as in `reference.attention`.

    Returns:
        fp64 out [tokens, H, D_v] and lse [H, tokens]. Tokens of no sequence have NaN.

    Example:
        q, k, v = torch.randn(3, 50, 2, 64, dtype=torch.bfloat16)
        cu_seqlens = torch.tensor([0, 30, 50], dtype=torch.int32)  # 30 tokens and 20
        exact, lse = ha.reference.attention_varlen(q, k, v, cu_seqlens, cu_seqlens)
    """
    return _each_sequence(attention, q, k, v, cu_seqlens_q, cu_seqlens_k, torch.float64, **options)


@with_scores
def fp8_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    recipe: Recipe | str = BALANCED,
    **options: Unpack[ScoreKwargs],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.fp8_attention` of every sequence, with arguments as `attention_varlen`; fp32 out and lse.

    Example:
        q, k, v = torch.randn(3, 50, 2, 64, dtype=torch.bfloat16)
        cu_seqlens = torch.tensor([0, 30, 50], dtype=torch.int32)  # 30 tokens and 20
        model, lse = ha.reference.fp8_attention_varlen(q, k, v, cu_seqlens, cu_seqlens)
    """
    recipe = as_recipe(recipe)
    block_n = varlen_packing(q.size(2), v.size(2), recipe.bits).bn
    return _each_sequence(
        fp8_attention, q, k, v, cu_seqlens_q, cu_seqlens_k, torch.float32, recipe=recipe, out_dtype=torch.float32,
        block_n=block_n, **options,
    )  # fmt: skip
