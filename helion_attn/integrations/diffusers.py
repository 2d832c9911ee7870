"""Attention for diffusers: a backend under a name, for `set_attention_backend` and `attention_backend`.

diffusers (0.42) lists its backends in an Enum and a registry, and lets nobody extend them: `register_diffusers` adds a
member and an entry at run time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from helion_attn.api import attention
from helion_attn.integrations.diffusers_schedule import (
    BoundSchedule,
    Layers,
    Schedule,
    bound_schedule,
    check_schedule,
    choice_of,
)
from helion_attn.integrations.fused.qk_prologue import QKPrologue, prefers_pytorch
from helion_attn.integrations.graphs import graph_break
from helion_attn.integrations.inputs import check_arguments, check_module, check_name, check_tensors, checked_inputs
from helion_attn.integrations.mask_tensors import ACCEPTED, Visible, attend_to_visible, check_visible, read_mask
from helion_attn.integrations.rules import NO_DROPOUT, Rule, is_none_or_tensor
from helion_attn.masks import Reordered
from helion_attn.masks.blocks import as_block_mask
from helion_attn.names import reject_unknown_kwargs
from helion_attn.types import BALANCED, Auto, Recipe, RecipeName, as_choice, is_auto, preset_of
from helion_attn.validate.dense import check_flag, described

if TYPE_CHECKING:
    from helion_attn.integrations.diffusers_schedule import Pattern, ScheduleFunction

#: What the backend accepts of what diffusers passes; the values of a mask are looked at later.
RULES = (
    Rule("attn_mask", is_none_or_tensor, f"None, or a tensor: {ACCEPTED}"),
    NO_DROPOUT,
)


def skips_scores(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether a hook of diffusers asks for the values instead of attention of q and k [B, S, heads, D].

    `LayerSkipConfig(skip_attention_scores=True)` does, for perturbed attention guidance, by a mode that waits for
    PyTorch's attention.
    """
    if torch.compiler.is_compiling() or q.size(1) != k.size(1):
        return False
    modes = torch.overrides._get_current_function_mode_stack()
    return any(type(mode).__name__ == "AttentionScoreSkipFunctionMode" for mode in modes)


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

#: The path of a module up to its last index in a list.
BLOCK = re.compile(r"(?:.*\.)?\d+(?=\.|$)")

#: Of Q and K that are normalised and rotated.
NO_PROLOGUE = QKPrologue()

#: What the registry must have: its interface is diffusers' own.
NEEDED = ("_backends", "_constraints", "_supported_arg_names", "_supports_context_parallel", "register")


