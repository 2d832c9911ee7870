"""A machine that runs a kernel by its PTX, one program at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

#: A register: one element a thread, of which an instruction's type takes the lowest bits.
Word = npt.NDArray[np.uint64]
#: Numbers of an instruction's type, one a thread.
Numbers = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

WARP = 32
#: Types of PTX by name: as many bits, without a sign, with one, and floats.
TYPES = {f"{x}{bits}": np.dtype(f"u{bits // 8}") for x in ("b", "u") for bits in (8, 16, 32, 64)}
TYPES |= {f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (16, 32, 64)}
TYPES |= {"pred": np.dtype("?"), "f16": np.dtype("f2"), "f32": np.dtype("f4")}


def field(a: Numbers, begin: Numbers, length: Numbers) -> Numbers:
    """`length` bits of `a` from `begin` on, of which the highest is the sign if the type has one."""
    bits = a.dtype.itemsize * 8
    return a << (bits - begin - length) >> (bits - length)


def permuted(a: Numbers, b: Numbers, selector: Numbers) -> Numbers:
    """Four bytes of `a` and `b`, or their signs, as the selector's four nibbles say."""
    nibbles = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
    chosen = np.take_along_axis(np.stack([a, b], 1).view(np.int8), nibbles.astype(np.int64) & 7, 1)
    return np.where(nibbles & 8, chosen >> 7, chosen).view(np.uint32)[:, 0]


