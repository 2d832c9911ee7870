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
iteration later there, of block j + stages - 2 into the buffer of block j - 2. Of two, `late_v` has V come a block
behind K. Where it does not, as with Q or V in pieces, the copies follow that wait or, with those of Q, the last of
their products. One-level loops of pieces of Q and three stages are left as they are; two-level ones of two have K in
one buffer (`one_k`).

The wait for Q, which Triton has where Q is loaded, moves behind the first copies of K and V.

No sum changes. A loop that does not look like the above stays as it is. `warpgroup_turns` goes on from here. What it
gains: docs/performance.md, Loads.
"""

from __future__ import annotations

import contextlib
import re

from helion_attn.compiler.passes.delayed_v import with_late_v
from helion_attn.compiler.passes.single_k_buffer import with_one_k, with_one_wait
from helion_attn.compiler.passes.ttgir import (
    BARRIER,
    COPY,
    EXPECT,
    PRODUCT,
    VALUE,
    WAIT_FOR_COPIES,
    WAIT_FOR_PRODUCT,
    defined,
    find,
    indentation,
    loops,
    matched,
    renamed,
    taken_out,
)


def _ahead(loop: str, stages: int) -> str:
    """What computes the index of the block that a loop's iteration loads: a pattern."""
    (j,) = matched(loop, rf"scf\.for ({VALUE}) =")
    return rf"arith\.addi {re.escape(j)}, %c{stages - 1}_i(32|64)(_\d+)? :"


def _an_iteration_later(loop: str, copies: list[str], stages: int) -> list[str]:
    """`copies`, of the block before, where one comes after the first that the loop's first iteration waits for.

    The counter of buffers stays as it was, one ahead: before it is raised, it is that of the block before.
    """
    j, first, end = matched(loop, rf"scf\.for ({VALUE}) = ({VALUE}) to ({VALUE}) step")
    (expected,) = find(copies, EXPECT)
    barrier, valid = matched(copies[expected], rf"({VALUE}), \d+, ({VALUE})")
    defining = {name: line for line in copies if (name := defined(line))}
    (buffer,) = matched(defining[barrier], rf"memdesc_index {VALUE}\[({VALUE})\]")
    (raised,) = matched(defining[buffer], rf"arith\.select {VALUE}, {VALUE}, ({VALUE}) :")
    (before,) = matched(defining[raised], rf"arith\.addi ({VALUE}), ")
    # The block's index, from j: its first computation.
    (ahead,) = [i for i, line in enumerate(copies) if re.search(_ahead(loop, stages), line)]
    (block,) = [defined(copies[ahead])]
    of_counter = [line for line in copies if defined(line) in (buffer, raised) or f" {raised}, " in line]
    of_block = [line for i, line in enumerate(copies) if line not in of_counter and i != ahead]
    # Something else may need what is no longer needed here.
    of_counter.append(copies[ahead])
    indent = indentation(copies[0])
    # i64 where K or V has 2**31 elements.
    (integer,) = matched(loop, r" : (i32|i64) \{")
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
    return [*of_counter, *(indent + line for line in checks), *(renamed(line, names) for line in of_block)]


def rescheduled(text: str) -> str | None:
    """`text`, a module of Triton's GPU IR, with the loads of its loop moved; None if it has no loop of that form."""
    with contextlib.suppress(ValueError, KeyError):
        return _rescheduled(text)
    return None


def _rescheduled(text: str) -> str | None:
    lines = text.split("\n")
    for at, end in loops(lines):
        indent, body = indentation(lines[at]), lines[at + 1 : end]
        expected, copies = find(body, EXPECT), find(body, COPY)
        products, waits = find(body, PRODUCT), find(body, WAIT_FOR_PRODUCT)
        # P is in registers, Q in shared memory.
        of_q = [i for i in products if " : !ttg.memdesc" in body[i]]
        if len(expected) != 1 or not copies or not of_q or not waits or find(body, "scf.for "):
            continue
        if expected[0] < products[-1] or any("pendings = 0 " not in body[i] for i in waits):
            continue
        (stages,) = map(int, matched(lines[end], r"tt\.num_stages = (\d+)"))
        buffers = [body[i] for i in find(body, "ttg.memdesc_index ")]
        if any(f" : !ttg.memdesc<{stages}x" not in line for line in buffers):
            continue
        if not any(re.search(_ahead(lines[at], stages), line) for line in body):
            continue
        before, after = lines[:at], lines[end:]
        in_flight = products[-1] > waits[-1]
        later = in_flight and stages > 2
        if later and len(of_q) > 1:
            # 0.95 to 1.05 of the time, and a register that spills.
            continue
        behind = of_q[0]
        in_one_buffer = not in_flight and len(of_q) > 1 and stages == 2
        if in_one_buffer:
            body = with_one_wait(body)
            expected, copies = find(body, EXPECT), find(body, COPY)
            # All products of Q have read K by then.
            behind, _of_p_v = find(body, WAIT_FOR_PRODUCT)
        group, rest = taken_out(body, [*expected, *copies], behind)
        if later:
            group = _an_iteration_later(lines[at], group, stages)
        elif in_flight:
            parts = None
            if len(of_q) == 1 and len(copies) == 2:
                (j,) = matched(lines[at], rf"scf\.for ({VALUE}) =")
                pattern = _ahead(lines[at], stages)
                ahead = {name for line in body if re.search(pattern, line) and (name := defined(line))}
                with contextlib.suppress(ValueError):
                    parts = with_late_v(before, j, ahead, group, rest, after)
            if parts is not None:
                before, group, rest, after = parts
            else:
                # The buffer is free behind the first wait; and the tensor core is busy behind the last product.
                behind = max(of_q[-1], waits[0])
                group, rest = taken_out(body, [*expected, *copies], behind)
        # The first: all warps have read what is overwritten. The second, and the one in front of the loop: Triton wants
        # one between a copy and what reads its buffers next, and would have it between the softmax and P V. The one
        # behind the loop: what is stored there may come into K's buffers, whose reading Triton takes for done.
        barrier = f"{indent}  {BARRIER}"
        body = [*rest[: behind + 1], barrier, *group, barrier, *rest[behind + 1 :]]
        before = _with_last_wait_behind(before, indent)
        if in_one_buffer:
            before, body, after = with_one_k(before, body, after)
        end_of_loop, *after = after
        return "\n".join([*before, indent + BARRIER, lines[at], *body, end_of_loop, indent + BARRIER, *after])
    return None


def _with_last_wait_behind(before: list[str], indent: str) -> list[str]:
    """The lines in front of a loop, the wait for Q, if there is one, behind the rest."""
    waits = [i for i in find(before, WAIT_FOR_COPIES) if before[i].startswith(indent + WAIT_FOR_COPIES)]
    if len(waits) != 1:
        return before
    (barrier,) = matched(before[waits[0]], rf"{WAIT_FOR_COPIES}({VALUE})")
    under_it = rf"\] ({VALUE}), {re.escape(barrier)}, "
    (buffer,) = [found[1] for i in find(before, COPY) if (found := re.search(under_it, before[i]))]
    if any(buffer in re.findall(VALUE, line) for line in before[waits[0] :]):
        return before
    of_wait = [*waits, *find(before, f"ttng.inval_barrier {barrier} ")]
    return [*(line for i, line in enumerate(before) if i not in of_wait), *(before[i] for i in of_wait)]
