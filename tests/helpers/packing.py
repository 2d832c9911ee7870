"""The packed format, undone with the design's formulas and nothing of the package."""

from __future__ import annotations

import torch

import helion_attn as ha


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
    """[B * H_kv, blocks, D_pad, bn], or of 16 bits [B * H_kv, blocks, bn, D_pad], to [B, H_kv, blocks * bn, D_pad]."""
    if v8.itemsize == 2:
        return unpack_rows(v8, B)
    bh, blocks, d_pad, bn = v8.shape
    in_order = v8.float()[..., stored_at(torch.arange(bn, device=v8.device))]
    return in_order.transpose(2, 3).reshape(B, bh // B, blocks * bn, d_pad)


def unpack_values(packed: ha.QuantizedQKV) -> dict[str, torch.Tensor]:
    """fp32 q8 [B, H, M_pad, D_pad], k8 and v8 [B, H_kv, N_pad, D_pad]: padding included."""
    B = packed.q_descale.size(0)
    return {"q8": unpack_rows(packed.q8, B), "k8": unpack_rows(packed.k8, B), "v8": unpack_v(packed.v8, B)}


def unpack_descales(packed: ha.QuantizedQKV) -> dict[str, torch.Tensor]:
    """q_descale [B, H, M], k_descale [B, H_kv, N], v_descale [B, H_kv, D_v]: one for every row, key, channel."""
    bn = packed.k8.size(2)
    per_key = (
        packed.k_descale if packed.recipe.k_scales == "block" else packed.k_descale.expand(-1, -1, packed.k8.size(1))
    )
    return {
        "q_descale": packed.q_descale.flatten(2)[:, :, : packed.M],
        "k_descale": per_key.repeat_interleave(bn, 2)[:, :, : packed.N],
        "v_descale": packed.v_descale[:, :, : packed.D_v],
    }


#: Neighbours are at most this part of themselves apart, or this among the smallest.
SPACING = {
    torch.float8_e4m3fn: (2.0**-3, 2.0**-9),
    torch.float8_e5m2: (2.0**-2, 2.0**-16),
    torch.int8: (0.0, 1.0),
    torch.bfloat16: (2.0**-7, 2.0**-126),
    torch.float16: (2.0**-10, 2.0**-24),
}


#: The share of values that an error in the last bits of fp32 may take over a rounding boundary: those lie closer with
#: every bit.
SHARE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-3}


def assert_same_values(
    actual: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    *,
    exact: bool,
    apart: torch.Tensor | float = 0.0,
) -> None:
    """Equal; or, where a divisor, a mean or a sum may differ in its last bit, all but a few: of 8 bits, one in 1000.

    Those are neighbours, or no more than `apart` from each other.
    """
    assert actual.shape == expected.shape
    differ = actual != expected
    assert not (differ.any() if exact else differ.sum() > max(1, int(differ.numel() * SHARE.get(dtype, 1e-3))))
    relative, absolute = SPACING[dtype]
    assert torch.all((actual - expected).abs() <= (expected.abs() * relative).clamp_min(absolute) + apart)
