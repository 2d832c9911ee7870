"""The packed format, undone with the design's formulas and nothing of the package."""

from __future__ import annotations

import torch


def unpack_rows(x8: torch.Tensor, B: int) -> torch.Tensor:
    """[B * H, blocks, block, D_pad] to [B, H, blocks * block, D_pad], fp32."""
    bh, blocks, block, d_pad = x8.shape
    return x8.float().reshape(B, bh // B, blocks * block, d_pad)


def stored_at(keys: torch.Tensor) -> torch.Tensor:
    """Where V's keys are stored: in every 16, key 8a + 2t + b at 4t + 2a + b."""
    key = keys % 16
    a, t, b = key // 8, key % 8 // 2, key % 2
    return keys - key + 4 * t + 2 * a + b


def unpack_v(v8: torch.Tensor, B: int) -> torch.Tensor:
    """[B * H_kv, blocks, D_pad, bn] to [B, H_kv, blocks * bn, D_pad], fp32."""
    bh, blocks, d_pad, bn = v8.shape
    in_order = v8.float()[..., stored_at(torch.arange(bn, device=v8.device))]
    return in_order.transpose(2, 3).reshape(B, bh // B, blocks * bn, d_pad)
