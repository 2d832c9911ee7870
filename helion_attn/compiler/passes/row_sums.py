"""P V's product makes P's row sums: a pass over Triton's IR of an attention kernel, and one over its PTX.

A kernel that makes P's bits from scores has no P in fp32 whose rows it could add up. Its tensor core has them at hand:
V with eight more channels of ones (eight is the step of a WGMMA's N) gives each row's sum of exactly the P that V is
multiplied by, for 1/8 of P V's time at D 64 and 1/16 at D 128. A product of its own with ones reads P's registers a
second time, and takes 3 to 6 times that.

    as Triton has it                            as it is then
    acc = P V                                   acc, sums = P [V, ones]
    sums = conversions, additions, shuffles

V's operand in shared memory is of groups of 8 channels, 1024 bytes each for 128 keys, one after the other. So each
buffer of V gets one more group, which is written before the loop, and nothing but the product's shape changes: with N
8 larger it reads on into the ones. Its four more registers are a thread's two rows, twice.
"""

from __future__ import annotations

import re

from helion_attn.compiler.passes.outcome import Refused, only
from helion_attn.compiler.passes.ttgir import (
    FENCE,
    VALUE,
    WAIT_FOR_PRODUCT,
    Loop,
    defined,
    indentation,
    matched,
    operands,
    over_loop,
    uses,
)

NAME = "row_sums"

#: Why it does not apply to kernels that ask for no sums of P in e4m3.
NOT_ASKED = "no row sums of an 8-bit P are asked for"

#: What stands in the IR for the sums: a thread's two rows. `$2` and `$3` give way to registers of the product.
_MARK = "// row sums of P V"
_SUMS = f"mov.b32 $0, $2; mov.b32 $1, $3; {_MARK}"

#: Channels of a group, keys of a block, the layout of the ones.
_GROUP, _KEYS = 8, 128
_LAYOUT = "#row_sums"
_LAYOUT_IS = (
    f"{_LAYOUT} = #ttg.blocked<{{sizePerThread = [1, 8], threadsPerWarp = [2, 16], warpsPerCTA = [4, 1], "
    "order = [1, 0]}>"
)

_BUFFER = r"!ttg\.memdesc<[^>]*>"

#: The product's last: two columns of a thread's first row, two of its second.
_REGISTERS = tuple(f"%row_sum{i}" for i in range(4))

#: A product of P in registers: its shape, sums, P, and what follows.
_P_V = re.compile(r"(wgmma\.mma_async\.sync\.aligned\.m64n)(\d+)(k32\.f32\.e4m3\.e4m3 \{)([^}]*)(\}, \{[^}]*\}, .*)")


@over_loop(NAME)
def with_sums_of_products(loop: Loop) -> tuple[list[str], str]:
    """Take the row sums of a loop that makes some of an 8-bit P from its product with V."""
    body, indent = [*loop.body], loop.indent
    # P as fp32, for the sums alone.
    widened = [i for i in loop.find("tt.fp_to_fp ") if "f8E4M3FN" in body[i].split(" -> ")[0]]
    if not widened:
        raise Refused(NOT_ASKED)
    p = defined(body[only(widened, "its conversions of P to fp32")])
    first = only([i for i, line in enumerate(body) if f'"tt.reduce"({p})' in line], "its sums of P")
    last = next(i for i in range(first, len(body)) if body[i].startswith(indentation(body[first]) + "}) : "))
    if not any("arith.addf" in line for line in body[first:last]):
        raise Refused("what it makes of P's rows are not sums")
    sums = str(defined(body[first]))
    layout = body[last].split(" -> ")[1].split(" loc(")[0]
    added = body[only(uses(body, sums), "the uses of P's row sums")]
    # Another operand of the same layout: what sums are added to, or multiplied by first.
    before, *_ = (name for name in operands(added) if name != sums)
    if f" : {layout}" not in added:
        raise Refused(f"its sums of P are used otherwise: {added.strip()}")

    if loop.has_two_warpgroups:
        # Turns stand between the barrier and the loop, so that half of the warps might not see the ones.
        raise Refused("its programs have two warpgroups")
    product = only([i for i in loop.of_p if "f8E4M3FN, #ttg.dot_op<" in body[i]], "its products of P")
    wait = next((i for i in loop.find(WAIT_FOR_PRODUCT) if i > product), len(body))
    if not product < wait < first:
        raise Refused("its sums of P do not come after the wait for P V")
    buffers = operands(loop.buffer(operands(body[product])[1]))[0]
    allocated = loop.definition(buffers, "ttg.local_alloc : ")
    count, channels, keys = map(int, matched(allocated, r"!ttg\.memdesc<(\d+)x(\d+)x(\d+)xf8E4M3FN, "))
    if keys != _KEYS or channels % _GROUP:
        raise Refused(f"a block of V is {channels} channels of {keys} keys, in place of {_KEYS}")
    groups = channels // _GROUP + 1

    old, new = f"<{count}x{channels}x{keys}xf8", f"<{count * groups}x{_GROUP}x{keys}xf8"
    at = body.index(added)
    body[at:at] = [
        f'{indent}  {sums} = tt.elementwise_inline_asm "{_SUMS}" {{constraints = "=f,=f,f,f", '
        f"packed_element = 2 : i32, pure = false}} {before} : {layout} -> {layout}"
    ]
    del body[first : last + 1]
    del body[widened[0]]

    def wider(line: str) -> list[str]:
        if buffers in operands(line) and "ttg.memdesc_index " in line:
            return _group_by_group(line, old, new, groups)
        return [line.replace(old, new) if buffers in re.findall(VALUE, line) else line]

    in_front, body, after = ([x for line in part for x in wider(line)] for part in (loop.before, body, loop.after))
    ones = [
        f"{indent}%row_sums_ones = arith.constant dense<1.0> : tensor<{_GROUP}x{keys}xf8E4M3FN, {_LAYOUT}>",
        *(line for stage in range(count) for line in _write_ones(indent, buffers, allocated, stage, groups, old, new)),
        f"{indent}{FENCE}{{bCluster = false}}",
    ]
    module = next(i for i, line in enumerate(in_front) if line.startswith("module "))
    # The ones come in front of the barrier that stands before the loop.
    lines = [*in_front[:module], _LAYOUT_IS, *in_front[module:-1], *ones, in_front[-1], loop.head, *body, *after]
    return lines, "P V's product makes P's row sums"