def to_e4m3(high: Numbers, low: Numbers) -> Numbers:
    """A pair of the nearest e4m3, none of which is infinite."""
    pair = torch.from_numpy(np.stack([low, high], 1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return pair.view(torch.uint8).numpy().view(np.uint16)[:, 0]


def from_e4m3(pair: Numbers) -> Numbers:
    """The float16 of a pair of e4m3."""
    return torch.from_numpy(pair.view(np.uint8)).view(torch.float8_e4m3fn).half().numpy().view(np.uint32)


def from_other_lane(x: Numbers, by: Numbers, limit: Numbers, members: Numbers) -> Numbers:
    """`x` of the lane whose number differs in the bits `by`."""
    assert (limit == WARP - 1).all(), "a part of a warp"
    assert (members == 2**32 - 1).all(), "a part of a warp"
    return x[np.arange(len(x)) ^ by]


def from_lower_lane(x: Numbers, by: Numbers, limit: Numbers, members: Numbers) -> Numbers:
    """`x` of the lane that lies `by` lower, or where the warp has none the thread's own."""
    assert (limit == 0).all(), "a part of a warp"
    assert (members == 2**32 - 1).all(), "a part of a warp"
    thread = np.arange(len(x))
    return x[np.where(thread % WARP >= by, thread - by.astype(np.int64), thread)]


def largest_of_warp(x: Numbers, members: Numbers) -> Numbers:
    assert (members == -1).all(), "a part of a warp"
    return np.repeat(x.reshape(-1, WARP).max(1), WARP)


class Operation(NamedTuple):
    """What an instruction computes of its operands."""

    function: Callable[..., Any]
    dtype: np.dtype[Any]  # of the operands
    last: np.dtype[Any]  # of the last of them


def _typed(name: str, types: str, function: Callable[..., Any], last: str | None = None) -> dict[str, Operation]:
    """An instruction of several types, by its names; `last` is the type of its last operand, if it is always that."""
    return {f"{name}.{x}": Operation(function, TYPES[x], TYPES[last or x]) for x in types.split()}


#: Instructions that write registers and read no memory, by name.
OPERATIONS: dict[str, Operation] = {
    **_typed("abs", "f32", np.abs),
    **_typed("add", "f32 s32 s64", np.add),
    **_typed("and", "b16 b32 b64 pred", np.bitwise_and),
    **_typed("bfe", "s32 u32 u64", field),
    **_typed("cvt.f32", "f16", lambda x: x.astype(np.float32)),
    "cvt.f32.bf16": Operation(lambda x: (x.astype(np.uint32) << 16).view(np.float32), TYPES["b16"], TYPES["b16"]),
    **_typed("cvt.rn.f32", "s16", lambda x: x.astype(np.float32)),
    "cvt.rn.f16x2.e4m3x2": Operation(from_e4m3, TYPES["b16"], TYPES["b16"]),
    **_typed("cvt.rn.satfinite.e4m3x2", "f32", to_e4m3),
    **_typed("cvt.s64", "s32", lambda x: x.astype(np.int64)),
    **_typed("cvt.u16", "u32", lambda x: x.astype(np.uint16)),
    **_typed("cvt.u32", "u16 u64", lambda x: x.astype(np.uint32)),
    **_typed("cvt.u64", "u32", lambda x: x.astype(np.uint64)),
    **_typed("div", "s32", lambda a, b: np.trunc(a / b).astype(np.int32)),  # through float64, which is exact
    **_typed("div.full", "f32", np.divide),  # which may be 2 units off on a GPU
    # The exact product is added in float64: another last bit is left in 1 of 2**29 sums.
    **_typed("fma.rn", "f32", lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32)),
    **_typed("ld.param", "b32 b64 s32", lambda x: x),
    **_typed("mad.lo", "s32 s64", lambda a, b, c: a * b + c),
    **_typed("mad.wide", "s32", lambda a, b, c: a.astype(np.int64) * b + c, "s64"),
    **_typed("mad.wide", "u32", lambda a, b, c: a.astype(np.uint64) * b + c, "u64"),
    **_typed("max", "s32 s64", np.maximum),
    **_typed("max.NaN", "f32", np.maximum),
    **_typed("min", "s32", np.minimum),
    **_typed("mov", "b16 b32 b64 pred u32", lambda x: x),
    **_typed("mul", "f32", np.multiply),
    **_typed("mul.lo", "s32 s64", np.multiply),
    **_typed("mul.wide", "s32", lambda a, b: a.astype(np.int64) * b),
    **_typed("mul.wide", "u32", lambda a, b: a.astype(np.uint64) * b),
    **_typed("neg", "s32", np.negative),
    **_typed("not", "pred", np.invert),
    **_typed("or", "b16 b32 b64 pred", np.bitwise_or),
    **_typed("prmt", "b32", permuted),
    **_typed("redux.sync.max", "s32", largest_of_warp),
    **_typed("selp", "b16 b32 b64 f32", lambda a, b, choice: np.where(choice, a, b), "pred"),
    **_typed("setp.eq", "b16 b32", np.equal),
    **_typed("setp.ge", "s32 s64", np.greater_equal),
    **_typed("setp.geu", "f32", lambda a, b: ~(a < b)),
    **_typed("setp.gt", "f32 s32 s64 u32", np.greater),
    **_typed("setp.le", "f32 s32", np.less_equal),
    **_typed("setp.lt", "f32 s32 s64 u32", np.less),
    **_typed("setp.nan", "f32", lambda a, b: np.isnan(a) | np.isnan(b)),
    **_typed("setp.ne", "b32 b64", np.not_equal),
    **_typed("shfl.sync.bfly", "b32", from_other_lane),
    **_typed("shfl.sync.up", "b32", from_lower_lane),
    **_typed("shl", "b16 b32 b64", lambda a, by: (a << by).astype(a.dtype), "u32"),
    **_typed("shr", "s16 s32 u16 u32 u64", lambda a, by: (a >> by).astype(a.dtype), "u32"),
    **_typed("sub", "f32 s32 s64", np.subtract),
    **_typed("xor", "b32 pred", np.bitwise_xor),
}

#: A load or a store: which, of which memory, of how many numbers, of which type.
ACCESS = re.compile(r"(ld|st)\.(global|shared)(?:\.v([24]))?\.(b\d+)")
STORED_MATRICES = "stmatrix.sync.aligned.m8n8.x4.shared.b16"
KNOWN = {*OPERATIONS, STORED_MATRICES, "bar.sync", "bra", "bra.uni", "ret"}


class Memory:
    """Bytes at addresses, in parts that have names; what is accessed lies inside of one part, and is aligned."""

    def __init__(self, parts: Mapping[str, tuple[int, Bytes]]) -> None:
        """Of `(address, bytes)` by name; the bytes are copied."""
        self.names = sorted(parts, key=lambda name: parts[name][0])
        self.begins = np.array([parts[name][0] for name in self.names], np.int64)
        self.sizes = np.array([len(parts[name][1]) for name in self.names], np.int64)
        self.data = np.concatenate([parts[name][1] for name in self.names])
        #: Where each part begins in `data`.
        self.firsts = np.cumsum(self.sizes) - self.sizes

    def __getitem__(self, name: str) -> Bytes:
        i = self.names.index(name)
        return self.data[self.firsts[i] : self.firsts[i] + self.sizes[i]]

    def places(self, addresses: Numbers, size: int) -> Numbers:
        """Where in `data` the bytes at addresses are, [threads, size]."""
        part = np.searchsorted(self.begins, addresses, "right") - 1
        offsets = addresses - self.begins[part]
        outside = (part < 0) | (offsets + size > self.sizes[part])
        assert not outside.any(), f"{size} bytes at {addresses[outside][0]:#x} are in no part of the memory"
        assert (addresses % size == 0).all(), f"{size} bytes are not aligned"
        places: Numbers = (self.firsts[part] + offsets)[:, None] + np.arange(size)
        return places


class Instruction(NamedTuple):
    """A line of PTX."""

    guard: str  # the predicate of threads that run it, or nothing for all
    negated: bool  # whether it is of those that do not
    opcode: str
    operands: list[str]


class PtxMachine:
    """A kernel that runs program by program, all threads of a program in step: races between them are not seen."""

    def __init__(self, ptx: str, shared_bytes: int) -> None:
        """Of the text of one kernel, and the bytes of dynamic shared memory that it is launched with."""
        found = re.search(r"\.entry \w+\((.*?)\)\s*\.reqntid (\d+)\s*\{\n(.*?)\$L__func_end", ptx, re.S)
        assert found is not None
        self.parameters, self.threads = re.findall(r"\w+_param_\d+", found[1]), int(found[2])
        self.shared_bytes = shared_bytes
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        # Without comments, directives, labels for debuggers and the braces around inline assembly.
        text = re.sub(r"//.*|^\s*\..*$|^\$L__[a-z]\w+:$|^\s*[{}]\s*$", "", found[3], flags=re.M)
        for statement in filter(None, map(str.strip, text.split(";"))):
            parts = re.fullmatch(r"((?:\$\w+:\s*)*)(?:@(!?)(%p\d+)\s+)?([\w.:]+)\s*(.*)", statement, re.S)
            if parts is None or not (parts[4] in KNOWN or ACCESS.fullmatch(parts[4])):
                raise NotImplementedError(statement)
            self.labels |= dict.fromkeys(re.findall(r"\$\w+", parts[1]), len(self.code))
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", parts[5])
            self.code.append(Instruction(parts[3] or "", parts[2] == "!", parts[4], operands))

    def run(self, program: int, arguments: Sequence[int], memory: Memory) -> None:
        """Run one program on arguments in the order of the PTX's parameters, of which pointers are addresses."""
        # Shared memory holds NaN at first.
        self.memories = {"global": memory, "shared": Memory({"": (0, np.full(self.shared_bytes, 255, np.uint8))})}
        self.registers: dict[str, Word] = {"%tid.x": np.arange(self.threads, dtype=np.uint64)}
        given = {f"[{name}]": x for name, x in zip(self.parameters, arguments, strict=True)}
        for name, x in {"%ctaid.x": program, "global_smem": 0, **given}.items():
            self.registers[name] = self.same_in_all(x)
        at = 0
        with np.errstate(all="ignore"):
            while (instruction := self.code[at]).opcode != "ret":
                at += 1
                guard, negated, opcode, operands = instruction
                active = self.registers[guard] != int(negated) if guard else np.ones(self.threads, np.bool_)
                if opcode in OPERATIONS:
                    self.compute(OPERATIONS[opcode], operands, active)
                elif (access := ACCESS.fullmatch(opcode)) is not None:
                    self.access(access, operands, active)
                elif opcode == STORED_MATRICES:
                    self.store_matrices(*operands)
                elif opcode in ("bra", "bra.uni"):
                    assert active.all() or not active.any(), "threads of a program diverge"
                    at = self.labels[operands[0]] if active.all() else at

    def same_in_all(self, x: int) -> Word:
        return np.full(self.threads, x % 2**64, np.uint64)

    @staticmethod
    def elements(operand: str) -> list[str]:
        """Registers in braces, or one."""
        return re.findall(r"[^{},\s]+", operand)

    def read(self, operand: str, dtype: np.dtype[Any]) -> Numbers:
        """A register, a constant, or in braces registers side by side, the lowest first."""
        if operand.startswith("{"):
            parts = self.elements(operand)
            narrow = np.dtype(f"u{dtype.itemsize // len(parts)}")
            return np.stack([self.read(part, narrow) for part in parts], 1).view(dtype)[:, 0]
        if operand not in self.registers:
            x = int(operand[2:], 16) if operand.startswith("0f") else int(operand.rstrip("U"), 0)
            self.registers[operand] = self.same_in_all(x)
        word = self.registers[operand]
        return word != 0 if dtype == TYPES["pred"] else word.astype(f"u{dtype.itemsize}").view(dtype)

    def write(self, target: str, x: Numbers, active: Numbers) -> None:
        """Write numbers to a register of active threads, or in braces to registers side by side."""
        parts = self.elements(target)
        for part, column in zip(parts, x[:, None].view(f"u{x.dtype.itemsize // len(parts)}").T, strict=True):
            # What nothing was written to holds ones; "_" is a register that nobody reads.
            before = self.registers.get(part, np.uint64(2**64 - 1))
            self.registers[part] = np.where(active, column.astype(np.uint64), before)

    def compute(self, operation: Operation, operands: list[str], active: Numbers) -> None:
        target, *sources = operands
        types = [operation.dtype] * (len(sources) - 1) + [operation.last]
        self.write(target, operation.function(*map(self.read, sources, types)), active)

    def address(self, operand: str) -> Numbers:
        """The sum in brackets."""
        terms = [self.read(term, TYPES["s64"]) for term in re.findall(r"[^\[\]+\s]+", operand)]
        return sum(terms[1:], terms[0])

    def access(self, found: re.Match[str], operands: list[str], active: Numbers) -> None:
        """Load or store up to four numbers of each active thread."""
        which, space, vector, name = found.groups()
        memory, dtype, count = self.memories[space], TYPES[name], int(vector or 1)
        pointer, elements = reversed(operands) if which == "ld" else operands
        registers = self.elements(elements)
        places = memory.places(self.address(pointer)[active], count * dtype.itemsize)
        if which == "ld":
            loaded = np.zeros((self.threads, count), dtype)
            loaded[active] = memory.data[places].view(dtype)
            for register, column in zip(registers, loaded.T, strict=True):
                self.write(register, column, active)
        else:
            stored = np.stack([self.read(register, dtype) for register in registers], 1)
            memory.data[places] = stored[active].view(np.uint8)

    def store_matrices(self, pointer: str, registers: str) -> None:
        """Store four matrices of 8 rows of 16 bytes: lanes have the rows' addresses, and 4 bytes of each matrix."""
        shared, rows, thread = self.memories["shared"], self.address(pointer), np.arange(self.threads)
        lane = thread % WARP
        for i, register in enumerate(self.elements(registers)):
            row = shared.places(rows[thread - lane + 8 * i + lane // 4], 16)
            columns = (lane % 4 * 4)[:, None] + np.arange(4)
            stored = self.read(register, TYPES["b32"])[:, None].view(np.uint8)
            shared.data[np.take_along_axis(row, columns, 1)] = stored
