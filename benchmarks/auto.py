"""Benchmarks from which length on `attention` is faster than PyTorch's own attention, which is `recipe="auto"`'s table.

    python benchmarks/attention.py --suite auto

The default recipe from bf16 to bf16, and `scaled_dot_product_attention` with the backend that PyTorch chooses; and
`recipe="auto"` by the table of the run before. A time is a call's share of calls back to back, none waited for: on
short sequences that is the host's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

import helion_attn as ha
from benchmarks.cells import compile_all
from benchmarks.lib.checks import Check
from benchmarks.lib.harness import Loaded, Results, Row, result_row, synchronize
from benchmarks.lib.problem import first_line, workload
from benchmarks.lib.recipes import DEFAULT
from benchmarks.lib.suite import Block, Options, Suite, progress
from benchmarks.lib.tables import Table, mask, number, ratio, rows_of, values_of
from benchmarks.speed import LENGTHS
from devtools.inputs import make_qkv
from devtools.workloads import Workload
from helion_attn import auto as choice
from helion_attn.api import dense_problem

Key = TypeVar("Key", bound=Hashable)

#: Query heads of a batch of one, by how many share a KV head.
HEADS = {1: (8, 16, 32, 64, 128), 4: (8, 32, 128)}

#: A sample of calls takes about as many seconds, of at most so many calls.
SAMPLE_SECONDS, MOST_CALLS = 5e-3, 50

#: Samples of each, at most.
SAMPLES = 9

#: What shares a threshold.
KIND = ("D", "causal", "group", "heads")

#: Thresholds are multiples of it.
STEP = 128

#: Between which `auto` chooses.
TAKEN = ("helion_attn", "sdpa_bf16")

#: The parts of the table that a suite makes: what was measured, and its crossovers.
PARTS = {"auto": ("measured", "rows"), "training": ("training_measured", "training")}

#: Bound on the time of what `auto` takes, and on `auto`'s own, over the faster one's.
BOUND = 1.03

#: What `recipe="auto"` reads; `report.py` writes it.
CONFIG = Path("helion_attn/configs/auto.json")

# --- measurement ----------------------------------------------------------------------------------


def workloads(options: Options) -> list[Workload]:
    """As many queries as keys, in a batch of one."""
    if options.device.type == "cpu":
        return [workload(1, 4, S, S, D) for D in options.dims for S in (64, 128)]
    lengths = LENGTHS[:4:2] if options.quick else LENGTHS
    return [
        dataclasses.replace(workload(1, H, S, S, D, causal), H_kv=H // group)
        for D in options.dims
        for causal in (False, True)
        for group, heads in HEADS.items()
        for H in heads
        for S in lengths
    ]


def ms_back_to_back(
    calls: Mapping[Key, Callable[[], object]], device: torch.device, samples: int, warmup: int = 3
) -> dict[Key, float]:
    """Median milliseconds of a call among others of its kind, the host's share included; samples are shuffled."""

    def sample(call: Callable[[], object], count: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(device)
        return (time.perf_counter() - started) / count

    counts = {}
    for key, call in calls.items():
        for _ in range(warmup if device.type == "cuda" else 0):
            call()
        counts[key] = max(1, min(MOST_CALLS, int(SAMPLE_SECONDS / sample(call, 1))))
    taken: dict[Key, list[float]] = {key: [] for key in calls}
    generator = random.Random(0)
    for _ in range(samples):
        for key in generator.sample(list(calls), len(calls)):
            taken[key].append(sample(calls[key], counts[key]))
    return {key: 1e3 * statistics.median(times) for key, times in taken.items()}


def run(options: Options, results: Results) -> None:
    """All in every cell, by turns."""
    found = workloads(options)
    compile_all(found, [DEFAULT], options)
    for w in progress(found, "auto"):
        q, k, v = make_qkv("randn", w.B, w.H, w.H_kv, w.M, w.N, w.D, torch.bfloat16, options.device)
        grouped = w.H_kv != w.H
        calls: dict[tuple[str, str | None], Callable[[], object]] = {
            ("helion_attn", DEFAULT): functools.partial(ha.attention, q, k, v, causal=w.causal),
            ("sdpa_bf16", None): functools.partial(
                scaled_dot_product_attention, q, k, v, is_causal=w.causal, enable_gqa=grouped
            ),
            ("auto", None): functools.partial(ha.attention, q, k, v, causal=w.causal, recipe="auto"),
        }
        backend = torch._fused_sdp_choice(q, k, v, is_causal=w.causal, enable_gqa=grouped)
        try:
            ms = ms_back_to_back(calls, options.device, min(options.repeats, SAMPLES))
        except Exception as error:  # a cell that fails is a result, not the end of the run
            results.add(*(row_of(*key, w) | {"error_message": first_line(error)} for key in calls))
            continue
        results.add(*(row_of(*key, w, ms[key]) | {"backend": SDPBackend(backend).name} for key in calls))


def row_of(impl: str, recipe: str | None, w: Workload, ms: float | None = None) -> Row:
    """A row, with what its threshold depends on."""
    return result_row(impl, w, "e2e", "randn", recipe=recipe, ms=ms) | {"group": w.H // w.H_kv, "heads": w.B * w.H}


# --- crossovers -----------------------------------------------------------------------------------


def cells_of(rows: list[Row]) -> dict[tuple[Any, ...], dict[int, dict[str, float]]]:
    """Milliseconds of each value of `KIND`, by length and implementation."""
    cells: dict[tuple[Any, ...], dict[int, dict[str, float]]] = {}
    for row in rows:
        kind = tuple(row[name] for name in KIND)
        if row.get("ms") is not None:
            cells.setdefault(kind, {}).setdefault(row["N"], {})[row["impl"]] = row["ms"]
    return cells


def speedups(rows: list[Row]) -> dict[tuple[Any, ...], dict[int, float]]:
    """The default's speed over PyTorch's by length, for each value of `KIND`."""
    return {
        kind: {S: ms["sdpa_bf16"] / ms["helion_attn"] for S, ms in by_length.items() if {*TAKEN} <= ms.keys()}
        for kind, by_length in cells_of(rows).items()
    }


def from_length(faster: dict[int, float]) -> int | None:
    """The length from which on the default is taken: where least time is lost over all that were measured.

    Between two lengths it is where a line through the logarithms of both speedups is 0.

    Args:
        faster: the default's speed over PyTorch's, by length.

    Returns:
        None if it is never taken.
    """
    lengths = sorted(faster)
    logs = [math.log(faster[S]) for S in lengths]

    def lost(first: int) -> float:
        return sum(max(x, 0.0) for x in logs[:first]) - sum(min(x, 0.0) for x in logs[first:])

    first = min(range(len(lengths) + 1), key=lost)
    if first == len(lengths):
        return None
    if first == 0 or not logs[first - 1] < 0 < logs[first]:
        return lengths[first]
    share = -logs[first - 1] / (logs[first] - logs[first - 1])
    between = lengths[first - 1] * (lengths[first] / lengths[first - 1]) ** share
    return min(lengths[first], STEP * math.ceil(between / STEP))


def crossovers_of(loaded: Loaded) -> list[Row]:
    """Of suite `auto`: from which length on the default is faster, for each value of `KIND`."""
    return [
        dict(zip(KIND, kind, strict=True)) | {"from_length": from_length(faster)}
        for kind, faster in speedups(rows_of(loaded, "auto")).items()
    ]


def training_rows(loaded: Loaded) -> list[Row]:
    """Of suite `training`: both passes of the two between which `auto` chooses, with what a threshold depends on."""
    rows = rows_of(loaded, "training", stage="both")
    taken = [row for row in rows if row["impl"] in TAKEN and row["recipe"] in (None, DEFAULT)]
    return [row | {"group": row["H"] // row["H_kv"], "heads": row["B"] * row["H"]} for row in taken]


def training_crossovers_of(loaded: Loaded) -> list[Row]:
    """Of suite `training`: the same for both passes, of the heads that the first length had at which it is faster.

    Its cells have fewer heads the longer they are. What is faster at no length has the fewest of all.
    """
    found = []
    rows = training_rows(loaded)
    for D, causal, group in values_of(rows, "D", "causal", "group"):
        of_kind = [row for row in rows if (row["D"], row["causal"], row["group"]) == (D, causal, group)]
        ms: dict[int, dict[str, float]] = {}
        for row in of_kind:
            ms.setdefault(row["N"], {})[row["impl"]] = row["ms"]
        faster = {S: of["sdpa_bf16"] / of["helion_attn"] for S, of in ms.items() if {*TAKEN} <= of.keys()}
        crossing = from_length(faster)
        reached = [row for row in of_kind if crossing is not None and row["N"] >= crossing]
        heads = min(reached, key=lambda row: row["N"])["heads"] if reached else min(row["heads"] for row in of_kind)
        kind = dict(zip(KIND, (D, causal, group, heads), strict=True))
        found.append(kind | {"from_length": crossing})
    return found


def tables(loaded: Loaded) -> list[Table]:
    """Speedups by length, and from where on 8 bits are taken."""
    found = speedups(rows_of(loaded, "auto"))
    lengths = sorted({S for by_length in found.values() for S in by_length})
    body = []
    for (D, causal, group, heads), by_length in found.items():
        crossing = from_length(by_length)
        kv = str(heads) if group == 1 else f"{heads}:{heads // group}"
        figures = [number(by_length.get(S), ".2f") for S in lengths]
        body.append([f"{D}, {mask(causal)}", kv, *figures, "-" if crossing is None else str(crossing)])
    headers = ["D, mask", "heads", *(f"S {S}" for S in lengths), "8 bits from"]
    return [Table("PyTorch's time / BALANCED's, calls back to back", headers, body)] if body else []


def checks(loaded: Loaded) -> list[Check]:
    """What the thresholds take, and a call of `auto` with its choosing: time over the faster one's."""
    found = []
    cells = cells_of(rows_of(loaded, "auto"))
    for kind, by_length in speedups(rows_of(loaded, "auto")).items():
        (D, causal, group, heads), crossing = kind, from_length(by_length)
        for S, faster in by_length.items():
            takes_8_bits = crossing is not None and crossing <= S
            lost = max(1.0, 1 / faster if takes_8_bits else faster)
            where = f"S {S}, D {D}, {mask(causal)}, {heads} heads, groups of {group}"
            found.append(Check("what auto takes, time / the faster one's", where, lost, BOUND))
            ms = cells[kind][S]
            called = ratio(ms.get("auto"), min(ms[impl] for impl in TAKEN))
            found.append(Check("a call of auto, time / the faster one's", where, called, BOUND))
    return found


def training_checks(loaded: Loaded) -> list[Check]:
    """What `auto` takes where inputs require grad: time of both passes over the faster one's."""
    found, rows = [], training_rows(loaded)
    for row in rows:
        of_both = [of for of in rows if all(of[name] == row[name] for name in ("B", "H", "H_kv", "N", "D", "causal"))]
        ms = {of["impl"]: of["ms"] for of in of_both}
        if row["impl"] == TAKEN[0] and {*TAKEN} <= ms.keys():
            lost = ms[TAKEN[0] if takes_8_bits(loaded, row, trains=True) else TAKEN[1]] / min(ms.values())
            where = f"S {row['N']}, D {row['D']}, {mask(row['causal'])}, {row['heads']} heads"
            found.append(Check("what auto takes of both passes, time / the faster one's", where, lost, BOUND))
    return found


def takes_8_bits(loaded: Loaded, row: Row, trains: bool = False) -> bool:
    """What `recipe="auto"` takes of a workload with nothing but a mask, by crossovers in the results, of their card."""
    suite, name = ("training", "TRAINING_CROSSOVERS") if trains else ("auto", "CROSSOVERS")
    crossovers = json.loads(config(loaded, CONFIG.read_text()))[PARTS[suite][1]]
    # Nothing of these is read: 4 GB that are not there.
    q, k = (
        torch.empty_strided((row["B"], H, row["N"], row["D"]), (0, 0, 0, 1), dtype=torch.bfloat16, requires_grad=trains)
        for H in (row["H"], row["H_kv"])
    )
    problem, options = dense_problem(q, k, k, causal=row["causal"]), {"causal": row["causal"]}
    gpu = loaded.get(suite, {}).get("meta", {}).get("gpu") or choice.FALLBACK_GPU
    with (
        patch.object(choice, name, tuple(choice.Crossover(**of) for of in crossovers)),
        patch.object(choice, "gpu_of_table", lambda device, trains: gpu),
    ):
        return choice.pytorch_call(problem, options) is None


# --- the table of `recipe="auto"` ------------------------------------------------------------------


def config(loaded: Loaded, before: str) -> str:
    """What `CONFIG` should be: with the crossovers of cards that were measured, and those of others as before.

    Args:
        loaded: the results.
        before: what it is.
    """
    kept = json.loads(before)
    names = ("gpu", "torch", "cudnn", "date", "commit", "command")
    for suite, (measured, rows) in PARTS.items():
        meta = loaded.get(suite, {}).get("meta", {})
        if meta.get("gpu") is None:
            continue
        for part in (measured, rows):
            kept[part] = [row for row in kept[part] if row["gpu"] != meta["gpu"]]
        kept[measured].append({name: meta.get(name) for name in names})
        found = crossovers_of(loaded) if suite == "auto" else training_crossovers_of(loaded)
        kept[rows] += [{"gpu": meta["gpu"], **row} for row in found]
    lines = {part: ",\n  ".join(map(json.dumps, rows)) for part, rows in kept.items()}
    return "{\n" + ",\n".join(f' "{part}": [\n  {text}\n ]' for part, text in lines.items()) + "\n}\n"


SUITE = Suite("auto", run, {"auto": Block("auto", tables)})
