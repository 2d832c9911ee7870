"""V with a descale a block of keys: K and V are read once, and a sum changes its units from block to block."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.configs import large_tile_config, tile_config
from helion_attn.numerics import SAMPLED_KEYS, V_BLOCK_RANGE_LOG2
from helion_attn.preprocess.lib import powers
from helion_attn.testing import make_qkv, relative_error
from helpers.cases import make_case
from helpers.offline import (
    assert_sound,
    compile_attention,
    compile_quantize,
    compile_quantize_varlen,
    compile_shape,
    compile_varlen,
    fake_qkv,
    loop_of,
)
from helpers.packing import unpack_descales

FAST = dataclasses.replace(ha.FAST, k_scales="block", v_scales="block", smooth_k=True)
BALANCED = dataclasses.replace(ha.BALANCED, v_scales="block", smooth_k=True)
NOT_CENTRED = dataclasses.replace(FAST, center_v=False)
E5M2 = dataclasses.replace(FAST, pv_dtype=torch.float8_e5m2)


def by_blocks(v: torch.Tensor, exponents: list[int]) -> torch.Tensor:
    """V whose blocks of 128 keys are times powers of two."""
    scale = torch.tensor([2.0**e for e in exponents], device=v.device).repeat_interleave(128)[: v.size(2)]
    return (v.float() * scale[:, None]).to(v.dtype)


#: What multiplies the blocks of V, of 700 keys.
EXPONENTS = {
    "alternating": [0, 20, 0, 20, 0, 20],
    "rising": [-20, -12, -4, 4, 12, 20],
    "falling": [20, 12, 4, -4, -12, -20],
    "tiny": [-90] * 6,
    "huge": [100] * 6,
}


@pytest.mark.parametrize("recipe", [FAST, NOT_CENTRED, E5M2], ids=["fast", "not_centred", "e5m2"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", EXPONENTS)
def test_scales_that_change(name: str, causal: bool, recipe: ha.Recipe, device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 1, 300, 700, 64, device=device)
    case = make_case((q, k, by_blocks(v, EXPONENTS[name])), causal=causal, recipe=recipe)
    out, lse = case.run(torch.float32)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)


@pytest.mark.parametrize("D", [64, 256, 320, 512])
def test_scales_that_change_in_every_kernel(D: int, device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 1, 70, 400, D, device=device)
    case = make_case((q, k, by_blocks(v, [0, 20, -20, 3])), causal=True, recipe=BALANCED)
    case.assert_within_budget(case.run(torch.float32)[0])


@pytest.mark.parametrize("zeros", [[0], [2], [5], [0, 1, 2], [0, 1, 2, 3, 4, 5]], ids=str)
@pytest.mark.parametrize("recipe", [FAST, NOT_CENTRED], ids=["centred", "not_centred"])
def test_blocks_of_zeros(recipe: ha.Recipe, zeros: list[int], device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 1, 100, 700, 64, device=device)
    for block in zeros:
        v[:, :, block * 128 : block * 128 + 128] = 0
    case = make_case((q, k, v), recipe=recipe, window=(400, 0))
    out, _lse = case.run(torch.float32)
    assert out.isfinite().all()
    if len(zeros) < 6:
        case.assert_within_budget(out)
    else:
        assert torch.all(out == 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("key", [0, 333], ids=["sampled", "not_sampled"])
def test_what_is_not_finite_shows_where_it_is_seen(key: int, value: float, device: str) -> None:
    """In every row that sees its block, and in no row before; in lse nowhere."""
    q, k, v = make_qkv("randn", 1, 1, 1, 700, 700, 64, device=device)
    assert (key % (700 // SAMPLED_KEYS) == 0) == (key == 0)
    v[0, 0, key, 5] = value
    out, lse = ha.attention(q, k, v, causal=True, recipe=NOT_CENTRED, return_lse=True)
    first = key // 128 * 128
    # Queries come in blocks, too: what a block's rows do not see they multiply by 0.
    assert out[0, 0, key:].isnan().all()
    assert out[0, 0, : first // 128 * 128].isfinite().all()
    assert lse.isfinite().all()


def test_entries_beyond_the_range_of_the_sample(device: str) -> None:
    """Small ones vanish, as beside the large ones of a head's descale; large ones are NaN, and not finite."""
    q, k, v = make_qkv("randn", 1, 1, 1, 100, 700, 64, device=device)
    sampled = torch.arange(0, 700, 700 // SAMPLED_KEYS)[:SAMPLED_KEYS]
    others = torch.ones(700, dtype=torch.bool)
    others[sampled] = False
    large = v.clone()
    large[:, :, others.to(device)] *= 2.0 ** (V_BLOCK_RANGE_LOG2 + 8)
    assert ha.attention(q, k, large, recipe=NOT_CENTRED).isnan().all()
    small = by_blocks(v, [0, -V_BLOCK_RANGE_LOG2 - 20, 0, 0, 0, 0])
    case = make_case((q, k, small), recipe=NOT_CENTRED)
    case.assert_within_budget(case.run(torch.float32)[0])


@pytest.mark.parametrize("N", [1, 100, 256, 300, 700, 1000])
def test_means_are_those_of_the_sample(N: int, device: str) -> None:
    """And V's, afterwards, that of V."""
    q, k, v = make_qkv("biased_v", 2, 2, 1, 3, N, 64, device=device)
    packed = ha.quantize(q, k, v, recipe=BALANCED)
    samples = min(N, SAMPLED_KEYS)
    keys = torch.arange(samples, device=device) * (N // samples)
    assert packed.k_mean is not None
    torch.testing.assert_close(packed.k_mean[..., :64], k[:, :, keys].float().mean(2), rtol=1e-4, atol=1e-5)
    _q, _k, dequantized = ha.dequantize(packed)
    torch.testing.assert_close(dequantized.mean(2), v.float().mean(2), rtol=1e-5, atol=1e-5)
    assert torch.all(torch.frexp(unpack_descales(packed)["v_descale"]).mantissa == 0.5), "powers of two"


def test_rope_moves_the_sampled_keys(device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 1, 20, 1000, 64, device=device)
    angles = torch.arange(2000, device=device)[:, None] * 100.0 ** -(torch.arange(32, device=device) / 32)
    positions = torch.arange(1000, device=device) * 2
    for rope in (
        ha.Rope(angles.cos(), angles.sin()),
        ha.Rope(angles.cos(), angles.sin(), q_positions=positions[:20], k_positions=positions),
    ):
        case = make_case((q, k + 3, v), recipe=BALANCED, rope=rope)
        out, lse = case.run(torch.float32)
        case.assert_within_budget(out)
        case.assert_lse_within_budget(lse)


@pytest.mark.parametrize(
    ("amax", "sampled", "expected"),
    [
        (448.0, 448.0, 0),
        (449.0, 448.0, 1),
        (1.0, 1.0, -8),
        (0.0, 448.0, -V_BLOCK_RANGE_LOG2),
        (0.0, 0.0, -V_BLOCK_RANGE_LOG2),
        (448.0 * 2.0**V_BLOCK_RANGE_LOG2, 448.0, V_BLOCK_RANGE_LOG2),
        (450.0 * 2.0**V_BLOCK_RANGE_LOG2, 448.0, None),
        (math.inf, 448.0, None),
        (math.nan, 448.0, None),
        (448.0, math.inf, 0),
        (448.0, math.nan, 0),
        (0.0, 2.0**-120, -126),
        (3e38, 3e38, 120),
    ],
)
def test_descales(amax: float, sampled: float, expected: int | None) -> None:
    descale, invalid = powers.block_descale(torch.tensor(amax), torch.tensor(sampled), 448.0, V_BLOCK_RANGE_LOG2)
    assert bool(invalid) == (expected is None)
    assert descale.item() == 2.0 ** (expected or 0)


@pytest.mark.parametrize("kind", ["randn", "k_channels", "qk_channels", "v_drifts"])
def test_errors(kind: str, device: str) -> None:
    """Not above those of the head's descales and whole means; far below where K's channels are biased."""
    q, k, v = make_qkv(kind, 1, 2, 2, 64, 4096, 64, device=device)
    expected = ha.reference.attention(q, k, v)
    assert isinstance(expected, torch.Tensor)

    def error(recipe: ha.Recipe) -> float:
        return relative_error(ha.attention(q, k, v, recipe=recipe), expected)

    for blocks, heads in ((FAST, ha.FAST), (BALANCED, ha.BALANCED)):
        assert error(blocks) <= (0.85 if kind.endswith("channels") else 1.0) * error(heads)


#: More instructions of the loop: a load, its address, and the change of units.
MORE = 20


@pytest.mark.parametrize(("D", "causal"), [(64, True), (128, False), (256, True), (512, False)])
def test_kernels_keep_their_passes(D: int, causal: bool) -> None:
    heads, blocks = (
        compile_attention(D, causal, recipe=recipe, D_v=D)
        for recipe in (dataclasses.replace(BALANCED, v_scales="head"), BALANCED)
    )
    assert_sound(blocks)
    assert [x.applied for x in blocks.passes] == [x.applied for x in heads.passes]
    assert len(loop_of(blocks)) <= len(loop_of(heads)) + MORE
    tile = tile_config(D, causal) if D <= 256 else large_tile_config(D, D, causal)
    assert blocks.ctas_per_sm >= tile.ctas_per_sm


def test_split_keys_compile() -> None:
    kernel, merge = compile_shape(1, 100, 16384, 128, True, recipe=BALANCED)
    assert_sound(kernel)
    assert_sound(merge)


@pytest.mark.parametrize("D", [128, 576])
def test_preprocessing_reads_once(D: int) -> None:
    """No pass over K or V before the one that packs: what comes first is as small as the sample."""
    kernels = compile_quantize(lambda: fake_qkv(1, 4, 2, 1000, 30000, D), recipe=BALANCED)
    assert [kernel.name.removeprefix("_helion_") for kernel in kernels] == ["sample", "pack", "add_lost"]
    for kernel in kernels:
        assert_sound(kernel)


@pytest.mark.parametrize("D", [64, 256])
def test_packed_sequences(D: int, device: str) -> None:
    """Each gets what it gets alone, bit for bit: means, descales and what rounding took are its own."""
    lengths = [300, 0, 129, 700, 1]
    tokens = sum(lengths)
    q, k, v = (x[0].transpose(0, 1) for x in make_qkv("biased_v", 1, 2, 2, tokens, tokens, D, device=device))
    sizes = torch.tensor([1, 1, 2.0**20, 2.0**-20, 1]).repeat_interleave(torch.tensor(lengths))
    v = v * sizes[:, None, None].to(v)
    table = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    options: dict[str, Any] = {"causal": True, "recipe": BALANCED, "return_lse": True}
    out, lse = ha.attention_varlen(q, k, v, table, table, **options)
    for begin, end in itertools.pairwise(table.tolist()):
        if begin < end:
            alone = (x[begin:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            its_out, its_lse = ha.attention(*alone, num_splits=1, **options)
            assert torch.equal(out[begin:end].transpose(0, 1), its_out[0])
            assert torch.equal(lse[:, begin:end], its_lse[0])


@pytest.mark.parametrize("D", [64, 256])
def test_packed_sequences_compile(D: int) -> None:
    attention, *before = compile_varlen(D, True, recipe=BALANCED), *compile_quantize_varlen(D, BALANCED)
    # Of 128 registers one goes and comes back, once, around the loop.
    assert_sound(attention, spilled=2 if D == 64 else 0)
    assert {"LDL", "STL"}.isdisjoint(loop_of(attention))
    for kernel in before:
        assert_sound(kernel)
