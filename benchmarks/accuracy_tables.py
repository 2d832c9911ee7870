"""The tables of the accuracy suite, and of preprocessing by recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from recipes import PRESETS, RUNGS
from tables import (
    LABELS,
    Loaded,
    Row,
    Table,
    by_error,
    by_impl,
    by_series,
    error_text,
    number,
    rows_of,
    series,
    series_in,
    values_of,
)

from helion_attn.testing import INPUT_KINDS

#: The columns of most tables, where they were measured: the other bf16 kernels are as accurate as FA3's.
SHOWN = (*PRESETS, *RUNGS, "fa3_fp8", "cudnn_fp8", "fa3_bf16")


def mask(causal: bool) -> str:
    """The name of a mask."""
    return "causal" if causal else "full"


def labels(names: list[str]) -> list[str]:
    """Column headers."""
    return [LABELS.get(name, name) for name in names]


def recipe_tables(loaded: Loaded) -> list[Table]:
    """What the presets choose."""
    recipes = loaded.get("accuracy", {}).get("meta", {}).get("recipes", {})
    presets = [name for name in (*PRESETS, *RUNGS) if name in recipes]
    if not presets:
        return []
    fields = [[f"`{field}`", *(recipes[name][field] for name in presets)] for field in recipes[presets[0]]]
    return [Table("The presets", ["field", *labels(presets)], fields)]


def rmse_tables(loaded: Loaded) -> list[Table]:
    """RMSE on outlier inputs beside FlashAttention-3's own figures: peers and presets, and one choice at a time."""
    rows = rows_of(loaded, "accuracy", part="rmse")
    paper = loaded["accuracy"]["meta"].get("paper", {}).get("rmse", {}) if rows else {}
    cells = values_of(rows, "D", "N")
    headers = [f"D {D}, S {S}" for D, S in cells]
    main = series_in(rows)
    ablation = ["fast", *dict.fromkeys(series(row) for row in rows if series(row) not in LABELS)]
    tables = []
    for title, names, with_paper in (
        ("RMSE, N(0, 1) + N(0, 100) Bernoulli(0.001)", main, True),
        ("RMSE, one choice of FAST changed", ablation, False),
    ):
        body = []
        for name in names:
            mine = {(row["D"], row["N"]): row.get("rmse") for row in rows if series(row) == name}
            figures = [number(mine.get(cell), ".2e") for cell in cells]
            body.append([*labels([name]), *figures, *([number(paper.get(name), ".1e")] if with_paper else [])])
        if with_paper:
            body.append(["P and V of BALANCED", *(number(x, ".2e") for x in pv_shares(rows, cells)), "-"])
        if body and rows:
            tables.append(Table(title, ["", *headers, *(["FA3's paper"] if with_paper else [])], body))
    return tables


def pv_shares(rows: list[Row], cells: list[tuple[Any, ...]]) -> list[float | None]:
    """Of BALANCED's RMSE what is not HYBRID's, which has the same Q and K: rounding errors that are independent add in
    squares.
    """
    rmse = {(series(row), row["D"], row["N"]): row.get("rmse") for row in rows}
    shares = []
    for D, N in cells:
        both, of_scores = rmse.get(("balanced", D, N)), rmse.get(("hybrid", D, N))
        shares.append(math.sqrt(both**2 - of_scores**2) if both and of_scores and both > of_scores else None)
    return shares


def input_tables(loaded: Loaded) -> list[Table]:
    """Kernel and total error on each kind of input."""
    rows = rows_of(loaded, "accuracy", part="inputs")
    names = series_in(rows, SHOWN)
    order = sorted(values_of(rows, "D", "causal", "input"), key=lambda cell: (*cell[:2], INPUT_KINDS.index(cell[2])))
    body = []
    for D, causal, kind in order:
        cell = [row for row in rows if (row["D"], row["causal"], row["input"]) == (D, causal, kind)]
        body.append([str(D), mask(causal), kind, *by_error(cell, names)])
    headers = ["D", "mask", "input", *labels(names)]
    return [Table(f"Relative error, kernel / total, {rows[0]['N']} tokens", headers, body)] if body else []


