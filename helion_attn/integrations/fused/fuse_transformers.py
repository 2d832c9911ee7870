"""Attention modules of transformers whose norms of Q and K and RoPE are a part of quantising.

An attention function gets Q and K normalised and rotated, each step of which reads and writes them. The module has the
weights that do it. It gets a class of its own, derived from that of transformers, whose forward hands them on. All that
the module itself holds is a `Fusing`, so that copies, replicas and pickles of it are fused too, with their own weights.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from helion_attn.api import attention
from helion_attn.integrations.fused.qk_prologue import (
    NormLayout,
    QKPrologue,
    RopeCache,
    apply_norm,
    get_rope_cache,
    prefers_pytorch,
    split_prologue,
)
from helion_attn.integrations.graphs import is_captured
from helion_attn.integrations.inputs import autocast_inputs, check_module
from helion_attn.integrations.transformers import changes_nothing, earlier_keys, register_transformers
from helion_attn.integrations.transformers_masks import VisibleKeys, what_is_seen
from helion_attn.names import reject_unknown_kwargs
from helion_attn.types import BALANCED, Auto, Recipe, RecipeName, Rope, as_choice, is_auto, unchecked_rope

#: What models call the cache; older ones have the second name.
CACHES = ("cache", "past_key_values")

#: What a module's forward takes before its cache.
ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask")


class Kind(NamedTuple):
    """Attention that has a fused forward here."""

    model: str  # what it is of
    parts: str  # what is fused, in words
    module: str  # of transformers, that has the classes
    attention: str  # its class
    norms: NormLayout | None = None  # what its norms by head, q_norm and k_norm, are handed; None if it has none


KINDS = (
    Kind("Llama", "RoPE", "transformers.models.llama.modeling_llama", "LlamaAttention"),
    Kind("Qwen3", "RoPE, and norms by head", "transformers.models.qwen3.modeling_qwen3", "Qwen3Attention", "bshd"),
    Kind("Gemma 3", "RoPE, and norms by head", "transformers.models.gemma3.modeling_gemma3", "Gemma3Attention", "bhsd"),
)

#: What all of them have.
ATTRIBUTES = ("config", "layer_idx", "head_dim", "scaling", "q_proj", "k_proj", "v_proj", "o_proj")


def rope_of(cos: torch.Tensor, sin: torch.Tensor) -> Rope | None:
    """Tables [B or 1, S, D] whose halves are alike; None where sequences have other positions than one another."""
    if cos.size(0) > 1 and (is_captured(cos) or not ((cos == cos[:1]) & (sin == sin[:1])).all()):
        return None
    half = cos.size(2) // 2
    return unchecked_rope(cos[0, :, :half].clone(), sin[0, :, :half].clone())


class Fusing(NamedTuple):
    """How an attention module is fused."""

    recipe: Recipe | Auto  # how the tensors become 8-bit numbers
    implementation: str  # the name of attention under which this is done. Under another the class's own forward runs.
    original: str  # the model's attention implementation before it was fused


class FusedAttention(torch.nn.Module):
    """The forward of attention that is fused, in front of a class of transformers.

    Attributes:
        kind: what it is.
        rotate: RoPE as the class applies it.
        fusing: of this module.
    """

    kind: ClassVar[Kind]
    rotate: ClassVar[Any]
    fusing: Fusing

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the attention implementation too, which another process does not know."""
        super().__setstate__(state)
        register_transformers(self.fusing.implementation, recipe=self.fusing.recipe)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,  # what else transformers tells every attention module
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the attention as the class's own forward: [B, S, channels] to the same, and None."""
        attn: Any = self
        seen = what_is_seen(attention_mask)
        cache = next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)
        rope_cache = rope_to_fuse(attn, hidden_states, position_embeddings, seen, cache, kwargs)
        if rope_cache is None:
            found: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
                hidden_states, position_embeddings, attention_mask, **kwargs
            )
            return found
        q, k, v = (
            project(hidden_states).unflatten(2, (-1, attn.head_dim))
            for project in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        if self.kind.norms is None:
            prologue = QKPrologue(rope_cache=rope_cache)
        else:
            q, k, prologue = split_prologue(q, k, attn.q_norm, attn.k_norm, self.kind.norms, rope_cache)
        out = self.attend(q, k, v, seen, prologue)
        if cache is not None:
            # It gets what the class gives it, so that later tokens find it.
            k = k if prologue.k_norm is None else apply_norm(prologue.k_norm, k, prologue.layout)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            cache.update(self.rotate(k[:, :0], k, *position_embeddings)[1], v, attn.layer_idx)
        return attn.o_proj(out), None

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: VisibleKeys, prologue: QKPrologue
    ) -> torch.Tensor:
        """[B, S, heads, D] each, to [B, S, H * D]."""
        attn: Any = self
        q, k, v = autocast_inputs(q, k, v)
        out = attention(
            q,
            k,
            v,
            causal=mask.causal,
            sm_scale=attn.scaling,
            window=None if mask.left is None else (mask.left, 0),
            layout="bshd",
            recipe=self.fusing.recipe,
            **prologue.options(q, k),
        )
        return out.flatten(2)


