"""How a block of V's keys is centred, scaled and cast; of 8 bits, also interleaved. Inlined into `pack`."""

from __future__ import annotations

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.steps import to_descale
from helion_attn.preprocess.lib.strided import load_rows


def key_stored_at(position: torch.Tensor) -> torch.Tensor:
    """The key that V has at a position of a block: in each 16, position 4t + 2a + b holds key 8a + 2t + b."""
    in_group = position % 16
    return position - in_group + (in_group // 2 % 2) * 8 + (in_group // 4) * 2 + in_group % 2


def position_of_key(key: torch.Tensor) -> torch.Tensor:
    """Where V has a key of a block, the inverse of `key_stored_at`."""
    in_group = key % 16
    return key - in_group + (in_group % 8 // 2) * 4 + (in_group // 8) * 2 + in_group % 2


def v_block(
    flat: torch.Tensor,
    mean: torch.Tensor,  # [B * H_kv, D_v_pad]
    amax: torch.Tensor,  # [B * H_kv, D_row]
    bh: int,
    i: int,
    d_index: int,
    d_row: int,
    head_offset: int,
    row_step: int,
    d_step: int,
    size: int,
    d: int,
    bn: int,
    d_tile: int,
    dtype: torch.dtype,
    largest: float,
    unscaled: hl.constexpr,
    channel_scales: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block `i` of a head's keys, `d_tile` channels of it, [bn, d_tile], and these channels' descales [d_tile]."""
    cols = d_index * d_tile + hl.arange(d_tile)
    keys = i * bn + hl.arange(bn)
    if dtype.itemsize == 1:
        # The permutation is in the addresses of the loads.
        keys = i * bn + key_stored_at(hl.arange(bn))
    # [bn, d_tile]
    x = load_rows(flat, head_offset, keys, cols, row_step, d_step, size, d)
    if unscaled:
        descale = hl.full([d_tile], 1.0, dtype=torch.float32)
    elif channel_scales:
        descale = to_descale(hl.load(amax, [bh, cols]), largest)
    else:
        descale = to_descale(torch.amax(hl.load(amax, [bh, hl.arange(d_row)]), 0), largest) + hl.zeros([d_tile])
    centred = x - hl.load(mean, [bh, cols]).unsqueeze(0)
    scaled = torch.where((keys < size).unsqueeze(1), centred * (1.0 / descale).unsqueeze(0), 0.0)
    return scaled.to(dtype), descale
