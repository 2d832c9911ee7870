"""Checks of the arguments of `varlen`: packed sequences, and where they lie."""

from __future__ import annotations

import torch

from helion_attn.configs import SUPPORTED_D
from helion_attn.debug_state import debugging
from helion_attn.validate.dense import MIN_D, check_count, check_table, check_tensors
from helion_attn.validate.values import check_cu_seqlens

#: The largest head dim of sequences of variable length, and their tokens: packed, these have room in 32 bits.
MAX_VARLEN_D = SUPPORTED_D[-1]
MAX_TOKENS = 2**30


def check_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    is_part: bool = False,
    differentiable: bool = False,
) -> None:
    """Q, K and V [tokens, heads, head dim], and all of `cu_seqlens` but their values.

    Inside `debug` also these, unless `is_part`: `cu_seqlens` are of more tokens than these.
    """
    check_tensors(
        {"q": q, "k": k, "v": v}, "[tokens, heads, head dim]", may_be_empty=True, differentiable=differentiable
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not MIN_D <= x.size(2) <= MAX_VARLEN_D:
            raise NotImplementedError(
                f"{name} has head dim {x.size(2)}; sequences of variable length must have one in "
                f"{MIN_D}..{MAX_VARLEN_D}"
            )
        if x.size(0) > MAX_TOKENS:
            raise ValueError(f"{name} has {x.size(0)} tokens; it must have at most {MAX_TOKENS}")
    H, H_kv = q.size(1), k.size(1)
    if k.size(2) != q.size(2):
        raise ValueError(f"k has head dim {k.size(2)} and q has {q.size(2)}; they must be equal (v's may differ)")
    if v.size(1) != H_kv:
        raise ValueError(f"v has {v.size(1)} heads and k has {H_kv}; they must be equal")
    if v.size(0) != k.size(0):
        raise ValueError(f"v has {v.size(0)} tokens and k has {k.size(0)}; they must be equal")
    if H % H_kv:
        raise ValueError(f"q has {H} heads and k has {H_kv}; q's must be a multiple of k's")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_table(name, x, q.device)
        if x.dim() != 1 or x.size(0) < 2:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [B + 1], of at least one sequence")
        if x.size(0) != cu_seqlens_q.size(0):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and cu_seqlens_q {tuple(cu_seqlens_q.shape)}; they must be equal"
            )
    check_count("the number of sequences", cu_seqlens_q.size(0) - 1)
    if not is_part:
        check_sequence_values(cu_seqlens_q, cu_seqlens_k, q.size(0), k.size(0))


def check_sequence_values(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, q_tokens: int, k_tokens: int) -> None:
    """Inside `debug`, the values of `cu_seqlens` of so many tokens."""
    if debugging():
        check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q_tokens)
        check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, k_tokens)
