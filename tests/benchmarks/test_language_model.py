"""examples/language_model.py and suite `language_model`: what they compute, on a tiny model; and the trained one."""

from __future__ import annotations

import importlib
import importlib.util
import math
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich")

from rich.console import Console

from benchmarks import language_model as suite
from benchmarks.lib.harness import Results, load
from benchmarks.lib.suite import Options
from helpers.tiny_models import train_language_model

example: Any = importlib.import_module("examples.language_model")


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, torch.Tensor]:
    return train_language_model()


def test_perplexity(tiny: tuple[Any, torch.Tensor]) -> None:
    """Of bf16 attention it is the model's own."""
    model, text = tiny
    scores = example.score(model, text[:130], 32, example.stock)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        losses = [model(part[None], labels=part[None]).loss.item() for part in text[:128].split(32)]
    assert scores.perplexity == pytest.approx(math.exp(sum(losses) / 4), rel=2e-3)
    assert scores.losses.shape == scores.choices.shape == (4, 31)
    assert scores.agreement(scores) == 1
    assert 1 < scores.perplexity < 20


def test_verdicts(tiny: tuple[Any, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets pass a bound that broken ones fail; and either the other way round is a failure."""
    model, text = tiny
    monkeypatch.setattr(example, "BOUNDS", {"balanced": 0.03})
    monkeypatch.setattr(example, "BROKEN", {"heads": example.heads_exchanged})
    assert example.verdicts(model, text[:128], 32, Console())
    monkeypatch.setattr(example, "BROKEN", {"nothing": example.fp8("balanced")})
    assert not example.verdicts(model, text[:128], 32, Console())
    monkeypatch.setattr(example, "BROKEN", {})
    monkeypatch.setattr(example, "fp8", lambda _: example.heads_exchanged)
    monkeypatch.setattr(example, "heads_exchanged", lambda q, k, v, sm_scale: torch.zeros_like(q))
    assert not example.verdicts(model, text[:128], 32, Console())


def test_suite(tiny: tuple[Any, torch.Tensor], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "load", lambda _: tiny)
    monkeypatch.setattr(suite, "CPU_CONTEXTS", (32,))
    monkeypatch.setattr(suite, "CPU_TOKENS", 256)
    options = Options(torch.device("cpu"), True, 1, ["helion_attn"], (64,), 0)
    suite.run(options, Results(tmp_path / "language_model.json", {}))
    rows = load(tmp_path)["language_model"]["rows"]
    assert [row["recipe"] for row in rows] == [None, *example.BOUNDS, *example.BROKEN]
    assert all(row["context"] == 32 and row["tokens"] == 62 for row in rows)
    assert rows[0]["difference"] == 0
    assert rows[0]["agreement"] == 1
    errors = {row["recipe"]: abs(row["difference"]) for row in rows}
    assert errors["bf16"] < errors["two heads exchanged"]
    (table,) = suite.tables(load(tmp_path))
    assert [line[0] for line in table.body[:3]] == ["SDPA bf16", "FAST", "BALANCED"]
