"""An operation of `torch.library`, declared once: its schema, its fake and its call come from one NamedTuple.

A field that is a tensor, a number, a string or a dtype is an argument of the schema. A field that is a NamedTuple or a
dataclass itself, such as a `Recipe`, stands for its own fields. Ints are SymInts, but for those of something that has
no tensor: these are constants of the code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import typing
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils.flop_counter import register_flop_formula

from helion_attn.compiler import call_plans

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])

DEVICES = ("CPU", "CUDA")

#: What the schema calls the types of fields.
SCHEMA_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    int: "SymInt",
    int | None: "SymInt?",
    float: "float",
    float | None: "float?",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
}


class Structure:
    """The fields of a NamedTuple or a dataclass, and of those inside it.

    Attributes:
        paths: where each argument lies: names of fields, from the outermost, with dots.
        types: what the schema calls it.
    """

    def __init__(self, of: type) -> None:
        hints = typing.get_type_hints(of)
        names = of._fields if hasattr(of, "_fields") else [field.name for field in dataclasses.fields(of)]
        self.paths: list[str] = []
        self.types: list[str] = []
        #: Where each field's values begin and end among all, and what is made of several.
        self._parts: list[tuple[int, int, Structure | None]] = []
        for name in names:
            inner = None if hints[name] in SCHEMA_TYPES else Structure(hints[name])
            begin = len(self.paths)
            self.paths += [name] if inner is None else [f"{name}.{path}" for path in inner.paths]
            self.types += [SCHEMA_TYPES[hints[name]]] if inner is None else inner.types
            self._parts.append((begin, len(self.paths), inner))
        self._of: Callable[..., Any] = of
        if not any(kind.startswith("Tensor") for kind in self.types):
            self.types = [kind.replace("SymInt", "int") for kind in self.types]
            # The same few choices come with every call.
            self._of = functools.lru_cache(256)(lambda *values: of(**dict(zip(names, values, strict=True))))
        self._flat = operator.attrgetter(*self.paths)
        #: The tensor that all structures of an operation begin with.
        self.first_tensor: Callable[[Any], torch.Tensor] = operator.attrgetter(self.paths[0])

    def build(self, values: Sequence[Any]) -> Any:
        """What `values`, in the order of `paths`, are the fields of."""
        return self._of(*[values[begin] if x is None else x.build(values[begin:end]) for begin, end, x in self._parts])

    def flat(self, arguments: Any) -> tuple[Any, ...]:
        """The values of the fields, in the order of `paths`."""
        if torch.compiler.is_compiling():
            # Dynamo does not trace attrgetter.
            return tuple(functools.reduce(getattr, path.split("."), arguments) for path in self.paths)
        values: tuple[Any, ...] = self._flat(arguments)
        return values


class Operation(Generic[Arguments]):
    """An operation that CPU and CUDA tensors have, and fake ones.

    Kernels are launched on the current device, which must be that of the tensors; and without autocast. The kernels
    say what is cast; autocast would also cast the fp32 products of the interpreter.
    """

    def __init__(
        self,
        name: str,
        arguments: type[Arguments],
        results: int,
        launch: Callable[[Arguments], Any],
        fake: Callable[[Arguments], Any],
        mutates: tuple[str, ...] = (),
        flops: Callable[[Arguments], int] | None = None,
    ) -> None:
        """Register it.

        Args:
            name: in `torch.ops.helion_attn`.
            arguments: the NamedTuple that it takes; its first field is a tensor, or begins with one.
            results: how many tensors it returns; one is returned alone.
            launch: runs it.
            fake: allocates what `launch` would return.
            mutates: paths of the tensors that it writes, such as "cache.k8".
            flops: what `torch.utils.flop_counter` counts of it; None for nothing.
        """
        self._name, self._structure = name, Structure(arguments)
        if unknown := {*mutates} - {*self._structure.paths}:
            raise ValueError(f"{name} mutates {sorted(unknown)}; its arguments are {self._structure.paths}")
        declared = []
        for path, kind in zip(self._structure.paths, self._structure.types, strict=True):
            alias = f"({chr(ord('a') + mutates.index(path))}!)" if path in mutates else ""
            declared.append(f"{kind}{alias} {path.replace('.', '_')}")
        returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        torch.library.define(f"helion_attn::{name}", f"({', '.join(declared)}) -> {returned}")

        self._launch = launch

        torch.library.impl(f"helion_attn::{name}", DEVICES)(lambda *values: self._run(self._structure.build(values)))
        torch.library.register_fake(f"helion_attn::{name}")(lambda *values: fake(self._structure.build(values)))
        if flops is not None:
            register_flop_formula(getattr(torch.ops.helion_attn, name), get_raw=True)(
                lambda *values, out_val: flops(self._structure.build(values))
            )

    def _run(self, arguments: Arguments) -> Any:
        """Launch it, on the device of the tensors and without autocast."""
        x = self._structure.first_tensor(arguments)
        elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
        autocast = torch.is_autocast_enabled(x.device.type)
        # Helion does not take a tensor together with a view of it; below this key a view does not know its base.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            if not (elsewhere or autocast):
                return self._launch(arguments)
            with contextlib.ExitStack() as stack:
                if elsewhere:
                    stack.enter_context(torch.cuda.device(x.device))
                if autocast:
                    stack.enter_context(torch.autocast(x.device.type, enabled=False))
                return self._launch(arguments)

    def __call__(self, arguments: Arguments) -> Any:
        """Run it through PyTorch's dispatcher; a recorded call is planned without it."""
        if not torch.compiler.is_compiling() and call_plans.recording():
            return self._run(arguments)
        return getattr(torch.ops.helion_attn, self._name)(*self._structure.flat(arguments))
