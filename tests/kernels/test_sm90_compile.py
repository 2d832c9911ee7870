"""Every shipped config, compiled for sm_90a without a GPU, and its machine code read."""

from __future__ import annotations

import re
import struct
from collections import Counter
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.sm90 import Sm90Kernel, compile_for_sm90, fake_cuda
from helion_attn.configs import (
    ALL_8_BIT,
    SUPPORTED_D,
    TileConfig,
    attention_tile_config,
    page_packing,
    tile_config,
)
from helion_attn.configs.scheduling import query_blocks_per_sm
from helion_attn.kernels.lib import schraudolph, steps
from helion_attn.numerics import MAX_P_OFFSET_LOG2, takes_bits
from helpers.cases import IN_E4M3, LADDER, PRESETS, SHIPPED, shipped_id
from helpers.offline import (
    LONGER_LOOP,
    MEASURED,
    SPILLED_IN_LOOP,
    assert_sound,
    batch_for,
    compile_attention,
    compile_decode,
    compile_shape,
    compile_step,
    compile_varlen,
    fake_cache,
    instructions_of_loop,
    launching,
    loop_of,
    products_in_flight,
    row_reduction_shuffles,
    widths,
)
from helpers.shared import shared


def assert_8_bit_attention(
    kernel: Sm90Kernel, tile: TileConfig, recipe: ha.Recipe = ha.FAST, *, spilled: int = 0, spilled_in_loop: int = 0
) -> None:
    assert_sound(kernel, spilled)
    assert kernel.opcodes["QGMMA"] > 0, "no FP8 WGMMA"
    assert (kernel.opcodes["IGMMA"] > 0) == (recipe.qk_dtype == torch.int8)
    assert kernel.opcodes["HGMMA"] == 0
    assert kernel.opcodes["UTMALDG"] > 0, "K and V do not come by TMA"
    assert kernel.opcodes["SHFL"] <= row_reduction_shuffles(tile, recipe), "P moves between lanes"
    in_loop = loop_of(kernel).count("LDL") + loop_of(kernel).count("STL")
    assert in_loop <= (spilled_in_loop if MEASURED else SPILLED_IN_LOOP), "the loop spills"


