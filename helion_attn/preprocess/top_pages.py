"""The pages of a paged cache that queries like best, of each KV head, as the mean keys of pages have it.

A query head gives a page the share that its mean key has in a softmax over all pages. The heads of a group add theirs
up. Shares are ordered by their bits, and the threshold that leaves as many pages as are to be kept is found bit by bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import by_device
from helion_attn.kernels.lib.scalars import int32
from helion_attn.preprocess.top_blocks import CHANNELS, LEAST, ordered_bits
from helion_attn.problem import TopPagesArgs

#: Pages of a program that scores them, pages whose scores or shares a step reads, and as many shares as registers hold.
PAGES, SCORES, MOST_AT_ONCE = 32, 128, 4096

#: Query heads of a program, at least: rows of a product.
LEAST_HEADS = 16

#: The share of a page with a NaN, so that attention shows it, and of one that is kept whatever its share.
UNKNOWN, ALWAYS = torch.finfo(torch.float32).max, float("inf")


class TopPagesSpec(NamedTuple):
    """Constants that the kernels are compiled for."""

    heads: int  # the power of two that holds the query heads of a KV head
    channels: int  # of a product
    whole_channels: bool  # D is a multiple
    pages: int  # of a program that scores them
    scores: int  # pages whose scores a step reads
    at_once: int  # pages whose shares a step reads
    all_at_once: bool  # there are no more
    is_cuda: bool  # the kernels are compiled; otherwise interpreted


def page_scores(
    q: torch.Tensor,  # [B * H * M, D]
    means: torch.Tensor,  # [num_pages + 1, H_kv, D]
    block_table: torch.Tensor,  # [B * width]
    scores: torch.Tensor,  # [B * H, width], written
    B: int,
    M: int,
    group: int,
    kv_heads: int,
    num_pages: int,
    width: int,
    scale: float,
    spec: hl.constexpr,  # TopPagesSpec
) -> None:
    """Write the products of mean queries and the mean keys of pages. `scale` is over M."""
    D = hl.specialize(means.size(2))
    # Known strides make loads wide.
    hl.specialize((q.stride(0), q.stride(1), means.stride(0), means.stride(1), means.stride(2)))
    hl.specialize((scores.stride(1), block_table.stride(0)))
    for b, h, part in hl.grid([B, kv_heads, (width + spec.pages - 1) // spec.pages]):
        # [heads]
        head = hl.arange(spec.heads)
        at = (b * kv_heads + h) * group + head
        head_mask = (head < group).unsqueeze(1)
        # [pages]
        slot = part * spec.pages + hl.arange(spec.pages)
        page_mask = (slot < width).unsqueeze(1)
        listed = hl.load(block_table, [b * width + slot], extra_mask=slot < width)
        page = torch.clamp_max(torch.clamp_min(listed, 0), num_pages - 1).to(torch.int64)
        # [heads, pages]
        s = hl.zeros([spec.heads, spec.pages], dtype=torch.float32)
        for d_step in hl.grid((D + spec.channels - 1) // spec.channels):
            cols = d_step * spec.channels + hl.arange(spec.channels)
            q_mask, k_mask = head_mask, page_mask
            # A mask of channels makes loads narrow.
            if not spec.whole_channels:
                inside = (cols < D).unsqueeze(0)
                q_mask, k_mask = q_mask & inside, k_mask & inside
            # [pages, channels]
            k = hl.load(means, [page, h, cols], extra_mask=k_mask)
            # [heads, channels]
            total_q = hl.zeros([spec.heads, spec.channels], dtype=torch.float32)
            for m in hl.grid(M):
                total_q = total_q + hl.load(q, [at * M + m, cols], extra_mask=q_mask).to(torch.float32)
            s = s + torch.matmul(total_q * scale, k.to(torch.float32).transpose(0, 1))
        hl.store(scores, [at, slot], s, extra_mask=head_mask & (slot < width).unsqueeze(0))


def top_pages(
    scores: torch.Tensor,  # [B * H, width]
    block_table: torch.Tensor,  # [B * width]
    cache_seqlens: torch.Tensor,  # [B]
    shares: torch.Tensor,  # [B * H_kv, width], written, and so the rest
    few: torch.Tensor,  # [B * H_kv, pages]
    keys: torch.Tensor,  # [B * H_kv]
    group: int,
    kv_heads: int,
    width: int,
    page_size: int,
    sink_pages: int,
    local_pages: int,
    spec: hl.constexpr,  # TopPagesSpec
) -> None:
    """Write the pages of each KV head in their order, and how many keys they have."""
    hl.specialize((scores.stride(1), shares.stride(1), few.stride(1)))
    hl.specialize((block_table.stride(0), cache_seqlens.stride(0)))
    pages = few.size(1)
    for b, h in hl.grid([cache_seqlens.size(0), kv_heads]):
        bh = b * kv_heads + h
        # [heads]
        head = hl.arange(spec.heads)
        at = bh * group + head
        head_mask = (head < group).unsqueeze(1)
        length = hl.load(cache_seqlens, [b])
        count = (torch.clamp_min(length, 0) + (page_size - 1)) // page_size
        largest = hl.full([spec.heads], float("-inf"), dtype=torch.float32)
        total = hl.zeros([spec.heads], dtype=torch.float32)
        for step in hl.grid((width + spec.scores - 1) // spec.scores):
            slot = step * spec.scores + hl.arange(spec.scores)
            there = ((slot < width) & (slot < count)).unsqueeze(0)
            # [heads, scores]
            s = hl.load(scores, [at, slot], extra_mask=head_mask & there)
            known = torch.where(there & (s == s), s, float("-inf"))
            before, largest = largest, torch.maximum(largest, torch.amax(known, 1))
            reference = torch.where(largest == float("-inf"), 0.0, largest)
            total = total * torch.exp(before - reference) + torch.exp(known - reference.unsqueeze(1)).sum(1)
        for share_step in hl.grid((width + spec.scores - 1) // spec.scores):
            slot = share_step * spec.scores + hl.arange(spec.scores)
            there = (slot < width) & (slot < count)
            of_share = head_mask & there.unsqueeze(0)
            s = hl.load(scores, [at, slot], extra_mask=of_share)
            unknown = torch.amax((of_share & (s != s)).to(torch.int32), 0) > 0
            of_total = torch.exp(s - largest.unsqueeze(1)) / total.unsqueeze(1)
            # [scores]; of what is infinite or without a sum, 0.
            share = torch.where(of_share & (of_total <= 1.0), of_total, 0.0).sum(0)
            share = torch.where(unknown, UNKNOWN, share)
            share = torch.where((slot < sink_pages) | (slot >= count - local_pages), ALWAYS, share)
            hl.store(shares, [bh, slot], torch.where(there, share, -1.0), extra_mask=slot < width)
        if spec.is_cuda:
            # All have written the shares.
            hl.inline_triton("tl.debug_barrier()", args=(), output_like=None)
        steps = (width + spec.at_once - 1) // spec.at_once
        if spec.all_at_once:
            all_shares = ordered_shares(shares, bh, 0, width, spec)
        threshold = hl.full([], LEAST, dtype=torch.int32)
        for bit in hl.grid(32):
            higher = threshold ^ (int32(1) << int32(31 - bit))
            if spec.all_at_once:
                held = (all_shares >= higher).to(torch.int32)
            else:
                held = hl.zeros([spec.at_once], dtype=torch.int32)
                for held_step in hl.grid(steps):
                    held = held + (ordered_shares(shares, bh, held_step, width, spec) >= higher).to(torch.int32)
            threshold = torch.where(held.sum(0) >= pages, higher, threshold)
        over = hl.zeros([spec.at_once], dtype=torch.int32)
        for over_step in hl.grid(steps):
            over = over + (ordered_shares(shares, bh, over_step, width, spec) > threshold).to(torch.int32)
        # How many at the threshold are kept, the first ones.
        left = pages - over.sum(0)
        stored = hl.zeros([], dtype=torch.int32)
        equal_before = hl.zeros([], dtype=torch.int32)
        for last_step in hl.grid(steps):
            slot_of_share = last_step * spec.at_once + hl.arange(spec.at_once)
            ordered = ordered_shares(shares, bh, last_step, width, spec)
            equal = (ordered == threshold).to(torch.int32)
            rank = equal_before + hl.cumsum(equal, 0).to(torch.int32) - equal
            keeps = (slot_of_share < width) & ((ordered > threshold) | ((equal > 0) & (rank < left)))
            index = stored + hl.cumsum(keeps.to(torch.int32), 0).to(torch.int32) - 1
            listed_page = hl.load(block_table, [b * width + slot_of_share], extra_mask=slot_of_share < width)
            hl.store(few, [bh, index], listed_page, extra_mask=keeps)
            stored = stored + keeps.to(torch.int32).sum(0).to(torch.int32)
            equal_before = equal_before + equal.sum(0).to(torch.int32)
        of_few = length - torch.clamp_min(count - pages, 0) * page_size
        fits = (length >= 0) & (length <= width * page_size)
        hl.store(keys, [bh], torch.where(fits, of_few, -1).to(torch.int32))


def ordered_shares(
    shares: torch.Tensor,  # [B * H_kv, width]
    bh: int,
    step: int,
    width: int,
    spec: TopPagesSpec,
) -> torch.Tensor:
    """Int32 [at_once] in the order of a step's shares; past the table, less than any."""
    slot = step * spec.at_once + hl.arange(spec.at_once)
    return torch.where(slot < width, ordered_bits(hl.load(shares, [bh, slot], extra_mask=slot < width)), LEAST)


