"""The tables of the rungs between 16 bits and 8, and of large head dims."""

from __future__ import annotations

from tables import (
    BF16_PEERS,
    LABELS,
    Loaded,
    Row,
    Table,
    by_impl,
    by_series,
    error_text,
    fastest,
    impls_in,
    number,
    rows_of,
    series_in,
    values_of,
)


def ladder_tables(loaded: Loaded) -> list[Table]:
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
    return [Table("Kernel, full attention, from 8 bits to 16, TFLOP/s", headers, body)] if body else []


def ladder_rmse_tables(loaded: Loaded) -> list[Table]:
    """RMSE of every rung, as Colfax Research's table has it."""
    rows = rows_of(loaded, "ladder", stage="kernel")
    names = series_in(rows)
    body = []
    for D, S in values_of(rows, "D", "N"):
        rmse = by_series((row for row in rows if (row["D"], row["N"]) == (D, S)), "rmse")
        body.append([str(D), str(S), *(number(rmse.get(name), ".2e") for name in names)])
    headers = ["D", "S", *(LABELS[name] for name in names)]
    return [Table("RMSE, N(0, 1), full attention, from 8 bits to 16", headers, body)] if body else []


def of_large_d(loaded: Loaded, square: bool) -> list[Row]:
    """FFPA's cells, with D = D_v, or those of other pairs."""
    return [row for row in rows_of(loaded, "large_d") if (row["D"] == row["D_v"]) == square]


def large_d_tables(loaded: Loaded) -> list[Table]:
    """Time and TFLOP/s of FFPA's cells, and a table for each pair of D and D_v."""
    parts: dict[str, list[Row]] = {}
    for row in [*of_large_d(loaded, True), *of_large_d(loaded, False)]:
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
                    "causal" if causal else "full",
                    *(f"{number(ms.get(impl), '.2f')} ({number(tflops.get(impl), '.0f')})" for impl in impls),
                    number(best / mine if best and mine else None, ".2f"),
                    error_text(by_impl(cell, "error_kernel").get("helion_attn")),
                ]
            )
        headers = ["D", "mask", *(LABELS[impl] for impl in impls), "best peer / ours", "our kernel error"]
        tables.append(Table(f"Kernel, {title}, ms (TFLOP/s)", headers, body))
    return tables
