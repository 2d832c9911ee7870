"""`fp8_attn_fwd`: attention over packed tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helion_attn import calls
from helion_attn.compiler.buffers import sm_count
from helion_attn.configs import LargeTileConfig
from helion_attn.ops import flops
from helion_attn.ops.choose import choose, shape_of
from helion_attn.ops.declare import Operation
from helion_attn.problem import AttentionArgs, Choice

if TYPE_CHECKING:
    from helion_attn.kernels.lib.query import Query

Outputs = tuple[torch.Tensor, torch.Tensor]


def empty_out_and_lse(
    like: torch.Tensor, rows: tuple[int, int, int], d_v: int, bshd: bool, dtype: torch.dtype
) -> Outputs:
    """`out` and fp32 `lse` for [B, H, M] rows."""
    B, H, M = rows
    shape = (B, M, H, d_v) if bshd else (B, H, M, d_v)
    return like.new_empty(shape, dtype=dtype), like.new_empty(rows, dtype=torch.float32)


def empty_outputs(a: AttentionArgs) -> Outputs:
    """`out` and `lse`."""
    B, H = a.packed.q_descale.shape[:2]
    return empty_out_and_lse(a.packed.q_descale, (B, H, a.m_len), a.d_v, a.bshd, a.out_dtype)


def attend(a: AttentionArgs, choice: Choice, query: Query | None = None) -> Outputs:
    """`out` and `lse` of packed tensors, or of a Q that the kernel quantises."""
    from helion_attn.kernels import attention, attention_large_d

    out, lse = empty_outputs(a)
    if isinstance(choice.tile, LargeTileConfig):
        attention_large_d.launch(choice.tile, a, out, lse, choice.head_group)
    else:
        attention.launch(choice, a, out, lse, query=query)
    return out, lse


attention = Operation(
    "fp8_attn_fwd",
    AttentionArgs,
    2,
    lambda a: attend(a, choose(shape_of(a), sm_count(a.packed.q8))),
    empty_outputs,
    flops=flops.of_packed,
    call=calls.of_packed,
)
