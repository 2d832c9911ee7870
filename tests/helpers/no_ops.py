"""Stand-ins for the package's ops, which show that bad arguments raise before any launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Launched(Exception):
    """An op was about to run."""


class NoOps:
    """In place of `torch.ops.helion_attn`."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def op(*_: object) -> None:
            raise Launched(name)

        return op
