"""Rows of the result files, and the tables made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import DEFAULT
from rich.table import Table as RichTable
from tabulate import tabulate

Row = dict[str, Any]
Loaded = dict[str, Row]  # suite file -> {"meta": ..., "rows": ...}

#: In the order of every table and legend. Presets are `series` of their own.
LABELS = {
    "helion_attn": "helion_attn",
    "fast": "FAST",
    "balanced": "BALANCED",
    "accurate": "ACCURATE",
    "hybrid": "HYBRID",
    "bf16": "BF16",
    "fp8_tensor": "FP8, a scale per tensor",
    "fa3_fp8": "FA3 FP8",
    "cudnn_fp8": "cuDNN FP8",
    "fa3_bf16": "FA3 bf16",
    "cudnn_bf16": "cuDNN bf16",
    "flash_bf16": "FA2 bf16",
    "efficient_bf16": "SDPA efficient bf16",
    "math_bf16": "SDPA math bf16",
    "fa3_fp16": "FA3 fp16",
    "flash_fp16": "FA2 fp16",
}

#: This package in the tables of speed: the default recipe, and FAST.
OURS = ("helion_attn", "fast")
FP8_PEERS = ("fa3_fp8", "cudnn_fp8")
BF16_PEERS = ("fa3_bf16", "cudnn_bf16", "flash_bf16")


# --- rows -----------------------------------------------------------------------------------------


def load(folder: Path) -> Loaded:
    """The result files in `folder`, by name."""
    loaded: Loaded = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        for row in content["rows"]:
            for name in ("error_kernel", "error_total", "rmse", "max_error", "ratio"):
                if isinstance(row.get(name), str):  # "nan" and "inf", which JSON cannot hold as numbers
                    row[name] = float(row[name])
        loaded[path.stem] = content
    return loaded


def rows_of(loaded: Loaded, suite: str, **wanted: Any) -> list[Row]:
    """The rows of one suite whose fields equal `wanted`."""
    rows = loaded.get(suite, {}).get("rows", [])
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def by_impl(rows: Iterable[Row], value: str) -> dict[str, float]:
    """One field by implementation, where it was measured."""
    return {row["impl"]: row[value] for row in rows if row.get(value) is not None}


def series(row: Row) -> str:
    """What a line or a column stands for: the recipe of a row of ours, the implementation of another."""
    return row["recipe"] if row["impl"] == "helion_attn" else row["impl"]


def by_series(rows: Iterable[Row], value: str) -> dict[str, float]:
    """One field by `series`, where it was measured."""
    return {series(row): row[value] for row in rows if row.get(value) is not None}


def series_in(rows: Iterable[Row], order: Iterable[str] = LABELS) -> list[str]:
    """The series that occur in `rows` and in `order`."""
    present = {series(row) for row in rows}
    return [name for name in order if name in present]


def unroped_default(rows: Iterable[Row]) -> list[Row]:
    """Preprocessing with the default recipe and without RoPE, and the rows without a recipe."""
    return [row for row in rows if row["recipe"] in (None, DEFAULT) and not row.get("rope")]


def values_of(rows: Iterable[Row], *names: str) -> list[tuple[Any, ...]]:
    """The distinct values of some fields, sorted."""
    return sorted({tuple(row[name] for name in names) for row in rows})


def impls_in(rows: Sequence[Row]) -> list[str]:
    """The known implementations that occur in `rows`, in the order of `LABELS`."""
    present = {row["impl"] for row in rows}
    return [impl for impl in LABELS if impl in present]


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Their quotient, None where one was not measured."""
    return None if numerator is None or denominator is None else numerator / denominator


def fastest(times: dict[str, float], impls: Iterable[str]) -> float | None:
    """The least time among `impls`."""
    return min((times[impl] for impl in impls if impl in times), default=None)


# --- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A titled table of text."""

    title: str
    headers: list[str]
    body: list[list[str]]

    def markdown(self) -> str:
        """As GitHub renders it."""
        align = ["right"] * len(self.headers)
        table = tabulate(self.body, self.headers, "github", colalign=align, disable_numparse=True)
        return f"**{self.title}**\n\n{table}"

    def rich(self) -> RichTable:
        """For a terminal."""
        table = RichTable(title=self.title, title_justify="left", header_style="bold", box=None, pad_edge=False)
        for header in self.headers:
            table.add_column(header, justify="right")
        for line in self.body:
            table.add_row(*line)
        return table


