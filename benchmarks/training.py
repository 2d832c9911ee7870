"""Benchmarks both passes of attention next to PyTorch's, the memory held between them, and errors of gradients.

    python benchmarks/attention.py --suite training

Q, K and V are bf16 [B, H, S, D], 16k tokens x hidden 2048 or one sequence, and require grad. PyTorch's attention is
`scaled_dot_product_attention` as it chooses ("sdpa_bf16"), cuDNN's and flash attention's. Errors are of 1,024 tokens
against fp64 on the bf16 tensors.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import helion_attn as ha
from benchmarks.lib.checks import Check
from benchmarks.lib.harness import Loaded, Results, Row, result_row, time_interleaved
from benchmarks.lib.problem import dry_workload, workload
from benchmarks.lib.recipes import DEFAULT, RECIPES
from benchmarks.lib.suite import Block, Options, Suite, progress
from benchmarks.lib.tables import LABELS, Table, mask, number, rows_of, series, values_of
from devtools.inputs import make_qkv
from devtools.workloads import BENCH_HIDDEN, BENCH_TOKENS, Workload
from helion_attn.api import dense_problem
from helion_attn.backward import dense, kernels
from helion_attn.options import ScoreOptions
from helion_attn.testing import relative_error

LENGTHS = (2048, 4096, 8192, 16384, 32768)

#: The one of a quick run, at which dequantising is timed alone.
MIDDLE = 16384

#: Wan 2.1 1.3B at 81 frames of 480p: heads, tokens, head dim.
WAN = (12, 75600, 128)

#: Largest windows' left edge, of a causal call.
WINDOW = 4096

#: Kinds of inputs whose gradients are compared, and the most that dQ and dK, and dV, may be off with BALANCED.
ERRORS = {
    "randn": (0.033, 0.013),
    "outlier": (0.065, 0.065),
    "wide": (0.065, 0.065),
    "biased_v": (0.065, 0.065),
    "k3x30": (0.065, 0.065),
    "k_channels": (0.065, 0.065),
}

Attend = Callable[..., torch.Tensor]


def pytorch(backend: SDPBackend | None) -> Attend:
    """PyTorch's attention, of one backend or as it chooses."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def ours(recipe: str, **options: Any) -> Attend:
    """This package's attention."""
    return lambda q, k, v, causal: ha.attention(q, k, v, causal=causal, recipe=RECIPES[recipe], **options)


def contenders(device: torch.device) -> dict[tuple[str, str | None], Attend]:
    """What is measured, by impl and recipe."""
    found: dict[tuple[str, str | None], Attend] = {
        ("helion_attn", recipe): ours(recipe) for recipe in (DEFAULT, "fast")
    }
    found["sdpa_bf16", None] = pytorch(None)
    if device.type == "cuda":
        found["cudnn_bf16", None] = pytorch(SDPBackend.CUDNN_ATTENTION)
        found["flash_bf16", None] = pytorch(SDPBackend.FLASH_ATTENTION)
    return found


def step(attend: Attend, qkv: list[torch.Tensor], d_out: torch.Tensor, causal: bool) -> None:
    """A forward and a backward pass."""
    torch.autograd.grad(attend(*qkv, causal), qkv, d_out)


