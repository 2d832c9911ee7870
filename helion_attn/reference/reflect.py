"""The reflection of Q's and K's channels, in fp64."""

from __future__ import annotations

import torch

from helion_attn.numerics import REFLECTED_GROUP


def reflect(x: torch.Tensor) -> torch.Tensor:
    """`x` with half of the sum of every four consecutive channels subtracted from each of them, in fp64.

    The matrix of a group, I - J/2 with J all ones, is symmetric and orthogonal: applied twice it gives x back.

    Args:
        x: [..., D], any floating dtype and device; the last D % 4 channels stay.

    Example:
        x = torch.randn(100, 64).double()
        assert torch.allclose(ha.reference.reflect(ha.reference.reflect(x)), x)
    """
    x = x.double()
    whole = x.size(-1) // REFLECTED_GROUP * REFLECTED_GROUP
    groups = x[..., :whole].unflatten(-1, (-1, REFLECTED_GROUP))
    return torch.cat([(groups - groups.sum(-1, keepdim=True) / 2).flatten(-2), x[..., whole:]], -1)
