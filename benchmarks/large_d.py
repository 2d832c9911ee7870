"""Benchmarks head dims that other FP8 attention kernels do not have.

FFPA's comparison (https://github.com/xlite-dev/ffpa-attn): B 1, H 48, N 8192, D 320..1024, against every backend of
PyTorch's SDPA that runs in bf16. Then pairs of D and D_v: DeepSeek's prefill, 192/128, and 64/128, B 1, H 16, N 16384,
against FlashAttention-3; and absorbed MLA, 576/512, 16 heads on one KV head, N 8192, against SDPA.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from torch.nn.attention import SDPBackend

from benchmarks.lib.checks import Check, error_check, figure
from benchmarks.lib.harness import Loaded, Results, Row
from benchmarks.lib.peers import PACKAGES, Prepare, available, cudnn_bf16, fa3_16bit, fa3_fp8, flash_16bit, sdpa
from benchmarks.lib.plots import PAGE_WIDTH, bars, legend
from benchmarks.lib.problem import Contender, make_problem, measure, ours, workload
from benchmarks.lib.recipes import DEFAULT
from benchmarks.lib.suite import Block, Options, Plot, Suite, progress
from benchmarks.lib.tables import (
    LABELS,
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
from devtools.workloads import Workload
from helion_attn.configs import SUPPORTED_D

#: FFPA's, where none above 256 is asked for.
DIMS = (320, 384, 448, 512, 576, 640, 768, 1024)

#: Query rows that are checked against the oracle.
CHECKED_ROWS = 16

SDPA: dict[str, Prepare] = {
    "efficient_bf16": functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION, "efficient_bf16"),
    "math_bf16": functools.partial(sdpa, SDPBackend.MATH, "math_bf16"),
    "flash_bf16": flash_16bit,
    "cudnn_bf16": cudnn_bf16,
}
PREFILL: dict[str, Prepare] = {"fa3_fp8": fa3_fp8, "fa3_bf16": fa3_16bit, "cudnn_bf16": cudnn_bf16}


def cells(options: Options) -> list[tuple[Workload, dict[str, Prepare]]]:
    """The shapes, and who else runs on them."""
    if options.device.type == "cpu":
        return [
            (workload(1, 1, 32, 80, 320, True), {}),
            (replace(workload(1, 1, 32, 80, 192, True), D_v=128), {}),
            (replace(workload(1, 1, 32, 80, 64, True), D_v=128), {}),
            (replace(workload(1, 2, 32, 80, 576, True), D_v=512, H_kv=1), {}),
        ]
    dims = [D for D in options.dims if SUPPORTED_D[-1] < D] or DIMS
    found = [(workload(1, 48, 8192, 8192, D, causal), SDPA) for D in dims for causal in (False, True)]
    for causal in (False, True):
        found += [(replace(workload(1, 16, 16384, 16384, D, causal), D_v=128), PREFILL) for D in (192, 64)]
        found.append((replace(workload(1, 16, 8192, 8192, 576, causal), D_v=512, H_kv=1), SDPA))
    return found


def run(options: Options, results: Results) -> None:
    """Kernel times; every row with its error, and no time for a wrong answer of ours."""
    runnable, _ = available(options.device)
    for w, peers in progress(cells(options), "large_d"):
        problem = make_problem(w, "randn", options, CHECKED_ROWS)
        wanted = [name for name in peers if name in runnable or name not in PACKAGES]
        contenders = [*ours(options, [DEFAULT]), *(Contender(name, peers[name]) for name in wanted)]
        results.add(*measure(problem, contenders, options))


def rows_by_pair(loaded: Loaded, square: bool) -> list[Row]:
    """FFPA's cells, with D = D_v, or those of other pairs."""
    return [row for row in rows_of(loaded, "large_d") if (row["D"] == row["D_v"]) == square]