class Fa3WithFa2(torch.autograd.Function):
    """FlashAttention-3's forward pass, whose wheel has no other, and FlashAttention-2's backward pass."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        """Attend to [B, H, S, D]."""
        fa3 = importlib.import_module("fa3_fwd_interface")
        bshd = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = fa3.flash_attn_func(*bshd, causal=causal, return_attn_probs=True)
        out = out.transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scores = ScoreOptions(causal=causal).resolved(q.size(3))
        return cast(torch.Tensor, out)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        """dQ, dK and dV."""
        q, k, v, out, lse = ctx.saved_tensors
        flash = kernels.BackwardKernel("flash", "FlashAttention-2's, behind FlashAttention-3's forward pass")
        return *kernels.run(flash, d_out, q, k, v, out, lse, ctx.scores, None), None


def checkpointed(attend: Attend, qkv: list[torch.Tensor], d_out: torch.Tensor) -> None:
    """A step without a mask whose forward pass runs again before the backward pass."""
    out = checkpoint(attend, *qkv, False, use_reentrant=False)
    torch.autograd.grad(out, qkv, d_out)


def measure_checkpointed(
    w: Workload, options: Options, results: Results, fs: dict[tuple[str, str | None], Attend]
) -> None:
    """Time steps with gradient checkpointing, and the most memory that one takes besides its inputs."""
    q, k, v = make_qkv("randn", w.B, w.H, w.H_kv, w.M, w.N, w.D, device=options.device)
    qkv, d_out = [x.requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    steps: dict[tuple[str, str | None], Callable[[], object]] = {}
    peaks = {}
    for key, attend in fs.items():
        steps[key] = functools.partial(checkpointed, attend, qkv, d_out)
        steps[key]()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps[key]()
        torch.cuda.synchronize()
        peaks[key] = torch.cuda.max_memory_allocated() - before
    ms = time_interleaved(steps, options.device, max(3, options.repeats // 2))
    for (impl, recipe), taken in ms.items():
        row = result_row(impl, w, "checkpointed", "randn", recipe=recipe, ms=taken)
        results.add(row | {"tflops": None, "bytes_peak": peaks[impl, recipe]})


def bytes_held(attend: Attend, qkv: list[torch.Tensor], causal: bool) -> int:
    """What autograd keeps after the forward pass, the output included; of tensors that nothing else holds."""
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attend(*qkv, causal)
    kept[out.untyped_storage().data_ptr()] = out.untyped_storage().nbytes()
    return sum(kept.values())


def measure_cell(w: Workload, options: Options, results: Results, fs: dict[tuple[str, str | None], Attend]) -> None:
    """Time all of one shape, forward and both passes; what cannot run has no row."""
    q, k, v = make_qkv("randn", w.B, w.H, w.H_kv, w.M, w.N, w.D, device=options.device)
    qkv, d_out = [x.requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    held: dict[tuple[str, str | None], int] = {}
    timed: dict[tuple[str, str | None, str], Callable[[], object]] = {}
    for key, attend in fs.items():
        try:
            held[key] = bytes_held(attend, qkv, w.causal)
            step(attend, qkv, d_out, w.causal)
        except RuntimeError as error:
            print(f"{key[0]} {w.name}: {str(error).splitlines()[0][:120]}")
            continue
        timed[(*key, "both")] = functools.partial(step, attend, qkv, d_out, w.causal)
        timed[(*key, "forward")] = functools.partial(attend, *qkv, w.causal)
    ms = time_interleaved(
        timed, options.device, options.repeats if w.N < BENCH_TOKENS else max(3, options.repeats // 2)
    )
    for impl, recipe in held:
        forward, both = (ms[impl, recipe, stage] for stage in ("forward", "both"))
        stages = {"forward": forward, "both": both}
        if options.device.type == "cuda":  # a CPU's times are too noisy to subtract
            stages["backward"] = both - forward
        for stage, taken in stages.items():
            row = result_row(impl, w, stage, "randn", recipe=recipe, ms=taken)
            results.add(row | {"tflops": None, "bytes_held": held[impl, recipe]})


def dequantising(w: Workload, options: Options) -> Row:
    """Time of giving the backward kernel its tensors."""
    q, k, v = make_qkv("randn", w.B, w.H, w.H_kv, w.M, w.N, w.D, device=options.device)
    a = dense_problem(q, k, v, causal=w.causal)
    asked = dense._kept(a, dense.attention_training(a))
    unpack = functools.partial(dense.dequantised, asked.forward, torch.bfloat16)
    ms = time_interleaved({"dequantise": unpack}, options.device, options.repeats)["dequantise"]
    return result_row("helion_attn", w, "dequantise", "randn", recipe=DEFAULT, ms=ms) | {"tflops": None}


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, causal: bool) -> list[torch.Tensor]:
    """dQ, dK and dV in fp64."""
    given = [x.detach().double().requires_grad_() for x in (q, k, v)]
    s = given[0] @ given[1].mT * q.size(3) ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    return [*torch.autograd.grad(s.softmax(3) @ given[2], given, d_out.double())]


def errors(options: Options, results: Results, fs: dict[tuple[str, str | None], Attend]) -> None:
    """Errors of dQ, dK and dV by kind of input."""
    on_gpu = options.device.type == "cuda"
    S = 1024 if on_gpu else 64
    for kind in ERRORS:
        for D in options.dims if on_gpu else (64,):
            for causal in (False, True):
                w = workload(1, 4 if on_gpu else 1, S, S, D, causal)
                q, k, v = make_qkv(kind, w.B, w.H, w.H_kv, S, S, D, device=options.device)
                d_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(0)).to(q)
                expected = exact(q, k, v, d_out, causal)
                qkv = [x.requires_grad_() for x in (q, k, v)]
                for (impl, recipe), attend in fs.items():
                    try:
                        found = torch.autograd.grad(attend(*qkv, causal), qkv, d_out)
                    except RuntimeError:
                        continue
                    of = {
                        f"error_{n}": relative_error(x, y)
                        for n, x, y in zip(("dq", "dk", "dv"), found, expected, strict=True)
                    }
                    results.add(result_row(impl, w, "errors", kind, recipe=recipe) | of)


def run(options: Options, results: Results) -> None:
    """Every shape, a windowed one, a Wan-shaped one, and errors."""
    fs = contenders(options.device)
    errors(options, results, fs)
    if options.device.type != "cuda":
        measure_cell(dry_workload(64), options, results, fs)
        return
    cells = []
    for D in options.dims:
        for S in (MIDDLE,) if options.quick else LENGTHS:
            for causal in (False, True):
                B = max(1, BENCH_TOKENS // S)
                cells.append(workload(B, BENCH_HIDDEN // D, S, S, D, causal))
    if not options.quick:
        cells.append(workload(1, WAN[0], WAN[1], WAN[1], WAN[2]))
    for w in progress(cells, "training"):
        measure_cell(w, options, results, fs)
        if w.N == MIDDLE:
            results.add(dequantising(w, options))
    if not options.quick:
        both = {key: f for key, f in fs.items() if key[0] in ("helion_attn", "cudnn_bf16")}
        if importlib.util.find_spec("fa3_fwd_interface") is not None:
            both["fa3_fa2_bf16", None] = Fa3WithFa2.apply
        measure_checkpointed(workload(1, WAN[0], WAN[1], WAN[1], WAN[2]), options, results, both)
    windowed: dict[tuple[str, str | None], Attend] = {
        ("helion_attn_window", DEFAULT): ours(DEFAULT, window=(WINDOW, 0))
    }
    measure_cell(workload(1, BENCH_HIDDEN // 128, 16384, 16384, 128, True), options, results, windowed)


def _cell(loaded: Loaded, impl: str, recipe: str | None, stage: str, **of: Any) -> Row | None:
    found = rows_of(loaded, "training", impl=impl, recipe=recipe, stage=stage, **of)
    return found[0] if found else None


def _of_cells(loaded: Loaded) -> list[dict[str, Any]]:
    """Shapes that were timed with BALANCED and PyTorch's own call."""
    rows = rows_of(loaded, "training", impl="sdpa_bf16", stage="both")
    return [{name: row[name] for name in ("D", "N", "H", "causal")} for row in rows]


