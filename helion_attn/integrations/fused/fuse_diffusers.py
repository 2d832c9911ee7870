"""`fuse_diffusers`: attention processors of a model of diffusers whose norms of Q and K and RoPE are fused.

A backend gets Q and K normalised and rotated, each step of which reads and writes them. A processor has the modules
that do it, and hands their weights on.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from helion_attn.integrations.diffusers import attention_layers
from helion_attn.integrations.diffusers_schedule import Schedule, bound_schedule, check_schedule
from helion_attn.integrations.fused.diffusers_processors import (
    NOT_PARALLEL,
    Flux2ParallelProcessor,
    FluxProcessor,
    HunyuanVideo15Processor,
    HunyuanVideoProcessor,
    LTX2Processor,
    MiniMaxH3Processor,
    Processor,
    QwenImageProcessor,
    WanProcessor,
    ZImageProcessor,
)
from helion_attn.integrations.inputs import check_module
from helion_attn.names import reject_unknown_kwargs
from helion_attn.types import BALANCED, Auto, Recipe, RecipeName, as_choice

if TYPE_CHECKING:
    from helion_attn.integrations.diffusers_schedule import ScheduleFunction

#: What most processors are called with.
ARGUMENTS = ("attn", "hidden_states", "encoder_hidden_states", "attention_mask", "image_rotary_emb")


class Kind(NamedTuple):
    """Attention that has a processor here."""

    model: str  # what it is of
    parts: str  # what is fused, in words
    module: str  # of diffusers, that has its classes
    classes: tuple[str, ...]  # of the attention's module, or of the blocks that hold it
    processor: str  # the name of its own processor
    make: type[Processor]  # what takes its place
    attributes: tuple[str, ...]  # what it uses of the attention
    child: str = ""  # where blocks hold it; empty for the attention's own class
    functions: tuple[str, ...] = ()  # what of `module` that calls
    arguments: tuple[str, ...] = ARGUMENTS  # of the own processor's call
    needs_streams: bool = False  # a text is a stream of its own


#: What all processors use, and those of two streams.
OF_ALL = ("heads", "inner_dim", "norm_q", "norm_k")
OF_STREAMS = (
    *("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k"),
    "to_add_out",
)

WAN = Kind(
    "Wan (2.1, 2.2, VACE)",
    "RoPE, and norms over all heads, also those of cross-attention",
    "diffusers.models.transformers.transformer_wan",
    ("WanAttention",),
    "WanAttnProcessor",
    WanProcessor,
    (*OF_ALL, "add_k_proj", "to_out"),
    functions=("_get_qkv_projections", "_get_added_kv_projections"),
    arguments=(*ARGUMENTS[:-1], "rotary_emb"),
)

LTX2 = Kind(
    "LTX-2",
    "norms over all heads in attention to text; elsewhere norms and one pass of RoPE come before",
    "diffusers.models.transformers.transformer_ltx2",
    ("LTX2Attention",),
    "LTX2AudioVideoAttnProcessor",
    LTX2Processor,
    (*OF_ALL, "to_q", "to_k", "to_v", "to_out", "to_gate_logits", "rope_type"),
    arguments=(*ARGUMENTS[:-1], "query_rotary_emb", "key_rotary_emb"),
)

FUSED = (
    WAN,
    WAN._replace(
        model="Wan-Animate",
        parts="as of Wan; attention to a face stays as it is",
        module="diffusers.models.transformers.transformer_wan_animate",
    ),
    WAN._replace(model="ChronoEdit", parts="as of Wan", module="diffusers.models.transformers.transformer_chronoedit"),
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
    Kind(
        "HunyuanVideo 1.5",
        "RoPE; all blocks have two streams",
        "diffusers.models.transformers.transformer_hunyuan_video15",
        ("HunyuanVideo15TransformerBlock",),
        "HunyuanVideo15AttnProcessor2_0",
        HunyuanVideo15Processor,
        (*OF_ALL, *OF_STREAMS, "to_out"),
        child="attn",
    ),
    Kind(
        "FLUX.2",
        "RoPE; these blocks have two streams",
        "diffusers.models.transformers.transformer_flux2",
        ("Flux2Attention",),
        "Flux2AttnProcessor",
        FluxProcessor,
        (*OF_ALL, "head_dim", "added_kv_proj_dim", "to_out"),
        functions=("_get_qkv_projections",),
        needs_streams=True,
    ),
    Kind(
        "FLUX.2",
        "RoPE, and norms by head, in blocks of one stream",
        "diffusers.models.transformers.transformer_flux2",
        ("Flux2ParallelSelfAttention",),
        "Flux2ParallelSelfAttnProcessor",
        Flux2ParallelProcessor,
        (*OF_ALL, "head_dim", "to_qkv_mlp_proj", "mlp_act_fn", "to_out"),
        arguments=("attn", "hidden_states", "attention_mask", "image_rotary_emb"),
    ),
    Kind(
        "Z-Image",
        "RoPE and norms by head; each sequence of a batch is a call of its own",
        "diffusers.models.transformers.transformer_z_image",
        ("ZImageTransformerBlock",),
        "ZSingleStreamAttnProcessor",
        ZImageProcessor,
        (*OF_ALL, "to_q", "to_k", "to_v", "to_out"),
        child="attention",
        arguments=(*ARGUMENTS[:-1], "freqs_cis"),
    ),
    Kind(
        "MiniMax-H3",
        "RoPE and norms by head",
        "diffusers.models.transformers.transformer_minimax_h3",
        ("MiniMaxH3Attention",),
        "MiniMaxH3AttnProcessor",
        MiniMaxH3Processor,
        (*OF_ALL, "to_q", "to_k", "to_v", "to_out"),
        arguments=("attn", "hidden_states", "rotary_emb", "attention_mask"),
    ),
    LTX2,
    LTX2._replace(
        model="LTX-2.3",
        parts="as of LTX-2",
        processor="LTX2PerturbedAttnProcessor",
        arguments=(*LTX2.arguments, "perturbation_mask", "all_perturbed"),
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

    It takes Wan (2.1, 2.2, VACE, Animate), ChronoEdit, MiniMax-H3, HunyuanVideo (1.5 too), LTX-2 (2.3 too), Flux,
    FLUX.2, Qwen-Image and Z-Image.
    `ha.fuse_diffusers(pipeline.transformer)` computes what the backend of `register_diffusers` computes, but for the
    rounding of the model's own norms and RoPE, which is left out. RoPE is fused, and so are all norms of Wan, also
    those of cross-attention, of MiniMax-H3 and Z-Image, and the norms of blocks of Flux, FLUX.2 and HunyuanVideo that
    have one stream. In blocks of two streams, as all of Qwen-Image's and HunyuanVideo 1.5's are, each stream's norm has
    a weight of its own, and runs as it is. Z-Image's sequences of a batch have angles each, and are calls of their own.
    LTX-2's heads have angles each: its norms are fused in attention to text, and elsewhere norms and one pass of RoPE
    come before.

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
            yet, but of LTX-2 they are, except in attention to text.
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
    if getattr(getattr(model, "_parallel_config", None), "tensor_parallel_config", None) is not None:
        raise NotImplementedError("model has tensor parallelism; a fused model has none: use register_diffusers")
    check_schedule(schedule)
    bound = bound_schedule(schedule, scheduler)
    found = []
    for name, attn, kind in attentions(model):
        module = importlib.import_module(kind.module)
        check_layout(f"model has {type(attn).__name__} {name!r}", attn, kind, module)
        found.append((name, attn, kind, module))
    if not found:
        *accepted, last = dict.fromkeys(kind.model for kind in FUSED)
        raise ValueError(
            f"model is a {type(model).__name__} without attention of {', '.join(accepted)} or {last}; it must have it"
        )
    unfuse_diffusers(model)
    layers = attention_layers(model)
    for _, attn, kind, module in found:
        functions = {function: getattr(module, function) for function in kind.functions}
        attn.set_processor(kind.make(recipe, attn.processor, functions, layers[attn], bound))


def attentions(model: torch.nn.Module) -> Iterator[tuple[str, Any, Kind]]:
    """All attention of a model that has a processor here: its name, the module, and what it is."""
    for name, holder in model.named_modules():
        cls = type(holder)
        kinds = [kind for kind in FUSED if cls.__name__ in kind.classes and cls.__module__ == kind.module]
        if not kinds:
            continue
        child = kinds[0].child
        attn = getattr(holder, child, None) if child else holder
        yield f"{name}.{child}".strip("."), attn, kind_of(attn, kinds)


def kind_of(attn: Any, kinds: list[Kind]) -> Kind:
    """Return which of the kinds of a class an attention is, by its own processor; the first if it has another."""
    processor = getattr(attn, "processor", None)
    own = type(processor.own if isinstance(processor, Processor) else processor).__name__
    return next((kind for kind in kinds if kind.processor == own), kinds[0])


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
    if kind.needs_streams and attn.added_kv_proj_dim is None:
        raise NotImplementedError(f"{what}, which has one stream, and {kind.model}'s has two; {of_version}")
    if processor._parallel_config is not None:
        raise NotImplementedError(f"{what}, and context parallelism is enabled; {NOT_PARALLEL}")


def unfuse_diffusers(model: torch.nn.Module) -> None:
    """Undo `fuse_diffusers`: the processors of before."""
    for module in model.modules():
        processor: Any = getattr(module, "processor", None)
        if isinstance(processor, Processor):
            module.set_processor(processor.own)  # type: ignore[operator]
