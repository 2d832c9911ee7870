"""Parts of plots: axes, lines, bars and legends that look alike in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed, and none may be there

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.lib.harness import Loaded, Row
from benchmarks.lib.recipes import PRESETS, RUNGS
from benchmarks.lib.suite import Plot
from benchmarks.lib.tables import BF16_PEERS, LABELS, mask, series, values_of

# Colours that stay distinct without red-green vision; bf16 lighter, dashed and hatched.
COLOURS = {
    "helion_attn": "#d1495b",
    "fast": "#e8a0aa",
    "balanced": "#d1495b",
    "accurate": "#7d1d2d",
    "hybrid": "#e08e45",
    "bf16": "#b58a2a",
    "efficient_bf16": "#8fbfe6",
    "math_bf16": "#c9c9c9",
    "fa3_fp8": "#1f6fb2",
    "cudnn_fp8": "#2a9d76",
    "sage2": "#6a4c93",
    "vllm_fa3": "#3a506b",
    "fa3_bf16": "#8fbfe6",
    "cudnn_bf16": "#97d3bb",
    "flash_bf16": "#a9a9a9",
    "quantize": "#d1495b",
    "copy of the same bytes": "#a9a9a9",
    "one run": "#a9a9a9",
    "cold": "#8fbfe6",
    "warm": "#d1495b",
    "fa3_fp16": "#8fbfe6",
    "flash_fp16": "#c9c9c9",
    "sdpa_bf16": "#c9c9c9",
    "allgather": "#d1495b",
    "ulysses": "#2a9d76",
    "ring": "#e08e45",
    "PASS": "#2a9d76",
    "FAIL": "#d1495b",
    "not all measured": "#a9a9a9",
}

MARKERS = {
    "helion_attn": "o",
    "fast": "v",
    "balanced": "o",
    "accurate": "P",
    "hybrid": "X",
    "bf16": "*",
    "fa3_fp8": "s",
    "cudnn_fp8": "^",
    "sage2": "D",
    "vllm_fa3": "h",
    "fa3_bf16": "s",
    "cudnn_bf16": "^",
    "flash_bf16": "D",
    "fa3_fp16": "p",
    "flash_fp16": "d",
    "sdpa_bf16": "d",
    "allgather": "o",
    "ulysses": "^",
    "ring": "v",
}

STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "axes.edgecolor": "#666666",
    "axes.titleweight": "bold",
    "axes.titlesize": 10.5,
    "figure.titlesize": 10.5,
    "legend.frameon": False,
    "figure.dpi": 130,
}


def line(ax: Axes, impl: str, points: dict[Any, float], at: Callable[[Any], float]) -> None:
    """One implementation, or one of our presets."""
    ours, bf16 = impl == "helion_attn" or impl in PRESETS | RUNGS, impl in BF16_PEERS
    ax.plot(
        [at(x) for x in sorted(points)],
        [points[x] for x in sorted(points)],
        label=LABELS[impl],
        color=COLOURS[impl],
        marker=MARKERS[impl],
        markersize=5.5 if ours else 4.5,
        linewidth=2.4 if ours else 1.5,
        linestyle="--" if bf16 else "-",
        zorder=3 if ours else 2,
    )


def bars(ax: Axes, groups: list[str], heights: dict[str, list[float | None]]) -> None:
    """Grouped bars: one group per label, one bar per implementation."""
    width = 0.82 / max(1, len(heights))
    for i, (impl, values) in enumerate(heights.items()):
        at = [g + (i - (len(heights) - 1) / 2) * width for g, value in enumerate(values) if value is not None]
        ax.bar(
            at,
            [value for value in values if value is not None],
            width * 0.92,
            label=LABELS.get(impl, impl),
            color=COLOURS.get(impl),
            hatch="///" if impl in BF16_PEERS else None,
            edgecolor="white",
            linewidth=0.4,
        )
    ax.set_xticks(range(len(groups)), groups)
    ax.grid(axis="x", visible=False)


def horizontal(
    panels: dict[str, dict[str, dict[str, float | None]]],
    x_label: str,
    reference: float | None = None,
    columns: int = 3,
    width: float = 4.1,
) -> Figure | None:
    """Horizontal bars with their figures, and a line at `reference`. None if nothing was measured.

    Args:
        panels: panel -> group -> series -> figure, each by its title; the series has the colour.
        x_label: below each panel.
        reference: what they are compared to.
        columns: panels side by side.
        width: of a panel, in inches.
    """
    figures = [x for groups in panels.values() for of in groups.values() for x in of.values()]
    if all(x is None for x in figures):
        return None
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    # Bars of a group lie side by side.
    most = max(len(of) for groups in panels.values() for of in groups.values())
    tallest = max(sum(len(of) + 0.5 for of in groups.values()) for groups in panels.values())
    same_groups = len({tuple(groups) for groups in panels.values()}) == 1
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(width * columns + 0.3, (0.19 * tallest + 0.4) * lines + 0.6),
        squeeze=False,
        layout="constrained",
        sharey="row" if same_groups else False,
    )
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for (title, groups), ax in zip(panels.items(), axes.flat, strict=False):
        thickness = 0.82 / most
        for y, of in enumerate(groups.values()):
            for i, (name, x) in enumerate(of.items()):
                if x is None:
                    continue
                at = y + (i - (len(of) - 1) / 2) * thickness
                colour = COLOURS.get(name, "#c9b6b9")
                ax.barh(at, x, thickness * 0.92, color=colour, label=LABELS.get(name, name))
                # Not 1.00 for what is less.
                figure_text = f"{x:.3f}" if 0.995 <= x < 1 else f"{x:.2f}" if x < 10 else f"{x:.0f}"
                text = ax.annotate(figure_text, (x, at), (3, 0), textcoords="offset points", va="center", fontsize=8)
                # Legible where it lies on the line.
                text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5})
        if reference is not None:
            ax.axvline(reference, color="#666666", linestyle="--", linewidth=1.2)
        ax.set_yticks(range(len(groups)), list(groups))
        ax.set_ylim(len(groups) - 0.5, -0.5)
        ax.margins(x=0.14)
        ax.grid(axis="y", visible=False)
        ax.set_title(title)
        ax.set_xlabel(x_label)
    if most > 1:
        legend(figure, axes.flat)
    return figure


def by_recipe(
    rows: list[Row], value: Callable[[list[Row], str], float | None], x_label: str, reference: float
) -> Figure | None:
    """Horizontal bars of a figure by recipe, a panel per head dim, and a line at `reference`."""
    names = list(dict.fromkeys(map(series, rows)))
    panels = {}
    for (D,) in values_of(rows, "D"):
        panel = [row for row in rows if row["D"] == D]
        panels[f"D = {D}"] = {LABELS.get(name, name): {name: value(panel, name)} for name in names}
    return horizontal(panels, x_label, reference)


def grid(lines: int, columns: int, width: float = 4.1, height: float = 3.0) -> tuple[Figure, list[list[Axes]]]:
    """Panels that share y in each line."""
    size = (width * columns + 0.3, height * lines + 0.5)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained", sharey="row")
    return figure, axes.tolist()


def log_axis(ax: Axes, subs: tuple[float, ...] = (1.0,)) -> None:
    """Logarithmic y, ticks at `subs` times the powers of ten."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=subs))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())


