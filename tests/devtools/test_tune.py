"""`python -m devtools.tune`: what it tries, chooses, writes and takes up again. Timings are made up here."""

from __future__ import annotations

import json
import math
import os
import runpy
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from devtools.sm90 import fake_cuda
from devtools.workloads import Workload
from helion_attn import configs
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
from devtools.tune.journal import Journal, Timing
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


def test_candidates_have_workloads_small_and_large() -> None:
    assert len(set(candidates())) == len(candidates())
    for tile in candidates():
        sizes = [w.B * w.H for w in workloads(tile)]
        assert sizes == sorted(set(sizes))
        assert sizes[-1] >= 4 * sizes[0]
        assert {(w.D, w.causal) for w in workloads(tile)} == {(tile.D_pad, tile.causal)}


@pytest.mark.parametrize("tile", [*TILE_CONFIGS, *LARGE_TILE_CONFIGS], ids=lambda t: f"d{t.D_pad}-{t.causal}")
def test_8_bit_scores_take_the_path_of_real_ones(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    scales = []
    module = attention if isinstance(tile, TileConfig) else attention_large_d
    monkeypatch.setattr(module, "launch", lambda tile, arguments, out, lse: scales.append(arguments.softmax.sm_scale))
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


@pytest.mark.thorough
def test_precompile_of_large_heads() -> None:
    forget()
    report = trial.precompile(LARGE_TILE_CONFIGS[0])
    forget()
    assert report.usable, report


def test_precompile_reports_what_does_not_compile() -> None:
    forget()
    report = trial.precompile(replace(TILE_CONFIGS[0], num_warps=3))
    forget()
    assert not report.usable
    assert report.error


def killed_at_three_stages(tile: Tile) -> Compiled:
    """In place of `precompile`: the process ends as one does that the system takes memory from."""
    if tile.num_stages == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return Compiled(registers=tile.max_registers, ctas_per_sm=1)


@pytest.mark.thorough
def test_a_killed_compiler_costs_one_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "precompile", killed_at_three_stages)
    tiles = tiles_for(128, (8, 8))[:3]
    assert [tile.num_stages for tile in tiles] == [2, 3, 2]
    advanced: list[None] = []
    found = command.compile_all(tiles, 1, lambda: advanced.append(None))
    assert list(found) == tiles
    assert len(advanced) == len(tiles)
    assert [report.usable for report in found.values()] == [True, False, True]
    assert "killed" in (found[tiles[1]].error or "")


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


def test_rows_say_where_they_come_from(run: Callable[..., int], tmp_path: Path) -> None:
    run(Measured(made_up))
    run(Measured(made_up), ["--d", "64", "--bits", "8/8"], {**NOW, "gpu": "another"})
    gpus = {
        row["config"]["D_pad"]: row["provenance"]["gpu"] for row in rows_of(tmp_path) if row["config"]["pv_bits"] == 8
    }
    assert gpus == {32: "NVIDIA H200", 64: "another", 128: "GPU of a test", 256: "NVIDIA H200"}
    row = next(row for row in rows_of(tmp_path) if is_tuned(row))
    assert NOW.items() <= row["provenance"].items()
    assert row["provenance"]["commit"] == "abc"
    assert row["provenance"]["command"] == f"python -m devtools.tune --d 128 --bits 8/8 --out {tmp_path} --commit abc"
    assert row["provenance"]["date"]


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


@pytest.mark.parametrize("after", [0, 1, 13, TRIALS - 1])
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


def test_an_unfinished_line_is_measured_again(run: Callable[..., int], tmp_path: Path) -> None:
    assert run(Measured(made_up, 5)) == 130
    path = tmp_path / command.JOURNAL
    path.write_text(path.read_text()[:-20])
    rest = Measured(made_up)
    assert run(rest) == 0
    assert len(rest.asked) == TRIALS - 4
    assert len(path.read_text().splitlines()) == TRIALS
    again = Measured(made_up)
    assert run(again) == 0
    assert again.asked == []


@pytest.mark.parametrize("changed", journal.MACHINE, ids=lambda name: f"another_{name}")
def test_timings_of_another_machine_or_source_do_not_count(run: Callable[..., int], changed: str) -> None:
    run(Measured(made_up))
    measured = Measured(made_up)
    run(measured, machine={**NOW, changed: 133 if changed == "sm_count" else "another"})
    assert len(measured.asked) == TRIALS


def test_a_damaged_journal_is_not_guessed_at(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    path.write_text('{"config": {}}\n')
    with pytest.raises(ValueError, match=r"tune\.jsonl, line 1, is not a timing"):
        Journal(path)


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


def test_block_sizes_without_one_of_the_masks_are_passed_over() -> None:
    tiles = [tile for tile in tiles_for(64, (8, 16)) if tile.bm == 64 or not tile.causal]
    rows = table.choose(timings(lambda tile, w: w.B * tile.bn / tile.bm, tiles))
    assert {row["config"]["bm"] for row in rows} == {64}
    with pytest.raises(ValueError, match="no block sizes work with both masks"):
        table.choose(timings(made_up, [t for t in tiles if t.bm == 128] + [t for t in tiles if t.causal]))


@pytest.mark.parametrize(("gain", "rows"), [(table.MIN_GAIN - 0.01, 2), (table.MIN_GAIN + 0.01, 3)])
def test_a_small_launch_has_a_row_if_it_gains_more_than_noise(gain: float, rows: int) -> None:
    def timer(tile: Tile, w: Workload) -> float:
        wins = tile.num_stages == 3 and w.causal and w.B == 1
        return w.B * (1 - gain if wins else 1 + 1e-3 * tile.num_stages)

    assert len(table.choose(timings(timer, tiles_for(128, (8, 8))))) == rows


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


BAD_ARGUMENTS = {
    "no_out": (["--d", "64"], "--out is needed"),
    "out_is_a_file": (["--out", __file__], "not a folder"),
    "head_dim": (["--d", "65", "--compile-only"], "invalid choice: 65"),
    "bits": (["--bits", "4/4", "--compile-only"], "invalid choice: '4/4'"),
    "nothing": (
        ["--d", "320", "--bits", "16/16", "--compile-only"],
        "no candidates of 16/16 bits have a head dim of 320",
    ),
    "jobs": (["--jobs", "0", "--compile-only"], "--jobs is 0"),
    "unknown": (["--fast"], "unrecognized arguments: --fast"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = BAD_ARGUMENTS[name]
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("available", "message"), [(False, "there is no CUDA device; --compile-only"), (True, "A100 has 8.0")]
)
def test_other_machines_cannot_time(
    available: bool, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    with pytest.raises(SystemExit) as end:
        command.main(["--out", str(tmp_path)])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


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


def test_rich_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "devtools.tune.__main__")
    for name in ("rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match=r"pip install 'helion_attn\[bench\]'"):
        runpy.run_module("devtools.tune", run_name="__main__")
