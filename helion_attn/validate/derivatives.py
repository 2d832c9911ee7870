"""Whether somebody differentiates through a tensor: PyTorch would take the derivative of a kernel for 0."""

from __future__ import annotations

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad


def requires_grad(x: torch.Tensor) -> bool:
    """Whether a tensor requires grad, or one that `torch.func` wrapped for it: a batch of `torch.vmap` does not say."""
    if x.requires_grad or torch.compiler.is_compiling() or not _functorch.is_functorch_wrapped_tensor(x):
        return x.requires_grad
    return requires_grad(_functorch.get_unwrapped(x))


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether somebody waits for the gradient of one of them."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def is_inside_functorch() -> bool:
    """Whether `torch.func` or `torch.vmap` runs the caller: their tensors have no place in torch.autograd's graph."""
    return not torch.compiler.is_compiling() and _functorch.peek_interpreter_stack() is not None


def is_forward_mode() -> bool:
    """Whether tensors may have tangents: inside `torch.func.jvp`, `jacfwd`, and levels of `forward_ad`."""
    return forward_ad._current_level >= 0  # PyTorch's own count, which costs nothing to read


def has_tangent(x: torch.Tensor) -> bool:
    """Whether a tensor has a tangent, at any of the levels that `torch.func` wrapped it for."""
    if not is_forward_mode():
        return False
    level = _functorch.peek_interpreter_stack()
    if level is None:
        return forward_ad.unpack_dual(x).tangent is not None
    is_of_level = _functorch.maybe_get_level(x) == level.level()
    if is_of_level and not _functorch.is_batchedtensor(x) and forward_ad.unpack_dual(x).tangent is not None:
        return True
    with temporarily_pop_interpreter_stack():
        return has_tangent(_functorch.get_unwrapped(x) if is_of_level else x)
