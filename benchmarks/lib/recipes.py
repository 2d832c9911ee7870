"""The recipes that the accuracy and the preprocessing suite measure, by the name that result rows have."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import helion_attn as ha

PRESETS = {"fast": ha.FAST, "balanced": ha.BALANCED, "accurate": ha.ACCURATE}

#: With 16-bit numbers.
RUNGS = {"hybrid": ha.HYBRID, "bf16": ha.BF16}

#: The recipe of `attention` unless told.
DEFAULT = "balanced"

#: e4m3, and nothing for accuracy.
_PLAIN = ha.Recipe(qk_dtype=torch.float8_e4m3fn, equalise=False, reflect=False, smooth_k=False, center_v=False)

#: Dimensions of [B, H, S, D] that share a descale.
_TENSOR, _HEAD = (0, 1, 2, 3), (2, 3)

#: Descales that are shared by more than any recipe's, of which of Q, K and V. Only the rounding model has them.
#: FlashAttention-3's paper calls the first one the FP8 baseline.
COARSE: dict[str, tuple[ha.Recipe, dict[str, tuple[int, ...]]]] = {
    "fp8_tensor": (_PLAIN, {"q": _TENSOR, "k": _TENSOR, "v": _TENSOR}),
    "fast, q_head": (ha.FAST, {"q": _HEAD}),
    "fast, k_head": (ha.FAST, {"k": _HEAD}),
}

_IN_INT8 = {"qk_dtype": torch.int8, "half_scores": False}

_CHANGES: dict[str, dict[str, Any]] = {
    "no_reflect": {"reflect": False},
    "hadamard": {"reflect": False, "hadamard": True},
    "no_smooth_k": {"smooth_k": False},
    "no_equalise": {"equalise": False},
    "int8_qk_no_reflect": _IN_INT8 | {"reflect": False},
    "int8_qk_hadamard": _IN_INT8 | {"reflect": False, "hadamard": True},
    "v_channel": {"v_scales": "channel"},
    "q_block": {"q_scales": "block"},
    "e5m2_pv": {"pv_dtype": torch.float8_e5m2},
    "p_offset_0": {"p_offset_log2": 0},
    "no_centring": {"center_v": False},
}


def _ablation() -> dict[str, ha.Recipe]:
    changed = {f"fast, {name}": dataclasses.replace(ha.FAST, **change) for name, change in _CHANGES.items()}
    return {name: recipe for name, recipe in changed.items() if recipe not in PRESETS.values()}


#: FAST with one choice changed.
ABLATION = _ablation()

RECIPES = PRESETS | RUNGS | ABLATION


def described() -> dict[str, dict[str, str]]:
    """Every recipe's fields as text, for the `meta` of a result file."""
    return {
        name: {key: str(value).removeprefix("torch.") for key, value in dataclasses.asdict(recipe).items()}
        for name, recipe in RECIPES.items()
    }
