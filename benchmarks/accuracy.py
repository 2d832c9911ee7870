"""Benchmarks the accuracy of every recipe and peer, what each recipe costs, and preprocessing.

    python benchmarks/accuracy.py                          # all its suites, on the GPU
    python benchmarks/accuracy.py --quick                  # head dim 128, short
    python benchmarks/accuracy.py --dims 64 256            # some head dims
    python benchmarks/accuracy.py --device cpu --quick     # a dry run in the interpreter, this package only

Writes `<out>/{accuracy,preprocess,stages}.json`. Most of the time is compilation, so `--workers` processes
measure errors, a head dim each, while this one compiles what it then times alone. Parts, in each row's `part`:

    rmse       FlashAttention-3's outlier distribution and error measure, also with one choice of FAST changed
    inputs     every kind of input, full and causal
    long       ever more keys
    criterion  FlashAttention-3's own pass criterion, on tensors quantised elsewhere
    real       Q, K and V of a trained model
    cost       end to end and kernel time of every recipe
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import fa3_criterion
import preprocess
import real_qkv
import torch
from command import Suite, console, progress, run_command
from harness import Results, Row, attention_flops, time_interleaved
from peers import fp8_tensor
from problem import Contender, Options, check, in_fp16, make_problem, others, ours, problem_of, workload
from recipes import PRESETS, RECIPES, RUNGS, described
from torch import Tensor

import helion_attn as ha
from helion_attn.testing import INPUT_KINDS, error_budget, relative_error
from helion_attn.workloads import BENCH_HIDDEN, BENCH_TOKENS, Workload, tagged

FP8_PEERS = ["fa3_fp8", "cudnn_fp8"]

#: FlashAttention-3's own figures, by what stands for each here. Its FP8 there has block scales and a Hadamard
#: rotation, which were not released.
PAPER = {
    "source": "FlashAttention-3, arXiv:2407.08608, section 4.3",
    "rmse": {"flash_fp16": 3.2e-4, "fa3_fp16": 1.9e-4, "fp8_tensor": 2.4e-2, "fa3_fp8": 9.1e-3},
}

#: Head dims that only the pass criterion adds.
CRITERION_DIMS = (96, 192)

#: Query rows that are checked before a recipe is timed.
CHECKED_ROWS = 64


# --- errors ---------------------------------------------------------------------------------------


def rmse(options: Options, D: int) -> Iterator[Row]:
    """Outliers, full attention."""
    contenders = in_fp16(options) + others(options, ["fa3_bf16"])
    contenders += [Contender("fp8_tensor", fp8_tensor), *others(options, FP8_PEERS), *ours(options, list(RECIPES))]
    for S in (128,) if options.device.type == "cpu" else (1024, 4096):
        problem = make_problem(workload(1, _heads(options), S, S, D), "outlier", options)
        for contender in contenders:
            yield check(contender, problem, part="rmse")[0]


def inputs(options: Options, D: int) -> Iterator[Row]:
    """Every kind of input, full and causal."""
    S = 128 if options.device.type == "cpu" else 4096
    for causal in (False, True):
        for kind in INPUT_KINDS:
            problem = make_problem(workload(1, _heads(options), S, S, D, causal), kind, options)
            for contender in (*ours(options, list(PRESETS)), *others(options)):
                yield check(contender, problem, part="inputs")[0]


def long(options: Options, D: int) -> Iterator[Row]:
    """A few queries against ever more keys."""
    found = [w for w in tagged("long") if w.D == D]
    if options.device.type == "cpu":
        found = [workload(1, 2, 64, 256, D)]
    for w in found[:1] if options.quick else found:
        for kind in INPUT_KINDS:
            problem = make_problem(w, kind, options)
            for contender in (*ours(options, [*PRESETS, *RUNGS]), *others(options)):
                yield check(contender, problem, part="long")[0]


def criterion(options: Options, D: int) -> Iterator[Row]:
    """See `fa3_criterion`."""
    for seed, w in enumerate(fa3_criterion.workloads(options, D)):
        yield from fa3_criterion.measure(options, w, seed)


def real(options: Options, D: int) -> Iterator[Row]:
    """Every layer of a trained model."""
    try:
        if options.qkv is None:
            layers = real_qkv.capture(128 if options.device.type == "cpu" else real_qkv.LENGTH, options.device)
        else:
            layers = torch.load(options.qkv, map_location=options.device)
    except ModuleNotFoundError as error:
        console.print(f"[yellow]skipped the trained model: package {error.name} is not installed")
        return
    for layer, (q, k, v) in enumerate(layers):
        if options.device.type == "cpu":
            q, k, v = (x[:1, :2] for x in (q, k, v))
        B, H, S, _ = q.shape
        problem = problem_of(workload(B, H, S, S, D), "real", q, k, v)
        for contender in (*ours(options, list(PRESETS)), *others(options)):
            yield check(contender, problem, part="real", layer=layer)[0]


def _heads(options: Options) -> int:
    return 2 if options.device.type == "cpu" else 8


Part = Callable[[Options, int], Iterator[Row]]


def parts_of(options: Options) -> dict[int, tuple[Part, ...]]:
    """What is measured at each head dim: the larger first, since they take longer."""
    parts: dict[int, tuple[Part, ...]] = {
        D: (rmse, inputs, long, criterion) for D in sorted(options.dims, reverse=True)
    }
    if not options.quick:
        parts |= {D: (criterion,) for D in CRITERION_DIMS if D not in parts}
    parts[real_qkv.DIM] = (*parts.get(real_qkv.DIM, ()), real)
    return parts


def measure_errors(options: Options, D: int) -> list[Row]:
    """All rows of one head dim."""
    return [row for part in parts_of(options)[D] for row in part(options, D)]


# --- cost -----------------------------------------------------------------------------------------


def cost_workloads(options: Options) -> list[Workload]:
    """16k tokens x hidden 2048."""
    if options.device.type == "cpu":
        return [workload(1, 2, 128, 128, D) for D in options.dims]
    lengths = (4096,) if options.quick else (4096, 16384)
    return [workload(BENCH_TOKENS // S, BENCH_HIDDEN // D, S, S, D) for D in options.dims for S in lengths]


@dataclass(frozen=True)
class Cost:
    """One shape, compiled and checked: rows without times, and by row what to time, if it is right."""

    workload: Workload
    rows: list[Row]
    runs: dict[int, Callable[[], Tensor]]


def prepare_cost(options: Options, w: Workload) -> Cost:
    """Compiles and checks every recipe."""
    cost = Cost(w, [], {})
    problem = make_problem(w, "randn", options, CHECKED_ROWS)
    q, k, v = problem.q[problem.batches, :, problem.rows], problem.k[problem.batches], problem.v[problem.batches]
    for name, recipe in RECIPES.items() if "helion_attn" in options.impls else ():
        model = ha.reference.fp8_attention(q, k, v, recipe=recipe)
        assert isinstance(model, Tensor)
        model_error = relative_error(model, problem.expected)
        for contender in (*ours(options, [name]), *ours(options, [name], "e2e")):
            row, run = check(contender, problem, part="cost")
            if run is not None and row["error_total"] <= error_budget(model_error, q.dtype, device=options.device):
                cost.runs[len(cost.rows)] = run
            elif run is not None:  # also where the error is NaN
                row["note"] = f"not timed: total error {row['error_total']:.3g}, rounding model {model_error:.3g}"
            cost.rows.append(row)
    return cost


def run(options: Options, results: Results) -> None:
    """The suite."""
    results.meta |= {"recipes": described(), "paper": PAPER}
    dims = list(parts_of(options))
    if options.workers:
        # Each process needs a CUDA context of its own, hence no fork.
        with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(measure_errors, options, D): D for D in dims}
            costs = _prepare_costs(options)
            for future in progress(as_completed(futures), "errors", len(futures)):
                if (error := future.exception()) is None:
                    results.add(*future.result())
                    dims.remove(futures[future])
                else:
                    console.print(f"[red]a process failed, measuring D {futures[future]} in this one: {error!r}")
    else:
        costs = _prepare_costs(options)
    for D in progress(dims, "errors"):
        results.add(*measure_errors(options, D))
    # Nothing else runs on the GPU from here on.
    for cost in progress(costs, "cost"):
        for i, ms in time_interleaved(cost.runs, options.device, options.repeats).items():
            cost.rows[i] |= {"ms": ms, "tflops": attention_flops(cost.workload) / ms / 1e9}
        results.add(*cost.rows)


def _prepare_costs(options: Options) -> list[Cost]:
    return [prepare_cost(options, w) for w in progress(cost_workloads(options), "compiling")]


SUITES: dict[str, tuple[str, Suite]] = {
    "accuracy": ("accuracy", run),
    "preprocess": ("preprocess", preprocess.run),
    "stages": ("stages", preprocess.run_stages),
}


def main(argv: list[str] | None = None) -> int:
    """The command."""
    return run_command(__doc__, SUITES, argv)


if __name__ == "__main__":
    raise SystemExit(main())
