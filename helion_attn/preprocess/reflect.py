"""The reflection of Q's and K's channels in groups of four: x - (x0 + x1 + x2 + x3) / 2, for each of the four."""

from __future__ import annotations

import torch

from helion_attn.kernels.helion_compat import hl
from helion_attn.numerics import REFLECTED_GROUP


def reflected_channels(D: int) -> int:
    """How many channels of a head dim are in whole groups."""
    return D // REFLECTED_GROUP * REFLECTED_GROUP


def reflection(D: int) -> torch.Tensor:
    """It as a matrix, fp32 [D, D]: orthogonal, and its own inverse."""
    groups = torch.full((REFLECTED_GROUP, REFLECTED_GROUP), 0.5)
    of_groups = torch.block_diag(*[groups] * (D // REFLECTED_GROUP), *[torch.zeros(1, 1)] * (D % REFLECTED_GROUP))
    return torch.eye(D) - of_groups


def reflect_rows(
    x: torch.Tensor,  # [n, D_pad]
    n: int,
    d_pad: int,
    channels: hl.constexpr,
) -> torch.Tensor:
    """Rows of fp32, of whose first `channels` each four consecutive have half of their sum subtracted.

    A thread holds whole groups, of a 16-byte load: seven instructions for four elements, no shuffle. Inlined into
    kernels.
    """
    groups = d_pad // REFLECTED_GROUP
    # [n, groups]
    half = x.reshape(n, groups, 2, 2).sum(3).sum(2) * 0.5
    if channels < d_pad:
        half = torch.where((hl.arange(groups) < channels // REFLECTED_GROUP).unsqueeze(0), half, 0.0)
    return (x.reshape(n, groups, REFLECTED_GROUP) - half.unsqueeze(2)).reshape(n, d_pad)
