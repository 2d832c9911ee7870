"""The checks of the other files, shown to fail on what they are there to catch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.testing import error_budget, relative_error
from helpers.cases import SIXTEEN_BIT, Case, make_case
from helpers.packing import stored_at

Mutation = Callable[[ha.QuantizedQKV], ha.QuantizedQKV]


@functools.cache
def case(causal: bool, device: str) -> Case:
    """GQA, heads of unequal magnitude, V off centre, nothing a whole number of blocks."""
    q, k, v = make_qkv("biased_v", 2, 4, 2, 65, 111, 64, torch.float32, device)
    q, k, v = (x * torch.linspace(0.5, 2, x.size(1), device=device)[:, None, None] for x in (q, k, v))
    return make_case((q, k, v), causal)


def replacing(**fields: Callable[[ha.QuantizedQKV], torch.Tensor]) -> Mutation:
    return lambda qkv: dataclasses.replace(qkv, **{name: make(qkv) for name, make in fields.items()})  # type: ignore[arg-type]


def without_interleave(qkv: ha.QuantizedQKV) -> torch.Tensor:
    """V's keys in their natural order: packed by someone who did not read the format."""
    position = stored_at(torch.arange(qkv.v8.size(3), device=qkv.v8.device))
    return qkv.v8.view(torch.int8)[..., position].view(qkv.v8.dtype)


def transposed_blocks(qkv: ha.QuantizedQKV) -> torch.Tensor:
    """The blocks of 16-bit V as those of 8 bits lie: [D_v_pad, bn], read as [bn, D_v_pad]."""
    return qkv.v8.transpose(2, 3).contiguous().view(qkv.v8.shape)


def interleaved(qkv: ha.QuantizedQKV) -> torch.Tensor:
    """The keys of 16-bit V in the order of 8 bits."""
    v8 = torch.empty_like(qkv.v8)
    v8[:, :, stored_at(torch.arange(v8.size(2), device=v8.device))] = qkv.v8
    return v8


def next_key(x8: torch.Tensor) -> torch.Tensor:
    """[BH, blocks, block, D_pad], every row replaced by the one after it."""
    return x8.view(torch.int8).flatten(1, 2).roll(-1, 1).view(x8.dtype).view(x8.shape)


