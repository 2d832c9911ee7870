"""What stands before attention, compiled for sm_90a without a GPU, and its machine code read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.sm90 import Sm90Kernel, compile_for_sm90, fake_cuda
from helion_attn.configs import MASK_BLOCK, MAX_PAGE_D, SUPPORTED_D
from helion_attn.numerics import RECENTRED_KEYS
from helion_attn.ops import varlen
from helion_attn.preprocess import block_means, mask_bits, pack_kv, pack_q, recentre, sample
from helion_attn.preprocess.append import PROMPT_NUMBERS
from helion_attn.problem import BlockMeansArgs, MaskBitsArgs
from helion_attn.types import Layout
from helion_attn.varlen import varlen_problem
from helpers.cases import IN_E4M3, PRESETS
from helpers.offline import (
    MEASURED,
    assert_sound,
    compile_append,
    compile_quantize,
    every_third,
    fake_cache,
    fake_qkv,
    fake_varlen,
    launching,
    undefined_pairs,
    widths,
    without,
)


def assert_preprocessing(kernels: list[Sm90Kernel], recipe: ha.Recipe = ha.BALANCED) -> None:
    for kernel in kernels:
        assert_sound(kernel)
        # 4 bytes: fp32 means, descales and partial results, and the rotation's signs.
        assert widths(kernel, "LDG|LDGSTS") <= {4, 8, 16}, f"{kernel.name} reads narrowly"
        # 8: a thread's part of fp32 vectors, V's maxima, K's mean and factors of channels. Rows are read in 16.
        of_8, of_16 = (
            len(re.findall(rf"\bLDG(?:STS)?(?:\.(?!{bits}\b)\w+)*\.{bits}\b", kernel.sass)) for bits in (64, 128)
        )
        reads_vectors = recipe.resolved.equalise or recipe.resolved.smooth_k
        packs = kernel.name in ("_helion_pack_kv", "_helion_pack_q")
        assert of_8 < (of_16 if packs and reads_vectors else 1), f"{kernel.name} reads narrowly"
    assert sum(16 in widths(kernel, "LDG|LDGSTS") for kernel in kernels) >= 2, "who reads the inputs?"
    assert any(16 in widths(kernel, "STG") for kernel in kernels)
    assert any(kernel.opcodes["HGMMA"] > 0 for kernel in kernels) == recipe.hadamard, "who rotates?"


LAYOUTS: dict[str, tuple[Layout, Callable[[], tuple[torch.Tensor, ...]]]] = {
    "bshd": ("bshd", lambda: fake_qkv(2, 4, 2, 1000, 3000, 128, layout="bshd")),
    "packed_bs3hd": ("bshd", lambda: fake_cuda(2, 3000, 3, 4, 128, dtype=torch.bfloat16).unbind(2)),
}


#: (D, recipe): two recipes, and both where tiles are the largest. `ROTATED` has others there.
PREPROCESSED = [(64, "accurate"), (128, "balanced"), (256, "balanced"), (256, "accurate")]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("D", "name"), PREPROCESSED)
def test_preprocessing(D: int, name: str) -> None:
    recipe = PRESETS[name]
    kernels = compile_quantize(lambda: fake_qkv(2, 4, 2, 1000, 3000, D), recipe=recipe)
    assert_preprocessing(kernels, recipe)
    # Of eight warps where rows are rotated, and otherwise of four.
    (of_q,) = (kernel for kernel in kernels if "pack_q" in kernel.name)
    assert of_q.ctas_per_sm >= (2 if recipe.hadamard and D > 64 else 3)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("D_v", [32, 576])
def test_mean_of_many_keys(D_v: int) -> None:
    """The sums of blocks are few; the slow path, for a head beyond its sample's room, costs the others no registers."""
    with without(sample, pack_kv, pack_q):
        (kernel,) = compile_quantize(lambda: fake_qkv(2, 4, 2, 1000, RECENTRED_KEYS, 64, D_v=D_v))
    assert "recentre" in kernel.name
    assert_sound(kernel)
    assert kernel.ctas_per_sm >= (1 if D_v == 576 else 2)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("D", "name"), [(32, "accurate"), (64, "balanced"), (64, "accurate"), (128, "balanced"), (128, "accurate")]
)
def test_packing_of_many_keys(D: int, name: str) -> None:
    """The sums of blocks leave an SM two programs of eight warps: with one, `quantize` took 18% longer."""
    with without(sample, pack_q, recentre):
        (kernel,) = compile_quantize(lambda: fake_qkv(1, 4, 4, 1000, RECENTRED_KEYS, D), recipe=PRESETS[name])
    assert "pack_kv" in kernel.name
    assert_sound(kernel)
    assert kernel.ctas_per_sm * kernel.num_warps >= 16


