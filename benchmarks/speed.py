"""Benchmarks speed: kernel only and end to end, on FlashAttention-3's grid, beside every peer.

python benchmarks/attention.py --suite speed
"""

from __future__ import annotations

import dataclasses

from command import progress
from harness import Results
from problem import Contender, Options, make_problem, measure, others, ours, workload
from recipes import DEFAULT
from roofline import gemm_tflops

from helion_attn.workloads import Workload, tagged

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


def contenders_of(options: Options) -> list[Contender]:
    """Our kernels, the peers, and ours from bf16 to bf16."""
    kernels, whole = ([*ours(options, [DEFAULT], stage), *in_a_column(options, stage)] for stage in ("kernel", "e2e"))
    return [*kernels, *others(options), *whole]


def run_speed(options: Options, results: Results) -> None:
    """Kernel and end-to-end times; every row with its error, and no time for a wrong answer of ours."""
    results.meta["gemm_tflops"] = gemm_tflops(options)
    for w in progress(workloads(options), "speed"):
        problem = make_problem(w, "randn", options, CHECKED_ROWS)
        results.add(*measure(problem, contenders_of(options), options))
