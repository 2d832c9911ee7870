"""What Helion's host functions launch, and the same launch again with other addresses.

A host function asks tensors for sizes and strides, builds descriptors, and hands some 40 arguments to Triton, which
finds their types, then the kernel for them, encodes the descriptors and only then launches. For arguments with the
shapes, strides, alignments and values of an earlier call, all of that comes out the same but for tensors' addresses
(what a call costs so: docs/notes/host.md).

Triton offers no way to launch a kernel of which only addresses change. `in_c`, `to_c` and `LinkedLaunch.at` are all
that knows how its launcher does it; where that is not known, launches go through Triton, and a warning says so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from helion_attn.compiler import triton_hook
from helion_attn.compiler.buffers import ALIGNMENT, Buffer
from helion_attn.compiler.helion_runtime.launcher import default_launcher
from helion_attn.compiler.slower import warn_slower
from helion_attn.compiler.versions import triton_is_known


class Launch(NamedTuple):
    """One call of a host function's launcher."""

    kernel: Any  # Triton's `JITFunction`
    grid: tuple[int, ...]  # programs, one to three dimensions
    args: tuple[Any, ...]  # of the kernel
    options: dict[str, Any]  # keyword arguments: warps, stages, registers


def recorded(host_fn: Callable[..., Any], args: Sequence[Any]) -> list[Launch]:
    """Return what `host_fn(*args)` would launch."""
    launches: list[Launch] = []

    def launcher(kernel: Any, grid: tuple[int, ...], *kernel_args: Any, **options: Any) -> None:
        launches.append(Launch(kernel, grid, kernel_args, options))

    host_fn(*args, _launcher=launcher)
    return launches


def types_of(launch: Launch) -> Hashable:
    """All that Triton compiles a kernel for: constants, types of arguments, and what it looks at of numbers."""
    return (id(launch.kernel), *map(_type_of, launch.kernel.params, launch.args), *sorted(launch.options.items()))


def _type_of(parameter: Any, x: Any) -> Hashable:
    kind = type(x)
    if kind is int and not parameter.is_constexpr:
        bits = 32 if -(2**31) <= x < 2**31 else 64
        return bits if parameter.do_not_specialize else (bits, x == 1, x % ALIGNMENT == 0)
    if kind is Buffer or isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % ALIGNMENT == 0
    if kind is TensorDescriptor:
        return x.base.dtype, *x.block_shape
    return kind, x if parameter.is_constexpr else None


class Address(NamedTuple):
    """The parts of a tensor that an encoded descriptor needs."""

    address: int

    def data_ptr(self) -> int:
        """The address, as a tensor gives it."""
        return self.address


#: Encoded descriptors that a box remembers: an allocator gives out the same few addresses again.
MAX_ENCODED = 8


class Box(NamedTuple):
    """A descriptor among the arguments of a launch."""

    of: int  # which of the addresses it is of
    rest: dict[str, Any]  # its fields but for the tensor; known to be sound
    encoding: dict[str, Any]  # how it is encoded, as Triton's compiler says
    by_address: dict[int, Any]  # encoded ones

    def encoded(self, address: int) -> Any:
        """Encode the descriptor of a tensor at `address` for the driver."""
        found = self.by_address.get(address)
        if found is None:
            if len(self.by_address) >= MAX_ENCODED:
                self.by_address.clear()
            # Without the checks.
            descriptor = object.__new__(TensorDescriptor)
            descriptor.__dict__.update(self.rest, base=Address(address))
            found, *_ = driver.make_tensordesc_arg(descriptor, self.encoding, *_no_arguments())
            self.by_address[address] = found
        return found


@functools.cache
def _no_arguments() -> tuple[tuple[()], ...]:
    """From Triton 3.8 on, `make_tensordesc_arg` takes the launch's other arguments too, and does nothing with them."""
    return ((),) * (len(inspect.signature(driver.make_tensordesc_arg).parameters) - 2)


#: What a launch allocates, where it allocates nothing.
NO_SCRATCH = None, None


class NotLinked(Exception):
    """A launch cannot be repeated with other addresses; the message says why."""


