"""FP8 attention of many queries on a paged KV cache, such as a chunk of a prompt: out = softmax(q k^T * sm_scale) v.

It computes what `fp8_attn_decode` does, to the same rounding points. Query rows are the M of its products. P stays in
registers, as in `fp8_attn_fwd`, so no page's scores pass through shared memory.

One program owns one of `m_tiles` tiles of `bm` query rows that share a KV head, and one of the splits of the pages that
each of them sees. Row r is query r // group of the group's head r % group. A tile's queries follow each other, so
with a causal mask the pages behind its last query are not read.

    s = q8 k8^T
    t = s * q_descale_i * k_descale * sm_scale * log2(e) + log2(v_descale)       one FMA
    m_i = max of the page's t, less 8;  p = 2**(t - m_i);  l_i += sum(p) / v_descale
    acc = acc * alpha + (p v8)                                                   e4m3, two levels

Head dims above 256 are as in `fp8_attn_fwd_large_d`: channels of V are split over programs, each with all scores, and K
and Q come in pieces of 256 channels.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import MAX_REGISTERS, Config, helion, hl
from helion_attn.compiler.runners import Runner, compiled, interpreted
from helion_attn.configs import MAX_FRESH_D, MAX_PIECE
from helion_attn.kernels.lib.inline_asm import e4m3_of_bits, exp2, fma, in_new_registers, opaque_copy
from helion_attn.kernels.lib.keys import (
    known_keys,
    page_by_bits,
    page_of,
    page_of_entry,
    queries_of_batch,
    queries_of_sequence,
    sequence_of,
)
from helion_attn.kernels.lib.masks import visible_keys
from helion_attn.kernels.lib.paged import (
    FP32_BYTES,
    PagedGrid,
    closed_pages,
    descales_by_form,
    descales_of_page,
    in_open_pages,
    in_split_of_query,
    k_of_page,
    largest_of,
    launch_paged,
    line_of_page,
    log2_of_power,
    may_be_wide,
    open_sums,
    own_page_of,
    page_scores,
    products,
    range_of_open_pages,
    scores_by_form,
    split_of_query,
    sums_of_page,
    total_of_lanes,
    transposed,
    v_of_page,
    wide_line,
)
from helion_attn.kernels.lib.row_layout import rows_to_dtype
from helion_attn.kernels.lib.scalars import imin, int32, inverse_of_power, quotient
from helion_attn.kernels.lib.schraudolph import by_fours, row_sums
from helion_attn.kernels.lib.steps import (
    accumulate,
    add_sink,
    interleave_keys,
    to_descale,
)
from helion_attn.numerics import LN2, LOG2E, NO_KEY
from helion_attn.options import ScoreScales
from helion_attn.problem import DecodeArgs, PackedBatch
from helion_attn.types import PagedKVCache


class PrefillTile(NamedTuple):
    """How a program is made."""

    bm: int  # query rows
    num_warps: int  # of a program, each with 16 rows
    num_stages: int  # pages in flight
    ctas_per_sm: int  # programs that an SM holds
    max_registers: int  # a thread's


#: The fastest on an H200 without windows and softcaps, by the largest padded head dim (docs/notes/paged_cache.md).
TILES = {
    64: PrefillTile(bm=64, num_warps=4, num_stages=2, ctas_per_sm=4, max_registers=128),
    128: PrefillTile(bm=64, num_warps=4, num_stages=2, ctas_per_sm=3, max_registers=168),
    512: PrefillTile(bm=128, num_warps=8, num_stages=3, ctas_per_sm=1, max_registers=255),
}


def prefill_tile(cache: PagedKVCache) -> PrefillTile:
    """The tile for a cache: that of the larger head dim, which has the registers for both."""
    larger_d = max(cache.k8.size(3), cache.v8.size(2))
    return next(tile for most, tile in TILES.items() if larger_d <= most)


#: Columns of ones in a product that sums up P: the fewest that there may be. Each column of it is the sum.
ONES = 16


def parts_of_v(D_v_pad: int) -> int:
    """Parts of V's channels, a program each: registers do not hold more than 256 channels."""
    return -(-D_v_pad // MAX_PIECE)


def fp8_attn_prefill(
    q: torch.Tensor,  # flat
    k8: torch.Tensor,  # [num_pages, H_kv, bn, D_pad], with `d_in_halves` [num_pages, H_kv, 2, bn, D_pad / 2]
    v8: torch.Tensor,  # [num_pages, H_kv, D_v_pad, bn], with n pieces [num_pages, H_kv, n, D_v_pad / n, bn]
    k_descale: torch.Tensor,  # flat
    v_descale: torch.Tensor,  # flat
    open_k8: torch.Tensor,  # as k8, of `open_width` pages a sequence, if has_open_pages
    open_v8: torch.Tensor,  # as v8, of as many pages
    open_k_descale: torch.Tensor,  # [B * open_width * H_kv * bn]
    open_v_descale: torch.Tensor,  # [B * open_width * H_kv * bn]
    block_table: torch.Tensor,  # [B * max_pages]
    cache_seqlens: torch.Tensor,  # [B]
    cu_seqlens: torch.Tensor,  # [B + 1] if batch
    sinks: torch.Tensor,  # [H] if has_sinks
    lse_shift: torch.Tensor,  # [B * H * M] if has_lse_shift
    channel_factors: torch.Tensor,  # [factor_rows * D_pad] if equalise
    out: torch.Tensor,  # [splits * B * H * M, D_v], written
    lse: torch.Tensor,  # [splits * B * H * M], written
    page_step: int,  # from a page's descales to the next's, in bytes
    head_step: int,  # of heads
    open_width: int,
    new_keys: int,
    drafts: int,
    splits: int,
    m_tiles: int,
    max_pages: int,
    group: int,
    m_len: int,
    most_queries: int,
    split_rows: int,
    q_b_step: int,
    q_h_step: int,
    q_s_step: int,
    out_head_step: int,
    out_row_step: int,
    factor_rows: int,
    left: int,
    right: int,
    scales: ScoreScales,
    spec: hl.constexpr,  # PagedSpec
) -> None:
    """The kernel; see the module's docstring. Rows of `out` lie `out_row_step` apart, heads `out_head_step`."""
    hl.register_tunable(MAX_REGISTERS, helion.autotuner.IntegerFragment(24, 255, 255))
    # A pool of more than 2**31 elements is read by descriptors only if its dimensions are known to fit 32 bits.
    torch._check(k8.size(0) <= 2**24)
    torch._check(k8.size(1) <= 2**24)
    torch._check(k8.size(2) <= 2**24)
    torch._check(v8.size(0) <= 2**24)
    torch._check(v8.size(1) <= 2**24)
    torch._check(v8.size(2) <= 2**24)
    torch._check(open_k8.size(0) <= 2**24)
    torch._check(open_k8.size(1) <= 2**24)
    torch._check(open_k8.size(2) <= 2**24)
    torch._check(open_v8.size(0) <= 2**24)
    torch._check(open_v8.size(1) <= 2**24)
    torch._check(open_v8.size(2) <= 2**24)
    num_pages, kv_heads, B = k8.size(0), k8.size(1), cache_seqlens.size(0)
    bn = hl.specialize(k8.size(-2))
    d_tile = hl.specialize(k8.size(-1))
    d_v_tile = hl.specialize(v8.size(-2))
    d_out = hl.specialize(out.size(1))
    # Known strides keep loads and stores 16 bytes wide.
    hl.specialize((q.stride(0), out.stride(0), out.stride(1)))
    hl.specialize((block_table.stride(0), cache_seqlens.stride(0), sinks.stride(0), lse_shift.stride(0)))
    hl.specialize((channel_factors.stride(0), cu_seqlens.stride(0)))
    hl.specialize((k_descale.stride(0), v_descale.stride(0)))
    # Of a packed batch tiles of all sequences follow each other.
    heads = kv_heads if spec.batch else B * kv_heads
    # Tiles that read the same pages are neighbours, those of the last queries first.
    for split, bh, from_end in hl.grid([splits, heads, m_tiles * spec.v_parts]):
        h = bh % kv_heads
        # A program has a part of V's channels. Parts of a tile are neighbours, read the same K, and have the same lse.
        tile_from_end = from_end // spec.v_parts
        v_part = from_end % spec.v_parts
        if spec.batch:
            # [batch]; sequences of few queries are those of `fp8_attn_decode`.
            of_each = queries_of_batch(cu_seqlens, cache_seqlens, B, spec.batch)
            of_each = torch.where(of_each > int32(most_queries), of_each, 0)
            tiles = quotient(of_each * int32(group) + (spec.rows - 1), int32(spec.rows))
            b, tile = sequence_of(tiles, tile_from_end, spec.batch)
            b = torch.minimum(b, int32(B - 1))
            first_query, queries = queries_of_sequence(cu_seqlens, cache_seqlens, b)
            # Behind the last tile there are none; tiles of the sequence's last queries come first.
            queries = torch.where((queries > int32(most_queries)) & (tile >= 0), queries, 0)
            tiles_there = quotient(queries * int32(group) + (spec.rows - 1), int32(spec.rows))
            first_row = torch.clamp_min(tiles_there - 1 - tile, 0) * spec.rows
        else:
            b = bh // kv_heads
            first_row = int32((m_tiles - 1 - tile_from_end) * spec.rows)
            first_query, queries = int32(0), int32(m_len)
        n_len, known_length = known_keys(cache_seqlens, b, max_pages, bn)
        if spec.batch:
            n_len = torch.where(queries > 0, n_len, 0)
        rows_of_group = queries * int32(group)
        # [bm]
        r = first_row + hl.arange(spec.rows, dtype=torch.int32)
        in_range = r < rows_of_group
        query = quotient(r, int32(group))
        head = h * group + r - query * int32(group)
        # [bm, D_pad]
        cols = hl.arange(d_tile)
        # In 64 bits, also where indices have 32.
        row_offset = (b * q_b_step + head * q_h_step + (first_query + query).to(torch.int64) * q_s_step) * spec.unit
        keep = in_range.unsqueeze(1) & (cols < spec.d).unsqueeze(0)
        x = hl.load(q, [row_offset.unsqueeze(1) + cols.unsqueeze(0) * spec.d_step], extra_mask=keep).to(torch.float32)
        if spec.equalise:
            of_factors = bh % factor_rows * (d_tile * (1 + spec.d_in_halves)) + cols
            x = x * hl.load(channel_factors, [of_factors]).unsqueeze(0)
        largest_q = torch.amax(torch.abs(x), 1)
        if spec.d_in_halves:
            cols_high = d_tile + cols
            keep = in_range.unsqueeze(1) & (cols_high < spec.d).unsqueeze(0)
            at_high = row_offset.unsqueeze(1) + cols_high.unsqueeze(0) * spec.d_step
            x_high = hl.load(q, [at_high], extra_mask=keep).to(torch.float32)
            if spec.equalise:
                x_high = x_high * hl.load(channel_factors, [of_factors + d_tile]).unsqueeze(0)
            largest_q = torch.maximum(largest_q, torch.amax(torch.abs(x_high), 1))
        # [bm]
        q_descale = to_descale(largest_q, spec.q_largest)
        q_scale_log2 = q_descale * scales.qk_scale
        # [bm, D_pad], or each half of it
        q_tile = rows_to_dtype(x, 1.0 / q_descale, k8.dtype, spec.is_cuda)
        q_high = q_tile
        if spec.d_in_halves:
            q_high = rows_to_dtype(x_high, 1.0 / q_descale, k8.dtype, spec.is_cuda)

        # Query i sees keys i + diagonal - left .. i + diagonal + right: bottom-right alignment.
        diagonal = n_len - queries
        first_on_diagonal = diagonal + quotient(first_row, int32(group))
        last_row = torch.clamp_min(torch.minimum(first_row + spec.rows, rows_of_group) - 1, 0)
        last_on_diagonal = diagonal + quotient(last_row, int32(group))
        # Splits of a tile's queries begin and end with its first and its last one's.
        n_begin, n_whole = split_of_query(first_on_diagonal, n_len, left, right, split, splits, spec)
        n_left, n_end = split_of_query(last_on_diagonal, n_len, left, right, split, splits, spec)
        # Pages n_left .. n_whole are seen whole by all rows of the tile, in their splits.
        keys_of_first = n_len
        if spec.scores.has_right:
            keys_of_first = torch.clamp_min(torch.minimum(n_len, first_on_diagonal + int32(right) + 1), 0)
        n_whole = torch.minimum(n_whole, keys_of_first >> spec.bn_log2)
        if spec.scores.has_left:
            left_edge = torch.clamp_min(last_on_diagonal - int32(left), 0)
            n_left = torch.maximum(n_left, (left_edge + bn - 1) >> spec.bn_log2)

        if spec.has_open_pages:
            new = queries if spec.batch else int32(new_keys)
            first_slot_page = int32(b * open_width)
            if spec.batch:
                first_slot_page = first_slot_page + (first_query >> spec.bn_log2)
            first_open_page, open_begin, open_end = range_of_open_pages(
                own_page_of(first_on_diagonal, n_len, right, spec), n_begin, n_end, n_len, new, drafts, spec
            )
            # Rows see pages from there on here or there.
            n_whole = torch.minimum(n_whole, first_open_page)

        m_i = hl.full([spec.rows], NO_KEY, dtype=torch.float32)
        m_run = m_i
        line_bias = hl.full([], spec.line_bias, dtype=torch.float32)
        # Sums in P V's product are whole; others are reduced across lanes once, after the loops.
        l_i = hl.zeros([spec.rows] if spec.schraudolph_exp2 else [4, 4, spec.rows], dtype=torch.float32)
        # [bm, d_v_tile]: the program's channels, or each half of them
        acc = hl.zeros([spec.rows, d_v_tile], dtype=torch.float32)
        if spec.split_v:
            acc_high = hl.zeros([spec.rows, d_v_tile], dtype=torch.float32)

        # A row that is NaN or infinite must not change its neighbours.
        known_scale_log2 = torch.where(q_scale_log2 < float("inf"), q_scale_log2, 0.0)
        largest_q_scale_log2 = torch.amax(known_scale_log2, 0)
        first_entry = int32(b * max_pages)
        # [bm], of `lse_shift`
        lse_rows = head * m_len + first_query + query
        if not spec.batch:
            lse_rows = lse_rows + b * kv_heads * group * m_len
        shift = q_scale_log2
        if spec.scores.lse_shift_in_scores:
            shift = hl.load(lse_shift, [lse_rows], extra_mask=in_range)
        entry = hl.load(block_table, [first_entry + imin(n_begin, int32(max_pages - 1))])
        next_page = page_by_bits(entry, num_pages)[0]
        next_k, next_v = descales_of_page(k_descale, v_descale, next_page, page_step, h, head_step, spec.is_cuda)
        # Pages from there on may be open.
        n_closed = torch.minimum(torch.maximum(closed_pages(n_len, drafts, spec), int32(n_begin)), int32(n_end))
        for j in hl.grid(n_begin, n_closed):
            page = page_of_entry(entry, num_pages)[0]
            known_page = page_by_bits(entry, num_pages)[1]
            page_k, page_v = next_k, next_v
            # One iteration early: warps would wait for what they use in the same one.
            entry = hl.load(block_table, [first_entry + imin(n_closed - 1, int32(j + 1))])
            next_page = page_by_bits(entry, num_pages)[0]
            next_k, next_v = descales_of_page(k_descale, v_descale, next_page, page_step, h, head_step, spec.is_cuda)
            # [bn, D_pad], or its halves, and [d_v_tile, bn]
            k_pieces, v_tile = k_of_page(k8, page, h, spec), v_of_page(v8, page, h, v_part, 0, spec)
            if spec.split_v:
                v_high = v_of_page(v8, page, h, v_part, 1, spec)
            # [bm, bn]
            s = products([q_tile, q_high], transposed(k_pieces), spec.rows, bn, spec)
            v_log2 = log2_of_power(page_v)
            row_scale_log2 = torch.where(known_page, q_scale_log2, float("nan"))
            s, scale_log2 = page_scores(s, row_scale_log2 * page_k, shift, scales, 1, spec)
            edge = torch.maximum(n_left - int32(j), int32(j + 1) - n_whole)
            if edge > 0:
                key = int32(j * bn) + hl.arange(bn, dtype=torch.int32)
                # [bm]
                row_at_edge = opaque_copy(first_row + hl.arange(spec.rows, dtype=torch.int32), spec.is_cuda)
                on_diagonal_at_edge = diagonal + quotient(row_at_edge, int32(group))
                visible = visible_keys(key, on_diagonal_at_edge, n_len, int32(left), int32(right), spec.scores)
                visible = in_split_of_query(visible, j, on_diagonal_at_edge, n_len, left, right, split, splits, spec)
                if spec.has_open_pages:
                    own_page_at_edge = own_page_of(on_diagonal_at_edge, n_len, right, spec)
                    there = in_open_pages(j, own_page_at_edge, n_len, new, drafts, spec)
                    visible = visible & (there.to(torch.int32) == 0).unsqueeze(1)
                s = torch.where(visible, s, float("-inf"))
            m_before = m_i
            largest = largest_of(s, 1, spec.line_bias)
            m_run, m_i, scale, offset, top = line_of_page(largest, line_bias, scale_log2, v_log2, m_run, m_i, spec)
            if spec.may_be_wide:
                wide = may_be_wide(largest_q_scale_log2, page_k, scales, spec)
                if wide > 0:
                    s, scale, offset = wide_line(
                        s, scale_log2, v_log2, m_i, scale, offset, largest, line_bias, top, 1, spec
                    )
            # [bm, bn]
            line = fma(s, scale.unsqueeze(1), offset.unsqueeze(1), spec.is_cuda)
            # [bm]
            v_inverse = inverse_of_power(page_v)
            if spec.schraudolph_exp2:
                p8 = e4m3_of_bits(by_fours(line, spec.rows, bn), spec.is_cuda).reshape(spec.rows, bn)
                alpha = exp2(m_before - m_i, spec.is_cuda)
            else:
                p = exp2(line, spec.is_cuda)
                sums = sums_of_page(p.transpose(0, 1), bn, spec.rows) * v_inverse
                # Not sooner: it would take registers that P needs.
                alpha = exp2(m_before - m_i, spec.is_cuda)
                l_i = fma(l_i, alpha.unsqueeze(0), sums, spec.is_cuda)
                p8 = interleave_keys(p.to(torch.float8_e4m3fn), spec.rows, bn)
            acc = accumulate(acc, alpha.unsqueeze(1), p8, v_tile.transpose(0, 1), spec)
            if spec.split_v:
                acc_high = accumulate(acc_high, alpha.unsqueeze(1), p8, v_high.transpose(0, 1), spec)
            if spec.schraudolph_exp2:
                l_i = fma(l_i, alpha, row_sums(p8) * v_inverse, spec.is_cuda)

        # Or the copies of loops of both kinds would be in the same registers.
        acc = in_new_registers(acc, spec.is_cuda)
        if spec.split_v:
            acc_high = in_new_registers(acc_high, spec.is_cuda)
        # [bm]. A row's query and head, computed again: kept through the loop, they would hold registers of it.
        row_after = opaque_copy(first_row + hl.arange(spec.rows, dtype=torch.int32), spec.is_cuda)
        in_range_after = row_after < rows_of_group
        query_after = quotient(row_after, int32(group))
        head_after = h * group + row_after - query_after * int32(group)
        on_diagonal = diagonal + query_after
        own_page = own_page_of(on_diagonal, n_len, right, spec) if spec.has_open_pages else n_len
        lse_rows_after = head_after * m_len + first_query + query_after
        if not spec.batch:
            lse_rows_after = lse_rows_after + b * kv_heads * group * m_len
        # The pages that remain, as the cache has them, then as `OpenPages` does.
        n_last, n_last_open, slot = int32(n_end) - n_closed, int32(n_end) - n_closed, int32(0)
        if spec.has_open_pages:
            n_last_open = n_last + torch.clamp_min(open_end - open_begin, 0)
        for t in hl.grid(0, n_last_open):
            jt = n_closed + int32(t)
            elsewhere = int32(0)
            if spec.has_open_pages:
                elsewhere = (int32(t) >= n_last).to(torch.int32)
                jt = torch.where(elsewhere > 0, open_begin + int32(t) - n_last, jt)
                slot = torch.where(elsewhere > 0, first_slot_page + jt - first_open_page, 0)
            page, known_page = page_of(block_table, first_entry + jt, num_pages)
            # [bm, bn]. Each source has products of its own, so that they read what TMA wrote: a tile that is chosen of
            # two would be written anew.
            if elsewhere > 0:
                s = products([q_tile, q_high], transposed(k_of_page(open_k8, slot, h, spec)), spec.rows, bn, spec)
            else:
                s = products([q_tile, q_high], transposed(k_of_page(k8, page, h, spec)), spec.rows, bn, spec)
            if elsewhere > 0:
                own_k, own_v, page_k, page_v, is_open = descales_by_form(
                    open_k_descale, open_v_descale, (slot * int32(kv_heads) + int32(h)) * bn, bn
                )
            else:
                own_k, own_v, page_k, page_v, is_open = descales_by_form(
                    k_descale, v_descale, (page.to(torch.int64) * page_step + h * head_step) // FP32_BYTES, bn
                )
            row_scale_log2 = torch.where(known_page, q_scale_log2, float("nan"))
            s, scale_log2, v_log2, bias = scores_by_form(
                s, row_scale_log2, own_k, own_v, page_k, page_v, is_open, shift, scales, 1, spec
            )
            key = jt * bn + hl.arange(bn, dtype=torch.int32)
            visible = visible_keys(key, on_diagonal, n_len, int32(left), int32(right), spec.scores)
            visible = in_split_of_query(visible, jt, on_diagonal, n_len, left, right, split, splits, spec)
            if spec.has_open_pages:
                there = in_open_pages(jt, own_page, n_len, new, drafts, spec)
                visible = visible & (there.to(torch.int32) == elsewhere).unsqueeze(1)
            s = torch.where(visible, s, float("-inf"))
            m_before = m_i
            largest = largest_of(s, 1, 0.0)
            m_run, m_i, scale, offset, top = line_of_page(largest, bias, scale_log2, v_log2, m_run, m_i, spec)
            if spec.may_be_wide:
                s, scale, offset = wide_line(s, scale_log2, v_log2, m_i, scale, offset, largest, bias, top, 1, spec)
            # [bm, bn]
            line = fma(s, scale.unsqueeze(1), offset.unsqueeze(1), spec.is_cuda)
            # [bm]
            alpha = exp2(m_before - m_i, spec.is_cuda)
            if spec.schraudolph_exp2:
                p8 = e4m3_of_bits(by_fours(line, spec.rows, bn), spec.is_cuda).reshape(spec.rows, bn)
                # A product, which adds in the order that the loop above has: a page may be of either loop.
                ones = hl.full([ONES, bn], 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
                columns = hl.dot(p8, ones.transpose(0, 1)).transpose(0, 1)
                of_closed = total_of_lanes(columns, spec.rows) * (inverse_of_power(page_v) * (1.0 / ONES))
                of_open = total_of_lanes(open_sums(line.transpose(0, 1), own_v, bn, spec.rows), spec.rows)
                l_i = fma(l_i, alpha, torch.where(is_open > 0, of_open, of_closed), spec.is_cuda)
            else:
                p = exp2(line, spec.is_cuda)
                of_keys = inverse_of_power(torch.where(is_open > 0, own_v, page_v))
                sums = sums_of_page(p.transpose(0, 1) * of_keys.unsqueeze(1), bn, spec.rows)
                l_i = fma(l_i, alpha.unsqueeze(0), sums, spec.is_cuda)
                p8 = interleave_keys(p.to(torch.float8_e4m3fn), spec.rows, bn)
            # [bm, d_v_tile], or each half
            if elsewhere > 0:
                acc = accumulate(
                    acc, alpha.unsqueeze(1), p8, v_of_page(open_v8, slot, h, v_part, 0, spec).transpose(0, 1), spec
                )
                if spec.split_v:
                    acc_high = accumulate(
                        acc_high, alpha.unsqueeze(1), p8, v_of_page(open_v8, slot, h, v_part, 1, spec).transpose(0, 1),
                        spec,
                    )  # fmt: skip
            else:
                acc = accumulate(
                    acc, alpha.unsqueeze(1), p8, v_of_page(v8, page, h, v_part, 0, spec).transpose(0, 1), spec
                )
                if spec.split_v:
                    acc_high = accumulate(
                        acc_high, alpha.unsqueeze(1), p8, v_of_page(v8, page, h, v_part, 1, spec).transpose(0, 1), spec
                    )

        # [bm]
        # Also since Helion looks for what masks a sum, and not through branches.
        l_i = in_new_registers(l_i, spec.is_cuda)
        if spec.schraudolph_exp2:
            row_sum = l_i
        else:
            row_sum = total_of_lanes(l_i, spec.rows)
        row_sum = torch.where(known_length, row_sum, float("nan"))
        normaliser = 1.0 / row_sum
        total = row_sum
        if spec.scores.has_sinks:
            # [bm], in one of the splits
            sink = hl.load(sinks, [head_after], extra_mask=in_range_after)
            if spec.scores.lse_shift_in_lse:
                sink = sink - hl.load(lse_shift, [lse_rows_after], extra_mask=in_range_after)
            # Else this product and `add_sink`'s sum are one FMA in some kernels, which rounds once.
            sink_log2 = in_new_registers(sink * LOG2E, spec.is_cuda)
            sink_log2 = torch.where(split + 0 * row_after == 0, sink_log2, float("-inf"))
            rescale, m_i, total = add_sink(m_i, row_sum, sink_log2, spec)
            normaliser = rescale / total
        no_key = row_sum == 0.0
        if spec.scores.has_sinks:
            no_key = no_key & (total == total)  # a sink that is NaN stays one
        lse_of_row = (m_i + torch.log2(total)) * LN2
        if spec.scores.lse_shift_in_lse and not spec.is_split_kv:
            lse_of_row = lse_of_row + hl.load(lse_shift, [lse_rows_after], extra_mask=in_range_after)
        hl.store(lse, [split * split_rows + lse_rows_after], lse_of_row, extra_mask=in_range_after)
        out_rows = split * split_rows + head_after * out_head_step + (first_query + query_after) * out_row_step
        if not spec.batch:
            out_rows = out_rows + b * kv_heads * group * m_len
        # [bm, d_v_tile]
        channels = v_part * (d_v_tile * (1 + spec.split_v)) + hl.arange(d_v_tile)
        o = torch.where(no_key.unsqueeze(1), 0.0, acc * normaliser.unsqueeze(1))
        stored = in_range_after.unsqueeze(1) & (channels < d_out).unsqueeze(0)
        hl.store(out, [out_rows, channels], o.to(out.dtype), extra_mask=stored)
        if spec.split_v:
            o = torch.where(no_key.unsqueeze(1), 0.0, acc_high * normaliser.unsqueeze(1))
            channels = d_v_tile + channels
            stored = in_range_after.unsqueeze(1) & (channels < d_out).unsqueeze(0)
            hl.store(out, [out_rows, channels], o.to(out.dtype), extra_mask=stored)


@functools.cache
def kernel(is_cuda: bool, tile: PrefillTile) -> Runner:
    """The kernel for the device."""
    if not is_cuda:
        return interpreted(fp8_attn_prefill)
    config = Config(
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        range_num_stages=[0, tile.num_stages, 1],
        # The last grid dimension is fastest.
        loop_orders=[[2, 1, 0]],
        indexing="tensor_descriptor",
        host_tensor_descriptors=True,
        **{MAX_REGISTERS: tile.max_registers},
    )
    return compiled(fp8_attn_prefill, config)


def launch(
    a: DecodeArgs,
    splits: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    shift: torch.Tensor | None,
    batch: PackedBatch | None = None,
) -> None:
    """Write `out` and `lse`; the arguments are those of `launch_paged`."""
    (B, H, M, _), H_kv, v8, tile = a.q.shape, a.cache.k8.size(1), a.cache.v8, prefill_tile(a.cache)
    if batch is None:
        tiles = -(-H // H_kv * M // tile.bm)
    else:
        # Each sequence of the kernel's has one that is not full, at most.
        tiles = H // H_kv * M // tile.bm + min(a.cache_seqlens.size(0), M // (batch.most_queries + 1))
    grid = PagedGrid(tile.bm, tiles, splits, B * H * M, splits > 1)
    own = {"splits": splits, "split_rows": grid.split_rows}
    runner, is_wide = kernel(a.q.is_cuda, tile), v8.size(2) > MAX_FRESH_D
    launch_paged(runner, a, grid, is_wide, parts_of_v(v8.size(2)), out, lse, batch, shift, own)
