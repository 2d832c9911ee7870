"""The node: it puts helion_attn's attention into a copy of a model."""

from __future__ import annotations

from typing import Any

import helion_attn as ha
from helion_attn.integrations.comfyui import Override

PRESETS = ["auto", "balanced", "fast", "accurate", "hybrid"]


class PatchModelHelionAttn:
    """Patch a model's attention."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "model/attention"
    DESCRIPTION = "Runs the model's attention in 8 bits on H100 and H200 GPUs; the other nodes' patches stay."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return the node's inputs, as ComfyUI asks for them."""
        layers = {"default": 0, "min": 0, "max": 100}
        return {
            "required": {
                "model": ("MODEL",),
                "preset": (
                    PRESETS,
                    {
                        "default": "auto",
                        "tooltip": "auto: balanced, or PyTorch's attention for short calls. fast: larger errors. "
                        "accurate: for Q and K with single large channels. hybrid: only Q and K in 8 bits.",
                    },
                ),
                "first_steps": ("INT", {**layers, "tooltip": "Steps at the start that stay in 16 bits."}),
                "first_layers": ("INT", {**layers, "tooltip": "Blocks at the model's start that stay in 16 bits."}),
                "last_layers": ("INT", {**layers, "tooltip": "Blocks at the model's end that stay in 16 bits."}),
                "keep_blocks": (
                    "FLOAT",
                    {
                        "default": 1.0,
                        "min": 0.05,
                        "max": 1.0,
                        "step": 0.05,
                        "tooltip": "The share of the blocks of keys that self-attention visits. 0.25 is for long "
                        "videos; it changes the picture more than a preset does.",
                    },
                ),
            }
        }

    def patch(
        self,
        model: Any,
        preset: Any,
        first_steps: int = 0,
        first_layers: int = 0,
        last_layers: int = 0,
        keep_blocks: float = 1.0,
    ) -> tuple[Any]:
        """Return a copy of the model with this attention, before what was there."""
        supported = ha.is_supported(model.load_device)
        if not supported:
            raise RuntimeError(f"helion_attn: {supported.reason}; bypass the node")
        patched = model.clone()
        options = patched.model_options.setdefault("transformer_options", {})
        options["optimized_attention_override"] = Override(
            preset,
            first_steps=first_steps,
            first_layers=first_layers,
            last_layers=last_layers,
            keep_blocks=keep_blocks,
            before=options.get("optimized_attention_override"),
        )
        return (patched,)


NODE_CLASS_MAPPINGS = {"PatchModelHelionAttn": PatchModelHelionAttn}
NODE_DISPLAY_NAME_MAPPINGS = {"PatchModelHelionAttn": "Patch model: helion_attn"}
