"""Moves the loads of a pipelined loop to where the tensor core is busy: a pass over Triton's IR of an attention kernel.

Triton's pipeliner puts the TMA copies of a coming key block at the end of an iteration, after P V, each after a
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

The buffer that they write must be read no more: it is the one of block j - 1. Two-level accumulation has waited for its
P V by then. One-level has not, before it has waited for a first product of Q K^T; and of two warpgroups in ping-pong
the other one has not. Of three stages, the copies come an iteration later there, of block j + stages - 2 into the
buffer of block j - 2. Of two, `stagger_v` has V come a block behind K. Where it does not, as in one-level loops with Q
or V in pieces, the copies follow that wait or, with pieces of Q, the last of their products. One-level loops of pieces
of Q and three stages are left as they are; two-level ones of one warpgroup and two stages have K in one buffer
(`single_k_buffer`).

Where a list says which block an iteration is of, the loop carries the list's entries on from the iteration that copies
to that of the products: what is copied later takes the entry of the iteration before. The next entry is loaded at the
beginning of an iteration. Triton has that at its end, right before it is used.

The wait for Q, which Triton has where Q is loaded, moves after the first copies of K and V.

No sum changes. A loop that does not look like the above stays as it is, and the outcome says what is other.
`pingpong` goes on from here. What it gains: docs/notes/passes.md.
"""

from __future__ import annotations

import re
from dataclasses import replace

from helion_attn.compiler.passes.outcome import Refused, only
from helion_attn.compiler.passes.single_k_buffer import with_one_wait, with_single_k_buffer
from helion_attn.compiler.passes.stagger_v import with_staggered_v
from helion_attn.compiler.passes.ttgir import (
    BARRIER,
    COPY,
    EXPECT,
    PRODUCT,
    VALUE,
    WAIT_FOR_COPIES,
    WAIT_FOR_PRODUCT,
    Loop,
    defined,
    destination,
    find,
    matched,
    operands,
    over_loop,
    renamed,
    source,
    taken_out,
    uses,
)

NAME = "early_copies"

#: The block that comes into the buffer of the block before the last.
EARLY_BLOCK = "%early_block"


def _ahead(loop: Loop, lines: list[str], stages: int) -> list[int]:
    """The lines that compute the index of the block which an iteration loads."""
    pattern = rf"arith\.addi {re.escape(loop.j)}, %c{stages - 1}_i(32|64)(_\d+)? :"
    return [i for i, line in enumerate(lines) if re.search(pattern, line)]


def _of_list(loop: Loop, stages: int) -> bool:
    """Whether an iteration copies what the loop carries the index of, and if there is the one `stages - 1` ahead."""
    try:
        loop.of_iteration_before(name for i in loop.find(COPY) for name in source(loop.body[i]))
    except Refused:
        return False
    _, valid, *_ = operands(loop.body[loop.find(EXPECT)[0]])
    compared = re.search(rf"arith\.cmpi slt, {re.escape(loop.j)}, ({VALUE}) :", loop.definitions.get(valid, ""))
    last = rf"arith\.subi {re.escape(operands(loop.head)[2])}, %c{stages - 1}_i(32|64)(_\d+)? :"
    return compared is not None and re.search(last, loop.definitions.get(compared.group(1), "")) is not None


def _with_early_loads(loop: Loop, stages: int) -> Loop:
    """The loop with what it loads behind its products at its beginning; of a list, with all loads behind Q K^T's issue.

    Addresses come from the list then, and ptxas has warps wait for an entry soon after its load: not before they have
    issued Q K^T.
    """
    loads = loop.find("tt.load ")
    behind = [i for i in loads if i > loop.find(PRODUCT)[-1]]
    if _ahead(loop, loop.body, stages):
        ahead, rest = taken_out(loop.body, behind, 0)
        return replace(loop, body=[*ahead, *rest])
    to = loop.of_q[0] + 1
    ahead, rest = taken_out(loop.body, behind, to)
    first = [i for i in loads if i < to]
    kept = [line for i, line in enumerate(rest[:to]) if i not in first]
    return replace(loop, body=[*kept, *(rest[i] for i in first), *ahead, *rest[to:]])


