"""Attention modules of transformers whose norms of Q and K and RoPE are a part of quantising.

An attention function gets Q and K normalised and rotated, each step of which reads and writes them. The module has the
weights that do it, and a forward of its own in the place of the class's hands them on.
"""

from __future__ import annotations

import importlib
import inspect
from types import MethodType
from typing import Any, NamedTuple

import torch

from helion_attn.api import attention
from helion_attn.integrations.fused import Tables, prefers_pytorch
from helion_attn.integrations.transformers import VisibleKeys, changes_nothing, earlier_keys, register_transformers
from helion_attn.names import named
from helion_attn.types import BALANCED, Auto, Recipe, RecipeName, RMSNorm, Rope, as_choice, is_auto
from helion_attn.validate.dense import described

#: What models call the cache; older ones have the second name.
CACHES = ("cache", "past_key_values")

#: What a module's forward takes before its cache.
ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask")


class Kind(NamedTuple):
    """Attention that has a fused forward here.

    Attributes:
        model: what it is of.
        parts: what is fused, in words.
        module: of transformers, that has the classes.
        attention: its class.
        norm: the class of its norms by head; None if it has none.
        eps: what that calls its eps.
        adds_one: whether it multiplies by 1 + weight.
    """

    model: str
    parts: str
    module: str
    attention: str
    norm: str | None = None
    eps: str = ""
    adds_one: bool = False


KINDS = (
    Kind("Llama", "RoPE", "transformers.models.llama.modeling_llama", "LlamaAttention"),
    Kind(
        "Qwen3",
        "RoPE, and norms by head",
        "transformers.models.qwen3.modeling_qwen3",
        "Qwen3Attention",
        "Qwen3RMSNorm",
        "variance_epsilon",
    ),
    Kind(
        "Gemma 3",
        "RoPE, and norms by head",
        "transformers.models.gemma3.modeling_gemma3",
        "Gemma3Attention",
        "Gemma3RMSNorm",
        "eps",
        adds_one=True,
    ),
)

#: What all of them have.
ATTRIBUTES = ("config", "layer_idx", "head_dim", "scaling", "q_proj", "k_proj", "v_proj", "o_proj")


def rope_of(cos: torch.Tensor, sin: torch.Tensor) -> Rope | None:
    """Tables [B or 1, S, D] whose halves are alike; None where sequences have other positions than one another."""
    if cos.size(0) > 1 and (torch.compiler.is_compiling() or not (cos == cos[:1]).all() or not (sin == sin[:1]).all()):
        return None
    half = cos.size(2) // 2
    return Rope(cos[0, :, :half].clone(), sin[0, :, :half].clone())


