"""Benchmarks masks and scores: window, softcap and sinks beside plain causal attention, and FlashAttention-3 FP8.

    python benchmarks/attention.py --suite masks

Kernel only, one sequence of 16384 tokens x hidden 2048. Windows are of 1024 keys and, by head dim, those of gpt-oss,
Mistral and Gemma 3. FlashAttention-3 has no sinks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import helion_attn as ha
from benchmarks.lib.checks import FEATURE_BOUND, Check, figure
from benchmarks.lib.harness import Loaded, Results, Row, attention_flops, result_row, time_interleaved
from benchmarks.lib.peers import Prepared, fa3_fp8_with
from benchmarks.lib.problem import CHECKED_ROWS, first_line, workload
from benchmarks.lib.recipes import DEFAULT, RECIPES
from benchmarks.lib.suite import Block, Options, Suite, progress
from benchmarks.lib.tables import Table, by_impl, error_text, number, ratio, rows_of, values_of
from devtools.inputs import make_qkv
from devtools.workloads import BENCH_HIDDEN, BENCH_TOKENS, Workload
from helion_attn.configs import packing
from helion_attn.testing import relative_error

#: Keys that a row sees, itself among them, at every head dim; and at one, as models of it have it.
WINDOW, OF_MODELS = 1024, {64: 128, 128: 4096, 256: 512}

#: A window's time over its blocks' share of causal attention's, at most.
WINDOW_BOUND = 1.15


@dataclass(frozen=True)
class Scores:
    """What is done to causal scores."""

    window: tuple[int, int] | None = None
    softcap: float | None = None
    sinks: bool = False


def cases(D: int) -> dict[str, Scores]:
    """What is measured at a head dim, by name."""
    sizes = dict.fromkeys((WINDOW, OF_MODELS.get(D, WINDOW)))
    return {
        "causal": Scores(),
        **{f"window {size}": Scores(window=(size - 1, 0)) for size in sizes},
        "softcap": Scores(softcap=30.0),
        "sinks": Scores(sinks=True),
    }


def visible_blocks(S: int, left: int, bm: int, bn: int) -> int:
    """Key blocks of which a query block's rows see some, over all query blocks; each row sees `left` keys before it."""
    first_rows = range(0, S, bm)
    return sum(min(S - 1, row + bm - 1) // bn - max(0, row - left) // bn + 1 for row in first_rows)


def visible_share(w: Workload, left: int) -> float:
    """What a window shows of what causality shows, in this package's key blocks."""
    shape = packing(w.D, w.D)
    return visible_blocks(w.M, left, shape.bm, shape.bn) / visible_blocks(w.M, w.M, shape.bm, shape.bn)


def ours(q: Tensor, k: Tensor, v: Tensor, recipe: str, options: dict[str, Any]) -> Prepared:
    """This package's kernel."""
    qkv = ha.quantize(q, k, v, recipe=RECIPES[recipe])
    run: Callable[[], Any] = functools.partial(ha.attention_quantized, qkv, causal=True, **options)
    return Prepared(run, lambda out: out, lambda: ha.dequantize(qkv))


def measure(w: Workload, name: str, options: Options) -> list[Row]:
    """One case: a row for each implementation."""
    scores = cases(w.D)[name]
    q, k, v = make_qkv("randn", w.B, w.H, w.H_kv, w.M, w.N, w.D, torch.bfloat16, options.device, seed=0)
    sinks = torch.linspace(-2.0, 2.0, w.H, device=q.device) if scores.sinks else None
    asked: dict[str, Any] = {"window": scores.window, "softcap": scores.softcap, "sinks": sinks}
    prepared: dict[str, Callable[[], Prepared]] = {
        recipe: functools.partial(ours, q, k, v, recipe, asked) for recipe in ("fast", DEFAULT)
    }
    if "fa3_fp8" in options.impls and sinks is None:
        peer = fa3_fp8_with(window=scores.window or (-1, -1), softcap=scores.softcap or 0.0)
        prepared["fa3_fp8"] = functools.partial(peer, q, k, v, True, w.D**-0.5)
    rows: list[Row] = []
    runs: dict[int, Callable[[], Tensor]] = {}
    visible = 1.0 if scores.window is None else visible_share(w, scores.window[0])
    last = slice(max(0, w.M - CHECKED_ROWS), None)
    for impl, prepare in prepared.items():
        row = result_row(impl, w, "kernel", "randn", recipe=impl if impl in RECIPES else None)
        row |= {"mask": name, "visible": visible}
        try:
            ready = prepare()
            assert ready.dequantized is not None
            dq, dk, dv = ready.dequantized()
            expected = ha.reference.attention(dq[:, :, last], dk, dv, causal=True, **asked)
            assert isinstance(expected, Tensor)
            error = relative_error(ready.output(ready.run())[:, :, last], expected)
        except Exception as problem:  # one implementation's failure is a result, not the end of the run
            rows.append(row | {"error_message": first_line(problem)})
            continue
        runs[len(rows)] = ready.run
        rows.append(row | {"error_kernel": error})
    for i, ms in time_interleaved(runs, options.device, options.repeats).items():
        rows[i] |= {"ms": ms, "tflops": attention_flops(w) / ms / 1e9}
    return rows


def run(options: Options, results: Results) -> None:
    """Every case at every head dim."""
    S = 256 if options.device.type == "cpu" else BENCH_TOKENS
    for D in progress(options.dims, "masks"):
        H = 2 if options.device.type == "cpu" else BENCH_HIDDEN // D
        for name in cases(D):
            results.add(*measure(workload(1, H, S, S, D, causal=True), name, options))


def tables(loaded: Loaded) -> list[Table]:
    """Milliseconds, and how they compare to plain causal attention and to FlashAttention-3."""
    rows = rows_of(loaded, "masks")
    body = []
    for (D,) in values_of(rows, "D"):
        names = list(dict.fromkeys(row["mask"] for row in rows if row["D"] == D))
        plain = by_impl([row for row in rows if (row["D"], row["mask"]) == (D, "causal")], "ms").get(DEFAULT)
        for name in names:
            cell = [row for row in rows if (row["D"], row["mask"]) == (D, name)]
            ms, error = by_impl(cell, "ms"), by_impl(cell, "error_kernel")
            mine, fast, peer = (ms.get(impl) for impl in (DEFAULT, "fast", "fa3_fp8"))
            line = [str(D), name, *(number(t, ".3f") for t in (mine, fast, peer))]
            line.append(number(mine / (plain * cell[0]["visible"]) if mine and plain else None, ".2f"))
            line.append(number(peer / mine if mine and peer else None, ".2f"))
            body.append([*line, error_text(error.get(DEFAULT))])
    headers = ["D", "scores", "BALANCED, ms", "FAST, ms", "FA3 FP8, ms", "over causal x visible blocks' share"]
    headers += ["FA3 / BALANCED", "our kernel error"]
    return [Table("Kernel, masks and scores on causal attention", headers, body)] if body else []


def checks(loaded: Loaded) -> list[Check]:
    """A window's time over what its blocks' share of causal attention takes; and softcap's, beside FA3's."""
    windows, softcaps = [], []
    rows = rows_of(loaded, "masks")
    for D, name in values_of(rows, "D", "mask"):
        cell, ms = rows_of(loaded, "masks", D=D, mask=name), by_impl(rows_of(loaded, "masks", D=D, mask="causal"), "ms")
        if name.startswith("window"):
            share = ratio(figure(cell, DEFAULT, "ms"), ms.get(DEFAULT))
            over = ratio(share, figure(cell, DEFAULT, "visible"))
            promise = "a window's time / its blocks' share of causal attention's"
            windows.append(Check(promise, f"D {D}, {name}", over, WINDOW_BOUND))
        if name == "softcap":
            faster = ratio(by_impl(cell, "ms").get("fa3_fp8"), figure(cell, DEFAULT, "ms"))
            softcaps.append(Check("softcap, speed / FA3 FP8's", f"D {D}", faster, FEATURE_BOUND, at_least=True))
    return windows + softcaps


SUITE = Suite("masks", run, {"masks": Block("masks", tables)})
