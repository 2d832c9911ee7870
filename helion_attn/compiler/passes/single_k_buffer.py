"""K in one buffer: part of the pass that `early_copies` is, for two-level loops of two stages that have Q in pieces.

At D 192 and D_v 128, registers leave room for three programs of 64 x 128 on an SM, and two buffers each for K and V
for two. Nothing reads K once Q K^T is done, so that it needs but one: K of the next block is copied after the wait
for Q K^T, and has the softmax and P V to arrive.

    for j:
        wait for block j
        s = Q K^T, issued piece by piece
        wait for s
        barrier, copy block j + 1, barrier
        softmax
        acc = P V, issued

Triton waits for the product of each piece before it issues the next. The tensor core adds products of one shape into
the same registers without (PTX ISA, `wgmma.fence`), so that there is one wait. Elsewhere that costs up to 12%.

What it gains: docs/notes/kernels.md.
"""

from __future__ import annotations

import re

from helion_attn.compiler.passes.outcome import Refused
from helion_attn.compiler.passes.ttgir import (
    PRODUCT,
    VALUE,
    WAIT_FOR_PRODUCT,
    Loop,
    defined,
    find,
    indentation,
    matched,
    operands,
    renamed,
    uses,
)

#: The index of the one buffer.
_ONLY = "%single_k"


def with_one_wait(body: list[str]) -> list[str]:
    """A loop's body without the waits for products that are only added to.

    Raises:
        Refused: the body is another.
    """
    body = list(body)
    for wait in find(body, WAIT_FOR_PRODUCT):
        result, product = matched(body[wait], rf"({VALUE}):\d+ = {WAIT_FOR_PRODUCT}({VALUE}),")
        users = uses(body, result)
        if len(users) == 1 and re.search(rf"{PRODUCT}{VALUE}, {VALUE}, {re.escape(result)}#0 ", body[users[0]]):
            body[users[0]] = renamed(body[users[0]].replace(f"{result}#0", result), {result: product})
            body[wait] = ""
    return [line for line in body if line]


def with_single_k_buffer(loop: Loop) -> Loop:
    """The loop with one buffer for each array that K comes into.

    Raises:
        Refused: the loop is another.
    """
    of_k = {operands(loop.buffer(operands(loop.body[i])[1]))[0] for i in loop.of_q}

    def in_one_buffer(line: str) -> str:
        if of_k.isdisjoint(re.findall(VALUE, line)):
            return line
        line = re.sub(rf"(memdesc_index {VALUE})\[{VALUE}\]", rf"\1[{_ONLY}]", line)
        return re.sub(r"!ttg\.memdesc<\d+x", "!ttg.memdesc<1x", line, count=1)

    begin = min((i for i, line in enumerate(loop.before) if defined(line) in of_k), default=None)
    if begin is None:
        raise Refused("the arrays of K are not made in front of it")
    constant = f"{indentation(loop.before[begin])}{_ONLY} = arith.constant 0 : i32"
    before = [*loop.before[:begin], constant, *loop.before[begin:]]
    before, body, after = ([in_one_buffer(line) for line in part] for part in (before, loop.body, loop.after))
    return Loop(before, loop.head, body, after)
