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

#: FlashAttention-3's paper calls this the FP8 baseline. Only the rounding model runs it here.
PER_TENSOR = ha.Recipe(
    qk_dtype=torch.float8_e4m3fn,
    q_scales="tensor",
    k_scales="tensor",
    v_scales="tensor",
    reflect=False,
    smooth_k=False,
    center_v=False,
)

_IN_INT8 = {"qk_dtype": torch.int8, "k_scales": "block", "half_scores": False}

_CHANGES: dict[str, dict[str, Any]] = {
    "no_reflect": {"reflect": False},
    "hadamard": {"reflect": False, "hadamard": True},
    "no_smooth_k": {"smooth_k": False},
    "k_head": {"k_scales": "head"},
    "int8_qk_no_reflect": _IN_INT8 | {"reflect": False},
    "int8_qk_hadamard": _IN_INT8 | {"reflect": False, "hadamard": True},
    "v_channel": {"v_scales": "channel"},
    "q_head": {"q_scales": "head"},
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
