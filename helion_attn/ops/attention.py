"""The operations of `attention` and `attention_quantized`: from unquantised tensors, and from packed ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helion_attn import public_calls
from helion_attn.compiler.buffers import sm_count
from helion_attn.configs import LargeTileConfig
from helion_attn.ops import flops
from helion_attn.ops.choose import choose, shape_of, shape_of_dense
from helion_attn.ops.declare import Operation
from helion_attn.problem import AttentionArgs, Choice, DenseArgs
from helion_attn.types import PackedTensors

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


def attention_args(a: DenseArgs, packed: PackedTensors) -> AttentionArgs:
    """Return what attends to its packed tensors."""
    return AttentionArgs(
        packed=packed,
        m_len=a.q.size(2),
        n_len=a.k.size(2),
        d=a.q.size(3),
        d_v=a.v.size(3),
        scores=a.scores,
        bshd=a.bshd,
        out_dtype=a.out_dtype,
        recipe=a.recipe,
        num_splits=a.num_splits,
        block_mask=a.block_mask,
    )


def _launch(a: DenseArgs) -> Outputs:
    from helion_attn.kernels.lib.query import Query
    from helion_attn.preprocess import tail
    from helion_attn.preprocess.pipeline import quantize_qkv

    choice = choose(shape_of_dense(a), sm_count(a.q), a)
    packed = quantize_qkv(a, packs_q=not choice.quantises_q)
    if a.block_mask.tail is not None:
        packed = tail.launch(packed, a.recipe, a.q.size(3), a.v.size(3))
    return attend(attention_args(a, packed), choice, Query(a.q, a.rope) if choice.quantises_q else None)


def _fake(a: DenseArgs) -> Outputs:
    B, H, M, _D = a.q.shape
    return empty_out_and_lse(a.q, (B, H, M), a.v.size(3), a.bshd, a.out_dtype)


attention = Operation(
    "attention",
    DenseArgs,
    2,
    _launch,
    _fake,
    flops=flops.of_attention,
    call=public_calls.of_attention,
)
attention_quantized = Operation(
    "attention_quantized",
    AttentionArgs,
    2,
    lambda a: attend(a, choose(shape_of(a), sm_count(a.packed.q8))),
    empty_outputs,
    flops=flops.of_attention_quantized,
    call=public_calls.of_attention_quantized,
)
