"""The reflection of rows that a preprocessing kernel has loaded. Inlined into kernels."""

from __future__ import annotations

import torch

from helion_attn.kernels.helion_compat import hl
from helion_attn.numerics import REFLECTED_GROUP


def reflect_rows(
    x: torch.Tensor,  # [n, D_pad]
    n: int,
    d_pad: int,
    channels: hl.constexpr,
) -> torch.Tensor:
    """Rows of fp32, of whose first `channels` each four consecutive have half of their sum subtracted.

    A thread holds whole groups, of a 16-byte load: seven instructions for four elements, no shuffle.
    """
    groups = d_pad // REFLECTED_GROUP
    # [n, groups]
    half = x.reshape(n, groups, 2, 2).sum(3).sum(2) * 0.5
    if channels < d_pad:
        half = torch.where((hl.arange(groups) < channels // REFLECTED_GROUP).unsqueeze(0), half, 0.0)
    return (x.reshape(n, groups, REFLECTED_GROUP) - half.unsqueeze(2)).reshape(n, d_pad)
