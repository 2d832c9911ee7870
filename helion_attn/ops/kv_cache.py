"""Operations of a paged cache: append to it, attend over it by one of two kernels, and both in one step."""

from __future__ import annotations

from typing import Any

import torch

from helion_attn import public_calls
from helion_attn.compiler.buffers import sm_count
from helion_attn.configs import scheduling
from helion_attn.ops import flops
from helion_attn.ops.attention import empty_out_and_lse
from helion_attn.ops.declare import Operation
from helion_attn.preprocess import top_pages as choose_pages
from helion_attn.problem import AppendArgs, DecodeArgs, OpenPagesArgs, PackedBatch, StepArgs, TopPagesArgs


def _launch_append(a: AppendArgs) -> tuple[torch.Tensor, ...]:
    from helion_attn.preprocess import append

    return append.launch(a)


def _empty_open_pages(a: AppendArgs) -> tuple[torch.Tensor, ...]:
    from helion_attn.preprocess.close_pages import empty_open_pages

    return empty_open_pages(a)


def empty_outputs(a: DecodeArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` and `lse`."""
    B, H, M, _D = a.q.shape
    return empty_out_and_lse(a.q, (B, H, M), a.cache.D_v, a.bshd, a.out_dtype)


def _launch_decode(a: DecodeArgs) -> tuple[torch.Tensor, torch.Tensor]:
    from helion_attn.kernels import cache_lse_shift, prefill

    out, lse = empty_outputs(a)
    shift = cache_lse_shift.launch(a, packed=False)
    (B, H, M, _D), H_kv, max_pages = a.q.shape, a.cache.k8.size(1), a.block_table.size(1)
    queries, splits, sms = H // H_kv * M, a.splits, sm_count(a.q)
    # More splits than pages would all be empty. A split's index times the pages fits 32 bits.
    most = min(max_pages, (2**31 - 1) // max(1, max_pages))
    if queries >= scheduling.MIN_PREFILL_ROWS:
        tile = prefill.prefill_tile(a.cache)
        if splits is None:
            programs = B * H_kv * -(-queries // tile.bm) * prefill.parts_of_v(a.cache.v8.size(2))
            queries_of_tile = -(-tile.bm * H_kv // H) + 1
            pages = scheduling.visible_key_blocks(max_pages, a.scores.left, 0, queries_of_tile, a.cache.page_size)
            splits = scheduling.key_splits(programs, pages, sms, tile.ctas_per_sm, scheduling.MIN_PAGES)
        prefill.launch(a, min(splits, most), out, lse, shift)
        return out, lse
    # The last query sees no keys after its own.
    pages = scheduling.visible_key_blocks(max_pages, a.scores.left, 0, M, a.cache.page_size)
    _decode(a, queries, pages, most, out, lse, shift)
    return out, lse


def _decode(
    a: DecodeArgs,
    queries: int,
    pages: int,
    most: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    shift: torch.Tensor | None,
    batch: PackedBatch | None = None,
) -> None:
    """Launch `fp8_attn_decode` for so many query rows of a KV head, which see up to so many pages."""
    from helion_attn.kernels import decode

    rows = scheduling.decode_rows(queries)
    limits = scheduling.split_limits(
        sequences=a.cache_seqlens.size(0),
        programs=a.cache.k8.size(1) * -(-queries // rows),
        max_pages=min(pages, most),
        splits=None if a.splits is None else min(a.splits, most),
        multiprocessors=sm_count(a.q),
        ctas_per_sm=decode.decode_tile(a.cache, rows).ctas_per_sm,
    )
    decode.launch(a, rows, limits, out, lse, shift, batch)


def _launch_step(a: StepArgs) -> torch.Tensor:
    """Append if there are keys, then decode sequences of few queries, and attend to prompts."""
    from helion_attn.kernels import cache_lse_shift, prefill
    from helion_attn.preprocess import append

    (T, H, _D), (H_kv, page_size), max_pages = a.q.shape, a.cache.k8.shape[1:3], a.block_table.size(1)
    group, drafts, opened, sms = H // H_kv, a.open_pages.drafts, a.open_pages, sm_count(a.q)
    longest = T if a.max_seqlen_q is None else min(T, a.max_seqlen_q)
    few = PackedBatch(a.cu_seqlens, longest, scheduling.decode_queries(group, drafts), few=True)
    if a.k is not None and a.v is not None:
        k, v = (x.transpose(0, 1).unsqueeze(0) for x in (a.k, a.v))
        given: Any = None if opened.k8 is None else opened[:4]
        appended = AppendArgs(k, v, a.cache, a.block_table, a.seqlens, drafts, a.rope)
        k8, v8, k_descale, v_descale = append.launch(appended, few, given, a.scores.left)
        opened = OpenPagesArgs(k8, v8, k_descale, v_descale, T, drafts)
    out, lse = a.out.unsqueeze(0), _empty_lse(a)
    attends = DecodeArgs(
        q=a.q.transpose(0, 1).unsqueeze(0),
        cache=a.cache,
        open_pages=opened,
        block_table=a.block_table,
        cache_seqlens=a.seqlens,
        splits=a.splits,
        scores=a.scores,
        needs_lse_shift=a.needs_lse_shift,
        bshd=True,
        out_dtype=a.out.dtype,
    )
    shift = cache_lse_shift.launch(attends, packed=True)
    most = min(max_pages, (2**31 - 1) // max(1, max_pages))
    width = max_pages if a.max_seqlen_k is None else min(max_pages, -(-a.max_seqlen_k // page_size))
    if few.most_queries:
        pages = scheduling.visible_key_blocks(width, a.scores.left, 0, few.most_queries, page_size)
        _decode(attends, group * few.most_queries, pages, most, out, lse.unsqueeze(0), shift, few)
    if few.most_queries < longest:
        tile, splits = prefill.prefill_tile(a.cache), a.splits
        if splits is None:
            programs = H_kv * -(-group * T // tile.bm) * prefill.parts_of_v(a.cache.v8.size(2))
            pages = scheduling.visible_key_blocks(width, a.scores.left, 0, -(-tile.bm // group) + 1, page_size)
            splits = scheduling.key_splits(programs, pages, sms, tile.ctas_per_sm, scheduling.MIN_PAGES)
        prefill.launch(attends, min(splits, most), out, lse.unsqueeze(0), shift, few._replace(few=False))
    return lse


def _empty_lse(a: StepArgs) -> torch.Tensor:
    return a.q.new_empty((a.q.size(1), a.q.size(0)), dtype=torch.float32)


top_pages = Operation("top_pages", TopPagesArgs, 2, choose_pages.launch, choose_pages.empty_tables)
append_kv = Operation(
    "append_kv",
    AppendArgs,
    4,
    _launch_append,
    _empty_open_pages,
    mutates=("cache.k8", "cache.v8", "cache.k_descale", "cache.v_descale"),
    call=public_calls.of_append,
)
decode = Operation(
    "fp8_attn_decode",
    DecodeArgs,
    2,
    _launch_decode,
    empty_outputs,
    flops=flops.of_decode,
    call=public_calls.of_decode,
)
step = Operation(
    "kv_cache_step",
    StepArgs,
    1,
    _launch_step,
    _empty_lse,
    mutates=(
        *("cache.k8", "cache.v8", "cache.k_descale", "cache.v_descale", "out"),
        *("open_pages.k8", "open_pages.v8", "open_pages.k_descale", "open_pages.v_descale"),
    ),
    call=public_calls.of_step,
)