def in_c(kernel: Any) -> Callable[..., None]:
    """The C function that Triton's launcher of a kernel calls; `NotLinked` if it is not to be found.

    The launcher has it as an attribute where no descriptors are encoded first. From 3.7 on it is one for all kernels,
    and the driver has it. 3.6 compiles one for each list of types, and keeps it in the closure that encodes
    descriptors. Loaded from the disk again it could be another: Python has one module of its name for all of them,
    which other threads write to.
    """
    launch = kernel.run.launch
    if not kernel.metadata.tensordesc_meta:
        return launch
    if (of_all := getattr(triton.runtime.driver.active.utils, "launch", None)) is not None:
        return of_all
    wrapped = inspect.getclosurevars(launch).nonlocals if inspect.isfunction(launch) else {}
    if "launcher" not in wrapped:
        raise NotLinked("the C function of a kernel with descriptors is not where Triton 3.6 has it")
    return wrapped["launcher"]


def to_c(kernel: Any) -> Callable[..., None]:
    """Function that launches a kernel in C; raises `NotLinked` if that is not all that a launch takes.

    Returns:
        A function of the grid, the stream, the CUDA function, a tuple of its packed metadata, metadata for hooks and
        two hooks, and the kernel's arguments.
    """
    launcher = kernel.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise NotLinked("a launch allocates scratch memory")
    if getattr(launcher, "gsan_enabled", False):
        raise NotLinked("it is instrumented")
    launch_in_c = in_c(kernel)
    options = launcher.launch_cooperative_grid, launcher.launch_pdl
    if hasattr(launcher, "kernel_signature"):
        # From 3.7 on the C function is told the types of the arguments.
        types = launcher.arg_annotations, launcher.kernel_signature

        def launch(grid: Any, stream: int, function: Any, metadata: tuple[Any, ...], values: list[Any]) -> None:
            launch_in_c(*grid, stream, function, *options, *metadata, *NO_SCRATCH, *types, values)

    else:

        def launch(grid: Any, stream: int, function: Any, metadata: tuple[Any, ...], values: list[Any]) -> None:
            launch_in_c(*grid, stream, function, *options, *NO_SCRATCH, *metadata, *values)

    return launch


