"""How `pack` cuts its work into tiles, and what a program of it may use."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from helion_attn.kernels.lib.norm import NO_NORM, Norms
from helion_attn.kernels.lib.rope import INTERLEAVED, NO_ROPE, RopeTables
from helion_attn.kernels.lib.strided import WIDEST_LOAD, StridedQKV
from helion_attn.numerics import MAX_HADAMARD_BLOCK
from helion_attn.types import Recipe

#: Elements of Q or K that a program packs: 64 a thread. Packed blocks lie one after the other, so that a program may
#: take a part of one.
PACK_ELEMENTS = 8192

#: Elements of K or V a warp, where a program packs a block of either: 64 a thread.
WARP_ELEMENTS = 2048

#: Warps of such a program, at most.
MAX_WARPS = 8

#: Likewise where K's mean is subtracted after the rotation, with eight warps: a block of K is one tile, rotated once.
#: A block of 64 channels has half as many, and three programs fit an SM.
ROTATED_ELEMENTS = 16384

#: Channels of V that a program packs.
PACK_CHANNELS = 64

#: Tiles that a program rotates, at most: they share 32 KB of matrix, which are as much as one or two of them.
ROTATED_TILES = 4

#: Tiles of Q that a program normalises or rotates by RoPE: the next is copied when one is done.
NORMED_TILES = 4

#: A thread's where rows of bf16 are rotated, so that two programs of eight warps fit an SM. Left alone, ptxas takes 178
#: for ACCURATE with RoPE where channels are 128.
ROTATED_REGISTERS = 128

#: Likewise, of three programs: where K's mean is subtracted after the rotation and channels are 64 or fewer; and where
#: it is subtracted after interleaved angles in 16 bits and channels are more than 128, for which ptxas, left alone,
#: takes as many and spills a value.
NARROW_REGISTERS = 80


class Tiling(NamedTuple):
    """How the kernel cuts its work."""

    q_tile: int  # rows of Q that are one tile; of `q_run` tiles a program
    k_tile: int  # keys of K; of `k_run` tiles a program
    d_tile: int  # channels of V that a program packs
    q_run: int
    k_run: int
    q_per_block: bool  # a program packs a block of several tiles, which has a descale, and reads it twice
    k_per_block: bool  # the same for K
    rotate_first: bool  # K's mean is rotated and then subtracted, not the other way round
    two_terms: bool  # rows are two terms of bf16 in the rotation
    q_vectors_first: bool  # factors of channels, and K's mean, are loaded in front of a program's tiles of Q
    k_vectors_first: bool  # the same for tiles of K
    q_warps: int  # of a program that packs Q
    kv_warps: int  # of one that packs K or V
    q_registers: int | None  # of a thread that packs Q, or None for ptxas' choice
    kv_registers: int | None  # of a thread that packs K or V
    q_in_flight: int  # tiles of Q that are loaded at once
    k_in_flight: int  # tiles of K


def tiling(
    source: StridedQKV, norms: Norms, rope: RopeTables, bm: int, bn: int, recipe: Recipe, sum_lost: bool
) -> Tiling:
    """Choose the tiling by shapes, dtype, recipe, and by whether what rounding takes from V is summed."""
    D_row, dtype, hadamard = source.D_row, source.flat[0].dtype, recipe.hadamard
    # Where the rotated mean is at hand for few instructions, and rows are one term; what cancels leaves an error that
    # 16 bits would show.
    rotate_first = (
        hadamard
        and recipe.smooth_k
        and recipe.qk_dtype.itemsize == 1
        and dtype == torch.bfloat16
        and not rope.pairing
        and norms.k.normed == NO_NORM
        and D_row <= MAX_HADAMARD_BLOCK
    )
    # The next tile is loaded under this one, if there is shared memory for both and its loads are 16 bytes wide.
    wide_loads = source.unit * dtype.itemsize == WIDEST_LOAD and set(source.d_steps) == {1}
    # Rows of which some channels are rotated, or padded, take registers for masks.
    all_rotated = rope.rotary == D_row == source.D
    as_they_come = wide_loads and dtype.itemsize == 2 and not hadamard and (not rope.pairing or all_rotated)
    elements = ROTATED_ELEMENTS if rotate_first else PACK_ELEMENTS
    kv_elements = elements
    # Angles and what is rotated do not fit the registers of four warps.
    warps = kv_warps = 8 if rope.pairing or hadamard else 4
    # A whole block of 256 channels would take 16 warps, and leave room for one program an SM.
    whole_blocks = as_they_come and bn * D_row <= MAX_WARPS * WARP_ELEMENTS
    if whole_blocks:
        kv_warps = max(warps, bn * D_row // WARP_ELEMENTS)
        kv_elements = kv_warps * WARP_ELEMENTS
    elif recipe.smooth_k and source.d_steps[1] != 1:
        # Addresses of single elements take the registers that the mean wants.
        kv_elements //= 2
    # A program packs a block of several tiles, if that has a descale, or a few tiles that share the rotation's matrix.
    few = ROTATED_TILES if hadamard else 1
    # Copied to shared memory, loads of rows, angles and weights are all on their way at once; to registers ptxas issues
    # them one behind the other, with latencies in between.
    q_copied, k_copied = (
        wide_loads and not hadamard and bool(rope.pairing or norm.normed) for norm in (norms.q, norms.k)
    )
    few_q = NORMED_TILES if q_copied else few
    # Angles and what is rotated: 32 elements a thread, of four warps.
    q_tile, k_tile = min(bm, (elements // 2 if q_copied else elements) // D_row), min(bn, kv_elements // D_row)
    # A block of one tile has its amax at hand; one of several is read twice.
    q_per_block, k_per_block = recipe.q_scales == "block" and q_tile < bm, recipe.k_scales == "block" and k_tile < bn
    two_terms = hadamard and dtype != torch.bfloat16
    # A second term, angles in 16 bits, or more chunks than two would spill.
    narrow_angles = rope.cos.dtype.itemsize == 2
    spills = two_terms or (rope.pairing and narrow_angles)
    cap_registers = hadamard and D_row <= 2 * MAX_HADAMARD_BLOCK and not spills
    narrow = rotate_first and D_row < MAX_HADAMARD_BLOCK
    pipelined = wide_loads and (warps == 4 or rotate_first)
    registers = (NARROW_REGISTERS if narrow else ROTATED_REGISTERS) if cap_registers else None
    interleaved = rope.pairing == INTERLEAVED and narrow_angles
    cap_k = interleaved and recipe.smooth_k and not hadamard and D_row > MAX_HADAMARD_BLOCK
    kv_registers = NARROW_REGISTERS if cap_k else registers
    of_block = rope.pairing or norms.k.normed or sum_lost
    if whole_blocks and of_block and bn * D_row > PACK_ELEMENTS and D_row <= MAX_HADAMARD_BLOCK:
        # A block, and its angles or sums: left alone, ptxas takes 190 for fp32 angles and 254 for sums, and one program
        # fits an SM.
        kv_registers = ROTATED_REGISTERS
    if recipe.equalise and wide_loads and kv_registers is None and bn * D_row >= PACK_ELEMENTS:
        # With the factors ptxas takes 144 to 168, left alone, and none is spilled for fewer.
        kv_registers = ROTATED_REGISTERS
    if narrow and sum_lost and D_row > MAX_HADAMARD_BLOCK // 4:
        # Of three programs the sums would spill.
        kv_registers = ROTATED_REGISTERS
    # With two stages the next load is issued when a tile is done, with three a tile earlier. For blocks of K with 128
    # channels that is 147456 bytes of shared memory, not 114688: one program an SM, not two.
    in_flight = (3 if narrow else 2) if pipelined else 1
    q_run = bm // q_tile if q_per_block else few_q
    return Tiling(
        q_tile=q_tile,
        k_tile=k_tile,
        d_tile=math.gcd(source.D_v_pad, kv_elements // bn if as_they_come else PACK_CHANNELS),
        q_run=q_run,
        k_run=bn // k_tile if k_per_block else few,
        q_per_block=q_per_block,
        k_per_block=k_per_block,
        rotate_first=rotate_first,
        two_terms=two_terms,
        # Loaded with each tile they would be copied 4 bytes at once; beside a block and its angles they would spill.
        q_vectors_first=hadamard or q_run > 1,
        k_vectors_first=hadamard or (rope.pairing != NO_ROPE and k_tile * D_row <= PACK_ELEMENTS),
        q_warps=4 if q_copied else warps,
        kv_warps=kv_warps,
        q_registers=registers,
        kv_registers=kv_registers,
        q_in_flight=(3 if rotate_first else 2) if (pipelined and not as_they_come) or q_copied else 1,
        # What a program of plain rows loads goes to registers.
        k_in_flight=2 if k_copied and whole_blocks else 1 if as_they_come else in_flight,
    )
