"""`attention_training` and its backward pass: dense attention that returns what its gradients need.

The forward pass is that of `ops.attention`, but that Q is packed at every head dim. The backward pass dequantises Q, K
and V, so that it recomputes the scores that the forward pass had: with the unquantised tensors, P = exp(S - lse) would
be of other scores than lse is of. Rounding is straight-through: gradients are those of the dequantised tensors.

K goes without its mean, and lse without `sm_scale * lse_shift`: the softmax sees no constant in the scores of a row,
and products with a large mean would lose the rest. `terms` says where the mean counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from helion_attn.backward import chunked, kernels
from helion_attn.backward.autograd import check_out_dtype, differentiate
from helion_attn.backward.prologue import without_prologue
from helion_attn.backward.terms import (
    gradient_of_lse,
    row_dots,
    row_sums,
    sink_probability,
    sinks_gradient,
    without_keys,
)
from helion_attn.compiler.buffers import sm_count
from helion_attn.compiler.slower import warn_slower
from helion_attn.masks.blocks import BlockMask
from helion_attn.ops import flops
from helion_attn.ops.attention import Outputs, attend, attention_args, empty_out_and_lse
from helion_attn.ops.choose import choose, shape_of_dense
from helion_attn.ops.declare import Operation
from helion_attn.ops.quantize import all_tensors, empty_quantized
from helion_attn.preprocess import dequantize, unpack
from helion_attn.problem import AttentionArgs, DenseArgs
from helion_attn.types import PackedTensors, Recipe, packed_fields
from helion_attn.validate.block_mask import check_no_tail


class BackwardArgs(NamedTuple):
    """The backward pass of dense attention."""

    d_out: torch.Tensor  # gradient of `out`, shaped as it
    d_lse: torch.Tensor | None  # fp32 [B, H, M], gradient of `lse`, or None
    out: torch.Tensor  # of the forward pass, in its layout
    lse: torch.Tensor  # fp32 [B, H, M]
    forward: AttentionArgs  # what the attention kernel was asked
    dtype: torch.dtype  # of Q, K and V, and of their gradients


def _launch(a: DenseArgs) -> tuple[torch.Tensor, ...]:
    from helion_attn.preprocess.pipeline import quantize_qkv

    packed = quantize_qkv(a)
    return *attend(attention_args(a, packed), choose(shape_of_dense(a), sm_count(a.q))), *all_tensors(packed)


def _fake(a: DenseArgs) -> tuple[torch.Tensor, ...]:
    B, H, M = a.q.shape[:3]
    out, lse = empty_out_and_lse(a.q, (B, H, M), a.v.size(3), a.bshd, a.out_dtype)
    return out, lse, *empty_quantized(a)


def case_of(a: AttentionArgs, is_cuda: bool, has_lse_gradient: bool) -> kernels.Case:
    """Return what the choice of a backward kernel depends on."""
    return kernels.Case(
        is_cuda=is_cuda,
        M=a.m_len,
        N=a.n_len,
        D=a.d,
        D_v=a.d_v,
        scores=a.scores,
        block_sparse=a.block_mask.block_sparse,
        has_lse_gradient=has_lse_gradient,
        packed_sequences=False,
    )


def backward_kernel(a: DenseArgs, has_lse_gradient: bool = False) -> kernels.BackwardKernel:
    """Return the kernel that a GPU's backward pass takes."""
    return kernels.choose(
        kernels.Case(
            is_cuda=True,
            M=a.q.size(2),
            N=a.k.size(2),
            D=a.q.size(3),
            D_v=a.v.size(3),
            scores=a.scores,
            block_sparse=a.block_mask.block_sparse,
            has_lse_gradient=has_lse_gradient,
            packed_sequences=False,
        )
    )


class DequantizeRowsArgs(NamedTuple):
    """Packed tensors, to be 16-bit rows."""

    packed: PackedTensors  # what `preprocess.unpack` takes
    m_len: int  # queries
    n_len: int  # keys
    d: int  # head dim of Q and K
    d_v: int  # of V
    recipe: Recipe  # of the packed tensors
    dtype: torch.dtype  # of the rows
    bshd: bool  # whether the rows lie as [B, S, heads, head dim]
    lists: unpack.TokenLists = unpack.NO_LISTS  # of packed sequences


def _dequantize_rows(a: DequantizeRowsArgs) -> tuple[torch.Tensor, ...]:
    return unpack.launch(a.packed, a.m_len, a.n_len, a.d, a.d_v, a.recipe, a.dtype, a.bshd, a.lists)


def _fake_dequantize_rows(a: DequantizeRowsArgs) -> tuple[torch.Tensor, ...]:
    (B, H), H_kv = a.packed.q_descale.shape[:2], a.packed.k_descale.size(1)
    shapes = (B, H, a.m_len, a.d), (B, H_kv, a.n_len, a.d), (B, H_kv, a.n_len, a.d_v)
    return tuple(laid(a.packed.q8.new_empty(shape, dtype=a.dtype), a.bshd) for shape in shapes)


dequantize_rows = Operation("dequantize_rows", DequantizeRowsArgs, 3, _dequantize_rows, _fake_dequantize_rows)


