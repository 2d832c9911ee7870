"""Q, K and V to the packed format, straight from the user's strided tensors: `statistics`, then `pack`."""

from __future__ import annotations

import math

import torch

from helion_attn.numerics import FORMAT_MAX
from helion_attn.preprocess import pack, sequences, statistics
from helion_attn.preprocess.hadamard import hadamard_block
from helion_attn.preprocess.rope import rope_tables
from helion_attn.preprocess.strided import strided_qkv


def quantize_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_positions: torch.Tensor | None,
    k_positions: torch.Tensor | None,
    interleaved: bool,
    bm: int,
    bn: int,
    D_pad: int,
    D_v_pad: int,
    qk_dtype: torch.dtype,
    pv_dtype: torch.dtype,
    q_scales: str,
    k_scales: str,
    v_scales: str,
    hadamard_seed: int | None,
    smooth_k: bool,
    center_v: bool,
) -> tuple[torch.Tensor, ...]:
    """Quantise and pack.

    Args:
        q: [B, H, M, D], bf16, fp16 or fp32, any strides.
        k: [B, H_kv, N, D], same dtype.
        v: [B, H_kv, N, D_v], same dtype.
        cos: and the four that follow: the fields of `Rope`, or None.
        bm: rows of a block of Q.
        bn: keys of a block of K and V.
        D_pad: padded head dim of Q and K.
        D_v_pad: padded head dim of V.
        qk_dtype: and those that follow: the fields of `Recipe`; `hadamard_seed` None is no rotation.

    Returns:
        q8, k8, v8, q_descale, k_descale, v_descale, v_mean, k_mean and lse_shift of `QuantizedQKV`; the last two are
        empty without smooth_k.
    """
    source = strided_qkv(q, k, v, D_pad, D_v_pad)
    unused = q.new_empty(1, dtype=torch.float32)
    rope = rope_tables(cos, sin, q_positions, k_positions, interleaved, source.D_row, unused)
    stats = statistics.launch(source, rope, q_scales, k_scales, v_scales, smooth_k, center_v)
    # What the rotation may do to a head's largest magnitude.
    factor = 1.0 if hadamard_seed is None else math.sqrt(hadamard_block(q.size(3)))
    scales = (q_scales, k_scales, v_scales)
    return pack.launch(source, rope, stats, factor, bm, bn, qk_dtype, pv_dtype, *scales, hadamard_seed, smooth_k)


def quantize_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    bm: int,
    bn: int,
    D_pad: int,
    D_v_pad: int,
    qk_dtype: torch.dtype,
    pv_dtype: torch.dtype,
    q_scales: str,
    k_scales: str,
    v_scales: str,
    hadamard_seed: int | None,
    smooth_k: bool,
    center_v: bool,
) -> tuple[torch.Tensor, ...]:
    """Quantise and pack the sequences of a batch, each by itself.

    Args:
        q: [M, H, D], bf16, fp16 or fp32, any strides; M tokens of all sequences.
        k: [N, H_kv, D], same dtype.
        v: [N, H_kv, D_v], same dtype.
        cu_seqlens_q: int32 [B + 1].
        cu_seqlens_k: int32 [B + 1].
        bm: and those that follow: as in `quantize_qkv`.

    Returns:
        The tensors of `PackedVarlen`; of k_mean, and of lse_shift, empty ones without smooth_k.
    """
    tables = sequences.launch(cu_seqlens_q, cu_seqlens_k, q.size(0), k.size(0), bm, bn)
    # Kernels want an address, also of no token.
    q, k, v = ((x if x.size(0) else x.new_zeros(1, *x.shape[1:])).transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    source = strided_qkv(q, k, v, D_pad, D_v_pad)
    unused = q.new_empty(1, dtype=torch.float32)
    rope = rope_tables(None, None, None, None, False, source.D_row, unused)
    stats = statistics.launch_of_sequences(source, rope, tables, bn, k_scales, v_scales, smooth_k, center_v)
    factor = 1.0 if hadamard_seed is None else math.sqrt(hadamard_block(source.D))
    scales = (q_scales, k_scales, v_scales)
    packed = pack.launch(
        source, rope, stats, factor, bm, bn, qk_dtype, pv_dtype, *scales, hadamard_seed, smooth_k, tables
    )
    return (*packed, tables.q_blocks)


def pack_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bm: int, bn: int, D_pad: int, D_v_pad: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pack tensors that are e4m3 already.

    Args:
        q: [B, H, M, D], float8_e4m3fn, any strides.
        k: [B, H_kv, N, D], likewise.
        v: [B, H_kv, N, D_v], likewise.
        bm: rows of a block of Q.
        bn: keys of a block of K and V.
        D_pad: padded head dim of Q and K.
        D_v_pad: padded head dim of V.

    Returns:
        q8, k8 and v8 of `QuantizedQKV`.
    """
    source = strided_qkv(q, k, v, D_pad, D_v_pad)
    unused = q.new_empty(1, dtype=torch.float32)
    # With the format's largest value as amax, descales are 1, and the cast gives every value back.
    stats = statistics.constant(source, FORMAT_MAX[q.dtype])
    rope = rope_tables(None, None, None, None, False, source.D_row, unused)
    packed = pack.launch(source, rope, stats, 1.0, bm, bn, q.dtype, v.dtype, "head", "head", "head", None, False)
    return packed[0], packed[1], packed[2]
