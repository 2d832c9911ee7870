"""Benchmarks speed: kernel only and end to end, on FlashAttention-3's grid, beside every peer.

    python benchmarks/attention.py --suite speed

What the tensor cores can do, the speed of a large GEMM in the same run, stands beside it.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from matplotlib.figure import Figure

from benchmarks.lib.checks import Check, error_check, fastest_bf16, figure
from benchmarks.lib.harness import Loaded, Results, Row, time_interleaved
from benchmarks.lib.plots import heat_maps, length, panels_by_length
from benchmarks.lib.problem import (
    CHECKED_ROWS,
    Contender,
    dry_workload,
    make_problem,
    measure,
    others,
    ours,
)
from benchmarks.lib.recipes import DEFAULT
from benchmarks.lib.suite import Block, Options, Plot, Suite, progress
from benchmarks.lib.tables import (
    BF16_PEERS,
    E2E_PEERS,
    FP8_PEERS,
    LABELS,
    OURS,
    Table,
    by_impl,
    error_text,
    fastest,
    impls_in,
    mask,
    number,
    ratio,
    rows_of,
    values_of,
)
from devtools.workloads import Workload, tagged

#: Sequence lengths of the grid.
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

#: Bounds on the kernel's speed over the faster FP8 peer's, at S 4096 and full also 16384: a first goal. Then it leads.
SPEED_BOUNDS = {64: 1.0, 128: 0.93, 256: 0.80}

#: Bounds on the speed from bf16 to bf16 over the fastest bf16 kernel's, from S 4096 on.
E2E_BOUNDS = {128: 1.25, 256: 1.4}

# --- measurement ----------------------------------------------------------------------------------


def workloads(options: Options) -> list[Workload]:
    """16k tokens x hidden 2048, by head dim, length and mask."""
    if options.device.type == "cpu":
        return [dry_workload(D, causal) for D in options.dims for causal in (False, True)]
    # M == N: elsewhere the peers disagree on what causal means.
    found = [w for w in tagged("bench") if w.M == w.N and w.D in options.dims]
    return [w for w in found if w.M == 4096] if options.quick else found


def in_a_column(options: Options, stage: str) -> list[Contender]:
    """The other preset that users choose for speed, as an implementation of its own."""
    return [dataclasses.replace(contender, impl="fast") for contender in ours(options, ["fast"], stage)]


def contenders_of(options: Options) -> list[Contender]:
    """Our kernels, the peers, and what of both quantises, from bf16 to bf16."""
    kernels, whole = ([*ours(options, [DEFAULT], stage), *in_a_column(options, stage)] for stage in ("kernel", "e2e"))
    return [*kernels, *others(options), *whole, *others(options, stage="e2e")]


def gemm_tflops(options: Options) -> dict[str, float]:
    """TFLOP/s of PyTorch's GEMMs, 8192 x 8192 x 8192, by the dtype of what is multiplied; bf16 out.

    The FP8 one sums in the tensor core, as its fastest and as the one-level kernels do.
    """
    n = 256 if options.device.type == "cpu" else 8192
    a, b = torch.randn(2, n, n, device=options.device).bfloat16()
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=options.device)

    def fp8() -> torch.Tensor:
        # FP8 takes the second operand column-major only.
        return torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    ms = time_interleaved({"e4m3": fp8, "bf16": lambda: a @ b.t()}, options.device, options.repeats)
    return {dtype: float(f"{2 * n**3 / time / 1e9:.6g}") for dtype, time in ms.items()}


def run(options: Options, results: Results) -> None:
    """Kernel and end-to-end times; every row with its error, and no time for a wrong answer of ours."""
    results.meta["gemm_tflops"] = gemm_tflops(options)
    for w in progress(workloads(options), "speed"):
        problem = make_problem(w, "randn", options, CHECKED_ROWS)
        results.add(*measure(problem, contenders_of(options), options))


# --- tables ---------------------------------------------------------------------------------------


E2E_TITLE = "End to end from bf16 to bf16, preprocessing included, ms"


def kernel_headers(impls: list[str]) -> list[str]:
    """Headers of `kernel_figures`."""
    labels = [LABELS[impl] for impl in impls]
    return [*labels, "BALANCED / best FP8 peer", "FAST / best FP8 peer", "BALANCED's kernel error"]


def kernel_figures(cell: list[Row], impls: list[str]) -> list[str]:
    """TFLOP/s of the kernels of a cell, our ratios to the faster FP8 peer, and our error."""
    tflops, ms = by_impl(cell, "tflops"), by_impl(cell, "ms")
    peer = fastest(ms, FP8_PEERS)
    ratios = [peer / ms[impl] if peer is not None and impl in ms else None for impl in OURS]
    return [
        *(number(tflops.get(impl), ".0f") for impl in impls),
        *(number(ratio, ".2f") for ratio in ratios),
        error_text(by_impl(cell, "error_kernel").get("helion_attn")),
    ]


def speed_tables(loaded: Loaded) -> list[Table]:
    """TFLOP/s of the kernels, one table per mask."""
    tables = []
    for causal in (False, True):
        rows = rows_of(loaded, "attention", stage="kernel", causal=causal)
        impls = impls_in(rows)
        body = []
        for D, S in values_of(rows, "D", "N"):
            cell = [row for row in rows if (row["D"], row["N"]) == (D, S)]
            body.append([str(D), str(S), *kernel_figures(cell, impls)])
        if body:
            title = f"Kernel, {mask(causal)} attention, TFLOP/s"
            tables.append(Table(title, ["D", "S", *kernel_headers(impls)], body, keys=2))
    return tables


def speedups(cell: list[Row]) -> dict[str, float]:
    """From bf16 to bf16 over the fastest bf16 kernel, of what quantises."""
    best = fastest(by_impl((row for row in cell if row["stage"] == "kernel"), "ms"), BF16_PEERS)
    ms = by_impl((row for row in cell if row["stage"] == "e2e"), "ms")
    return {impl: best / ms[impl] for impl in (*OURS, "sage2") if best is not None and impl in ms}


def e2e_headers(peers: list[str]) -> list[str]:
    """Headers of `e2e_figures`."""
    labels = [LABELS[impl] for impl in (*OURS, *peers)]
    return [*labels, "BALANCED's speed-up", "FAST's", "BALANCED's total error"]


def e2e_figures(cell: list[Row], peers: list[str]) -> list[str]:
    """Milliseconds from bf16 to bf16, our speed-ups over the fastest bf16 kernel, and our error."""
    kernel = by_impl((row for row in cell if row["stage"] == "kernel"), "ms")
    e2e = [row for row in cell if row["stage"] == "e2e"]
    ms, error = by_impl(e2e, "ms"), by_impl(e2e, "error_total").get("helion_attn")
    faster = speedups(cell)
    return [
        *(number(ms.get(impl), ".3f") for impl in OURS),
        *(number((kernel if impl in BF16_PEERS else ms).get(impl), ".3f") for impl in peers),
        *(number(faster.get(impl), ".2f") for impl in OURS),
        error_text(error),
    ]


def e2e_tables(loaded: Loaded) -> list[Table]:
    """Milliseconds from bf16 to bf16. A bf16 kernel is its own end to end."""
    rows = rows_of(loaded, "attention")
    peers = [impl for impl in impls_in(rows) if impl in E2E_PEERS]
    body = []
    for causal, D, S in values_of(rows, "causal", "D", "N"):
        cell = [row for row in rows if (row["causal"], row["D"], row["N"]) == (causal, D, S)]
        body.append([mask(causal), str(D), str(S), *e2e_figures(cell, peers)])
    headers = ["mask", "D", "S", *e2e_headers(peers)]
    return [Table(E2E_TITLE, headers, body, keys=3)] if body else []


def gemm_fractions(loaded: Loaded, suite: str, rows: list[Row]) -> dict[str, float]:
    """Each implementation's TFLOP/s in a cell, kernel only, over those of the GEMM of its dtype in the same run.

    Rows with a commit of their own are of another run, whose GEMMs are not known.
    """
    peaks = loaded[suite]["meta"].get("gemm_tflops", {})
    tflops = by_impl((row for row in rows if row["stage"] == "kernel" and "commit" not in row), "tflops")
    of_dtype = {impl: peaks.get("bf16" if impl in BF16_PEERS else "e4m3") for impl in tflops}
    return {impl: tflops[impl] / peak for impl, peak in of_dtype.items() if peak}


def roofline_table(
    loaded: Loaded, suite: str, headers: list[str], cells: list[tuple[tuple[str, ...], list[Row]]]
) -> list[Table]:
    """A kernel's TFLOP/s over a GEMM's; of bf16, the fastest over the bf16 GEMM's."""
    peaks = loaded.get(suite, {}).get("meta", {}).get("gemm_tflops")
    if not peaks or not cells:
        return []
    impls = (*OURS, *FP8_PEERS)
    body = []
    for name, cell in cells:
        if not (fractions := gemm_fractions(loaded, suite, cell)):
            continue
        bf16 = max((fractions[impl] for impl in BF16_PEERS if impl in fractions), default=None)
        figures = [*(fractions.get(impl) for impl in impls), bf16]
        body.append([*name, *(number(figure, ".2f") for figure in figures)])
    title = f"Kernel over a GEMM of 8192 x 8192 x 8192: FP8 {peaks['e4m3']:.0f} TFLOP/s, bf16 {peaks['bf16']:.0f}"
    return [Table(title, [*headers, *(LABELS[impl] for impl in impls), "best bf16, over bf16"], body)]


