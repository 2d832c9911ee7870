"""A machine that runs the integers of a kernel, by Triton's IR of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from helion_attn.compiler.passes.ttgir import VALUE
from helpers.passes import operation, split_at_loop


class Machine:
    """A warp that runs the integers of a kernel: what its buffers hold, and which are read, or free."""

    def __init__(
        self, values: dict[str, int], memory: dict[str, Callable[[int], int]] | None = None, axis: int = 1
    ) -> None:
        self.values: dict[str, Any] = dict(values)
        #: Which coordinate of a copy says the block: behind the head, or before it, of pages.
        self.axis = axis
        #: What pointers point to, by their names.
        self.memory = memory or {}
        #: The block of now, and of each buffer's name the coordinate that a product found in it, by block.
        self.block = -1
        self.found: dict[str, dict[int, int]] = {}
        #: The integers of the loop, by block.
        self.history: dict[int, dict[str, int]] = {}
        #: Of a buffer, the coordinate that was copied, and under which barrier. Those that have arrived.
        self.content: dict[Any, tuple[int, Any]] = {}
        self.arrived: set[Any] = set()
        #: Of a barrier, how often something was expected, and waited for.
        self.expected: dict[Any, int] = {}
        self.waited: dict[Any, int] = {}
        #: Buffers that products of now read, that this warp has read, and that others may.
        self.in_flight: set[Any] = set()
        self.done: set[Any] = set()
        self.busy: set[Any] = set()

    def value(self, name: str) -> Any:
        constant = re.fullmatch(r"%(true|c(-?\d+)_i\d+(_\d+)?)", name)
        if constant is None:
            return self.values.get(name)
        return 1 if constant[1] == "true" else int(constant[2])

    def run(self, lines: list[str]) -> None:
        for line in lines:
            defined, op, rest = operation(line)
            names = re.findall(VALUE, rest)
            result = self.step(op, rest, names, [self.value(name) for name in names])
            if defined is not None:
                self.values[defined] = result

    def step(self, op: str, rest: str, names: list[str], given: list[Any]) -> Any:
        if op == "tt.addptr" and (names[0] in self.memory):
            return (names[0], given[1])
        if op == "tt.load" and isinstance(given[0], tuple):
            pointer, at = given[0]
            return self.memory[pointer](at) if len(given) == 1 or given[1] else None
        match op.removeprefix("ttng.").removeprefix("ttg."):
            case "gpu.barrier":
                # What all warps have read is free.
                self.busy -= self.done
                self.done = set()
            case "memdesc_index":
                return (names[0], given[1])
            case "memdesc_trans" | "memdesc_reshape" | "memdesc_reinterpret":
                return given[0]
            case "barrier_expect" if isinstance(given[0], tuple):
                assert given[1] is not None
                self.expected[given[0]] = self.expected.get(given[0], 0) + given[1]
            case "async_tma_copy_global_to_local" if isinstance(given[-2], tuple):
                *coordinates, buffer, barrier, valid = given[1:]
                assert valid is not None
                if valid:
                    assert self.expected[barrier] == self.waited.get(barrier, 0) + 1
                    assert buffer not in self.busy | self.in_flight, "written while it is read"
                    # The block, or the part of V in it.
                    assert coordinates[self.axis] is not None
                    self.content[buffer] = (coordinates[self.axis], barrier)
                    self.arrived.discard(buffer)
                    self.busy.add(buffer)
            case "wait_barrier" if isinstance(given[0], tuple):
                times = self.waited.get(given[0], 0)
                assert self.expected.get(given[0], 0) == times + 1, "nothing is on its way"
                assert given[1] == times % 2, "another phase"
                self.waited[given[0]] = times + 1
                self.arrived |= {buffer for buffer, (_, barrier) in self.content.items() if barrier == given[0]}
            case "warp_group_dot":
                for buffer in given:
                    if isinstance(buffer, tuple):
                        assert buffer in self.arrived, "read before it has come"
                        self.in_flight.add(buffer)
                        self.found.setdefault(buffer[0], {})[self.block] = self.content[buffer][0]
            case "warp_group_dot_wait":
                assert "pendings = 0 " in rest
                self.done |= self.in_flight
                self.in_flight = set()
            case "arith.constant":
                if rest.startswith(" true"):
                    return 1
                return int(found[1]) if (found := re.match(r" (-?\d+) : i", rest)) else None
            case "arith.extsi" | "arith.extui" | "arith.trunci":
                return given[0]
            case "tt.get_program_id":
                return 0
            case "tt.elementwise_inline_asm" if "mul.hi.u32" in rest and None not in given:
                return given[0] * given[1] >> 32
        if op.startswith("arith.") and all(isinstance(x, int) for x in given):
            return self.arithmetic(op, rest, given)
        return None

    @staticmethod
    def arithmetic(op: str, rest: str, given: list[int]) -> int | None:
        match op:
            case "arith.addi":
                return given[0] + given[1]
            case "arith.subi":
                return given[0] - given[1]
            case "arith.muli":
                return given[0] * given[1]
            case "arith.divsi" | "arith.floordivsi":
                return given[0] // given[1]
            case "arith.remsi":
                return given[0] % given[1]
            case "arith.andi":
                return given[0] & given[1]
            case "arith.shrsi":
                return given[0] >> given[1]
            case "arith.xori":
                return given[0] ^ given[1]
            case "arith.select":
                return given[1] if given[0] else given[2]
            case "arith.cmpi":
                (compare,) = re.findall(r"^ (\w+),", rest)
                a, b = given
                signs = {"slt": a < b, "sgt": a > b, "sge": a >= b, "sle": a <= b, "eq": a == b, "ne": a != b}
                return int(signs[compare]) if compare in signs else None
        return None


def run(
    text: str,
    first: int,
    end: int,
    arguments: dict[str, int] | None = None,
    memory: dict[str, Callable[[int], int]] | None = None,
    axis: int = 1,
) -> Machine:
    """The loads of a program with key blocks `first` to `end`; arguments that are not given are 1.

    `memory` is what pointers among the arguments point to, `axis` the machine's.
    """
    before, loop, body = split_at_loop(text)
    bounds = re.search(rf"scf\.for ({VALUE}) = ({VALUE}) to ({VALUE}) ", loop)
    assert bounds is not None
    j, first_name, end_name = bounds.groups()
    # Of the first program.
    (function,) = [line for line in before if "tt.func " in line]
    ones = dict.fromkeys(re.findall(rf"({VALUE}): i(?:32|64)", function), 1)
    machine = Machine(ones | (arguments or {}) | {first_name: first, end_name: end}, memory, axis)
    machine.run([line for line in before if operation(line)[0] not in (first_name, end_name)])
    carried = re.findall(rf"({VALUE}) = ({VALUE})", loop.split("iter_args(")[1])
    machine.values |= {name: machine.value(start) for name, start in carried}
    for i in range(first, end):
        machine.values[j] = machine.block = i
        machine.run(body)
        machine.history[i] = {name: x for name, x in machine.values.items() if isinstance(x, int)}
        yielded = re.findall(VALUE, operation(body[-1])[2])
        machine.values |= {name: machine.value(x) for (name, _), x in zip(carried, yielded, strict=True)}
    return machine
