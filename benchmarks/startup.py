"""Benchmarks start-up: the first call of `attention` in a process, with and without compiled kernels on the disk.

Every (head dim, mask) has caches of its own, in a temporary folder that is empty at first, and two processes, one after
the other: the first compiles (cold), the second finds what it compiled (warm). The cold ones of all cases run side by
side, the warm ones alone. Default recipe, one sequence of 1024 tokens x hidden 2048. A row has

    import_torch_s, import_s   importing PyTorch, then this package with its kernels, hence Helion and Triton
    context_s                  the first use of the GPU, and the inputs
    first_s                    the first call, until its output is there
    triton_s                   Triton's compiler and its cache in it; the rest is mostly Helion
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
from command import progress
from harness import Results, Row, result_row
from problem import Options, workload
from recipes import DEFAULT

from helion_attn.workloads import BENCH_HIDDEN, Workload

S = 1024


def run_process(w: Workload, device: torch.device, caches: Path) -> dict[str, Any]:
    """What a fresh process says of its start, with its caches in `caches`."""
    # Without its own variable, Triton's cache lies in Helion's, and that in PyTorch's.
    folders = {"TRITON_CACHE_DIR": caches / "triton", "TORCHINDUCTOR_CACHE_DIR": caches / "inductor"}
    shape = [str(x) for x in (w.H, w.N, w.D)]
    command = [sys.executable, str(Path(__file__).with_name("startup_process.py")), *shape]
    command += ["causal" if w.causal else "full", device.type]
    environment = os.environ | {name: str(folder) for name, folder in folders.items()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"error_message": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def measure(cases: list[Workload], device: torch.device, caches: Path) -> Iterator[Row]:
    """The rows, as they come: a cold start of each case, then a warm one."""

    def row(w: Workload, cache: str) -> Row:
        said = run_process(w, device, caches / w.name)
        return result_row("helion_attn", w, "e2e", "randn", recipe=DEFAULT, cache=cache, **said)

    with ThreadPoolExecutor(len(cases)) as threads:
        yield from threads.map(row, cases, itertools.repeat("cold"))
    yield from (row(w, "warm") for w in cases)


def run_startup(options: Options, results: Results) -> None:
    """A cold and a warm process for each head dim and mask."""
    cases = [workload(1, BENCH_HIDDEN // D, S, S, D, causal) for D in options.dims for causal in (False, True)]
    if options.device.type == "cpu":
        cases = [workload(1, 1, 64, 64, 64, True)]
    with tempfile.TemporaryDirectory() as caches:
        for row in progress(measure(cases, options.device, Path(caches)), "startup", total=2 * len(cases)):
            results.add(row)
