"""Q that a kernel has quantised itself stays in shared memory: a pass over Triton's IR of an attention kernel.

Triton keeps the computed operand of a product in registers: it stores Q's tile once, and loads it again in every key
block, 16 to 32 registers a thread that the loop does not have. WGMMA reads that operand from shared memory as well,
where it lies as K does. So the tile is stored in K's layout, and the products take it from there, as they take a tile
that TMA has copied.

The fence makes the stores visible to the tensor core (PTX ISA, async proxy). Triton puts a barrier between stores and
products.
"""

from __future__ import annotations

import re

from helion_attn.compiler.passes.outcome import Outcome, Refused, definition, only
from helion_attn.compiler.passes.ttgir import (
    FENCE,
    PRODUCT,
    VALUE,
    defined,
    find,
    indentation,
    loops,
    matched,
    with_copies_ahead,
)

NAME = "shared_q"

#: Why it does not apply to kernels that read a packed Q.
COPIED = "no product has a computed operand that is stored in shared memory"

#: How the operand of a product in registers ends.
_FIRST_OPERAND = r"-> (tensor<[^#]*#ttg\.dot_op<\{opIdx = 0, parent = #\w+, kWidth = \d+\}>>)"


def with_shared_q(text: str) -> Outcome:
    """Have the products of a tile that is stored before a loop read it from shared memory."""
    lines = text.split("\n")
    definitions = {name: line for line in lines if (name := defined(line))}
    stored = {matched(lines[i], rf"({VALUE}) = ")[0]: i for i in find(lines, "ttg.local_alloc %")}
    loads = [
        i
        for i in find(lines, "ttg.local_load ")
        if re.search(_FIRST_OPERAND, lines[i]) and matched(lines[i], rf"local_load ({VALUE})")[0] in stored
    ]
    if not loads:
        return Outcome(NAME, False, COPIED, text)
    try:
        tile = only(sorted({matched(lines[i], rf"local_load ({VALUE})")[0] for i in loads}), "tiles that products read")
        old_type = matched(lines[stored[tile]], r"-> (!ttg\.memdesc<.*#smem>)")[0]
        layouts = set()
        for load in loads:
            name, in_registers = matched(lines[load], rf"({VALUE}) = .*{_FIRST_OPERAND}")
            uses = [i for i, line in enumerate(lines) if i != load and name in re.findall(VALUE, line)]
            product = only(uses, f"the uses of {name}")
            k = definition(definitions, matched(lines[product], rf"{PRODUCT}{re.escape(name)}, ({VALUE}),")[0])
            layouts.add(matched(k, r"ttg\.memdesc_trans .* : !ttg\.memdesc<[^,]*, (#\w+),")[0])
            lines[product] = lines[product].replace(f"{name}, ", f"{tile}, ", 1).replace(in_registers, old_type, 1)
            lines[load] = ""
        layout = only(sorted(layouts), "the layouts of K")
    except Refused as refused:
        return Outcome(NAME, False, str(refused), text)
    lines = [line for i, line in enumerate(lines) if i not in loads]
    new_type = re.sub(r", #\w+, #smem", f", {layout}, #smem", old_type)
    at = stored[tile]
    lines = [line.replace(old_type, new_type) if tile in re.findall(VALUE, line) else line for line in lines]
    fence = f"{indentation(lines[at])}{FENCE}{{bCluster = false}}"
    return Outcome(
        NAME, True, "products read Q from shared memory", "\n".join([*lines[: at + 1], fence, *lines[at + 1 :]])
    )


def with_keys_on_their_way(text: str) -> str:
    """The first copies of K and V, in front of the first loop, ahead of what computes Q."""
    lines = text.split("\n")
    at = next((at for at, _ in loops(lines)), None)
    return text if at is None else "\n".join([*with_copies_ahead(lines[:at]), *lines[at:]])
