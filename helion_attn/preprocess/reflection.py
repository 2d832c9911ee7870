"""The reflection of Q's and K's channels in groups of four: x - (x0 + x1 + x2 + x3) / 2, for each of the four.

A Householder reflection, and of four channels a Hadamard rotation as well: I - 1/2 is orthogonal, and all its entries
are 1/2 or -1/2. So Q K^T does not change, and an outlier is spread. `reflect` has it for rows in a kernel.
"""

from __future__ import annotations

import torch

from helion_attn.numerics import REFLECTED_GROUP


def reflected_channels(D: int) -> int:
    """How many channels of a head dim are in whole groups; the others stay."""
    return D // REFLECTED_GROUP * REFLECTED_GROUP


def reflection(D: int) -> torch.Tensor:
    """It as a matrix, fp32 [D, D]: orthogonal, and its own inverse."""
    groups = torch.full((REFLECTED_GROUP, REFLECTED_GROUP), 0.5)
    of_groups = torch.block_diag(*[groups] * (D // REFLECTED_GROUP), *[torch.zeros(1, 1)] * (D % REFLECTED_GROUP))
    return torch.eye(D) - of_groups
