"""The mask that transformers' models carry from their mask function to their attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

#: Operations whose result is a view of all of the mask.
ALIASES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


@dataclass(frozen=True)
class VisibleKeys:
    """A mask, described in place of stored: the mask function makes it, the attention function reads it.

    Computed once a forward pass, so that layers need not read a mask from the device.
    """

    spans: tuple[tuple[int, int], ...]  # (start, stop) for every sequence of the batch: the keys that are not padding
    M: int  # number of queries; the last stands at key N - 1
    N: int  # number of keys
    causal: bool  # a query sees no later key
    left: int | None  # a query sees this many earlier keys; None for all

    def dense(self, device: torch.device | str) -> torch.Tensor:
        """Return the mask by scores: bool [B, 1, M, N], True where a query sees a key."""
        keys = torch.arange(self.N, device=device)
        queries = torch.arange(self.N - self.M, self.N, device=device).unsqueeze(1)
        seen = torch.ones(1, 1, self.M, self.N, dtype=torch.bool, device=device)
        if self.causal:
            seen = seen & (keys <= queries)
        if self.left is not None:
            seen = seen & (keys >= queries - self.left)
        if any(span != (0, self.N) for span in self.spans):
            # [2, B, 1, 1, 1]
            start, stop = torch.tensor(self.spans, device=device).T[:, :, None, None, None]
            seen = seen & (start <= keys) & (keys < stop)
        return seen.expand(len(self.spans), -1, -1, -1)


@dataclass
class Additive:
    """State that operations on a mask share."""

    mask: torch.Tensor | None = None  # as it is added to scores, once an operation has read it
    has_views: bool = False  # whether an operation wrote to it, or gave a view that may be written to


class MaskTensor(torch.Tensor):
    """A mask that models may look at, slice and hand on: [B, 1, M, N], as transformers' eager attention adds it.

    It has no memory. The first operation that reads it makes its numbers, 0 or the dtype's lowest, and later ones share
    them: all of transformers' models take such a mask, but not all take a bool one.

    Attributes:
        seen: what attention reads in its place: a description, or bool [B, 1, M, N].
    """

    seen: VisibleKeys | torch.Tensor
    _additive: Additive
    _anchor: torch.Tensor

    @staticmethod
    def __new__(
        cls, seen: VisibleKeys | torch.Tensor, dtype: torch.dtype, device: torch.device | str, other: Any = None
    ) -> MaskTensor:
        """Make the tensor of what is seen, or a view of all of an `other`."""
        shape = seen.shape if isinstance(seen, torch.Tensor) else (len(seen.spans), 1, seen.M, seen.N)
        mask: MaskTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device(device))
        return mask

    def __init__(
        self, seen: VisibleKeys | torch.Tensor, dtype: torch.dtype, device: torch.device | str, other: Any = None
    ) -> None:
        self.seen = seen
        self._additive = Additive() if other is None else other._additive
        # What torch.compile of a part of a model has for it.
        self._anchor = seen if isinstance(seen, torch.Tensor) else torch.empty(0, device=device)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the numbers, but for a view of all of the mask and a copy on another device."""
        kwargs = kwargs or {}
        if func in ALIASES:
            mask: MaskTensor = args[0]
            return MaskTensor(mask.seen, mask.dtype, mask.device, mask)
        if func is torch.ops.aten._to_copy.default and not args[0]._additive.has_views:
            mask, device = args[0], kwargs.get("device", args[0].device)
            if kwargs.get("dtype", mask.dtype) == mask.dtype:
                seen = mask.seen.to(device) if isinstance(mask.seen, torch.Tensor) else mask.seen
                return MaskTensor(seen, mask.dtype, device)
        may_write = any(found.alias_info is not None for found in func._schema.returns)

        def additive(mask: MaskTensor) -> torch.Tensor:
            mask._additive.has_views |= may_write
            return mask.additive()

        args, kwargs = tree_map_only(MaskTensor, additive, (args, kwargs))
        return func(*args, **kwargs)

    def additive(self) -> torch.Tensor:
        """Return the mask as an ordinary tensor, the same on every call."""
        if self._additive.mask is None:
            # In inference mode a tensor does not count its changes.
            with torch.inference_mode(False), torch.no_grad():
                seen = self.seen if isinstance(self.seen, torch.Tensor) else self.seen.dense(self.device)
                zero = torch.zeros((), dtype=self.dtype, device=self.device)
                self._additive.mask = torch.where(seen, zero, torch.finfo(self.dtype).min)
        return self._additive.mask

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Name the tensors, and what else there is, for torch.compile of a part of a model."""
        return ["_anchor"], (None if isinstance(self.seen, torch.Tensor) else self.seen, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, *_: Any) -> MaskTensor:
        anchor, (seen, dtype) = inner["_anchor"], context
        mask = MaskTensor(anchor if seen is None else seen, dtype, anchor.device)
        mask._anchor = anchor
        return mask


def what_is_seen(mask: Any) -> Any:
    """Return what attention reads of a mask: of a `MaskTensor` what is seen, or numbers that may have changed."""
    if not isinstance(mask, MaskTensor):
        return mask
    return mask.additive() if mask._additive.has_views else mask.seen
