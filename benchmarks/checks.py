"""The figures that these benchmarks are to show, and whether they do."""

from __future__ import annotations

import math
from collections.abc import Callable

from accuracy_tables import mask
from ladder_tables import of_large_d
from promises import Check, by_promise, figure, on_gpu, worst_of
from recipes import DEFAULT, PRESETS, RUNGS
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
    ratio,
    rows_of,
    series,
    unroped_default,
    values_of,
)

#: Of the kernel's speed over the faster FP8 peer's, at S 4096 and full also 16384: a first goal. Then it is to lead.
SPEED_BOUNDS = {64: 1.0, 128: 0.93, 256: 0.80}

#: Of the speed from bf16 to bf16 over the fastest bf16 kernel's, from S 4096 on.
E2E_BOUNDS = {128: 1.25, 256: 1.4}

#: Of the speed over FlashAttention-3's in FP8, where it has the feature.
FEATURE_BOUND = 0.95


# --- speed, memory, and the error of the default --------------------------------------------------


def speed_checks(loaded: Loaded) -> list[Check]:
    """The kernel's speed and error, end to end, preprocessing and memory, all with the default recipe."""
    loaded = on_gpu(loaded)
    return [
        *_kernel_checks(loaded),
        *_e2e_checks(loaded),
        *_colfax_checks(rows_of(loaded, "cells", part="Colfax", stage="kernel")),
        *_preprocessing_checks(unroped_default(rows_of(loaded, "preprocess", impl="helion_attn"))),
    ]


def _kernel_checks(loaded: Loaded) -> list[Check]:
    errors, first, every = [], [], []
    for D, bound in SPEED_BOUNDS.items():
        for causal in (False, True):
            rows = rows_of(loaded, "accuracy", part="inputs", D=D, causal=causal, input="randn")
            error = figure(rows, DEFAULT, "error_kernel")
            errors.append(Check("kernel error, N(0, 1)", f"S 4096, D {D}, {mask(causal)}", error, 0.026))
            for S in (512, 1024, 2048, 4096, 8192, 16384):
                cell = rows_of(loaded, "attention", stage="kernel", D=D, N=S, causal=causal)
                ms, where = by_impl(cell, "ms"), f"S {S}, D {D}, {mask(causal)}"
                error = figure(cell, DEFAULT, "error_kernel")
                errors.append(Check("kernel error in the grid of speed", where, error, 0.026))
                # The bound is on the faster of both: with one missing there is nothing to judge.
                peer = fastest(ms, FP8_PEERS) if all(impl in ms for impl in FP8_PEERS) else None
                faster = ratio(peer, figure(cell, DEFAULT, "ms"))
                if S == 4096 or (S == 16384 and not causal):
                    name = f"kernel speed / faster FP8 peer's, first goal, D {D}"
                    first.append(Check(name, f"S {S}, {mask(causal)}", faster, bound, at_least=True))
                if S >= 1024:
                    name = "kernel speed / faster FP8 peer's, S 1024 to 16384"
                    every.append(Check(name, where, faster, 1.0, at_least=True))
    ratios = [check.value for check in every if check.value is not None]
    # A mean of some of the cells is another figure.
    logs = [math.log(x) for x in ratios] if len(ratios) == len(every) else []
    mean = math.exp(sum(logs) / len(logs)) if logs else None
    name = f"kernel speed / faster FP8 peer's, geometric mean of these {len(every)} cells"
    geometric = Check(name, "", mean, 1.10, at_least=True)
    return [*errors, *first, *every, geometric]


def _fastest_bf16(ms: dict[str, float]) -> float | None:
    """With FlashAttention-3 or cuDNN missing there is nothing to judge."""
    return fastest(ms, BF16_PEERS) if {"fa3_bf16", "cudnn_bf16"} <= set(ms) else None


