"""P is computed once: a pass over Triton's IR of an attention kernel.

Both the row sums and the second product read P, in layouts that differ in name and not in what a thread holds. Triton
would rather compute P twice, with all of its exponentials, than convert one into the other, wherever nothing between it
and the scores keeps it from that; the reduction of a block's maximum does, and is not there where a row keeps its
reference.
"""

from __future__ import annotations

import re
from dataclasses import replace

from helion_attn.compiler.passes.outcome import Refused, only
from helion_attn.compiler.passes.ttgir import VALUE, Loop, indentation, over_loop

NAME = "computed_once"

#: Why it does not apply to kernels that do not ask for it, and where P is computed once without it, as by Triton 3.9:
#: it is there once, or twice in one layout, which LLVM makes one of.
UNMARKED, ONCE, ALIKE = "nothing is marked", "what is marked is there once", "what is marked has one layout"

NOT_NEEDED = (UNMARKED, ONCE, ALIKE)

#: What `inline_asm.computed_once` becomes: a name, and a type.
_MARKED = re.compile(
    rf'\s*({VALUE}) = tt\.elementwise_inline_asm "[^"]*// computed once" .* -> (tensor<.*>)(?: loc.*)?$'
)


@over_loop(NAME)
def with_one(loop: Loop) -> tuple[list[str], str]:
    """Have one of two marked lines, the one whose result a product reads, convert the result of the other."""
    marked = [(i, found[1], found[2]) for i, line in enumerate(loop.body) if (found := _MARKED.match(line))]
    if not marked:
        # A P of bf16 has the mark. One of fp16 takes the same config, and has none.
        raise Refused("P of bf16 is not marked" if any("xbf16, #ttg.dot_op" in x for x in loop.lines) else UNMARKED)
    if len(marked) == 1:
        raise Refused(ONCE)
    of_products = [x for x in marked if "dot_op" in x[-1]]
    of_sums = [x for x in marked if "dot_op" not in x[-1]]
    if not of_products and len({kind for _, _, kind in of_sums}) == 1:
        raise Refused(ALIKE)
    at, product, kind = only(of_products, "the marked lines for a product")
    kept_at, kept, kept_kind = only(of_sums, "the marked lines for sums")
    # Next to each other, nothing in between can need what is moved.
    if abs(at - kept_at) != 1:
        raise Refused("something stands between the marked lines")
    line = loop.body[kept_at]
    conversion = f"{indentation(line)}{product} = ttg.convert_layout {kept} : {kept_kind} -> {kind}"
    begin = min(at, kept_at)
    body = [*loop.body[:begin], line, conversion, *loop.body[begin + 2 :]]
    return replace(loop, body=body).lines, "P V reads the P of the row sums"
