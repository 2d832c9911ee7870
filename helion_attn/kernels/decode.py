"""FP8 attention of a few queries on a paged KV cache, split over keys: out = softmax(q k^T * sm_scale) v.

One program owns up to `MAX_ROWS` query rows that share a KV head (the whole query group's, times the new tokens), and
one of `splits` runs of the pages that each of them sees; `merge_splits` puts the runs together. A page is a packed
block of `bn` keys.

    q8, q_descale = e4m3 of a row, amax / 448                                   rounding point 1
    s = q8 k8^T * q_descale_i * k_descale_j * sm_scale * log2(e)                fp32; or a softcap's tanh of it
    t = s + log2(v_descale_j)                                                   fp32
    m_i = max of the page's t, less 8;  p = 2**(t - m_i)                        fp32
    l_i += p / v_descale_j                                                      fp32, unrounded p
    acc = acc * alpha + (cast(p) v8)             e4m3, two levels as in `fp8_attn_fwd`: rounding point 2
    out = acc / l_i                                                             fp32, cast once: rounding point 3

V's descales, one a key, ride on the exponent: what e4m3 holds is a key's whole weight, probability times magnitude of
its value, next to the largest such weight of the row in its page (`lib/references.py`). Folded into P after the softmax
instead, a key that has little probability and a large V would push the others below e4m3's range. They are powers of
two, so that their logarithm and their inverse are integer steps on the bits, and `l_i` is as exact as without them.

Products are taken transposed, with keys or V's channels as the M of a WGMMA, of which 64 is the least, and query rows
as its N, of which 16 is enough. So a tile of 16 rows costs a thread 16 scores a page, and what belongs to a key, its
two descales, is 4 numbers a thread.

A window moves the first page that is read and masks at its edges, and a sink joins the sum of the first run.

What a page holds past the end of a sequence enters no result. Scores are masked. V is multiplied by p = 0 there, and
`append` has cleared it.
"""

from __future__ import annotations

import functools

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.kernels import Runner, compiled, interpreted
from helion_attn.configs import MAX_FRESH_D
from helion_attn.kernels.lib.inline_asm import fma_up
from helion_attn.kernels.lib.keys import known_keys, page_of
from helion_attn.kernels.lib.masks import visible_keys
from helion_attn.kernels.lib.paged import (
    in_run_of_query,
    inverse_of_power,
    launch_paged,
    page_references,
    page_scores,
    run_of_query,
    sums_of_page,
    total_of_lanes,
)
from helion_attn.kernels.lib.scalars import int32
from helion_attn.kernels.lib.specs import PagedSpec
from helion_attn.kernels.lib.steps import accumulate, add_sink, interleave_keys, to_descale
from helion_attn.numerics import LN2, LOG2E, NO_KEY
from helion_attn.problem import DecodeProblem, ScoreScales

#: Pages in flight.
NUM_STAGES = 3


