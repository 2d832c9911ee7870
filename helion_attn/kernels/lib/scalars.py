"""Arithmetic on integers of a kernel, inlined into it: ints that are known at run time, and scalar tensors."""

from __future__ import annotations

import builtins
from typing import Any

import torch

from helion_attn.compiler.helion_adapter import helion_builtins, hl

#: An int that a kernel has at run time, or a scalar tensor.
Int = Any


def int32(n: Int) -> torch.Tensor:
    """A run-time int as a scalar tensor; as it is, it would make 64 bits of those that it is added to."""
    return hl.full([], n, dtype=torch.int32)


def quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The quotient, elementwise, of integers that are not negative."""
    return torch.div(a, b, rounding_mode="trunc")


def imin(*numbers: Int) -> Int:
    """The least of ints, or of two that are not both ints. Helpers may not take `min` of run-time ints."""
    if any(isinstance(x, torch.Tensor) for x in numbers):
        a, b = (x if isinstance(x, torch.Tensor) else int32(x) for x in numbers)
        return torch.minimum(a, b)
    if any(isinstance(x, torch.SymInt) for x in numbers):
        return helion_builtins.compute_symbolic_min_max(numbers, builtins.min)
    return min(numbers)


def imax(*numbers: Int) -> Int:
    """The largest of ints, or of two that are not both ints."""
    if any(isinstance(x, torch.Tensor) for x in numbers):
        a, b = (x if isinstance(x, torch.Tensor) else int32(x) for x in numbers)
        return torch.maximum(a, b)
    if any(isinstance(x, torch.SymInt) for x in numbers):
        return helion_builtins.compute_symbolic_min_max(numbers, builtins.max)
    return max(numbers)


def inverse_of_power(x: torch.Tensor) -> torch.Tensor:
    """1 / x of fp32 powers of two, exactly: the biased exponent e becomes 254 - e."""
    return (0x7F000000 - x.view(torch.int32)).view(torch.float32)
