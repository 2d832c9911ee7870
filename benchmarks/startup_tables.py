"""The table of start-up."""

from __future__ import annotations

from accuracy_tables import mask
from tables import Loaded, Row, Table, number, rows_of, values_of


def startup_tables(loaded: Loaded) -> list[Table]:
    """Seconds of a process's first call, with nothing compiled and with all compiled, and what comes before it."""
    rows = rows_of(loaded, "startup")
    body = []
    for D, causal in values_of(rows, "D", "causal"):
        by_cache: dict[str, Row] = {row["cache"]: row for row in rows if (row["D"], row["causal"]) == (D, causal)}
        cold, warm = by_cache.get("cold", {}), by_cache.get("warm", {})
        figures = [cold.get("first_s"), warm.get("first_s"), warm.get("triton_s")]
        before = [warm.get(name) for name in ("import_torch_s", "import_s", "context_s")]
        body.append(
            [
                str(D),
                mask(causal),
                *(number(figure, ".2f") for figure in figures),
                f"{number(cold.get('compiled'), 'd')} / {number(warm.get('compiled'), 'd')}",
                number(warm.get("later_ms"), ".2f"),
                *(number(figure, ".2f") for figure in before),
            ]
        )
    headers = ["D", "mask", "cold, s", "warm, s", "of it Triton, s", "kernels compiled: cold / warm", "later, ms"]
    headers += ["import PyTorch, s", "import Helion and the kernels, s", "CUDA context, s"]
    return (
        [Table("First call of a process, bf16 [1, 2048 / D, 1024, D], default recipe", headers, body)] if body else []
    )
