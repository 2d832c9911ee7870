"""Attention, forward: out = softmax(q k^T * sm_scale) v, on the packed tensors of `QuantizedQKV`, most often FP8.

One program owns one block of `bm` query rows of one head and walks the key blocks of its KV head:

    s = q8 k8^T                          e4m3 or 16-bit, fp32 accumulate; or int8, int32
    m_i = the block's maximum            fp32, p_offset_log2 below it; of 16-bit P the running one (`lib.block_max`)
    p8 = 2**(s * qk_scale_log2 - m_i)    e4m3 up to D 128: bits from the score (`lib.schraudolph`); else exp2, cast:
                                         rounding point 1
    l_i = l_i * alpha + sum(p)           fp32; of rounded p with bits, else of p as it was
    acc = acc * alpha + (p8 v8)          two-level: a fresh FP8 product per block, added in fp32
    out = acc / l_i * v_descale + v_mean                    fp32, cast once: rounding point 2

Two-level accumulation is what keeps long contexts right: Hopper's FP8 tensor core keeps about 14 bits when it
accumulates in place, and small addends vanish beside a grown sum (DeepSeek-V3, arXiv:2412.19437, section 3.3.2, does
the same for its GEMMs). At D_v_pad = 256 registers hold a fresh product of half of the channels beside the accumulator,
so P V is two products, one after the other. The online softmax is that of Milakov and Gimelshein (arXiv:1805.02867)
and FlashAttention-2 (arXiv:2307.08691).

V arrives transposed, because FP8 WGMMA takes B only K-major, with its keys permuted inside every 16 so that P's fp32
accumulator registers are, in place, the A operand of the second product: `interleave_keys` is no instruction. 16-bit V
needs neither, since WGMMA takes 16-bit B either way and P's registers are in order; nor the two levels, since the
tensor core sums 16-bit products in fp32.

One loop walks the key blocks that some row sees; the others are never loaded. Blocks at an edge of what is visible
(diagonal, ragged end, a window's two sides) are masked behind a branch: a loop of their own would have no pipelined
loads (docs/notes/kernels.md has what this and other choices gain). So are blocks whose scale is too large for
one FMA; of P by bits they have a branch of their own, behind the maximum.

Where scores have 8 bits and P is bf16, whose range is that of fp32, there is no running maximum up to D 128
(`numerics.first_block_max`): the first block that a row sees gives the reference of all its P, and the accumulator is
not rescaled. Where a row's sum passes `MAX_ROW_SUM`, the program walks all blocks again, with a running maximum.

Three specialisations more, which cost nothing where they are not asked for. A window (Longformer, arXiv:2004.05150;
Mistral 7B, arXiv:2310.06825) moves the two edges; causality is a right edge of 0. `lib.steps.softmax_input` may cap
scaled scores (Gemma 2, arXiv:2408.00118). A sink (StreamingLLM, arXiv:2309.17453; gpt-oss), one more logit of each
head, joins the sum in the epilogue.

With few queries, each head of a group would fill a tile in part. So the group's heads, which have their keys in common,
may share tiles (PackGQA in the code of FlashAttention-3, arXiv:2407.08608). Their rows stay where `quantize` put them:
a program gathers its own.

Few query blocks on many keys leave SMs idle. So the key blocks of each program are then split, a program for a
split (FlashDecoding), which writes fp32: as above, each with the sum of its own keys. `merge_splits` averages them by
their lse. V's mean is in every split that has a key, and so once in the average; sinks are left to the merge.
"""

from __future__ import annotations

import functools

import torch

