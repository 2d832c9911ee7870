"""Moves the loads of a pipelined loop to where the tensor core is busy: a pass over Triton's IR of an attention kernel.

Triton's pipeliner puts the TMA copies of a coming key block at the end of an iteration, behind P V, each behind a
barrier of all warps. Two stages, as at D 128, bring the block that is next, and Q K^T waits for it. Between Q K^T's
issue and the wait for it they have an iteration, and the barriers stand where warps have nothing else to do:

    as Triton has it                        as it is then
    for j:                                  for j:
        wait for block j                        wait for block j
        s = Q K^T, issued                       s = Q K^T, issued
        wait for s                              barrier, copy block j + stages - 1, barrier
        softmax                                 wait for s
        acc = P V, issued                       softmax
        copy block j + stages - 1               acc = P V, issued

The buffer that they write must be read no more: it is that of block j - 1. Two-level accumulation has waited for its
P V by then. One-level has not, before it has waited for a first product of Q K^T. Of three stages, the copies come an
iteration later there, of block j + stages - 2 into the buffer of block j - 2. Of two, they follow that wait or, where Q
comes in pieces, the last of their products. Loops of pieces and three stages are left as they are.

The wait for Q, which Triton has where Q is loaded, moves behind the first copies of K and V.

No sum changes. A loop that does not look like the above stays as it is. Triton has no way to say this in a kernel, but
a hook for compilers of one's own (`knobs.runtime.add_stages_inspection_hook`), which is set while a kernel of this
package's is compiled. What it gains: docs/performance.md, Loads.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

#: Operations of Triton's GPU dialects, as lines of its IR begin them.
EXPECT = "ttng.barrier_expect "
COPY = "ttng.async_tma_copy_global_to_local "
WAIT_FOR_COPIES = "ttng.wait_barrier "
PRODUCT = "ttng.warp_group_dot "
WAIT_FOR_PRODUCT = "ttng.warp_group_dot_wait "
BARRIER = "gpu.barrier"

#: Whose IR this is, and whose way to launch `launches` repeats. Neither is an interface of Triton's: others compile and
#: launch as they do.
KNOWN_TRITONS = ("3.6.", "3.7.", "3.8.", "3.9.")

#: A value's name.
VALUE = r"%[\w.$-]+"


def _defined(line: str) -> str | None:
    """The value that an operation defines."""
    found = re.match(rf"\s*({VALUE})(:\d+)? = ", line)
    return found and found.group(1)


def _renamed(line: str, names: dict[str, str]) -> str:
    return re.sub(VALUE, lambda found: names.get(found.group(), found.group()), line)


def _find(lines: list[str], operation: str) -> list[int]:
    return [i for i, line in enumerate(lines) if re.match(rf"\s*({VALUE}(:\d+)? = )?{re.escape(operation)}", line)]


def _group(text: str, pattern: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in {text}")
    return found.groups()


def _needed(body: list[str], wanted: list[int], begin: int) -> list[int]:
    """Operations `wanted`, and those behind `begin` whose values they need."""
    defined = {name: i for i, line in enumerate(body) if (name := _defined(line))}
    needed: set[int] = set()
    while wanted:
        i = wanted.pop()
        if i >= begin and i not in needed:
            needed.add(i)
            wanted += [defined[name] for name in re.findall(VALUE, body[i]) if name in defined]
    return sorted(needed)


def _ahead(loop: str, stages: int) -> str:
    """What computes the index of the block that a loop's iteration loads: a pattern."""
    (j,) = _group(loop, rf"scf\.for ({VALUE}) =")
    return rf"arith\.addi {re.escape(j)}, %c{stages - 1}_i(32|64)(_\d+)? :"


