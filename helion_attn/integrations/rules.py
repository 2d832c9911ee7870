"""Rules for the arguments that other libraries have: one table for checks and docs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Rule:
    """A rule for one argument of an entry point."""

    argument: str  # its name
    accepts: Callable[[Any], bool]  # whether a value will do
    accepted: str  # what `accepts` says, in words, to follow "it must be"


def is_none(value: Any) -> bool:
    """Only None will do."""
    return value is None


def is_zero(value: Any) -> bool:
    """Only 0 will do."""
    return bool(value == 0)


def is_none_or_tensor(value: Any) -> bool:
    """None will do, or a tensor."""
    return value is None or isinstance(value, torch.Tensor)


NO_DROPOUT = Rule("dropout_p", is_zero, "0")


def check_supported(entry_point: str, rules: Iterable[Rule], values: dict[str, Any]) -> None:
    """Raise `NotImplementedError` for the first value, by argument, that its rule does not accept."""
    for rule in rules:
        if not rule.accepts(values[rule.argument]):
            raise NotImplementedError(
                f"{entry_point}: {rule.argument} is {_described(values[rule.argument])}; it must be {rule.accepted}"
            )


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} {tuple(value.shape)} of {value.dtype}"
    return repr(value)


def table(rules: Iterable[Rule]) -> str:
    """The rules in markdown, for docs/integrations.md."""
    return "\n".join(
        ["| argument | must be |", "|---|---|", *(f"| `{rule.argument}` | {rule.accepted} |" for rule in rules)]
    )
