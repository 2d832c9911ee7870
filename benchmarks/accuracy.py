"""Benchmarks the accuracy of every recipe and peer, and what each recipe costs.

    python benchmarks/attention.py --suite accuracy

Most of the time is compilation, so `--workers` processes measure errors, a head dim each, while this one compiles what
it then times alone. Parts, in each row's `part`:

    rmse       FlashAttention-3's outlier distribution and error measure, also with one choice of FAST changed
    inputs     every kind of input, full and causal
    long       ever more keys
    criterion  FlashAttention-3's own pass criterion, on tensors quantised elsewhere
    real       Q, K and V of a trained model
    cost       end to end and kernel time of every recipe
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

import helion_attn as ha
from benchmarks import fa3_criterion, preprocess, real_qkv
from benchmarks.lib.checks import Check, error_check, figure, worst_of
from benchmarks.lib.harness import Loaded, Results, Row, attention_flops, time_interleaved
from benchmarks.lib.peers import modelled
from benchmarks.lib.plots import COLOURS, MARKERS, PAGE_WIDTH, bars, grid, legend, length, log_axis
from benchmarks.lib.problem import (
    CHECKED_ROWS,
    Contender,
    check,
    dry_workload,
    in_fp16,
    kernel_error_budget,
    make_problem,
    others,
    ours,
    workload,
)
from benchmarks.lib.recipes import COARSE, DEFAULT, PRESETS, RECIPES, RUNGS, described
from benchmarks.lib.suite import DIMS, Block, Options, Plot, Suite, console, progress
from benchmarks.lib.tables import (
    FP8_PEERS,
    LABELS,
    SHOWN,
    Table,
    by_error,
    by_series,
    labels,
    mask,
    number,
    ratio,
    rows_of,
    series,
    series_in,
    values_of,
)
from devtools.inputs import INPUT_KINDS, SINK_SHARES
from devtools.workloads import Workload, tagged
from helion_attn.testing import error_budget, relative_error

#: FlashAttention-3's own figures, by what stands for each here. Its FP8 there has block scales and a Hadamard
#: rotation, which were not released.
PAPER = {
    "source": "FlashAttention-3, arXiv:2407.08608, section 4.3",
    "rmse": {"flash_fp16": 3.2e-4, "fa3_fp16": 1.9e-4, "fp8_tensor": 2.4e-2, "fa3_fp8": 9.1e-3},
}

#: What parts `inputs` and `long` measure.
KINDS = (*INPUT_KINDS, *SINK_SHARES, "k3x30", "k2x100q")

#: Head dims that only the pass criterion adds.
CRITERION_DIMS = (96, 192)

# --- errors ---------------------------------------------------------------------------------------


def rmse(options: Options, D: int) -> Iterator[Row]:
    """Outliers, full attention."""
    contenders = in_fp16(options) + others(options, ["fa3_bf16"])
    contenders += [Contender(name, modelled(*coarse)) for name, coarse in COARSE.items()]
    contenders += [*others(options, [*FP8_PEERS]), *ours(options, list(RECIPES))]
    on_cpu = options.device.type == "cpu"
    for w in [dry_workload(D)] if on_cpu else [workload(1, 8, S, S, D) for S in (1024, 4096)]:
        problem = make_problem(w, "outlier", options)
        for contender in contenders:
            yield check(contender, problem)[0] | {"part": "rmse"}


def inputs(options: Options, D: int) -> Iterator[Row]:
    """Every kind of input, full and causal."""
    for causal in (False, True):
        w = dry_workload(D, causal) if options.device.type == "cpu" else workload(1, 8, 4096, 4096, D, causal)
        for kind in KINDS:
            problem = make_problem(w, kind, options)
            for contender in (*ours(options, list(PRESETS)), *others(options)):
                row = check(contender, problem)[0] | {"part": "inputs"}
                if contender.recipe is not None and kind == "randn":
                    row["error_budget"] = kernel_error_budget(problem, RECIPES[contender.recipe])
                yield row


def long(options: Options, D: int) -> Iterator[Row]:
    """A few queries against ever more keys."""
    found = [w for w in tagged("long") if w.D == D]
    if options.device.type == "cpu":
        found = [workload(1, 2, 64, 256, D)]
    for w in found[:1] if options.quick else found:
        for kind in KINDS:
            problem = make_problem(w, kind, options)
            for contender in (*ours(options, [*PRESETS, *RUNGS]), *others(options)):
                yield check(contender, problem)[0] | {"part": "long"}


Part = Callable[[Options, int], Iterator[Row]]


def parts_of(options: Options) -> dict[int, tuple[Part, ...]]:
    """What is measured at each head dim: the larger first, since they take longer."""
    parts: dict[int, tuple[Part, ...]] = {
        D: (rmse, inputs, long, fa3_criterion.rows) for D in sorted(options.dims, reverse=True)
    }
    for D, part in ((D, fa3_criterion.rows) for D in CRITERION_DIMS):
        if part not in parts.get(D, ()) and (D in parts or not options.quick):
            parts[D] = (*parts.get(D, ()), part)
    parts[real_qkv.DIM] = (*parts.get(real_qkv.DIM, ()), real_qkv.rows)
    return parts


def measure_errors(options: Options, D: int) -> list[Row]:
    """All rows of one head dim."""
    return [row for part in parts_of(options)[D] for row in part(options, D)]


# --- cost -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """One shape, compiled and checked: rows without times, and by row what to time, if it is right."""

    workload: Workload
    rows: list[Row]
    runs: dict[int, Callable[[], Tensor]]


def prepare_cost(options: Options, w: Workload) -> Cost:
    """Compiles and checks every recipe."""
    cost = Cost(w, [], {})
    problem = make_problem(w, "randn", options, CHECKED_ROWS)
    q, k, v = problem.q[problem.batches, :, problem.rows], problem.k[problem.batches], problem.v[problem.batches]
    recipes = RECIPES if options.device.type == "cuda" else PRESETS  # a dry run has every recipe in part `rmse`
    for name, recipe in recipes.items() if "helion_attn" in options.impls else ():
        model = ha.reference.fp8_attention(q, k, v, recipe=recipe)
        assert isinstance(model, Tensor)
        model_error = relative_error(model, problem.expected)
        for contender in (*ours(options, [name]), *ours(options, [name], "e2e")):
            row, run = check(contender, problem)
            row["part"] = "cost"
            if run is not None and row["error_total"] <= error_budget(model_error, q.dtype, device=options.device):
                cost.runs[len(cost.rows)] = run
            elif run is not None:  # also where the error is NaN
                row["note"] = f"not timed: total error {row['error_total']:.3g}, rounding model {model_error:.3g}"
            cost.rows.append(row)
    return cost


def prepare_costs(options: Options) -> list[Cost]:
    """Every shape."""
    return [prepare_cost(options, w) for w in progress(preprocess.workloads(options), "compiling")]


# --- the suite ------------------------------------------------------------------------------------


def run(options: Options, results: Results) -> None:
    """The suite."""
    results.meta |= {"recipes": described(), "paper": PAPER}
    dims = list(parts_of(options))
    if options.workers:
        # Each process needs a CUDA context of its own, hence no fork.
        with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(measure_errors, options, D): D for D in dims}
            costs = prepare_costs(options)
            for future in progress(as_completed(futures), "errors", len(futures)):
                if (error := future.exception()) is None:
                    results.add(*future.result())
                    dims.remove(futures[future])
                else:
                    console.print(f"[red]a process failed, measuring D {futures[future]} in this one: {error!r}")
    else:
        costs = prepare_costs(options)
    for D in progress(dims, "errors"):
        results.add(*measure_errors(options, D))
    # Nothing else runs on the GPU from here on.
    for cost in progress(costs, "cost"):
        for i, ms in time_interleaved(cost.runs, options.device, options.repeats).items():
            cost.rows[i] |= {"ms": ms, "tflops": attention_flops(cost.workload) / ms / 1e9}
        results.add(*cost.rows)


# --- tables ---------------------------------------------------------------------------------------


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
    """The part of BALANCED's RMSE that P and V have.

    HYBRID has the same Q and K, and independent errors add in squares.
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
    order = sorted(values_of(rows, "D", "causal", "input"), key=lambda cell: (*cell[:2], KINDS.index(cell[2])))
    body = []
    for D, causal, kind in order:
        cell = [row for row in rows if (row["D"], row["causal"], row["input"]) == (D, causal, kind)]
        body.append([str(D), mask(causal), kind, *by_error(cell, names)])
    headers = ["D", "mask", "input", *labels(names)]
    return [Table(f"Relative error, kernel / total, {rows[0]['N']} tokens", headers, body, keys=3)] if body else []


