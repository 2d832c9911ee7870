"""Benchmarks run on the CPU."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as pyplot
import pytest
import torch
from torch import Tensor

from benchmarks import (
    ablation,
    attention,
    auto,
    distributed,
    front,
    host,
    loss_curves,
    plane,
    report,
    same_token,
    serving,
    startup,
    steps,
)
from benchmarks.lib.checks import Check, by_promise
from benchmarks.lib.harness import RESULTS, Loaded, Row, load
from benchmarks.lib.recipes import PRESETS
from benchmarks.lib.suite import Options
from benchmarks.suites import SUITES
from helpers import ranks


def dry_run(suite: str, out: Path) -> Loaded:
    """What a dry run writes."""
    options = ["--suite", suite, "--device", "cpu", "--quick", "--out", str(out), "--no-plots"]
    assert attention.main(options) == 0
    return load(out)


@pytest.fixture(autouse=True)
def restore_num_threads() -> Iterator[None]:
    threads = torch.get_num_threads()  # on the CPU, the benchmarks set it
    yield
    torch.set_num_threads(threads)


#: They take longer than `make test` has; those that have tests of their own, and what compiles models.
LONG = ("accuracy", "hard", "distributed", "startup", "masks", "ablation", "host", "sparse", "varlen", "steps")
ELSEWHERE = ("same_token", "language_model", "model_channels", "quality", "steps_new", "steps_compiled", "vllm")

#: What says that a number format errs more than another, by suite: of its rows, in their order.
ORDERS: dict[str, Callable[[list[Row]], bool]] = {
    "ladder": lambda rows: rows[0]["error_pv"] > 3 * rows[1]["error_pv"] > 0,
    "split": lambda rows: rows[0]["error_kernel"] == pytest.approx(rows[1]["error_kernel"], rel=1e-4),
    "decode": lambda rows: rows[8]["error_total"] < rows[11]["error_total"] < 0.1,
    "plane": lambda rows: (
        len({row["error_total"] for row in rows if row.get("input") == "randn"}) == len(plane.FORMATS)
    ),
}


@pytest.mark.parametrize(
    "suite",
    [pytest.param(s, marks=pytest.mark.thorough if s in LONG else ()) for s in SUITES if s not in ELSEWHERE],
)
def test_dry_run(suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fails, every time and error is one, tables and plots are made of them, and no goal is of a CPU."""
    monkeypatch.setattr(distributed, "spawn", ranks.spawn)
    # On the CPU nothing is compiled, and a warm process is a cold one.
    monkeypatch.setattr(startup, "run_process", functools.cache(startup.run_process))
    for name, value in (("SAME", 5), ("TURNS", 6), ("FIRST_NEW", 7), ("ROUNDS", 1)):
        monkeypatch.setattr(host, name, value)
    loaded = dry_run(suite, tmp_path)
    rows = loaded[SUITES[suite].file]["rows"]
    assert not [row["error_message"] for row in rows if "error_message" in row]
    numbers = {name: [row[name] for row in rows if row.get(name) is not None] for name in ("ms", "error_total")}
    assert all(ms > 0 for ms in numbers["ms"])
    assert all(0 <= error < 0.6 for error in numbers["error_total"])
    assert suite not in ORDERS or ORDERS[suite](rows)
    blocks = SUITES[suite].blocks.values()
    assert all(table.body for block in blocks for table in block.tables(loaded))
    assert any(block.tables(loaded) for block in blocks)
    for plot in (plot for block in blocks for plot in block.plots):
        plot.draw(loaded)
    pyplot.close("all")
    assert {check.verdict for check in report.all_checks(loaded)} <= {"not measured"}


@pytest.mark.thorough
@pytest.mark.parametrize("first", [0, 2])
def test_dry_run_of_newer_models(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their steps are beside those of other models, and MiniMax-H3's held to bounds of their own."""
    monkeypatch.setattr(steps, "DRY_NEW", steps.DRY_NEW[first:])
    loaded = dry_run("steps_new", tmp_path)
    rows = loaded["steps_new"]["rows"]
    assert not [row["error_message"] for row in rows if "error_message" in row]
    names = [model.name for model in steps.DRY_NEW[:2]]  # a quick run
    times, parts = steps.tables(loaded)
    assert [line[0] for line in times.body] == names
    assert parts.body
    rows[:] = [row for row in rows if row["model"] == names[0]]
    for row in rows:
        row["model"] = steps.H3_10S.name
    (check,) = steps.checks(loaded)
    assert steps.H3_10S.name in check.promise


def test_a_peers_attention_is_what_its_backend_calls() -> None:
    """Not this package's, under another name; without keys of padding."""
    keys: list[int] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float | None, left: int | None) -> Tensor:
        keys.append(k.size(1))
        return torch.full_like(q, 7.0)

    x, mask = torch.randn(1, 5, 2, 16), torch.arange(5) < 3
    backend = steps.OtherBackend(attention)
    for of_keys in (None, mask[None], mask[None, None, None], mask[None, None, None].expand(1, 1, 5, 5)):
        out: Any = backend(x, x, x, of_keys)
        assert torch.all(out == 7.0)
    assert keys == [5, 3, 3, 3]


