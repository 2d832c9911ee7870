"""The plots of the accuracy suite, and of preprocessing by recipe."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib.pyplot as plt
from accuracy_tables import SHOWN, labels, mask, pareto
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from plots import COLOURS, MARKERS, bars, horizontal, legend, length, line, log_axis
from recipes import PRESETS
from tables import LABELS, Loaded, Row, by_series, rows_of, series, series_in, values_of

from helion_attn.testing import INPUT_KINDS


def _grid(lines: int, columns: int, width: float = 4.1, height: float = 3.0) -> tuple[Figure, list[list[Axes]]]:
    size = (width * columns + 0.3, height * lines + 0.5)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained", sharey="row")
    return figure, axes.tolist()


def _flat(axes: list[list[Axes]]) -> list[Axes]:
    return [ax for panels in axes for ax in panels]


def accuracy(loaded: Loaded) -> Figure | None:
    """Kernel and total error by kind of input, one column per head dim."""
    rows = rows_of(loaded, "accuracy", part="inputs", causal=False)
    if not rows:
        return None
    dims, kinds = [D for (D,) in values_of(rows, "D")], kinds_in(rows)
    figure, axes = _grid(2, len(dims))
    errors = (("error_kernel", "kernel error"), ("error_total", "total error"))
    for (error, text), panels in zip(errors, axes, strict=True):
        for D, ax in zip(dims, panels, strict=True):
            panel = [row for row in rows if row["D"] == D]
            by_kind = [by_series((row for row in panel if row["input"] == kind), error) for kind in kinds]
            bars(
                ax,
                [kind.replace("_", "\n") for kind in kinds],
                {name: [found.get(name) for found in by_kind] for name in series_in(panel, SHOWN)},
            )
            log_axis(ax)
            ax.set_title(f"D = {D}, {text}")
        panels[0].set_ylabel("relative error")
    legend(figure, _flat(axes))
    return figure


def kinds_in(rows: list[Row]) -> list[str]:
    """The kinds of input that occur in `rows`."""
    present = {row["input"] for row in rows}
    return [kind for kind in INPUT_KINDS if kind in present]


def _by_keys(loaded: Loaded, wanted: tuple[str, ...], error: str) -> Figure | None:
    """An error by number of keys, both axes logarithmic: a row per kind of input, a column per head dim."""
    rows = [row for row in rows_of(loaded, "accuracy", part="long") if row["input"] in wanted]
    if not rows:
        return None
    dims, kinds = [D for (D,) in values_of(rows, "D")], kinds_in(rows)
    figure, axes = _grid(len(kinds), len(dims))
    for kind, panels in zip(kinds, axes, strict=True):
        for D, ax in zip(dims, panels, strict=True):
            panel = [row for row in rows if (row["D"], row["input"]) == (D, kind)]
            for name in series_in(panel, SHOWN):
                mine = [row for row in panel if series(row) == name and row[error] is not None]
                line(ax, name, {row["N"]: row[error] for row in mine}, float)
            lengths = [N for (N,) in values_of(panel, "N")]
            ax.set_xscale("log", base=2)
            log_axis(ax)
            ax.set_xticks(lengths, [length(N) for N in lengths])
            ax.xaxis.set_minor_locator(NullLocator())
            ax.margins(x=0.08)
            ax.set_title(f"D = {D}, {kind}")
        panels[0].set_ylabel(f"relative {error.removeprefix('error_')} error")
    for ax in axes[-1]:
        ax.set_xlabel("keys")
    legend(figure, _flat(axes))
    return figure


def rmse(loaded: Loaded) -> Figure | None:
    """RMSE of every series at the longest length, a panel per head dim; dotted, FlashAttention-3's own figures."""
    rows = rows_of(loaded, "accuracy", part="rmse")
    if not rows:
        return None
    S = max(row["N"] for row in rows)
    rows = [row for row in rows if row["N"] == S]
    dims = [D for (D,) in values_of(rows, "D")]
    paper = loaded["accuracy"]["meta"].get("paper", {}).get("rmse", {})
    names = [*series_in(rows), *dict.fromkeys(series(row) for row in rows if series(row) not in LABELS)][::-1]
    figure, axes = _grid(1, len(dims), height=0.27 * len(names) + 0.5)
    for D, ax in zip(dims, axes[0], strict=True):
        found = by_series((row for row in rows if row["D"] == D), "rmse")
        colours = [COLOURS.get(name, "#c9b6b9" if name.startswith("fast, ") else "#a9a9a9") for name in names]
        ax.barh(labels(names), [found.get(name, 0.0) for name in names], color=colours, height=0.75)
        ax.set_xscale("log")
        for name, value in paper.items():
            if name in names:
                y = names.index(name)
                ax.plot(
                    [value, value], [y - 0.5, y + 0.5], color="black", linewidth=2, label="FlashAttention-3's paper"
                )
        ax.grid(axis="y", visible=False)
        ax.set_title(f"D = {D}, S = {length(S)}")
        ax.set_xlabel("RMSE")
    legend(figure, axes[0])
    return figure


