"""Attention for models of ComfyUI: what a node puts into their transformer options.

ComfyUI hands every call of a model's attention to `transformer_options["optimized_attention_override"]`, with the
function that it would have called. The node pack of this repository's folder comfyui/ puts an `Override` there.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from helion_attn.api import attention
from helion_attn.integrations.sageattention import LAYOUTS, sageattn
from helion_attn.masks import top_blocks
from helion_attn.types import Auto, Recipe, RecipeName, as_choice
from helion_attn.validate.dense import described

_LOG = logging.getLogger(__name__)

#: Frames, height and width of a tile, whose tokens make a block of 128.
TILE = (4, 4, 8)


class Override:
    """Attention with ComfyUI's arguments: `options["optimized_attention_override"] = Override(...)`.

    What it declines goes to the override that was there, or to ComfyUI's own function: calls with
    `low_precision_attention=False`, those that the schedule has in 16 bits, and those that `sageattn` refuses, of
    which the log names each reason once.

    Args:
        recipe: how the tensors become 8-bit numbers, a preset's name, or "auto", which leaves to PyTorch's attention
            what that is faster at.
        first_steps: steps at the start of sampling that stay in 16 bits.
        first_layers: blocks at the start of the model that do. Models with double and single blocks have as many of
            each.
        last_layers: blocks at its end that do. Models that do not say which block of how many runs, such as UNets, have
            none of both.
        keep_blocks: the share of the blocks of 128 keys that self-attention without a mask visits, chosen by
            `helion_attn.masks.top_blocks`; 1 for all. Where the model says the grid of its tokens, as Wan does, a block
            is a tile of the video.
        before: the override that was there.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.

    Example:
        from helion_attn.integrations.comfyui import Override

        options = {}  # model.clone().model_options["transformer_options"]
        before = options.get("optimized_attention_override")
        options["optimized_attention_override"] = Override("balanced", first_steps=2, before=before)
    """

    def __init__(
        self,
        recipe: Recipe | RecipeName | Auto = "auto",
        *,
        first_steps: int = 0,
        first_layers: int = 0,
        last_layers: int = 0,
        keep_blocks: float = 1.0,
        before: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self.recipe = as_choice(recipe)
        counts = {"first_steps": first_steps, "first_layers": first_layers, "last_layers": last_layers}
        for name, count in counts.items():
            if type(count) is not int or count < 0:
                raise ValueError(f"{name} is {count!r}; it must be an int, 0 or more")
        if not isinstance(keep_blocks, (int, float)) or not 0 < keep_blocks <= 1:
            raise ValueError(f"keep_blocks is {keep_blocks!r}; it must lie above 0, and be at most 1, for all")
        if before is not None and not callable(before):
            raise TypeError(f"before is {described(before)}; it must be the override that was there, or None")
        self.first_steps, self.first_layers, self.last_layers = first_steps, first_layers, last_layers
        self.keep_blocks, self.before = keep_blocks, before
        self._said: set[str] = set()
        self._step: tuple[weakref.ref[torch.Tensor], int] | None = None
        self._order: tuple[tuple[Any, ...], torch.Tensor, torch.Tensor] | None = None

    def __call__(
        self,
        func: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Attention of q [B, M, H D] to k and v [B, N, H_kv D]; with `skip_reshape` they are [B, H, S, D].

        Args:
            func: ComfyUI's attention.
            q: queries.
            k: keys.
            v: values.
            heads: H.
            mask: bool or added to the scores, [M, N], [B, M, N] or [B, H, M, N].
            attn_precision: of scores; they are fp32 here.
            skip_reshape: whether heads are a dimension of q, k and v.
            skip_output_reshape: whether they stay one in the result.
            options: `scale`, `enable_gqa`, `low_precision_attention` and `transformer_options` count.

        Returns:
            [B, M, H D], or with `skip_output_reshape` [B, H, M, D].
        """
        model: Mapping[str, Any] = options.get("transformer_options") or {}
        if options.get("low_precision_attention", True) is not False and not self._in_16_bits(model):
            try:
                out = self._attend(q, k, v, heads, mask, skip_reshape, options, model)
            except (NotImplementedError, TypeError, ValueError) as refusal:
                if str(refusal) not in self._said:
                    self._said.add(str(refusal))
                    _LOG.warning("helion_attn leaves calls to other attention: %s", refusal)
            else:
                return out if skip_output_reshape else out.transpose(1, 2).flatten(2)
        declined = func if self.before is None else _chained(self.before, func)
        return declined(
            q, k, v, heads, mask=mask, attn_precision=attn_precision, skip_reshape=skip_reshape,
            skip_output_reshape=skip_output_reshape, **options,
        )  # fmt: skip

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None,
        skip_reshape: bool,
        options: Mapping[str, Any],
        model: Mapping[str, Any],
    ) -> torch.Tensor:
        """Return [B, H, M, D]."""
        layout = "HND" if skip_reshape else "NHD"
        if not skip_reshape:
            q, k, v = (x.unflatten(2, (-1, q.size(2) // heads)) for x in (q, k, v))
        of_heads, of_tokens = (1, 2) if skip_reshape else (2, 1)
        if q.size(of_heads) != k.size(of_heads) and not options.get("enable_gqa", False):
            raise ValueError(
                f"q has {q.size(of_heads)} heads and k {k.size(of_heads)}; they must be equal without enable_gqa=True"
            )
        scale, M = options.get("scale"), q.size(of_tokens)
        if self.keep_blocks < 1 and mask is None and k.size(of_tokens) == M:
            order = self._tiles(model.get("grid_sizes"), M, q.device)
            if order is not None:
                q, k, v = (x.index_select(of_tokens, order[0]) for x in (q, k, v))
            ours: Any = LAYOUTS[layout]
            blocks = top_blocks(q, k, keep=self.keep_blocks, sm_scale=scale, layout=ours)
            out: Any = attention(q, k, v, sm_scale=scale, layout=ours, recipe=self.recipe, block_mask=blocks)
            out = out if order is None else out.index_select(of_tokens, order[1])
        else:
            if mask is not None and mask.dim() == 3:
                mask = mask.unsqueeze(1)
            out = sageattn(q, k, v, layout, sm_scale=scale, attn_mask=mask, recipe=self.recipe)
        assert isinstance(out, torch.Tensor)
        return out if skip_reshape else out.transpose(1, 2)

    def _in_16_bits(self, model: Mapping[str, Any]) -> bool:
        """Return whether the schedule has a call of this step and block in 16 bits."""
        layer, count = model.get("block_index"), model.get("total_blocks")
        # UNets count the blocks of each of their transformers anew, and do not say how many there are.
        if layer is not None and count is not None and not self.first_layers <= layer < count - self.last_layers:
            return True
        return self.first_steps > 0 and self._current_step(model) < self.first_steps

    def _current_step(self, model: Mapping[str, Any]) -> int:
        """Return the step that a model's noise level belongs to; one that nobody says is behind the first ones."""
        now, all_ = model.get("sigmas"), model.get("sample_sigmas")
        if now is None or all_ is None:
            return self.first_steps
        # One tensor serves all layers, and the host waits for it once.
        if self._step is None or self._step[0]() is not now:
            begun = all_.cpu() >= now.max().cpu() * (1 - 1e-4)
            self._step = weakref.ref(now), int(begun.sum()) - 1
        return self._step[1]

    def _tiles(
        self, grid: tuple[int, ...] | None, tokens: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the order that brings the tokens of a tile together, and its inverse; None for another grid."""
        if grid is None or len(grid) != 3 or math.prod(grid) != tokens:
            return None
        key = (*grid, device)
        if self._order is None or self._order[0] != key:
            tile = torch.zeros((1, 1, 1), dtype=torch.int64, device=device)
            for dim, (size, of) in enumerate(zip(grid, TILE, strict=True)):
                at = torch.arange(size, device=device).div(of, rounding_mode="floor")
                tile = tile * -(-size // of) + at.view([-1 if i == dim else 1 for i in range(3)])
            order = tile.flatten().argsort(stable=True)
            self._order = key, order, order.argsort()
        return self._order[1:]


def _chained(before: Callable[..., torch.Tensor], func: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return an override as the function that it stands for."""
    return lambda *args, **options: before(func, *args, **options)
