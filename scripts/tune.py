"""Choose the attention kernel's config per (D_pad, causal) on this GPU, and write the table that the package ships.

    python scripts/tune.py --out helion_attn/configs/fp8_attn_fwd_sm90.json

A grid of tiles, warps and stages is compiled in parallel without touching the GPU (which also gives registers and
spills), then timed serially on the workloads tagged "tune", with the fast recipe. Block sizes are one per D_pad, since
packing does not know the mask: the pair with the best sum of both times wins.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from helion_attn.configs import MAX_TWO_LEVEL_D, SUPPORTED_D, TileConfig
from helion_attn.testing import compile_for_sm90, fake_cuda
from helion_attn.types import FAST
from helion_attn.workloads import BENCH_HIDDEN, BENCH_TOKENS, Workload, tagged

#: (bm, bn, num_warps, num_stages) worth trying, by D_pad. What has been seen to lose by 10% or to spill is left out.
TILES = {
    32: [(64, 128, 4, 3), (64, 128, 4, 4)],
    64: [(64, 128, 4, 2), (64, 128, 4, 3)],
    128: [(64, 128, 4, 2), (64, 128, 4, 3)],
    256: [(128, 128, 8, 3), (64, 64, 4, 3)],
}

#: What ptxas may give a thread, by D_pad: four, four, three and one program of 4, 4, 4 and 8 warps an SM.
MAX_REGISTERS = {32: 128, 64: 128, 128: 168, 256: 255}


def grid(d_pads: Iterable[int], causals: Iterable[bool]) -> list[TileConfig]:
    """Every candidate."""
    return [
        TileConfig(
            D_pad,
            causal,
            bm,
            bn,
            num_warps,
            num_stages,
            query_blocks_fastest,
            two_level=D_pad <= MAX_TWO_LEVEL_D,
            ctas_per_sm=0,
            max_registers=MAX_REGISTERS[D_pad],
        )
        for D_pad, causal in itertools.product(d_pads, causals)
        for bm, bn, num_warps, num_stages in TILES[D_pad]
        for query_blocks_fastest in (False, True)
    ]


def workload(tile: TileConfig) -> Workload:
    """The shape that `tile` is timed on; D = 32 has no benchmark cell and takes that of D = 64."""
    bench_d = max(tile.D_pad, 64)
    found = next(w for w in tagged("tune") if (w.D, w.causal) == (bench_d, tile.causal))
    H = BENCH_HIDDEN // tile.D_pad
    return replace(found, D=tile.D_pad, H=H, H_kv=H)


def packed_shapes(tile: TileConfig) -> list[tuple[int, ...]]:
    """Shapes of q8, k8, v8; q_descale, k_descale, v_descale, v_mean; out and lse."""
    w = workload(tile)
    B, H, S, D_pad = w.B, w.H, w.M, tile.D_pad
    m_blocks, n_blocks = -(-S // tile.bm), -(-S // tile.bn)
    return [
        (B * H, m_blocks, tile.bm, D_pad),
        (B * H, n_blocks, tile.bn, D_pad),
        (B * H, n_blocks, D_pad, tile.bn),
        (B, H, m_blocks, tile.bm),
        (B, H, 1),
        (B, H, D_pad),
        (B, H, D_pad),
        (B, H, S, D_pad),
        (B, H, S),
    ]


#: Of what `packed_shapes` lists.
DTYPES = [torch.float8_e4m3fn] * 3 + [torch.float32] * 4 + [torch.bfloat16, torch.float32]


def precompile(tile: TileConfig) -> dict[str, Any]:
    """Compile one candidate into Triton's disk cache; its registers and spills."""
    from helion_attn.kernels import fp8_attn_fwd as module

    def launch() -> None:
        module.compiled_kernel.cache_clear()
        tensors = [fake_cuda(*shape, dtype=dtype) for shape, dtype in zip(packed_shapes(tile), DTYPES, strict=True)]
        S, recipe, right = workload(tile).M, FAST, 0 if tile.causal else -1
        with mock.patch.object(module, "tile_config", return_value=tile):
            module.launch(
                *tensors[:7], None, None, *tensors[7:], S, S, -1, right, tile.D_pad**-0.5, None, False,
                recipe.p_offset, recipe.promote_every, recipe.q_scales == "token", recipe.k_scales == "block",
                recipe.v_scales == "channel",
            )  # fmt: skip

    try:
        (kernel,) = compile_for_sm90(launch)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    spills = kernel.opcodes["LDL"] + kernel.opcodes["STL"]
    return {"registers": kernel.registers, "spills": spills, "ctas_per_sm": kernel.ctas_per_sm}