def biased_v_tables(loaded: Loaded) -> list[Table]:
    """Kernel error by number of keys, V biased."""
    rows = rows_of(loaded, "accuracy", part="long", input="biased_v")
    names = series_in(rows, SHOWN)
    body = []
    for D, N in values_of(rows, "D", "N"):
        cell = [row for row in rows if (row["D"], row["N"]) == (D, N)]
        kernel, total = by_series(cell, "error_kernel"), by_series(cell, "error_total")
        body.append([str(D), str(N), *(error_text(kernel.get(name)) for name in names)])
        body[-1].append(error_text(total.get("balanced")))
    headers = ["D", "keys", *labels(names), "BALANCED, total error"]
    return [Table("Relative kernel error, V = |N(0, 1)| + 0.5", headers, body)] if body else []


def long_tables(loaded: Loaded) -> list[Table]:
    """Kernel and total error by number of keys, one table per kind of input."""
    tables = []
    for kind in INPUT_KINDS:
        rows = rows_of(loaded, "accuracy", part="long", input=kind)
        names = series_in(rows, SHOWN)
        body = []
        for D, N in values_of(rows, "D", "N"):
            cell = [row for row in rows if (row["D"], row["N"]) == (D, N)]
            body.append([str(D), str(N), *by_error(cell, names)])
        if body:
            title = f"Relative error, kernel / total, {rows[0]['M']} queries, {kind}"
            tables.append(Table(title, ["D", "keys", *labels(names)], body))
    return tables


def criterion_tables(loaded: Loaded) -> list[Table]:
    """The worst of FlashAttention-3's test cases by head dim and mask, and every case."""
    rows = rows_of(loaded, "accuracy", part="criterion")
    impls = [impl for impl in ("helion_attn", "fa3_fp8") if any(row["impl"] == impl for row in rows)]
    names = [LABELS[impl] for impl in impls]
    worst, every = [], []
    for D, causal in values_of(rows, "D", "causal"):
        cell = [row for row in rows if (row["D"], row["causal"]) == (D, causal)]
        figures = []
        for impl in impls:
            ratios = [row.get("ratio") for row in cell if row["impl"] == impl]
            measured = [ratio for ratio in ratios if ratio is not None]
            passed = sum(ratio <= 1 for ratio in measured)
            figures += [number(max(measured, default=None), ".2f"), f"{passed} of {len(ratios)}"]
        worst.append([str(D), mask(causal), *figures])
    for case in values_of(rows, "D", "causal", "M", "N", "H_kv"):
        cell = [row for row in rows if tuple(row[name] for name in ("D", "causal", "M", "N", "H_kv")) == case]
        by = by_impl(cell, "ratio")
        D, causal, *rest = case
        every.append([str(D), mask(causal), *map(str, rest), *(number(by.get(impl), ".2f") for impl in impls)])
    if not rows:
        return []
    headers = [text for name in names for text in (f"{name}, worst ratio", "passed")]
    return [
        Table("FlashAttention-3's FP8 test: error / what is allowed", ["D", "mask", *headers], worst),
        Table("Every case of it, 6 heads", ["D", "mask", "M", "N", "KV heads", *names], every),
    ]


def real_tables(loaded: Loaded) -> list[Table]:
    """Errors by layer of the trained model."""
    rows = rows_of(loaded, "accuracy", part="real")
    names = series_in(rows, SHOWN)
    body = [
        [str(layer), *by_error((row for row in rows if row["layer"] == layer), names)]
        for (layer,) in values_of(rows, "layer")
    ]
    if not body:
        return []
    w = rows[0]
    title = f"all-MiniLM-L6-v2, relative error, kernel / total, {w['B']} x {w['N']} tokens, {w['H']} heads of {w['D']}"
    return [Table(title, ["layer", *labels(names)], body)]


def cost_tables(loaded: Loaded) -> list[Table]:
    """Milliseconds by recipe, and how many times those of FAST."""
    tables = []
    for stage, title in (("e2e", "End to end from bf16 to bf16"), ("kernel", "Kernel alone")):
        rows = rows_of(loaded, "accuracy", part="cost", stage=stage)
        cells = values_of(rows, "D", "N")
        body = []
        for name in dict.fromkeys(map(series, rows)):
            line = labels([name])
            for cell in cells:
                ms = by_series((row for row in rows if (row["D"], row["N"]) == cell), "ms")
                mine, fast = ms.get(name), ms.get("fast")
                line.append("-" if mine is None else f"{mine:.3f}" + (f" ({mine / fast:.2f})" if fast else ""))
            body.append(line)
        if body:
            headers = ["", *(f"D {D}, S {S}" for D, S in cells)]
            tables.append(Table(f"{title}, full attention, ms (times FAST's)", headers, body))
    return tables


