"""Sequences of different lengths in one call, packed without padding."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from typing_extensions import Unpack

from helion_attn import backward, ops, plans
from helion_attn.api import split_tensors
from helion_attn.names import reject_unknown_kwargs
from helion_attn.options import ScoreKwargs, ScoreOptions, VarlenOptions
from helion_attn.problem import VarlenArgs
from helion_attn.types import BALANCED, Recipe, RecipeName, as_recipe
from helion_attn.validate.dense import check_options, check_recipe
from helion_attn.validate.derivatives import needs_gradient
from helion_attn.validate.varlen import check_varlen


def varlen_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    recipe: Recipe | RecipeName = BALANCED,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    **score_kwargs: Unpack[ScoreKwargs],
) -> VarlenArgs:
    """The arguments of `attention_varlen`, checked, as its operation takes them."""
    recipe = as_recipe(recipe)
    check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, differentiable=True)
    check_recipe(recipe, q.size(2), v.size(2))
    given = ScoreOptions(**score_kwargs)
    check_options(given, return_lse, out_dtype, q.size(1), q.device, differentiable=True)
    scores = given.resolved(q.size(2))
    return VarlenArgs(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        scores=scores,
        out_dtype=q.dtype if out_dtype is None else out_dtype,
        recipe=recipe,
        needs_lse_shift=scores.needs_lse_shift(return_lse),
    )


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> torch.Tensor: ...
@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    return_lse: bool,
    **options: Unpack[VarlenOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@reject_unknown_kwargs
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    recipe: Recipe | RecipeName = BALANCED,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` of every sequence of a batch, whose tokens lie one after the other without padding.

    A sequence's result is, bit for bit, the one that it has alone, whatever the others hold. With M and N for its
    queries and keys, masks are those of `attention`; a row without a key gives 0, and lse -inf. Programs start with the
    sequences that have the most keys, so that a long one among short ones does not leave SMs idle at the end.

    Args:
        q: [tokens, H, D], bf16, fp16 or fp32, any strides, such as a slice of [tokens, 3, H, D]; fp32 tensors as
            `quantize` has them. D and D_v in 16..256.
        k: [tokens, H_kv, D]; H is a multiple of H_kv.
        v: [tokens, H_kv, D_v].
        cu_seqlens_q: int32 [B + 1], contiguous: sequence b has tokens `cu_seqlens_q[b]` up to `cu_seqlens_q[b + 1]`,
            none if they are equal. It is not read on the host. Tokens before the first and from the last on are of no
            sequence: their results are NaN. So are all if either table descends, or holds a number that is negative or
            more than there are tokens.
        cu_seqlens_k: int32 [B + 1], of K and V. Their tokens that are of no sequence are not read.
        causal: row i sees keys j <= i + N - M (bottom-right aligned).
        sm_scale: multiplies q k^T; 1 / sqrt(D) by default; in 0..2**64.
        recipe: as in `attention`.
        window: as `attention` has it.
        softcap: as `attention` has it.
        sinks: as `attention` has it.
        return_lse: also return the log-sum-exp of the scores as the softmax sees them, sinks included.
        out_dtype: bf16, fp16, fp32 or float8_e4m3fn; q's by default.

    Returns:
        out [tokens, H, D_v], and fp32 lse [H, tokens], natural log, if asked for; with gradients as `attention` has
        them. Tokens of no sequence have gradients of 0.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
        NotImplementedError: a head dim that only `attention` has; neither a CUDA device of compute capability 9.0
            nor the CPU.
        RuntimeError: as `attention`.

    Example:
        q, k, v = torch.randn(3, 50, 2, 64, dtype=torch.bfloat16)
        cu_seqlens = torch.tensor([0, 30, 50], dtype=torch.int32)  # 30 tokens and 20
        out = ha.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True)
    """

    options: dict[str, Any] = {
        "causal": causal, "sm_scale": sm_scale, "window": window, "softcap": softcap, "recipe": recipe,
        "return_lse": return_lse, "out_dtype": out_dtype,
    }  # fmt: skip
    given = q, k, v, cu_seqlens_q, cu_seqlens_k

    def problem() -> tuple[Any, VarlenArgs]:
        asked = varlen_problem(*given, sinks=sinks, **options)
        learned = needs_gradient(q, k, v, asked.scores.sinks)
        return backward.attention_varlen_with_gradients if learned else ops.attention_varlen, asked

    more, rest = split_tensors(sinks=sinks)
    out, lse = plans.run("attention_varlen", (*given, *more), (*options.values(), *rest), problem)
    return (out, lse) if return_lse else out
