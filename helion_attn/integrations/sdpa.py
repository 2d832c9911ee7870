"""A context in which `torch.nn.functional.scaled_dot_product_attention` is FP8 attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from helion_attn.api import attention
from helion_attn.integrations.autocast import autocast_inputs
from helion_attn.integrations.rules import Rule, check_supported
from helion_attn.types import BALANCED, Recipe, as_recipe
from helion_attn.validate.dense import check_sm_scale


def _is_causal_bias(mask: Any) -> bool:
    from torch.nn.attention.bias import CausalBias  # imports triton

    return isinstance(mask, CausalBias)


#: What the context accepts of the arguments of `scaled_dot_product_attention`.
RULES = (
    Rule(
        "attn_mask",
        lambda mask: mask is None or _is_causal_bias(mask),
        "None, or made by torch.nn.attention.bias.causal_lower_right or causal_upper_left: the values of other masks "
        "would have to be read",
    ),
    Rule("dropout_p", lambda p: p == 0, "0"),
)

#: Functions of torch that call `scaled_dot_product_attention`, or compute attention, where the mode does not see it.
HIDDEN = (F.multi_head_attention_forward, torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)


class _SdpaMode(TorchFunctionMode):
    """Takes the calls of `scaled_dot_product_attention` of this thread.

    A mode, not another function in the place of `F.scaled_dot_product_attention`: it also sees calls through names that
    were bound before (`from torch.nn.functional import scaled_dot_product_attention`), leaves other threads alone,
    nests and is popped on exceptions, and torch.compile guards on it, so that what was compiled outside is compiled
    again inside, and the other way round. It costs about 1 us for every call of a torch function inside.

    While a mode runs a function it is off. A function written in Python that torch hands to it as a whole would call
    the stock attention: `HIDDEN` lists them, and they raise.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}), recipe=self.recipe)
        if func in HIDDEN:
            raise NotImplementedError(
                f"helion_attn.sdpa: {func.__name__} (torch.nn.MultiheadAttention) is not supported; call "
                f"scaled_dot_product_attention on the projected tensors"
            )
        return func(*args, **(kwargs or {}))


def sdpa(*, recipe: Recipe | str = BALANCED) -> TorchFunctionMode:
    """`with helion_attn.sdpa():` runs `torch.nn.functional.scaled_dot_product_attention` in FP8.

    It holds for calls from the thread that entered the context, until it is left, however that happens. Contexts nest;
    the innermost one counts. It works around and inside functions compiled by torch.compile. Calls of
    `torch.ops.aten.scaled_dot_product_attention` and its backends, and other attention functions, are left alone.

    The arguments mean what they mean to PyTorch:

    - `query` [B, H, M, D], `key` [B, H_kv, N, D], `value` [B, H_kv, N, D_v]; bf16, fp16 or fp32; D and D_v in
      16..1024. H_kv other than H needs `enable_gqa=True`. Under `torch.autocast` they are cast to its dtype first, as
      PyTorch does.
    - `is_causal=True`: PyTorch aligns the mask to the top left, and helion_attn to the bottom right. They agree for
      M = N; other lengths raise. `attn_mask=torch.nn.attention.bias.causal_lower_right(M, N)` is right for any
      lengths; rows that see no key give 0.
    - `attn_mask`: no other mask; `dropout_p`: 0; `scale`: in 0..2**64.

    Args:
        recipe: how the tensors become 8-bit numbers.

    Raises:
        TypeError: `recipe` is no Recipe.

    Calls inside the context raise what `helion_attn.attention` does, and NotImplementedError for what
    docs/integrations.md lists as not supported, torch.nn.MultiheadAttention among it. Nothing falls back to the stock
    attention.
    """
    return _SdpaMode(as_recipe(recipe))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recipe: Recipe,
) -> torch.Tensor:
    check_supported("helion_attn.sdpa", RULES, {"attn_mask": attn_mask, "dropout_p": dropout_p})
    if scale is not None:
        check_sm_scale(scale, "scale")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; helion_attn.sdpa needs 4 dimensions")
    M, N = query.size(2), key.size(2)
    if attn_mask is not None:
        from torch.nn.attention.bias import CausalVariant

        if is_causal:
            raise ValueError("is_causal is True and attn_mask is given; it must be one of them")
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (M, N):
            raise ValueError(
                f"attn_mask is for lengths {attn_mask.seq_len_q} and {attn_mask.seq_len_kv}; it must be for {M} and {N}"
            )
        top_left = attn_mask.variant == CausalVariant.UPPER_LEFT
    else:
        top_left = is_causal
    if top_left and M != N:
        raise NotImplementedError(
            f"helion_attn.sdpa: the causal mask is aligned top-left with M = {M} and N = {N}; helion_attn has only "
            f"bottom-right: pass attn_mask=torch.nn.attention.bias.causal_lower_right(M, N) if that is meant"
        )
    if query.size(1) != key.size(1) and not enable_gqa:
        raise ValueError(
            f"query has {query.size(1)} heads and key has {key.size(1)}; they must be equal without enable_gqa=True"
        )
    causal = is_causal or attn_mask is not None
    query, key, value = autocast_inputs(query, key, value)
    return attention(query, key, value, causal=causal, sm_scale=scale, recipe=recipe)
