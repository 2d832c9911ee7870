"""New keys and values into a paged cache: quantised, packed, and scattered to where the block table says.

    K:          x = (rope(x) - mean) / factors of channels
    e4m3 K:     k_descale = the power of two with amax / k_descale in 224..448;  k8 = cast(x / k_descale)
    int8 K:     k_descale = amax / 127;                                          k8 = round(x / k_descale)
    V:          as e4m3 K, without a mean

The mean and the factors are the cache's, the same for all keys of a head. A page that fills is open: each key has its
own descales, and what is there is not quantised anew. `close_pages` then closes pages that are full.

An append that writes a page's first slot also clears what lies past its own last key: the attention kernel multiplies V
there by 0, and 0 times a NaN that the memory, or an earlier owner of the page, left there would be NaN. So does one
that begins inside of a closed page, which it opens: each key before has the page's descales as its own.

A key whose position or page lies outside of the tables is not stored anywhere; the attention kernel gives NaN for such
a sequence. Neighbours of V in memory are neighbouring keys, so a program has 16 slots of a page or a multiple of them:
where new keys fill them all, stores are 16 bytes wide, and otherwise one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import by_device
from helion_attn.kernels.lib.inline_asm import to_int8
from helion_attn.kernels.lib.keys import keys_of_batch, queries_of_batch, queries_of_sequence, sequence_of
from helion_attn.kernels.lib.rope import rope_rows, rope_tables
from helion_attn.kernels.lib.scalars import int32, inverse_of_power, quotient
from helion_attn.kernels.lib.steps import to_descale
from helion_attn.kernels.lib.strided import (
    PageSteps,
    common_unit,
    flat_memory,
    load_rows,
    page_begins,
    page_steps,
    row_channels,
    strided_rows,
)
from helion_attn.numerics import (
    E4M3_MAX,
    INT8_MAX,
    MAX_INT8_K_DESCALE_LOG2,
    MAX_K_DESCALE_LOG2,
    MAX_V_DESCALE_LOG2,
    MIN_K_DESCALE_LOG2,
)
from helion_attn.preprocess import close_pages
from helion_attn.preprocess.lib.v_layout import key_stored_at
from helion_attn.problem import AppendArgs, PackedBatch

#: Slots of a program where few keys are new.
FEW_KEYS = 16

#: Numbers of K, and of V, that a program of a prompt has: 16 registers of 4 warps, which wait for memory at once.
PROMPT_NUMBERS = 8192


def keys_of_program(new_keys: int, page_size: int, d: int) -> int:
    """Slots of a program, which lie in one page; `d` is the larger head dim."""
    many = min(PROMPT_NUMBERS // d, page_size)
    return many if new_keys >= many else FEW_KEYS


def power_of_key(
    amax: torch.Tensor,  # [keys]
    least_log2: hl.constexpr,
    limit_log2: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A key's descale, `amax / 448` rounded up to a power of two from 2**least_log2 on, and its numbers' factor.

    On the bits, so that it is exact: adding all ones below the exponent carries unless they are zeros. The numbers of a
    key that is not finite, or whose descale would pass 2**limit_log2, are times NaN; its descale is the least.
    """
    exponent = ((amax * (1.0 / E4M3_MAX)).view(torch.int32) + 0x7FFFFF) >> 23
    invalid = (exponent > 127 + limit_log2) | (amax != amax)
    exponent = torch.where(invalid, 127 + least_log2, torch.clamp_min(exponent, 127 + least_log2))
    descale = (exponent << 23).view(torch.float32)
    return descale, torch.where(invalid, float("nan"), inverse_of_power(descale))


def descale_of_int8_key(amax: torch.Tensor, limit_log2: hl.constexpr) -> torch.Tensor:
    """`amax / 127`, [keys]; NaN of NaN, of infinity, and above 2**limit_log2."""
    descale = to_descale(amax, INT8_MAX)
    return torch.where(descale <= 2.0**limit_log2, descale, float("nan"))


class AppendSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    keys: int  # slots of a program, a multiple of 16
    k_d_step: int  # from a channel of K to the next
    v_d_step: int  # of V
    unit: int  # what the other steps are multiples of
    bn: int  # keys of a page
    d: int  # head dim of K
    d_v: int  # of V
    d_pad: int  # padded head dim of K
    d_v_pad: int  # of V
    rotary: int  # channels of K that are rotated
    pairing: int  # how, as `lib.rope` has it
    int8_keys: bool  # K becomes int8
    has_mean: bool  # K loses a constant first
    equalise: bool  # then its channels are divided by their factors
    k_least_log2: int  # descales of e4m3 K begin at two to this
    k_limit_log2: int  # and end at two to this
    v_limit_log2: int  # descales of V end at two to this, and at its inverse
    # A power of two that holds the sequences of a packed batch, which have different numbers of new keys; or 0.
    batch: int
    is_cuda: bool  # the kernel is compiled; otherwise interpreted


