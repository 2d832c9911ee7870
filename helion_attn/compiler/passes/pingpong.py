"""Ping-pong of two warpgroups: a pass over Triton's IR of an attention kernel, and one over its PTX.

A program of eight warps is two warpgroups, each with half of the query rows. Triton keeps them in step, by barriers of
all warps in every key block: both compute their softmax, and the tensor core is idle; then both wait for it. With
ping-pong, the products of one run under the softmax of the other (FlashAttention-3, arXiv:2407.08608, section 3.1):

    first:   Q K^T | softmax       | P V, Q K^T | softmax        | P V, Q K^T
    second:        | Q K^T         | softmax    | P V, Q K^T     | softmax

A turn is P V of a block and Q K^T of the next. Whoever has issued both passes the turn on. The loop that `early_copies`
leaves, as each of them runs it:

    for j:                                      first               second
        wait for block j
        s = Q K^T, issued
        copy                                    waits for READ
        turn to the other                       arrives at SECOND   arrives at FIRST
        wait for s, and for P V of j - 1                            arrives at READ
        softmax
        turn to me                              waits for FIRST     waits for SECOND
        acc = P V, issued

What is copied comes into buffers of block j - 2 or, with `stagger_v`, of K of block j - 1. READ says that Q K^T of
j - 1 and P V of j - 2 are done in the second warpgroup. All of the first waits for it: a copy of rows that are wider
than 128 bytes is several, by as many of its warps. They are done in the first when it has the barrier for P V of j - 1,
for all its warps have waited for them. Before the loop, the second says READ for a block that there is not, and waits
for its first turn; after it, the first passes the turn on once more, and waits for READ. So at each barrier as many
arrive as wait, with no blocks too; nobody arrives twice before the other has waited, for in between it needs a turn.

These barriers, named ones of PTX, take the place of Triton's in the loop. Those have to go: a warpgroup that waited
there for the other would wait for what has not got the turn. Without them a copy may be issued, and its bytes come,
before the first thread says how many to expect; the barrier of memory waits for both.

ptxas moves a barrier up as far as its operand allows: the barrier for P V came before 46 to 66 of a block's 66
exponentials, and lasted as long as they do. So the number of its barrier takes in registers of P, and a part of P is
made before. The rest runs under the end of the other's products. A loop of `stagger_v` needs none of that: no barrier
moves up across V's wait, which is a branch.

In front of the loop no other program runs on the SM, so what comes from memory comes at once. All loads are issued
first, then the first copies of Q, K and V. What was loaded is used after the wait for Q. Left alone, ptxas has a
maximum of Q's descales across lanes in between, which waits for them.

No sum changes. What it gains: docs/notes/passes.md.
"""

from __future__ import annotations

import re

from helion_attn.compiler.passes.early_copies import EARLY_BLOCK
from helion_attn.compiler.passes.outcome import Outcome, Refused
from helion_attn.compiler.passes.stagger_v import STAGGERED_BARRIER
from helion_attn.compiler.passes.ttgir import (
    BARRIER,
    COPY,
    EXPECT,
    PRODUCT,
    VALUE,
    WAIT_FOR_COPIES,
    WAIT_FOR_PRODUCT,
    Loop,
    over_loop,
    with_loads_and_copies_ahead,
)

NAME, BARRIER_AFTER_P = "pingpong", "pingpong_barrier_after_p"

#: Named barriers of a program; 0 is the one of all its warps. Of the first two, the one is the other from 3.
FIRST, SECOND, READ = 1, 2, 3

#: Threads of a warpgroup, of a program.
WARPGROUP, PROGRAM = 128, 256

_MINE = "shr.u32 turn, $1, 7; add.u32 turn, turn, 1; "
_THE_OTHERS = "shr.u32 turn, $1, 7; sub.u32 turn, 2, turn; "
_IF_SECOND = f"setp.ge.u32 mine, $1, {WARPGROUP}; @mine "
_IF_FIRST = f"setp.lt.u32 mine, $1, {WARPGROUP}; @mine "

# What each thread does, $1 its number. The labels are marks for `pingpong_ptx`.
_BEFORE_LOOP = f"before_turns: {_IF_SECOND}bar.arrive {READ}, {PROGRAM}; @mine bar.sync {SECOND}, {PROGRAM};"
_BEFORE_COPIES = f"before_copies: {_IF_FIRST}bar.sync {READ}, {PROGRAM};"
_BEHIND_COPIES = f"{_THE_OTHERS}bar.arrive turn, {PROGRAM};"
_BEHIND_WAIT = f"behind_wait: {_IF_SECOND}bar.arrive {READ}, {PROGRAM};"
_BEFORE_P_V = f"{_MINE}bar.sync turn, {PROGRAM};"
_BEHIND_PART_OF_P = f"behind_part_of_p: {_BEFORE_P_V}"
_BEHIND_LOOP = f"behind_turns: {_IF_FIRST}bar.arrive {SECOND}, {PROGRAM}; @mine bar.sync {READ}, {PROGRAM};"