def test_a_wrong_variant_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V in order for a kernel that takes it interleaved: what the error is there to show."""
    wrong = {"shipped": ablation.variants(64)["shipped"], "wrong": ablation.Variant(interleaved=False)}
    monkeypatch.setattr(ablation, "variants", lambda D: wrong)
    shipped, mistaken = dry_run("ablation", tmp_path)["ablation"]["rows"]
    assert shipped["ms"] > 0
    assert mistaken["ms"] is None
    assert "not timed" in mistaken["note"]


def test_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits that must be the same are, and what a KV cache or later keys change is of the size of the error."""
    monkeypatch.setattr(same_token, "CPU_KEYS", 96)
    found = same_token.rows(Options(torch.device("cpu"), True, 1, ["helion_attn"], (128,), 0), "balanced")
    by_part = {row["part"]: row for row in found}
    assert {*by_part} == {*same_token.PARTS}
    for part in ("decode", "batch", "batch, num_splits=1"):
        assert by_part[part]["same_bits"]
    assert 0.3 < by_part["cache"]["ratio"] < 5
    (table,) = same_token.tables({"same_token": {"rows": found}})
    assert [line[0] for line in table.body] == [*same_token.PARTS]


def test_a_crossover_loses_the_least_time() -> None:
    lengths = (512, 1024, 2048, 4096)

    def crossing(*faster: float) -> int | None:
        return auto.from_length(dict(zip(lengths, faster, strict=True)))

    assert crossing(1.1, 1.2, 1.3, 1.4) == 512
    assert crossing(0.5, 0.6, 0.7, 0.9) is None
    # Half way between, in logarithms: 2048 times the root of two.
    assert crossing(0.5, 0.6, 0.8, 1.25) == 2944
    assert crossing(0.5, 0.99, 1.5, 1.6) == 1152
    # One cell of noise moves nothing.
    assert crossing(1.01, 0.7, 1.2, 1.6) == 1664
    assert crossing(0.5, 1.2, 0.99, 1.6) == 896
    row = {"D": 64, "causal": True, "group": 1, "heads": 8}
    times = {512: (2.0, 1.0), 1024: (1.0, 1.0), 2048: (1.0, 0.95), 4096: (1.0, 1.5)}
    rows = [
        row | {"N": S, "impl": impl, "ms": ms}
        for S, both in times.items()
        for impl, ms in zip(("helion_attn", "sdpa_bf16"), both, strict=True)
    ]

    def judged() -> list[Check]:
        return [check for check in auto.checks({"auto": {"rows": rows}}) if check.promise.startswith("what")]

    assert [(check.value, check.verdict) for check in judged()] == [(1.0, "PASS")] * 4
    rows[-1]["ms"] = 0.9
    assert [check.verdict for check in judged()] == ["PASS"] * 4
    rows[-1]["ms"], rows[1]["ms"] = 1.5, 3.0
    assert [check.verdict for check in judged()] == ["PASS", "PASS", "FAIL", "PASS"]
    rows += [row | {"N": 512, "impl": "auto", "ms": 2.08}, row | {"N": 1024, "impl": "auto", "ms": 1.02}]
    called = [check for check in auto.checks({"auto": {"rows": rows}}) if check.promise.startswith("a call")]
    assert [check.verdict for check in called] == ["FAIL", "PASS", "not measured", "not measured"]