class LinkedLaunch:
    """A launch, for arguments of which only the tensors' addresses are other than when it was made.

    Attributes:
        compiled: what Triton compiled.
        reads: which of the host function's arguments it takes addresses of, in this order.

    What is written after that, encoded descriptors by address, is the same whoever writes it: threads may share it.
    """

    def __init__(self, launch: Launch, compiled: Any, args: Sequence[Any]) -> None:
        """Of `launch`, which `args` led to and for which Triton ran `compiled`; `NotLinked` if it is not known how."""
        if not triton_is_known():
            raise NotLinked(f"how Triton {triton.__version__} launches is not known")
        if len(launch.args) != len(launch.kernel.params) or any(name.startswith("_") for name in launch.options):
            raise NotLinked("Helion's launcher adds arguments")
        if launch.kernel.launch_metadata is not None:
            raise NotLinked("hooks are given arguments")
        if compiled is None:
            raise NotLinked("a hook of Triton's kept it from launching")
        objects = {id(arg): i for i, arg in enumerate(args)}
        # As Triton's compiler says; none where descriptors are not TMA's.
        encodings = iter(compiled.metadata.tensordesc_meta or ())
        self.compiled, self.reads = compiled, []
        # Where addresses of `reads` stand among the C function's arguments; which of them are encoded, and how.
        self._places: list[int] = []
        self._encodings: list[tuple[int, dict[str, Any]]] = []
        at = 0
        for x in launch.args:
            # By identity: a tensor that the host function made, be it a view, is not in `objects`.
            if isinstance(x, (Buffer, torch.Tensor)):
                self.reads.append(_place(objects, x))
                self._places.append(at)
            elif isinstance(x, TensorDescriptor):
                encoding = next(encodings, None)
                if encoding is None:
                    raise NotLinked("a descriptor is not TMA's")
                self._encodings.append((len(self.reads), encoding))
                self.reads.append(_place(objects, x.base))
                self._places.append(at)
                at += len(x.shape) + len(x.strides)
            elif not isinstance(x, int | float):
                raise NotLinked(f"{x!r} is neither a tensor nor a number")
            at += 1
        self._launch = to_c(compiled)
        self._device = next(arg.device for arg in args if isinstance(arg, (Buffer, torch.Tensor))).index
        self._set_sizes(launch)

    def _set_sizes(self, launch: Launch) -> None:
        """Set all that depends on sizes; nothing keeps the tensors of `launch` alive."""
        self._grid = (*launch.grid, 1, 1)[:3]
        values: list[Any] = [*launch.args]
        boxes = []
        for n, encoding in self._encodings:
            at = self._places[n]
            rest = vars(values[at]).copy()
            del rest["base"]
            values[at : at + 1] = [None, *rest["shape"], *rest["strides"]]
            boxes.append(Box(n, rest, encoding, {}))
        for i in self._places:
            values[i] = None
        self._values, self._boxes = values, boxes

    def resized(self, launch: Launch) -> LinkedLaunch:
        """The same for `launch`, of the same host function and of the same `types_of`, but of other sizes."""
        other = object.__new__(LinkedLaunch)
        vars(other).update(vars(self))
        other._set_sizes(launch)
        return other

    def at(self, addresses: Sequence[int]) -> None:
        """Launch it on the current stream, as `JITFunction.run` does from where it has found the kernel.

        Args:
            addresses: of the arguments in `reads`.
        """
        values = self._values.copy()
        for i, address in zip(self._places, addresses, strict=True):
            values[i] = address
        for box in self._boxes:
            values[self._places[box.of]] = box.encoded(addresses[box.of])
        stream = triton.runtime.driver.active.get_current_stream(self._device)
        # A chain of no hooks is not worth a call into Python.
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        enter = enter if getattr(enter, "calls", enter) else None
        leave = leave if getattr(leave, "calls", leave) else None
        metadata = None
        if enter is not None or leave is not None:
            metadata = self.compiled.launch_metadata(self._grid, stream)
        compiled = self.compiled
        hooks = compiled.packed_metadata, metadata, enter, leave
        self._launch(self._grid, stream, compiled.function, hooks, values)


def _place(objects: dict[int, int], x: torch.Tensor | Buffer) -> int:
    """Which of the host function's arguments a tensor is."""
    if id(x) not in objects:
        raise NotLinked("the host function makes a tensor")
    return objects[id(x)]


def through_triton(
    host_fn: Callable[..., Any], args: Sequence[Any], expected: tuple[str, ...]
) -> list[tuple[Launch, Any]]:
    """Call `host_fn(*args)`, and return what it launched, and what Triton compiled for it.

    Args:
        host_fn: of Helion's, which launches through Triton a kernel that is compiled with the passes.
        args: its arguments.
        expected: names of the passes without which a warning is given.
    """
    launches: list[tuple[Launch, Any]] = []

    def launcher(kernel: Any, grid: tuple[int, ...], *kernel_args: Any, **options: Any) -> None:
        compiled = default_launcher(triton_hook.with_passes(kernel, expected), grid, *kernel_args, **options)
        launches.append((Launch(kernel, grid, kernel_args, options), compiled))

    host_fn(*args, _launcher=launcher)
    return launches


def link(
    host_fn: Callable[..., Any], launches: Sequence[tuple[Launch, Any]], args: Sequence[Any]
) -> LinkedLaunch | None:
    """Return the launch of `host_fn(*args)` for other addresses; warn and return None where it cannot be repeated."""
    try:
        if len(launches) != 1:
            raise NotLinked(f"the host function launches {len(launches)} kernels")
        ((launch, compiled),) = launches
        return LinkedLaunch(launch, compiled, args)
    except NotLinked as reason:
        # Of an unknown Triton the compilation has warned.
        if triton_is_known():
            warn_slower(
                f"{host_fn.__name__} is launched through Triton {triton.__version__} in every call, which costs the "
                f"host some microseconds more than a launch that is repeated: {reason}."
            )
        return None