def _e2e_checks(loaded: Loaded) -> list[Check]:
    every, more = [], []
    for D in SPEED_BOUNDS:
        for causal in (False, True):
            for S in (4096, 8192, 16384):
                cell = rows_of(loaded, "attention", D=D, N=S, causal=causal)
                e2e = figure([row for row in cell if row["stage"] == "e2e"], DEFAULT, "ms")
                faster = ratio(_fastest_bf16(by_impl((row for row in cell if row["stage"] == "kernel"), "ms")), e2e)
                name = "end to end, speed / fastest bf16's, from S 4096 on"
                every.append(Check(name, f"S {S}, D {D}, {mask(causal)}", faster, 1.0, at_least=True))
                if D in E2E_BOUNDS:
                    more.append(Check(f"{name}, D {D}", f"S {S}, {mask(causal)}", faster, E2E_BOUNDS[D], at_least=True))
    return every + more


def _colfax_checks(rows: list[Row]) -> list[Check]:
    return [
        Check("TFLOP/s, Colfax's cells, D 256", f"S {row['N']}", figure([row], DEFAULT, "tflops"), 1100, at_least=True)
        for row in rows
        if series(row) == DEFAULT
    ]


def _preprocessing_checks(rows: list[Row]) -> list[Check]:
    found = []
    for row in rows:
        where = f"S {row['N']}, D {row['D']}"
        if row["stage"] == "preprocess":
            found.append(Check("preprocessing, time / a copy's", where, row["copy_ratio"], 2.5))
        else:
            extra = row["peak_extra_bytes"] / row["packed_bytes"]
            # 5%: partial sums of the preprocessing, and the allocator's rounding.
            found.append(Check("peak extra memory / packed copies", where, extra, 1.05))
    return found


# --- recipes --------------------------------------------------------------------------------------


def recipe_checks(loaded: Loaded) -> list[Check]:
    """Accuracy of the recipes, and what they cost."""
    loaded = on_gpu(loaded)
    return [
        *_rmse_checks(rows_of(loaded, "accuracy", part="rmse")),
        *_long_checks(rows_of(loaded, "accuracy", part="long", input="biased_v", N=131072)),
        *_criterion_checks(rows_of(loaded, "accuracy", part="criterion", impl="helion_attn")),
        *_cost_checks(loaded),
        *_bandwidth_checks(rows_of(loaded, "preprocess", impl="helion_attn", stage="preprocess")),
        *_stage_checks(rows_of(loaded, "stages", impl="helion_attn")),
    ]


def _rmse_checks(rows: list[Row]) -> list[Check]:
    found = []
    for D, S in values_of(rows, "D", "N"):
        cell = [row for row in rows if (row["D"], row["N"]) == (D, S)]
        balanced, accurate = figure(cell, "balanced", "rmse"), figure(cell, "accurate", "rmse")
        fa3 = by_series(cell, "rmse").get("fa3_fp8")
        where = f"S {S}, D {D}"
        found += [
            Check("RMSE, outliers, BALANCED", where, balanced, 9.1e-3),
            Check("RMSE, outliers, BALANCED / FA3 FP8", where, ratio(balanced, fa3), 1.0),
            Check("RMSE, outliers, ACCURATE", where, accurate, 7e-3),
        ]
    return found


def _long_checks(rows: list[Row]) -> list[Check]:
    found = []
    for (D,) in values_of(rows, "D"):
        cell = [row for row in rows if row["D"] == D]
        for preset in PRESETS | RUNGS:
            worst = worst_of(figure(cell, preset, name) for name in ("error_kernel", "error_total"))
            of = "8-bit" if preset in PRESETS else "16-bit"
            name = f"kernel and total error, biased V, 131072 keys, {of} presets"
            found.append(Check(name, f"{LABELS[preset]}, D {D}", worst, 0.003))
    return found


def _criterion_checks(rows: list[Row]) -> list[Check]:
    found = []
    for (D,) in values_of(rows, "D"):
        # A case that raised has no ratio and must not pass.
        ratios = [row.get("ratio", float("nan")) for row in rows if row["D"] == D]
        name = "FA3's FP8 test, error / what is allowed"
        found.append(Check(name, f"D {D}, worst of {len(ratios)} cases", worst_of(ratios), 1.0))
    return found