class Fused:
    """The forward pass of one attention module.

    Attributes:
        attn: the module.
        kind: what it is.
        recipe: how the tensors become 8-bit numbers.
        implementation: the name of attention under which this is done. Under another the class's own forward runs.
        tables: of the model.
        cache_name: what the class calls the cache.
        rotate: RoPE as the class applies it.
    """

    def __init__(
        self, attn: Any, kind: Kind, recipe: Recipe | Auto, implementation: str, tables: Tables, module: Any
    ) -> None:
        self.attn, self.kind, self.recipe, self.implementation, self.tables = attn, kind, recipe, implementation, tables
        self.cache_name = tuple(inspect.signature(type(attn).forward).parameters)[1 + len(ARGUMENTS)]
        self.rotate = module.apply_rotary_pos_emb

    def norm(self, name: str) -> RMSNorm | None:
        """Of Q or K, None where there is none."""
        if self.kind.norm is None:
            return None
        norm = getattr(self.attn, name)
        return RMSNorm(1.0 + norm.weight.float() if self.kind.adds_one else norm.weight, getattr(norm, self.kind.eps))

    def rope(
        self, hidden_states: torch.Tensor, position_embeddings: Any, mask: Any, kwargs: dict[str, Any]
    ) -> Rope | None:
        """The model's RoPE, where its first tokens attend to one another, without padding; None elsewhere."""
        attn, (B, S) = self.attn, hidden_states.shape[:2]
        if attn.config._attn_implementation != self.implementation or not isinstance(mask, VisibleKeys):
            return None
        if (mask.M, mask.N, mask.spans) != (S, S, ((0, S),) * B):
            return None
        left = earlier_keys(getattr(attn, "sliding_window", None), S)
        if (left is not None and left != mask.left) or (mask.left is not None and mask.left < 0):
            return None
        if not all(changes_nothing(name, value) for name, value in kwargs.items() if name != self.cache_name):
            return None
        if attn.training and getattr(attn, "attention_dropout", 0.0):
            return None
        if (cache := kwargs.get(self.cache_name)) is not None:
            from helion_attn.integrations.transformers_cache import PagedCache

            if isinstance(cache, PagedCache) or cache.get_seq_length(attn.layer_idx) > 0:
                return None
        if position_embeddings[0].size(2) != attn.head_dim or self.leaves_to_pytorch(hidden_states, mask):
            return None
        ropes = self.tables.ropes(rope_of, position_embeddings)
        return None if ropes is None else ropes.whole

    def leaves_to_pytorch(self, hidden_states: torch.Tensor, mask: VisibleKeys) -> bool:
        """Whether "auto" takes PyTorch's attention, which has no windows."""
        if not is_auto(self.recipe) or mask.left is not None:
            return False
        config, shape = self.attn.config, hidden_states.shape[:2]
        # Views of as many numbers as a head has, in the shapes of Q and K.
        q, k = (
            hidden_states.as_strided((*shape, heads, self.attn.head_dim), (0, 0, 0, 1))
            for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        return prefers_pytorch(q, k, k, causal=mask.causal, sm_scale=self.attn.scaling)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,  # what else transformers tells every attention module
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the attention as the class's own forward: [B, S, channels] to the same, and None."""
        attn = self.attn
        rope = self.rope(hidden_states, position_embeddings, attention_mask, kwargs)
        if rope is None:
            found: tuple[torch.Tensor, torch.Tensor | None] = type(attn).forward(
                attn, hidden_states, position_embeddings, attention_mask, **kwargs
            )
            return found
        q, k, v = (
            project(hidden_states).unflatten(2, (-1, attn.head_dim))
            for project in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        out = self.attend(q, k, v, attention_mask, rope)
        if (cache := kwargs.get(self.cache_name)) is not None:
            # It gets what the class gives it, so that later tokens find it.
            turned = (k if self.kind.norm is None else attn.k_norm(k)).transpose(1, 2)
            turned = self.rotate(turned[:, :0], turned, *position_embeddings)[1]
            cache.update(turned, v.transpose(1, 2), attn.layer_idx)
        return attn.o_proj(out), None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: VisibleKeys, rope: Rope) -> torch.Tensor:
        """[B, S, heads, D] each, to [B, S, H * D]."""
        out = attention(
            q,
            k,
            v,
            causal=mask.causal,
            sm_scale=self.attn.scaling,
            window=None if mask.left is None else (mask.left, 0),
            layout="bshd",
            recipe=self.recipe,
            rope=rope,
            q_norm=self.norm("q_norm"),
            k_norm=self.norm("k_norm"),
        )
        return out.flatten(2)


@named
def fuse_transformers(model: torch.nn.Module, *, recipe: Recipe | RecipeName | Auto = BALANCED) -> None:
    """Fuse norms of Q and K and RoPE of a Llama, Qwen3 or Gemma 3 of transformers (5.x) into quantising.

    `ha.fuse_transformers(model)` computes what `register_transformers` with the same recipe computes, but for the
    rounding of the model's own norms and RoPE, which is left out. It sets the model's attention implementation to one
    of its own, and `model.set_attn_implementation("sdpa")`, or another, takes the fusing away.

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
        NotImplementedError: attention of the model is not as in transformers 5.24, or has another forward.

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
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {described(model)}; it must be a torch.nn.Module")
    import transformers

    implementation, tables = f"helion_fp8_fused({recipe})", Tables()
    owners = [x for x in model.modules() if isinstance(x, transformers.PreTrainedModel)]
    found: list[Fused] = []
    for name, attn in model.named_modules():
        for kind in KINDS:
            if type(attn).__name__ == kind.attention and type(attn).__module__ == kind.module:
                module = importlib.import_module(kind.module)
                if unlike := difference(attn, kind, module):
                    raise NotImplementedError(
                        f"model has {kind.attention} {name!r}, {unlike}; transformers is {transformers.__version__}, "
                        f"and of 5.24 is known what can be fused: register_transformers takes the others"
                    )
                if not any(owner.config is attn.config for owner in owners):
                    raise ValueError(
                        f"model has {kind.attention} {name!r} without the model whose config it has; it must be, or "
                        f"hold, that transformers.PreTrainedModel"
                    )
                found.append(Fused(attn, kind, recipe, implementation, tables, module))
    if not found:
        accepted = ", ".join(kind.attention for kind in KINDS[:-1])
        raise ValueError(
            f"model is a {type(model).__name__} without {accepted} or {KINDS[-1].attention}; it must have such modules"
        )
    register_transformers(implementation, recipe=recipe)
    for owner in owners:
        if any(owner.config is fused.attn.config for fused in found):
            owner.set_attn_implementation(implementation)
    for fused in found:
        fused.attn.forward = fused.forward


def difference(attn: Any, kind: Kind, module: Any) -> str | None:
    """Name the first part of an attention that `Fused` cannot take; None if it takes all."""
    names = ATTRIBUTES if kind.norm is None else (*ATTRIBUTES, "q_norm", "k_norm")
    missing = [name for name in names if not hasattr(attn, name)]
    missing += [name for name in ("apply_rotary_pos_emb", kind.norm) if name is not None and not hasattr(module, name)]
    if missing:
        return f"which has no {missing[0]}"
    forward = vars(attn).get("forward")
    if forward is not None and not (isinstance(forward, MethodType) and isinstance(forward.__self__, Fused)):
        return "whose forward is not that of its class"
    arguments = tuple(inspect.signature(type(attn).forward).parameters)[1:5]
    if arguments[:3] != ARGUMENTS or arguments[3:] not in [(name,) for name in CACHES]:
        return f"whose forward takes {', '.join(arguments)} and not {', '.join(ARGUMENTS)}, {' or '.join(CACHES)}"
    if getattr(attn, "attn_logit_softcapping", None) is not None:
        return f"whose attn_logit_softcapping is {attn.attn_logit_softcapping} and not None"
    for name in ("q_norm", "k_norm") if kind.norm is not None else ():
        norm = getattr(attn, name)
        of_class = type(norm).__name__ == kind.norm and hasattr(norm, kind.eps)
        if not of_class or tuple(norm.weight.shape) != (attn.head_dim,):
            return f"whose {name} is {norm} and no {kind.norm} of {attn.head_dim} channels"
    return None
