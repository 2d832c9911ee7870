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

from devtools.sm90 import fake_cuda
from devtools.workloads import Workload
from helion_attn import configs
from helion_attn.compiler import buffers
from helion_attn.configs import (
    LARGE_D_TABLE,
    LARGE_TILE_CONFIGS,
    TABLE,
    TILE_CONFIGS,
    TileConfig,
    read_table,
    scheduling,
)
from helion_attn.kernels import attention, attention_large_d
from helion_attn.numerics import LOG2E, MAX_FUSED_SCALE_LOG2
from helpers.offline import MEASURED, forget

pytest.importorskip("rich")

from devtools.tune import __main__ as command
from devtools.tune import journal, table, trial
from devtools.tune.candidates import Tile, candidates, recipe_of, workloads
from devtools.tune.journal import Timing
from devtools.tune.trial import MAX_SPILLS, Compiled

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


@pytest.mark.parametrize("tile", [*TILE_CONFIGS, *LARGE_TILE_CONFIGS], ids=lambda t: f"d{t.D_pad}-{t.causal}")
def test_8_bit_scores_take_the_path_of_real_ones(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    scales = []
    module = attention if isinstance(tile, TileConfig) else attention_large_d
    monkeypatch.setattr(module, "launch", lambda _, arguments, *more: scales.append(arguments.softmax.sm_scale))
    monkeypatch.setattr(buffers, "sm_count", lambda _: 132)
    w = workloads(tile)[0]
    trial._launch(tile, w, [fake_cuda(*shape, dtype=dtype) for shape, dtype in trial._packed(tile, w)])
    dtype = recipe_of(tile).qk_dtype
    spread = trial.SPREAD if dtype.itemsize == 1 else 1.0
    assert scales == [pytest.approx(tile.D_pad**-0.5 / spread**2)]
    assert scales[0] * LOG2E <= MAX_FUSED_SCALE_LOG2[dtype]


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


def test_precompile_reports_what_does_not_compile() -> None:
    forget()
    report = trial.precompile(replace(TILE_CONFIGS[0], num_warps=3))
    forget()
    assert not report.usable
    assert report.error


def test_run_writes_rows(run: Callable[..., int], tmp_path: Path) -> None:
    measured = Measured(made_up)
    assert run(measured) == 0
    assert len(measured.asked) == TRIALS
    rows = rows_of(tmp_path)
    assert [row for row in rows if not is_tuned(row)] == [row for row in read_table(TABLE) if not is_tuned(row)]
    full, causal, small = (row for row in rows if is_tuned(row))
    assert [row["config"]["causal"] for row in (full, causal, small)] == [False, True, True]
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


def test_written_rows_are_found_by_size(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(Measured(made_up))
    full, causal, small = (configs.load_rows(TileConfig, [row])[0] for row in rows_of(tmp_path) if is_tuned(row))
    monkeypatch.setattr(configs, "_BY_KIND", {((8, 8), 128, False): [full], ((8, 8), 128, True): [small, causal]})
    for w in workloads(causal):
        load = scheduling.query_blocks_per_sm(w.B * w.H, w.M // 64, 132)
        assert configs.tile_config(128, True, load=load) == (small if w.B <= 2 else causal)
        assert configs.tile_config(128, False, load=load) == full
    assert small.measured_on == "GPU of a test"


@pytest.mark.parametrize("after", [0, 13])
def test_an_interrupted_run_is_completed(run: Callable[..., int], tmp_path: Path, after: int) -> None:
    assert run(Measured(made_up, after)) == 130
    assert not (tmp_path / TABLE).exists()
    rest = Measured(made_up)
    assert run(rest) == 0
    assert len(rest.asked) == TRIALS - after
    interrupted = rows_of(tmp_path)
    (tmp_path / TABLE).unlink()
    (tmp_path / command.JOURNAL).unlink()
    assert run(Measured(made_up)) == 0
    assert rows_of(tmp_path) == interrupted


@pytest.mark.parametrize("changed", journal.MACHINE, ids=lambda name: f"another_{name}")
def test_timings_of_another_machine_or_source_do_not_count(run: Callable[..., int], changed: str) -> None:
    run(Measured(made_up))
    measured = Measured(made_up)
    run(measured, machine={**NOW, changed: 133 if changed == "sm_count" else "another"})
    assert len(measured.asked) == TRIALS


def test_what_spills_is_not_timed(run: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    def two_stages_spill(tiles: list[Tile], jobs: int, advance: Callable[[], None]) -> dict[Tile, Compiled]:
        return {tile: Compiled(168, MAX_SPILLS + 1 if tile.num_stages == 2 else 0, 3) for tile in tiles}

    monkeypatch.setattr(command, "compile_all", two_stages_spill)
    measured = Measured(made_up)
    assert run(measured) == 0
    assert {tile.num_stages for tile, _ in measured.asked} == {3}


def timings(timer: Timer, tiles: list[Tile]) -> list[Timing]:
    return [Timing(tile, w, 128, 0, timer(tile, w), NOW) for tile in tiles for w in workloads(tile)]


def tiles_for(D_pad: int, bits: tuple[int, int]) -> list[Tile]:
    return [tile for tile in candidates() if isinstance(tile, TileConfig) and (tile.D_pad, tile.bits) == (D_pad, bits)]


def test_masks_share_the_block_sizes_of_least_time() -> None:
    """Full attention alone would take others."""

    def timer(tile: Tile, w: Workload) -> float:
        wide = tile.bm == 128
        return w.B * ((1.0 if wide else 1.1) if not w.causal else (1.0 if wide else 0.5))

    rows = table.choose(timings(timer, tiles_for(64, (8, 16))))
    assert {row["config"]["bm"] for row in rows} == {64}
    assert rows[0]["runners_up"][0]["bm"] == 128


def test_large_heads(run: Callable[..., int], tmp_path: Path) -> None:
    """Two head dims of V at D 576 do not compete, and the other rows stay."""

    def timer(tile: Tile, w: Workload) -> float:
        return float(w.H * (tile.bn if tile.num_stages == 2 else 100))

    assert run(Measured(timer), ["--d", "576"]) == 0
    rows = json.loads((tmp_path / LARGE_D_TABLE).read_text())["rows"]
    shipped = read_table(LARGE_D_TABLE)
    assert [r for r in rows if r["config"]["D_pad"] != 576] == [r for r in shipped if r["config"]["D_pad"] != 576]
    tuned = [row for row in rows if row["config"]["D_pad"] == 576]
    assert [(r["config"]["v_tile"], r["workload"]["D_v"], r["config"]["causal"]) for r in tuned] == [
        *((256, 512, False), (256, 512, True), (288, 576, False), (288, 576, True))
    ]


def test_compile_only_lists_candidates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "compile_all", compile_nothing)
    assert command.main(["--compile-only", *SUBSET]) == 0
    shown = capsys.readouterr().out
    assert shown.count("│ 8/8") == len(tiles_for(128, (8, 8)))
    assert "168" in shown
    assert list(tmp_path.iterdir()) == []
