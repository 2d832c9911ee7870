"""State of `debug` that calls read: whether values on the device are checked, and what calls did before."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary


class Append(NamedTuple):
    """The last keys that were appended to a page: to positions `first` up to `first + keys` of its sequence."""

    first: int
    keys: int


@dataclass
class Seen:
    """A record of calls inside `debug`, against which later calls are checked."""

    # The last one to a cache, by its `k8`, and by page.
    appends: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    # Of parts that `distributed.shard` cut, by group and tokens of the part.
    balances: dict[tuple[str, int], set[str | None]] = field(default_factory=dict)
    # The folder that the first bad call is written to; None if none is asked for, or one was written.
    save: Path | None = None
    # Looks at a call while there is such a folder: at the arguments of its operation, at what this returned, at the
    # names of its kernels, and at this record.
    examine: Callable[[Any, Any, str, Seen], None] | None = None


SEEN: ContextVar[Seen | None] = ContextVar("seen", default=None)


def debugging() -> bool:
    """Whether values are checked."""
    # torch.compile traces no ContextVar.
    return not torch.compiler.is_compiling() and SEEN.get() is not None


def seen_so_far() -> Seen | None:
    """Return what calls inside `ha.debug()` did, or None outside of it."""
    return SEEN.get()
