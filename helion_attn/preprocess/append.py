"""New keys and values into a paged cache: quantised, packed, and scattered to where the block table says.

    K, a key:  x = rope(x);  k8 = cast(x / k_descale),  k_descale = max(amax / 448, 2**-126)
    V, a key:  v8 = cast(x / v_descale),                v_descale = amax / 448 rounded up to a power of two

What is there is never quantised anew, since a descale belongs to one key. An append that writes a page's first slot
also clears V past its own last key: the attention kernel multiplies those slots by 0, and 0 times a NaN that the
memory, or an earlier owner of the page, left there would be NaN.

A key whose position or page lies outside of the tables is not stored anywhere; the attention kernel gives NaN for such
a sequence. Neighbours of V in memory are neighbouring keys, so a program has 16 slots of a page: where new keys fill
them all, stores are 16 bytes wide, and otherwise one.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.kernels import Runner, compiled, interpreted
from helion_attn.kernels.lib.rope import rope_rows, rope_tables
from helion_attn.kernels.lib.steps import to_descale
from helion_attn.kernels.lib.strided import common_unit, load_rows, strided_rows
from helion_attn.numerics import E4M3_MAX, MAX_V_DESCALE_LOG2
from helion_attn.preprocess.lib.v_layout import key_stored_at
from helion_attn.problem import AppendProblem

#: New keys of a program.
APPENDED_KEYS = 16


def power_of_two_descale(
    amax: torch.Tensor, largest: float, limit_log2: hl.constexpr
) -> tuple[torch.Tensor, torch.Tensor]:
    """`amax / largest` rounded up to a power of two, at least 2**-limit_log2; and where it is NaN or too large.

    Too large is more than 2**limit_log2. There it is 1. On the bits, so that it is exact: adding all ones below the
    exponent carries unless they are zeros.
    """
    least = amax * (1.0 / largest)
    exponent = (least.view(torch.int32) + 0x7FFFFF) >> 23
    invalid = (exponent > 127 + limit_log2) | (least != least)
    exponent = torch.where(invalid, 127, torch.clamp_min(exponent, 127 - limit_log2))
    return (exponent << 23).view(torch.float32), invalid


class AppendSpec(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        keys: new keys of a program.
        k_d_step: from a channel of K to the next.
        v_d_step: of V.
        unit: what the other steps are multiples of.
        bn: keys of a page.
        d: head dim of K.
        d_v: of V.
        d_pad: padded head dim of K.
        d_v_pad: of V.
        rotary: channels of K that are rotated.
        pairing: how, as `lib.rope` has it.
        largest: the format's largest number.
        v_limit_log2: V's descales end at two to this.
    """

    keys: int
    k_d_step: int
    v_d_step: int
    unit: int
    bn: int
    d: int
    d_v: int
    d_pad: int
    d_v_pad: int
    rotary: int
    pairing: int
    largest: float
    v_limit_log2: int


