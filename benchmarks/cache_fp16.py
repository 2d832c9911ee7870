"""Times attention on a paged cache in the tree that it is run from, beside `attention`'s kernel on the same keys.

    cd TREE && python PATH/cache_fp16.py OUT [--label NAME]         one tree; OUT/NAME.json
    cd TREE && python PATH/cache_fp16.py OUT --compare A.json B.json   a table of two

First `test_tensor_cores_add_in_one_order`: fp16 sums of q k^T and k q^T must have the same bits. Then prefill, D 64, 128,
256, and decode, D 64 and 128. "255": prefill D 128 with two programs of 255 registers and 3 stages, in place of three
of 168 and 2. `--device cpu` is a dry run.
"""

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import traceback
from pathlib import Path
from unittest import mock

TREE = Path.cwd()
sys.path[:0] = [str(TREE), str(TREE / "tests")]

import torch  # noqa: E402

import helion_attn as ha  # noqa: E402
from benchmarks.decode import filled_cache  # noqa: E402
from benchmarks.lib.harness import copier, describe_run, time_interleaved  # noqa: E402
from helion_attn import ops, plans  # noqa: E402
from helion_attn.api import quantized_problem  # noqa: E402
from helion_attn.kernels import prefill  # noqa: E402
from helion_attn.kv_cache import decode_problem  # noqa: E402
from helion_attn.testing import make_qkv, relative_error  # noqa: E402

assert Path(ha.__file__).parents[1] == TREE, f"{ha.__file__} is not of {TREE}"

KV_HEADS, CHECKED = 8, 16
WIDE = prefill.PrefillTile(bm=64, num_warps=4, num_stages=3, ctas_per_sm=2, max_registers=255)


def one_order(out: Path, label: str) -> dict:
    """The test of sums' order, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", "8", "--maxfail=6"]
    command += ["tests/kernels/test_kv_cache_same_bits.py", "-k", "test_tensor_cores_add_in_one_order"]
    found = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": f"{TREE}:{TREE}/tests"}, timeout=420
    )
    (out / f"{label}_one_order.txt").write_text(found.stdout + found.stderr)
    lines = found.stdout.strip().splitlines()
    print("one order:", found.returncode, lines[-1] if lines else "no output", flush=True)
    return {"rc": found.returncode, "last": lines[-1:] if lines else []}


def paged(q, cache, table, seqlens, tile=None):
    """A call of the cache's kernel, planned once, D 128 with a tile if one is given."""
    plans.forget()
    problem = decode_problem(q, cache, table, seqlens, causal=True)
    with mock.patch.dict(prefill.TILES, {128: tile} if tile else {}):
        plan = ops.decode.plan(problem)
        tensors = ops.decode.tensors(problem)
        plan.run(tensors)
    return lambda: plan.run(tensors)[0]


def dense(q, k, v, recipe):
    """A call of `attention`'s kernel on packed tensors."""
    problem = quantized_problem(ha.quantize(q, k, v, recipe=recipe), causal=True)
    plan = ops.attention.plan(problem)
    tensors = ops.attention.tensors(problem)
    return lambda: plan.run(tensors)[0]


def errors(runs, q, k, v, M):
    """Relative errors of the first KV head's queries, the last rows, over the fp64 oracle."""
    group, rows = q.size(1) // k.size(1), min(M, CHECKED)
    expected = ha.reference.attention(q[-1:, :group, -rows:], k[-1:, :1], v[-1:, :1], causal=True)
    return {name: relative_error(run()[-1:, :group, -rows:], expected) for name, run in runs.items() if name != "copy"}


def cells(device):
    """(kind, D, H, B, M, N)."""
    if device.type == "cpu":
        return [("prefill", 64, 8, 1, 8, 300), ("prefill", 128, 8, 1, 70, 300), ("decode", 64, 8, 2, 1, 300)]
    found = [
        ("prefill", D, H, 1, M, N)
        for D in (64, 128, 256)
        for H in (32, 64)
        for N in (16384, 131072)
        for M in (128, 512, 2048)
    ]
    return [("decode", D, H, 64, 1, 16384) for D in (64, 128) for H in (32, 64)] + found