def append_kv(
    k: torch.Tensor,  # flat
    v: torch.Tensor,  # flat
    k8: torch.Tensor,  # flat, written
    v8: torch.Tensor,  # flat, written
    k_descale: torch.Tensor,  # flat, written
    v_descale: torch.Tensor,  # flat, written
    k_mean: torch.Tensor,  # [H_kv * D_pad] if has_mean
    channel_factors: torch.Tensor,  # [H_kv * D_pad] if equalise
    block_table: torch.Tensor,  # [B * max_pages]
    cache_seqlens: torch.Tensor,  # [B], without the new keys; of a packed batch with them
    cu_seqlens: torch.Tensor,  # [B + 1] if batch
    cos: torch.Tensor,  # [table_rows * rotary / 2]
    sin: torch.Tensor,  # [table_rows * rotary / 2]
    num_pages: int,
    max_pages: int,
    kv_heads: int,
    tiles: int,
    length: int,
    k_b_step: int,
    k_h_step: int,
    k_s_step: int,
    v_b_step: int,
    v_h_step: int,
    v_s_step: int,
    table_rows: int,
    d_at_run_time: int,
    d_v_at_run_time: int,
    steps: PageSteps,
    spec: hl.constexpr,  # AppendSpec
) -> None:
    """The kernel; see the module's docstring."""
    B = cache_seqlens.size(0)
    k_channels = row_channels(spec.d, d_at_run_time, spec.k_d_step)
    v_channels = row_channels(spec.d_v, d_v_at_run_time, spec.v_d_step)
    # Known strides keep loads and stores 16 bytes wide.
    hl.specialize((k.stride(0), v.stride(0), k8.stride(0), v8.stride(0)))
    hl.specialize((k_descale.stride(0), v_descale.stride(0), block_table.stride(0), cache_seqlens.stride(0)))
    hl.specialize(cu_seqlens.stride(0))
    hl.specialize((cos.stride(0), sin.stride(0), k_mean.stride(0), channel_factors.stride(0)))
    # Of a packed batch tiles of all sequences follow each other.
    heads = kv_heads if spec.batch else B * kv_heads
    for bh, at_tile in hl.grid([heads, tiles]):
        h = bh % kv_heads
        if spec.batch:
            # [batch]
            new = queries_of_batch(cu_seqlens, cache_seqlens, B, spec.batch)
            stored_keys = keys_of_batch(cache_seqlens, B, spec.batch) - new
            slots = torch.where((new > 0) & (stored_keys >= 0), stored_keys % spec.keys + new + spec.keys - 1, 0)
            b, tile = sequence_of(quotient(slots, int32(spec.keys)), at_tile, spec.batch)
            b = torch.minimum(b, int32(B - 1))
            first_token, new_keys = queries_of_sequence(cu_seqlens, cache_seqlens, b)
            new_keys = torch.where(tile >= 0, new_keys, 0)
            first = hl.load(cache_seqlens, [b]) - new_keys
        else:
            b, tile = bh // kv_heads, at_tile + 0
            first, first_token, new_keys = hl.load(cache_seqlens, [b]), int32(0), int32(length)
        # A program's slots lie in one page. Negative for a length near 2**31.
        group = first // spec.keys + tile
        begin = group * spec.keys
        # A product, so that Triton knows it to be aligned.
        first_slot = group % (spec.bn // spec.keys) * spec.keys
        # Rows that lie `keys / 4` apart are a thread's, and are neighbours in V.
        # [keys]
        row = hl.arange(spec.keys)
        key = key_stored_at(row % (spec.keys // 4) * 4 + row // (spec.keys // 4))
        position = begin + key
        given = (position >= first) & (position - first < new_keys)
        rows = torch.where(given, first_token + position - first, length)
        listed = (first >= 0) & (begin >= 0) & (begin < max_pages * spec.bn)
        page = hl.load(block_table, [torch.where(listed, b * max_pages + begin // spec.bn, 0)])
        known = listed & (page >= 0) & (page < num_pages)
        stored = given & known
        of_k, of_v, of_descales = page_begins(page, h, steps)

        # Only the first program of a sequence may find its page closed, and no other writes what says so.
        page_at = torch.where(known, of_descales, 0)
        old_k, mark, old_v = (
            hl.load(k_descale, [page_at]),
            hl.load(k_descale, [page_at + 1]),
            hl.load(v_descale, [page_at]),
        )
        opens = known & (new_keys > 0) & (tile == 0) & (first % spec.bn > 0) & (mark < 0.0)

        # All loads come before all else, so that a program waits for memory once.
        # [keys, D_v_pad]
        channels = hl.arange(spec.d_v_pad)
        v_offset = (b * v_b_step + h * v_h_step) * spec.unit
        y = load_rows(v, v_offset, rows, channels, v_s_step * spec.unit, spec.v_d_step, length, v_channels)
        # [keys, D_pad]
        cols = hl.arange(spec.d_pad)
        k_offset = (b * k_b_step + h * k_h_step) * spec.unit
        if spec.pairing:
            x, factor = rope_rows(
                k, cos, sin, cos, cos, cos, k_offset, 0, 0, rows, k_s_step * spec.unit, spec.k_d_step, length,
                k_channels, first - first_token, table_rows, spec.keys, spec.d_pad, spec.rotary, spec.pairing, False, 0,
                1.0,
            )  # fmt: skip
            x = x * factor.unsqueeze(1)
        else:
            x = load_rows(k, k_offset, rows, cols, k_s_step * spec.unit, spec.k_d_step, length, k_channels)
        if spec.has_mean:
            # [1, D_pad]
            mean = hl.load(k_mean, [h * spec.d_pad + cols]).unsqueeze(0)
            x = x - mean
        if spec.equalise:
            # [1, D_pad]
            inverse = inverse_of_power(hl.load(channel_factors, [h * spec.d_pad + cols])).unsqueeze(0)
            x = x * inverse

        at = of_descales + first_slot + key
        k_at = of_k + ((first_slot + key).unsqueeze(1) * spec.d_pad + cols.unsqueeze(0)).to(torch.int64)
        # [keys], then [keys, D_pad]
        if spec.int8_keys:
            k_scale = descale_of_int8_key(torch.amax(torch.abs(x), 1), spec.k_limit_log2)
            k_tile = to_int8(x, (1.0 / k_scale).unsqueeze(1), spec.is_cuda)
        else:
            k_scale, factor = power_of_key(torch.amax(torch.abs(x), 1), spec.k_least_log2, spec.k_limit_log2)
            k_tile = (factor.unsqueeze(1) * x).to(k8.dtype)
        if spec.is_cuda:
            # A key of slot 1 overwrites the mark.
            hl.inline_triton("tl.debug_barrier()", args=(), output_like=None)
        # Before K itself, whose numbers leave no registers for it above head dim 256.
        hl.store(k_descale, [at], k_scale, extra_mask=stored)
        hl.store(k8, [k_at], k_tile, extra_mask=stored.unsqueeze(1))

        # [keys]
        v_scale, factor = power_of_key(torch.amax(torch.abs(y), 1), -spec.v_limit_log2, spec.v_limit_log2)
        hl.store(v_descale, [at], v_scale, extra_mask=stored)
        # [keys, D_v_pad], then [D_v_pad, keys] in V's order
        v_tile = (factor.unsqueeze(1) * y).to(v8.dtype)
        v_tile = v_tile.reshape(4, spec.keys // 4, spec.d_v_pad).permute(2, 1, 0).reshape(spec.d_v_pad, spec.keys)
        places = hl.arange(spec.keys)
        # A page that begins in this tile and that new keys do not fill, or a closed one that the first new key is in.
        keys_there = first + new_keys - begin // spec.bn * spec.bn
        begins = known & (first_slot == 0) & (begin >= first) & (begin - first < new_keys)
        clears = (begins | opens) & (keys_there < spec.bn)
        # [bn]
        slot = hl.arange(spec.bn)
        cleared = of_v + (channels.unsqueeze(1) * spec.bn + slot.unsqueeze(0)).to(torch.int64)
        no_value = hl.zeros([spec.d_v_pad, spec.bn], dtype=v8.dtype)
        # No other program has keys of the page: all of it is cleared, 16 bytes at once.
        alone = begins & (keys_there <= spec.keys)
        if alone:
            hl.store(v8, [cleared], no_value)
        if spec.is_cuda:
            # Before what the tile stores there.
            hl.inline_triton("tl.debug_barrier()", args=(), output_like=None)
        v_at = of_v + (channels.unsqueeze(1) * spec.bn + (first_slot + places).unsqueeze(0)).to(torch.int64)
        if known & (begin >= first) & (begin - first <= new_keys - spec.keys):
            # Without a mask, 16 bytes at once.
            hl.store(v8, [v_at], v_tile)
        else:
            position_there = begin + key_stored_at(places)
            there = known & (position_there >= first) & (position_there - first < new_keys)
            hl.store(v8, [v_at], v_tile, extra_mask=there.unsqueeze(0))

        if clears & (alone == 0):
            hl.store(v8, [cleared], no_value, extra_mask=(key_stored_at(slot) >= keys_there).unsqueeze(0))
        if clears:
            behind = slot >= keys_there
            ones = hl.full([spec.bn], 1.0, dtype=torch.float32)
            hl.store(k_descale, [of_descales + slot], ones, extra_mask=behind)
            hl.store(v_descale, [of_descales + slot], ones, extra_mask=behind)
        if opens:
            # Slots of keys that were there, but for the first one's.
            older = (slot > 0) & (slot < first % spec.bn)
            of_page = hl.zeros([spec.bn], dtype=torch.float32)
            hl.store(k_descale, [of_descales + slot], of_page + old_k, extra_mask=older)
            hl.store(v_descale, [of_descales + slot], of_page + old_v, extra_mask=older)


kernel = by_device(append_kv, Config(num_warps=4, indexing="pointer"))


def launch(
    a: AppendArgs,
    batch: PackedBatch | None = None,
    open_pages: tuple[torch.Tensor, ...] | None = None,
    left: int = -1,
) -> tuple[torch.Tensor, ...]:
    """Store keys and values at positions `cache_seqlens[b]` and up, and return `close_pages`' open pages.

    With a packed batch B is 1 in k and v, and lengths are those with the new keys. Open pages are made, or given. A
    query sees `left` keys before its own, or all for -1.
    """
    (H_kv, L, D), cache = a.k.shape[1:], a.cache
    (num_pages, _, bn, D_pad), int8_keys = cache.k8.shape, cache.k8.dtype == torch.int8
    longest = L if batch is None else batch.longest
    keys = keys_of_program(longest, bn, max(D_pad, cache.v8.size(2)))
    unit = common_unit(a.k, a.v)
    k, v = strided_rows(a.k, unit), strided_rows(a.v, unit)
    rope = rope_tables(a.rope, D_pad, a.k.new_empty(1, dtype=torch.float32))
    unread = flat_memory(cache.k_descale)
    tiles = (L + 2 * keys - 2) // keys
    if batch is not None:
        # Of a sequence two are not full, at most; of one key it is one.
        tiles = L // keys + min(2 * a.cache_seqlens.size(0), L)
    kernel(a.k.is_cuda).run(
        {
            "k": k.flat,
            "v": v.flat,
            "k8": flat_memory(cache.k8),
            "v8": flat_memory(cache.v8),
            "k_descale": flat_memory(cache.k_descale),
            "v_descale": flat_memory(cache.v_descale),
            "k_mean": unread if cache.k_mean is None else cache.k_mean.view(-1),
            "channel_factors": unread if cache.channel_factors is None else cache.channel_factors.view(-1),
            "block_table": a.block_table.view(-1),
            "cache_seqlens": a.cache_seqlens,
            "cu_seqlens": a.cache_seqlens if batch is None else batch.cu_seqlens,
            "cos": rope.cos,
            "sin": rope.sin,
            "num_pages": num_pages,
            "max_pages": a.block_table.size(1),
            "kv_heads": H_kv,
            "tiles": tiles,
            "length": L,
            "k_b_step": k.b_step if batch is None else 0,
            "k_h_step": k.h_step,
            "k_s_step": k.s_step,
            "v_b_step": v.b_step if batch is None else 0,
            "v_h_step": v.h_step,
            "v_s_step": v.s_step,
            "table_rows": rope.table_rows,
            "d_at_run_time": D,
            "d_v_at_run_time": a.v.size(3),
            "steps": page_steps(cache),
            "spec": AppendSpec(
                keys=keys,
                k_d_step=k.d_step,
                v_d_step=v.d_step,
                unit=unit,
                bn=bn,
                d=D,
                d_v=a.v.size(3),
                d_pad=D_pad,
                d_v_pad=cache.v8.size(2),
                rotary=rope.rotary,
                pairing=rope.pairing,
                int8_keys=int8_keys,
                has_mean=cache.k_mean is not None,
                equalise=cache.channel_factors is not None,
                k_least_log2=MIN_K_DESCALE_LOG2,
                k_limit_log2=MAX_INT8_K_DESCALE_LOG2 if int8_keys else MAX_K_DESCALE_LOG2,
                v_limit_log2=MAX_V_DESCALE_LOG2,
                batch=0 if batch is None else batch.size,
                is_cuda=a.k.is_cuda,
            ),
        }
    )
    return close_pages.launch(a, batch, open_pages, left)