def dequantised(f: AttentionArgs, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v [B, heads, S, head dim], K without its mean: on a GPU in one pass, where kernels take them."""
    sizes = f.m_len, f.n_len, f.d, f.d_v, f.recipe
    if f.packed.q8.is_cuda and unpack.takes(f.packed, f.recipe):
        return dequantize_rows(DequantizeRowsArgs(f.packed, *sizes, dtype, f.bshd))
    q, k, v = dequantize.unpack(f.packed, *sizes)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def rows_of(x: torch.Tensor, M: int) -> torch.Tensor:
    """A number for each row, [B, H, M], of those that the packed format has, [B, H, M_blocks, bm]."""
    return x.flatten(2)[:, :, :M]


def laid(x: torch.Tensor, bshd: bool) -> torch.Tensor:
    """x [B, heads, S, D], which lies in memory as contiguous [B, heads, S, D] or [B, S, heads, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if bshd else x.contiguous()


def _backward(a: BackwardArgs) -> tuple[torch.Tensor, ...]:
    f, scores, packed = a.forward, a.forward.scores, a.forward.packed
    kernel = kernels.choose(case_of(f, a.out.is_cuda, a.d_lse is not None))
    # [B, heads, S, head dim]
    out, d_out = (x.transpose(1, 2) if f.bshd else x for x in (a.out, a.d_out))
    dtype = a.dtype if a.dtype.itemsize == 2 else torch.bfloat16
    q, k, v = dequantised(f, torch.float32 if kernel.name == "chunked" else dtype)
    lse, lse_shift, d_lse = without_keys(a.lse), None, gradient_of_lse(a.d_lse, a.lse)
    if packed.lse_shift is not None:
        lse_shift = rows_of(packed.lse_shift, f.m_len)
        lse = lse - scores.scale * lse_shift if scores.is_linear else lse
    capped = None
    if kernel.name == "chunked":
        if kernel.is_slow:
            warn_slower(f"a backward pass of helion_attn takes {kernel}")
        less = row_dots(d_out, out) if d_lse is None else row_dots(d_out, out) - d_lse
        visible = visible_scores(f, *a.lse.shape[:2])
        dq, dk, dv, capped = chunked.run(q, k, v, d_out.float(), less, lse, lse_shift, scores, visible)
    else:
        d_out_16, q, k, v, out_16 = (laid(x.to(dtype), f.bshd) for x in (d_out, q, k, v, out))
        dq, dk, dv = kernels.run(kernel, d_out_16, q, k, v, out_16, lse, scores, d_lse)
    d_sinks = a.lse.new_empty(0)
    if scores.sinks is not None or d_lse is not None or capped is not None:
        delta, p = row_dots(d_out, out), sink_probability(scores.sinks, a.lse)
        if packed.k_mean is not None:
            mean = packed.k_mean[:, :, None, : f.d].repeat_interleave(q.size(1) // k.size(1), 1)
            dq = dq.float() + scores.scale * row_sums(delta, p, d_lse, capped).unsqueeze(3) * mean
        if scores.sinks is not None:
            d_sinks = sinks_gradient(delta, p, d_lse)
    return *(laid(x.to(a.dtype), f.bshd) for x in (dq, dk, dv)), d_sinks


def visible_scores(f: AttentionArgs, B: int, H: int) -> Callable[[int, int], torch.Tensor] | None:
    """Give the scores of rows that a block mask shows, bool [B, H, rows, N]; None without a mask."""
    if not f.block_mask.block_sparse:
        return None
    mask = BlockMask._of_lists(f.m_len, f.n_len, *f.block_mask)  # type: ignore[arg-type]
    kinds = mask._kinds()

    def rows(first: int, last: int) -> torch.Tensor:
        return mask._seen_by(torch.arange(first, last, device=kinds.device), kinds).expand(B, H, -1, -1)

    return rows


def _fake_backward(a: BackwardArgs) -> tuple[torch.Tensor, ...]:
    f = a.forward
    (B, H), H_kv = f.packed.q_descale.shape[:2], f.packed.k_descale.size(1)
    shapes = (B, H, f.m_len, f.d), (B, H_kv, f.n_len, f.d), (B, H_kv, f.n_len, f.d_v)
    gradients = (laid(a.d_out.new_empty(shape, dtype=a.dtype), f.bshd) for shape in shapes)
    return *gradients, a.lse.new_empty(0 if f.scores.sinks is None else H)


def _kept(a: DenseArgs, outputs: Sequence[torch.Tensor]) -> BackwardArgs:
    out, lse, *tensors = outputs
    packed = PackedTensors(**packed_fields(tensors, a.recipe, a.needs_lse_shift))
    return BackwardArgs(d_out=out, d_lse=None, out=out, lse=lse, forward=attention_args(a, packed), dtype=a.q.dtype)


attention_training = Operation("attention_training", DenseArgs, 12, _launch, _fake, flops=flops.of_attention)
attention_backward = Operation(
    "attention_backward",
    BackwardArgs,
    4,
    _backward,
    _fake_backward,
    flops=lambda a: flops.of_backward(a.forward),
    planned=False,
)
differentiate(attention_training, DenseArgs, _kept, attention_backward, BackwardArgs, ("q", "k", "v", "scores.sinks"))


def attention_with_gradients(a: DenseArgs) -> Outputs:
    """`out` and `lse` of attention whose inputs may get gradients.

    Raises:
        TypeError: the output has 8 bits.
        ValueError: the block mask has a tail.
    """
    check_out_dtype(a.out_dtype)
    check_no_tail(a.block_mask.tail, "where an input requires grad")
    out, lse, *_ = attention_training(without_prologue(a))
    return out, lse
