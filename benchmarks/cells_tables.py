"""The tables of the cells beside the grid of suite `speed`, of the roofline, and of the ablation."""

from __future__ import annotations

from accuracy_tables import mask
from tables import (
    BF16_PEERS,
    FP8_PEERS,
    LABELS,
    OURS,
    Loaded,
    Row,
    Table,
    by_impl,
    e2e_figures,
    e2e_headers,
    error_text,
    impls_in,
    kernel_figures,
    kernel_headers,
    number,
    rows_of,
    values_of,
)

#: What makes a cell of its own.
CELL = ("part", "D", "B", "H", "H_kv", "N", "causal")


def cells_of(rows: list[Row]) -> list[tuple[tuple[str, ...], list[Row]]]:
    """Rows by cell, in the order of the run: what names it, and its rows."""
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        part, D, B, H, H_kv, S, causal = (row[name] for name in CELL)
        heads = str(H) if H_kv == H else f"{H}:{H_kv}"
        cells.setdefault((part, str(D), str(B), heads, str(S), mask(causal)), []).append(row)
    return list(cells.items())


CELL_HEADERS = ["cell", "D", "B", "heads", "S", "mask"]


def cells_tables(loaded: Loaded) -> list[Table]:
    """TFLOP/s of the kernels, and milliseconds from bf16 to bf16."""
    rows = rows_of(loaded, "cells")
    impls = impls_in([row for row in rows if row["stage"] == "kernel"])
    peers = [impl for impl in impls if impl in BF16_PEERS]
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
        Table("Kernel, TFLOP/s", [*CELL_HEADERS, *kernel_headers(impls), "FA3 FP8's / cuDNN FP8's"], kernel),
        Table("End to end from bf16 to bf16, preprocessing included, ms", [*CELL_HEADERS, *e2e_headers(peers)], e2e),
        *_roofline(loaded, "cells", CELL_HEADERS, cells_of(rows)),
    ]


# --- roofline -------------------------------------------------------------------------------------


def gemm_fractions(loaded: Loaded, suite: str, rows: list[Row]) -> dict[str, float]:
    """Of each implementation in a cell: its kernel's TFLOP/s over those of the GEMM of its dtype, in the same run.

    Rows with a commit of their own are of another run, whose GEMMs are not known.
    """
    peaks = loaded[suite]["meta"].get("gemm_tflops", {})
    tflops = by_impl((row for row in rows if row["stage"] == "kernel" and "commit" not in row), "tflops")
    of_dtype = {impl: peaks.get("bf16" if impl in BF16_PEERS else "e4m3") for impl in tflops}
    return {impl: tflops[impl] / peak for impl, peak in of_dtype.items() if peak}


def _roofline(
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
    return _roofline(loaded, "attention", ["mask", "D", "S"], cells)


# --- ablation -------------------------------------------------------------------------------------


def ablation_tables(loaded: Loaded) -> list[Table]:
    """TFLOP/s of the kernel with one step undone, and what the compiler says of it."""
    rows = rows_of(loaded, "ablation")
    shipped = {row["D"]: row["ms"] for row in rows if row["variant"] == "shipped"}
    body = []
    for row in rows:
        base = shipped.get(row["D"])
        body.append(
            [
                str(row["D"]),
                row["variant"],
                number(row["tflops"], ".0f"),
                number(base / row["ms"] if base and row["ms"] else None, ".2f"),
                error_text(row["error_kernel"]),
                *(number(row.get(name), "d") for name in ("registers", "spills", "shuffles", "ctas_per_sm")),
            ]
        )
    headers = ["D", "kernel", "TFLOP/s", "/ shipped", "kernel error", "registers", "spills", "shuffles"]
    headers.append("programs an SM")
    return [Table("FAST with one thing changed, kernel, full attention", headers, body)] if body else []
