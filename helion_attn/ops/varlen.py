"""The operation of `attention_varlen`: every sequence of a batch, from unquantised tensors to the output."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from helion_attn import public_calls
from helion_attn.compiler.buffers import sm_count
from helion_attn.ops import flops
from helion_attn.ops.attention import Outputs
from helion_attn.ops.choose import choose, shape_of
from helion_attn.ops.declare import Operation
from helion_attn.problem import AttentionArgs, VarlenArgs
from helion_attn.types import PackedTensors


@dataclass(frozen=True, eq=False, repr=False)  # of tensors: == of their fields would be ambiguous
class PackedVarlen(PackedTensors):
    """A quantised batch of sequences, in the packed format of `QuantizedQKV` with these differences.

    Every sequence begins with a block of its own. `M_blocks` and `N_blocks` are enough for any sequences of as many
    tokens, since the host does not know them; blocks that remain hold anything. Each block of K and V has the descales
    of its sequence, or its own.

    Attributes:
        q8: [H, M_blocks, bm, D_pad].
        k8: [H_kv, N_blocks, bn, D_pad].
        v8: [H_kv, N_blocks, D_v_pad, bn], or of 16 bits [H_kv, N_blocks, bn, D_v_pad].
        q_descale: [1, H, M_blocks, bm].
        k_descale: [1, H_kv, N_blocks].
        v_descale: [1, H_kv, N_blocks * D_v_pad].
        v_mean: [B, H_kv, D_v_pad], one of each sequence.
        k_mean: [B, H_kv, D_row], or None.
        channel_factors: [B, H_kv, D_row], or None.
        lse_shift: [1, H, M_blocks, bm], or None.
        q_blocks: int32 [M_blocks, Q_FIELDS]: what every block of Q holds; see `configs.Q_FIELDS`.
    """

    q_blocks: torch.Tensor


def quantize(a: VarlenArgs) -> PackedVarlen:
    """Every sequence by itself, quantised and packed."""
    from helion_attn.preprocess.pipeline import quantize_varlen

    packed, q_blocks = quantize_varlen(a)
    return PackedVarlen(**vars(packed), q_blocks=q_blocks)


def empty_outputs(a: VarlenArgs) -> Outputs:
    """`out` and `lse`: neither has a batch."""
    M, H = a.q.shape[:2]
    return (
        a.q.new_empty((M, H, a.v.size(2)), dtype=a.out_dtype),
        a.q.new_empty((H, M), dtype=torch.float32),
    )


def attend(a: VarlenArgs, packed: PackedVarlen) -> Outputs:
    """`out` and `lse` of packed sequences."""
    from helion_attn.kernels import attention

    out, lse = empty_outputs(a)
    if not a.q.size(0):
        return out, lse
    arguments = AttentionArgs(
        packed=packed,
        m_len=a.q.size(0),
        n_len=a.k.size(0),
        d=a.q.size(2),
        d_v=a.v.size(2),
        scores=a.scores,
        bshd=True,
        out_dtype=a.out_dtype,
        recipe=a.recipe,
        num_splits=None,
    )
    choice = choose(shape_of(arguments, "varlen"), sm_count(a.q))
    attention.launch(choice, arguments, out, lse, q_blocks=packed.q_blocks)
    return out, lse


attention_varlen = Operation(
    "attention_varlen",
    VarlenArgs,
    2,
    lambda a: attend(a, quantize(a)),
    empty_outputs,
    flops=flops.of_attention_varlen,
    call=public_calls.of_attention_varlen,
)
