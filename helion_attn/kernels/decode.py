"""FP8 attention of a few queries on a paged KV cache, split over keys: out = softmax(q k^T * sm_scale) v.

One program owns up to `MAX_ROWS` query rows that share a KV head (the whole query group's, times the new tokens), and
one of the splits of the pages that each of them sees: `dynamic_splits` says how many each sequence has, and
`merge_splits` merges them. A page is a packed block of `bn` keys.

    q8, q_descale = e4m3 or int8 of a row                                        rounding point 1
    s = q8 k8^T                                                                  fp32, or int32
    t = s * q_descale_i * k_descale * sm_scale * log2(e) + log2(v_descale)       one FMA
    m_i = max of the page's t, less 8                                            fp32
    p = 2**(t - m_i)              e4m3 up to D 128: bits from the score (`lib.schraudolph`); else exp2, cast: point 2
    l_i += sum(p) / v_descale     fp32, of rounded p with bits, else of p as it was
    acc = acc * alpha + (p v8)    two levels as in `fp8_attn_fwd`
    out = acc / l_i                                                              fp32, cast once: rounding point 3

A closed page has one k_descale and one v_descale. V's rides on the exponent: m_i is the largest weight of the row in
its page, probability times magnitude of the value (`lib/block_max.py`). V's descales are powers of two, so that their
logarithm and their inverse are integer steps on the bits, and `l_i` is as exact as without them.

The keys of an open page, a sequence's last, have descales of their own, in t and in l_i; there P that is 0 in e4m3
counts in l_i as what it was, or a key of little probability and a large V would take the others' share. New keys'
queries may see a page in another form than the cache has it in. Such pages come from `OpenPages`:
`lib.paged.in_open_pages` says which. A first loop has the pages that are closed, and a second one those that may be
open, as the cache has them and then as `OpenPages` does. A page of which a row sees nothing leaves its sums as they
are, so that a row's bits do not depend on what shares its tile.

Products are taken transposed, with keys or V's channels as the M of a WGMMA, of which 64 is the least, and query rows
as its N, of which 16 is enough. So a tile of 16 rows costs a thread 16 scores a page, and what belongs to a key, its
two descales, is 4 numbers a thread.

Above head dim 256 K, Q and V come in pieces of 256 channels, and a page has half as many keys: two of them fit shared
memory. All of V's channels stay in one program, since reading K twice would cost more than registers.

Keys may be less a mean of the cache's. Then all scores of a row lack its product with that. A softmax loses nothing by
it. A softcap gets it back before its tanh, a sink loses it too, and the lse gets it at the end, or where splits are
merged.

A window moves the first page that is read and masks at its edges, and a sink joins the sum of the first split.

What a page holds past the end of a sequence enters no result. Scores are masked. V is multiplied by p = 0 there, and
`append` has cleared it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import MAX_REGISTERS, Config, helion, hl
from helion_attn.compiler.runners import Runner, compiled, interpreted
from helion_attn.configs import MAX_PIECE
from helion_attn.configs.scheduling import MIN_ROWS, SplitLimits
from helion_attn.kernels import dynamic_splits
from helion_attn.kernels.lib.inline_asm import e4m3_of_bits, exp2, fma, in_new_registers
from helion_attn.kernels.lib.keys import (
    SplitLists,
    known_keys,
    page_by_bits,
    page_of,
    page_of_entry,
    queries_of_sequence,
    split_at,
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
    v_of_page,
    wide_line,
)
from helion_attn.kernels.lib.row_layout import rows_to_dtype
from helion_attn.kernels.lib.scalars import imin, int32, inverse_of_power, quotient
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


class DecodeTile(NamedTuple):
    """How a program is made."""

    num_warps: int  # of a program
    num_stages: int  # pages in flight
    ctas_per_sm: int  # programs that an SM holds
    max_registers: int  # a thread's


#: By the largest padded head dim: the tile of up to 16 rows, and that of 32. The fastest on an H200, but for D 512.
#: Eight warps share what four have no registers for: 512 channels, or 256 of 32 rows.
TILES = {
    64: (
        DecodeTile(4, num_stages=3, ctas_per_sm=4, max_registers=128),
        DecodeTile(4, num_stages=3, ctas_per_sm=3, max_registers=168),
    ),
    128: (DecodeTile(4, num_stages=3, ctas_per_sm=2, max_registers=255),) * 2,
    256: (
        DecodeTile(4, num_stages=3, ctas_per_sm=1, max_registers=255),
        DecodeTile(8, num_stages=3, ctas_per_sm=1, max_registers=255),
    ),
    512: (DecodeTile(8, num_stages=2, ctas_per_sm=1, max_registers=255),) * 2,
}


def decode_tile(cache: PagedKVCache, rows: int) -> DecodeTile:
    """The tile for a cache and a program's rows: that of the larger head dim, which has the registers for both."""
    larger_d = max(cache.k8.size(3), cache.v8.size(2))
    return next(of_rows[rows > MIN_ROWS] for most, of_rows in TILES.items() if larger_d <= most)


