"""Triton's GPU IR, parsed as far as passes need it: operations, one a line, and the hot loop of a kernel."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from helion_attn.compiler.passes.outcome import Outcome, Refused

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


def operands(line: str) -> list[str]:
    """The values that an operation takes, in their order."""
    return re.findall(VALUE, re.sub(rf"^\s*{VALUE}(:\d+)? = ", "", line))


def uses(lines: list[str], name: str | None) -> list[int]:
    """The lines that take a value."""
    return [i for i, line in enumerate(lines) if name in operands(line)]


def destination(copy: str) -> list[str]:
    """The buffer that a copy writes, its barrier, and whether it is made."""
    return operands(copy)[-3:]


def source(copy: str) -> list[str]:
    """The indices that a copy reads at."""
    return operands(copy)[1:-3]


def renamed(line: str, names: dict[str, str]) -> str:
    """`line` with other names for its values."""
    return re.sub(VALUE, lambda found: names.get(found.group(), found.group()), line)


def find(lines: list[str], operation: str) -> list[int]:
    """The lines whose operation it is."""
    return [i for i, line in enumerate(lines) if re.match(rf"\s*({VALUE}(:\d+)? = )?{re.escape(operation)}", line)]


def taken_out(body: list[str], wanted: list[int], begin: int) -> tuple[list[str], list[str]]:
    """Operations `wanted`, with what they need from `begin` on; and the rest."""
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


def indentation(line: str) -> str:
    """Return the spaces at the beginning of a line."""
    return line[: len(line) - len(line.lstrip())]


@dataclass(frozen=True)
class Loop:
    """The hot loop of a kernel, which is the first that holds no other, in the lines of its module."""

    before: list[str]  # the lines in front of it
    head: str  # its first line
    body: list[str]  # the lines of its iteration
    after: list[str]  # the line that ends it, and the lines after that

    @classmethod
    def of(cls, text: str) -> Loop:
        """Parse a module; `Refused` without a loop."""
        lines = text.split("\n")
        heads = find(lines, "scf.for ")
        for at, following in zip(heads, [*heads[1:], len(lines)], strict=False):
            closing = indentation(lines[at]) + "}"
            end = next((i for i in range(at + 1, following) if lines[i].startswith(closing)), None)
            if end is not None:
                return cls(lines[:at], lines[at], lines[at + 1 : end], lines[end:])
        raise Refused("there is no loop")

    @property
    def lines(self) -> list[str]:
        """Lines of the module."""
        return [*self.before, self.head, *self.body, *self.after]

    @property
    def indent(self) -> str:
        """Spaces in front of it."""
        return indentation(self.head)

    @property
    def j(self) -> str:
        """The block of an iteration."""
        return operands(self.head)[0]

    def of_iteration_before(self, wanted: Iterable[str]) -> tuple[dict[str, str], list[str]]:
        """Names for what values of its body were in the iteration before, and the lines that compute these.

        They come of what the loop carries on twice, to the next iteration and to the one after; `Refused` without.
        """
        (carried,) = matched(self.head, r" iter_args\((.*?)\) -> ")
        arguments = re.findall(rf"({VALUE}) = ", carried)
        later = dict(zip(operands(self.body[self.find("scf.yield ")[-1]]), arguments, strict=True))
        inside = {name: i for i, line in enumerate(self.body) if (name := defined(line))}
        wanted, needed = list(wanted), set[int]()
        while wanted:
            if (i := inside.get(wanted.pop())) is not None and i not in needed:
                needed.add(i)
                wanted += operands(self.body[i])
        names, lines = dict[str, str](), []
        for i in sorted(needed):
            line = self.body[i]
            for name in operands(line):
                if name == self.j or (name in arguments and name not in later):
                    raise Refused(f"the loop does not carry {name} on for another iteration")
                if name in arguments:
                    names[name] = later[name]
            names[str(defined(line))] = f"{defined(line)}_before"
            lines.append(renamed(line, names))
        return names, lines

    @property
    def has_two_warpgroups(self) -> bool:
        """True for programs of eight warps."""
        return any(TWO_WARPGROUPS in line for line in self.before)

    @property
    def of_q(self) -> list[int]:
        """The products of Q, which is in shared memory, in its body."""
        return [i for i in self.find(PRODUCT) if " : !ttg.memdesc" in self.body[i]]

    @property
    def of_p(self) -> list[int]:
        """The products of P, which is in registers, in its body."""
        return [i for i in self.find(PRODUCT) if " : !ttg.memdesc" not in self.body[i]]

    @functools.cached_property
    def definitions(self) -> dict[str, str]:
        """The lines that define the values of its body, by these; another loop may have the same names."""
        return {name: line for line in (*self.before, *self.body) if (name := defined(line))}

    def find(self, operation: str) -> list[int]:
        """The lines of its body whose operation it is."""
        return find(self.body, operation)

    def definition(self, name: str, operation: str = "") -> str:
        """The line that defines a value; `Refused` if there is none, or it is of another operation."""
        if f" = {operation}" not in self.definitions.get(name, ""):
            raise Refused(f"{name} is not of {operation.strip() or 'an operation'}")
        return self.definitions[name]

    def buffer(self, operand: str) -> str:
        """The line that takes a buffer from its array, of which a product's operand is a view."""
        while "memdesc_index" not in (line := self.definition(operand, "ttg.memdesc_")):
            operand = operands(line)[0]
        return line


def over_loop(name: str) -> Callable[[Callable[[Loop], tuple[list[str], str]]], Callable[[str], Outcome]]:
    """Make a pass, over the text of a module, of a function of its loop: to the module's lines, and what was done."""

    def made(change: Callable[[Loop], tuple[list[str], str]]) -> Callable[[str], Outcome]:
        @functools.wraps(change)
        def over(text: str) -> Outcome:
            try:
                lines, how = change(Loop.of(text))
            except Refused as refused:
                return Outcome(name, False, str(refused), text)
            return Outcome(name, True, how, "\n".join(lines))

        return over

    return made


def with_copies_ahead(before: list[str]) -> list[str]:
    """The lines in front of a loop, the first copies, and what they need, ahead of the rest."""
    return _ahead(before, [])


def with_loads_and_copies_ahead(before: list[str]) -> list[str]:
    """The lines in front of a loop: loads from memory, the first copies, the wait for them, and then the rest.

    Loads and copies come with what they need. What is loaded is used after the wait, and is under way meanwhile. Loads
    after something that writes stay where they are.
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
