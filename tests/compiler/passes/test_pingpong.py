"""Warpgroups that take turns: no schedule of the warps has them wait forever, or write what is read."""

from __future__ import annotations

import functools
import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest

import helion_attn as ha
from devtools.sm90 import Sm90Kernel
from helion_attn.compiler.passes import per_warpgroup_epilogue, pingpong, ttgir
from helion_attn.compiler.passes.outcome import Outcome
from helion_attn.compiler.versions import MEASURED_SERIES
from helion_attn.configs import tile_config
from helpers.offline import MEASURED, assert_sound, compile_attention, compile_shape, compile_tile, compile_varlen
from helpers.passes import operation, recorded, split_at_loop
from helpers.shared import shared_call, shared_ir

# Tests that leave a pass out compile shipped configs without it.
pytestmark = pytest.mark.filterwarnings("ignore::helion_attn.compiler.slower.SlowerWarning")

#: Kernels whose loops the machine below runs: copies are issued by one to four warps.
LOOPS: dict[str, functools.partial[Any]] = {
    "three_stages": functools.partial(compile_attention, 256, True, recipe=replace(ha.BALANCED, promote_every=0)),
    "halves": functools.partial(compile_attention, 256, True, recipe=ha.BALANCED),
    "halves_two_stages": functools.partial(compile_tile, replace(tile_config(256, True), num_stages=2)),
    "pieces": functools.partial(compile_attention, 512, True, D_v=512, recipe=ha.BALANCED),
    "stagger_v": functools.partial(compile_attention, 256, False, recipe=ha.BF16),
    "hybrid_d128": functools.partial(compile_tile, replace(tile_config(128, True, ha.HYBRID.bits), num_stages=3)),
    "hybrid_d256": functools.partial(compile_attention, 256, True, recipe=ha.HYBRID),
}
STAGES = dict.fromkeys(("three_stages", "halves", "pieces", "hybrid_d128"), 3)
STAGES |= dict.fromkeys(("halves_two_stages", "stagger_v", "hybrid_d256"), 2)
#: All others that are to ping-pong.
TAKE_TURNS: dict[str, functools.partial[Any]] = {
    "fast": functools.partial(compile_attention, 256, False),
    "accurate": functools.partial(compile_attention, 256, True, recipe=ha.ACCURATE),
    "softcap": functools.partial(compile_attention, 256, False, softcap=50.0),
    "window": functools.partial(compile_attention, 256, True, recipe=ha.BALANCED, window=(1000, 0), sinks=True),
    "bf16_d128": functools.partial(compile_attention, 128, False, recipe=ha.BF16),
    "hybrid_two_stages": functools.partial(compile_attention, 128, True, recipe=ha.HYBRID),
    "sequences": functools.partial(compile_varlen, 256, True),
    "split": functools.partial(compile_shape, 1, 64, 100000, 256, False, recipe=ha.BALANCED),
    "many_keys": functools.partial(compile_shape, 1, 10000, 2**23 + 2**20, 256, True, recipe=ha.BALANCED),
}


@functools.cache
def kernel(name: str) -> Sm90Kernel:
    found = shared_call((LOOPS | TAKE_TURNS)[name])
    return found if isinstance(found, Sm90Kernel) else found[0]


@functools.cache
def text(name: str) -> str:
    """Of the IR, with ping-pong."""
    without = shared_ir(LOOPS[name])[0][1]
    assert without is not None
    found = pingpong.with_pingpong(without)
    assert found.applied
    return found.text


def left_alone(code: str) -> Outcome:
    """In place of a pass."""
    return Outcome("a pass", False, "it is left out", code)


def named_barriers(ptx: str) -> list[str]:
    return re.findall(r"bar\.(?:sync|arrive) (?:turn|\d), \d+", ptx)


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", [*LOOPS, *TAKE_TURNS])
def test_who_ping_pongs(name: str) -> None:
    """Each of the barriers is there once, and none of all warps in the loop; registers do not spill."""
    ptx = kernel(name).ptx
    assert len(named_barriers(ptx)) == 8
    loop = ptx[ptx.index("before_turns: ") : ptx.index("behind_turns: ")]
    assert "wgmma.mma_async" in loop
    assert re.search(r"\bbar\S*\s+0[,;]", loop) is None
    assert re.search(r"\bbar\S*\s+0[,;]", ptx) is not None
    assert_sound(kernel(name))


