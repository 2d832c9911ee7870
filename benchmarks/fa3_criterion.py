"""FlashAttention-3's own pass criterion for FP8 (hopper/test_flash_attn.py), on this package and on FlashAttention-3.

Q, K and V are N(0, 1) rounded to e4m3; the descales, one per (batch, KV head), are uniform in 0..2. An output passes if

    max|out - ref| <= 2 max|out_pt - ref| + atol

where ref is fp32 attention on the dequantised tensors, cast to bf16 (here fp64 before the cast); out_pt the same in
bf16 PyTorch operations, P rounded to e4m3 besides; and atol twice what adding 0.3 to ref and taking it off again costs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import helion_attn as ha
from benchmarks.lib.checks import Check, worst_of
from benchmarks.lib.harness import Loaded, Row, result_row
from benchmarks.lib.peers import fa3_on_fp8
from benchmarks.lib.problem import first_line, oracle
from benchmarks.lib.suite import Block, Options
from benchmarks.lib.tables import LABELS, Table, by_impl, mask, number, rows_of, values_of
from devtools.workloads import Workload
from helion_attn.reference.shapes import hide_future_keys

E4M3 = torch.float8_e4m3fn
INPUT = "fa3_test"

#: (M, N) of FlashAttention-3's list.
LENGTHS = ((64, 128), (113, 203), (384, 256), (256, 512), (1024, 1023), (4096, 4096))

#: KV heads to its 6 heads: MHA, GQA and MQA.
KV_HEADS = (6, 2, 1)


def workloads(options: Options, D: int) -> list[Workload]:
    """Every length with and without a mask; the KV heads take turns."""
    lengths = LENGTHS[:2] if options.device.type == "cpu" else LENGTHS
    found = []
    for i, (M, N) in enumerate(lengths):
        for causal in (False, True):
            H_kv = KV_HEADS[(i + causal) % len(KV_HEADS)]
            B = 1 if options.device.type == "cpu" else 9 if N <= 2048 else 2
            found.append(Workload("fa3_test", B, 6, H_kv, M, N, D, causal, frozenset()))
    return found


def rounded_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """out_pt: every operation in the tensors' bf16, and P, not scaled, through e4m3."""
    G = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
    s = q @ (k * q.size(3) ** -0.5).mT
    if causal:
        s = hide_future_keys(s)
    p = torch.softmax(s, 3).nan_to_num(0.0)  # rows without a key
    return p.to(E4M3).to(p.dtype) @ v


def measure(options: Options, w: Workload, seed: int) -> list[Row]:
    """One row per implementation: `ratio`, max|out - ref| over what is allowed, is at most 1 if it passes."""
    generator = torch.Generator(options.device).manual_seed(seed)

    def randn8(heads: int, S: int) -> Tensor:
        x = torch.randn(w.B, heads, S, w.D, device=options.device, generator=generator)
        return x.to(torch.bfloat16).to(E4M3)

    def descale() -> Tensor:
        return torch.rand(w.B, w.H_kv, device=options.device, generator=generator) * 2

    q8, k8, v8 = randn8(w.H, w.M), randn8(w.H_kv, w.N), randn8(w.H_kv, w.N)
    q_descale, k_descale, v_descale = descale(), descale(), descale()
    q = q8.float() * q_descale.repeat_interleave(w.H // w.H_kv, 1)[:, :, None, None]
    k, v = k8.float() * k_descale[:, :, None, None], v8.float() * v_descale[:, :, None, None]
    ref = oracle(q, k, v, w.causal).bfloat16()
    atol = 2 * (ref + 0.3 - 0.3 - ref).abs().max().item()
    out_pt = rounded_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), w.causal)
    pytorch = _max_difference(out_pt, ref)

    measured = []
    for impl in ("helion_attn", "fa3_fp8"):
        if impl not in options.impls:
            continue
        recipe = "fast" if impl == "helion_attn" else None
        row = result_row(impl, w, "kernel", INPUT, recipe=recipe) | {"part": "criterion"}
        try:
            if impl == "helion_attn":
                qkv = ha.pack(q8, k8, v8, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
                out = ha.attention_quantized(qkv, causal=w.causal)
            else:
                out = fa3_on_fp8(q8, k8, v8, q_descale, k_descale, v_descale, w.causal)
        except Exception as error:
            measured.append(row | {"error_message": first_line(error)})
            continue
        worst = _max_difference(out, ref)
        errors = {"max_error": worst, "max_error_pytorch": pytorch, "atol": atol}
        measured.append(row | errors | {"ratio": worst / (2 * pytorch + atol)})
    return measured


def _max_difference(out: Tensor, ref: Tensor) -> float:
    return (out.float() - ref.float()).abs().max().item()


def rows(options: Options, D: int) -> Iterator[Row]:
    """Part `criterion` of the accuracy suite: every case at a head dim."""
    for seed, w in enumerate(workloads(options, D)):
        yield from measure(options, w, seed)


def tables(loaded: Loaded) -> list[Table]:
    """The worst of FlashAttention-3's test cases by head dim and mask, and every case."""
    cases = rows_of(loaded, "accuracy", part="criterion")
    impls = [impl for impl in ("helion_attn", "fa3_fp8") if any(row["impl"] == impl for row in cases)]
    # Ours is FAST there.
    names = [LABELS["fast" if impl == "helion_attn" else impl] for impl in impls]
    worst, every = [], []
    for D, causal in values_of(cases, "D", "causal"):
        cell = [row for row in cases if (row["D"], row["causal"]) == (D, causal)]
        figures = []
        for impl in impls:
            ratios = [row.get("ratio") for row in cell if row["impl"] == impl]
            measured = [ratio for ratio in ratios if ratio is not None]
            passed = sum(ratio <= 1 for ratio in measured)
            figures += [number(max(measured, default=None), ".2f"), f"{passed} of {len(ratios)}"]
        worst.append([str(D), mask(causal), *figures])
    for case in values_of(cases, "D", "causal", "M", "N", "H_kv"):
        cell = [row for row in cases if tuple(row[name] for name in ("D", "causal", "M", "N", "H_kv")) == case]
        by = by_impl(cell, "ratio")
        D, causal, *rest = case
        every.append([str(D), mask(causal), *map(str, rest), *(number(by.get(impl), ".2f") for impl in impls)])
    if not cases:
        return []
    headers = [text for name in names for text in (f"{name}, worst ratio", "passed")]
    return [
        Table("FlashAttention-3's FP8 test: error / what is allowed", ["D", "mask", *headers], worst),
        Table("Every case of it, 6 heads", ["D", "mask", "M", "N", "KV heads", *names], every),
    ]


def checks(loaded: Loaded) -> list[Check]:
    """The worst case of each head dim."""
    found, cases = [], rows_of(loaded, "accuracy", part="criterion", impl="helion_attn")
    for (D,) in values_of(cases, "D"):
        # A case that raised has no ratio and must not pass.
        ratios = [row.get("ratio", float("nan")) for row in cases if row["D"] == D]
        name = "FA3's FP8 test, error / what is allowed"
        found.append(Check(name, f"D {D}, worst of {len(ratios)} cases", worst_of(ratios), 1.0))
    return found


BLOCK = Block("accuracy", tables)
