"""The figures that these benchmarks are to show, and whether they do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from accuracy_tables import mask
from ladder_tables import of_large_d
from recipes import DEFAULT, PRESETS
from tables import (
    BF16_PEERS,
    FP8_PEERS,
    LABELS,
    Loaded,
    Row,
    Table,
    by_impl,
    by_series,
    fastest,
    number,
    rows_of,
    series,
    unroped_default,
    values_of,
)


@dataclass(frozen=True)
class Check:
    """One promise, and what was measured of it (None: nothing)."""

    name: str
    value: float | None
    bound: float
    at_least: bool = False

    @property
    def relation(self) -> str:
        """The bound as text."""
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"

    @property
    def verdict(self) -> str:
        """PASS, FAIL, or that there is nothing to judge."""
        if self.value is None:
            return "not measured"
        # Comparisons with NaN are false, hence a NaN fails.
        return "PASS" if (self.value >= self.bound if self.at_least else self.value <= self.bound) else "FAIL"


SPEED_BOUNDS = {64: 1.0, 128: 0.93, 256: 0.80}


def _on_gpu(loaded: Loaded) -> Loaded:
    """A run on the CPU shows none of these figures."""
    return {suite: content for suite, content in loaded.items() if content["meta"].get("gpu")}


def _worst(values: Iterable[float | None]) -> float | None:
    """The largest, NaN if there is one; None if nothing was measured."""
    measured = [value for value in values if value is not None]
    return next((value for value in measured if value != value), max(measured, default=None))


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator


def _figure(rows: list[Row], name: str, value: str) -> float | None:
    """One figure of a series: NaN, which fails, where it ran and raised or was wrong."""
    mine = [row for row in rows if series(row) == name]
    if not mine:
        return None
    measured: float | None = mine[0].get(value)
    return float("nan") if measured is None else measured


# --- speed, memory, and the error of the default --------------------------------------------------


def speed_checks(loaded: Loaded) -> list[Check]:
    """The kernel's speed and error, end to end, preprocessing and memory, all with the default recipe."""
    loaded = _on_gpu(loaded)
    found: list[Check] = []
    for D in SPEED_BOUNDS:
        for causal in (False, True):
            rows = rows_of(loaded, "accuracy", part="inputs", D=D, causal=causal, input="randn")
            name = f"kernel error, randn, S 4096, D {D}, {mask(causal)}"
            found.append(Check(name, by_series(rows, "error_kernel").get("balanced"), 0.026))
    for causal, lengths in ((False, (4096, 16384)), (True, (4096,))):
        for S in lengths:
            for D, bound in SPEED_BOUNDS.items():
                ms = by_impl(rows_of(loaded, "attention", stage="kernel", D=D, N=S, causal=causal), "ms")
                # The bound is on the faster of both: with one missing there is nothing to judge.
                peer = fastest(ms, FP8_PEERS) if all(impl in ms for impl in FP8_PEERS) else None
                name = f"speed / faster FP8 peer, S {S}, D {D}, {mask(causal)}"
                found.append(Check(name, _ratio(peer, ms.get("helion_attn")), bound, at_least=True))
    for causal in (False, True):
        for S in (4096, 8192, 16384):
            for D in SPEED_BOUNDS:
                cell = rows_of(loaded, "attention", D=D, N=S, causal=causal)
                e2e = by_impl((row for row in cell if row["stage"] == "e2e"), "ms").get("helion_attn")
                best = fastest(by_impl((row for row in cell if row["stage"] == "kernel"), "ms"), BF16_PEERS)
                name = f"end to end / fastest bf16, S {S}, D {D}, {mask(causal)}"
                found.append(Check(name, _ratio(best, e2e), 1.0, at_least=True))
    rows = unroped_default(rows_of(loaded, "preprocess", impl="helion_attn"))
    for row in rows:
        if row["stage"] == "preprocess":
            found.append(Check(f"preprocessing / copy, S {row['N']}, D {row['D']}", row["copy_ratio"], 2.5))
        else:
            ratio = row["peak_extra_bytes"] / row["packed_bytes"]
            # 5%: partial sums of the preprocessing, and the allocator's rounding.
            found.append(Check(f"peak extra memory / packed copies, S {row['N']}, D {row['D']}", ratio, 1.05))
    return found


# --- recipes --------------------------------------------------------------------------------------


