"""What is tried, and what it is timed on."""

from __future__ import annotations

import itertools
from dataclasses import replace

from devtools.workloads import BENCH_HIDDEN, Workload, tagged
from helion_attn.configs import (
    ALL_8_BIT,
    LARGE_D_TABLE,
    SUPPORTED_D,
    TABLE,
    LargeTileConfig,
    TileConfig,
)
from helion_attn.types import BF16, FAST, HYBRID, Recipe

#: A candidate of either kernel. Its occupancy is 0 until it is compiled.
Tile = TileConfig | LargeTileConfig

#: What each pair of bits is timed with.
RECIPES = {recipe.bits: recipe.resolved for recipe in (FAST, HYBRID, BF16)}

#: (bm, bn, num_warps, num_stages, max_registers) worth trying, by bits and D_pad. What has been seen to lose by 10% or
#: to spill is left out. The registers of the 8-bit ones are for four, four, three and one program an SM.
TILES = {
    ((8, 8), 32): [(64, 128, 4, 3, 128), (64, 128, 4, 4, 128)],
    ((8, 8), 64): [(64, 128, 4, 2, 128), (64, 128, 4, 3, 128), (64, 128, 4, 2, 168), (64, 128, 4, 3, 168)],
    ((8, 8), 128): [(64, 128, 4, 2, 168), (64, 128, 4, 3, 168)],
    ((8, 8), 256): [(128, 128, 8, 2, 255), (128, 128, 8, 3, 255)],
    ((8, 16), 32): [(64, 128, 4, 2, 168), (64, 128, 4, 3, 168)],
    ((8, 16), 64): [(64, 128, 4, 2, 168), (128, 64, 8, 2, 128), (128, 64, 8, 3, 128)],
    ((8, 16), 128): [
        *((128, 64, 8, 2, 128), (128, 64, 8, 3, 128)),
        *((128, 128, 8, 2, 255), (128, 128, 8, 3, 255)),
    ],
    ((8, 16), 256): [(128, 64, 8, 3, 255), (128, 128, 8, 2, 255)],
    ((16, 16), 32): [(64, 128, 4, 2, 168), (64, 128, 4, 3, 168)],
    ((16, 16), 64): [(64, 128, 4, 2, 168), (128, 64, 8, 2, 128), (128, 64, 8, 3, 128)],
    ((16, 16), 128): [(128, 64, 8, 2, 128), (128, 128, 8, 2, 255), (128, 128, 8, 3, 255)],
    ((16, 16), 256): [(128, 64, 8, 2, 255)],
}

#: (v_tile, bm, bn, num_warps, num_stages, max_registers) worth trying, by D_pad, in two levels. Several `v_tile` of one
#: D_pad compete: the table keeps one for each `head_dim_v`, the fastest. What has been seen to lose by 10% or to spill
#: in the loop is left out.
LARGE_TILES = {
    192: [(128, 64, 64, 4, 3, 168), (128, 64, 128, 4, 2, 168)],
    320: [(320, 128, 64, 8, 2, 255), (320, 128, 64, 8, 3, 255)],
    384: [(192, 128, 64, 8, 2, 255), (192, 128, 64, 8, 3, 255)],
    512: [(256, 128, 64, 8, 3, 255)],
    576: [(256, 128, 64, 8, 2, 255), (288, 128, 64, 8, 2, 255)],
    640: [(320, 128, 64, 8, 2, 255)],
    768: [(256, 128, 64, 8, 2, 255)],
    1024: [(256, 128, 32, 8, 2, 255), (256, 64, 64, 4, 2, 255)],
}

#: What --d takes: the head dims of the one kernel, then of the other.
HEAD_DIMS = (*SUPPORTED_D, *LARGE_TILES)

#: Heads of the launches that `LARGE_TILES` are timed on: B 1, M = N = 8192.
LARGE_HEADS, LARGE_S = (12, 48), 8192


def bits_of(tile: Tile) -> tuple[int, int]:
    """`Recipe.bits` of what the candidate takes."""
    return tile.bits if isinstance(tile, TileConfig) else ALL_8_BIT


def recipe_of(tile: Tile) -> Recipe:
    """What the candidate is timed with."""
    return RECIPES[bits_of(tile)]


def table_of(tile: Tile) -> str:
    """The table that the candidate competes for."""
    return TABLE if isinstance(tile, TileConfig) else LARGE_D_TABLE


def head_dim_v(tile: Tile) -> int:
    """The head dim of V that the candidate is timed with. Those for other D_v do not compete."""
    if isinstance(tile, TileConfig):
        return tile.D_pad
    return {(192, 128): 128, (576, 256): 512}.get((tile.D_pad, tile.v_tile), tile.D_pad)


def candidates() -> list[Tile]:
    """All of them."""
    main = [
        TileConfig(
            *bits,
            D_pad,
            causal,
            bm,
            bn,
            num_warps,
            num_stages,
            two_level=bits == ALL_8_BIT,
            ctas_per_sm=0,
            max_registers=max_registers,
        )
        for ((bits, D_pad), tiles), causal in itertools.product(TILES.items(), (False, True))
        for bm, bn, num_warps, num_stages, max_registers in tiles
    ]
    large = [
        LargeTileConfig(D_pad, v_tile, causal, bm, bn, num_warps, num_stages, True, 0, registers)
        for (D_pad, tiles), causal in itertools.product(LARGE_TILES.items(), (False, True))
        for v_tile, bm, bn, num_warps, num_stages, registers in tiles
    ]
    return [*main, *large]


def workloads(tile: Tile) -> list[Workload]:
    """The launches, small ones first, that the candidate is timed on."""
    D, causal, D_v = tile.D_pad, tile.has_right, head_dim_v(tile)
    if isinstance(tile, LargeTileConfig):
        name = f"tune_d{D}_v{D_v}_{'causal' if causal else 'full'}"
        tags = frozenset({"tune"})
        return [Workload(f"{name}_h{H}", 1, H, H, LARGE_S, LARGE_S, D, causal, tags, D_v=D_v) for H in LARGE_HEADS]
    # D 32 has no benchmark and takes that of D 64.
    found = [w for w in tagged("tune") if (w.D, w.causal) == (max(D, 64), causal)]
    H = BENCH_HIDDEN // D
    return sorted((replace(w, D=D, H=H, H_kv=H, D_v=D) for w in found), key=lambda w: w.B)
