"""The report of a pass on the code that it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Outcome:
    """The change that a pass made, or why it made none.

    Attributes:
        name: of the pass.
        applied: whether it changed the code.
        reason: what it did, or why it did not apply.
        text: the code behind it; as it was if the pass did not apply.
    """

    name: str
    applied: bool
    reason: str
    text: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.name}: {'applied' if self.applied else 'refused'}, {self.reason}"


class Refused(Exception):
    """A pass does not apply to a piece of code; the message says why."""


def only(found: Sequence[Item], what: str) -> Item:
    """The one item of `found`; `Refused` if there are none or several."""
    if len(found) != 1:
        raise Refused(f"there are {len(found)} of {what}, in place of one")
    return found[0]


def definition(definitions: Mapping[str, str], name: str) -> str:
    """The line that defines a value; `Refused` if it stands elsewhere."""
    if name not in definitions:
        raise Refused(f"{name} is defined elsewhere")
    return definitions[name]


def in_any(reasons: Sequence[str]) -> str:
    """Why a pass applies to no loop, from the reasons of each."""
    if not reasons:
        return "there is no loop"
    if len(reasons) == 1:
        return reasons[0]
    return "; ".join(f"loop {i}: {reason}" for i, reason in enumerate(reasons, 1))