def recipe_checks(loaded: Loaded) -> list[Check]:
    """Accuracy of the recipes, and what they cost."""
    loaded = _on_gpu(loaded)
    return [
        *_rmse_checks(rows_of(loaded, "accuracy", part="rmse")),
        *_long_checks(rows_of(loaded, "accuracy", part="long", input="biased_v", N=131072)),
        *_criterion_checks(rows_of(loaded, "accuracy", part="criterion", impl="helion_attn")),
        *_cost_checks(rows_of(loaded, "accuracy", part="cost", stage="e2e")),
        *_bandwidth_checks(rows_of(loaded, "preprocess", impl="helion_attn", stage="preprocess")),
        *_stage_checks(rows_of(loaded, "stages", impl="helion_attn")),
    ]


def _rmse_checks(rows: list[Row]) -> list[Check]:
    found = []
    for D, S in values_of(rows, "D", "N"):
        cell = [row for row in rows if (row["D"], row["N"]) == (D, S)]
        balanced, accurate = _figure(cell, "balanced", "rmse"), _figure(cell, "accurate", "rmse")
        fa3 = by_series(cell, "rmse").get("fa3_fp8")
        found += [
            Check(f"RMSE, outliers, BALANCED, S {S}, D {D}", balanced, 9.1e-3),
            Check(f"RMSE, outliers, BALANCED / FA3 FP8, S {S}, D {D}", _ratio(balanced, fa3), 1.0),
            Check(f"RMSE, outliers, ACCURATE, S {S}, D {D}", accurate, 7e-3),
        ]
    return found


def _long_checks(rows: list[Row]) -> list[Check]:
    found = []
    for (D,) in values_of(rows, "D"):
        cell = [row for row in rows if row["D"] == D]
        for preset in PRESETS:
            worst = _worst(_figure(cell, preset, name) for name in ("error_kernel", "error_total"))
            found.append(Check(f"error, biased V, 131072 keys, {LABELS[preset]}, D {D}", worst, 0.003))
    return found


def _criterion_checks(rows: list[Row]) -> list[Check]:
    found = []
    for (D,) in values_of(rows, "D"):
        # A case that raised has no ratio and must not pass.
        ratios = [row.get("ratio", float("nan")) for row in rows if row["D"] == D]
        found.append(Check(f"FA3's FP8 test, worst of {len(ratios)} cases, D {D}", _worst(ratios), 1.0))
    return found


def _cost_checks(rows: list[Row]) -> list[Check]:
    found = []
    for D, S in values_of(rows, "D", "N"):
        cell = [row for row in rows if (row["D"], row["N"]) == (D, S)]
        ratio = _ratio(_figure(cell, "balanced", "ms"), _figure(cell, "fast", "ms"))
        found.append(Check(f"end to end, BALANCED / FAST, S {S}, D {D}", ratio, 1.05))
    return found


def _bandwidth_checks(rows: list[Row]) -> list[Check]:
    found = []
    for preset in PRESETS:
        for rope in (None, True):
            mine = [row for row in rows if row["recipe"] == preset and row.get("rope") == rope]
            least = min((row["copy_fraction"] for row in mine if "copy_fraction" in row), default=None)
            name = f"quantize / copy bandwidth, {LABELS[preset]}{', RoPE' if rope else ''}, least"
            found.append(Check(name, least, 0.75, at_least=True))
    return found


def _stage_checks(rows: list[Row]) -> list[Check]:
    found = []
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        bound = 0.65 if part == "pack V" else 0.75
        for preset in dict.fromkeys(row["recipe"] for row in mine):
            least = min(row["copy_fraction"] for row in mine if row["recipe"] == preset)
            name = f"{part} / copy bandwidth{', ' + LABELS[preset] if preset else ''}, least"
            found.append(Check(name, least, bound, at_least=True))
    return found


# --- 16 bits, and large head dims -----------------------------------------------------------------


