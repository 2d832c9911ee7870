"""P is computed once: a pass over Triton's IR of an attention kernel.

Both the row sums and the second product read P, in layouts that differ in name and not in what a thread holds. Triton
would rather compute P twice, with all of its exponentials, than convert one into the other, wherever nothing between it
and the scores keeps it from that; the reduction of a block's maximum does, and is not there where a row keeps its
reference.
"""

from __future__ import annotations

import re

from helion_attn.compiler.passes.ttgir import VALUE, indentation

#: What `inline_asm.computed_once` becomes: a name, and a type.
_MARKED = re.compile(rf'\s*({VALUE}) = tt\.elementwise_inline_asm "[^"]*// computed once" .* -> (tensor<.*>)( loc.*)?$')


def with_one(text: str) -> str:
    """`text`, in which of two marked lines the one whose result a product reads converts that of the other."""
    lines = text.split("\n")
    marked = [(i, found) for i, line in enumerate(lines) if (found := _MARKED.match(line))]
    for_product = [x for x in marked if "dot_op" in x[1].group(2)]
    for_sums = [x for x in marked if "dot_op" not in x[1].group(2)]
    if len(for_product) != 1 or len(for_sums) != 1:
        return text
    ((at, product),), ((kept_at, kept),) = for_product, for_sums
    # One behind the other, nothing in between can need what is moved.
    if abs(at - kept_at) != 1:
        return text
    conversion = (
        f"{indentation(lines[at])}{product.group(1)} = ttg.convert_layout {kept.group(1)}"
        f" : {kept.group(2)} -> {product.group(2)}"
    )
    rest = [line for i, line in enumerate(lines) if i != at]
    behind = rest.index(lines[kept_at]) + 1
    return "\n".join([*rest[:behind], conversion, *rest[behind:]])
