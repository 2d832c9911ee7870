"""Checks of quantised tensors, which need not come from `quantize`."""

from __future__ import annotations

import torch

from helion_attn.configs import Packing, row_width
from helion_attn.types import QuantizedQKV
from helion_attn.validate.dense import check_device, check_dtype, check_layout, check_no_grad


def check_quantized(qkv: QuantizedQKV, packing: Packing) -> None:
    """The fields of a `QuantizedQKV`, against the block sizes and padding of its head dims."""
    bm, bn, D_pad, D_v_pad = packing.bm, packing.bn, packing.D_pad, packing.D_v_pad
    check_layout(qkv.layout)
    for name, size in (("M", qkv.M), ("N", qkv.N)):
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    check_dtype(qkv.dtype)
    packed: tuple[str, ...] = ("q8", "k8", "v8", "q_descale", "k_descale", "v_descale", "v_mean")
    if qkv.recipe.smooth_k:
        packed += ("k_mean", "lse_shift")
    if qkv.recipe.equalise:
        packed += ("channel_factors",)
    for name in packed:
        x = getattr(qkv, name)
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"{name} is a {type(x).__name__}; it must be a torch.Tensor, as helion_attn.quantize makes it"
            )
    # All others follow from what these two say.
    for name, x, ndim in (("q_descale", qkv.q_descale, 4), ("k_descale", qkv.k_descale, 3)):
        if x.dim() != ndim:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have {ndim} dimensions")
    check_device("q8", qkv.q8)
    (B, H), H_kv = qkv.q_descale.shape[:2], qkv.k_descale.size(1)
    if H_kv == 0 or H % H_kv:
        raise ValueError(f"q_descale has {H} heads and k_descale {H_kv}; q's must be a multiple of k's")
    m_blocks, n_blocks = -(-qkv.M // bm), -(-qkv.N // bn)
    rows, channels = (B, H, m_blocks, bm), (B, H_kv, D_v_pad)
    v_block = (D_v_pad, bn) if qkv.recipe.pv_dtype.itemsize == 1 else (bn, D_v_pad)
    expected = {
        "q8": ((B * H, m_blocks, bm, D_pad), qkv.recipe.qk_dtype),
        "k8": ((B * H_kv, n_blocks, bn, D_pad), qkv.recipe.qk_dtype),
        "v8": ((B * H_kv, n_blocks, *v_block), qkv.recipe.pv_dtype),
        "q_descale": (rows, torch.float32),
        "k_descale": ((B, H_kv, n_blocks if qkv.recipe.k_scales == "block" else 1), torch.float32),
        "v_descale": (channels, torch.float32),
        "v_mean": (channels, torch.float32),
        "k_mean": ((B, H_kv, row_width(D_pad, D_v_pad)), torch.float32),
        "channel_factors": ((B, H_kv, row_width(D_pad, D_v_pad)), torch.float32),
        "lse_shift": (rows, torch.float32),
    }
    for name in packed:
        x = getattr(qkv, name)
        shape, dtype = expected[name]
        if x.shape != shape or x.dtype != dtype or not x.is_contiguous() or x.device != qkv.q8.device:
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}; for M={qkv.M}, N={qkv.N}, D={qkv.D}, "
                f"D_v={qkv.D_v} it must be contiguous {dtype} {shape} on {qkv.q8.device}, as "
                f"helion_attn.quantize makes it"
            )
        check_no_grad(name, x)
