"""Helion's interpreter in a third of the time: what it does besides computing is done faster, with the same results.

- Every store with a mask looks for places that come twice, by `Tensor.unique(dim=0)`, which compares rows.
- A mode looks at every operation to make new tensors on the kernel's device. On the CPU they are there already.
- Another mode looks at every operation, by its name, for those that Helion does otherwise than PyTorch.
- Every call of one of Helion's functions binds its arguments as `inspect` does, and looks in them for symbolic tiles,
  which only the compiler has.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunction

from helion_attn.compiler.helion_adapter import helion, hl, imported

ref_mode = helion.runtime.ref_mode
RefModeContext, RefModeTorchFunctionMode = ref_mode.RefModeContext, ref_mode.RefModeTorchFunctionMode
Tile = helion.language.tile_proxy.Tile
_unique, _init = torch.Tensor.unique, RefModeContext.__init__
_torch_function, _tiles_to_sizes = RefModeTorchFunctionMode.__torch_function__, Tile._tiles_to_sizes


def unique_rows(
    x: torch.Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """As `Tensor.unique`; rows of int64 by one number each."""
    if dim != 0 or x.dim() != 2 or x.dtype != torch.int64 or not x.numel() or return_inverse or return_counts:
        return _unique(x, sorted, return_inverse, return_counts, dim)
    least = x.amin(0)
    sizes = (x.amax(0) - least + 1).tolist()
    # What one more of each column counts.
    steps = [1]
    for size in reversed(sizes[1:]):
        steps.insert(0, steps[0] * size)
    if steps[0] * sizes[0] >= 2**63:
        return _unique(x, dim=0)
    by_column = torch.tensor(steps)
    found = torch.unique(((x - least) * by_column).sum(1))
    return found.unsqueeze(1) // by_column % torch.tensor(sizes) + least


class OnTheCpu(contextlib.nullcontext[None]):
    """In place of `torch.device("cpu")` where that is the default."""

    type = "cpu"


def _without_a_mode(self: Any, env: Any, config: Any) -> None:
    _init(self, env, config)
    if env.device.type == "cpu" and torch.get_default_device().type == "cpu":
        self.device_ctx = OnTheCpu()


#: Functions that were met, and whether they are PyTorch's own in the interpreter as well.
_PLAIN: dict[Callable[..., Any], bool] = {}


def _is_plain(mode: Any, func: Callable[..., Any]) -> bool:
    """Whether `mode` does with `func` what PyTorch does."""
    name = getattr(func, "__name__", None)
    return not (
        func in mode._func_handlers
        or func in mode._binary_ops
        or name in mode._method_handlers
        or name in mode._binary_op_names
        or name in ("__getitem__", "__setitem__")
    )


def _plainly(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    plain = _PLAIN.get(func)
    if plain is None:
        plain = _PLAIN[func] = _is_plain(self, func)
    return func(*args, **(kwargs or {})) if plain else _torch_function(self, func, types, args, kwargs)


def _without_tiles(it: Any) -> Any:
    return it if ref_mode.is_in_ref_mode_context() else _tiles_to_sizes(it)


class Bound(inspect.BoundArguments):
    """Arguments that have their defaults."""

    def apply_defaults(self) -> None:
        pass


class QuickSignature(inspect.Signature):
    """Binds the arguments of a function that may all be given by name."""

    @functools.cached_property
    def _defaults(self) -> dict[str, Any]:
        return {name: parameter.default for name, parameter in self.parameters.items()}

    def bind(self, /, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        if not ref_mode.is_in_ref_mode_context():
            return super().bind(*args, **kwargs)
        by_place = dict(zip(self._defaults, args, strict=False))
        arguments = self._defaults | by_place | kwargs
        is_right = len(by_place) == len(args) and len(arguments) == len(self._defaults)
        if not is_right or by_place.keys() & kwargs or any(x is self.empty for x in arguments.values()):
            return super().bind(*args, **kwargs)  # which says what is wrong
        return Bound(self, arguments)


def _without_the_mode(access: Callable[..., Any], mask: int) -> Callable[..., Any]:
    """`hl.load` or `hl.store`: under a mask they keep to the tensor themselves, and the mode has nothing to do.

    `mask` is its place among the arguments.
    """

    @functools.wraps(access)
    def under_a_mask(*args: Any) -> Any:
        with contextlib.nullcontext() if args[mask] is None else DisableTorchFunction():
            return access(*args)

    return under_a_mask


def install() -> None:
    """For all kernels of this process."""
    torch.Tensor.unique = unique_rows  # type: ignore[method-assign]
    RefModeContext.__init__ = _without_a_mode
    RefModeTorchFunctionMode.__torch_function__ = _plainly
    Tile._tiles_to_sizes = _without_tiles
    for function in vars(imported(hl)).values():
        if getattr(function, "_helion_api", False) is True:
            parameters = [*function._signature.parameters.values()]
            if all(x.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for x in parameters):
                function._signature = QuickSignature(parameters)
    for access, mask in ((hl.load, 2), (hl.store, 3)):
        access._ref_fn = _without_the_mode(access._ref_fn, mask)
