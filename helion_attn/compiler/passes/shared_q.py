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
from dataclasses import replace

from helion_attn.compiler.passes.outcome import Refused, only
from helion_attn.compiler.passes.ttgir import (
    FENCE,
    PRODUCT,
    VALUE,
    Loop,
    defined,
    find,
    indentation,
    matched,
    operands,
    over_loop,
    uses,
    with_copies_ahead,
)

NAME = "shared_q"

#: Why it does not apply to kernels that read a packed Q.
COPIED = "no product has a computed operand that is stored in shared memory"

#: How the operand of a product in registers ends.
_FIRST_OPERAND = r"-> (tensor<[^#]*#ttg\.dot_op<\{opIdx = 0, parent = #\w+, kWidth = \d+\}>>)"


@over_loop(NAME)
def with_shared_q(loop: Loop) -> tuple[list[str], str]:
    """Have the products of tiles that are stored before a loop read them from shared memory."""
    lines = loop.lines
    stored = {defined(lines[i]): i for i in find(lines, "ttg.local_alloc %")}
    loads = [
        i
        for i in find(lines, "ttg.local_load ")
        if re.search(_FIRST_OPERAND, lines[i]) and operands(lines[i])[0] in stored
    ]
    if not loads:
        raise Refused(COPIED)
    # One, or a piece of Q each.
    tiles = {operands(lines[i])[0] for i in loads}
    for tile in tiles:
        _share(lines, tile, stored[tile], [i for i in loads if operands(lines[i])[0] == tile])
    last = max(stored[tile] for tile in tiles)
    fence = f"{indentation(lines[last])}{FENCE}{{bCluster = false}}"
    rest = [line for i, line in enumerate(lines) if i > last and i not in loads]
    return [*lines[: last + 1], fence, *rest], "products read Q from shared memory"


def _share(lines: list[str], tile: str, at: int, loads: list[int]) -> None:
    """Have the products of what `loads` load of one tile read it from where it lies."""
    (old_type,) = matched(lines[at], r"-> (!ttg\.memdesc<.*#smem>)")
    layouts = set()
    for load in loads:
        name, in_registers = matched(lines[load], rf"({VALUE}) = .*{_FIRST_OPERAND}")
        # The next: another loop may have the same names.
        product = next((i for i in uses(lines, name) if i > load), load)
        (k,) = matched(lines[product], rf" = {PRODUCT}{re.escape(name)}, ({VALUE}),")
        # The nearest: another loop may have the same names.
        transposed = [i for i in find(lines[:product], "ttg.memdesc_trans ") if defined(lines[i]) == k]
        if not transposed:
            raise Refused(f"{k} is not transposed in shared memory")
        layouts.add(matched(lines[transposed[-1]], r" : !ttg\.memdesc<[^,]*, (#\w+),")[0])
        lines[product] = lines[product].replace(f"{name}, ", f"{tile}, ", 1).replace(in_registers, old_type, 1)
    layout = only(sorted(layouts), "the layouts of K")
    new_type = re.sub(r", #\w+, #smem", f", {layout}, #smem", old_type)
    for i in (at, *uses(lines, tile)):
        lines[i] = lines[i].replace(old_type, new_type)


def with_keys_on_their_way(text: str) -> str:
    """The first copies of K and V, in front of the loop, ahead of what computes Q."""
    loop = Loop.of(text)
    return "\n".join(replace(loop, before=with_copies_ahead(loop.before)).lines)