def by_error(rows: Iterable[Row], names: list[str]) -> list[str]:
    """ "kernel / total" of each series in `names`."""
    rows = list(rows)
    kernel, total = by_series(rows, "error_kernel"), by_series(rows, "error_total")
    return [f"{error_text(kernel.get(name))} / {error_text(total.get(name))}" for name in names]


def number(value: float | None, spec: str) -> str:
    """A figure, or a dash where it was not measured."""
    return "-" if value is None else format(value, spec)


def error_text(value: float | None) -> str:
    """An error in as many digits as mean something, or a dash."""
    if value is None:
        return "-"
    return f"{value:.2g}" if value < 0.001 else f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


def kernel_headers(impls: list[str]) -> list[str]:
    """Of `kernel_figures`."""
    labels = [LABELS[impl] for impl in impls]
    return [*labels, "ours / best FP8 peer", "FAST / best FP8 peer", "our kernel error"]


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
            title = f"Kernel, {'causal' if causal else 'full'} attention, TFLOP/s"
            tables.append(Table(title, ["D", "S", *kernel_headers(impls)], body))
    return tables


def e2e_headers(peers: list[str]) -> list[str]:
    """Of `e2e_figures`."""
    labels = [LABELS[impl] for impl in (*OURS, *peers)]
    return [*labels, "speed-up", "FAST's speed-up", "our total error"]


def e2e_figures(cell: list[Row], peers: list[str]) -> list[str]:
    """Milliseconds from bf16 to bf16, our speed-ups over the fastest of `peers`, and our error."""
    kernel = by_impl((row for row in cell if row["stage"] == "kernel"), "ms")
    e2e = [row for row in cell if row["stage"] == "e2e"]
    ms, error = by_impl(e2e, "ms"), by_impl(e2e, "error_total").get("helion_attn")
    best = fastest(kernel, peers)
    speedups = [best / ms[impl] if best is not None and impl in ms else None for impl in OURS]
    return [
        *(number(ms.get(impl), ".3f") for impl in OURS),
        *(number(kernel.get(impl), ".3f") for impl in peers),
        *(number(speedup, ".2f") for speedup in speedups),
        error_text(error),
    ]


def e2e_tables(loaded: Loaded) -> list[Table]:
    """Milliseconds from bf16 to bf16. A bf16 kernel is its own end to end."""
    rows = rows_of(loaded, "attention")
    peers = [impl for impl in impls_in(rows) if impl in BF16_PEERS]
    body = []
    for causal, D, S in values_of(rows, "causal", "D", "N"):
        cell = [row for row in rows if (row["causal"], row["D"], row["N"]) == (causal, D, S)]
        body.append(["causal" if causal else "full", str(D), str(S), *e2e_figures(cell, peers)])
    headers = ["mask", "D", "S", *e2e_headers(peers)]
    return [Table("End to end from bf16 to bf16, preprocessing included, ms", headers, body)] if body else []


def preprocess_tables(loaded: Loaded) -> list[Table]:
    """Time of `quantize` and memory of `attention`."""
    rows = unroped_default(rows_of(loaded, "preprocess"))
    body = []
    for D, S in values_of(rows, "D", "N"):
        cell = [row for row in rows if (row["D"], row["N"]) == (D, S)]
        ms, gbs = (by_impl((row for row in cell if row["stage"] == "preprocess"), name) for name in ("ms", "gbs"))
        ratio = by_impl(cell, "copy_ratio").get("helion_attn")
        extra, packed = (by_impl(cell, name).get("helion_attn") for name in ("peak_extra_bytes", "packed_bytes"))
        body.append(
            [
                str(D),
                str(S),
                number(ms.get("helion_attn"), ".3f"),
                number(ms.get("copy"), ".3f"),
                number(ratio, ".2f"),
            ]
            + [number(gbs.get(impl), ".0f") for impl in ("helion_attn", "copy")]
            + [number(None if x is None else x / 2**20, ".1f") for x in (extra, packed)]
        )
    headers = ["D", "S", "quantize, ms", "copy, ms", "ratio", "quantize, GB/s", "copy, GB/s"]
    headers += ["attention's extra memory, MiB", "packed Q, K, V, MiB"]
    return [Table("Preprocessing Q, K and V", headers, body)] if body else []
