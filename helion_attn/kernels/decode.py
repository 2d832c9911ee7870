"""FP8 attention of a few queries on a paged KV cache, split over keys: out = softmax(q k^T * sm_scale) v.

One program owns up to `MAX_ROWS` query rows that share a KV head (the whole query group's, times the new tokens), and
one of `splits` runs of the pages that each of them sees; `merge_splits` puts the runs together. A page is a packed
block of `bn` keys.

    q8, q_descale = e4m3 of a row, amax / q_largest                              rounding point 1
    s = q8 k8^T                                                                  of a page's keys with its base
    t = s * q_descale_i * k_base * sm_scale * log2(e) + log2(v_base)             one FMA
    m_i = max of the page's t, less 8                                            fp32
    p = 2**(t - m_i)              e4m3 up to D 128: bits from the score (`lib.schraudolph`); else exp2, cast: point 2
    l_i += sum(p) / v_base        fp32, of rounded p with bits, else of p as it was
    acc = acc * alpha + (p v8)    two levels as in `fp8_attn_fwd`
    out = acc / l_i                                                              fp32, cast once: rounding point 3

Up to D 128 scores of e4m3 keys without a softcap are fp16, and so is their line to P: q_largest, 7.5 at D 128, keeps
them below 65504 beside keys of up to 64 times their page's base. Elsewhere they are fp32, and q_largest 448. A row
whose largest score turns out to lie too far from 0 for fp16 has all again, in fp32, in the second loop.

V's base, one a page, rides on the exponent: m_i is the largest weight of the row in its page, probability times
magnitude of the value (`lib/block_max.py`). V's bases are powers of two, so that their logarithm and their inverse are
integer steps on the bits, and `l_i` is as exact as without them.

Keys with descales of their own, which escape their page's base, are hidden in that loop. If there are any, a second one
walks the pages again and takes only them, each score times a k_descale_j of its own, and log2(v_descale_j) added: P is
a key's whole weight. Folded into P after the softmax instead, a key that has little probability and a large V would
push the others below e4m3's range. Sums are of p as it was. A row that sees none of them keeps its bits.

Products are taken transposed, with keys or V's channels as the M of a WGMMA, of which 64 is the least, and query rows
as its N, of which 16 is enough. So a tile of 16 rows costs a thread 16 scores a page, and what belongs to a key, its
two descales, is 4 numbers a thread.

Above head dim 256 K, Q and V come in pieces of 256 channels, and a page has half as many keys: two of them fit shared
memory. All of V's channels stay in one program, since reading K twice would cost more than registers.

Keys may be less a mean of the cache's. Then all scores of a row lack its product with that. A softmax loses nothing by
it. A softcap gets it back before its tanh, a sink loses it too, and the lse gets it at the end, or where runs are
merged.

Int8 keys have scores in int32 and a descale each, which a score is multiplied by; q_largest is 127. Of their descales
V's alone escape a page's base.

A window moves the first page that is read and masks at its edges, and a sink joins the sum of the first run.

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
from helion_attn.configs.scheduling import MIN_ROWS
from helion_attn.kernels.lib.inline_asm import e4m3_of_bits, e4m3_of_half_lines, exp2, fma, in_new_registers
from helion_attn.kernels.lib.keys import known_keys, page_of
from helion_attn.kernels.lib.masks import visible_keys
from helion_attn.kernels.lib.paged import (
    base_scores,
    bases_are_wide,
    bases_of_page,
    class_of_slot,
    descales_of_keys,
    has_all_again,
    in_run_of_query,
    keys_of_class,
    launch_paged,
    line_of_page,
    run_of_query,
    sums_of_page,
    times_descales,
    total_of_lanes,
    wide_line,
)
from helion_attn.kernels.lib.row_layout import rows_to_dtype
from helion_attn.kernels.lib.scalars import int32, inverse_of_power
from helion_attn.kernels.lib.specs import PagedSpec
from helion_attn.kernels.lib.steps import (
    accumulate,
    add_sink,
    dot_fp16_acc,
    interleave_keys,
    scores,
    scores_of_pieces,
    to_descale,
)
from helion_attn.numerics import LN2, LOG2E, NO_KEY
from helion_attn.options import ScoreScales
from helion_attn.problem import DecodeArgs
from helion_attn.types import PagedKVCache


class DecodeTile(NamedTuple):
    """How a program is made.

    Attributes:
        num_warps: of a program.
        num_stages: pages in flight.
        ctas_per_sm: programs that an SM holds.
        max_registers: a thread's.
    """

    num_warps: int
    num_stages: int
    ctas_per_sm: int
    max_registers: int


#: By the largest padded head dim: the tile of up to 16 rows, and that of 32. Up to D 128 the fastest on an H200.
#: Eight warps share what four have no registers for: 256 channels of 32 rows, twice.
TILES = {
    64: (
        DecodeTile(4, num_stages=3, ctas_per_sm=4, max_registers=128),
        DecodeTile(4, num_stages=3, ctas_per_sm=3, max_registers=168),
    ),
    128: (DecodeTile(4, num_stages=3, ctas_per_sm=2, max_registers=255),) * 2,
    512: (DecodeTile(8, num_stages=2, ctas_per_sm=1, max_registers=255),) * 2,
}
#: With int8 keys fewer registers are 2 to 6% faster where rows are few, of as many programs on an SM.
INT8_TILES = TILES | {128: (DecodeTile(4, num_stages=3, ctas_per_sm=2, max_registers=168), TILES[128][1])}


def decode_tile(cache: PagedKVCache, rows: int) -> DecodeTile:
    """The tile for a cache and a program's rows: that of the larger head dim, which has the registers for both."""
    larger_d = max(cache.k8.size(3), cache.v8.size(2))
    tiles = INT8_TILES if cache.k8.dtype == torch.int8 else TILES
    return next(of_rows[rows > MIN_ROWS] for most, of_rows in tiles.items() if larger_d <= most)