def pareto_plot(loaded: Loaded) -> Figure | None:
    """RMSE on outlier inputs against end-to-end time, a point per recipe."""
    found = pareto(loaded)
    if found is None or not found.points:
        return None
    figure, ax = plt.subplots(figsize=(7.4, 4.6), layout="constrained")
    # Labels of points at nearly the same height would cover each other: they take turns above and below.
    for i, (name, (ms, error)) in enumerate(sorted(found.points.items(), key=lambda item: item[1])):
        preset = name in PRESETS
        ax.plot(ms, error, MARKERS.get(name, "."), color=COLOURS.get(name, "#888888"), markersize=9 if preset else 7)
        ax.annotate(
            LABELS.get(name, name.removeprefix("fast, ")),
            (ms, error),
            (6, 5 if i % 2 else -11),
            textcoords="offset points",
            fontsize=9 if preset else 8,
            fontweight="bold" if preset else "normal",
        )
    if found.fa3_rmse is not None:
        ax.axhline(found.fa3_rmse, color=COLOURS["fa3_fp8"], linestyle="--", linewidth=1.2, label="FA3 FP8, error only")
        ax.legend(loc="upper right")
    log_axis(ax, (1.0, 2.0, 5.0))
    ax.margins(x=0.18, y=0.15)
    ax.set_title(f"Lower left is better: D = {found.D}, S = {length(found.S)}")
    ax.set_xlabel("ms, from bf16 to bf16")
    ax.set_ylabel("RMSE, N(0, 1) + N(0, 100) Bernoulli(0.001)")
    return figure


def criterion(loaded: Loaded) -> Figure | None:
    """Every case of FlashAttention-3's FP8 test: its error over what is allowed."""
    rows = [row for row in rows_of(loaded, "accuracy", part="criterion") if row.get("ratio") is not None]
    if not rows:
        return None
    cells = values_of(rows, "D", "causal")
    figure, ax = plt.subplots(figsize=(7.4, 3.3), layout="constrained")
    for offset, impl in ((-0.12, "helion_attn"), (0.12, "fa3_fp8")):
        points = [
            (cells.index((row["D"], row["causal"])) + offset, row["ratio"]) for row in rows if row["impl"] == impl
        ]
        if points:
            x, y = zip(*points, strict=True)
            ax.plot(x, y, MARKERS[impl], color=COLOURS[impl], markersize=4.5, alpha=0.7, label=LABELS[impl])
    ax.axhline(1, color="#666666", linestyle="--", linewidth=1.2, label="passes below")
    ax.set_xticks(range(len(cells)), [f"D {D}\n{mask(causal)}" for D, causal in cells])
    ax.set_ylim(bottom=0)
    ax.set_ylabel("error / what is allowed")
    legend(figure, [ax])
    return figure


