"""FP8 attention, forward, for the head dims of `configs.uses_large_d`: above 256, where one program cannot hold them,
D and D_v up to 1024; and D 129 to 192 with D_v up to 128, for which `fp8_attn_fwd` would pad too much.

The mathematics and the rounding points are those of `fp8_attn_fwd`. What differs is who computes what:

- **Channels of V are split over programs.** A [128, D_v] fp32 accumulator fills the register file at D_v = 512. So a
  program owns `bm` query rows and one slice of `v_tile` channels, and computes the scores of its rows itself: with n
  slices, Q K^T and the softmax are done n times, and each slice of V is read once. `v_tile` is what registers allow.
- **A head dim is cut in pieces of 256 and a rest**, a power of two each (320 = 256 + 64), for so are Triton's tiles,
  and a TMA box has at most 256 elements a side. The scores are products of pieces into one accumulator, and a program
  has an accumulator for each piece of V. Pieces are views of the packed tensors.

Q stays in shared memory, all D of it; blocks of K and of a slice of V pass through in `num_stages` stages, but for K of
D 192, which has one buffer (`compiler/passes/single_k_buffer.py`).

P V is summed in two levels: pieces of V are as small as the fresh product must be to have registers beside all sums
(`fresh_channels`).
"""

from __future__ import annotations

import functools

import torch

from helion_attn.compiler.helion_adapter import MAX_REGISTERS, helion, helion_config, hl
from helion_attn.compiler.passes.expected import expected_passes
from helion_attn.compiler.runners import Compiled, compiled, interpreted
from helion_attn.configs import MAX_FRESH_D, MAX_PIECE, LargeTileConfig, largest_power_of_two
from helion_attn.kernels.lib.keys import keys_of_head
from helion_attn.kernels.lib.masks import masked_scores, visible_keys
from helion_attn.kernels.lib.rows import in_order, rows_of_block
from helion_attn.kernels.lib.specs import AttentionSpec, LargeSpec
from helion_attn.kernels.lib.steps import (
    accumulate,
    add_sink,
    keys_first,
    online_softmax_step,
    scaled,
    scores_of_pieces,
    softmax_input,
    store_lse,
    store_out,
    v_rows,
)
from helion_attn.numerics import LOG2E, MAX_FUSED_SCALE_LOG2, NO_KEY
from helion_attn.options import ScoreScales
from helion_attn.problem import AttentionArgs


def split_head_dim(d: int) -> list[tuple[int, int]]:
    """Where the pieces of a head dim start, and their sizes."""
    wide = min(largest_power_of_two(d), MAX_PIECE)
    starts = range(0, d, wide)
    return [(start, min(wide, d - start)) for start in starts]


def row_pieces(
    wide: torch.Tensor,  # [heads, blocks, rows, count, d_wide]
    narrow: torch.Tensor,  # [heads, blocks, rows, d_narrow]
    head: int,
    block: int,
    count: int,
    has_narrow: hl.constexpr,
) -> list[torch.Tensor]:
    """One block of rows: its wide pieces, `count` times [rows, d_wide], then its narrow one, [rows, d_narrow]."""
    whole = slice(None)
    found = [hl.load(wide, [head, block, whole, i, whole]) for i in range(count)]
    if has_narrow:
        found.append(hl.load(narrow, [head, block, whole, whole]))
    return found


def query_pieces(
    q8: torch.Tensor,  # flat
    first: int,
    bm: int,
    d_pad: int,
) -> list[torch.Tensor]:
    """`bm` rows of Q in pieces, [bm, d] each.

    Not by descriptor: Triton keeps what a reshaped TMA box gives in registers, where D = 512 takes 64 a thread, and
    what a plain load gives in shared memory.
    """
    found = []
    for start, size in split_head_dim(d_pad):
        offsets = first + hl.arange(bm).unsqueeze(1) * d_pad + (start + hl.arange(size)).unsqueeze(0)
        found.append(hl.load(q8, [offsets]))
    return found