def label(ax: Axes, x: float, y: float, text: str) -> None:
    """Text just above a bar."""
    ax.annotate(text, (x, y), (0, 2), textcoords="offset points", ha="center", fontsize=8)


def length(S: int) -> str:
    """4096 is 4k."""
    return f"{S // 1024}k" if S >= 1024 else str(S)


def legend(figure: Figure, axes: Iterable[Axes], columns: int = 6) -> None:
    """One legend for all panels, below them."""
    entries: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    order = [label for label in LABELS.values() if label in entries]
    order += [label for label in entries if label not in order]
    handles = [entries[label] for label in order]
    figure.legend(handles, order, loc="outside lower center", ncols=min(columns, len(order)))


def panels_by_length(
    rows: list[Row], points_of: Callable[[list[Row]], dict[str, dict[int, float]]], y_label: str, share_y: bool
) -> Figure | None:
    """A row of panels per mask, a column per head dim: what `points_of` a panel's rows gives each implementation."""
    if not rows:
        return None
    dims, masks = values_of(rows, "D"), values_of(rows, "causal")
    lengths = [S for (S,) in values_of(rows, "N")]
    size = (3.9 * len(dims) + 0.3, 3.0 * len(masks) + 0.7)
    figure, axes = plt.subplots(
        len(masks), len(dims), figsize=size, squeeze=False, layout="constrained", sharex=True, sharey=share_y
    )
    for (causal,), panels in zip(masks, axes, strict=True):
        for (D,), ax in zip(dims, panels, strict=True):
            panel = [row for row in rows if (row["causal"], row["D"]) == (causal, D)]
            for impl, points in points_of(panel).items():
                line(ax, impl, points, lengths.index)
            ax.set_title(f"D = {D}, {mask(causal)}")
            ax.set_xticks(range(len(lengths)), [length(S) for S in lengths])
            ax.set_ylim(bottom=0)
        panels[0].set_ylabel(y_label)
    for ax in axes[-1]:
        ax.set_xlabel("sequence length")
    legend(figure, axes.flat)
    return figure


def draw_all(plots: Iterable[Plot], loaded: Loaded, folder: Path) -> None:
    """Writes `<folder>/<name>.png` for every plot that has data."""
    for plot in plots:
        with plt.rc_context(STYLE):
            figure = plot.draw(loaded)
            if figure is not None:
                figure.savefig(folder / f"{plot.name}.png")
                plt.close(figure)
