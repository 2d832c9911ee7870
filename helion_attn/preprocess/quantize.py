"""Q, K and V to the packed format, straight from the user's strided tensors: `statistics`, `pack`, `recentre`."""

from __future__ import annotations

import torch

from helion_attn.configs import Packing
from helion_attn.numerics import FORMAT_MAX
from helion_attn.preprocess import pack, recentre, sequences, statistics
from helion_attn.preprocess.lib.choices import Choices
from helion_attn.preprocess.lib.rope import rope_tables
from helion_attn.preprocess.lib.strided import strided_qkv


def quantize_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_positions: torch.Tensor | None,
    k_positions: torch.Tensor | None,
    interleaved: bool,
    tile: Packing,
    choices: Choices,
) -> tuple[torch.Tensor, ...]:
    """Quantise and pack.

    Args:
        q: [B, H, M, D], bf16, fp16 or fp32, any strides.
        k: [B, H_kv, N, D], same dtype.
        v: [B, H_kv, N, D_v], same dtype.
        cos: and the four that follow: the fields of `Rope`, or None.
        tile: block sizes and padding.
        choices: of a recipe.

    Returns:
        q8, k8, v8, q_descale, k_descale, v_descale, v_mean, k_mean and lse_shift of `QuantizedQKV`; the last two are
        empty without smooth_k.
    """
    source = strided_qkv(q, k, v, tile.D_pad, tile.D_v_pad)
    unused = q.new_empty(1, dtype=torch.float32)
    rope = rope_tables(cos, sin, q_positions, k_positions, interleaved, source.D_row, unused)
    stats = statistics.launch(source, rope, choices)
    packed = pack.launch(source, rope, stats, tile.bm, tile.bn, choices)
    recentre.launch(packed, source.N, choices)
    return packed


def quantize_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    tile: Packing,
    choices: Choices,
) -> tuple[torch.Tensor, ...]:
    """Quantise and pack the sequences of a batch, each by itself.

    Args:
        q: [M, H, D], bf16, fp16 or fp32, any strides; M tokens of all sequences.
        k: [N, H_kv, D], same dtype.
        v: [N, H_kv, D_v], same dtype.
        cu_seqlens_q: int32 [B + 1].
        cu_seqlens_k: int32 [B + 1].
        tile: and `choices`: as in `quantize_qkv`.

    Returns:
        The tensors of `PackedVarlen`; of k_mean, and of lse_shift, empty ones without smooth_k.
    """
    tables = sequences.launch(cu_seqlens_q, cu_seqlens_k, q.size(0), k.size(0), tile.bm, tile.bn)
    # Kernels want an address, also of no token.
    q, k, v = ((x if x.size(0) else x.new_zeros(1, *x.shape[1:])).transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    source = strided_qkv(q, k, v, tile.D_pad, tile.D_v_pad)
    unused = q.new_empty(1, dtype=torch.float32)
    rope = rope_tables(None, None, None, None, False, source.D_row, unused)
    stats = statistics.launch_of_sequences(source, rope, tables, tile.bn, choices)
    packed = pack.launch(source, rope, stats, tile.bm, tile.bn, choices, tables)
    recentre.launch(packed, source.N, choices, tables)
    return (*packed, tables.q_blocks)


def pack_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Packing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pack tensors that are e4m3 already.

    Args:
        q: [B, H, M, D], float8_e4m3fn, any strides.
        k: [B, H_kv, N, D], likewise.
        v: [B, H_kv, N, D_v], likewise.
        tile: block sizes and padding.

    Returns:
        q8, k8 and v8 of `QuantizedQKV`.
    """
    source = strided_qkv(q, k, v, tile.D_pad, tile.D_v_pad)
    unused = q.new_empty(1, dtype=torch.float32)
    # With the format's largest value as amax, descales are 1, and the cast gives every value back.
    stats = statistics.constant(source, FORMAT_MAX[q.dtype])
    rope = rope_tables(None, None, None, None, False, source.D_row, unused)
    choices = Choices(q.dtype, v.dtype, "head", "head", "head", None, reflect=False, smooth_k=False, center_v=False)
    packed = pack.launch(source, rope, stats, tile.bm, tile.bn, choices)
    return packed[0], packed[1], packed[2]
