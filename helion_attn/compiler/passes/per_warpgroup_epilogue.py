"""Give each warpgroup an epilogue of its own: a pass over Triton's IR of a kernel with ping-pong, and one over its PTX.

After the loop Triton keeps all warps in step: it has barriers there, and exchanges the output between warps to store
it. The warpgroup that is first done with its last P V waits for the other, half a block behind it, and no other program
runs on the SM meanwhile. Here no warp needs another's rows:

- The layouts that the output and the lse are stored in have a warp's rows where the accumulator has them, 16 in a row.
  Stores stay as wide.
- The barriers after the loop go. The mbarriers are not invalidated, since nothing takes their place.
- V's buffers and the mbarriers count as in use up to the end. What is exchanged between the lanes of a warp then comes
  into buffers of Q or K. Both warpgroups are done with these: ping-pong ends with a wait for the other's last Q K^T.
- In PTX, the barrier of all warps between two exchanges of lanes becomes one of a warp.

No sum changes. What it gains: docs/notes/passes.md.
"""

from __future__ import annotations

import re
from dataclasses import replace

from helion_attn.compiler.passes.outcome import Refused, only
from helion_attn.compiler.passes.ttgir import (
    BARRIER,
    PRODUCT,
    Loop,
    defined,
    find,
    indentation,
    matched,
    operands,
    over_loop,
)

NAME = "per_warpgroup_epilogue"

#: Rows of a warp's accumulator.
_ROWS = 16

_STORED = re.compile(
    r"(#\w+ = #ttg\.blocked<\{sizePerThread = )\[1, (\d+)\](, threadsPerWarp = \[(\d+), \d+\], )"
    r"warpsPerCTA = \[\d, \d\](, order = \[1, 0\]\}>)"
)
_SINGLE_ROWS = re.compile(r"(#\w+) = #ttg\.blocked<\{sizePerThread = \[1\], .*, order = \[0\]\}>")

#: Operations that may not stand after the loop.
_NOT_BEHIND = ("scf.", "ttng.wait_barrier ", "ttng.async_tma_copy", PRODUCT)


class EpilogueIsShared(Exception):
    """The warpgroups of a kernel cannot end each by itself; the message says why."""


@over_loop(NAME)
def with_per_warpgroup_epilogue(loop: Loop) -> tuple[list[str], str]:
    """Let the warpgroups of the loop with ping-pong end each by itself."""
    marks = [i for i, line in enumerate(loop.after) if "behind_turns: " in line]
    begin = only(marks, "the marks of its ping-pong's end") + 1
    behind = loop.after[begin:]
    for operation in _NOT_BEHIND:
        if any(f" {operation}" in line for line in behind):
            raise Refused(f"{operation.strip()} stands after it")
    in_use = _allocations_of_v(loop) | _mbarriers(loop)
    freed = {
        name: behind[i] for i in find(behind, "ttg.local_dealloc ") for name in operands(behind[i]) if name in in_use
    }
    # What nothing frees counts as in use up to its last use.
    for line in loop.before:
        if (name := defined(line)) in in_use and name not in freed:
            freed[name] = f"{loop.indent}ttg.local_dealloc {name} : {matched(line, r'-> (.*?)(?: loc|$)')[0]}"
    dropped = {*find(behind, BARRIER), *find(behind, "ttng.inval_barrier ")}
    returns = only(find(behind, "tt.return"), "its returns")
    kept = [line for i, line in enumerate(behind[:returns]) if i not in dropped and line not in freed.values()]
    after = [*loop.after[:begin], *kept, *freed.values(), *behind[returns:]]
    return _with_rows_of_warps(replace(loop, after=after)), "each warpgroup stores its rows when it is done"


def _allocations_of_v(loop: Loop) -> set[str]:
    """The buffers that products of P read."""
    return {operands(loop.buffer(operands(loop.body[i])[1]))[0] for i in loop.of_p}


