"""Benchmarks few queries on many keys, as a prompt in chunks has them: beside one run of the keys, and FA3 FP8.

    python benchmarks/attention.py --suite split

Kernel only, merge included, one causal sequence, BALANCED; and the same keys on paged caches, Q quantised on the way.
FlashAttention-3 chooses its own number of splits.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

import helion_attn as ha
from benchmarks.decode import filled_cache
from benchmarks.lib.checks import Check, checks_over_fa3
from benchmarks.lib.harness import Loaded, Results, Row
from benchmarks.lib.peers import Prepare, Prepared, fa3_fp8_with, helion_attn_with
from benchmarks.lib.problem import Contender, make_problem, measure
from benchmarks.lib.recipes import DEFAULT, RECIPES
from benchmarks.lib.suite import Block, Options, Suite, progress
from benchmarks.lib.tables import Table, by_impl, error_text, number, ratio, rows_of, values_of
from devtools.workloads import Workload
from helion_attn import ops
from helion_attn.api import quantized_problem
from helion_attn.configs import scheduling
from helion_attn.configs.scheduling import key_splits
from helion_attn.numerics import FORMAT_MAX
from helion_attn.reference.kv_cache import closed, k_descales, row_descale, to_format, v_descales
from helion_attn.types import CACHE_RECIPE

#: Query rows that are checked against the oracle: the last, which see most.
CHECKED_ROWS = 16

#: How rows of a paged cache are named, by the recipe of its keys.
PAGED = {"paged": CACHE_RECIPE, "paged, fast": ha.FAST}

#: So many queries are a prompt, and have at least so much of `attention`'s speed: each, and in the mean.
LEAST_PROMPT, LEAST_SHARE, MEAN_SHARE = 128, 0.85, 0.92

LENGTHS, QUERIES, HEADS, KV_HEADS = (16384, 131072), (16, 128, 512, 2048), (32, 64), 8

#: From what a launch is to the number of its splits, as `scheduling.key_splits` has it.
Chooser = Callable[[int, int, int, int], int]


def workloads(options: Options) -> list[Workload]:
    """By head dim, heads, keys and queries. `workload` has no KV heads of their own."""
    cells = [(D, H, N, M) for D in options.dims for H in HEADS for N in LENGTHS for M in QUERIES]
    if options.device.type == "cpu":
        cells = [(D, 2, 300, 5) for D in options.dims]
    elif options.quick:
        cells = [cell for cell in cells if cell[2:] == (LENGTHS[0], QUERIES[1])]
    dims = (128, 256) if options.device.type == "cuda" else options.dims
    return [
        Workload(f"split_d{D}_h{H}_n{N}_m{M}", 1, H, min(H, KV_HEADS), M, N, D, True, frozenset())
        for D, H, N, M in cells
        if D in dims
    ]


def paged(recipe: ha.Recipe, q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
    """The same keys in a paged cache."""
    cache, table, seqlens = filled_cache(k, v, 1, recipe)

    def dequantized() -> tuple[Tensor, Tensor, Tensor]:
        dtype = cache.k8.dtype
        q_descale = row_descale(q, FORMAT_MAX[dtype])
        dq = to_format(q.float(), q_descale, dtype) * q_descale

        def stored(x: Tensor, descale: Tensor, to: torch.dtype) -> Tensor:
            x8, of_key = closed(to_format(x.float(), descale, to), descale, cache.page_size, to)
            return x8 * of_key

        return dq, stored(k, k_descales(k, dtype), dtype), stored(v, v_descales(v), cache.v8.dtype)

    run = functools.partial(ha.attention_kvcache, q, cache, table, seqlens, causal=causal, sm_scale=sm_scale)
    return Prepared(run, lambda out: out, dequantized)


def visible_flops(w: Workload) -> float:
    """2 (D + D_v) H B for each key that a query sees, bottom-right aligned."""
    return 4.0 * w.D * w.H * w.B * (w.M * w.N - w.M * (w.M - 1) / 2)


def choosing(choose: Chooser) -> Prepare:
    """This package's kernel, with `choose` in place of `scheduling.key_splits`."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
        prepared = helion_attn_with(RECIPES[DEFAULT])(q, k, v, causal, sm_scale)
        problem = quantized_problem(ha.quantize(q, k, v), causal=causal, sm_scale=sm_scale)
        with mock.patch.object(scheduling, "key_splits", choose):
            plan = ops.attention_quantized.plan(problem)
        tensors = ops.attention_quantized.tensors(problem)
        return dataclasses.replace(prepared, run=lambda: plan.run(tensors)[0])

    return prepare


