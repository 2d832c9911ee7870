"""Benchmarks FP8 attention against its peers: speed, accuracy, preprocessing.

    python benchmarks/attention.py                          # all suites, on the GPU
    python benchmarks/attention.py --suite speed --quick    # a few cells
    python benchmarks/attention.py --device cpu --quick     # a dry run in the interpreter, this package only

Each suite writes `<out>/{attention,accuracy,preprocess}.json`, after every cell, so that an interrupted run
keeps what it measured; the tables come last. `report.py` turns the files into plots and the README's tables.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import report
import torch
from harness import (
    Results,
    Row,
    attention_flops,
    copier,
    copy_bandwidth,
    describe_run,
    gigabytes_per_second,
    nbytes,
    result_row,
    synchronize,
    time_interleaved,
)
from peers import IMPLS, Prepare, Prepared, available, helion_attn_e2e
from rich.console import Console
from rich.progress import track
from tables import load
from torch import Tensor

import helion_attn as ha
from helion_attn.testing import INPUT_KINDS, make_qkv, relative_error
from helion_attn.workloads import BENCH_HIDDEN, BENCH_TOKENS, Workload, tagged

#: Kernel error (randn) above which a run of ours is wrong, and its time not worth reporting.
ERROR_BUDGET = 0.026

#: Query rows that the speed suite checks against the oracle, in every head of the first and the last batch.
CHECKED_ROWS = 64

RECIPE = "balanced"

Cell = TypeVar("Cell")

# Where output is a file there is no width to ask for, and tables would be cut at 80.
console = Console(width=None if sys.stdout.isatty() else 160)


@dataclass(frozen=True)
class Options:
    """What the command line chose."""

    device: torch.device
    quick: bool
    repeats: int
    impls: list[str]


# --- workloads ------------------------------------------------------------------------------------


def speed_workloads(options: Options) -> list[Workload]:
    """16k tokens x hidden 2048, by head dim, length and mask."""
    if options.device.type == "cpu":
        return [_workload(1, 2, 128, 128, 64, causal) for causal in (False, True)]
    workloads = [w for w in tagged("bench") if w.M == w.N]  # the peers disagree on what causal means elsewhere
    return [w for w in workloads if w.M == 4096] if options.quick else workloads


def accuracy_workloads(options: Options) -> list[Workload]:
    """Shapes on which every input is tried."""
    if options.device.type == "cpu":
        return [_workload(1, 2, 128, 128, 64, causal) for causal in (False, True)]
    dims = (128,) if options.quick else (64, 128, 256)
    return [_workload(1, 8, 4096, 4096, D, causal) for D in dims for causal in (False, True)]


def long_workloads(options: Options) -> list[Workload]:
    """A few queries against ever more keys."""
    if options.device.type == "cpu":
        return [_workload(1, 2, 64, 256, 64, False)]
    return [w for w in tagged("long") if w.D == 128] if options.quick else tagged("long")


def preprocess_workloads(options: Options) -> list[Workload]:
    """16k tokens x hidden 2048 in long and in short sequences."""
    if options.device.type == "cpu":
        return [_workload(1, 2, 128, 128, 64, False)]
    dims = (128,) if options.quick else (64, 128, 256)
    return [_workload(BENCH_TOKENS // S, BENCH_HIDDEN // D, S, S, D, False) for D in dims for S in (4096, 16384)]


def _workload(B: int, H: int, M: int, N: int, D: int, causal: bool) -> Workload:
    mask = "causal" if causal else "full"
    return Workload(f"b{B}_h{H}_m{M}_n{N}_d{D}_{mask}", B, H, H, M, N, D, causal, frozenset())


# --- one cell -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Inputs, and the answer on some of the query rows.

    Attributes:
        workload: the shape.
        kind: of input.
        q, k, v: bf16, BHSD.
        batches: that are checked.
        rows: the query rows that are checked. With a causal mask they must be the last ones, with which a
            shorter Q stays aligned bottom-right.
        expected: the fp64 oracle on these.
    """

    workload: Workload
    kind: str
    q: Tensor
    k: Tensor
    v: Tensor
    batches: slice
    rows: slice
    expected: Tensor

    @property
    def sm_scale(self) -> float:
        """The usual one."""
        return self.workload.D**-0.5

    def errors(self, prepared: Prepared, out: Tensor) -> tuple[float, float]:
        """(error_kernel, error_total) of what `prepared.run` returned."""
        out = prepared.output(out)[self.batches, :, self.rows]
        given = _oracle(*prepared.dequantized(), self.workload, self.batches, self.rows)
        return relative_error(out, given), relative_error(out, self.expected)