from helion_attn.compiler.helion_adapter import MAX_REGISTERS, helion, helion_config, hl
from helion_attn.compiler.passes.expected import expected_passes
from helion_attn.compiler.runners import Compiled, compiled, interpreted
from helion_attn.configs import MASK_BLOCK, MAX_FRESH_D, TAIL_COUNT_LOG2, TileConfig
from helion_attn.kernels.lib.block_max import update_block_max
from helion_attn.kernels.lib.inline_asm import maximum
from helion_attn.kernels.lib.keys import (
    at_edge,
    block_of_keys,
    first_k_descale,
    first_key_of_block,
    first_unmasked_block,
    k_descale_of,
    keys_of,
    next_k_descale,
)
from helion_attn.kernels.lib.kv_lists import (
    block_at_edge,
    block_of_entry,
    first_entry_of,
    next_entry_of,
    within_list,
)
from helion_attn.kernels.lib.masks import Bounds, bounds_of_rows, masked_scores, visible_keys, within_bounds
from helion_attn.kernels.lib.query import Query, quantised_rows, query_arguments
from helion_attn.kernels.lib.rows import (
    first_packed_row,
    out_rows_of,
    packed_rows_of,
    queries_of_rows,
    rows_of,
    rows_on_diagonal,
)
from helion_attn.kernels.lib.schraudolph import (
    in_fp16_steps,
    largest_scores,
    p_of_scores,
    row_sums,
    wide_scores,
)
from helion_attn.kernels.lib.specs import AttentionSpec
from helion_attn.kernels.lib.steps import (
    accumulate,
    add_sink,
    keys_first,
    online_softmax_step,
    row_sum_overflows,
    scaled,
    scaled_largest,
    scores,
    softmax_input,
    store_lse,
    store_out,
    v_rows,
)
from helion_attn.kernels.merge_splits import merge_splits
from helion_attn.numerics import (
    FP32_TINY,
    INT8_SCORE_BIAS,
    LOG2E,
    MAX_FUSED_HALF_SCALE_LOG2,
    MAX_FUSED_SCALE_LOG2,
    NO_KEY,
    first_block_max,
    takes_bits,
)
from helion_attn.options import ScoreScales
from helion_attn.problem import NO_CHUNKS, AttentionArgs, Choice, ListSteps, RankChunks, magic


