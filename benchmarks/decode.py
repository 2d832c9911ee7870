"""Benchmarks decoding from a paged FP8 KV cache, against the bandwidth of a copy.

    python benchmarks/decode.py                          # B 64, GQA 8, D 128, N 8k, 16k and 64k, on the GPU
    python benchmarks/decode.py --quick                  # N 8k, fewer repeats
    python benchmarks/decode.py --device cpu --quick     # a dry run in the interpreter, this package only

One new query a sequence. Beside it: a device copy that moves as many bytes, timed in the same rounds;
FlashAttention-3's `flash_attn_with_kvcache` in bf16 and FP8, on contiguous caches; and appending one key a sequence.
All sequences have the same keys, in pages of their own. Errors of peers are shown, and do not decide. Writes
`<out>/decode.json`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Results, Row, copier, describe_run, gigabytes_per_second, nbytes, result_row, time_interleaved
from peers import available, fa3_kvcache_16bit, fa3_kvcache_fp8
from problem import first_line
from torch import Tensor

import helion_attn as ha
from helion_attn.testing import error_budget, make_qkv, relative_error
from helion_attn.workloads import Workload

LENGTHS = (8192, 16384, 65536)

#: impl -> (what prepares it, bytes of an element).
PEERS = {"fa3_bf16": (fa3_kvcache_16bit, 2), "fa3_fp8": (fa3_kvcache_fp8, 1)}


def cells(device: torch.device, quick: bool) -> list[Workload]:
    """The shapes. With one query a sequence, causal or not is the same."""
    if device.type == "cpu":
        return [Workload("decode_cpu", 2, 4, 2, 1, 300, 64, False, frozenset())]
    lengths = LENGTHS[:1] if quick else LENGTHS
    return [Workload(f"decode_n{N}", 64, 64, 8, 1, N, 128, False, frozenset()) for N in lengths]


def filled_cache(w: Workload, k: Tensor, v: Tensor) -> tuple[ha.PagedKVCache, Tensor, Tensor]:
    """A cache with k and v [1, H_kv, N, D] for each sequence, its block table in random order, and the lengths.

    There is a page more for each sequence, for a new key.
    """
    page_size = ha.paged_kv_cache(1, w.H_kv, w.D).page_size
    pages = w.N // page_size + 1
    cache = ha.paged_kv_cache(w.B * pages, w.H_kv, w.D, device=k.device)
    table = torch.randperm(w.B * pages, device=k.device).to(torch.int32).view(w.B, pages)
    k, v = (x.expand(w.B, -1, -1, -1) for x in (k, v))
    ha.append_kvcache(cache, k, v, table, torch.zeros(w.B, dtype=torch.int32, device=k.device))
    return cache, table, torch.full((w.B,), w.N, dtype=torch.int32, device=k.device)


def measure(w: Workload, device: torch.device, repeats: int) -> list[Row]:
    """The rows of one shape. No time is reported for a wrong answer of ours."""
    q, k, v = make_qkv("randn", 1, w.H, w.H_kv, w.B, w.N, w.D, torch.bfloat16, device)
    q = q.transpose(0, 2).contiguous()  # [B, H, 1, D]
    last = slice(w.B - 1, None)
    expected = ha.reference.attention(q[last], k, v)
    cache, table, seqlens = filled_cache(w, k, v)
    runs: dict[str, Callable[[], object]] = {}
    rows: dict[str, Row] = {}
    moved: dict[str, int] = {}

    model, _ = ha.reference.fp8_attention_kvcache(q[last], k, v)
    budget = error_budget(relative_error(model, expected), q.dtype, device=device)

    def decode() -> Tensor:
        return ha.attention_kvcache(q, cache, table, seqlens)

    error = relative_error(decode()[last], expected)
    rows["helion_attn"] = result_row("helion_attn", w, "kernel", "randn", error_total=error)
    moved["helion_attn"] = w.B * w.H_kv * w.N * (nbytes(cache.k8[0, 0, 0], cache.v8[0, 0, :, 0]) + 8)
    # "not <=": a NaN is over budget too.
    if not error <= budget:
        rows["helion_attn"]["note"] = f"not timed: error over {budget:.3g}"
    else:
        runs["helion_attn"] = decode

    rows["append"] = result_row("helion_attn", w, "append", "randn")
    new = torch.zeros(2, w.B, w.H_kv, 1, w.D, dtype=k.dtype, device=device)
    # The second key of a page, as most are: the first also clears it.
    runs["append"] = functools.partial(ha.append_kvcache, cache, new[0], new[1], table, seqlens + 1)

    runnable, _ = available(device)
    for name, (prepare, size) in PEERS.items():
        if name not in runnable:
            continue
        rows[name] = result_row(name, w, "kernel", "randn")
        try:
            k_all, v_all = (x.transpose(1, 2).expand(w.B, -1, -1, -1).contiguous() for x in (k, v))
            run = prepare(q.transpose(1, 2), k_all, v_all, seqlens)
            rows[name]["error_total"] = relative_error(run().transpose(1, 2)[last], expected)
        except Exception as problem:  # a peer's failure is a result, not the end of the run
            rows[name]["error_message"] = first_line(problem)
            continue
        runs[name] = run
        moved[name] = 2 * w.B * w.H_kv * w.N * w.D * size

    half = moved["helion_attn"] // 2
    rows["copy"] = result_row("copy", w, "kernel", "none")
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


def main(argv: list[str] | None = None) -> int:
    """Parse `argv`, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the result file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="the shortest length, fewer repeats")
    parser.add_argument("--commit", help="commit to record, where there is no git to ask")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    repeats = 1 if device.type == "cpu" else 5 if args.quick else 20
    results = Results(args.out / "decode.json", describe_run(device, args.commit))
    for w in cells(device, args.quick):
        rows = measure(w, device, repeats)
        results.add(*rows)
        for row in rows:
            names = ("impl", "stage", "N", "ms", "gb_per_s", "of_copy", "error_total", "note", "error_message")
            print(*(f"{name} {row[name]}" for name in names if row.get(name) is not None), sep="  ", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