def _cost_checks(loaded: Loaded) -> list[Check]:
    """From suite `speed`, and from `cost` where that has no such cell."""
    both = rows_of(loaded, "attention", stage="e2e"), rows_of(loaded, "accuracy", part="cost", stage="e2e")
    cells: dict[tuple[int, bool, int], list[Row]] = {}
    for rows in both:
        for D, causal, S in values_of(rows, "D", "causal", "N"):
            cell = [row for row in rows if (row["D"], row["causal"], row["N"]) == (D, causal, S)]
            if S >= 4096 and {DEFAULT, "fast"} <= {series(row) for row in cell}:
                cells.setdefault((D, causal, S), cell)
    return [
        Check(
            "end to end, time of BALANCED / FAST, from S 4096 on",
            f"S {S}, D {D}, {mask(causal)}",
            ratio(figure(cell, DEFAULT, "ms"), figure(cell, "fast", "ms")),
            1.05,
        )
        for (D, causal, S), cell in sorted(cells.items())
    ]


def _bandwidth_checks(rows: list[Row]) -> list[Check]:
    found = []
    for preset in PRESETS:
        for rope in (None, True):
            for row in rows:
                if row["recipe"] == preset and row.get("rope") == rope and "copy_fraction" in row:
                    where = f"{LABELS[preset]}{', RoPE' if rope else ''}, S {row['N']}, D {row['D']}"
                    name = "quantize, bandwidth / a copy's"
                    found.append(Check(name, where, row["copy_fraction"], 0.75, at_least=True))
    return found


def _stage_checks(rows: list[Row]) -> list[Check]:
    found = []
    for row in rows:
        alone = row["part"] == "pack V"
        name = f"{'V packed alone' if alone else 'a stage'}, bandwidth / a copy's"
        preset = f", {LABELS[row['recipe']]}" if row["recipe"] else ""
        where = f"{row['part']}{preset}, S {row['N']}, D {row['D']}"
        found.append(Check(name, where, row["copy_fraction"], 0.65 if alone else 0.75, at_least=True))
    return found


# --- 16 bits, and large head dims -----------------------------------------------------------------


def rung_checks(loaded: Loaded) -> list[Check]:
    """The hybrid and the baseline beside bf16 kernels; head dims above 256 beside SDPA, 192/128 beside FA3."""
    loaded = on_gpu(loaded)
    return _ladder_checks(rows_of(loaded, "ladder", stage="kernel")) + _large_d_checks(loaded)


def _ladder_checks(rows: list[Row]) -> list[Check]:
    hybrid, bf16, errors = [], [], []
    for D, S in values_of(rows, "D", "N"):
        cell, where = [row for row in rows if (row["D"], row["N"]) == (D, S)], f"S {S}, D {D}"
        ms, pv = by_series(cell, "ms"), by_series(cell, "error_pv")
        if D >= 128 and S >= 4096:
            faster = ratio(_fastest_bf16(ms), figure(cell, "hybrid", "ms"))
            name = "HYBRID, speed / fastest bf16's, D 128 and 256, from S 4096 on"
            hybrid.append(Check(name, where, faster, 1.15, at_least=True))
        faster = ratio(ms.get("fa3_bf16"), figure(cell, "bf16", "ms"))
        bf16.append(Check("BF16, speed / FA3 bf16's", where, faster, 0.85, at_least=True))
        share = ratio(figure(cell, "hybrid", "error_pv"), pv.get("balanced"))
        errors.append(Check("error of P and V, HYBRID / BALANCED", where, share, 1 / 3))
    return hybrid + bf16 + errors