def rung_checks(loaded: Loaded) -> list[Check]:
    """The hybrid and the baseline beside bf16 kernels; head dims above 256 beside SDPA, 192/128 beside FA3."""
    loaded = _on_gpu(loaded)
    found = []
    for D, S in values_of(rows_of(loaded, "ladder"), "D", "N"):
        if D < 128 or S < 4096:
            continue
        cell = rows_of(loaded, "ladder", D=D, N=S, stage="kernel")
        ms, pv = by_series(cell, "ms"), by_series(cell, "error_pv")
        best = fastest(ms, BF16_PEERS)
        found += [
            Check(f"HYBRID / fastest bf16, S {S}, D {D}", _ratio(best, ms.get("hybrid")), 1.15, at_least=True),
            Check(f"BF16 / FA3 bf16, S {S}, D {D}", _ratio(ms.get("fa3_bf16"), ms.get("bf16")), 0.85, at_least=True),
            Check(f"P/V error, HYBRID / BALANCED, S {S}, D {D}", _ratio(pv.get("hybrid"), pv.get("balanced")), 1 / 3),
        ]
    for square in (True, False):
        rows = of_large_d(loaded, square)
        for D, causal in values_of(rows, "D", "causal"):
            cell = [row for row in rows if (row["D"], row["causal"]) == (D, causal)]
            ms, where = by_impl(cell, "ms"), f"D {D}, {mask(causal)}"
            mine = ms.pop("helion_attn", None)
            error = _figure(cell, DEFAULT, "error_kernel")
            found.append(Check(f"kernel error, randn, {where}", error, 0.026))
            if square:
                efficient = _ratio(ms.get("efficient_bf16"), mine)
                found.append(Check(f"speed / SDPA efficient, {where}", efficient, 3.0, at_least=True))
                found.append(Check(f"speed / fastest SDPA, {where}", _ratio(fastest(ms, ms), mine), 1.0, at_least=True))
            elif causal:
                found.append(Check(f"speed / FA3 FP8, {where}", _ratio(ms.get("fa3_fp8"), mine), 0.9, at_least=True))
            if square and D == 512 and not causal:
                found.append(Check("TFLOP/s, D 512", by_impl(cell, "tflops").get("helion_attn"), 600, at_least=True))
    return found


def decode_checks(loaded: Loaded) -> list[Check]:
    """Bandwidth of decoding, as a share of a copy's."""
    rows = rows_of(_on_gpu(loaded), "decode", impl="helion_attn", stage="kernel")
    return [Check(f"decode / copy bandwidth, {row['N']} keys", row.get("of_copy"), 0.75, at_least=True) for row in rows]


def mask_checks(loaded: Loaded) -> list[Check]:
    """A window's time over what its blocks' share of causal attention takes; and softcap's, beside FA3's."""
    found = []
    rows = rows_of(_on_gpu(loaded), "masks")
    for (D,) in values_of(rows, "D"):
        of_window = rows_of(loaded, "masks", D=D, mask="window", impl=DEFAULT)
        causal, window, capped = (
            by_impl(rows_of(loaded, "masks", D=D, mask=name), "ms") for name in ("causal", "window", "softcap")
        )
        share = _ratio(window.get(DEFAULT), causal.get(DEFAULT))
        visible = _figure(of_window, DEFAULT, "visible")
        found += [
            Check(f"window / its blocks' share of causal, D {D}", _ratio(share, visible), 1.3),
            Check(f"softcap / FA3 FP8, D {D}", _ratio(capped.get("fa3_fp8"), capped.get(DEFAULT)), 0.95, at_least=True),
        ]
    return found


def startup_checks(loaded: Loaded) -> list[Check]:
    """The first call of a process that finds its kernels compiled, imports left out."""
    found = []
    for D, causal in values_of(rows_of(_on_gpu(loaded), "startup"), "D", "causal"):
        rows = rows_of(loaded, "startup", D=D, causal=causal, cache="warm")
        name = f"first call from a warm cache, s, D {D}, {mask(causal)}"
        found.append(Check(name, _figure(rows, DEFAULT, "first_s"), 1.0))
    return found


def host_checks(loaded: Loaded) -> list[Check]:
    """What a call costs the host, beside FlashAttention-3's in FP8: of quantised tensors, and from bf16."""
    found = []
    for stage in ("kernel", "e2e"):
        us = by_impl(rows_of(_on_gpu(loaded), "host", stage=stage, lengths="same"), "host_us")
        if us:
            ratio = _ratio(us.get("helion_attn"), us.get("fa3_fp8"))
            found.append(Check(f"host time of a call / FA3 FP8's, {stage}", ratio, 1.0))
    return found


# --- as tables ------------------------------------------------------------------------------------


def all_checks(loaded: Loaded) -> list[Check]:
    """Every figure."""
    others = mask_checks(loaded) + decode_checks(loaded) + startup_checks(loaded) + host_checks(loaded)
    return speed_checks(loaded) + recipe_checks(loaded) + rung_checks(loaded) + others


def _table(title: str, found: list[Check]) -> list[Table]:
    body = [[c.name, number(c.value, ".4g"), c.relation, c.verdict] for c in found]
    return [Table(title, ["figure", "measured", "bound", ""], body)] if body else []


def speed_check_tables(loaded: Loaded) -> list[Table]:
    """`speed_checks`."""
    return _table("What must hold", speed_checks(loaded))


def recipe_check_tables(loaded: Loaded) -> list[Table]:
    """`recipe_checks`."""
    return _table("What must hold of the recipes", recipe_checks(loaded))


def rung_check_tables(loaded: Loaded) -> list[Table]:
    """`rung_checks`."""
    return _table("What must hold of 16 bits and of large head dims", rung_checks(loaded))
