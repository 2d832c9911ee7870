"""What Helion's host functions launch, and the same launch again with other addresses.

A host function asks tensors for sizes and strides, builds descriptors, and hands some 40 arguments to Triton, which
finds their types, then the kernel for them, encodes the descriptors and only then launches. For arguments with the
shapes, strides, alignments and values of an earlier call, all of that comes out the same but for tensors' addresses
(what a call costs so: docs/performance.md, Host time).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from helion_attn.compiler.helion_adapter import default_launcher
from helion_attn.compiler.triton_hook import KNOWN_TRITONS


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


#: Encoded descriptors that a box remembers: an allocator gives out the same few addresses again.
MAX_ENCODED = 8


class Box(NamedTuple):
    """A descriptor among the arguments of a launch.

    Attributes:
        at: where the encoded descriptor stands.
        arg: which argument of the host function it is of.
        rest: its fields but for the tensor; known to be sound.
        encoding: how it is encoded, as Triton's compiler says.
        known: encoded ones, by address.
    """

    at: int
    arg: int
    rest: dict[str, Any]
    encoding: dict[str, Any]
    known: dict[int, Any]

    def encoded(self, base: torch.Tensor) -> Any:
        """Of `base`, as the driver has it."""
        address = base.data_ptr()
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= MAX_ENCODED:
                self.known.clear()
            # Without the checks.
            descriptor = object.__new__(TensorDescriptor)
            descriptor.__dict__.update(self.rest, base=base)
            found = self.known[address] = driver.make_tensordesc_arg(descriptor, self.encoding, *_no_arguments())[0]
        return found


@functools.cache
def _no_arguments() -> tuple[tuple[()], ...]:
    """From Triton 3.8 on, `make_tensordesc_arg` takes the launch's other arguments too, and does nothing with them."""
    return ((),) * (len(inspect.signature(driver.make_tensordesc_arg).parameters) - 2)


#: What a launch allocates, where it allocates nothing.
NO_SCRATCH = None, None


def to_c(launcher: Any, boxes: int) -> tuple[Callable[..., None], list[dict[str, Any] | None]]:
    """What Triton's launcher calls in C, and how its `boxes` are to be encoded; ValueError if that is not clear.

    Returns:
        A function of the grid, the stream, the CUDA function, a tuple of its packed metadata, metadata for hooks and
        two hooks, and the kernel's arguments; and the encodings.
    """
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise ValueError("it allocates")
    if getattr(launcher, "gsan_enabled", False):
        raise ValueError("it is instrumented")
    around = inspect.getclosurevars(launcher.launch).nonlocals if inspect.isfunction(launcher.launch) else {}
    # With descriptors it is wrapped in what encodes them.
    encodings = around.get("tensordesc_meta") or []
    if len(encodings) != boxes:
        raise ValueError(f"{len(encodings)} descriptors are encoded, of {boxes}")
    in_c = around.get("launcher", launcher.launch)
    options = launcher.launch_cooperative_grid, launcher.launch_pdl
    if hasattr(launcher, "kernel_signature"):
        # From 3.7 on one C function launches all kernels, and is told the types of their arguments.
        types = launcher.arg_annotations, launcher.kernel_signature

        def launch(grid: Any, stream: int, function: Any, metadata: tuple[Any, ...], values: list[Any]) -> None:
            in_c(*grid, stream, function, *options, *metadata, *NO_SCRATCH, *types, values)

    else:

        def launch(grid: Any, stream: int, function: Any, metadata: tuple[Any, ...], values: list[Any]) -> None:
            in_c(*grid, stream, function, *options, *NO_SCRATCH, *metadata, *values)

    return launch, encodings


class Plan:
    """A launch, for arguments of which only the tensors' addresses are other than when it was made.

    What is written after that, encoded descriptors by address, is the same whoever writes it: threads may share it.
    """

    def __init__(self, launch: Launch, compiled: Any, args: Sequence[Any]) -> None:
        """Of `launch`, which `args` led to and for which Triton ran `compiled`; ValueError if it is not known how."""
        if not triton.__version__.startswith(KNOWN_TRITONS):
            raise ValueError(f"how does Triton {triton.__version__} launch?")
        if len(launch.args) != len(launch.kernel.params) or any(name.startswith("_") for name in launch.options):
            raise ValueError("the launcher adds arguments")
        if launch.kernel.launch_metadata is not None:
            raise ValueError("hooks are given arguments")
        if compiled is None:
            raise ValueError("a hook of Triton's kept it from launching")
        objects = [id(arg) for arg in args]
        boxes = sum(isinstance(x, TensorDescriptor) for x in launch.args)
        self._launch, encodings = to_c(compiled.run, boxes)
        self._compiled = compiled
        self._grid = (*launch.grid, 1, 1)[:3]
        # Of `_values`, the C function's arguments, and of `args`.
        self._tensors: list[tuple[int, int]] = []
        self._boxes: list[Box] = []
        self._values: list[Any] = []
        for x in launch.args:
            # By identity: a tensor that the host function made, be it a view, is not in `objects`. Nor does a plan keep
            # the first call's tensors alive.
            if isinstance(x, torch.Tensor):
                self._tensors.append((len(self._values), objects.index(id(x))))
                self._values.append(None)
            elif isinstance(x, TensorDescriptor):
                encoding = encodings[len(self._boxes)]
                if encoding is None:
                    raise ValueError("a descriptor that is not TMA's")
                rest = {name: field for name, field in vars(x).items() if name != "base"}
                self._boxes.append(Box(len(self._values), objects.index(id(x.base)), rest, encoding, {}))
                self._values += [None, *x.shape, *x.strides]
            elif isinstance(x, int | float):
                self._values.append(x)
            else:
                raise ValueError(f"what is {x!r}?")
        device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
        self._device = device.index

    def __call__(self, *args: Any) -> None:
        """Launch it on the current stream, as `JITFunction.run` does from where it has found the kernel."""
        values = self._values.copy()
        for i, arg in self._tensors:
            values[i] = args[arg].data_ptr()
        for box in self._boxes:
            values[box.at] = box.encoded(args[box.arg])
        stream = triton.runtime.driver.active.get_current_stream(self._device)
        # A chain of no hooks is not worth a call into Python.
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        enter = enter if getattr(enter, "calls", enter) else None
        leave = leave if getattr(leave, "calls", leave) else None
        metadata = None
        if enter is not None or leave is not None:
            metadata = self._compiled.launch_metadata(self._grid, stream)
        compiled = self._compiled
        hooks = compiled.packed_metadata, metadata, enter, leave
        self._launch(self._grid, stream, compiled.function, hooks, values)


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
