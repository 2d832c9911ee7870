"""Head dims above 256, and heads whose V is wider or narrower: results, configs, and the code of every config."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from devtools.sm90 import SHARED_BYTES_PER_SM, Sm90Kernel
from helion_attn.configs import (
    LARGE_TILE_CONFIGS,
    MAX_PIECE,
    LargeTileConfig,
    attention_tile_config,
    large_tile_config,
    largest_power_of_two,
    packing,
    uses_large_d,
)
from helion_attn.kernels.attention_large_d import fresh_channels
from helion_attn.testing import error_budget, relative_error
from helpers.cases import IN_E4M3, LARGE_SHIPPED, PRESETS, make_case, shipped_id
from helpers.offline import (
    HEADS,
    assert_sound,
    batch_for,
    compile_attention,
    compile_quantize,
    compile_shape,
    fake_qkv,
    products_in_flight,
    row_reduction_shuffles,
    widths,
)
from helpers.shared import shared

#: (D, D_v, H_kv, M, N, causal): padded and whole, one part of V and several, both kernels.
SHAPES = [
    (64, 128, 1, 70, 150, True),
    (128, 48, 2, 65, 129, False),
    (192, 128, 1, 130, 200, True),
    (320, 320, 2, 130, 150, False),
    (300, 200, 1, 20, 70, True),
    (448, 448, 2, 17, 70, True),
    (576, 512, 1, 17, 70, True),
    (640, 640, 2, 130, 63, True),
    (1024, 1024, 1, 17, 70, False),
]


@pytest.mark.parametrize(("D", "D_v", "H_kv", "M", "N", "causal"), SHAPES)
def test_errors(D: int, D_v: int, H_kv: int, M: int, N: int, causal: bool, device: str) -> None:
    case = make_case(make_qkv("randn", 1, 2, H_kv, M, N, D, device=device, D_v=D_v), causal)
    out, lse = case.run(torch.float32)
    assert out.shape == (1, 2, M, D_v)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)
    dequantized = ha.dequantize(ha.quantize(*case.qkv))
    assert [x.size(3) for x in dequantized] == [D, D, D_v]
    assert relative_error(dequantized[2], case.qkv[2]) < 0.05


@pytest.mark.parametrize("recipe", [ha.FAST, ha.ACCURATE], ids=["fast", "accurate"])
@pytest.mark.parametrize(("D", "D_v"), [(192, 128), (384, 384)])
def test_recipes(D: int, D_v: int, recipe: ha.Recipe, device: str) -> None:
    case = make_case(make_qkv("outlier", 1, 2, 1, 20, 140, D, device=device, D_v=D_v), True, recipe=recipe)
    out, lse = case.run(torch.float32)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)


#: Together with a recipe that shifts the lse, on shapes of one part of V and of several.
MASKS: dict[str, dict[str, Any]] = {
    "window": {"window": (40, 9)},
    "window_causal": {"window": (70, -1), "causal": True},
    "softcap": {"softcap": 2.0, "recipe": ha.ACCURATE},
    "sinks": {"sinks": [1.0, float("-inf")], "causal": True, "recipe": replace(IN_E4M3, smooth_k=True)},
    "everything": {"window": (50, 5), "softcap": 3.0, "sinks": [0.5, 4.0], "recipe": ha.ACCURATE},
}


@pytest.mark.parametrize(
    ("D", "D_v", "name"), [*((192, 128, name) for name in MASKS), (320, 384, "everything"), (320, 384, "window_causal")]
)
def test_masks_and_sinks(D: int, D_v: int, name: str, device: str) -> None:
    options = dict(MASKS[name])
    if "sinks" in options:
        options["sinks"] = torch.tensor(options["sinks"], device=device)
    case = make_case(make_qkv("biased_v", 1, 2, 1, 150, 140, D, device=device, D_v=D_v), **options)
    out, lse = case.run(torch.float32)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)


@pytest.mark.parametrize(("D", "D_v"), [(192, 128), (512, 512), (1024, 1024)])
def test_largest_int8_sums(D: int, D_v: int, device: str) -> None:
    """Sums up to 127**2 D, of both signs and odd: past 2**22, where the other kernel's reading of int32 ends."""
    q = torch.ones(1, 1, 3, D, device=device)
    k = torch.ones(1, 1, 9, D, device=device)
    for j in range(9):
        k[0, 0, j, : 100 * j] = -1
    k[0, 0, 1:, -1] = 0
    v = torch.arange(9.0, device=device).view(1, 1, 9, 1).repeat(1, 1, 1, D_v)
    recipe = replace(IN_E4M3, qk_dtype=torch.int8, center_v=False)
    packed = ha.quantize(q, k, v, recipe=recipe)
    assert packed.q8.amax() == packed.k8.amax() == 127
    assert packed.k8.amin() == -127
    for keys in (slice(None), slice(0, 1), slice(8, 9), slice(1, 2)):
        # Of a few keys, so that the lse is a score; differences of scores of 1 show as well.
        found = ha.attention(q, k[:, :, keys], v[:, :, keys], sm_scale=1.0, recipe=recipe, return_lse=True)
        expected = ha.reference.attention(q, k[:, :, keys], v[:, :, keys], sm_scale=1.0, return_lse=True)
        torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(found[0].double(), expected[0], rtol=0.02, atol=1e-6)