#: The loop's operations, by their letters: wait for copies; issue Q K^T; barrier, copies, barrier; wait for products;
#: with `stagger_v`, wait for its copy; issue P V, in pieces, which two-level accumulation waits for one by one.
LETTERS = {
    WAIT_FOR_COPIES: "W",
    PRODUCT: "I",
    WAIT_FOR_PRODUCT: "F",
    BARRIER: "B",
    EXPECT: "E",
    COPY: "C",
}
FORM = r"WI+B(EC+)+BFW?(I+|(IF)+)"


@over_loop(NAME)
def with_pingpong(loop: Loop) -> tuple[list[str], str]:
    """Put ping-pong into a loop that has the form in which `early_copies` leaves it."""
    if not loop.has_two_warpgroups:
        raise Refused("a program is not two warpgroups")
    layouts = [line for line in loop.before if "#ttg.nvidia_mma<" in line]
    if any("warpsPerCTA = [8, 1]" not in line for line in layouts):
        raise Refused("a warpgroup does not have half of the rows")
    body = loop.body
    form = "".join(letter for _, letter in sorted((i, x) for op, x in LETTERS.items() for i in loop.find(op)))
    if not re.fullmatch(FORM, form):
        raise Refused(f"its operations are {form or 'others'}, which is not {FORM}")
    # P V of the block before, which the other warpgroup is yet to issue, reads its buffer.
    if not any(name in line for name in (EARLY_BLOCK, STAGGERED_BARRIER) for line in body):
        raise Refused("it copies into buffers of the block before")
    (before_copies, behind_copies), (wait, *_) = loop.find(BARRIER), loop.find(WAIT_FOR_PRODUCT)
    p_v = loop.of_p[0]
    has_staggered_v = len(loop.find(WAIT_FOR_COPIES)) > 1
    outer, inner = loop.indent, loop.indent + "  "
    thread = [
        f"{outer}%turns_zero = arith.constant 0 : i32",
        _asm(outer, "%turns_thread", "mov.u32 $0, %tid.x;", "%turns_zero", pure=True),
    ]
    lines = [
        *with_loads_and_copies_ahead(loop.before),
        *thread,
        _barrier(outer, "before_loop", _BEFORE_LOOP),
        loop.head,
        *body[:before_copies],
        _barrier(inner, "before_copies", _BEFORE_COPIES),
        *body[before_copies : behind_copies + 1],
        _barrier(inner, "behind_copies", _BEHIND_COPIES),
        *body[behind_copies + 1 : wait + 1],
        _barrier(inner, "behind_wait", _BEHIND_WAIT),
        *body[wait + 1 : p_v],
        _barrier(inner, "before_p_v", _BEFORE_P_V if has_staggered_v else _BEHIND_PART_OF_P),
        *body[p_v:],
        loop.after[0],
        _barrier(outer, "behind_loop", _BEHIND_LOOP),
        *loop.after[1:],
    ]
    return lines, "two warpgroups take turns at the tensor core"


def _asm(indent: str, name: str, code: str, operand: str, pure: bool) -> str:
    """Inline assembly, of each thread, from an i32 to an i32."""
    options = f'{{constraints = "=r,r", packed_element = 1 : i32, pure = {str(pure).lower()}}}'
    return f'{indent}{name} = tt.elementwise_inline_asm "{code}" {options} {operand} : i32 -> i32'


def _barrier(indent: str, name: str, code: str) -> str:
    code = f"{{ .reg .b32 turn; .reg .pred mine; {code} mov.b32 $0, 0; }}"
    return _asm(indent, f"%turns_{name}", code, "%turns_thread", pure=False)


class BarrierInLoop(Exception):
    """A barrier of all warps, where a warpgroup would wait forever, may be in the loop; the message says why."""


def pingpong_ptx(ptx: str) -> Outcome:
    """Take the barriers of all warps out of a loop with ping-pong, and put its barrier for P V after a part of P.

    The outcome is about the barrier for P V. The caller knows that the kernel has ping-pong: its marks must be there.

    Raises:
        BarrierInLoop: there is a barrier of all warps that is neither between the loop's copies and the wait for Q K^T
            nor right after another wait for products, or the marks of ping-pong are not there, or not in their order.
    """
    return _with_barrier_after_p(_without_block_barriers(ptx))


