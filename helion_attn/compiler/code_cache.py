"""Finds the code that Helion generates for a kernel: of this process, of the disk, or new.

Helion keeps nothing: every process would import it, trace each kernel and generate its Triton code anew, which takes
some 15 s before a first call (an H200's host; docs/notes/host.md). With the code found on the disk, none of
that is needed.

A file there (`stored_code`) is named by a digest of all that is known before tracing (`Generated._key`), and lists what
was generated under it: each piece of code with the facts about the arguments that it depends on beyond (`facts`).
Nothing of either asks Helion. Where no entry holds, the kernel is traced as ever.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import math
import os
import sys
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from helion_attn.compiler import stored_code
from helion_attn.compiler.buffers import Buffer, tensor_type
from helion_attn.compiler.facts import UnknownFact, facts_of, holding, value
from helion_attn.compiler.generated_code import HostFn, linked, load
from helion_attn.compiler.helion_adapter import Config, bind, capability, kernel_to_compile
from helion_attn.compiler.notice import compiling
from helion_attn.compiler.stored_code import Entry

#: Held while a kernel is looked for on the disk, and traced: `torch.fx`, with which Helion traces, patches what all
#: threads see.
TRACING = threading.Lock()

#: Elements from which on Helion computes indices of a tensor in 64 bits.
INT32_ELEMENTS = 2**31

#: Beginnings of the names of variables that Helion and Inductor read, and of those among them that change no code.
VARIABLES = ("HELION_", "TORCHINDUCTOR_", "TRITON_F32_DEFAULT", "TRITON_INTERPRET", "ENABLE_TILE")
CHANGE_NO_CODE = ("HELION_AUTOTUNE", "HELION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def _is_foreign(module: str | None) -> bool:
    """Whether its version speaks for it."""
    return (module or "").partition(".")[0] in ("torch", "triton", "helion", *sys.stdlib_module_names)


def _names(code: types.CodeType) -> set[str]:
    """Names of globals and attributes."""
    inner = [_names(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return set(code.co_names).union(*inner)


def _described(constant: Any) -> str:
    """Text that identifies a constant of a function in every process, wherever the package is installed."""
    if isinstance(constant, frozenset):
        return repr(sorted(map(repr, constant)))
    if not isinstance(constant, types.CodeType):
        return repr(constant)
    constants = [_described(x) for x in constant.co_consts]
    code = constant
    return repr((code.co_firstlineno, code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants))


def _functions(fn: types.FunctionType) -> Iterator[str]:
    """`fn`, and the functions that it finds by name, with the numbers, strings and dtypes that they find."""
    plain = (bool, int, float, str, tuple, dict, torch.dtype)
    seen: list[types.FunctionType] = []
    queue = [fn]
    while queue:
        function = queue.pop()
        if function in seen:
            continue
        seen.append(function)
        code = function.__code__
        scopes = [function.__globals__, inspect.getclosurevars(function).nonlocals]
        names = sorted(_names(code))
        modules = [x for n in names if isinstance(x := function.__globals__.get(n), types.ModuleType)]
        scopes += [vars(x) for x in modules if not _is_foreign(x.__name__)]
        found = [(n, scope[n]) for scope in scopes for n in names if n in scope]
        queue += [x for _, x in found if isinstance(x, types.FunctionType) and not _is_foreign(x.__module__)]
        constants = [(n, x) for n, x in found if isinstance(x, plain)]
        yield repr((function.__module__, function.__qualname__, _described(code), function.__defaults__, constants))


@functools.cache
def versions() -> str:
    """Digest that every kernel's code depends on: of this package's sources, and the compilers' versions."""
    root = Path(__file__).parent.parent
    sources = [(str(path.relative_to(root)), path.read_bytes()) for path in sorted(root.rglob("*.py"))]
    digest = hashlib.sha256(repr(sources).encode()).hexdigest()
    return repr((digest, importlib.metadata.version("helion"), triton.__version__, torch.__version__, sys.version))


def fingerprint(fn: Callable[..., Any], config: Config) -> str:
    """Identify the code of `fn`, apart from its arguments and the process's options.

    The sources on the disk need not be what this process runs: the functions that it has are looked at as well.
    Helion's settings are in these sources (`helion_adapter.kernel_to_compile`) and in the environment.
    """
    assert isinstance(fn, types.FunctionType)
    return repr((versions(), list(_functions(fn)), sorted(config.items())))


def _environment() -> list[tuple[str, str]]:
    """The variables of which Helion and Inductor make their settings."""
    return sorted(
        (name, text)
        for name, text in os.environ.items()
        if name.startswith(VARIABLES) and not name.startswith(CHANGE_NO_CODE)
    )


def _inductor_options() -> list[tuple[str, Any]]:
    """Inductor's options that are not as its sources and the environment have them."""
    name = "torch._inductor.config"
    # A process that has not imported it, which takes a second, has changed none. Some variables count as a change.
    if name not in sys.modules and not any(x.startswith("TORCHINDUCTOR_") for x, _ in _environment()):
        return []
    config: Any = importlib.import_module(name)
    return sorted((x, now) for x, now in config.save_config_portable().items() if now != config._config[x].default)


def options() -> str:
    """Settings that change the generated code, and that a process may change between two calls."""
    return repr((torch.get_default_dtype(), _inductor_options(), _environment()))


def _is_marked(x: torch.Tensor) -> bool:
    """Whether `torch._dynamo.mark_static` was told of it."""
    return bool(getattr(x, "_dynamo_static_indices", ()))


