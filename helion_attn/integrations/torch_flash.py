"""PyTorch's flash attention backend in FP8: what `torch.nn.attention.activate_flash_attention_impl` takes.

PyTorch chooses a backend for `scaled_dot_product_attention` as ever; where it chooses flash attention, the operator
`aten::_scaled_dot_product_flash_attention` of CUDA tensors is this one. So it is reached from C++ and from what calls
the operator itself, such as `torch.distributed.tensor.experimental.context_parallel`.
"""

from __future__ import annotations

from typing import Any

import torch

from helion_attn.api import attention
from helion_attn.integrations.inputs import NAMES, check_name, check_scale
from helion_attn.types import BALANCED, Layout, Recipe, RecipeName, as_recipe
from helion_attn.validate.dense import check_qkv

#: The operator whose kernel is replaced.
OPERATOR = "_scaled_dot_product_flash_attention"

#: What its backward pass says. PyTorch's would take the 16-bit tensors with the lse of 8-bit ones.
NO_BACKWARD = (
    "helion_attn has no backward pass of PyTorch's operator; call helion_attn.sdpa, which has one, or "
    "restore_flash_attention_impl() first"
)


class FlashImplementation:
    """Keeps the operator and its backward pass replaced; PyTorch's registry holds it, and calls `remove`."""

    def __init__(self, recipe: Recipe, dispatch_key: str) -> None:
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL", dispatch_key)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            return flash_attention(*args, **kwargs, recipe=recipe)

        def backward(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(NO_BACKWARD)

        self.library.impl(OPERATOR, kernel, dispatch_key)
        self.library.impl(f"{OPERATOR}_backward", backward, dispatch_key)

    def remove(self) -> None:
        """Put the operators' own kernels back."""
        self.library = None


def register_flash_attention(name: str = "helion_fp8", *, recipe: Recipe | RecipeName = BALANCED) -> None:
    """Make `torch.nn.attention.activate_flash_attention_impl(name)` FP8 attention, for inference.

    Once activated, PyTorch's flash attention backend is FP8 attention, in every thread of this process. PyTorch chooses
    that backend for CUDA tensors in fp16 or bf16 without a mask, with a head dim up to 256 and, if causal, equal
    lengths. `torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)` has it choose no other.
    `restore_flash_attention_impl()` ends it. `helion_attn.sdpa` is the way that takes every call, or raises.

    Args:
        name: that is activated.
        recipe: how the tensors become 8-bit numbers, or a preset's name.

    Raises:
        TypeError, ValueError: `recipe` is no Recipe; `name` is no str, or one of PyTorch's own.

    The calls raise what `helion_attn.attention` does, and NotImplementedError of a dropout or a debug mask.

    Example:
        from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

        ha.register_flash_attention()
        activate_flash_attention_impl("helion_fp8")
        restore_flash_attention_impl()
    """
    recipe = as_recipe(recipe)
    check_name(name)
    if name in ("FA2", "FA3", "FA4"):
        raise ValueError(f"name is {name!r}, which PyTorch uses for another implementation; it must be another")
    from torch.nn.attention import register_flash_attention_impl

    register_flash_attention_impl(name, register_fn=lambda: FlashImplementation(recipe, "CUDA"))


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    recipe: Recipe,
) -> tuple[Any, ...]:
    """Compute the operator's results: out [B, H, M, D], lse [B, H, M], and empty ones for a backward pass.

    Raises:
        NotImplementedError: a dropout, a debug mask, or a causal mask of other lengths.
    """
    check_qkv(query, key, value, "bhsd", names=NAMES)
    check_scale(scale)
    M, N = query.size(2), key.size(2)
    if dropout_p != 0:
        raise NotImplementedError(f"helion_attn: dropout_p is {dropout_p}; it must be 0")
    if return_debug_mask:
        raise NotImplementedError("helion_attn: return_debug_mask is True; it must be False: there is no such mask")
    if is_causal and M != N:
        raise NotImplementedError(f"helion_attn: is_causal is True with {M} queries and {N} keys; they must be as many")
    # PyTorch promises an output that lies in memory as the query does.
    bshd = query.transpose(1, 2).is_contiguous() and not query.is_contiguous()
    q, k, v = (x.transpose(1, 2) for x in (query, key, value)) if bshd else (query, key, value)
    layout: Layout = "bshd" if bshd else "bhsd"
    out, lse = attention(q, k, v, causal=is_causal, sm_scale=scale, layout=layout, recipe=recipe, return_lse=True)
    out = out.transpose(1, 2) if bshd else out
    if out.stride() != (like := torch.empty_like(query)).stride():
        out = like.copy_(out)
    # The state of a random number generator that nothing used, and the mask.
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    return out, lse, None, None, M, N, state, unused, out.new_empty(0)