def tables(loaded: Loaded) -> list[Table]:
    """Milliseconds of both passes and memory, and errors."""
    found, body = [], []
    for D, N, H in values_of(rows_of(loaded, "training", impl="sdpa_bf16", stage="both"), "D", "N", "H"):
        line = [str(D), f"{N:,}"]
        for recipe in (DEFAULT, "fast"):
            for causal in (False, True):
                of = {"D": D, "N": N, "H": H, "causal": causal}
                bf16 = _cell(loaded, "sdpa_bf16", None, "both", **of)
                row = _cell(loaded, "helion_attn", recipe, "both", **of)
                line.append("-" if row is None or bf16 is None else number(bf16["ms"] / row["ms"], ".2f"))
        bf16 = _cell(loaded, "sdpa_bf16", None, "both", D=D, N=N, H=H)
        row = _cell(loaded, "helion_attn", DEFAULT, "both", D=D, N=N, H=H)
        line.append("-" if row is None or bf16 is None else number(row["bytes_held"] / bf16["bytes_held"], ".2f"))
        body.append(line)
    if body:
        speeds = ["BALANCED, full", "BALANCED, causal", "FAST, full", "FAST, causal"]
        headers = ["D", "length", *speeds, "BALANCED, memory held"]
        found.append(Table("Forward and backward, from bf16: times the speed of PyTorch's own call", headers, body))
    body = []
    for kind, D, causal in values_of(rows_of(loaded, "training", stage="errors"), "input", "D", "causal"):
        for row in rows_of(loaded, "training", stage="errors", input=kind, D=D, causal=causal):
            of_each = (number(row[f"error_{x}"], ".4f") for x in ("dq", "dk", "dv"))
            body.append([kind, str(D), mask(causal), LABELS[series(row)], *of_each])
    if body:
        headers = ["input", "D", "mask", "attention", "dQ", "dK", "dV"]
        found.append(Table("Errors of gradients against fp64", headers, body))
    return found + checkpointed_table(loaded)


