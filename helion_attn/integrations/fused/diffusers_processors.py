"""Attention processors for diffusers' models, one a model: they hand norms of Q and K and RoPE on to quantising."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from helion_attn.integrations.diffusers import attend, skips_scores, visible_of
from helion_attn.integrations.diffusers_schedule import BoundSchedule, check_eager, choice_of
from helion_attn.integrations.fused.qk_prologue import (
    QKPrologue,
    RopeCache,
    apply_norm,
    fusable_norm,
    get_rope_cache,
    rotate,
    split_prologue,
)
from helion_attn.integrations.inputs import autocast_inputs
from helion_attn.integrations.mask_tensors import Visible, of_all_heads
from helion_attn.masks import Reordered
from helion_attn.masks.blocks import as_block_mask
from helion_attn.types import Auto, Recipe, Rope, unchecked_rope

if TYPE_CHECKING:
    from helion_attn.integrations.diffusers_schedule import Pattern

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


def rope_of_halves(cos: torch.Tensor, sin: torch.Tensor) -> Rope:
    """Make a Rope of tables [S, rotary] whose second half of columns is the first: of the first channels of a head."""
    cos, sin = (x[:, : x.size(-1) // 2].float().contiguous() for x in (cos, sin))
    return unchecked_rope(cos, sin, interleaved=False)


def rope_of_sequence(angles: torch.Tensor, b: int) -> Rope:
    """Make a Rope of sequence b of complex tables [B, S, D / 2]."""
    return rope_of_complex(angles[b])


def rope_of_heads(cos: torch.Tensor, sin: torch.Tensor, heads: int, *, interleaved: bool) -> Rope:
    """Make a Rope of B S heads rows: each head of a token has angles of its own.

    Tables of the second form in fp32, as LTX-2 makes them, are used as they are; nothing is kept for other layers.

    Args:
        cos: [B, S, heads D] with every column twice in a row if `interleaved`, otherwise [B, heads, S, D / 2].
        sin: same shape.
        heads: of the attention.
        interleaved: as `Rope` has it.
    """
    if interleaved:
        cos, sin = (x[..., ::2].unflatten(2, (heads, -1)) for x in (cos, sin))
    else:
        cos, sin = (x.transpose(1, 2) for x in (cos, sin))
    cos, sin = (x.float().flatten(0, 2).contiguous() for x in (cos, sin))
    return unchecked_rope(cos, sin, interleaved=interleaved)


def visible_of_sequence(visible: Visible | None, b: int) -> Visible | None:
    """Return what a mask leaves of sequence b, as a mask of that sequence alone."""
    if visible is None:
        return None
    rows, kept, scores = slice(b, b + 1), visible.kept, visible.scores
    if scores is not None and scores.dim() == 4 and scores.size(0) > 1:
        scores = scores[rows]
    kept = None if kept is None else kept[rows]
    return dataclasses.replace(
        visible, first=visible.first[rows], second=visible.second[rows], kept=kept, scores=scores
    )


def pattern_of_sequence(pattern: Pattern | None, B: int, b: int) -> Pattern | None:
    """Return what a schedule's mask is for sequence b of B, as a mask of that sequence alone, in the same order."""
    if pattern is None:
        return None
    mask = as_block_mask(pattern.mask if isinstance(pattern, Reordered) else pattern)
    assert mask is not None
    if mask.B not in (1, B):
        raise ValueError(f"schedule gives a mask with B = {mask.B}; it must be 1 or {B}")
    mask = mask._of_sequence(b)
    return pattern._replace(mask=mask) if isinstance(pattern, Reordered) else mask


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
        rope_caches: Sequence[RopeCache | None] = (),
    ) -> torch.Tensor:
        """Return [B, S, H * D_v] of [B, S, heads, D] each.

        With `rope_caches`, one of each sequence, `prologue` has none, and each sequence is a call of its own.
        """
        if skips_scores(q, k):
            return v.flatten(2, 3)
        q, k, v = autocast_inputs(q, k, v)
        B, M, H, N = *q.shape[:3], k.size(1)
        visible = visible_of(attention_mask, B, H, M, N, "attention_mask")
        recipe, pattern = self.recipe, None
        if self.schedule is not None:
            check_eager()
            recipe, pattern = choice_of(self.schedule, self.layer, recipe, q, k)

        if not rope_caches:
            out, _ = attend(q, k, v, recipe=recipe, visible=visible, pattern=pattern, prologue=prologue)
            return out.flatten(2, 3)
        outs = []
        for b, rope_cache in enumerate(rope_caches):
            rows = slice(b, b + 1)
            out, _ = attend(
                q[rows], k[rows], v[rows], recipe=recipe, visible=visible_of_sequence(visible, b),
                pattern=pattern_of_sequence(pattern, B, b), prologue=prologue._replace(rope_cache=rope_cache),
            )  # fmt: skip
            outs.append(out.flatten(2, 3))
        return torch.cat(outs)


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


