"""Descales that are powers of two, on the bits of fp32, and so exact. Inlined into kernels."""

from __future__ import annotations

import torch

from helion_attn.compiler.helion_adapter import hl


def biased_exponent(x: torch.Tensor) -> torch.Tensor:
    """That of x, 0 or more, rounded up to a power of two: adding all ones below the exponent carries unless they are 0.

    Infinity has 255, and NaN more.
    """
    return (x.view(torch.int32) + 0x7FFFFF) >> 23


def power_of_two_descale(
    amax: torch.Tensor, largest: float, limit_log2: hl.constexpr
) -> tuple[torch.Tensor, torch.Tensor]:
    """`amax / largest` rounded up to a power of two, at least 2**-limit_log2; and where it is NaN or too large.

    Too large is more than 2**limit_log2. There it is 1.
    """
    least = amax * (1.0 / largest)
    exponent = biased_exponent(least)
    invalid = (exponent > 127 + limit_log2) | (least != least)
    exponent = torch.where(invalid, 127, torch.clamp_min(exponent, 127 - limit_log2))
    return (exponent << 23).view(torch.float32), invalid


def block_descale(
    amax: torch.Tensor,  # []
    sampled_amax: torch.Tensor,  # []
    largest: float,
    range_log2: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`power_of_two_descale` of a block, whose limits are about the descale of a sample of its head; and of a sample
    that is 0, NaN or infinite about 1.
    """
    least = amax * (1.0 / largest)
    unit = sampled_amax * (1.0 / largest)
    known = (unit > 0.0) & (unit < float("inf"))
    about = torch.where(known, biased_exponent(unit), 127)
    exponent = biased_exponent(least)
    # Of infinity it is 255; and 2**126 is the largest that has a normal inverse.
    invalid = (exponent > torch.clamp_max(about + range_log2, 253)) | (least != least)
    exponent = torch.where(invalid, 127, torch.maximum(exponent, torch.clamp_min(about - range_log2, 1)))
    return (exponent << 23).view(torch.float32), invalid
