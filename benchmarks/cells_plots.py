"""The plots beside a GEMM: of suite `speed` by length, and of the cells beside its grid."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib.pyplot as plt
from cells_tables import cells_of, gemm_fractions
from matplotlib.figure import Figure
from plots import bars, legend, panels_by_length
from tables import Loaded, Row, impls_in, rows_of, values_of


def roofline(loaded: Loaded) -> Figure | None:
    """A kernel's TFLOP/s over those of the GEMM of its dtype, by length."""
    rows = rows_of(loaded, "attention", stage="kernel")
    if not rows or "gemm_tflops" not in loaded["attention"]["meta"]:
        return None

    def points_of(panel: list[Row]) -> dict[str, dict[int, float]]:
        fractions = {
            S: gemm_fractions(loaded, "attention", [row for row in panel if row["N"] == S])
            for (S,) in values_of(panel, "N")
        }
        return {impl: {S: of[impl] for S, of in fractions.items() if impl in of} for impl in impls_in(panel)}

    return panels_by_length(rows, points_of, "of the GEMM of its dtype", share_y=True)


def cells(loaded: Loaded) -> Figure | None:
    """The same of each cell, as bars."""
    rows = rows_of(loaded, "cells", stage="kernel")
    if not rows or "gemm_tflops" not in loaded["cells"]["meta"]:
        return None
    found = cells_of(rows)
    fractions = [gemm_fractions(loaded, "cells", cell) for _, cell in found]
    groups = [f"{part}\nD {D}, {mask}\nS {S}" for (part, D, _, _, S, mask), _ in found]
    figure, ax = plt.subplots(figsize=(1.4 * len(found) + 1.5, 3.9), layout="constrained")
    bars(ax, groups, {impl: [of.get(impl) for of in fractions] for impl in impls_in(rows)})
    ax.set_ylim(bottom=0)
    ax.set_ylabel("of the GEMM of its dtype")
    legend(figure, [ax])
    return figure


PLOTS: dict[str, Callable[[Loaded], Figure | None]] = {"roofline": roofline, "cells": cells}
