"""Checks of what a `BlockMask` is made from."""

from __future__ import annotations

import torch

from helion_attn.configs import MASK_BLOCK, packing, uses_large_d
from helion_attn.types import BlockMask, Recipe
from helion_attn.validate.dense import check_device, described

#: Longest sequence: a block's number, and its complement, are int32, and so are tokens.
MAX_TOKENS = 2**31 - 1

#: Head dims that `has_block_masks` accepts.
BLOCK_MASK_DIMS = "up to 256 with 8 bits, but for D in 129..192 with D_v up to 128, and up to 128 with 16 bits"


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


def check_dense(mask: torch.Tensor, capacity: int | None) -> None:
    """A mask by scores, and how many tiles there is room for."""
    what = "[M, N], [H or 1, M, N] or [B or 1, H or 1, M, N]"
    check_bool_tensor("mask", mask, what)
    if not 2 <= mask.dim() <= 4 or 0 in mask.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}; it must be {what}, of at least one query and one key")
    if capacity is not None:
        check_int("capacity", capacity, 1, MAX_TOKENS)
    elif torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise RuntimeError(
            "capacity is None; in torch.compile and in a CUDA graph, where nothing can be read, it must say how many "
            "tiles there is room for: different blocks of the mask that are seen in part"
        )


def has_block_masks(D: int, D_v: int, recipe: Recipe) -> bool:
    """Whether key blocks are those of masks, for these head dims."""
    return not uses_large_d(D, D_v, recipe.bits) and packing(D, D_v, recipe.bits).bn == MASK_BLOCK


def check_block_mask(
    mask: BlockMask, B: int, H: int, M: int, N: int, D: int, D_v: int, recipe: Recipe, device: torch.device
) -> None:
    """A mask for queries [B, H, M, D] on `device`, and N keys."""
    if mask.lists.device != device:
        raise ValueError(f"block_mask is on {mask.lists.device}; it must be on {device}, as q is")
    if (mask.M, mask.N) != (M, N):
        raise ValueError(f"block_mask is of {mask.M} queries and {mask.N} keys; it must be of M = {M} and N = {N}")
    if mask.B not in (1, B) or mask.H not in (1, H):
        raise ValueError(
            f"block_mask has B = {mask.B} and H = {mask.H}; B must be 1 or {B}, and H 1 or {H}, that of the query heads"
        )
    if mask.entries.numel() > MAX_TOKENS:
        raise ValueError(f"block_mask has room for {mask.entries.numel()} key blocks; it may be {MAX_TOKENS}")
    if not has_block_masks(D, D_v, recipe):
        raise ValueError(
            f"block_mask is given with D {D} and D_v {D_v}, whose key blocks are not of {MASK_BLOCK} keys with "
            f"{recipe.bits[0]} bits for Q and K; it is accepted {BLOCK_MASK_DIMS}"
        )


def check_no_tail(tail: torch.Tensor | None, where: str) -> None:
    """Refuse a mask's tail; `where` says what has none."""
    if tail is not None:
        raise ValueError(
            f"block_mask has a tail; {where} it must have none: leave out tail=True, or call helion_attn.attention "
            f"where nothing requires grad"
        )


def check_flex(mask: object) -> None:
    """A mask of PyTorch's flex_attention."""
    from torch.nn.attention import flex_attention

    if not isinstance(mask, flex_attention.BlockMask):
        raise TypeError(f"mask is {described(mask)}; it must be a torch.nn.attention.flex_attention.BlockMask")
    # PyTorch leaves a slice the lengths of the whole, and a mask_mod that raises.
    if mask.mask_mod is getattr(flex_attention, "_sliced_mask_mod_error", None):
        raise ValueError(
            "mask is a slice of a torch.nn.attention.flex_attention.BlockMask, without a mask_mod; it must be whole, "
            "from create_block_mask for the sequences, heads and queries of the slice"
        )
    check_device("mask.kv_indices", mask.kv_indices)
    if not 2 <= mask.kv_indices.dim() <= 4 or mask.kv_indices.dim() != mask.kv_num_blocks.dim() + 1:
        raise ValueError(
            f"mask.kv_indices has shape {tuple(mask.kv_indices.shape)}; it must be [B, H, row blocks, key blocks], or "
            f"without the first or the first two"
        )
    lengths, sizes, rows = mask.seq_lengths, mask.BLOCK_SIZE, mask.kv_indices.size(-2)
    if min(*lengths, *sizes) < 1 or rows * sizes[0] < lengths[0]:
        raise ValueError(
            f"mask has seq_lengths {lengths}, BLOCK_SIZE {sizes} and {rows} row blocks; lengths and sizes must be at "
            f"least 1, and the row blocks must hold all queries"
        )
