"""Checks of what a `BlockMask` is made from."""

from __future__ import annotations

import torch

from helion_attn.configs import MASK_BLOCK
from helion_attn.validate.dense import check_device, described

#: Longest sequence: a block's number, and its complement, are int32, and so are tokens.
MAX_TOKENS = 2**31 - 1


def check_int(name: str, value: object, least: int, most: int) -> None:
    """Accept an int from `least` up to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}; it must be an int in {least}..{most}")


def check_bool_tensor(name: str, x: object, what: str) -> None:
    """Accept a tensor of bool, on a device that is supported; `what` says what else it must be."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.bool:
        raise TypeError(f"{name} is {described(x)}; it must be a bool tensor {what}")
    check_device(name, x)


def check_blocks(blocks: torch.Tensor, M: int, N: int) -> None:
    """Blocks of M queries and N keys."""
    check_int("M", M, 1, MAX_TOKENS)
    check_int("N", N, 1, MAX_TOKENS)
    check_bool_tensor("blocks", blocks, "[B or 1, H or 1, ceil(M / 128), ceil(N / 128)]")
    wanted = (-(-M // MASK_BLOCK), -(-N // MASK_BLOCK))
    if blocks.dim() != 4 or blocks.shape[2:] != wanted or 0 in blocks.shape:
        raise ValueError(
            f"blocks has shape {tuple(blocks.shape)}; for M = {M} and N = {N} it must be [B or 1, H or 1, {wanted[0]}, "
            f"{wanted[1]}]: blocks of {MASK_BLOCK} queries and {MASK_BLOCK} keys"
        )
