"""Benchmarks shapes beside the grid of suite `speed`: grouped queries, odd lengths, 128k keys, Colfax Research's cells.

    python benchmarks/attention.py --suite cells

Kernel only and from bf16 to bf16, beside the same peers, and beside the GEMMs of the same run.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.lib.checks import Check, figure
from benchmarks.lib.harness import Loaded, Results, Row, synchronize
from benchmarks.lib.peers import helion_attn_e2e
from benchmarks.lib.problem import CHECKED_ROWS, make_problem, measure, workload
from benchmarks.lib.recipes import DEFAULT, RECIPES
from benchmarks.lib.suite import Block, Options, Suite, console, progress
from benchmarks.lib.tables import (
    E2E_PEERS,
    FP8_PEERS,
    LABELS,
    Table,
    by_impl,
    by_series,
    error_text,
    fastest,
    impls_in,
    mask,
    ratio,
    rows_of,
    series,
    values_of,
)
from benchmarks.speed import (
    E2E_TITLE,
    contenders_of,
    e2e_figures,
    e2e_headers,
    gemm_tflops,
    kernel_figures,
    kernel_headers,
    roofline_table,
)
from devtools.workloads import BENCH_HIDDEN, BENCH_TOKENS, Workload

#: A long context, of one sequence.
LONG = 131072

#: Lengths that are multiples of a block, and neighbours that are not; the last is Wan 2.1's at 480p.
ODD_LENGTHS = ((4096, 4097), (8192, 8191), (75648, 75600))

#: Timed rounds of a long context, at most: one takes a second.
LONG_REPEATS = 5

#: Bounds on the speed of grouped queries over the faster FP8 peer's.
GROUPED_BOUNDS = {"fast": 1.0, DEFAULT: 0.97}


def workloads(options: Options) -> dict[str, list[Workload]]:
    """The cells by what they are there for. As many queries as keys."""
    if options.device.type == "cpu":
        return {"GQA": [dataclasses.replace(workload(1, 4, 128, 128, 64, True), H_kv=1)]}
    found = {
        # The heads of Llama 3 8B and 70B.
        "GQA": [
            dataclasses.replace(workload(1, H, S, S, 128, causal), H_kv=8)
            for causal in (False, True)
            for H in (32, 64)
            for S in (8192, 32768)
        ],
        "lengths": [workload(1, 16, S, S, 128) for pair in ODD_LENGTHS for S in pair],
        "128k": [workload(1, BENCH_HIDDEN // D, LONG, LONG, D, True) for D in (128, 256)],
        # The cells of their FP8 FlashAttention-2 with the most TFLOP/s.
        "Colfax": [workload(B, 8, S, S, 256) for B, S in ((4, 8448), (2, 16896))],
    }
    found = {part: [w for w in ws if w.D in options.dims] for part, ws in found.items()}
    return {part: ws[:1] for part, ws in found.items()} if options.quick else found


def compile_ahead(w: Workload, recipe: str, device: torch.device) -> None:
    """Compile all that `w` needs into Triton's disk cache."""
    heads = (w.H, w.H_kv, w.H_kv)
    q, k, v = (torch.zeros(w.B, n, w.N, w.D, dtype=torch.bfloat16, device=device) for n in heads)
    helion_attn_e2e(RECIPES[recipe])(q, k, v, w.causal, w.D**-0.5).run()
    synchronize(device)


def compile_all(found: Sequence[Workload], recipes: Sequence[str], options: Options) -> None:
    """Compile all that workloads need, in processes beside this one; nothing else runs on the GPU afterwards."""
    if not options.workers:
        return
    # Each process needs a CUDA context of its own, hence no fork.
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_ahead, w, recipe, options.device) for w in found for recipe in recipes]
        for job in progress(jobs, "compiling"):
            if (error := job.exception()) is not None:  # it comes again later, as a row
                console.print(f"[yellow]not compiled ahead: {error!r}")


