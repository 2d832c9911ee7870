"""What a promise is: a figure, its bound, and what was measured of it in each cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.lib.harness import Loaded, Row
from benchmarks.lib.recipes import DEFAULT
from benchmarks.lib.tables import BF16_PEERS, Table, by_series, fastest, number, ratio, series, values_of

#: Titles of the tables of goals, by verdict.
GOALS = {
    "FAIL": "These goals do not hold",
    "PASS": "These goals hold",
    "not all measured": "These goals hold where they were measured",
    "not measured": "These goals were not measured",
}

#: Bound on the speed over FlashAttention-3's in FP8, where it has the feature.
FEATURE_BOUND = 0.97


@dataclass(frozen=True)
class Check:
    """One promise in one cell, and what was measured of it there (None: nothing)."""

    promise: str
    cell: str
    value: float | None
    bound: float
    at_least: bool = False

    @property
    def name(self) -> str:
        """The promise and the cell."""
        return f"{self.promise}, {self.cell}" if self.cell else self.promise

    @property
    def relation(self) -> str:
        """The bound as text."""
        return f"{'>=' if self.at_least else '<='} {self.bound:.4g}"

    @property
    def verdict(self) -> str:
        """PASS, FAIL, or that there is nothing to judge."""
        if self.value is None:
            return "not measured"
        # Comparisons with NaN are false, hence a NaN fails.
        return "PASS" if (self.value >= self.bound if self.at_least else self.value <= self.bound) else "FAIL"

    @property
    def margin(self) -> float | None:
        """How many times better than the bound it is; 0 for NaN."""
        if self.value is None:
            return None
        better = self.value / self.bound if self.at_least else self.bound / self.value if self.value else math.inf
        return better if better == better else 0.0


@dataclass(frozen=True)
class Promise:
    """One promise in all its cells, which have the same bound."""

    checks: list[Check]  # one a cell

    @property
    def worst(self) -> Check:
        """That with the least margin, of those that were measured."""
        return min(self.checks, key=lambda check: math.inf if check.margin is None else check.margin)

    @property
    def measured(self) -> bool:
        """Whether any cell was."""
        return any(check.value is not None for check in self.checks)

    @property
    def verdict(self) -> str:
        """PASS if all cells were measured and hold, FAIL if one does not."""
        verdicts = {check.verdict for check in self.checks}
        if "FAIL" in verdicts:
            return "FAIL"
        if not self.measured:
            return "not measured"
        return "PASS" if verdicts == {"PASS"} else "not all measured"


def by_promise(found: list[Check]) -> list[Promise]:
    """`found` by promise, as they come first."""
    cells: dict[str, list[Check]] = {}
    for check in found:
        cells.setdefault(check.promise, []).append(check)
    return [Promise(checks) for checks in cells.values()]


# --- what was measured ----------------------------------------------------------------------------


def on_gpu(loaded: Loaded) -> Loaded:
    """A run on the CPU shows none of these figures."""
    return {suite: content for suite, content in loaded.items() if content["meta"].get("gpu")}


def figure(rows: list[Row], name: str, value: str) -> float | None:
    """One figure of a series: NaN, which fails, where it ran and raised or was wrong."""
    mine = [row for row in rows if series(row) == name]
    if not mine:
        return None
    measured: float | None = mine[0].get(value)
    return float("nan") if measured is None else measured


def error_check(promise: str, cell: str, rows: list[Row]) -> Check:
    """The default's kernel error over the largest that is right."""
    error = figure(rows, DEFAULT, "error_kernel")
    # Without a budget there is nothing to judge, but for what failed.
    budget = figure(
        [row for row in rows if row.get("error_kernel") is None or "error_budget" in row], DEFAULT, "error_budget"
    )
    return Check(f"{promise} / its budget", cell, ratio(error, budget), 1.0)


def worst_of(values: Iterable[float | None]) -> float | None:
    """The largest, NaN if there is one; None if nothing was measured."""
    measured = [value for value in values if value is not None]
    return next((value for value in measured if value != value), max(measured, default=None))


def fastest_bf16(ms: dict[str, float]) -> float | None:
    """With FlashAttention-3 or cuDNN missing there is nothing to judge."""
    return fastest(ms, BF16_PEERS) if {"fa3_bf16", "cudnn_bf16"} <= set(ms) else None


def checks_over_fa3(
    promise: str, rows: list[Row], keys: tuple[str, ...], where: Callable[[Row], str], mine: str = DEFAULT
) -> list[Check]:
    """The speed of series `mine` over FA3's in FP8, for each cell of `rows`, which has the same `keys`."""
    found = []
    for values in values_of(rows, *keys):
        cell = [row for row in rows if tuple(row[key] for key in keys) == values]
        faster = ratio(by_series(cell, "ms").get("fa3_fp8"), figure(cell, mine, "ms"))
        found.append(Check(f"{promise}, speed / FA3 FP8's", where(cell[0]), faster, FEATURE_BOUND, at_least=True))
    return found


# --- as tables ------------------------------------------------------------------------------------


def goal_tables(found: list[Check]) -> list[Table]:
    """What does not hold, what does and what was not measured: a row for each promise, with its worst cell."""
    bodies: dict[str, list[list[str]]] = {title: [] for title in GOALS.values()}
    promises = by_promise(found)
    for promise in promises if any(promise.measured for promise in promises) else []:
        worst, verdicts = promise.worst, [check.verdict for check in promise.checks]
        hold = f"{verdicts.count('PASS')} of {len(verdicts)}"
        if missing := verdicts.count("not measured"):
            hold += f", {missing} not measured"
        where = worst.cell if promise.measured and worst.cell else "-"
        bodies[GOALS[promise.verdict]].append([worst.promise, worst.relation, number(worst.value, ".4g"), where, hold])
    headers = ["goal", "bound", "worst", "where", "cells that hold"]
    return [Table(title, headers, body) for title, body in bodies.items() if body]