def append_kv(
    k: torch.Tensor,  # flat
    v: torch.Tensor,  # flat
    k8: torch.Tensor,  # flat, written
    v8: torch.Tensor,  # flat, written
    k_descale: torch.Tensor,  # [num_pages * H_kv * bn], written
    v_descale: torch.Tensor,  # [num_pages * H_kv * bn], written
    block_table: torch.Tensor,  # [B * max_pages]
    cache_seqlens: torch.Tensor,  # [B]
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
    spec: hl.constexpr,  # AppendSpec
) -> None:
    """The kernel; see the module's docstring."""
    B = cache_seqlens.size(0)
    # Known strides keep loads and stores 16 bytes wide.
    hl.specialize((k.stride(0), v.stride(0), k8.stride(0), v8.stride(0)))
    hl.specialize((k_descale.stride(0), v_descale.stride(0), block_table.stride(0), cache_seqlens.stride(0)))
    hl.specialize((cos.stride(0), sin.stride(0)))
    for bh, tile in hl.grid([B * kv_heads, tiles]):
        b = bh // kv_heads
        h = bh % kv_heads
        first = hl.load(cache_seqlens, [b])
        # A program's slots lie in one page; its keys come in V's order. Negative for a length near 2**31.
        begin = (first // spec.keys + tile) * spec.keys
        # [keys]
        position = begin + key_stored_at(hl.arange(spec.keys))
        given = (position >= first) & (position - first < length)
        rows = torch.where(given, position - first, length)
        listed = (first >= 0) & (begin >= 0) & (begin < max_pages * spec.bn)
        page = hl.load(block_table, [torch.where(listed, b * max_pages + begin // spec.bn, 0)])
        known = listed & (page >= 0) & (page < num_pages)
        stored = given & known
        # A pool may have more than 2**31 elements.
        block = page.to(torch.int64) * kv_heads + h
        first_slot = begin % spec.bn
        slot = position % spec.bn

        # [keys, D_pad]
        cols = hl.arange(spec.d_pad)
        k_offset = (b * k_b_step + h * k_h_step) * spec.unit
        if spec.pairing:
            x = rope_rows(
                k, cos, sin, cos, cos, cos, k_offset, 0, 0, rows, k_s_step * spec.unit, spec.k_d_step, length, spec.d,
                first, table_rows, spec.keys, spec.d_pad, spec.rotary, spec.pairing, False, 0, 1.0,
            )  # fmt: skip
        else:
            x = load_rows(k, k_offset, rows, cols, k_s_step * spec.unit, spec.k_d_step, length, spec.d)
        # [keys]
        k_scale = to_descale(torch.amax(torch.abs(x), 1), spec.largest)
        x8 = (x * (1.0 / k_scale).unsqueeze(1)).to(k8.dtype)
        at = block * spec.bn + slot
        hl.store(k8, [at.unsqueeze(1) * spec.d_pad + cols.unsqueeze(0)], x8, extra_mask=stored.unsqueeze(1))
        hl.store(k_descale, [at], k_scale, extra_mask=stored)

        # [keys, D_v_pad]
        channels = hl.arange(spec.d_v_pad)
        v_offset = (b * v_b_step + h * v_h_step) * spec.unit
        values = load_rows(v, v_offset, rows, channels, v_s_step * spec.unit, spec.v_d_step, length, spec.d_v)
        # [keys]
        v_scale, invalid = power_of_two_descale(torch.amax(torch.abs(values), 1), spec.largest, spec.v_limit_log2)
        scaled = torch.where(invalid.unsqueeze(1), float("nan"), values * (1.0 / v_scale).unsqueeze(1))
        # [D_v_pad, keys]
        v_tile = scaled.to(v8.dtype).transpose(0, 1)
        places = first_slot + hl.arange(spec.keys)
        v_at = (block * spec.d_v_pad + channels).unsqueeze(1) * spec.bn + places.unsqueeze(0)
        if torch.amin(stored.to(torch.int32), 0) > 0:
            # Without a mask, 16 bytes at once.
            hl.store(v8, [v_at], v_tile)
        else:
            hl.store(v8, [v_at], v_tile, extra_mask=stored.unsqueeze(0))
        hl.store(v_descale, [at], v_scale, extra_mask=stored)

        # The page that begins in this tile, if one does.
        begun = torch.amax(torch.where(stored & (slot == 0), block, -1), 0)
        if begun >= 0:
            # [bn]
            place = hl.arange(spec.bn)
            keys_there = first + length - begin
            cleared = (begun * spec.d_v_pad + channels).unsqueeze(1) * spec.bn + place.unsqueeze(0)
            no_value = hl.zeros([spec.d_v_pad, spec.bn], dtype=v8.dtype)
            hl.store(v8, [cleared], no_value, extra_mask=(key_stored_at(place) >= keys_there).unsqueeze(0))
            one = hl.full([spec.bn], 1.0, dtype=torch.float32)
            hl.store(v_descale, [begun * spec.bn + place], one, extra_mask=place >= keys_there)


@functools.cache
def kernel(is_cuda: bool) -> Runner:
    """The kernel for the device."""
    if not is_cuda:
        return interpreted(append_kv)
    return compiled(append_kv, Config(num_warps=4, indexing="pointer"))


def launch(a: AppendProblem) -> None:
    """Store keys and values at positions `cache_seqlens[b]` and up."""
    (H_kv, L, D), cache = a.k.shape[1:], a.cache
    num_pages, _, bn, D_pad = cache.k8.shape
    assert bn >= APPENDED_KEYS, "two pages would begin in a tile"
    unit = common_unit(a.k, a.v)
    k, v = strided_rows(a.k, unit), strided_rows(a.v, unit)
    rope = rope_tables(a.rope, D_pad, a.k.new_empty(1, dtype=torch.float32))
    kernel(a.k.is_cuda).run(
        {
            "k": k.flat,
            "v": v.flat,
            "k8": cache.k8.view(-1),
            "v8": cache.v8.view(-1),
            "k_descale": cache.k_descale.view(-1),
            "v_descale": cache.v_descale.view(-1),
            "block_table": a.block_table.view(-1),
            "cache_seqlens": a.cache_seqlens,
            "cos": rope.cos,
            "sin": rope.sin,
            "num_pages": num_pages,
            "max_pages": a.block_table.size(1),
            "kv_heads": H_kv,
            "tiles": (L + 2 * APPENDED_KEYS - 2) // APPENDED_KEYS,
            "length": L,
            "k_b_step": k.b_step,
            "k_h_step": k.h_step,
            "k_s_step": k.s_step,
            "v_b_step": v.b_step,
            "v_h_step": v.h_step,
            "v_s_step": v.s_step,
            "table_rows": rope.table_rows,
            "spec": AppendSpec(
                keys=APPENDED_KEYS,
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
                largest=E4M3_MAX,
                v_limit_log2=MAX_V_DESCALE_LOG2,
            ),
        }
    )
