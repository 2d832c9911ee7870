"""What Helion's host functions launch, and the same launch again with other addresses.

A host function asks tensors for sizes and strides, builds descriptors, and hands some 40 arguments to Triton, which
finds their types, then the kernel for them, and only then launches. For arguments with the shapes, strides, alignments
and values of an earlier call, all of that comes out the same but for tensors' addresses (what a call costs so:
docs/performance.md, Host time).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from helion_attn.kernels.helion_compat import default_launcher

#: Whose way to launch a `Plan` repeats. It is no interface of Triton's; with any other, host functions are called.
TRITON = "3.6."


@dataclass(frozen=True)
class Launch:
    """One call of a host function's launcher.

    Attributes:
        kernel: Triton's `JITFunction`.
        grid: programs, one to three dimensions.
        args: of the kernel.
        options: keyword arguments: warps, stages, registers.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


def recorded(run: Callable[..., Any], args: Sequence[Any]) -> list[Launch]:
    """What `run(*args)` would launch."""
    launches: list[Launch] = []

    def launcher(kernel: Any, grid: tuple[int, ...], *kernel_args: Any, **options: Any) -> None:
        launches.append(Launch(kernel, grid, kernel_args, options))

    run(*args, _launcher=launcher)
    return launches


def descriptor(base: torch.Tensor, rest: dict[str, Any]) -> TensorDescriptor:
    """A `TensorDescriptor` of `base`, whose other fields are known to be sound: without the checks."""
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(rest, base=base)
    return made


class Plan:
    """A launch, for arguments of which only the tensors' addresses are other than when it was made.

    It is not written after that, so threads may share it.
    """

    def __init__(self, launch: Launch, compiled: Any, args: Sequence[Any]) -> None:
        """Of `launch`, which `args` led to and for which Triton ran `compiled`; ValueError if it is not known how."""
        if not triton.__version__.startswith(TRITON):
            raise ValueError(f"how does Triton {triton.__version__} launch?")
        if len(launch.args) != len(launch.kernel.params) or any(name.startswith("_") for name in launch.options):
            raise ValueError("the launcher adds arguments")
        if compiled is None:
            raise ValueError("a hook of Triton's kept it from launching")
        objects = [id(arg) for arg in args]
        self._compiled = compiled
        self._grid = (*launch.grid, 1, 1)[:3]
        self._tensors: list[tuple[int, int]] = []
        self._boxes: list[tuple[int, int, dict[str, Any]]] = []
        # By identity: a tensor that the host function made, be it a view, is not in `objects`.
        for i, x in enumerate(launch.args):
            if isinstance(x, torch.Tensor):
                self._tensors.append((i, objects.index(id(x))))
            elif isinstance(x, TensorDescriptor):
                rest = {name: field for name, field in vars(x).items() if name != "base"}
                self._boxes.append((i, objects.index(id(x.base)), rest))
            elif not isinstance(x, int | float):
                raise ValueError(f"what is {x!r}?")
        # Nor does a plan keep the first call's tensors alive.
        replaced = {i for i, _ in self._tensors} | {i for i, *_ in self._boxes}
        self._values = [None if i in replaced else x for i, x in enumerate(launch.args)]
        device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
        self._device = device.index

    def __call__(self, *args: Any) -> None:
        """Launch it on the current stream, as `JITFunction.run` does from where it has found the kernel."""
        compiled, values = self._compiled, self._values.copy()
        for i, arg in self._tensors:
            values[i] = args[arg].data_ptr()
        for i, arg, rest in self._boxes:
            values[i] = descriptor(args[arg], rest)
        stream = triton.runtime.driver.active.get_current_stream(self._device)
        # A chain of no hooks is not worth a call into Python.
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        enter = enter if getattr(enter, "calls", enter) else None
        leave = leave if getattr(leave, "calls", leave) else None
        metadata = None if enter is None else compiled.launch_metadata(self._grid, stream, *values)
        function, packed = compiled.function, compiled.packed_metadata
        compiled.run(*self._grid, stream, function, packed, metadata, enter, leave, *values)


def launch_first(run: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """Call `run(*args)`, and return what does the same for arguments that differ in addresses alone."""
    launches: list[tuple[Launch, Any]] = []

    def launcher(kernel: Any, grid: tuple[int, ...], *kernel_args: Any, **options: Any) -> None:
        compiled = default_launcher(kernel, grid, *kernel_args, **options)
        launches.append((Launch(kernel, grid, kernel_args, options), compiled))

    run(*args, _launcher=launcher)
    try:
        ((launch, compiled),) = launches
        return Plan(launch, compiled, args)
    except ValueError:
        return run
