"""Attention processors for diffusers whose norms of Q and K and RoPE are a part of quantising.

A backend gets Q and K normalised and rotated, each step of which reads and writes them. A processor has the modules
that do it, and hands their weights on.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from helion_attn.integrations.diffusers import attend, attention_layers, visible_of
from helion_attn.integrations.diffusers_schedule import (
    BoundSchedule,
    Schedule,
    bound_schedule,
    check_eager,
    check_schedule,
    choice_of,
)
from helion_attn.integrations.fused.qk_prologue import QKPrologue, fusable_norm, get_rope_cache, split_prologue
from helion_attn.integrations.inputs import autocast_inputs, check_module
from helion_attn.names import reject_unknown_kwargs
from helion_attn.types import BALANCED, Auto, Recipe, RecipeName, Rope, as_choice, unchecked_rope

if TYPE_CHECKING:
    from helion_attn.integrations.diffusers_schedule import ScheduleFunction

#: Of Wan's text, behind those of an image, as diffusers has it.
TEXT_TOKENS = 512

#: What an error says of context parallelism.
NOT_PARALLEL = "a model that fuse_diffusers was given has none: use the backend of register_diffusers"

Rotary = tuple[torch.Tensor, torch.Tensor]


def rope_of(cos: torch.Tensor, sin: torch.Tensor, more: int = 0) -> Rope:
    """Make a Rope of tables [S, D] or [1, S, 1, D] that have every column twice in a row.

    `more` tokens follow that are not rotated.
    """
    cos, sin = (x.float().view(-1, x.size(-1))[:, ::2] for x in (cos, sin))
    if more:
        cos, sin = (torch.nn.functional.pad(x, (0, 0, 0, more), value=at) for x, at in ((cos, 1.0), (sin, 0.0)))
    return unchecked_rope(cos.contiguous(), sin.contiguous(), interleaved=True)


def rope_of_complex(*tables: torch.Tensor) -> Rope:
    """Make a Rope of complex tables [S, D / 2], joined along S."""
    angles = torch.cat(tables)
    return unchecked_rope(angles.real.float().contiguous(), angles.imag.float().contiguous(), interleaved=True)


class Processor:
    """The common part of all processors.

    Attributes:
        recipe: how the tensors become 8-bit numbers.
        own: the processor of diffusers in whose place it is.
        functions: of diffusers, by name.
        layer: the number of the attention.
        schedule: with its steps.
    """

    def __init__(
        self,
        recipe: Recipe | Auto | None = None,
        own: Any = None,
        functions: dict[str, Callable[..., Any]] | None = None,
        layer: int = 0,
        schedule: BoundSchedule | None = None,
    ) -> None:
        if recipe is None:
            # diffusers makes processors so, for example when it loads an IP-Adapter.
            raise TypeError(
                f"helion_attn: a {type(self).__name__} is made without a recipe; fuse_diffusers makes it with one: "
                f"call helion_attn.unfuse(model) before you load an IP-Adapter or set other processors, and then use "
                f"the backend of register_diffusers"
            )
        self.recipe, self.own, self.functions = recipe, own, {} if functions is None else functions
        self.layer, self.schedule = layer, schedule

    @property
    def _attention_backend(self) -> None:
        """diffusers' backend: none is asked."""
        return None

    @_attention_backend.setter
    def _attention_backend(self, backend: object) -> None:
        if backend is not None:
            raise NotImplementedError(
                f"helion_attn: the backend is {backend}; a model that fuse_diffusers was given has none: "
                f"call helion_attn.unfuse(model) first"
            )

    @property
    def _parallel_config(self) -> None:
        """diffusers' context parallelism: there is none."""
        return None

    @_parallel_config.setter
    def _parallel_config(self, config: object) -> None:
        if config is not None:
            raise NotImplementedError(f"helion_attn: context parallelism is enabled; {NOT_PARALLEL}")

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        prologue: QKPrologue,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, S, H, D] each, to [B, S, H * D_v]."""
        q, k, v = autocast_inputs(q, k, v)
        B, M, H, N = *q.shape[:3], k.size(1)
        visible = visible_of(attention_mask, B, H, M, N, "attention_mask")
        recipe, pattern = self.recipe, None
        if self.schedule is not None:
            check_eager()
            recipe, pattern = choice_of(self.schedule, self.layer, recipe, q, k)
        out, _ = attend(q, k, v, recipe=recipe, visible=visible, pattern=pattern, prologue=prologue)
        return out.flatten(2, 3)


class WanProcessor(Processor):
    """In place of `WanAttnProcessor`: norms over all heads, in self- and cross-attention."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """Attention of [B, S, channels] to itself or to what is encoded."""
        image = None
        if attn.add_k_proj is not None and encoder_hidden_states is not None:
            if rotary_emb is not None:
                raise NotImplementedError("helion_attn: rotary_emb is given for attention to an image; it must be None")
            tokens = encoder_hidden_states.size(1) - TEXT_TOKENS
            image, encoder_hidden_states = encoder_hidden_states[:, :tokens], encoder_hidden_states[:, tokens:]
        q, k, v = (
            x.unflatten(2, (attn.heads, -1))
            for x in self.functions["_get_qkv_projections"](attn, hidden_states, encoder_hidden_states)
        )
        rope_cache = get_rope_cache(rope_of, rotary_emb)
        q, k, prologue = split_prologue(q, k, attn.norm_q, attn.norm_k, "bsc", rope_cache)
        out = self.attend(q, k, v, prologue, attention_mask)
        if image is not None:
            k, v = (x.unflatten(2, (attn.heads, -1)) for x in self.functions["_get_added_kv_projections"](attn, image))
            k, k_norm = fusable_norm(attn.norm_added_k, k, "bsc")
            out = out + self.attend(q, k, v, prologue._replace(k_norm=k_norm, rope_cache=None))
        return project_out(attn, out)


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
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of [B, S, channels] to itself, and of both streams together."""
        projected = self.functions["_get_qkv_projections"](attn, hidden_states, encoder_hidden_states)
        q, k, v = (x.unflatten(-1, (-1, attn.head_dim)) for x in projected[:3])
        rope_cache = get_rope_cache(rope_of, image_rotary_emb)
        prologue = QKPrologue(rope_cache=rope_cache)
        if attn.added_kv_proj_dim is None:
            q, k, prologue = split_prologue(q, k, attn.norm_q, attn.norm_k, "bshd", rope_cache)
        else:
            text = [x.unflatten(-1, (-1, attn.head_dim)) for x in projected[3:]]
            q, k, v = join_streams(attn, text, [q, k, v], text_first=True)
        out = self.attend(q, k, v, prologue, attention_mask)
        if encoder_hidden_states is None:
            return out
        return split_streams(attn, out, encoder_hidden_states.size(1))


