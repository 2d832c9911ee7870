"""Q, K and V to the packed format, straight from the user's strided tensors: `norm_factors`, `sample`, then `pack`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helion_attn.kernels.lib.norm import no_norms
from helion_attn.kernels.lib.rope import rope_tables
from helion_attn.kernels.lib.strided import strided_qkv
from helion_attn.preprocess import norm_factors, pack, sample, sequences
from helion_attn.problem import (
    NO_ROPE_ARGUMENTS,
    DenseArgs,
    PackArgs,
    QuantizeArgs,
)
from helion_attn.types import PackedTensors, Recipe

if TYPE_CHECKING:
    from helion_attn.problem import VarlenArgs

#: The recipe of tensors that are e4m3 already.
GIVEN = Recipe(
    qk_dtype=torch.float8_e4m3fn, k_scales="head", equalise=False, reflect=False, smooth_k=False, center_v=False
).resolved


def quantize_qkv(a: DenseArgs | QuantizeArgs, packs_q: bool = True) -> PackedTensors:
    """Return Q, K and V quantised and packed; without `packs_q` no block of Q, which attention quantises then.

    Returns:
        What is shaped as in `QuantizedQKV`; k_mean and lse_shift are None without smooth_k, lse_shift also without
        needs_lse_shift, channel_factors without equalise.
    """
    tile = a.packing
    source = strided_qkv(a.q, a.k, a.v, tile)
    unused = a.q.new_empty(1, dtype=torch.float32)
    rope = rope_tables(a.rope, source.D_row, unused)
    normed = a.norm.q_weight is not None or a.norm.k_weight is not None
    norms = norm_factors.launch(source, a.norm, unused) if normed else no_norms(unused)
    stats = sample.launch(source, norms, rope, a.recipe)
    return pack.launch(source, norms, rope, stats, tile.bm, tile.bn, a.recipe, a.needs_lse_shift, packs_q)


def quantize_varlen(a: VarlenArgs) -> tuple[PackedTensors, torch.Tensor]:
    """Return the sequences of a batch quantised and packed, each by itself.

    Returns:
        What is shaped as in `PackedVarlen`, None as above; and `q_blocks`.
    """
    tile = a.packing
    tables = sequences.launch(a.cu_seqlens_q, a.cu_seqlens_k, a.q.size(0), a.k.size(0), tile.bm, tile.bn)
    # Kernels want an address, also of no token.
    q, k, v = ((x if x.size(0) else x.new_zeros(1, *x.shape[1:])).transpose(0, 1).unsqueeze(0) for x in (a.q, a.k, a.v))
    source = strided_qkv(q, k, v, tile)
    unused = q.new_empty(1, dtype=torch.float32)
    norms, rope = no_norms(unused), rope_tables(NO_ROPE_ARGUMENTS, source.D_row, unused)
    stats = sample.launch(source, norms, rope, a.recipe, tables)
    packed = pack.launch(source, norms, rope, stats, tile.bm, tile.bn, a.recipe, a.needs_lse_shift, sequences=tables)
    return packed, tables.q_blocks


def pack_qkv(a: PackArgs) -> tuple[torch.Tensor, ...]:
    """Return tensors that are e4m3 already in the packed format.

    Returns:
        q8, k8 and v8 of `QuantizedQKV`.
    """
    tile = a.packing
    source = strided_qkv(a.q, a.k, a.v, tile)
    unused = a.q.new_empty(1, dtype=torch.float32)
    norms, rope = no_norms(unused), rope_tables(NO_ROPE_ARGUMENTS, source.D_row, unused)
    stats = sample.launch(source, norms, rope, GIVEN)
    # Unscaled, the cast gives every value back.
    packed = pack.launch(source, norms, rope, stats, tile.bm, tile.bn, GIVEN, needs_lse_shift=False)
    return packed.q8, packed.k8, packed.v8
