"""`attention_varlen_training` and its backward pass: `dense`, of packed sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from helion_attn.backward import chunked, kernels
from helion_attn.backward.autograd import check_out_dtype, differentiate
from helion_attn.backward.dense import DequantizeRowsArgs, dequantize_rows
from helion_attn.backward.terms import (
    gradient_of_lse,
    row_dots,
    row_sums,
    sink_probability,
    sinks_gradient,
    without_keys,
)
from helion_attn.compiler.slower import warn_slower
from helion_attn.configs import Q_FIELDS, blocks_for
from helion_attn.ops import flops
from helion_attn.ops.attention import Outputs
from helion_attn.ops.declare import Operation
from helion_attn.ops.quantize import empty_descales, empty_packed
from helion_attn.ops.varlen import PackedVarlen, attend, empty_outputs, quantize
from helion_attn.options import ScoreOptions
from helion_attn.preprocess import unpack
from helion_attn.preprocess.dequantize import unmix, unpack_v
from helion_attn.problem import VarlenArgs
from helion_attn.types import Recipe, packed_fields


class VarlenBackwardArgs(NamedTuple):
    """The backward pass of attention over packed sequences."""

    d_out: torch.Tensor  # gradient of `out`, shaped as it
    d_lse: torch.Tensor | None  # fp32 [H, tokens], gradient of `lse`, or None
    out: torch.Tensor  # of the forward pass, [tokens, H, D_v]
    lse: torch.Tensor  # fp32 [H, tokens]
    cu_seqlens_q: torch.Tensor  # int32 [B + 1]
    cu_seqlens_k: torch.Tensor  # int32 [B + 1]
    packed: PackedVarlen  # Q, K and V
    n_tokens: int  # of K and V
    d: int  # head dim of Q and K
    scores: ScoreOptions  # which there are, and what is done to them
    recipe: Recipe  # how the tensors were quantised
    dtype: torch.dtype  # of Q, K and V, and of their gradients


def _launch(a: VarlenArgs) -> tuple[torch.Tensor, ...]:
    packed = quantize(a)
    empty = a.q.new_empty(0, dtype=torch.float32)
    tensors = (empty.new_empty(0) if x is None else x for x in packed.tensors())
    return *attend(a, packed), *tensors, packed.q_blocks


def _fake(a: VarlenArgs) -> tuple[torch.Tensor, ...]:
    (M, H, _D), (N, H_kv), p, B = a.q.shape, a.k.shape[:2], a.packing, a.cu_seqlens_q.size(0) - 1
    m_blocks, n_blocks = blocks_for(M, p.bm, B), blocks_for(N, p.bn, B)
    return (
        *empty_outputs(a),
        *empty_packed(a.q, H, H_kv, m_blocks, n_blocks, p, a.recipe.qk_dtype, a.recipe.pv_dtype),
        *empty_descales(
            a.q, (1, H, m_blocks, p.bm), (1, H_kv, n_blocks), (1, H_kv, n_blocks * p.D_v_pad), (B, H_kv), p, a.recipe,
            a.needs_lse_shift,
        ),
        a.cu_seqlens_q.new_empty(m_blocks, Q_FIELDS),
    )  # fmt: skip


class Tokens(NamedTuple):
    """Where the tokens of a packed batch lie in the packed format."""

    sequence: torch.Tensor  # int64 [tokens], 0 for tokens of none
    inside: torch.Tensor  # bool [tokens], whether a token is of a sequence
    row: torch.Tensor  # int64 [tokens], among the rows of all blocks


def sequences_of(cu_seqlens: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`Tokens.sequence` and `Tokens.inside`."""
    at = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, at, right=True) - 1
    inside = (sequence >= 0) & (sequence < cu_seqlens.size(0) - 1)
    return sequence.where(inside, 0), inside


