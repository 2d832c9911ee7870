"""Loads that are moved: every block comes once, in time, and into a buffer that nobody reads."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import triton
from offline import compile_attention, compile_decode, compile_shape, compile_varlen
from triton import knobs

import helion_attn as ha
from helion_attn.kernels import early_loads

ONE_LEVEL = ha.Recipe(promote_every=0)

#: Kernels, and how their loops are to look, by letters of `LETTERS`.
KERNELS: dict[str, tuple[Callable[[], Any], str]] = {
    "two_level_2_stages": (lambda: compile_attention(128, False), "WIBECCBFIF"),
    "two_level_3_stages": (lambda: compile_attention(64, True, recipe=ha.BALANCED), "WIBECCBFIF"),
    "one_level_2_stages": (lambda: compile_attention(128, True, recipe=ONE_LEVEL), "WIFBECCBI"),
    "one_level_3_stages": (lambda: compile_attention(256, False, recipe=ha.BALANCED), "WIBECCBFI"),
    "hybrid_2_stages": (lambda: compile_attention(256, False, recipe=ha.HYBRID), "WIFBECCBI"),
    "bf16_3_stages": (lambda: compile_attention(128, True, recipe=ha.BF16), "WIBECCBFI"),
    "sequences": (lambda: compile_varlen(256, True), "WIBECCBFI"),
    "split": (lambda: compile_shape(1, 64, 100000, 256, False, recipe=ha.BALANCED), "WIBECCBFI"),
    "pieces_two_level": (lambda: compile_attention(192, True, D_v=128), "WIBECCCBFIFIF"),
    "pieces_3_stages": (lambda: compile_attention(512, True), "WIFIBECCCBFI"),
    "pieces_2_stages": (lambda: compile_attention(1024, False), "WIFIBECCCCCCBFIFIFII"),
}

LETTERS = {
    "ttng.wait_barrier": "W",
    "ttng.warp_group_dot": "I",
    "ttng.warp_group_dot_wait": "F",
    "gpu.barrier": "B",
    "ttng.barrier_expect": "E",
    "ttng.async_tma_copy_global_to_local": "C",
}


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, str | None]]]:
    """What the pass is given, and what it returns."""
    seen = []

    def recording(text: str) -> str | None:
        seen.append((text, rescheduled(text)))
        return seen[-1][1]

    rescheduled = early_loads.rescheduled
    with (
        mock.patch.object(early_loads, "rescheduled", recording),
        # What is found in Triton's cache is not compiled.
        mock.patch.object(early_loads, "_digest", return_value=f"{time.time_ns()}"),
    ):
        yield seen


@functools.cache
def texts(name: str) -> tuple[str, str]:
    """Triton's IR of a kernel, and what the pass makes of it."""
    with recorded() as seen:
        KERNELS[name][0]()
    before, after = seen[0]
    assert after is not None
    return before, after


def operation(line: str) -> tuple[str | None, str, str]:
    """What a line defines, its operation, and the rest."""
    found = re.match(rf"\s*(?:({early_loads.VALUE})(?::\d+)? = )?\"?([\w.]+)\"?(.*)", line)
    return (None, "", "") if found is None else (found[1], found[2], found[3].split(" loc(")[0])


def split_at_loop(text: str) -> tuple[list[str], str, list[str]]:
    """What comes before the loop, its line, and its body."""
    lines = text.split("\n")
    at = next(i for i, line in enumerate(lines) if " scf.for " in line)
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    end = next(i for i in range(at + 1, len(lines)) if lines[i].startswith(indent + "}"))
    return lines[:at], lines[at], lines[at + 1 : end]


@pytest.mark.parametrize("name", KERNELS)
def test_order(name: str) -> None:
    _, _, body = split_at_loop(texts(name)[1])
    order = "".join(LETTERS.get(operation(line)[1], "") for line in body)
    assert order == KERNELS[name][1]


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_else_changes(name: str) -> None:
    """Lines are moved; those that are new, or no more, are the barriers and the index of the block."""
    before, after = ([operation(line)[1] for line in text.split("\n")] for text in texts(name))
    new = list(after)
    for op in before:
        new.remove(op)
    later = KERNELS[name][1] == "WIBECCBFI"
    index = ["arith.constant"] * 2 + ["arith.addi"] * 2 + ["arith.cmpi"] * 2 + ["arith.andi"]
    assert sorted(new) == sorted(["gpu.barrier"] * 3 + (index if later else []))