def long_tables(loaded: Loaded) -> list[Table]:
    """Kernel and total error by number of keys, one table per kind of input."""
    tables = []
    for kind in KINDS:
        rows = rows_of(loaded, "accuracy", part="long", input=kind)
        names = series_in(rows, SHOWN)
        body = []
        for D, N in values_of(rows, "D", "N"):
            cell = [row for row in rows if (row["D"], row["N"]) == (D, N)]
            body.append([str(D), str(N), *by_error(cell, names)])
        if body:
            title = f"Relative error, kernel / total, {rows[0]['M']} queries, {kind}"
            tables.append(Table(title, ["D", "keys", *labels(names)], body, keys=2))
    return tables


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
    """What a recipe gains and costs."""

    D: int  # D, S: where
    S: int
    points: dict[str, tuple[float, float]]  # (end-to-end ms, RMSE on outliers) by recipe
    fa3_rmse: float | None  # of FlashAttention-3 in FP8, if it was measured


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


# --- plots ----------------------------------------------------------------------------------------


def input_plot(loaded: Loaded) -> Figure | None:
    """Kernel and total error by kind of input, one column per head dim."""
    rows = rows_of(loaded, "accuracy", part="inputs", causal=False)
    if not rows:
        return None
    dims, kinds = [D for (D,) in values_of(rows, "D")], kinds_in(rows)
    figure, axes = grid(2, len(dims))
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
    legend(figure, itertools.chain(*axes))
    return figure


