"""Keeps the code that Helion generates on the disk, beside what Triton makes of it.

Helion keeps nothing: every process traces each kernel and generates its Triton code anew. Where Triton finds all it
needs on the disk, that was 6 of the 6.5 s of a first call of `attention`. With the code found here too, a first call
takes 0.5 to 0.8 s (an H200's host; docs/performance.md, Start-up).

Code is stored through Triton's own cache manager, so one folder holds both. A file is named by a digest of all that is
known before tracing (`Generated._key`), and lists what was generated under it: each piece of code with the facts about
the arguments that it depends on beyond, as JSON. Helion names those when it has traced: sizes and strides that the
kernel asked for, and what a tensor must be for TMA to read it. A fact that is not known here, or a file that is not
whole, is not used; the kernel is traced as ever.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import json
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from triton.runtime.cache import get_cache_manager

from helion_attn.compiler.helion_adapter import helion, helion_backends, helion_environment, helion_kernel
from helion_attn.compiler.launch_plans import recorded

#: File name of an entry in Triton's cache.
FILE = "generated.json"

#: Held while a kernel is looked for on the disk, and traced: `torch.fx`, with which Helion traces, patches what all
#: threads see.
TRACING = threading.Lock()

#: A host function that launches one Triton kernel.
Run = Callable[..., Any]

#: A name of `FACTS`, and its arguments.
Fact = list[Any]


def _descriptor(x: torch.Tensor, most: list[int]) -> list[Any]:
    """What TMA asks of a tensor that is read in boxes: strides, extents up to `most`, and 32-bit coordinates."""
    strides = helion_environment.tensor_descriptor_layout_signature_from_strides(x.stride(), x.element_size())
    contiguous, aligned = strides
    extents = [helion_kernel._tensor_descriptor_extent_class(size, n) for size, n in zip(x.shape, most, strict=True)]
    return [contiguous, list(aligned), extents, max(x.shape) < 2**31]


#: What code can depend on, by name: functions of the arguments, whose values are JSON.
FACTS: dict[str, Callable[..., Any]] = {
    "size": lambda args, i, dim: args[i].size(dim),
    "stride": lambda args, i, dim: args[i].stride(dim),
    "number": lambda args, i: args[i],
    "has_size": lambda args, i, dim, size: args[i].size(dim) == size,
    "has_stride": lambda args, i, dim, stride: args[i].stride(dim) == stride,
    "descriptor": lambda args, i, most: _descriptor(args[i], most),
    "aligned": lambda args, i: helion_environment._concrete_tensor_satisfies_alignment_guard(args[i], False),
    "multiprocessors": lambda args, i: torch.cuda.get_device_properties(args[i].device).multi_processor_count,
}


def value(fact: Fact, args: Sequence[Any]) -> Any:
    """The value of `fact` for these arguments."""
    name, *parameters = fact
    return FACTS[name](args, *parameters)


class UnknownFact(Exception):
    """Helion's code depends on something that `FACTS` cannot say."""


def _fact(extractor: Any, args: Sequence[Any]) -> list[Any]:
    """One of Helion's extractors, which are closures whose defaults hold what they look at."""
    if isinstance(extractor, helion_kernel._PreparedMetadataSpecializationExtractor):
        extractor = extractor.extractor
    if isinstance(extractor, helion_kernel._CompilerSeedSpecializationExtractor):
        if extractor.fact != "device_num_sm":
            raise UnknownFact(extractor)
        return ["multiprocessors", next(i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor))]
    if isinstance(extractor, helion_kernel._GuardedInputFact):
        if len(extractor.sources) != 1 or extractor.block or not extractor.rhs.is_Integer:
            raise UnknownFact(extractor)
        ((symbol, source),) = extractor.sources
        name = {"SIZE": "has_size", "STRIDE": "has_stride"}.get(source.prop.name)
        if extractor.lhs != symbol or name is None:
            raise UnknownFact(extractor)
        return [name, extractor.param_names.index(source.base.local_name), source.idx, int(extractor.rhs)]
    name = getattr(extractor, "__name__", "")
    holds = {p.name: p.default for p in inspect.signature(extractor).parameters.values()}
    if name != "local_extractor":
        # A tensor must be an argument by itself.
        tensor: Any = holds.get("_inner") or holds.get("_extract_tensor")
        if getattr(tensor, "__name__", "") != "local_extractor":
            raise UnknownFact(extractor)
        i = inspect.signature(tensor).parameters["_index"].default
    match name:
        case "local_extractor" if isinstance(args[holds["_index"]], int | float):
            return ["number", holds["_index"]]
        case "size_extractor":
            return ["size", i, holds["_index"]]
        case "stride_extractor":
            return ["stride", i, holds["_index"]]
        case "td_layout_extractor":
            return ["descriptor", i, [holds["_extent_cap"]] * holds["_ndim"]]
        case "td_alignment_extractor" if not holds["_requires_zero_storage_offset"]:
            return ["aligned", i]
    raise UnknownFact(extractor)