def test_crossovers_of_both_passes() -> None:
    """Of suite `training`, whose cells have fewer heads the longer they are; other recipes and stages do not count."""
    faster = {2048: 0.8, 4096: 0.8, 8192: 1.25, 16384: 1.3}
    rows = [
        {"D": 64, "causal": causal, "B": 16384 // S, "H": 4, "H_kv": 4, "N": S, "impl": impl, "recipe": recipe}
        | {"stage": stage, "ms": ms}
        for causal in (False, True)
        for S, x in faster.items()
        for impl, recipe, stage, ms in (
            ("helion_attn", "balanced", "both", 2.0 if causal else 1 / x),
            ("helion_attn", "fast", "both", 0.1),
            ("helion_attn", "balanced", "forward", 0.1),
            ("sdpa_bf16", None, "both", 1.0),
            ("sdpa_bf16", None, "forward", 9.0),
        )
    ]
    loaded: Loaded = {"training": {"meta": {"gpu": "NVIDIA H200"}, "rows": rows}}
    full, causal = auto.training_crossovers_of(loaded)
    # Half way between 4096 and 8192, in logarithms, of the heads that 8192 has.
    assert full == {"D": 64, "causal": False, "group": 1, "heads": 8, "from_length": 5888}
    assert causal == {"D": 64, "causal": True, "group": 1, "heads": 4, "from_length": None}
    before = auto.CONFIG.read_text()
    table = json.loads(auto.config(loaded, before))
    assert [row for row in table["training"] if row["gpu"] == "NVIDIA H200"] == [
        {"gpu": "NVIDIA H200", **row} for row in (full, causal)
    ]
    assert table["rows"] == json.loads(before)["rows"]
    judged = auto.training_checks(loaded)
    assert [(check.value, check.verdict) for check in judged] == [(1.0, "PASS")] * 8
    next(row for row in rows if row["N"] == 16384 and row["recipe"] == "balanced")["ms"] = 1.2
    assert [(check.cell[:7], check.value) for check in auto.training_checks(loaded) if check.verdict == "FAIL"] == [
        ("S 16384", 1.2)
    ]


def loss_rows(case: str, curves: dict[str, list[float | None]]) -> list[Row]:
    """Of one seed more than there is a base for."""
    impls = {"balanced": ("helion_attn", "balanced")}
    return [
        dict(zip(("impl", "recipe"), impls.get(name, (name, None)), strict=True))
        | {"case": case, "seed": seed, "losses": losses, "ms": 1.0}
        for name, losses in curves.items()
        for seed in ((0,) if name == loss_curves.BASE else (0, 1))
    ]


@pytest.mark.parametrize(
    ("balanced", "apart"), [([2.1, 0.9, 1.1], 1.5), ([2.2, 0.8, 1.2], 3.0), ([2.0, None, 1.0], None)]
)
def test_distances_of_loss_curves(balanced: list[float | None], apart: float | None) -> None:
    """A loss that is not finite fails."""
    curves: dict[str, list[float | None]] = {"cudnn_bf16": [2.0, 1.0, 1.0], "flash_bf16": [2.0, 1.1, 0.9]}
    rows = [row for case in loss_curves.CASES for row in loss_rows(case, curves | {"balanced": balanced})]
    loaded: Loaded = {"loss_curves": {"meta": {"gpu": "NVIDIA H200"}, "rows": rows}}
    found = loss_curves.checks(loaded)
    assert [check.cell for check in found] == [*loss_curves.CASES]
    for check in found:
        assert check.value == pytest.approx(math.nan if apart is None else apart, nan_ok=True)
        assert check.verdict == ("PASS" if apart == 1.5 else "FAIL")
    (table,) = loss_curves.tables(loaded)
    assert len(table.body) == 6


def test_loss_curves_start_alike() -> None:
    """At an equal seed the first loss is of the same weights and text, the second of a step that changed them."""
    size = loss_curves.CPU_SIZE
    data = loss_curves.text(torch.device("cpu"))[: size.S + 2]
    attends = loss_curves.contenders(torch.device("cpu")).values()
    curves = [loss_curves.train(size, attend, 16.0, 0, data) for attend in attends]
    for first, second in curves:
        assert first == pytest.approx(curves[0][0], abs=2e-3)
        assert second < first - 0.02
    other = loss_curves.train(size, next(iter(attends)), 16.0, 1, data)
    assert abs(other[0] - curves[0][0]) > 0.01
    assert loss_curves.rate(0, 300) < loss_curves.rate(29, 300) == 1
    assert loss_curves.rate(300, 300) == pytest.approx(0.1)


def test_every_promise_has_one_bound() -> None:
    root = Path(__file__).parents[2]
    loaded = load(root / RESULTS)
    shown = {name for block in report.BLOCKS.values() for name in (block.file, *block.beside)}
    assert set(report.CHECKED_FILES) <= shown
    assert set(report.CHECKED_FILES) <= set(loaded)
    found = by_promise(report.all_checks(loaded))
    assert all(len({check.relation for check in promise.checks}) == 1 for promise in found)
    names = [check.name for promise in found for check in promise.checks]
    assert len(names) == len(set(names))


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Loaded:
    monkeypatch.chdir(Path(__file__).parents[2])
    return load(RESULTS)


def test_documents_show_the_results(results: Loaded) -> None:
    assert report.stale(report.DOCUMENTS, results, RESULTS) == [], "run python benchmarks/report.py"


@pytest.mark.thorough
def test_old_documents_are_found(results: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that was typed, a result that changed, plots too many and too few, and a page of tables likewise."""
    page = tmp_path / "docs" / "masks.md"
    page.parent.mkdir()
    for name, text in report.table_pages(results).items():
        (tmp_path / f"{name}.md").write_text(text)
    page.write_text(Path("docs/masks.md").read_text())
    (tmp_path / "other.png").touch()
    page.write_text(report.filled(page, results, tmp_path).text)
    old = report.stale([page], results, tmp_path)
    assert old == ["no plot sparse.png", "other.png is in no document"]
    tables = tmp_path / "sparse.md"
    text = tables.read_text()
    for wrong in (text + "more", None):
        tables.write_text(wrong) if wrong else tables.unlink()
        assert report.stale([page], results, tmp_path) == [f"{tables} is old", *old]
    tables.write_text(text)
    (tmp_path / "unknown.md").touch()
    assert report.stale([page], results, tmp_path)[0] == f"{tmp_path / 'unknown.md'} is old"
    (tmp_path / "unknown.md").unlink()
    page.write_text(page.read_text().replace(" random |", " typed |", 1))
    assert report.stale([page], results, tmp_path)[0] == f"{page} is old"
    page.write_text(report.filled(page, results, tmp_path).text)
    for row in results["sparse"]["rows"]:
        row["rmse"] = 1.0  # no table has it
    assert report.stale([page], results, tmp_path) == old
    for row in results["sparse"]["rows"]:
        if row["impl"] == "helion_attn" and row["ms"]:
            row["ms"] *= 2
    assert {f"{page} is old", f"{tables} is old"} <= {*report.stale([page], results, tmp_path)}
    monkeypatch.setattr(sys, "argv", ["report.py", "--strict", "--documents", str(page)])
    before = page.read_text()
    with pytest.raises(SystemExit) as status:
        report.main()
    assert status.value.code == 1
    assert page.read_text() == before


def test_every_plot_is_drawn_and_small(results: Loaded) -> None:
    blocks = list(report.BLOCKS.values())
    plots = {plot.name: plot for block in blocks for plot in block.plots}
    for name, plot in plots.items():
        assert plot.draw(results) is not None, name
        pyplot.close("all")
        assert (RESULTS / f"{name}.png").stat().st_size < 60_000, name


def test_every_block_is_in_a_document_and_its_tables_on_a_page(results: Loaded) -> None:
    for page, text in report.table_pages(results).items():
        for name in report.PAGES[page]:
            block = report.BLOCKS[name]
            assert all(table.markdown() in text for table in block.tables(results) if block.file in results), name
    assert sorted([*front.BLOCKS, *(name for names in report.PAGES.values() for name in names)]) == sorted(
        report.BLOCKS
    )
    texts = [path.read_text() for path in report.DOCUMENTS]
    assert [name for name in report.BLOCKS if not any(f"<!-- results:{name} -->" in text for text in texts)] == []


def test_the_door_to_a_server_says_what_was_measured(results: Loaded) -> None:
    """Tokens a second of a server, or until there are any attention's time."""
    assert "64 sequences of 8,192 keys" in str(front.served({**results, "vllm": {"rows": []}}))
    model, rows = serving.LLAMA, []
    for impl, speed in (("helion_attn", 300.0), ("fa3_bf16", 200.0), ("fa3_fp8", 240.0)):
        row = {"impl": impl, "model": model, "N": 8192, "sequences": 64, "stage": "decode", "tokens_per_s": speed}
        rows.append(row)
    said = front.served({**results, "vllm": {"rows": rows}})
    assert said == (
        f"{model} decodes 64 sequences of 8,192 tokens **1.50 times as fast** as with FA3, 1.25 times as with its FP8 "
        "cache."
    )
    assert front.served({}) is None
    assert front.filmed({}) is None
    assert front.trained({}) is None


def test_the_front_page_has_the_accurate_peers_and_every_8_bit_preset(results: Loaded) -> None:
    (errors,) = front.error_tables(results)
    names = [line[0].partition(" (")[0] for line in errors.body]
    assert set(names) == {*map(str.upper, {*PRESETS, "hybrid"}), "SageAttention 2", "vLLM's FA3", "FA3 FP8", "FA3 bf16"}
    assert names[0] == "BALANCED"
    assert errors.body[0][-1] == "1.00"
    assert "-" not in [figure for line in errors.body for figure in line[1:5]]