@reject_unknown_kwargs
def register_diffusers(
    name: str = "helion_fp8",
    *,
    recipe: Recipe | RecipeName | Auto = BALANCED,
    schedule: Schedule | ScheduleFunction | None = None,
    models: torch.nn.Module | Sequence[torch.nn.Module] = (),
    scheduler: Any = None,
) -> None:
    """Add FP8 attention to diffusers' backends (0.42).

    `model.set_attention_backend(name)`, `pipeline.transformer.set_attention_backend(name)` and
    `with diffusers.attention_backend(name):` then run it. Padding masks, such as those of HunyuanVideo and Qwen-Image,
    become packed sequences, and other masks what `helion_attn.sdpa` says. diffusers' context parallelism, ring and
    Ulysses, takes the backend too: a part of a ring quantises its own keys.

    diffusers asks no backend in models whose processors call PyTorch's attention themselves, and does not say so; run
    these inside `helion_attn.sdpa()`, whatever backend is set: Stable Diffusion 1 and 2, SDXL and other UNets, PixArt,
    DiT, Latte, Stable Diffusion 3, CogVideoX, ConsisID, CogView3Plus, CogView4, HunyuanDiT, Sana, SanaVideo, SanaWM,
    Allegro, AuraFlow, EasyAnimate, HiDream, Lumina, Lumina2, Mochi, OmniGen, Stable Audio, and most autoencoders.

    Under `torch.autocast` inputs are cast as `scaled_dot_product_attention` does it.

    `schedule(step, layer, q, k)` gives what a call takes in the place of `recipe` and dense attention: a preset, by
    name or as a Recipe; a mask, which is a `BlockMask`, PyTorch's, or a `masks.Reordered`, whose order q, k and v are
    moved to, and the result back; a tuple of preset and mask; or None for neither. For example
    `lambda step, layer, q, k: "bf16" if step < 3 or layer < 2 or layer >= 38 else None` keeps the first steps and the
    first and last two of 40 layers in 16 bits.

    The step is how often `scheduler.step` was called in this generation, as the pipeline's callbacks count. It begins
    at 0 also from an image. Guidance, which calls the model twice, does not change it. A scheduler of second order,
    such as Heun's, counts each of its two calls. A loop without a scheduler gives a `helion_attn.Schedule` its steps.

    A layer is a block of the model, such as `blocks.3`, in the order of `model.named_modules()`, in which a refiner may
    come first. Self- and cross-attention of a block have one number. Hooks on the attention modules of `models` know
    which runs, so that calls which a cache skips change no number. Blocks that never ask a backend have none.

    Keys that `attn_mask` hides stay hidden by a mask if they are the last ones of all sequences alike, as padded text
    is. In torch.compile and in CUDA graphs a schedule raises.

    Args:
        name: of the backend, in lower case. Registering a name again replaces it, and its hooks.
        recipe: how the tensors become 8-bit numbers, a preset's name, or "auto": `register_diffusers(recipe="auto")`
            leaves to PyTorch's attention what that is faster at, as `helion_attn.attention` says.
        schedule: called with ints and views of q [B, H, M, D] and k [B, H_kv, N, D]; or a `helion_attn.Schedule`.
        models: `pipeline.transformer`, or several that take turns, each with layers from 0. Copies of them follow the
            schedule too. Calls from other models, and from loaded ones, have none.
        scheduler: `pipeline.scheduler`, which has a `step_index`; with a function as the schedule. After the pipeline
            is given another, register again.

    Raises:
        ImportError: diffusers is not installed.
        TypeError, ValueError: `recipe` is no Recipe; `name` is no name in lower case, or one of diffusers' own;
            `schedule` without `models`, or the other way round; a model without such attention; a function as
            `schedule` without `scheduler`; a scheduler without `step_index`.
        NotImplementedError: this diffusers keeps its backends in another way.

    The models' forward passes raise what `helion_attn.attention` does, NotImplementedError for what
    docs/integrations.md lists as not supported, and RuntimeError outside of the steps of a `helion_attn.Schedule` and
    where the scheduler is in no generation. To warm up, call the pipeline, or `scheduler.set_timesteps` first.

    Example:
        ha.register_diffusers(recipe="auto")  # then pipeline.transformer.set_attention_backend("helion_fp8")
    """
    recipe = as_choice(recipe)
    check_schedule(schedule)
    numbers = checked_models(models, schedule is not None)
    bound = bound_schedule(schedule, scheduler)
    check_name(name)
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
    if (before := registry._backends.get(member)) is not None:
        before.layers.unwatch()
    registry.register(member, supports_context_parallel=True)(Backend(recipe, bound, numbers))


def checked_models(
    models: torch.nn.Module | Sequence[torch.nn.Module], has_schedule: bool
) -> dict[torch.nn.Module, int]:
    """Return the layers of the models whose attention a schedule is about; they are given with a schedule alone."""
    watched = (models,) if isinstance(models, torch.nn.Module) else tuple(models)
    if has_schedule != bool(watched):
        raise ValueError(
            f"schedule is {'given' if has_schedule else 'None'} with {len(watched)} models; it must be given with "
            f"those whose steps and layers it is about, such as pipeline.transformer, and without it there are none"
        )
    numbers: dict[torch.nn.Module, int] = {}
    for i, model in enumerate(watched):
        check_module(model, f"models[{i}]")
        layers = attention_layers(model)
        if not layers:
            raise ValueError(
                f"models[{i}] is {described(model)}, in which no module has a processor that asks a backend of "
                f"diffusers; it must be a model that has such attention, as pipeline.transformer"
            )
        numbers |= layers
    return numbers