class Flux2ParallelProcessor(Processor):
    """In place of `Flux2ParallelSelfAttnProcessor`: norms by head; projections are one with the feed-forward's."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """Attention of [B, S, channels] to itself."""
        projected = attn.to_qkv_mlp_proj(hidden_states)
        qkv, mlp = projected.tensor_split([3 * attn.inner_dim], -1)
        q, k, v = (x.unflatten(-1, (-1, attn.head_dim)) for x in qkv.chunk(3, dim=-1))
        rope_cache = get_rope_cache(rope_of, image_rotary_emb)
        q, k, prologue = split_prologue(q, k, attn.norm_q, attn.norm_k, "bshd", rope_cache)
        out = self.attend(q, k, v, prologue, attention_mask)
        return attn.to_out(torch.cat([out, attn.mlp_act_fn(mlp)], -1))


class HunyuanVideo15Processor(Processor):
    """In place of `HunyuanVideo15AttnProcessor2_0`: two streams, and a text of which the first tokens are no padding.

    Rows of padding, which see nothing in diffusers' attention, see what others see: no other row sees them.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a video, [B, S, channels], together with a text, of which `attention_mask` says what counts."""
        image, text = project_image(attn, hidden_states), encoder_hidden_states
        tokens = hidden_states.size(1)
        if text is None:
            raise ValueError("helion_attn: HunyuanVideo 1.5's attention needs encoder_hidden_states")
        q, k, v = join_streams(attn, project_text(attn, text), image, text_first=False)
        prologue = QKPrologue(rope_cache=get_rope_cache(rope_of, image_rotary_emb, text.size(1)))
        if attention_mask is not None:
            # [B, 1, 1, video and text]
            attention_mask = torch.nn.functional.pad(attention_mask.bool(), (tokens, 0), value=True)[:, None, None]
        out, out_text = self.attend(q, k, v, prologue, attention_mask).tensor_split([tokens], 1)
        return project_out(attn, out), attn.to_add_out(out_text)


class MiniMaxH3Processor(Processor):
    """In place of `MiniMaxH3AttnProcessor`: norms by head, and RoPE of a head's first channels, its halves paired."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        rotary_emb: Rotary | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of [B, S, channels] to itself."""
        if getattr(attn, "fused_projections", False):
            qkv = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            qkv = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q, k, v = (x.unflatten(-1, (attn.heads, -1)) for x in qkv)
        rope_cache = get_rope_cache(rope_of_halves, rotary_emb)
        q, k, prologue = split_prologue(q, k, attn.norm_q, attn.norm_k, "bshd", rope_cache)
        return project_out(attn, self.attend(q, k, v, prologue, attention_mask))