def _without_block_barriers(ptx: str) -> str:
    lines = ptx.split("\n")

    labels = ("before_turns: ", "before_copies: ", "behind_wait: ", "behind_turns: ")
    found_at = [i for label in labels for i, line in enumerate(lines) if label in line]
    if len(found_at) != len(labels) or found_at != sorted(found_at):
        raise BarrierInLoop("the marks of ping-pong are not in the PTX, once each and in their order")
    before_loop, *with_copies, behind_loop = found_at
    copies_and_wait = range(*with_copies)
    of_all = r"\s*(bar|barrier)(\.\w+)*\s+0[,;]"
    barriers = [i for i in range(before_loop, behind_loop) if re.match(of_all, lines[i])]
    # From Triton 3.9 on every wait for products ends with one, for the buffers that these have read. Copies into these
    # come after a wait of ping-pong's own.
    if any(i not in copies_and_wait and not _ends_a_wait(lines, i) for i in barriers):
        raise BarrierInLoop("Triton has put a barrier of all warps into the loop")
    return "\n".join(line for i, line in enumerate(lines) if i not in barriers)


def _ends_a_wait(lines: list[str], barrier: int) -> bool:
    """Return whether nothing but notes stands between a barrier and a wait for products before it."""
    before = (line.strip() for line in reversed(lines[:barrier]))
    instruction = next(line for line in before if line and not line.startswith(("//", ".loc", "$L__tmp")))
    return instruction.startswith("wgmma.wait_group")


def _with_barrier_after_p(ptx: str) -> Outcome:
    """Have the barrier for P V need every second register of P; of int8 scores and an 8-bit P every fourth.

    Which part is best was measured (docs/notes/passes.md). PTX of another form stays as it is.
    """
    lines = ptx.split("\n")
    marked = [i for i, line in enumerate(lines) if "behind_part_of_p: " in line]
    if not marked:
        return Outcome(BARRIER_AFTER_P, False, "the barrier for P V stands after the wait for V", ptx)
    if len(marked) != 1:
        return Outcome(BARRIER_AFTER_P, False, f"{len(marked)} barriers are marked, in place of one", ptx)
    (barrier,) = marked
    # In front of its fence, all of P has been packed.
    fence = next((i for i in range(barrier, len(lines)) if lines[i].lstrip().startswith("wgmma.fence")), barrier)
    if fence == barrier:
        return Outcome(BARRIER_AFTER_P, False, "no fence of products comes after the barrier", ptx)
    # Products of a second loop do not count.
    end = next((i for i, line in enumerate(lines) if "behind_turns: " in line), len(lines))
    products = "\n".join(line for line in lines[:end] if "wgmma.mma_async" in line)
    p = list(dict.fromkeys(re.findall(VALUE, " ".join(re.findall(r"\}, \{([^}]*)\}, ", products)))))
    if not p:
        return Outcome(BARRIER_AFTER_P, False, "no product takes P from registers", ptx)
    # Past other blocks, or what has an order of its own, it is not moved.
    ordered = r"^\$|\b(bra|bar|barrier|mbarrier|wgmma|cp)\b"
    if between := [line.strip() for line in lines[barrier + 1 : fence] if re.search(ordered, line)]:
        return Outcome(BARRIER_AFTER_P, False, f"{between[0]!r} stands between the barrier and the fence of P V", ptx)
    part = p[3::4] if ".s8.s8 " in products and re.search(r"\.e[45]m[32] ", products) else p[1::2]
    # A grid has fewer than 2**16 planes, which ptxas does not count on: what is added to the barrier's number is 0.
    needs = "mov.u32 nothing, %nctaid.z; shr.u32 nothing, nothing, 16; mov.b32 p, 0; "
    needs += "".join(f"or.b32 p, p, {register}; " for register in part)
    needs += "and.b32 p, p, nothing; add.u32 turn, turn, p; bar.sync "
    taken = lines[barrier].replace("behind_part_of_p: ", ".reg .b32 p, nothing; ").replace("bar.sync ", needs)
    moved = "\n".join([*lines[:barrier], *lines[barrier + 1 : fence], taken, *lines[fence:]])
    return Outcome(
        BARRIER_AFTER_P, True, f"the barrier for P V waits for {len(part)} of {len(p)} registers of P", moved
    )