def measure_cell(w: Workload, options: Options) -> list[Row]:
    """One cell: a row for each implementation. No time for a wrong answer of ours."""
    problem = make_problem(w, "randn", options, CHECKED_ROWS)
    chosen: list[int] = []

    def noted(*launch: int) -> int:
        # On the CPU nothing is large enough.
        chosen.append(key_splits(*launch) if options.device.type == "cuda" else 2)
        return chosen[-1]

    contenders = [
        Contender("helion_attn", choosing(noted), DEFAULT),
        Contender("one_run", choosing(lambda *_: 1), DEFAULT),
        *(Contender(name, functools.partial(paged, recipe), name, model=recipe) for name, recipe in PAGED.items()),
    ]
    if "fa3_fp8" in options.impls:
        contenders.append(Contender("fa3_fp8", fa3_fp8_with(num_splits=0)))
    rows = measure(problem, contenders, options)
    rows[0] |= {"splits": chosen[-1]} if chosen else {}
    for row in rows:
        if row["ms"] is not None:
            # FLOPs of the keys that are seen: with few queries nearly all, not half.
            row["tflops"] = visible_flops(w) / row["ms"] / 1e9
    return rows


def run(options: Options, results: Results) -> None:
    """Every cell."""
    for w in progress(workloads(options), "split"):
        results.add(*measure_cell(w, options))


def tables(loaded: Loaded) -> list[Table]:
    """Milliseconds with keys split, in one run, and FlashAttention-3's."""
    rows = rows_of(loaded, "split")
    body = []
    for cell_of in values_of(rows, "D", "H", "N", "M"):
        cell = [row for row in rows if (row["D"], row["H"], row["N"], row["M"]) == cell_of]
        ms, error, splits = (by_impl(cell, name) for name in ("ms", "error_total", "splits"))
        times = [ms.get(impl) for impl in ("helion_attn", "one_run", *PAGED, "fa3_fp8")]
        mine, _, of_pages, _, fa3 = times
        body.append(
            [
                *map(str, cell_of),
                number(splits.get("helion_attn"), "d"),
                *(number(t, ".3f") for t in times),
                *(number(ratio(fa3, t), ".2f") for t in (mine, of_pages)),
                " / ".join(error_text(error.get(impl)) for impl in ("helion_attn", "paged", "fa3_fp8")),
            ]
        )
    headers = ["D", "H", "keys", "queries", "splits", "ours, ms", "one run, ms"]
    headers += ["paged, ms", "paged, FAST, ms", "FA3 FP8, ms"]
    headers += ["FA3 / ours", "FA3 / paged", "total error: ours / paged / FA3"]
    title = "Kernel, few causal queries on many keys, B 1, H_kv 8, BALANCED"
    return [Table(title, headers, body, keys=5)] if body else []


def prompt_checks(rows: list[Row]) -> Iterator[Check]:
    """Prompts on a paged cache beside `attention` on the same keys: every cell, and the geometric mean."""
    prompts = [row for row in rows if row["M"] >= LEAST_PROMPT]
    for name, recipe in PAGED.items():
        promise = f"a prompt on a paged cache, {recipe}, speed / attention's"
        speeds = []
        for D, H, N, M in values_of(prompts, "D", "H", "N", "M"):
            ms = by_impl((row for row in prompts if (row["D"], row["H"], row["N"], row["M"]) == (D, H, N, M)), "ms")
            speeds.append(ratio(ms.get("helion_attn"), ms.get(name)))
            where = f"{M} queries, {N} keys, D {D}, {H} heads"
            yield Check(promise, where, speeds[-1], LEAST_SHARE, at_least=True)
        measured = [speed for speed in speeds if speed is not None]
        mean = statistics.geometric_mean(measured) if measured else None
        yield Check(f"{promise}, geometric mean", "", mean, MEAN_SHARE, at_least=True)


def checks(loaded: Loaded) -> list[Check]:
    """Few queries on many keys beside FlashAttention-3's, contiguous and on pages; prompts beside `attention`."""
    return [*prompt_checks(rows_of(loaded, "split"))] + [
        check
        for promise, mine in (("few queries on many keys", DEFAULT), ("few queries on a paged cache", "paged"))
        for check in checks_over_fa3(
            promise,
            rows_of(loaded, "split"),
            ("D", "H", "N", "M"),
            lambda row: f"{row['M']} queries, {row['N']} keys, D {row['D']}, {row['H']} heads",
            mine,
        )
    ]


SUITE = Suite(
    "split",
    run,
    {"split": Block("split", tables)},
)
