"""Triton's IR of kernels, before and after this package's passes."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from unittest import mock

from helion_attn.compiler import triton_hook
from helion_attn.compiler.passes import early_copies
from helion_attn.compiler.passes.outcome import Outcome
from helion_attn.compiler.passes.ttgir import VALUE


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, str | None]]]:
    """What the pass over loads is given, and what it makes of that; None if it does not apply."""
    seen: list[tuple[str, str | None]] = []

    def recording(text: str) -> Outcome:
        outcome = rescheduled(text)
        seen.append((text, outcome.text if outcome.applied else None))
        return outcome

    rescheduled = early_copies.rescheduled
    with (
        mock.patch.object(early_copies, "rescheduled", recording),
        # What is found in Triton's cache is not compiled.
        mock.patch.object(triton_hook, "digest", return_value=f"{time.time_ns()}"),
    ):
        yield seen


def operation(line: str) -> tuple[str | None, str, str]:
    """What a line defines, its operation, and the rest."""
    found = re.match(rf"\s*(?:({VALUE})(?::\d+)? = )?\"?([\w.]+)\"?(.*)", line)
    return (None, "", "") if found is None else (found[1], found[2], found[3].split(" loc(")[0])


def split_at_loop(text: str) -> tuple[list[str], str, list[str]]:
    """What comes before the loop, its line, and its body."""
    lines = text.split("\n")
    at = next(i for i, line in enumerate(lines) if " scf.for " in line)
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    end = next(i for i in range(at + 1, len(lines)) if lines[i].startswith(indent + "}"))
    return lines[:at], lines[at], lines[at + 1 : end]