def rope_to_fuse(
    attn: Any, hidden_states: torch.Tensor, position_embeddings: Any, mask: Any, cache: Any, kwargs: dict[str, Any]
) -> RopeCache | None:
    """The model's RoPE, where its first tokens attend to one another, without padding; None elsewhere."""
    B, S = hidden_states.shape[:2]
    if attn.config._attn_implementation != attn.fusing.implementation or not isinstance(mask, VisibleKeys):
        return None
    if (mask.M, mask.N, mask.spans) != (S, S, ((0, S),) * B):
        return None
    left = earlier_keys(getattr(attn, "sliding_window", None), S)
    if (left is not None and left != mask.left) or (mask.left is not None and mask.left < 0):
        return None
    if not all(changes_nothing(name, value) for name, value in kwargs.items() if name not in CACHES):
        return None
    if attn.training and getattr(attn, "attention_dropout", 0.0):
        return None
    if cache is not None:
        from helion_attn.integrations.transformers_cache import PagedCache

        if isinstance(cache, PagedCache) or cache.get_seq_length(attn.layer_idx) > 0:
            return None
    if position_embeddings[0].size(2) != attn.head_dim or leaves_to_pytorch(attn, hidden_states, mask):
        return None
    return get_rope_cache(rope_of, position_embeddings)


