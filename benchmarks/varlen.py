"""Benchmarks sequences of different lengths in one call, against FlashAttention-3's `flash_attn_varlen_func`.

Batches of 16k to 33k tokens, H = 2048 / D, self-attention, full and causal: of equal lengths, of one long sequence
among short ones, of lengths as in a log-normal distribution, and of three clips of video. Stages: "kernel", inputs
quantised before, and "e2e", from bf16 to bf16, which for bf16 attention are the same. With equal lengths,
`helion_attn_fixed` is the kernel without variable lengths, on the same tokens. FLOPs are 4 m n D H summed over
sequences, halved for causal. Errors are those of every sequence's last rows, to fp64; those of peers do not decide.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import torch
from torch import Tensor

import helion_attn as ha
from benchmarks.lib.checks import Check, checks_over_fa3
from benchmarks.lib.harness import Loaded, Results, Row, result_row, time_interleaved
from benchmarks.lib.peers import available, fa3_varlen_16bit, fa3_varlen_fp8
from benchmarks.lib.problem import first_line
from benchmarks.lib.recipes import PRESETS
from benchmarks.lib.suite import Block, Options, Suite, progress
from benchmarks.lib.tables import LABELS, Table, error_text, mask, number, rows_of, values_of
from devtools.inputs import make_qkv
from devtools.workloads import BENCH_HIDDEN, Workload
from helion_attn.ops import varlen
from helion_attn.problem import VarlenArgs
from helion_attn.testing import error_budget, relative_error
from helion_attn.varlen import varlen_problem

#: Rows of a sequence that are checked against the oracle, the last ones.
CHECKED_ROWS = 16

#: What runs of this package: (recipe, stage).
OURS = (("balanced", "kernel"), ("fast", "kernel"), ("balanced", "e2e"), ("fast", "e2e"))

PEERS = {"fa3_fp8": fa3_varlen_fp8, "fa3_bf16": fa3_varlen_16bit}


def lognormal(count: int, median: int, sigma: float) -> list[int]:
    """Lengths, the same every time."""
    rng = random.Random(0)
    return [max(1, min(16384, round(median * rng.lognormvariate(0, sigma)))) for _ in range(count)]


#: The lengths of each batch.
BATCHES = {
    "uniform_1k": [1024] * 16,
    "uniform_4k": [4096] * 4,
    "skewed": [1024] * 8 + [16384] + [1024] * 7,
    "lognormal": lognormal(32, 600, 1.0),
    # Clips of 49, 25 and 13 frames in CogVideoX: 13, 7 and 4 latent frames of 1350 tokens, and 226 of text.
    "video": [17776, 9676, 5626],
}


def flops(lengths: list[int], H: int, D: int, causal: bool) -> float:
    """Two products, a multiply and an add each; half of it is masked away when causal."""
    return sum(4.0 * n * n * D * H for n in lengths) / (2 if causal else 1)


def last_rows(x: Tensor, lengths: list[int]) -> Tensor:
    """The last rows of every sequence of [tokens, heads, D]."""
    return torch.cat([part[-CHECKED_ROWS:] for part in x.split(lengths)])


def expected(
    qkv: tuple[Tensor, Tensor, Tensor], cu_seqlens: Tensor, lengths: list[int], causal: bool, recipe: ha.Recipe
) -> tuple[Tensor, Tensor]:
    """The oracle's output on the last rows, and the rounding model's. Aligned bottom-right, they need no others."""
    q, k, v = qkv
    rows = torch.tensor([0, *(min(n, CHECKED_ROWS) for n in lengths)], device=q.device).cumsum(0).to(torch.int32)
    given = (last_rows(q, lengths), k, v, rows, cu_seqlens)
    oracle, _ = ha.reference.attention_varlen(*given, causal=causal)
    model, _ = ha.reference.fp8_attention_varlen(*given, causal=causal, recipe=recipe)
    return oracle, model


def attend(problem: VarlenArgs, packed: varlen.PackedVarlen) -> Tensor:
    """The output of packed sequences."""
    return varlen.attend(problem, packed)[0]


def our_runs(
    qkv: tuple[Tensor, Tensor, Tensor], cu_seqlens: Tensor, lengths: list[int], causal: bool
) -> dict[tuple[str, str, str], Callable[[], Tensor]]:
    """What is timed, by (impl, recipe, stage)."""
    runs: dict[tuple[str, str, str], Callable[[], Tensor]] = {}
    for name, stage in OURS:
        recipe = PRESETS[name]
        if stage == "kernel":
            problem = varlen_problem(*qkv, cu_seqlens, cu_seqlens, causal=causal, recipe=recipe)
            runs["helion_attn", name, stage] = functools.partial(attend, problem, varlen.quantize(problem))
        else:
            runs["helion_attn", name, stage] = functools.partial(
                ha.attention_varlen, *qkv, cu_seqlens, cu_seqlens, causal=causal, recipe=recipe
            )
        if len(set(lengths)) == 1:
            fixed = [x.unflatten(0, (len(lengths), -1)) for x in qkv]
            if stage == "kernel":
                quantised = ha.quantize(*fixed, layout="bshd", recipe=recipe)
                run = functools.partial(ha.attention_quantized, quantised, causal=causal)
            else:
                run = functools.partial(ha.attention, *fixed, layout="bshd", causal=causal, recipe=recipe)
            runs["helion_attn_fixed", name, stage] = lambda run=run: run().flatten(0, 1)  # type: ignore[misc]
    return runs


def measure(
    batch: str, lengths: list[int], H: int, D: int, causal: bool, device: torch.device, repeats: int
) -> list[Row]:
    """The rows of one batch. No time is reported for a wrong answer of ours."""
    longest = max(lengths)
    w = Workload(f"varlen_{batch}", len(lengths), H, H, longest, longest, D, causal, frozenset())
    q, k, v = (
        x[0].transpose(0, 1).contiguous()
        for x in make_qkv("randn", 1, H, H, sum(lengths), sum(lengths), D, torch.bfloat16, device)
    )
    qkv = (q, k, v)
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    described: Row = {"batch": batch, "tokens": sum(lengths)}
    rows: dict[tuple[str, str, str], Row] = {}
    runs: dict[tuple[str, str, str], Callable[[], object]] = {}

    answers = {name: expected(qkv, cu_seqlens, lengths, causal, PRESETS[name]) for name, _ in OURS}
    for key, run in our_runs(qkv, cu_seqlens, lengths, causal).items():
        impl, recipe, stage = key
        oracle, model = answers[recipe]
        error = relative_error(last_rows(run(), lengths), oracle)
        rows[key] = result_row(impl, w, stage, "randn", recipe=recipe, error_total=error) | described
        budget = error_budget(relative_error(model.to(q.dtype), oracle), q.dtype, device=device)
        # "not <=": a NaN is over budget too.
        if not error <= budget:
            rows[key]["note"] = f"not timed: error over {budget:.3g}"
        else:
            runs[key] = run

    runnable, _ = available(device)
    for impl, prepare in PEERS.items():
        if impl not in runnable:
            continue
        key = (impl, "", "kernel")
        rows[key] = result_row(impl, w, "kernel", "randn") | described
        try:
            peer = prepare(*qkv, cu_seqlens, lengths, causal)
            rows[key]["error_total"] = relative_error(last_rows(peer(), lengths), next(iter(answers.values()))[0])
        except Exception as problem:  # a peer's failure is a result, not the end of the run
            rows[key]["error_message"] = first_line(problem)
            continue
        runs[key] = peer

    for key, ms in time_interleaved(runs, device, repeats).items():
        rows[key] |= {"ms": ms, "tflops": flops(lengths, H, D, causal) / ms / 1e9}
    return list(rows.values())


def run(options: Options, results: Results) -> None:
    """Every batch at every head dim."""
    cells = [(name, lengths, BENCH_HIDDEN // D, D) for D in options.dims for name, lengths in BATCHES.items()]
    if options.device.type == "cpu":
        cells = [("uniform", [9, 9], 1, 32), ("skewed", [5, 40], 1, 32)]
    for name, lengths, H, D in progress(cells, "varlen"):
        for causal in (False, True):
            results.add(*measure(name, lengths, H, D, causal, options.device, options.repeats))
            if options.device.type == "cuda":
                torch.cuda.empty_cache()


#: (impl, recipe, stage) of each column.
COLUMNS = (
    ("helion_attn", "balanced", "kernel"),
    ("helion_attn", "fast", "kernel"),
    ("helion_attn_fixed", "balanced", "kernel"),
    ("helion_attn", "balanced", "e2e"),
    ("fa3_fp8", None, "kernel"),
    ("fa3_bf16", None, "kernel"),
)


def _title(impl: str, recipe: str | None, stage: str) -> str:
    name = LABELS.get(recipe or impl, impl)
    fixed = ", equal lengths" if impl == "helion_attn_fixed" else ""
    return f"{name}{fixed}{', e2e' if stage == 'e2e' else ''}"


def tables(loaded: Loaded) -> list[Table]:
    """TFLOP/s and errors by batch."""
    tables = []
    for causal in (False, True):
        rows = rows_of(loaded, "varlen", causal=causal)
        body = []
        for D, batch in values_of(rows, "D", "batch"):
            cell: dict[tuple[str, str | None, str], Row] = {
                (row["impl"], row["recipe"], row["stage"]): row
                for row in rows
                if (row["D"], row["batch"]) == (D, batch)
            }
            speeds = (number(cell.get(column, {}).get("tflops"), ".0f") for column in COLUMNS)
            errors = (error_text(cell.get(column, {}).get("error_total")) for column in (COLUMNS[0], *COLUMNS[-2:]))
            body.append([str(D), batch, *speeds, " / ".join(errors)])
        if body:
            headers = [
                "D",
                "batch",
                *(_title(*column) for column in COLUMNS),
                "total error: BALANCED / FA3 FP8 / FA3 bf16",
            ]
            tables.append(Table(f"Packed sequences, {mask(causal)}, TFLOP/s", headers, body))
    return tables


def checks(loaded: Loaded) -> list[Check]:
    """Packed sequences beside FlashAttention-3's."""
    return checks_over_fa3(
        "packed sequences",
        rows_of(loaded, "varlen", stage="kernel"),
        ("D", "causal", "batch"),
        lambda row: f"{row['batch']}, D {row['D']}, {mask(row['causal'])}",
    )


SUITE = Suite(
    "varlen",
    run,
    {"varlen": Block("varlen", tables)},
)
