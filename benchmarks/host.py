"""Benchmarks what a call costs the host: tiny calls back to back, none waited for.

[1, 16, S, 128], causal. `host_us` is a call's share of `CALLS`, the least of `ROUNDS`: the host is shared. Lengths are

    same       S 512 in every call
    by_turns   S 512 and 384
    new        S that nothing was called with before; one round. Others of that size were: what they compile, and the
               memory that PyTorch keeps for them, is there

`attention` and `attention_quantized` with the default recipe, and `attention` with recipe="auto", which takes PyTorch's
SDPA here; FlashAttention-3 in bf16, on e4m3 tensors, and from bf16
to e4m3 and on, by the PyTorch operations with which these benchmarks quantise for it; PyTorch's SDPA, by the backend
that it chooses and by FlashAttention-2; SageAttention 2.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import helion_attn as ha
from benchmarks.lib.checks import Check
from benchmarks.lib.harness import Loaded, Results, Row, result_row, synchronize
from benchmarks.lib.peers import available, fa3_16bit, fa3_fp8, flash_16bit, sage2_e2e
from benchmarks.lib.problem import workload
from benchmarks.lib.recipes import DEFAULT
from benchmarks.lib.suite import Block, Options, Suite, progress
from benchmarks.lib.tables import LABELS, Table, number, ratio, rows_of, values_of
from devtools.inputs import make_qkv
from devtools.workloads import Workload

H, D, CALLS, ROUNDS = 16, 128, 300, 7

SAME, TURNS, FIRST_NEW = 512, 384, 544

#: Lengths in a row that are all timed or none: kernels are compiled once for multiples of it, and once for the rest.
TOGETHER = 16

#: From inputs to what is timed on them.
Prepare = Callable[[Tensor, Tensor, Tensor], Callable[[], object]]


def attention_quantized(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    """One launch."""
    qkv = ha.quantize(q, k, v)
    return lambda: ha.attention_quantized(qkv, causal=True)


def fa3_e2e(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    """Quantise with PyTorch, then FlashAttention-3."""
    return lambda: fa3_fp8(q, k, v, True, D**-0.5).run()


#: (implementation, stage): what is timed.
CALLED: dict[tuple[str, str], Prepare] = {
    ("helion_attn", "kernel"): attention_quantized,
    ("helion_attn", "preprocess"): lambda q, k, v: lambda: ha.quantize(q, k, v),
    ("helion_attn", "e2e"): lambda q, k, v: lambda: ha.attention(q, k, v, causal=True),
    ("helion_attn", "auto"): lambda q, k, v: lambda: ha.attention(q, k, v, causal=True, recipe="auto"),
    ("fa3_bf16", "kernel"): lambda q, k, v: fa3_16bit(q, k, v, True, D**-0.5).run,
    ("fa3_fp8", "kernel"): lambda q, k, v: fa3_fp8(q, k, v, True, D**-0.5).run,
    ("fa3_fp8", "e2e"): fa3_e2e,
    ("sdpa_bf16", "kernel"): lambda q, k, v: lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
    ("flash_bf16", "kernel"): lambda q, k, v: flash_16bit(q, k, v, True, D**-0.5).run,
    ("sage2", "e2e"): lambda q, k, v: sage2_e2e(q, k, v, True, D**-0.5).run,
}


def new_lengths(i: int, count: int) -> tuple[list[int], list[int]]:
    """Those of the i-th of `CALLED`, and of no other: what prepares one call may itself be what another times.

    Returns:
        `count` lengths to be called first, and as many, between these, to be timed.
    """
    groups = -(-count // TOGETHER)
    first = FIRST_NEW + 2 * i * groups * TOGETHER
    lengths = [range(begin, begin + TOGETHER) for begin in range(first, first + 2 * groups * TOGETHER, TOGETHER)]
    compiled, timed = ([S for some in lengths[half::2] for S in some][:count] for half in (0, 1))
    return compiled, timed


def host_us(calls: list[Callable[[], object]], rounds: int, device: torch.device) -> float:
    """Microseconds of each of `calls`, one after the other, in the fastest of `rounds`.

    Without Python's garbage collector, as `timeit` does: it runs for a third of a second when it likes.
    """
    best = float("inf")
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            synchronize(device)
            started = time.perf_counter()
            for call in calls:
                call()
            best = min(best, (time.perf_counter() - started) / len(calls))
    finally:
        gc.enable()
    synchronize(device)
    return 1e6 * best


def measure(device: torch.device, called: dict[tuple[str, str], Prepare], count: int) -> Iterator[Row]:
    """The rows, as they come."""

    def on(w: Workload, prepare: Prepare) -> Callable[[], object]:
        return prepare(*make_qkv("randn", w.B, w.H, w.H_kv, w.M, w.N, w.D, device=device))

    def shape(S: int) -> Workload:
        return workload(1, H, S, S, D, True)

    for i, ((impl, stage), prepare) in enumerate(called.items()):
        same, turns = (on(shape(S), prepare) for S in (SAME, TURNS))
        compiling, new = ([on(shape(S), prepare) for S in lengths] for lengths in new_lengths(i, count // 2))
        for call in (same, turns, *compiling):
            call()
        recipe = "auto" if stage == "auto" else DEFAULT if impl == "helion_attn" else None
        lengths = {
            "new": host_us(new, 1, device),
            "same": host_us([same] * count, ROUNDS, device),
            "by_turns": host_us([same, turns] * (count // 2), ROUNDS, device),
        }
        for name, us in lengths.items():
            yield result_row(impl, shape(SAME), stage, "randn", recipe=recipe) | {"lengths": name, "host_us": us}


def run(options: Options, results: Results) -> None:
    """Every call, with the same lengths, by turns and with new ones."""
    names, _why_not = available(options.device)
    called = {key: prepare for key, prepare in CALLED.items() if key[0] in {*names, "sdpa_bf16"}}
    count = CALLS if options.device.type == "cuda" else 2
    for row in progress(measure(options.device, called, count), "host", total=3 * len(called)):
        results.add(row)


#: What was called, by (implementation, stage).
CALL_NAMES = {
    ("helion_attn", "kernel"): "`attention_quantized`",
    ("helion_attn", "preprocess"): "`quantize`",
    ("helion_attn", "e2e"): "`attention`",
    ("helion_attn", "auto"): '`attention`, `recipe="auto"`',
    ("fa3_fp8", "e2e"): "FA3 FP8, from bf16",
}

LENGTHS = ("same", "by_turns", "new")


def call_name(impl: str, stage: str) -> str:
    """What was called."""
    return CALL_NAMES.get((impl, stage), LABELS.get(impl, impl))


def tables(loaded: Loaded) -> list[Table]:
    """Microseconds a call, by what was called and by whether its lengths were seen before."""
    rows = rows_of(loaded, "host")
    body = []
    for impl, stage in values_of(rows, "impl", "stage"):
        us = {row["lengths"]: row["host_us"] for row in rows if (row["impl"], row["stage"]) == (impl, stage)}
        body.append([call_name(impl, stage), *(number(us.get(lengths), ".0f") for lengths in LENGTHS)])
    headers = ["call", "same lengths", "two by turns", "new"]
    return [Table("Host time of a call, microseconds", headers, body)] if body else []


def checks(loaded: Loaded) -> list[Check]:
    """What a call costs the host, beside FlashAttention-3's: of quantised tensors, and from bf16."""
    us = {(row["impl"], row["stage"]): row["host_us"] for row in rows_of(loaded, "host", lengths="same")}
    if not us:
        return []
    return [
        Check("host time of a call / FA3's", where, ratio(us.get(("helion_attn", stage)), us.get(peer)), 1.0)
        for where, stage, peer in (
            ("quantised tensors, fastest of four runs", "kernel", ("fa3_fp8", "kernel")),
            ("from bf16, FA3 in FP8", "e2e", ("fa3_fp8", "e2e")),
            ("from bf16, FA3 in bf16", "e2e", ("fa3_bf16", "kernel")),
        )
    ]


SUITE = Suite("host", run, {"host": Block("host", tables, shown=1)})