def test_a_barrier_that_stays() -> None:
    ptx = kernel("three_stages").ptx
    ends = ptx.index("behind_turns: ")
    begins = ptx.rindex("\n", 0, ends)
    with pytest.raises(pingpong.BarrierInLoop):
        pingpong._without_block_barriers(ptx[:begins] + "\n\tbar.sync \t0;" + ptx[begins:])
    assert pingpong._without_block_barriers(ptx) == ptx


def test_a_barrier_that_ends_a_wait_goes() -> None:
    """As Triton 3.9 ends each wait for products; behind anything else it stays."""
    lines = kernel("halves").ptx.split("\n")
    inside = range(
        *(next(i for i, line in enumerate(lines) if f"{label}_turns: " in line) for label in ("before", "behind"))
    )
    waits = [i for i in inside if "wgmma.wait_group" in lines[i]]
    barrier = ["\t// a note", "\tbar.sync \t0;"]
    ended = [new for i, line in enumerate(lines) for new in ([line, *barrier] if i in waits else [line])]
    kept = [new for i, line in enumerate(lines) for new in ([line, barrier[0]] if i in waits else [line])]
    assert len(waits) == 3
    assert pingpong._without_block_barriers("\n".join(ended)) == "\n".join(kept)
    product = next(i for i in reversed(inside) if "wgmma.mma_async" in lines[i])
    with pytest.raises(pingpong.BarrierInLoop):
        pingpong._without_block_barriers("\n".join([*lines[: product + 1], *barrier, *lines[product + 1 :]]))


def test_with_a_barrier_that_stays_none_ping_pong() -> None:
    def with_barrier(ptx: str) -> str:
        raise pingpong.BarrierInLoop("it is there")

    with mock.patch.object(pingpong, "pingpong_ptx", with_barrier), recorded():
        found = LOOPS["stagger_v"]()
    assert named_barriers(found.ptx) == []
    assert found.opcodes["HGMMA"] > 0


#: Kernels whose barrier for P V waits for part of P, and how many of a thread's 64 exponentials that are.
BEHIND_P = dict.fromkeys(("three_stages", "accurate", "window", "sequences", "split", "many_keys"), 16)
BEHIND_P |= dict.fromkeys(("fast", "softcap", "hybrid_d128"), 32)


def exponentials_before_barrier(sass: str) -> int:
    """Between the wait for Q K^T and the barrier for P V, the one barrier whose number is in a register."""
    (turn,) = re.finditer(r"BAR\.SYNC\S* R\d+, 0x100", sass)
    waited = sass.rindex("WARPGROUP.DEPBAR", 0, turn.start())
    return sass.count("MUFU.EX2", waited, turn.start())


@pytest.mark.thorough(but=2)
@pytest.mark.skipif(
    not MEASURED, reason=f"the code of Triton {MEASURED_SERIES}: another's ptxas moves barriers, or copies P"
)
@pytest.mark.parametrize("name", BEHIND_P)
def test_a_barrier_comes_behind_part_of_p(name: str) -> None:
    """Also in machine code, where two exponentials more are those of alpha; and in front of the rest."""
    ptx, sass = kernel(name).ptx, kernel(name).sass
    assert BEHIND_P[name] <= exponentials_before_barrier(sass) < 64
    (taken,) = re.findall(r".*bar\.sync turn, .*", ptx)
    part = re.findall(r"or\.b32 p, p, (%\w+);", taken)
    numbers_a_register = 2 if "HGMMA" in sass else 4
    assert len(part) * numbers_a_register == BEHIND_P[name]
    # They are the block's: made in front of the barrier, without a label between; and what comes next is its product.
    before, behind = ptx.split(taken)
    block = before[before.rindex("\n$") :]
    assert all(re.search(rf"\s{register}, ", block) for register in part)
    assert next(line for line in behind.split("\n") if "wgmma" in line).strip() == "wgmma.fence.sync.aligned;"


@functools.cache
def not_held_back(name: str) -> Sm90Kernel:
    """With ping-pong that do not wait for part of P."""
    with mock.patch.object(pingpong, "_with_barrier_after_p", left_alone), recorded():
        found: Sm90Kernel = (LOOPS | TAKE_TURNS)[name]()
    return found


