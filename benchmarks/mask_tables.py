"""The table of the masks suite."""

from __future__ import annotations

from recipes import DEFAULT
from tables import Loaded, Table, by_impl, error_text, number, rows_of, values_of


def mask_tables(loaded: Loaded) -> list[Table]:
    """Milliseconds, and how they compare to plain causal attention and to FlashAttention-3."""
    rows = rows_of(loaded, "masks")
    names = list(dict.fromkeys(row["mask"] for row in rows))
    body = []
    for (D,) in values_of(rows, "D"):
        plain = by_impl([row for row in rows if (row["D"], row["mask"]) == (D, "causal")], "ms").get(DEFAULT)
        for name in names:
            cell = [row for row in rows if (row["D"], row["mask"]) == (D, name)]
            ms, error = by_impl(cell, "ms"), by_impl(cell, "error_kernel")
            mine, fast, peer = (ms.get(impl) for impl in (DEFAULT, "fast", "fa3_fp8"))
            line = [str(D), name, *(number(t, ".3f") for t in (mine, fast, peer))]
            line.append(number(mine / (plain * cell[0]["visible"]) if mine and plain else None, ".2f"))
            line.append(number(peer / mine if mine and peer else None, ".2f"))
            body.append([*line, error_text(error.get(DEFAULT))])
    headers = ["D", "scores", "BALANCED, ms", "FAST, ms", "FA3 FP8, ms", "over causal x visible blocks' share"]
    headers += ["FA3 / BALANCED", "our kernel error"]
    return [Table("Kernel, masks and scores on causal attention", headers, body)] if body else []