def measure(tile: TileConfig) -> float:
    """Median milliseconds of the kernel alone, on random packed tensors."""
    from triton.testing import do_bench

    from helion_attn.kernels import fp8_attn_fwd as module

    shapes = packed_shapes(tile)
    torch.manual_seed(0)
    # Scores of standard deviation about 1, as with N(0, 1) inputs.
    packed = [torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for shape in shapes[:3]]
    descales = [torch.ones(shape, device="cuda") for shape in shapes[3:6]]
    v_mean = torch.zeros(shapes[6], device="cuda")
    out = torch.empty(shapes[7], dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(shapes[8], device="cuda")
    S, right = workload(tile).M, 0 if tile.causal else -1
    args = module.kernel_args(
        *packed, *descales, v_mean, None, None, out, lse, S, S, -1, right, tile.D_pad**-0.5, None, False,
        FAST.p_offset, tile.two_level, FAST.q_scales == "token", FAST.k_scales == "block",
                FAST.v_scales == "channel",
    )  # fmt: skip
    kernel = module.compiled(module.fp8_attn_fwd, module.helion_config(tile))
    return do_bench(lambda: kernel(*args), warmup=50, rep=300, return_mode="median")


def best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest row per (D_pad, causal), under one (bm, bn) per D_pad."""
    chosen = []
    for D_pad in sorted({row["config"]["D_pad"] for row in rows}):
        by_blocks: dict[tuple[int, int], dict[bool, dict[str, Any]]] = {}
        for row in rows:
            config = row["config"]
            if config["D_pad"] == D_pad and not row["spills"]:
                per_mask = by_blocks.setdefault((config["bm"], config["bn"]), {})
                held = per_mask.get(config["causal"])
                if held is None or row["ms"] < held["ms"]:
                    per_mask[config["causal"]] = row
        masks = max(len(per_mask) for per_mask in by_blocks.values())
        complete = [per_mask for per_mask in by_blocks.values() if len(per_mask) == masks]
        fastest = min(complete, key=lambda per_mask: sum(row["ms"] for row in per_mask.values()))
        chosen += [fastest[causal] for causal in sorted(fastest)]
    return chosen


def main() -> int:
    """Tune, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the table of chosen configs")
    parser.add_argument("--trials", type=Path, help="also write every candidate with its time")
    parser.add_argument("--d", type=int, nargs="+", default=list(SUPPORTED_D), choices=SUPPORTED_D)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args = parser.parse_args()

    candidates = grid(args.d, (False, True))
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        reports = list(track(pool.map(precompile, candidates), "compiling", total=len(candidates)))
    compiled_s = time.perf_counter() - started

    rows = []
    for tile, report in track(list(zip(candidates, reports, strict=True)), "timing"):
        if "error" in report or report["ctas_per_sm"] == 0:
            continue
        w = workload(tile)
        ms = measure(tile)
        tflops = 4 * w.M * w.N * w.D * w.H * w.B / (2 if w.causal else 1) / ms / 1e9
        config = asdict(replace(tile, ctas_per_sm=report["ctas_per_sm"]))
        rows.append(
            {
                "config": config,
                **{k: report[k] for k in ("registers", "spills")},
                "ms": round(ms, 4),
                "tflops": round(tflops, 1),
            }
        )

    import helion
    import triton

    meta = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "helion": getattr(helion, "__version__", "1.5.1"),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "workload": f"{BENCH_TOKENS} tokens x hidden {BENCH_HIDDEN}, S = 4096, bf16 output, kernel only",
    }
    chosen = best(rows)
    args.out.write_text(json.dumps({"meta": meta, "rows": chosen}, indent=1) + "\n")
    if args.trials:
        args.trials.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")

    table = Table(title=f"{meta['gpu']}: {len(rows)} timed, compiled in {compiled_s:.0f} s; * chosen")
    columns = (
        "D", "causal", "bm", "bn", "warps", "stages", "rows fastest", "two-level", "CTAs/SM", "max regs", "regs",
        "spills", "ms", "TFLOP/s",
    )  # fmt: skip
    for column in columns:
        table.add_column(column)
    for row in sorted(rows, key=lambda r: (r["config"]["D_pad"], r["config"]["causal"], r["ms"])):
        values = [str(value) for value in row["config"].values()]
        mark = "*" if row in chosen else ""
        table.add_row(
            *values, str(row["registers"]), str(row["spills"]), f"{row['ms']:.3f}", f"{row['tflops']:.0f}{mark}"
        )
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
