"""Constants of a server's cache: what a prompt gives them, and what a rank takes of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.integrations.vllm import constants

transformers = pytest.importorskip("transformers")


def tiny(layers: int = 2) -> Any:
    """A Qwen2 with large biases of K."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e15},
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=30.0)
    return model


def test_constants_are_those_of_the_prompts_queries_and_keys() -> None:
    model, tokens = tiny(), torch.randint(64, (1, 300))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        seen.append((query, key))
        return ha.reference.attention(query, key, value, causal=True).float().transpose(1, 2), None

    transformers.AttentionInterface.register("keeps_qk", keep)
    found = constants.of_model(model, tokens)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("keeps_qk")
    with torch.no_grad():
        model(tokens, use_cache=False)
    assert sorted(found) == [0, 1]
    for layer, (q, k) in enumerate(seen):
        expected = ha.cache_constants(q, k)
        for x, y in zip(found[layer], expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-3)
        assert (found[layer][0] != 0).any()


class Words:
    """A tokenizer: a word a token."""

    @classmethod
    def from_pretrained(cls, model: str) -> Words:
        assert model == "folder"
        return cls()

    def __call__(self, text: str, return_tensors: str) -> Any:
        return argparse.Namespace(input_ids=torch.tensor([[int(word) for word in text.split()]]))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It writes what a layer of a server reads, on any rank; a short prompt is refused."""
    from helion_attn.__main__ import main

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", Words.from_pretrained)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name, dtype: tiny().to(dtype))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    prompt, out = tmp_path / "prompt.txt", tmp_path / "constants.safetensors"
    command = ["vllm-calibrate", "folder", "--prompt", str(prompt), "--out", str(out)]
    prompt.write_text("1 2 3")
    with pytest.raises(SystemExit):
        main(command)
    assert "--prompt has 3 tokens; it must have at least 256" in capsys.readouterr().err
    prompt.write_text(" ".join(str(i % 64) for i in range(300)))
    assert main(command) == 0
    whole = constants.of_layer(str(out), "model.layers.1.self_attn.attn", 0, 1, (2, 64))
    for rank in range(2):
        part = constants.of_layer(str(out), "model.layers.1.self_attn.attn", rank, 2, (1, 64))
        for x, y in zip(part, whole, strict=True):
            assert torch.equal(x[0], y[rank])
    # Four ranks have each head twice.
    mean, _ = constants.of_layer(str(out), "model.layers.1.self_attn.attn", 3, 4, (1, 64))
    assert torch.equal(mean[0], whole[0][1])
    with pytest.raises(
        ValueError, match=r"k_mean of shape \(2, 64\); this server's model\S* has 2 KV heads .* dim 128"
    ):
        constants.of_layer(str(out), "model.layers.1.self_attn.attn", 0, 1, (2, 128))


@pytest.fixture
def two_layers(tmp_path: Path) -> str:
    """A file with constants of layers 0 and 2."""
    from safetensors.torch import save_file

    path = tmp_path / "constants.safetensors"
    names = ("k_mean", "channel_factors")
    save_file({f"layers.{layer}.{name}": torch.full((2, 64), 3.0) for layer in (0, 2) for name in names}, path)
    return str(path)


@pytest.mark.parametrize(
    "name",
    ["draft_model.model.layers.2.self_attn.attn", "mtp.layers.0.self_attn.attn", "model.layers.3.self_attn.attn"],
)
def test_layers_that_draft_have_none_of_the_models_constants(two_layers: str, name: str) -> None:
    mean, factors = constants.of_layer(two_layers, name, 0, 1, (4, 32), drafting=True)
    assert torch.equal(mean, torch.zeros(4, 32))
    assert torch.equal(factors, torch.ones(4, 32))


@pytest.mark.parametrize(
    ("name", "drafting"),
    [("model.layers.3.self_attn.attn", False), ("model.layers.1.self_attn.attn", True), ("attn", True)],
)
def test_a_layer_without_constants_is_refused(two_layers: str, name: str, drafting: bool) -> None:
    """Its message says which file, which layer, and how to make the file."""
    with pytest.raises(ValueError, match=r"has 2 layers, numbered up to 2;") as raised:
        constants.of_layer(two_layers, name, 0, 1, (2, 64), drafting)
    for said in (
        f"helion_attn_constants is {two_layers}",
        f"this server has {name};",
        f"MODEL --prompt FILE --out {two_layers}",
    ):
        assert said in str(raised.value)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = str(tmp_path / "other.safetensors")
    save_file({"model.norm.weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=r"has no layer; this server has model"):
        constants.of_layer(path, "model.layers.0.self_attn.attn", 0, 1, (2, 64))