MUTATIONS: dict[str, Mutation] = {
    "q_descale_of_another_head": replacing(q_descale=lambda x: x.q_descale.roll(1, 1)),
    "k_descale_of_another_head": replacing(k_descale=lambda x: x.k_descale.flip(1).contiguous()),
    "v_descale_of_another_head": replacing(v_descale=lambda x: x.v_descale.flip(1).contiguous()),
    "k_and_v_descales_swapped": replacing(
        k_descale=lambda x: x.v_descale[:, :, :1].contiguous(),
        v_descale=lambda x: x.k_descale.expand_as(x.v_descale).contiguous(),
    ),
    "q_descale_as_quantising_scale": replacing(q_descale=lambda x: 1 / x.q_descale),
    "kv_head_of_another_group": replacing(
        k8=lambda x: x.k8.view(torch.int8).roll(1, 0).view(x.k8.dtype),
        v8=lambda x: x.v8.view(torch.int8).roll(1, 0).view(x.v8.dtype),
    ),
    "v_not_interleaved": replacing(v8=without_interleave),
    "v_mean_left_out": replacing(v_mean=lambda x: torch.zeros_like(x.v_mean)),
    "v_mean_of_another_head": replacing(v_mean=lambda x: x.v_mean.flip(1).contiguous()),
    "keys_off_by_one": replacing(k8=lambda x: next_key(x.k8)),
    "queries_off_by_one": replacing(q8=lambda x: next_key(x.q8)),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_exceeds_the_budget(mutation: str, causal: bool, device: str) -> None:
    healthy = case(causal, device)
    packed = ha.quantize(*healthy.qkv)
    healthy.assert_within_budget(ha.attention_quantized(packed, causal=causal))
    out = ha.attention_quantized(MUTATIONS[mutation](packed), causal=causal)
    with pytest.raises(AssertionError, match="budget"):
        healthy.assert_within_budget(out)


SIXTEEN_BIT_MUTATIONS: dict[str, Mutation] = {
    "v_transposed": replacing(v8=transposed_blocks),
    "v_interleaved": replacing(v8=interleaved),
    "values_off_by_one": replacing(v8=lambda x: next_key(x.v8)),
}


@pytest.mark.parametrize("recipe", SIXTEEN_BIT.values(), ids=SIXTEEN_BIT)
@pytest.mark.parametrize("mutation", SIXTEEN_BIT_MUTATIONS)
def test_v_of_16_bits_laid_out_otherwise_exceeds_the_budget(mutation: str, recipe: ha.Recipe, device: str) -> None:
    healthy = make_case(case(False, device).qkv, recipe=recipe)
    packed = ha.quantize(*healthy.qkv, recipe=recipe)
    healthy.assert_within_budget(ha.attention_quantized(packed))
    with pytest.raises(AssertionError, match="budget"):
        healthy.assert_within_budget(ha.attention_quantized(SIXTEEN_BIT_MUTATIONS[mutation](packed)))


@functools.cache
def accurate_case(device: str) -> Case:
    """Rows, key blocks and channels of unequal magnitude, K and V off centre."""
    q, k, v = make_qkv("randn", 1, 4, 2, 65, 300, 64, torch.float32, device)
    q = q * torch.linspace(0.5, 2, 65, device=device)[:, None]
    k = k * torch.linspace(0.25, 2, 300, device=device)[:, None] + torch.linspace(-1, 1, 64, device=device)
    v = v * torch.linspace(0.25, 2, 64, device=device) + 1
    return make_case((q, k, v), recipe=ha.ACCURATE)


ACCURATE_MUTATIONS: dict[str, Mutation] = {
    "q_descale_of_another_row": replacing(q_descale=lambda x: x.q_descale.roll(8, 3)),
    "k_descale_of_another_block": replacing(k_descale=lambda x: x.k_descale.roll(1, 2)),
    "k_descale_of_the_first_block": replacing(k_descale=lambda x: x.k_descale[:, :, :1].repeat(1, 1, 3)),
    "v_descale_of_another_channel": replacing(v_descale=lambda x: x.v_descale.roll(8, 2)),
    "q_of_another_rotation": replacing(q8=lambda x: x.q8.flip(3).contiguous()),
}


@pytest.mark.parametrize("mutation", ACCURATE_MUTATIONS)
def test_accurate_exceeds_the_budget(mutation: str, device: str) -> None:
    healthy = accurate_case(device)
    packed = ha.quantize(*healthy.qkv, recipe=ha.ACCURATE)
    healthy.assert_within_budget(ha.attention_quantized(packed))
    out = ha.attention_quantized(ACCURATE_MUTATIONS[mutation](packed))
    with pytest.raises(AssertionError, match="budget"):
        healthy.assert_within_budget(out)


@pytest.mark.parametrize("mutation", ["zeros", "another_head", "doubled"])
def test_wrong_lse_shift_exceeds_the_budget(mutation: str, device: str) -> None:
    healthy = accurate_case(device)
    packed = ha.quantize(*healthy.qkv, recipe=ha.ACCURATE)
    shift = packed.lse_shift
    assert shift is not None
    wrong = {"zeros": torch.zeros_like(shift), "another_head": shift.roll(1, 1), "doubled": shift * 2}[mutation]
    _, lse = ha.attention_quantized(packed, return_lse=True)
    healthy.assert_lse_within_budget(lse)
    _, lse = ha.attention_quantized(dataclasses.replace(packed, lse_shift=wrong), return_lse=True)
    with pytest.raises(AssertionError, match="budget"):
        healthy.assert_lse_within_budget(lse)


@pytest.mark.parametrize("what", ["no_rope", "other_pairing", "off_by_one", "sin_negated"])
def test_wrong_rope_exceeds_the_budget(what: str, device: str) -> None:
    angles = torch.arange(200, device=device).unsqueeze(1) * 100.0 ** -torch.linspace(0, 1, 32, device=device)
    rope = ha.Rope(angles.cos(), angles.sin())
    healthy = make_case(make_qkv("randn", 1, 2, 2, 70, 200, 64, device=device), rope=rope)
    healthy.assert_within_budget(healthy.run()[0])
    wrong = {
        "no_rope": None,
        "other_pairing": dataclasses.replace(rope, interleaved=True),
        "off_by_one": dataclasses.replace(rope, k_positions=torch.arange(200, device=device).sub(1).clamp(0)),
        "sin_negated": ha.Rope(rope.cos, -rope.sin, q_positions=torch.arange(70, device=device)),
    }[what]
    with pytest.raises(AssertionError, match="budget"):
        healthy.assert_within_budget(ha.attention(*healthy.qkv, rope=wrong))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("keys", [-1, 1], ids=["last_key_masked", "padding_attended"])
def test_mask_off_by_one_exceeds_the_budget(keys: int, causal: bool, device: str) -> None:
    healthy = make_case(make_qkv("randn", 2, 4, 2, 5, 6, 64, torch.float32, device), causal)
    packed = ha.quantize(*healthy.qkv)
    healthy.assert_within_budget(ha.attention_quantized(packed, causal=causal))
    # For a causal mask this also moves the diagonal.
    out = ha.attention_quantized(dataclasses.replace(packed, N=packed.N + keys), causal=causal)
    with pytest.raises(AssertionError, match="budget"):
        healthy.assert_within_budget(out)


@pytest.mark.parametrize("what", ["zeros", "nan", "one_nan", "transposed_heads", "other_mask", "other_scale"])
def test_wrong_output_exceeds_the_budget(what: str, device: str) -> None:
    healthy = case(True, device)
    out, _ = healthy.run()
    one_nan = out.clone()
    one_nan[0, 0, 0, 0] = float("nan")
    wrong = {
        "zeros": torch.zeros_like(out),
        "nan": torch.full_like(out, float("nan")),
        "one_nan": one_nan,
        "transposed_heads": out.transpose(1, 2).reshape(out.shape),
        "other_mask": ha.attention(*healthy.qkv, causal=False),
        "other_scale": ha.attention(*healthy.qkv, causal=True, sm_scale=0.1),
    }
    with pytest.raises(AssertionError, match="budget"):
        healthy.assert_within_budget(wrong[what])


@pytest.mark.parametrize("factor", [1.4426950408889634, 0.6931471805599453], ids=["log2", "ln_twice"])
def test_lse_of_another_base_exceeds_the_budget(factor: float, device: str) -> None:
    healthy = case(False, device)
    _, lse = healthy.run()
    budget = error_budget(relative_error(healthy.model_lse, healthy.oracle_lse), torch.float32)
    assert relative_error(lse, healthy.oracle_lse) <= budget
    assert relative_error(lse * factor, healthy.oracle_lse) > budget
