"""Tables of result rows: how rows are found, named and written down."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable
from tabulate import tabulate

from benchmarks.lib.harness import Loaded, Row
from benchmarks.lib.recipes import PRESETS, RUNGS

#: In the order of every table and legend. Presets are `series` of their own.
LABELS = {
    "helion_attn": "BALANCED",  # the recipe of what names none
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
    "sage2": "SageAttention 2",
    "vllm_fa3": "vLLM's FA3",
    "flex": "FlexAttention",
    "sparge": "SpargeAttn",
    "cudnn_sparse_fp8": "cuDNN FP8, block-sparse",
    "cudnn_sparse_bf16": "cuDNN bf16, block-sparse",
    "sta": "STA",
    "fa3_documents": "FA3 bf16, packed",
    "fa3_fa2_bf16": "FA3's forward, FA2's backward, bf16",
    "efficient_bf16": "SDPA efficient bf16",
    "math_bf16": "SDPA math bf16",
    "fa3_fp16": "FA3 fp16",
    "flash_fp16": "FA2 fp16",
    "sdpa_bf16": "SDPA bf16",
    "allgather": "all-gather",
    "ulysses": "Ulysses",
    "ring": "ring",
    "auto": '"auto"',
    "fused": "BALANCED, fused",
    "masked": "BALANCED, fused, a quarter of the blocks",
    "blocks": "BALANCED, a quarter of the blocks",
    "tail": "BALANCED, a quarter of the blocks, a tail",
}

#: This package in the tables of speed: the default recipe, and FAST.
OURS = ("helion_attn", "fast")
FP8_PEERS = ("fa3_fp8", "cudnn_fp8")

#: The peers that hold their accuracy, since they sum P V in two levels. Shown where they are installed.
ACCURATE_PEERS = ("sage2", "vllm_fa3")
BF16_PEERS = ("fa3_bf16", "cudnn_bf16", "flash_bf16")

#: The peers that someone who holds bf16 tensors can call.
E2E_PEERS = (*BF16_PEERS, "sage2")

#: The columns of most tables of errors, where they were measured: the other bf16 kernels are as accurate as FA3's.
SHOWN = (*PRESETS, *RUNGS, *FP8_PEERS, *ACCURATE_PEERS, "fa3_bf16")

# --- rows -----------------------------------------------------------------------------------------


def rows_of(loaded: Loaded, suite: str, **wanted: Any) -> list[Row]:
    """The rows of one result file whose fields equal `wanted`; every row must have these fields."""
    rows = loaded.get(suite, {}).get("rows", [])
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


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

#: Of a page's width.
MOST_COLUMNS = 9


@dataclass(frozen=True)
class Table:
    """A table of text."""

    title: str  # above it; "" is none
    headers: list[str]  # of its columns
    body: list[list[str]]  # its lines
    keys: int = 1  # columns that say what a line is of. A page repeats them where it breaks a wide table into several.

    def columns(self) -> list[list[int]]:
        """The columns of each table that a page shows, of about as many columns each."""
        values = range(self.keys, len(self.headers))
        if len(self.headers) <= MOST_COLUMNS:
            return [[*range(len(self.headers))]]
        parts = math.ceil(len(values) / (MOST_COLUMNS - self.keys))
        ends = [math.ceil(len(values) * i / parts) for i in range(parts + 1)]
        return [[*range(self.keys), *values[start:end]] for start, end in itertools.pairwise(ends)]

    def markdown(self) -> str:
        """As GitHub renders it."""
        if not self.title:
            # A front page has few bytes: no padding.
            lines = [self.headers, [":-", *["-:"] * (len(self.headers) - 1)], *self.body]
            return "\n".join(f"|{'|'.join(line)}|" for line in lines)
        tables = []
        for columns in self.columns():
            headers, *body = ([line[i] for i in columns] for line in (self.headers, *self.body))
            align = ["right"] * len(headers)
            tables.append(tabulate(body, headers, "github", colalign=align, disable_numparse=True))
        return "\n\n".join([f"**{self.title}**", *tables])

    def rich(self) -> RichTable:
        """For a terminal."""
        table = RichTable(title=self.title, title_justify="left", header_style="bold", box=None, pad_edge=False)
        for header in self.headers:
            table.add_column(header, justify="right")
        for line in self.body:
            table.add_row(*line)
        return table


#: They quantise within, so that what their kernel adds is not known.
QUANTISES_WITHIN = ("sage2",)


def by_error(rows: Iterable[Row], names: list[str]) -> list[str]:
    """ "kernel / total" of each series in `names`."""
    rows = [row | {"error_kernel": None} if row["impl"] in QUANTISES_WITHIN else row for row in rows]
    kernel, total = by_series(rows, "error_kernel"), by_series(rows, "error_total")
    return [f"{error_text(kernel.get(name))} / {error_text(total.get(name))}" for name in names]


def number(value: float | None, spec: str) -> str:
    """A figure, or a dash where it was not measured."""
    return "-" if value is None else format(value, spec)


def speed_text(value: float | None) -> str:
    """A speed over another: not 1.00 for what is less; a dash where it was not measured."""
    return number(value, ".3f" if value is not None and 0.995 <= value < 1 else ".2f")


def error_text(value: float | None) -> str:
    """An error in as many digits as mean something, or a dash."""
    if value is None:
        return "-"
    return f"{value:.2g}" if value < 0.001 else f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


def mask(causal: bool) -> str:
    """The name of a mask."""
    return "causal" if causal else "full"


def labels(names: list[str]) -> list[str]:
    """Column headers."""
    return [LABELS.get(name, name) for name in names]
