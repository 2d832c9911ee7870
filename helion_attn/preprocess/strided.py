"""How a preprocessing kernel reads a tensor of any strides with wide loads, compiled once.

Triton proves a 16-byte load aligned from what it knows at compile time, and a stride is a run-time argument. So the
strides arrive divided by a constant `unit` and are multiplied back inside the kernel, where the constant is visible.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

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
    unit: int


def strided_rows(x: torch.Tensor) -> StridedRows:
    """View `x` [B, H, S, D], of any strides, as flat memory. Copies nothing."""
    b, h, s, d = x.stride()
    unit = math.gcd(b, h, s, _WIDEST_LOAD // x.element_size()) or 1
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return StridedRows(x.as_strided((extent,), (1,)), b // unit, h // unit, s // unit, d, unit)