def softmax_step(
    t: torch.Tensor,  # [bn, rows]
    v_inverse: torch.Tensor,  # [bn]
    m_run: torch.Tensor,  # [rows]
    m_i: torch.Tensor,  # [rows]
    l_i: torch.Tensor,  # [4, 4, rows]
    bn: int,
    spec: PagedSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`t`, -inf where masked, into `(p8, alpha, m_run, m_i, l_i)`."""
    rows = spec.rows
    one, offset = hl.full([], 1.0, dtype=torch.float32), hl.full([], spec.p_offset_log2, dtype=torch.float32)
    top = fma_up(torch.amax(t, 0), one, -offset, spec.is_cuda)
    m_run, m_new = page_references(top, m_run, m_i, spec)
    # [bn, rows]
    p = torch.exp2(t - m_new.unsqueeze(0))
    alpha = torch.exp2(m_i - m_new).unsqueeze(0)
    # Unrounded p.
    l_i = l_i * alpha.unsqueeze(0) + sums_of_page(p * v_inverse.unsqueeze(1), bn, rows)
    p8 = interleave_keys(p.to(torch.float8_e4m3fn).transpose(0, 1), rows, bn).transpose(0, 1)
    return p8, alpha, m_run, m_new, l_i


def fp8_attn_decode(
    q: torch.Tensor,  # flat
    k8: torch.Tensor,  # [num_pages, H_kv, bn, D_pad]
    v8: torch.Tensor,  # [num_pages, H_kv, D_v_pad, bn]
    k_descale: torch.Tensor,  # [num_pages * H_kv * bn]
    v_descale: torch.Tensor,  # [num_pages * H_kv * bn]
    block_table: torch.Tensor,  # [B * max_pages]
    cache_seqlens: torch.Tensor,  # [B]
    sinks: torch.Tensor,  # [H] if has_sinks
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
    left: int,
    right: int,
    scales: ScoreScales,
    spec: hl.constexpr,  # PagedSpec
) -> None:
    """The kernel; see the module's docstring. Rows of `out` lie `out_row_step` apart, heads `out_head_step`."""
    # A pool of more than 2**31 elements is read by descriptors only if its dimensions are known to fit 32 bits.
    torch._check(k8.size(0) <= 2**24)
    torch._check(k8.size(1) <= 2**24)
    torch._check(v8.size(0) <= 2**24)
    torch._check(v8.size(1) <= 2**24)
    num_pages, kv_heads, B = k8.size(0), k8.size(1), cache_seqlens.size(0)
    bn = hl.specialize(k8.size(2))
    d_pad = hl.specialize(k8.size(3))
    d_v_pad = hl.specialize(v8.size(2))
    d_out = hl.specialize(out.size(1))
    # Known strides keep loads and stores 16 bytes wide.
    hl.specialize((q.stride(0), out.stride(0), out.stride(1), k_descale.stride(0), v_descale.stride(0)))
    hl.specialize((block_table.stride(0), cache_seqlens.stride(0), sinks.stride(0)))
    total_rows = B * kv_heads * group * m_len

    for tile_index, split in hl.grid([B * kv_heads * m_tiles, splits]):
        bh = tile_index // m_tiles
        b = bh // kv_heads
        h = bh % kv_heads
        # [rows], of the group's heads times M; row r is query r % M of the group's head r // M
        r = (tile_index % m_tiles) * spec.rows + hl.arange(spec.rows)
        in_range = r < group * m_len
        head = h * group + r // m_len
        i = r % m_len
        # [rows, D_pad]
        cols = hl.arange(d_pad)
        row_offset = (b * q_b_step + head * q_h_step + i * q_s_step) * spec.unit
        keep = in_range.unsqueeze(1) & (cols < spec.d).unsqueeze(0)
        x = hl.load(q, [row_offset.unsqueeze(1) + cols.unsqueeze(0) * spec.d_step], extra_mask=keep).to(torch.float32)
        # [rows]
        q_descale = to_descale(torch.amax(torch.abs(x), 1), spec.q_largest)
        # [D_pad, rows]
        q_tile = (x * (1.0 / q_descale).unsqueeze(1)).to(k8.dtype).transpose(0, 1)
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
        l_i = hl.zeros([4, 4, spec.rows], dtype=torch.float32)
        # [D_v_pad, rows]
        acc = hl.zeros([d_v_pad, spec.rows], dtype=torch.float32)

        for j in hl.grid(n_begin, n_end):
            page, known_page = page_of(block_table, b * max_pages + j, num_pages)
            keys = (page * kv_heads + h) * bn + hl.arange(bn)
            # [bn]
            k_scale = torch.where(known_page, hl.load(k_descale, [keys]), float("nan"))
            v_scale = hl.load(v_descale, [keys])
            # [bn, rows]
            s = hl.dot(k8[page, h, :, :], q_tile) * k_scale.unsqueeze(1)
            t = page_scores(s, q_scale_log2.unsqueeze(0), v_scale.unsqueeze(1), scales, spec)
            # [D_v_pad, bn]
            v_tile = v8[page, h, :, :]
            edge = torch.maximum(n_left - int32(j), int32(j + 1) - n_whole)
            if edge > 0:
                key = j * bn + hl.arange(bn)
                visible = visible_keys(key, diagonal + i, n_len, left, right, spec)
                visible = in_run_of_query(visible, j, diagonal + i, n_len, left, right, split, splits, spec)
                t = torch.where(visible.transpose(0, 1), t, float("-inf"))
            p8, alpha, m_run, m_i, l_i = softmax_step(t, inverse_of_power(v_scale), m_run, m_i, l_i, bn, spec)
            acc = accumulate(acc, alpha, v_tile, p8, spec)

        # [rows]
        row_sum = torch.where(known_length, total_of_lanes(l_i, spec.rows), float("nan"))
        normaliser = 1.0 / row_sum
        total = row_sum
        if spec.has_sinks:
            # [rows], in one run of them all
            sink_log2 = hl.load(sinks, [head], extra_mask=in_range) * LOG2E
            sink_log2 = torch.where(split + 0 * r == 0, sink_log2, float("-inf"))
            rescale, m_i, total = add_sink(m_i, row_sum, sink_log2, spec)
            normaliser = rescale / total
        # [rows, D_v_pad]
        o = acc.transpose(0, 1) * normaliser.unsqueeze(1)
        no_key = row_sum == 0.0
        if spec.has_sinks:
            no_key = no_key & (total == total)  # a sink that is NaN stays one
        o = torch.where(no_key.unsqueeze(1), 0.0, o)
        out_cols = hl.arange(d_v_pad)
        out_rows = split * total_rows + b * kv_heads * group * m_len + head * out_head_step + i * out_row_step
        stored = in_range.unsqueeze(1) & (out_cols < d_out).unsqueeze(0)
        hl.store(out, [out_rows, out_cols], o.to(out.dtype), extra_mask=stored)
        lse_rows = split * total_rows + bh * group * m_len + r
        hl.store(lse, [lse_rows], (m_i + torch.log2(total)) * LN2, extra_mask=in_range)


@functools.cache
def kernel(is_cuda: bool, num_warps: int) -> Runner:
    """The kernel for the device."""
    if not is_cuda:
        return interpreted(fp8_attn_decode)
    config = Config(
        num_warps=num_warps,
        num_stages=NUM_STAGES,
        range_num_stages=[0, NUM_STAGES],
        # Tiles that read the same pages are neighbours.
        loop_orders=[[0, 1]],
        indexing="tensor_descriptor",
        host_tensor_descriptors=True,
    )
    return compiled(fp8_attn_decode, config)


def launch(a: DecodeProblem, rows: int, splits: int, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write `out` and `lse`; `rows` are those of a program's tile, and the rest is as in `launch_paged`."""
    v8 = a.cache.v8
    # Eight share what four have no registers for: 256 channels of 32 rows, twice.
    num_warps = 4 if max(a.cache.k8.size(3), v8.size(2)) <= MAX_FRESH_D else 8
    own = {
        "v8": v8,
        "k_descale": a.cache.k_descale.view(-1),
        "v_descale": a.cache.v_descale.view(-1),
    }
    launch_paged(kernel(a.q.is_cuda, num_warps), a, rows, False, splits, out, lse, own)
