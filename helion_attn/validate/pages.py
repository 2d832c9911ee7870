"""Checks of the arguments of `pages`, and of block tables that name pages of every KV head."""

from __future__ import annotations

import torch

from helion_attn.types import PagedKVCache
from helion_attn.validate.block_mask import check_int
from helion_attn.validate.dense import MAX_COUNT, check_count, check_layout, check_sm_scale, check_table, described
from helion_attn.validate.kv_cache import check_heads_of_cache, check_kv_cache, check_page_tables, check_query_heads


def check_means(means: torch.Tensor, cache: PagedKVCache) -> None:
    """What `empty_means` makes."""
    if not isinstance(means, torch.Tensor):
        raise TypeError(f"means is {described(means)}; it must be a tensor of helion_attn.pages.empty_means")
    num_pages, H_kv = cache.k8.shape[:2]
    shape = (num_pages + 1, H_kv, cache.D)
    if tuple(means.shape) != shape or means.dtype != torch.bfloat16 or means.device != cache.device:
        raise ValueError(
            f"means is {means.dtype} {tuple(means.shape)} on {means.device}; for this cache it must be torch.bfloat16 "
            f"{shape} on {cache.device}, as helion_attn.pages.empty_means makes it"
        )


def check_update_means(
    means: torch.Tensor, cache: PagedKVCache, block_table: torch.Tensor, cache_seqlens: torch.Tensor, length: int
) -> None:
    """The arguments of `update_means`."""
    check_kv_cache(cache)
    check_means(means, cache)
    check_table("cache_seqlens", cache_seqlens, cache.device)
    if cache_seqlens.dim() != 1:
        raise ValueError(f"cache_seqlens has shape {tuple(cache_seqlens.shape)}; it must have one dimension")
    check_page_tables(block_table, cache_seqlens, cache_seqlens.size(0), cache.device, "block_table")
    check_count("length", length)


def check_queries(q: torch.Tensor, cache: PagedKVCache, layout: str) -> tuple[int, int]:
    """Queries of a cache, floating-point; their sequences, and how many each has."""
    check_layout(layout)
    if not isinstance(q, torch.Tensor) or not q.is_floating_point():
        raise TypeError(f"q is {described(q)}; it must be a floating-point tensor")
    if q.dim() != 4 or 0 in q.shape:
        raise ValueError(f"q has shape {tuple(q.shape)}; it must have 4 dimensions, and not be empty")
    check_heads_of_cache("q", cache, q, cache.D)
    check_query_heads(q, cache, layout)
    return q.size(0), q.size(2 if layout == "bhsd" else 1)


def check_top(
    q: torch.Tensor,
    means: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    pages: int,
    sink_pages: int,
    local_pages: int,
    sm_scale: float | None,
    layout: str,
) -> None:
    """The arguments of `top`."""
    check_kv_cache(cache)
    check_means(means, cache)
    B, M = check_queries(q, cache, layout)
    check_page_tables(block_table, cache_seqlens, B, cache.device, "block_table")
    check_count("pages", pages)
    check_int("sink_pages", sink_pages, 0, pages)
    # M keys may begin with a page's last.
    needed = (M + cache.page_size - 2) // cache.page_size + 1
    if type(local_pages) is not int or not needed <= local_pages <= pages - sink_pages:
        raise ValueError(
            f"local_pages is {local_pages!r}; for {M} queries it must be an int of at least {needed}, and with "
            f"sink_pages={sink_pages} at most pages={pages}"
        )
    if sm_scale is not None:
        check_sm_scale(sm_scale)


def check_pages_of_heads(
    q: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    layout: str,
    window: tuple[int, int] | None,
    sinks: torch.Tensor | None,
) -> None:
    """A block table [B, H_kv, pages], and what goes with it."""
    check_kv_cache(cache)
    B, _ = check_queries(q, cache, layout)
    H_kv = cache.k8.size(1)
    for name, x, shape in (
        ("block_table", block_table, (B, H_kv, block_table.size(2))),
        ("cache_seqlens", cache_seqlens, (B, H_kv)),
    ):
        check_table(name, x, cache.device)
        if tuple(x.shape) != shape or x.numel() == 0:
            wanted = f"({B}, {H_kv}, pages of a KV head)" if x is block_table else shape
            raise ValueError(f"{name} has shape {tuple(x.shape)}; with pages of every KV head it must be {wanted}")
    check_count("the width of block_table", block_table.size(2), MAX_COUNT - 1)
    check_count("the pages of the cache times its KV heads", cache.k8.size(0) * H_kv)
    for name, given in (("window", window is not None), ("sinks", sinks is not None)):
        if given:
            raise NotImplementedError(f"{name} is given; with a block table of every KV head it must be None")