class ZImageProcessor(Processor):
    """In place of `ZSingleStreamAttnProcessor`: norms by head, and RoPE, whose angles each sequence has for itself."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        freqs_cis: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of [B, S, channels] to itself."""
        q, k, v = project_image(attn, hidden_states)
        q, k, prologue = split_prologue(q, k, attn.norm_q, attn.norm_k, "bshd", None)
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = attention_mask[:, None, None]
        count = 1 if freqs_cis is None else freqs_cis.size(0)
        tables = None if freqs_cis is None else (freqs_cis,)
        rope_caches = [get_rope_cache(rope_of_sequence, tables, b) for b in range(count)]
        if count == 1:
            prologue, rope_caches = prologue._replace(rope_cache=rope_caches[0]), []
        return project_out(attn, self.attend(q, k, v, prologue, attention_mask, rope_caches))


class LTX2Processor(Processor):
    """In place of `LTX2AudioVideoAttnProcessor` and `LTX2PerturbedAttnProcessor`: norms over all heads.

    They are fused in attention to a text. Elsewhere each head has angles of its own: norms come before, and then one
    pass rotates all heads.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        query_rotary_emb: Rotary | None = None,
        key_rotary_emb: Rotary | None = None,
        perturbation_mask: torch.Tensor | None = None,
        all_perturbed: torch.Tensor | bool | None = None,
    ) -> torch.Tensor:
        """Attention of [B, S, channels] to itself, to a text or to the other of video and audio.

        `perturbation_mask` is 0 for sequences that take their values in place of attention.
        """
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        v = attn.to_v(context)
        if all_perturbed is None:
            all_perturbed = perturbation_mask is not None and bool((perturbation_mask == 0).all())
        if all_perturbed:
            out = v
        else:
            q, k = attn.to_q(hidden_states), attn.to_k(context)
            out = self.attend_rotated(attn, q, k, v, attention_mask, query_rotary_emb, key_rotary_emb)
            if perturbation_mask is not None:
                out = torch.lerp(v, out, perturbation_mask)
        if attn.to_gate_logits is not None:
            gates = 2 * attn.to_gate_logits(hidden_states).sigmoid()
            out = (out.unflatten(2, (attn.heads, -1)) * gates.unsqueeze(-1)).flatten(2)
        return project_out(attn, out)

    def attend_rotated(
        self,
        attn: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention_mask: torch.Tensor | None,
        q_rotary: Rotary | None,
        k_rotary: Rotary | None,
    ) -> torch.Tensor:
        """Attention of what is projected, [B, S, H * D] each, to [B, S, H * D]; tables of k None: those of q."""
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))
        if attention_mask is not None:
            attention_mask = mask_of_ltx2(attention_mask, q.size(0))
        if q_rotary is None:
            q, k, prologue = split_prologue(q, k, attn.norm_q, attn.norm_k, "bsc", None)
            return self.attend(q, k, v, prologue, attention_mask)
        is_interleaved = attn.rope_type == "interleaved"
        q_rope = k_rope = rope_of_heads(*q_rotary, attn.heads, interleaved=is_interleaved)
        if k_rotary is not None:
            k_rope = rope_of_heads(*k_rotary, attn.heads, interleaved=is_interleaved)
        q = rotate_heads(apply_norm(attn.norm_q, q, "bsc"), q_rope)
        k = rotate_heads(apply_norm(attn.norm_k, k, "bsc"), k_rope)
        return self.attend(q, k, v, QKPrologue(), attention_mask)


def mask_of_ltx2(mask: torch.Tensor, B: int) -> torch.Tensor:
    """Return a mask [B or 1, N], [B or 1, 1 or M, N] or [B or 1, 1 or H, 1 or M, N] with the heads' dimension."""
    if not 2 <= mask.dim() <= 4 or mask.size(0) not in (1, B):
        raise ValueError(
            f"helion_attn: attention_mask has shape {tuple(mask.shape)}; with B = {B} it must be [B or 1, N], "
            f"[B or 1, 1 or M, N] or [B or 1, 1 or H, 1 or M, N]"
        )
    if mask.dim() == 2:
        return mask[:, None, None]
    return of_all_heads(mask) if mask.dim() == 3 else mask


def rotate_heads(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Return x [B, S, H, D] rotated by a Rope that `rope_of_heads` makes."""
    return rotate(x.reshape(-1, rope.cos.size(0), 1, x.size(-1)), rope).view_as(x)


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