def _large_d_checks(loaded: Loaded) -> list[Check]:
    found = []
    square = of_large_d(loaded, square=True)
    for D, causal in values_of(square, "D", "causal"):
        cell = [row for row in square if (row["D"], row["causal"]) == (D, causal)]
        ms, where = by_impl(cell, "ms"), f"D {D}, {mask(causal)}"
        ms.pop("helion_attn", None)
        mine, error = figure(cell, DEFAULT, "ms"), figure(cell, DEFAULT, "error_kernel")
        found += [
            Check("kernel error, D > 256", where, error, 0.026),
            Check(
                "speed / SDPA efficient's, D > 256", where, ratio(ms.get("efficient_bf16"), mine), 3.0, at_least=True
            ),
            Check("speed / fastest SDPA's, D > 256", where, ratio(fastest(ms, ms), mine), 1.0, at_least=True),
        ]
        if D == 512 and not causal:
            tflops = figure(cell, DEFAULT, "tflops")
            found.append(Check("TFLOP/s, D 512, full", "", tflops, 600, at_least=True))
    prefill = [row for row in of_large_d(loaded, square=False) if (row["D"], row["D_v"]) == (192, 128)]
    for (causal,) in values_of(prefill, "causal"):
        cell = [row for row in prefill if row["causal"] == causal]
        found.append(Check("kernel error, 192/128", mask(causal), figure(cell, DEFAULT, "error_kernel"), 0.026))
        if causal:
            faster = ratio(by_impl(cell, "ms").get("fa3_fp8"), figure(cell, DEFAULT, "ms"))
            found.append(Check("speed / FA3 FP8's, 192/128, causal", "", faster, 0.9, at_least=True))
    return found


# --- features -------------------------------------------------------------------------------------


def feature_checks(loaded: Loaded) -> list[Check]:
    """Masks, packed sequences, grouped queries and split keys beside FlashAttention-3's; decoding beside a copy."""
    loaded = on_gpu(loaded)
    return [
        *_mask_checks(loaded),
        *_checks_over_fa3(
            "packed sequences",
            rows_of(loaded, "varlen", stage="kernel"),
            ("D", "causal", "batch"),
            lambda row: f"{row['batch']}, D {row['D']}, {mask(row['causal'])}",
        ),
        *_checks_over_fa3(
            "grouped queries",
            rows_of(loaded, "cells", part="GQA", stage="kernel"),
            ("causal", "N"),
            lambda row: f"S {row['N']}, D 128, {mask(row['causal'])}",
        ),
        *_checks_over_fa3(
            "few queries on many keys",
            rows_of(loaded, "split"),
            ("D", "H", "N", "M"),
            lambda row: f"{row['M']} queries, {row['N']} keys, D {row['D']}, {row['H']} heads",
        ),
        *_decode_checks(rows_of(loaded, "decode", impl="helion_attn", stage="kernel")),
    ]


def _mask_checks(loaded: Loaded) -> list[Check]:
    """A window's time over what its blocks' share of causal attention takes; and softcap's, beside FA3's."""
    windows, softcaps = [], []
    for (D,) in values_of(rows_of(loaded, "masks"), "D"):
        causal, window, softcap = (rows_of(loaded, "masks", D=D, mask=name) for name in ("causal", "window", "softcap"))
        share = ratio(figure(window, DEFAULT, "ms"), by_impl(causal, "ms").get(DEFAULT))
        over = ratio(share, figure(window, DEFAULT, "visible"))
        name = "a window's time / its blocks' share of causal attention's"
        windows.append(Check(name, f"D {D}", over, 1.3))
        faster = ratio(by_impl(softcap, "ms").get("fa3_fp8"), figure(softcap, DEFAULT, "ms"))
        softcaps.append(Check("softcap, speed / FA3 FP8's", f"D {D}", faster, FEATURE_BOUND, at_least=True))
    return windows + softcaps


def _checks_over_fa3(promise: str, rows: list[Row], keys: tuple[str, ...], where: Callable[[Row], str]) -> list[Check]:
    """Our speed over FlashAttention-3's in FP8, for each cell of `rows`, which has the same `keys`."""
    found = []
    for values in values_of(rows, *keys):
        cell = [row for row in rows if tuple(row[key] for key in keys) == values]
        faster = ratio(by_series(cell, "ms").get("fa3_fp8"), figure(cell, DEFAULT, "ms"))
        found.append(Check(f"{promise}, speed / FA3 FP8's", where(cell[0]), faster, FEATURE_BOUND, at_least=True))
    return found