def _facts(bound: Any, args: Sequence[Any], run: Run) -> list[Fact]:
    """All that the code of `bound` depends on beyond the base key."""
    extractors = [*bound._specialize_extra(), *bound._guarded_input_facts()]
    facts = [_fact(x, args) for x in (*extractors, *bound._compiler_seed_specialization_extractors)]
    (launch,) = recorded(run, args)
    for fact in facts:
        # Where all of a tensor's accesses became descriptors, a dimension's extent matters up to that of the box, which
        # is 1 for batches and blocks. Helion asks for the largest box of the kernel in every dimension.
        if fact[0] == "descriptor":
            tensor = args[fact[1]]
            boxes = [x.block_shape for x in launch.args if getattr(x, "base", None) is tensor]
            if boxes and not any(x is tensor for x in launch.args):
                fact[2] = [max(extents) for extents in zip(*boxes, strict=True)]
    return facts


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


def fingerprint(kernel: helion.Kernel[Any]) -> str:
    """What `kernel`'s code depends on, whatever its arguments and the process's options.

    The sources on the disk need not be what this process runs: the functions that it has are looked at as well.
    """
    settings = {name: repr(x) for name, x in kernel.settings.to_dict().items() if not name.startswith("autotune")}
    (config,) = kernel.configs
    return repr((versions(), list(_functions(kernel.fn)), repr(config), settings))


def options() -> str:
    """Settings that change the generated code, and that a process may change between two calls."""
    return repr((torch.get_default_dtype(), inductor_config.save_config_portable()))


def read(key: str) -> list[dict[str, Any]]:
    """The entries under `key`, of "facts" and "source"; none if the file is not there or not whole."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if (path := get_cache_manager(key).get_file(FILE)) is not None:
            stored = json.loads(Path(path).read_text())
            if stored["sha256"] == _checksum(stored["entries"]):
                return list(stored["entries"])
    return []


def write(key: str, entries: list[dict[str, Any]]) -> None:
    """Store `entries` under `key`, in place of what is there; in a folder that can only be read, do not."""
    with contextlib.suppress(OSError):
        get_cache_manager(key).put(json.dumps({"sha256": _checksum(entries), "entries": entries}), FILE)


def _checksum(entries: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


class Generated:
    """The code that Helion generates for a kernel with one config: of this process, of the disk, or new."""

    def __init__(self, kernel: helion.Kernel[Any]) -> None:
        self._kernel = kernel
        self._entries: dict[Any, list[dict[str, Any]]] = {}

    @functools.cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._kernel)

    def _key(self, base: tuple[Any, ...]) -> str:
        """The name of a file: hexadecimal, as Triton asks for it."""
        return hashlib.sha256(repr((self._fingerprint, options(), base)).encode()).hexdigest()

    def find(self, args: tuple[Any, ...]) -> Run:
        """The host function for `args`, which are tensors and numbers. Threads that have to trace take turns."""
        base = self._kernel._base_specialization_key(args)
        if (run := self._known(base, args)) is not None:
            return run
        with TRACING:
            return self._known(base, args) or self._read_or_trace(base, args)

    def _read_or_trace(self, base: tuple[Any, ...], args: tuple[Any, ...]) -> Run:
        # Helion does this before it compiles, and Triton's folder may be another afterwards.
        device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
        helion_backends.get_backend_class(self._kernel.settings.backend)().setup_compile_cache_dir(device.index or 0)
        # A class of tensors may have no addresses.
        key = self._key((base, *map(type, args)))
        # Another process may have written meanwhile.
        self._entries[base] = read(key) or self._entries.get(base, [])
        if (run := self._known(base, args)) is not None:
            return run
        return self._trace(base, key, args)

    def _known(self, base: tuple[Any, ...], args: tuple[Any, ...]) -> Run | None:
        for entry in self._entries.get(base, []):
            if all(value(fact, args) == expected for fact, expected in entry["facts"]):
                # As Helion loads it, once a process: a file, of which Triton reads the source.
                run: Run = getattr(PyCodeCache.load(entry["source"]), self._kernel.name)
                return run
        return None

    def _trace(self, base: tuple[Any, ...], key: str, args: tuple[Any, ...]) -> Run:
        bound = self._kernel.bind(args)
        run: Run = bound.compile_config()
        # Code whose facts have a form that is not known here serves this call, and is not kept.
        with contextlib.suppress(UnknownFact, AttributeError, LookupError, StopIteration, TypeError, ValueError):
            facts = [[fact, value(fact, args)] for fact in _facts(bound, args, run)]
            entry = {"facts": facts, "source": Path(run.__code__.co_filename).read_text()}
            self._entries[base] = [*self._entries[base], entry]
            # What is lost when two processes write at once is traced again. Other entries of this process may have been
            # traced with other options.
            write(key, [*read(key), entry])
        return run