def fp8_attn_fwd(
    q8: torch.Tensor,  # [B * H, M_blocks, bm, D_pad]
    k8: torch.Tensor,  # [B * H_kv, N_blocks, bn, D_pad]
    v8: torch.Tensor,  # [B * H_kv, N_blocks, D_v_pad, bn], with `split_v` [B * H_kv, N_blocks * 2, D_v_pad / 2, bn],
    # or of 16 bits [B * H_kv, N_blocks, bn, D_v_pad]
    q_descale: torch.Tensor,  # [B * H * M_blocks * bm]
    k_descale: torch.Tensor,  # [B * H_kv * N_blocks] if k_block_descales, else [B * H_kv]
    v_descale: torch.Tensor,  # [B * H_kv * D_v_pad]; of a head all the same, unless v_channel_descales
    v_mean: torch.Tensor,  # [B * H_kv * D_v_pad]
    lse_shift: torch.Tensor,  # [B * H * M_blocks * bm] if has_lse_shift
    sinks: torch.Tensor,  # [H] if has_sinks
    q_blocks: torch.Tensor,  # [M_blocks, Q_FIELDS] if varlen
    q_rows: torch.Tensor,  # q8 as [B * H * M_blocks * bm, D_pad] if pack_gqa
    q: torch.Tensor,  # flat, as the user has it, if spec.query
    k_mean: torch.Tensor,  # [B * H_kv * D_row] if spec.query and has_lse_shift
    channel_factors: torch.Tensor,  # [B * H_kv * D_row] if spec.query and its rows has equalise
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_positions: torch.Tensor,
    row_bounds: torch.Tensor,  # [2, M_blocks * bm] if row_ranges
    block_bounds: torch.Tensor,  # [M_blocks, 4] if row_ranges
    lists: torch.Tensor,  # [lists * 2] if block_sparse
    entries: torch.Tensor,  # [lists * N_blocks] if block_sparse
    tile_of: torch.Tensor,  # as `entries`, or of one element
    tiles: torch.Tensor,  # [T * MASK_BLOCK * words of a row] if block_sparse
    tail: torch.Tensor,  # [lists * words of a list] if has_tail
    out: torch.Tensor,  # [B * H * M, D_v], or [splits * B * H * M, D_v] if is_split_kv, written
    lse: torch.Tensor,  # [B * H * M], or [splits * B * H * M], written
    m_len: int,
    n_len: int,
    heads: int,
    q_b_step: int,
    q_h_step: int,
    q_s_step: int,
    table_rows: int,
    group: int,
    out_head_step: int,
    out_row_step: int,
    left: int,
    right: int,
    splits: int,
    head_group: int,
    chunks: RankChunks,
    key_magic: int,
    list_steps: ListSteps,
    scales: ScoreScales,
    spec: hl.constexpr,  # AttentionSpec
) -> None:
    """Write `out` and `lse`, as the module's docstring says.

    Rows of `out` lie `out_row_step` apart, heads `out_head_step`.

    If rows may see any number of keys (`has_right` alone), `head_group` heads, which divide those of the grid, come at
    once: the longest rows of all of them first. `scheduling.group_programs` says why. Few queries whose keys are split
    see almost as many.

    With `varlen` the sequences of a batch lie one after the other, as `preprocess.sequences` has it, and `q_blocks`
    says where; as many heads of a sequence come at once as have `head_group` programs, or one. The tensors have no B in
    their sizes then, but for v_mean, m_len is the number of all queries, and v_descale has D_v_pad channels for every
    key block. A sequence's keys are counted from the first packed block of all: it is the bounds that differ, not the
    loop.

    With `is_split_kv` there are `splits` times as many heads in the grid, a split after the other, and in `out`, fp32,
    and `lse`: both [splits, B, H, M, ...], whatever the steps say.

    With `pack_gqa` the grid has KV heads in place of heads, and the heads of a group, `group` of them but no more than
    two to `group_log2`, share tiles: the group's row r is query `r >> group_log2` of its head `r % 2**group_log2`.
    Then there are `q_row_descales`, and no `varlen`.

    With `split_v` P V is two products, of half of V's channels each.

    With `multi_rank` K and V are in chunks, of several ranks, and so may the rows be: `kernels.lib.rank_chunks` says
    where each lies, and what `chunks` are. k8 and v8 have one head then, of all blocks, and out and lse have the rows
    of all chunks. There is no `varlen`, `is_split_kv` or `pack_gqa`. With `row_ranges` besides, a row sees the keys
    from one position up to another: `row_bounds` has these of every row, `block_bounds` what follows of a block's key
    blocks; and there are no edges.

    With `block_sparse` the loop walks the entries of a KV list: `kernels.lib.kv_lists` says which. There is no
    `varlen`, `multi_rank` or `pack_gqa`. With `has_tail` k8 and v8 have blocks of means behind those of keys. Their
    scores lack log2 of `MASK_BLOCK`, and so do the references that P is relative to.
    """
    # Passed on to Triton: the registers that the config's occupancy leaves to a thread.
    hl.register_tunable(MAX_REGISTERS, helion.autotuner.IntegerFragment(24, 255, 255))
    # More than 2**31 elements are read by descriptors only if the dimensions are known to fit 32 bits; and by
    # pointers, scalar tensors cannot be indices.
    torch._check(q8.size(0) <= 2**24)
    torch._check(q8.size(1) <= 2**25)
    torch._check(k8.size(0) <= 2**24)
    torch._check(k8.size(1) <= 2**25)
    torch._check(v8.size(0) <= 2**24)
    torch._check(v8.size(1) <= 2**25)
    bh_size, n_blocks = q8.size(0), k8.size(1)
    bm = hl.specialize(q8.size(2))
    bn = hl.specialize(k8.size(2))
    d_pad = hl.specialize(k8.size(3))
    hl.specialize((q8.size(3), v8.size(2), v8.size(3)))
    if spec.query is not None:
        m_blocks = (m_len + bm - 1) // bm
        if spec.block_sparse:
            m_blocks = list_steps.row_blocks * (MASK_BLOCK // bm)
        hl.specialize((q.stride(0), cos.stride(0), sin.stride(0), k_mean.stride(0), channel_factors.stride(0)))
    else:
        m_blocks = q8.size(1)
    d_v_tile = v8.size(2) if v8.dtype.itemsize == 1 else v8.size(3)
    d_v_pad = d_v_tile * 2 if spec.split_v else d_v_tile
    d_out = hl.specialize(out.size(1))
    # Row sums are carried this wide and reduced across lanes once, after the loops.
    l_lanes = 8
    # Known strides keep the stores 16 bytes wide.
    hl.specialize((lists.stride(0), entries.stride(0), tile_of.stride(0), tiles.stride(0), tail.stride(0)))
    hl.specialize((out.stride(0), out.stride(1), v_mean.stride(0), q_descale.stride(0)))

    if spec.pack_gqa:
        head_size, blocks = k8.size(0), ((m_len << spec.group_log2) + bm - 1) // bm
        # Known strides keep the loads 16 bytes wide.
        hl.specialize((q_rows.stride(0), q_rows.stride(1)))
    else:
        head_size, blocks = bh_size, m_blocks
    if spec.block_sparse:
        blocks = list_steps.row_blocks * (MASK_BLOCK // bm)
        hl.specialize(k_descale.stride(0))
    grid_heads = splits * head_size if spec.is_split_kv else head_size
    rows_differ = spec.block_sparse or (spec.scores.has_right and not spec.scores.has_left)
    heads_at_once = head_group if rows_differ and not (spec.varlen or spec.is_split_kv) else 1
    for grid_group, program in hl.grid([grid_heads // heads_at_once, blocks * heads_at_once]):
        grid_head = grid_group * heads_at_once + program % heads_at_once
        grid_block = program // heads_at_once
        # Row i sees keys i + diagonal - left .. i + diagonal + right: bottom-right alignment.
        rows = rows_of(
            q_blocks, lists, grid_head, grid_block, head_size, blocks, k8.size(0), n_blocks, head_group, group, m_len,
            n_len, bm, bn, m_blocks, chunks, list_steps, spec,
        )  # fmt: skip
        keys = keys_of(block_bounds, rows, grid_head, head_size, splits, n_len, left, right, bm, bn, chunks, spec)
        # Helion's branches take no record of several tensors.
        kv, row_begin, diagonal = rows.kv, rows.begin, rows.diagonal
        split_begin, split_end, n_full, key_end = keys.begin, keys.stop, keys.full, rows.key_end
        head_first, first_descale = keys.head_first, keys.first_descale
        # [bm]
        packed_rows = packed_rows_of(rows, m_blocks, group, m_len, bm, spec)
        # Flat indices make plain loads of what is small. As a descriptor load each waits for a barrier of its own.
        # [bm], or a scalar for one a block. Loads before that of Q, which is waited for behind them, are under way
        # meanwhile.
        if spec.query is not None:
            # [bm, D_pad], [bm], [bm]
            head_offset = (rows.bh // heads) * q_b_step + (rows.bh % heads) * q_h_step
            q_tile, q_scale, lse_shift_of_rows = quantised_rows(
                q, cos, sin, q_positions, k_mean, channel_factors, kv, head_offset * spec.query.unit, rows.begin +
                hl.arange(bm), q_s_step * spec.query.unit, m_len, n_len - m_len, table_rows, bm, d_pad, k8.dtype, spec,
            )  # fmt: skip
            if spec.scores.has_lse_shift:
                # Read again behind the loop, which has no registers for it.
                hl.store(lse_shift, [packed_rows], lse_shift_of_rows)
                if spec.is_cuda:
                    hl.inline_triton("tl.debug_barrier()", args=(), output_like=None)
        elif spec.q_row_descales:
            q_scale = hl.load(q_descale, [packed_rows])
        else:
            q_scale = hl.load(q_descale, [first_packed_row(rows, m_blocks, bm, spec)])
        entry = first_entry_of(entries, split_begin, spec)
        first_entry, key_blocks = rows.first_entry, (n_len + bn - 1) // bn
        first_block = block_of_entry(split_begin, entry, spec)
        # The descale of the block at hand. With one a block, the next is loaded a block ahead: loaded in the block that
        # uses it, Triton's pipeliner sends it through shared memory and adds a barrier.
        if spec.k_block_descales:
            k_scale = first_k_descale(k_descale, first_block, kv, first_descale, n_blocks, chunks, spec)
        else:
            k_scale = k_descale[rows.descale_row]
        # [bm, D_pad]
        if spec.pack_gqa:
            q_tile = hl.load(q_rows, [packed_rows, hl.arange(q8.size(3))])
        elif spec.query is None:
            q_tile = q8[rows.bh, rows.m_block, :, :]
        q_scale_log2 = q_scale * scales.qk_scale
        if spec.q_row_descales:
            # A row that is NaN or infinite must not change its neighbours.
            finite_scale_log2 = torch.where(q_scale_log2 < float("inf"), q_scale_log2, 0.0)
            max_fused_k_scale = spec.max_fused_scale / torch.amax(finite_scale_log2, 0)
        else:
            max_fused_k_scale = spec.max_fused_scale / q_scale_log2
        # [bm], what smooth-K took from all of a row's scores
        lse_shift_scaled = hl.zeros([bm], dtype=torch.float32)
        if spec.scores.lse_shift_in_scores:
            lse_shift_scaled = hl.load(lse_shift, [packed_rows]) * scales.qk_scale
        m_i = hl.full([bm], NO_KEY if spec.block_max else float("-inf"), dtype=torch.float32)
        m_run = m_i
        l_i = hl.zeros([bm] if spec.schraudolph_exp2 else [bm, l_lanes], dtype=torch.float32)
        # [bm, D_v_pad], or each half of it
        acc = hl.zeros([bm, d_v_tile], dtype=torch.float32)
        if spec.split_v:
            acc_high = hl.zeros([bm, d_v_tile], dtype=torch.float32)

        # [bm], loaded here, since in the loop they would go through shared memory
        keys_from, keys_up_to = bounds_of_rows(row_bounds, rows.m_block, bm, spec.row_ranges)

        n_unmasked = first_unmasked_block(keys, spec)
        for entry_idx in hl.grid(split_begin, split_end):
            entry_at_hand, j = entry, block_of_entry(entry_idx, entry, spec)
            if spec.block_sparse:
                entry = next_entry_of(entries, entry_idx, split_end)
            next_block = block_of_entry(entry_idx, entry, spec)
            s_scale_log2 = q_scale_log2 * k_scale
            # Masked scores, -inf before they are scaled, stay so: no scale is 0.
            if spec.half_scores:
                s_scale_log2 = in_fp16_steps(s_scale_log2, spec.is_cuda)
            elif spec.schraudolph_exp2:
                s_scale_log2 = maximum(s_scale_log2, hl.full([], FP32_TINY, dtype=torch.float32), spec.is_cuda)
            # Not "large", since a NaN is not within.
            within = (k_scale <= max_fused_k_scale).to(torch.int32)
            if spec.k_block_descales:
                k_scale = next_k_descale(k_descale, next_block, split_end, kv, first_descale, n_blocks, spec)
            # [bn, D_pad] and [d_v_tile, bn], or of 16 bits [bn, D_v_pad]
            k_block, v_block, v_high, chunk = block_of_keys(k8, v8, j, kv, head_first, key_magic, chunks, spec)
            # [bm, bn]
            s = scores(q_tile, k_block.transpose(0, 1), bm, bn, spec.half_scores, spec.is_cuda)
            s, s_scale_log2 = softmax_input(s, s_scale_log2, scales, lse_shift_scaled, spec)
            # Blocks at an edge of what is visible, those that references come from, and those of a large scale: one
            # branch for all.
            edge = at_edge(j, chunk, entry_at_hand, n_unmasked, n_full, chunks, spec)
            if spec.schraudolph_exp2:
                special = edge
            else:
                special = 1 - within + edge
            if special > 0:
                if not spec.schraudolph_exp2:
                    # Exact, then rounded: against a running maximum the largest P is 2**p_offset_log2 while fp32 tells
                    # m_i from it.
                    s = scaled(s - spec.softmax_bias, s_scale_log2, spec.softmax_row_descales)
                # The key index is made inside the loop; kept outside, it takes 32 registers and the third CTA with it.
                first_key, keys_end = first_key_of_block(
                    block_at_edge(entry_idx, entry_at_hand, key_blocks, spec), chunk, key_end, bn, chunks, spec
                )
                positions = first_key + hl.arange(bn)
                on_diagonal = rows_on_diagonal(row_begin, diagonal, n_len - m_len, bm, spec)
                visible = visible_keys(positions, on_diagonal, keys_end, left, right, spec.scores)
                visible = within_bounds(visible, positions, keys_from, keys_up_to, spec.row_ranges)
                visible = within_list(
                    visible, tile_of, tiles, tail, entry_idx, entry_at_hand, first_entry, row_begin, diagonal, n_len,
                    left, right, bm, bn, list_steps, spec,
                )  # fmt: skip
                if spec.has_tail:
                    # From the first block of means on, references are of scores without their counts. The running
                    # maximum of `block_max` only limits them, and its shift would spill.
                    count_log2 = torch.where(entry_at_hand == key_blocks, TAIL_COUNT_LOG2, 0.0)
                    m_i = m_i - count_log2
                    if not spec.block_max:
                        m_run = m_run - count_log2
                s = masked_scores(s, visible, bm, bn, spec)
                if spec.first_block_max:
                    m_i = torch.where(m_i == float("-inf"), torch.amax(s, 1), m_i)
            if spec.schraudolph_exp2:
                largest = largest_scores(s, bm, bn, spec)
                top = scaled_largest(largest - spec.softmax_bias, s_scale_log2, spec)
                m_before = m_i
                m_run, m_i = update_block_max(top, m_run, spec.is_cuda)
                wide = 1 - within
                if wide > 0:
                    s = wide_scores(s, s_scale_log2, largest, top, m_i, bm, bn, spec)
                # [bm, bn], [bm]
                p8, m_i = p_of_scores(s, s_scale_log2, m_i, wide, bm, bn, spec)
                # [bm, 1]
                alpha = torch.exp2(m_before - m_i).unsqueeze(1)
            else:
                bias = torch.where(special > 0, 0.0, spec.softmax_bias)
                s_scale_log2 = torch.where(special > 0, 1.0, s_scale_log2)
                p8, alpha, m_run, m_i, l_i = online_softmax_step(
                    s, bias, s_scale_log2, m_run, m_i, l_i, bm, bn, l_lanes, v8.dtype, spec
                )
            acc = accumulate(acc, alpha, p8, keys_first(v_block), spec)
            if spec.split_v:
                acc_high = accumulate(acc_high, alpha, p8, keys_first(v_high), spec)
            if spec.schraudolph_exp2:
                l_i = l_i * alpha.squeeze(1) + row_sums(p8)

        if spec.has_tail:
            m_i = m_i + torch.where(entry >= key_blocks, TAIL_COUNT_LOG2, 0.0)

        # These come while the rows are summed, where no other program runs meanwhile. At D 64 ptxas would wait for each
        # single product of 16 bits.
        sums_cover_loads = d_v_tile == 256 or (spec.split_v and not spec.varlen)
        if sums_cover_loads:
            mean, descale = v_rows(v_mean, v_descale, rows.mean_row, rows.descale_row, 0, d_v_tile, d_v_pad, spec)
        # By channel, descales of both halves are more than registers hold.
        both_covered = spec.split_v and sums_cover_loads and not spec.v_channel_descales
        if both_covered:
            mean_high, descale_high = v_rows(
                v_mean, v_descale, rows.mean_row, rows.descale_row, d_v_tile, d_v_tile, d_v_pad, spec
            )
        # [bm]
        if spec.schraudolph_exp2:
            row_sum = l_i
        else:
            row_sum = l_i.sum(1)
        if spec.first_block_max:
            # A sum that bf16 or fp32 may not hold: all again, against the running maximum.
            again = row_sum_overflows(row_sum)
            if again > 0:
                m_i = hl.full([bm], float("-inf"), dtype=torch.float32)
                l_i = hl.zeros([bm, l_lanes], dtype=torch.float32)
                scaled_spec = spec.of_scaled_scores
                acc = hl.zeros([bm, d_v_pad], dtype=torch.float32)
                for i in hl.grid(split_begin, split_end):
                    k_block_again, v_block_again, _, chunk_again = block_of_keys(
                        k8, v8, i, kv, head_first, key_magic, chunks, spec
                    )
                    first_again, end_again = first_key_of_block(i, chunk_again, key_end, bn, chunks, spec)
                    if spec.k_block_descales:
                        k_scale = k_descale_of(k_descale, i, kv, first_descale, n_blocks, spec)
                    # [bm, bn]
                    s = scores(q_tile, k_block_again.transpose(0, 1), bm, bn, False, spec.is_cuda)
                    s, s_scale_log2 = softmax_input(s, q_scale_log2 * k_scale, scales, lse_shift_scaled, spec)
                    s = scaled(s - spec.softmax_bias, s_scale_log2, spec.softmax_row_descales)
                    positions = first_again + hl.arange(bn)
                    on_diagonal = rows_on_diagonal(row_begin, diagonal, n_len - m_len, bm, spec)
                    visible = visible_keys(positions, on_diagonal, end_again, left, right, spec.scores)
                    visible = within_bounds(visible, positions, keys_from, keys_up_to, spec.row_ranges)
                    s = masked_scores(s, visible, bm, bn, spec)
                    p8, alpha, _, m_i, l_i = online_softmax_step(
                        s, 0.0, hl.full([], 1.0, dtype=torch.float32), m_i, m_i, l_i, bm, bn, l_lanes, v8.dtype,
                        scaled_spec,
                    )  # fmt: skip
                    acc = accumulate(acc, alpha, p8, v_block_again, scaled_spec)
                row_sum = l_i.sum(1)
        if spec.varlen:
            # Rows of no sequence must not pass for rows without a key.
            row_sum = torch.where(rows.keys < 0, float("nan"), row_sum)
        total = row_sum
        rescale = row_sum
        m_keys = m_i
        if spec.block_max:
            m_keys = torch.where(row_sum == 0.0, float("-inf"), m_i)
        # [bm], of each row its query, and its head: in the output, and in the splits
        query, head, split_head, row_in_range = queries_of_rows(rows, grid_head, group, bm, spec)
        if spec.scores.lse_shift_in_lse:
            lse_shift_scaled = hl.load(lse_shift, [packed_rows]) * scales.qk_scale
        if spec.scores.has_sinks:
            if spec.pack_gqa:
                sink = hl.load(sinks, [head % heads])
            else:
                sink = sinks[rows.bh % heads]
            # [bm], as far below the whole scores' as these scores are. Added to 0 the product is rounded here; left
            # alone, the subtractions below take it in as FMAs, and a large one differs from itself.
            sink_log2 = hl.zeros([bm], dtype=torch.float32) + sink * LOG2E
            if spec.scores.lse_shift_in_lse:
                sink_log2 = sink_log2 - lse_shift_scaled
            rescale, m_i, total = add_sink(m_i, row_sum, sink_log2, spec)
        # Before the output: with it after, ptxas waits for each single product where Q, K and V are of 16 bits.
        lse_rows = (split_head if spec.is_split_kv else head) * m_len + query
        store_lse(lse, m_i, total, lse_shift_scaled, lse_rows, row_in_range, spec.scores.lse_shift_in_lse)
        out_rows = out_rows_of(query, head, split_head, heads, m_len, out_head_step, out_row_step, spec)
        if spec.split_v and not both_covered:
            mean_high, descale_high = v_rows(
                v_mean, v_descale, rows.mean_row, rows.descale_row, d_v_tile, d_v_tile, d_v_pad, spec
            )
        if spec.split_v:
            store_out(
                out, acc_high, mean_high, descale_high, m_keys, row_sum, rescale, total, out_rows, row_in_range,
                d_v_tile, d_v_tile, d_v_pad, d_out, spec,
            )  # fmt: skip
        if not sums_cover_loads:
            mean, descale = v_rows(v_mean, v_descale, rows.mean_row, rows.descale_row, 0, d_v_tile, d_v_pad, spec)
        store_out(
            out, acc, mean, descale, m_keys, row_sum, rescale, total, out_rows, row_in_range, 0,
            d_v_tile, d_v_pad, d_out, spec,
        )  # fmt: skip


#: Of keys and rows of several ranks: sums of two fit 32 bits.
MAX_POSITION = 2**29


@functools.cache
def compiled_kernel(tile: TileConfig, two_level: bool, quantises_q: bool) -> Compiled:
    """The kernel for sm_90 with a config."""
    return compiled(fp8_attn_fwd, helion_config(tile), expected_passes(tile, two_level, quantises_q))


interpreted_kernel = interpreted(fp8_attn_fwd)


def launch(
    choice: Choice,
    a: AttentionArgs,
    out: torch.Tensor,
    lse: torch.Tensor,
    q_blocks: torch.Tensor | None = None,
    query: Query | None = None,
    rank_chunks: RankChunks | None = None,
    bounds: Bounds | None = None,
) -> None:
    """Write `out` and `lse`.

    Args:
        choice: of `fp8_attn_fwd`; q8 and v8 are packed in the block sizes of its tile. With `q_blocks` and
            `rank_chunks`, keys are not split and heads share no tiles.
        a: the operation's arguments.
        out: contiguous [B, H, M, D_v], or [B, M, H, D_v] when `a.bshd`; bf16, fp16, fp32 or e4m3. With `q_blocks`
            [M, H, D_v], and `bshd`.
        lse: fp32 [B, H, M], natural log; with `q_blocks` [H, M].
        q_blocks: of `PackedVarlen`, or None.
        query: Q that the kernel quantises, where no block of Q is packed.
        rank_chunks: where keys of several ranks lie, and the rows that attend to them, or None. Then `a.n_len` is
            where their positions end; and no `q_blocks`.
        bounds: which keys rows see, or None; with `rank_chunks` alone.
    """
    tile, splits, pack_gqa = choice.tile, choice.splits, choice.pack_gqa
    assert isinstance(tile, TileConfig)
    q8, k8, v8 = a.packed.q8, a.packed.k8, a.packed.v8
    # Also stands for tensors that are not read: its view is there already.
    q_descale = a.packed.q_descale.view(-1)
    sizes, spec_fields = a.sizes(), a.spec_fields()
    if rank_chunks is not None:
        # Positions, and not rows, are what edges are measured in.
        sizes |= {"left": min(a.scores.left, MAX_POSITION), "right": min(a.scores.right, MAX_POSITION)}
    is_split_kv = splits > 1
    # Two to it are the rows of a query.
    group_log2 = (sizes["group"] - 1).bit_length() if pack_gqa else 0
    # Splits are BHSD, and without sinks.
    partial_out = out.new_empty((splits * lse.numel(), out.size(-1)), dtype=torch.float32) if is_split_kv else out
    partial_lse = lse.new_empty((splits, lse.numel())) if is_split_kv else lse
    split_sinks = None if is_split_kv else a.scores.sinks
    two_level = a.recipe.is_two_level(tile.two_level)
    block_max = two_level and v8.dtype.itemsize == 1
    schraudolph_exp2 = block_max and takes_bits(v8.dtype, tile.D_pad)
    half_scores = schraudolph_exp2 and a.recipe.half_scores and a.scores.is_linear
    split_v = two_level and v8.size(2) > MAX_FRESH_D
    block_sparse = a.block_mask.lists is not None
    # Heads that share tiles have descales of their own.
    spec_fields["q_row_descales"] = spec_fields["q_row_descales"] or pack_gqa
    chunks = NO_CHUNKS if rank_chunks is None else rank_chunks
    query_tensors, query_spec = query_arguments(query, a, tile.bm)
    spec = AttentionSpec(
        s_bias=INT8_SCORE_BIAS if q8.dtype == torch.int8 and q8.is_cuda else 0.0,
        max_fused_scale=MAX_FUSED_HALF_SCALE_LOG2 if half_scores else MAX_FUSED_SCALE_LOG2[q8.dtype],
        p_offset_log2=float(a.recipe.p_offset),
        **spec_fields,
        scores=a.scores.spec(has_lse_shift=a.packed.lse_shift is not None)._replace(has_sinks=split_sinks is not None),
        # The first block of a list need not be one that all rows see.
        first_block_max=first_block_max(q8.dtype, v8.dtype, tile.D_pad) and not block_sparse,
        two_level=two_level,
        block_max=block_max,
        schraudolph_exp2=schraudolph_exp2,
        half_scores=half_scores,
        split_v=split_v,
        varlen=q_blocks is not None,
        is_split_kv=is_split_kv,
        pack_gqa=pack_gqa,
        group_log2=group_log2,
        bn_log2=k8.size(2).bit_length() - 1,
        multi_rank=rank_chunks is not None,
        zigzag=chunks.zigzag,
        same_kv_layout=chunks.k_rank_step == chunks.v_rank_step,
        row_ranges=bounds is not None,
        block_sparse=block_sparse,
        has_tail=a.block_mask.tail is not None,
        query=query_spec,
        is_cuda=q8.is_cuda,
    )
    kernel = compiled_kernel(tile, two_level, query is not None) if q8.is_cuda else interpreted_kernel
    kernel.run(
        {
            "q8": q8,
            "k8": k8,
            "v8": v8.view(v8.size(0), -1, v8.size(2) // 2, v8.size(3)) if split_v else v8,
            "q_descale": q_descale,
            "k_descale": a.packed.k_descale.view(-1),
            "v_descale": a.packed.v_descale.view(-1),
            "v_mean": a.packed.v_mean.view(-1),
            "sinks": q_descale if split_sinks is None else split_sinks,
            "q_blocks": q_descale if q_blocks is None else q_blocks,
            "q_rows": q8.view(-1, q8.size(3)) if pack_gqa else q_descale,
            **query_tensors,
            "row_bounds": q_descale if bounds is None else bounds.rows,
            "block_bounds": q_descale if bounds is None else bounds.blocks,
            **a.block_mask.arguments(sizes["heads"], q_descale),
            "out": partial_out.view(-1, out.size(-1)),
            "lse": partial_lse.view(-1),
            **sizes,
            "splits": splits,
            "head_group": choice.head_group,
            "chunks": chunks,
            "key_magic": magic(chunks.key_chunk_blocks),
            "scales": a.scores.scales(),
            "spec": spec,
        }
    )
    if is_split_kv:
        merge_splits(partial_out, partial_lse, out, lse, a.bshd, a.scores.sinks)
