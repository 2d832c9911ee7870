"""The command line that the suites share."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import report
import torch
from harness import Results, describe_run, synchronize
from peers import IMPLS, available
from problem import Options
from rich.console import Console
from rich.progress import track
from tables import load

Cell = TypeVar("Cell")

#: A suite measures what `Options` chose and adds rows to its result file.
Suite = Callable[[Options, Results], None]

DIMS = (64, 128, 256)

#: Processes beside this one.
WORKERS = 6

# Where output is a file there is no width to ask for, and tables would be cut at 80.
console = Console(width=None if sys.stdout.isatty() else 160)


def progress(cells: Iterable[Cell], what: str, total: int | None = None) -> Iterable[Cell]:
    """Shows how many cells are done."""
    cells = cells if total is not None else list(cells)
    return track(cells, f"{what:<10}", total=total, console=console, transient=True)


def run_command(doc: str | None, suites: dict[str, tuple[str, Suite]], argv: list[str] | None = None) -> int:
    """Parse `argv`, run the suites that it names, print their tables and draw their plots.

    Args:
        doc: what --help says.
        suites: by the name that --suite takes: the result file's name, and the suite.
        argv: instead of the command line.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=[*suites, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="a few cells of each suite")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the result files")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dims", type=int, nargs="+", help=f"head dims (default {DIMS}; 128 when quick, 64 on the CPU)"
    )
    parser.add_argument("--repeats", type=int, help="timed rounds per cell (default 20; 5 when quick, 1 on the CPU)")
    parser.add_argument("--impls", nargs="+", choices=list(IMPLS), default=list(IMPLS), metavar="IMPL")
    parser.add_argument(
        "--workers",
        type=int,
        help=f"processes that measure the accuracy suite's errors, or compile ahead (default {WORKERS}; 0 on the CPU)",
    )
    parser.add_argument("--qkv", type=Path, help="what real_qkv.py saved, where the trained model cannot be run")
    parser.add_argument("--commit", help="commit to record, where there is no git to ask")
    parser.add_argument("--no-plots", action="store_true", help="leave the plots to report.py")
    args = parser.parse_args(argv)

    device = torch.device(args.device)
    if on_cpu := device.type == "cpu":
        torch.set_num_threads(1)  # the interpreter's tiles are so small that threads only get in its way
    names, skipped = available(device)
    for name in args.impls:
        if name in skipped:
            console.print(f"[yellow]skipped {name}: {skipped[name]}")
    dims = tuple(args.dims) if args.dims else (64,) if on_cpu else (128,) if args.quick else DIMS
    repeats = args.repeats or (1 if on_cpu else 5 if args.quick else 20)
    workers = args.workers if args.workers is not None else 0 if on_cpu else WORKERS
    options = Options(
        device, args.quick, repeats, [name for name in names if name in args.impls], dims, workers, args.qkv
    )

    meta = describe_run(device, args.commit)
    for name in suites if args.suite == "all" else [args.suite]:
        file, suite = suites[name]
        started = time.perf_counter()
        results = Results(args.out / f"{file}.json", dict(meta))
        suite(options, results)
        synchronize(device)
        console.print(f"{name}: {time.perf_counter() - started:.0f} s -> {results.path}")

    loaded = load(args.out)
    report.print_tables(loaded, console, failing_only=True)
    if not args.no_plots:
        report.draw_plots(loaded, args.out)
    return 0
