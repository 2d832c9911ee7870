"""Benchmarks FP8 attention against its peers: speed, masks, packed sequences, decoding, accuracy, preprocessing, start.

    python benchmarks/attention.py                          # all suites, on the GPU
    python benchmarks/attention.py --suite speed --quick    # a few cells
    python benchmarks/attention.py --device cpu --quick     # a dry run in the interpreter, this package only

Each suite writes `<out>/<suite>.json` (`speed` attention.json) as it goes: an interrupted run keeps what it measured.
The tables come last. `report.py` turns the files into plots and the tables of the documents.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # a script's own folder is on the path; the package is found in the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.lib.harness import RESULTS, Results, describe_run, load, synchronize
from benchmarks.lib.peers import IMPLS, available
from benchmarks.lib.suite import DIMS, Options, console
from benchmarks.report import draw_plots, print_tables
from benchmarks.suites import SUITES

#: Processes beside this one.
WORKERS = 6


def main(argv: list[str] | None = None) -> int:
    """Parse `argv`, or the command line, run the suites that it names, print their tables and draw their plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=[*SUITES, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="a few cells of each suite")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
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
    parser.add_argument(
        "--model-qkv", type=Path, nargs="+", default=[], help="what model_channels.py saved, instead of its models"
    )
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
    impls = [name for name in names if name in args.impls]
    options = Options(device, args.quick, repeats, impls, dims, workers, args.qkv, args.model_qkv)

    meta = describe_run(device, args.commit)
    for name in SUITES if args.suite == "all" else [args.suite]:
        started = time.perf_counter()
        results = Results(args.out / f"{SUITES[name].file}.json", dict(meta))
        SUITES[name].measure(options, results)
        synchronize(device)
        console.print(f"{name}: {time.perf_counter() - started:.0f} s -> {results.path}")

    loaded = load(args.out)
    print_tables(loaded, failing_only=True)
    if not args.no_plots:
        draw_plots(loaded, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