def _oracle(q: Tensor, k: Tensor, v: Tensor, w: Workload, batches: slice, rows: slice) -> Tensor:
    expected = ha.reference.attention(q[batches, :, rows], k[batches], v[batches], causal=w.causal, sm_scale=w.D**-0.5)
    assert isinstance(expected, Tensor)
    return expected


def make_problem(w: Workload, kind: str, options: Options, checked_rows: int | None = None) -> Problem:
    """Inputs for `w`; `checked_rows` limits what is compared with the oracle, which is what that costs."""
    q, k, v = make_qkv(kind, w.B, w.H, w.H_kv, w.M, w.N, w.D, torch.bfloat16, options.device, seed=0)
    batches = rows = slice(None)
    if checked_rows is not None and checked_rows < w.M:
        batches = slice(None, None, max(1, w.B - 1))
        # The last rows under a causal mask, else an odd stride, which meets every position within a query block.
        rows = slice(w.M - checked_rows, None) if w.causal else slice(None, None, w.M // checked_rows | 1)
    return Problem(w, kind, q, k, v, batches, rows, _oracle(q, k, v, w, batches, rows))


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}"


def check(impl: str, stage: str, prepare: Prepare, problem: Problem) -> tuple[Row, Callable[[], Tensor] | None]:
    """Runs one implementation once: its row, not timed yet, and what to time (None if it failed)."""
    recipe = RECIPE if impl == "helion_attn" else None
    w, kind = problem.workload, problem.kind
    try:
        prepared = prepare(problem.q, problem.k, problem.v, w.causal, problem.sm_scale)
        error_kernel, error_total = problem.errors(prepared, prepared.run())
    except Exception as error:  # one implementation's failure is a result, not the end of the run
        return result_row(impl, w, stage, kind, recipe=recipe, error_message=_first_line(error)), None
    row = result_row(impl, w, stage, kind, recipe=recipe, error_kernel=error_kernel, error_total=error_total)
    return row, prepared.run


# --- suites ---------------------------------------------------------------------------------------


def run_speed(options: Options, results: Results) -> None:
    """Kernel and end-to-end times; every row with its error, and no time for a wrong answer of ours."""
    contenders: list[tuple[str, str, Prepare]] = [(impl, "kernel", IMPLS[impl]) for impl in options.impls]
    if "helion_attn" in options.impls:
        contenders.append(("helion_attn", "e2e", helion_attn_e2e))
    for w in _progress(speed_workloads(options), "speed"):
        problem = make_problem(w, "randn", options, CHECKED_ROWS)
        rows: list[Row] = []
        runs: dict[int, Callable[[], Tensor]] = {}
        for impl, stage, prepare in contenders:
            row, run = check(impl, stage, prepare, problem)
            if run is not None:
                # "not <=": a NaN is over budget too.
                if impl == "helion_attn" and not row["error_kernel"] <= ERROR_BUDGET:
                    row["note"] = f"not timed: kernel error over {ERROR_BUDGET}"
                else:
                    runs[len(rows)] = run
            rows.append(row)
        for i, ms in time_interleaved(runs, options.device, options.repeats).items():
            rows[i] |= {"ms": ms, "tflops": attention_flops(w) / ms / 1e9}
        results.add(*rows)


def run_accuracy(options: Options, results: Results) -> None:
    """Errors of every implementation on every kind of input, and on ever longer contexts with a biased V."""
    cells = [(w, kind) for w in accuracy_workloads(options) for kind in INPUT_KINDS]
    cells += [(w, "biased_v") for w in long_workloads(options)]
    for w, kind in _progress(cells, "accuracy"):
        problem = make_problem(w, kind, options)
        results.add(*(check(impl, "kernel", IMPLS[impl], problem)[0] for impl in options.impls))