BF16, FP32 = torch.bfloat16, torch.float32

#: (D, recipe, interleaved, dtype of the tables): where tiles are the largest; with fp32 tables at 128 channels, where
#: there is a limit of registers.
ROTATED = [
    *((128, "balanced", True, BF16), (128, "accurate", False, FP32), (256, "balanced", False, BF16)),
]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("D", "name", "interleaved", "dtype"), ROTATED)
def test_preprocessing_with_rope(D: int, name: str, interleaved: bool, dtype: torch.dtype) -> None:
    recipe = PRESETS[name]

    def make_rope() -> ha.Rope:
        cos, sin = (fake_cuda(4096, D // 2, dtype=dtype) for _ in range(2))
        return ha.Rope(cos, sin, interleaved)

    kernels = compile_quantize(lambda: fake_qkv(2, 4, 2, 1000, 3000, D), recipe=recipe, make_rope=make_rope)
    assert_preprocessing(kernels, recipe)
    if not recipe.hadamard and dtype == BF16:
        assert kernels[-1].ctas_per_sm >= 3
    if dtype == FP32:
        assert all(kernel.ctas_per_sm >= 2 for kernel in kernels)


#: (D, recipe, interleaved or None for no RoPE, over heads).
NORMED = [
    *((64, "balanced", False, True), (128, "balanced", True, False)),
    *((128, "accurate", None, False), (256, "balanced", False, False)),
]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("D", "name", "interleaved", "over_heads"), NORMED)
def test_preprocessing_with_norms(D: int, name: str, interleaved: bool | None, over_heads: bool) -> None:
    def make_rope() -> ha.Rope:
        return ha.Rope(fake_cuda(4096, D // 2), fake_cuda(4096, D // 2), bool(interleaved))

    kernels = compile_quantize(
        lambda: fake_qkv(2, 4, 2, 1000, 3000, D, layout="bshd"),
        layout="bshd",
        recipe=PRESETS[name],
        make_rope=None if interleaved is None else make_rope,
        norm_channels=(4 * D, 2 * D) if over_heads else (D, D),
    )
    assert ("norm_factors" in kernels[0].name) == over_heads
    for kernel in kernels:
        # A tile of 128 keys by 128 channels, its angles and weights leave a few values no register.
        tight = "pack_kv" in kernel.name and D == 128 and interleaved is not None
        assert_sound(kernel, 32 if tight else 0)
        # 2 bytes: of the bf16 weights, which are a row.
        assert widths(kernel, "LDG|LDGSTS") <= ({4, 16} if "factors" in kernel.name else {2, 4, 8, 16})
        assert 16 in widths(kernel, "LDG|LDGSTS")
    if over_heads:
        # Loads of two or three heads, 8 KB each, are on their way at once: of six programs, more than memory's latency.
        assert kernels[0].ctas_per_sm >= 6
    if interleaved is not None:
        assert all(kernel.ctas_per_sm >= 2 for kernel in kernels)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_preprocessing_of_views(name: str) -> None:
    layout, make_qkv = LAYOUTS[name]
    assert_preprocessing(compile_quantize(make_qkv, layout=layout))


def strided_in_d(D: int) -> tuple[torch.Tensor, ...]:
    """Q, K and V."""
    return every_third(2, 4, 1000, D), every_third(2, 2, 3000, D), every_third(2, 2, 3000, D)


@pytest.mark.thorough
def test_preprocessing_of_strided_padded_channels() -> None:
    for kernel in compile_quantize(lambda: strided_in_d(40), recipe=ha.FAST):
        # Where every element has an address of its own, these take the registers of V's largest entries.
        assert_sound(kernel, 48)


@pytest.mark.thorough
def test_preprocessing_of_strided_padded_channels_of_variable_lengths() -> None:
    """With nothing in front of the cast, where the pairs were undefined."""

    def launch() -> None:
        with launching():
            *_, cu_q, cu_k = fake_varlen(147, 147)
            q, k, v = (every_third(S, heads, 147) for S, heads in ((10000, 4), (20000, 2), (20000, 2)))
            varlen.quantize(varlen_problem(q, k, v, cu_q, cu_k, recipe=IN_E4M3))

    for kernel in compile_for_sm90(launch):
        assert_sound(kernel)


@pytest.mark.thorough
@pytest.mark.skipif(not MEASURED, reason="the ptxas of another Triton makes none")
def test_constant_padding_makes_undefined_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the check can fail, and the number at run time is still needed: where nothing stands before the cast."""
    for module in (pack_kv, pack_q):
        monkeypatch.setattr(module, "row_channels", lambda d, d_at_run_time, d_step: d)
    packed = compile_quantize(lambda: strided_in_d(147), recipe=IN_E4M3)
    assert any(undefined_pairs(kernel.sass) for kernel in packed)


def test_packing() -> None:
    def launch() -> None:
        with launching():
            q, k, v = fake_qkv(2, 4, 2, 1000, 3000, 64, torch.float8_e4m3fn)
            torch.ops.helion_attn.pack(q, k, v)

    for kernel in compile_for_sm90(launch):
        assert_sound(kernel)
        assert 16 in widths(kernel, "LDG|LDGSTS")
        assert 16 in widths(kernel, "STG")


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("D", "dtype"), [*((D, BF16) for D in (*SUPPORTED_D, MAX_PAGE_D)), (64, FP32)])
def test_appending(D: int, dtype: torch.dtype) -> None:
    kernel, closing = compile_append(D, dtype)
    assert_sound(kernel)
    assert_sound(closing)
    assert 16 in widths(closing, "LDG"), "reads pages narrowly"
    assert 16 in widths(closing, "STG"), "stores pages narrowly"
    assert 16 in widths(kernel, "LDG"), "reads narrowly"
    # 16 keys of 32 or 64 channels are few for 128 threads.
    assert max(widths(kernel, "STG")) >= {32: 4, 64: 8}.get(D, 16), "stores V a byte at a time"


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("D", [40, 147])
def test_appending_strided_padded_channels(D: int) -> None:
    assert_sound(compile_append(D, torch.float16, L=600, strided=True)[0])


#: (D, dtype, interleaved or None for no RoPE, recipe).
PROMPTS = [
    *((64, BF16, None, ha.FAST), (128, BF16, None, ha.FAST), (128, BF16, False, ha.FAST), (128, BF16, True, ha.FAST)),
    *((128, FP32, None, ha.FAST), (256, BF16, None, ha.FAST), (128, BF16, None, ha.BALANCED)),
    (128, BF16, True, ha.BALANCED),
]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("D", "dtype", "interleaved", "recipe"), PROMPTS)
def test_appending_a_prompt(D: int, dtype: torch.dtype, interleaved: bool | None, recipe: ha.Recipe) -> None:
    """Loads of K and V are on their way at once, of three programs enough for the memory's bandwidth: 40 KB an SM."""
    kernel, _ = compile_append(D, dtype, interleaved, L=4096, recipe=recipe, k_mean=recipe == ha.BALANCED)
    assert_sound(kernel)
    # K's and V's 8192 bytes each, and zeros of a page. A byte at a time goes V at the ends.
    wide = 2 * PROMPT_NUMBERS + 128 * D
    assert kernel.sass.count("STG.E.128") == wide // (16 * 128), "stores K, V or zeros narrowly"
    before_stores, _, _ = kernel.sass.partition("STG")
    loads = before_stores.count("LDG.E.128")
    assert loads >= 2 * PROMPT_NUMBERS * dtype.itemsize // (16 * 128), "waits for K before it loads V"
    assert kernel.ctas_per_sm >= 3


@pytest.mark.parametrize(("N", "width"), [(4096, 16), (4100, 4)])
def test_bits_of_a_mask(N: int, width: int) -> None:
    """Loads are as wide as rows are aligned, and instructions few enough for the memory's bandwidth."""

    def launch() -> None:
        with launching():
            mask_bits.launch(MaskBitsArgs(fake_cuda(1, 2, 1000, N, dtype=torch.bool), N))

    (kernel,) = compile_for_sm90(launch)
    assert_sound(kernel)
    assert widths(kernel, "LDG") == {width}
    assert kernel.opcodes["LDG"] == MASK_BLOCK**2 // (32 * width)
    # A warp has 16 KB: at 2,000 instructions, an SM's four schedulers read 7.6 TB/s, twice what the memory gives.
    assert width < 16 or sum(kernel.opcodes.values()) < 2000
    assert width < 16 or kernel.opcodes["BAR"] == 0
    # Narrow loads need an address each; 8 warps still have 128 KB on their way.
    assert kernel.ctas_per_sm >= (16 if width == 16 else 8)


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize(("D", "dtype"), [(64, BF16), (128, BF16), (96, torch.float16), (256, FP32)])
def test_means_of_blocks(D: int, dtype: torch.dtype) -> None:
    """16 bytes a load, and of them enough on their way for the memory's bandwidth: 40 KB an SM."""

    def launch() -> None:
        with launching():
            block_means.launch(BlockMeansArgs(fake_cuda(1, 2, 3000, D, dtype=dtype)))

    (kernel,) = compile_for_sm90(launch)
    assert_sound(kernel)
    assert widths(kernel, "LDG") == {16}
    assert kernel.ctas_per_sm * kernel.opcodes["LDG"] * 128 * 16 >= 40_000


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("options", [{"keep": 0.25}, {"mass": 0.9, "causal": True}], ids=["keep", "mass"])
def test_top_blocks(options: dict[str, Any]) -> None:
    """Five launches. The one that chooses waits for one load after the other, and has several programs an SM."""

    def launch() -> None:
        with launching():
            ha.masks.top_blocks(*(fake_cuda(2, 4, 4096, 128, dtype=BF16) for _ in range(2)), **options)

    kernels = compile_for_sm90(launch)
    assert len(kernels) == 5
    for kernel in kernels:
        assert_sound(kernel)
    (choosing,) = (kernel for kernel in kernels if "top_blocks" in kernel.name)
    assert choosing.ctas_per_sm >= 4
    assert choosing.opcodes["HMMA"] > 0


@pytest.mark.thorough
def test_top_pages() -> None:
    """Two launches, of programs of which an SM holds several."""

    def launch() -> None:
        with launching():
            cache = fake_cache(64, 8, 128, 128, ha.BALANCED)
            means = fake_cuda(65, 8, 128, dtype=BF16)
            tables = fake_cuda(4, 1000, dtype=torch.int32), fake_cuda(4, dtype=torch.int32)
            ha.pages.top(fake_cuda(4, 32, 1, 128, dtype=BF16), means, cache, *tables, pages=64)

    scoring, choosing = compile_for_sm90(launch)
    for kernel in (scoring, choosing):
        assert_sound(kernel)
        assert kernel.ctas_per_sm >= 3
    assert scoring.opcodes["HMMA"] > 0
    assert max(widths(scoring, "LDG")) == 16