def test_rope(device: str) -> None:
    angles = torch.arange(90, device=device).unsqueeze(1) * torch.linspace(0.01, 1, 32, device=device)
    rope = ha.Rope(angles.cos(), angles.sin())
    case = make_case(make_qkv("randn", 1, 2, 1, 20, 90, 320, device=device), True, rope=rope)
    case.assert_within_budget(case.run(torch.float32)[0])


def test_bshd(device: str) -> None:
    qkv = make_qkv("randn", 2, 2, 1, 20, 70, 320, device=device, D_v=384)
    expected = ha.attention(*qkv)
    out = ha.attention(*(x.transpose(1, 2) for x in qkv), layout="bshd")
    assert torch.equal(out.transpose(1, 2), expected)


@pytest.mark.parametrize(("D", "D_v"), [(192, 128), (512, 512)])
def test_biased_v_at_many_keys(D: int, D_v: int, device: str) -> None:
    """Centred or in two levels, the sum of P V does not drift."""
    case = make_case(make_qkv("biased_v", 1, 1, 1, 2, 4096, D, device=device, D_v=D_v))
    out = case.run(torch.float32)[0]
    case.assert_within_budget(out)
    assert relative_error(out, case.oracle) <= 0.003


@pytest.mark.parametrize(("D", "D_v"), [(192, 128), (320, 320), (576, 512), (576, 288), (384, 384)])
def test_sums_of_every_head_dim_can_be_of_either_kind(D: int, D_v: int, device: str) -> None:
    """In two levels or in the tensor core, V comes in other pieces; both give what the rounding model does."""
    qkv = make_qkv("randn", 1, 2, 1, 37, 150, D, D_v=D_v, device=device)
    oracle = ha.reference.attention(*qkv)
    for promote_every in (0, 1):
        recipe = replace(IN_E4M3, promote_every=promote_every)
        model = relative_error(ha.reference.fp8_attention(*qkv, recipe=recipe), oracle)
        budget = error_budget(model, torch.bfloat16, device=device)
        assert relative_error(ha.attention(*qkv, recipe=recipe), oracle) <= budget


@pytest.mark.parametrize("D", [16, 64, 192, 256, 257, 448, 576, 900, 1024])
@pytest.mark.parametrize("D_v", [16, 128, 256, 300, 512, 1024])
def test_packing_holds_every_pair(D: int, D_v: int) -> None:
    found = packing(D, D_v)
    assert found.D_pad >= D
    assert found.D_v_pad >= D_v
    for causal in (False, True):
        tile = (large_tile_config if uses_large_d(D, D_v) else attention_tile_config)(D, D_v, causal)
        assert (tile.bm, tile.bn) == (found.bm, found.bn)
        if isinstance(tile, LargeTileConfig):
            assert found.D_pad == tile.D_pad
            assert found.D_v_pad % tile.v_tile == 0


def test_both_masks_have_a_config() -> None:
    default = [t for t in LARGE_TILE_CONFIGS if t.max_query_blocks_per_sm == math.inf]
    keys = [(t.D_pad, t.v_tile, t.causal) for t in default]
    assert len(set(keys)) == len(keys)
    assert set(keys) == {(D_pad, v_tile, causal) for D_pad, v_tile, _ in keys for causal in (False, True)}


#: Head dims of V that configs are for, where they are not D.
D_V = {(192, 128): 128, (576, 256): 512}

