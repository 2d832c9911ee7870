"""The reflection of Q's and K's channels in groups of four: x - (x0 + x1 + x2 + x3) / 2, for each of the four.

I - J/2, J all ones, is orthogonal for four channels, and all its entries are 1/2 or -1/2: it is a Householder
reflection and a Hadamard transform. So Q K^T does not change, and an outlier is spread.
"""

from __future__ import annotations

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.numerics import REFLECTED_GROUP


def reflect_rows(
    x: torch.Tensor,  # [n, D_row]
    n: int,
    d_row: int,
    channels: hl.constexpr,
) -> torch.Tensor:
    """Rows of fp32, of whose first `channels` each four consecutive have half of their sum subtracted.

    Where channels are next to each other, a thread holds whole groups, of a 16-byte load: seven instructions for four
    elements, no shuffle. A strided last dimension is loaded an element at a time, and shuffled. Inlined into kernels.
    """
    groups = d_row // REFLECTED_GROUP
    # [n, groups]
    half = x.reshape(n, groups, 2, 2).sum(3).sum(2) * 0.5
    if channels < d_row:
        half = torch.where((hl.arange(groups) < channels // REFLECTED_GROUP).unsqueeze(0), half, 0.0)
    return (x.reshape(n, groups, REFLECTED_GROUP) - half.unsqueeze(2)).reshape(n, d_row)
