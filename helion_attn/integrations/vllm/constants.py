"""Constants of a model's keys, of a prompt: `python -m helion_attn vllm-calibrate MODEL --prompt FILE --out FILE`.

K's mean and factors of channels by layer, as `helion_attn.cache_constants` makes them, in a safetensors file: the same
in every start and every instance of a server. A server is given it by vLLM's `--additional-config`.
"""

from __future__ import annotations

import argparse
import functools
import re
from pathlib import Path
from typing import Any

import torch

from helion_attn.kv_cache import cache_constants

#: The key of vLLM's `additional_config` under which a server finds the file.
CONFIG_KEY = "helion_attn_constants"

#: How names of a drafting model's layers begin. A file is of the model that it drafts for.
DRAFTING = ("draft_model.", "mtp.")

#: The fewest tokens of a prompt, and how many are taken.
LEAST_TOKENS, MOST_TOKENS = 256, 8192

#: What `vllm-calibrate --help` prints.
DESCRIPTION = (
    "Run a prompt through a model of transformers, and write each layer's mean of K and factors of channels for the "
    f'8-bit cache of a vLLM server: vllm serve MODEL ... --additional-config \'{{"{CONFIG_KEY}": "FILE"}}\'. They '
    "matter for models whose keys have large biases or a few large channels."
)

#: A layer's two constants, fp32 [H_kv, D], of all heads of the model.
Constants = tuple[torch.Tensor, torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `calibrate`."""
    parser.add_argument("model", help="a folder, or a name on the Hub")
    parser.add_argument("--prompt", type=Path, required=True, help="a text file, of the kind that the model will see")
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to write")


def calibrate(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Write the constants of a model's layers."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = AutoTokenizer.from_pretrained(given.model)(given.prompt.read_text(), return_tensors="pt").input_ids
    if tokens.size(1) < LEAST_TOKENS:
        parser.error(f"--prompt has {tokens.size(1)} tokens; it must have at least {LEAST_TOKENS}")
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16).to(device).eval()
    found = of_model(model, tokens[:, :MOST_TOKENS].to(device))
    named = {
        f"layers.{layer}.{name}": x.contiguous().cpu()
        for layer, both in found.items()
        for name, x in zip(("k_mean", "channel_factors"), both, strict=True)
    }
    save_file(named, given.out, {"model": given.model, "tokens": str(min(tokens.size(1), MOST_TOKENS))})
    print(f"{len(found)} layers -> {given.out}")
    return 0


@torch.no_grad()
def of_model(model: Any, tokens: torch.Tensor) -> dict[int, Constants]:
    """Return the constants of the layers of a model of transformers, by their numbers, from a prompt [1, tokens]."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    found: dict[int, Constants] = {}

    def noting(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> Any:
        found[module.layer_idx] = cache_constants(query, key)
        return sdpa_attention_forward(module, query, key, *args, **options)

    before = model.config._attn_implementation
    AttentionInterface.register("helion_attn_calibrate", noting)
    AttentionMaskInterface.register("helion_attn_calibrate", sdpa_mask)
    model.set_attn_implementation("helion_attn_calibrate")
    try:
        model(tokens, use_cache=False, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
    return found


@functools.cache
def load(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file that `calibrate` wrote, by name."""
    from safetensors.torch import load_file

    return load_file(path)


def of_layer(
    path: str, layer_name: str, rank: int, ranks: int, shape: tuple[int, int], drafting: bool = False
) -> Constants:
    """Return a layer's constants on a rank of tensor parallelism, [H_kv, D] of its own heads.

    Layers that draft have a mean of 0 and factors of 1: those of a drafting model, and those behind the file's last.

    Args:
        path: the file.
        layer_name: vLLM's, such as "model.layers.3.self_attn.attn".
        rank: of the process.
        ranks: how many share the heads.
        shape: KV heads of the rank, and the head dim.
        drafting: the server drafts.

    Raises:
        ValueError: the file has no such layer, or other heads.
    """
    numbers = re.findall(r"\.(\d+)\.", layer_name)
    names = [f"layers.{numbers[0]}.{name}" for name in ("k_mean", "channel_factors")] if numbers else []
    tensors = load(path)
    of_file = [int(match[1]) for name in tensors if (match := re.fullmatch(r"layers\.(\d+)\.k_mean", name))]
    behind = bool(numbers) and int(numbers[0]) > max(of_file, default=-1)
    if layer_name.startswith(DRAFTING) or (drafting and behind):
        return torch.zeros(shape), torch.ones(shape)
    how = f"make it of the served model: python -m helion_attn vllm-calibrate MODEL --prompt FILE --out {path}"
    if not names or any(name not in tensors for name in names):
        has = f"{len(of_file)} layers, numbered up to {max(of_file)}" if of_file else "no layer"
        raise ValueError(f"{CONFIG_KEY} is {path}, which has {has}; this server has {layer_name}; {how}")
    found = []
    for name in names:
        first = rank * tensors[name].size(0) // ranks
        x = tensors[name][first : first + shape[0]]
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{CONFIG_KEY} is {path}, which has {name} of shape {tuple(tensors[name].shape)}; this server's "
                f"{layer_name} has {shape[0]} KV heads on each of {ranks} ranks and head dim {shape[1]}; {how}"
            )
        found.append(x)
    return found[0], found[1]