#: Instructions for spilled registers by V tile: 320 channels of sums leave the least room.
MAX_SPILLED = {128: 2, 320: 24}


def tensor_maps(kernel: Sm90Kernel) -> int:
    """The TMA descriptors, 128 bytes each, among a kernel's parameters."""
    return len(re.findall(r"\.param [^,)]*\[128\]", kernel.ptx))


def maps_of(tile: LargeTileConfig, recipe: ha.Recipe) -> int:
    """One for the wide pieces of K and of V each, and one for what is left of either."""
    widest = fresh_channels(tile.v_tile) if recipe.is_two_level(tile.two_level) else MAX_PIECE
    wide = [min(largest_power_of_two(d), most) for d, most in ((tile.D_pad, MAX_PIECE), (tile.v_tile, widest))]
    return 2 + (tile.D_pad % wide[0] > 0) + (tile.v_tile % wide[1] > 0)


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize(
    ("tile", "recipe"), [pytest.param(tile, name, id=f"{shipped_id(tile)}-{name}") for tile, name in LARGE_SHIPPED]
)
def test_shipped_config(tile: LargeTileConfig, recipe: str) -> None:
    D_v = D_V.get((tile.D_pad, tile.v_tile), tile.D_pad)
    assert large_tile_config(tile.D_pad, D_v, tile.causal, tile.max_query_blocks_per_sm) == tile
    kernel = shared(compile_attention, tile.D_pad, tile.causal, D_v=D_v, recipe=PRESETS[recipe], B=batch_for(tile))
    assert_sound(kernel, MAX_SPILLED.get(tile.v_tile, 0))
    assert kernel.opcodes["QGMMA"] > 0
    # int8 sums are converted one by one: the scores of a thread, and a few lengths.
    conversions = sum(count for name, count in kernel.opcodes.items() if name.startswith("I2F"))
    if recipe != "fast":
        assert kernel.opcodes["IGMMA"] > 0
        assert conversions >= tile.bm * tile.bn // (32 * tile.num_warps)
    assert products_in_flight(kernel), "ptxas waits for each product"
    assert tensor_maps(kernel) == maps_of(tile, PRESETS[recipe]), "a part of K or V does not come by TMA"
    assert 16 in widths(kernel, "LDG|LDGSTS")
    assert min(widths(kernel, "LDG|LDGSTS")) == 4, "Q is read narrowly"
    assert kernel.opcodes["SHFL"] <= row_reduction_shuffles(tile, PRESETS[recipe]), "P moves between lanes"
    assert kernel.shared_bytes <= SHARED_BYTES_PER_SM - 1024
    assert kernel.registers <= tile.max_registers
    assert kernel.ctas_per_sm >= tile.ctas_per_sm


@pytest.mark.thorough
def test_more_than_32_bits_of_elements() -> None:
    """The index type is another, and K and V still come by TMA: by pointers, 604 registers spilled."""
    (kernel,) = shared(compile_shape, 40, 32768, 32768, 576, True, recipe=ha.BALANCED, D_v=512)
    assert 40 * HEADS * 32768 * 576 > 2**31
    assert_sound(kernel)
    assert kernel.opcodes["UTMALDG"] > 0, "K and V do not come by TMA"
    assert kernel.ctas_per_sm >= large_tile_config(576, 512, True).ctas_per_sm


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("D", "D_v"), [(64, 128), (128, 64)])
def test_pairs_of_the_other_kernel_compile(D: int, D_v: int) -> None:
    kernel = shared(compile_attention, D, True, D_v=D_v)
    assert_sound(kernel)
    assert kernel.opcodes["QGMMA"] > 0
    assert kernel.ctas_per_sm >= attention_tile_config(D, D_v, True).ctas_per_sm


@pytest.mark.thorough
def test_preprocessing_compiles() -> None:
    D = 1024
    for kernel in compile_quantize(lambda: fake_qkv(2, 4, 2, 1000, 3000, D, D_v=D), recipe=PRESETS["accurate"]):
        assert_sound(kernel)


@pytest.mark.thorough
def test_masks_compile() -> None:
    options: dict[str, Any] = {"window": (100, 20), "softcap": 30.0, "sinks": True}
    kernel = shared(compile_attention, 640, False, recipe=ha.BALANCED, **options)
    assert_sound(kernel, MAX_SPILLED[320])
