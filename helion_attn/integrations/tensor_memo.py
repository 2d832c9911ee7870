"""A memo of values made of tensors. It forgets one when a tensor is gone or is written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

Made = TypeVar("Made")


@dataclass(frozen=True)
class Entry(Generic[Made]):
    """A value, and the tensors that it was made of."""

    tensors: list[weakref.ref[torch.Tensor]]  # it was made of these
    # The version of each, which grows when PyTorch writes to it, its address and its shape.
    states: list[tuple[int, int, torch.Size]]
    made: Made  # of them

    def matches(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Return whether these are the tensors, and are what they were."""
        for reference, state, x in zip(self.tensors, self.states, tensors, strict=False):
            if reference() is not x or (x._version, x.data_ptr(), x.shape) != state:
                return False
        return True


class TensorMemo(Generic[Made]):
    """Keep what is made of tensors, for each stream, until PyTorch has written to a tensor or given it other memory.

    Nothing is kept of tensors that do not count their changes: those made in `torch.inference_mode`, and outputs of
    CUDA graphs that torch.compile replays into them.

    Args:
        make: returns what is kept, of a tuple of tensors and of what else it depends on.
    """

    def __init__(self, make: Callable[..., Made]) -> None:
        self.make = make
        self._entries: dict[Hashable, Entry[Made]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tensors: tuple[torch.Tensor, ...], *rest: Hashable) -> Made | None:
        """Return what is kept; None if nothing is."""
        entry = self._entries.get(key_of(tensors, rest))
        return entry.made if entry is not None and entry.matches(tensors) else None

    def get(self, tensors: tuple[torch.Tensor, ...], *rest: Hashable) -> Made:
        """Return what is kept, or make it."""
        key = key_of(tensors, rest)
        entry = self._entries.get(key)
        if entry is not None and entry.matches(tensors):
            return entry.made
        made = self.make(tensors, *rest)
        if all(map(counts_changes, tensors)):
            references = [weakref.ref(x, lambda _: self._entries.pop(key, None)) for x in tensors]
            self._entries[key] = Entry(references, [(x._version, x.data_ptr(), x.shape) for x in tensors], made)
        return made

    def drop(self, tensors: tuple[torch.Tensor, ...], *rest: Hashable) -> None:
        """Forget what is kept, if anything is."""
        self._entries.pop(key_of(tensors, rest), None)


def key_of(tensors: tuple[torch.Tensor, ...], rest: tuple[Hashable, ...]) -> Hashable:
    """Return what tells entries apart: the stream, the tensors' identities, and what else they depend on."""
    x = tensors[0]
    # `torch.cuda.current_stream` makes an object.
    stream: Any = torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0
    return stream, *map(id, tensors), *rest


def counts_changes(x: torch.Tensor) -> bool:
    """Return whether a write to a tensor is seen in its version."""
    is_of_a_graph: bool = torch._C._is_cached_tensor(x)  # type: ignore[attr-defined]
    return not (x.is_inference() or is_of_a_graph)
