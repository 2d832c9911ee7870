"""Suite `model_channels`, on a tiny model with norms of Q and K and sliding windows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich")

import helion_attn as ha
from benchmarks import attention, model_channels
from benchmarks.lib.harness import Loaded, Row, load
from benchmarks.lib.recipes import PRESETS
from benchmarks.model_channels import Layer
from helion_attn.testing import relative_error

#: Of its layers: KV heads, query heads, head dim; the tokens that a query of the first one sees, itself included.
H_KV, H, D, WINDOW = 1, 4, 64, 16

TOKENS = 70


@pytest.fixture(autouse=True)
def restore_num_threads() -> Iterator[None]:
    threads = torch.get_num_threads()  # on the CPU, the benchmarks set it
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def read_by() -> tuple[list[Layer], list[torch.Tensor]]:
    """What the layers of a Gemma 3 whose norms have large channels are given, and what they give, [S, H * D] each."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=H,
        num_key_value_heads=H_KV, head_dim=D, query_pre_attn_scalar=4 * D, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"], bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model: Any = transformers.Gemma3ForCausalLM(config).eval()
    given: list[torch.Tensor] = []
    for layer in model.model.layers:
        # A norm multiplies by 1 + its weight.
        of_k = torch.exp(1.5 * torch.randn(D))
        with torch.no_grad():
            layer.self_attn.k_norm.weight.copy_(of_k - 1)
            layer.self_attn.q_norm.weight.copy_(1 / of_k - 1)
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0][0]))
    return model_channels.capture(model, torch.randint(3, 50, (TOKENS,))), given


def test_layers_attend_as_the_model_does(read_by: tuple[list[Layer], list[torch.Tensor]]) -> None:
    """But for the rounding to bf16, with its scale and window."""
    layers, given = read_by
    assert [layer.left for layer in layers] == [WINDOW - 1, -1]
    for layer, out in zip(layers, given, strict=True):
        assert layer.q.shape == (1, H, TOKENS, D)
        assert layer.k.shape == layer.v.shape == (1, H_KV, TOKENS, D)

        def error(of: Layer, out: torch.Tensor = out) -> float:
            return relative_error(of.attend(of.q, of.k)[0].transpose(0, 1).flatten(1), out)

        assert error(layer) < 2**-7
        assert error(layer._replace(left=WINDOW - 2)) > 0.02
        assert error(layer._replace(sm_scale=2 * layer.sm_scale)) > 0.02


@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
def test_errors_are_those_of_q_and_k_by_head(
    recipe: ha.Recipe, read_by: tuple[list[Layer], list[torch.Tensor]]
) -> None:
    """As the rounding model has them."""
    for layer in read_by[0]:
        expected = layer.attend(layer.q, layer.k)
        found = model_channels.errors(layer, expected, recipe)
        rounded = ha.reference.quantize(layer.q, layer.k, layer.v, recipe)
        q, k = (
            x * descale[..., None] for x, descale in ((rounded.q8, rounded.q_descale), (rounded.k8, rounded.k_descale))
        )
        scores = (q[0].double() @ k[0].double().mT) * layer.sm_scale
        apart = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
        hidden = (apart < 0) | (apart > (layer.left if layer.left >= 0 else TOKENS))
        out = scores.masked_fill(hidden, -math.inf).softmax(2) @ layer.v[0].double()
        of_model = [relative_error(out[head], expected[0, head]) for head in range(H)]
        assert found == pytest.approx(of_model, rel=0.01)


def measure(folder: Path, files: list[Path]) -> Loaded:
    options = ["--suite", "model_channels", "--device", "cpu", "--quick", "--out", str(folder), "--no-plots"]
    assert attention.main([*options, "--model-qkv", *map(str, files)]) == 0
    return load(folder)


def test_suite(read_by: tuple[list[Layer], list[torch.Tensor]], tmp_path: Path) -> None:
    """Of saved tensors: a row for each layer, preset and whether channels are equalised, which helps such channels."""
    file = model_channels.save(tmp_path, "SmolLM2-135M", read_by[0])
    loaded = measure(tmp_path / "out", [file])
    rows = loaded["model_channels"]["rows"]
    assert [(row["layer"], row["recipe"], row["equalise"]) for row in rows] == [
        (layer, preset, equalise) for layer in (0, 1) for preset in PRESETS for equalise in (False, True)
    ]
    layer = read_by[0][1].first(model_channels.QUICK_TOKENS)
    expected = layer.attend(layer.q, layer.k)
    assert rows[-1]["errors"] == pytest.approx(model_channels.errors(layer, expected, ha.ACCURATE), rel=1e-3)
    assert rows[-1]["spreads"] == pytest.approx(model_channels.spreads(layer), rel=1e-3)
    (table,) = model_channels.tables(loaded)
    assert table.title.startswith(
        f"SmolLM2-135M, {model_channels.QUICK_TOKENS} tokens, {2 * H} heads of {D}; sizes of "
    )
    assert [line[1] for line in table.body] == ["no", "yes"] * 3
    means = [float(line[2]) for line in table.body]
    assert means[3] < 0.6 * means[2], "BALANCED, equalised or not"
    assert all(float(line[2]) < float(line[4]) for line in table.body)


def row(layer: int, errors: list[float], **fields: Any) -> Row:
    return {"model": "SmolLM2-135M", "recipe": "balanced", "equalise": True, "layer": layer, "errors": errors} | fields
