"""Sequences of different lengths in one call, packed without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, overload

import torch
from typing_extensions import Unpack

from helion_attn import ops
from helion_attn.api import mask_arguments, sees_shift
from helion_attn.compiler import call_plans
from helion_attn.configs import varlen_packing
from helion_attn.kernels.lib.arguments import AttentionArguments, VarlenArguments
from helion_attn.ops.dense import packed_fields
from helion_attn.preprocess.lib.arguments import QuantizeVarlenArguments
from helion_attn.types import BALANCED, PackedTensors, Recipe, RecipeName, VarlenOptions, as_recipe
from helion_attn.validate.dense import check_options, check_recipe
from helion_attn.validate.names import named
from helion_attn.validate.varlen import check_varlen


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
        lse_shift: [1, H, M_blocks, bm], or None.
        q_blocks: int32 [M_blocks, Q_FIELDS]: what every block of Q holds; see `configs.Q_FIELDS`.
        M: tokens of Q.
        N: tokens of K and V.
        D: head dim of the unpadded Q and K.
        D_v: head dim of the unpadded V.
        dtype: of the unquantised tensors.
        recipe: the one that it was made with.
    """

    q_blocks: torch.Tensor
    M: int
    N: int
    D: int
    D_v: int
    dtype: torch.dtype
    recipe: Recipe


def quantize_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    recipe: Recipe = BALANCED,
    shift_lse: bool = True,
) -> PackedVarlen:
    """The first half of `attention_varlen`, of checked arguments."""
    D, D_v = q.size(2), v.size(2)
    arguments = QuantizeVarlenArguments(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        packing=varlen_packing(D, D_v, recipe.bits),
        recipe=recipe,
        shift_lse=shift_lse,
    )
    *tensors, q_blocks = ops.quantize_varlen(arguments)
    return PackedVarlen(
        **packed_fields(tensors, recipe, shift_lse),
        q_blocks=q_blocks,
        M=q.size(0),
        N=k.size(0),
        D=D,
        D_v=D_v,
        dtype=q.dtype,
        recipe=recipe,
    )


def attend_varlen(
    packed: PackedVarlen,
    causal: bool = False,
    sm_scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second half of `attention_varlen`, of checked arguments: `(out, lse)`."""
    left, right, softcap, sinks = mask_arguments(causal, window, softcap, sinks)
    attention = AttentionArguments(
        packed=packed,
        sinks=sinks,
        m_len=packed.M,
        n_len=packed.N,
        d=packed.D,
        d_v=packed.D_v,
        left=left,
        right=right,
        sm_scale=float(packed.D**-0.5 if sm_scale is None else sm_scale),
        softcap=softcap,
        bshd=True,
        out_dtype=packed.dtype if out_dtype is None else out_dtype,
        recipe=packed.recipe,
        num_splits=None,
    )
    out, lse = ops.attention_varlen(VarlenArguments(attention=attention, q_blocks=packed.q_blocks))
    return out, lse


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
@named
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    recipe: Recipe | RecipeName = BALANCED,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
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
        out [tokens, H, D_v], and fp32 lse [H, tokens], natural log, if asked for.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
        NotImplementedError: a head dim that only `attention` has; neither a CUDA device of compute capability 9.0
            nor the CPU.
        RuntimeError: an input requires grad, in grad mode, or has a tangent.
    """

    chosen = as_recipe(recipe)

    def run() -> tuple[torch.Tensor, ...]:
        check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)
        check_recipe(chosen, q.size(2), v.size(2))
        check_options(causal, sm_scale, window, softcap, sinks, return_lse, out_dtype, q.size(1), q.device)
        shift_lse = sees_shift(softcap, sinks, return_lse)
        packed = quantize_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, chosen, shift_lse)
        out, lse = attend_varlen(packed, causal, sm_scale, window, softcap, sinks, out_dtype)
        return (out, lse) if return_lse else (out,)

    tensors = q, k, v, cu_seqlens_q, cu_seqlens_k, sinks
    options = causal, sm_scale, chosen, window, softcap, return_lse, out_dtype
    returned = call_plans.planned("attention_varlen", tensors, options, run)
    return (returned[0], returned[1]) if return_lse else returned[0]
