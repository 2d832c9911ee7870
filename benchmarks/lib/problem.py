"""One cell of a suite: inputs with their right answer, and a checked run of one implementation on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import helion_attn as ha
from benchmarks.lib.harness import Row, attention_flops, result_row, time_interleaved
from benchmarks.lib.peers import (
    E2E_IMPLS,
    FP16_IMPLS,
    IMPLS,
    Prepare,
    Prepared,
    helion_attn_e2e,
    helion_attn_with,
    values_of,
)
from benchmarks.lib.recipes import RECIPES
from benchmarks.lib.suite import Options
from benchmarks.lib.tables import mask
from devtools.inputs import make_qkv
from devtools.workloads import BENCH_HIDDEN, BENCH_TOKENS, Workload
from helion_attn.options import ScoreOptions
from helion_attn.reference import rounding_model
from helion_attn.testing import error_budget, relative_error

#: Query rows that most suites check against the oracle, in every head of the first and the last batch.
CHECKED_ROWS = 64


@dataclass(frozen=True)
class Contender:
    """What a row measures."""

    impl: str  # its name
    prepare: Prepare  # makes it ready for one set of inputs
    recipe: str | None = None  # a key of `recipes.RECIPES`, if it is ours
    stage: str = "kernel"  # "kernel" or "e2e"
    model: ha.Recipe | None = None  # whose rounding model says how large its kernel error may be, if not `recipe`'s


def ours(options: Options, recipes: list[str], stage: str = "kernel") -> list[Contender]:
    """This package by recipe, if it was asked for."""
    make = helion_attn_with if stage == "kernel" else helion_attn_e2e
    names = recipes if "helion_attn" in options.impls else []
    return [Contender("helion_attn", make(RECIPES[name]), name, stage) for name in names]


def others(options: Options, impls: list[str] | None = None, stage: str = "kernel") -> list[Contender]:
    """The peers, or those named, as far as they were asked for; with stage "e2e" those that quantise themselves."""
    table = IMPLS if stage == "kernel" else E2E_IMPLS
    names = [name for name in options.impls if name != "helion_attn" and name in (table if impls is None else impls)]
    return [Contender(name, table[name], stage=stage) for name in names]


def in_fp16(options: Options) -> list[Contender]:
    """The peers on the same values in fp16, as far as they were asked for."""
    return [Contender(name, run) for name, (needs, run) in FP16_IMPLS.items() if needs in options.impls]


def workload(B: int, H: int, M: int, N: int, D: int, causal: bool = False) -> Workload:
    """An untagged one, as many KV heads as heads."""
    return Workload(f"b{B}_h{H}_m{M}_n{N}_d{D}_{mask(causal)}", B, H, H, M, N, D, causal, frozenset())


def grid_workload(S: int, D: int, causal: bool = False) -> Workload:
    """16k tokens x hidden 2048, in sequences of S."""
    return workload(BENCH_TOKENS // S, BENCH_HIDDEN // D, S, S, D, causal)


def dry_workload(D: int, causal: bool = False) -> Workload:
    """What stands for the grid in a dry run on the CPU."""
    return workload(1, 2, 64, 64, D, causal)


def oracle(q: Tensor, k: Tensor, v: Tensor, causal: bool, block_mask: ha.BlockMask | None = None) -> Tensor:
    """The fp64 oracle's output."""
    expected = ha.reference.attention(q, k, v, causal=causal, block_mask=block_mask)
    assert isinstance(expected, Tensor)
    return expected


@dataclass(frozen=True)
class Problem:
    """Inputs, and the answer on some of the query rows."""

    workload: Workload  # the shape
    kind: str  # of input
    q: Tensor  # q, k, v: BHSD
    k: Tensor
    v: Tensor
    batches: slice  # that are checked
    # The query rows that are checked. With a causal mask they must be the last ones, with which a shorter Q stays
    # aligned bottom-right.
    rows: slice
    expected: Tensor  # the fp64 oracle on these
    block_mask: ha.BlockMask | None = None  # of the rows that are checked, for all batches, or None

    def errors(self, prepared: Prepared, out: Tensor) -> dict[str, float]:
        """`error_kernel`, `error_total` and `rmse` of what `prepared.run` returned."""
        out = prepared.output(out)[self.batches, :, self.rows]
        given = self.expected
        if prepared.dequantized is not None:
            q, k, v = prepared.dequantized()
            of_rows = q[self.batches, :, self.rows], k[self.batches], v[self.batches]
            given = oracle(*of_rows, self.workload.causal, self.block_mask)
        return {
            "error_kernel": relative_error(out, given),
            "error_total": relative_error(out, self.expected),
            "rmse": (out.double() - self.expected).square().mean().sqrt().item(),
        }


