"""Benchmarks the rungs between 16 bits and 8: the bf16 baseline, the hybrid and FP8, beside peers.

    python benchmarks/attention.py --suite ladder

The cells are those of Colfax Research's FP8 figure (FlashAttention-3's authors; forward, full attention): 16k tokens x
hidden 2048, kernel only, and the hybrid from bf16 to bf16 as well. Their table of RMSE has fp16, the hybrid and FP8.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.lib.checks import Check, fastest_bf16, figure
from benchmarks.lib.harness import Loaded, Results, Row
from benchmarks.lib.plots import panels_by_length
from benchmarks.lib.problem import (
    CHECKED_ROWS,
    Contender,
    Problem,
    dry_workload,
    grid_workload,
    in_fp16,
    make_problem,
    measure,
    oracle,
    others,
    ours,
)
from benchmarks.lib.recipes import DEFAULT, RUNGS
from benchmarks.lib.suite import Block, Options, Plot, Suite, progress
from benchmarks.lib.tables import (
    BF16_PEERS,
    FP8_PEERS,
    LABELS,
    Table,
    by_series,
    error_text,
    fastest,
    number,
    ratio,
    rows_of,
    series,
    series_in,
    values_of,
)
from benchmarks.speed import LENGTHS
from helion_attn.testing import relative_error


def pv_error(contender: Contender, problem: Problem) -> float:
    """The share of P and V: the error against the oracle on the dequantised Q and K and the unquantised V."""
    p = problem
    prepared = contender.prepare(p.q, p.k, p.v, p.workload.causal, p.workload.D**-0.5)
    assert prepared.dequantized is not None
    q, k, _ = prepared.dequantized()
    expected = oracle(q[p.batches, :, p.rows], k[p.batches], p.v[p.batches], p.workload.causal)
    return relative_error(prepared.output(prepared.run())[p.batches, :, p.rows], expected)


def run(options: Options, results: Results) -> None:
    """Every rung in every cell; a row with its error, and with its time if it ran."""
    lengths = (4096,) if options.quick else LENGTHS
    contenders = [
        *ours(options, [DEFAULT, *RUNGS]),
        *ours(options, ["hybrid"], "e2e"),
        *others(options, [*FP8_PEERS, *BF16_PEERS]),
        *in_fp16(options),
    ]
    workloads = [grid_workload(S, D) for D in options.dims for S in lengths]
    if options.device.type == "cpu":
        workloads = [dry_workload(D) for D in options.dims]
    for w in progress(workloads, "ladder"):
        problem = make_problem(w, "randn", options, CHECKED_ROWS)
        rows = measure(problem, contenders, options)
        for contender, row in zip(contenders, rows, strict=True):
            if contender.recipe is not None and contender.stage == "kernel" and "error_message" not in row:
                row["error_pv"] = pv_error(contender, problem)
        results.add(*rows)


def speed_tables(loaded: Loaded) -> list[Table]:
    """TFLOP/s of every rung, what the hybrid gains on bf16, and the errors."""
    rows = rows_of(loaded, "ladder", stage="kernel")
    names = series_in(rows)
    body = []
    for D, S in values_of(rows, "D", "N"):
        cell = [row for row in rows if (row["D"], row["N"]) == (D, S)]
        tflops, ms, pv = (by_series(cell, name) for name in ("tflops", "ms", "error_pv"))
        peer, fa3 = fastest(ms, BF16_PEERS), ms.get("fa3_bf16")
        body.append(
            [
                str(D),
                str(S),
                *(number(tflops.get(name), ".0f") for name in names),
                number(peer / ms["hybrid"] if peer and "hybrid" in ms else None, ".2f"),
                number(fa3 / ms["bf16"] if fa3 and "bf16" in ms else None, ".2f"),
                number(by_series(rows_of(loaded, "ladder", stage="e2e", D=D, N=S), "tflops").get("hybrid"), ".0f"),
                " / ".join(error_text(pv.get(name)) for name in ("balanced", "hybrid", "bf16")),
            ]
        )
    headers = ["D", "S", *(LABELS[name] for name in names), "HYBRID / best bf16 peer", "BF16 / FA3 bf16"]
    headers.append("HYBRID from bf16 to bf16")
    headers.append("error of P and V: BALANCED / HYBRID / BF16")
    return [Table("Kernel, full attention, from 8 bits to 16, TFLOP/s", headers, body, keys=2)] if body else []


def rmse_tables(loaded: Loaded) -> list[Table]:
    """RMSE of every rung, as Colfax Research's table has it."""
    rows = rows_of(loaded, "ladder", stage="kernel")
    names = series_in(rows)
    body = []
    for D, S in values_of(rows, "D", "N"):
        rmse = by_series((row for row in rows if (row["D"], row["N"]) == (D, S)), "rmse")
        body.append([str(D), str(S), *(number(rmse.get(name), ".2e") for name in names)])
    headers = ["D", "S", *(LABELS[name] for name in names)]
    return [Table("RMSE, N(0, 1), full attention, from 8 bits to 16", headers, body, keys=2)] if body else []


def plot(loaded: Loaded) -> Figure | None:
    """TFLOP/s by length, a panel for each head dim."""

    def points_of(panel: list[Row]) -> dict[str, dict[int, float]]:
        return {
            name: {row["N"]: row["tflops"] for row in panel if series(row) == name and row["tflops"] is not None}
            for name in series_in(panel)
        }

    return panels_by_length(rows_of(loaded, "ladder", stage="kernel"), points_of, "TFLOP/s")


def checks(loaded: Loaded) -> list[Check]:
    """The hybrid and the baseline beside bf16 kernels."""
    rows = rows_of(loaded, "ladder", stage="kernel")
    hybrid, bf16, errors = [], [], []
    for D, S in values_of(rows, "D", "N"):
        cell, where = [row for row in rows if (row["D"], row["N"]) == (D, S)], f"S {S}, D {D}"
        ms, pv = by_series(cell, "ms"), by_series(cell, "error_pv")
        if D >= 128 and S >= 4096:
            faster = ratio(fastest_bf16(ms), figure(cell, "hybrid", "ms"))
            name = "HYBRID, speed / fastest bf16's, D 128 and 256, from S 4096 on"
            hybrid.append(Check(name, where, faster, 1.15, at_least=True))
        faster = ratio(ms.get("fa3_bf16"), figure(cell, "bf16", "ms"))
        bf16.append(Check("BF16, speed / FA3 bf16's", where, faster, 0.85, at_least=True))
        share = ratio(figure(cell, "hybrid", "error_pv"), pv.get("balanced"))
        errors.append(Check("error of P and V, HYBRID / BALANCED", where, share, 1 / 3))
    return hybrid + bf16 + errors


SUITE = Suite(
    "ladder",
    run,
    {
        "ladder": Block(
            "ladder", speed_tables, (Plot("ladder", "TFLOP/s by sequence length, from 8 bits to 16", plot),)
        ),
        "ladder_rmse": Block("ladder", rmse_tables),
    },
)
