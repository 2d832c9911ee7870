"""How a block of rows of Q or K becomes FP8. Inlined into the kernels of `quantize`."""

from __future__ import annotations

import torch

from helion_attn.kernels.helion_compat import hl
from helion_attn.numerics import DESCALE_MIN, E4M3_MAX
from helion_attn.preprocess.strided import load_rows


def to_descale(amax: torch.Tensor) -> torch.Tensor:
    """The multiplier that dequantises: `amax / 448`, large enough to have a finite reciprocal."""
    return torch.clamp_min(amax * (1.0 / E4M3_MAX), DESCALE_MIN)


def row_block(
    flat: torch.Tensor,
    amax: torch.Tensor,  # [B * H, MAX_PARTS]
    bh: int,
    i: int,
    parts: int,
    max_parts: int,
    head_offset: int,
    row_step: int,
    d_step: int,
    size: int,
    d: int,
    block: int,
    d_pad: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block `i` of a head's rows as e4m3 [block, D_pad], and the head's descale."""
    # [block, D_pad]
    x = load_rows(flat, head_offset, i * block + hl.arange(block), hl.arange(d_pad), row_step, d_step, size, d)
    part = hl.arange(max_parts)
    descale = to_descale(torch.amax(hl.load(amax, [bh, part], extra_mask=part < parts), 0))
    return (x * (1.0 / descale)).to(torch.float8_e4m3fn), descale
