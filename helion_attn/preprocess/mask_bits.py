"""A mask by scores, as bits: each bool is read once.

For every block of 128 queries and 128 keys this finds whether it is seen whole, in part or not at all, and of one that
is seen in part its bits, and a number of 64 bits by which equal blocks are found. Blocks that differ have the same
number as often as random ones would: it is a sum over words, mixed with their place by a bijection (the finalizer of
MurmurHash3), so that no pattern of the bits decides.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import by_device
from helion_attn.configs import MASK_BLOCK
from helion_attn.kernels.lib.strided import WIDEST_LOAD
from helion_attn.problem import MaskBitsArgs

#: Bits of a word of a tile.
WORD = 32

#: What a block is, if it is not seen in part.
WHOLE, UNSEEN = -1, -2

#: A block that is seen in part, before it has a tile.
IN_PART = 0

#: The key of blocks that are not seen in part. It sorts before others.
NO_KEY = -(2**63)


class MaskBitsSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    unit: int  # what the steps and the length of a row are multiples of
    block: int  # queries and keys of a block
    word: int  # bits of a word
    in_part: int  # what `kinds` has for a block that is seen in part
    whole: int  # for one that is seen whole
    unseen: int  # for one that is not seen
    no_key: int  # what `keys` has for a block that is not seen in part


def four_bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of four keys as a number below 16, of their bytes as an int32. Inlined into kernels.

    Bit 7 of a byte carries if a bit below is set. The product moves bits 7, 15, 23 and 31 to the upper four, and no two
    of its terms meet.
    """
    high = (((x & 0x7F7F7F7F) + 0x7F7F7F7F) | x) & -0x7F7F7F80
    return ((high * 0x00204081) >> 28) & 15


def mixed(
    words: torch.Tensor,  # int32
    salt: torch.Tensor,  # int32, likewise
) -> torch.Tensor:
    """A bijection of 32 bits for each salt. Inlined into kernels."""
    x = words ^ (salt * -1640531535)
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)


