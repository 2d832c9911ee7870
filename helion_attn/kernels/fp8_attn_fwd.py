"""FP8 attention, forward: out = softmax(q k^T * sm_scale) v, on the packed tensors of `QuantizedQKV`.

One program owns one block of `bm` query rows of one head and walks the key blocks of its KV head:

    s = q8 k8^T                          e4m3 x e4m3, fp32 accumulate
    m_i, p = running max, 2**(s * qk_scale_log2 - m_i)      fp32; m_i lies P_OFFSET_LOG2 below the true maximum
    l_i += p                             fp32, unrounded p
    p8 = e4m3(p)                         rounding point 1
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

import torch

from helion_attn.configs import TileConfig, tile_config
from helion_attn.kernels.helion_compat import compiled, helion, hl, interpreted
from helion_attn.kernels.inline_asm import fma, maximum
from helion_attn.numerics import E4M3_OVERFLOW, LN2, LOG2E, P_OFFSET_LOG2


def interleave_keys(p8: torch.Tensor, bm: int, bn: int) -> torch.Tensor:
    """Give P's columns the order in which V's keys are stored: key (a, t, b) of each 16 moves to (t, a, b)."""
    return p8.reshape(bm, bn // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(bm, bn)


def online_softmax_step(
    s: torch.Tensor,  # [bm, bn]
    qk_scale_log2: torch.Tensor,
    m_i: torch.Tensor,  # [bm]
    l_i: torch.Tensor,  # [bm, l_lanes]
    bm: int,
    bn: int,
    l_lanes: int,
    masked: hl.constexpr,
    inline_asm: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One block of scores into `(p8, alpha, m_i, l_i)`."""
    # The scale is not negative, so the maximum commutes with it: one multiply per row, and exp2's argument is one FMA.
    m_new = maximum(m_i, torch.amax(s, 1) * qk_scale_log2 - P_OFFSET_LOG2, inline_asm)
    if masked:
        # A row that has seen no key keeps m_i = -inf; its p must be 0, not 2**(-inf + inf).
        m_ref = torch.where(m_new == float("-inf"), 0.0, m_new)
    else:
        m_ref = m_new
    p = torch.exp2(s * qk_scale_log2 - m_ref.unsqueeze(1))
    alpha = torch.exp2(m_i - m_ref)
    l_i = l_i * alpha.unsqueeze(1) + p.reshape(bm, bn // l_lanes, l_lanes).sum(1)
    p8 = interleave_keys(p.to(torch.float8_e4m3fn), bm, bn)
    return p8, alpha.unsqueeze(1), m_new, l_i


def accumulate(
    acc: torch.Tensor,  # [bm, D_pad]
    alpha: torch.Tensor,  # [bm, 1]
    p8: torch.Tensor,  # [bm, bn]
    v_tile: torch.Tensor,  # [bn, D_pad]
    two_level: hl.constexpr,
    inline_asm: hl.constexpr,
) -> torch.Tensor:
    """`acc * alpha + p8 @ v_tile`: with the sum in fp32, or inside the tensor core."""
    if two_level:
        return fma(acc, alpha, hl.dot(p8, v_tile), inline_asm)
    return hl.dot(p8, v_tile, acc=acc * alpha)


def store_out(
    out: torch.Tensor,  # [B * H * M, D]
    acc: torch.Tensor,  # [bm, D_pad]
    v_mean: torch.Tensor,  # [B * H_kv, D_pad]
    v_factor: torch.Tensor,  # [bm]
    no_key: torch.Tensor,  # [bm]
    kv: int,
    out_rows: torch.Tensor,  # [bm]
    row_in_range: torch.Tensor,  # [bm]
    d_pad: int,
    d_out: int,
    causal: hl.constexpr,
) -> None:
    """Normalise, put V's mean back, cast, store."""
    d = hl.arange(d_pad)
    mean = hl.load(v_mean, [kv, d])
    # [bm, D_pad]
    o = acc * v_factor.unsqueeze(1) + mean.unsqueeze(0)
    if causal:
        # Only causality can leave a row without a key.
        o = torch.where(no_key.unsqueeze(1), 0.0, o)
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
    v8: torch.Tensor,  # [B * H_kv, N_blocks, D_pad, bn]
    q_descale: torch.Tensor,  # [B * H]
    k_descale: torch.Tensor,  # [B * H_kv]
    v_descale: torch.Tensor,  # [B * H_kv]
    v_mean: torch.Tensor,  # [B * H_kv, D_pad]
    out: torch.Tensor,  # [B * H * M, D], written
    lse: torch.Tensor,  # [B * H * M], written
    m_len: int,
    n_len: int,
    heads: int,
    group: int,
    out_head_step: int,
    out_row_step: int,
    sm_scale_log2: float,
    causal: hl.constexpr,
    two_level: hl.constexpr,
    inline_asm: hl.constexpr,
) -> None:
    """The kernel; see the module's docstring. Rows of `out` lie `out_row_step` apart, heads `out_head_step`."""
    bh_size, m_blocks = q8.size(0), q8.size(1)
    bm = hl.specialize(q8.size(2))
    bn = hl.specialize(k8.size(2))
    d_pad = hl.specialize(q8.size(3))
    hl.specialize(v8.size(2))
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
        qk_scale_log2 = q_descale[bh] * k_descale[kv] * sm_scale_log2
        m_i = hl.full([bm], float("-inf"), dtype=torch.float32)
        l_i = hl.zeros([bm, l_lanes], dtype=torch.float32)
        # [bm, D_pad]
        acc = hl.zeros([bm, d_pad], dtype=torch.float32)

        for j in hl.grid(n_full):
            # [bm, bn]
            s = hl.dot(q_tile, k8[kv, j, :, :].transpose(0, 1))
            # [bn, D_pad]. Loaded before the softmax: after it, ptxas packs p8 with 16 more PRMT per block.
            v_tile = v8[kv, j, :, :].transpose(0, 1)
            p8, alpha, m_i, l_i = online_softmax_step(s, qk_scale_log2, m_i, l_i, bm, bn, l_lanes, False, inline_asm)
            acc = accumulate(acc, alpha, p8, v_tile, two_level, inline_asm)

        for j_masked in hl.grid(n_full, n_end):
            s = hl.dot(q_tile, k8[kv, j_masked, :, :].transpose(0, 1))
            v_tile = v8[kv, j_masked, :, :].transpose(0, 1)
            # The key index is made inside the loop; kept outside, it takes 32 registers and the third CTA with it.
            keys = j_masked * bn + hl.arange(bn)
            if causal:
                # This also hides keys >= n_len from every row that exists; what padded rows see is not stored.
                visible = keys.unsqueeze(0) <= (row_begin + diagonal + hl.arange(bm)).unsqueeze(1)
            else:
                visible = (keys < n_len).unsqueeze(0)
            s = torch.where(visible, s, float("-inf"))
            p8, alpha, m_i, l_i = online_softmax_step(s, qk_scale_log2, m_i, l_i, bm, bn, l_lanes, True, inline_asm)
            acc = accumulate(acc, alpha, p8, v_tile, two_level, inline_asm)

        # [bm]
        row_sum = l_i.sum(1)
        rows = row_begin + hl.arange(bm)
        row_in_range = rows < m_len
        no_key = row_sum == 0.0
        v_factor = v_descale[kv] / row_sum
        out_rows = (bh // heads) * heads * m_len + (bh % heads) * out_head_step + rows * out_row_step
        store_out(out, acc, v_mean, v_factor, no_key, kv, out_rows, row_in_range, d_pad, d_out, causal)
        hl.store(lse, [bh * m_len + rows], (m_i + torch.log2(row_sum)) * LN2, extra_mask=row_in_range)


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
    )


