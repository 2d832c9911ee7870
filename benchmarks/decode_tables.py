"""The table of decoding from the KV cache."""

from __future__ import annotations

from tables import LABELS, Loaded, Table, by_impl, error_text, impls_in, number, rows_of, values_of


def decode_tables(loaded: Loaded) -> list[Table]:
    """Milliseconds, and bandwidth as a share of a device copy's."""
    rows = rows_of(loaded, "decode", stage="kernel")
    impls = impls_in(rows)
    body = []
    for (N,) in values_of(rows, "N"):
        cell = [row for row in rows if row["N"] == N]
        ms, share, error = (by_impl(cell, name) for name in ("ms", "of_copy", "error_total"))
        append = by_impl(rows_of(loaded, "decode", stage="append", N=N), "ms").get("helion_attn")
        times = (f"{number(ms.get(impl), '.3f')} ({number(share.get(impl), '.2f')})" for impl in impls)
        errors = " / ".join(error_text(error.get(impl)) for impl in impls)
        body.append([str(N), *times, number(append, ".3f"), errors])
    headers = ["keys", *(LABELS[impl] for impl in impls), "append, ms", "total error, in this order"]
    title = "One new token, B 64, H 64, H_kv 8, D 128, ms (bandwidth / a copy's)"
    return [Table(title, headers, body)] if body else []
