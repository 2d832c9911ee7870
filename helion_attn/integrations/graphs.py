"""Calls in graphs, of torch.compile and of CUDA, in which the host can read no values."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def is_captured(x: torch.Tensor) -> bool:
    """Return whether what is done with x becomes a part of a graph, which is run again on other values."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def graph_break(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that torch.compile runs as it is: the graph breaks there, and `fullgraph=True` raises.

    That is `torch.compiler.disable`, but for the second that importing it takes: where nothing is compiled, Dynamo is
    not imported.
    """

    @functools.wraps(function)
    def as_it_is(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        eager: Callable[P, R] = torch.compiler.disable(function)
        return eager(*args, **kwargs)

    return as_it_is
