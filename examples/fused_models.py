"""Norms of Q and K and RoPE fused into quantising, in a language model and in a video model.

Makes a Qwen3 of transformers and a Wan of diffusers, small and with random weights, and compares outputs with those of
their own attention: with helion_attn registered, fused, and fused with the first step and the outer layers in 16 bits.
Fails if a fused model is further off than one that is not, by half.

    python examples/fused_models.py [--device cuda]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from rich.console import Console
from rich.table import Table

import helion_attn as ha
from helion_attn.testing import relative_error
from helion_attn.types import RecipeName

#: A fused model rounds less, and its rounding differs.
MOST = 1.5

LAYERS, D = 3, 64


@ha.Schedule
def in_16_bits(step: int, layer: int, q: torch.Tensor, k: torch.Tensor) -> RecipeName | None:
    """A schedule: the first step, and the first and the last layer."""
    return "bf16" if step < 1 or not 0 < layer < LAYERS - 1 else None


def qwen3() -> tuple[Any, Callable[[Any], torch.Tensor]]:
    """A model, and its logits for a prompt."""
    config = transformers.Qwen3Config(
        vocab_size=100, hidden_size=128, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=D, initializer_range=0.1,
    )  # fmt: skip
    tokens = torch.arange(60).view(1, -1)
    return transformers.Qwen3ForCausalLM(config), lambda model: model(tokens.to(model.device)).logits


def wan() -> tuple[Any, Callable[[Any], torch.Tensor]]:
    """A model, and what it predicts in two steps."""
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=D, in_channels=4, out_channels=4, text_dim=24, freq_dim=16,
        ffn_dim=64, num_layers=LAYERS, rope_max_seq_len=32,
    )  # fmt: skip
    model.set_attention_backend("native")  # diffusers keeps what the process chose last
    video, text = torch.randn(1, 4, 2, 8, 10), torch.randn(1, 11, 24)

    def predict(model: Any) -> torch.Tensor:
        inputs = {"hidden_states": video, "encoder_hidden_states": text}
        inputs = {name: x.to(model.device, model.dtype) for name, x in inputs.items()}
        outs = []
        for step, time in enumerate((900, 500)):
            with in_16_bits.step(step):  # with a pipeline: fuse_diffusers(..., scheduler=pipeline.scheduler)
                outs.append(model(**inputs, timestep=torch.tensor([time], device=model.device)).sample)
        return torch.stack(outs)

    return model, predict


def errors(device: str) -> dict[str, dict[str, float]]:
    """How far outputs are from those of the model's own attention, by model and by what runs."""
    diffusers.utils.logging.set_verbosity_error()  # backends are experimental there, and it says so
    ha.register_transformers()
    ha.register_diffusers()
    ways: dict[str, list[tuple[str, Callable[[Any], Any]]]] = {
        "Qwen3": [
            ("registered", lambda model: model.set_attn_implementation("helion_fp8")),
            ("fused", ha.fuse_transformers),
        ],
        "Wan": [
            ("registered", lambda model: model.set_attention_backend("helion_fp8")),
            ("fused", lambda model: (model.set_attention_backend("native"), ha.fuse_diffusers(model))),
            ("fused, some in 16 bits", lambda model: ha.fuse_diffusers(model, schedule=in_16_bits)),
        ],
    }
    found: dict[str, dict[str, float]] = {}
    for name, make in (("Qwen3", qwen3), ("Wan", wan)):
        torch.manual_seed(0)
        model, run = make()
        model = model.to(device, torch.bfloat16).eval()
        with torch.no_grad():
            own = run(model)
            found[name] = {}
            for way, enter in ways[name]:
                enter(model)
                found[name][way] = relative_error(run(model), own.double())
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the errors; return 1 if one is too large."""
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if on_hopper else "cpu")
    found = errors(parser.parse_args(argv).device)
    table = Table("model", "attention", "output beside that of its own")
    for name, of_model in found.items():
        for way, error in of_model.items():
            table.add_row(name, way, f"{error:.2%}")
    Console().print(table)
    bounds = {name: MOST * of_model["registered"] for name, of_model in found.items()}
    are_small = (0 < error < bounds[name] for name, of_model in found.items() for error in of_model.values())
    return 0 if all(are_small) else 1


if __name__ == "__main__":
    raise SystemExit(main())