@dataclass(frozen=True)
class Pareto:
    """What a recipe gains and costs.

    Attributes:
        D, S: where.
        points: (end-to-end ms, RMSE on outliers) by recipe.
        fa3_rmse: of FlashAttention-3 in FP8, if it was measured.
    """

    D: int
    S: int
    points: dict[str, tuple[float, float]]
    fa3_rmse: float | None


def pareto(loaded: Loaded) -> Pareto | None:
    """At head dim 128 and the length that both parts have, or the nearest to that."""
    errors, times = rows_of(loaded, "accuracy", part="rmse"), rows_of(loaded, "accuracy", part="cost", stage="e2e")
    both = sorted(
        set(values_of(errors, "D", "N")) & set(values_of(times, "D", "N")), key=lambda c: (abs(c[0] - 128), c)
    )
    if not both:
        return None
    D, S = min(both, key=lambda cell: (abs(cell[0] - 128), cell))
    rmse, ms = (
        by_series((row for row in rows if (row["D"], row["N"]) == (D, S)), value)
        for rows, value in ((errors, "rmse"), (times, "ms"))
    )
    return Pareto(D, S, {name: (ms[name], rmse[name]) for name in ms if name in rmse}, rmse.get("fa3_fp8"))


def pareto_tables(loaded: Loaded) -> list[Table]:
    """Error and time by recipe, the most accurate first."""
    found = pareto(loaded)
    if found is None or not found.points:
        return []
    body = [
        [*labels([name]), f"{rmse:.2e}", f"{ms:.3f}"]
        for name, (ms, rmse) in sorted(found.points.items(), key=lambda item: item[1][1])
    ]
    title = f"RMSE on outliers and end-to-end time, D {found.D}, S {found.S}"
    return [Table(title, ["recipe", "RMSE", "ms"], body)]


def preprocess_recipe_tables(loaded: Loaded) -> list[Table]:
    """`quantize` by recipe against a copy."""
    rows = rows_of(loaded, "preprocess", impl="helion_attn", stage="preprocess")
    rows = [row for row in rows if "copy_fraction" in row]
    body = [
        [
            *labels([row["recipe"]]),
            "yes" if row.get("rope") else "",
            str(row["D"]),
            str(row["N"]),
            f"{row['ms']:.3f}",
            f"{row['moved_bytes'] / 2**20:.0f}",
            f"{row['moved_gbs']:.0f}",
            f"{row['copy_fraction']:.2f}",
            f"{row['copy_ratio']:.2f}",
        ]
        for row in sorted(rows, key=_preprocess_order)
    ]
    headers = ["recipe", "RoPE", "D", "S", "ms", "MiB moved", "GB/s", "GB/s / a copy's", "ms / a copy's"]
    return [Table("`quantize`, 16k tokens x 2048", headers, body)] if body else []


def _preprocess_order(row: Row) -> tuple[int, int, bool]:
    return row["D"], row["N"], bool(row.get("rope"))


def stage_tables(loaded: Loaded) -> list[Table]:
    """Each stage of preprocessing, and all in one launch, against a copy."""
    rows = rows_of(loaded, "stages", impl="helion_attn")
    body = [
        [
            row["part"],
            *(labels([row["recipe"]]) if row["recipe"] else ["any"]),
            str(row["D"]),
            str(row["N"]),
            f"{row['ms']:.3f}",
            f"{row['moved_bytes'] / 2**20:.0f}",
            f"{row['moved_gbs']:.0f}",
            f"{row['copy_fraction']:.2f}",
        ]
        for row in sorted(rows, key=lambda row: (row["D"], row["N"]))
    ]
    headers = ["launch", "recipe", "D", "S", "ms", "MiB moved", "GB/s", "GB/s / a copy's"]
    return [Table("Stages of preprocessing, 16k tokens x 2048", headers, body)] if body else []
