"""transformers' cache in 8 bits: keys and values are quantised once, when they arrive, and stay in pages.

What a layer's `update` returns is no tensor: models hand it to attention as keys and values, and this package's
attention function knows what to do with it. Any other raises, since it would not find the keys.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from typing_extensions import Unpack

from helion_attn.kv_cache import append_kvcache, attention_kvcache, cache_constants, paged_kv_cache
from helion_attn.options import ScoreKwargs
from helion_attn.types import OpenPages, PagedKVCache, Recipe

#: With fewer first tokens of a sequence than these, the cache has no constants.
TOKENS_OF_CONSTANTS = 32

#: A pool without room grows to so many times its pages.
GROWTH = 1.125


class NewKeys:
    """What `update` returns in the place of keys, and of values: new ones, and the layer that has those before.

    Attributes:
        states: [B, H_kv, M, D], bf16, fp16 or fp32.
        layer: that they belong to.
    """

    #: How attention knows it, without an import of transformers.
    is_of_paged_layer = True

    def __init__(self, states: torch.Tensor, layer: PagedLayer) -> None:
        self.states = states
        self.layer = layer

    def __getattr__(self, name: str) -> NoReturn:
        raise TypeError(
            f"a helion_attn cache was given to another attention, which asked its keys for {name}; the model's "
            f"attn_implementation must be one that helion_attn.register_transformers made"
        )


def constants_of(
    q: torch.Tensor, k: torch.Tensor, padding: list[int]
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """`cache_constants` of the last tokens [B, heads, L, D], as many as no sequence has padding among; None of few."""
    q, k = q[:, :, max(padding) :], k[:, :, max(padding) :]
    return cache_constants(q, k) if k.size(2) >= TOKENS_OF_CONSTANTS else (None, None)


class PagedLayer(CacheLayerMixin):
    """A layer's keys and values in the pages of a `PagedKVCache`, without the padding at the start of sequences.

    Page i of sequence b is page `i B + b` of the pool, so that the pool grows, and its sequences are reordered, without
    a change of the block table. Windows are attention's affair: a layer with one keeps all keys, and reads those in it.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.cache: PagedKVCache | None = None
        #: Tokens so far, padding included, of every sequence.
        self.tokens = 0
        #: Padding at the start of each sequence.
        self.padding: torch.Tensor | None = None
        self.starts: list[int] = []
        #: Of the last append, whose queries attend next.
        self._open_pages: OpenPages | None = None
        # What several calls take, and four launches make: the table, and lengths with the tokens that they are of.
        self._table: torch.Tensor | None = None
        self._lengths: tuple[int, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the first `append` makes the pool."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Hand the new keys and values on to attention, which knows what is padding, and appends them."""
        return NewKeys(key_states, self), NewKeys(value_states, self)

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys with the new ones, and where they begin."""
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def append(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: list[int]) -> None:
        """Quantise and store new keys and values.

        Args:
            q: [B, H, L, D], their queries.
            k: [B, H_kv, L, D].
            v: [B, H_kv, L, D_v].
            starts: where in the whole sequence, padding included, each one's keys begin.

        Raises:
            NotImplementedError: padding elsewhere than at the start of the first keys.
        """
        B, H_kv, L, D = k.shape
        if self.cache is None:
            k_mean, channel_factors = constants_of(q, k, starts)
            self.cache = paged_kv_cache(
                B, H_kv, D, D_v=v.size(3), device=k.device, recipe=self.recipe, k_mean=k_mean,
                channel_factors=channel_factors,
            )  # fmt: skip
            self.padding = torch.tensor(starts, dtype=torch.int32, device="cpu").to(k.device)
            self.starts = starts
            if any(starts):
                # Keys behind a sequence's last are padding, which the next ones are written over.
                at = torch.arange(L, device=k.device) + self.padding.unsqueeze(1)
                at = at.clamp_max(L - 1)[:, None, :, None]
                k, v = (x.gather(2, at.expand(-1, H_kv, -1, x.size(3))) for x in (k, v))
        elif starts != self.starts:
            raise NotImplementedError(
                f"helion_attn: attention_mask has padding up to {starts}, and had up to {self.starts} before; with a "
                f"cache it must stay as it was"
            )
        try:
            if (needed := -(-(self.tokens + L) // self.cache.page_size)) > self.pages:
                self.grow(max(needed, int(GROWTH * self.pages)))
            self._open_pages = append_kvcache(self.cache, k, v, self.block_table(), self.lengths())
        except Exception:
            if self.tokens == 0:
                self.reset()
            raise
        self.tokens += L

    @property
    def batch(self) -> int:
        """Sequences."""
        return 0 if self.padding is None else self.padding.size(0)

    @property
    def pages(self) -> int:
        """Pages of each sequence."""
        return 0 if self.cache is None else self.cache.k8.size(0) // self.batch

    def block_table(self) -> torch.Tensor:
        """int32 [B, pages of a sequence]."""
        assert self.cache is not None
        if self._table is None:
            table = torch.arange(self.cache.k8.size(0), dtype=torch.int32, device=self.cache.k8.device)
            self._table = table.view(self.pages, self.batch).T.contiguous()
        return self._table

    def lengths(self) -> torch.Tensor:
        """int32 [B]: keys of each sequence, without padding."""
        assert self.padding is not None
        if self._lengths is None or self._lengths[0] != self.tokens:
            self._lengths = self.tokens, (self.tokens - self.padding).clamp_min(0)
        return self._lengths[1]

    def grow(self, pages: int) -> None:
        """Give each sequence so many pages."""
        assert self.cache is not None
        more = paged_kv_cache(
            (pages - self.pages) * self.batch, self.cache.k8.size(1), self.cache.D, D_v=self.cache.D_v,
            device=self.cache.k8.device, recipe=self.recipe,
        )  # fmt: skip
        self._replace(lambda name: torch.cat([_bytes(getattr(self.cache, name)), _bytes(getattr(more, name))]))

    def select(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order, some of them more than once: each gets pages of its own."""
        if self.cache is None or self.padding is None:
            return
        pages, batch = self.pages, self.batch
        indices = indices.to(self.padding.device)

        def selected(name: str) -> torch.Tensor:
            x = _bytes(getattr(self.cache, name))
            return x.view(pages, batch, *x.shape[1:]).index_select(1, indices).flatten(0, 1)

        self._replace(selected)
        self._open_pages = None
        self.padding = self.padding.index_select(0, indices)
        self.starts = self.padding.tolist()
        self._lengths = None

    def _replace(self, made: Any) -> None:
        assert self.cache is not None
        old = self.cache
        names = ("k8", "v8", "k_descale", "v_descale")
        fields = {name: made(name).view(getattr(old, name).dtype) for name in names}
        self.cache = dataclasses.replace(old, **fields)
        self._table = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the sequences that a beam search goes on with."""
        self.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence so many times."""
        self.select(torch.arange(self.batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences that a contrastive search goes on with."""
        self.select(torch.arange(self.batch, device="cpu")[indices.cpu()])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens. A page that is full stays rounded as it is, and may go on.

        Raises:
            NotImplementedError: some padding would go, but not every token.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}; it must be negative, as in transformers, or 0")
        tokens = max(self.tokens + tokens_to_remove, 0)
        if tokens == 0:
            self.reset()
            return
        # Padding that comes again would be stored as keys.
        if tokens < (padding := max(self.starts, default=0)):
            raise NotImplementedError(
                f"helion_attn: crop would leave {tokens} tokens, and attention_mask had padding up to {self.starts}; "
                f"with a cache in 8 bits it must leave at least {padding}, or 0: begin with a new cache"
            )
        self.tokens = tokens

    def reset(self) -> None:
        """Forget everything."""
        self.cache = self.padding = self._table = self._lengths = self._open_pages = None
        self.starts = []
        self.tokens = 0

    def offload(self) -> NoReturn:
        """Not supported."""
        raise NotImplementedError("helion_attn: a cache in 8 bits is not offloaded")

    def attend(self, q: torch.Tensor, **options: Unpack[ScoreKwargs]) -> torch.Tensor:
        """Attention of the last tokens' queries [B, H, M, D] to all keys: [B, M, H, D_v]."""
        assert self.cache is not None
        table, lengths = self.block_table(), self.lengths()
        return attention_kvcache(
            q.transpose(1, 2), self.cache, table, lengths, layout="bshd", open_pages=self._open_pages, **options
        )


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Pages by their bytes, which every device can copy."""
    return x.view(torch.uint8)


class PagedCache(Cache):
    """transformers' cache of layers as above."""

    def __init__(self, recipe: Recipe) -> None:
        # transformers calls it without arguments, once a layer.
        layer: Any = functools.partial(PagedLayer, recipe)
        super().__init__(layer_class_to_replicate=layer)