def _decode_checks(rows: list[Row]) -> list[Check]:
    return [
        Check(
            "decoding, bandwidth / a copy's", f"{row['N']} keys", row.get("of_copy", float("nan")), 0.75, at_least=True
        )
        for row in rows
    ]


# --- the host -------------------------------------------------------------------------------------


def startup_checks(loaded: Loaded) -> list[Check]:
    """The first call of a process that finds its kernels compiled, imports left out."""
    found = []
    for D, causal in values_of(rows_of(on_gpu(loaded), "startup"), "D", "causal"):
        rows = rows_of(loaded, "startup", D=D, causal=causal, cache="warm")
        name = "first call from a warm cache, without imports, s"
        found.append(Check(name, f"D {D}, {mask(causal)}", figure(rows, DEFAULT, "first_s"), 1.0))
    return found


def host_checks(loaded: Loaded) -> list[Check]:
    """What a call costs the host, beside FlashAttention-3's: of quantised tensors, and from bf16."""
    us = {(row["impl"], row["stage"]): row["host_us"] for row in rows_of(on_gpu(loaded), "host", lengths="same")}
    if not us:
        return []
    return [
        Check("host time of a call / FA3's", where, ratio(us.get(("helion_attn", stage)), us.get(peer)), 1.0)
        for where, stage, peer in (
            ("quantised tensors, fastest of four runs", "kernel", ("fa3_fp8", "kernel")),
            ("from bf16, FA3 in FP8", "e2e", ("fa3_fp8", "e2e")),
            ("from bf16, FA3 in bf16", "e2e", ("fa3_bf16", "kernel")),
        )
    ]


# --- as tables ------------------------------------------------------------------------------------

#: Every figure, by what it is about.
CHECKS: dict[str, Callable[[Loaded], list[Check]]] = {
    "Speed, error and memory of the default": speed_checks,
    "The recipes": recipe_checks,
    "16 bits, and large head dims": rung_checks,
    "Masks, packed sequences, grouped queries, split keys, decoding": feature_checks,
    "Start-up and host time": lambda loaded: startup_checks(loaded) + host_checks(loaded),
}

#: The result files that they are of.
CHECKED_SUITES = (
    *("attention", "cells", "accuracy", "preprocess", "stages", "ladder", "large_d", "masks", "varlen", "split"),
    *("decode", "startup", "host"),
)


def all_checks(loaded: Loaded) -> list[Check]:
    """Every figure."""
    return [check for checks in CHECKS.values() for check in checks(loaded)]


def promise_tables(loaded: Loaded) -> list[Table]:
    """A row for each promise: its worst cell, and how many cells hold. Empty if nothing was measured at all."""
    body = []
    found = by_promise(all_checks(loaded))
    for promise in found if any(promise.measured for promise in found) else []:
        worst, verdicts = promise.worst, [check.verdict for check in promise.checks]
        hold = f"{verdicts.count('PASS')} of {len(verdicts)}"
        if missing := verdicts.count("not measured"):
            hold += f", {missing} not measured"
        figures = [number(worst.value, ".4g"), worst.cell if promise.measured and worst.cell else "-", hold]
        body.append([worst.promise, worst.relation, *figures, promise.verdict])
    headers = ["figure", "bound", "worst", "where", "cells that hold", "verdict"]
    return [Table("What must hold", headers, body)] if body else []


def _table(title: str, found: list[Check]) -> list[Table]:
    checks = [check for promise in by_promise(found) for check in promise.checks]
    body = [[c.name, number(c.value, ".4g"), c.relation, c.verdict] for c in checks]
    return [Table(title, ["figure", "measured", "bound", "verdict"], body)] if body else []


def recipe_check_tables(loaded: Loaded) -> list[Table]:
    """`recipe_checks`, every cell."""
    return _table("What must hold of the recipes", recipe_checks(loaded))


def other_check_tables(loaded: Loaded) -> list[Table]:
    """All the others, every cell."""
    tables = (_table(title, checks(loaded)) for title, checks in CHECKS.items() if checks is not recipe_checks)
    return [table for found in tables for table in found]