def assert_p_stays_in_place(
    kernel: Sm90Kernel, tile: TileConfig, recipe: ha.Recipe = ha.BALANCED, softcap: bool = False
) -> None:
    """No byte of P moves between registers; and where its bits come from scores, that is all that makes it."""
    loop = instructions_of_loop(kernel)
    opcodes = Counter(loop_of(kernel))
    threads = 32 * tile.num_warps
    if not takes_bits(recipe.pv_dtype, tile.D_pad) or recipe.promote_every == 0:
        assert "PRMT" not in opcodes, "P moves between the bytes of registers"
        return
    scores = tile.bm * tile.bn // threads
    assert opcodes["PRMT"] <= scores // 4, "P is packed in more than one instruction a register"
    # Of a thread's rows, the rescale; and tanh.
    rows = 2 * tile.bm // (16 * tile.num_warps)
    assert opcodes["MUFU"] == rows + (scores if softcap else 0), "P takes exponentials"
    half = recipe.half_scores and not softcap
    lines = Counter(x.split(".")[0] for x in loop if ".RELU" in x)
    assert lines == {"HFMA2" if half else "F2FP": scores // 2}, "scores are rounded one by one, or twice"
    assert not [x for x in loop if x.startswith("F2FP") and "E4M3" in x], "P is converted to FP8"
    wide = re.findall(r"QGMMA\.64x(\d+)x32", kernel.sass)
    assert str(tile.D_pad + 8) in wide, "P V makes no row sums"


#: How much longer a loop may be than another that does as much.
AS_LONG = 1.01 if MEASURED else LONGER_LOOP


def shipped(eight_bits: bool) -> list[Any]:
    return [
        pytest.param(tile, LADDER[name], id=f"{shipped_id(tile)}-{name}")
        for tile, name in SHIPPED
        if (tile.bits == ALL_8_BIT) == eight_bits
    ]


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize(("tile", "recipe"), shipped(eight_bits=True))
def test_shipped_config(tile: TileConfig, recipe: ha.Recipe) -> None:
    kernel = shared(compile_attention, tile.D_pad, tile.has_right, recipe=recipe, B=batch_for(tile))
    assert_8_bit_attention(kernel, tile, recipe)
    assert products_in_flight(kernel), "ptxas waits for each product"
    assert_p_stays_in_place(kernel, tile, recipe)
    assert kernel.num_warps == tile.num_warps
    assert kernel.registers <= tile.max_registers
    assert kernel.ctas_per_sm >= tile.ctas_per_sm


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize(("tile", "recipe"), shipped(eight_bits=False))
def test_shipped_16_bit_config(tile: TileConfig, recipe: ha.Recipe) -> None:
    kernel = shared(compile_attention, tile.D_pad, tile.has_right, recipe=recipe, B=batch_for(tile))
    assert_sound(kernel)
    assert kernel.opcodes["HGMMA"] > 0, "no 16-bit WGMMA"
    assert (kernel.opcodes["IGMMA"] > 0) == (recipe.qk_dtype == torch.int8)
    assert kernel.opcodes["QGMMA"] == 0
    assert products_in_flight(kernel), "ptxas waits for each product"
    assert kernel.opcodes["UTMALDG"] > 0, "K and V do not come by TMA"
    assert kernel.opcodes["SHFL"] <= row_reduction_shuffles(tile, recipe), "P moves between lanes"
    # A row's rescale, of two rows, and P, once.
    assert loop_of(kernel).count("MUFU") <= 2 + tile.bm * tile.bn // (32 * tile.num_warps), "P is computed twice"
    # One packs a flag where there are no registers left.
    assert loop_of(kernel).count("PRMT") <= 1, "P moves between the halves of registers"
    assert kernel.num_warps == tile.num_warps
    assert kernel.registers <= tile.max_registers
    assert kernel.ctas_per_sm >= tile.ctas_per_sm


def test_keys_of_more_than_2_to_the_31_elements() -> None:
    """Helion's index type is another there, and K and V came by pointers, with 233 spills."""
    (kernel,) = shared(compile_shape, 1, 10000, 2**23 + 2**20, 128, True, recipe=ha.FAST)
    if MEASURED:
        assert_8_bit_attention(kernel, tile_config(128, True), spilled=SPILLED_BY_WIDE_INDICES["keys"])
    else:
        # Of its loop's registers 62 spill under Triton 3.9 (docs/trust.md, Other Tritons).
        assert_sound(kernel)
        assert kernel.opcodes["UTMALDG"] > 0


MASKS: dict[str, dict[str, Any]] = {
    "window_causal": {"window": (100, -1), "causal": True, "recipe": ha.ACCURATE},
    "softcap": {"softcap": 50.0, "recipe": ha.FAST},
}
AT_64: dict[str, dict[str, Any]] = {
    "softcap_causal_blocks": {"softcap": 50.0, "causal": True, "recipe": IN_E4M3},
    "everything": {"window": (100, -1), "causal": True, "softcap": 50.0, "sinks": True, "recipe": ha.ACCURATE},
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("name", "D"), [("window_causal", 128), ("softcap", 64), *((m, 64) for m in AT_64)])
def test_masks_and_sinks(name: str, D: int) -> None:
    options = dict((MASKS | AT_64)[name])
    recipe = options.pop("recipe")
    tile = tile_config(D, "window" in options)
    kernel = shared(compile_attention, D, options.pop("causal", False), recipe=recipe, **options)
    assert_8_bit_attention(kernel, tile, recipe)
    assert_p_stays_in_place(kernel, tile, recipe, softcap="softcap" in options)
    assert products_in_flight(kernel), "ptxas waits for each product"
    assert kernel.registers <= tile.max_registers
    assert kernel.ctas_per_sm >= tile.ctas_per_sm


def keep_order(p8: torch.Tensor, bm: int, bn: int) -> torch.Tensor:
    return p8


def fours_in_order(x: torch.Tensor, bm: int, bn: int) -> torch.Tensor:
    return x.reshape(bm, bn // 16, 4, 2, 2)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("D", [128, 256])
def test_without_interleaved_keys_p_is_shuffled(D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the check above can fail, where P's bits come from scores and where P is cast."""
    monkeypatch.setattr(steps, "interleave_keys", keep_order)
    monkeypatch.setattr(schraudolph, "by_fours", fours_in_order)
    tile = tile_config(D, False)
    kernel = compile_attention(D, False)
    # [bm, bn] per program: a thread holds 64 values of a 64 x 128 tile on 4 warps, and moves them 4 to a register.
    packed_registers = tile.bm * tile.bn // (tile.num_warps * 32) // 4
    assert kernel.opcodes["SHFL"] >= packed_registers
    with pytest.raises(AssertionError, match="P moves between lanes"):
        assert_8_bit_attention(kernel, tile)


#: (D, D_v, H, M), and the programs that an SM must hold.
DECODED = {
    "d64": (64, 64, 64, 1, 4),
    "d64_32_rows": (64, 64, 64, 4, 3),
    "d128": (128, 128, 64, 1, 2),
    "d128_32_rows": (128, 128, 64, 4, 2),
    "d192_128": (192, 128, 64, 1, 1),
    "d256_32_rows": (256, 256, 64, 4, 1),
    "d512": (512, 512, 64, 1, 1),
}

#: The same with so many queries that `fp8_attn_prefill` is taken, and the instructions for spilled registers, all and
#: in the loop. Most are in the loop of pages that may be open, of which a program has one or two, and beside it.
PREFILLED: dict[str, tuple[int, int, dict[str, Any], int, tuple[int, int]]] = {
    "d64": (64, 64, {}, 4, (330, 8)),
    "d64_masked_large_pool": (64, 64, {"masked": True, "num_pages": 2**16}, 4, (450, 46)),
    "d128": (128, 128, {}, 3, (340, 8)),
    "d128_splits": (128, 128, {"num_splits": 2, "masked": True}, 3, (460, 54)),
    "d128_lse": (128, 128, {"return_lse": True, "k_mean": True}, 3, (340, 8)),
    "d128_softcap_mean": (128, 128, {"masked": True, "k_mean": True}, 3, (420, 32)),
    "d256": (256, 256, {}, 1, (305, 6)),
    "d512": (512, 512, {}, 1, (345, 14)),
    "d512_splits": (512, 512, {"num_splits": 2, "masked": True}, 1, (620, 60)),
    "d64_512_large_pool": (64, 512, {"num_pages": 2**16}, 1, (95, 2)),
}


#: The same of int8 keys.
PREFILLED_INT8: dict[str, tuple[int, int, dict[str, Any], int, tuple[int, int]]] = {
    "d128": (128, 128, {}, 3, (340, 6)),
    "d128_splits": (128, 128, {"num_splits": 2, "masked": True}, 3, (460, 54)),
    "d256": (256, 256, {}, 1, (310, 6)),
}


def assert_decoding(kernel: Sm90Kernel, ctas_per_sm: int, spilled: int = 0, int8_keys: bool = False) -> None:
    assert_sound(kernel, spilled)
    assert kernel.opcodes["QGMMA"] > 0, "no FP8 WGMMA"
    assert (kernel.opcodes["IGMMA"] > 0) == int8_keys
    assert kernel.opcodes["HGMMA"] + kernel.opcodes["HMMA"] == 0, "a product is not in FP8"
    assert kernel.opcodes["UTMALDG"] > 0, "K and V do not come by TMA"
    assert kernel.ctas_per_sm >= ctas_per_sm


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", DECODED)
def test_decoding(name: str) -> None:
    D, D_v, H, M, ctas_per_sm = DECODED[name]
    splits, decode, merge = shared(compile_decode, D, D_v, H, M, num_splits=2)
    # In the loop of pages that may be open.
    assert_decoding(decode, ctas_per_sm, {"d64": 10, "d64_32_rows": 68}.get(name, 0))
    opcodes = Counter(loop_of(decode))
    assert opcodes["LDL"] + opcodes["STL"] <= (name == "d64_32_rows")
    assert_sound(splits)
    assert_sound(merge)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["d128", "d512"])
def test_decoding_from_int8_keys(name: str) -> None:
    """As many programs an SM, nothing in memory, and no more barriers; a loop as of e4m3 keys."""
    D, D_v, H, M, ctas_per_sm = DECODED[name]
    _, decode, _ = shared(compile_decode, D, D_v, H, M, num_splits=2, recipe=ha.BALANCED)
    assert_decoding(decode, ctas_per_sm, int8_keys=True)
    _, e4m3, _ = shared(compile_decode, D, D_v, H, M, num_splits=2)
    assert loop_of(decode).count("BAR") <= loop_of(e4m3).count("BAR")
    assert len(loop_of(decode)) <= 1.1 * len(loop_of(e4m3))


@pytest.mark.thorough
def test_a_large_q_beside_a_mean() -> None:
    """Of more than 2**31 elements, where indices have 64 bits."""

    def launch() -> None:
        q = fake_cuda(2**31 + 6401, dtype=torch.bfloat16).as_strided((1, 2, 100, 64), (8, 2**31, 64, 1))
        cache = fake_cache(2048, 2, 64, 64, ha.BALANCED, k_mean=True)
        table, seqlens = fake_cuda(1, 32, dtype=torch.int32), fake_cuda(1, dtype=torch.int32)
        with launching():
            ha.attention_kvcache(q, cache, table, seqlens, num_splits=1, return_lse=True)

    for kernel in compile_for_sm90(launch):
        # Before the loop and behind it.
        assert_sound(kernel, 160)


@pytest.mark.thorough
@pytest.mark.parametrize(("D", "recipe"), [(165, ha.FAST), (505, ha.BALANCED)])
def test_prompts_of_unaligned_rows(D: int, recipe: ha.Recipe) -> None:
    """Q's layouts change in shared memory, which pages leave little of."""
    for kernel in compile_decode(D, D, 64, 16, num_splits=2, masked=True, recipe=recipe, k_mean=True):
        assert kernel.ctas_per_sm >= 1, f"{kernel.name} needs {kernel.shared_bytes} bytes"


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("name", "recipe"), [*((name, ha.FAST) for name in PREFILLED), *((name, ha.BALANCED) for name in PREFILLED_INT8)]
)
def test_prefill(name: str, recipe: ha.Recipe) -> None:
    int8_keys = recipe == ha.BALANCED
    D, D_v, options, ctas_per_sm, (spilled, in_loop) = (PREFILLED_INT8 if int8_keys else PREFILLED)[name]
    kernels = shared(compile_decode, D, D_v, 64, 16, recipe=recipe, **({"num_splits": 1} | options))
    (kernel,) = (x for x in kernels if "prefill" in x.name)
    assert len(kernels) == 1 + ("num_splits" in options) + ("k_mean" in options)
    opcodes, bits = Counter(loop_of(kernel)), takes_bits(torch.float8_e4m3fn, max(D, D_v))
    # A warp has 16 rows.
    scores = page_packing(D, D_v).page_size // 2
    exponentials, tanhs = 0 if bits else scores, scores if options.get("masked") else 0
    assert_decoding(kernel, ctas_per_sm, spilled, int8_keys)
    assert opcodes["LDL"] + opcodes["STL"] <= (in_loop if MEASURED else max(in_loop, SPILLED_IN_LOOP))
    assert opcodes["SHFL"] == 4, "a row's maximum alone crosses lanes"
    assert opcodes["LDS"] == 0, "scores pass through shared memory"
    assert opcodes["MUFU"] == 3 + exponentials + tanhs + ("num_splits" in options), (
        "exponentials, and an edge's quotients"
    )
    applied = {x.name for x in kernel.passes if x.applied}
    assert {"shared_q", "early_copies", "row_sums" if bits else "pingpong"} <= applied


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("D", "recipe"), [(128, ha.BALANCED), (256, ha.FAST)])
def test_a_step(D: int, recipe: ha.Recipe) -> None:
    """Sequences of different lengths take nothing from the loops."""
    kernels = {x.name: x for x in compile_step(D, 64, 2112, 65, 2, recipe)}
    assert len(kernels) == 6  # both kernels have a merge
    for name, spilled in (("append_kv", 0), ("close_full_pages", 0), ("merge_splits_kernel", 0)):
        assert_sound(kernels[f"_helion_{name}"], spilled)
    # Before and behind the loop, and in that of pages that may be open.
    for name, ctas_per_sm, spilled, in_loop in (("fp8_attn_decode", 2, 6, 0), ("fp8_attn_prefill", 3, 330, 20)):
        kernel = kernels[f"_helion_{name}"]
        assert_decoding(kernel, ctas_per_sm if D == 128 else 1, spilled, recipe == ha.BALANCED)
        opcodes = Counter(loop_of(kernel))
        assert opcodes["LDL"] + opcodes["STL"] <= in_loop


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("recipe", [ha.BALANCED, ha.FAST])
def test_a_step_of_a_large_pool(recipe: ha.Recipe) -> None:
    """Of more than 2**31 elements, where indices have 64 bits; the splits are chosen on the GPU."""
    small, kernels = (
        {x.name: x for x in compile_step(128, 64, 2112, 65, None, recipe, num_pages=pages)} for pages in (2048, 20000)
    )
    for name, spilled in (("append_kv", 0), ("close_full_pages", 0), ("dynamic_splits", 0), ("fp8_attn_decode", 50)):
        assert_sound(kernels[f"_helion_{name}"], spilled)
    opcodes = Counter(loop_of(kernels["_helion_fp8_attn_decode"]))
    assert opcodes["LDL"] + opcodes["STL"] <= 1
    for name in ("_helion_fp8_attn_decode", "_helion_fp8_attn_prefill"):
        assert kernels[name].opcodes["UTMALDG"] == small[name].opcodes["UTMALDG"] > 0