def problem_of(
    w: Workload,
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    checked_rows: int | None = None,
    block_mask: ha.BlockMask | None = None,
) -> Problem:
    """A problem of these inputs.

    Args:
        w: the shape.
        kind: of input.
        q, k, v: BHSD.
        checked_rows: limits what is compared with the oracle, and what that costs.
        block_mask: what the queries see; the same for all batches.
    """
    batches = rows = slice(None)
    if checked_rows is not None and checked_rows < w.M:
        batches = slice(None, None, max(1, w.B - 1))
        # The last rows under a causal mask, else an odd stride, which meets every position within a query block.
        rows = slice(w.M - checked_rows, None) if w.causal else slice(None, None, w.M // checked_rows | 1)
    seen = None if block_mask is None else rows_of_mask(block_mask, torch.arange(w.M, device=q.device)[rows])
    expected = oracle(q[batches, :, rows], k[batches], v[batches], w.causal, seen)
    return Problem(w, kind, q, k, v, batches, rows, expected, seen)


def rows_of_mask(mask: ha.BlockMask, rows: Tensor) -> ha.BlockMask:
    """What some queries of a mask see, int64 [rows], as a mask of these queries, which can have no tail."""
    assert mask.tail is None
    return ha.BlockMask.from_dense(torch.stack([mask._seen_by(rows, kinds) for kinds in mask._kinds()[0]]))


def make_problem(w: Workload, kind: str, options: Options, checked_rows: int | None = None) -> Problem:
    """bf16 inputs for `w`."""
    q, k, v = make_qkv(kind, w.B, w.H, w.H_kv, w.M, w.N, w.D, torch.bfloat16, options.device, 0, w.D_v)
    return problem_of(w, kind, q, k, v, checked_rows)


def first_line(error: Exception) -> str:
    """The type and the first line, for a row."""
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}"


def check(contender: Contender, problem: Problem) -> tuple[Row, Callable[[], Tensor] | None]:
    """Runs one contender once: its row, not timed yet, and what to time (None if it failed)."""
    w, c = problem.workload, contender
    row = result_row(c.impl, w, c.stage, problem.kind, recipe=c.recipe)
    try:
        prepared = c.prepare(problem.q, problem.k, problem.v, w.causal, w.D**-0.5)
        return row | problem.errors(prepared, prepared.run()), prepared.run
    except Exception as error:  # one implementation's failure is a result, not the end of the run
        return row | {"error_message": first_line(error)}, None


def kernel_error_budget(problem: Problem, recipe: ha.Recipe) -> float:
    """The largest kernel error that is right: by the rounding model's, in the checked rows of one head.

    With a block mask, of all heads.
    """
    heads, mask, causal = slice(None if problem.block_mask else 1), problem.block_mask, problem.workload.causal
    q, (k, v) = problem.q[:1, heads, problem.rows], (x[:1, heads] for x in (problem.k, problem.v))
    rounded = rounding_model.quantize(q, k, v, recipe)
    out, _lse = rounding_model.attend(rounded, recipe, ScoreOptions(causal=causal), mask)
    error = relative_error(out.to(q.dtype), oracle(*values_of(rounded), causal, mask))
    return error_budget(error, q.dtype, device=q.device)


def checked(problem: Problem, contenders: list[Contender]) -> list[tuple[Row, Callable[[], Tensor] | None]]:
    """`check` of each contender; what is not to be timed, since it failed or is ours and wrong, has nothing to run."""
    found: list[tuple[Row, Callable[[], Tensor] | None]] = []
    for contender in contenders:
        row, run = check(contender, problem)
        if run is not None and contender.recipe is not None:
            row["error_budget"] = kernel_error_budget(problem, contender.model or RECIPES[contender.recipe])
            # "not <=": a NaN is over budget too.
            if not row["error_kernel"] <= row["error_budget"]:
                row["note"], run = f"not timed: kernel error over {row['error_budget']:.3g}", None
        found.append((row, run))
    return found


def timed(w: Workload, found: list[tuple[Row, Callable[[], Tensor] | None]], options: Options) -> list[Row]:
    """The rows of what `checked` returned, all of shape `w`, with their times, interleaved."""
    rows = [row for row, _ in found]
    runs = {i: run for i, (_, run) in enumerate(found) if run is not None}
    for i, ms in time_interleaved(runs, options.device, options.repeats).items():
        rows[i] |= {"ms": ms, "tflops": attention_flops(w) / ms / 1e9}
    return rows


def measure(problem: Problem, contenders: list[Contender], options: Options) -> list[Row]:
    """A row for each contender, with its error and its time; no time for a wrong answer of ours.

    Args:
        problem: what they run on.
        contenders: what runs, interleaved.
        options: of the run.
    """
    return timed(problem.workload, checked(problem, contenders), options)
