"""Benchmarks quantising with RMSNorm and RoPE fused, over quantising alone.

    python benchmarks/attention.py --suite norms

Q and K of models that normalise them, bf16 [B, S, H, D], D 128. A norm is by head, or over the channels of all heads.
Both are followed by RoPE, and what they are compared with has neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

import helion_attn as ha
from benchmarks.lib.checks import Check
from benchmarks.lib.harness import Loaded, Results, result_row, time_interleaved
from benchmarks.lib.problem import workload
from benchmarks.lib.recipes import DEFAULT, RECIPES
from benchmarks.lib.suite import Block, Options, Suite, progress
from benchmarks.lib.tables import LABELS, Table, number, rows_of, values_of
from benchmarks.preprocess import rope_tables
from devtools.workloads import Workload

D = 128

#: A model's query heads, KV heads and tokens, channels that are rotated and whether in interleaved pairs, and its norm.
MODELS = {
    "Wan 2.1 1.3B": (12, 12, 75600, D, True, "over heads"),
    "Wan 2.1 14B": (40, 40, 32760, D, True, "over heads"),
    "Flux.1": (24, 24, 4608, D, True, "by head"),
    "Qwen3 8B": (32, 8, 32768, D, False, "by head"),
    "MiniMax-H3": (56, 56, 74240, 96, False, "by head"),
}

#: Time of both and quantising, over that of quantising, at most.
BOUND = 1.25


def calls(
    w: Workload, rotary: int, interleaved: bool, recipe: str, device: torch.device
) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    q, k, v = (torch.randn(w.B, w.N, H, D, dtype=torch.bfloat16, device=device) for H in (w.H, w.H_kv, w.H_kv))
    tables = rope_tables(w.N, rotary, device)
    rope = ha.Rope(tables.cos, tables.sin, interleaved)
    quantize = functools.partial(ha.quantize, q, k, v, layout="bshd", recipe=RECIPES[recipe])

    def norm(heads: int) -> ha.RMSNorm:
        return ha.RMSNorm(torch.ones(heads * D, dtype=torch.bfloat16, device=device))

    return {
        "none": quantize,
        "RoPE": functools.partial(quantize, rope=rope),
        "by head": functools.partial(quantize, rope=rope, q_norm=norm(1), k_norm=norm(1)),
        "over heads": functools.partial(quantize, rope=rope, q_norm=norm(w.H), k_norm=norm(w.H_kv)),
    }


def run(options: Options, results: Results) -> None:
    """Every model with BALANCED and FAST."""
    on_gpu = options.device.type == "cuda"
    for model, (H, H_kv, S, rotary, interleaved, norm) in progress(MODELS.items(), "norms"):
        w = replace(workload(1, H, S, S, D), H_kv=H_kv) if on_gpu else workload(1, 2, 256, 256, D)
        for recipe in (DEFAULT, "fast"):
            ms = time_interleaved(
                calls(w, rotary, interleaved, recipe, options.device), options.device, options.repeats
            )
            for name, taken in ms.items():
                row = result_row("helion_attn", w, "preprocess", "randn", recipe=recipe, ms=taken)
                results.add(
                    row | {"model": model, "fused": name, "has_norm": name == norm, "over_none": taken / ms["none"]}
                )
        if options.quick:
            return


def tables(loaded: Loaded) -> list[Table]:
    """Milliseconds of quantising, and of the rest beside it."""
    body = []
    for model, recipe in values_of(rows_of(loaded, "norms"), "model", "recipe"):
        cell = {row["fused"]: row for row in rows_of(loaded, "norms", model=model, recipe=recipe)}
        line = [model, LABELS[recipe], number(cell["none"]["ms"], ".3f")]
        for name in ("RoPE", "by head", "over heads"):
            mark = " *" if cell[name]["has_norm"] else ""
            line.append(number(cell[name]["over_none"], ".2f") + mark)
        body.append(line)
    headers = ["shape of", "recipe", "quantize, ms", "RoPE", "norm by head, RoPE", "norm over heads, RoPE"]
    return (
        [Table("Norms and RoPE in quantising, times quantising alone (*: the model's)", headers, body)] if body else []
    )


def checks(loaded: Loaded) -> list[Check]:
    """The norm that a model has, with RoPE, over quantising alone."""
    return [
        Check(
            "norm and RoPE in quantising, time / without",
            f"{row['model']}, {LABELS[row['recipe']]}",
            row["over_none"],
            BOUND,
        )
        for row in rows_of(loaded, "norms", has_norm=True)
    ]


SUITE = Suite("norms", run, {"norms": Block("norms", tables)})
