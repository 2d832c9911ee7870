"""The tuned table: complete, consistent, and with the timings that chose it."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources
from typing import Any

import pytest

from helion_attn.configs import SUPPORTED_D, TILE_CONFIGS, TileConfig, padded_head_dim, tile_config
from helion_attn.validate import MIN_D

BITS = [(8, 8), (8, 16), (16, 16)]


def tile_id(tile: TileConfig) -> str:
    return f"{tile.qk_bits}-{tile.pv_bits}-d{tile.D_pad}-{'causal' if tile.causal else 'full'}"


def table() -> dict[str, Any]:
    text = resources.files("helion_attn.configs").joinpath("fp8_attn_fwd_sm90.json").read_text()
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def test_one_row_for_every_head_dim_and_mask() -> None:
    expected = {(bits, D, causal) for bits in BITS for D in SUPPORTED_D for causal in (False, True)}
    assert TILE_CONFIGS.keys() == expected
    assert len(table()["rows"]) == len(expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("D_pad", SUPPORTED_D)
def test_both_masks_share_block_sizes(D_pad: int, bits: tuple[int, int]) -> None:
    full, causal = tile_config(D_pad, False, bits), tile_config(D_pad, True, bits)
    assert (full.bm, full.bn) == (causal.bm, causal.bn)


@pytest.mark.parametrize("tile", TILE_CONFIGS.values(), ids=tile_id)
def test_config_fits_the_hardware(tile: TileConfig) -> None:
    assert tile.bm % 64 == 0, "a warp group's product has 64 rows"
    assert tile.bn % 16 == 0, "keys are interleaved in groups of 16"
    assert tile.num_warps % 4 == 0, "a warp group is 4 warps"
    assert tile.bm >= 16 * tile.num_warps
    assert tile.num_stages >= 1
    assert tile.ctas_per_sm >= 1


@pytest.mark.parametrize("row", table()["rows"], ids=lambda row: tile_id(TileConfig(**row["config"])))
def test_rows_have_timings_and_round_trip(row: dict[str, Any]) -> None:
    tile = TileConfig(**row["config"])
    assert asdict(tile) == row["config"]
    assert tile_config(tile.D_pad, tile.causal, tile.bits) == tile
    assert {name: type(value) for name, value in row["config"].items()} == {
        name: bool if name in ("causal", "query_blocks_fastest", "two_level") else int for name in row["config"]
    }
    assert row["ms"] > 0
    assert row["tflops"] > 0
    assert 0 < row["registers"] <= 255
    assert json.loads(json.dumps(row)) == row


def test_meta_says_what_made_it() -> None:
    meta = table()["meta"]
    for name in ("gpu", "torch", "triton", "helion", "date", "command", "workload"):
        assert meta.get(name), name
    assert "H200" in meta["gpu"] or "H100" in meta["gpu"]


@pytest.mark.parametrize("D", range(MIN_D, SUPPORTED_D[-1] + 1))
def test_padded_head_dim(D: int) -> None:
    D_pad = padded_head_dim(D)
    assert D_pad in SUPPORTED_D
    assert D_pad >= D
    assert all(d < D for d in SUPPORTED_D if d < D_pad)


def test_unknown_config_raises() -> None:
    with pytest.raises(KeyError, match="D_pad=48, causal=False"):
        tile_config(48, False)
