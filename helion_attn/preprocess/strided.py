"""How a preprocessing kernel reads tensors of any strides with wide loads, compiled once.

Triton proves a 16-byte load aligned from what it knows at compile time, and a stride is a run-time argument. So the
strides arrive divided by a constant `unit` and are multiplied back inside the kernel, where the constant is visible.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from helion_attn.kernels.helion_compat import hl

_WIDEST_LOAD = 16  # bytes


class StridedRows(NamedTuple):
    """A [B, H, S, D] tensor as flat memory.

    Element (b, h, s, d) is `flat[(b * b_step + h * h_step + s * s_step) * unit + d * d_step]`.
    """

    flat: torch.Tensor
    b_step: int
    h_step: int
    s_step: int
    d_step: int


def common_unit(*tensors: torch.Tensor) -> int:
    """The widest power of two, at most 16 bytes of elements, that divides every stride but the last dimension's."""
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    return math.gcd(*strides, _WIDEST_LOAD // tensors[0].element_size())


def strided_rows(x: torch.Tensor, unit: int) -> StridedRows:
    """View `x` [B, H, S, D], of any strides, as flat memory. Copies nothing."""
    b, h, s, d = x.stride()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return StridedRows(x.as_strided((extent,), (1,)), b // unit, h // unit, s // unit, d)


def load_rows(
    flat: torch.Tensor,
    head_offset: int,
    rows: torch.Tensor,  # [n]
    cols: torch.Tensor,  # [d_tile]
    row_step: int,
    d_step: int,
    size: int,
    d: int,
) -> torch.Tensor:
    """Rows of one head as fp32 [n, d_tile], zero outside `size` x `d`. Inlined into kernels."""
    offsets = head_offset + rows.unsqueeze(1) * row_step + cols.unsqueeze(0) * d_step
    keep = (rows < size).unsqueeze(1) & (cols < d).unsqueeze(0)
    return hl.load(flat, [offsets], extra_mask=keep).to(torch.float32)
