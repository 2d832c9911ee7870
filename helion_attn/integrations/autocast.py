"""What autocast does to attention's inputs."""

from __future__ import annotations

import torch


def autocast_inputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As `scaled_dot_product_attention` has it: floating-point inputs take autocast's dtype, but for float64."""
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
