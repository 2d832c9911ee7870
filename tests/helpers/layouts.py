"""Tensors of every kind of strides."""

from __future__ import annotations

from collections.abc import Callable

import torch

B, H, S, D = 2, 3, 70, 48

#: Ways to lay [B, H, S, D] out in memory, from a maker of contiguous tensors.
LAYOUTS: dict[str, Callable[[Callable[..., torch.Tensor]], torch.Tensor]] = {
    "bhsd": lambda make: make(B, H, S, D),
    "bshd": lambda make: make(B, S, H, D).transpose(1, 2),
    "slice_of_packed_bs3hd": lambda make: make(B, S, 3, H, D)[:, :, 1].transpose(1, 2),
    "slice_of_packed_bshd3": lambda make: make(B, S, H, D, 3)[..., 2].transpose(1, 2),
    "transposed_d": lambda make: make(B, H, D, S).mT,
    "expanded_heads": lambda make: make(B, 1, S, D).expand(B, H, S, D),
    "expanded_batch_and_rows": lambda make: make(1, H, 1, D).expand(B, H, S, D),
    "odd_offset": lambda make: make(B * H * S * D + 1)[1:].view(B, H, S, D),
    "odd_row_stride": lambda make: make(B, H, S, D + 3)[..., 3:],
    "every_second_row": lambda make: make(B, H, 2 * S, D)[:, :, 1::2],
    "sbhd": lambda make: make(S, B, H, D).permute(1, 2, 0, 3),
}


def make_x(layout: str, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    return LAYOUTS[layout](make)
