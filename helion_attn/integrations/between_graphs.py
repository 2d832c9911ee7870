"""Functions that read values on the host, which no graph of torch.compile can hold."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def between_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """A function that torch.compile runs as it is: it breaks the graph there, and with `fullgraph=True` it raises.

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
