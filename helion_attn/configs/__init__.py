"""The tuned configs: data, with the timings that chose it, and its reader."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

#: `fp8_attn_fwd` has head dims zero-padded to one of these.
SUPPORTED_D = (32, 64, 128, 256)

#: Bits of Q and K, and of P and V: 8-bit numbers.
ALL_8_BIT = (8, 8)

#: Queries of a row block of a `BlockMask`, and keys of a key block.
MASK_BLOCK = 128

#: What a key that stands for a key block's adds to its score, in base 2.
TAIL_COUNT_LOG2 = math.log2(MASK_BLOCK)

#: A TMA box has at most 256 elements a dimension.
MAX_PIECE = 256

#: Channels of a fresh product of P and V for which registers have room beside the sum of 256.
MAX_FRESH_D = 128


@dataclass(frozen=True)
class TileConfig:
    """How the attention kernel is tiled for one (bits, D_pad, has_right), and how large a launch."""

    qk_bits: int  # of a number of Q and K
    pv_bits: int  # of P and V
    D_pad: int  # padded head dim
    has_right: bool  # which of the two specialisations: a window or causality ends to the right, or none does
    bm: int  # query rows of a block; the same for both, since packing does not know the mask
    bn: int  # keys of a block; the same for both
    num_warps: int  # warps of a program
    num_stages: int  # K/V blocks in flight
    two_level: bool  # P V is summed in fp32, a fresh product per key block; otherwise inside the tensor core
    # The occupancy that the timing had, which registers and shared memory must allow; `head_group` goes by it.
    ctas_per_sm: int
    max_registers: int  # of a thread, at most
    # The largest launch that this is for, as `query_blocks_per_sm` has it. A larger one takes the next config; all that
    # differ in this alone have the same block sizes.
    max_query_blocks_per_sm: float = math.inf
    measured_on: str | None = None  # the GPU whose timings chose it. Any other, such as an H100, runs it unmeasured.
    passes: tuple[str, ...] = ()  # names of the compiler's passes that its kernel was timed with, in their order

    @property
    def bits(self) -> tuple[int, int]:
        """`Recipe.bits`."""
        return self.qk_bits, self.pv_bits


@dataclass(frozen=True)
class LargeTileConfig:
    """How `fp8_attn_fwd_large_d` is tiled for a (D_pad, v_tile, has_right); `uses_large_d` says for which head dims."""

    D_pad: int  # padded head dim of Q and K: a power of two, or the sum of two
    v_tile: int  # channels of V that a program owns: such a number; D_v is padded to a multiple
    has_right: bool  # and the rest, as in `TileConfig`
    bm: int
    bn: int
    num_warps: int
    num_stages: int
    two_level: bool
    ctas_per_sm: int
    max_registers: int
    max_query_blocks_per_sm: float = math.inf
    measured_on: str | None = None
    passes: tuple[str, ...] = ()


AnyTileConfig = TypeVar("AnyTileConfig", TileConfig, LargeTileConfig)


def largest_power_of_two(size: int) -> int:
    """The largest that is at most `size`."""
    return 1 << (size.bit_length() - 1)


def read_table(name: str, part: str = "rows") -> list[dict[str, Any]]:
    """The rows of a table of this package: docs/notes/host.md says what they hold."""
    rows: list[dict[str, Any]] = json.loads(resources.files(__package__).joinpath(name).read_text())[part]
    return rows


def load_rows(config_type: type[AnyTileConfig], rows: list[dict[str, Any]]) -> tuple[AnyTileConfig, ...]:
    """The configs in `rows`."""
    return tuple(
        config_type(
            **row["config"],
            max_query_blocks_per_sm=row.get("max_query_blocks_per_sm", math.inf),
            measured_on=row["provenance"]["gpu"],
            passes=tuple(row["passes"]),
        )
        for row in rows
    )


TABLE, LARGE_D_TABLE = "fp8_attn_fwd_sm90.json", "fp8_attn_fwd_large_d_sm90.json"

#: The configs of both kernels. Read at import: torch.compile traces look-ups, and cannot trace files.
TILE_CONFIGS = load_rows(TileConfig, read_table(TABLE))
LARGE_TILE_CONFIGS = load_rows(LargeTileConfig, read_table(LARGE_D_TABLE))

#: For the smallest launches first, by (bits, D_pad, has_right).
_BY_KIND: dict[tuple[tuple[int, int], int, bool], list[TileConfig]] = {}
for _tile in sorted(TILE_CONFIGS, key=lambda tile: tile.max_query_blocks_per_sm):
    _BY_KIND.setdefault((_tile.bits, _tile.D_pad, _tile.has_right), []).append(_tile)


def tile_config(D_pad: int, has_right: bool, bits: tuple[int, int] = ALL_8_BIT, load: float = math.inf) -> TileConfig:
    """The config for (bits, D_pad, has_right), and a launch of `load` query blocks an SM."""
    if (bits, D_pad, has_right) not in _BY_KIND:
        raise KeyError(f"no tuned config for bits={bits}, D_pad={D_pad}, has_right={has_right}")
    return next(tile for tile in _BY_KIND[bits, D_pad, has_right] if load <= tile.max_query_blocks_per_sm)


def padded_head_dim(D: int) -> int:
    """The smallest supported head dim that holds D."""
    return next(d for d in SUPPORTED_D if d >= D)


def _padded_to(D_v: int, v_tile: int) -> int:
    return -(-D_v // v_tile) * v_tile


def uses_large_d(D: int, D_v: int, bits: tuple[int, int] = ALL_8_BIT) -> bool:
    """Whether (D, D_v) runs `fp8_attn_fwd_large_d`, which takes 8-bit numbers only.

    That is what does not fit `fp8_attn_fwd`, and D in 129..192 with D_v up to 128 (DeepSeek's prefill): padded to 256,
    the other kernel would do a third more work in Q K^T and twice as much in P V.
    """
    return bits == ALL_8_BIT and (max(D, D_v) > SUPPORTED_D[-1] or (128 < D <= 192 and D_v <= 128))


def large_tile_config(D: int, D_v: int, has_right: bool, load: float = math.inf) -> LargeTileConfig:
    """The config that does the least work for (D, D_v): every program multiplies D_pad and `v_tile` channels.

    Among those with as much, the one for a launch of `load` query blocks an SM.
    """

    def order(tile: LargeTileConfig) -> tuple[float, ...]:
        work = _padded_to(D_v, tile.v_tile) // tile.v_tile * (tile.D_pad + tile.v_tile)
        # Block sizes depend on D_pad and v_tile, and must not depend on the load.
        return work, tile.D_pad, tile.v_tile, tile.max_query_blocks_per_sm

    fitting = (t for t in LARGE_TILE_CONFIGS if t.has_right == has_right and t.D_pad >= D)
    return min((t for t in fitting if load <= t.max_query_blocks_per_sm), key=order)


def row_width(D_pad: int, D_v_pad: int) -> int:
    """The power of two that holds both padded head dims: the preprocessing kernels' tiles are as wide."""
    return 1 << (max(D_pad, D_v_pad) - 1).bit_length()


@dataclass(frozen=True)
class Packing:
    """How `quantize` packs one (D, D_v): `bm`, `bn`, and the padded head dims."""

    bm: int
    bn: int
    D_pad: int
    D_v_pad: int

    @property
    def D_row(self) -> int:
        """Width of what preprocessing kernels read and know of rows."""
        return row_width(self.D_pad, self.D_v_pad)


def packing(D: int, D_v: int, bits: tuple[int, int] = ALL_8_BIT) -> Packing:
    """For head dims D of Q and K, and D_v of V. It does not depend on the mask, which packing does not know."""
    if uses_large_d(D, D_v, bits):
        large = large_tile_config(D, D_v, has_right=False)
        return Packing(large.bm, large.bn, large.D_pad, _padded_to(D_v, large.v_tile))
    return varlen_packing(D, D_v, bits)


def attention_tile_config(
    D: int, D_v: int, has_right: bool, bits: tuple[int, int] = ALL_8_BIT, load: float = math.inf
) -> TileConfig:
    """The config of `fp8_attn_fwd` for (D, D_v): that of the larger, which has the registers for both."""
    return tile_config(padded_head_dim(max(D, D_v)), has_right, bits, load)


def varlen_packing(D: int, D_v: int, bits: tuple[int, int] = ALL_8_BIT) -> Packing:
    """`packing` for sequences of variable length, which always run `fp8_attn_fwd`."""
    tile = attention_tile_config(D, D_v, has_right=False, bits=bits)
    return Packing(tile.bm, tile.bn, padded_head_dim(D), padded_head_dim(D_v))


#: Fields of a block of Q: the sequence; its first token, and how many it has; its first packed block of K and
#: V; how many keys it has, -1 for tokens of no sequence; its first packed block of Q, and how many it has. The eighth,
#: which nothing writes or reads, makes a row 32 bytes.
Q_FIELDS = 8


def blocks_for(tokens: int, block: int, B: int) -> int:
    """Blocks that are enough for `tokens` in any B sequences: every sequence, and what lies before and after all, may
    have one that is not full.
    """
    return tokens // block + B + 2


#: The largest head dim of a KV cache, and what its pages pad those above 256 to.
MAX_PAGE_D = 512


@dataclass(frozen=True)
class PagePacking:
    """How a page of a KV cache is packed: its keys, and the padded head dims."""

    page_size: int
    D_pad: int
    D_v_pad: int


def page_packing(D: int, D_v: int) -> PagePacking:
    """For head dims of at most `MAX_PAGE_D`. A page is the key block that the attention kernels have for them.

    V's channels are the M of a WGMMA there, which is 64.
    """
    D_pad, D_v_pad = (padded_head_dim(d) if d <= SUPPORTED_D[-1] else MAX_PAGE_D for d in (D, D_v))
    if max(D_pad, D_v_pad) == MAX_PAGE_D:
        page_size = large_tile_config(MAX_PAGE_D, MAX_PAGE_D, has_right=True).bn
    else:
        page_size = attention_tile_config(D, D_v, has_right=True).bn
    return PagePacking(page_size, D_pad, max(64, D_v_pad))