def _an_iteration_later(loop: str, copies: list[str], stages: int) -> list[str]:
    """`copies`, of the block before, where one comes after the first that the loop's first iteration waits for.

    The counter of buffers stays as it was, one ahead: before it is raised, it is that of the block before.
    """
    j, first, end = _group(loop, rf"scf\.for ({VALUE}) = ({VALUE}) to ({VALUE}) step")
    (expected,) = _find(copies, EXPECT)
    barrier, valid = _group(copies[expected], rf"({VALUE}), \d+, ({VALUE})")
    defining = {name: line for line in copies if (name := _defined(line))}
    (buffer,) = _group(defining[barrier], rf"memdesc_index {VALUE}\[({VALUE})\]")
    (raised,) = _group(defining[buffer], rf"arith\.select {VALUE}, {VALUE}, ({VALUE}) :")
    (before,) = _group(defining[raised], rf"arith\.addi ({VALUE}), ")
    # The block's index, from j: its first computation.
    (ahead,) = [i for i, line in enumerate(copies) if re.search(_ahead(loop, stages), line)]
    (block,) = [_defined(copies[ahead])]
    of_counter = [line for line in copies if _defined(line) in (buffer, raised) or f" {raised}, " in line]
    of_block = [line for i, line in enumerate(copies) if line not in of_counter and i != ahead]
    # Something else may need what is no longer needed here.
    of_counter.append(copies[ahead])
    indent = " " * (len(copies[0]) - len(copies[0].lstrip()))
    # i64 where K or V has 2**31 elements.
    (integer,) = _group(loop, r" : (i32|i64) \{")
    checks = [
        f"%early_stages = arith.constant {stages - 2} : {integer}",
        f"%early_one = arith.constant 1 : {integer}",
        f"%early_block = arith.addi {j}, %early_stages : {integer}",
        f"%early_first = arith.addi {first}, %early_one : {integer}",
        f"%early_in_loop = arith.cmpi slt, %early_block, {end} : {integer}",
        f"%early_not_first = arith.cmpi sge, {j}, %early_first : {integer}",
        "%early_valid = arith.andi %early_in_loop, %early_not_first : i1",
    ]
    names = {buffer: before, valid: "%early_valid", str(block): "%early_block"}
    return [*of_counter, *(indent + line for line in checks), *(_renamed(line, names) for line in of_block)]


def rescheduled(text: str) -> str | None:
    """`text`, a module of Triton's GPU IR, with the loads of its loop moved; None if it has no loop of that form."""
    with contextlib.suppress(ValueError, KeyError):
        return _rescheduled(text)
    return None


def _rescheduled(text: str) -> str | None:
    lines = text.split("\n")
    for at in _find(lines, "scf.for "):
        indent = " " * (len(lines[at]) - len(lines[at].lstrip()))
        end = next(i for i in range(at + 1, len(lines)) if lines[i].startswith(indent + "}"))
        body = lines[at + 1 : end]
        expected, copies = _find(body, EXPECT), _find(body, COPY)
        products, waits = _find(body, PRODUCT), _find(body, WAIT_FOR_PRODUCT)
        # P is in registers, Q in shared memory.
        of_q = [i for i in products if " : !ttg.memdesc" in body[i]]
        if len(expected) != 1 or not copies or not of_q or not waits or _find(body, "scf.for "):
            continue
        if expected[0] < products[-1] or any("pendings = 0 " not in body[i] for i in waits):
            continue
        (stages,) = map(int, _group(lines[end], r"tt\.num_stages = (\d+)"))
        buffers = [body[i] for i in _find(body, "ttg.memdesc_index ")]
        if any(f" : !ttg.memdesc<{stages}x" not in line for line in buffers):
            continue
        if not any(re.search(_ahead(lines[at], stages), line) for line in body):
            continue
        in_flight = products[-1] > waits[-1]
        later = in_flight and stages > 2
        if later and len(of_q) > 1:
            # 0.95 to 1.05 of the time, and a register that spills.
            continue
        # In flight, the buffer is free behind the first wait; and the tensor core is busy behind the last product.
        behind = max(of_q[-1], waits[0]) if in_flight and not later else of_q[0]
        moved = _needed(body, [*expected, *copies], behind)
        group = [body[i] for i in moved]
        if later:
            group = _an_iteration_later(lines[at], group, stages)
        rest = [line for i, line in enumerate(body) if i not in moved]
        # The first: all warps have read what is overwritten. The second, and the one in front of the loop: Triton wants
        # one between a copy and what reads its buffers next, and would have it between the softmax and P V.
        barrier = f"{indent}  {BARRIER}"
        body = [*rest[: behind + 1], barrier, *group, barrier, *rest[behind + 1 :]]
        before = _with_last_wait_behind(lines[:at], indent)
        return "\n".join([*before, indent + BARRIER, lines[at], *body, *lines[end:]])
    return None