#: Of three stages, which are not shipped: ptxas of another Triton moves its barrier anyway.
HYBRID_D128 = pytest.param(
    "hybrid_d128", marks=pytest.mark.skipif(not MEASURED, reason=f"the code of Triton {MEASURED_SERIES}")
)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", ["fast", HYBRID_D128])
def test_ptxas_moves_a_barrier_up(name: str) -> None:
    assert exponentials_before_barrier(not_held_back(name).sass) < BEHIND_P[name]


def test_a_barrier_is_not_moved_past_another_block() -> None:
    """Nor one of two, nor without registers of P."""
    ptx = not_held_back("fast").ptx
    assert pingpong._with_barrier_after_p(ptx).applied
    (turn,) = re.findall(r".*behind_part_of_p: .*\n", ptx)
    for other in (
        ptx.replace(turn, turn + "$L__other:\n"),
        ptx.replace(turn, turn + "\t@%p1 bra \t$L__other;\n"),
        ptx.replace(turn, turn + "\tbar.sync \t0;\n"),
        ptx.replace(turn, turn + turn),
        ptx.replace("wgmma.fence", "wgmma.something_else"),
        ptx.replace("wgmma.mma_async", "wgmma.something_else"),
    ):
        assert pingpong._with_barrier_after_p(other).text == other


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", ["stagger_v", "hybrid_d256"])
def test_a_barrier_behind_a_wait_stays(name: str) -> None:
    """V's wait is a branch, and the exponentials come before the barrier."""
    sass = kernel(name).sass
    (turn,) = re.finditer(r"BAR\.SYNC\S* R\d+, 0x100", sass)
    waited = sass.rindex("SYNCS.PHASECHK", 0, turn.start())
    assert "BRA" in sass[waited : turn.start()]
    assert exponentials_before_barrier(sass) >= 32
    assert "or.b32 p, p, " not in kernel(name).ptx


def in_front(lines: list[str]) -> str:
    """In front of a loop, in their order: loads l, copies c, waits for them w, and maxima across lanes m."""
    letters = {
        "tt.load": "l",
        "ttng.async_tma_copy_global_to_local": "c",
        "ttng.wait_barrier": "w",
        "tt.reduce": "m",
    }
    return "".join(letters.get(operation(line)[1], "") for line in lines)


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("name", LOOPS)
def test_loads_come_first_and_are_used_last(name: str) -> None:
    without = shared_ir(LOOPS[name])[0][1]
    before = in_front(split_at_loop(str(without))[0])
    after = in_front(split_at_loop(text(name))[0])
    assert re.fullmatch("l+c+w?m?", after)
    assert sorted(before) == sorted(after)


def test_what_comes_first_comes_with_what_it_needs() -> None:
    """As a whole or not at all."""
    function, load, use, address, index, copy, wait, last = (
        "  tt.func public @f(%p: !tt.ptr<f32>, %d: !tt.tensordesc<f32>) {",
        "    %a = tt.load %q : !tt.ptr<f32>",
        "    %u = arith.addf %a, %a : f32",
        "    %q = tt.addptr %p, %c : !tt.ptr<f32>",
        "    %i = arith.addi %c, %c : i32",
        "    ttng.async_tma_copy_global_to_local %d[%i] %buffer, %barrier, %true : f32",
        "    ttng.wait_barrier %barrier, %c : i32",
        "    gpu.barrier",
    )
    moved = ttgir.with_loads_and_copies_ahead([function, index, address, load, use, copy, wait, last])
    assert moved == [function, address, load, index, copy, wait, use, last]
    branch = ["    %i = scf.if %b -> (i32) {", "      scf.yield %c : i32", "    }"]
    waiting = ["    %i = ttg.local_load %x : i32"]
    for needed in (branch, waiting):
        lines = [function, address, load, *needed, copy, wait, last]
        assert ttgir.with_loads_and_copies_ahead(lines) == lines
    # What is loaded behind something that writes may be what that wrote.
    store = "    tt.store %p, %u : !tt.ptr<f32>"
    lines = [function, index, store, address, load, use, copy, wait, last]
    assert ttgir.with_loads_and_copies_ahead(lines) == [function, index, copy, store, address, load, use, wait, last]
    inside = "      %b = tt.load %p : !tt.ptr<f32>"
    lines = [function, "    scf.if %x {", inside, "    }", copy, last]
    assert ttgir.with_loads_and_copies_ahead(lines) == [function, copy, *lines[1:4], last]


