"""Checks of values that lie on the device, which `debug` asks for: they are read on the host."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from helion_attn.compiler import call_plans
from helion_attn.types import PagedKVCache, Rope

_DEBUGGING: ContextVar[bool] = ContextVar("debugging", default=False)


@contextlib.contextmanager
def debug() -> Iterator[None]:
    """Inside, calls also check what lies on the device, and raise where they would otherwise give NaN.

    Checked are `cu_seqlens` (ascending, within the tokens, no lengths in their place), `cache_seqlens` (within what the
    block table holds), `block_table` (pages of the pool; of an append, none that is written twice), positions
    of a `Rope`, and descales of `flash_attn_func`. Every call reads them on the host, which waits for the device: leave
    the context where speed counts. It holds for the thread that entered it. Code that torch.compile compiled is not
    checked.

    Raises:
        RuntimeError: a call inside is captured in a CUDA graph, where nothing can be read.

    The calls inside raise ValueError, naming the argument, its value and what is accepted.
    """
    token = _DEBUGGING.set(True)
    try:
        with call_plans.paused():
            yield
    finally:
        _DEBUGGING.reset(token)


def debugging() -> bool:
    """Whether values are checked."""
    # torch.compile traces no ContextVar.
    return not torch.compiler.is_compiling() and _DEBUGGING.get()


def _read(x: torch.Tensor) -> list[int] | None:
    """The values of a tensor of one dimension; None of a fake one."""
    if isinstance(x, FakeTensor) or x.device.type == "meta":
        return None
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("helion_attn.debug() reads values, which cannot be while a CUDA graph is captured: leave it")
    return x.tolist()


def check_cu_seqlens(name: str, cu_seqlens: torch.Tensor, tokens: int) -> None:
    """Where sequences of `tokens` tokens begin and end."""
    values = _read(cu_seqlens)
    if values is None:
        return
    if values[0] != 0 and sum(values) == tokens:
        raise ValueError(
            f"{name} is {values}, which add up to the {tokens} tokens: lengths; it must be where each sequence begins, "
            f"and the end: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)"
        )
    for b, (start, stop) in enumerate(itertools.pairwise(values)):
        if not 0 <= start <= stop <= tokens:
            raise ValueError(
                f"{name} has {start} and {stop} at {b} and {b + 1}; it must ascend in 0..{tokens}, the number of tokens"
            )


def check_cache_values(
    cache: PagedKVCache, block_table: torch.Tensor, cache_seqlens: torch.Tensor, table_name: str, new_keys: int = 0
) -> None:
    """Lengths that the block table holds, and pages that the pool has; `new_keys` are appended to each sequence."""
    lengths = _read(cache_seqlens)
    if lengths is None:
        return
    room = block_table.size(1) * cache.page_size
    pages, page_size, written = cache.k8.size(0), cache.page_size, dict[int, int]()
    for b, length in enumerate(lengths):
        if not 0 <= length <= room - new_keys:
            new = f" beside the {new_keys} new ones" if new_keys else ""
            raise ValueError(
                f"cache_seqlens[{b}] is {length}; it must lie in 0..{room - new_keys}: {table_name} has "
                f"{block_table.size(1)} pages of {page_size} keys a sequence{new}"
            )
        for i, page in enumerate(_read(block_table[b, : -(-(length + new_keys) // page_size)]) or ()):
            if not 0 <= page < pages:
                raise ValueError(f"{table_name}[{b}, {i}] is {page}; it must lie in 0..{pages - 1}, pages of the cache")
            if new_keys and i >= length // page_size:
                if page in written:
                    raise ValueError(
                        f"{table_name} has page {page} for sequences {written[page]} and {b}; a page that is appended "
                        f"to must be of one sequence"
                    )
                written[page] = b


def check_rope_positions(rope: Rope) -> None:
    """Positions that the tables of a `Rope` have."""
    for name in ("q_positions", "k_positions"):
        positions = getattr(rope, name)
        check_position_values(f"rope.{name}", positions, rope.cos.size(0))


def check_position_values(name: str, positions: torch.Tensor | None, size: int) -> None:
    """Positions in a table of so many."""
    for i, position in enumerate(_read(positions) or () if positions is not None else ()):
        if not 0 <= position < size:
            raise ValueError(f"{name}[{i}] is {position}; it must lie in 0..{size - 1}: rope.cos has {size} positions")
