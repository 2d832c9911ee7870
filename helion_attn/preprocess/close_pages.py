"""Pages of a paged cache that an append has filled, closed: rewritten in place, with one descale of K and one of V.

    k_descale = max of the keys' own;   e4m3 K: k8 = cast(k8 * own / k_descale), an exact shift but for subnormals
                                        int8 K: k8 = round(k8 * own / k_descale)
    V:          as e4m3 K

Slot 0 of a page's descales has the page's, and slot 1 of both a negative number: `CLOSED`, the mark. What becomes of a
page depends on its bytes alone. A page that is closed already stays as it is, so sequences may share it.

A page is closed in place where it lies wholly below the last `drafts` tokens, which may still be rejected, or below the
first new key of another sequence that has it, whose prefix is no draft; also the page before the first new key, which
drafts may have left open, if a window shows it. Pages behind the window may be another sequence's by now.
`open_pages` takes the form that the cache does not
have, for the queries of the new keys: of a page that is closed its open form, and of one that is full and stays open
its closed form, with a copy of the open page behind it. `kernels.lib.paged.in_open_pages` says which query reads which.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import by_device
from helion_attn.kernels.lib.inline_asm import to_int8
from helion_attn.kernels.lib.keys import keys_of_batch, queries_of_batch, queries_of_sequence, sequence_of
from helion_attn.kernels.lib.scalars import int32, quotient
from helion_attn.kernels.lib.strided import PageSteps, flat_memory, page_begins, page_steps
from helion_attn.numerics import CLOSED
from helion_attn.preprocess.lib.v_layout import key_stored_at
from helion_attn.problem import AppendArgs, PackedBatch, open_page_count, pages_apart, power_that_holds

#: Below so many new keys a sequence, most programs find no page to close: each then looks after all heads.
FEW_NEW_KEYS = 16


#: More keys than a query may see before its own; a difference of two positions and of it fits 32 bits.
NO_WINDOW = 2**30


class CloseSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    bn: int  # keys of a page
    d_pad: int  # padded head dim of K
    d_v_pad: int  # of V
    d_tile: int  # channels that are rewritten at once
    int8_keys: bool  # K is int8
    closed: float  # what marks a closed page
    # A power of two that holds the sequences of a packed batch, which have different numbers of new keys; or 0.
    batch: int
    sequences: int  # a power of two that holds all
    is_cuda: bool  # the kernel is compiled; otherwise interpreted


def close_full_pages(
    k8: torch.Tensor,  # flat, written
    v8: torch.Tensor,  # flat, written
    k_descale: torch.Tensor,  # flat, written
    v_descale: torch.Tensor,  # flat, written
    open_k8: torch.Tensor,  # [B * width * H_kv * bn * D_pad], written
    open_v8: torch.Tensor,  # [B * width * H_kv * bn * D_v_pad], written
    open_k_descale: torch.Tensor,  # [B * width * H_kv * bn], written
    open_v_descale: torch.Tensor,  # [B * width * H_kv * bn], written
    block_table: torch.Tensor,  # [B * max_pages]
    cache_seqlens: torch.Tensor,  # [B], without the new keys; of a packed batch with them
    cu_seqlens: torch.Tensor,  # [B + 1] if batch
    num_pages: int,
    max_pages: int,
    kv_heads: int,
    head_groups: int,
    width: int,
    pages: int,
    length: int,
    drafts: int,
    left: int,
    steps: PageSteps,
    spec: hl.constexpr,  # CloseSpec
) -> None:
    """The kernel; see the module's docstring. A program has a page's heads, or a group of them.

    A head has `width` pages from that of the first new key on, and one more. `open_pages` has `width` pages a sequence.
    Of a packed batch `width` is `pages_apart`, and `pages` those of all. A query sees `left` keys before its own.
    """
    hl.specialize((k8.stride(0), v8.stride(0), k_descale.stride(0), v_descale.stride(0)))
    hl.specialize((open_k8.stride(0), open_v8.stride(0), open_k_descale.stride(0), open_v_descale.stride(0)))
    hl.specialize((block_table.stride(0), cache_seqlens.stride(0), cu_seqlens.stride(0)))
    B = cache_seqlens.size(0)
    # Of a packed batch pages of all sequences follow each other.
    groups = head_groups if spec.batch else B * head_groups
    for group, at_page in hl.grid([groups, pages]):
        first_head = group % head_groups * (kv_heads // head_groups)
        if spec.batch:
            # [batch]
            new = queries_of_batch(cu_seqlens, cache_seqlens, B, spec.batch)
            all_keys = keys_of_batch(cache_seqlens, B, spec.batch)
            last, before = quotient(all_keys - 1, int32(spec.bn)), quotient(all_keys - new, int32(spec.bn))
            touched = torch.where((new > 0) & (all_keys >= new), last - before + 2, 0)
            b, i = sequence_of(touched, at_page, spec.batch)
            b = torch.minimum(b, int32(B - 1))
            first_token, new_keys = queries_of_sequence(cu_seqlens, cache_seqlens, b)
            new_keys = torch.where(i >= 0, new_keys, 0)
            first = hl.load(cache_seqlens, [b]) - new_keys
            first_open = int32(b * width) + quotient(first_token, int32(spec.bn))
        else:
            b, i = group // head_groups, at_page + 0
            first, new_keys = hl.load(cache_seqlens, [b]), int32(length)
            first_open = int32(b * width)
        # The page before the first new key's comes first.
        j = first // spec.bn - 1 + i
        listed = (first >= 0) & (j >= 0) & (j < max_pages)
        page = hl.load(block_table, [torch.where(listed, b * max_pages + j, 0)])
        known = listed & (page >= 0) & (page < num_pages) & (new_keys > 0)
        of_first_head = page_begins(torch.where(known, page, 0), first_head, steps)[2]
        begin, end, keys = j * spec.bn, (j + 1) * spec.bn, first + new_keys
        # A sequence may have fewer new keys than drafts: only new ones may be rejected.
        kept = torch.maximum(keys - drafts, first)
        is_full, settled = end <= keys, end <= kept
        # Behind a full page that drafts keep open.
        follows = (begin < keys) & (begin > first) & (begin > kept)
        # Of all heads at once. Not "open", since a NaN is neither.
        closed = (hl.load(k_descale, [of_first_head + 1]) < 0.0).to(torch.int32)
        closes = (settled & (closed == 0)).to(torch.int32)
        if (i == 0) | (is_full & (end > kept)):
            # Others may have the page: whose new keys fill it closes it, or else the first of those that follow it.
            # [sequences]
            other = hl.arange(spec.sequences)
            there = other < B
            other_new = (int32(length) + 0 * other).to(torch.int32)
            if spec.batch:
                other_new = queries_of_batch(cu_seqlens, cache_seqlens, B, spec.sequences)
            other_first = hl.load(cache_seqlens, [other], extra_mask=there)
            if spec.batch:
                other_first = other_first - other_new
            at = other * max_pages + torch.where(known, j, 0)
            same = there & (hl.load(block_table, [at], extra_mask=there) == page) & (other_new > 0)
            same = same & (other_first >= 0) & (end > other_first - int32(left))
            fills = same & (other_first // spec.bn <= j) & (other_first + other_new > begin)
            follows_sooner = same & (other_first // spec.bn - 1 == j) & (other < b)
            elsewhere = (fills | follows_sooner).to(torch.int32).sum(0) > 0
            # Below another's first new key.
            follows_any = (same & (other_first >= end)).to(torch.int32).sum(0) > 0
            closes = torch.where((i == 0) & (elsewhere | (end <= first - int32(left))), 0, closes)
            closes = torch.where((i > 0) & follows_any & (closed == 0), 1, closes)
        copies = (i > 0) & (is_full | follows)
        if known & ((closes > 0) | copies):
            for h in hl.grid(first_head, first_head + kv_heads // head_groups):
                of_k, of_v, of_descales = page_begins(page, h, steps)
                # [bn], keys, and V's in their order
                slot = hl.arange(spec.bn)
                stored = key_stored_at(slot)
                own_k = hl.load(k_descale, [of_descales + slot])
                own_v = hl.load(v_descale, [of_descales + slot])
                own_v_stored = hl.load(v_descale, [of_descales + stored])
                # Descales are not negative, and a NaN's bits are larger than any.
                page_k = torch.amax(own_k.view(torch.int32), 0).view(torch.float32)
                page_v = torch.amax(own_v, 0)
                k_factor = (own_k * (1.0 / page_k)).unsqueeze(1)
                v_factor = (own_v_stored * (1.0 / page_v)).unsqueeze(0)
                open_block = (first_open + i - 1).to(torch.int64) * kv_heads + h
                # What is settled, or not full, is there open.
                as_it_is = settled | (end > keys)
                for k_tile in hl.grid(spec.d_pad // spec.d_tile):
                    # [bn, d_tile]
                    cols = k_tile * spec.d_tile + hl.arange(spec.d_tile)
                    k_in_page = slot.unsqueeze(1) * spec.d_pad + cols.unsqueeze(0)
                    k_at = of_k + k_in_page
                    k = hl.load(k8, [k_at])
                    if spec.int8_keys:
                        k_closed = to_int8(k.to(torch.float32), k_factor, spec.is_cuda)
                    else:
                        k_closed = (k.to(torch.float32) * k_factor).to(k8.dtype)
                    if copies:
                        k_there = open_block * (spec.bn * spec.d_pad) + k_in_page
                        hl.store(open_k8, [k_there], torch.where(as_it_is, k, k_closed))
                    if closes > 0:
                        hl.store(k8, [k_at], k_closed)
                for v_tile in hl.grid(spec.d_v_pad // spec.d_tile):
                    # [d_tile, bn]
                    channels = v_tile * spec.d_tile + hl.arange(spec.d_tile)
                    v_in_page = channels.unsqueeze(1) * spec.bn + slot.unsqueeze(0)
                    v_at = of_v + v_in_page
                    v = hl.load(v8, [v_at])
                    v_closed = (v.to(torch.float32) * v_factor).to(v8.dtype)
                    if copies:
                        v_there = open_block * (spec.bn * spec.d_v_pad) + v_in_page
                        hl.store(open_v8, [v_there], torch.where(as_it_is, v, v_closed))
                    if closes > 0:
                        hl.store(v8, [v_at], v_closed)
                marked = slot < 2
                new_k, new_v = (torch.where(slot == 0, x, spec.closed) for x in (page_k, page_v))
                if copies:
                    # All but the mark may be the keys' own.
                    opened = as_it_is | (slot > 1)
                    hl.store(open_k_descale, [open_block * spec.bn + slot], torch.where(opened, own_k, new_k))
                    hl.store(open_v_descale, [open_block * spec.bn + slot], torch.where(opened, own_v, new_v))
                if spec.is_cuda:
                    # All have read the descales.
                    hl.inline_triton("tl.debug_barrier()", args=(), output_like=None)
                if closes > 0:
                    hl.store(k_descale, [of_descales + slot], new_k, extra_mask=marked)
                    hl.store(v_descale, [of_descales + slot], new_v, extra_mask=marked)


kernel = by_device(close_full_pages, Config(num_warps=8, indexing="pointer"))


def empty_open_pages(a: AppendArgs, batch: PackedBatch | None = None) -> tuple[torch.Tensor, ...]:
    """Memory for pages in their other forms: as many as new keys may touch, shaped as the cache's tensors."""
    cache, L = a.cache, a.k.size(2)
    count = a.k.size(0) * -(-(L + cache.page_size - 1) // cache.page_size)
    if batch is not None:
        count = open_page_count(L, a.cache_seqlens.size(0), cache.page_size, a.drafts)
    return tuple(x.new_empty((count, *x.shape[1:])) for x in (cache.k8, cache.v8, cache.k_descale, cache.v_descale))


def launch(
    a: AppendArgs,
    batch: PackedBatch | None = None,
    open_pages: tuple[torch.Tensor, ...] | None = None,
    left: int = -1,
) -> tuple[torch.Tensor, ...]:
    """Close the pages that an append has filled, and return `open_pages`; these are made, or given.

    `left`: how many keys before its own a query sees, or -1 for all.
    """
    cache, length, sequences = a.cache, a.k.size(2), a.cache_seqlens.size(0)
    num_pages, H_kv, bn, D_pad = cache.k8.shape
    open_pages = empty_open_pages(a, batch) if open_pages is None else open_pages
    width, new_keys = open_pages[0].size(0) // sequences, length
    pages = width + 1
    if batch is not None:
        # A sequence has one before, one with its first key, and one with its last.
        width = pages_apart(a.drafts)
        pages = length // bn + min(sequences, length) + min(2 * sequences, length)
        new_keys = length // sequences
    kernel(a.k.is_cuda).run(
        {
            "k8": flat_memory(cache.k8),
            "v8": flat_memory(cache.v8),
            "k_descale": flat_memory(cache.k_descale),
            "v_descale": flat_memory(cache.v_descale),
            "open_k8": open_pages[0].view(-1),
            "open_v8": open_pages[1].view(-1),
            "open_k_descale": open_pages[2].view(-1),
            "open_v_descale": open_pages[3].view(-1),
            "block_table": a.block_table.view(-1),
            "cache_seqlens": a.cache_seqlens,
            "cu_seqlens": a.cache_seqlens if batch is None else batch.cu_seqlens,
            "num_pages": num_pages,
            "max_pages": a.block_table.size(1),
            "kv_heads": H_kv,
            "head_groups": 1 if new_keys < FEW_NEW_KEYS else H_kv,
            "width": width,
            "pages": pages,
            "length": length,
            "drafts": a.drafts,
            "left": NO_WINDOW if left < 0 else min(left, NO_WINDOW),
            "steps": page_steps(cache),
            "spec": CloseSpec(
                bn=bn,
                d_pad=D_pad,
                d_v_pad=cache.v8.size(2),
                d_tile=min(64, D_pad),
                int8_keys=cache.k8.dtype == torch.int8,
                closed=CLOSED,
                batch=0 if batch is None else batch.size,
                sequences=power_that_holds(sequences),
                is_cuda=a.k.is_cuda,
            ),
        }
    )
    return open_pages