class QwenImageProcessor(Processor):
    """In place of `QwenDoubleStreamAttnProcessor2_0`: all of its blocks have two streams, as some of Flux."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of image and text, [B, S, channels] each, together."""
        if encoder_hidden_states is None or attention_mask is not None:
            raise ValueError(
                "helion_attn: Qwen-Image's attention needs encoder_hidden_states, and attention_mask must be None: "
                "encoder_hidden_states_mask says what of the text is padding"
            )
        if encoder_hidden_states_mask is not None:
            # [B, 1, 1, text and image]
            attention_mask = torch.nn.functional.pad(
                encoder_hidden_states_mask.bool(), (0, hidden_states.size(1)), value=True
            )[:, None, None]
        image, text = project_image(attn, hidden_states), project_text(attn, encoder_hidden_states)
        q, k, v = join_streams(attn, text, image, text_first=True)
        rope_cache = get_rope_cache(rope_of_complex, None if image_rotary_emb is None else image_rotary_emb[::-1])
        out = self.attend(q, k, v, QKPrologue(rope_cache=rope_cache), attention_mask)
        return split_streams(attn, out, encoder_hidden_states.size(1))


class HunyuanVideoProcessor(Processor):
    """In place of `HunyuanVideoAttnProcessor2_0`: norms as in Flux; the text comes last, and is not rotated."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of a video, [B, S, channels], to itself, and together with a text."""
        text = encoder_hidden_states
        rope_cache = get_rope_cache(rope_of, image_rotary_emb, 0 if text is None else text.size(1))
        prologue = QKPrologue(rope_cache=rope_cache)
        if attn.add_q_proj is not None and text is not None:
            q, k, v = join_streams(attn, project_text(attn, text), project_image(attn, hidden_states), text_first=False)
        else:
            q, k, v = project_image(attn, hidden_states if text is None else torch.cat([hidden_states, text], 1))
            q, k, prologue = split_prologue(q, k, attn.norm_q, attn.norm_k, "bshd", rope_cache)
        out = self.attend(q, k, v, prologue, attention_mask)
        if text is None:
            return out, None
        out, out_text = out.tensor_split([hidden_states.size(1)], 1)
        if getattr(attn, "to_out", None) is not None:
            out = project_out(attn, out)
        if getattr(attn, "to_add_out", None) is not None:
            out_text = attn.to_add_out(out_text)
        return out, out_text