def in_order_of_v(p8: torch.Tensor, bn: int, rows: int) -> torch.Tensor:
    """P, [bn, rows], with its keys in V's order."""
    return interleave_keys(p8.transpose(0, 1), rows, bn).transpose(0, 1)


def fp8_attn_decode(
    q: torch.Tensor,  # flat
    k8: torch.Tensor,  # [num_pages, H_kv, bn, D_pad], with `d_in_halves` [num_pages, H_kv, 2, bn, D_pad / 2]
    v8: torch.Tensor,  # [num_pages, H_kv, D_v_pad, bn], with `split_v` [num_pages, H_kv, 2, D_v_pad / 2, bn]
    k_descale: torch.Tensor,  # flat
    v_descale: torch.Tensor,  # flat
    open_k8: torch.Tensor,  # as k8, of `open_width` pages a sequence, if has_open_pages
    open_v8: torch.Tensor,  # as v8, of as many pages
    open_k_descale: torch.Tensor,  # [B * open_width * H_kv * bn]
    open_v_descale: torch.Tensor,  # [B * open_width * H_kv * bn]
    block_table: torch.Tensor,  # [B * max_pages]
    cache_seqlens: torch.Tensor,  # [B]
    cu_seqlens: torch.Tensor,  # [B + 1] if batch
    sequence_of_split: torch.Tensor,  # [all_splits] if is_split_kv
    first_split: torch.Tensor,  # [B] if is_split_kv
    own_splits: torch.Tensor,  # [B] if is_split_kv
    sinks: torch.Tensor,  # [H] if has_sinks
    lse_shift: torch.Tensor,  # [B * H * M] if has_lse_shift
    channel_factors: torch.Tensor,  # [factor_rows * D_pad] if equalise
    out: torch.Tensor,  # [B * H * M, D_v], of splits [all_splits * H * most_queries, D_v], written
    lse: torch.Tensor,  # [B * H * M], of splits [all_splits * H * most_queries], written
    page_step: int,  # from a page's descales to the next's, in bytes
    head_step: int,  # of heads
    open_width: int,
    new_keys: int,
    drafts: int,
    all_splits: int,
    m_tiles: int,
    max_pages: int,
    group: int,
    m_len: int,
    most_queries: int,
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
    """The kernel; see the module's docstring. Rows of `out` lie `out_row_step` apart, heads `out_head_step`.

    `all_splits` are as many as all sequences may have, or with one each as sequences. What is no split writes nothing.
    """
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
    num_pages, kv_heads = k8.size(0), k8.size(1)
    bn = hl.specialize(k8.size(-2))
    d_tile = hl.specialize(k8.size(-1))
    d_v_tile = hl.specialize(v8.size(-2))
    d_out = hl.specialize(out.size(1))
    # Known strides keep loads and stores 16 bytes wide.
    hl.specialize((q.stride(0), out.stride(0), out.stride(1), k_descale.stride(0), v_descale.stride(0)))
    hl.specialize((block_table.stride(0), cache_seqlens.stride(0), sinks.stride(0), lse_shift.stride(0)))
    hl.specialize((cu_seqlens.stride(0), sequence_of_split.stride(0), first_split.stride(0), own_splits.stride(0)))
    hl.specialize(channel_factors.stride(0))

    for tile_index, at_split in hl.grid([kv_heads * m_tiles, all_splits]):
        h = tile_index // m_tiles
        if spec.is_split_kv:
            is_there, b, split, splits = split_at(sequence_of_split, first_split, own_splits, at_split)
        else:
            b, split, splits = at_split + 0, int32(0), int32(1)
        n_len, known_length = known_keys(cache_seqlens, b, max_pages, bn)
        first_query, queries = int32(0), int32(m_len)
        if spec.batch:
            first_query, queries = queries_of_sequence(cu_seqlens, cache_seqlens, b)
            # Of others `fp8_attn_prefill` takes care.
            queries = torch.where(queries > int32(most_queries), 0, queries)
        if spec.is_split_kv:
            queries = torch.where(is_there, queries, 0)
        if spec.batch or spec.is_split_kv:
            n_len = torch.where(queries > 0, n_len, 0)
        # [rows], of the queries times the group's heads; row r is query r // group of the group's head r % group
        # In 32 bits, like keys, where a large pool makes Helion's indices 64: they are kept through both loops.
        r = ((tile_index % m_tiles) * spec.rows + hl.arange(spec.rows)).to(torch.int32)
        in_range = r < int32(group) * queries
        i = quotient(r, int32(group))
        head = h * group + r - i * int32(group)
        # [rows, D_pad]
        cols = hl.arange(d_tile)
        row_offset = (b * q_b_step + head * q_h_step + (first_query + i).to(torch.int64) * q_s_step) * spec.unit
        keep = in_range.unsqueeze(1) & (cols < spec.d).unsqueeze(0)
        x = hl.load(q, [row_offset.unsqueeze(1) + cols.unsqueeze(0) * spec.d_step], extra_mask=keep).to(torch.float32)
        if spec.equalise:
            of_factors = (b * kv_heads + h) % factor_rows * (d_tile * (1 + spec.d_in_halves)) + cols
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
        # [rows]
        q_descale = to_descale(largest_q, spec.q_largest)
        # [D_pad, rows], or each half of it
        q_tile = rows_to_dtype(x, 1.0 / q_descale, k8.dtype, spec.is_cuda).transpose(0, 1)
        q_high = q_tile
        if spec.d_in_halves:
            q_high = rows_to_dtype(x_high, 1.0 / q_descale, k8.dtype, spec.is_cuda).transpose(0, 1)
        q_scale_log2 = q_descale * scales.qk_scale

        # Row i sees keys i + diagonal - left .. i + diagonal + right: bottom-right alignment.
        diagonal = n_len - queries
        # The splits of all queries begin and end with the first and the last one's.
        n_begin, n_whole = split_of_query(diagonal, n_len, left, right, split, splits, spec)
        n_left, n_end = split_of_query(n_len - 1, n_len, left, right, split, splits, spec)
        # Pages n_left .. n_whole are seen whole by all rows, in their splits.
        keys_of_first = n_len
        if spec.scores.has_right:
            keys_of_first = torch.clamp_min(torch.minimum(n_len, diagonal + int32(right) + 1), 0)
        n_whole = torch.minimum(n_whole, keys_of_first >> spec.bn_log2)
        if spec.scores.has_left:
            n_left = torch.maximum(n_left, (torch.clamp_min(n_len - 1 - int32(left), 0) + bn - 1) >> spec.bn_log2)

        if spec.has_open_pages:
            new = queries if spec.batch else int32(new_keys)
            first_slot_page = int32(b * open_width)
            if spec.batch:
                first_slot_page = first_slot_page + (first_query >> spec.bn_log2)
            # [rows]
            own_page = own_page_of(diagonal + i, n_len, right, spec)
            first_open_page, open_begin, open_end = range_of_open_pages(
                own_page_of(diagonal, n_len, right, spec), n_begin, n_end, n_len, new, drafts, spec
            )
            # Rows see pages from there on here or there.
            n_whole = torch.minimum(n_whole, first_open_page)

        m_i = hl.full([spec.rows], NO_KEY, dtype=torch.float32)
        m_run = m_i
        line_bias = hl.full([], spec.line_bias, dtype=torch.float32)
        # Sums by a product are in 64 rows that are all the same, others reduced across lanes once, after the loops.
        l_i = hl.zeros([spec.sum_rows, spec.rows] if spec.schraudolph_exp2 else [4, 4, spec.rows], dtype=torch.float32)
        # [D_v_pad, rows], or each half of it
        acc = hl.zeros([d_v_tile, spec.rows], dtype=torch.float32)
        if spec.split_v:
            acc_high = hl.zeros([d_v_tile, spec.rows], dtype=torch.float32)
        # A row that is NaN or infinite must not change its neighbours.
        known_scale_log2 = torch.where(q_scale_log2 < float("inf"), q_scale_log2, 0.0)
        largest_q_scale_log2 = torch.amax(known_scale_log2, 0)
        # [rows], of `lse_shift`, and of `lse` unless it is a split's
        shift_rows = head * m_len + first_query + i
        if not spec.batch:
            shift_rows = shift_rows + b * kv_heads * group * m_len
        shift = q_scale_log2
        if spec.scores.lse_shift_in_scores:
            shift = hl.load(lse_shift, [shift_rows], extra_mask=in_range)

        # Pages from there on may be open.
        n_closed = torch.minimum(torch.maximum(closed_pages(n_len, drafts, spec), int32(n_begin)), int32(n_end))
        first_entry = int32(b * max_pages)
        entry = hl.load(block_table, [first_entry + imin(n_begin, int32(max_pages - 1))])
        next_page = page_by_bits(entry, num_pages)[0]
        next_k, next_v = descales_of_page(k_descale, v_descale, next_page, page_step, h, head_step, spec.is_cuda)
        for j in hl.grid(n_begin, n_closed):
            page = page_of_entry(entry, num_pages)[0]
            known_page = page_by_bits(entry, num_pages)[1]
            page_k, page_v = next_k, next_v
            # One iteration early: warps would wait for what they use in the same one.
            entry = hl.load(block_table, [first_entry + imin(n_closed - 1, int32(j + 1))])
            next_page = page_by_bits(entry, num_pages)[0]
            next_k, next_v = descales_of_page(k_descale, v_descale, next_page, page_step, h, head_step, spec.is_cuda)
            # Nothing stands between the loads, so they have one barrier.
            k_pieces, v_tile = k_of_page(k8, page, h, spec), v_of_page(v8, page, h, 0, 0, spec)
            if spec.split_v:
                v_high = v_of_page(v8, page, h, 0, 1, spec)
            # [bn, rows]
            s = products(k_pieces, [q_tile, q_high], bn, spec.rows, spec)
            v_log2 = log2_of_power(page_v)
            row_scale_log2 = torch.where(known_page, q_scale_log2, float("nan"))
            s, scale_log2 = page_scores(s, row_scale_log2 * page_k, shift, scales, 0, spec)
            edge = torch.maximum(n_left - int32(j), int32(j + 1) - n_whole)
            if edge > 0:
                key = (j * bn + hl.arange(bn)).to(torch.int32)
                visible = visible_keys(key, diagonal + i, n_len, left, right, spec.scores)
                if spec.is_split_kv:
                    # Read again, since the loops have no registers for them.
                    _, _, own, of_own = split_at(sequence_of_split, first_split, own_splits, at_split)
                    visible = in_split_of_query(visible, j, diagonal + i, n_len, left, right, own, of_own, spec)
                if spec.has_open_pages:
                    there = in_open_pages(j, own_page, n_len, new, drafts, spec)
                    visible = visible & (there.to(torch.int32) == 0).unsqueeze(1)
                s = torch.where(visible.transpose(0, 1), s, float("-inf"))
            m_before = m_i
            largest = largest_of(s, 0, spec.line_bias)
            m_run, m_i, scale, offset, top = line_of_page(largest, line_bias, scale_log2, v_log2, m_run, m_i, spec)
            if spec.may_be_wide:
                wide = may_be_wide(largest_q_scale_log2, page_k, scales, spec)
                if wide > 0:
                    s, scale, offset = wide_line(
                        s, scale_log2, v_log2, m_i, scale, offset, largest, line_bias, top, 0, spec
                    )
            # [bn, rows]
            line = fma(s, scale.unsqueeze(0), offset.unsqueeze(0), spec.is_cuda)
            # [1, rows]
            alpha = exp2(m_before - m_i, spec.is_cuda).unsqueeze(0)
            v_inverse = inverse_of_power(page_v)
            if spec.schraudolph_exp2:
                p8 = in_order_of_v(e4m3_of_bits(line, spec.is_cuda), bn, spec.rows)
                # As in `fp8_attn_prefill`, where V has such rows: P's rounded numbers, added in the order of products.
                ones = hl.full([spec.sum_rows, bn], 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
                l_i = fma(l_i, alpha, hl.dot(ones, p8) * v_inverse, spec.is_cuda)
            else:
                p = exp2(line, spec.is_cuda)
                l_i = fma(l_i, alpha.unsqueeze(0), sums_of_page(p, bn, spec.rows) * v_inverse, spec.is_cuda)
                p8 = in_order_of_v(p.to(torch.float8_e4m3fn), bn, spec.rows)
            acc = accumulate(acc, alpha, v_tile, p8, spec)
            if spec.split_v:
                acc_high = accumulate(acc_high, alpha, v_high, p8, spec)

        # Or the copies of loops of both kinds would be in the same registers.
        acc = in_new_registers(acc, spec.is_cuda)
        if spec.split_v:
            acc_high = in_new_registers(acc_high, spec.is_cuda)
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
            # [bn, rows]. A branch has products of its own, so that these read what TMA wrote: of a tile that is chosen
            # among two, Triton 3.6 writes a copy, and leaves out the fence before the product.
            if elsewhere > 0:
                s = products(k_of_page(open_k8, slot, h, spec), [q_tile, q_high], bn, spec.rows, spec)
            else:
                s = products(k_of_page(k8, page, h, spec), [q_tile, q_high], bn, spec.rows, spec)
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
                s, row_scale_log2, own_k, own_v, page_k, page_v, is_open, shift, scales, 0, spec
            )
            key = jt * bn + hl.arange(bn, dtype=torch.int32)
            visible = visible_keys(key, diagonal + i, n_len, left, right, spec.scores)
            visible = in_split_of_query(visible, jt, diagonal + i, n_len, left, right, split, splits, spec)
            if spec.has_open_pages:
                there = in_open_pages(jt, own_page, n_len, new, drafts, spec)
                visible = visible & (there.to(torch.int32) == elsewhere).unsqueeze(1)
            s = torch.where(visible.transpose(0, 1), s, float("-inf"))
            m_before = m_i
            largest = largest_of(s, 0, 0.0)
            m_run, m_i, scale, offset, top = line_of_page(largest, bias, scale_log2, v_log2, m_run, m_i, spec)
            if spec.may_be_wide:
                s, scale, offset = wide_line(s, scale_log2, v_log2, m_i, scale, offset, largest, bias, top, 0, spec)
            # [bn, rows]
            line = fma(s, scale.unsqueeze(0), offset.unsqueeze(0), spec.is_cuda)
            # [1, rows]
            alpha = exp2(m_before - m_i, spec.is_cuda).unsqueeze(0)
            if spec.schraudolph_exp2:
                p8 = in_order_of_v(e4m3_of_bits(line, spec.is_cuda), bn, spec.rows)
                ones = hl.full([spec.sum_rows, bn], 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
                of_closed = hl.dot(ones, p8) * inverse_of_power(page_v)
                of_open = total_of_lanes(open_sums(line, own_v, bn, spec.rows), spec.rows)
                of_open = of_open.unsqueeze(0).expand(spec.sum_rows, spec.rows)
                l_i = fma(l_i, alpha, torch.where(is_open > 0, of_open, of_closed), spec.is_cuda)
            else:
                p = exp2(line, spec.is_cuda)
                of_keys = inverse_of_power(torch.where(is_open > 0, own_v, page_v))
                sums = sums_of_page(p * of_keys.unsqueeze(1), bn, spec.rows)
                l_i = fma(l_i, alpha.unsqueeze(0), sums, spec.is_cuda)
                p8 = in_order_of_v(p.to(torch.float8_e4m3fn), bn, spec.rows)
            # [D_v_pad, rows], or each half
            if elsewhere > 0:
                acc = accumulate(acc, alpha, v_of_page(open_v8, slot, h, 0, 0, spec), p8, spec)
                if spec.split_v:
                    acc_high = accumulate(acc_high, alpha, v_of_page(open_v8, slot, h, 0, 1, spec), p8, spec)
            else:
                acc = accumulate(acc, alpha, v_of_page(v8, page, h, 0, 0, spec), p8, spec)
                if spec.split_v:
                    acc_high = accumulate(acc_high, alpha, v_of_page(v8, page, h, 0, 1, spec), p8, spec)

        # [rows]
        # Also since Helion looks for what masks a sum, and not through branches.
        l_i = in_new_registers(l_i, spec.is_cuda)
        if spec.schraudolph_exp2:
            row_sum = torch.amax(l_i.reshape(spec.sum_rows, spec.rows), 0)
        else:
            row_sum = total_of_lanes(l_i, spec.rows)
        row_sum = torch.where(known_length, row_sum, float("nan"))
        normaliser = 1.0 / row_sum
        total = row_sum
        if spec.scores.has_sinks:
            # [rows], in one of the splits
            sink = hl.load(sinks, [head], extra_mask=in_range)
            if spec.scores.lse_shift_in_lse:
                sink = sink - hl.load(lse_shift, [shift_rows], extra_mask=in_range)
            # Else this product and `add_sink`'s sum are one FMA in some kernels, which rounds once.
            sink_log2 = in_new_registers(sink * LOG2E, spec.is_cuda)
            sink_log2 = torch.where(split + 0 * r == 0, sink_log2, float("-inf"))
            rescale, m_i, total = add_sink(m_i, row_sum, sink_log2, spec)
            normaliser = rescale / total
        # [rows, d_v_tile]
        o = acc.transpose(0, 1) * normaliser.unsqueeze(1)
        no_key = row_sum == 0.0
        if spec.scores.has_sinks:
            no_key = no_key & (total == total)  # a sink that is NaN stays one
        o = torch.where(no_key.unsqueeze(1), 0.0, o)
        out_cols = hl.arange(d_v_tile)
        lse_rows, out_rows = shift_rows, head * out_head_step + (first_query + i) * out_row_step
        if not spec.batch:
            out_rows = out_rows + b * kv_heads * group * m_len
        if spec.is_split_kv:
            lse_rows = (int32(at_split) * int32(kv_heads * group) + head) * int32(most_queries) + i
            out_rows = lse_rows
        stored = in_range.unsqueeze(1) & (out_cols < d_out).unsqueeze(0)
        hl.store(out, [out_rows, out_cols], o.to(out.dtype), extra_mask=stored)
        if spec.split_v:
            o = torch.where(no_key.unsqueeze(1), 0.0, acc_high.transpose(0, 1) * normaliser.unsqueeze(1))
            out_cols = d_v_tile + out_cols
            stored = in_range.unsqueeze(1) & (out_cols < d_out).unsqueeze(0)
            hl.store(out, [out_rows, out_cols], o.to(out.dtype), extra_mask=stored)
        lse_of_row = (m_i + torch.log2(total)) * LN2
        if spec.scores.lse_shift_in_lse and not spec.is_split_kv:
            lse_of_row = lse_of_row + hl.load(lse_shift, [shift_rows], extra_mask=in_range)
        hl.store(lse, [lse_rows], lse_of_row, extra_mask=in_range)


@functools.cache
def kernel(is_cuda: bool, tile: DecodeTile) -> Runner:
    """The kernel for the device and a tile."""
    if not is_cuda:
        return interpreted(fp8_attn_decode)
    config = Config(
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        range_num_stages=[0, tile.num_stages, 1],
        # Tiles that read the same pages are neighbours.
        loop_orders=[[0, 1]],
        indexing="tensor_descriptor",
        host_tensor_descriptors=True,
        **{MAX_REGISTERS: tile.max_registers},
    )
    return compiled(fp8_attn_decode, config)


def launch(
    a: DecodeArgs,
    rows: int,
    limits: SplitLimits,
    out: torch.Tensor,
    lse: torch.Tensor,
    shift: torch.Tensor | None,
    batch: PackedBatch | None = None,
) -> None:
    """Write `out` and `lse`; `rows` are those of a program's tile, and the rest is as in `launch_paged`."""
    H, H_kv, B = a.q.size(1), a.cache.k8.size(1), a.cache_seqlens.size(0)
    runner = kernel(a.q.is_cuda, decode_tile(a.cache, rows))
    queries = a.q.size(2) if batch is None else batch.most_queries
    m_tiles, is_split_kv = -(-H // H_kv * queries // rows), limits.most_splits > 1
    all_splits, lists = B, None
    if is_split_kv:
        all_splits, lists = limits.all_splits, dynamic_splits.launch(a, limits, H_kv * m_tiles, batch)
    own = (lists or SplitLists(*(a.cache_seqlens,) * 3))._asdict() | {"all_splits": all_splits}
    grid = PagedGrid(rows, m_tiles, all_splits, H * queries, is_split_kv, lists)
    launch_paged(runner, a, grid, a.cache.v8.size(2) > MAX_PIECE, 1, out, lse, batch, shift, own)
