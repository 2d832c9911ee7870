"""Benchmarks the attention of real models, from bf16 to bf16.

    python benchmarks/attention.py --suite models

A layer's attention of video, image and language models, each row with its `model`: this package by preset, end to end
and the kernel alone, beside the bf16 kernels and, where it is installed, SageAttention 2.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor

from matplotlib.figure import Figure

from benchmarks.cells import compile_ahead
from benchmarks.lib.checks import Check
from benchmarks.lib.harness import Loaded, Results, Row
from benchmarks.lib.plots import horizontal
from benchmarks.lib.problem import CHECKED_ROWS, make_problem, measure, others, ours, workload
from benchmarks.lib.recipes import DEFAULT
from benchmarks.lib.suite import Block, Options, Plot, Suite, console, progress
from benchmarks.lib.tables import (
    BF16_PEERS,
    E2E_PEERS,
    LABELS,
    Table,
    impls_in,
    mask,
    rows_of,
)
from benchmarks.speed import e2e_figures, e2e_headers, in_a_column, speedups
from devtools.workloads import Workload

#: Least speed over the fastest bf16 kernel: of the geometric mean, and of each, which at D 64 may be lower.
MEAN_BOUNDS = {"helion_attn": 1.15, "fast": 1.19}
EACH_BOUND, EACH_BOUND_D64 = 1.0, 0.97


def grouped(B: int, H: int, H_kv: int, S: int, D: int, causal: bool = True) -> Workload:
    """As many queries as keys."""
    return dataclasses.replace(workload(B, H, S, S, D, causal), H_kv=H_kv)


MODELS: dict[str, Workload] = {
    "FLUX": grouped(1, 24, 24, 4608, 128, causal=False),
    "Wan 2.1 1.3B": grouped(1, 12, 12, 75600, 128, causal=False),
    "Wan 2.1 14B": grouped(1, 40, 40, 32760, 128, causal=False),
    "CogVideoX": grouped(1, 48, 48, 17776, 64, causal=False),
    "Llama 8B, short": grouped(1, 32, 8, 2048, 128),
    "Llama 8B": grouped(1, 32, 8, 8192, 128),
    "Llama 8B, long": grouped(1, 32, 8, 32768, 128),
    "Llama 8B, batch": grouped(4, 32, 8, 2048, 128),
    "Llama 70B": grouped(1, 64, 8, 8192, 128),
    "Gemma": grouped(1, 16, 8, 8192, 256),
    "gpt-oss": grouped(1, 64, 8, 4096, 64),
}

#: From so many keys on, an error is allowed what that of a long context is.
LONG = 32768

#: Timed rounds of more than this many scores; one takes some 50 ms.
MANY_SCORES, FEW_REPEATS = 10**10, 6


def workloads(options: Options) -> dict[str, Workload]:
    """The models; on the CPU one that stands for them."""
    if options.device.type == "cpu":
        return {"Llama 8B": grouped(1, 4, 1, 64, 64)}
    found = {name: w for name, w in MODELS.items() if w.D in options.dims}
    return dict(list(found.items())[:2]) if options.quick else found


def run(options: Options, results: Results) -> None:
    """All models."""
    found = workloads(options)
    if options.workers:
        # Each process needs a CUDA context of its own, hence no fork.
        with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
            jobs = [
                pool.submit(compile_ahead, w, recipe, options.device)
                for w in found.values()
                for recipe in (DEFAULT, "fast")
            ]
            for job in progress(jobs, "compiling"):
                if (error := job.exception()) is not None:  # it comes again below, as a row
                    console.print(f"[yellow]not compiled ahead: {error!r}")
    # Nothing else runs on the GPU from here on.
    for name, w in progress(found.items(), "models"):
        problem = make_problem(w, "randn", options, CHECKED_ROWS)
        contenders = [
            x for stage in ("kernel", "e2e") for x in (*ours(options, [DEFAULT], stage), *in_a_column(options, stage))
        ]
        contenders += [x for x in others(options) if x.impl in BF16_PEERS]
        contenders += others(options, stage="e2e")
        long = w.B * w.H * w.M * w.N > MANY_SCORES
        repeats = min(options.repeats, FEW_REPEATS) if long else options.repeats
        rows = measure(problem, contenders, dataclasses.replace(options, repeats=repeats))
        results.add(*(row | {"model": name} for row in rows))


def cells_of(loaded: Loaded) -> dict[str, list[Row]]:
    """Rows by model."""
    names = dict.fromkeys(row["model"] for row in rows_of(loaded, "models"))
    return {name: rows_of(loaded, "models", model=name) for name in names}


def tables(loaded: Loaded) -> list[Table]:
    """Milliseconds from bf16 to bf16."""
    rows = rows_of(loaded, "models")
    peers = [impl for impl in impls_in(rows) if impl in E2E_PEERS]
    body = []
    for name, cell in cells_of(loaded).items():
        row = cell[0]
        heads = str(row["H"]) if row["H"] == row["H_kv"] else f"{row['H']}:{row['H_kv']}"
        shape = [str(row["B"]), heads, str(row["D"]), str(row["N"]), mask(row["causal"])]
        body.append([name, *shape, *e2e_figures(cell, peers)])
    headers = ["model", "B", "heads", "D", "S", "mask", *e2e_headers(peers)]
    return [Table("Attention of a layer, from bf16 to bf16, ms", headers, body)] if body else []


def plot(loaded: Loaded) -> Figure | None:
    """Speed over the fastest bf16 kernel."""
    groups = {}
    for name, cell in cells_of(loaded).items():
        groups[f"{name}\nD {cell[0]['D']}, S {cell[0]['N']}, {mask(cell[0]['causal'])}"] = speedups(cell)
    return horizontal(groups, "speed-up over the fastest bf16 attention, quantising included", 1.0)


def checks(loaded: Loaded) -> list[Check]:
    """The speed from bf16 to bf16 beside bf16 kernels'."""
    found = {name: speedups(cell) for name, cell in cells_of(loaded).items()}
    checked = []
    for impl, bound in MEAN_BOUNDS.items():
        each = {name: of.get(impl) for name, of in found.items()}
        measured = [x for x in each.values() if x is not None]
        if len(measured) < len(each) or not each:
            continue
        mean = statistics.geometric_mean(measured)
        checked.append(Check(f"models, speed / fastest bf16's, {LABELS[impl]}, mean", "", mean, bound, at_least=True))
        for model, faster in each.items():
            narrow = MODELS[model].D == 64
            name = f"models, speed / fastest bf16's{', D 64' if narrow else ''}"
            least = EACH_BOUND_D64 if narrow else EACH_BOUND
            checked.append(Check(name, f"{model}, {LABELS[impl]}", faster, least, at_least=True))
    return checked


PLOT = Plot("models", "Speed over bf16's, by model", plot)
SUITE = Suite("models", run, {"models": Block("models", tables, (PLOT,), shown=1)})