def test_other_loops_stay() -> None:
    before, without = shared_ir(LOOPS["three_stages"])[0]
    assert without is not None
    assert pingpong.with_pingpong(text("three_stages")).applied  # the form of its loop is the same
    for other, reason in (
        (before, "its operations are"),
        (without.replace('"ttg.num-warps" = 8', '"ttg.num-warps" = 4'), "not two warpgroups"),
        (without.replace("warpsPerCTA = [8, 1]", "warpsPerCTA = [4, 2]"), "does not have half of the rows"),
        (without.replace("gpu.barrier", "gpu.something_else"), "its operations are"),
    ):
        outcome = pingpong.with_pingpong(other)
        assert not outcome.applied
        assert outcome.text == other
        assert reason in outcome.reason


# The machine: eight warps that run one after the other, an operation at a time, in any order.


@dataclass
class NamedBarrier:
    """Of PTX: it opens when as many threads as it is told have come; `sync` waits for that."""

    came: list[int] = field(default_factory=list)
    threads: int = 0
    opened: int = 0

    def come(self, warp: int, threads: int) -> int:
        """How often it must have opened before one goes on who waits."""
        assert warp not in self.came, "came twice"
        assert self.threads in (0, threads)
        self.came.append(warp)
        self.threads = threads
        goes_on = self.opened + 1
        assert 32 * len(self.came) <= threads
        if 32 * len(self.came) == threads:
            self.came, self.threads, self.opened = [], 0, goes_on
        return goes_on

    def is_open(self, opened: int) -> bool:
        """Whether it has opened that often."""
        return self.opened >= opened


def is_copy(line: str) -> bool:
    return operation(line)[1] == "ttng.async_tma_copy_global_to_local"