def query_tokens(a: VarlenBackwardArgs) -> Tokens:
    """Where queries lie: blocks are in the order of the programs, of which `q_blocks` tells."""
    M, bm = a.out.size(0), a.packed.q8.size(2)
    _, begin, length, _, _, first_block = a.packed.q_blocks.long()[:, :6].unbind(1)
    block = torch.arange(begin.size(0), device=begin.device)
    in_sequence = ((block - first_block) * bm).unsqueeze(1) + torch.arange(bm, device=begin.device)
    token = torch.where(in_sequence < length.unsqueeze(1), begin.unsqueeze(1) + in_sequence, M)
    rows = torch.arange(token.numel(), device=begin.device)
    row = rows.new_zeros(M + 1).scatter_(0, token.flatten(), rows)[:M]
    return Tokens(*sequences_of(a.cu_seqlens_q, M), row)


def key_tokens(a: VarlenBackwardArgs) -> Tokens:
    """Where keys lie: blocks are in the order of the batch."""
    bn = a.packed.k8.size(2)
    sequence, inside = sequences_of(a.cu_seqlens_k, a.n_tokens)
    begin = a.cu_seqlens_k.long()
    blocks = (begin.diff() + bn - 1) // bn
    first_block = blocks.cumsum(0) - blocks
    at = torch.arange(a.n_tokens, device=begin.device)
    row = first_block[sequence] * bn + at - begin[sequence]
    return Tokens(sequence, inside, row.where(inside, 0))


def dequantised(
    a: VarlenBackwardArgs, queries: Tokens, keys: Tokens
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 q [tokens, H, D], k [tokens, H_kv, D] less its mean, and v [tokens, H_kv, D_v] with its own."""
    packed, d_v = a.packed, a.out.size(2)

    def rows(x8: torch.Tensor, descale: torch.Tensor, at: Tokens) -> torch.Tensor:
        # Descales [1, heads, blocks, block or 1]
        of_row = descale.expand(-1, -1, -1, x8.size(2)).flatten(2)[0][:, at.row]
        return (x8.flatten(1, 2)[:, at.row].float() * of_row.unsqueeze(2)).transpose(0, 1)

    q = unmix(rows(packed.q8, packed.q_descale, queries)[:, :, : a.d], a.recipe)
    k = unmix(rows(packed.k8, packed.k_descale.unsqueeze(3), keys)[:, :, : a.d], a.recipe)
    v8 = unpack_v(packed.v8)
    of_block = packed.v_descale.view(v8.size(0), v8.size(1), v8.size(3))
    v = (v8 * of_block.unsqueeze(2)).flatten(1, 2)[:, keys.row].transpose(0, 1)[:, :, :d_v]
    v = v + packed.v_mean[keys.sequence, :, :d_v]
    if packed.channel_factors is not None:
        factors = packed.channel_factors[:, :, : a.d]
        group = q.size(1) // k.size(1)
        q = q / factors.repeat_interleave(group, 1)[queries.sequence]
        k = k * factors[keys.sequence]
    return q, k, v


def lists_of(a: VarlenBackwardArgs, queries: Tokens, keys: Tokens) -> unpack.TokenLists:
    """Return where tokens lie, as the kernels take it."""
    blocks, bn = a.packed.k8.shape[1:3]
    token = torch.arange(a.n_tokens, device=keys.row.device)
    # One more for tokens of no sequence. [N_blocks * bn]
    token_of = token.new_full((blocks * bn + 1,), -1)
    token_of = token_of.scatter_(0, keys.row.where(keys.inside, blocks * bn), token)[:-1]
    of_block = keys.sequence[token_of[::bn].clamp_min(0)] if a.n_tokens else token.new_zeros(blocks)
    found = (queries.row, queries.sequence, keys.row, keys.sequence, token_of, of_block)
    return unpack.TokenLists(*(x.to(torch.int32) for x in found))


def dequantised_16(
    a: VarlenBackwardArgs, queries: Tokens, keys: Tokens, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `dequantised` in 16 bits: on a GPU in one pass, where kernels take it."""
    if not (a.out.is_cuda and unpack.takes(a.packed, a.recipe)):
        q, k, v = dequantised(a, queries, keys)
        return q.to(dtype).contiguous(), k.to(dtype).contiguous(), v.to(dtype).contiguous()
    asked = DequantizeRowsArgs(
        packed=a.packed,
        m_len=a.out.size(0),
        n_len=a.n_tokens,
        d=a.d,
        d_v=a.out.size(2),
        recipe=a.recipe,
        dtype=dtype,
        bshd=True,
        lists=lists_of(a, queries, keys),
    )
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in dequantize_rows(asked))
    return q, k, v


