"""The tuned tables: complete, consistent, with the timings that chose them; and how a launch finds its row."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from devtools.tune.trial import MAX_SPILLS
from helion_attn import configs
from helion_attn.configs import (
    LARGE_D_TABLE,
    LARGE_TILE_CONFIGS,
    SUPPORTED_D,
    TABLE,
    TILE_CONFIGS,
    LargeTileConfig,
    TileConfig,
    attention_tile_config,
    large_tile_config,
    packing,
    padded_head_dim,
    read_table,
    tile_config,
)
from helion_attn.configs.scheduling import group_programs, head_group, query_blocks_per_sm
from helion_attn.validate.dense import MIN_D

BITS = [(8, 8), (8, 16), (16, 16)]

ALL_TILES: tuple[TileConfig | LargeTileConfig, ...] = (*TILE_CONFIGS, *LARGE_TILE_CONFIGS)

ROWS = list(zip(ALL_TILES, read_table(TABLE) + read_table(LARGE_D_TABLE), strict=True))


def tile_id(tile: TileConfig | LargeTileConfig) -> str:
    kind = f"{tile.qk_bits}-{tile.pv_bits}" if isinstance(tile, TileConfig) else f"v{tile.v_tile}"
    return f"{kind}-d{tile.D_pad}-{'causal' if tile.has_right else 'full'}-up-to-{tile.max_query_blocks_per_sm}"


def test_every_head_dim_and_mask_has_a_row_for_any_launch() -> None:
    default = [(t.bits, t.D_pad, t.has_right) for t in TILE_CONFIGS if t.max_query_blocks_per_sm == math.inf]
    expected = {(bits, D, causal) for bits in BITS for D in SUPPORTED_D for causal in (False, True)}
    assert set(default) == expected
    assert len(default) == len(expected)


def test_masks_and_launches_share_block_sizes() -> None:
    """Packing knows neither."""
    for tile in TILE_CONFIGS:
        packed = packing(tile.D_pad, tile.D_pad, tile.bits)
        assert (tile.bm, tile.bn) == (packed.bm, packed.bn)
    blocks: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for large in LARGE_TILE_CONFIGS:
        blocks.setdefault((large.D_pad, large.v_tile), set()).add((large.bm, large.bn))
    assert all(len(sizes) == 1 for sizes in blocks.values())


@pytest.mark.parametrize("tile", ALL_TILES, ids=tile_id)
def test_config_fits_the_hardware(tile: TileConfig | LargeTileConfig) -> None:
    assert tile.bm % 64 == 0, "a warp group's product has 64 rows"
    assert tile.bn % 16 == 0, "keys are interleaved in groups of 16"
    assert tile.num_warps % 4 == 0, "a warp group is 4 warps"
    assert tile.bm >= 16 * tile.num_warps
    assert tile.num_stages >= 1
    assert tile.ctas_per_sm >= 1


@pytest.mark.parametrize(("tile", "row"), [pytest.param(*pair, id=tile_id(pair[0])) for pair in ROWS])
def test_rows_have_timings_and_round_trip(tile: TileConfig | LargeTileConfig, row: dict[str, Any]) -> None:
    not_in_config = {"max_query_blocks_per_sm", "measured_on", "passes"}
    assert {name: value for name, value in asdict(tile).items() if name not in not_in_config} == row["config"]
    flags = ("has_right", "two_level")
    assert {name: type(value) for name, value in row["config"].items()} == {
        name: bool if name in flags else int for name in row["config"]
    }
    if isinstance(tile, TileConfig):
        found: object = tile_config(tile.D_pad, tile.has_right, tile.bits, tile.max_query_blocks_per_sm)
    else:
        D_v = row["workload"]["D_v"]
        found = large_tile_config(tile.D_pad, D_v, tile.has_right, tile.max_query_blocks_per_sm)
    assert found == tile
    assert tile.passes == tuple(row["passes"])
    assert row["ms"] > 0
    assert row["tflops"] > 0
    assert 0 < row["registers"] <= 255
    assert row["spills"] <= MAX_SPILLS
    assert json.loads(json.dumps(row)) == row


@pytest.mark.parametrize("D", range(MIN_D, SUPPORTED_D[-1] + 1))
def test_padded_head_dim(D: int) -> None:
    D_pad = padded_head_dim(D)
    assert D_pad in SUPPORTED_D
    assert D_pad >= D
    assert all(d < D for d in SUPPORTED_D if d < D_pad)


def test_unknown_config_raises() -> None:
    with pytest.raises(KeyError, match="D_pad=48, has_right=False"):
        tile_config(48, False)


def small(tile: Any, limit: float) -> Any:
    return replace(tile, max_query_blocks_per_sm=limit, num_stages=tile.num_stages + 1)


def test_a_launch_takes_the_first_row_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    default = tile_config(128, True)
    rows = [small(default, 4.0), small(default, 8.0), default]
    monkeypatch.setattr(configs, "_BY_KIND", {(default.bits, 128, True): rows})
    for load, row in ((0.1, rows[0]), (4.0, rows[0]), (4.01, rows[1]), (8.0, rows[1]), (8.01, default), (1e9, default)):
        assert attention_tile_config(100, 128, True, load=load) == row
    assert tile_config(128, True) == default


def test_a_launch_of_large_heads_takes_the_first_row_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    default = large_tile_config(512, 512, True)
    row = small(default, 4.0)
    for_any = [tile for tile in LARGE_TILE_CONFIGS if tile.max_query_blocks_per_sm == math.inf]
    monkeypatch.setattr(configs, "LARGE_TILE_CONFIGS", (*for_any, row))
    assert large_tile_config(512, 512, True, 4.0) == row
    assert large_tile_config(512, 512, True, 4.01) == default
    assert large_tile_config(512, 512, True) == default
    assert large_tile_config(512, 512, False, 1.0) == large_tile_config(512, 512, False)


def test_size_of_a_launch_counts_multiprocessors() -> None:
    H200, H100_PCIE = 132, 114
    assert query_blocks_per_sm(32, 132, H200) == 32.0
    assert query_blocks_per_sm(32, 132, H100_PCIE) > 32.0


@pytest.mark.parametrize(
    ("heads", "programs", "ctas_per_sm", "group"),
    [
        (64, 64, 3, 16),  # D 128, B 4, S 4096
        (16, 256, 3, 4),
        (128, 64, 4, 32),  # D 64
        (32, 32, 1, 4),  # D 256
        (8, 128, 1, 1),
        (48, 64, 3, 16),
        (40, 64, 3, 10),
        (13, 64, 3, 13),
        (23, 64, 3, 1),
        (4, 1, 3, 4),  # all of them
        (4, 5000, 3, 1),  # more programs than a group has
    ],
)
def test_heads_at_once(heads: int, programs: int, ctas_per_sm: int, group: int) -> None:
    assert head_group(heads, programs, 132, ctas_per_sm) == group
    assert heads % group == 0
    assert group == 1 or group * programs <= group_programs(132, ctas_per_sm)
