"""The operations of `quantize` and `pack`: tensors to the packed format."""

from __future__ import annotations

import torch

from helion_attn import public_calls
from helion_attn.configs import Packing
from helion_attn.ops.declare import Operation
from helion_attn.problem import DenseArgs, PackArgs, QuantizeArgs, QuantizeRankArgs
from helion_attn.types import PackedTensors, Recipe


def empty_packed(
    like: torch.Tensor,
    q_heads: int,
    kv_heads: int,
    m_blocks: int,
    n_blocks: int,
    packing: Packing,
    qk_dtype: torch.dtype,
    pv_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q8, k8 and v8 for so many blocks of so many heads."""
    p = packing
    v_block = (p.D_v_pad, p.bn) if pv_dtype.itemsize == 1 else (p.bn, p.D_v_pad)
    return (
        like.new_empty((q_heads, m_blocks, p.bm, p.D_pad), dtype=qk_dtype),
        like.new_empty((kv_heads, n_blocks, p.bn, p.D_pad), dtype=qk_dtype),
        like.new_empty((kv_heads, n_blocks, *v_block), dtype=pv_dtype),
    )


def empty_descales(
    like: torch.Tensor,
    rows: tuple[int, ...],
    keys: tuple[int, ...],
    channels: tuple[int, ...],
    means: tuple[int, int],
    packing: Packing,
    recipe: Recipe,
    needs_lse_shift: bool,
) -> tuple[torch.Tensor, ...]:
    """The fp32 fields of `PackedTensors`; those that the recipe goes without are empty."""
    of_channels = (*means, packing.D_row)
    shapes = (
        rows,
        keys,
        channels,
        (*means, packing.D_v_pad),
        of_channels if recipe.smooth_k else (0,),
        of_channels if recipe.equalise else (0,),
        rows if recipe.smooth_k and needs_lse_shift else (0,),
    )
    return tuple(like.new_empty(shape, dtype=torch.float32) for shape in shapes)


def all_tensors(packed: PackedTensors) -> tuple[torch.Tensor, ...]:
    """Packed tensors as operations return them: an empty tensor stands for None, which they cannot return."""
    return tuple(packed.q_descale.new_empty(0) if x is None else x for x in packed.tensors())


def _launch_quantize(a: QuantizeArgs) -> tuple[torch.Tensor, ...]:
    from helion_attn.preprocess.pipeline import quantize_qkv

    return all_tensors(quantize_qkv(a))


def empty_quantized(a: DenseArgs | QuantizeArgs | QuantizeRankArgs) -> tuple[torch.Tensor, ...]:
    """The tensors of `PackedTensors`, for all of a sequence or for a rank's part."""
    (B, H, M, _D), (H_kv, N), p = a.q.shape, a.k.shape[1:3], a.packing
    m_blocks, n_blocks = (M + p.bm - 1) // p.bm, (N + p.bn - 1) // p.bn
    keys = (B, H_kv, n_blocks if a.recipe.k_scales == "block" else 1)
    return (
        *empty_packed(a.q, B * H, B * H_kv, m_blocks, n_blocks, p, a.recipe.qk_dtype, a.recipe.pv_dtype),
        *empty_descales(
            a.q, (B, H, m_blocks, p.bm), keys, (B, H_kv, p.D_v_pad), (B, H_kv), p, a.recipe, a.needs_lse_shift
        ),
    )


def _launch_pack(a: PackArgs) -> tuple[torch.Tensor, ...]:
    from helion_attn.preprocess.pipeline import pack_qkv

    return pack_qkv(a)


def _fake_pack(a: PackArgs) -> tuple[torch.Tensor, ...]:
    (B, H, M, _D), (H_kv, N), p = a.q.shape, a.k.shape[1:3], a.packing
    m_blocks, n_blocks = (M + p.bm - 1) // p.bm, (N + p.bn - 1) // p.bn
    return empty_packed(a.q, B * H, B * H_kv, m_blocks, n_blocks, p, a.q.dtype, a.v.dtype)


quantize = Operation(
    "quantize",
    QuantizeArgs,
    10,
    _launch_quantize,
    empty_quantized,
    call=public_calls.of_quantize,
)
pack = Operation("pack", PackArgs, 3, _launch_pack, _fake_pack, call=public_calls.of_pack)