def with_sequences(a: VarlenBackwardArgs) -> tuple[VarlenBackwardArgs, torch.Tensor]:
    """`a`, and whether its tables are ones: else they are 0, and own no token, as others' kernels do not check them.

    The host reads neither.
    """

    def is_table(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
        return (cu_seqlens[0] >= 0) & (cu_seqlens[-1] <= tokens) & (cu_seqlens[1:] >= cu_seqlens[:-1]).all()

    cu_q, cu_k = a.cu_seqlens_q, a.cu_seqlens_k
    found = is_table(cu_q, a.out.size(0)) & is_table(cu_k, a.n_tokens)
    return a._replace(cu_seqlens_q=cu_q.where(found, 0), cu_seqlens_k=cu_k.where(found, 0)), found


def _backward(a: VarlenBackwardArgs) -> tuple[torch.Tensor, ...]:
    scores, packed = a.scores, a.packed
    a, has_sequences = with_sequences(a)
    H = a.out.size(1)
    kernel = kernels.choose(case_of(a))
    queries, keys = query_tokens(a), key_tokens(a)
    # Outputs of no sequence are NaN. [H, M]
    outside = ~queries.inside
    lse = a.lse.masked_fill(outside, 0.0)
    d_out, out = (x.masked_fill(outside[:, None, None], 0.0) for x in (a.d_out, a.out))
    d_lse = gradient_of_lse(None if a.d_lse is None else a.d_lse.masked_fill(outside, 0.0), lse)
    scores_lse, lse_shift = without_keys(lse), None
    if packed.lse_shift is not None:
        lse_shift = packed.lse_shift[0].flatten(1)[:, queries.row]
        scores_lse = scores_lse - scores.scale * lse_shift if scores.is_linear else scores_lse
    capped = None
    if kernel.name == "chunked":
        if kernel.is_slow:
            warn_slower(f"a backward pass of helion_attn takes {kernel}")
        less = row_dots(d_out, out).T if d_lse is None else row_dots(d_out, out).T - d_lse
        q, k, v = dequantised(a, queries, keys)
        dq, dk, dv, capped = _of_each(a, q, k, v, d_out.float(), less, scores_lse, lse_shift)
    else:
        dtype = a.dtype if a.dtype.itemsize == 2 else torch.bfloat16
        q, k, v = dequantised_16(a, queries, keys, dtype)
        d_out_16, out_16 = (x.to(dtype).contiguous() for x in (d_out, out))
        ends = a.cu_seqlens_q, a.cu_seqlens_k
        dq, dk, dv = kernels.run_varlen(kernel, d_out_16, q, k, v, out_16, scores_lse, scores, d_lse, *ends)
        dq = dq.masked_fill(outside[:, None, None], 0.0)
        dk, dv = (x.masked_fill(~keys.inside[:, None, None], 0.0) for x in (dk, dv))
    d_sinks = a.lse.new_empty(0)
    if scores.sinks is not None or d_lse is not None or capped is not None:
        delta, p = row_dots(d_out, out).T, sink_probability(scores.sinks, lse).masked_fill(outside, 0.0)
        if packed.k_mean is not None:
            mean = packed.k_mean[:, :, : a.d].repeat_interleave(H // packed.k8.size(0), 1)[queries.sequence]
            dq = dq.float() + scores.scale * row_sums(delta, p, d_lse, capped).T.unsqueeze(2) * mean
            # The mean is another sequence's there, and may be NaN.
            dq = dq.masked_fill(outside[:, None, None], 0.0)
        if scores.sinks is not None:
            d_sinks = sinks_gradient(delta, p, d_lse)
    found = *(x.to(a.dtype).contiguous() for x in (dq, dk, dv)), d_sinks
    return tuple(x.where(has_sequences, math.nan) for x in found)


def case_of(a: VarlenBackwardArgs) -> kernels.Case:
    """Return what the choice of a backward kernel depends on."""
    return kernels.Case(
        is_cuda=a.out.is_cuda,
        M=a.out.size(0),
        N=a.n_tokens,
        D=a.d,
        D_v=a.out.size(2),
        scores=a.scores,
        block_sparse=False,
        has_lse_gradient=a.d_lse is not None,
        packed_sequences=True,
    )


def _of_each(
    a: VarlenBackwardArgs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_out: torch.Tensor,
    delta: torch.Tensor,
    lse: torch.Tensor,
    lse_shift: torch.Tensor | None,
) -> chunked.Gradients:
    """Compute one sequence after the other, whose ends are read on the host; tokens of none get 0."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    capped = None if a.scores.is_linear else torch.zeros_like(lse)
    starts_q, starts_k = a.cu_seqlens_q.tolist(), a.cu_seqlens_k.tolist()
    for b in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        if rows.start >= rows.stop or keys.start >= keys.stop:
            continue
        q_b, d_out_b, k_b, v_b = (x.transpose(0, 1)[None] for x in (q[rows], d_out[rows], k[keys], v[keys]))
        found = chunked.run(
            q_b, k_b, v_b, d_out_b, delta[None, :, rows], lse[None, :, rows],
            None if lse_shift is None else lse_shift[None, :, rows], a.scores, None,
        )  # fmt: skip
        dq[rows], dk[keys], dv[keys] = (x[0].transpose(0, 1) for x in (found.dq, found.dk, found.dv))
        if capped is not None and found.capped is not None:
            capped[:, rows] = found.capped[0]
    return chunked.Gradients(dq, dk, dv, capped)


def _fake_backward(a: VarlenBackwardArgs) -> tuple[torch.Tensor, ...]:
    (M, H, D_v), H_kv = a.out.shape, a.packed.v_mean.size(1)
    shapes = (M, H, a.d), (a.n_tokens, H_kv, a.d), (a.n_tokens, H_kv, D_v)
    gradients = (a.d_out.new_empty(shape, dtype=a.dtype) for shape in shapes)
    return *gradients, a.lse.new_empty(0 if a.scores.sinks is None else H)


def _kept(a: VarlenArgs, outputs: Sequence[torch.Tensor]) -> VarlenBackwardArgs:
    out, lse, *packed, q_blocks = outputs
    return VarlenBackwardArgs(
        d_out=out,
        d_lse=None,
        out=out,
        lse=lse,
        cu_seqlens_q=a.cu_seqlens_q,
        cu_seqlens_k=a.cu_seqlens_k,
        packed=PackedVarlen(**packed_fields(packed, a.recipe, a.needs_lse_shift), q_blocks=q_blocks),
        n_tokens=a.k.size(0),
        d=a.q.size(2),
        scores=a.scores,
        recipe=a.recipe,
        dtype=a.q.dtype,
    )


attention_varlen_training = Operation(
    "attention_varlen_training", VarlenArgs, 13, _launch, _fake, flops=flops.of_attention_varlen
)
attention_varlen_backward = Operation(
    "attention_varlen_backward", VarlenBackwardArgs, 4, _backward, _fake_backward, planned=False
)
differentiate(
    attention_varlen_training,
    VarlenArgs,
    _kept,
    attention_varlen_backward,
    VarlenBackwardArgs,
    ("q", "k", "v", "scores.sinks"),
)


def attention_varlen_with_gradients(a: VarlenArgs) -> Outputs:
    """`out` and `lse` of attention over packed sequences whose inputs may get gradients.

    Raises:
        TypeError: the output has 8 bits.
    """
    check_out_dtype(a.out_dtype)
    out, lse, *_ = attention_varlen_training(a)
    return out, lse
