"""RoPE inside `quantize`: against the fp64 reference, alone and in front of everything else."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.configs import tile_config
from helion_attn.preprocess.lib.hadamard import hadamard_block
from helion_attn.reference.rope import apply_rope_qk
from helpers.cases import IN_E4M3, LADDER, PRESETS, RECIPES, make_case
from helpers.packing import assert_same_values, unpack_descales, unpack_values
from helpers.rotations import PAIRING, tables

PRESET = pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
ANY_BITS = pytest.mark.parametrize("recipe", LADDER.values(), ids=LADDER)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.mark.thorough(but=9)
@PRESET
@pytest.mark.parametrize(
    ("D", "rotary", "interleaved"),
    [
        *((32, 32, False), (48, 48, True), (64, 16, False), (80, 80, True)),
        *((96, 64, False), (128, 128, False), (128, 128, True), (192, 64, True), (256, 256, False)),
    ],
)
def test_attention(D: int, rotary: int, interleaved: bool, recipe: ha.Recipe, device: str) -> None:
    rope = tables(200, rotary, interleaved=interleaved, device=device)
    case = make_case(make_qkv("outlier", 1, 4, 2, 65, 200, D, device=device), True, recipe=recipe, rope=rope)
    out, lse = case.run(torch.float32)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)


@pytest.mark.thorough(but=13)
@PAIRING
@pytest.mark.parametrize("name", [*LADDER, "plain", "q_block", "hadamard_smooth_k", "reflect_smooth_k"])
@pytest.mark.parametrize(("D", "rotary"), [(48, 32), (128, 128), (256, 64)])
def test_values(D: int, rotary: int, name: str, interleaved: bool, device: str) -> None:
    rope = tables(150, rotary, norm=1.4, dtype=torch.bfloat16, interleaved=interleaved, device=device)
    qkv = make_qkv("outlier", 1, 4, 2, 65, 130, D, device=device)
    packed = ha.quantize(*qkv, recipe=RECIPES[name], rope=rope)
    model = ha.reference.quantize(*qkv, RECIPES[name], rope)
    for field, value in unpack_values(packed).items():
        expected = getattr(model, field)
        dtype, apart = getattr(packed, field).dtype, 0.0
        if RECIPES[name].hadamard and field != "v8" and dtype.itemsize == 2:
            # The rotation reads channels as bf16. One that lies between two of these, and goes the other way, moves its
            # row by that much of itself; 8 bits are coarser.
            apart = 2.0**-7 * expected.norm(dim=-1, keepdim=True) * hadamard_block(D) ** -0.5
        # Where fp32 sums differ in their last bit, a value may round the other way.
        assert_same_values(value[:, :, : expected.size(2), :D], expected, dtype, exact=False, apart=apart)
    for field, descale in unpack_descales(packed).items():
        torch.testing.assert_close(descale, getattr(model, field), rtol=1e-5, atol=0)


@CAUSAL
@pytest.mark.parametrize(("M", "N"), [(1, 1), (1, 200), (70, 200), (130, 130)])
def test_default_positions_are_aligned_to_the_last_key(M: int, N: int, causal: bool, device: str) -> None:
    rope = tables(N, 32, device=device)
    explicit = dataclasses.replace(
        rope,
        q_positions=torch.arange(N - M, N, device=device),
        k_positions=torch.arange(N, dtype=torch.int32, device=device),
    )
    qkv = make_qkv("randn", 2, 2, 1, M, N, 32, device=device)
    out, expected = (ha.attention(*qkv, causal=causal, rope=r) for r in (rope, explicit))
    assert torch.equal(out, expected)
    case = make_case(qkv, causal, rope=rope)
    case.assert_within_budget(out)


@PAIRING
@ANY_BITS
def test_positions_in_any_order(recipe: ha.Recipe, interleaved: bool, device: str) -> None:
    """And more queries than keys, which need positions."""
    generator = torch.Generator().manual_seed(0)
    rope = dataclasses.replace(
        tables(500, 32, interleaved=interleaved, device=device),
        q_positions=torch.randint(0, 500, (130,), generator=generator, dtype=torch.int32).to(device),
        k_positions=torch.randperm(500, generator=generator)[:70].to(device),
    )
    case = make_case(make_qkv("randn", 1, 4, 2, 130, 70, 48, device=device), recipe=recipe, rope=rope)
    case.assert_within_budget(case.run(torch.float32)[0])


@pytest.mark.thorough(but=10)
@pytest.mark.parametrize("position", [-1, 200, 2**31 - 1, 2**32 + 7, -(2**32)])
@ANY_BITS
def test_position_outside_the_table(recipe: ha.Recipe, position: int, device: str) -> None:
    """NaN are a query's row, with what shares its descale, and no other; of a key, the head's output."""
    qkv = make_qkv("randn", 1, 2, 1, 70, 200, 32, device=device)
    rope = tables(200, 32, device=device)
    at, keys_at = torch.arange(130, 200, device=device), torch.arange(200, device=device)
    clean = ha.attention(*qkv, recipe=recipe, rope=rope)
    at[13] = position
    out = ha.attention(*qkv, recipe=recipe, rope=dataclasses.replace(rope, q_positions=at))
    rows = torch.arange(70, device=device)
    bm = tile_config(32, has_right=False).bm
    outside = rows // bm == 13 // bm if recipe.resolved.q_scales == "block" else rows == 13
    assert out[:, :, outside].isnan().all()
    assert torch.equal(out[:, :, ~outside], clean[:, :, ~outside])
    keys_at[13] = position
    assert ha.attention(*qkv, recipe=recipe, rope=dataclasses.replace(rope, k_positions=keys_at)).isnan().all()


@pytest.mark.thorough(but=11)
@PAIRING
@pytest.mark.parametrize(("D", "S"), [(16, 1), (48, 63), (80, 65), (96, 129), (128, 7), (192, 33), (256, 66)])
@pytest.mark.parametrize("hadamard", [False, True], ids=["rope", "rope_hadamard"])
def test_stages(hadamard: bool, D: int, S: int, interleaved: bool, device: str) -> None:
    """What is cast, before it is: int8 rows hold 127 levels of their own largest value."""
    rope = tables(S, D, interleaved=interleaved, device=device)
    q, k, v = make_qkv("randn", 1, 2, 2, S, S, D, device=device)
    recipe = replace(IN_E4M3, qk_dtype=torch.int8, q_scales="token", hadamard=hadamard)
    packed = ha.quantize(q, k, v, recipe=recipe, rope=rope)
    q64, _ = apply_rope_qk(q, k, rope)
    if hadamard:
        q64 = ha.reference.hadamard(q64)
    cast = unpack_values(packed)["q8"][:, :, :S, :D] * unpack_descales(packed)["q_descale"].unsqueeze(3)
    half_a_level = q64.abs().amax(3, keepdim=True) / 127 * 0.5
    bf16 = torch.finfo(torch.bfloat16).eps if hadamard else 1e-5
    assert torch.all((cast - q64).abs() <= half_a_level * 1.001 + bf16 * q64.norm(dim=3, keepdim=True))


def table(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


GOOD: dict[str, Any] = {"cos": table(7, 16), "sin": table(7, 16)}

#: Fields that replace good ones; for M = 5, N = 7, D = 32.
BAD: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "table_too_short": ({"cos": table(6, 16), "sin": table(6, 16)}, ValueError, ["6 positions", "at least N = 7"]),
    "table_too_wide": ({"cos": table(7, 17), "sin": table(7, 17)}, ValueError, ["cos", "(7, 17)", "R <= 32"]),
    "table_rank": ({"cos": table(1, 7, 16)}, ValueError, ["cos", "(1, 7, 16)", "[positions, R / 2]"]),
    "empty_table": ({"cos": table(7, 0), "sin": table(7, 0)}, ValueError, ["cos", "(7, 0)"]),
    "shapes_differ": ({"sin": table(8, 16)}, ValueError, ["sin", "(8, 16)", "cos", "(7, 16)", "equal"]),
    "widths_differ": ({"sin": table(7, 8)}, ValueError, ["sin", "(7, 8)", "(7, 16)", "equal"]),
    "dtype": (
        {"cos": table(7, 16, dtype=torch.float64), "sin": table(7, 16, dtype=torch.float64)},
        TypeError,
        ["cos", "torch.float64", "float32"],
    ),
    "dtypes_differ": ({"sin": table(7, 16).float()}, TypeError, ["sin", "torch.float32", "same"]),
    "device": ({"sin": table(7, 16).to("meta")}, ValueError, ["sin", "meta", "cpu"]),
    "strided": ({"cos": table(16, 7).mT}, ValueError, ["cos", "contiguous"]),
    "not_a_tensor": ({"cos": [1.0]}, TypeError, ["cos is a list", "torch.Tensor"]),
    "positions_of_floats": (
        {"q_positions": torch.zeros(5)},
        TypeError,
        ["rope.q_positions is a Tensor of torch.float32 (5,); it must be an int32 or int64 tensor"],
    ),
    "q_positions_strided": (
        {"q_positions": torch.arange(10)[::2]},
        ValueError,
        ["rope.q_positions has strides (2,); it must be contiguous: pass rope.q_positions.contiguous()"],
    ),
    "k_positions_expanded": (
        {"k_positions": torch.zeros(1, dtype=torch.int32).expand(7)},
        ValueError,
        ["rope.k_positions has strides (0,); it must be contiguous"],
    ),
    "q_positions_too_many": (
        {"q_positions": torch.zeros(7, dtype=torch.int64)},
        ValueError,
        ["q_positions has shape (7,)", "(5,)"],
    ),
    "k_positions_rank": (
        {"k_positions": torch.zeros(1, 7, dtype=torch.int32)},
        ValueError,
        ["k_positions has shape (1, 7)", "(7,)"],
    ),
    "k_positions_device": (
        {"k_positions": torch.zeros(7, dtype=torch.int32, device="meta")},
        ValueError,
        ["k_positions", "meta", "cpu"],
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_rope(what: str) -> None:
    fields, error, parts = BAD[what]
    q, k = torch.zeros(1, 2, 5, 32), torch.zeros(1, 2, 7, 32)
    with pytest.raises(error) as raised:
        ha.quantize(q, k, k, rope=ha.Rope(**(GOOD | fields)))
    assert type(raised.value) is error
    for part in parts:
        assert part in str(raised.value)


def test_more_queries_than_keys_need_positions() -> None:
    q, k = torch.zeros(1, 2, 9, 32), torch.zeros(1, 2, 7, 32)
    with pytest.raises(ValueError, match=r"q_positions is None with 9 queries and 7 keys"):
        ha.attention(q, k, k, rope=ha.Rope(**GOOD))


def test_not_a_rope() -> None:
    q = torch.zeros(1, 2, 7, 32)
    with pytest.raises(TypeError, match=r"rope is a tuple; it must be a helion_attn.Rope"):
        ha.attention(q, q, q, rope=(table(7, 16), table(7, 16)))  # type: ignore[call-overload]


def test_strided_channels_are_refused() -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 20, 30, 32)
    with pytest.raises(ValueError, match=r"k has a last-dimension stride of 30; with rope it must be 1"):
        ha.quantize(q, k.mT.contiguous().mT, v, rope=tables(30, 32, device="cpu"))


#: How transformers' tables repeat the columns of this package's.
REPEATED = {"halves": lambda x: torch.cat([x, x], -1), "pairs": lambda x: x.repeat_interleave(2, -1)}


@pytest.mark.parametrize("how", REPEATED)
@pytest.mark.parametrize("rotary", [64, 32, 16])
def test_tables_with_every_column_twice_are_refused(rotary: int, how: str, device: str) -> None:
    """Of a partial rotation they would pass for tables of twice the channels, and give a wrong result."""
    rope = tables(30, rotary, device=device)
    twice = {name: REPEATED[how](getattr(rope, name)) for name in ("cos", "sin")}
    kept = f"..., :{rotary // 2}" if how == "halves" else "..., ::2"
    with pytest.raises(ValueError, match=rf"rope\.cos has shape \(30, {rotary}\).*transformers.*cos\[{kept}\]"):
        ha.Rope(**twice)
    with pytest.raises(ValueError, match=r"rope\.sin has shape"):
        dataclasses.replace(rope, sin=twice["sin"])
    # What the message says to pass is right.
    columns = slice(0, rotary // 2) if how == "halves" else slice(None, None, 2)
    halves = ha.Rope(**{name: x[:, columns].contiguous() for name, x in twice.items()})
    qkv = make_qkv("randn", 1, 2, 2, 20, 30, 64, device=device)
    assert torch.equal(ha.attention(*qkv, rope=halves), ha.attention(*qkv, rope=rope))


def test_transformers_own_tables_are_refused() -> None:
    """Full and partial rotation, as its models make the tables, [B, S, R]."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

    sizes: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2}
    positions = torch.arange(9).unsqueeze(0)
    for config, embedding in (
        (transformers.LlamaConfig(**sizes), LlamaRotaryEmbedding),
        (transformers.PhiConfig(**sizes, partial_rotary_factor=0.5), PhiRotaryEmbedding),
    ):
        cos, sin = embedding(config)(torch.zeros(1, 9, 128), positions)
        with pytest.raises(ValueError, match="as in the tables of transformers"):
            ha.Rope(cos[0], sin[0])


def test_tables_of_one_value_are_taken() -> None:
    """Position 0 alone: nothing is rotated, whichever columns there are."""
    ha.Rope(torch.ones(1, 16), torch.zeros(1, 16))


def test_tables_are_not_read_in_a_graph(device: str) -> None:
    def attend(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return ha.attention(q, q, q, rope=ha.Rope(cos, sin))

    torch._dynamo.reset()
    rope = tables(20, 32, device=device)
    q = make_qkv("randn", 1, 2, 2, 20, 20, 64, device=device)[0]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, rope.cos, rope.sin), attend(q, rope.cos, rope.sin))
