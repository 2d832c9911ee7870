"""The mean of a sequence's first page of keys, into a paged cache, before `append` subtracts it.

    x = rope(k) of the first page's keys, all of which one call brings
    mean = sum(x) / keys, in bf16; 0 where noise has as large ones, as in `sample`, and of what is not finite

softmax(q (k - c)) is the same for any constant c. It is that of a whole page so that a longer prompt's chunks do not
matter. A sequence that has keys already has its mean.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.kernels import Runner, compiled, interpreted
from helion_attn.kernels.lib.rope import rope_rows, rope_tables
from helion_attn.kernels.lib.strided import common_unit, load_rows, strided_rows
from helion_attn.numerics import SIGNIFICANT_MEAN
from helion_attn.preprocess.sample import significant_mean
from helion_attn.problem import AppendProblem


class FirstMeanSpec(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        d_step: from a channel of K to the next.
        unit: what the other steps are multiples of.
        bn: keys of a page.
        d: head dim of K.
        d_pad: padded.
        rotary: channels of K that are rotated.
        pairing: how, as `lib.rope` has it.
        threshold: of significant means, as `SIGNIFICANT_MEAN` has it.
        is_cuda: the kernel is compiled; otherwise interpreted.
    """

    d_step: int
    unit: int
    bn: int
    d: int
    d_pad: int
    rotary: int
    pairing: int
    threshold: float
    is_cuda: bool


def first_mean(
    k: torch.Tensor,  # flat
    k_mean: torch.Tensor,  # [num_pages * H_kv * D_pad], written
    block_table: torch.Tensor,  # [B * max_pages]
    cache_seqlens: torch.Tensor,  # [B]
    cos: torch.Tensor,  # [table_rows * rotary / 2]
    sin: torch.Tensor,  # [table_rows * rotary / 2]
    num_pages: int,
    max_pages: int,
    kv_heads: int,
    length: int,
    k_b_step: int,
    k_h_step: int,
    k_s_step: int,
    table_rows: int,
    spec: hl.constexpr,  # FirstMeanSpec
) -> None:
    """The kernel; see the module's docstring."""
    B = cache_seqlens.size(0)
    # Known strides keep loads and stores 16 bytes wide.
    hl.specialize((k.stride(0), k_mean.stride(0), block_table.stride(0), cache_seqlens.stride(0)))
    hl.specialize((cos.stride(0), sin.stride(0)))
    for bh in hl.grid(B * kv_heads):
        b = bh // kv_heads
        h = bh % kv_heads
        page = hl.load(block_table, [b * max_pages])
        begins = (hl.load(cache_seqlens, [b]) == 0) & (page >= 0) & (page < num_pages)
        if begins.to(torch.int32) > 0:
            # [bn, D_pad]
            rows, cols = hl.arange(spec.bn), hl.arange(spec.d_pad)
            offset = (b * k_b_step + h * k_h_step) * spec.unit
            if spec.pairing:
                x = rope_rows(
                    k, cos, sin, cos, cos, cos, offset, 0, 0, rows, k_s_step * spec.unit, spec.d_step, length, spec.d,
                    0, table_rows, spec.bn, spec.d_pad, spec.rotary, spec.pairing, False, 0, 1.0,
                )  # fmt: skip
            else:
                x = load_rows(k, offset, rows, cols, k_s_step * spec.unit, spec.d_step, length, spec.d)
            # [D_pad]
            mean = significant_mean(
                x.sum(0), torch.amin(x, 0), torch.amax(x, 0), spec.bn, spec.threshold, False, spec.is_cuda
            )
            # A key that is not finite must not be every key's affair.
            mean = torch.where(torch.abs(mean) < float("inf"), mean, 0.0)
            at = (page.to(torch.int64) * kv_heads + h) * spec.d_pad + cols
            hl.store(k_mean, [at], mean.to(torch.bfloat16))


@functools.cache
def kernel(is_cuda: bool) -> Runner:
    """The kernel for the device."""
    if not is_cuda:
        return interpreted(first_mean)
    return compiled(first_mean, Config(num_warps=8, indexing="pointer"))


def launch(a: AppendProblem) -> None:
    """Write the means of sequences that begin, of at least a page of keys."""
    (H_kv, L, D), cache = a.k.shape[1:], a.cache
    num_pages, _, bn, D_pad = cache.k8.shape
    assert bn <= L, "there is no whole page"
    unit = common_unit(a.k)
    k = strided_rows(a.k, unit)
    rope = rope_tables(a.rope, D_pad, a.k.new_empty(1, dtype=torch.float32))
    kernel(a.k.is_cuda).run(
        {
            "k": k.flat,
            "k_mean": cache.k_mean.view(-1),
            "block_table": a.block_table.view(-1),
            "cache_seqlens": a.cache_seqlens,
            "cos": rope.cos,
            "sin": rope.sin,
            "num_pages": num_pages,
            "max_pages": a.block_table.size(1),
            "kv_heads": H_kv,
            "length": L,
            "k_b_step": k.b_step,
            "k_h_step": k.h_step,
            "k_s_step": k.s_step,
            "table_rows": rope.table_rows,
            "spec": FirstMeanSpec(
                d_step=k.d_step,
                unit=unit,
                bn=bn,
                d=D,
                d_pad=D_pad,
                rotary=rope.rotary,
                pairing=rope.pairing,
                threshold=SIGNIFICANT_MEAN,
                is_cuda=a.k.is_cuda,
            ),
        }
    )