def tables(loaded: Loaded) -> list[Table]:
    """Time and TFLOP/s of FFPA's cells, and a table for each pair of D and D_v."""
    parts: dict[str, list[Row]] = {}
    for row in [*rows_by_pair(loaded, True), *rows_by_pair(loaded, False)]:
        heads = row["H"] if row["H"] == row["H_kv"] else f"{row['H']}:{row['H_kv']}"
        pair = "" if row["D"] == row["D_v"] else f"D {row['D']}, D_v {row['D_v']}, "
        parts.setdefault(f"{pair}B {row['B']}, H {heads}, N {row['N']}", []).append(row)
    tables = []
    for title, rows in parts.items():
        impls = [impl for impl in impls_in(rows) if any(row["impl"] == impl and row["ms"] for row in rows)]
        body = []
        for D, causal in values_of(rows, "D", "causal"):
            cell = [row for row in rows if (row["D"], row["causal"]) == (D, causal)]
            ms, tflops = by_impl(cell, "ms"), by_impl(cell, "tflops")
            best, mine = fastest(ms, [impl for impl in impls if impl != "helion_attn"]), ms.get("helion_attn")
            body.append(
                [
                    str(D),
                    mask(causal),
                    *(f"{number(ms.get(impl), '.2f')} ({number(tflops.get(impl), '.0f')})" for impl in impls),
                    number(best / mine if best and mine else None, ".2f"),
                    error_text(by_impl(cell, "error_kernel").get("helion_attn")),
                ]
            )
        headers = ["D", "mask", *(LABELS[impl] for impl in impls), "best peer / ours", "our kernel error"]
        tables.append(Table(f"Kernel, {title}, ms (TFLOP/s)", headers, body))
    return tables


def plot(loaded: Loaded) -> Figure | None:
    """TFLOP/s by head dim, a panel for each mask."""
    rows = [row for row in rows_by_pair(loaded, square=True) if row["tflops"] is not None]
    if not rows:
        return None
    masks, dims = values_of(rows, "causal"), [D for (D,) in values_of(rows, "D")]
    figure, panels = plt.subplots(
        1, len(masks), figsize=(PAGE_WIDTH, 3.1), squeeze=False, layout="constrained", sharey=True
    )
    for (causal,), ax in zip(masks, panels[0], strict=True):
        panel = [row for row in rows if row["causal"] == causal]
        heights = {
            impl: [by_impl((row for row in panel if row["D"] == D), "tflops").get(impl) for D in dims]
            for impl in impls_in(panel)
        }
        bars(ax, [str(D) for D in dims], heights)
        ax.set_title(mask(causal))
        ax.set_xlabel("head dim")
    panels[0][0].set_ylabel("TFLOP/s")
    legend(figure, panels[0])
    return figure


def checks(loaded: Loaded) -> list[Check]:
    """Head dims above 256 beside SDPA, 192/128 beside FA3."""
    found = []
    square = rows_by_pair(loaded, square=True)
    for D, causal in values_of(square, "D", "causal"):
        cell = [row for row in square if (row["D"], row["causal"]) == (D, causal)]
        ms, where = by_impl(cell, "ms"), f"D {D}, {mask(causal)}"
        ms.pop("helion_attn", None)
        mine = figure(cell, DEFAULT, "ms")
        found += [
            error_check("kernel error, D > 256", where, cell),
            Check(
                "speed / SDPA efficient's, D > 256", where, ratio(ms.get("efficient_bf16"), mine), 3.0, at_least=True
            ),
            Check("speed / fastest SDPA's, D > 256", where, ratio(fastest(ms, ms), mine), 1.0, at_least=True),
        ]
        if D == 512 and not causal:
            tflops = figure(cell, DEFAULT, "tflops")
            found.append(Check("TFLOP/s, D 512, full", "", tflops, 600, at_least=True))
    prefill = [row for row in rows_by_pair(loaded, square=False) if (row["D"], row["D_v"]) == (192, 128)]
    for (causal,) in values_of(prefill, "causal"):
        cell = [row for row in prefill if row["causal"] == causal]
        found.append(error_check("kernel error, 192/128", mask(causal), cell))
        if causal:
            faster = ratio(by_impl(cell, "ms").get("fa3_fp8"), figure(cell, DEFAULT, "ms"))
            found.append(Check("speed / FA3 FP8's, 192/128, causal", "", faster, 0.9, at_least=True))
    return found


SUITE = Suite("large_d", run, {"large_d": Block("large_d", tables, (Plot("large_d", "TFLOP/s by head dim", plot),))})
