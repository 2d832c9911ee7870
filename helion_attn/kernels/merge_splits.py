"""Attention over runs of keys, put together: out = sum_s exp(lse_s - lse) out_s, lse = log(sum_s exp(lse_s)).

The identity is that of the online softmax (Milakov and Gimelshein, arXiv:1805.02867) and of FlashDecoding. A run
without a key has lse -inf and weighs nothing; a row without a key in any run gives 0, and lse -inf.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable

import torch

from helion_attn.kernels.helion_compat import compiled, helion, hl, interpreted
from helion_attn.kernels.inline_asm import maximum
from helion_attn.numerics import LN2, LOG2E

#: Rows of a program.
MERGED_ROWS = 4


def merge_splits_kernel(
    parts: torch.Tensor,  # [splits, B * H * M, D_v]
    part_lse: torch.Tensor,  # [splits, B * H * M]
    out: torch.Tensor,  # [B * H * M, D_v], written
    lse: torch.Tensor,  # [B * H * M], written
    heads: int,
    m_len: int,
    out_head_step: int,
    out_row_step: int,
    rows: hl.constexpr,
    d_row: hl.constexpr,
    is_cuda: hl.constexpr,
) -> None:
    """The kernel; see the module's docstring. Rows of `out` lie `out_row_step` apart, heads `out_head_step`."""
    splits, total_rows = parts.size(0), parts.size(1)
    d = hl.specialize(parts.size(2))
    hl.specialize((parts.stride(2), out.stride(0), out.stride(1), part_lse.stride(1), lse.stride(0)))
    for tile_index in hl.grid((total_rows + rows - 1) // rows):
        # [rows]
        r = tile_index * rows + hl.arange(rows)
        in_range = r < total_rows
        cols = hl.arange(d_row)
        stored = in_range.unsqueeze(1) & (cols < d).unsqueeze(0)
        largest = hl.full([rows], float("-inf"), dtype=torch.float32)
        for s in hl.grid(splits):
            largest = maximum(largest, hl.load(part_lse, [s, r], extra_mask=in_range), is_cuda)
        # exp(-inf - -inf) would be NaN.
        shift = torch.where(largest == float("-inf"), 0.0, largest)
        total = hl.zeros([rows], dtype=torch.float32)
        # [rows, D_row]
        acc = hl.zeros([rows, d_row], dtype=torch.float32)
        for part in hl.grid(splits):
            weight = torch.exp2((hl.load(part_lse, [part, r], extra_mask=in_range) - shift) * LOG2E)
            total = total + weight
            acc = acc + weight.unsqueeze(1) * hl.load(parts, [part, r, cols], extra_mask=stored)
        o = torch.where((total == 0.0).unsqueeze(1), 0.0, acc * (1.0 / total).unsqueeze(1))
        b = r // (heads * m_len)
        head = r // m_len % heads
        out_rows = b * heads * m_len + head * out_head_step + (r % m_len) * out_row_step
        hl.store(out, [out_rows, cols], o.to(out.dtype), extra_mask=stored)
        hl.store(lse, [r], shift + torch.log2(total) * LN2, extra_mask=in_range)


@functools.cache
def kernel(is_cuda: bool, variant: Hashable) -> helion.Kernel[None]:
    """The kernel for the device; one object for each `variant`, the specialisations."""
    if not is_cuda:
        return interpreted(merge_splits_kernel)
    return compiled(merge_splits_kernel, helion.Config(num_warps=4, indexing="pointer", range_num_stages=[0, 2, 2]))


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
        MERGED_ROWS, d_row, out.is_cuda,
    )  # fmt: skip
