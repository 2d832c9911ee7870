"""Head dims above 256, and heads whose V is wider or narrower: results, configs, and the code of every config."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from devtools.sm90 import SHARED_BYTES_PER_SM, Sm90Kernel
from helion_attn.configs import (
    LARGE_TILE_CONFIGS,
    MAX_PIECE,
    LargeTileConfig,
    large_tile_config,
    largest_power_of_two,
)
from helion_attn.kernels.attention_large_d import fresh_channels
from helion_attn.testing import error_budget, relative_error
from helpers.cases import IN_E4M3, LARGE_SHIPPED, PRESETS, make_case, shipped_id
from helpers.offline import (
    HEADS,
    assert_sound,
    batch_for,
    compile_attention,
    compile_shape,
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


@pytest.mark.thorough(but=4)
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


@pytest.mark.parametrize(("D", "D_v"), [(192, 128), (512, 512)])
def test_biased_v_at_many_keys(D: int, D_v: int, device: str) -> None:
    """Centred or in two levels, the sum of P V does not drift."""
    case = make_case(make_qkv("biased_v", 1, 1, 1, 2, 4096, D, device=device, D_v=D_v))
    out = case.run(torch.float32)[0]
    case.assert_within_budget(out)
    assert relative_error(out, case.oracle) <= 0.003


@pytest.mark.thorough(but=2)
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


def test_both_masks_have_a_config() -> None:
    default = [t for t in LARGE_TILE_CONFIGS if t.max_query_blocks_per_sm == math.inf]
    keys = [(t.D_pad, t.v_tile, t.has_right) for t in default]
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


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("tile", "recipe"), [pytest.param(tile, name, id=f"{shipped_id(tile)}-{name}") for tile, name in LARGE_SHIPPED]
)
def test_shipped_config(tile: LargeTileConfig, recipe: str) -> None:
    D_v = D_V.get((tile.D_pad, tile.v_tile), tile.D_pad)
    assert large_tile_config(tile.D_pad, D_v, tile.has_right, tile.max_query_blocks_per_sm) == tile
    kernel = shared(compile_attention, tile.D_pad, tile.has_right, D_v=D_v, recipe=PRESETS[recipe], B=batch_for(tile))
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
