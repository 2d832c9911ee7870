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
P V by then. One-level has not, before it has waited for a first product of Q K^T; and of two warpgroups that take turns
the other one has not. Of three stages, the copies come an iteration later there, of block j + stages - 2 into the
buffer of block j - 2. Of two, `delayed_v` has V come a block behind K. Where it does not, as in one-level loops with Q
or V in pieces, the copies follow that wait or, with those of Q, the last of their products. One-level loops of pieces
of Q and three stages are left as they are; two-level ones of one warpgroup and two stages have K in one buffer
(`single_k_buffer`).

The wait for Q, which Triton has where Q is loaded, moves behind the first copies of K and V.

No sum changes. A loop that does not look like the above stays as it is, and the outcome says what is other.
`warpgroup_turns` goes on from here. What it gains: docs/notes/loads_and_turns.md.
"""

from __future__ import annotations

import re

from helion_attn.compiler.passes.delayed_v import with_delayed_v
from helion_attn.compiler.passes.outcome import Outcome, Refused, definition, in_any, only
from helion_attn.compiler.passes.single_k_buffer import with_one_wait, with_single_k_buffer
from helion_attn.compiler.passes.ttgir import (
    BARRIER,
    COPY,
    EXPECT,
    PRODUCT,
    TWO_WARPGROUPS,
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

NAME = "early_copies"

#: The block that comes into the buffer of the block before the last.
EARLY_BLOCK = "%early_block"


def _ahead(loop: str, stages: int) -> str:
    """Pattern of the line that computes the index of the block which an iteration loads."""
    (j,) = matched(loop, rf"scf\.for ({VALUE}) =")
    return rf"arith\.addi {re.escape(j)}, %c{stages - 1}_i(32|64)(_\d+)? :"


def _an_iteration_later(loop: str, copies: list[str], rest: list[str], stages: int) -> list[str]:
    """`copies`, of the block before, where one comes after the first that the loop's first iteration waits for.

    The counter of buffers stays as it was, one ahead: before it is raised, it is that of the block before. What the
    block's index leads to has a name of its own here: the loop carries some of it, such as the block's part, to the
    iteration of that block.

    Args:
        loop: its first line.
        copies: the operations to be moved.
        rest: the loop's others.
        stages: buffers.
    """
    j, first, end = matched(loop, rf"scf\.for ({VALUE}) = ({VALUE}) to ({VALUE}) step")
    expected = only(find(copies, EXPECT), "its barriers of copies")
    barrier, valid = matched(copies[expected], rf"({VALUE}), \d+, ({VALUE})")
    defining = {name: line for line in copies if (name := defined(line))}
    (buffer,) = matched(definition(defining, barrier), rf"memdesc_index {VALUE}\[({VALUE})\]")
    (raised,) = matched(definition(defining, buffer), rf"arith\.select {VALUE}, {VALUE}, ({VALUE}) :")
    (before,) = matched(definition(defining, raised), rf"arith\.addi ({VALUE}), ")
    # The block's index, from j: its first computation.
    ahead = only(
        [i for i, line in enumerate(copies) if re.search(_ahead(loop, stages), line)], "the indices of the block ahead"
    )
    block = defined(copies[ahead])
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
        f"{EARLY_BLOCK} = arith.addi {j}, %early_stages : {integer}",
        f"%early_first = arith.addi {first}, %early_one : {integer}",
        f"%early_in_loop = arith.cmpi slt, {EARLY_BLOCK}, {end} : {integer}",
        f"%early_not_first = arith.cmpi sge, {j}, %early_first : {integer}",
        "%early_valid = arith.andi %early_in_loop, %early_not_first : i1",
    ]
    names = {buffer: before, valid: "%early_valid", str(block): EARLY_BLOCK, j: "%early_before"}
    own, found = {}, []
    for line in of_block:
        name = defined(line)
        if name and renamed(line, names) != line:
            own[name] = names[name] = f"%moved_{name[1:]}"
        found.append(renamed(line, names))
    if any(names[j] in line for line in found):
        checks.append(f"{names[j]} = arith.subi {j}, %early_one : {integer}")
    needed = {name for line in rest for name in re.findall(VALUE, line)}
    carried, _ = taken_out(of_block, [i for i, line in enumerate(of_block) if defined(line) in needed & own.keys()], 0)
    of_counter += carried
    return [*of_counter, *(indent + line for line in checks), *(line for line in found if line not in carried)]


def rescheduled(text: str) -> Outcome:
    """Move the loads of the first loop that has the form, in a module of Triton's GPU IR."""
    lines = text.split("\n")
    reasons = []
    for at, end in loops(lines):
        try:
            moved, how = _rescheduled(lines, at, end)
        except Refused as refused:
            reasons.append(str(refused))
        else:
            return Outcome(NAME, True, how, "\n".join(moved))
    return Outcome(NAME, False, in_any(reasons), text)


