"""Benchmarks head dims that other FP8 attention kernels do not have.

FFPA's comparison (https://github.com/xlite-dev/ffpa-attn): B 1, H 48, N 8192, D 320..1024, against every backend of
PyTorch's SDPA that runs in bf16. Then pairs of D and D_v: DeepSeek's prefill, 192/128, and 64/128, B 1, H 16, N 16384,
against FlashAttention-3; and absorbed MLA, 576/512, 16 heads on one KV head, N 8192, against SDPA.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from command import progress
from harness import Results
from peers import PACKAGES, Prepare, available, cudnn_bf16, fa3_16bit, fa3_fp8, flash_16bit, sdpa
from problem import Contender, Options, make_problem, measure, ours, workload
from recipes import DEFAULT
from torch.nn.attention import SDPBackend

from helion_attn.configs import SUPPORTED_D
from helion_attn.workloads import Workload

#: FFPA's, where none above 256 is asked for.
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
    dims = [D for D in options.dims if SUPPORTED_D[-1] < D] or DIMS
    found = [(workload(1, 48, 8192, 8192, D, causal), SDPA) for D in dims for causal in (False, True)]
    for causal in (False, True):
        found += [(replace(workload(1, 16, 16384, 16384, D, causal), D_v=128), PREFILL) for D in (192, 64)]
        found.append((replace(workload(1, 16, 8192, 8192, 576, causal), D_v=512, H_kv=1), SDPA))
    return found


def run_large_d(options: Options, results: Results) -> None:
    """Kernel times; every row with its error, and no time for a wrong answer of ours."""
    runnable, _ = available(options.device)
    for w, peers in progress(cells(options), "large_d"):
        problem = make_problem(w, "randn", options, CHECKED_ROWS)
        wanted = [name for name in peers if name in runnable or name not in PACKAGES]
        contenders = [*ours(options, [DEFAULT]), *(Contender(name, peers[name]) for name in wanted)]
        results.add(*measure(problem, contenders, options))
