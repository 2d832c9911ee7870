"""Helion's interpreter in half the time: what it does besides computing is done faster, with the same results.

- Every store with a mask looks for places that come twice, by `Tensor.unique(dim=0)`, which compares rows.
- A mode looks at every operation to make new tensors on the kernel's device. On the CPU they are there already.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from helion_attn.compiler.helion_adapter import helion

RefModeContext = helion.runtime.ref_mode.RefModeContext
_unique, _init = torch.Tensor.unique, RefModeContext.__init__


def unique_rows(
    x: torch.Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """As `Tensor.unique`; rows of int64 by one number each."""
    if dim != 0 or x.dim() != 2 or x.dtype != torch.int64 or not x.numel() or return_inverse or return_counts:
        return _unique(x, sorted, return_inverse, return_counts, dim)
    least = x.amin(0)
    sizes = (x.amax(0) - least + 1).tolist()
    # What one more of each column counts.
    steps = [1]
    for size in reversed(sizes[1:]):
        steps.insert(0, steps[0] * size)
    if steps[0] * sizes[0] >= 2**63:
        return _unique(x, dim=0)
    by_column = torch.tensor(steps)
    found = torch.unique(((x - least) * by_column).sum(1))
    return found.unsqueeze(1) // by_column % torch.tensor(sizes) + least


class OnTheCpu(contextlib.nullcontext[None]):
    """In place of `torch.device("cpu")` where that is the default."""

    type = "cpu"


def _without_a_mode(self: Any, env: Any, config: Any) -> None:
    _init(self, env, config)
    if env.device.type == "cpu" and torch.get_default_device().type == "cpu":
        self.device_ctx = OnTheCpu()


def install() -> None:
    """For all kernels of this process."""
    torch.Tensor.unique = unique_rows  # type: ignore[method-assign]
    RefModeContext.__init__ = _without_a_mode
