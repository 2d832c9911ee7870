"""The arguments of the operations that prepare tensors for attention."""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.configs import Packing
from helion_attn.kernels.lib.arguments import NO_ROPE_ARGUMENTS, RopeArguments
from helion_attn.types import PagedKVCache, Recipe, Rope


def rope_arguments(rope: Rope | None) -> RopeArguments:
    """`rope` as operations take it."""
    if rope is None:
        return NO_ROPE_ARGUMENTS
    return RopeArguments(
        cos=rope.cos,
        sin=rope.sin,
        q_positions=rope.q_positions,
        k_positions=rope.k_positions,
        interleaved=rope.interleaved,
    )


class QuantizeArguments(NamedTuple):
    """Q, K and V to the packed format.

    Attributes:
        q: [B, H, M, D], bf16, fp16 or fp32, any strides.
        k: [B, H_kv, N, D], same dtype.
        v: [B, H_kv, N, D_v], same dtype.
        rope: rotates Q and K first.
        packing: block sizes and padding.
        recipe: how they become 8- or 16-bit numbers.
        shift_lse: whether somebody sees what smooth_k takes from the scores.
        packs_q: otherwise no block of Q is packed: attention quantises it.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rope: RopeArguments
    packing: Packing
    recipe: Recipe
    shift_lse: bool
    packs_q: bool


class DescribePartArguments(NamedTuple):
    """A rank's part of a sequence, to what it tells the others of it.

    Attributes:
        q: [B, H, M, D], bf16, fp16 or fp32, any strides.
        k: [B, H_kv, N, D], same dtype.
        v: [B, H_kv, N, D_v], same dtype.
        rope: rotates K first; with positions.
        packing: block sizes and padding.
        recipe: how they become 8- or 16-bit numbers.
        rows: sampled keys that a rank tells of, at most.
        every: and the rest: which these are, as `distributed.cut.Sample` has it.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rope: RopeArguments
    packing: Packing
    recipe: Recipe
    rows: int
    every: int
    first: int
    first_count: int
    second: int
    second_count: int


class QuantizePartArguments(NamedTuple):
    """A rank's part of a sequence to the packed format.

    Attributes:
        q: and the rest, as in `QuantizeArguments`.
        told: sampled rows of all ranks, [rows, B, H_kv, columns].
        v_largest: [B, H_kv, D_v], the largest magnitudes of V of all ranks.
        all_keys: of all ranks.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    told: torch.Tensor
    v_largest: torch.Tensor
    rope: RopeArguments
    packing: Packing
    recipe: Recipe
    shift_lse: bool
    all_keys: int


class PackArguments(NamedTuple):
    """Tensors that are e4m3 already to the packed format.

    Attributes:
        q: [B, H, M, D], float8_e4m3fn, any strides.
        k: [B, H_kv, N, D], likewise.
        v: [B, H_kv, N, D_v], likewise.
        packing: block sizes and padding.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    packing: Packing


class TransformArguments(NamedTuple):
    """Rows, rotated by position or by a Hadamard matrix, or reflected.

    Attributes:
        x: [B, H, S, D], bf16, fp16 or fp32, any strides.
        rope: rotates by position; the positions of x are its `q_positions`.
        hadamard_seed: of the rotation's signs, or None for no rotation.
        reflect: whether channels are reflected.
        bshd: layout of the result.
    """

    x: torch.Tensor
    rope: RopeArguments
    hadamard_seed: int | None
    reflect: bool
    bshd: bool


class AppendArguments(NamedTuple):
    """New keys and values into a paged cache, at positions `cache_seqlens[b]` and up.

    Attributes:
        k: [B, H_kv, L, D], bf16, fp16 or fp32, any strides.
        v: [B, H_kv, L, D_v], likewise.
        cache: written.
        block_table: int32 [B, max_pages].
        cache_seqlens: int32 [B].
        rope: rotates K.
    """

    k: torch.Tensor
    v: torch.Tensor
    cache: PagedKVCache
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    rope: RopeArguments
