"""Benchmarks decoding from a paged KV cache in 8 bits, against the bandwidth of a copy.

B 64, GQA 8, D 128, N 8k, 16k and 64k (8k when quick), one new query a sequence, with keys in int8, the default, and in
e4m3. Beside it: a device copy that moves as many bytes, timed in the same rounds; FlashAttention-3's
`flash_attn_with_kvcache` in bf16 and FP8, on contiguous caches. With int8 keys: an eighth of the longest sequence's
pages, chosen for this query or before, and attended to; appending one key a sequence, and a prompt of all keys to one
sequence, with RoPE and without. All sequences have the same keys, in pages of their own. Errors of peers are shown, and
do not decide. Then batches of other sizes, also of sequences that differ in length.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from torch import Tensor

import helion_attn as ha
from benchmarks.lib.checks import Check
from benchmarks.lib.harness import (
    Loaded,
    Results,
    Row,
    copier,
    gigabytes_per_second,
    nbytes,
    result_row,
    time_interleaved,
)
from benchmarks.lib.peers import available, fa3_kvcache_16bit, fa3_kvcache_fp8
from benchmarks.lib.plots import grid, legend, length, line, powers_axis
from benchmarks.lib.problem import first_line
from benchmarks.lib.suite import Block, Options, Plot, Suite, progress
from benchmarks.lib.tables import LABELS, Table, by_impl, error_text, impls_in, number, rows_of, values_of
from benchmarks.varlen import lognormal
from devtools.inputs import make_qkv
from devtools.workloads import Workload
from helion_attn.testing import error_budget, relative_error

NAMES = LABELS | {"copy": "copy"}

#: What is decoded from caches of each: keys in int8, the default, and in e4m3.
RECIPES = {"helion_attn": ha.BALANCED, "fast": ha.FAST}

LENGTHS = (8192, 16384, 65536)

#: The heading of what `few_pages` measures.
FEW_PAGES = "an eighth of the pages, ms (chosen before)"

#: Stages that append a prompt, and whether they rotate its keys.
PROMPTS = {"append_prompt": False, "append_prompt_rope": True}

#: impl -> (what prepares it, bytes of an element).
PEERS = {"fa3_bf16": (fa3_kvcache_16bit, 2), "fa3_fp8": (fa3_kvcache_fp8, 1)}

#: Keys of the sequences of a batch, with 32 heads on 8 and D 128.
BATCHES = {
    "1 of 131072": [131072],
    "4 of 32768": [32768] * 4,
    "17 of 8192": [8192] * 17,
    "32 of 8192": [8192] * 32,
    "64, lognormal": lognormal(64, 4000, 1.0),
    "31 of 2048, 1 of 65536": [2048] * 31 + [65536],
}


def cells(device: torch.device, quick: bool) -> list[Workload]:
    """The shapes. With one query a sequence, causal or not is the same."""
    if device.type == "cpu":
        return [Workload("decode_cpu", 2, 4, 2, 1, 300, 64, False, frozenset())]
    lengths = LENGTHS[:1] if quick else LENGTHS
    return [Workload(f"decode_n{N}", 64, 64, 8, 1, N, 128, False, frozenset()) for N in lengths]


def filled_cache(k: Tensor, v: Tensor, B: int, recipe: ha.Recipe) -> tuple[ha.PagedKVCache, Tensor, Tensor]:
    """A cache with k and v [1, H_kv, N, D] for each of B sequences, its block table in random order, and the lengths.

    There is a page more for each sequence, for a new key.
    """
    _, H_kv, N, D = k.shape
    pages = N // ha.paged_kv_cache(1, H_kv, D).page_size + 1
    cache = ha.paged_kv_cache(B * pages, H_kv, D, device=k.device, recipe=recipe)
    table = torch.randperm(B * pages, device=k.device).to(torch.int32).view(B, pages)
    k, v = (x.expand(B, -1, -1, -1) for x in (k, v))
    ha.append_kvcache(cache, k, v, table, torch.zeros(B, dtype=torch.int32, device=k.device))
    return cache, table, torch.full((B,), N, dtype=torch.int32, device=k.device)


def bytes_of_key(cache: ha.PagedKVCache) -> int:
    """A key's and its value's in a head, descales included."""
    return nbytes(cache.k8[0, 0, 0], cache.v8[0, 0, :, 0]) + 8


def means_of(cache: ha.PagedKVCache, table: Tensor, N: int) -> Tensor:
    """The mean keys of all pages; one sequence after the other, as their keys in fp32 are large."""
    means = ha.pages.empty_means(cache)
    for pages in table.split(1):
        ha.pages.update_means(means, cache, pages, torch.zeros_like(pages[:, 0]), N)
    return means


def few_pages(
    q: Tensor, cache: ha.PagedKVCache, table: Tensor, seqlens: Tensor, N: int
) -> dict[str, Callable[[], object]]:
    """What attends to an eighth of the pages of N keys, three of a short sequence: chosen for q, and chosen before.

    The choice includes the means of the pages that have the newest keys.
    """
    means, pages = means_of(cache, table, N), max(3, N // cache.page_size // 8)

    def chosen() -> tuple[Tensor, Tensor]:
        ha.pages.update_means(means, cache, table, seqlens - 1, 1)
        return ha.pages.top(q, means, cache, table, seqlens, pages=pages)

    def decode() -> Tensor:
        return ha.attention_kvcache(q, cache, *chosen())

    return {"few_pages": decode, "chosen_pages": functools.partial(ha.attention_kvcache, q, cache, *chosen())}


def some_rope(N: int, D: int, device: torch.device) -> ha.Rope:
    """RoPE at positions 0..N - 1."""
    angles = torch.outer(torch.arange(N, device=device), 10000 ** (-torch.arange(D // 2, device=device) / (D // 2)))
    return ha.Rope(angles.cos(), angles.sin())


def measure(w: Workload, device: torch.device, repeats: int) -> list[Row]:
    """The rows of one shape. No time is reported for a wrong answer of ours."""
    q, k, v = make_qkv("randn", 1, w.H, w.H_kv, w.B, w.N, w.D, torch.bfloat16, device)
    q = q.transpose(0, 2).contiguous()  # [B, H, 1, D]
    last = slice(w.B - 1, None)
    expected = ha.reference.attention(q[last], k, v)
    runs: dict[str, Callable[[], object]] = {}
    rows: dict[str, Row] = {}
    moved: dict[str, int] = {}
    caches = {name: filled_cache(k, v, w.B, recipe) for name, recipe in RECIPES.items()}
    for name, recipe in RECIPES.items():
        model, _ = ha.reference.fp8_attention_kvcache(q[last], k, v, recipe=recipe)
        budget = error_budget(relative_error(model, expected), q.dtype, device=device)
        decode = functools.partial(ha.attention_kvcache, q, *caches[name])
        error = relative_error(decode()[last], expected)
        rows[name] = result_row(name, w, "kernel", "randn", error_total=error)
        moved[name] = w.B * w.H_kv * w.N * bytes_of_key(caches[name][0])
        # "not <=": a NaN is over budget too.
        if not error <= budget:
            rows[name]["note"] = f"not timed: error over {budget:.3g}"
        else:
            runs[name] = decode
    cache, table, seqlens = caches["helion_attn"]

    rows["append"] = result_row("helion_attn", w, "append", "randn")
    new = torch.zeros(2, w.B, w.H_kv, 1, w.D, dtype=k.dtype, device=device)
    # The second key of a page, as most are: the first also clears it.
    runs["append"] = functools.partial(ha.append_kvcache, cache, new[0], new[1], table, seqlens + 1)

    for stage, attend in few_pages(q, cache, table, seqlens, w.N).items():
        rows[stage], runs[stage] = result_row("helion_attn", w, stage, "randn"), attend

    rope, start = some_rope(w.N, w.D, device), torch.zeros_like(seqlens[:1])
    for stage, rotates in PROMPTS.items():
        rows[stage] = result_row("helion_attn", w, stage, "randn") | {"B": 1}
        runs[stage] = functools.partial(
            ha.append_kvcache, cache, k, v, table[:1], start, rope=rope if rotates else None
        )
        moved[stage] = nbytes(k, v) + w.H_kv * w.N * bytes_of_key(cache)

    found = peers_of(w, "kernel", q, k, v, seqlens, last, expected)
    for name, (row, run) in found.items():
        rows[name] = row
        if run is not None:
            runs[name], moved[name] = run, 2 * w.B * w.H_kv * w.N * w.D * PEERS[name][1]
    return timed(w, "kernel", rows, runs, moved, device, repeats)


Peer = tuple[Row, Callable[[], object] | None]


def peers_of(
    w: Workload, stage: str, q: Tensor, k: Tensor, v: Tensor, seqlens: Tensor, at: slice, expected: Tensor
) -> dict[str, Peer]:
    """What of the peers is here: its row, with the error of sequence `at`, and what is timed, if it runs."""
    found: dict[str, Peer] = {}
    runnable, _ = available(q.device)
    for name, (prepare, _) in PEERS.items():
        if name not in runnable:
            continue
        row = result_row(name, w, stage, "randn")
        try:
            k_all, v_all = (x.transpose(1, 2).expand(w.B, -1, -1, -1).contiguous() for x in (k, v))
            run = prepare(q.transpose(1, 2), k_all, v_all, seqlens)
            row["error_total"] = relative_error(run().transpose(1, 2)[at], expected)
        except Exception as problem:  # a peer's failure is a result, not the end of the run
            found[name] = row | {"error_message": first_line(problem)}, None
            continue
        found[name] = row, run
    return found


def timed(
    w: Workload,
    stage: str,
    rows: dict[str, Row],
    runs: dict[str, Callable[[], object]],
    moved: dict[str, int],
    device: torch.device,
    repeats: int,
) -> list[Row]:
    """The rows, with milliseconds and bandwidth, and that of a copy of as many bytes as ours."""
    half = moved["helion_attn"] // 2
    rows["copy"] = result_row("copy", w, stage, "none")
    runs["copy"] = copier(torch.zeros(half, dtype=torch.uint8, device=device))
    moved["copy"] = 2 * half
    times = time_interleaved(runs, device, repeats)
    copy_speed = gigabytes_per_second(moved["copy"], times["copy"])
    for name, ms in times.items():
        rows[name]["ms"] = ms
        if name in moved:
            speed = gigabytes_per_second(moved[name], ms)
            rows[name] |= {"bytes": moved[name], "gb_per_s": speed, "of_copy": speed / copy_speed}
    return list(rows.values())


def measure_batch(batch: str, lengths: list[int], device: torch.device, repeats: int) -> list[Row]:
    """The rows of one batch; the error is that of its longest sequence."""
    D = 128 if device.type == "cuda" else 64
    w = Workload(f"decode_b{len(lengths)}", len(lengths), 32, 8, 1, max(lengths), D, False, frozenset())
    q, k, v = make_qkv("randn", 1, w.H, w.H_kv, w.B, w.N, w.D, torch.bfloat16, device)
    q = q.transpose(0, 2).contiguous()  # [B, H, 1, D]
    longest = lengths.index(w.N)
    at = slice(longest, longest + 1)
    expected = ha.reference.attention(q[at], k, v)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    runs: dict[str, Callable[[], object]] = {}
    rows: dict[str, Row] = {}
    moved: dict[str, int] = {}
    for name, recipe in RECIPES.items():
        cache, table, _ = filled_cache(k, v, w.B, recipe)
        runs[name] = decode = functools.partial(ha.attention_kvcache, q, cache, table, seqlens)
        rows[name] = result_row(name, w, "batch", "randn", error_total=relative_error(decode()[at], expected))
        moved[name] = sum(lengths) * w.H_kv * bytes_of_key(cache)
        if name == "helion_attn":
            for stage, attend in few_pages(q, cache, table, seqlens, w.N).items():
                rows[stage], runs[stage] = result_row(name, w, f"batch_{stage}", "randn"), attend
    for name, (row, run) in peers_of(w, "batch", q, k, v, seqlens, at, expected).items():
        rows[name] = row
        if run is not None:
            runs[name], moved[name] = run, 2 * sum(lengths) * w.H_kv * w.D * PEERS[name][1]
    return [row | {"batch": batch} for row in timed(w, "batch", rows, runs, moved, device, repeats)]


def run(options: Options, results: Results) -> None:
    """Every length, one after the other, and every batch."""
    for w in progress(cells(options.device, options.quick), "decode"):
        results.add(*measure(w, options.device, options.repeats))
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
    on_gpu = options.device.type == "cuda"
    batches = BATCHES if on_gpu else {"2 that differ": [200, 70]}
    for batch, lengths in progress(() if options.quick and on_gpu else batches.items(), "batches"):
        results.add(*measure_batch(batch, lengths, options.device, options.repeats))
        if on_gpu:
            torch.cuda.empty_cache()


def tables(loaded: Loaded) -> list[Table]:
    """Milliseconds, and bandwidth as a share of a device copy's."""
    rows = rows_of(loaded, "decode", stage="kernel")
    impls = impls_in(rows)
    body = []
    for (N,) in values_of(rows, "N"):
        cell = [row for row in rows if row["N"] == N]
        ms, share, error = (by_impl(cell, name) for name in ("ms", "of_copy", "error_total"))
        append, few, chosen = (
            by_impl(rows_of(loaded, "decode", stage=stage, N=N), "ms").get("helion_attn")
            for stage in ("append", "few_pages", "chosen_pages")
        )
        times = (f"{number(ms.get(impl), '.3f')} ({number(share.get(impl), '.2f')})" for impl in impls)
        errors = " / ".join(error_text(error.get(impl)) for impl in impls)
        few_times = f"{number(few, '.3f')} ({number(chosen, '.3f')})"
        body.append([str(N), *times, few_times, number(append, ".3f"), errors])
    headers = [
        "keys",
        *(NAMES[impl] for impl in impls),
        FEW_PAGES,
        "append, ms",
        "total error, in this order",
    ]
    found = (
        [Table("One new token, B 64, H 64, H_kv 8, D 128, ms (bandwidth / a copy's)", headers, body)] if body else []
    )
    prompts = {stage: {row["N"]: row for row in rows_of(loaded, "decode", stage=stage)} for stage in PROMPTS}
    body = []
    for N in prompts["append_prompt"]:
        of_N = [prompts[stage][N] for stage in PROMPTS]
        times = (f"{number(row['ms'], '.3f')} ({number(row.get('of_copy'), '.2f')})" for row in of_N)
        body.append([str(N), *times])
    title = "A prompt appended, H_kv 8, D 128, ms (bandwidth / a copy's)"
    found += [Table(title, ["keys", "as they are", "rotated (RoPE)"], body)] if body else []
    body = []
    for (batch,) in values_of(rows_of(loaded, "decode", stage="batch"), "batch"):
        cell = rows_of(loaded, "decode", stage="batch", batch=batch)
        ms, share = (by_impl(cell, name) for name in ("ms", "of_copy"))
        few, chosen = (
            by_impl(rows_of(loaded, "decode", stage=f"batch_{stage}", batch=batch), "ms").get("helion_attn")
            for stage in ("few_pages", "chosen_pages")
        )
        times = (f"{number(ms.get(impl), '.3f')} ({number(share.get(impl), '.2f')})" for impl in impls)
        body.append([batch, *times, f"{number(few, '.3f')} ({number(chosen, '.3f')})"])
    title = "One new token of batches, H 32, H_kv 8, D 128, ms (bandwidth / a copy's)"
    headers = ["keys", *(NAMES[impl] for impl in impls), FEW_PAGES]
    return [*found, Table(title, headers, body)] if body else found


