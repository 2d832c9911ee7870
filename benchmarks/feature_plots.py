"""The plots of the smaller suites: bars of what their tables say."""

from __future__ import annotations

from collections.abc import Callable

from accuracy_tables import mask
from checks import all_checks
from host_tables import call_name
from matplotlib.figure import Figure
from plots import horizontal
from promises import by_promise
from recipes import DEFAULT
from tables import Loaded, Row, by_impl, by_series, impls_in, ratio, rows_of, values_of


def ablation(loaded: Loaded) -> Figure | None:
    """Speed with one step undone over the shipped kernel's, a panel per head dim."""
    panels = {}
    for (D,) in values_of(rows_of(loaded, "ablation"), "D"):
        ms = {row["variant"]: row["ms"] for row in rows_of(loaded, "ablation", D=D)}
        groups: dict[str, dict[str, float | None]] = {
            name: {"fast": ratio(ms.get("shipped"), mine)} for name, mine in ms.items()
        }
        panels[f"D = {D}"] = groups
    return horizontal(panels, "speed / the shipped kernel's", 1.0, width=5.2)


def masks(loaded: Loaded) -> Figure | None:
    """Milliseconds by what is done to causal scores, a panel per head dim."""
    rows = rows_of(loaded, "masks")
    panels = {}
    for (D,) in values_of(rows, "D"):
        groups: dict[str, dict[str, float | None]] = {}
        for name in dict.fromkeys(row["mask"] for row in rows):
            ms = by_impl(rows_of(loaded, "masks", D=D, mask=name), "ms")
            groups[name] = {impl: ms.get(impl) for impl in (DEFAULT, "fast", "fa3_fp8")}
        panels[f"D = {D}"] = groups
    return horizontal(panels, "ms")


def split(loaded: Loaded) -> Figure | None:
    """Speed over FlashAttention-3's, with keys split and in one run, a panel per head dim and heads."""
    rows = rows_of(loaded, "split")
    panels = {}
    for D, H in values_of(rows, "D", "H"):
        groups: dict[str, dict[str, float | None]] = {}
        for N, M in values_of(rows, "N", "M"):
            ms = by_impl(rows_of(loaded, "split", D=D, H=H, N=N, M=M), "ms")
            speeds = (ratio(ms.get("fa3_fp8"), ms.get(impl)) for impl in ("helion_attn", "one_run"))
            groups[f"{M} x {N}"] = dict(zip(("helion_attn", "one run"), speeds, strict=True))
        panels[f"D = {D}, {H} heads, queries x keys"] = groups
    return horizontal(panels, "speed / FA3 FP8's", 1.0, columns=2, width=5.0)


def decode(loaded: Loaded) -> Figure | None:
    """Bandwidth of decoding over a copy's, by number of keys."""
    rows = rows_of(loaded, "decode", stage="kernel")
    groups: dict[str, dict[str, float | None]] = {}
    for (N,) in values_of(rows, "N"):
        share = by_impl(rows_of(loaded, "decode", stage="kernel", N=N), "of_copy")
        groups[f"{N} keys"] = {impl: share.get(impl) for impl in impls_in(rows)}
    return horizontal({"One new token": groups}, "bandwidth / a copy's", 1.0, width=6.6)


def varlen(loaded: Loaded) -> Figure | None:
    """Speed on packed sequences over FlashAttention-3's, a panel per head dim and mask."""
    rows = rows_of(loaded, "varlen", stage="kernel")
    panels = {}
    for causal, D in values_of(rows, "causal", "D"):
        groups: dict[str, dict[str, float | None]] = {}
        for (batch,) in values_of(rows, "batch"):
            ms = by_series(rows_of(loaded, "varlen", stage="kernel", causal=causal, D=D, batch=batch), "ms")
            groups[batch] = {name: ratio(ms.get("fa3_fp8"), ms.get(name)) for name in (DEFAULT, "fast")}
        panels[f"D = {D}, {mask(causal)}"] = groups
    return horizontal(panels, "speed / FA3 FP8's", 1.0)


def host(loaded: Loaded) -> Figure | None:
    """Microseconds of a call, of the same lengths as the one before."""
    groups: dict[str, dict[str, float | None]] = {
        call_name(row["impl"], row["stage"]).strip("`"): {row["impl"]: row["host_us"]}
        for row in rows_of(loaded, "host", lengths="same")
    }
    return horizontal({"Calls of the same lengths": groups}, "host time of a call, microseconds", width=6.6)


def startup(loaded: Loaded) -> Figure | None:
    """Seconds of a process's first call, with nothing compiled and with all compiled."""
    rows = rows_of(loaded, "startup")
    groups: dict[str, dict[str, float | None]] = {}
    for D, causal in values_of(rows, "D", "causal"):
        by_cache: dict[str, Row] = {row["cache"]: row for row in rows_of(loaded, "startup", D=D, causal=causal)}
        groups[f"D {D}, {mask(causal)}"] = {cache: by_cache.get(cache, {}).get("first_s") for cache in ("cold", "warm")}
    return horizontal({"First call of a process": groups}, "s", 1.0, width=6.6)


def checks(loaded: Loaded) -> Figure | None:
    """How many times better than its bound the worst cell of each promise is."""
    groups: dict[str, dict[str, float | None]] = {
        f"{promise.worst.promise} ({promise.worst.relation})": {promise.verdict: promise.worst.margin}
        for promise in by_promise(all_checks(loaded))
    }
    x_label = "how many times better than its bound the worst cell is; below 1 it misses"
    return horizontal({"What must hold": groups}, x_label, 1.0, width=9.5)


PLOTS: dict[str, Callable[[Loaded], Figure | None]] = {
    "ablation": ablation,
    "masks": masks,
    "split": split,
    "decode": decode,
    "varlen": varlen,
    "host": host,
    "startup": startup,
    "checks": checks,
}
