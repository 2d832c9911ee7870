"""The tuned configs: data, with the timings that chose it, and its reader."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

#: Head dims are zero-padded to one of these.
SUPPORTED_D = (32, 64, 128, 256)

#: Up to this padded head dim the fp32 sum of P V has registers beside the fresh product.
MAX_TWO_LEVEL_D = 128


@dataclass(frozen=True)
class TileConfig:
    """How the attention kernel is tiled for one (D_pad, causal).

    Attributes:
        D_pad: padded head dim.
        causal: which of the two specialisations.
        bm: query rows of a block; the same for both, since packing does not know the mask.
        bn: keys of a block; likewise.
        num_warps: warps of a program.
        num_stages: K/V blocks in flight.
        query_blocks_fastest: neighbouring programs share a head (K and V stay in L2), not a query block.
        two_level: P V is summed in fp32, a fresh product per key block; otherwise inside the tensor core.
        ctas_per_sm: the occupancy that the timing had, which registers and shared memory must allow.
        max_registers: a thread's, which ptxas is told.
    """

    D_pad: int
    causal: bool
    bm: int
    bn: int
    num_warps: int
    num_stages: int
    query_blocks_fastest: bool
    two_level: bool
    ctas_per_sm: int
    max_registers: int


@dataclass(frozen=True)
class LargeTileConfig:
    """How `fp8_attn_fwd_large_d` is tiled for one (D_pad, v_tile, causal).

    Attributes:
        D_pad: padded head dim of Q and K: a power of two, or the sum of two.
        v_tile: channels of V that a program owns, likewise; D_v is padded to a multiple.
        causal: and the rest, as in `TileConfig`.
    """

    D_pad: int
    v_tile: int
    causal: bool
    bm: int
    bn: int
    num_warps: int
    num_stages: int
    query_blocks_fastest: bool
    two_level: bool
    ctas_per_sm: int
    max_registers: int


def largest_power_of_two(size: int) -> int:
    """The largest that is at most `size`."""
    return 1 << (size.bit_length() - 1)


def _read_table() -> dict[tuple[int, bool], TileConfig]:
    text = resources.files(__package__).joinpath("fp8_attn_fwd_sm90.json").read_text()
    configs = [TileConfig(**row["config"]) for row in json.loads(text)["rows"]]
    return {(config.D_pad, config.causal): config for config in configs}


#: `fp8_attn_fwd_sm90.json`, by (D_pad, causal). Read at import: torch.compile traces look-ups, and cannot trace files.
TILE_CONFIGS = _read_table()


def tile_configs() -> tuple[TileConfig, ...]:
    """Every config."""
    return tuple(TILE_CONFIGS.values())


def tile_config(D_pad: int, causal: bool) -> TileConfig:
    """The config for (D_pad, causal)."""
    if (D_pad, causal) not in TILE_CONFIGS:
        raise KeyError(f"no tuned config for D_pad={D_pad}, causal={causal}")
    return TILE_CONFIGS[D_pad, causal]


def padded_head_dim(D: int) -> int:
    """The smallest supported head dim that holds D."""
    return next(d for d in SUPPORTED_D if d >= D)
