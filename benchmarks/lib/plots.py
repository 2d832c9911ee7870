"""Parts of plots: axes, lines, bars and legends that look alike in all of them."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed, and none may be there

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from PIL import Image

from benchmarks.lib.harness import Loaded, Row
from benchmarks.lib.recipes import PRESETS, RUNGS
from benchmarks.lib.suite import Plot
from benchmarks.lib.tables import BF16_PEERS, LABELS, mask, speed_text, values_of

# Colours that stay distinct without red-green vision; bf16 lighter, dashed and hatched.
COLOURS = {
    "helion_attn": "#d1495b",
    "fast": "#e8a0aa",
    "balanced": "#d1495b",
    "accurate": "#7d1d2d",
    "hybrid": "#e08e45",
    "bf16": "#b58a2a",
    "fa3_fp8": "#1f6fb2",
    "cudnn_fp8": "#2a9d76",
    "sage2": "#6a4c93",
    "vllm_fa3": "#3a506b",
    "flex": "#2e7d4f",
    "sparge": "#8338ec",
    "cudnn_sparse_fp8": "#2a9d76",
    "cudnn_sparse_bf16": "#97d3bb",
    "sta": "#0f4c5c",
    "fa3_bf16": "#8fbfe6",
    "cudnn_bf16": "#97d3bb",
    "flash_bf16": "#a9a9a9",
    "efficient_bf16": "#6fa3a8",
    "math_bf16": "#d9cfc1",
    "sdpa_bf16": "#bfa5d8",
    "fa3_fp16": "#5a8fc4",
    "flash_fp16": "#777777",
    "allgather": "#b8336a",
    "ulysses": "#c49bbb",
    "ring": "#444444",
    "fused": "#f4a259",
    "masked": "#5b8e7d",
    "blocks": "#5b8e7d",
    "tail": "#0f4c5c",
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
    "flex": "s",
    "sparge": "D",
    "cudnn_sparse_fp8": "^",
    "cudnn_sparse_bf16": "v",
    "sta": "^",
    "fa3_bf16": "s",
    "cudnn_bf16": "^",
    "flash_bf16": "D",
    "fa3_fp16": "p",
    "flash_fp16": "d",
    "math_bf16": "x",
    "sdpa_bf16": "d",
    "allgather": "o",
    "ulysses": "^",
    "ring": "v",
    "blocks": "s",
    "tail": "D",
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

#: Inches. A page shows it in about 840 pixels, so that letters of 10 points are as large as its text.
PAGE_WIDTH = 8.8

#: Lines, text and their edges.
COLOUR_COUNT = 96


def line(ax: Axes, impl: str, points: dict[Any, float], at: Callable[[Any], float], name: str | None = None) -> None:
    """One implementation, or one of our presets."""
    ours, bf16 = impl == "helion_attn" or impl in PRESETS | RUNGS, impl in BF16_PEERS
    ax.plot(
        [at(x) for x in sorted(points)],
        [points[x] for x in sorted(points)],
        label=name or LABELS[impl],
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


def horizontal(groups: dict[str, dict[str, float]], x_label: str, reference: float) -> Figure | None:
    """Horizontal bars with their figures, and a line at `reference`. None if nothing was measured.

    Args:
        groups: group -> series -> figure, each by its title; the series has the colour.
        x_label: below.
        reference: what they are compared to.
    """
    if not any(groups.values()):
        return None
    most = max(map(len, groups.values()))
    figure, ax = plt.subplots(figsize=(PAGE_WIDTH, (0.17 * most + 0.11) * len(groups) + 0.9), layout="constrained")
    thickness = 0.82 / most
    for y, of in enumerate(groups.values()):
        for i, (name, x) in enumerate(of.items()):
            at = y + (i - (len(of) - 1) / 2) * thickness
            ax.barh(at, x, thickness * 0.92, color=COLOURS[name], label=LABELS[name])
            ax.annotate(speed_text(x), (x, at), (3, 0), textcoords="offset points", va="center", fontsize=8)
    ax.axvline(reference, color="#666666", linestyle="--", linewidth=1.2)
    ax.set_yticks(range(len(groups)), list(groups))
    ax.set_ylim(len(groups) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(x_label)
    legend(figure, [ax])
    return figure


def stacked(groups: dict[str, dict[str, tuple[float, float]]], x_label: str, reference: float) -> Figure:
    """Horizontal bars of two parts, of which the second is grey, with the sum's figure, and a line at `reference`.

    Args:
        groups: group -> series -> parts, each by its title; the series has the colour of the first part.
        x_label: below.
        reference: what they are compared to.
    """
    lines = sum(len(of) + 1 for of in groups.values())
    figure, ax = plt.subplots(figsize=(PAGE_WIDTH, 0.15 * lines + 0.9), layout="constrained")
    at, ticks = 0.0, []
    for of in groups.values():
        ticks.append(at + (len(of) - 1) / 2)
        for name, (first, rest) in of.items():
            ax.barh(at, first, 0.9, color=COLOURS[name], label=LABELS[name])
            ax.barh(at, rest, 0.9, left=first, color="#dddddd")
            ax.annotate(
                speed_text(first + rest),
                (first + rest, at),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
            at += 1
        at += 1
    ax.axvline(reference, color="#666666", linestyle="--", linewidth=1.2)
    ax.set_yticks(ticks, list(groups))
    ax.set_ylim(at - 1, -1)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(x_label)
    legend(figure, [ax], columns=3)
    return figure


def grid(lines: int, columns: int, share_y: bool = True, height: float = 2.4) -> tuple[Figure, list[list[Axes]]]:
    """Panels as wide as a page together; with `share_y` those of a line have the same y."""
    size = (PAGE_WIDTH, height * lines + 0.5)
    figure, axes = plt.subplots(
        lines, columns, figsize=size, squeeze=False, layout="constrained", sharey="row" if share_y else False
    )
    return figure, axes.tolist()


def log_axis(ax: Axes, subs: tuple[float, ...] = (1.0,)) -> None:
    """Logarithmic y, ticks at `subs` times the powers of ten."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=subs))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())


