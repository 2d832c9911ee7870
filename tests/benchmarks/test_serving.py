"""The suite of vLLM, of figures that a process might say: it needs a server to measure any."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib import pyplot

from benchmarks import serving
from benchmarks.lib.harness import Loaded
from benchmarks.lib.suite import Options
from benchmarks.lib.tables import LABELS
from helpers.tiny_models import tiny_llama

#: Tokens a second of all stages, by implementation.
SPEEDS = {"helion_attn": 300.0, "fa3_bf16": 200.0, "fa3_fp8": 250.0}


class Kept(list[Any]):
    """Rows that a suite adds."""

    def add(self, *rows: Any) -> None:
        self.extend(rows)


def measured(monkeypatch: pytest.MonkeyPatch, again: float = 1.0) -> Loaded:
    """What the suite keeps where every process says the same, but for the last cell's, which fails."""

    def serve(cell: serving.Served, impl: str, folder: Path) -> dict[str, Any]:
        if cell == serving.CELLS[-1]:
            return {"error_message": "out of memory"}
        stage = {"tokens_per_s": SPEEDS[impl], "ms": 5.0}
        fits = {"helion_attn": 1.94, "fa3_bf16": 1.0, "fa3_fp8": 2.0}[impl]
        return {"cache_tokens": fits * 1e6, "start_s": 30.0} | dict.fromkeys(serving.STAGES, stage)

    def qualities(folder: Path) -> Any:
        for impl in serving.IMPLS:
            perplexity = {"2048": 20.0 if impl == "fa3_bf16" else 20.03, "8191": 19.0}
            yield impl, {"perplexity": perplexity, "passkeys": 0.8, "agreed": 0.9, "again": again}

    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.setattr(serving, "qualities", qualities)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    kept: Any = Kept()
    serving.run(Options(torch.device("cuda"), False, 1, [], (128,), 0), kept)
    return {"vllm": {"rows": list(kept), "meta": {}}}


def test_tables_and_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = measured(monkeypatch)
    table, quality = serving.tables(loaded)
    assert quality.body[0] == [LABELS["helion_attn"], "20.030", "19.000", "80%", "90%", "100%"]
    assert len(table.body) == 3 * (len(serving.CELLS) - 1)
    assert table.body[0][3:9] == ["300", "200", "250", "1.50", "1.20", "1.94"]
    assert serving.plot(loaded) is not None
    pyplot.close("all")
    missed = {check.promise for check in serving.checks(loaded) if check.verdict != "PASS"}
    assert missed == {f"vLLM, decode, tokens/s over {LABELS['fa3_bf16']}"}


def test_another_token_from_the_prefix_cache_is_a_promise_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = measured(monkeypatch, again=0.9)
    missed = {check.promise for check in serving.checks(loaded) if check.verdict != "PASS"}
    assert "vLLM, share of prompts with the same tokens from the prefix cache" in missed


def test_nothing_is_measured_without_a_gpu() -> None:
    kept: Any = Kept()
    serving.run(Options(torch.device("cpu"), True, 1, [], (128,), 0), kept)
    assert kept == []
    assert serving.tables({}) == []
    assert serving.plot({}) is None


def test_a_dequantised_model_is_saved_as_a_plain_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = tiny_llama()
    of_gguf = SimpleNamespace(quant_method="gguf")
    model.hf_quantizer = SimpleNamespace(is_serializable=lambda: False, quantization_config=of_gguf)
    model.config.quantization_config = {"quant_method": "gguf"}
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path)
    serving.save_plain(model, tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    found = type(model).from_pretrained(tmp_path).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(found[name].bfloat16(), weight.bfloat16()), name