def _an_iteration_later(loop: Loop, copies: list[str], rest: list[str], stages: int) -> list[str]:
    """`copies`, of the block before, where one comes after the first that the loop's first iteration waits for.

    The counter of buffers stays as it was, one ahead: before it is raised, it is the one of the block before. What the
    block's index leads to has a name of its own here: the loop carries some of it, such as the block's part, to the
    iteration of that block. An index from a list is made anew of the entry before.

    Args:
        loop: as it is.
        copies: its operations to be moved.
        rest: its others.
        stages: buffers.
    """
    j, first, end, *_ = operands(loop.head)
    barrier, valid, *_ = operands(copies[only(find(copies, EXPECT), "its barriers of copies")])
    buffer = operands(loop.definition(barrier, "ttg.memdesc_index "))[1]
    raised = operands(loop.definition(buffer, "arith.select "))[2]
    before = operands(loop.definition(raised, "arith.addi "))[0]
    names = {buffer: before, valid: "%early_valid", j: "%early_before"}
    of_counter = [line for line in copies if defined(line) in (buffer, raised) or f" {raised}, " in line]
    of_block = [line for line in copies if line not in of_counter]
    of_list: list[str] = []
    if found_ahead := _ahead(loop, of_block, stages):
        # The block's index, from j: its first computation.
        ahead = of_block.pop(only(found_ahead, "the indices of the block ahead"))
        names[str(defined(ahead))] = EARLY_BLOCK
        # Something else may need what is no longer needed here.
        of_counter.append(ahead)
    else:
        of_list_before, of_list = loop.of_iteration_before(
            name for i in find(of_block, COPY) for name in source(of_block[i])
        )
        names |= of_list_before
        of_counter += [line for line in of_block if defined(line) in of_list_before]
        of_block = [line for line in of_block if defined(line) not in of_list_before]
    indent = loop.indent + "  "
    # i64 where K or V has 2**31 elements.
    (integer,) = matched(loop.head, r" : (i32|i64) \{")
    checks = [
        f"%early_stages = arith.constant {stages - 2} : {integer}",
        f"%early_one = arith.constant 1 : {integer}",
        f"{EARLY_BLOCK} = arith.addi {j}, %early_stages : {integer}",
        f"%early_first = arith.addi {first}, %early_one : {integer}",
        f"%early_in_loop = arith.cmpi slt, {EARLY_BLOCK}, {end} : {integer}",
        f"%early_not_first = arith.cmpi sge, {j}, %early_first : {integer}",
        "%early_valid = arith.andi %early_in_loop, %early_not_first : i1",
    ]
    own, found = {}, []
    for line in of_block:
        name = defined(line)
        if name and renamed(line, names) != line:
            own[name] = names[name] = f"%moved_{name[1:]}"
        found.append(renamed(line, names))
    if any(names[j] in line for line in found):
        checks.append(f"{names[j]} = arith.subi {j}, %early_one : {integer}")
    needed = {name for line in rest for name in operands(line)}
    carried, _ = taken_out(of_block, [i for i, line in enumerate(of_block) if defined(line) in needed & own.keys()], 0)
    of_counter += carried
    checks = [*(indent + line for line in checks), *of_list]
    return [*of_counter, *checks, *(line for line in found if line not in carried)]


def _stages(loop: Loop) -> int:
    """The stages of a loop that looks as Triton's pipeliner leaves it; `Refused` if it does not."""
    waits = loop.find(WAIT_FOR_PRODUCT)
    if not loop.find(COPY):
        raise Refused("TMA copies nothing in it")
    expected = only(loop.find(EXPECT), "its barriers of copies")
    if not loop.of_q or not waits:
        raise Refused("it has no product of two operands in shared memory, or no wait for one")
    if expected < loop.find(PRODUCT)[-1]:
        raise Refused("its copies do not come after its products")
    if any("pendings = 0 " not in loop.body[i] for i in waits):
        raise Refused("it waits for some of its products only")
    (found,) = matched(loop.after[0], r"tt\.num_stages = (\d+)")
    stages = int(found)
    if any(f" : !ttg.memdesc<{stages}x" not in loop.body[i] for i in loop.find("ttg.memdesc_index ")):
        raise Refused(f"it has other numbers of buffers than its {stages} stages")
    if not _ahead(loop, loop.body, stages) and not _of_list(loop, stages):
        raise Refused(f"it does not copy the block that is {stages - 1} ahead")
    return stages


