"""Count what reads tensors on the host, where it would wait for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: Functions of PyTorch whose result the host has.
READS = {
    *(getattr(torch.Tensor, name) for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__")),
    *(torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.equal, torch.equal, torch.Tensor.nonzero, torch.nonzero),
    *(torch.Tensor.is_nonzero, torch.is_nonzero, torch.Tensor.allclose, torch.allclose),
}


class HostReads(TorchFunctionMode):
    """Count reads inside the context.

    Attributes:
        names: of the functions, one a call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))
