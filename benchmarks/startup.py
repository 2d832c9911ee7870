"""Benchmarks start-up: the first call of `attention` in a process, with and without compiled kernels on the disk.

    python benchmarks/startup.py                 # on the GPU
    python benchmarks/startup.py --device cpu    # a dry run in the interpreter, which compiles nothing

Every (head dim, mask) has caches of its own, in a temporary folder that is empty at first, and two processes, one after
the other: the first compiles (cold), the second finds what it compiled (warm). The cold ones of all cases run side by
side, the warm ones alone. Default recipe, one sequence of 1024 tokens x hidden 2048. Writes `<out>/startup.json`:

    import_torch_s, import_s   importing PyTorch, then this package with its kernels, hence Helion and Triton
    context_s                  the first use of the GPU, and the inputs
    first_s                    the first call, until its output is there
    triton_s                   Triton's compiler and its cache in it; the rest is mostly Helion
    compiled, reused           kernels that Triton compiled in it, and that it found on the disk
    later_ms                   a call after that, the median
"""

from __future__ import annotations

import argparse
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
from harness import Results, Row, describe_run, result_row
from problem import workload
from recipes import DEFAULT

from helion_attn.workloads import BENCH_HIDDEN, Workload

DIMS = (64, 128, 256)

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


def main(argv: list[str] | None = None) -> int:
    """Parse `argv`, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the result file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dims", type=int, nargs="+", default=list(DIMS), help="head dims")
    parser.add_argument("--commit", help="commit to record, where there is no git to ask")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    cases = [workload(1, BENCH_HIDDEN // D, S, S, D, causal) for D in args.dims for causal in (False, True)]
    if device.type == "cpu":
        cases = [workload(1, 1, 64, 64, 64, True)]
    results = Results(args.out / "startup.json", describe_run(device, args.commit))
    with tempfile.TemporaryDirectory() as caches:
        for row in progress(measure(cases, device, Path(caches)), "startup", total=2 * len(cases)):
            results.add(row)
    for row in results.rows:
        names = [
            *("D", "causal", "cache", "import_torch_s", "import_s", "context_s", "first_s", "triton_s", "compiled"),
            *("reused", "later_ms", "error_message"),
        ]
        print(*(f"{name} {row[name]}" for name in names if row.get(name) is not None), sep="  ", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