def run_preprocess(options: Options, results: Results) -> None:
    """`quantize` against a copy of the same bytes, and the memory `attention` takes beyond its output."""
    for w in _progress(preprocess_workloads(options), "preprocess"):
        q, k, v = make_qkv("randn", w.B, w.H, w.H_kv, w.M, w.N, w.D, torch.bfloat16, options.device, seed=0)
        packed = _packed_bytes(q, k, v)
        functions: dict[str, Callable[[], object]] = {
            "helion_attn": lambda q=q, k=k, v=v: ha.quantize(q, k, v, recipe=ha.BALANCED),  # type: ignore[misc]
            "copy": copier(q, k, v),
        }
        ms = time_interleaved(functions, options.device, options.repeats)
        size = nbytes(q, k, v)
        for impl, written in (("helion_attn", packed), ("copy", size)):
            ours = impl == "helion_attn"
            results.add(
                result_row(
                    impl,
                    w,
                    "preprocess",
                    "randn",
                    recipe=RECIPE if ours else None,
                    ms=ms[impl],
                    copy_ratio=ms[impl] / ms["copy"] if ours else None,
                    gbs=gigabytes_per_second(size + written, ms[impl]),
                )
            )
        if options.device.type == "cuda":
            results.add(_memory_row(w, q, k, v, packed))
    if options.device.type == "cuda":
        results.meta["copy_gbs"] = copy_bandwidth(2**30, options.device)
        results.add()


def _packed_bytes(q: Tensor, k: Tensor, v: Tensor) -> int:
    packed = ha.quantize(q, k, v, recipe=ha.BALANCED)
    return nbytes(*(x for x in vars(packed).values() if isinstance(x, Tensor)))


def _memory_row(w: Workload, q: Tensor, k: Tensor, v: Tensor, packed: int) -> Row:
    run = helion_attn_e2e(q, k, v, False, w.D**-0.5).run
    run()  # what is allocated once and kept is no part of the peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = run()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - nbytes(out)
    return result_row("helion_attn", w, "e2e", "randn", recipe=RECIPE, peak_extra_bytes=extra, packed_bytes=packed)


SUITES: dict[str, tuple[str, Callable[[Options, Results], None]]] = {
    "speed": ("attention", run_speed),
    "accuracy": ("accuracy", run_accuracy),
    "preprocess": ("preprocess", run_preprocess),
}


# --- command line ---------------------------------------------------------------------------------


def _progress(cells: Iterable[Cell], suite: str) -> Iterable[Cell]:
    return track(list(cells), f"{suite:<10}", console=console, transient=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=[*SUITES, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="a few cells of each suite")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the result files")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, help="timed rounds per cell (default 20; 5 when quick, 3 on the CPU)")
    parser.add_argument("--impls", nargs="+", choices=list(IMPLS), default=list(IMPLS), metavar="IMPL")
    parser.add_argument("--commit", help="commit to record, where there is no git to ask")
    parser.add_argument("--no-plots", action="store_true", help="leave the plots to report.py")
    args = parser.parse_args()

    device = torch.device(args.device)
    names, skipped = available(device)
    for name in args.impls:
        if name in skipped:
            console.print(f"[yellow]skipped {name}: {skipped[name]}")
    repeats = args.repeats or (3 if device.type == "cpu" else 5 if args.quick else 20)
    options = Options(device, args.quick, repeats, [name for name in names if name in args.impls])

    meta = describe_run(device, args.commit)
    for suite in SUITES if args.suite == "all" else [args.suite]:
        name, run = SUITES[suite]
        started = time.perf_counter()
        results = Results(args.out / f"{name}.json", dict(meta))
        run(options, results)
        synchronize(device)
        console.print(f"{suite}: {time.perf_counter() - started:.0f} s -> {results.path}")

    loaded = load(args.out)
    report.print_tables(loaded, console, failing_only=True)
    if not args.no_plots:
        report.draw_plots(loaded, args.out)


if __name__ == "__main__":
    main()