def roofline_tables(loaded: Loaded) -> list[Table]:
    """Suite `speed` over the GEMMs of its run."""
    rows = rows_of(loaded, "attention", stage="kernel")
    cells: list[tuple[tuple[str, ...], list[Row]]] = [
        ((mask(causal), str(D), str(S)), [row for row in rows if (row["causal"], row["D"], row["N"]) == (causal, D, S)])
        for causal, D, S in values_of(rows, "causal", "D", "N")
    ]
    return roofline_table(loaded, "attention", ["mask", "D", "S"], cells)


# --- plots ----------------------------------------------------------------------------------------


def speed_plot(loaded: Loaded) -> Figure | None:
    """TFLOP/s by length."""

    def points_of(panel: list[Row]) -> dict[str, dict[int, float]]:
        return {
            impl: {row["N"]: row["tflops"] for row in panel if row["impl"] == impl and row["tflops"] is not None}
            for impl in impls_in(panel)
        }

    return panels_by_length(rows_of(loaded, "attention", stage="kernel"), points_of, "TFLOP/s")


def e2e_plot(loaded: Loaded) -> Figure | None:
    """Speed-up over the fastest bf16 kernel from bf16 to bf16, by length."""

    def points_of(panel: list[Row]) -> dict[str, dict[int, float]]:
        found: dict[str, dict[int, float]] = {}
        for (S,) in values_of(panel, "N"):
            for impl, faster in speedups([row for row in panel if row["N"] == S]).items():
                found.setdefault(impl, {})[S] = faster
        return found

    return panels_by_length(rows_of(loaded, "attention"), points_of, "speed / fastest bf16's", True, 1.0)


