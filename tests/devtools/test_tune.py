"""`python -m devtools.tune`: what it tries, chooses, writes and takes up again. Timings are made up here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from devtools.workloads import Workload
from helion_attn.configs import (
    LARGE_D_TABLE,
    LARGE_TILE_CONFIGS,
    TABLE,
    TILE_CONFIGS,
    read_table,
)
from helpers.offline import MEASURED, forget

pytest.importorskip("rich")

from devtools.tune import __main__ as command
from devtools.tune import trial
from devtools.tune.candidates import Tile, candidates
from devtools.tune.trial import Compiled

NOW = {"gpu": "GPU of a test", "sm_count": 132, "torch": "1", "triton": "2", "helion": "3", "source": "4"}

#: All candidates for e4m3 and head dim 128: 64 x 128, 2 and 3 stages, 2 masks; on four sizes.
SUBSET = ["--d", "128", "--bits", "8/8"]
TRIALS = 16

#: Says how long a candidate takes.
Timer = Callable[[Tile, Workload], float]


def made_up(tile: Tile, w: Workload) -> float:
    """Two stages are faster, and three on small causal launches."""
    faster = 3 if w.causal and w.B <= 2 else 2
    return w.B * (2.0 if tile.num_stages == faster else 2.2)


class Measured:
    """In place of `measure`: what was asked, and an interruption after `limit` of it."""

    def __init__(self, timer: Timer, limit: int | None = None) -> None:
        self.timer, self.limit = timer, limit
        self.asked: list[tuple[Tile, Workload]] = []

    def __call__(self, tile: Tile, w: Workload) -> float:
        if len(self.asked) == self.limit:
            raise KeyboardInterrupt
        self.asked.append((tile, w))
        return self.timer(tile, w)


def compile_nothing(tiles: list[Tile], jobs: int, advance: Callable[[], None]) -> dict[Tile, Compiled]:
    for _ in tiles:
        advance()
    return {tile: Compiled(registers=168, spills=0, ctas_per_sm=3, passes=("a pass",)) for tile in tiles}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The command on a GPU that is not there, with --out `tmp_path`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(command, "compile_all", compile_nothing)

    def run_with(measured: Measured, arguments: list[str] = SUBSET, machine: dict[str, Any] = NOW) -> int:
        monkeypatch.setattr(command, "machine", lambda: dict(machine))
        monkeypatch.setattr(command, "measure", measured)
        return command.main([*arguments, "--out", str(tmp_path), "--commit", "abc"])

    return run_with


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((path / TABLE).read_text())["rows"]
    return rows


def is_tuned(row: dict[str, Any]) -> bool:
    return (row["config"]["D_pad"], row["config"]["qk_bits"], row["config"]["pv_bits"]) == (128, 8, 8)


def test_shipped_configs_are_candidates() -> None:
    known = candidates()
    tiles: tuple[Tile, ...] = (*TILE_CONFIGS, *LARGE_TILE_CONFIGS)
    for tile in tiles:
        unmeasured = replace(tile, ctas_per_sm=0, max_query_blocks_per_sm=math.inf, measured_on=None, passes=())
        assert unmeasured in known, f"the shipped {tile} was not tried"


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("index", range(0, len(TILE_CONFIGS), 11))
def test_precompile(index: int) -> None:
    tile = TILE_CONFIGS[index]
    forget()
    report = trial.precompile(replace(tile, ctas_per_sm=0, passes=()))
    forget()
    assert report.usable or (report.error is None and not MEASURED), report
    assert report.ctas_per_sm == tile.ctas_per_sm
    assert report.passes == tile.passes or not MEASURED
    assert report.registers <= tile.max_registers


def test_run_writes_rows(run: Callable[..., int], tmp_path: Path) -> None:
    measured = Measured(made_up)
    assert run(measured) == 0
    assert len(measured.asked) == TRIALS
    rows = rows_of(tmp_path)
    assert [row for row in rows if not is_tuned(row)] == [row for row in read_table(TABLE) if not is_tuned(row)]
    full, causal, small = (row for row in rows if is_tuned(row))
    assert [row["config"]["has_right"] for row in (full, causal, small)] == [False, True, True]
    assert [row["config"]["num_stages"] for row in (full, causal, small)] == [2, 2, 3]
    assert "max_query_blocks_per_sm" not in full | causal
    # B 2, H 16, M 4096 in blocks of 64, on 132 SMs.
    assert small["max_query_blocks_per_sm"] == pytest.approx(2 * 16 * 64 / 132, abs=0.01)
    for row in (full, causal, small):
        assert row["config"]["ctas_per_sm"] == 3
        assert row["registers"] == 168
        assert row["passes"] == ["a pass"]
        assert row["ms"] == row["workload"]["B"] * 2
        assert row["runners_up"][0]["ms"] >= row["ms"]
    assert small["runners_up"] == [{"ms": 4.4, "num_stages": 2}]
    assert not (tmp_path / LARGE_D_TABLE).exists()
