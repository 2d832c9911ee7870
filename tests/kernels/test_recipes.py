"""`attention` with every recipe: out and lse against the fp64 oracle, within what the rounding model allows."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.testing import relative_error
from helpers.cases import IN_E4M3, PRESETS, RECIPES, Tensors, make_case

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def biased(kind: str, B: int, H: int, H_kv: int, M: int, N: int, D: int, device: str) -> Tensors:
    """K and V off centre besides, so that smoothing and centring do something."""
    q, k, v = make_qkv(kind, B, H, H_kv, M, N, D, device=device)
    return q, k + 2 * torch.linspace(-1, 1, D, dtype=k.dtype, device=device), v + 1


@pytest.mark.thorough(but=13)
@CAUSAL
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_recipe(recipe: ha.Recipe, causal: bool, device: str) -> None:
    case = make_case(biased("outlier", 1, 4, 2, 70, 300, 64, device), causal, recipe=recipe)
    out, lse = case.run(torch.float32)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)


def test_rotation_reflection_and_int8_are_worth_it(device: str) -> None:
    qkv = make_qkv("outlier", 1, 2, 2, 128, 512, 128, device=device)
    oracle = ha.reference.attention(*qkv)
    fast, balanced, accurate = (
        relative_error(ha.attention(*qkv, recipe=recipe, out_dtype=torch.float32), oracle)
        for recipe in PRESETS.values()
    )
    e4m3, int8 = (
        relative_error(
            ha.attention(*qkv, recipe=dataclasses.replace(recipe, reflect=False), out_dtype=torch.float32), oracle
        )
        for recipe in (ha.FAST, ha.BALANCED)
    )
    assert int8 < 0.85 * e4m3
    assert fast < 0.9 * e4m3
    assert balanced < 0.9 * int8
    assert accurate < 0.85 * int8


def test_lse_of_smoothed_k_is_of_the_original_scores(device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 1, 70, 200, 64, torch.float32, device)
    recipe = replace(IN_E4M3, smooth_k=True)
    # A common part of all keys moves all scores of row i by the same amount, and out not at all.
    common = 3.0
    out, lse = ha.attention(q, k, v, recipe=recipe, return_lse=True)
    shifted_out, shifted_lse = ha.attention(q, k + common, v, recipe=recipe, return_lse=True)
    expected = lse + q.sum(3) * common * 64**-0.5
    # The shift is about 3; what is left is of values that round the other way.
    assert (shifted_lse - expected).abs().max() < 0.05
    assert (shifted_lse - lse).abs().max() > 1
    assert relative_error(shifted_out, out) < 0.1
    # Without smoothing the common part takes K's bits.
    oracle = ha.reference.attention(q, k + common, v)
    not_smoothed = ha.attention(q, k + common, v, recipe=dataclasses.replace(recipe, smooth_k=False))
    assert relative_error(shifted_out, oracle) < 0.8 * relative_error(not_smoothed, oracle)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "qk_dtype": ({"qk_dtype": torch.float8_e5m2}, ["qk_dtype is torch.float8_e5m2", "torch.int8"]),
    "pv_dtype": ({"pv_dtype": torch.int8}, ["pv_dtype is torch.int8", "torch.float8_e5m2"]),
    "q_scales": ({"q_scales": "channel"}, ["q_scales is 'channel'", "'token'"]),
    "k_scales": ({"k_scales": "token"}, ["k_scales is 'token'", "'block'"]),
    "v_scales": ({"v_scales": "block"}, ["v_scales is 'block'", "'channel'"]),
    "hadamard_is_1": ({"hadamard": 1}, ["hadamard is 1", "True"]),
    "reflect_is_1": ({"reflect": 1}, ["reflect is 1", "True"]),
    "reflect_and_hadamard": (
        {"reflect": True, "hadamard": True},
        ["reflect and hadamard are both True", "one must be"],
    ),
    "equalise_16_bits": (
        {"qk_dtype": torch.bfloat16, "pv_dtype": torch.bfloat16, "equalise": True},
        ["equalise is True; with qk_dtype torch.bfloat16", "must be False"],
    ),
    "center_v_is_1": ({"center_v": 1}, ["center_v is 1", "True"]),
    "promote_every": ({"promote_every": 2}, ["promote_every is 2", "(None, 0, 1)"]),
    "seed_without_hadamard": ({"hadamard_seed": 1}, ["hadamard_seed is 1", "hadamard is False"]),
    "seed_negative": ({"hadamard": True, "hadamard_seed": -1}, ["hadamard_seed is -1", "0..2**63 - 1"]),
    "seed_too_large": (
        {"hadamard": True, "hadamard_seed": 2**63},
        ["hadamard_seed is 9223372036854775808", "0..2**63 - 1"],
    ),
    "seed_is_true": ({"hadamard": True, "hadamard_seed": True}, ["hadamard_seed is True", "an int"]),
    **{
        f"{field}_{value}": ({field: value}, [f"{field} is {value!r}", f"one of {accepted}"])
        for field, value, accepted in (
            ("q_scales", "head", "('block', 'token', 'none')"),
            ("q_scales", "tensor", "('block', 'token', 'none')"),
            ("k_scales", "tensor", "('head', 'block', 'none')"),
            ("v_scales", "tensor", "('head', 'channel', 'none')"),
        )
    },
    **{
        f"k_head_{name}": (
            {"k_scales": "head", "center_v": False, name: value},
            ["k_scales is 'head'", "helion_attn.pack", "'block'"],
        )
        for name, value in (
            ("qk_dtype", torch.int8),
            ("pv_dtype", torch.float8_e5m2),
            ("hadamard", True),
            ("reflect", True),
            ("smooth_k", True),
            ("center_v", True),
        )
    },
    "hybrid_scaled": ({"pv_dtype": torch.bfloat16, "v_scales": "head"}, ["v_scales is 'head'", "'none'", "bfloat16"]),
    "bf16_scaled": ({"qk_dtype": torch.bfloat16, "q_scales": "token"}, ["q_scales is 'token'", "'none'", "bfloat16"]),
    "bf16_k_scaled": ({"qk_dtype": torch.bfloat16, "k_scales": "block"}, ["k_scales is 'block'", "'none'", "bfloat16"]),
    "e4m3_unscaled": ({"q_scales": "none"}, ["q_scales is 'none'", "16-bit", "float8_e4m3fn"]),
    "int8_unscaled": ({"qk_dtype": torch.int8, "k_scales": "none"}, ["k_scales is 'none'", "int8", "16-bit"]),
    "e4m3_v_unscaled": ({"v_scales": "none"}, ["v_scales is 'none'", "16-bit", "float8_e4m3fn"]),
    "bf16_scores_of_8_bit_p": (
        {"qk_dtype": torch.bfloat16},
        ["pv_dtype is torch.float8_e4m3fn", "bfloat16 or float16"],
    ),
    "hybrid_promoted": (
        {"pv_dtype": torch.bfloat16, "v_scales": "none", "promote_every": 1},
        ["promote_every is 1", "bfloat16", "0 or None"],
    ),
    "hybrid_p_offset": (
        {"pv_dtype": torch.bfloat16, "v_scales": "none", "p_offset_log2": 1},
        ["p_offset_log2 is 1", "bfloat16", "0..0"],
    ),
    "p_offset_9": ({"p_offset_log2": 9}, ["p_offset_log2 is 9", "float8_e4m3fn", "0..8"]),
    "p_offset_16": (
        {"p_offset_log2": 16, "pv_dtype": torch.float8_e5m2},
        ["p_offset_log2 is 16", "float8_e5m2", "0..15"],
    ),
    "p_offset_negative": ({"p_offset_log2": -1}, ["p_offset_log2 is -1", "0..8"]),
    "p_offset_float": ({"p_offset_log2": 8.0}, ["p_offset_log2 is 8.0", "int"]),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_contradictions(what: str) -> None:
    fields, parts = CONTRADICTIONS[what]
    with pytest.raises(ValueError) as raised:
        replace(IN_E4M3, **fields)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize("name", RECIPES)
def test_defaults_are_spelt_out(name: str) -> None:
    recipe = RECIPES[name]
    largest = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15, torch.bfloat16: 0, torch.float16: 15}[recipe.pv_dtype]
    assert recipe.p_offset == (largest if recipe.p_offset_log2 is None else recipe.p_offset_log2)
    assert recipe == dataclasses.replace(recipe, p_offset_log2=recipe.p_offset)
    assert recipe != dataclasses.replace(recipe, smooth_k=not recipe.resolved.smooth_k)
    assert dataclasses.replace(recipe) == recipe
    assert hash(dataclasses.replace(recipe)) == hash(recipe)


#: Recipes by the one or two fields that imply all others, and what they are.
IMPLIED = {
    "hybrid": (ha.Recipe(pv_dtype=torch.bfloat16), ha.HYBRID),
    "bf16": (ha.Recipe(qk_dtype=torch.bfloat16, pv_dtype=torch.bfloat16), ha.BF16),
    "accurate": (ha.Recipe(hadamard=True, v_scales="channel"), ha.ACCURATE),
    "spelt out": (
        ha.Recipe(q_scales="token", k_scales="block", v_scales="head", reflect=True, smooth_k=True, center_v=True),
        ha.BALANCED,
    ),
    "promoted": (ha.Recipe(promote_every=1, p_offset_log2=8), ha.BALANCED),
    "hybrid, not promoted": (ha.Recipe(pv_dtype=torch.bfloat16, promote_every=0, p_offset_log2=0), ha.HYBRID),
}


@pytest.mark.parametrize("what", IMPLIED)
def test_fields_that_follow_from_others(what: str) -> None:
    recipe, preset = IMPLIED[what]
    assert recipe == preset
    assert hash(recipe) == hash(preset)
    assert repr(recipe) == repr(preset)
    found, expected = (dataclasses.asdict(x.resolved) for x in (recipe, preset))
    assert [name for name in found if found[name] is None and name not in ("promote_every", "p_offset_log2")] == []
    assert {**expected, "promote_every": 0, "p_offset_log2": 0} == {**found, "promote_every": 0, "p_offset_log2": 0}
    assert recipe.resolved == recipe
    assert repr(recipe.resolved) == repr(preset)
    assert recipe.resolved.resolved is recipe.resolved


#: A preset, one field of it, and what it becomes.
CHANGED: dict[str, tuple[ha.Recipe, dict[str, Any], ha.Recipe]] = {
    "balanced to hybrid": (ha.BALANCED, {"pv_dtype": torch.bfloat16}, ha.HYBRID),
    "hybrid to balanced": (ha.HYBRID, {"pv_dtype": torch.float8_e4m3fn}, ha.BALANCED),
    "hybrid to bf16": (ha.HYBRID, {"qk_dtype": torch.bfloat16}, ha.BF16),
    "bf16 to hybrid": (ha.BF16, {"qk_dtype": torch.int8}, ha.HYBRID),
    "accurate, not rotated": (ha.ACCURATE, {"hadamard": False}, ha.Recipe(v_scales="channel")),
    "balanced, rotated": (ha.BALANCED, {"hadamard": True}, ha.Recipe(hadamard=True)),
    "fast, rotated": (ha.FAST, {"hadamard": True}, replace(ha.FAST, hadamard=True, reflect=False)),
    "fast, in fp16": (ha.FAST, {"pv_dtype": torch.float16}, replace(ha.FAST, pv_dtype=torch.float16, v_scales="none")),
}


@pytest.mark.parametrize("what", CHANGED)
def test_presets_are_changed_in_one_field(what: str) -> None:
    preset, field, expected = CHANGED[what]
    assert replace(preset, **field) == expected


@pytest.mark.parametrize(
    "field",
    [{"pv_dtype": torch.bfloat16}, {"qk_dtype": torch.bfloat16, "pv_dtype": torch.bfloat16}, {"hadamard": True}],
    ids=str,
)
def test_the_recipe_of_packed_tensors_says_which_to_change(field: dict[str, Any], device: str) -> None:
    """It is resolved, and what `replace` keeps of it contradicts the field."""
    recipe = replace(ha.BALANCED, center_v=False)
    packed = ha.quantize(*make_qkv("randn", 1, 2, 2, 40, 40, 64, device=device), recipe=recipe)
    with pytest.raises(ValueError, match="of packed tensors, change the recipe that they were made with"):
        replace(packed.recipe, **field)
    assert replace(recipe, **field) != recipe


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_can_be_stored(name: str) -> None:
    """As what was asked, so that `replace` changes one field of them too."""
    recipe, file = RECIPES[name], io.BytesIO()
    hash(recipe)
    torch.save(recipe, file)
    file.seek(0)
    for stored in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe), torch.load(file, weights_only=True)):
        assert stored == recipe
        assert dataclasses.asdict(stored) == dataclasses.asdict(recipe)
        assert stored.resolved == recipe.resolved