def keys_last(k_pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Pieces of K, [bn, d] each, as [d, bn]."""
    return [k.transpose(0, 1) for k in k_pieces]


def channel_pieces(
    wide: torch.Tensor,  # [heads, blocks, count, d_wide, bn], without count if it is 1
    narrow: torch.Tensor,  # [heads, blocks, d_narrow, bn]
    head: int,
    block: int,
    count: int,
    has_narrow: hl.constexpr,
) -> list[torch.Tensor]:
    """One block of V: its wide pieces, `count` times [d_wide, bn], then its narrow one, [d_narrow, bn]."""
    whole = slice(None)
    if count == 1:
        found = [hl.load(wide, [head, block, whole, whole])]
    else:
        found = [hl.load(wide, [head, block, i, whole, whole]) for i in range(count)]
    if has_narrow:
        found.append(hl.load(narrow, [head, block, whole, whole]))
    return found


def zeros_of_pieces(bm: int, v_sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """The sums of all pieces of V before the first key, [bm, d] each."""
    return tuple([hl.zeros([bm, size], dtype=torch.float32) for size in v_sizes])


def accumulate_pieces(
    accs: tuple[torch.Tensor, ...],  # [bm, d] each
    alpha: torch.Tensor,  # [bm, 1]
    p8: torch.Tensor,  # [bm, bn]
    v_tiles: list[torch.Tensor],  # [d, bn] each
    spec: AttentionSpec,
) -> tuple[torch.Tensor, ...]:
    """`accumulate` for each piece of V."""
    pairs = zip(accs, v_tiles, strict=True)
    return tuple([accumulate(acc, alpha, p8, keys_first(v_tile), spec) for acc, v_tile in pairs])


def store_pieces(
    out: torch.Tensor,  # [B * H * M, D_v]
    accs: tuple[torch.Tensor, ...],  # [bm, d] each
    v_mean: torch.Tensor,  # [B * H_kv * D_v_pad]
    v_descale: torch.Tensor,  # [B * H_kv * D_v_pad]
    m_keys: torch.Tensor,  # [bm]
    row_sum: torch.Tensor,  # [bm]
    alpha: torch.Tensor,  # [bm]
    total: torch.Tensor,  # [bm]
    out_rows: torch.Tensor,  # [bm]
    row_in_range: torch.Tensor,  # [bm]
    kv: int,
    first: int,
    v_sizes: list[int],
    d_v_pad: int,
    d_out: int,
    spec: AttentionSpec,
) -> None:
    """`store_out` for each piece of V, from channel `first`; the last goes first, which has the smallest sum."""
    for i in reversed(range(len(v_sizes))):
        begin = first + sum(v_sizes[:i])
        mean, descale = v_rows(v_mean, v_descale, kv, kv, begin, v_sizes[i], d_v_pad, spec)
        store_out(
            out, accs[i], mean, descale, m_keys, row_sum, alpha, total, out_rows, row_in_range, begin, v_sizes[i],
            d_v_pad, d_out, spec,
        )  # fmt: skip


def fp8_attn_fwd_large_d(
    q8: torch.Tensor,  # [B * H, M_blocks, bm, D_pad]
    q_flat: torch.Tensor,  # q8 as [B * H * M_blocks * bm * D_pad]
    k_wide: torch.Tensor,  # [B * H_kv, N_blocks, bn, d_count, d_wide]
    k_narrow: torch.Tensor,  # [B * H_kv, N_blocks, bn, d_narrow]
    v_wide: torch.Tensor,  # [B * H_kv, N_blocks * v_slices, v_count, v_wide, bn], without v_count if it is 1
    v_narrow: torch.Tensor,  # [B * H_kv, N_blocks * v_slices, v_narrow, bn]
    q_descale: torch.Tensor,  # [B * H * M_blocks * bm]
    k_descale: torch.Tensor,  # [B * H_kv * N_blocks] if k_block_descales, else [B * H_kv]
    v_descale: torch.Tensor,  # [B * H_kv * D_v_pad]; of a head all the same, unless v_channel_descales
    v_mean: torch.Tensor,  # [B * H_kv * D_v_pad]
    lse_shift: torch.Tensor,  # [B * H * M_blocks * bm] if has_lse_shift
    sinks: torch.Tensor,  # [H] if has_sinks
    out: torch.Tensor,  # [B * H * M, D_v], written
    lse: torch.Tensor,  # [B * H * M], written
    m_len: int,
    n_len: int,
    heads: int,
    group: int,
    out_head_step: int,
    out_row_step: int,
    left: int,
    right: int,
    head_group: int,
    scales: ScoreScales,
    large: hl.constexpr,  # LargeSpec
    spec: hl.constexpr,  # AttentionSpec
) -> None:
    """Write `out` and `lse`, as the module's docstring says, and `fp8_attn_fwd`'s what is not said here."""
    # Passed on to Triton: the registers that the config's occupancy leaves to a thread.
    hl.register_tunable(MAX_REGISTERS, helion.autotuner.IntegerFragment(24, 255, 255))
    # Without these, more than 2**31 elements are read by pointers: see `fp8_attn_fwd`.
    torch._check(k_wide.size(0) <= 2**24)
    torch._check(k_wide.size(1) <= 2**25)
    torch._check(k_narrow.size(0) <= 2**24)
    torch._check(k_narrow.size(1) <= 2**25)
    torch._check(v_wide.size(0) <= 2**24)
    torch._check(v_wide.size(1) <= 2**30)
    torch._check(v_wide.size(2) <= 2**10)
    torch._check(v_narrow.size(0) <= 2**24)
    torch._check(v_narrow.size(1) <= 2**30)
    bh_size, m_blocks, n_blocks = q8.size(0), q8.size(1), k_wide.size(1)
    bm = hl.specialize(q8.size(2))
    bn = hl.specialize(k_wide.size(2))
    d_pad = hl.specialize(q8.size(3))
    d_count = hl.specialize(k_wide.size(3))
    hl.specialize((k_wide.size(4), k_narrow.size(3)))
    wide = hl.specialize(v_wide.size(-2))
    narrow = hl.specialize(v_narrow.size(2))
    # Of a program's pieces of V.
    v_sizes = [wide] * large.v_count + [narrow] * large.has_narrow_v
    v_tile = sum(v_sizes)
    d_v_pad = v_tile * large.v_slices
    d_out = hl.specialize(out.size(1))
    # Row sums are carried this wide and reduced across lanes once, after the loop.
    l_lanes = 8
    # Known strides keep the stores, and the loads of Q, 16 bytes wide.
    hl.specialize((out.stride(0), out.stride(1), v_mean.stride(0), q_descale.stride(0), q_flat.stride(0)))

    heads_at_once = head_group if spec.scores.has_right and not spec.scores.has_left else 1
    for grid_group, m_rank, of_group in hl.grid([bh_size // heads_at_once, m_blocks, large.v_slices * heads_at_once]):
        bh = grid_group * heads_at_once + of_group // large.v_slices
        # The slices of one query block are neighbours: they read the same K.
        v_slice = of_group % large.v_slices
        # Row i sees keys i + diagonal - left .. i + diagonal + right: bottom-right alignment.
        block = rows_of_block(bh, in_order(m_rank, m_blocks, spec), group, m_len, n_len, bm)
        key_blocks = keys_of_head(block, n_len, left, right, bn, spec)
        kv, diagonal = block.kv, block.diagonal
        n_begin, n_left, n_full, n_end = key_blocks.begin, key_blocks.left, key_blocks.full, key_blocks.stop
        packed_rows = (bh * m_blocks + block.m_block) * bm
        # [bm, d_wide] each, [bm, d_narrow]
        q_tiles = query_pieces(q_flat, packed_rows * d_pad, bm, d_pad)
        # [bm], or a scalar for one a block
        if spec.q_row_descales:
            q_scale_log2 = hl.load(q_descale, [packed_rows + hl.arange(bm)]) * scales.qk_scale
            # A row that is NaN or infinite must not change its neighbours.
            known_scale_log2 = torch.where(q_scale_log2 < float("inf"), q_scale_log2, 0.0)
            max_fused_k_scale = spec.max_fused_scale / torch.amax(known_scale_log2, 0)
        else:
            q_scale_log2 = q_descale[packed_rows] * scales.qk_scale
            max_fused_k_scale = spec.max_fused_scale / q_scale_log2
        # The descale of the block at hand; with one a block, the next is loaded a block ahead.
        if spec.k_block_descales:
            k_scale = k_descale[kv * n_blocks + min(n_begin, n_blocks - 1)]
        else:
            k_scale = k_descale[kv]
        # [bm], what smooth-K took from all of a row's scores
        lse_shift_scaled = hl.zeros([bm], dtype=torch.float32)
        if spec.scores.lse_shift_in_scores:
            lse_shift_scaled = hl.load(lse_shift, [packed_rows + hl.arange(bm)]) * scales.qk_scale
        m_i = hl.full([bm], NO_KEY if spec.two_level else float("-inf"), dtype=torch.float32)
        m_run = m_i
        l_i = hl.zeros([bm, l_lanes], dtype=torch.float32)
        # [bm, d] each
        accs = zeros_of_pieces(bm, v_sizes)

        for j in hl.grid(n_begin, n_end):
            s_scale_log2 = q_scale_log2 * k_scale
            # Not "large", since a NaN is not within.
            within = (k_scale <= max_fused_k_scale).to(torch.int32)
            if spec.k_block_descales:
                k_scale = k_descale[kv * n_blocks + min(j + 1, n_blocks - 1)]
            # [bn, d_wide] each, [bn, d_narrow]
            k_tiles = row_pieces(k_wide, k_narrow, kv, j, d_count, large.has_narrow_d)
            # [d, bn] each. All loads side by side, at one barrier: see `fp8_attn_fwd`.
            v_at = j * large.v_slices + v_slice
            v_tiles = channel_pieces(v_wide, v_narrow, kv, v_at, large.v_count, large.has_narrow_v)
            # [bm, bn]
            s = scores_of_pieces(q_tiles, keys_last(k_tiles), spec.is_cuda)
            s, s_scale_log2 = softmax_input(s, s_scale_log2, scales, lse_shift_scaled, spec)
            # Blocks at an edge of what is visible, and those of a large scale, in one branch: see `fp8_attn_fwd`.
            special = 1 - within + max(n_left - j, j + 1 - n_full, 0)
            if special > 0:
                s = scaled(s, s_scale_log2, spec.softmax_row_descales)
                # The key index is made inside the loop; kept outside, it takes registers throughout.
                keys = j * bn + hl.arange(bn)
                visible = visible_keys(keys, diagonal + hl.arange(bm), n_len, left, right, spec.scores)
                s = masked_scores(s, visible, bm, bn, spec)
            s_scale_log2 = torch.where(special > 0, 1.0, s_scale_log2)
            p8, alpha, m_run, m_i, l_i = online_softmax_step(
                s, 0.0, s_scale_log2, m_run, m_i, l_i, bm, bn, l_lanes, v_wide.dtype, spec
            )
            accs = accumulate_pieces(accs, alpha, p8, v_tiles, spec)

        # [bm]
        row_sum = l_i.sum(1)
        total = row_sum
        rescale = row_sum
        m_keys = m_i
        if spec.two_level:
            m_keys = torch.where(row_sum == 0.0, float("-inf"), m_i)
        rows = block.begin + hl.arange(bm)
        row_in_range = rows < m_len
        if spec.scores.lse_shift_in_lse:
            lse_shift_scaled = hl.load(lse_shift, [packed_rows + hl.arange(bm)]) * scales.qk_scale
        if spec.scores.has_sinks:
            # [bm], as far below the whole scores' as these scores are.
            sink_log2 = hl.zeros([bm], dtype=torch.float32) + sinks[bh % heads] * LOG2E
            if spec.scores.lse_shift_in_lse:
                sink_log2 = sink_log2 - lse_shift_scaled
            rescale, m_i, total = add_sink(m_i, row_sum, sink_log2, spec)
        # Every slice has the same; the first stores it. Before the output: see `fp8_attn_fwd`.
        first_slice_rows = rows < m_len * (1 - v_slice)
        store_lse(lse, m_i, total, lse_shift_scaled, bh * m_len + rows, first_slice_rows, spec.scores.lse_shift_in_lse)
        out_rows = (bh // heads) * heads * m_len + (bh % heads) * out_head_step + rows * out_row_step
        first = v_slice * v_tile
        store_pieces(
            out, accs, v_mean, v_descale, m_keys, row_sum, rescale, total, out_rows, row_in_range, kv, first, v_sizes,
            d_v_pad, d_out, spec,
        )  # fmt: skip


@functools.cache
def compiled_kernel(tile: LargeTileConfig, two_level: bool) -> Compiled:
    """The kernel for sm_90 with a config."""
    return compiled(fp8_attn_fwd_large_d, helion_config(tile, grid_dims=3), expected_passes(tile, two_level))


interpreted_kernel = interpreted(fp8_attn_fwd_large_d)


def fresh_channels(v_tile: int) -> int:
    """Channels of a fresh product for which registers have room beside the sums of `v_tile` channels."""
    return MAX_FRESH_D if v_tile <= 320 else MAX_FRESH_D // 2


def pieces(x: torch.Tensor, dim: int, widest: int = MAX_PIECE) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Views of `x`: dimension `dim` as [count, wide], what is left of it, and whether there is such a rest.

    Where there is none, a part of `x` stands for it: Helion loads a tensor that it is given twice without TMA.
    """
    size = x.size(dim)
    wide = min(largest_power_of_two(size), widest)
    whole = size // wide * wide
    split = x.narrow(dim, 0, whole).unflatten(dim, (-1, wide))
    rest = size - whole
    return split, x.narrow(dim, whole, rest) if rest else x.narrow(dim, 0, wide // 2), rest > 0


def launch(tile: LargeTileConfig, a: AttentionArgs, out: torch.Tensor, lse: torch.Tensor, head_group: int) -> None:
    """Write `out` and `lse`.

    Args:
        tile: the config; q8 and k8 are `tile.D_pad` wide, v8 a multiple of `tile.v_tile`.
        a: and `out`, `lse`, as in `attention.launch`.
        head_group: heads that come at once, as `ops.choose` has it.
    """
    q8, k8, v8, lse_shift = a.packed.q8, a.packed.k8, a.packed.v8, a.packed.lse_shift
    kv_heads, n_blocks, d_v_pad, bn = v8.shape
    v_slices = d_v_pad // tile.v_tile
    k_wide, k_narrow, has_narrow_d = pieces(k8, 3)
    two_level = a.recipe.is_two_level(tile.two_level)
    v_wide, v_narrow, has_narrow_v = pieces(
        v8.view(kv_heads, n_blocks * v_slices, tile.v_tile, bn),
        dim=2,
        widest=fresh_channels(tile.v_tile) if two_level else MAX_PIECE,
    )
    large = LargeSpec(v_slices=v_slices, v_count=v_wide.size(2), has_narrow_d=has_narrow_d, has_narrow_v=has_narrow_v)
    spec = AttentionSpec(
        # int8 scores are converted, and are smaller than those of e4m3.
        s_bias=0.0,
        max_fused_scale=MAX_FUSED_SCALE_LOG2[torch.float8_e4m3fn],
        p_offset_log2=float(a.recipe.p_offset),
        **a.spec_fields(),
        scores=a.scores.spec(has_lse_shift=lse_shift is not None),
        two_level=two_level,
        block_max=two_level,
        query=None,
        is_cuda=q8.is_cuda,
    )
    kernel = compiled_kernel(tile, two_level) if q8.is_cuda else interpreted_kernel
    q_descale = a.packed.q_descale.view(-1)
    kernel.run(
        {
            "q8": q8,
            "q_flat": q8.view(-1),
            "k_wide": k_wide,
            "k_narrow": k_narrow,
            "v_wide": v_wide.squeeze(2),
            "v_narrow": v_narrow,
            "q_descale": q_descale,
            "k_descale": a.packed.k_descale.view(-1),
            "v_descale": a.packed.v_descale.view(-1),
            "v_mean": a.packed.v_mean.view(-1),
            "lse_shift": q_descale if lse_shift is None else lse_shift.view(-1),
            "sinks": q_descale if a.scores.sinks is None else a.scores.sinks,
            "out": out.view(-1, out.size(-1)),
            "lse": lse.view(-1),
            **a.sizes(),
            "head_group": head_group,
            "scales": a.scores.scales(),
            "large": large,
            "spec": spec,
        }
    )
