"""Facts about the arguments, by name, as JSON: generated code depends on them beyond the key of its entry.

Helion names them when it has traced: sizes and strides that the kernel asked for, and what a tensor must be for TMA to
read it. Their values are found without Helion, and are those that Helion's own functions give.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from helion_attn.compiler.buffers import tensor_type
from helion_attn.compiler.helion_adapter import helion_kernel
from helion_attn.compiler.linked_launch import recorded

#: A name of `FACTS`, and its arguments.
Fact = list[Any]

#: Alignment of a tensor's address and strides that TMA asks for, in bytes.
ALIGNMENT = 16


def _descriptor(args: Sequence[Any], i: int, most: list[int]) -> list[Any]:
    """Facts that TMA asks of a tensor that is read in boxes: strides, extents up to `most`, and 32-bit coordinates.

    A box fits an extent if it is no larger than the largest power of two that does.
    """
    x: torch.Tensor = args[i]
    shape, strides, width = x.shape, x.stride(), x.itemsize
    contiguous = strides.index(1) if strides.count(1) == 1 else None
    aligned = [stride * width % ALIGNMENT == 0 for stride in strides]
    extents = [min(1 << size.bit_length() >> 1, n) for size, n in zip(shape, most, strict=True)]
    return [contiguous, aligned, extents, max(shape) < 2**31]


def _aligned(args: Sequence[Any], i: int) -> bool:
    """Return whether TMA can read from a tensor's address; Helion takes it that fake tensors have none."""
    x: torch.Tensor = args[i]
    return tensor_type(x).__name__ not in ("FakeTensor", "FunctionalTensor") and x.data_ptr() % ALIGNMENT == 0


#: Functions of the arguments, whose values are JSON.
FACTS: dict[str, Callable[..., Any]] = {
    "size": lambda args, i, dim: args[i].size(dim),
    "stride": lambda args, i, dim: args[i].stride(dim),
    "number": lambda args, i: args[i],
    "has_size": lambda args, i, dim, size: args[i].size(dim) == size,
    "has_stride": lambda args, i, dim, stride: args[i].stride(dim) == stride,
    "descriptor": _descriptor,
    "aligned": _aligned,
    "multiprocessors": lambda args, i: torch.cuda.get_device_properties(args[i].device).multi_processor_count,
}


def value(fact: Fact, args: Sequence[Any]) -> Any:
    """The value of `fact` for these arguments."""
    name, *parameters = fact
    return FACTS[name](args, *parameters)


def _parts(name: str, facts: Sequence[Sequence[Any]]) -> list[tuple[int, Callable[[Any], Any], Any]]:
    """Facts of this name, put together by tensor: which argument, what takes the dimensions in question, and those."""
    wanted: dict[int, dict[int, int]] = {}
    for (of, *parameters), expected in facts:
        if of == name:
            wanted.setdefault(parameters[0], {})[parameters[1]] = expected
    getters = {i: operator.itemgetter(*dims) for i, dims in wanted.items()}
    return [(i, take, take(wanted[i])) for i, take in getters.items()]


def holding(facts: Sequence[Sequence[Any]]) -> Callable[[Sequence[Any]], bool]:
    """Function of the arguments: whether all facts have these values. Nearly all are of sizes and strides."""
    sizes, strides = _parts("size", facts), _parts("stride", facts)
    others = [(fact, expected) for fact, expected in facts if fact[0] not in ("size", "stride")]

    def hold(args: Sequence[Any]) -> bool:
        for i, take, expected in sizes:
            if take(args[i].shape) != expected:
                return False
        for i, take, expected in strides:
            if take(args[i].stride()) != expected:
                return False
        return all(FACTS[name](args, *parameters) == expected for (name, *parameters), expected in others)

    return hold


class UnknownFact(Exception):
    """Helion's code depends on something that `FACTS` cannot say."""


def _fact(extractor: Any, args: Sequence[Any]) -> Fact:
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


def facts_of(bound: Any, args: Sequence[Any], host_fn: Callable[..., Any]) -> list[Fact]:
    """All that the code of a kernel depends on beyond its key; `UnknownFact` if that cannot be said.

    Args:
        bound: Helion's kernel, traced for these arguments.
        args: the arguments.
        host_fn: the host function.
    """
    extractors = [*bound._specialize_extra(), *bound._guarded_input_facts()]
    facts = [_fact(x, args) for x in (*extractors, *bound._compiler_seed_specialization_extractors)]
    (launch,) = recorded(host_fn, args)
    for fact in facts:
        # Where all of a tensor's accesses became descriptors, a dimension's extent matters up to that of the box, which
        # is 1 for batches and blocks. Helion asks for the largest box of the kernel in every dimension.
        if fact[0] == "descriptor":
            tensor = args[fact[1]]
            boxes = [x.block_shape for x in launch.args if getattr(x, "base", None) is tensor]
            if boxes and not any(x is tensor for x in launch.args):
                fact[2] = [max(extents) for extents in zip(*boxes, strict=True)]
    return facts
