"""Gives back the model that was fused."""

from __future__ import annotations

import torch

from helion_attn.integrations.fused.fuse_diffusers import unfuse_diffusers
from helion_attn.integrations.fused.fuse_transformers import unfuse_transformers
from helion_attn.integrations.inputs import check_module


def unfuse(model: torch.nn.Module) -> None:
    """Undo `fuse_transformers` and `fuse_diffusers`: the model computes what it did before, to the bit.

    Attention modules of transformers get their class back, and the model its attention implementation, unless another
    has been set since. Those of diffusers get the processors that they had, with their backends. A model that is not
    fused stays as it is.

    Args:
        model: what was fused, or a module that holds it, or a copy of it.

    Raises:
        TypeError: `model` is no module.

    Example:
        import diffusers

        model = diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=32, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=1
        )
        ha.fuse_diffusers(model)
        ha.unfuse(model)
    """
    check_module(model)
    unfuse_transformers(model)
    unfuse_diffusers(model)