def project_image(attn: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Return Q, K and V [B, S, heads, D] of an image or a video [B, S, channels]."""
    return [project(x).unflatten(2, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v)]


def project_text(attn: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Return Q, K and V [B, S, heads, D] of a text [B, S, channels] that is a stream of its own."""
    projections = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
    return [project(x).unflatten(2, (attn.heads, -1)) for project in projections]


def join_streams(
    attn: Any, text: list[torch.Tensor], image: list[torch.Tensor], *, text_first: bool
) -> list[torch.Tensor]:
    """Return Q, K and V of two streams, normalised by the model: their weights differ."""
    norms = ((attn.norm_added_q, attn.norm_q), (attn.norm_added_k, attn.norm_k), (None, None))
    joined = []
    for *streams, stream_norms in zip(text, image, norms, strict=True):
        both = [x if norm is None else norm(x) for x, norm in zip(streams, stream_norms, strict=True)]
        joined.append(torch.cat(both if text_first else both[::-1], 1))
    return joined


def project_out(attn: Any, out: torch.Tensor) -> torch.Tensor:
    """Return the attention's output projection of out [B, S, H * D]."""
    for module in attn.to_out:
        out = module(out)
    return out


def split_streams(attn: Any, out: torch.Tensor, text_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output projections of image and text, whose tokens come first in out [B, S, H * D]."""
    text, image = out.tensor_split([text_tokens], 1)
    return project_out(attn, image.contiguous()), attn.to_add_out(text.contiguous())


#: What most processors are called with.
ARGUMENTS = ("attn", "hidden_states", "encoder_hidden_states", "attention_mask", "image_rotary_emb")


class Kind(NamedTuple):
    """Attention that has a processor here.

    Attributes:
        model: what it is of.
        parts: what is fused, in words.
        module: of diffusers, that has its classes.
        classes: of the attention's module, or of the blocks that hold it.
        processor: the name of its own processor.
        make: what takes its place.
        attributes: what it uses of the attention.
        child: where blocks hold it; empty for the attention's own class.
        functions: what of `module` that calls.
        arguments: of the own processor's call.
    """

    model: str
    parts: str
    module: str
    classes: tuple[str, ...]
    processor: str
    make: type[Processor]
    attributes: tuple[str, ...]
    child: str = ""
    functions: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ARGUMENTS


#: What all processors use, and those of two streams.
OF_ALL = ("heads", "inner_dim", "norm_q", "norm_k")
OF_STREAMS = (
    *("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k"),
    "to_add_out",
)

FUSED = (
    Kind(
        "Wan",
        "RoPE, and norms over all heads, also those of cross-attention",
        "diffusers.models.transformers.transformer_wan",
        ("WanAttention",),
        "WanAttnProcessor",
        WanProcessor,
        (*OF_ALL, "add_k_proj", "to_out"),
        functions=("_get_qkv_projections", "_get_added_kv_projections"),
        arguments=(*ARGUMENTS[:-1], "rotary_emb"),
    ),
    Kind(
        "Flux",
        "RoPE, and norms by head in blocks of one stream",
        "diffusers.models.transformers.transformer_flux",
        ("FluxAttention",),
        "FluxAttnProcessor",
        FluxProcessor,
        (*OF_ALL, "head_dim", "added_kv_proj_dim"),
        functions=("_get_qkv_projections",),
    ),
    Kind(
        "Qwen-Image",
        "RoPE; all blocks have two streams",
        "diffusers.models.transformers.transformer_qwenimage",
        ("QwenImageTransformerBlock",),
        "QwenDoubleStreamAttnProcessor2_0",
        QwenImageProcessor,
        (*OF_ALL, *OF_STREAMS, "to_out"),
        child="attn",
        arguments=(*ARGUMENTS[:3], "encoder_hidden_states_mask", *ARGUMENTS[3:]),
    ),
    Kind(
        "HunyuanVideo",
        "RoPE, and norms by head in blocks of one stream",
        "diffusers.models.transformers.transformer_hunyuan_video",
        (
            *("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock"),
            *("HunyuanVideoTokenReplaceTransformerBlock", "HunyuanVideoTokenReplaceSingleTransformerBlock"),
        ),
        "HunyuanVideoAttnProcessor2_0",
        HunyuanVideoProcessor,
        (*OF_ALL, *OF_STREAMS),
        child="attn",
    ),
)


@reject_unknown_kwargs
def fuse_diffusers(
    model: torch.nn.Module,
    *,
    recipe: Recipe | RecipeName | Auto = BALANCED,
    schedule: Schedule | ScheduleFunction | None = None,
    scheduler: Any = None,
) -> None:
    """Fuse norms of Q and K and RoPE of a transformer of diffusers (0.42) into quantising: new attention processors.

    It takes Wan, Flux, Qwen-Image and HunyuanVideo. `ha.fuse_diffusers(pipeline.transformer)` computes what the backend
    of `register_diffusers` computes, but for the rounding of the model's own norms and RoPE, which is left out. RoPE is
    fused, and so are all norms of Wan, also those of cross-attention, and the norms of blocks of Flux and HunyuanVideo
    that have one stream. In blocks of two streams, as all of Qwen-Image's are, each stream's norm has a weight of its
    own, and runs as it is.

    Masks that leave each sequence its first keys, as HunyuanVideo's padding does, are fused too; with all others, such
    as Qwen-Image's padding, norms and RoPE come before. The host reads masks in every layer.

    The processors ask no backend, and raise for one and for diffusers' context parallelism. `ha.unfuse(model)` sets
    the processors of before, as an IP-Adapter needs it. A norm is called, and the rest fused, where the norm has hooks
    or parametrizations, is offloaded, or is no RMSNorm with a weight and no bias. Tables of RoPE are converted as
    `fuse_transformers` says.

    Under `torch.autocast` inputs are cast as `scaled_dot_product_attention` does it.

    Args:
        model: `pipeline.transformer`, or another module that holds such attention.
        recipe: how the tensors become 8-bit numbers, a preset's name, or "auto", which is chosen as for tensors that
            are normalised and rotated; where it takes PyTorch's attention, norms and RoPE come before.
        schedule: as `register_diffusers` has it, with the same steps and layers; q and k are not normalised or rotated
            yet.
        scheduler: as `register_diffusers` has it.

    Raises:
        TypeError, ValueError: `recipe` is no Recipe; `model` is no module, or has no attention that can be fused;
            `schedule` and `scheduler` are not as `register_diffusers` has them.
        NotImplementedError: attention of the model is not as in diffusers 0.42, has another processor, or context
            parallelism.

    Example:
        import diffusers

        model = diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=32, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=1
        )
        ha.fuse_diffusers(model)
    """
    recipe = as_choice(recipe)
    check_module(model)
    check_schedule(schedule)
    bound = bound_schedule(schedule, scheduler)
    found = []
    for name, attn, kind in attentions(model):
        module = importlib.import_module(kind.module)
        check_layout(f"model has {type(attn).__name__} {name!r}", attn, kind, module)
        found.append((name, attn, kind, module))
    if not found:
        accepted = ", ".join(kind.model for kind in FUSED[:-1])
        raise ValueError(
            f"model is a {type(model).__name__} without attention of {accepted} or {FUSED[-1].model}; it must have it"
        )
    unfuse_diffusers(model)
    layers = attention_layers(model)
    for _, attn, kind, module in found:
        functions = {function: getattr(module, function) for function in kind.functions}
        attn.set_processor(kind.make(recipe, attn.processor, functions, layers[attn], bound))


def attentions(model: torch.nn.Module) -> Iterator[tuple[str, Any, Kind]]:
    """All attention of a model that has a processor here: its name, the module, and what it is."""
    for name, holder in model.named_modules():
        for kind in FUSED:
            if type(holder).__name__ in kind.classes and type(holder).__module__ == kind.module:
                if not kind.child:
                    yield name, holder, kind
                else:
                    yield f"{name}.{kind.child}".lstrip("."), getattr(holder, kind.child, None), kind


def check_layout(what: str, attn: Any, kind: Kind, module: Any) -> None:
    """Raise `NotImplementedError` for attention, `what` in words, that its processor here would not compute."""
    import diffusers

    of_version = f"diffusers is {diffusers.__version__}, and it must be as in 0.42"
    missing = [name for name in ("processor", *kind.attributes) if not hasattr(attn, name)]
    missing += [name for name in (*kind.functions, kind.processor) if not hasattr(module, name)]
    if missing:
        raise NotImplementedError(f"{what}, which has no {missing[0]}; {of_version}")
    own, processor = getattr(module, kind.processor), attn.processor
    arguments = tuple(inspect.signature(own.__call__).parameters)[1:]
    if arguments != kind.arguments:
        raise NotImplementedError(
            f"{what}, whose processor takes {', '.join(arguments)} and not {', '.join(kind.arguments)}; {of_version}"
        )
    if type(processor) not in (own, kind.make):
        raise NotImplementedError(
            f"{what}, whose processor is a {type(processor).__name__}; it must be a {kind.processor}: use the backend "
            f"of register_diffusers"
        )
    if processor._parallel_config is not None:
        raise NotImplementedError(f"{what}, and context parallelism is enabled; {NOT_PARALLEL}")


def unfuse_diffusers(model: torch.nn.Module) -> None:
    """Undo `fuse_diffusers`: the processors of before."""
    for module in model.modules():
        processor: Any = getattr(module, "processor", None)
        if isinstance(processor, Processor):
            module.set_processor(processor.own)  # type: ignore[operator]