@functools.cache
def compiled_kernel(D_pad: int, causal: bool) -> helion.Kernel[None]:
    """The kernel for sm_90 with the tuned config of (D_pad, causal)."""
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
    out: torch.Tensor,
    lse: torch.Tensor,
    m_len: int,
    n_len: int,
    causal: bool,
    sm_scale: float,
    bshd: bool,
    two_level: bool,
) -> tuple[object, ...]:
    """The arguments of `fp8_attn_fwd`, from those of `launch` and the config's `two_level`."""
    H, H_kv = q_descale.size(1), k_descale.size(1)
    return (
        q8,
        k8,
        v8,
        q_descale.view(-1),
        k_descale.view(-1),
        v_descale.view(-1),
        v_mean.view(-1, v_mean.size(-1)),
        out.view(-1, out.size(-1)),
        lse.view(-1),
        m_len,
        n_len,
        H,
        H // H_kv,
        1 if bshd else m_len,
        H if bshd else 1,
        sm_scale * LOG2E,
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
    out: torch.Tensor,
    lse: torch.Tensor,
    m_len: int,
    n_len: int,
    causal: bool,
    sm_scale: float,
    bshd: bool,
) -> None:
    """Write `out` and `lse` for the packed tensors of a `QuantizedQKV`.

    Args:
        q8: and the six that follow: the fields of `QuantizedQKV`.
        out: contiguous [B, H, M, D], or [B, M, H, D] when `bshd`; bf16, fp16, fp32 or e4m3.
        lse: fp32 [B, H, M], natural log.
        m_len: M, the true query length.
        n_len: N, the true key length.
        causal: row i sees keys j <= i + N - M.
        sm_scale: multiplies q k^T; not negative.
        bshd: the layout of `out`.
    """
    D_pad = v8.size(2)
    kernel = compiled_kernel(D_pad, causal) if q8.is_cuda else interpreted_kernel
    packed = (q8, k8, v8, q_descale, k_descale, v_descale, v_mean)
    two_level = tile_config(D_pad, causal).two_level
    kernel(*kernel_args(*packed, out, lse, m_len, n_len, causal, sm_scale, bshd, two_level))
