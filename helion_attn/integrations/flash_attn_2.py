"""flash-attn 2's functions for packed Q, K and V, with its arguments, on those of flash-attn 3."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from helion_attn.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from helion_attn.integrations.flash_attn_arguments import ALIBI, ORDER_2, is_number
from helion_attn.integrations.rules import check_supported
from helion_attn.names import reject_unknown_kwargs
from helion_attn.types import BALANCED, Auto, Recipe, RecipeName


@reject_unknown_kwargs
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    recipe: Recipe | RecipeName | Auto = BALANCED,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """`flash_attn_func` of packed Q, K and V, with flash-attn 2's arguments.

    Args:
        qkv: [B, S, 3, H, D], bf16, fp16 or fp32.
        dropout_p: 0.
        softmax_scale: and all others as in `flash_attn_func`.

    Returns:
        out [B, S, H, D]; with `return_attn_probs` (out, lse, None), where flash-attn 2 has its dropout mask last.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `flash_attn_func`.

    Example:
        qkv = torch.randn(1, 100, 3, 2, 64, dtype=torch.bfloat16)
        out = ha.flash_attn_qkvpacked_func(qkv, causal=True)
    """
    q, k, v = _unpacked("qkv", qkv, 3, 5)
    attend = functools.partial(flash_attn_func, q, k, v, recipe=recipe)
    return _called(
        "flash_attn_qkvpacked_func", attend, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


@reject_unknown_kwargs
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    recipe: Recipe | RecipeName | Auto = BALANCED,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """`flash_attn_func` of packed K and V, with flash-attn 2's arguments.

    Args:
        q: [B, M, H, D], bf16, fp16 or fp32.
        kv: [B, N, 2, H_kv, D].
        dropout_p: 0.
        softmax_scale: and all others as in `flash_attn_func`.

    Returns:
        out [B, M, H, D]; with `return_attn_probs` (out, lse, None), where flash-attn 2 has its dropout mask last.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `flash_attn_func`.

    Example:
        q = torch.randn(1, 100, 4, 64, dtype=torch.bfloat16)
        kv = torch.randn(1, 100, 2, 2, 64, dtype=torch.bfloat16)
        out = ha.flash_attn_kvpacked_func(q, kv, causal=True)
    """
    k, v = _unpacked("kv", kv, 2, 5)
    attend = functools.partial(flash_attn_func, q, k, v, recipe=recipe)
    return _called(
        "flash_attn_kvpacked_func", attend, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


@reject_unknown_kwargs
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    recipe: Recipe | RecipeName = BALANCED,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """`flash_attn_varlen_func` of packed Q, K and V, with flash-attn 2's arguments.

    Args:
        qkv: [tokens, 3, H, D], bf16, fp16 or fp32.
        cu_seqlens: int32 [B + 1], as `flash_attn_varlen_func` has it of Q.
        max_seqlen: not looked at.
        dropout_p: 0.
        softmax_scale: and all others as in `flash_attn_varlen_func`.

    Returns:
        out [tokens, H, D]; with `return_attn_probs` (out, lse, None), where flash-attn 2 has its dropout mask last.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `flash_attn_varlen_func`.

    Example:
        qkv = torch.randn(50, 3, 2, 64, dtype=torch.bfloat16)
        cu_seqlens = torch.tensor([0, 30, 50], dtype=torch.int32)  # 30 tokens and 20
        out = ha.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 30, causal=True)
    """
    q, k, v = _unpacked("qkv", qkv, 3, 4)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    attend = functools.partial(flash_attn_varlen_func, q, k, v, *lengths, recipe=recipe)
    return _called(
        "flash_attn_varlen_qkvpacked_func", attend, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@reject_unknown_kwargs
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    recipe: Recipe | RecipeName = BALANCED,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """`flash_attn_varlen_func` of packed K and V, with flash-attn 2's arguments.

    Args:
        q: [tokens, H, D], bf16, fp16 or fp32.
        kv: [tokens, 2, H_kv, D].
        cu_seqlens_q: int32 [B + 1], as `flash_attn_varlen_func` has it; likewise cu_seqlens_k.
        max_seqlen_q: not looked at; nor max_seqlen_k.
        dropout_p: 0.
        softmax_scale: and all others as in `flash_attn_varlen_func`.

    Returns:
        out [tokens, H, D]; with `return_attn_probs` (out, lse, None), where flash-attn 2 has its dropout mask last.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `flash_attn_varlen_func`.

    Example:
        q = torch.randn(50, 4, 64, dtype=torch.bfloat16)
        kv = torch.randn(50, 2, 2, 64, dtype=torch.bfloat16)
        cu_seqlens = torch.tensor([0, 30, 50], dtype=torch.int32)  # 30 tokens and 20
        out = ha.flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens, 30, 30)
    """
    k, v = _unpacked("kv", kv, 2, 4)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    attend = functools.partial(flash_attn_varlen_func, q, k, v, *lengths, recipe=recipe)
    return _called(
        "flash_attn_varlen_kvpacked_func", attend, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def _unpacked(name: str, packed: torch.Tensor, count: int, ndim: int) -> tuple[torch.Tensor, ...]:
    """The tensors that lie side by side in the third dimension from the last."""
    axes = f"[{'B, S' if ndim == 5 else 'tokens'}, {count}, heads, head dim]"
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"{name} is a {type(packed).__name__}; it must be a torch.Tensor {axes}")
    if packed.dim() != ndim or packed.size(-3) != count:
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; it must be {axes}")
    return packed.unbind(-3)


def _called(
    function: str, attend: Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]], *by_place: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """Return what flash-attn 3's function `attend` returns, with flash-attn 2's third result, which is None.

    Arguments that flash-attn 3 does not have raise, under the name of the function that was called.

    Args:
        function: that was called.
        attend: takes `by_place` by name.
        by_place: as `ORDER_2` names them.
    """
    given = dict(zip(ORDER_2, by_place, strict=True))
    if not is_number(given["dropout_p"]) or given["dropout_p"] != 0:
        raise NotImplementedError(
            f"{function}: dropout_p is {given['dropout_p']!r}; it must be 0.0, as in inference. Arguments are in the "
            f"order of flash-attn 2, with dropout_p before softmax_scale: pass softmax_scale by name"
        )
    check_supported(function, (ALIBI,), given)
    out = attend(**given)
    return (*out, None) if isinstance(out, tuple) else out