def row_bytes(copy: str) -> int:
    """In units of 128, at least one."""
    elements, element = re.findall(r"tensordesc<(?:tensor<)?[\dx]*x(\d+)x(\w+)[,>]", copy)[0]
    return max(1, int(elements) * {"f8E4M3FN": 1, "si8": 1, "bf16": 2}[element] // 128)


def execute(
    code: str, variables: dict[str, int], barriers: dict[int, NamedBarrier], warp: int
) -> Iterator[Callable[[], bool]]:
    """What a warp waits for in inline assembly."""
    number = lambda x: variables[x] if x in variables else int(x)  # noqa: E731
    for statement in code.strip("{} \t").split(";"):
        words = re.sub(r"^\s*\w+: ", "", statement).replace(",", "").split()
        if words and words[0].startswith("@"):
            if not variables[words[0][1:]]:
                continue
            words = words[1:]
        match words:
            case ["setp.ge.u32", name, a, b]:
                variables[name] = int(number(a) >= number(b))
            case ["setp.lt.u32", name, a, b]:
                variables[name] = int(number(a) < number(b))
            case ["shr.u32", name, a, b]:
                variables[name] = number(a) >> number(b)
            case ["add.u32", name, a, b]:
                variables[name] = number(a) + number(b)
            case ["sub.u32", name, a, b]:
                variables[name] = number(a) - number(b)
            case ["bar.arrive", barrier, threads]:
                barriers[number(barrier)].come(warp, int(threads))
            case ["bar.sync", barrier, threads]:
                found = barriers[number(barrier)]
                goes_on = found.come(warp, int(threads))
                yield functools.partial(found.is_open, goes_on)
            case ["mov.u32" | "mov.b32", name, a]:
                variables[name] = number(a)
            case ["or.b32", name, a, b]:
                variables[name] = number(a) | number(b)
            case ["and.b32", name, a, b]:
                variables[name] = number(a) & number(b)
            case [".reg", *_] | []:
                pass
            case _:
                raise AssertionError(statement)


class Program:
    """A program with some key blocks: named barriers, which blocks are there, who has read them."""

    def __init__(self, lines: dict[str, list[str]], stages: int, blocks: int) -> None:
        self.lines, self.stages, self.blocks = lines, stages, blocks
        self.barriers = {i: NamedBarrier() for i in range(4)}
        copies = list(filter(is_copy, lines["loop"]))
        #: The pieces of K and of V, each a tensor, in the order of their copies and of their products.
        self.k, self.v = ([f"{x}{i}" for i in range(sum(f"%{x}" in line for line in copies))] for x in "kv")
        #: Of a tensor, how many warps copy a block: each 128 bytes of its rows.
        self.parts = dict(zip([*self.k, *self.v], map(row_bytes, copies), strict=True))
        #: Of a tensor and block, the warps whose parts are there, and those that have read it.
        first = dict.fromkeys(self.k, stages - 1) | dict.fromkeys(self.v, 0 if stages == 2 else 2)
        self.arrived = {(x, i): set(range(self.parts[x])) for x, n in first.items() for i in range(min(n, blocks))}
        self.read: dict[tuple[str, int], set[int]] = {}

    def copy(self, warp: int, tensor: str, block: int) -> None:
        if block >= self.blocks or warp >= self.parts[tensor]:
            return
        old = (tensor, block - self.stages)
        assert old[1] < 0 or self.is_read(*old), f"{old} is written over while it is read"
        self.arrived.setdefault((tensor, block), set()).add(warp)

    def is_there(self, tensor: str, block: int) -> bool:
        return len(self.arrived.get((tensor, block), ())) == self.parts[tensor]

    def is_read(self, tensor: str, block: int) -> bool:
        """By all warps."""
        return len(self.read.get((tensor, block), ())) == 8

    def warp(self, warp: int) -> Iterator[Callable[[], bool]]:
        """A warp: before every step, what it waits for."""
        reads: deque[tuple[str, int]] = deque()
        yield from self.run(warp, "before", -1, reads)
        for block in range(self.blocks):
            yield from self.run(warp, "loop", block, reads)
        yield from self.run(warp, "after", self.blocks, reads)
        last = self.blocks - 1
        assert last < 0 or all(self.is_read(k, last) for k in self.k), "what is stored next may be in its place"

    def run(self, warp: int, part: str, block: int, reads: deque[tuple[str, int]]) -> Iterator[Callable[[], bool]]:
        copied_v = block + (1 if self.stages == 3 else 0)
        copies = iter([*((x, block + 1) for x in self.k), *((x, copied_v) for x in self.v)])
        products = iter([*self.k, *self.v])
        waits = iter([[*self.k, *self.v]] if self.stages == 3 else [self.k, self.v])
        for line in self.lines[part]:
            op = operation(line)[1]
            if op.startswith(("ttng.", "tt.elementwise_inline_asm", "gpu.barrier")):
                yield lambda: True
            match op:
                case "tt.elementwise_inline_asm" if "%turns_" in line and "pure = false" in line:
                    code = re.findall('"([^"]*)"', line)[0]
                    yield from execute(code, {"$1": 32 * warp}, self.barriers, warp)
                case "ttng.wait_barrier" if part == "loop":
                    for tensor in next(waits):
                        yield functools.partial(self.is_there, tensor, block)
                case "ttng.warp_group_dot" if part == "loop":
                    tensor = next(products)
                    assert self.is_there(tensor, block), "read before it has come"
                    reads.append((tensor, block))
                case "ttng.warp_group_dot_wait":
                    for x in reads:
                        self.read.setdefault(x, set()).add(warp)
                    reads.clear()
                case "ttng.async_tma_copy_global_to_local" if part == "loop":
                    tensor, copied = next(copies)
                    # The first iteration of three stages finds its blocks there.
                    if self.stages == 2 or block > 0:
                        self.copy(warp, tensor, copied)
                case "gpu.barrier" if part == "after":
                    goes_on = self.barriers[0].come(warp, 256)
                    yield functools.partial(self.barriers[0].is_open, goes_on)
                case _:
                    pass


def run(text_: str, stages: int, blocks: int, seed: int) -> None:
    """A program, its warps in an order of this seed."""
    before, _, body = split_at_loop(text_)
    # Behind the loop: its end, what ping-pong has there, a barrier of all or none, and the wait for the last product.
    after = text_.split("\n")[len(before) + 1 + len(body) :][:4]
    program = Program({"before": before, "loop": body, "after": after}, stages, blocks)
    schedule = random.Random(seed)
    running = {warp: program.warp(warp) for warp in range(8)}
    waiting: dict[int, Callable[[], bool]] = {warp: lambda: True for warp in running}
    # Some warps are slower than others.
    speeds = {warp: schedule.choice((1, 1, 5, 50)) for warp in running}
    while running:
        ready = [warp for warp in running if waiting[warp]()]
        assert ready, "all wait"
        (warp,) = schedule.choices(ready, [speeds[warp] for warp in ready])
        try:
            waiting[warp] = next(running[warp])
        except StopIteration:
            del running[warp]
    assert not any(barrier.came for barrier in program.barriers.values()), "somebody came and nobody waited"
    assert len(program.read) == len(program.parts) * blocks


@pytest.mark.thorough(but=18)
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("blocks", [0, 1, 2, 3, 4, 9])
def test_no_schedule_fails(name: str, blocks: int) -> None:
    for seed in range(8):
        run(text(name), STAGES[name], blocks, seed)


@pytest.mark.thorough(but=12)
@pytest.mark.parametrize("name", [name for name in LOOPS if name != "hybrid_d128"])
@pytest.mark.parametrize("blocks", [0, 1, 2, 9])
def test_no_schedule_fails_where_warpgroups_end_alone(name: str, blocks: int) -> None:
    """Their rows come into buffers of K: also the other warpgroup has read those."""
    ends = per_warpgroup_epilogue.with_per_warpgroup_epilogue(text(name))
    assert ends.applied, ends.reason
    for seed in range(6):
        run(ends.text, STAGES[name], blocks, seed)


@pytest.mark.parametrize("name", ["halves", "three_stages"])
def test_the_machine_sees_an_end_that_comes_too_early(name: str) -> None:
    ends = per_warpgroup_epilogue.with_per_warpgroup_epilogue(text(name)).text
    (at,) = re.findall(r".*%turns_behind_loop = .*\n", ends)
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in range(8):
            run(ends.replace(at, ""), STAGES[name], 6, seed)


@pytest.mark.thorough(but=18)
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize(
    "line", ["before_loop", "before_copies", "behind_copies", "behind_wait", "before_p_v", "behind_loop"]
)
def test_the_machine_can_fail(name: str, line: str) -> None:
    """Without one of the barriers."""
    lines = text(name).split("\n")
    (at,) = [i for i, x in enumerate(lines) if f"%turns_{line} = " in x]
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    lines[at] = indent + "%turns_none = arith.constant 0 : i32"
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in range(8):
            run("\n".join(lines), STAGES[name], 6, seed)


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("name", LOOPS)
def test_copies_are_of_the_first_warpgroup(name: str) -> None:
    """All threads that issue them wait for READ: as many warps as a row has 128 bytes, as the machine has it, too."""
    ptx = kernel(name).ptx
    loop = ptx[ptx.index("before_copies: ") : ptx.index("behind_wait: ")]
    conditions = dict(re.findall(r"(?:and\.pred|setp\.lt\.u32) +\t?(%p\d+), (.*);", ptx))

    def threads(predicate: str) -> list[int]:
        """What the thread's number is less than."""
        parts = conditions.get(predicate, "").split(", ")
        if parts[0].startswith("%p"):
            return [n for part in parts for n in threads(part)]
        return [int(parts[1])] if len(parts) == 2 and parts[1].isdigit() else []

    found = [threads(predicate) for predicate in re.findall(r"@(%p\d+) cp\.async\.bulk\.tensor", loop)]
    copies = [x for x in split_at_loop(text(name))[2] if is_copy(x)]
    assert found == [[32 * row_bytes(x)] for x in copies]
    assert max(max(found)) <= pingpong.WARPGROUP


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        ("bar.sync 3, 256", "bar.arrive 3, 256"),  # does not wait for the reader
        ("add.u32 turn, turn, 1; bar.sync", "add.u32 turn, turn, 1; bar.arrive"),  # nor for its turn
        ("sub.u32 turn, 2, turn", "add.u32 turn, turn, 1"),  # passes the turn to itself
    ],
)
def test_other_mistakes_fail(pattern: str, replacement: str) -> None:
    wrong = text("three_stages").replace(pattern, replacement)
    assert wrong != text("three_stages")
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in range(8):
            run(wrong, 3, 6, seed)