def in_order_of_v(p8: torch.Tensor, bn: int, rows: int) -> torch.Tensor:
    """P, [bn, rows], with its keys in V's order."""
    return interleave_keys(p8.transpose(0, 1), rows, bn).transpose(0, 1)


def p_of_half_line(
    s: torch.Tensor,  # [bn, rows], fp16
    scale: torch.Tensor,  # [rows]
    offset: torch.Tensor,  # [rows]
    bn: int,
    spec: PagedSpec,
) -> torch.Tensor:
    """`schraudolph.p_of_line` of scores whose keys come first, [bn, rows]: the same bits."""
    scale, offset = (x.unsqueeze(0).expand(bn, spec.rows) for x in (scale, offset))
    if spec.is_cuda:
        return e4m3_of_half_lines(s, scale, offset)
    return e4m3_of_bits(s * scale + offset, spec.is_cuda)


def fp8_attn_decode(
    q: torch.Tensor,  # flat
    k8: torch.Tensor,  # [num_pages, H_kv, bn, D_pad], with `d_in_halves` [num_pages, H_kv, 2, bn, D_pad / 2]
    v8: torch.Tensor,  # [num_pages, H_kv, D_v_pad, bn], with `in_halves` [num_pages, H_kv * 2, D_v_pad / 2, bn]
    k_descale: torch.Tensor,  # [num_pages * H_kv * bn]
    v_descale: torch.Tensor,  # [num_pages * H_kv * bn]
    block_table: torch.Tensor,  # [B * max_pages]
    cache_seqlens: torch.Tensor,  # [B]
    sinks: torch.Tensor,  # [H] if has_sinks
    lse_shift: torch.Tensor,  # [B * H * M] if shift_lse
    channel_factors: torch.Tensor,  # [factor_rows * D_pad] if equalise
    out: torch.Tensor,  # [splits * B * H * M, D_v], written
    lse: torch.Tensor,  # [splits * B * H * M], written
    splits: int,
    m_tiles: int,
    max_pages: int,
    group: int,
    m_len: int,
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
    num_pages, kv_heads, B = k8.size(0), k8.size(1), cache_seqlens.size(0)
    bn = hl.specialize(k8.size(-2))
    d_tile = hl.specialize(k8.size(-1))
    d_v_tile = hl.specialize(v8.size(2))
    d_out = hl.specialize(out.size(1))
    # Known strides keep loads and stores 16 bytes wide.
    hl.specialize((q.stride(0), out.stride(0), out.stride(1), k_descale.stride(0), v_descale.stride(0)))
    hl.specialize((block_table.stride(0), cache_seqlens.stride(0), sinks.stride(0), lse_shift.stride(0)))
    hl.specialize(channel_factors.stride(0))
    total_rows = B * kv_heads * group * m_len

    for tile_index, split in hl.grid([B * kv_heads * m_tiles, splits]):
        bh = tile_index // m_tiles
        b = bh // kv_heads
        h = bh % kv_heads
        # [rows], of the group's heads times M; row r is query r % M of the group's head r // M
        # In 32 bits, like keys, where a large pool makes Helion's indices 64: they are kept through both loops.
        r = ((tile_index % m_tiles) * spec.rows + hl.arange(spec.rows)).to(torch.int32)
        in_range = r < group * m_len
        head = h * group + r // m_len
        i = r % m_len
        # [rows, D_pad]
        cols = hl.arange(d_tile)
        row_offset = (b * q_b_step + head * q_h_step + i * q_s_step) * spec.unit
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
        # [rows]
        q_descale = to_descale(largest_q, spec.q_largest)
        # [D_pad, rows], or each half of it
        q_tile = rows_to_dtype(x, 1.0 / q_descale, k8.dtype, spec.is_cuda).transpose(0, 1)
        if spec.d_in_halves:
            q_high = rows_to_dtype(x_high, 1.0 / q_descale, k8.dtype, spec.is_cuda).transpose(0, 1)
        q_scale_log2 = q_descale * scales.qk_scale

        n_len, known_length = known_keys(cache_seqlens, b, max_pages, bn)
        # Row i sees keys i + diagonal - left .. i + diagonal + right: bottom-right alignment.
        diagonal = n_len - int32(m_len)
        # The runs of all queries begin and end with the first and the last one's.
        n_begin, n_whole = run_of_query(diagonal, n_len, left, right, split, splits, spec)
        n_left, n_end = run_of_query(n_len - 1, n_len, left, right, split, splits, spec)
        # Pages n_left .. n_whole are seen whole by all rows, in their runs.
        keys_of_first = n_len
        if spec.has_right:
            keys_of_first = torch.clamp_min(torch.minimum(n_len, diagonal + int32(right) + 1), 0)
        n_whole = torch.minimum(n_whole, keys_of_first >> spec.bn_log2)
        if spec.has_left:
            n_left = torch.maximum(n_left, (torch.clamp_min(n_len - 1 - int32(left), 0) + bn - 1) >> spec.bn_log2)

        m_i = hl.full([spec.rows], NO_KEY, dtype=torch.float32)
        m_run = m_i
        # Sums by a product are in 64 rows that are all the same, others reduced across lanes once, after the loops.
        l_i = hl.zeros([spec.sum_rows, spec.rows] if spec.p_bits else [4, 4, spec.rows], dtype=torch.float32)
        # [D_v_pad, rows], or each half of it
        acc = hl.zeros([d_v_tile, spec.rows], dtype=torch.float32)
        if spec.in_halves:
            acc_high = hl.zeros([d_v_tile, spec.rows], dtype=torch.float32)
        # A row that is NaN or infinite must not change its neighbours.
        known_scale_log2 = torch.where(q_scale_log2 < float("inf"), q_scale_log2, 0.0)
        largest_q_scale_log2 = torch.amax(known_scale_log2, 0)
        escapes = int32(0)
        # [rows]
        shift = q_scale_log2
        if spec.shifts_scores:
            shift = hl.load(lse_shift, [bh * group * m_len + r], extra_mask=in_range)

        for j in hl.grid(n_begin, n_end):
            page, known_page = page_of(block_table, b * max_pages + j, num_pages)
            # [bn, D_pad] and [D_v_pad, bn], or halves. Nothing stands between the loads, so they have one barrier.
            if spec.d_in_halves:
                k_tile = k8[page, h, 0, :, :]
                k_high = k8[page, h, 1, :, :]
            else:
                k_tile = k8[page, h, :, :]
            if spec.in_halves:
                v_tile = v8[page, h * 2, :, :]
                v_high = v8[page, h * 2 + 1, :, :]
            else:
                v_tile = v8[page, h, :, :]
            # [bn, rows]
            if spec.half_scores:
                s = dot_fp16_acc(k_tile, q_tile, spec.is_cuda)
            elif spec.d_in_halves:
                s = scores_of_pieces([k_tile, k_high], [q_tile, q_high], spec.is_cuda)
            else:
                s = scores(k_tile, q_tile, bn, spec.rows, False, spec.is_cuda)
            first_slot = (page * int32(kv_heads) + int32(h)) * bn
            k_base, v_base, escaped = bases_of_page(k_descale, v_descale, first_slot, bn, spec.int8_keys, spec.is_cuda)
            escapes = torch.maximum(escapes, escaped)
            row_scale_log2 = torch.where(known_page, q_scale_log2, float("nan"))
            if spec.int8_keys:
                s = times_descales(s, descales_of_keys(k_descale, first_slot, bn, 0, spec.is_cuda), 0, spec)
            s, scale_log2 = base_scores(s, row_scale_log2, k_base, shift, scales, 0, spec)
            edge = torch.maximum(n_left - int32(j), int32(j + 1) - n_whole)
            if edge > 0:
                key = (j * bn + hl.arange(bn)).to(torch.int32)
                visible = visible_keys(key, diagonal + i, n_len, left, right, spec)
                visible = in_run_of_query(visible, j, diagonal + i, n_len, left, right, split, splits, spec)
                s = torch.where(visible.transpose(0, 1), s, float("-inf"))
            if escaped > 0:
                is_first, k_own, v_own, w0, w1, w2, w3 = class_of_slot(
                    k_descale, v_descale, first_slot, int32(0), bn, spec.int8_keys, spec.is_cuda
                )
                of_base = keys_of_class(w0, w1, w2, w3, bn, spec.is_cuda)
                s = torch.where(of_base.unsqueeze(1) != 0, s, float("-inf"))
            m_before = m_i
            m_run, m_i, scale, offset, largest, top = line_of_page(s, scale_log2, v_base, m_run, m_i, 0, spec)
            if not spec.half_scores:
                if spec.may_be_wide:
                    wide = bases_are_wide(largest_q_scale_log2, k_base, scales, spec)
                    if wide > 0:
                        s, scale, offset = wide_line(s, scale_log2, v_base, m_i, scale, offset, largest, top, 0, spec)
                # [bn, rows]
                line = fma(s, scale.unsqueeze(0), offset.unsqueeze(0), spec.is_cuda)
            # [1, rows]
            alpha = exp2(m_before - m_i, spec.is_cuda).unsqueeze(0)
            v_inverse = inverse_of_power(v_base)
            if spec.p_bits:
                if spec.half_scores:
                    p8 = p_of_half_line(s, scale, offset, bn, spec)
                else:
                    p8 = e4m3_of_bits(line, spec.is_cuda)
                p8 = in_order_of_v(p8, bn, spec.rows)
                # As in `fp8_attn_prefill`, where V has such rows: P's rounded numbers, added in the order of products.
                ones = hl.full([spec.sum_rows, bn], 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
                l_i = fma(l_i, alpha, hl.dot(ones, p8) * v_inverse, spec.is_cuda)
            else:
                p = exp2(line, spec.is_cuda)
                l_i = fma(l_i, alpha.unsqueeze(0), sums_of_page(p, bn, spec.rows) * v_inverse, spec.is_cuda)
                p8 = in_order_of_v(p.to(torch.float8_e4m3fn), bn, spec.rows)
            acc = accumulate(acc, alpha, v_tile, p8, spec)
            if spec.in_halves:
                acc_high = accumulate(acc_high, alpha, v_high, p8, spec)

        if spec.half_scores:
            # [rows]: rows that have the keys of their pages' bases again, as slot 0's class.
            all_again = has_all_again(m_run)
            some_again = torch.amax(all_again.to(torch.int32), 0)
            escapes = torch.maximum(escapes, some_again)
        if escapes > 0:
            # Keys with descales of their own, of the same pages, those with the same descales at once.
            class_spec = spec.of_fp32_scores
            if spec.half_scores:
                m_i = torch.where(all_again, NO_KEY, m_i)
                m_run = torch.where(all_again, NO_KEY, m_run)
                l_i = torch.where(all_again.unsqueeze(0), 0.0, l_i)
                acc = torch.where(all_again.unsqueeze(0), 0.0, acc)
            for again in hl.grid(n_begin, n_end):
                page, known_page = page_of(block_table, b * max_pages + again, num_pages)
                first_slot = (page * int32(kv_heads) + int32(h)) * bn
                k_base, v_base, escaped = bases_of_page(
                    k_descale, v_descale, first_slot, bn, spec.int8_keys, spec.is_cuda
                )
                row_scale_log2 = torch.where(known_page, q_scale_log2, float("nan"))
                first_slot_of_class, slots = escaped, escaped * bn
                if spec.half_scores:
                    first_slot_of_class, slots = 1 - some_again, torch.maximum(escaped * bn, some_again)
                for slot in hl.grid(first_slot_of_class, slots):
                    is_first, k_own, v_own, w0, w1, w2, w3 = class_of_slot(
                        k_descale, v_descale, first_slot, int32(slot), bn, spec.int8_keys, spec.is_cuda
                    )
                    if is_first > 0:
                        # [bn, rows]
                        if spec.d_in_halves:
                            class_s = scores_of_pieces(
                                [k8[page, h, 0, :, :], k8[page, h, 1, :, :]], [q_tile, q_high], spec.is_cuda
                            )
                        else:
                            class_s = scores(k8[page, h, :, :], q_tile, bn, spec.rows, False, spec.is_cuda)
                        if spec.int8_keys:
                            class_k = descales_of_keys(k_descale, first_slot, bn, 0, spec.is_cuda)
                            class_s = times_descales(class_s, class_k, 0, spec)
                        class_s, class_scale_log2 = base_scores(
                            class_s, row_scale_log2, k_own, shift, scales, 0, class_spec
                        )
                        class_key = (again * bn + hl.arange(bn)).to(torch.int32)
                        class_visible = visible_keys(class_key, diagonal + i, n_len, left, right, spec)
                        class_visible = in_run_of_query(
                            class_visible, again, diagonal + i, n_len, left, right, split, splits, spec
                        )
                        class_visible = class_visible & (
                            keys_of_class(w0, w1, w2, w3, bn, spec.is_cuda).unsqueeze(0) != 0
                        )
                        class_s = torch.where(class_visible.transpose(0, 1), class_s, float("-inf"))
                        if spec.half_scores:
                            class_s = torch.where((all_again | (int32(slot) > 0)).unsqueeze(0), class_s, float("-inf"))
                        class_before = m_i
                        m_run, m_i, class_scale, class_offset, class_largest, class_top = line_of_page(
                            class_s, class_scale_log2, v_own, m_run, m_i, 0, class_spec
                        )
                        class_s, class_scale, class_offset = wide_line(
                            class_s,
                            class_scale_log2,
                            v_own,
                            m_i,
                            class_scale,
                            class_offset,
                            class_largest,
                            class_top,
                            0,
                            class_spec,
                        )
                        class_line = fma(class_s, class_scale.unsqueeze(0), class_offset.unsqueeze(0), spec.is_cuda)
                        # [1, rows]
                        class_alpha = exp2(class_before - m_i, spec.is_cuda).unsqueeze(0)
                        class_inverse = inverse_of_power(v_own)
                        if spec.p_bits:
                            class_p8 = e4m3_of_bits(class_line, spec.is_cuda)
                            # Sums of 128 such numbers are exact.
                            class_sums = class_p8.to(torch.float32).sum(0) * class_inverse
                            l_i = fma(l_i, class_alpha, class_sums.unsqueeze(0), spec.is_cuda)
                        else:
                            class_p = exp2(class_line, spec.is_cuda)
                            l_i = fma(
                                l_i,
                                class_alpha.unsqueeze(0),
                                sums_of_page(class_p, bn, spec.rows) * class_inverse,
                                spec.is_cuda,
                            )
                            class_p8 = class_p.to(torch.float8_e4m3fn)
                        if spec.in_halves:
                            class_p8 = in_order_of_v(class_p8, bn, spec.rows)
                            acc = accumulate(acc, class_alpha, v8[page, h * 2, :, :], class_p8, spec)
                            acc_high = accumulate(acc_high, class_alpha, v8[page, h * 2 + 1, :, :], class_p8, spec)
                        else:
                            acc = accumulate(
                                acc, class_alpha, v8[page, h, :, :], in_order_of_v(class_p8, bn, spec.rows), spec
                            )

        # [rows]
        # Also since Helion looks for what masks a sum, and not through branches.
        l_i = in_new_registers(l_i, spec.is_cuda)
        if spec.p_bits:
            row_sum = torch.amax(l_i.reshape(spec.sum_rows, spec.rows), 0)
        else:
            row_sum = total_of_lanes(l_i, spec.rows)
        row_sum = torch.where(known_length, row_sum, float("nan"))
        normaliser = 1.0 / row_sum
        total = row_sum
        # [rows]
        rows_of_lse = bh * group * m_len + r
        if spec.has_sinks:
            # [rows], in one run of them all
            sink = hl.load(sinks, [head], extra_mask=in_range)
            if spec.shifts_lse:
                sink = sink - hl.load(lse_shift, [rows_of_lse], extra_mask=in_range)
            sink_log2 = torch.where(split + 0 * r == 0, sink * LOG2E, float("-inf"))
            rescale, m_i, total = add_sink(m_i, row_sum, sink_log2, spec)
            normaliser = rescale / total
        # [rows, d_v_tile]
        o = acc.transpose(0, 1) * normaliser.unsqueeze(1)
        no_key = row_sum == 0.0
        if spec.has_sinks:
            no_key = no_key & (total == total)  # a sink that is NaN stays one
        o = torch.where(no_key.unsqueeze(1), 0.0, o)
        out_cols = hl.arange(d_v_tile)
        out_rows = split * total_rows + b * kv_heads * group * m_len + head * out_head_step + i * out_row_step
        stored = in_range.unsqueeze(1) & (out_cols < d_out).unsqueeze(0)
        hl.store(out, [out_rows, out_cols], o.to(out.dtype), extra_mask=stored)
        if spec.in_halves:
            o = torch.where(no_key.unsqueeze(1), 0.0, acc_high.transpose(0, 1) * normaliser.unsqueeze(1))
            out_cols = d_v_tile + out_cols
            stored = in_range.unsqueeze(1) & (out_cols < d_out).unsqueeze(0)
            hl.store(out, [out_rows, out_cols], o.to(out.dtype), extra_mask=stored)
        lse_of_row = (m_i + torch.log2(total)) * LN2
        if spec.shifts_lse and not spec.in_runs:
            lse_of_row = lse_of_row + hl.load(lse_shift, [rows_of_lse], extra_mask=in_range)
        hl.store(lse, [split * total_rows + rows_of_lse], lse_of_row, extra_mask=in_range)


@functools.cache
def kernel(is_cuda: bool, tile: DecodeTile) -> Runner:
    """The kernel for the device and a tile."""
    if not is_cuda:
        return interpreted(fp8_attn_decode)
    config = Config(
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        range_num_stages=[0, tile.num_stages],
        # Tiles that read the same pages are neighbours.
        loop_orders=[[0, 1]],
        indexing="tensor_descriptor",
        host_tensor_descriptors=True,
        **{MAX_REGISTERS: tile.max_registers},
    )
    return compiled(fp8_attn_decode, config)


def launch(a: DecodeArgs, rows: int, splits: int, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write `out` and `lse`; `rows` are those of a program's tile, and the rest is as in `launch_paged`."""
    runner = kernel(a.q.is_cuda, decode_tile(a.cache, rows))
    launch_paged(runner, a, rows, a.cache.v8.size(2) > MAX_PIECE, 1, splits, out, lse)