def _mbarriers(loop: Loop) -> set[str]:
    """The allocations of the mbarriers that a loop uses, itself or by an index."""
    before = loop.before
    used = {name for line in (loop.head, *loop.body) for name in operands(line)}
    used |= {operands(before[i])[0] for i in find(before, "ttg.memdesc_index ") if defined(before[i]) in used}
    allocated = [before[i] for i in find(before, "ttg.local_alloc ") if re.search(r"memdesc<[\dx]+xi64,", before[i])]
    return used & {str(defined(line)) for line in allocated}


def _with_rows_of_warps(loop: Loop) -> list[str]:
    text = "\n".join(loop.lines)
    for found in _STORED.finditer(text):
        begin, width, threads, rows, end = found.groups()
        # Rows may be loaded in such a layout, too.
        if _ROWS % int(rows) == 0 and re.search(rf"\btt\.store .*, {begin.split()[0]}>( loc|$)", text, re.MULTILINE):
            own_rows = f"{begin}[{_ROWS // int(rows)}, {width}]{threads}warpsPerCTA = [8, 1]{end}"
            text = text.replace(found.group(), own_rows)
    # A layout that names another comes after it.
    mma, *_ = matched(text, r"(#\w+) = #ttg\.nvidia_mma<")
    single = [*_SINGLE_ROWS.finditer(text)]
    for found in single:
        text = text.replace(found.group() + "\n", "")
    layouts = "\n".join(f"{found.group(1)} = #ttg.slice<{{dim = 1, parent = {mma}}}>" for found in single)
    line = next(line for line in text.split("\n") if line.startswith(f"{mma} = "))
    return text.replace(line, f"{line}\n{layouts}" if layouts else line, 1).split("\n")


#: What the PTX after the loop does with shared memory and barriers, by letters, and the form that it must have.
_LETTERS = (
    (r"(st(\.\w+)*\.shared|stmatrix)\b", "S"),
    (r"(ld(\.\w+)*\.shared|ldmatrix)\b", "L"),
    (r"bar\.warp\.sync\b", "W"),
    (r"(bar|barrier)(\.\w+)*\s+0[,;]", "B"),
    (r".*\.shared\b|(bar|barrier|mbarrier)\b", "X"),
)
_FORM = r"W*(S+W+L+[WB]*)*"


def _letter(line: str) -> str:
    instruction = re.sub(r"^\s*(@!?%p\d+\s+)?", "", line)
    return next((letter for pattern, letter in _LETTERS if re.match(pattern, instruction)), "")


def without_epilogue_barriers(ptx: str) -> str:
    """Have no barrier of all warps after the ping-pong.

    Raises:
        EpilogueIsShared: warps exchange rows with others there, or two exchanges have other places in shared memory.
    """
    lines = ptx.split("\n")
    mark = next((i for i, line in enumerate(lines) if "behind_turns: " in line), None)
    if mark is None:
        raise EpilogueIsShared("the mark of its ping-pong's end is not in the PTX")
    found = [(i, letter) for i in range(mark + 1, len(lines)) if (letter := _letter(lines[i]))]
    form = "".join(letter for _, letter in found)
    if not re.fullmatch(_FORM, form):
        raise EpilogueIsShared(f"its use of shared memory after the loop is {form}, which is not {_FORM}")
    # A warp that is ahead must not come into the places of one that is behind.
    exchanges: list[dict[str, set[str]]] = []
    for i, letter in found:
        if letter == "S" and (not exchanges or exchanges[-1]["L"]):
            exchanges.append({"S": set(), "L": set()})
        if letter in "SL":
            exchanges[-1][letter] |= set(re.findall(r"\[([^\]]*)\]", lines[i]))
    if any(exchange != exchanges[0] for exchange in exchanges):
        raise EpilogueIsShared("exchanges between lanes have different places in shared memory")
    for i, letter in found:
        if letter == "B":
            lines[i] = f"{indentation(lines[i])}bar.warp.sync \t-1;"
    return "\n".join(lines)
