"""The plots beside a GEMM: of suite `speed` by length, and of the cells beside its grid."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib.pyplot as plt
from cells_tables import cells_of, gemm_fractions
from matplotlib.figure import Figure
from plots import bars, legend, length, line
from tables import Loaded, impls_in, rows_of, values_of


def roofline(loaded: Loaded) -> Figure | None:
    """A kernel's TFLOP/s over those of the GEMM of its dtype, by length: a row per mask, a column per head dim."""
    rows = rows_of(loaded, "attention", stage="kernel")
    if not rows or "gemm_tflops" not in loaded["attention"]["meta"]:
        return None
    dims, masks = values_of(rows, "D"), values_of(rows, "causal")
    lengths = [S for (S,) in values_of(rows, "N")]
    size = (3.9 * len(dims) + 0.3, 3.0 * len(masks) + 0.7)
    figure, axes = plt.subplots(
        len(masks), len(dims), figsize=size, squeeze=False, layout="constrained", sharex=True, sharey=True
    )
    for (causal,), panels in zip(masks, axes, strict=True):
        for (D,), ax in zip(dims, panels, strict=True):
            panel = [row for row in rows if (row["causal"], row["D"]) == (causal, D)]
            fractions = {
                S: gemm_fractions(loaded, "attention", [row for row in panel if row["N"] == S]) for S in lengths
            }
            for impl in impls_in(panel):
                line(ax, impl, {S: of[impl] for S, of in fractions.items() if impl in of}, lengths.index)
            ax.set_title(f"D = {D}, {'causal' if causal else 'full'}")
            ax.set_xticks(range(len(lengths)), [length(S) for S in lengths])
            ax.set_ylim(bottom=0)
        panels[0].set_ylabel("of the GEMM of its dtype")
    for ax in axes[-1]:
        ax.set_xlabel("sequence length")
    legend(figure, axes.flat)
    return figure


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
