"""A paged KV cache full of NaN, and keys appended to it."""

from __future__ import annotations

import torch

import helion_attn as ha
from helion_attn.types import CACHE_RECIPE

#: What a block table holds where nothing may read it.
NO_PAGE = -(2**31)


def poison(cache: ha.PagedKVCache) -> None:
    """Every byte of the pool a NaN."""
    for x in (cache.k8, cache.v8):
        x.view(torch.uint8).fill_(0x7F)
    for x in (cache.k_descale, cache.v_descale):
        x.fill_(float("nan"))


def make_cache(
    lengths: list[int],
    H_kv: int,
    D: int,
    D_v: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    recipe: ha.Recipe = CACHE_RECIPE,
    k_mean: torch.Tensor | None = None,
    channel_factors: torch.Tensor | None = None,
) -> tuple[ha.PagedKVCache, torch.Tensor, torch.Tensor]:
    """A poisoned pool, a block table of pages in random order, and the lengths."""
    size = ha.paged_kv_cache(1, H_kv, D, D_v=D_v).page_size
    pages = [-(-n // size) for n in lengths]
    constants = {"k_mean": k_mean, "channel_factors": channel_factors}
    cache = ha.paged_kv_cache(sum(pages) + 3, H_kv, D, D_v=D_v, device=device, recipe=recipe, **constants)
    poison(cache)
    order = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(lengths), max(pages) + 1), NO_PAGE, dtype=torch.int32)
    for b, count in enumerate(pages):
        table[b, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    return cache, table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)


def append_all(
    cache: ha.PagedKVCache, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: list[int]
) -> None:
    """Of each sequence its own number of keys."""
    start = torch.zeros(1, dtype=torch.int32, device=k.device)
    for b, n in enumerate(lengths):
        if n:
            one = slice(b, b + 1)
            ha.append_kvcache(cache, k[one, :, :n], v[one, :, :n], table[one].contiguous(), start)
