"""`fp8_attn_dense`: attention from unquantised tensors to the output."""

from __future__ import annotations

from helion_attn import calls
from helion_attn.compiler.buffers import sm_count
from helion_attn.ops import flops
from helion_attn.ops.attention import Outputs, attend, empty_out_and_lse
from helion_attn.ops.choose import choose, shape_of_dense
from helion_attn.ops.declare import Operation
from helion_attn.problem import AttentionArgs, DenseArgs
from helion_attn.types import PackedTensors


def attention_args(a: DenseArgs, packed: PackedTensors) -> AttentionArgs:
    """Return what attends to its packed tensors."""
    return AttentionArgs(
        packed=packed,
        m_len=a.q.size(2),
        n_len=a.k.size(2),
        d=a.q.size(3),
        d_v=a.v.size(3),
        softmax=a.softmax,
        bshd=a.bshd,
        out_dtype=a.out_dtype,
        recipe=a.recipe,
        num_splits=a.num_splits,
        block_mask=a.block_mask,
    )


def _launch(a: DenseArgs) -> Outputs:
    from helion_attn.kernels.lib.query import Query
    from helion_attn.preprocess.quantize import quantize_qkv

    choice = choose(shape_of_dense(a), sm_count(a.q), a)
    packed = attention_args(a, quantize_qkv(a, packs_q=not choice.quantises_q))
    return attend(packed, choice, Query(a.q, a.rope) if choice.quantises_q else None)


def _fake(a: DenseArgs) -> Outputs:
    B, H, M, _D = a.q.shape
    return empty_out_and_lse(a.q, (B, H, M), a.v.size(3), a.bshd, a.out_dtype)


attention_dense = Operation(
    "fp8_attn_dense",
    DenseArgs,
    2,
    _launch,
    _fake,
    flops=lambda a: flops.of_tensors(a.q, a.k, a.v),
    call=calls.of_dense,
)
