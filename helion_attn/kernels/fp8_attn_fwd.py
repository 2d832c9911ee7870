"""FP8 attention, forward: out = softmax(q k^T * sm_scale) v, on the packed tensors of `QuantizedQKV`.

One program owns one block of `bm` query rows of one head and walks the key blocks of its KV head:

    s = q8 k8^T                          e4m3, fp32 accumulate; or int8, int32
    m_i, p = running max, 2**(s * qk_scale_log2 - m_i)      fp32; m_i lies p_offset_log2 below the true maximum
    l_i += p                             fp32, unrounded p
    p8 = cast(p)                         e4m3 or e5m2: rounding point 1
    acc = acc * alpha + (p8 v8)          two-level: a fresh FP8 product per block, added in fp32
    out = acc / l_i * v_descale + v_mean                    fp32, cast once: rounding point 2

Two-level accumulation is what keeps long contexts right: Hopper's FP8 tensor core keeps about 14 bits when it
accumulates in place, and small addends vanish beside a grown sum (DeepSeek-V3, arXiv:2412.19437, section 3.3.2, does
the same for its GEMMs). At D_pad = 256 the fresh product has no registers beside the accumulator, and the sum stays in
the tensor core: there it is centring V that keeps a biased V right. The online softmax is that of Milakov and
Gimelshein (arXiv:1805.02867) and FlashAttention-2 (arXiv:2307.08691).

V arrives transposed, because FP8 WGMMA takes B only K-major, with its keys permuted inside every 16 so that P's fp32
accumulator registers are, in place, the A operand of the second product: `interleave_keys` is no instruction.

Key blocks that every row of the query block sees whole run in a loop without masks; the remaining one or two
(diagonal, ragged end) run in a loop of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable

import torch

from helion_attn.configs import TileConfig, tile_config
from helion_attn.kernels.helion_compat import MAX_REGISTERS, IntegerFragment, compiled, helion, hl, interpreted
from helion_attn.kernels.inline_asm import fma, maximum
from helion_attn.numerics import E4M3_OVERFLOW, INT8_SCORE_BIAS, LN2, LOG2E


def interleave_keys(p8: torch.Tensor, bm: int, bn: int) -> torch.Tensor:
    """Give P's columns the order in which V's keys are stored: key (a, t, b) of each 16 moves to (t, a, b)."""
    return p8.reshape(bm, bn // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(bm, bn)


def scores(q_tile: torch.Tensor, k_tile: torch.Tensor, bm: int, bn: int, is_cuda: hl.constexpr) -> torch.Tensor:
    """`q_tile @ k_tile` as fp32 [bm, bn]; of int8, `INT8_SCORE_BIAS` too large.

    The float 1.5 * 2**23 + n has n in its low bits, for |n| < 2**22, and int8 products stay below 127**2 * 256. So an
    int32 sum that starts at the bits of 1.5 * 2**23 is that float: the conversion costs no instruction of its own.
    """
    if q_tile.dtype == torch.int8:
        if is_cuda:
            bias = hl.full([bm, bn], 0x4B400000, dtype=torch.int32)
            return hl.dot(q_tile, k_tile, acc=bias).view(torch.float32)
        return q_tile.to(torch.float32) @ k_tile.to(torch.float32) + 12582912.0
    return hl.dot(q_tile, k_tile)


def scaled(s: torch.Tensor, qk_scale_log2: torch.Tensor, q_row_descales: hl.constexpr) -> torch.Tensor:
    """Scores [bm, bn] times a scale, a row's [bm] or the block's []."""
    if q_row_descales:
        return s * qk_scale_log2.unsqueeze(1)
    return s * qk_scale_log2


def online_softmax_step(
    s: torch.Tensor,  # [bm, bn]
    qk_scale_log2: torch.Tensor,  # [bm] or []
    m_i: torch.Tensor,  # [bm]
    l_i: torch.Tensor,  # [bm, l_lanes]
    bm: int,
    bn: int,
    l_lanes: int,
    pv_dtype: torch.dtype,
    s_bias: hl.constexpr,
    p_offset_log2: hl.constexpr,
    q_row_descales: hl.constexpr,
    masked: hl.constexpr,
    is_cuda: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One block of scores into `(p8, alpha, m_i, l_i)`. They are `s_bias` too large and unscaled, unless `masked`."""
    if masked:
        m_new = maximum(m_i, torch.amax(s, 1) - p_offset_log2, is_cuda)
        # A row that has seen no key keeps m_i = -inf; its p must be 0, not 2**(-inf + inf).
        m_ref = torch.where(m_new == float("-inf"), 0.0, m_new)
        p = torch.exp2(s - m_ref.unsqueeze(1))
    else:
        # The scale is not negative, so the maximum commutes with it: a multiply per row, and exp2's argument is an FMA.
        largest = torch.amax(s, 1)
        if s_bias:
            largest = largest - s_bias
        m_new = maximum(m_i, largest * qk_scale_log2 - p_offset_log2, is_cuda)
        m_ref = m_new
        shift = m_ref
        if s_bias:
            shift = shift + s_bias * qk_scale_log2
        p = torch.exp2(scaled(s, qk_scale_log2, q_row_descales) - shift.unsqueeze(1))
    alpha = torch.exp2(m_i - m_ref)
    # Unrounded p.
    l_i = l_i * alpha.unsqueeze(1) + p.reshape(bm, bn // l_lanes, l_lanes).sum(1)
    p8 = interleave_keys(p.to(pv_dtype), bm, bn)
    return p8, alpha.unsqueeze(1), m_new, l_i


def accumulate(
    acc: torch.Tensor,  # [bm, D_v_pad]
    alpha: torch.Tensor,  # [bm, 1]
    p8: torch.Tensor,  # [bm, bn]
    v_tile: torch.Tensor,  # [bn, D_v_pad]
    two_level: hl.constexpr,
    is_cuda: hl.constexpr,
) -> torch.Tensor:
    """`acc * alpha + p8 @ v_tile`: with the sum in fp32, or inside the tensor core."""
    if two_level:
        return fma(acc, alpha, hl.dot(p8, v_tile), is_cuda)
    return hl.dot(p8, v_tile, acc=acc * alpha)


def store_out(
    out: torch.Tensor,  # [B * H * M, D]
    acc: torch.Tensor,  # [bm, d_tile]
    v_mean: torch.Tensor,  # [B * H_kv, D_v_pad]
    v_descale: torch.Tensor,  # [B * H_kv, D_v_pad]
    row_sum: torch.Tensor,  # [bm]
    kv: int,
    out_rows: torch.Tensor,  # [bm]
    row_in_range: torch.Tensor,  # [bm]
    first: int,
    d_tile: int,
    d_pad: int,
    d_out: int,
    causal: hl.constexpr,
) -> None:
    """Normalise, put V's mean back, cast, store: `d_tile` channels of D_v_pad, from `first`."""
    d = first + hl.arange(d_tile)
    # [bm, d_tile]
    o = acc * (1.0 / row_sum).unsqueeze(1)
    # With a mask these are plain loads: as descriptor loads each waits for its own barrier.
    in_head = d < d_out
    descale = hl.load(v_descale, [kv, d], extra_mask=in_head)
    mean = hl.load(v_mean, [kv, d], extra_mask=in_head)
    o = o * descale.unsqueeze(0) + mean.unsqueeze(0)
    if causal:
        # Only causality can leave a row without a key.
        o = torch.where((row_sum == 0.0).unsqueeze(1), 0.0, o)
    if out.dtype == torch.float8_e4m3fn:
        # The instruction saturates; an overflow must not pass for a finite number.
        o = torch.where(torch.abs(o) > E4M3_OVERFLOW, float("nan"), o)
    keep = row_in_range.unsqueeze(1)
    if d_out < d_pad:
        keep = keep & (d < d_out).unsqueeze(0)
    hl.store(out, [out_rows, d], o.to(out.dtype), extra_mask=keep)


def fp8_attn_fwd(
    q8: torch.Tensor,  # [B * H, M_blocks, bm, D_pad]
    k8: torch.Tensor,  # [B * H_kv, N_blocks, bn, D_pad]
    v8: torch.Tensor,  # [B * H_kv, N_blocks, D_v_pad, bn]
    q_descale: torch.Tensor,  # [B * H, M_blocks, bm]
    k_descale: torch.Tensor,  # [B * H_kv, N_blocks], or [B * H_kv, 1] for one a head
    v_descale: torch.Tensor,  # [B * H_kv, D_v_pad]
    v_mean: torch.Tensor,  # [B * H_kv, D_v_pad]
    lse_shift: torch.Tensor,  # [B * H, M_blocks, bm] if shift_lse
    out: torch.Tensor,  # [B * H * M, D_v], written
    lse: torch.Tensor,  # [B * H * M], written
    m_len: int,
    n_len: int,
    heads: int,
    group: int,
    out_head_step: int,
    out_row_step: int,
    sm_scale_log2: float,
    s_bias: hl.constexpr,
    p_offset_log2: hl.constexpr,
    q_row_descales: hl.constexpr,
    k_block_descales: hl.constexpr,
    shift_lse: hl.constexpr,
    causal: hl.constexpr,
    two_level: hl.constexpr,
    is_cuda: hl.constexpr,
) -> None:
    """The kernel; see the module's docstring. Rows of `out` lie `out_row_step` apart, heads `out_head_step`."""
    # Passed on to Triton: the registers that the config's occupancy leaves to a thread.
    hl.register_tunable(MAX_REGISTERS, IntegerFragment(24, 255, 255))
    bh_size, m_blocks, n_blocks = q8.size(0), q8.size(1), k8.size(1)
    bm = hl.specialize(q8.size(2))
    bn = hl.specialize(k8.size(2))
    hl.specialize((q8.size(3), k8.size(3)))
    d_v_pad = hl.specialize(v8.size(2))
    d_out = hl.specialize(out.size(1))
    # Row sums are carried this wide and reduced across lanes once, after the loops.
    l_lanes = 8
    # Known strides keep the stores 16 bytes wide.
    hl.specialize((out.stride(0), out.stride(1), v_mean.stride(1)))

    for bh, grid_block in hl.grid([bh_size, m_blocks]):
        if causal:
            m_block = m_blocks - 1 - grid_block  # long rows first
        else:
            m_block = grid_block
        kv = bh // group
        row_begin = m_block * bm
        # Row i sees keys j <= i + diagonal: bottom-right alignment.
        diagonal = n_len - m_len
        if causal:
            n_first_row = max(0, min(n_len, row_begin + diagonal + 1))
            n_last_row = max(0, min(n_len, row_begin + bm + diagonal))
        else:
            n_first_row = n_len
            n_last_row = n_len
        n_full = n_first_row // bn
        n_end = (n_last_row + bn - 1) // bn

        # [bm, D_pad]
        q_tile = q8[bh, m_block, :, :]
        # [bm], or a scalar for one a block
        if q_row_descales:
            q_scale_log2 = hl.load(q_descale, [bh, m_block, hl.arange(bm)]) * sm_scale_log2
        else:
            q_scale_log2 = q_descale[bh, m_block, 0] * sm_scale_log2
        # The descale of the block at hand. With one a block, the next is loaded a block ahead: loaded in the block that
        # uses it, Triton's pipeliner sends it through shared memory and adds a barrier.
        k_scale = k_descale[kv, 0]
        m_i = hl.full([bm], float("-inf"), dtype=torch.float32)
        l_i = hl.zeros([bm, l_lanes], dtype=torch.float32)
        # [bm, D_v_pad]
        acc = hl.zeros([bm, d_v_pad], dtype=torch.float32)

        for j in hl.grid(n_full):
            qk_scale_log2 = q_scale_log2 * k_scale
            if k_block_descales:
                k_scale = k_descale[kv, min(j + 1, n_blocks - 1)]
            # [bm, bn]
            s = scores(q_tile, k8[kv, j, :, :].transpose(0, 1), bm, bn, is_cuda)
            # [bn, D_v_pad]. Loaded before the softmax: after it, ptxas packs p8 with 16 more PRMT per block.
            v_tile = v8[kv, j, :, :].transpose(0, 1)
            p8, alpha, m_i, l_i = online_softmax_step(
                s,
                qk_scale_log2,
                m_i,
                l_i,
                bm,
                bn,
                l_lanes,
                v8.dtype,
                s_bias,
                p_offset_log2,
                q_row_descales,
                False,
                is_cuda,
            )
            acc = accumulate(acc, alpha, p8, v_tile, two_level, is_cuda)

        for j_masked in hl.grid(n_full, n_end):
            qk_scale_log2 = q_scale_log2 * k_scale
            if k_block_descales:
                k_scale = k_descale[kv, min(j_masked + 1, n_blocks - 1)]
            s = scores(q_tile, k8[kv, j_masked, :, :].transpose(0, 1), bm, bn, is_cuda)
            v_tile = v8[kv, j_masked, :, :].transpose(0, 1)
            # The key index is made inside the loop; kept outside, it takes 32 registers and the third CTA with it.
            keys = j_masked * bn + hl.arange(bn)
            if causal:
                # This also hides keys >= n_len from every row that exists; what padded rows see is not stored.
                visible = keys.unsqueeze(0) <= (row_begin + diagonal + hl.arange(bm)).unsqueeze(1)
            else:
                visible = (keys < n_len).unsqueeze(0)
            # Scaled before it is masked: a scale of 0 would make NaN of -inf.
            s = torch.where(visible, scaled(s - s_bias, qk_scale_log2, q_row_descales), float("-inf"))
            p8, alpha, m_i, l_i = online_softmax_step(
                s,
                qk_scale_log2,
                m_i,
                l_i,
                bm,
                bn,
                l_lanes,
                v8.dtype,
                s_bias,
                p_offset_log2,
                q_row_descales,
                True,
                is_cuda,
            )
            acc = accumulate(acc, alpha, p8, v_tile, two_level, is_cuda)

        # [bm]
        row_sum = l_i.sum(1)
        rows = row_begin + hl.arange(bm)
        row_in_range = rows < m_len
        out_rows = (bh // heads) * heads * m_len + (bh % heads) * out_head_step + rows * out_row_step
        store_out(out, acc, v_mean, v_descale, row_sum, kv, out_rows, row_in_range, 0, d_v_pad, d_v_pad, d_out, causal)
        lse_log2 = m_i + torch.log2(row_sum)
        if shift_lse:
            lse_log2 = lse_log2 + hl.load(lse_shift, [bh, m_block, hl.arange(bm)]) * sm_scale_log2
        hl.store(lse, [bh * m_len + rows], lse_log2 * LN2, extra_mask=row_in_range)


def helion_config(tile: TileConfig) -> helion.Config:
    """The Helion config of one row of the tuned table."""
    return helion.Config(
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        # The masked loop runs once or twice: a pipeline there costs 70 registers and gains nothing.
        range_num_stages=[0, tile.num_stages, 1],
        # (heads, query blocks), fastest first
        loop_orders=[[1, 0] if tile.query_blocks_fastest else [0, 1]],
        indexing="tensor_descriptor",
        host_tensor_descriptors=True,
        **{MAX_REGISTERS: tile.max_registers},
    )


@functools.cache
def compiled_kernel(D_pad: int, causal: bool, variant: Hashable) -> helion.Kernel[None]:
    """The kernel for sm_90 with the tuned config of (D_pad, causal).

    One object for each `variant`, the other specialisations: an object whose specialisation alternates between calls
    costs 300 us of dispatch.
    """
    return compiled(fp8_attn_fwd, helion_config(tile_config(D_pad, causal)))


interpreted_kernel = interpreted(fp8_attn_fwd)


def kernel_args(
    q8: torch.Tensor,
    k8: torch.Tensor,
    v8: torch.Tensor,
    q_descale: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    v_mean: torch.Tensor,
    lse_shift: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    m_len: int,
    n_len: int,
    causal: bool,
    sm_scale: float,
    bshd: bool,
    p_offset_log2: int,
    two_level: bool,
    q_row_descales: bool,
    k_block_descales: bool,
) -> tuple[object, ...]:
    """The arguments of `fp8_attn_fwd`, from those of `launch`."""
    H, H_kv = q_descale.size(1), k_descale.size(1)
    q_descale = q_descale.view(-1, *q_descale.shape[2:])
    return (
        q8,
        k8,
        v8,
        q_descale,
        k_descale.view(-1, k_descale.size(2)),
        v_descale.view(-1, v_descale.size(2)),
        v_mean.view(-1, v_mean.size(2)),
        q_descale if lse_shift is None else lse_shift.view(q_descale.shape),
        out.view(-1, out.size(-1)),
        lse.view(-1),
        m_len,
        n_len,
        H,
        H // H_kv,
        1 if bshd else m_len,
        H if bshd else 1,
        sm_scale * LOG2E,
        INT8_SCORE_BIAS if q8.dtype == torch.int8 else 0.0,
        float(p_offset_log2),
        q_row_descales,
        k_block_descales,
        lse_shift is not None,
        causal,
        two_level,
        q8.is_cuda,
    )


def launch(
    q8: torch.Tensor,
    k8: torch.Tensor,
    v8: torch.Tensor,
    q_descale: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    v_mean: torch.Tensor,
    lse_shift: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    m_len: int,
    n_len: int,
    causal: bool,
    sm_scale: float,
    bshd: bool,
    p_offset_log2: int,
    promote_every: int | None,
    q_row_descales: bool,
    k_block_descales: bool,
) -> None:
    """Write `out` and `lse` for the packed tensors of a `QuantizedQKV`.

    Args:
        q8: and the seven that follow: the fields of `QuantizedQKV`.
        out: contiguous [B, H, M, D_v], or [B, M, H, D_v] when `bshd`; bf16, fp16, fp32 or e4m3.
        lse: fp32 [B, H, M], natural log.
        m_len: M, the true query length.
        n_len: N, the true key length.
        causal: row i sees keys j <= i + N - M.
        sm_scale: multiplies q k^T; not negative.
        bshd: the layout of `out`.
        p_offset_log2: P is stored times two to this.
        promote_every: 1, 0, or None for the config's choice.
        q_row_descales: rows of a block have descales of their own.
        k_block_descales: `k_descale` has one for each key block.
    """
    D_pad = max(q8.size(3), v8.size(2))
    tile = tile_config(D_pad, causal)
    two_level = tile.two_level if promote_every is None else promote_every == 1
    variant = (
        q8.dtype,
        v8.dtype,
        q8.size(3),
        v8.size(2),
        p_offset_log2,
        two_level,
        q_row_descales,
        k_block_descales,
        lse_shift is None,
    )
    kernel = compiled_kernel(D_pad, causal, variant) if q8.is_cuda else interpreted_kernel
    packed = (q8, k8, v8, q_descale, k_descale, v_descale, v_mean, lse_shift)
    kernel(
        *kernel_args(
            *packed,
            out,
            lse,
            m_len,
            n_len,
            causal,
            sm_scale,
            bshd,
            p_offset_log2,
            two_level,
            q_row_descales,
            k_block_descales,
        )
    )
