"""Triton's GPU IR as text: what passes over it look for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from helion_attn.compiler.passes.outcome import Refused

#: Operations of Triton's GPU dialects, as lines of its IR begin them.
EXPECT = "ttng.barrier_expect "
COPY = "ttng.async_tma_copy_global_to_local "
WAIT_FOR_COPIES = "ttng.wait_barrier "
PRODUCT = "ttng.warp_group_dot "
WAIT_FOR_PRODUCT = "ttng.warp_group_dot_wait "
BARRIER = "gpu.barrier"
FENCE = "ttng.fence_async_shared "

#: What a module of programs of eight warps says.
TWO_WARPGROUPS = '"ttg.num-warps" = 8 : i32'

#: A value's name.
VALUE = r"%[\w.$-]+"


def defined(line: str) -> str | None:
    """The value that an operation defines."""
    found = re.match(rf"\s*({VALUE})(:\d+)? = ", line)
    return found and found.group(1)


def renamed(line: str, names: dict[str, str]) -> str:
    """`line` with other names for its values."""
    return re.sub(VALUE, lambda found: names.get(found.group(), found.group()), line)


def find(lines: list[str], operation: str) -> list[int]:
    """The lines that begin with an operation, behind what it defines."""
    return [i for i, line in enumerate(lines) if re.match(rf"\s*({VALUE}(:\d+)? = )?{re.escape(operation)}", line)]


def taken_out(body: list[str], wanted: list[int], begin: int) -> tuple[list[str], list[str]]:
    """Operations `wanted`, and those behind `begin` whose values they need; and the rest."""
    definitions = {name: i for i, line in enumerate(body) if (name := defined(line))}
    needed: set[int] = set()
    while wanted:
        i = wanted.pop()
        if i >= begin and i not in needed:
            needed.add(i)
            wanted += [definitions[name] for name in re.findall(VALUE, body[i]) if name in definitions]
    return [body[i] for i in sorted(needed)], [line for i, line in enumerate(body) if i not in needed]


def matched(text: str, pattern: str) -> tuple[str, ...]:
    """The groups of a pattern's first match; `Refused` without one."""
    found = re.search(pattern, text)
    if found is None:
        raise Refused(f"{pattern!r} is not in {text.strip()!r}")
    return found.groups()


def loops(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Where a loop begins and ends."""
    for at in find(lines, "scf.for "):
        ends = [i for i in range(at + 1, len(lines)) if lines[i].startswith(indentation(lines[at]) + "}")]
        yield from ((at, end) for end in ends[:1])


def indentation(line: str) -> str:
    """Return the spaces at the beginning of a line."""
    return line[: len(line) - len(line.lstrip())]


def with_copies_ahead(before: list[str]) -> list[str]:
    """The lines in front of a loop, the first copies, and what they need, ahead of the rest."""
    return _ahead(before, [])


def with_loads_and_copies_ahead(before: list[str]) -> list[str]:
    """The lines in front of a loop: loads from memory, the first copies, the wait for them, and behind it the rest.

    Loads and copies come with what they need. What is loaded is used behind the wait, and is under way meanwhile. Loads
    behind something that writes stay where they are.
    """
    indent = indentation(before[-1])
    written = [i for operation in ("tt.store ", "tt.atomic", BARRIER) for i in find(before, operation)]
    end = min(written, default=len(before))
    return _ahead(before, [i for i in find(before[:end], "tt.load ") if indentation(before[i]) == indent])


def _ahead(before: list[str], loads: list[int]) -> list[str]:
    begin = find(before, "tt.func ")[-1] + 1
    of_loads, rest = taken_out(before, list(loads), begin)
    copies = [i for operation in ("ttng.init_barrier ", EXPECT, COPY) for i in find(rest, operation)]
    of_copies, rest = taken_out(rest, copies, begin)
    waits = (
        [i for operation in (WAIT_FOR_COPIES, "ttng.inval_barrier ") for i in find(rest, operation)] if loads else []
    )
    ahead = [*of_loads, *of_copies, *(rest[i] for i in sorted(waits))]
    # An operation of several lines is not taken apart, and nothing that waits is moved ahead of copies.
    indent = indentation(before[-1])
    if any(indentation(line) != indent or line.endswith("{") or "local_load" in line for line in ahead):
        return before
    others = [line for i, line in enumerate(rest[begin:], begin) if i not in waits]
    return [*rest[:begin], *ahead, *others]
