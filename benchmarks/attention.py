"""Benchmarks FP8 attention against its peers: speed, masks, splits, accuracy, preprocessing.

    python benchmarks/attention.py                          # all suites, on the GPU
    python benchmarks/attention.py --suite speed --quick    # a few cells
    python benchmarks/attention.py --device cpu --quick     # a dry run in the interpreter, this package only

Each suite writes `<out>/{attention,masks,ladder,split,accuracy,preprocess,stages}.json` as it goes: an interrupted run
keeps what it measured. The tables come last. `report.py` turns the files into plots and the tables of the documents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import accuracy
import ladder
import masks
import splits
from command import Suite, progress, run_command
from harness import Results, Row, attention_flops, time_interleaved
from problem import Contender, Options, check, make_problem, others, ours, workload
from recipes import DEFAULT
from torch import Tensor

from helion_attn.workloads import Workload, tagged

#: Kernel error (randn) above which a run of ours is wrong, and its time not worth reporting.
ERROR_BUDGET = 0.026

#: Query rows that are checked against the oracle, in every head of the first and the last batch.
CHECKED_ROWS = 64


def workloads(options: Options) -> list[Workload]:
    """16k tokens x hidden 2048, by head dim, length and mask."""
    if options.device.type == "cpu":
        return [workload(1, 2, 128, 128, D, causal) for D in options.dims for causal in (False, True)]
    # M == N: elsewhere the peers disagree on what causal means.
    found = [w for w in tagged("bench") if w.M == w.N and w.D in options.dims]
    return [w for w in found if w.M == 4096] if options.quick else found


def in_a_column(options: Options, stage: str) -> list[Contender]:
    """The other preset that users choose for speed, as an implementation of its own."""
    return [dataclasses.replace(contender, impl="fast") for contender in ours(options, ["fast"], stage)]


def run_speed(options: Options, results: Results) -> None:
    """Kernel and end-to-end times; every row with its error, and no time for a wrong answer of ours."""
    kernels, whole = ([*ours(options, [DEFAULT], stage), *in_a_column(options, stage)] for stage in ("kernel", "e2e"))
    contenders = [*kernels, *others(options), *whole]
    for w in progress(workloads(options), "speed"):
        problem = make_problem(w, "randn", options, CHECKED_ROWS)
        rows: list[Row] = []
        runs: dict[int, Callable[[], Tensor]] = {}
        for contender in contenders:
            row, run = check(contender, problem)
            if run is not None:
                # "not <=": a NaN is over budget too.
                if contender.recipe is not None and not row["error_kernel"] <= ERROR_BUDGET:
                    row["note"] = f"not timed: kernel error over {ERROR_BUDGET}"
                else:
                    runs[len(rows)] = run
            rows.append(row)
        for i, ms in time_interleaved(runs, options.device, options.repeats).items():
            rows[i] |= {"ms": ms, "tflops": attention_flops(w) / ms / 1e9}
        results.add(*rows)


SUITES: dict[str, tuple[str, Suite]] = {
    "speed": ("attention", run_speed),
    "masks": ("masks", masks.run_masks),
    "ladder": ("ladder", ladder.run_ladder),
    "split": ("split", splits.run_split),
    **accuracy.SUITES,
}

if __name__ == "__main__":
    raise SystemExit(run_command(__doc__, SUITES))