def kinds_in(rows: list[Row]) -> list[str]:
    """The kinds of input that occur in `rows`."""
    present = {row["input"] for row in rows}
    return [kind for kind in INPUT_KINDS if kind in present]


def pareto_plot(loaded: Loaded) -> Figure | None:
    """RMSE on outlier inputs against end-to-end time, a point per preset."""
    found = pareto(loaded)
    if found is None or not found.points:
        return None
    figure, ax = plt.subplots(figsize=(PAGE_WIDTH, 3.4), layout="constrained")
    for name in (*PRESETS, *RUNGS):
        if name in found.points:
            ms, error = found.points[name]
            ax.plot(ms, error, MARKERS[name], color=COLOURS[name], markersize=9)
            ax.annotate(LABELS[name], (ms, error), (7, 5), textcoords="offset points")
    if found.fa3_rmse is not None:
        ax.axhline(found.fa3_rmse, color=COLOURS["fa3_fp8"], linestyle="--", linewidth=1.2, label="FA3 FP8, error only")
        ax.legend(loc="upper right")
    log_axis(ax, (1.0, 2.0, 5.0))
    ax.margins(x=0.18, y=0.15)
    ax.set_title(f"Lower left is better: D = {found.D}, S = {length(found.S)}")
    ax.set_xlabel("ms, from bf16 to bf16")
    ax.set_ylabel("RMSE on outliers")
    return figure


# --- bounds ---------------------------------------------------------------------------------------


def error_checks(loaded: Loaded) -> list[Check]:
    """The default's error on N(0, 1)."""
    found = []
    for D in DIMS:
        for causal in (False, True):
            rows = rows_of(loaded, "accuracy", part="inputs", D=D, causal=causal, input="randn")
            found.append(error_check("kernel error, N(0, 1)", f"S 4096, D {D}, {mask(causal)}", rows))
    return found


def rmse_checks(loaded: Loaded) -> list[Check]:
    """RMSE on outliers, and beside FlashAttention-3's."""
    found, rows = [], rows_of(loaded, "accuracy", part="rmse")
    for D, S in values_of(rows, "D", "N"):
        cell = [row for row in rows if (row["D"], row["N"]) == (D, S)]
        balanced, accurate = figure(cell, "balanced", "rmse"), figure(cell, "accurate", "rmse")
        fa3 = by_series(cell, "rmse").get("fa3_fp8")
        where = f"S {S}, D {D}"
        found += [
            Check("RMSE, outliers, BALANCED", where, balanced, 9.1e-3),
            Check("RMSE, outliers, BALANCED / FA3 FP8", where, ratio(balanced, fa3), 1.0),
            Check("RMSE, outliers, ACCURATE", where, accurate, 7e-3),
        ]
    return found


def long_checks(loaded: Loaded) -> list[Check]:
    """The error with many keys and a biased V."""
    found, rows = [], rows_of(loaded, "accuracy", part="long", input="biased_v", N=131072)
    for (D,) in values_of(rows, "D"):
        cell = [row for row in rows if row["D"] == D]
        for preset in PRESETS | RUNGS:
            worst = worst_of(figure(cell, preset, name) for name in ("error_kernel", "error_total"))
            of = "8-bit" if preset in PRESETS else "16-bit"
            name = f"kernel and total error, biased V, 131072 keys, {of} presets"
            found.append(Check(name, f"{LABELS[preset]}, D {D}", worst, 0.003))
    return found


def cost_checks(loaded: Loaded) -> list[Check]:
    """What the default costs beside FAST: from suite `speed`, and from `cost` where that has no such cell."""
    both = rows_of(loaded, "attention", stage="e2e"), rows_of(loaded, "accuracy", part="cost", stage="e2e")
    cells: dict[tuple[int, bool, int], list[Row]] = {}
    for rows in both:
        for D, causal, S in values_of(rows, "D", "causal", "N"):
            cell = [row for row in rows if (row["D"], row["causal"], row["N"]) == (D, causal, S)]
            if S >= 4096 and {DEFAULT, "fast"} <= {series(row) for row in cell}:
                cells.setdefault((D, causal, S), cell)
    return [
        Check(
            "end to end, time of BALANCED / FAST, from S 4096 on",
            f"S {S}, D {D}, {mask(causal)}",
            ratio(figure(cell, DEFAULT, "ms"), figure(cell, "fast", "ms")),
            1.05,
        )
        for (D, causal, S), cell in sorted(cells.items())
    ]


SUITE = Suite(
    "accuracy",
    run,
    {
        "accuracy": Block("accuracy", input_tables, (Plot("accuracy", "Relative error by kind of input", input_plot),)),
        "recipes": Block("accuracy", recipe_tables, shown=None),
        "pareto": Block(
            "accuracy",
            pareto_tables,
            (Plot("pareto", "RMSE on outliers against end-to-end time, by preset", pareto_plot),),
            shown=1,
        ),
        "cost": Block("accuracy", cost_tables),
        "rmse": Block("accuracy", rmse_tables),
        "long": Block("accuracy", long_tables),
        "criterion": fa3_criterion.BLOCK,
        "real": real_qkv.BLOCK,
    },
)
