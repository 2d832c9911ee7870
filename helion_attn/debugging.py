"""`debug`: whether values on the device are checked, and what calls did inside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary


class Append(NamedTuple):
    """The last keys that were appended to a page: to positions `first` up to `first + keys` of its sequence."""

    first: int
    keys: int


@dataclass
class Seen:
    """A record of calls inside `debug`, against which later calls are checked.

    Attributes:
        appends: the last one to a cache, by its `k8`, and by page.
        balances: of parts that `distributed.shard` cut, by group and tokens of the part.
    """

    appends: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    balances: dict[tuple[str, int], set[str | None]] = field(default_factory=dict)


_SEEN: ContextVar[Seen | None] = ContextVar("seen", default=None)


@contextlib.contextmanager
def debug() -> Iterator[None]:
    """Inside, calls also check what lies on the device, and raise where they would otherwise give NaN, 0 or nonsense.

    Checked are `cu_seqlens` (ascending, within the tokens, no lengths in their place), `cache_seqlens` (within what the
    block table holds), `block_table` (pages of the pool; of an append, none that is written twice), positions
    of a `Rope`, and descales of `flash_attn_func`. Every call reads them on the host, which waits for the device: leave
    the context where speed counts. It holds for the thread that entered it. Code that torch.compile compiled is not
    checked.

    Calls are also held to those before them in the same context: `attention_kvcache` to the last `append_kvcache`
    (`cache_seqlens` that do not count its keys, a q whose heads are as many as its keys), and
    `helion_attn.distributed`'s attention and `unshard` to the `balance` of `shard` and `positions`.

    Raises:
        RuntimeError: a call inside is captured in a CUDA graph, where nothing can be read.

    The calls inside raise ValueError, naming the argument, its value and what is accepted.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        with ha.debug():
            out = ha.attention(q, k, v)
    """
    token = _SEEN.set(Seen())
    try:
        yield
    finally:
        _SEEN.reset(token)


def debugging() -> bool:
    """Whether values are checked."""
    # torch.compile traces no ContextVar.
    return not torch.compiler.is_compiling() and _SEEN.get() is not None


def seen_so_far() -> Seen | None:
    """Return what calls inside `ha.debug()` did, or None outside of it."""
    return _SEEN.get()