def heat_plot(loaded: Loaded) -> Figure | None:
    """The default's speed-up over the fastest bf16 kernel from bf16 to bf16, by head dim and length."""
    rows = rows_of(loaded, "attention")
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for causal, D, S in values_of(rows, "causal", "D", "N"):
        faster = speedups([row for row in rows if (row["causal"], row["D"], row["N"]) == (causal, D, S)])
        if "helion_attn" in faster:
            cells = panels.setdefault(mask(causal), {}).setdefault(str(D), {})
            cells[length(S)] = faster["helion_attn"]
    return heat_maps(panels, "D", "sequence length", "speed / fastest bf16's") if panels else None


def roofline_plot(loaded: Loaded) -> Figure | None:
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


# --- bounds ---------------------------------------------------------------------------------------


def kernel_checks(loaded: Loaded) -> list[Check]:
    """The kernel's speed beside the FP8 peers', and its error."""
    errors, first, every = [], [], []
    for D, bound in SPEED_BOUNDS.items():
        for causal in (False, True):
            for S in LENGTHS:
                cell = rows_of(loaded, "attention", stage="kernel", D=D, N=S, causal=causal)
                ms, where = by_impl(cell, "ms"), f"S {S}, D {D}, {mask(causal)}"
                errors.append(error_check("kernel error in the grid of speed", where, cell))
                # The bound is on the faster of both: with one missing there is nothing to judge.
                peer = fastest(ms, FP8_PEERS) if all(impl in ms for impl in FP8_PEERS) else None
                faster = ratio(peer, figure(cell, DEFAULT, "ms"))
                if S == 4096 or (S == 16384 and not causal):
                    name = f"kernel speed / faster FP8 peer's, first goal, D {D}"
                    first.append(Check(name, f"S {S}, {mask(causal)}", faster, bound, at_least=True))
                if S >= 1024:
                    name = "kernel speed / faster FP8 peer's, S 1024 to 16384"
                    every.append(Check(name, where, faster, 1.0, at_least=True))
    ratios = [check.value for check in every if check.value is not None]
    # A mean of some of the cells is another figure.
    logs = [math.log(x) for x in ratios] if len(ratios) == len(every) else []
    mean = math.exp(sum(logs) / len(logs)) if logs else None
    name = f"kernel speed / faster FP8 peer's, geometric mean of these {len(every)} cells"
    geometric = Check(name, "", mean, 1.10, at_least=True)
    return [*errors, *first, *every, geometric]


def e2e_checks(loaded: Loaded) -> list[Check]:
    """The speed from bf16 to bf16 beside bf16 kernels'."""
    every, more = [], []
    for D in SPEED_BOUNDS:
        for causal in (False, True):
            for S in (4096, 8192, 16384):
                cell = rows_of(loaded, "attention", D=D, N=S, causal=causal)
                e2e = figure([row for row in cell if row["stage"] == "e2e"], DEFAULT, "ms")
                faster = ratio(fastest_bf16(by_impl((row for row in cell if row["stage"] == "kernel"), "ms")), e2e)
                name = "end to end, speed / fastest bf16's, from S 4096 on"
                every.append(Check(name, f"S {S}, D {D}, {mask(causal)}", faster, 1.0, at_least=True))
                if D in E2E_BOUNDS:
                    more.append(Check(f"{name}, D {D}", f"S {S}, {mask(causal)}", faster, E2E_BOUNDS[D], at_least=True))
    return every + more


SUITE = Suite(
    "attention",
    run,
    {
        "speed": Block("attention", speed_tables, (Plot("speed", "TFLOP/s by sequence length", speed_plot),), shown=1),
        "e2e": Block("attention", e2e_tables, (Plot("e2e", "Speed over bf16's, by sequence length", e2e_plot),)),
        "heat": Block(
            "attention", lambda _: [], (Plot("heat", "Speed over bf16's, by head dim and length", heat_plot),)
        ),
        "roofline": Block(
            "attention",
            roofline_tables,
            (Plot("roofline", "Speed over a GEMM's, by sequence length", roofline_plot),),
        ),
    },
)
