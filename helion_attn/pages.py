"""The pages of a KV cache that a query needs most: block-sparse attention for decoding.

`attention_kvcache` takes a block table for every KV head. So a few pages of each can be attended to: those whose mean
keys the queries like best, as `masks.top_blocks` has it, with the first and the last ones. The idea is Quest's
(arXiv:2406.10774), which bounds scores by a page's least and largest numbers in slot of its mean.

All of it runs on the device: the host reads nothing.
"""

from __future__ import annotations

import torch

from helion_attn import ops
from helion_attn.problem import TopPagesArgs
from helion_attn.types import Layout, PagedKVCache, key_descales
from helion_attn.validate.kv_cache import check_kv_cache
from helion_attn.validate.pages import check_top, check_update_means

__all__ = ["empty_means", "top", "update_means"]


def empty_means(cache: PagedKVCache) -> torch.Tensor:
    """Memory for the mean key of every page, zeros: bf16 [num_pages + 1, H_kv, D].

    The last row is no page's. It takes what `update_means` must not store.

    Args:
        cache: from `paged_kv_cache`.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.

    Example:
        cache = ha.paged_kv_cache(num_pages=8, H_kv=2, D=64)
        assert ha.pages.empty_means(cache).shape == (9, 2, 64)
    """
    check_kv_cache(cache)
    num_pages, H_kv = cache.k8.shape[:2]
    return torch.zeros(num_pages + 1, H_kv, cache.D, dtype=torch.bfloat16, device=cache.device)


def update_means(
    means: torch.Tensor, cache: PagedKVCache, block_table: torch.Tensor, cache_seqlens: torch.Tensor, length: int
) -> None:
    """Write the mean keys, less `cache.k_mean`, of the pages that an append has touched.

    Call it behind `append_kvcache(cache, k, v, block_table, cache_seqlens)` with the same tables. It reads those pages,
    and has their keys in fp32 meanwhile: of long prompts, one sequence after the other.

    Args:
        means: from `empty_means`, written.
        cache: as the append left it.
        block_table: int32 [B, pages of a sequence].
        cache_seqlens: int32 [B], the keys of each sequence before the append.
        length: keys that were appended to each.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.

    Example:
        cache = ha.paged_kv_cache(num_pages=2, H_kv=2, D=64)
        means = ha.pages.empty_means(cache)
        block_table = torch.tensor([[1], [0]], dtype=torch.int32)
        cache_seqlens = torch.zeros(2, dtype=torch.int32)
        k, v = torch.randn(2, 2, 2, 10, 64, dtype=torch.bfloat16)
        ha.append_kvcache(cache, k, v, block_table, cache_seqlens)
        ha.pages.update_means(means, cache, block_table, cache_seqlens, 10)
    """
    check_update_means(means, cache, block_table, cache_seqlens, length)
    num_pages, page_size, width = cache.k8.size(0), cache.page_size, block_table.size(1)
    first, end = cache_seqlens.long().unsqueeze(1), cache_seqlens.long().unsqueeze(1) + length
    # [B, pages]
    slot = first // page_size + torch.arange((length + page_size - 2) // page_size + 1, device=means.device)
    page = block_table.long().gather(1, slot.clamp(0, width - 1))
    stored = (first >= 0) & (slot * page_size < end) & (slot < width) & (page >= 0) & (page < num_pages)
    source = torch.where(stored, page, 0)
    # [B, pages, page_size]
    filled = (slot * page_size).unsqueeze(2) + torch.arange(page_size, device=means.device) < end.unsqueeze(2)
    # [B, pages, H_kv, page_size, D]; PyTorch has no indexing of 8-bit floats on a CPU.
    keys = cache.k8.view(torch.uint8)[source].view(cache.k8.dtype)[..., : cache.D].float()
    keys = torch.where(filled[:, :, None, :, None], keys * key_descales(cache.k_descale[source]).unsqueeze(4), 0.0)
    mean = keys.sum(3) / filled.sum(2).clamp_min(1)[:, :, None, None]
    if cache.channel_factors is not None:
        mean = mean * cache.channel_factors[:, : cache.D]
    means[torch.where(stored, page, num_pages)] = mean.to(means.dtype)


def top(
    q: torch.Tensor,
    means: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    pages: int,
    sink_pages: int = 1,
    local_pages: int = 2,
    sm_scale: float | None = None,
    layout: Layout = "bhsd",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block tables of the `pages` pages of each KV head that the queries like best.

    A query head gives a page the share that the page's mean key would have in a softmax over all pages. Query heads
    that share a KV head add up their shares, and queries of one call are averaged first. It is an estimate.

    Args:
        q: [B, H, M, D], of any floating-point dtype; with layout="bshd", H and M swapped.
        means: of `update_means`.
        cache: whose pages they are.
        block_table: int32 [B, pages of a sequence].
        cache_seqlens: int32 [B], the keys of each sequence, those of the queries included.
        pages: that are kept of each sequence and KV head; all of a shorter sequence.
        sink_pages: so many first pages are among them.
        local_pages: so many last pages are among them; they must hold the keys of the M queries.
        sm_scale: of the scores; 1 / sqrt(D) by default.
        layout: "bhsd" or "bshd".

    Returns:
        int32 [B, H_kv, pages], at most as many as the table has, in the order of their keys, and int32 [B, H_kv], the
        keys in them: what `attention_kvcache` takes in slot of the two tables. A length that `attention_kvcache`
        makes NaN of is -1.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.

    Example:
        cache = ha.paged_kv_cache(num_pages=8, H_kv=2, D=64)
        means = ha.pages.empty_means(cache)
        block_table = torch.arange(8, dtype=torch.int32).unsqueeze(0)
        lengths = torch.zeros(1, dtype=torch.int32)
        k, v = torch.randn(2, 1, 2, 1000, 64, dtype=torch.bfloat16)
        ha.append_kvcache(cache, k, v, block_table, lengths)
        ha.pages.update_means(means, cache, block_table, lengths, 1000)
        q = torch.randn(1, 4, 1, 64, dtype=torch.bfloat16)
        few, keys = ha.pages.top(q, means, cache, block_table, lengths + 1000, pages=4)
        out = ha.attention_kvcache(q, cache, few, keys)
    """
    check_top(q, means, cache, block_table, cache_seqlens, pages, sink_pages, local_pages, sm_scale, layout)
    if layout == "bshd":
        q = q.transpose(1, 2)
    scale = cache.D**-0.5 if sm_scale is None else float(sm_scale)
    tables = block_table.contiguous(), cache_seqlens.contiguous()
    return ops.top_pages(
        TopPagesArgs(q.detach().contiguous(), means, *tables, cache.page_size, pages, sink_pages, local_pages, scale)
    )