def _group_by_group(line: str, old: str, new: str, groups: int) -> list[str]:
    """A buffer of V, found by its first group."""
    indent, name = indentation(line), str(defined(line))
    buffers, index = operands(line)
    whole, buffer = re.findall(_BUFFER, line)
    whole, group = whole.replace(old, new), re.sub(r"<\d+x", f"<{_GROUP}x", buffer, count=1)
    own = f"%row_sums_{name[1:]}"
    return [
        f"{indent}{own}_groups = arith.constant {groups} : i32",
        f"{indent}{own}_at = arith.muli {index}, {own}_groups : i32",
        f"{indent}{own}_group = ttg.memdesc_index {buffers}[{own}_at] : {whole} -> {group}",
        f"{indent}{name} = ttg.memdesc_reinterpret {own}_group : {group} -> {buffer}",
    ]


def _write_ones(indent: str, buffers: str, allocated: str, stage: int, groups: int, old: str, new: str) -> list[str]:
    """The ones after a buffer of V."""
    (whole,) = matched(allocated.replace(old, new), f"({_BUFFER})")
    group = re.sub(r"<\d+x", "<", whole, count=1)
    at, name = f"%row_sums_at_{stage}", f"%row_sums_of_{stage}"
    return [
        f"{indent}{at} = arith.constant {(stage + 1) * groups - 1} : i32",
        f"{indent}{name} = ttg.memdesc_index {buffers}[{at}] : {whole} -> {group}",
        f"{indent}ttg.local_store %row_sums_ones, {name} : tensor<{_GROUP}x{_KEYS}xf8E4M3FN, {_LAYOUT}> -> {group}",
    ]


class NoSums(Exception):
    """The PTX of a kernel whose product is to make row sums has another form; the message says which."""


def summed(ptx: str) -> str:
    """Make the marked product 8 channels wider, and its last registers the row sums.

    Raises:
        NoSums: there is not one mark, or no product of P in registers in front of it.
    """
    lines = ptx.split("\n")
    marks = [i for i, line in enumerate(lines) if _MARK in line]
    if len(marks) != 1:
        raise NoSums(f"{len(marks)} row sums are marked, in place of one")
    (mark,) = marks
    issued = {i: found for i in range(mark) if (found := _P_V.search(lines[i]))}
    outputs = {found[4] for found in issued.values()}
    waits = [i for i in range(max(issued), mark) if "wgmma.wait_group" in lines[i]] if issued else []
    if len(outputs) != 1 or len(waits) != 1:
        raise NoSums(f"{len(outputs)} products of P in registers and {len(waits)} waits stand in front of the mark")
    for i, found in issued.items():
        shape, channels, types, accumulators, rest = found.groups()
        lines[i] = f"\t{shape}{int(channels) + _GROUP}{types}{accumulators},{','.join(_REGISTERS)}{rest}"
    moves = re.search(r"mov\.b32 (%\w+), %\w+; mov\.b32 (%\w+), %\w+;", lines[mark])
    if moves is None:
        raise NoSums(f"{lines[mark].strip()!r} are not two moves")
    # The first column of either row.
    lines[mark] = f"\tmov.b32 {moves[1]}, {_REGISTERS[0]}; mov.b32 {moves[2]}, {_REGISTERS[2]}; {_MARK}"
    begin = next(i for i, line in enumerate(lines) if line.strip().startswith(".reg "))
    return "\n".join([*lines[:begin], f"\t.reg .b32 \t{', '.join(_REGISTERS)};", *lines[begin:]])
