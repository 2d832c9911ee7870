"""Choose the attention kernel's config per (bits, D_pad, causal) on this GPU, and write the package's table.

    python scripts/tune.py --out helion_attn/configs/fp8_attn_fwd_sm90.json

A grid of tiles, warps and stages is compiled in parallel without touching the GPU (which also gives registers and
spills), then timed serially on the workloads tagged "tune", with the recipe of `RECIPES`. Block sizes are one per bits
and D_pad, since packing does not know the mask: the pair with the best sum of both times wins.
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
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from helion_attn.configs import ALL_8_BIT, MAX_TWO_LEVEL_D, SUPPORTED_D, TileConfig
from helion_attn.testing import compile_for_sm90, fake_cuda
from helion_attn.types import BF16, FAST, HYBRID
from helion_attn.workloads import BENCH_HIDDEN, BENCH_TOKENS, Workload, tagged

#: What each pair of bits is timed with.
RECIPES = {(8, 8): FAST, (8, 16): HYBRID, (16, 16): BF16}

#: The pairs, as the command line has them.
BITS = {f"{qk_bits}/{pv_bits}": (qk_bits, pv_bits) for qk_bits, pv_bits in RECIPES}

#: (bm, bn, num_warps, num_stages, max_registers) worth trying, by bits and D_pad. What has been seen to lose by 10% or
#: to spill is left out. The registers of the 8-bit ones are for four, four, three and one program an SM.
TILES = {
    ((8, 8), 32): [(64, 128, 4, 3, 128), (64, 128, 4, 4, 128)],
    ((8, 8), 64): [(64, 128, 4, 2, 128), (64, 128, 4, 3, 128)],
    ((8, 8), 128): [(64, 128, 4, 2, 168), (64, 128, 4, 3, 168)],
    ((8, 8), 256): [(128, 128, 8, 3, 255), (64, 64, 4, 3, 255)],
    ((8, 16), 32): [(64, 128, 4, 2, 168), (64, 128, 4, 3, 168)],
    ((8, 16), 64): [(64, 128, 4, 2, 168), (64, 128, 4, 3, 168), (128, 128, 8, 2, 255), (128, 128, 8, 3, 255)],
    ((8, 16), 128): [
        *((64, 64, 4, 2, 168), (64, 64, 4, 3, 168), (64, 128, 4, 2, 255), (128, 64, 8, 3, 255)),
        *((128, 128, 8, 2, 255), (128, 128, 8, 3, 255)),
    ],
    ((8, 16), 256): [(64, 64, 4, 2, 255), (128, 64, 8, 2, 255), (128, 64, 8, 3, 255), (128, 128, 8, 2, 255)],
    ((16, 16), 32): [(64, 128, 4, 2, 168), (64, 128, 4, 3, 168)],
    ((16, 16), 64): [(64, 128, 4, 2, 168), (64, 128, 4, 3, 168), (128, 128, 8, 2, 255), (128, 128, 8, 3, 255)],
    ((16, 16), 128): [
        *((64, 64, 4, 2, 168), (64, 64, 4, 3, 255), (128, 64, 8, 2, 255)),
        *((128, 64, 8, 3, 255), (128, 128, 8, 2, 255)),
    ],
    ((16, 16), 256): [(128, 64, 8, 2, 255), (128, 32, 8, 3, 255)],
}


def grid(d_pads: Iterable[int], causals: Iterable[bool], bits: Iterable[tuple[int, int]] = RECIPES) -> list[TileConfig]:
    """Every candidate."""
    return [
        TileConfig(
            *bits_of,
            D_pad,
            causal,
            bm,
            bn,
            num_warps,
            num_stages,
            query_blocks_fastest,
            two_level=bits_of == ALL_8_BIT and D_pad <= MAX_TWO_LEVEL_D,
            ctas_per_sm=0,
            max_registers=max_registers,
        )
        for bits_of, D_pad, causal in itertools.product(bits, d_pads, causals)
        for bm, bn, num_warps, num_stages, max_registers in TILES[bits_of, D_pad]
        for query_blocks_fastest in (False, True)
    ]


def tile_key(row: dict[str, Any]) -> tuple[int, int, int, bool]:
    """What a row of the table is looked up by."""
    config = row["config"]
    return config["qk_bits"], config["pv_bits"], config["D_pad"], config["causal"]


def workload(tile: TileConfig) -> Workload:
    """The shape that `tile` is timed on; D = 32 has no benchmark cell and takes that of D = 64."""
    bench_d = max(tile.D_pad, 64)
    found = next(w for w in tagged("tune") if (w.D, w.causal) == (bench_d, tile.causal))
    H = BENCH_HIDDEN // tile.D_pad
    return replace(found, D=tile.D_pad, H=H, H_kv=H)


def packed(tile: TileConfig) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of q8, k8, v8; q_descale, k_descale, v_descale, v_mean; out and lse."""
    w, recipe = workload(tile), RECIPES[tile.bits]
    B, H, S, D_pad, fp32 = w.B, w.H, w.M, tile.D_pad, torch.float32
    m_blocks, n_blocks = -(-S // tile.bm), -(-S // tile.bn)
    v_block = (D_pad, tile.bn) if tile.pv_bits == 8 else (tile.bn, D_pad)
    return [
        ((B * H, m_blocks, tile.bm, D_pad), recipe.qk_dtype),
        ((B * H, n_blocks, tile.bn, D_pad), recipe.qk_dtype),
        ((B * H, n_blocks, *v_block), recipe.pv_dtype),
        ((B, H, m_blocks, tile.bm), fp32),
        ((B, H, n_blocks if recipe.k_scales == "block" else 1), fp32),
        ((B, H, D_pad), fp32),
        ((B, H, D_pad), fp32),
        ((B, H, S, D_pad), torch.bfloat16),
        ((B, H, S), fp32),
    ]


def precompile(tile: TileConfig) -> dict[str, Any]:
    """Compile one candidate into Triton's disk cache; its registers and spills."""
    from helion_attn.kernels import fp8_attn_fwd as module

    def launch() -> None:
        module.compiled_kernel.cache_clear()
        tensors = [fake_cuda(*shape, dtype=dtype) for shape, dtype in packed(tile)]
        S, recipe, right = workload(tile).M, RECIPES[tile.bits], 0 if tile.causal else -1
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

    torch.manual_seed(0)
    tensors = []
    for i, (shape, dtype) in enumerate(packed(tile)):
        # 8-bit numbers as quantised ones are spread, descales of 1, a mean of 0.
        spread = 32.0 if dtype.itemsize == 1 else 1.0
        x = torch.randn(shape, device="cuda") * spread if i < 3 else torch.full(shape, float(i < 6), device="cuda")
        tensors.append(x.to(dtype))
    recipe, S, right = RECIPES[tile.bits], workload(tile).M, 0 if tile.causal else -1
    # Scores of standard deviation about 1, as with N(0, 1) inputs. Of 8 bits that takes a scale as small as real
    # descales make it: above `MAX_FUSED_SCALE_LOG2` the kernel takes a slower path, which real inputs hardly ever do.
    sm_scale = tile.D_pad**-0.5 / (1024.0 if recipe.bits[0] == 8 else 1.0)
    args = module.kernel_args(
        *tensors[:7], None, None, *tensors[7:], S, S, -1, right, sm_scale, None, False, recipe.p_offset,
        tile.two_level, recipe.q_scales == "token", recipe.k_scales == "block", recipe.v_scales == "channel",
    )  # fmt: skip
    kernel = module.compiled(module.fp8_attn_fwd, module.helion_config(tile))
    return do_bench(lambda: kernel(*args), warmup=50, rep=300, return_mode="median")


def best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest row per (bits, D_pad, causal), under one (bm, bn) per bits and D_pad."""

    def kind(config: dict[str, Any]) -> tuple[int, int, int]:
        return config["qk_bits"], config["pv_bits"], config["D_pad"]

    chosen = []
    for kind_at_hand in sorted({kind(row["config"]) for row in rows}):
        by_blocks: dict[tuple[int, int], dict[bool, dict[str, Any]]] = {}
        for row in rows:
            config = row["config"]
            if kind(config) == kind_at_hand and not row["spills"]:
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
    parser.add_argument("--bits", nargs="+", default=list(BITS), choices=BITS, help="of Q and K, and of P and V")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args = parser.parse_args()

    candidates = grid(args.d, (False, True), [BITS[name] for name in args.bits])
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
    # What was not asked for keeps its rows.
    shipped = json.loads(resources.files("helion_attn.configs").joinpath("fp8_attn_fwd_sm90.json").read_text())["rows"]
    tuned = {tile_key(row) for row in chosen}
    kept = [row for row in shipped if tile_key(row) not in tuned]
    args.out.write_text(json.dumps({"meta": meta, "rows": sorted(kept + chosen, key=tile_key)}, indent=1) + "\n")
    if args.trials:
        args.trials.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")

    table = Table(title=f"{meta['gpu']}: {len(rows)} timed, compiled in {compiled_s:.0f} s; * chosen")
    columns = (
        "QK bits", "PV bits", "D", "causal", "bm", "bn", "warps", "stages", "rows fastest", "two-level", "CTAs/SM",
        "max regs", "regs", "spills", "ms", "TFLOP/s",
    )  # fmt: skip
    for column in columns:
        table.add_column(column)
    for row in sorted(rows, key=lambda r: (*tile_key(r), r["ms"])):
        values = [str(value) for value in row["config"].values()]
        mark = "*" if row in chosen else ""
        table.add_row(
            *values, str(row["registers"]), str(row["spills"]), f"{row['ms']:.3f}", f"{row['tflops']:.0f}{mark}"
        )
    Console(width=160).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
