"""Benchmarks head dims that other FP8 attention kernels do not have.

    python benchmarks/large_d.py                          # FFPA's comparison and pairs of D and D_v, on the GPU
    python benchmarks/large_d.py --dims 512 --quick       # one head dim of the former, and the pairs
    python benchmarks/large_d.py --device cpu --quick     # a dry run in the interpreter, this package only

FFPA's comparison (https://github.com/xlite-dev/ffpa-attn): B 1, H 48, N 8192, D 320..1024, against every backend of
PyTorch's SDPA that runs in bf16. Then pairs of D and D_v: DeepSeek's prefill, 192/128, and 64/128, B 1, H 16, N 16384,
against FlashAttention-3; and absorbed MLA, 576/512, 16 heads on one KV head, N 8192, against SDPA. Writes
`<out>/large_d.json`.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import replace
from pathlib import Path

import torch
from harness import Results, describe_run
from peers import PACKAGES, Prepare, available, cudnn_bf16, fa3_16bit, fa3_fp8, flash_16bit, sdpa
from problem import Contender, Options, make_problem, measure, ours, workload
from recipes import DEFAULT
from torch.nn.attention import SDPBackend

from helion_attn.workloads import Workload

#: FFPA's.
DIMS = (320, 384, 448, 512, 576, 640, 768, 1024)

#: Query rows that are checked against the oracle.
CHECKED_ROWS = 16

SDPA: dict[str, Prepare] = {
    "efficient_bf16": functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION, "efficient_bf16"),
    "math_bf16": functools.partial(sdpa, SDPBackend.MATH, "math_bf16"),
    "flash_bf16": flash_16bit,
    "cudnn_bf16": cudnn_bf16,
}
PREFILL: dict[str, Prepare] = {"fa3_fp8": fa3_fp8, "fa3_bf16": fa3_16bit, "cudnn_bf16": cudnn_bf16}


def cells(options: Options) -> list[tuple[Workload, dict[str, Prepare]]]:
    """The shapes, and who else runs on them."""
    if options.device.type == "cpu":
        return [
            (workload(1, 1, 32, 80, 320, True), {}),
            (replace(workload(1, 1, 32, 80, 192, True), D_v=128), {}),
            (replace(workload(1, 1, 32, 80, 64, True), D_v=128), {}),
            (replace(workload(1, 2, 32, 80, 576, True), D_v=512, H_kv=1), {}),
        ]
    found = [(workload(1, 48, 8192, 8192, D, causal), SDPA) for D in options.dims for causal in (False, True)]
    for causal in (False, True):
        found += [(replace(workload(1, 16, 16384, 16384, D, causal), D_v=128), PREFILL) for D in (192, 64)]
        found.append((replace(workload(1, 16, 8192, 8192, 576, causal), D_v=512, H_kv=1), SDPA))
    return found


def run(options: Options, results: Results) -> None:
    """Kernel times; every row with its error, and no time for a wrong answer of ours."""
    runnable, _ = available(options.device)
    for w, peers in cells(options):
        problem = make_problem(w, "randn", options, CHECKED_ROWS)
        wanted = [name for name in peers if name in runnable or name not in PACKAGES]
        contenders = [*ours(options, [DEFAULT]), *(Contender(name, peers[name]) for name in wanted)]
        rows = measure(problem, contenders, options)
        results.add(*rows)
        for row in rows:
            shown = [f"{name} {row[name]}" for name in ("impl", "D", "D_v", "causal", "ms", "tflops", "error_kernel")]
            print(*shown, row.get("error_message", ""), sep="  ", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Parse `argv`, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the result file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dims", type=int, nargs="+", default=list(DIMS))
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--commit", help="commit to record, where there is no git to ask")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    repeats = 1 if device.type == "cpu" else 5 if args.quick else 20
    options = Options(device, args.quick, repeats, ["helion_attn"], tuple(args.dims), 0)
    run(options, Results(args.out / "large_d.json", describe_run(device, args.commit)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