def real(loaded: Loaded) -> Figure | None:
    """Kernel and total error by layer of the trained model."""
    rows = rows_of(loaded, "accuracy", part="real")
    if not rows:
        return None
    figure, axes = _grid(1, 2)
    layers = [layer for (layer,) in values_of(rows, "layer")]
    for error, ax in zip(("error_kernel", "error_total"), axes[0], strict=True):
        for name in series_in(rows, SHOWN):
            mine = [row for row in rows if series(row) == name and row[error] is not None]
            line(ax, name, {row["layer"]: row[error] for row in mine}, float)
        log_axis(ax, (1.0, 2.0, 5.0))
        ax.set_xticks(layers)
        ax.set_xlabel("layer")
        ax.set_title(f"{error.removeprefix('error_')} error")
    axes[0][0].set_ylabel("relative error")
    legend(figure, axes[0])
    return figure


def _by_recipe(
    rows: list[Row], value: Callable[[list[Row], str], float | None], x_label: str, reference: float
) -> Figure | None:
    """Horizontal bars of a figure by recipe, a panel per head dim, and a line at `reference`."""
    names = list(dict.fromkeys(map(series, rows)))
    panels = {}
    for (D,) in values_of(rows, "D"):
        panel = [row for row in rows if row["D"] == D]
        panels[f"D = {D}"] = {LABELS.get(name, name): {name: value(panel, name)} for name in names}
    return horizontal(panels, x_label, reference)


def cost(loaded: Loaded) -> Figure | None:
    """End-to-end time as a multiple of FAST's, by recipe, at the shortest length."""
    rows = rows_of(loaded, "accuracy", part="cost", stage="e2e")
    if not rows:
        return None
    S = min(row["N"] for row in rows)

    def times_fast(panel: list[Row], name: str) -> float | None:
        ms = by_series(panel, "ms")
        return ms[name] / ms["fast"] if name in ms and "fast" in ms else None

    rows = [row for row in rows if row["N"] == S]
    return _by_recipe(rows, times_fast, f"end-to-end time / FAST's, S = {length(S)}", 1.0)


def preprocess_recipes(loaded: Loaded) -> Figure | None:
    """Bandwidth of `quantize` over a copy's, by recipe, the lower of both lengths."""
    rows = [row for row in rows_of(loaded, "preprocess", impl="helion_attn") if "copy_fraction" in row]
    if not rows:
        return None
    named = [row | {"recipe": f"{LABELS[row['recipe']]}, RoPE"} if row.get("rope") else row for row in rows]

    def least(panel: list[Row], name: str) -> float | None:
        return min((row["copy_fraction"] for row in panel if series(row) == name), default=None)

    return _by_recipe(named, least, "bandwidth / a copy's", 0.75)


def stages(loaded: Loaded) -> Figure | None:
    """Bandwidth of each stage of preprocessing over a copy's, the lower of both lengths."""
    rows = rows_of(loaded, "stages", impl="helion_attn")
    if not rows:
        return None
    named = [row | {"recipe": ", ".join((row["part"], *labels([row["recipe"] or "any recipe"])))} for row in rows]

    def least(panel: list[Row], name: str) -> float | None:
        return min((row["copy_fraction"] for row in panel if series(row) == name), default=None)

    return _by_recipe(named, least, "bandwidth / a copy's", 0.75)


PLOTS: dict[str, Callable[[Loaded], Figure | None]] = {
    "accuracy": accuracy,
    "long_context": lambda loaded: _by_keys(loaded, ("biased_v",), "error_kernel"),
    "long_kernel": lambda loaded: _by_keys(loaded, INPUT_KINDS, "error_kernel"),
    "long_total": lambda loaded: _by_keys(loaded, INPUT_KINDS, "error_total"),
    "rmse": rmse,
    "pareto": pareto_plot,
    "criterion": criterion,
    "real": real,
    "cost": cost,
    "preprocess_recipes": preprocess_recipes,
    "stages": stages,
}