class Machine:
    """A warp that runs the integers of a kernel, with buffers that are written, read, and known to be free."""

    def __init__(self, values: dict[str, int]) -> None:
        self.values: dict[str, Any] = dict(values)
        #: Of each barrier: what is copied under it, and how often it was waited for.
        self.copied: dict[Any, list[int]] = {}
        self.waited: dict[Any, int] = {}
        #: Blocks that were waited for, in order, and buffers by state.
        self.blocks: list[int] = []
        self.in_flight: set[Any] = set()
        self.ready: set[Any] = set()
        self.done: set[Any] = set()
        self.barrier: Any = None

    def value(self, name: str) -> Any:
        constant = re.fullmatch(r"%c(-?\d+)_i\d+(_\d+)?", name)
        return int(constant[1]) if constant else self.values.get(name)

    def run(self, lines: list[str]) -> None:
        for line in lines:
            defined, op, rest = operation(line)
            names = re.findall(early_loads.VALUE, rest)
            given = [self.value(name) for name in names]
            result = self.step(op, rest, names, given)
            if defined is not None:
                self.values[defined] = result

    def step(self, op: str, rest: str, names: list[str], given: list[Any]) -> Any:
        match op.removeprefix("ttng.").removeprefix("ttg."):
            case "gpu.barrier":
                # What all warps have read is free.
                self.ready -= self.done
                self.done = set()
            case "memdesc_index":
                return (names[0], given[1])
            case "memdesc_trans" | "memdesc_reshape":
                return given[0]
            case "barrier_expect" if given[1]:
                self.barrier = given[0]
                self.copied.setdefault(self.barrier, []).append(-1)
            case "async_tma_copy_global_to_local":
                buffer, barrier, valid = given[-3:]
                if valid:
                    assert barrier == self.barrier
                    assert buffer not in self.ready | self.in_flight, "written while it is read"
                    self.ready.add(buffer)
                    # Descriptors of pieces have the block times their number, or first.
                    if self.copied[barrier][-1] < 0:
                        self.copied[barrier][-1] = next(x for x in given[2:-3] if x is not None)
            case "wait_barrier":
                times = self.waited.get(given[0], 0)
                if given[0] in self.copied:
                    assert given[1] == times % 2, "another phase"
                    self.blocks.append(self.copied[given[0]][times])
                    self.waited[given[0]] = times + 1
            case "warp_group_dot":
                self.in_flight |= {x for x in given if isinstance(x, tuple)}
            case "warp_group_dot_wait":
                assert "pendings = 0 " in rest
                self.done |= self.in_flight
                self.in_flight = set()
            case "arith.constant":
                return int(found[1]) if (found := re.match(r" (-?\d+) : i", rest)) else None
        if op.startswith("arith.") and None not in given and all(isinstance(x, int) for x in given):
            compare = re.match(r" (\w+),", rest)
            match op:
                case "arith.addi":
                    return given[0] + given[1]
                case "arith.subi":
                    return given[0] - given[1]
                case "arith.muli":
                    return given[0] * given[1]
                case "arith.andi":
                    return given[0] & given[1]
                case "arith.xori":
                    return given[0] ^ given[1]
                case "arith.select":
                    return given[1] if given[0] else given[2]
                case "arith.cmpi":
                    assert compare is not None
                    a, b = given
                    return int({"slt": a < b, "sgt": a > b, "sge": a >= b, "sle": a <= b, "eq": a == b}[compare[1]])
        return None


def run(text: str, first: int, end: int) -> Machine:
    """The loads of a program with key blocks `first` to `end`."""
    before, loop, body = split_at_loop(text)
    bounds = re.search(rf"scf\.for ({early_loads.VALUE}) = ({early_loads.VALUE}) to ({early_loads.VALUE}) ", loop)
    assert bounds is not None
    j, first_name, end_name = bounds.groups()
    at_buffers = next(i for i, line in enumerate(before) if "ttg.local_alloc : () -> !ttg.memdesc<" in line)
    machine = Machine({first_name: first, end_name: end})
    # Before that, there is but Q.
    machine.run([line for line in before[at_buffers:] if operation(line)[0] not in (first_name, end_name)])
    carried = re.findall(rf"({early_loads.VALUE}) = ({early_loads.VALUE})", loop.split("iter_args(")[1])
    machine.values |= {name: machine.value(start) for name, start in carried}
    for i in range(first, end):
        machine.values[j] = i
        machine.run(body)
        yielded = re.findall(early_loads.VALUE, operation(body[-1])[2])
        machine.values |= {name: machine.value(x) for (name, _), x in zip(carried, yielded, strict=True)}
    return machine


