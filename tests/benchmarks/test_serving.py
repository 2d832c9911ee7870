"""The suite of vLLM, of figures that a process might say: it needs a server to measure any."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib import pyplot

from benchmarks import serving, serving_process
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
    assert "vLLM, batch invariant, share of prompts with the same tokens from the prefix cache" in missed


@pytest.mark.parametrize("fails", [False, True])
def test_the_same_tokens_are_asked_of_a_batch_invariant_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool
) -> None:
    """Another server may choose other splits; one without the mode has all other figures."""
    modes: dict[str, set[str]] = {}

    def process(command: list[str], env: dict[str, str], **_: Any) -> Any:
        given = json.loads(command[-1])
        modes.setdefault(given["measures"], set()).add(env["VLLM_BATCH_INVARIANT"])
        if given["measures"] == "again":
            return SimpleNamespace(returncode=int(fails), stdout='{"again": 0.75}', stderr="ValueError: no such mode")
        return SimpleNamespace(returncode=0, stdout='{"passkeys": 1.0, "continuations": [[1, 2]]}', stderr="")

    example = SimpleNamespace(load=lambda device: (None, None), load_tokenizer=lambda: None)
    monkeypatch.setattr(serving, "save_plain", lambda model, folder: None)
    monkeypatch.setattr(serving, "texts_of", lambda tokens, tokenizer: {})
    monkeypatch.setattr("subprocess.run", process)
    monkeypatch.setattr("importlib.import_module", lambda name: example)
    found = dict(serving.qualities(tmp_path))
    assert modes == {"quality": {"0"}, "again": {"1"}}
    again = None if fails else 0.75
    assert found == {impl: {"passkeys": 1.0, "agreed": 1.0, "again": again} for impl in serving.IMPLS}


def test_the_share_of_prompts_with_the_same_tokens_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = iter([[[1], [2], [3], [4]], [[1], [2], [3], [5]]])

    class Client:
        def __init__(self, given: dict[str, Any], most_tokens: int) -> None:
            pass

        def seconds(self, prompts: list[Any], new: int) -> tuple[float, list[list[int]]]:
            assert prompts == [{"prompt_token_ids": [7]}] * 4
            return 1.0, next(answers)

    monkeypatch.setattr(serving_process, "Client", Client)
    (tmp_path / "texts.json").write_text(json.dumps({"continued": [[7]] * 4}))
    said = serving_process.MEASURES["again"]({"texts": str(tmp_path / "texts.json"), "N": 1})
    assert said == {"again": 0.75}


def test_a_cell_has_short_windows_and_sinks_at_head_dim_64() -> None:
    """As transformers reads its configuration, which names no field that it does not know."""
    transformers = pytest.importorskip("transformers")
    (cell,) = (cell for cell in serving.CELLS if cell.config["model_type"] == "gpt_oss")
    read = transformers.GptOssConfig.from_dict(cell.config)
    assert (read.head_dim, read.sliding_window, read.num_hidden_layers) == (64, 128, len(read.layer_types))
    assert read.rope_parameters["factor"] == 32.0
    known = {"architectures", "model_type", "torch_dtype", "rope_theta", "rope_scaling"}
    assert cell.config.keys() - known <= transformers.GptOssConfig().to_dict().keys()


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