def measure(cell, device, repeats):
    """A row."""
    kind, D, H, B, M, N = cell
    q, k, v = make_qkv("randn", 1, H, min(H, KV_HEADS), M if B == 1 else B, N, D, torch.bfloat16, device)
    if B > 1:
        q = q.transpose(0, 2).contiguous()  # [B, H, 1, D]
    cache, table, seqlens = filled_cache(k, v, B)
    runs = {"paged": paged(q, cache, table, seqlens)}
    if kind == "prefill" and D == 128:
        runs["paged_255"] = paged(q, cache, table, seqlens, WIDE)
    if B > 1:
        k, v = (x.expand(B, -1, -1, -1) for x in (k, v))
        moved = torch.empty(B * min(H, KV_HEADS) * N * (2 * D + 8) // 2, dtype=torch.int8, device=device)
        runs["copy"] = copier(moved)
    for name in ("balanced", "fast"):
        runs[name] = dense(q, k, v, {"balanced": ha.BALANCED, "fast": ha.FAST}[name])
    error = errors(runs, q, k, v, M)
    ms = time_interleaved(runs, device, repeats)
    row = dict(zip(("kind", "D", "H", "B", "M", "N"), cell)) | {"ms": ms, "error": error}
    print(json.dumps(row), flush=True)
    return row


def geometric(values):
    """The geometric mean."""
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def table(rows):
    """A short table, and means."""
    names = ["paged", "paged_255", "balanced", "fast", "copy"]
    print(
        f"{'cell':32s}"
        + "".join(f"{n:>10s}" for n in names)
        + f"{'of bal.':>9s}{'of fast':>9s}{'err':>8s}{'err b.':>8s}"
    )
    for r in rows:
        ms, best = r["ms"], r["ms"]["paged"]
        name = f"{r['kind']} D{r['D']} H{r['H']} {r['B']}x{r['M']} on {r['N']}"
        print(
            f"{name:32s}"
            + "".join(f"{ms[n]:10.4f}" if n in ms else f"{'':10s}" for n in names)
            + f"{ms['balanced'] / best:9.3f}{ms['fast'] / best:9.3f}{r['error']['paged']:8.4f}{r['error']['balanced']:8.4f}"
        )
    for D in (64, 128, 256):
        of = [r for r in rows if r["kind"] == "prefill" and r["D"] == D]
        if not of:
            continue
        line = f"prefill D {D}, {len(of)} cells, of balanced (fast):"
        for n in ("paged", "paged_255"):
            some = [r for r in of if n in r["ms"]]
            if some:
                b, f = (geometric(r["ms"][x] / r["ms"][n] for r in some) for x in ("balanced", "fast"))
                least = min(r["ms"]["balanced"] / r["ms"][n] for r in some)
                line += f"  {n} {b:.3f} ({f:.3f}), least {least:.3f}"
        print(line)
    of = [r for r in rows if r["kind"] == "prefill"]
    if of:
        chosen = [r["ms"]["balanced"] / min(r["ms"][n] for n in ("paged", "paged_255") if n in r["ms"]) for r in of]
        plain = [r["ms"]["balanced"] / r["ms"]["paged"] for r in of]
        print(
            f"prefill, all: {geometric(plain):.3f} (bound .92), least {min(plain):.3f} (bound .85); faster tile {geometric(chosen):.3f}"
        )
    for r in rows:
        if r["kind"] == "decode":
            print(f"decode D {r['D']} H {r['H']}: {r['ms']['copy'] / r['ms']['paged']:.3f} of a copy's speed")


def compare(a, b):
    """Milliseconds of the cache in two files."""
    first, second = (json.loads(Path(x).read_text()) for x in (a, b))
    of = {tuple(r[x] for x in ("kind", "D", "H", "B", "M", "N")): r for r in first["rows"]}
    ratios = {}
    print(f"{'cell':32s}{first['label']:>12s}{second['label']:>12s}{'ratio':>8s}{'corrected':>11s}   error")
    for r in second["rows"]:
        key = tuple(r[x] for x in ("kind", "D", "H", "B", "M", "N"))
        if key not in of:
            continue
        one, two = of[key]["ms"], r["ms"]
        # Corrected by what the dense kernel, which both trees have alike, took beside it.
        drift = one["balanced"] / two["balanced"]
        ratio = two["paged"] / one["paged"]
        ratios.setdefault(key[:2], []).append(ratio * drift)
        name = f"{key[0]} D{key[1]} H{key[2]} {key[3]}x{key[4]} on {key[5]}"
        print(
            f"{name:32s}{one['paged']:12.4f}{two['paged']:12.4f}{ratio:8.3f}{ratio * drift:11.3f}"
            f"   {of[key]['error']['paged']:.4f} {r['error']['paged']:.4f}"
        )
    for key, values in ratios.items():
        print(f"{key[0]} D {key[1]}: {geometric(values):.3f} of the time")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--label", default=TREE.name)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-test", action="store_true")
    parser.add_argument("--compare", nargs=2)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.compare:
        return compare(*args.compare)
    device = torch.device(args.device)
    result = {"label": args.label, "meta": describe_run(device), "rows": [], "failed": []}
    path = args.out / f"{args.label}.json"
    if not args.no_test:
        try:
            result["one_order"] = one_order(args.out, args.label)
        except Exception as e:
            result["one_order"] = {"rc": None, "last": [repr(e)[:500]]}
            print("one order:", repr(e)[:500], flush=True)
    for cell in cells(device):
        try:
            result["rows"].append(measure(cell, device, args.repeats))
        except Exception as e:
            traceback.print_exc()
            result["failed"].append([cell, repr(e)[:500]])
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        path.write_text(json.dumps(result, indent=1, default=str))
    table(result["rows"])
    if result["failed"]:
        print("failed:", *result["failed"], sep="\n")
    print("one order:", result.get("one_order"))


if __name__ == "__main__":
    main()
