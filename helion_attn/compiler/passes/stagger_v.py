"""V a block behind K: part of the pass that `early_copies` is, for loops of two stages, one-level or of two warpgroups.

P V of the block before is in flight when Q K^T is issued, or yet to be issued by the other warpgroup, and reads V's
buffer, while K's is free. With V under barriers of its own, both can come as early:

    for j:
        wait for K of j
        s = Q K^T, issued
        barrier, copy K of j + 1 and V of j, barrier
        wait for s, and for P V of j - 1
        softmax
        wait for V of j
        acc = P V, issued

V of j comes into the buffer of j - 2. K of the first block is all that the loop begins with.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from helion_attn.compiler.passes.outcome import Refused, only
from helion_attn.compiler.passes.ttgir import (
    COPY,
    EXPECT,
    VALUE,
    WAIT_FOR_COPIES,
    Loop,
    defined,
    destination,
    find,
    indentation,
    matched,
    operands,
    renamed,
    source,
)

#: Bytes of the elements that K and V have.
ELEMENT_BYTES = {"f8E4M3FN": 1, "f8E5M2": 1, "i8": 1, "f16": 2, "bf16": 2}

#: The barrier of the block at hand, in the loop.
STAGGERED_BARRIER = "%stagger_v_mine"

#: The block before the one at hand.
BLOCK_BEFORE = "%stagger_v_before"


def with_staggered_v(loop: Loop, copies: list[str], rest: list[str], ahead: set[str]) -> tuple[Loop, list[str]]:
    """The loop without its copies, and these, with V a block behind.

    Args:
        loop: as it is.
        copies: of K and of V, and what they need.
        rest: its body without them.
        ahead: names of the block that it copies, j + 1; none where that is from a list.

    Raises:
        Refused: the loop is another.
    """
    before, j, body, after = loop.before, loop.j, rest, loop.after

    def array(name: str) -> list[str]:
        """The array that a buffer belongs to, and its place there."""
        return operands(loop.definition(name, "ttg.memdesc_index "))

    def array_of(copy: str) -> str:
        return array(destination(copy)[0])[0]

    def size(name: str) -> int:
        shape, element = matched(loop.definition(name), r"-> !ttg\.memdesc<([\dx]+)x(\w+),")
        if element not in ELEMENT_BYTES:
            raise Refused(f"its elements are {element}")
        return math.prod(map(int, shape.split("x"))) * ELEMENT_BYTES[element]

    p_v = replace(loop, body=rest).of_p
    if not p_v:
        raise Refused("it has no product of P in registers")
    barrier, phase, *_ = operands(body[only(find(body, WAIT_FOR_COPIES), "its waits for copies")])
    # The buffers of V, by their arrays.
    v = {operands(line)[0]: str(defined(line)) for i in p_v for line in [loop.buffer(operands(body[i])[1])]}
    of_v = [line for line in copies if COPY in line and array_of(line) in v]
    of_k = [line for line in copies if COPY in line and line not in of_v]
    if len(of_v) != len(v) or not of_k:
        raise Refused(f"it has {len(of_v)} copies of V and {len(of_k)} of K")
    expected = only([line for line in copies if EXPECT in line], "its barriers of copies")
    slot = array(barrier)[1]
    if any(array(name)[1] != slot for name in v.values()):
        raise Refused("V is not read where its barrier is")
    # What says where V is copied from, of the block at hand: names, and lines that compute them. What is not computed
    # from the block ahead is from j, as j + 2 where a block's place needs j + 1.
    if ahead:
        names = {**dict.fromkeys(ahead, j), j: BLOCK_BEFORE}
        of_block = list[str]()
    else:
        names, of_block = loop.of_iteration_before(name for line in of_v for name in source(line))
    for line in copies if ahead else ():
        if (name := defined(line)) and name not in ahead and names.keys() & set(re.findall(VALUE, line)):
            names[name] = f"{name}_delayed"
            of_block.append(renamed(line, names))
    if any(names.keys().isdisjoint(re.findall(VALUE, line)) for line in of_v):
        raise Refused("V is not copied by its block")
    if any(BLOCK_BEFORE in line for line in of_block):
        (one_block, integer) = matched(
            only([line for line in copies if defined(line) in ahead], "the indices of the block ahead"),
            rf"arith\.addi {re.escape(j)}, ({VALUE}) : (i32|i64)",
        )
        of_block.insert(0, f"{indentation(body[0])}{BLOCK_BEFORE} = arith.subi {j}, {one_block} : {integer}")
    sources = [names.get(name, name) for line in of_v for name in source(line)]
    varying = {name for line in body if (name := defined(line))}
    if varying & {*sources, *(name for line in of_block for name in operands(line))}:
        raise Refused("where V is copied from is computed apart from its copies")

    def expecting(line: str, copied: list[str]) -> str:
        return re.sub(rf"({EXPECT}{VALUE}), \d+,", rf"\1, {sum(size(destination(x)[0]) for x in copied)},", line)

    barriers, one = matched(loop.definition(barrier), r" : (.*) -> (![^>]*>)")
    indent, outer = indentation(body[0]), loop.indent
    each = ("%stagger_v_0", "%stagger_v_1")
    ready = [
        f"%stagger_v = ttg.local_alloc : () -> {barriers}",
        "%stagger_v_true = arith.constant true",
        *(f"%stagger_v_c{i} = arith.constant {i} : i32" for i in range(2)),
        *(
            f"{name} = ttg.memdesc_index %stagger_v[%stagger_v_c{i}] : {barriers} -> {one}"
            for i, name in enumerate(each)
        ),
        *(f"ttng.init_barrier {name}, 1 : {one}" for name in each),
    ]
    last_init = max(find(before, "ttng.init_barrier "), default=len(before))
    first = only([i for i in find(before, EXPECT) if i > last_init], "the barriers of copies in front of it")
    of_first = [i for i in find(before, COPY) if i > first and array_of(before[i]) in v]
    if len(of_first) != len(v):
        raise Refused(f"{len(of_first)} copies of V stand in front of it")
    before = [
        *before[: last_init + 1],
        *(outer + line for line in ready),
        *before[last_init + 1 : first],
        expecting(before[first], of_k),
        *(line for i, line in enumerate(before[first + 1 :], first + 1) if i not in of_first),
    ]

    _, v_barrier, v_valid = destination(of_v[0])
    names |= {v_barrier: STAGGERED_BARRIER, v_valid: "%stagger_v_true"}
    names |= {destination(line)[0]: v[array_of(line)] for line in of_v}
    copies = [
        *(expecting(line, of_k) if line == expected else line for line in copies if line not in of_v),
        f"{indent}{STAGGERED_BARRIER} = ttg.memdesc_index %stagger_v[{slot}] : {barriers} -> {one}",
        *of_block,
        renamed(expecting(expected, of_v), names),
        *(renamed(line, names) for line in of_v),
    ]
    body = [*body[: p_v[0]], f"{indent}{WAIT_FOR_COPIES}{STAGGERED_BARRIER}, {phase} : {one}", *body[p_v[0] :]]
    ended = min(find(after, "ttng.inval_barrier "), default=None)
    if ended is None:
        raise Refused("no barrier ends after it")
    after = [*after[:ended], *(f"{outer}ttng.inval_barrier {name} : {one}" for name in each), *after[ended:]]
    return Loop(before, loop.head, body, after), copies
