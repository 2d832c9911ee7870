"""How a block of V's keys is centred, scaled and cast; of 8 bits, also interleaved. Inlined into `pack_kv`."""

from __future__ import annotations

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.steps import to_descale
from helion_attn.kernels.lib.strided import load_rows


def key_stored_at(position: torch.Tensor) -> torch.Tensor:
    """The key that V has at a position of a block: in each 16, position 4t + 2a + b holds key 8a + 2t + b.

    Of the position's type, which addresses need. It is computed in 32 bits: of 64, as `hl.arange` has beside tensors of
    2**31 elements, Triton 3.6 loses a term.
    """
    narrow = position.to(torch.int32)
    in_group = narrow % 16
    return (narrow - in_group + (in_group // 2 % 2) * 8 + (in_group // 4) * 2 + in_group % 2).to(position.dtype)


def v_descales(
    amax: torch.Tensor,  # [B * H_kv, D_row]
    bh: int,
    d_index: int,
    d_row: int,
    d_tile: int,
    largest: float,
    unscaled: hl.constexpr,
    channel_scales: hl.constexpr,
) -> torch.Tensor:
    """Descales of `d_tile` channels, [d_tile]: ones, or each channel's, or the head's."""
    if unscaled:
        return hl.full([d_tile], 1.0, dtype=torch.float32)
    if channel_scales:
        return to_descale(hl.load(amax, [bh, d_index * d_tile + hl.arange(d_tile)]), largest)
    return to_descale(torch.amax(hl.load(amax, [bh, hl.arange(d_row)]), 0), largest) + hl.zeros([d_tile])


def v_block(
    flat: torch.Tensor,
    mean: torch.Tensor,  # [B * H_kv, D_v_pad]
    descale: torch.Tensor,  # [d_tile]
    bh: int,
    i: int,
    d_index: int,
    head_offset: int,
    row_step: int,
    d_step: int,
    size: int,
    d: int,
    bn: int,
    d_tile: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block `i` of a head's keys, `d_tile` channels: centred and scaled, and cast, [bn, d_tile]. 0 past the end."""
    cols = d_index * d_tile + hl.arange(d_tile)
    keys = i * bn + hl.arange(bn)
    if dtype.itemsize == 1:
        # The permutation is in the addresses of the loads.
        keys = i * bn + key_stored_at(hl.arange(bn))
    # [bn, d_tile]
    x = load_rows(flat, head_offset, keys, cols, row_step, d_step, size, d)
    # Keys past the end stay 0: one FMA an element, where a choice would be an instruction more.
    inside = (keys < size).to(torch.float32).unsqueeze(1)
    centred = x - inside * hl.load(mean, [bh, cols]).unsqueeze(0)
    scaled = centred * (1.0 / descale).unsqueeze(0)
    return scaled, scaled.to(dtype)


def lost_in_rounding(
    scaled: torch.Tensor,  # [bn, d_tile]
    tile: torch.Tensor,  # [bn, d_tile]
    descale: torch.Tensor,  # [d_tile]
) -> torch.Tensor:
    """The sum over keys of what the cast took from a block, [d_tile]."""
    return (scaled - tile.to(torch.float32)).sum(0) * descale
