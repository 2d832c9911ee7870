"""Converts the descales of rows in front of the loop: a pass over Triton's IR of an attention kernel.

A kernel that quantises Q has the descales of Q's rows from a reduction, in the layout of Q's tile. The loop multiplies
them by K's descale, and Triton converts the product to the layout of scores: in every key block, through shared memory
and after barriers of all warps. The factors are converted in front of the loop, and the loop multiplies them in the
layout of scores.
"""

from __future__ import annotations

import re

from helion_attn.compiler.passes.outcome import Refused
from helion_attn.compiler.passes.ttgir import VALUE, Loop, defined, find, operands, over_loop, renamed

NAME = "hoist_q_scale"

#: Why it does not apply to a loop that has its rows in the layout of scores.
NOTHING = "no loop converts what comes from in front of it"

#: Operations that take as much in one layout as in another.
_ELEMENTWISE = (
    "arith.mulf ",
    "arith.addf ",
    "arith.select ",
    "arith.truncf ",
    "arith.extf ",
    "tt.splat ",
    "tt.expand_dims ",
    "tt.elementwise_inline_asm ",
)

#: A tensor's type; the group is its layout, or that which its layout is a slice of.
_TENSOR = r"tensor<[\dx]+\w+, (?:#ttg\.slice<\{dim = \d+, parent = )?(#\w+)(?:\}>)?>"

#: A type with several numbers a row.
_TILE = re.compile(r"tensor<\d+x(?!1x)\d+x")

_CONVERSION = re.compile(rf"\s*({VALUE}) = ttg\.convert_layout ({VALUE}) : {_TENSOR} -> {_TENSOR}(?: loc.*)?$")


@over_loop(NAME)
def with_hoisted_q_scale(loop: Loop) -> tuple[list[str], str]:
    """Convert in front of the loop what its conversions come from."""
    lines, begin = loop.lines, len(loop.before)
    end = begin + 1 + len(loop.body)
    defined_at = {name: i for i, line in enumerate(lines[:end]) if (name := defined(line))}
    ahead: dict[str, str] = {}
    clones: dict[int, list[str]] = {}
    names: dict[str, str] = {}
    dropped = set()
    for at in find(lines[:end], "ttg.convert_layout "):
        found = _CONVERSION.match(lines[at])
        if at < begin or found is None:
            continue
        if len({*re.findall(r"dim = (\d+)", lines[at])}) > 1:
            continue  # rows of a transposed tile
        result, value, old, new = found.groups()
        inside, outside, wanted, of_scores = [], [], [value], False
        while wanted:
            name = wanted.pop()
            of_scores |= begin < defined_at.get(name, 0) < end and '"tt.reduce"' in lines[defined_at[name]]
            if name not in defined_at or not re.search(_TENSOR, lines[defined_at[name]]):
                continue  # a scalar has no layout
            if not begin < defined_at[name] < end:
                outside.append(name)
            elif defined_at[name] not in inside:
                inside.append(defined_at[name])
                wanted += operands(lines[defined_at[name]])
        # Of the block's own scores, there is nothing in front of the loop.
        if of_scores or not inside:
            continue
        if _TILE.search(lines[at]):
            continue  # P, in the order of V's keys
        if others := [lines[i] for i in inside if not any(f" = {op}" in lines[i] for op in _ELEMENTWISE)]:
            raise Refused(f"it converts what comes of another operation: {others[0].strip()}")
        suffix = f"_in_{new[1:]}"
        own = {str(defined(lines[i])): f"{defined(lines[i])}{suffix}" for i in inside}
        for name in outside:
            *_, its_type = re.finditer(_TENSOR, lines[defined_at[name]])
            if its_type.group(1) == old:
                own[name], kind = f"{name}{suffix}", its_type.group()
                # A constant is made anew: nobody knows that a converted one's registers hold the same.
                constant = re.search(r" = (arith\.constant dense<[^\[>]*> : )", lines[defined_at[name]])
                conversion = f"ttg.convert_layout {name} : {kind} -> "
                made = (constant[1] if constant else conversion) + kind.replace(old, new)
                ahead[own[name]] = f"{loop.indent}{own[name]} = {made}"
        for i in inside:
            clone = re.sub(rf"{old}\b", new, renamed(lines[i], own))
            clones[i] = [*(x for x in clones.get(i, []) if x != clone), clone]
        names[result] = own[value]
        dropped.add(at)
    if not dropped:
        raise Refused(NOTHING)
    moved = [*loop.before, *ahead.values(), loop.head]
    for i, line in enumerate(lines[begin + 1 :], begin + 1):
        moved += [] if i in dropped else [renamed(line, names)]
        moved += clones.get(i, [])
    return moved, "rows are converted in front of the loop"
