"""The PTX of shipped kernels as hashes: what a change that should change no kernel is held to."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import helion_attn as ha
from devtools.sm90 import Sm90Kernel, compile_for_sm90, fake_cuda
from helion_attn.backward.dense import DequantizeRowsArgs, dequantize_rows
from helion_attn.configs import TILE_CONFIGS
from helion_attn.types import Layout
from helpers import offline
from helpers.cases import GIVEN, IN_E4M3

HASHES = Path(__file__).parents[1] / "ptx_hashes.json"

Compile = Callable[[], Sm90Kernel | list[Sm90Kernel]]

RECIPES = {"fast": ha.FAST, "balanced": ha.BALANCED, "accurate": ha.ACCURATE, "hybrid": ha.HYBRID, "bf16": ha.BF16}
OF_BITS = {(8, 8): ("fast", "balanced", "accurate"), (8, 16): ("hybrid",), (16, 16): ("bf16",)}
EVERYTHING: dict[str, Any] = {"window": (100, -1), "softcap": 50.0, "sinks": True}


def attention(*args: Any, **options: Any) -> Compile:
    """The attention kernel."""
    return lambda: offline.compile_attention(*args, **options)


def quantize(
    D: int,
    recipe: ha.Recipe,
    dtype: torch.dtype = torch.bfloat16,
    rope: bool = False,
    norm_channels: tuple[int, int] | None = None,
) -> Compile:
    """What runs before it."""
    layout: Layout = "bshd" if rope else "bhsd"

    def tables() -> ha.Rope:
        return ha.Rope(fake_cuda(9000, D // 2), fake_cuda(9000, D // 2))

    return lambda: offline.compile_quantize(
        lambda: offline.fake_qkv(2, 8, 4, 4096, 9000, D, dtype=dtype, layout=layout),
        layout=layout,
        recipe=recipe,
        make_rope=tables if rope else None,
        norm_channels=norm_channels,
    )


def transforms() -> list[Sm90Kernel]:
    """The stages of quantising alone."""

    def launch() -> None:
        x = fake_cuda(2, 8, 1000, 128, dtype=torch.bfloat16)
        with offline.launching():
            ha.hadamard(x)
            ha.reflect(x)
            ha.apply_rope(x, ha.Rope(fake_cuda(1000, 64), fake_cuda(1000, 64)))

    return compile_for_sm90(launch)


def unpacks(D: int, recipe: ha.Recipe) -> list[Sm90Kernel]:
    """What a backward pass reads: the packed tensors as 16-bit rows again."""

    def launch() -> None:
        qkv = offline.fake_qkv(2, 8, 4, 4096, 9000, D, dtype=torch.bfloat16)
        with offline.launching():
            packed = ha.quantize(*qkv, recipe=recipe)
            sizes = packed.M, packed.N, packed.D, packed.D_v
            dequantize_rows(DequantizeRowsArgs(packed, *sizes, packed.recipe, torch.bfloat16, bshd=False))

    return [kernel for kernel in compile_for_sm90(launch) if "unpack" in kernel.name]


def cases() -> dict[str, Compile]:
    """How to compile each, by name."""
    found: dict[str, Compile] = {}
    for tile in TILE_CONFIGS:
        mask = "causal" if tile.has_right else "full"
        for name in OF_BITS[tile.bits]:
            found[f"attention {name} D{tile.D_pad} {mask} <={tile.max_query_blocks_per_sm}"] = attention(
                tile.D_pad, tile.has_right, recipe=RECIPES[name], B=offline.batch_for(tile)
            )
    for D in (64, 256):
        q_block = replace(IN_E4M3, q_scales="block", smooth_k=True)
        found[f"everything D{D}"] = attention(D, True, recipe=ha.ACCURATE, **EVERYTHING)
        found[f"fp32 bshd D{D}"] = attention(D, False, torch.float32, "bshd")
        found[f"q_block D{D}"] = attention(D, True, recipe=q_block)
        found[f"given D{D}"] = attention(D, True, recipe=GIVEN)
    for D in (64, 128, 256):
        q_block = replace(IN_E4M3, q_scales="block", smooth_k=True, hadamard=True)
        found |= {
            f"unpack D{D}": partial(unpacks, D, ha.BALANCED),
            f"varlen D{D}": partial(offline.compile_varlen, D, True, ha.BALANCED),
            f"varlen all D{D}": partial(offline.compile_varlen, D, True, ha.ACCURATE, **EVERYTHING),
            f"listed D{D}": partial(offline.compile_listed, D, True, ha.BALANCED, tail=False),
            f"tail D{D}": partial(offline.compile_listed, D, False, ha.BALANCED, tail=True),
            f"split D{D}": partial(offline.compile_shape, 1, 100, 16384, D, True, recipe=ha.BALANCED, sinks=True),
            f"gqa D{D}": partial(offline.compile_shape, 1, 16, 8192, D, True, recipe=ha.BALANCED),
            f"decode D{D}": partial(offline.compile_decode, D, D, 64, 1, 2),
            f"decode masked D{D}": partial(offline.compile_decode, D, D, 64, 4, 2, masked=True),
            f"prefill D{D}": partial(offline.compile_decode, D, D, 64, 16, 1),
            f"decode open D{D}": partial(offline.compile_decode, D, D, 64, 1, 1, recipe=ha.BALANCED, open_pages=True),
            f"step D{D}": partial(offline.compile_step, D, 64, 2112, 65, None),
            f"append D{D}": partial(offline.compile_append, D, torch.bfloat16, interleaved=True),
            f"decode int8 D{D}": partial(offline.compile_decode, D, D, 64, 1, 2, recipe=ha.BALANCED, return_lse=True),
            f"decode int8 masked D{D}": partial(
                offline.compile_decode, D, D, 64, 4, 2, masked=True, recipe=ha.BALANCED, k_mean=True
            ),
            f"prefill int8 D{D}": partial(offline.compile_decode, D, D, 64, 16, 1, recipe=ha.BALANCED),
            f"append int8 D{D}": partial(
                offline.compile_append, D, torch.bfloat16, interleaved=True, recipe=ha.BALANCED
            ),
            f"quantize rope D{D}": quantize(D, ha.ACCURATE, rope=True),
            f"quantize norm D{D}": quantize(D, ha.BALANCED, rope=True, norm_channels=(D, D)),
            f"quantize norm over heads D{D}": quantize(D, ha.BALANCED, rope=True, norm_channels=(8 * D, 4 * D)),
            f"quantize q_block D{D}": quantize(D, q_block, torch.float16),
        }
        for name in ("fast", "balanced", "accurate", "hybrid"):
            found[f"quantize {name} D{D}"] = quantize(D, RECIPES[name])
            found[f"quantize varlen {name} D{D}"] = partial(offline.compile_quantize_varlen, D, RECIPES[name])
    found |= {
        "decode D512": partial(offline.compile_decode, 512, 512, 64, 1, 2),
        "prefill D512": partial(offline.compile_decode, 512, 512, 64, 16, 1),
        "append D512": partial(offline.compile_append, 512, torch.bfloat16, interleaved=True),
        "decode int8 D512": partial(
            offline.compile_decode, 512, 512, 64, 1, 2, recipe=ha.BALANCED, return_lse=True, k_mean=True
        ),
        "prefill int8 D512": partial(offline.compile_decode, 512, 512, 64, 16, 1, recipe=ha.BALANCED),
    }
    for D, D_v in ((192, 128), (320, 320), (512, 512), (1024, 1024), (576, 512)):
        for causal in (False, True):
            for name in ("fast", "balanced"):
                large = attention(D, causal, recipe=RECIPES[name], D_v=D_v)
                found[f"large {name} D{D}/{D_v} {causal}"] = large
    return found | {"transforms": transforms}


def digest(ptx: str) -> str:
    """A hash of PTX without comments and what refers to source lines."""
    code, _, _ = ptx.partition(".section\t.debug")
    lines = (re.sub(r"//.*", "", line).rstrip() for line in code.split("\n"))
    kept = [line for line in lines if line.strip() and not line.lstrip().startswith((".loc", ".file"))]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def hashes(compile_case: Compile) -> list[str]:
    """A line a kernel: its name and its hash."""
    kernels = compile_case()
    return [f"{x.name} {digest(x.ptx)}" for x in (kernels if isinstance(kernels, list) else [kernels])]


def stored() -> dict[str, list[str]]:
    """The hashes in the repository."""
    found: dict[str, list[str]] = json.loads(HASHES.read_text())
    return found
