"""Attention processors for diffusers whose norms of Q and K and RoPE are a part of quantising.

A backend gets Q and K normalised and rotated, each step of which reads and writes them. A processor has the modules
that do it, and hands their weights on.
"""

from __future__ import annotations

import importlib
import inspect
import weakref
from typing import Any, NamedTuple

import torch

from helion_attn.api import attention
from helion_attn.names import named
from helion_attn.types import BALANCED, Recipe, RecipeName, RMSNorm, Rope, as_recipe
from helion_attn.validate.dense import described

#: Of Wan's text, behind those of an image, as diffusers has it.
TEXT_TOKENS = 512


class Tables:
    """A model's RoPE as `Rope` has it. All layers of a forward are given the same tensors."""

    def __init__(self) -> None:
        self._of: weakref.ref[torch.Tensor] | None = None
        self._rope: Rope | None = None

    def rope(self, rotary: tuple[torch.Tensor, torch.Tensor] | None) -> Rope | None:
        """The tables of cosines and sines in which every column comes twice in a row, as [S, D] or [1, S, 1, D]."""
        if rotary is None:
            return None
        if torch.compiler.is_compiling():
            return rope_of(*rotary)
        if self._of is None or self._of() is not rotary[0]:
            self._of, self._rope = weakref.ref(rotary[0]), rope_of(*rotary)
        return self._rope


def rope_of(cos: torch.Tensor, sin: torch.Tensor) -> Rope:
    """Every second column."""
    cos, sin = (x.float().view(-1, x.size(-1))[:, ::2].contiguous() for x in (cos, sin))
    return Rope(cos, sin, interleaved=True)


def norm_of(module: torch.nn.RMSNorm, x: torch.Tensor) -> RMSNorm:
    """What `module` does to x."""
    return RMSNorm(module.weight, torch.finfo(x.dtype).eps if module.eps is None else module.eps)


class Processor:
    """What the processors share.

    Attributes:
        recipe: how the tensors become 8-bit numbers.
        tables: of the model.
        module: diffusers' module of the model.
    """

    def __init__(self, recipe: Recipe, tables: Tables, module: Any) -> None:
        self.recipe, self.tables, self.module = recipe, tables, module

    @property
    def _attention_backend(self) -> None:
        """diffusers' backend: none is asked."""
        return None

    @_attention_backend.setter
    def _attention_backend(self, backend: object) -> None:
        if backend is not None:
            raise NotImplementedError(
                f"helion_attn: the backend is {backend}; a model that fuse_diffusers was given has none: set "
                f"diffusers' own processors first"
            )

    @property
    def _parallel_config(self) -> None:
        """diffusers' context parallelism: there is none."""
        return None

    @_parallel_config.setter
    def _parallel_config(self, config: object) -> None:
        if config is not None:
            raise NotImplementedError(
                "helion_attn: context parallelism is enabled; a model that fuse_diffusers was given has none: use the "
                "backend of register_diffusers"
            )

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_norm: torch.nn.RMSNorm | None,
        k_norm: torch.nn.RMSNorm | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """[B, S, H, D] each, to [B, S, H * D_v]."""
        out = attention(
            q,
            k,
            v,
            layout="bshd",
            recipe=self.recipe,
            q_norm=None if q_norm is None else norm_of(q_norm, q),
            k_norm=None if k_norm is None else norm_of(k_norm, k),
            rope=self.tables.rope(rotary),
        )
        return out.flatten(2, 3)


def check_no_mask(mask: object) -> None:
    """Processors take none."""
    if mask is not None:
        raise NotImplementedError(
            f"helion_attn: attention_mask is {described(mask)}; in a model that fuse_diffusers was given it must be "
            f"None: use the backend of register_diffusers"
        )


class WanProcessor(Processor):
    """In place of `WanAttnProcessor`: norms over all heads, in self- and cross-attention."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attention of [B, S, channels] to itself or to what is encoded."""
        check_no_mask(attention_mask)
        image = None
        if attn.add_k_proj is not None and encoder_hidden_states is not None:
            if rotary_emb is not None:
                raise NotImplementedError("helion_attn: rotary_emb is given for attention to an image; it must be None")
            tokens = encoder_hidden_states.size(1) - TEXT_TOKENS
            image, encoder_hidden_states = encoder_hidden_states[:, :tokens], encoder_hidden_states[:, tokens:]
        q, k, v = (
            x.unflatten(2, (attn.heads, -1))
            for x in self.module._get_qkv_projections(attn, hidden_states, encoder_hidden_states)
        )
        out = self.attend(q, k, v, attn.norm_q, attn.norm_k, rotary_emb)
        if image is not None:
            k, v = (x.unflatten(2, (attn.heads, -1)) for x in self.module._get_added_kv_projections(attn, image))
            out = out + self.attend(q, k, v, attn.norm_q, attn.norm_added_k, None)
        for module in attn.to_out:
            out = module(out)
        return out


