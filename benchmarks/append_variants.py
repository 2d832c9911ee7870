"""Times variants of `append_kvcache` beside a copy: python .gpu/append_variants.py [--cpu, a dry run in the interpreter]."""

import functools
import sys

import torch

import helion_attn as ha
from helion_attn import plans
from helion_attn.compiler.kernels import compiled, interpreted
from helion_attn.preprocess import append

CPU = "--cpu" in sys.argv
DEVICE = "cpu" if CPU else "cuda"
LENGTHS = (256,) if CPU else (8192, 16384, 65536)
D, H = 128, 8
shipped_keys = append.keys_of_program
#: (keys of a program, or None for what ships; num_warps; more of the config).
LOADS_FIRST = [
    *((None, 4, {}), (16, 4, {}), (16, 1, {}), (32, 2, {}), (32, 4, {}), (64, 2, {}), (64, 4, {}), (64, 8, {})),
    *((128, 8, {}), (32, 4, {"loop_orders": [[1, 0]]}), (64, 4, {"loop_orders": [[1, 0]]})),
]


def use(keys, warps, more):
    config = {"num_warps": warps, "indexing": "pointer", **more}
    run = interpreted(append.append_kv) if CPU else compiled(append.append_kv, config)
    append.kernel = lambda is_cuda: run
    append.keys_of_program = shipped_keys if keys is None else lambda *_: keys
    plans.forget()


def microseconds(call):
    if CPU:
        call()
        return float("nan")
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    times = []
    for _ in range(30):
        flush.zero_()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # so that the host is ahead
        a.record()
        call()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1000)
    return sorted(times)[len(times) // 2]


def problem(B, L, start, rotates):
    pages = (L + start) // 128 + 1
    cache = ha.paged_kv_cache(B * pages, H, D, device=DEVICE)
    table = torch.randperm(B * pages, device=DEVICE).to(torch.int32).view(B, pages)
    k, v = (torch.randn(B, H, L, D, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    seqlens = torch.full((B,), start, dtype=torch.int32, device=DEVICE)
    rope = None
    if rotates:
        angles = torch.outer(torch.arange(L, device=DEVICE), 10000 ** (-torch.arange(D // 2, device=DEVICE) / (D // 2)))
        rope = ha.Rope(angles.cos(), angles.sin())
    return functools.partial(ha.append_kvcache, cache, k, v, table, seqlens, rope=rope)


def main():
    calls, copies = {}, {}
    for L in LENGTHS:
        half = (H * L * (2 * 2 * D + 2 * D + 8)) // 2
        x = torch.zeros(half, dtype=torch.uint8, device=DEVICE)
        y = torch.empty_like(x)
        copies[L] = microseconds(functools.partial(y.copy_, x))
        for rotates in (False, True):
            calls[L, rotates] = problem(1, L, 0, rotates)
    one = problem(2 if CPU else 64, 1, 1 if CPU else 8193, False)
    begins = problem(2 if CPU else 64, 1, 0 if CPU else 8192, False)
    heads = [f"{L}{' rope' if r else ''}" for L, r in calls]
    print(torch.cuda.get_device_name() if not CPU else "interpreter", "us (bandwidth / a copy's)")
    print("copy", {L: round(us, 1) for L, us in copies.items()})
    print(f"{'keys, warps':36}", *(f"{x:>14}" for x in [*heads, "one, B 64", "first of page"]))
    for keys, warps, more in LOADS_FIRST:
        use(keys, warps, more)
        texts = []
        for (L, _), call in calls.items():
            us = microseconds(call)
            texts.append(f"{us:.1f} ({copies[L] / us:.2f})")
        texts += [f"{microseconds(one):.1f}", f"{microseconds(begins):.1f}"]
        name = f"{keys or 'shipped'}, {warps} {more or ''}"
        print(f"{name:36}", *(f"{x:>14}" for x in texts), flush=True)


main()
