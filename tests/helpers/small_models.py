"""Models of transformers, by type, as small as their configs allow."""

from __future__ import annotations

import re
from typing import Any

import torch

#: Of a language model.
SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1},
    **{"eos_token_id": None, "initializer_range": 0.2},  # attention that looks somewhere, and logits that differ
}


def tokens_of(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


#: By patterns of a config's integers: the largest that is left. The first that matches counts.
LARGEST = {
    r"vocab_size": 101,
    r"layers?$|^depth$": 2,
    r"key_value_heads|kv_heads": 2,
    r"heads?$": 4,
    r"^(head_dim|d_kv|v_head_dim|qk_nope_head_dim|qk_rope_head_dim|qk_head_dim|rotary_dim)$": 16,
    r"lora_rank$": 32,
    r"experts_per_tok|top_k$": 1,
    r"experts$": 2,
    r"intermediate|ffn|d_ff|n_inner|mlp_dim": 96,
    r"hidden_size|d_model|embed_dim|n_embd|hidden_dim$|^dim$|embedding_size|projection_dim": 64,
    r"_token_id$": 0,
    r"^image_size$": 32,
    r"^patch_size$": 8,
}


def small_config(config: Any) -> Any:
    """Return a config of the same class with smaller numbers, and two layers, of two kinds if there are two."""
    return type(config)(**_smaller(config))


def _smaller(config: Any) -> dict[str, Any]:
    given, parts = config.to_dict(), getattr(type(config), "sub_configs", {})
    smaller: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, int) and not isinstance(value, bool) and name not in parts:
            largest = next((most for pattern, most in LARGEST.items() if re.search(pattern, name)), value)
            if value > largest:
                smaller[name] = largest
        if name in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            smaller[name] = (list(dict.fromkeys(value)) * 2)[:2]
    for name in parts:
        if (part := getattr(config, name, None)) is not None:
            smaller[name] = part.to_dict() | _smaller(part)
    return smaller
