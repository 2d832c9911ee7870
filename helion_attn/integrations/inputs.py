"""Casts and checks what functions like `scaled_dot_product_attention` are given."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from helion_attn.integrations.rules import Rule, check_supported
from helion_attn.validate.dense import check_flag, check_is_tensor, check_qkv, check_sm_scale, described

#: What such functions call Q, K and V.
NAMES = ("query", "key", "value")


def autocast_inputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast floating-point inputs but float64 to autocast's dtype, as `scaled_dot_product_attention` does."""
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def check_tensors(*tensors: object) -> None:
    """Check that query, key and value are tensors."""
    for name, x in zip(NAMES, tensors, strict=True):
        check_is_tensor(name, x)


def checked_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value as autocast has them, checked: packed sequences would not know batches apart."""
    q, k, v = autocast_inputs(query, key, value)
    check_qkv(q, k, v, layout, names=NAMES, differentiable=True)
    return q, k, v


def check_scale(scale: float | None, name: str = "scale") -> None:
    """Check what multiplies scores; None is 1 / sqrt(D)."""
    if scale is not None:
        check_sm_scale(scale, name)


def check_arguments(
    entry_point: str,
    rules: Iterable[Rule],
    attn_mask: object,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> None:
    """Check the arguments of `scaled_dot_product_attention` besides its tensors, of which `rules` are about two."""
    check_supported(entry_point, rules, {"attn_mask": attn_mask, "dropout_p": dropout_p})
    check_scale(scale)
    check_flag(is_causal, "is_causal")
    check_flag(enable_gqa, "enable_gqa")


def check_name(name: object) -> None:
    """Check what is registered under a name: it is a str."""
    if not isinstance(name, str):
        raise TypeError(f"name is a {type(name).__name__}; it must be a str")


def check_module(model: object, name: str = "model") -> None:
    """Check that a model is a module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{name} is {described(model)}; it must be a torch.nn.Module")
