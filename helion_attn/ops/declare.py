"""An operation of `torch.library`, declared once: its schema, its fake and its call come from one NamedTuple.

A field that is a tensor, a number, a string or a dtype is an argument of the schema. A field that is a NamedTuple or a
dataclass itself, such as a `Recipe`, stands for its own fields. Ints are SymInts, but for those of something that has
no tensor: these are constants of the code.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import typing
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils.flop_counter import register_flop_formula

from helion_attn import plans
from helion_attn.compiler.buffers import Draft
from helion_attn.compiler.helion_adapter import multiprocessors
from helion_attn.compiler.notice import LOG
from helion_attn.debug_state import seen_so_far
from helion_attn.public_calls import PublicCall

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
    tuple[int, int] | None: "SymInt[2]?",
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
        #: Fields that are tensors or have some.
        self._with_tensors: list[tuple[str, Structure | None]] = []
        for name in names:
            inner = None if hints[name] in SCHEMA_TYPES else Structure(hints[name])
            begin = len(self.paths)
            self.paths += [name] if inner is None else [f"{name}.{path}" for path in inner.paths]
            self.types += [SCHEMA_TYPES[hints[name]]] if inner is None else inner.types
            self._parts.append((begin, len(self.paths), inner))
            if any(kind.startswith("Tensor") for kind in self.types[begin:]):
                self._with_tensors.append((name, inner))
        self._of: Callable[..., Any] = of
        if not any(kind.startswith("Tensor") for kind in self.types):
            self.types = [kind.replace("SymInt", "int") for kind in self.types]
            # The same few choices come with every call.
            self._of = functools.lru_cache(256)(lambda *values: of(**dict(zip(names, values, strict=True))))
        get = operator.attrgetter(*self.paths)
        self._flat: Callable[[Any], tuple[Any, ...]] = get if len(self.paths) > 1 else lambda of: (get(of),)
        #: The tensor that all structures of an operation begin with.
        self.first_tensor: Callable[[Any], torch.Tensor] = operator.attrgetter(self.paths[0])

    def build(self, values: Sequence[Any]) -> Any:
        """What `values`, in the order of `paths`, are the fields of."""
        return self._of(*[values[begin] if x is None else x.build(values[begin:end]) for begin, end, x in self._parts])

    def with_tensors(self, arguments: Any, replaced: Callable[[torch.Tensor], Any]) -> Any:
        """The arguments with something in place of each tensor, in the order of `paths`; all else is as it was."""
        fields = {}
        for name, inner in self._with_tensors:
            x = getattr(arguments, name)
            if inner is not None:
                fields[name] = inner.with_tensors(x, replaced)
            elif x is not None:
                fields[name] = replaced(x)
        if isinstance(arguments, tuple):
            return arguments._replace(**fields)  # type: ignore[attr-defined]
        return dataclasses.replace(arguments, **fields)

    def flat(self, arguments: Any) -> tuple[Any, ...]:
        """The values of the fields, in the order of `paths`."""
        if torch.compiler.is_compiling():
            # Dynamo does not trace attrgetter.
            return tuple(functools.reduce(getattr, path.split("."), arguments) for path in self.paths)
        return self._flat(arguments)


class Operation(Generic[Arguments]):
    """An operation that CPU and CUDA tensors have, and fake ones; it runs a plan, which it makes on buffers."""

    def __init__(
        self,
        name: str,
        arguments: type[Arguments],
        results: int,
        launch: Callable[[Arguments], Any],
        fake: Callable[[Arguments], Any],
        mutates: tuple[str, ...] = (),
        flops: Callable[[Arguments], int] | None = None,
        planned: bool = True,
        call: Callable[[Arguments], PublicCall] | None = None,
    ) -> None:
        """Register it.

        Args:
            name: in `torch.ops.helion_attn`.
            arguments: the NamedTuple that it takes; its first field is a tensor, or begins with one.
            results: how many tensors it returns; one is returned alone.
            launch: allocates what it returns, and runs kernels: on tensors, or on the buffers of a plan.
            fake: allocates what `launch` would return.
            mutates: paths of the tensors that it writes, such as "cache.k8".
            flops: what `torch.utils.flop_counter` counts of it; None for nothing.
            planned: whether all that `launch` does can be planned; PyTorch's own operations cannot.
            call: the call of a public function that it is; None for what such a call does among others.
        """
        self.name, self._structure = name, Structure(arguments)
        if unknown := {*mutates} - {*self._structure.paths}:
            raise ValueError(f"{name} mutates {sorted(unknown)}; its arguments are {self._structure.paths}")
        declared = []
        for path, kind in zip(self._structure.paths, self._structure.types, strict=True):
            alias = f"({chr(ord('a') + mutates.index(path))}!)" if path in mutates else ""
            declared.append(f"{kind.replace('Tensor', f'Tensor{alias}')} {path.replace('.', '_')}")
        returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        torch.library.define(f"helion_attn::{name}", f"({', '.join(declared)}) -> {returned}")

        self._launch, self._results, self._call = launch, results, call
        torch.library.impl(f"helion_attn::{name}", DEVICES)(self._run if planned else self._run_unplanned)
        torch.library.register_fake(f"helion_attn::{name}")(lambda *values: fake(self._structure.build(values)))
        if flops is not None:
            register_flop_formula(getattr(torch.ops.helion_attn, name), get_raw=True)(
                lambda *values, out_val: flops(self._structure.build(values))
            )

    def _run(self, *values: Any) -> Any:
        """Run the plan of what comes through PyTorch's dispatcher."""
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        rest = [None if isinstance(x, torch.Tensor) else tuple(x) if isinstance(x, list) else x for x in values]
        key = (self.name, *plans.layouts(tensors), *[x is None for x in values], *rest)
        found = plans.lookup(key)
        if found is None:
            arguments = self._structure.build(values)
            found = plans.remember(key, self.plan(arguments))
            if LOG.isEnabledFor(logging.DEBUG):
                plans.log_new(self, arguments, found)
        returned = found.run(tensors)
        if self._call is not None and (seen := seen_so_far()) is not None and seen.save is not None and seen.examine:
            seen.examine(self._structure.build(values), returned, found.kernels, seen)
        return returned[0] if self._results == 1 else tuple(returned) if self._results else None

    def _run_unplanned(self, *values: Any) -> Any:
        arguments = self._structure.build(values)
        with plans.plain_kernels(self._structure.first_tensor(arguments)):
            return self._launch(arguments)

    def plan(self, arguments: Arguments, sm_count: int | None = None) -> plans.Plan:
        """Plan the launches for arguments of these layouts, on their GPU or one of so many SMs. Nothing runs."""
        device = self._structure.first_tensor(arguments).device
        draft = Draft(device, multiprocessors(device) if sm_count is None else sm_count)
        returned = self._launch(self._structure.with_tensors(arguments, draft.given))
        outputs = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
        return plans.Plan(draft, outputs)

    def call_of(self, arguments: Arguments) -> PublicCall | None:
        """Return the call of a public function that it is, or None."""
        return None if self._call is None else self._call(arguments)

    def tensors(self, arguments: Arguments) -> list[torch.Tensor]:
        """Return the tensors that a plan of `arguments` runs on."""
        return [x for x in self._structure.flat(arguments) if isinstance(x, torch.Tensor)]

    def values(self, arguments: Arguments) -> tuple[Any, ...]:
        """Return the arguments in the order of the schema."""
        return self._structure.flat(arguments)

    def __call__(self, arguments: Arguments) -> Any:
        """Run it through PyTorch's dispatcher."""
        return getattr(torch.ops.helion_attn, self.name)(*self.values(arguments))