def checkpointed_table(loaded: Loaded) -> list[Table]:
    """A video model's step with gradient checkpointing: milliseconds, and peak memory."""
    body = []
    for row in rows_of(loaded, "training", stage="checkpointed"):
        body.append([LABELS[series(row)], number(row["ms"], ".1f"), number(row["bytes_peak"] / 2**20, ",.0f")])
    title = "A step of 75,600 tokens, 12 heads of 128, with gradient checkpointing"
    return [Table(title, ["attention", "ms", "peak memory, MiB"], body)] if body else []


def checks(loaded: Loaded) -> list[Check]:
    """Errors of BALANCED, and its time beside PyTorch's."""
    found = []
    for row in rows_of(loaded, "training", impl="helion_attn", recipe=DEFAULT, stage="errors"):
        of_scores, of_values = ERRORS[row["input"]]
        what = f"{row['input']}, D {row['D']}, {mask(row['causal'])}"
        kind = "hard inputs" if of_scores == of_values else "N(0, 1)"
        found.append(Check(f"error of dQ and dK, {kind}", what, max(row["error_dq"], row["error_dk"]), of_scores))
        found.append(Check(f"error of dV, {kind}", what, row["error_dv"], of_values))
    ratios = []
    for of in _of_cells(loaded):
        ours_ = _cell(loaded, "helion_attn", DEFAULT, "both", **of)
        theirs = _cell(loaded, "sdpa_bf16", None, "both", **of)
        if ours_ is None or theirs is None or of["N"] < 4096 or of["D"] == 256:
            continue
        what = f"D {of['D']}, {of['N']}, {mask(of['causal'])}"
        found.append(Check("forward and backward, time / PyTorch's", what, ours_["ms"] / theirs["ms"], 1 / 0.97))
        found.append(Check("memory held / bf16's", what, ours_["bytes_held"] / theirs["bytes_held"], 0.65))
        if of["N"] in (16384, 32768):
            ratios.append(ours_["ms"] / theirs["ms"])
    if ratios:
        mean = statistics.geometric_mean(ratios)
        found.append(Check("forward and backward, mean time / PyTorch's", "16k and 32k", mean, 1 / 1.08))
    for row in rows_of(loaded, "training", stage="dequantise"):
        of = {name: row[name] for name in ("D", "N", "H", "causal")}
        backward = _cell(loaded, "helion_attn", DEFAULT, "backward", **of)
        if backward is not None:
            what = f"D {of['D']}, {mask(of['causal'])}"
            found.append(Check("dequantising / backward", what, row["ms"] / backward["ms"], 0.03))
    return found


SUITE = Suite("training", run, {"training": Block("training", tables, shown=1)})
