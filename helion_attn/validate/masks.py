"""Checks of the arguments of `helion_attn.masks`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from helion_attn.validate.block_mask import MAX_TOKENS, check_int
from helion_attn.validate.dense import check_device, check_layout, check_sm_scale, described


def check_sizes(name: str, sizes: Sequence[int], most: Sequence[int]) -> None:
    """Accept as many ints as `most` has, each from 1 up to that."""
    wanted = f"ints from 1 up to {', '.join(map(str, most))}"
    if not isinstance(sizes, (tuple, list)) or len(sizes) != len(most):
        raise ValueError(f"{name} is {sizes!r}; it must be {len(most)} {wanted}")
    if any(type(size) is not int or not 1 <= size <= top for size, top in zip(sizes, most, strict=True)):
        raise ValueError(f"{name} is {sizes!r}; it must be {len(most)} {wanted}")


def check_number(name: str, value: object, what: str, accepted: bool) -> None:
    """Accept a number, if it is one and `accepted`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not accepted:
        raise ValueError(f"{name} is {value!r}; it must be {what}")


def check_grid(grid: Sequence[int], tile: Sequence[int], before: int, text: int) -> None:
    """A grid of tokens, its tiles, and tokens before and behind it."""
    check_sizes("grid", grid, [MAX_TOKENS] * 3)
    check_sizes("tile", tile, grid)
    left = MAX_TOKENS - min(MAX_TOKENS, grid[0] * grid[1] * grid[2])
    check_int("before", before, 0, left)
    check_int("text", text, 0, left - before)


def check_ids(name: str, ids: torch.Tensor, dims: tuple[int, ...], what: str) -> None:
    """Integers of so many dimensions."""
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {described(ids)}; it must be an int32 or int64 tensor {what}")
    check_device(name, ids)
    if ids.dim() not in dims or 0 in ids.shape:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}; it must be {what}, and not empty")


def check_top_blocks(
    q: torch.Tensor, k: torch.Tensor, keep: float | None, mass: float | None, sm_scale: float | None, layout: str
) -> None:
    """Q and K, their scale, and how many blocks to keep."""
    check_layout(layout)
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            raise TypeError(f"{name} is {described(x)}; it must be a floating-point tensor")
        check_device(name, x)
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have 4 dimensions, and not be empty")
    if k.device != q.device:
        raise ValueError(f"k is on {k.device}; it must be where q is, on {q.device}")
    heads = 1 if layout == "bhsd" else 2
    B, H, D = q.size(0), q.size(heads), q.size(3)
    if k.size(0) != B or k.size(3) != D or H % k.size(heads):
        raise ValueError(
            f"k has shape {tuple(k.shape)} with layout={layout!r}; for q of shape {tuple(q.shape)} it must have {B} "
            f"sequences, head dim {D}, and a number of heads that divides {H}"
        )
    if (keep is None) == (mass is None):
        raise ValueError(f"keep is {keep!r} and mass is {mass!r}; one of them must be given, and not both")
    name, value = ("keep", keep) if mass is None else ("mass", mass)
    check_number(name, value, "a number above 0, up to 1", isinstance(value, (int, float)) and 0 < value <= 1)
    if sm_scale is not None:
        check_sm_scale(sm_scale)