class FluxProcessor(Processor):
    """In place of `FluxAttnProcessor`: norms by head, in blocks of one stream.

    In blocks of two the streams have weights of their own: the model's norms run as they are, and RoPE alone is fused.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of [B, S, channels] to itself, and of both streams together."""
        check_no_mask(attention_mask)
        projected = self.module._get_qkv_projections(attn, hidden_states, encoder_hidden_states)
        q, k, v = (x.unflatten(-1, (-1, attn.head_dim)) for x in projected[:3])
        norms = attn.norm_q, attn.norm_k
        if attn.added_kv_proj_dim is not None:
            text_q, text_k, text_v = (x.unflatten(-1, (-1, attn.head_dim)) for x in projected[3:])
            q = torch.cat([attn.norm_added_q(text_q), attn.norm_q(q)], 1)
            k = torch.cat([attn.norm_added_k(text_k), attn.norm_k(k)], 1)
            v = torch.cat([text_v, v], 1)
            norms = None, None
        out = self.attend(q, k, v, *norms, image_rotary_emb)
        if encoder_hidden_states is None:
            return out
        text, out = out.tensor_split([encoder_hidden_states.size(1)], 1)
        out = out.contiguous()
        for module in attn.to_out:
            out = module(out)
        return out, attn.to_add_out(text.contiguous())


class Fused(NamedTuple):
    """A kind of attention that has a processor here.

    Attributes:
        module: of diffusers, that has its classes.
        attention: the name of its module.
        processor: the name of its own processor.
        make: what takes its place.
        functions: what of `module` that calls.
        arguments: of the own processor's call.
        attributes: what it uses of the attention.
        over_heads: whether the norms' weights are of all heads.
    """

    module: str
    attention: str
    processor: str
    make: type[Processor]
    functions: tuple[str, ...]
    arguments: tuple[str, ...]
    attributes: tuple[str, ...]
    over_heads: bool


FUSED = (
    Fused(
        "diffusers.models.transformers.transformer_wan",
        "WanAttention",
        "WanAttnProcessor",
        WanProcessor,
        ("_get_qkv_projections", "_get_added_kv_projections"),
        ("attn", "hidden_states", "encoder_hidden_states", "attention_mask", "rotary_emb"),
        ("heads", "inner_dim", "norm_q", "norm_k", "add_k_proj", "to_out"),
        over_heads=True,
    ),
    Fused(
        "diffusers.models.transformers.transformer_flux",
        "FluxAttention",
        "FluxAttnProcessor",
        FluxProcessor,
        ("_get_qkv_projections",),
        ("attn", "hidden_states", "encoder_hidden_states", "attention_mask", "image_rotary_emb"),
        ("heads", "head_dim", "inner_dim", "norm_q", "norm_k", "added_kv_proj_dim"),
        over_heads=False,
    ),
)


@named
def fuse_diffusers(model: torch.nn.Module, *, recipe: Recipe | RecipeName = BALANCED) -> None:
    """Fuse norms and RoPE of a Wan or Flux transformer of diffusers (0.42) into quantising: new attention processors.

    `ha.fuse_diffusers(pipeline.transformer)` computes what the backend of `register_diffusers` computes, but for the
    rounding of the model's own norms and RoPE, which is left out. All of Wan's norms are fused, also those of
    cross-attention; of Flux those of its blocks of one stream, and in blocks of two, whose streams have weights of
    their own, RoPE alone. The processors ask no backend, and take neither masks nor diffusers' context parallelism:
    with these they raise. `model.set_attn_processor(WanAttnProcessor())`, or Flux's, takes them away.

    Args:
        model: `pipeline.transformer`, or another module that holds such attention.
        recipe: how the tensors become 8-bit numbers, or a preset's name.

    Raises:
        TypeError, ValueError: `recipe` is no Recipe; `model` is no module, or has no attention that can be fused.
        NotImplementedError: attention of the model is not as in diffusers 0.42, or has another processor.

    Example:
        import diffusers

        model = diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=32, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=1
        )
        ha.fuse_diffusers(model)
    """
    recipe = as_recipe(recipe)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {described(model)}; it must be a torch.nn.Module")
    import diffusers

    tables, found = Tables(), []
    for name, attn in model.named_modules():
        for kind in FUSED:
            if type(attn).__name__ == kind.attention and type(attn).__module__ == kind.module:
                module = importlib.import_module(kind.module)
                if unlike := difference(attn, kind, module):
                    raise NotImplementedError(
                        f"model has {kind.attention} {name!r}, {unlike}; diffusers is {diffusers.__version__}, and it "
                        f"must be as in 0.42"
                    )
                found.append((attn, kind.make(recipe, tables, module)))
    if not found:
        accepted = " or ".join(kind.attention for kind in FUSED)
        raise ValueError(f"model is a {type(model).__name__} without {accepted}; it must have such modules")
    for attn, processor in found:
        attn.set_processor(processor)


def difference(attn: Any, kind: Fused, module: Any) -> str | None:
    """What of an attention is not as its processor here takes it to be."""
    missing = [name for name in kind.attributes if not hasattr(attn, name)]
    missing += [name for name in (*kind.functions, kind.processor) if not hasattr(module, name)]
    if missing:
        return f"which has no {missing[0]}"
    own = getattr(module, kind.processor)
    processor = type(attn.processor)
    if processor not in (own, kind.make):
        return f"whose processor is a {processor.__name__} and not a {kind.processor}"
    arguments = tuple(inspect.signature(own.__call__).parameters)[1:]
    if arguments != kind.arguments:
        return f"whose processor takes {', '.join(arguments)} and not {', '.join(kind.arguments)}"
    channels = attn.inner_dim if kind.over_heads else attn.inner_dim // attn.heads
    for name in ("norm_q", "norm_k"):
        norm = getattr(attn, name)
        if not isinstance(norm, torch.nn.RMSNorm) or norm.weight is None or tuple(norm.weight.shape) != (channels,):
            return f"whose {name} is {norm} and no RMSNorm of {channels} channels with a weight"
    return None
