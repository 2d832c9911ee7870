"""Benchmarks the rungs between 16 bits and 8: the bf16 baseline, the hybrid and FP8, beside peers.

    python benchmarks/attention.py --suite ladder

The cells are those of Colfax Research's FP8 figure (FlashAttention-3's authors; forward, full attention): 16k tokens x
hidden 2048, kernel only, and the hybrid from bf16 to bf16 as well. Their table of RMSE has fp16, the hybrid and FP8.
"""

from __future__ import annotations

from command import progress
from harness import Results
from problem import Contender, Options, Problem, in_fp16, make_problem, measure, oracle, others, ours, workload
from recipes import DEFAULT, RUNGS
from tables import BF16_PEERS, FP8_PEERS

from helion_attn.testing import relative_error
from helion_attn.workloads import BENCH_HIDDEN, BENCH_TOKENS

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

#: Query rows that are checked against the oracle.
CHECKED_ROWS = 64


def pv_error(contender: Contender, problem: Problem) -> float:
    """The share of P and V: the error against the oracle on the dequantised Q and K and the unquantised V."""
    p = problem
    prepared = contender.prepare(p.q, p.k, p.v, p.workload.causal, p.workload.D**-0.5)
    assert prepared.dequantized is not None
    q, k, _ = prepared.dequantized()
    expected = oracle(q[p.batches, :, p.rows], k[p.batches], p.v[p.batches], p.workload.causal)
    return relative_error(prepared.output(prepared.run())[p.batches, :, p.rows], expected)


def run_ladder(options: Options, results: Results) -> None:
    """Every rung in every cell; a row with its error, and with its time if it ran."""
    on_cpu = options.device.type == "cpu"
    lengths = (128,) if on_cpu else (4096,) if options.quick else LENGTHS
    contenders = [
        *ours(options, [DEFAULT, *RUNGS]),
        *ours(options, ["hybrid"], "e2e"),
        *others(options, [*FP8_PEERS, *BF16_PEERS]),
        *in_fp16(options),
    ]
    for D, S in progress([(D, S) for D in options.dims for S in lengths], "ladder"):
        w = workload(1, 2, S, S, D) if on_cpu else workload(BENCH_TOKENS // S, BENCH_HIDDEN // D, S, S, D)
        problem = make_problem(w, "randn", options, CHECKED_ROWS)
        rows = measure(problem, contenders, options)
        for contender, row in zip(contenders, rows, strict=True):
            if contender.recipe is not None and contender.stage == "kernel" and "error_message" not in row:
                row["error_pv"] = pv_error(contender, problem)
        results.add(*rows)