def powers_axis(ax: Axes, ticks: list[int], of: Callable[[int], str]) -> None:
    """Logarithmic x with a tick at each of these."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [of(x) for x in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.margins(x=0.08)


def length(S: int) -> str:
    """4096 is 4k."""
    return f"{S // 1024}k" if S >= 1024 else str(S)


def legend(figure: Figure, axes: Iterable[Axes], columns: int = 6) -> None:
    """One legend for all panels, below them."""
    entries: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    order = [label for label in dict.fromkeys(LABELS.values()) if label in entries]
    order += [label for label in entries if label not in order]
    handles = [entries[label] for label in order]
    figure.legend(handles, order, loc="outside lower center", ncols=min(columns, len(order)))


def panels_by_length(
    rows: list[Row],
    points_of: Callable[[list[Row]], dict[str, dict[int, float]]],
    y_label: str,
    share_y: bool = False,
    reference: float | None = None,
) -> Figure | None:
    """A row of panels per mask, a column per head dim: what `points_of` a panel's rows gives each implementation."""
    if not rows:
        return None
    dims, masks = values_of(rows, "D"), values_of(rows, "causal")
    lengths = [S for (S,) in values_of(rows, "N")]
    figure, axes = grid(len(masks), len(dims), share_y)
    for (causal,), panels in zip(masks, axes, strict=True):
        for (D,), ax in zip(dims, panels, strict=True):
            panel = [row for row in rows if (row["causal"], row["D"]) == (causal, D)]
            for impl, points in points_of(panel).items():
                line(ax, impl, points, lengths.index)
            if reference is not None:
                ax.axhline(reference, color="#666666", linestyle="--", linewidth=1.2)
            ax.set_title(f"D = {D}, {mask(causal)}")
            ax.set_xticks(range(len(lengths)), [length(S) for S in lengths])
        panels[0].set_ylabel(y_label)
    for ax in axes[-1]:
        ax.set_xlabel("sequence length")
    # After every line is drawn: the limit at the bottom stops the one at the top from following them.
    for ax in itertools.chain(*axes):
        ax.margins(y=0.1)
        ax.set_ylim(bottom=0)
    legend(figure, itertools.chain(*axes))
    return figure


def heat_maps(panels: dict[str, dict[str, dict[str, float]]], y_label: str, x_label: str, bar_label: str) -> Figure:
    """Ratios by colour, with their figures: 1 is white, above it the package's colour, below it bf16's.

    Args:
        panels: title -> row -> column -> ratio, all with the rows of the first and its columns.
        y_label: of the rows.
        x_label: of the columns.
        bar_label: what the ratio is.
    """
    first = next(iter(panels.values()))
    rows = list(first)
    columns = list(dict.fromkeys(itertools.chain(*first.values())))
    colours = LinearSegmentedColormap.from_list("", [COLOURS["fa3_bf16"], "white", COLOURS["helion_attn"]])
    size = (PAGE_WIDTH, 0.42 * len(rows) + 1.3)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for ax, (title, cells) in zip(axes[0], panels.items(), strict=True):
        ratios = [[cells[row].get(column) for column in columns] for row in rows]
        # As far from white at 2 as at 1 / 2.
        image = ax.imshow(np.array(ratios, dtype=float), cmap=colours, norm=LogNorm(0.5, 2), aspect="auto")
        for y, row in enumerate(ratios):
            for x, ratio in enumerate(row):
                ax.text(x, y, speed_text(ratio), ha="center", va="center", fontsize=8.5)
        ax.set_title(title)
        ax.set_xticks(range(len(columns)), columns)
        ax.set_yticks(range(len(rows)), rows)
        ax.set_xlabel(x_label)
        ax.grid(visible=False)
    axes[0][0].set_ylabel(y_label)
    bar = figure.colorbar(image, ax=axes[0], label=bar_label, ticks=[0.5, 0.7, 1, 1.4, 2], pad=0.01)
    bar.ax.minorticks_off()
    bar.ax.set_yticklabels(["0.5", "0.7", "1", "1.4", "2"])
    return figure


def save(figure: Figure, path: Path) -> None:
    """A PNG in a few colours, which takes a third of the bytes."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    image = (
        Image.open(drawn).convert("RGB").quantize(COLOUR_COUNT, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    image.save(path, optimize=True)


def draw_all(plots: Iterable[Plot], loaded: Loaded, folder: Path) -> None:
    """Writes `<folder>/<name>.png` for every plot that has data."""
    for plot in plots:
        with plt.rc_context(STYLE):
            figure = plot.draw(loaded)
            if figure is not None:
                save(figure, folder / f"{plot.name}.png")
                plt.close(figure)
