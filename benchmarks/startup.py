"""Benchmarks start-up: the first call of `attention` in a process, with and without compiled kernels on the disk.

Every (head dim, mask) has caches of its own, in a temporary folder that is empty at first, and two processes, one after
the other: the first compiles (cold), the second finds what it compiled (warm). The cold ones of all cases run side by
side, the warm ones alone. Default recipe, one sequence of 1024 tokens x hidden 2048. A row has

    import_torch_s, import_s   importing PyTorch, then this package with its kernels, hence Triton
    context_s                  the first use of the GPU, and the inputs
    first_s                    the first call, until its output is there; a cold one imports Helion
    triton_s                   Triton's compiler and its cache in it; the rest of a cold call is mostly Helion
    compiled, reused           kernels that Triton compiled in it, and that it found on the disk
    later_ms                   a call after that, the median
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.checks import Check, figure
from benchmarks.lib.harness import Loaded, Results, Row, result_row
from benchmarks.lib.problem import workload
from benchmarks.lib.recipes import DEFAULT
from benchmarks.lib.suite import Block, Options, Suite, progress
from benchmarks.lib.tables import Table, mask, number, rows_of, values_of
from devtools.workloads import BENCH_HIDDEN, Workload

S = 1024

#: Where the process finds this package, and this checkout's kernels.
ROOT = Path(__file__).resolve().parents[1]


def run_process(w: Workload, device: torch.device, caches: Path) -> dict[str, Any]:
    """What a fresh process says of its start, with its caches in `caches`."""
    # Without its own variable, Triton's cache lies in Helion's, and that in PyTorch's.
    folders = {"TRITON_CACHE_DIR": caches / "triton", "TORCHINDUCTOR_CACHE_DIR": caches / "inductor"}
    shape = [str(x) for x in (w.H, w.N, w.D)]
    command = [sys.executable, "-m", "benchmarks.startup_process", *shape]
    command += [mask(w.causal), device.type]
    environment = os.environ | {name: str(folder) for name, folder in folders.items()}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"error_message": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def measure(cases: list[Workload], device: torch.device, caches: Path) -> Iterator[Row]:
    """The rows, as they come: a cold start of each case, then a warm one."""

    def row(w: Workload, cache: str) -> Row:
        said = run_process(w, device, caches / w.name)
        return result_row("helion_attn", w, "e2e", "randn", recipe=DEFAULT) | {"cache": cache} | said

    with ThreadPoolExecutor(len(cases)) as threads:
        yield from threads.map(row, cases, itertools.repeat("cold"))
    yield from (row(w, "warm") for w in cases)


def run(options: Options, results: Results) -> None:
    """A cold and a warm process for each head dim and mask."""
    cases = [workload(1, BENCH_HIDDEN // D, S, S, D, causal) for D in options.dims for causal in (False, True)]
    if options.device.type == "cpu":
        cases = [workload(1, 1, 64, 64, 64, True)]
    with tempfile.TemporaryDirectory() as caches:
        for row in progress(measure(cases, options.device, Path(caches)), "startup", total=2 * len(cases)):
            results.add(row)


def start_seconds(row: Row) -> float | None:
    """Of a first call with all imports but PyTorch's; None if it failed."""
    imports, first = row.get("import_s"), row.get("first_s")
    return None if imports is None or first is None else imports + first


def tables(loaded: Loaded) -> list[Table]:
    """Seconds of a process's first call, with nothing compiled and with all compiled, and what comes before it."""
    rows = rows_of(loaded, "startup")
    body = []
    for D, causal in values_of(rows, "D", "causal"):
        by_cache: dict[str, Row] = {row["cache"]: row for row in rows if (row["D"], row["causal"]) == (D, causal)}
        cold, warm = by_cache.get("cold", {}), by_cache.get("warm", {})
        figures = [start_seconds(cold), start_seconds(warm), warm.get("import_s"), warm.get("triton_s")]
        before = [warm.get(name) for name in ("import_torch_s", "context_s")]
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
    headers = ["D", "mask", "cold, s", "warm, s", "of it imports, s", "of it Triton, s"]
    headers += ["kernels compiled: cold / warm", "later, ms", "import PyTorch, s", "CUDA context, s"]
    title = "First call of a process, imports but PyTorch's included, bf16 [1, 2048 / D, 1024, D], default recipe"
    return [Table(title, headers, body, keys=2)] if body else []


def checks(loaded: Loaded) -> list[Check]:
    """The first call of a process that finds its kernels compiled, imports but PyTorch's included."""
    found = []
    for D, causal in values_of(rows_of(loaded, "startup"), "D", "causal"):
        rows = rows_of(loaded, "startup", D=D, causal=causal, cache="warm")
        started = [row | {"start_s": start_seconds(row)} for row in rows]
        name = "first call from a warm cache, imports but PyTorch's included, s"
        found.append(Check(name, f"D {D}, {mask(causal)}", figure(started, DEFAULT, "start_s"), 2.0))
    return found


SUITE = Suite("startup", run, {"startup": Block("startup", tables)})
