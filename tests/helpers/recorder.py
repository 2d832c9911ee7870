"""What PyTorch's dispatcher is given of this package's ops."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

Call = tuple[Any, tuple[Any, ...]]


class Recorder(TorchDispatchMode):
    """The calls of this package's ops, by name: each op, and its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Call] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "helion_attn":
            self.calls[func.name()] = (func, args)
        return func(*args, **(kwargs or {}))
