"""The plots of the rungs between 16 bits and 8, and of large head dims."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib.pyplot as plt
from ladder_tables import of_large_d
from matplotlib.figure import Figure
from plots import bars, legend, length, line, log_axis
from tables import Loaded, by_impl, impls_in, rows_of, series, series_in, values_of


def _by_length(loaded: Loaded, value: str, y_label: str) -> Figure | None:
    """One field by length, a panel for each head dim; logarithmic, unless it is TFLOP/s."""
    rows = [row for row in rows_of(loaded, "ladder", stage="kernel") if row.get(value) is not None]
    if not rows:
        return None
    dims, lengths = values_of(rows, "D"), [S for (S,) in values_of(rows, "N")]
    figure, panels = plt.subplots(
        1, len(dims), figsize=(3.9 * len(dims) + 0.3, 3.7), squeeze=False, layout="constrained"
    )
    for (D,), ax in zip(dims, panels[0], strict=True):
        panel = [row for row in rows if row["D"] == D]
        for name in series_in(panel):
            line(ax, name, {row["N"]: row[value] for row in panel if series(row) == name}, lengths.index)
        ax.set_title(f"D = {D}, full")
        ax.set_xticks(range(len(lengths)), [length(S) for S in lengths])
        if value == "tflops":
            ax.set_ylim(bottom=0)
        else:
            log_axis(ax)
        ax.set_xlabel("sequence length")
    panels[0][0].set_ylabel(y_label)
    legend(figure, panels[0])
    return figure


def large_d(loaded: Loaded) -> Figure | None:
    """TFLOP/s by head dim, a panel for each mask."""
    rows = [row for row in of_large_d(loaded, square=True) if row["tflops"] is not None]
    if not rows:
        return None
    masks, dims = values_of(rows, "causal"), [D for (D,) in values_of(rows, "D")]
    figure, panels = plt.subplots(1, len(masks), figsize=(10.5, 3.7), squeeze=False, layout="constrained", sharey=True)
    for (causal,), ax in zip(masks, panels[0], strict=True):
        panel = [row for row in rows if row["causal"] == causal]
        heights = {
            impl: [by_impl((row for row in panel if row["D"] == D), "tflops").get(impl) for D in dims]
            for impl in impls_in(panel)
        }
        bars(ax, [str(D) for D in dims], heights)
        ax.set_title("causal" if causal else "full")
        ax.set_xlabel("head dim")
    panels[0][0].set_ylabel("TFLOP/s")
    legend(figure, panels[0])
    return figure


PLOTS: dict[str, Callable[[Loaded], Figure | None]] = {
    "ladder": lambda loaded: _by_length(loaded, "tflops", "TFLOP/s"),
    "ladder_rmse": lambda loaded: _by_length(loaded, "rmse", "RMSE"),
    "large_d": large_d,
}
