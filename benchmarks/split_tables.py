"""The table of the split suite."""

from __future__ import annotations

from tables import Loaded, Table, by_impl, error_text, number, rows_of, values_of


def split_tables(loaded: Loaded) -> list[Table]:
    """Milliseconds with keys split, in one run, and FlashAttention-3's."""
    rows = rows_of(loaded, "split")
    body = []
    for cell_of in values_of(rows, "D", "H", "N", "M"):
        cell = [row for row in rows if (row["D"], row["H"], row["N"], row["M"]) == cell_of]
        ms, error, splits = (by_impl(cell, name) for name in ("ms", "error_total", "splits"))
        times = [ms.get(impl) for impl in ("helion_attn", "one_run", "fa3_fp8")]
        mine = times[0]
        body.append(
            [
                *map(str, cell_of),
                number(splits.get("helion_attn"), "d"),
                *(number(t, ".3f") for t in times),
                *(number(t / mine if t and mine else None, ".2f") for t in times[1:]),
                " / ".join(error_text(error.get(impl)) for impl in ("helion_attn", "one_run", "fa3_fp8")),
            ]
        )
    headers = ["D", "H", "keys", "queries", "splits", "ours, ms", "one run, ms", "FA3 FP8, ms"]
    headers += ["one run / ours", "FA3 / ours", "total error: ours / one run / FA3"]
    return [Table("Kernel, few causal queries on many keys, B 1, H_kv 8, BALANCED", headers, body)] if body else []