def mask_bits(
    mask: torch.Tensor,  # flat, four bools a number
    bits: torch.Tensor,  # [blocks * 128, 4], written
    kinds: torch.Tensor,  # [blocks], written
    keys: torch.Tensor,  # [blocks], written
    row_blocks: int,
    n_blocks: int,
    m_blocks: int,
    H: int,
    M: int,
    N: int,
    units: int,
    b_step: int,
    h_step: int,
    m_step: int,
    spec: hl.constexpr,  # MaskBitsSpec
) -> None:
    """Write each block's bits, its kind, and the number by which equal blocks are found."""
    # Known strides keep loads and stores 16 bytes wide.
    hl.specialize((mask.stride(0), bits.stride(0), bits.stride(1), kinds.stride(0), keys.stride(0)))
    w = hl.specialize(bits.size(1))
    half = spec.word // 8
    for row_block, n_block in hl.grid([row_blocks, n_blocks]):
        bh = row_block // m_blocks
        # A mask may have more than 2**31 elements.
        b = hl.full([], bh // H, dtype=torch.int64)
        h = hl.full([], bh % H, dtype=torch.int64)
        # [128]
        rows = (row_block % m_blocks) * spec.block + hl.arange(spec.block)
        # [16]: the first 16 keys of each word. A thread loads these and the next 16, so that it has the word alone.
        i = hl.arange(w * half)
        cols = n_block * (spec.block // 4) + i // half * (2 * half) + i % half
        # [128, 16]
        at_row = (b * b_step + h * h_step + rows.to(torch.int64) * m_step) * spec.unit
        at = at_row.unsqueeze(1) + cols.unsqueeze(0)
        is_row = (rows < M).unsqueeze(1)
        inside = is_row & (cols < units * spec.unit).unsqueeze(0)
        first = four_bits(hl.load(mask, [at], extra_mask=inside)) << (4 * (i % half)).unsqueeze(0)
        inside = is_row & (cols + half < units * spec.unit).unsqueeze(0)
        second = four_bits(hl.load(mask, [at + half], extra_mask=inside)) << (4 * (i % half) + 4 * half).unsqueeze(0)
        # [128, 4]
        seen = (first | second).reshape(spec.block, w, half).sum(2).to(torch.int32)

        # What it would be if all were seen, of keys and rows that exist.
        left = N - n_block * spec.block - hl.arange(w) * spec.word
        ones = (torch.full_like(left, 1) << torch.clamp(left, 0, spec.word - 1)) - 1
        ones = torch.where(left >= spec.word, -1, ones)
        full = torch.where(is_row, ones.unsqueeze(0), 0)
        words = seen & full
        # In one sum: how many words are not 0, and in the upper half how many lack a bit.
        found = ((words != 0).to(torch.int32) + ((words != full).to(torch.int32) << 16)).reshape(-1).sum(0)
        lacking = torch.where(found >> 16 == 0, spec.whole, spec.in_part)
        kind = torch.where((found & 0xFFFF) == 0, spec.unseen, lacking)
        place = hl.arange(spec.block).unsqueeze(1) * w + hl.arange(w).unsqueeze(0)
        high = mixed(words, 2 * place + 1).to(torch.int64) << 32
        low = mixed(words, 2 * place + 2).to(torch.int64) & 0xFFFFFFFF
        block = row_block * n_blocks + n_block
        hl.store(kinds, [block], kind.to(torch.int32))
        key = torch.clamp_min((high | low).reshape(-1).sum(0), spec.no_key + 1)
        hl.store(keys, [block], torch.where(kind == spec.in_part, key, spec.no_key))
        at_bits = hl.full([], block, dtype=torch.int64) * spec.block
        in_part = (kind == spec.in_part) & (full == full)
        hl.store(bits, [at_bits + hl.arange(spec.block), hl.arange(w)], words, extra_mask=in_part)


def is_aligned(mask: torch.Tensor) -> bool:
    """Whether all rows of a mask of bytes are whole numbers of 32 bits."""
    steps = (step for size, step in zip(mask.shape, mask.stride()[:3], strict=False) if size > 1)
    return mask.stride(3) == 1 and all(
        x % 4 == 0 for x in (*steps, mask.size(3), mask.storage_offset(), mask.data_ptr())
    )


def aligned_copy(mask: torch.Tensor) -> torch.Tensor:
    """A copy whose rows are wider, with anything past their end. Dimensions that are expanded stay so."""
    once = mask[tuple(slice(1) if step == 0 else slice(None) for step in mask.stride()[:3])]
    room = once.new_empty((*once.shape[:3], -(-mask.size(3) // WIDEST_LOAD) * WIDEST_LOAD))
    room[..., : mask.size(3)] = once
    return room.expand(*mask.shape[:3], -1)


kernel = by_device(mask_bits, Config(num_warps=1, indexing="pointer", loop_orders=[[1, 0]]))


def launch(a: MaskBitsArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the bits of a mask, and of its blocks kinds and numbers.

    Returns:
        bits int32 [B, H, M_blocks, N_blocks, 128, 4], undefined but for blocks that are seen in part; kinds int32 and
        keys int64 [B, H, M_blocks, N_blocks].
    """
    bits, kinds, keys = empty_bits(a)
    mask = a.mask if is_aligned(a.mask) else aligned_copy(a.mask)
    (B, H, M, width), strides = mask.shape, mask.stride()
    b_step, h_step, m_step = (step if size > 1 else 0 for size, step in zip((B, H, M), strides[:3], strict=True))
    extent = (B - 1) * b_step + (H - 1) * h_step + (M - 1) * m_step + width
    # In bytes; a number that is loaded has four.
    unit = math.gcd(b_step, h_step, m_step, width, WIDEST_LOAD)
    m_blocks, n_blocks = kinds.shape[2:]
    kernel(mask.is_cuda).run(
        {
            "mask": mask.as_strided((extent,), (1,)).view(torch.int32),
            "bits": bits.view(-1, MASK_BLOCK // WORD),
            "kinds": kinds.view(-1),
            "keys": keys.view(-1),
            "row_blocks": B * H * m_blocks,
            "n_blocks": n_blocks,
            "m_blocks": m_blocks,
            "H": H,
            "M": M,
            "N": a.N,
            "units": width // unit,
            "b_step": b_step // unit,
            "h_step": h_step // unit,
            "m_step": m_step // unit,
            "spec": MaskBitsSpec(
                unit=unit // 4,
                block=MASK_BLOCK,
                word=WORD,
                in_part=IN_PART,
                whole=WHOLE,
                unseen=UNSEEN,
                no_key=NO_KEY,
            ),
        }
    )
    return bits, kinds, keys


def empty_bits(a: MaskBitsArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate what `launch` returns."""
    B, H, M, _ = a.mask.shape
    blocks = (B, H, -(-M // MASK_BLOCK), -(-a.N // MASK_BLOCK))
    bits = a.mask.new_empty((*blocks, MASK_BLOCK, MASK_BLOCK // WORD), dtype=torch.int32)
    return bits, a.mask.new_empty(blocks, dtype=torch.int32), a.mask.new_empty(blocks, dtype=torch.int64)
