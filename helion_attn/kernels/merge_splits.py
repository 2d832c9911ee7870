"""Merge the splits of split-KV: out = sum_s exp(lse_s - lse) out_s, lse = log(sum_s exp(lse_s)).

A sink is one more term of the second sum, and of that alone. All is fp32.

The identity is that of the online softmax (Milakov and Gimelshein, arXiv:1805.02867) and of FlashDecoding. A split
without a key has lse -inf and weighs nothing; a row without a key in any split gives 0, and lse -inf.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import Runner, compiled, interpreted
from helion_attn.kernels.lib.inline_asm import maximum
from helion_attn.kernels.lib.keys import SplitLists, queries_of_batch, queries_of_sequence
from helion_attn.kernels.lib.scalars import Int, int32
from helion_attn.kernels.lib.steps import to_out_dtype
from helion_attn.numerics import LN2, LOG2E
from helion_attn.problem import PackedBatch

#: Splits that a program, which merges one row, reads at once, and its warps. Of few splits there may be many rows, and
#: then as many as possible should be under way.
FEW_SPLITS, FEW_WARPS = 8, 1
MANY_SPLITS, MANY_WARPS = 32, 4


class MergeSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    at_once: int  # splits that a program reads at once
    d_row: int  # the power of two that holds a row
    has_sinks: bool  # a head has one more logit
    has_lse_shift: bool  # rows have a `lse_shift_scaled` that all of their lse lack
    batch: int  # a power of two that holds the sequences of a packed batch, or 0
    of_few: bool  # splits are of `most_queries` queries of each sequence, those of `fp8_attn_decode`; or of all tokens
    by_sequence: bool  # sequences have splits of their own, from `dynamic_splits`
    is_cuda: bool  # the kernel is compiled; otherwise interpreted


def merge_splits_kernel(
    partial_out: torch.Tensor,  # [splits * split_rows, D_v]
    partial_lse: torch.Tensor,  # [splits * split_rows]
    first_split: torch.Tensor,  # [B] if by_sequence
    own_splits: torch.Tensor,  # [B] if by_sequence
    sinks: torch.Tensor,  # [H] if has_sinks
    lse_shift_scaled: torch.Tensor,  # [B * H * M] if has_lse_shift
    cu_seqlens: torch.Tensor,  # [B + 1] if batch
    seqlens: torch.Tensor,  # [B] if batch
    out: torch.Tensor,  # [B * H * M, D_v], written
    lse: torch.Tensor,  # [B * H * M], written
    total_rows: int,
    split_rows: int,
    all_splits: int,
    heads: int,
    m_len: int,
    most_queries: int,
    out_head_step: int,
    out_row_step: int,
    spec: hl.constexpr,  # MergeSpec
) -> None:
    """The kernel; see the module's docstring. Rows of `out` lie `out_row_step` apart, heads `out_head_step`."""
    d = hl.specialize(partial_out.size(1))
    # Known strides keep loads 16 bytes wide.
    hl.specialize((partial_out.stride(0), partial_out.stride(1), out.stride(0), out.stride(1)))
    hl.specialize((partial_lse.stride(0), sinks.stride(0), lse_shift_scaled.stride(0), lse.stride(0)))
    hl.specialize((cu_seqlens.stride(0), seqlens.stride(0), first_split.stride(0), own_splits.stride(0)))
    for r in hl.grid(total_rows):
        # Split s of the row is there from `first_row` on, `split_rows` apart.
        if spec.by_sequence:
            sequence = r // split_rows
            first_row = hl.load(first_split, [sequence]) * split_rows + r % split_rows
            splits_of_row = hl.load(own_splits, [sequence])
        else:
            first_row, splits_of_row = r + 0, int32(all_splits)
        if spec.batch:
            # [1]; programs of rows that are not there, or another kernel's, read and write nothing.
            row = r + hl.arange(1)
            if spec.of_few:
                head, query = row // most_queries % heads, row % most_queries
                first, queries = queries_of_sequence(cu_seqlens, seqlens, row // (heads * most_queries))
                token = first + query
                is_there = (query < queries) & (queries <= most_queries)
            else:
                # [batch]
                B = cu_seqlens.size(0) - 1
                of_each = queries_of_batch(cu_seqlens, seqlens, B, spec.batch)
                b = hl.arange(spec.batch)
                begin = hl.load(cu_seqlens, [b], extra_mask=b < B)
                token, head = row % m_len, row // m_len
                own = (begin <= r % m_len) & (r % m_len < begin + of_each) & (of_each > most_queries)
                is_there = own.to(torch.int32).sum(0) + 0 * row > 0
            lse_row, out_row = head * m_len + token, head * out_head_step + token * out_row_step
            splits: Int = torch.where(is_there, splits_of_row, 0).sum(0)
        else:
            splits = splits_of_row
        # [D_row]
        cols = hl.arange(spec.d_row)
        # [at_once]
        peak = hl.full([spec.at_once], float("-inf"), dtype=torch.float32)
        for i in hl.grid((splits + spec.at_once - 1) // spec.at_once):
            s = i * spec.at_once + hl.arange(spec.at_once)
            s_lse = hl.load(partial_lse, [s * split_rows + first_row], extra_mask=s < splits)
            s_lse = torch.where(s < splits, s_lse, float("-inf"))
            peak = maximum(peak, s_lse, spec.is_cuda)
        largest = torch.amax(peak, 0)
        if spec.has_sinks:
            # []
            if spec.batch:
                sink = hl.load(sinks, [head]).sum(0)
            else:
                sink = hl.load(sinks, [r // m_len % heads])
            largest = maximum(largest, sink, spec.is_cuda)
        # exp(-inf - -inf) would be NaN.
        finite_largest = torch.where(largest == float("-inf"), 0.0, largest)
        # [at_once]
        total = hl.zeros([spec.at_once], dtype=torch.float32)
        # [D_row]
        acc = hl.zeros([spec.d_row], dtype=torch.float32)
        for j in hl.grid((splits + spec.at_once - 1) // spec.at_once):
            split_idx = j * spec.at_once + hl.arange(spec.at_once)
            at = split_idx * split_rows + first_row
            lse_of_split = hl.load(partial_lse, [at], extra_mask=split_idx < splits)
            lse_of_split = torch.where(split_idx < splits, lse_of_split, float("-inf"))
            weight = torch.exp2((lse_of_split - finite_largest) * LOG2E)
            total = total + weight
            # [at_once, D_row]
            stored = (split_idx < splits).unsqueeze(1) & (cols < d).unsqueeze(0)
            acc = acc + (weight.unsqueeze(1) * hl.load(partial_out, [at, cols], extra_mask=stored)).sum(0)
        of_keys = total.sum(0)
        sum_of_weights = of_keys
        if spec.has_sinks:
            sum_of_weights = sum_of_weights + torch.exp2((sink - finite_largest) * LOG2E)
        no_key = of_keys == 0.0
        if spec.has_sinks:
            no_key = no_key & (sum_of_weights == sum_of_weights)  # a sink that is NaN stays one
        o = torch.where(no_key, 0.0, acc * (1.0 / sum_of_weights))
        if spec.batch:
            written = is_there.unsqueeze(1) & (cols < d).unsqueeze(0)
            hl.store(out, [out_row, cols], to_out_dtype(o, out.dtype).unsqueeze(0), extra_mask=written)
            lse_of_row = finite_largest + torch.log2(sum_of_weights) * LN2 + 0.0 * lse_row
            if spec.has_lse_shift:
                lse_of_row = lse_of_row + hl.load(lse_shift_scaled, [lse_row], extra_mask=is_there)
            hl.store(lse, [lse_row], lse_of_row, extra_mask=is_there)
        else:
            head = r // m_len % heads
            out_row = r // (heads * m_len) * heads * m_len + head * out_head_step + (r % m_len) * out_row_step
            hl.store(out, [out_row, cols], to_out_dtype(o, out.dtype), extra_mask=cols < d)
            lse_of_row = finite_largest + torch.log2(sum_of_weights) * LN2
            if spec.has_lse_shift:
                lse_of_row = lse_of_row + hl.load(lse_shift_scaled, [r])
            lse[r] = lse_of_row


@functools.cache
def kernel(is_cuda: bool, num_warps: int) -> Runner:
    """The kernel for the device."""
    if not is_cuda:
        return interpreted(merge_splits_kernel)
    config = Config(num_warps=num_warps, indexing="pointer", range_num_stages=[0, 1, 1])
    return compiled(merge_splits_kernel, config)


def merge_splits(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bshd: bool,
    sinks: torch.Tensor | None = None,
    lse_shift_scaled: torch.Tensor | None = None,
    batch: PackedBatch | None = None,
    seqlens: torch.Tensor | None = None,
    lists: SplitLists | None = None,
) -> None:
    """Write `out` and `lse`.

    Args:
        partial_out: contiguous fp32 [splits * B * H * M, D_v], each normalised; with `lists`
            [splits * H * M, D_v] of all sequences' splits, where M is the most queries of a sequence.
        partial_lse: contiguous fp32, as many rows, [splits, rows of a split], natural log.
        out: contiguous [B, H, M, D_v], or [B, M, H, D_v] when `bshd`; bf16, fp16, fp32 or e4m3.
        lse: fp32 [B, H, M], natural log.
        bshd: the layout of `out`.
        sinks: fp32 [H], of which no split has, or None.
        lse_shift_scaled: fp32 [B * H * M], added to `lse`, or None.
        batch: if queries are packed; then B is 1 in out and lse.
        seqlens: int32, the keys of each of its sequences.
        lists: where sequences have splits of their own; else each row has all splits.
    """
    B, H, M = lse.shape
    sequences = B if lists is None else lists.own_splits.size(0)
    splits, split_rows = partial_lse.shape
    flat_lse = lse.view(-1)
    # Of sequences with splits of their own, in the mean.
    of_each = splits if lists is None else splits // sequences
    d_row = 1 << (partial_out.size(1) - 1).bit_length()
    at_once, num_warps = (FEW_SPLITS, FEW_WARPS) if of_each <= FEW_SPLITS else (MANY_SPLITS, MANY_WARPS)
    kernel(out.is_cuda, num_warps).run(
        {
            "partial_out": partial_out,
            "partial_lse": partial_lse.view(-1),
            "first_split": flat_lse if lists is None else lists.first_split,
            "own_splits": flat_lse if lists is None else lists.own_splits,
            "sinks": flat_lse if sinks is None else sinks,
            "lse_shift_scaled": flat_lse if lse_shift_scaled is None else lse_shift_scaled,
            "cu_seqlens": flat_lse if batch is None else batch.cu_seqlens,
            "seqlens": flat_lse if seqlens is None else seqlens,
            "out": out.view(-1, out.size(-1)),
            "lse": flat_lse,
            "total_rows": split_rows if lists is None else sequences * split_rows,
            "split_rows": split_rows,
            "all_splits": splits,
            "heads": H,
            "m_len": M,
            "most_queries": 0 if batch is None else batch.most_queries,
            "out_head_step": 1 if bshd else M,
            "out_row_step": H if bshd else 1,
            "spec": MergeSpec(
                at_once,
                d_row,
                has_sinks=sinks is not None,
                has_lse_shift=lse_shift_scaled is not None,
                batch=0 if batch is None else 1 if batch.few else batch.size,
                of_few=batch is not None and batch.few,
                by_sequence=lists is not None,
                is_cuda=out.is_cuda,
            ),
        }
    )
