"""Tables of RoPE."""

from __future__ import annotations

import pytest
import torch

import helion_attn as ha

PAIRING = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def tables(
    positions: int,
    rotary: int,
    *,
    norm: float = 1.0,
    dtype: torch.dtype = torch.float32,
    interleaved: bool = False,
    device: str,
) -> ha.Rope:
    """The usual angles, base 10000, for the first `rotary` channels; cos**2 + sin**2 = norm**2, as YaRN has it."""
    frequencies = 10000.0 ** -(torch.arange(0, rotary, 2, device=device).double() / rotary)
    angles = torch.arange(positions, device=device).double().unsqueeze(1) * frequencies
    return ha.Rope((norm * angles.cos()).to(dtype), (norm * angles.sin()).to(dtype), interleaved)