def _with_last_wait_behind(before: list[str], indent: str) -> list[str]:
    """The lines in front of a loop, the wait for Q, if there is one, behind the rest."""
    waits = [i for i in _find(before, WAIT_FOR_COPIES) if before[i].startswith(indent + WAIT_FOR_COPIES)]
    if len(waits) != 1:
        return before
    (barrier,) = _group(before[waits[0]], rf"{WAIT_FOR_COPIES}({VALUE})")
    under_it = rf"\] ({VALUE}), {re.escape(barrier)}, "
    (buffer,) = [found[1] for i in _find(before, COPY) if (found := re.search(under_it, before[i]))]
    if any(buffer in re.findall(VALUE, line) for line in before[waits[0] :]):
        return before
    of_wait = [*waits, *_find(before, f"ttng.inval_barrier {barrier} ")]
    return [*(line for i, line in enumerate(before) if i not in of_wait), *(before[i] for i in of_wait)]


def _parsed(text: str, context: Any) -> Any:
    """The module that `text` is."""
    from triton._C.libtriton import ir

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "early_loads.ttgir"
        path.write_text(text)
        module = ir.parse_mlir_module(str(path), context)
    # As Triton does with what it parses.
    module.context = context
    return module


@functools.cache
def _digest() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


#: Held while the hook, of which a process has one, is one of this module's.
_HOOKED = threading.Lock()


class _Hook:
    """Adds the pass to the next compilation of this thread, and takes itself away then.

    Other threads' compilations meanwhile are what they would be, though from Triton 3.7 on not found in its caches.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        _HOOKED.acquire()
        self._held = True
        self._earlier = knobs.runtime.add_stages_inspection_hook
        knobs.runtime.add_stages_inspection_hook = self

    def remove(self) -> None:
        """Put back the hook that was there before, once."""
        if self._held:
            self._held = False
            knobs.runtime.add_stages_inspection_hook = self._earlier
            _HOOKED.release()

    def __call__(self, *args: Any) -> Any:
        """What Triton adds to its keys; or, given the stages of a compilation, change them."""
        if not args:
            return ("", "") if self._earlier is None else self._earlier()
        if self._earlier is not None:
            self._earlier(*args)
        if threading.get_ident() == self._thread:
            _add_pass(args[1])
            self.remove()
        return None


def _add_pass(stages: dict[str, Callable[..., Any]]) -> None:
    make_ttgir = stages["ttgir"]

    def with_early_loads(module: Any, metadata: dict[str, Any]) -> Any:
        module = make_ttgir(module, metadata)
        text = rescheduled(str(module))
        return module if text is None else _parsed(text, module.context)

    stages["ttgir"] = with_early_loads


def compiled(source: Any, *, _env_vars: dict[str, str] | None = None, **options: Any) -> Any:
    """`triton.compile`, with the pass."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    variables = get_cache_invalidating_env_vars() if _env_vars is None else _env_vars
    # Triton's cache must not take a kernel without the pass for this one.
    variables = {**variables, "helion_attn_early_loads": _digest()}
    hook = _Hook()
    try:
        return triton.compile(source, _env_vars=variables, **options)
    finally:
        hook.remove()


class _WithEarlyLoads(JITFunction[Any]):
    """A kernel that is compiled with the pass, on whatever device: Triton sets `compile` anew for each."""

    @property
    def compile(self) -> Callable[..., Any]:
        return compiled

    @compile.setter
    def compile(self, triton_compile: Callable[..., Any]) -> None:
        pass


def with_early_loads(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, a host function of Helion's, whose kernel is compiled with the pass from now on, if Triton is known."""
    kernel = run.__globals__[f"_helion_{run.__name__}"]
    # Triton's interpreter has kernels of another class.
    if triton.__version__.startswith(KNOWN_TRITONS) and isinstance(kernel, JITFunction):
        kernel.__class__ = _WithEarlyLoads
    return run
