"""The report of a pass on the code that it was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Outcome:
    """The change that a pass made, or why it made none."""

    name: str  # of the pass
    applied: bool  # whether it changed the code
    reason: str  # what it did, or why it did not apply
    text: str = field(default="", repr=False)  # the code after it; as it was if the pass did not apply

    def __str__(self) -> str:
        return f"{self.name}: {'applied' if self.applied else 'refused'}, {self.reason}"


class Refused(Exception):
    """A pass does not apply to a piece of code; the message says why."""


def only(found: Sequence[Item], what: str) -> Item:
    """The one item of `found`; `Refused` if there are none or several."""
    if len(found) != 1:
        raise Refused(f"there are {len(found)} of {what}, in place of one")
    return found[0]
