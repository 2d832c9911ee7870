"""Benchmarks run on the CPU."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def restore_num_threads() -> Iterator[None]:
    threads = torch.get_num_threads()  # on the CPU, the benchmarks set it
    yield
    torch.set_num_threads(threads)


def test_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("rich", "pandas", "tabulate", "matplotlib"):
        pytest.importorskip(needed)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    accuracy = importlib.import_module("accuracy")
    assert accuracy.main(["--device", "cpu", "--quick", "--out", str(tmp_path), "--no-plots"]) == 0
    written = list(tmp_path.rglob("*.json"))
    assert "accuracy.json" in [path.name for path in written]
    for path in written:
        assert json.loads(path.read_text())
    stages = json.loads((tmp_path / "stages.json").read_text())["rows"]
    timed = {(row["part"], row["recipe"]) for row in stages if row["impl"] == "helion_attn"}
    assert {("RoPE of Q", None), ("Hadamard of Q", None), ("RoPE, Hadamard, pack", "balanced")} <= timed
    assert all(row["ms"] > 0 and row.get("copy_fraction", 1.0) > 0 for row in stages)


def test_large_d(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    large_d = importlib.import_module("large_d")
    assert large_d.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "large_d.json").read_text())["rows"]
    assert [(row["D"], row["D_v"]) for row in rows] == [(320, 320), (192, 128)]
    assert all(row["ms"] > 0 for row in rows)


def test_ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    attention, plots, tables = (importlib.import_module(name) for name in ("attention", "ladder_plots", "tables"))
    argv = ["--suite", "ladder", "--device", "cpu", "--quick", "--no-plots", "--out", str(tmp_path)]
    assert attention.run_command("", attention.SUITES, argv) == 0
    loaded = tables.load(tmp_path)
    rows = loaded["ladder"]["rows"]
    assert [(row["recipe"], row["stage"]) for row in rows] == [
        *((recipe, "kernel") for recipe in ("balanced", "hybrid", "bf16")),
        ("hybrid", "e2e"),
    ]
    assert all(row["ms"] > 0 for row in rows)
    assert rows[0]["error_pv"] > 3 * rows[1]["error_pv"] > 0
    (table,) = importlib.import_module("ladder_tables").ladder_tables(loaded)
    assert len(table.body) == 1
    assert plots.ladder(loaded) is not None


def test_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    attention, tables = importlib.import_module("attention"), importlib.import_module("tables")
    argv = ["--suite", "split", "--device", "cpu", "--quick", "--no-plots", "--out", str(tmp_path)]
    assert attention.run_command("", attention.SUITES, argv) == 0
    loaded = tables.load(tmp_path)
    rows = loaded["split"]["rows"]
    assert [(row["impl"], row.get("splits")) for row in rows] == [("helion_attn", 2), ("one_run", None)]
    assert all(row["ms"] > 0 for row in rows)
    assert rows[0]["error_kernel"] != rows[1]["error_kernel"]
    (table,) = importlib.import_module("split_tables").split_tables(loaded)
    assert len(table.body) == 1


def test_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    decode = importlib.import_module("decode")
    assert decode.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert [(row["impl"], row["stage"]) for row in rows] == [
        ("helion_attn", "kernel"),
        ("helion_attn", "append"),
        ("copy", "kernel"),
    ]
    assert all(row["ms"] > 0 for row in rows)
    assert rows[0]["of_copy"] == pytest.approx(rows[0]["gb_per_s"] / rows[2]["gb_per_s"], rel=1e-4)


def test_varlen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    varlen, tables = importlib.import_module("varlen"), importlib.import_module("tables")
    assert varlen.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    loaded = tables.load(tmp_path)
    rows = loaded["varlen"]["rows"]
    assert {(row["batch"], row["impl"]) for row in rows} == {
        ("uniform", "helion_attn"),
        ("uniform", "helion_attn_fixed"),
        ("skewed", "helion_attn"),
    }
    assert all(row["ms"] > 0 and row["tflops"] > 0 for row in rows)
    full, causal = importlib.import_module("varlen_tables").varlen_tables(loaded)
    assert len(full.body) == len(causal.body) == 2


@pytest.mark.parametrize("document", ["README.md", "docs/accuracy.md", "docs/performance.md", "docs/kv_cache.md"])
def test_documents_show_the_results(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever changes a result or a table runs report.py."""
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    report = importlib.import_module("report")
    text, loaded = (root / document).read_text(), report.load(root / "benchmarks" / "results")
    images = "../benchmarks/results" if "/" in document else "benchmarks/results"
    shown = [name for name in report.BLOCKS if f"<!-- results:{name} -->" in text]
    assert shown
    for name in shown:
        content = report.block_markdown(name, loaded, images)
        assert content is None or content in text, f"{document}, {name}: run python benchmarks/report.py"
