"""The one place that imports Helion, when it is first needed, and what its kernels are told of configs and devices.

Importing Helion takes some seconds, and a process that finds its kernels' code on the disk needs nothing of it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from helion_attn.configs import LargeTileConfig, TileConfig

__all__ = [
    "MAX_REGISTERS",
    "Config",
    "bind",
    "capability",
    "helion",
    "helion_builtins",
    "helion_config",
    "helion_environment",
    "helion_kernel",
    "hl",
    "kernel_to_compile",
    "kernel_to_interpret",
    "multiprocessors",
]


class Later(types.ModuleType):
    """Stands for a module of Helion's, which is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of any module, by those that look for something else
            raise AttributeError(name)
        return getattr(imported(self), name)


@functools.cache
def imported(module: types.ModuleType) -> types.ModuleType:
    """The module that `module` stands for."""
    if not isinstance(module, Later):
        return module
    triton_compat: Any = importlib.import_module("torch._inductor.runtime.triton_compat")
    if not hasattr(triton_compat, "IntelGPUError"):
        # helion 1.5.1 imports this name, which torch 2.11 does not have yet.
        triton_compat.IntelGPUError = type("IntelGPUError", (Exception,), {})
    return importlib.import_module(module.__name__)


if TYPE_CHECKING:
    import helion
    import helion._compiler.compile_environment as helion_environment
    import helion._compiler.device_ir as helion_device_ir
    import helion._compiler.type_info as helion_types
    import helion._compiler.variable_origin as helion_origins
    import helion._dist_utils as helion_distributed
    import helion.language as hl
    import helion.language._tracing_ops as helion_tracing
    import helion.language.builtin_ops as helion_builtins
    import helion.runtime.kernel as helion_kernel
else:
    helion = Later("helion")
    helion_environment = Later("helion._compiler.compile_environment")
    helion_device_ir = Later("helion._compiler.device_ir")
    helion_types = Later("helion._compiler.type_info")
    helion_origins = Later("helion._compiler.variable_origin")
    helion_distributed = Later("helion._dist_utils")
    helion_kernel = Later("helion.runtime.kernel")
    helion_tracing = Later("helion.language._tracing_ops")
    hl = Later("helion.language")
    helion_builtins = Later("helion.language.builtin_ops")

#: Keyword arguments of Helion's `Config`.
Config = dict[str, Any]

#: A tunable of this name, registered in a kernel, reaches Triton as its option `maxnreg`. Helion's own key for it is
#: refused for grids that are not persistent.
MAX_REGISTERS = "_triton_config_maxnreg"


def helion_config(tile: TileConfig | LargeTileConfig, grid_dims: int = 2) -> Config:
    """The Helion config of an attention kernel, from a row of its tuned table; the last grid dimension is fastest."""
    return {
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "range_num_stages": [0, tile.num_stages],
        "loop_orders": [[*reversed(range(grid_dims))]],
        "indexing": "tensor_descriptor",
        "host_tensor_descriptors": True,
        MAX_REGISTERS: tile.max_registers,
    }