@over_loop(NAME)
def rescheduled(loop: Loop) -> tuple[list[str], str]:
    """Move the loads of a loop that has the form."""
    stages = _stages(loop)
    loop = _with_early_loads(loop, stages)
    in_flight = loop.find(PRODUCT)[-1] > loop.find(WAIT_FOR_PRODUCT)[-1]
    # The other warpgroup's P V of the block before is yet to come.
    pingpong_ptx = not in_flight and loop.has_two_warpgroups
    later = (in_flight or pingpong_ptx) and stages > 2
    in_pieces = len(loop.of_q) > 1
    if later and in_flight and in_pieces:
        # 0.95 to 1.05 of the time, and a register that spills.
        raise Refused("it has Q in pieces, three stages and P V in flight: moving them gained nothing")
    in_one_buffer = not in_flight and not pingpong_ptx and in_pieces and stages == 2
    if in_pieces and (in_one_buffer or pingpong_ptx):
        loop = replace(loop, body=with_one_wait(loop.body))
    waits = loop.find(WAIT_FOR_PRODUCT)
    behind = loop.of_q[-1] if pingpong_ptx else loop.of_q[0]
    if in_one_buffer:
        if len(waits) != 2:
            raise Refused(f"it waits {len(waits)} times for products, in place of once for Q K^T and once for P V")
        # All products of Q have read K by then.
        behind = waits[0]
    copies = [*loop.find(EXPECT), *loop.find(COPY)]
    group, rest = taken_out(loop.body, copies, behind)
    moved = replace(loop, body=rest)
    how = f"block j + {stages - 1} is copied after the issue of Q K^T"
    if in_one_buffer:
        how = "block j + 1 is copied after the wait for Q K^T; K has one buffer"
    elif later:
        group = _an_iteration_later(loop, group, rest, stages)
        how = f"block j + {stages - 2} is copied after the issue of Q K^T, an iteration later than before"
    elif in_flight or pingpong_ptx:
        try:
            if in_flight and (in_pieces or len(loop.find(COPY)) != 2):
                raise Refused("Q or V comes in pieces")
            ahead = {str(defined(loop.body[i])) for i in _ahead(loop, loop.body, stages)}
            moved, group = with_staggered_v(loop, group, rest, ahead)
            how = "K of block j + 1 and V of block j are copied after the issue of Q K^T"
        except Refused as refused:
            if pingpong_ptx:
                raise
            # The buffer is free after the first wait; and the tensor core is busy after the last product.
            behind = max(loop.of_q[-1], waits[0])
            group, rest = taken_out(loop.body, copies, behind)
            moved = replace(loop, body=rest)
            how = f"block j + 1 is copied after a wait; V does not come a block behind K: {refused}"
    # The first: all warps have read what is overwritten. The second, and the one in front of the loop: Triton wants one
    # between a copy and what reads its buffers next, and would have it between the softmax and P V. The one after the
    # loop: what is stored there may come into K's buffers, whose reading Triton takes for done.
    barrier, outer = f"{loop.indent}  {BARRIER}", loop.indent + BARRIER
    issued, rest = moved.body[: behind + 1], moved.body[behind + 1 :]
    body = [*issued, barrier, *group, barrier, *rest]
    moved = replace(moved, before=_with_last_wait_after(moved), body=body)
    if in_one_buffer:
        moved = with_single_k_buffer(moved)
    end, *after = moved.after
    return replace(moved, before=[*moved.before, outer], after=[end, outer, *after]).lines, how


def _with_last_wait_after(loop: Loop) -> list[str]:
    """The lines in front of a loop, the wait for Q, if there is one, after the rest."""
    before = loop.before
    waits = [i for i in find(before, WAIT_FOR_COPIES) if before[i].startswith(loop.indent + WAIT_FOR_COPIES)]
    if len(waits) != 1:
        return before
    barrier, *_ = operands(before[waits[0]])
    copied = [to for i in find(before, COPY) for to, under, _ in [destination(before[i])] if under == barrier]
    if uses(before[waits[0] :], only(copied, "the copies that the wait in front of it is for")):
        return before
    of_wait = [*waits, *find(before, f"ttng.inval_barrier {barrier} ")]
    return [*(line for i, line in enumerate(before) if i not in of_wait), *(before[i] for i in of_wait)]
