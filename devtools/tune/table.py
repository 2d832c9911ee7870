"""From timings to the rows of a table: docs/notes/host.md says how to read one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from devtools.tune.candidates import Tile, bits_of, head_dim_v
from devtools.tune.journal import Timing, workload_fields
from devtools.tune.trial import launch_parameters, tflops
from helion_attn.configs import TABLE, LargeTileConfig, TileConfig, read_table
from helion_attn.configs.scheduling import query_blocks_per_sm

#: A small launch has a row of its own if that takes this much less time: two or three percent are noise.
MIN_GAIN = 0.04

#: How many of the next best a row remembers.
RUNNERS_UP = 3

T = TypeVar("T")


def competition(tile: Tile) -> tuple[Hashable, ...]:
    """What the candidates that share one pair of block sizes have in common. Each is tuned as a whole."""
    return bits_of(tile), tile.D_pad, head_dim_v(tile)


def _blocks(timing: Timing) -> tuple[int, ...]:
    tile = timing.tile
    return (tile.bm, tile.bn, tile.v_tile) if isinstance(tile, LargeTileConfig) else (tile.bm, tile.bn)


def load(timing: Timing) -> float:
    """The size of the launch, in query blocks an SM."""
    w = timing.workload
    return query_blocks_per_sm(w.B * w.H, -(-w.M // timing.tile.bm), timing.provenance["sm_count"])


def _grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _fastest(timings: Iterable[Timing]) -> Timing:
    return min(timings, key=lambda timing: timing.ms)


def _by_workload(timings: Iterable[Timing]) -> list[list[Timing]]:
    """Largest launches first."""
    groups = _grouped(timings, lambda t: t.workload)
    return sorted(groups, key=lambda group: load(group[0]), reverse=True)


def _row(winner: Timing, others: Iterable[Timing], limit: float) -> dict[str, Any]:
    """A row for launches of up to `limit` query blocks an SM, and what was next best of `others`."""
    config = launch_parameters(winner.tile)
    runners_up = sorted((t for t in others if t.workload == winner.workload and t is not winner), key=lambda t: t.ms)
    return {
        "config": config,
        **({} if limit == math.inf else {"max_query_blocks_per_sm": math.ceil(limit * 100) / 100}),
        "workload": workload_fields(winner.workload),
        "registers": winner.registers,
        "spills": winner.spills,
        "passes": winner.tile.passes,
        "ms": round(winner.ms, 4),
        "tflops": round(tflops(winner.workload, winner.ms), 1),
        "runners_up": [
            {"ms": round(t.ms, 4)} | {k: v for k, v in launch_parameters(t.tile).items() if v != config[k]}
            for t in runners_up[:RUNNERS_UP]
        ],
        "provenance": winner.provenance,
    }


def _rows_of_mask(timings: list[Timing], others: list[Timing]) -> list[dict[str, Any]]:
    """The fastest on the largest launch, then what beats it on smaller ones."""
    rows: list[dict[str, Any]] = []
    held = None
    for group in _by_workload(timings):
        winner = _fastest(group)
        if held is None:
            rows.append(_row(winner, others, math.inf))
        elif winner.ms < (1 - MIN_GAIN) * next((t.ms for t in group if t.tile == held), math.inf):
            rows.append(_row(winner, others, load(winner)))
        else:
            continue
        held = winner.tile
    return rows


def choose(timings: list[Timing]) -> list[dict[str, Any]]:
    """Rows for every competition, under the one pair of block sizes with the least time for an operation."""
    rows = []
    for group in _grouped(timings, lambda t: competition(t.tile)):
        workloads = {t.workload for t in group}
        complete = [blocks for blocks in _grouped(group, _blocks) if {t.workload for t in blocks} == workloads]
        if not complete:
            raise ValueError(f"no block sizes work with both masks: {competition(group[0].tile)}")

        def cost(blocks: list[Timing]) -> float:
            fastest = [_fastest(timings) for timings in _by_workload(blocks)]
            return sum(1 / tflops(t.workload, t.ms) for t in fastest)

        chosen = min(complete, key=cost)
        for causal in (False, True):
            rows += _rows_of_mask([t for t in chosen if t.tile.has_right == causal], group)
    return rows


def _tile_of(row: dict[str, Any], name: str) -> Tile:
    return TileConfig(**row["config"]) if name == TABLE else LargeTileConfig(**row["config"])


def _order(tile: Tile) -> tuple[int, ...]:
    if isinstance(tile, TileConfig):
        return *tile.bits, tile.D_pad, tile.has_right
    return tile.D_pad, tile.v_tile, tile.has_right


def dump(rows: list[dict[str, Any]]) -> str:
    """The table's text, a line for each part of a row."""
    texts = [",\n".join(f"   {json.dumps(name)}: {json.dumps(value)}" for name, value in row.items()) for row in rows]
    return '{\n "rows": [\n' + ",\n".join(f"  {{\n{text}\n  }}" for text in texts) + "\n ]\n}\n"


def write(path: Path, chosen: list[dict[str, Any]]) -> None:
    """Put `chosen` into the table at `path`; competitions that were not held keep their rows.

    A table that is not there yet starts as the package's.
    """
    name = path.name
    shipped = json.loads(path.read_text())["rows"] if path.exists() else read_table(name)
    held = {competition(_tile_of(row, name)) for row in chosen}
    kept = [row for row in shipped if competition(_tile_of(row, name)) not in held]
    path.write_text(dump(sorted(kept + chosen, key=lambda row: _order(_tile_of(row, name)))))