def leaves_to_pytorch(attn: Any, hidden_states: torch.Tensor, mask: VisibleKeys) -> bool:
    """Whether "auto" takes PyTorch's attention, which has no windows."""
    if not is_auto(attn.fusing.recipe) or mask.left is not None:
        return False
    config, shape = attn.config, hidden_states.shape[:2]
    # Views of as many numbers as a head has, in the shapes of Q and K.
    q, k = (
        hidden_states.as_strided((*shape, heads, attn.head_dim), (0, 0, 0, 1))
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    return prefers_pytorch(q, k, k, causal=mask.causal, sm_scale=attn.scaling)


@functools.cache
def fused_class(kind: Kind) -> type[FusedAttention]:
    """The class of fused attention of a kind, which `pickle` finds under its name in this module."""
    module = importlib.import_module(kind.module)
    members = {"kind": kind, "rotate": staticmethod(module.apply_rotary_pos_emb), "__module__": __name__}
    return type(f"Fused{kind.attention}", (FusedAttention, getattr(module, kind.attention)), members)


if not TYPE_CHECKING:  # a checker would take any name for one of this module's

    def __getattr__(name: str) -> type[FusedAttention]:
        """Return a class of fused attention, which is made on first use: it needs transformers."""
        for kind in KINDS:
            if name == f"Fused{kind.attention}":
                return fused_class(kind)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def kind_of(attn: torch.nn.Module) -> Kind | None:
    """Return the kind of a module; None if it has no fused forward here."""
    if isinstance(attn, FusedAttention):
        return attn.kind
    cls = type(attn)
    return next((kind for kind in KINDS if (cls.__module__, cls.__name__) == (kind.module, kind.attention)), None)


def set_class(attn: Any, cls: Any) -> None:
    """Give an attention module a class, and its forward to accelerate, where that has wrapped the one of before."""
    attn.__class__ = cls
    if "_old_forward" in vars(attn):
        attn._old_forward = MethodType(cls.forward, attn)


@reject_unknown_kwargs
def fuse_transformers(model: torch.nn.Module, *, recipe: Recipe | RecipeName | Auto = BALANCED) -> None:
    """Fuse norms of Q and K and RoPE of a Llama, Qwen3 or Gemma 3 of transformers (5.x) into quantising.

    `ha.fuse_transformers(model)` computes what `register_transformers` with the same recipe computes, but for the
    rounding of the model's own norms and RoPE, which is left out. It sets the model's attention implementation to one
    of its own, and the class of its attention modules. `ha.unfuse(model)` sets both back.

    A norm is called, and RoPE alone is fused, where the norm has hooks or parametrizations, is offloaded, or is of
    another class than the model's own. Models that accelerate has dispatched can be fused. Tables of RoPE are converted
    once a forward pass, but in `torch.inference_mode` and in a CUDA graph in every layer. Where each sequence is given
    positions, the host waits to see whether they are alike: once a forward pass, in `torch.inference_mode` in every
    layer. That tables are written to in place is seen, unless it is done through `.data` or NumPy.

    A prompt is fused: tokens that attend to one another, without padding, with or without a cache that is still empty.
    Keys go into the cache as the model makes them. All else runs what `register_transformers` registers, after the
    model's own norms and RoPE: tokens after those in a cache, prompts on a `transformers_cache`, padded batches,
    batches whose sequences have other positions than one another, and masks by scores.

    Args:
        model: from transformers, or a module that holds one.
        recipe: how the tensors become 8-bit numbers, a preset's name, or "auto", which is chosen as for tensors that
            are normalised and rotated; where it takes PyTorch's attention, nothing is fused.

    Raises:
        ImportError: transformers is not installed.
        TypeError, ValueError: `recipe` is no Recipe; `model` is no module, or has no attention that can be fused.
        NotImplementedError: attention of the model is not as in transformers 5.24, has another forward, or a softcap.

    The model's forward passes raise what those of `register_transformers` do.

    Example:
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        )
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
        ha.fuse_transformers(model)
        with torch.no_grad():
            out = model(torch.arange(16)[None]).logits
    """
    recipe = as_choice(recipe)
    check_module(model)
    implementation = f"helion_fp8_fused({recipe})"
    owners = owners_of(model)
    found: list[tuple[Any, Kind, Fusing]] = []
    for name, attn in model.named_modules():
        kind = kind_of(attn)
        if kind is None:
            continue
        what = f"model has {kind.attention} {name!r}"
        check_layout(what, attn, kind)
        if not any(owner.config is attn.config for owner in owners):
            raise ValueError(
                f"{what} without the model whose config it has; it must be, or hold, that transformers.PreTrainedModel"
            )
        original = attn.config._attn_implementation
        if isinstance(attn, FusedAttention) and original == attn.fusing.implementation:
            original = attn.fusing.original
        found.append((attn, kind, Fusing(recipe, implementation, original)))
    if not found:
        accepted = ", ".join(kind.attention for kind in KINDS[:-1])
        raise ValueError(
            f"model is a {type(model).__name__} without {accepted} or {KINDS[-1].attention}; it must have such modules"
        )
    register_transformers(implementation, recipe=recipe)
    for owner in owners:
        if any(owner.config is attn.config for attn, _, _ in found):
            owner.set_attn_implementation(implementation)
    for attn, kind, fusing in found:
        attn.fusing = fusing
        set_class(attn, fused_class(kind))


def unfuse_transformers(model: torch.nn.Module) -> None:
    """Undo `fuse_transformers`: classes and attention implementation as they were before."""
    found = [attn for attn in model.modules() if isinstance(attn, FusedAttention)]
    for owner in owners_of(model) if found else ():
        for attn in found:
            if owner.config is attn.config and attn.config._attn_implementation == attn.fusing.implementation:
                owner.set_attn_implementation(attn.fusing.original)
    for attn in found:
        del attn.fusing
        set_class(attn, class_of(attn.kind))


def owners_of(model: torch.nn.Module) -> list[Any]:
    """The models of transformers that a module is, or holds."""
    import transformers

    return [x for x in model.modules() if isinstance(x, transformers.PreTrainedModel)]


def class_of(kind: Kind) -> Any:
    """The class of transformers."""
    return getattr(importlib.import_module(kind.module), kind.attention)


def check_layout(what: str, attn: Any, kind: Kind) -> None:
    """Raise `NotImplementedError` for attention, `what` in words, that a fused forward would not compute."""
    import transformers

    own, needed = class_of(kind), (*ATTRIBUTES, *(("q_norm", "k_norm") if kind.norms is not None else ()))
    missing = [name for name in needed if not hasattr(attn, name)]
    if not hasattr(importlib.import_module(kind.module), "apply_rotary_pos_emb"):
        missing.append("apply_rotary_pos_emb")
    arguments = tuple(inspect.signature(own.forward).parameters)[1:5]
    of_version = f"transformers is {transformers.__version__}, and it must be as in 5.24"
    if missing:
        raise NotImplementedError(f"{what}, which has no {missing[0]}; {of_version}")
    if arguments[:3] != ARGUMENTS or arguments[3:] not in [(name,) for name in CACHES]:
        raise NotImplementedError(
            f"{what}, whose forward takes {', '.join(arguments)} and not {', '.join(ARGUMENTS)}, "
            f"{' or '.join(CACHES)}; {of_version}"
        )
    # accelerate keeps the forward that it wraps.
    wrapped = getattr(vars(attn).get("_old_forward"), "__func__", None)
    if "forward" in vars(attn) and wrapped not in (own.forward, FusedAttention.forward):
        raise NotImplementedError(
            f"{what}, whose forward is not that of its class; it must be, or be wrapped by hooks of accelerate alone"
        )
    if getattr(attn, "attn_logit_softcapping", None) is not None:
        raise NotImplementedError(
            f"{what}, whose attn_logit_softcapping is {attn.attn_logit_softcapping}; it must be None: use "
            f"register_transformers"
        )