def plot(loaded: Loaded) -> Figure | None:
    """Milliseconds of a new token by number of keys."""
    rows = [row for row in rows_of(loaded, "decode", stage="kernel") if row["ms"] is not None]
    if not rows:
        return None
    figure, ((ax,),) = grid(1, 1)
    for impl in impls_in(rows):
        line(ax, impl, {row["N"]: row["ms"] for row in rows if row["impl"] == impl}, float, NAMES[impl])
    powers_axis(ax, [N for (N,) in values_of(rows, "N")], length)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("keys of a sequence")
    ax.set_ylabel("ms a token, 64 sequences")
    legend(figure, [ax])
    return figure


def checks(loaded: Loaded) -> list[Check]:
    """Bandwidth beside a copy's."""
    promises = {"kernel": ("decoding", 0.926), "append_prompt": ("appending a prompt", 0.7)}
    promises["append_prompt_rope"] = ("appending a prompt, RoPE", 0.7)
    return [
        Check(
            f"{what}, bandwidth / a copy's",
            f"{row['N']} keys, {LABELS[row['impl']]}",
            row.get("of_copy", math.nan),
            bound,
            at_least=True,
        )
        for stage, (what, bound) in promises.items()
        for row in rows_of(loaded, "decode", stage=stage)
        if row["impl"] in RECIPES
    ]


SUITE = Suite(
    "decode",
    run,
    {"decode": Block("decode", tables, (Plot("decode", "Milliseconds a token, by keys", plot),), shown=1)},
)