def run(options: Options, results: Results) -> None:
    """As `speed.run`."""
    found = [(part, w) for part, ws in workloads(options).items() for w in ws]
    compile_all([w for _, w in found], (DEFAULT, "fast"), options)
    results.meta["gemm_tflops"] = gemm_tflops(options)
    for part, w in progress(found, "cells"):
        problem = make_problem(w, "randn", options, CHECKED_ROWS)
        repeats = min(options.repeats, LONG_REPEATS) if w.N > BENCH_TOKENS else options.repeats
        rows = measure(problem, contenders_of(options), dataclasses.replace(options, repeats=repeats))
        results.add(*(row | {"part": part} for row in rows))


#: What makes a cell of its own.
CELL = ("part", "D", "B", "H", "H_kv", "N", "causal")

CELL_HEADERS = ["cell", "shape"]


def cells_of(rows: list[Row]) -> list[tuple[tuple[str, ...], list[Row]]]:
    """Rows by cell, in the order of the run: what names it, and its rows."""
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        part, D, B, H, H_kv, S, causal = (row[name] for name in CELL)
        heads = str(H) if H_kv == H else f"{H}:{H_kv}"
        shape = f"D {D}, {B} x {S}, {heads} heads, {mask(causal)}"
        cells.setdefault((part, shape), []).append(row)
    return list(cells.items())


def tables(loaded: Loaded) -> list[Table]:
    """TFLOP/s of the kernels, and milliseconds from bf16 to bf16."""
    rows = rows_of(loaded, "cells")
    impls = impls_in([row for row in rows if row["stage"] == "kernel"])
    peers = [impl for impl in impls if impl in E2E_PEERS]
    kernel, e2e = [], []
    for name, cell in cells_of(rows):
        launched = [row for row in cell if row["stage"] == "kernel"]
        errors = by_impl(launched, "error_kernel")
        of_peers = " / ".join(error_text(errors.get(impl)) for impl in FP8_PEERS)
        kernel.append([*name, *kernel_figures(launched, impls), of_peers])
        e2e.append([*name, *e2e_figures(cell, peers)])
    if not rows:
        return []
    return [
        Table("Kernel, TFLOP/s", [*CELL_HEADERS, *kernel_headers(impls), "FA3 FP8's / cuDNN FP8's"], kernel, keys=2),
        Table(E2E_TITLE, [*CELL_HEADERS, *e2e_headers(peers)], e2e, keys=2),
        *roofline_table(loaded, "cells", CELL_HEADERS, cells_of(rows)),
    ]


def colfax_checks(loaded: Loaded) -> list[Check]:
    """The speed in Colfax Research's cells."""
    return [
        Check("TFLOP/s, Colfax's cells, D 256", f"S {row['N']}", figure([row], DEFAULT, "tflops"), 1100, at_least=True)
        for row in rows_of(loaded, "cells", part="Colfax", stage="kernel")
        if series(row) == DEFAULT
    ]


def grouped_checks(loaded: Loaded) -> list[Check]:
    """Grouped queries beside the faster FP8 peer, by preset."""
    found = []
    rows = rows_of(loaded, "cells", part="GQA", stage="kernel")
    for H, S, causal in values_of(rows, "H", "N", "causal"):
        cell = [row for row in rows if (row["H"], row["N"], row["causal"]) == (H, S, causal)]
        ms = by_series(cell, "ms")
        for name, bound in GROUPED_BOUNDS.items():
            faster = ratio(fastest(ms, FP8_PEERS), figure(cell, name, "ms"))
            promise = f"grouped queries, D 128, {LABELS[name]}, speed / faster FP8 peer's"
            found.append(Check(promise, f"{H} heads, S {S}, {mask(causal)}", faster, bound, at_least=True))
    return found


def length_checks(loaded: Loaded) -> list[Check]:
    """An odd length's TFLOP/s over its neighbour's."""
    rows = rows_of(loaded, "cells", part="lengths", stage="kernel")
    tflops = {S: figure([row for row in rows if row["N"] == S], DEFAULT, "tflops") for (S,) in values_of(rows, "N")}
    return [
        Check("odd length, speed / its neighbour's", f"S {odd}", ratio(tflops.get(odd), tflops.get(even)), 0.98, True)
        for even, odd in ODD_LENGTHS
        if odd in tflops
    ]


SUITE = Suite("cells", run, {"cells": Block("cells", tables)})
