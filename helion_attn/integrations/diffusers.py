"""Attention for diffusers: a backend under a name, for `set_attention_backend` and `attention_backend`.

diffusers (0.42) lists its backends in an Enum and a registry, and lets nobody extend them: `register_diffusers` adds a
member and an entry at run time.
"""

from __future__ import annotations

from typing import Any

import torch

from helion_attn.api import attention
from helion_attn.integrations.autocast import autocast_inputs
from helion_attn.integrations.masks import attend_to_visible, read_mask
from helion_attn.integrations.rules import Rule, check_supported
from helion_attn.types import BALANCED, Recipe, RecipeName, as_recipe
from helion_attn.validate.dense import check_flag, check_is_tensor, check_qkv, check_sm_scale
from helion_attn.validate.varlen import MAX_VARLEN_D

#: What the backend accepts of what diffusers passes; the values of a mask are looked at later.
RULES = (
    Rule(
        "attn_mask",
        lambda mask: mask is None or isinstance(mask, torch.Tensor),
        "None, or a tensor, alike for all heads, that hides nothing, keys after the diagonal, or padding",
    ),
    Rule("dropout_p", lambda p: p == 0, "0"),
)

#: What of diffusers 0.42 calls PyTorch's attention itself, where no backend is asked: models -> processors and modules.
OWN_CALLS: dict[str, tuple[str, ...]] = {
    "Stable Diffusion 1 and 2, SDXL and other UNets, PixArt, DiT, Latte": (
        *("AttnProcessor2_0", "AttnAddedKVProcessor2_0", "FusedAttnProcessor2_0", "CustomDiffusionAttnProcessor2_0"),
        *("IPAdapterAttnProcessor2_0", "PAGIdentitySelfAttnProcessor2_0", "PAGCFGIdentitySelfAttnProcessor2_0"),
        *("AttnProcessorNPU", "XLAFlashAttnProcessor2_0"),
    ),
    "Stable Diffusion 3": (
        *("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0", "PAGJointAttnProcessor2_0"),
        *("PAGCFGJointAttnProcessor2_0", "SD3IPAdapterJointAttnProcessor2_0"),
    ),
    "CogVideoX, ConsisID, CogView3Plus": ("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0"),
    "CogView4": ("CogView4AttnProcessor", "CogView4TrainingAttnProcessor"),
    "HunyuanDiT": (
        *("HunyuanAttnProcessor2_0", "FusedHunyuanAttnProcessor2_0", "PAGHunyuanAttnProcessor2_0"),
        "PAGCFGHunyuanAttnProcessor2_0",
    ),
    "Sana, SanaVideo, SanaWM": ("SanaAttnProcessor2_0", "SanaWMSoftmaxAttention", "SanaWMSoftmaxCamAttention"),
    "Allegro": ("AllegroAttnProcessor2_0",),
    "AuraFlow": ("AuraFlowAttnProcessor2_0", "FusedAuraFlowAttnProcessor2_0"),
    "EasyAnimate": ("EasyAnimateAttnProcessor2_0",),
    "HiDream": ("HiDreamAttnProcessor",),
    "Lumina": ("LuminaAttnProcessor2_0",),
    "Lumina2": ("Lumina2AttnProcessor2_0",),
    "Mochi": ("MochiAttnProcessor2_0", "MochiAttentionPool"),
    "OmniGen": ("OmniGenAttnProcessor2_0",),
    "Stable Audio": ("StableAudioAttnProcessor2_0",),
    "most autoencoders": (
        *("CosmosSpatialAttentionProcessor2_0", "CosmosTemporalAttentionProcessor2_0", "HunyuanImageAttentionBlock"),
        *("HunyuanImageRefinerAttnBlock", "HunyuanVideo15AttnBlock", "MochiVaeAttnProcessor2_0"),
        *("QwenImageAttentionBlock", "QwenImage21AttentionBlock", "VidTokAttnBlock", "WanAttentionBlock"),
    ),
}

#: What the registry must have: its interface is diffusers' own.
NEEDED = ("_backends", "_constraints", "_supported_arg_names", "_supports_context_parallel", "register")