@pytest.mark.parametrize("M", [1, 16])
def test_a_sink_is_rounded_before_it_is_added(M: int) -> None:
    """No FMA of it with what maxima are shifted by: decoding and prompts have the same bits."""
    kernel = compile_decode(64, 64, 64, M, num_splits=1, masked=True, recipe=ha.BALANCED)[0]
    shift = struct.pack(">f", -float(MAX_P_OFFSET_LOG2[torch.float8_e4m3fn])).hex().upper()
    names = [line.split()[0] for line in kernel.ptx.splitlines() if line.rstrip().endswith(f", 0f{shift};")]
    assert "add.f32" in names, "a sink's shift"
    assert not any(name.startswith("fma.rn") for name in names)


#: (D, causal, recipe, options) of sequences of variable length.
VARLEN: dict[str, tuple[int, bool, ha.Recipe, dict[str, Any]]] = {
    **{f"d{D}-True": (D, True, ha.BALANCED, {}) for D in SUPPORTED_D[1:]},
    "everything": (64, True, ha.ACCURATE, {"window": (100, -1), "softcap": 50.0, "sinks": True}),
    "everything_d256": (256, False, ha.ACCURATE, {"window": (100, 5), "softcap": 50.0, "sinks": True}),
    "d192_v128": (192, True, ha.BALANCED, {"D_v": 128}),
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", VARLEN)
def test_variable_lengths(name: str) -> None:
    D, causal, recipe, options = VARLEN[name]
    # What `fake_varlen` launches is small: four heads of 10000 tokens.
    load = query_blocks_per_sm(4, 10000 // 64, 132)
    tile = attention_tile_config(D, D, causal or "window" in options, load=load)
    kernel = shared(compile_varlen, D, causal, recipe, **options)
    assert_8_bit_attention(kernel, tile, recipe)
    assert products_in_flight(kernel), "ptxas waits for each product"
    assert kernel.registers <= tile.max_registers
    assert kernel.ctas_per_sm >= tile.ctas_per_sm
    assert_p_stays_in_place(kernel, tile, recipe, softcap="softcap" in options)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("D", [64, 128])
def test_the_loop_is_as_long_as_without_sequences(D: int) -> None:
    fixed, varlen = (loop_of(shared(f, D, True, recipe=ha.BALANCED)) for f in (compile_attention, compile_varlen))
    assert len(varlen) <= AS_LONG * len(fixed)


#: (D, causal, recipe, options) of few queries on many keys.
SPLIT: dict[str, tuple[int, bool, ha.Recipe, dict[str, Any]]] = {
    **{
        f"d{D}-{'causal' if causal else 'full'}-{name}": (D, causal, PRESETS[name], {})
        for D, causal, name in (*((64, True, "balanced"), (128, True, "balanced"), (256, True, "balanced")),)
    },
    "everything_d128": (128, True, ha.ACCURATE, {"window": (9000, -1), "softcap": 50.0, "sinks": True}),
    "everything_d256": (256, False, ha.ACCURATE, {"window": (9000, 5), "softcap": 50.0, "sinks": True}),
}


#: What of these is spilled, and in their loop: beside the running maximum a row has its block's.
SPILLED_OF_SPLITS = {
    "d256-causal-balanced": {"spilled": 4},
    "everything_d128": {"spilled": 10, "spilled_in_loop": 2},
    "everything_d256": {"spilled": 11, "spilled_in_loop": 2},
}

#: Instructions for spilled registers, none in the loop, where indices have 64 bits.
SPILLED_BY_WIDE_INDICES = {"keys": 10, "split": 8, "varlen": 4}


def small_tile(D: int, causal: bool, recipe: ha.Recipe) -> TileConfig:
    """The config for a launch of few query blocks."""
    return tile_config(D, causal, recipe.bits, load=0.1)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", SPLIT)
def test_split_keys(name: str) -> None:
    D, causal, recipe, options = SPLIT[name]
    tile = small_tile(D, causal or "window" in options, recipe)
    kernel, merge = shared(compile_shape, 1, 100, 16384, D, causal, recipe=recipe, **options)
    assert_8_bit_attention(kernel, tile, recipe, **SPILLED_OF_SPLITS.get(name, {}))
    assert_p_stays_in_place(kernel, tile, recipe, softcap="softcap" in options)
    assert kernel.num_warps == tile.num_warps
    assert kernel.registers <= tile.max_registers
    assert kernel.ctas_per_sm >= tile.ctas_per_sm
    assert_sound(merge)
    assert 16 in widths(merge, "LDG")


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("D", "recipe"), [(64, ha.BALANCED), (256, ha.ACCURATE)], ids=["d64", "d256"])
def test_heads_that_share_tiles(D: int, recipe: ha.Recipe) -> None:
    """As many programs an SM, and their rows come in wide loads."""
    kernel, _merge = shared(compile_shape, 1, 16, 8192, D, True, recipe=recipe)
    tile = small_tile(D, True, recipe)
    # At D 256 the loads of Q spill, before the loop.
    assert_8_bit_attention(kernel, tile, recipe, spilled=16 if D == 256 else 0)
    assert kernel.ctas_per_sm >= tile.ctas_per_sm
    assert 16 in widths(kernel, "LDG")
    assert 1 not in widths(kernel, "LDG")


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_the_loop_is_as_long_as_without_splits(D: int) -> None:
    split, _ = shared(compile_shape, 1, 100, 16384, D, True, recipe=ha.BALANCED)
    one = shared(compile_attention, D, True, recipe=ha.BALANCED)
    # At D 256 the loop of a split moves indices from registers to uniform ones.
    assert len(loop_of(split)) <= max(AS_LONG, 1.03 if D == 256 else 0) * len(loop_of(one))


@pytest.mark.thorough
def test_split_keys_of_more_than_32_bits() -> None:
    """The index type is another, and K and V still come by TMA."""
    kernel, merge = shared(compile_shape, 1, 100, 12_000_000, 128, True, recipe=ha.BALANCED)
    tile = small_tile(128, True, ha.BALANCED)
    assert_8_bit_attention(kernel, tile, ha.BALANCED, spilled=SPILLED_BY_WIDE_INDICES["split"], spilled_in_loop=2)
    assert kernel.ctas_per_sm >= tile.ctas_per_sm
    assert_sound(merge)


@pytest.mark.thorough
def test_variable_lengths_of_more_than_32_bits() -> None:
    """The index type is another, and K and V still come by TMA."""
    kernel = shared(compile_varlen, 128, True, tokens=300_000, heads=64)
    assert_8_bit_attention(kernel, tile_config(128, True), ha.BALANCED, spilled=SPILLED_BY_WIDE_INDICES["varlen"])
    assert kernel.ctas_per_sm >= 3
