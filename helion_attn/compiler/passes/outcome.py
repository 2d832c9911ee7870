"""The report of a pass on the code that it was given."""

from __future__ import annotations

from collections.abc import Sequence
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
        text: the code after it; as it was if the pass did not apply.
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