def register_diffusers(name: str = "helion_fp8", *, recipe: Recipe | RecipeName = BALANCED) -> None:
    """Add FP8 attention to diffusers' backends (0.42), for inference.

    `model.set_attention_backend(name)`, `pipeline.transformer.set_attention_backend(name)` and
    `with diffusers.attention_backend(name):` then run it. Padding masks, such as those of HunyuanVideo and Qwen-Image,
    become packed sequences. diffusers' context parallelism, ring and Ulysses, takes the backend too: a part of a ring
    quantises its own keys.

    diffusers asks no backend in models whose processors call PyTorch's attention themselves, and does not say so; run
    these inside `helion_attn.sdpa()`, whatever backend is set: Stable Diffusion 1 and 2, SDXL and other UNets, PixArt,
    DiT, Latte, Stable Diffusion 3, CogVideoX, ConsisID, CogView3Plus, CogView4, HunyuanDiT, Sana, SanaVideo, SanaWM,
    Allegro, AuraFlow, EasyAnimate, HiDream, Lumina, Lumina2, Mochi, OmniGen, Stable Audio, and most autoencoders.

    Under `torch.autocast` inputs are cast as `scaled_dot_product_attention` does it.

    Args:
        name: of the backend, in lower case. Registering a name again replaces it.
        recipe: how the tensors become 8-bit numbers, or a preset's name.

    Raises:
        ImportError: diffusers is not installed.
        TypeError, ValueError: `recipe` is no Recipe; `name` is no name in lower case, or one of diffusers' own.
        NotImplementedError: this diffusers keeps its backends in another way.

    The models' forward passes raise what `helion_attn.attention` does, and NotImplementedError for what
    docs/integrations.md lists as not supported.
    """
    recipe = as_recipe(recipe)
    if not isinstance(name, str):
        raise TypeError(f"name is a {type(name).__name__}; it must be a str")
    if not name.isidentifier() or name != name.lower():
        raise ValueError(f"name is {name!r}; it must be an identifier in lower case")
    import diffusers
    from diffusers.models import attention_dispatch as dispatch

    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    missing = [needed for needed in NEEDED if not hasattr(registry, needed)]
    if missing:
        raise NotImplementedError(
            f"diffusers is {diffusers.__version__}, whose registry of backends has no {missing[0]}; it must be 0.42"
        )
    if name in names._value2member_map_:
        member = names(name)
        if not isinstance(registry._backends.get(member), Backend):
            raise ValueError(f"name is {name!r}, which diffusers uses for another attention; it must be another")
    else:
        member = str.__new__(names, name)
        member._name_, member._value_ = name.upper(), name
        type.__setattr__(names, member._name_, member)
        names._member_map_[member._name_] = member
        names._member_names_.append(member._name_)
        names._value2member_map_[name] = member
    registry.register(member, supports_context_parallel=True)(Backend(recipe))


class Backend:
    """Attention with the arguments that diffusers passes."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of query [B, M, H, D] to key and value [B, N, H_kv, D].

        Returns:
            [B, M, H, D_v], and fp32 lse [B, M, H], natural log, if asked for.
        """
        if _parallel_config is None:
            return self.attend(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse
            )  # fmt: skip
        from diffusers.models.attention_dispatch import _templated_context_parallel_attention

        return _templated_context_parallel_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse,
            forward_op=self.forward, backward_op=backward, _parallel_config=_parallel_config,
        )  # fmt: skip

    def forward(
        self,
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _save_ctx: bool = True,
        _parallel_config: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """A part of context-parallel attention. Nothing is saved for a backward pass."""
        return self.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`__call__` on one device."""
        check_supported("helion_attn", RULES, {"attn_mask": attn_mask, "dropout_p": dropout_p})
        if scale is not None:
            check_sm_scale(scale, "scale")
        for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa), ("return_lse", return_lse)):
            check_flag(flag, name)
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_is_tensor(name, x)
        # Packed sequences would not know batches of different sizes from one another.
        query, key, value = autocast_inputs(query, key, value)
        check_qkv(query, key, value, "bshd", names=("query", "key", "value"))
        B, M, H, N = *query.shape[:3], key.size(1)
        if query.size(2) != key.size(2) and not enable_gqa:
            raise ValueError(
                f"query has {query.size(2)} heads and key {key.size(2)}; they must be equal without enable_gqa=True"
            )
        if is_causal and (attn_mask is not None or M != N):
            raise NotImplementedError(
                f"helion_attn: is_causal is True with M = {M}, N = {N} and attn_mask "
                f"{'None' if attn_mask is None else 'given'}; it must be without a mask, on as many queries as keys"
            )
        causal = is_causal
        if attn_mask is not None:
            # diffusers has padding masks [B, N] as well.
            of_keys = attn_mask.dim() == 2 and tuple(attn_mask.shape) == (B, N)
            if of_keys and B == M > 1:
                raise NotImplementedError(
                    f"helion_attn: attn_mask has shape {tuple(attn_mask.shape)}, which is [B, N] and [M, N] alike; "
                    "pass attn_mask[:, None, None] for padding, or attn_mask[None, None]"
                )
            visible = read_mask(attn_mask[:, None, None] if of_keys else attn_mask, B, H, M, N)
            if not visible.whole:
                if (D := max(query.size(3), value.size(3))) > MAX_VARLEN_D:
                    raise NotImplementedError(
                        f"helion_attn: attn_mask hides padding and the head dim is {D}; with padding it must be "
                        f"at most {MAX_VARLEN_D}"
                    )
                out, lse = attend_to_visible(query, key, value, visible, scale, self.recipe)
                return (out, lse.transpose(1, 2)) if return_lse else out
            causal = visible.causal
        result = attention(
            query, key, value, causal=causal, sm_scale=scale, layout="bshd", recipe=self.recipe, return_lse=return_lse
        )
        return (result[0], result[1].transpose(1, 2)) if isinstance(result, tuple) else result


def backward(ctx: Any, grad_out: torch.Tensor, *args: Any) -> None:
    """There is none."""
    raise NotImplementedError("helion_attn has no backward pass: run the model in torch.no_grad()")
