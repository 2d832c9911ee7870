"""P is computed once: a pass over Triton's IR of an attention kernel.

Both the row sums and the second product read P, in layouts that differ in name and not in what a thread holds. Triton
would rather compute P twice, with all of its exponentials, than convert one into the other, wherever nothing between it
and the scores keeps it from that; the reduction of a block's maximum does, and is not there where a row keeps its
reference.
"""

from __future__ import annotations

import re

from helion_attn.compiler.passes.outcome import Outcome
from helion_attn.compiler.passes.ttgir import VALUE, indentation

NAME = "computed_once"

#: Why it does not apply to kernels that do not ask for it, and where P is computed once without it, as by Triton 3.9:
#: it is there once, or twice in one layout, which LLVM makes one of.
UNMARKED, ONCE, ALIKE = "nothing is marked", "what is marked is there once", "what is marked has one layout"

NOT_NEEDED = (UNMARKED, ONCE, ALIKE)

#: What `inline_asm.computed_once` becomes: a name, and a type.
_MARKED = re.compile(rf'\s*({VALUE}) = tt\.elementwise_inline_asm "[^"]*// computed once" .* -> (tensor<.*>)( loc.*)?$')


def with_one(text: str) -> Outcome:
    """Have one of two marked lines, that whose result a product reads, convert the result of the other."""
    lines = text.split("\n")
    marked = [(i, found) for i, line in enumerate(lines) if (found := _MARKED.match(line))]
    if not marked:
        # A P of bf16 has the mark. One of fp16 takes the same config, and has none.
        reason = "P of bf16 is not marked" if "xbf16, #ttg.dot_op" in text else UNMARKED
        return Outcome(NAME, False, reason, text)
    if len(marked) == 1:
        return Outcome(NAME, False, ONCE, text)
    if len({found.group(2) for _, found in marked}) == 1 and "dot_op" not in marked[0][1].group(2):
        return Outcome(NAME, False, ALIKE, text)
    for_product = [x for x in marked if "dot_op" in x[1].group(2)]
    for_sums = [x for x in marked if "dot_op" not in x[1].group(2)]
    if len(for_product) != 1 or len(for_sums) != 1:
        reason = f"{len(for_product)} marked lines are for a product and {len(for_sums)} for sums, in place of one each"
        return Outcome(NAME, False, reason, text)
    ((at, product),), ((kept_at, kept),) = for_product, for_sums
    # One behind the other, nothing in between can need what is moved.
    if abs(at - kept_at) != 1:
        return Outcome(NAME, False, "something stands between the marked lines", text)
    conversion = (
        f"{indentation(lines[at])}{product.group(1)} = ttg.convert_layout {kept.group(1)}"
        f" : {kept.group(2)} -> {product.group(2)}"
    )
    rest = [line for i, line in enumerate(lines) if i != at]
    behind = rest.index(lines[kept_at]) + 1
    return Outcome(
        NAME, True, "P V reads the P of the row sums", "\n".join([*rest[:behind], conversion, *rest[behind:]])
    )