def _check_form(loop: str, body: list[str], end: str) -> int:
    """The stages of a loop that looks as Triton's pipeliner leaves it; `Refused` if it does not."""
    expected, copies = find(body, EXPECT), find(body, COPY)
    products, waits = find(body, PRODUCT), find(body, WAIT_FOR_PRODUCT)
    if find(body, "scf.for "):
        raise Refused("it holds another loop")
    if not copies:
        raise Refused("TMA copies nothing in it")
    only(expected, "its barriers of copies")
    if not any(" : !ttg.memdesc" in body[i] for i in products) or not waits:
        raise Refused("it has no product of two operands in shared memory, or no wait for one")
    if expected[0] < products[-1]:
        raise Refused("its copies do not come behind its products")
    if any("pendings = 0 " not in body[i] for i in waits):
        raise Refused("it waits for some of its products only")
    (found,) = matched(end, r"tt\.num_stages = (\d+)")
    stages = int(found)
    if any(f" : !ttg.memdesc<{stages}x" not in body[i] for i in find(body, "ttg.memdesc_index ")):
        raise Refused(f"it has other numbers of buffers than its {stages} stages")
    if not any(re.search(_ahead(loop, stages), line) for line in body):
        raise Refused(f"it does not copy the block that is {stages - 1} ahead")
    return stages


def _rescheduled(lines: list[str], at: int, end: int) -> tuple[list[str], str]:
    """All lines with the loads of the loop from `at` to `end` moved, and how; `Refused` if it has another form."""
    indent, body = indentation(lines[at]), lines[at + 1 : end]
    stages = _check_form(lines[at], body, lines[end])
    before, after = lines[:at], lines[end:]
    expected, copies = find(body, EXPECT), find(body, COPY)
    products, waits = find(body, PRODUCT), find(body, WAIT_FOR_PRODUCT)
    # P is in registers, Q in shared memory.
    of_q = [i for i in products if " : !ttg.memdesc" in body[i]]
    in_flight = products[-1] > waits[-1]
    # The other warpgroup's P V of the block before is yet to come.
    in_turns = not in_flight and any(TWO_WARPGROUPS in line for line in before)
    later = (in_flight or in_turns) and stages > 2
    if later and in_flight and len(of_q) > 1:
        # 0.95 to 1.05 of the time, and a register that spills.
        raise Refused("it has Q in pieces, three stages and P V in flight: moving them gained nothing")
    in_one_buffer = not in_flight and not in_turns and len(of_q) > 1 and stages == 2
    if len(of_q) > 1 and (in_one_buffer or in_turns):
        body = with_one_wait(body)
        expected, copies = find(body, EXPECT), find(body, COPY)
        waits = find(body, WAIT_FOR_PRODUCT)
        of_q = [i for i in find(body, PRODUCT) if " : !ttg.memdesc" in body[i]]
    behind = of_q[-1] if in_turns else of_q[0]
    if in_one_buffer:
        if len(waits) != 2:
            raise Refused(f"it waits {len(waits)} times for products, in place of once for Q K^T and once for P V")
        # All products of Q have read K by then.
        behind, _of_p_v = waits
    group, rest = taken_out(body, [*expected, *copies], behind)
    how = f"block j + {stages - 1} is copied behind the issue of Q K^T"
    if in_one_buffer:
        how = "block j + 1 is copied behind the wait for Q K^T; K has one buffer"
    elif later:
        group = _an_iteration_later(lines[at], group, rest, stages)
        how = f"block j + {stages - 2} is copied behind the issue of Q K^T, an iteration later than before"
    elif in_flight or in_turns:
        try:
            if in_flight and (len(of_q) > 1 or len(copies) != 2):
                raise Refused("Q or V comes in pieces")
            (j,) = matched(lines[at], rf"scf\.for ({VALUE}) =")
            pattern = _ahead(lines[at], stages)
            ahead = {name for line in body if re.search(pattern, line) and (name := defined(line))}
            before, group, rest, after = with_delayed_v(before, j, ahead, group, rest, after)
            how = "K of block j + 1 and V of block j are copied behind the issue of Q K^T"
        except Refused as refused:
            if in_turns:
                raise
            # The buffer is free behind the first wait; and the tensor core is busy behind the last product.
            behind = max(of_q[-1], waits[0])
            group, rest = taken_out(body, [*expected, *copies], behind)
            how = f"block j + 1 is copied behind a wait; V does not come a block behind K: {refused}"
    # The first: all warps have read what is overwritten. The second, and the one in front of the loop: Triton wants one
    # between a copy and what reads its buffers next, and would have it between the softmax and P V. The one behind the
    # loop: what is stored there may come into K's buffers, whose reading Triton takes for done.
    barrier = f"{indent}  {BARRIER}"
    body = [*rest[: behind + 1], barrier, *group, barrier, *rest[behind + 1 :]]
    before = _with_last_wait_behind(before, indent)
    if in_one_buffer:
        before, body, after = with_single_k_buffer(before, body, after)
    end_of_loop, *after = after
    return [*before, indent + BARRIER, lines[at], *body, end_of_loop, indent + BARRIER, *after], how


def _with_last_wait_behind(before: list[str], indent: str) -> list[str]:
    """The lines in front of a loop, the wait for Q, if there is one, behind the rest."""
    waits = [i for i in find(before, WAIT_FOR_COPIES) if before[i].startswith(indent + WAIT_FOR_COPIES)]
    if len(waits) != 1:
        return before
    (barrier,) = matched(before[waits[0]], rf"{WAIT_FOR_COPIES}({VALUE})")
    under_it = rf"\] ({VALUE}), {re.escape(barrier)}, "
    found = [match[1] for i in find(before, COPY) if (match := re.search(under_it, before[i]))]
    buffer = only(found, "the copies that the wait in front of it is for")
    if any(buffer in re.findall(VALUE, line) for line in before[waits[0] :]):
        return before
    of_wait = [*waits, *find(before, f"ttng.inval_barrier {barrier} ")]
    return [*(line for i, line in enumerate(before) if i not in of_wait), *(before[i] for i in of_wait)]
