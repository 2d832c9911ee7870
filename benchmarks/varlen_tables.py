"""The tables of sequences of different lengths."""

from __future__ import annotations

from tables import LABELS, Loaded, Row, Table, error_text, number, rows_of, values_of

#: (impl, recipe, stage) of each column.
COLUMNS = (
    ("helion_attn", "balanced", "kernel"),
    ("helion_attn", "fast", "kernel"),
    ("helion_attn_fixed", "balanced", "kernel"),
    ("helion_attn", "balanced", "e2e"),
    ("fa3_fp8", None, "kernel"),
    ("fa3_bf16", None, "kernel"),
)


def _title(impl: str, recipe: str | None, stage: str) -> str:
    name = LABELS.get(recipe or impl, impl)
    fixed = ", equal lengths" if impl == "helion_attn_fixed" else ""
    return f"{name}{fixed}{', e2e' if stage == 'e2e' else ''}"


def varlen_tables(loaded: Loaded) -> list[Table]:
    """TFLOP/s and errors by batch."""
    tables = []
    for causal in (False, True):
        rows = rows_of(loaded, "varlen", causal=causal)
        body = []
        for D, batch in values_of(rows, "D", "batch"):
            cell: dict[tuple[str, str | None, str], Row] = {
                (row["impl"], row["recipe"], row["stage"]): row
                for row in rows
                if (row["D"], row["batch"]) == (D, batch)
            }
            speeds = (number(cell.get(column, {}).get("tflops"), ".0f") for column in COLUMNS)
            errors = (error_text(cell.get(column, {}).get("error_total")) for column in (COLUMNS[0], *COLUMNS[-2:]))
            body.append([str(D), batch, *speeds, " / ".join(errors)])
        if body:
            headers = [
                "D",
                "batch",
                *(_title(*column) for column in COLUMNS),
                "total error: BALANCED / FA3 FP8 / FA3 bf16",
            ]
            tables.append(Table(f"Packed sequences, {'causal' if causal else 'full'}, TFLOP/s", headers, body))
    return tables