def _seen_by_helion(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, in whose module stand-ins have given way to Helion's modules: Helion compares what it finds by name."""
    scope = fn.__globals__
    scope.update({name: imported(x) for name, x in scope.items() if isinstance(x, Later)})
    return fn


def kernel_to_compile(fn: Callable[..., Any], config: Config) -> helion.Kernel[Any]:
    """Helion's kernel that compiles `fn` with `config`, once for all lengths and strides.

    `triton_do_not_specialize` keeps Triton from compiling anew when a length becomes a multiple of 16. A `key` keeps
    Helion from preparing for the next call of these sizes. Its heuristics are for a config that is still to be found,
    and take a tenth of the time of tracing.
    """
    return helion.kernel(
        _seen_by_helion(fn),
        config=helion.Config(**config),
        static_shapes=False,
        triton_do_not_specialize=True,
        key=lambda *args: None,
        disable_autotuner_heuristics=True,
    )


@functools.cache
def _record_type() -> type[Any]:
    """A class for what Helion knows of a NamedTuple."""

    class Record(helion_types.LiteralType):
        """A NamedTuple that a kernel and its helpers take whole; some of its fields may be known at run time alone.

        Helion has a dict of the fields in its place: helpers find no attributes, and nobody finds properties.
        """

        def populate_symbol_origins(self, origin: Any) -> None:
            """Say how the host function finds the fields that are known at run time."""
            for name in self.value._fields:
                of_field = helion_origins.AttributeOrigin(origin, name)
                self.propagate_attribute(name, of_field).populate_symbol_origins(of_field)

        def merge(self, other: Any, var_name: str | None = None) -> Any:
            """Join two values of one name, where control flow meets."""
            if not isinstance(other, Record) or type(self.value) is not type(other.value):
                return super().merge(other, var_name=var_name)
            if self.value is other.value:
                return self
            mine, theirs = (
                [helion_types.TypeInfo.from_example(x, self.origin) for x in of.value] for of in (self, other)
            )
            fields = [a.merge(b, var_name=var_name).proxy() for a, b in zip(mine, theirs, strict=True)]
            return Record(self.origin, type(self.value)(*fields))

    return Record


@contextlib.contextmanager
def _records() -> Iterator[None]:
    """Have Helion take NamedTuples as `Record`s, in this thread."""
    stock = helion_types.TypeInfo.from_example
    here = threading.get_ident()

    def from_example(cls: Any, value: Any, origin: Any) -> Any:
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        # Helion knows its own.
        if threading.get_ident() != here or not is_named or type(value).__module__.partition(".")[0] == "helion":
            return stock(value, origin)
        if isinstance(origin, helion_origins.ArgumentOrigin):
            # Of a constant that is an argument the host function has the repr, which names a class that it does not
            # import. So it asks its argument.
            origin = helion_origins.NameOrigin(origin.name)
        return _record_type()(origin, value)

    with mock.patch.object(imported(helion_types).TypeInfo, "from_example", classmethod(from_example)):
        yield


def _tuples_in_loops() -> contextlib.AbstractContextManager[object]:
    """Have Helion carry tuples of tiles through a loop: it flattens them, but joins single tensors alone behind it."""
    operations = vars(imported(helion_tracing))
    join = operations["_phi"]

    def joined(before: Any, after: Any) -> Any:
        return tuple(map(join, before, after)) if isinstance(before, tuple) else join(before, after)

    replaced = types.SimpleNamespace(**operations | {"_phi": joined})
    return mock.patch.object(imported(helion_device_ir), "_tracing_ops", replaced)


def bind(kernel: helion.Kernel[Any], args: tuple[Any, ...]) -> Any:
    """`kernel.bind(args)`, for one GPU, also where `torch.distributed` is initialised.

    Helion makes grids persistent for symmetric memory. PyTorch 2.11 cannot say which tensors are of it, and Helion then
    takes all for such; attention is some 3 times slower with a persistent grid.
    """
    here = threading.get_ident()

    def elsewhere(real: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *args, **options: threading.get_ident() != here and real(*args, **options)

    in_arguments = mock.patch.object(
        imported(helion_kernel), "kernel_uses_symm_mem", elsewhere(helion_kernel.kernel_uses_symm_mem)
    )
    in_environment = mock.patch.object(
        imported(helion_distributed), "is_symm_mem_tensor", elsewhere(helion_distributed.is_symm_mem_tensor)
    )
    with in_arguments, in_environment, _records(), _tuples_in_loops():
        return kernel.bind(args)


def kernel_to_interpret(fn: Callable[..., Any]) -> helion.Kernel[Any]:
    """Helion's kernel that runs `fn` step by step with PyTorch operations."""
    return helion.kernel(
        _seen_by_helion(fn), config=helion.Config(), static_shapes=False, ref_mode=helion.RefMode.EAGER
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU; the interpreter runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)
