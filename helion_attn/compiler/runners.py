"""The two ways in which this package runs a kernel function: compiled for a GPU, and interpreted."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from helion_attn.compiler import code_cache
from helion_attn.compiler.buffers import ALIGNMENT, Buffer
from helion_attn.compiler.generated_code import HostFn
from helion_attn.compiler.helion_adapter import Config, kernel_to_interpret
from helion_attn.compiler.linked_launch import LinkedLaunch, link, recorded, through_triton, types_of

#: Argument lists that a kernel remembers.
MAX_REMEMBERED = 4096


class Runner:
    """A kernel function that can be run, by the names of its arguments or by their places."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.name = fn.__name__
        self._names = tuple(inspect.signature(fn).parameters)
        self._in_order = itemgetter(*self._names) if len(self._names) > 1 else lambda of: (of[self._names[0]],)

    def run(self, arguments: Mapping[str, Any]) -> None:
        """Run it with arguments by name. On buffers nothing runs: their plan gets the launch, for `Plan.run`."""
        if len(arguments) != len(self._names):
            unknown, missing = set(arguments) - {*self._names}, {*self._names} - set(arguments)
            raise TypeError(f"arguments that are unknown: {sorted(unknown)}, and missing: {sorted(missing)}")
        args = self._in_order(arguments)
        buffer = next((x for x in args if isinstance(x, Buffer)), None)
        if buffer is None:
            self(*args)
        else:
            buffer.draft.launch(self, args)

    def __call__(self, *args: Any) -> LinkedLaunch | None:
        """Run it with arguments by place. Return what does the same for other addresses, if that is known."""
        raise NotImplementedError

    def linked(self, args: tuple[Any, ...]) -> LinkedLaunch | None:
        """Find a launch on tensors like these buffers without a run, or None."""
        return None

    def compiled_for(self, args: tuple[Any, ...]) -> Hashable:
        """Return what it is compiled for of tensors or buffers like these."""
        return None

    def is_stored(self, args: tuple[Any, ...]) -> bool:
        """Return whether an earlier process compiled it for buffers like these."""
        return True


class Compiled(Runner):
    """A kernel function compiled through Triton with one config: once a specialisation, for all lengths and strides.

    Helion is slow to find the code for sizes that are not those of the last call, and slower in a new process
    (docs/notes/host.md). `code_cache` finds it instead, and this remembers what it led to (`linked_launch`), for
    every set of sizes and specialisations.
    """

    def __init__(self, fn: Callable[..., Any], config: Config, expected: tuple[str, ...] = ()) -> None:
        super().__init__(fn)
        self._generated = code_cache.Generated(fn, config)
        self._expected = expected
        #: The host function, and its linked launch, by all that they depend on; None where only Triton can launch it.
        self._launches: dict[Hashable, tuple[HostFn, LinkedLaunch | None]] = {}
        #: A launch of each kernel that Triton compiled, by device and by all but sizes.
        self._of_kernels: dict[Hashable, LinkedLaunch] = {}

    def __call__(self, *args: Any) -> LinkedLaunch | None:
        """Run it."""
        of_tensors, of_values = self._generated.tensors, self._generated.values
        # All that Helion looks at: layouts, alignment, which arguments are the same tensor, and values.
        tensors = {id(args[i]): args[i] for i in of_tensors}
        layouts = [(x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT) for x in tensors.values()]
        identities = list(tensors)
        same = [identities.index(id(args[i])) for i in of_tensors]
        key = (args[of_tensors[0]].device, *layouts, *same, *[args[i] for i in of_values])
        cached = self._launches.get(key)
        if cached is not None:
            host_fn, launch = cached
            if launch is None:
                through_triton(host_fn, args, self._expected)
            else:
                launch.at([args[i].data_ptr() for i in launch.reads])
            return launch
        if len(self._launches) >= MAX_REMEMBERED:
            self._launches.clear()
        base = self._generated.base(args)
        host_fn = self._generated.find(base, args)
        launches = through_triton(host_fn, args, self._expected)
        launch = link(host_fn, launches, args)
        if launch is not None:
            ((recorded_launch, _),) = launches
            self._of_kernels[args[of_tensors[0]].device, base, types_of(recorded_launch)] = launch
        self._launches[key] = host_fn, launch
        return launch

    def compiled_for(self, args: tuple[Any, ...]) -> Hashable:
        """Return what Helion generates code for."""
        return self._generated.base(args)

    def is_stored(self, args: tuple[Any, ...]) -> bool:
        """Return whether an earlier process generated code for buffers like these."""
        return self._generated.is_stored(self._generated.base(args), args)

    def linked(self, args: tuple[Any, ...]) -> LinkedLaunch | None:
        """Find a launch on tensors like these buffers, or None if something is to be compiled.

        New lengths find one, most often.
        """
        base = self._generated.base(args)
        host_fn = self._generated.cached(base, args)
        if host_fn is None:
            return None
        launch, *_ = recorded(host_fn, args)
        of_kernel = self._of_kernels.get((args[self._generated.tensors[0]].device, base, types_of(launch)))
        return None if of_kernel is None else of_kernel.resized(launch)


class _Fp32Scales(TorchFunctionMode):
    """Makes scales of products in fp32, as PyTorch takes them: Helion's interpreter makes them in the default dtype.

    A mode holds for its thread; a default dtype that was set for a while would hold for all.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and isinstance(args[0], float):
            kwargs = {"dtype": torch.float32, **kwargs}
        return func(*args, **kwargs)


class Interpreted(Runner):
    """A kernel function run step by step with PyTorch operations: for CPU tensors."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(fn)
        self._fn = fn

    @functools.cached_property
    def _kernel(self) -> Any:
        return kernel_to_interpret(self._fn)

    def __call__(self, *args: Any) -> None:
        """Run it."""
        with contextlib.nullcontext() if torch.get_default_dtype() == torch.float32 else _Fp32Scales():
            self._kernel(*args)


def compiled(fn: Callable[..., Any], config: Config, expected: tuple[str, ...] = ()) -> Compiled:
    """`fn` compiled through Triton with `config`, once for all lengths and strides.

    Args:
        fn: the kernel function.
        config: Helion's, with the tunables of `fn`.
        expected: names of the passes without which a warning is given (`passes.expected`).
    """
    return Compiled(fn, config, expected)


def interpreted(fn: Callable[..., Any]) -> Interpreted:
    """The same source, run step by step with PyTorch operations: for CPU tensors."""
    return Interpreted(fn)


def by_device(fn: Callable[..., Any], config: Config) -> Callable[[bool], Runner]:
    """The function that returns how `fn` runs: on a GPU compiled with `config` if it is given True, or interpreted."""

    def kernel(is_cuda: bool) -> Runner:
        return compiled(fn, config) if is_cuda else interpreted(fn)

    kernel.__module__ = fn.__module__
    return functools.cache(kernel)