@pytest.mark.parametrize("name", KERNELS)
def test_blocks_and_buffers(name: str) -> None:
    """Of any number of blocks, each is waited for in turn; no buffer is written before all warps have read it."""
    after = texts(name)[1]
    starts_at_0 = re.search(rf"scf\.for {early_loads.VALUE} = %c0_i32 ", after) is not None
    for first in (0,) if starts_at_0 else (0, 5):
        for number in range(9):
            machine = run(after, first, first + number)
            assert [x for x in machine.blocks if x >= 0] == list(range(first, first + number))


def test_the_machine_can_fail() -> None:
    after = texts("one_level_3_stages")[1]
    run(after, 0, 6)
    without_barrier = after.replace("      gpu.barrier\n", "", 1)
    with pytest.raises(AssertionError, match="written while it is read"):
        run(without_barrier, 0, 6)
    # An iteration too early, into the buffer that P V still reads.
    before = texts("one_level_3_stages")[0]
    with mock.patch.object(early_loads, "_an_iteration_later", lambda loop, copies, stages: copies):
        too_early = early_loads.rescheduled(before)
    assert too_early is not None
    with pytest.raises(AssertionError, match="written while it is read"):
        run(too_early, 0, 6)


def test_other_loops_stay() -> None:
    before, after = texts("two_level_2_stages")
    for text in (
        "module {\n}",
        after,  # the copies are not at the end
        before.replace("pendings = 0", "pendings = 1"),
        before.replace(early_loads.EXPECT, "ttng.something_else "),
        before.replace("tt.num_stages", "tt.something_else"),
        "\n".join(line for line in before.split("\n") if early_loads.COPY not in line),
    ):
        assert early_loads.rescheduled(text) is None


def test_decoding_stays() -> None:
    """Its copies of K and V have barriers of their own."""
    with recorded() as seen:
        compile_decode(64, 64, 32, 1, 2)
    assert [after for _, after in seen] == [None] * len(seen) != []


@contextlib.contextmanager
def installed(hook: Any) -> Iterator[None]:
    """A hook of somebody else's."""
    knobs.runtime.add_stages_inspection_hook = hook
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = None


def test_the_hook_is_this_compilations() -> None:
    calls: list[Any] = []
    stages = {"ttgir": lambda module, metadata: module}

    def theirs(*args: Any) -> Any:
        calls.append(args)
        return ("key", "hash") if not args else None

    def compile_(source: Any, **options: Any) -> Any:
        hook = knobs.runtime.add_stages_inspection_hook
        assert hook is not None
        assert hook() == ("key", "hash")
        kept = stages["ttgir"]
        other = threading.Thread(target=lambda: hook(None, stages, None, None, None))
        other.start()
        other.join()
        assert stages["ttgir"] is kept
        hook(None, stages, None, None, None)
        assert stages["ttgir"] is not kept
        assert options["_env_vars"]["helion_attn_early_loads"]
        raise RuntimeError(source)

    with installed(theirs):
        with mock.patch.object(triton, "compile", compile_), pytest.raises(RuntimeError, match="a kernel"):
            early_loads.compiled("a kernel")
        assert knobs.runtime.add_stages_inspection_hook is theirs
    assert [len(args) for args in calls] == [0, 5, 5]


@pytest.mark.parametrize(("version", "known"), [("3.6.0", True), ("3.9.1", True), ("3.10.0", False), ("4.0.0", False)])
def test_unknown_tritons_compile_as_they_do(version: str, known: bool) -> None:
    class Kernel: ...

    kernel = Kernel()
    host = types.FunctionType((lambda: None).__code__, {"_helion_host": kernel}, "host")
    replaced = type("Replaced", (Kernel,), {})
    with mock.patch.object(triton, "__version__", version), mock.patch.object(early_loads, "_WithEarlyLoads", replaced):
        assert early_loads.with_early_loads(host) is host
    assert isinstance(kernel, replaced) is known
