"""Packed sequences of different lengths, and the answers that their tests compare to."""

from __future__ import annotations

from typing import Any

import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helpers.cases import Case, Tensors

#: Of lists of tensors; and its result is a tensor or a pair, by a bool.
attention_varlen: Any = ha.attention_varlen


def cu_seqlens(sizes: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *sizes], device=device).cumsum(0).to(torch.int32)


def tables(batch: list[tuple[int, int]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return cu_seqlens([m for m, _ in batch], device), cu_seqlens([n for _, n in batch], device)


def packed_qkv(
    batch: list[tuple[int, int]],
    device: str,
    D: int = 32,
    D_v: int | None = None,
    H: int = 4,
    H_kv: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    kind: str = "biased_v",
) -> Tensors:
    """[tokens, heads, head dim]; sequences of different magnitudes, so that a neighbour's descale shows."""
    M, N = (sum(sizes) for sizes in zip(*batch, strict=True))
    q, k, v = make_qkv(kind, 1, H, H_kv, M, N, D, torch.float32, device, D_v=D_v)
    cu = tables(batch, device)
    scale_q, scale_k = (
        torch.linspace(0.5, 2, len(batch), device=device).repeat_interleave(x.diff()).view(1, 1, -1, 1) for x in cu
    )
    return tuple((x[0].transpose(0, 1)).to(dtype) for x in (q * scale_q, k * scale_k, v * scale_k**3))  # type: ignore[return-value]


def make_varlen_case(
    qkv: Tensors, cu: tuple[torch.Tensor, torch.Tensor], recipe: ha.Recipe = ha.BALANCED, **options: Any
) -> Case:
    causal, sm_scale = options.pop("causal", False), options.pop("sm_scale", None)
    oracle = ha.reference.attention_varlen(*qkv, *cu, causal=causal, sm_scale=sm_scale, **options)
    model = ha.reference.fp8_attention_varlen(*qkv, *cu, causal=causal, sm_scale=sm_scale, recipe=recipe, **options)
    return Case(qkv, causal, sm_scale, recipe, *oracle, *model, **options)


def run(
    case: Case, cu: tuple[torch.Tensor, torch.Tensor], out_dtype: torch.dtype | None = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    return attention_varlen(
        *case.qkv,
        *cu,
        causal=case.causal,
        sm_scale=case.sm_scale,
        recipe=case.recipe,
        window=case.window,
        softcap=case.softcap,
        sinks=case.sinks,
        return_lse=True,
        out_dtype=out_dtype,
    )


def assert_right(case: Case, cu: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, lse = run(case, cu)
    assert out.shape == case.oracle.shape
    assert lse.shape == case.oracle_lse.shape
    no_key = case.model_lse == float("-inf")
    assert torch.all(out.transpose(0, 1)[no_key] == 0)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)
