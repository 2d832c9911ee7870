"""Attention over runs of keys, put together: out = sum_s exp(lse_s - lse) out_s, lse = log(sum_s exp(lse_s)).

The identity is that of the online softmax (Milakov and Gimelshein, arXiv:1805.02867) and of FlashDecoding. A run
without a key has lse -inf and weighs nothing; a row without a key in any run gives 0, and lse -inf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import torch

from helion_attn.kernels.helion_compat import compiled, helion, hl, interpreted
from helion_attn.kernels.inline_asm import maximum
from helion_attn.numerics import LN2, LOG2E

#: Runs that a program, which merges one row, reads at once.
RUNS_AT_ONCE = 32


def merge_splits_kernel(
    parts: torch.Tensor,  # [splits, B * H * M, D_v]
    part_lse: torch.Tensor,  # [splits, B * H * M]
    out: torch.Tensor,  # [B * H * M, D_v], written
    lse: torch.Tensor,  # [B * H * M], written
    heads: int,
    m_len: int,
    out_head_step: int,
    out_row_step: int,
    at_once: hl.constexpr,
    d_row: hl.constexpr,
    is_cuda: hl.constexpr,
) -> None:
    """The kernel; see the module's docstring. Rows of `out` lie `out_row_step` apart, heads `out_head_step`."""
    splits, total_rows = parts.size(0), parts.size(1)
    d = hl.specialize(parts.size(2))
    hl.specialize((parts.stride(2), out.stride(0), out.stride(1), part_lse.stride(1), lse.stride(0)))
    for r in hl.grid(total_rows):
        # [D_row]
        cols = hl.arange(d_row)
        # [at_once]
        peak = hl.full([at_once], float("-inf"), dtype=torch.float32)
        for i in hl.grid((splits + at_once - 1) // at_once):
            s = i * at_once + hl.arange(at_once)
            known = torch.where(s < splits, hl.load(part_lse, [s, r], extra_mask=s < splits), float("-inf"))
            peak = maximum(peak, known, is_cuda)
        largest = torch.amax(peak, 0)
        # exp(-inf - -inf) would be NaN.
        shift = torch.where(largest == float("-inf"), 0.0, largest)
        # [at_once]
        total = hl.zeros([at_once], dtype=torch.float32)
        # [D_row]
        acc = hl.zeros([d_row], dtype=torch.float32)
        for j in hl.grid((splits + at_once - 1) // at_once):
            run = j * at_once + hl.arange(at_once)
            run_lse = torch.where(run < splits, hl.load(part_lse, [run, r], extra_mask=run < splits), float("-inf"))
            weight = torch.exp2((run_lse - shift) * LOG2E)
            total = total + weight
            # [at_once, D_row]
            stored = (run < splits).unsqueeze(1) & (cols < d).unsqueeze(0)
            acc = acc + (weight.unsqueeze(1) * hl.load(parts, [run, r, cols], extra_mask=stored)).sum(0)
        sum_of_weights = total.sum(0)
        o = torch.where(sum_of_weights == 0.0, 0.0, acc * (1.0 / sum_of_weights))
        head = r // m_len % heads
        out_row = r // (heads * m_len) * heads * m_len + head * out_head_step + (r % m_len) * out_row_step
        hl.store(out, [out_row, cols], o.to(out.dtype), extra_mask=cols < d)
        lse[r] = shift + torch.log2(sum_of_weights) * LN2


@functools.cache
def kernel(is_cuda: bool, variant: Hashable) -> Callable[..., None]:
    """The kernel for the device; one object for each `variant`, the specialisations."""
    if not is_cuda:
        return interpreted(merge_splits_kernel)
    return compiled(merge_splits_kernel, helion.Config(num_warps=4, indexing="pointer", range_num_stages=[0, 1, 1]))


def merge_splits(parts: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, bshd: bool) -> None:
    """Write `out` and `lse`.

    Args:
        parts: fp32 [splits, B * H * M, D_v], each normalised.
        part_lse: fp32 [splits, B * H * M], natural log.
        out: contiguous [B, H, M, D_v], or [B, M, H, D_v] when `bshd`; bf16, fp16 or fp32.
        lse: fp32 [B, H, M], natural log.
        bshd: the layout of `out`.
    """
    _, H, M = lse.shape
    d_row = 1 << (parts.size(2) - 1).bit_length()
    kernel(out.is_cuda, (parts.size(2), out.dtype))(
        parts, part_lse, out.view(-1, out.size(-1)), lse.view(-1), H, M, 1 if bshd else M, H if bshd else 1,
        RUNS_AT_ONCE, d_row, out.is_cuda,
    )  # fmt: skip