class Generated:
    """The code that Helion generates for a kernel function with one config."""

    def __init__(self, fn: Callable[..., Any], config: Config) -> None:
        self._fn = fn
        self._config = config
        annotations = [str(x.annotation) for x in inspect.signature(fn).parameters.values()]
        #: Which arguments are tensors, which are not, and which of these the code is generated for.
        self.tensors = [i for i, annotation in enumerate(annotations) if "Tensor" in annotation]
        self.values = [i for i, annotation in enumerate(annotations) if "Tensor" not in annotation]
        self._constants = [i for i, annotation in enumerate(annotations) if "constexpr" in annotation]
        #: What was generated, and whether it holds for arguments.
        self._entries: dict[Hashable, list[tuple[Entry, Callable[[Sequence[Any]], bool]]]] = {}
        #: Helion's kernels, by the environment that their settings are of.
        self._kernels: dict[str, Any] = {}

    @functools.cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._fn, self._config)

    def base(self, args: Sequence[Any]) -> tuple[Hashable, ...]:
        """All of Helion's base key that an argument can change."""
        tensors = [args[i] for i in self.tensors]
        first, ids = tensors[0], [*map(id, tensors)]
        if isinstance(first, Buffer):
            types, static = [first.draft.tensor_type] * len(tensors), []
        else:
            types = [*map(tensor_type, tensors)]
            static = [(i, *sorted(x._dynamo_static_indices)) for i, x in enumerate(tensors) if _is_marked(x)]
        return (
            # A class of tensors may have no addresses.
            *types,
            *[(x.dtype, len(x.shape), math.prod(x.shape) >= INT32_ELEMENTS) for x in tensors],
            *map(ids.index, ids),
            *static,
            *[type(args[i]) for i in self.values],
            # The repr, for True is equal to 1, also in a spec.
            *[repr(args[i]) for i in self._constants],
            first.device.type,
            capability(first.device),
        )

    def _key(self, base: tuple[Hashable, ...]) -> str:
        """The name of a file: hexadecimal, as Triton's are."""
        return hashlib.sha256(repr((self._fingerprint, options(), base)).encode()).hexdigest()

    def is_stored(self, base: tuple[Hashable, ...], args: Sequence[Any]) -> bool:
        """Whether code for `args`, of that `base`, is on the disk."""
        set_cache_folder(args[self.tensors[0]].device.index or 0)
        return any(holding(entry["facts"])(args) for entry in stored_code.read(self._key(base)))

    def find(self, base: tuple[Hashable, ...], args: tuple[Any, ...]) -> HostFn:
        """The host function for `args`, of that `base`: tensors and numbers. Threads that have to trace take turns."""
        if (host_fn := self.cached(base, args)) is not None:
            return host_fn
        with TRACING:
            return self.cached(base, args) or self._read_or_trace(base, args)

    def _read_or_trace(self, base: tuple[Hashable, ...], args: tuple[Any, ...]) -> HostFn:
        device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
        set_cache_folder(device.index or 0)
        key = self._key(base)
        # Another process may have written meanwhile.
        stored = stored_code.read(key)
        mine = [x for x, _ in self._entries.get(base, []) if x not in stored]
        self._entries[base] = [(x, holding(x["facts"])) for x in (*stored, *mine)]
        if (host_fn := self.cached(base, args)) is not None:
            return host_fn
        with compiling(self._fn.__name__):
            return self._trace(base, key, args)

    def cached(self, base: tuple[Hashable, ...], args: tuple[Any, ...]) -> HostFn | None:
        """The host function for `args`, tensors or buffers and numbers, if this process has it."""
        for entry, hold in self._entries.get(base, []):
            if hold(args):
                try:
                    return load(entry["source"], self._fn.__name__)
                except Exception:
                    # What cannot be loaded is made anew.
                    continue
        return None

    def _trace(self, base: tuple[Hashable, ...], key: str, args: tuple[Any, ...]) -> HostFn:
        environment = repr(_environment())
        if environment not in self._kernels:
            self._kernels[environment] = kernel_to_compile(self._fn, self._config)
        bound = bind(self._kernels[environment], args)
        source = linked(Path(bound.compile_config().__code__.co_filename).read_text())
        host_fn = load(source, self._fn.__name__)
        # Code whose facts have a form that is not known here serves this call, and is not kept.
        with contextlib.suppress(UnknownFact, AttributeError, LookupError, StopIteration, TypeError, ValueError):
            facts = [[fact, value(fact, args)] for fact in facts_of(bound, args, host_fn)]
            entry = {"facts": facts, "source": source}
            self._entries[base] = [*self._entries[base], (entry, holding(facts))]
            # What is lost when two processes write at once is traced again. Other entries of this process may have been
            # traced with other options.
            stored_code.write(key, [*stored_code.read(key), entry])
        return host_fn


def set_cache_folder(device_index: int) -> None:
    """Set Triton's cache folder, if nobody has, to the one that Helion sets it to when it compiles."""
    if "TRITON_CACHE_DIR" not in os.environ:
        folders = importlib.import_module("helion_attn.compiler.inductor_runtime.cache_dir_utils")
        root = os.environ.get("HELION_CACHE_DIR") or os.path.join(folders.cache_dir(), "helion")
        os.environ["TRITON_CACHE_DIR"] = os.path.join(root, "triton", str(device_index))