def attention_layers(model: torch.nn.Module) -> dict[torch.nn.Module, int]:
    """Return the attention modules that may ask a backend, each with the number of its block.

    Blocks are counted in the order of `model.named_modules()`. A block is an item of a list, such as `blocks.3`: its
    self- and cross-attention have the same number.
    """
    own = {name for names in OWN_CALLS.values() for name in names}
    blocks: dict[str, int] = {}
    found: dict[torch.nn.Module, int] = {}
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if processor is None or (type(processor).__name__ in own and not hasattr(processor, "_attention_backend")):
            continue
        block = BLOCK.match(name)
        found[module] = blocks.setdefault(block[0] if block else name.rpartition(".")[0], len(blocks))
    return found


class Backend:
    """Attention with the arguments that diffusers passes."""

    def __init__(
        self,
        recipe: Recipe | Auto,
        schedule: BoundSchedule | None = None,
        numbers: Mapping[torch.nn.Module, int] = MappingProxyType({}),
    ) -> None:
        self.recipe = recipe
        self.schedule = schedule
        self.layers = Layers(numbers)

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
            return self.forward(
                None, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse
            )  # fmt: skip
        if self.schedule is not None:
            raise NotImplementedError("helion_attn: schedule is given; with context parallelism it must be None")
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
        """`__call__` on one device, and a part of context parallelism. Nothing is saved for a backward pass."""
        check_arguments("helion_attn", RULES, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        check_flag(return_lse, "return_lse")
        check_tensors(query, key, value)
        if not return_lse and skips_scores(query, key):
            return value
        query, key, value = checked_inputs(query, key, value, "bshd")
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
        visible = visible_of(attn_mask, B, H, M, N)
        recipe, pattern = self.scheduled(query, key)
        out, lse = attend(
            query, key, value, recipe=recipe, sm_scale=scale, causal=is_causal, visible=visible, pattern=pattern,
            return_lse=return_lse,
        )  # fmt: skip
        return (out, lse.transpose(1, 2)) if return_lse and lse is not None else out

    def scheduled(self, query: torch.Tensor, key: torch.Tensor) -> tuple[Recipe | Auto, Pattern | None]:
        """Recipe and mask of a call of query [B, M, H, D] and key [B, N, H_kv, D]."""
        if self.schedule is None or (layer := self.layers.running.value) is None:
            return self.recipe, None
        return choice_of(self.schedule, layer, self.recipe, query, key)


def visible_of(
    attn_mask: torch.Tensor | None, B: int, H: int, M: int, N: int, name: str = "attn_mask"
) -> Visible | None:
    """Read a mask of diffusers: one that `read_mask` takes, or one of keys alone, [B, N]. None hides nothing."""
    if attn_mask is None:
        return None
    of_keys = attn_mask.dim() == 2 and tuple(attn_mask.shape) == (B, N)
    if of_keys and B == M > 1:
        raise NotImplementedError(
            f"helion_attn: {name} has shape {tuple(attn_mask.shape)}, which is [B, N] and [M, N] alike; "
            f"pass {name}[:, None, None] for padding, or {name}[None, None]"
        )
    return read_mask(attn_mask[:, None, None] if of_keys else attn_mask, B, H, M, N, name)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    recipe: Recipe | Auto,
    sm_scale: float | None = None,
    causal: bool = False,
    visible: Visible | None = None,
    pattern: Pattern | None = None,
    prologue: QKPrologue = NO_PROLOGUE,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of q [B, M, H, D] to k [B, N, H_kv, D] and v [B, N, H_kv, D_v].

    Norms and RoPE are fused where nothing is masked, with a schedule's mask, and where a mask leaves each sequence its
    first keys. Elsewhere, and where "auto" takes PyTorch's attention, they come first.

    Args:
        q: queries.
        k: keys.
        v: values.
        recipe: of the call.
        sm_scale: as `attention` has it.
        causal: of a call without a mask.
        visible: what a mask leaves; None without one.
        pattern: of a schedule.
        prologue: what q and k are still without.
        return_lse: whether lse is needed.

    Returns:
        out [B, M, H, D_v], and lse [B, H, M], or None where it is not needed.
    """
    M, N = q.size(1), k.size(1)
    causal = causal if visible is None else visible.causal
    options: dict[str, Any] = {"sm_scale": sm_scale, "layout": "bshd", "return_lse": return_lse}
    if pattern is not None:
        keys = N if visible is None else visible.first_keys(M)
        if causal or keys == 0:
            raise NotImplementedError(
                "helion_attn: schedule gives a mask, and is_causal or attn_mask hides other keys than the last "
                "of all sequences; there it must give no mask"
            )
        return attend_to_pattern(q, k, v, pattern, keys, prologue, {**options, "recipe": recipe})
    if visible is None or visible.whole:
        if not prologue.is_empty and is_auto(recipe) and prefers_pytorch(q, k, v, causal=causal, sm_scale=sm_scale):
            q, k = prologue.apply(q, k)
            prologue = NO_PROLOGUE
        return out_and_lse(attention(q, k, v, causal=causal, recipe=recipe, **options, **prologue.options(q, k)))
    return attend_masked(q, k, v, visible, recipe, prologue, options)


@graph_break
def attend_masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Visible,
    recipe: Recipe | Auto,
    prologue: QKPrologue,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attend` where a mask hides keys: in a graph, each number of keys would be compiled for."""
    stops = first_keys_of_each(visible, q.size(1))
    if prologue.is_empty or stops is None:
        check_visible("helion_attn", visible, q, v, recipe)
        q, k = prologue.apply(q, k)
        return attend_to_visible(q, k, v, visible, recipe, sm_scale=options["sm_scale"])

    options = {**options, "recipe": preset_of(recipe)}

    def attend_to_first(rows: slice, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        of_q, of_k, of_v = q[rows], k[rows, :stop], v[rows, :stop]
        return out_and_lse(attention(of_q, of_k, of_v, **options, **prologue.options(of_q, of_k)))

    if len(set(stops)) == 1:
        return attend_to_first(slice(None), stops[0])
    parts = [attend_to_first(slice(b, b + 1), stop) for b, stop in enumerate(stops)]
    lses = [lse for _, lse in parts if lse is not None]
    return torch.cat([out for out, _ in parts]), torch.cat(lses) if lses else None


def out_and_lse(
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `attention` returns, with None for an lse that was not asked for."""
    return result if isinstance(result, tuple) else (result, None)


def first_keys_of_each(visible: Visible, M: int) -> list[int] | None:
    """How many of its first keys each sequence sees, alike for all of M rows; None where it is not so."""
    if visible.causal or visible.second or visible.kept is not None or visible.scores is not None:
        return None
    is_first = all(rows == (0, M) and start == 0 < stop for rows, (start, stop) in visible.first)
    return [part.keys[1] for part in visible.first] if is_first else None


def attend_to_pattern(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern,
    keys: int,
    prologue: QKPrologue,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with the schedule's mask to the first `keys` keys: out [B, M, H, D_v] and lse [B, H, M] or None."""
    reordered = pattern if isinstance(pattern, Reordered) else None
    mask = as_block_mask(pattern.mask if isinstance(pattern, Reordered) else pattern)
    assert mask is not None
    M, N = q.size(1), k.size(1)
    if (mask.M, mask.N) != (M, N):
        raise ValueError(f"schedule gives a mask of {mask.M} queries and {mask.N} keys; it must be of {M} and {N}")
    order = None if reordered is None else reordered.order
    if order is not None:
        q, k, v = (x[:, order] for x in (q, k, v))
    if keys < N:
        if order is not None:
            are_last = (order[keys:] >= keys).all()
            torch._assert_async(are_last, "keys that attn_mask hides are not the last in the schedule's order")
        k, v, mask = k[:, :keys], v[:, :keys], mask._of_first_keys(keys)
    out, lse = out_and_lse(attention(q, k, v, block_mask=mask, **options, **prologue.options(q, k, order)))
    if reordered is None:
        return out, lse
    return out[:, reordered.inverse], None if lse is None else lse[:, :, reordered.inverse]


def backward(ctx: Any, grad_out: torch.Tensor, *args: Any) -> None:
    """There is none."""
    raise NotImplementedError(
        "helion_attn has no backward pass under diffusers' context parallelism: call it in torch.no_grad()"
    )