scoring_kernel = by_device(page_scores, Config(num_warps=4, indexing="pointer"))
choosing_kernel = by_device(top_pages, Config(num_warps=4, indexing="pointer"))


def launch(a: TopPagesArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages of each KV head, int32 [B, H_kv, pages], and how many keys they have, int32 [B, H_kv]."""
    B, H, M, D = a.q.shape
    H_kv, width = a.means.size(1), a.block_table.size(1)
    few, keys = empty_tables(a)
    group = H // H_kv
    at_once = min(MOST_AT_ONCE, max(SCORES, 1 << (width - 1).bit_length()))
    shared = {
        "block_table": a.block_table.view(-1),
        "scores": a.q.new_empty((B * H, width), dtype=torch.float32),
        "group": group,
        "kv_heads": H_kv,
        "width": width,
        "spec": TopPagesSpec(
            heads=max(LEAST_HEADS, 1 << (group - 1).bit_length()),
            channels=CHANNELS,
            whole_channels=D % CHANNELS == 0,
            pages=PAGES,
            scores=SCORES,
            at_once=at_once,
            all_at_once=width <= at_once,
            is_cuda=a.q.is_cuda,
        ),
    }
    of_scores = {"B": B, "M": M, "num_pages": a.means.size(0) - 1, "scale": a.scale / M}
    scoring_kernel(a.q.is_cuda).run({"q": a.q.view(-1, D), "means": a.means, **of_scores, **shared})
    choosing_kernel(a.q.is_cuda).run(
        {
            "cache_seqlens": a.cache_seqlens,
            "shares": a.q.new_empty((B * H_kv, width), dtype=torch.float32),
            "few": few.view(B * H_kv, -1),
            "keys": keys.view(-1),
            "page_size": a.page_size,
            "sink_pages": a.sink_pages,
            "local_pages": a.local_pages,
            **shared,
        }
    )
    return few, keys


def empty_tables(a: TopPagesArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate what `launch` returns."""
    B, H_kv = a.q.size(0), a.means.size(1)
    few = a.block_table.new_empty((B, H_kv, min(a.pages, a.block_table.size(1))))
    return few, a.block_table.new_empty((B, H_kv))
