"""Random e4m3 tensors with descales of their own, through `pack`, against the fp64 oracle of what they stand for.

A test owns a specialisation, and hypothesis varies the data, as in `test_fuzz`. Nothing but P is rounded, so the budget
is a small one, and fp32's own part of it counts.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch

import helion_attn as ha
from helion_attn.configs import scheduling
from helion_attn.reference import rounding_model
from helion_attn.validate.dense import MAX_D, OUT_DTYPES
from helpers.cases import GIVEN, Case, Tensors, pair
from helpers.fuzzing import (
    LAYOUTS,
    Data,
    Specialisation,
    assert_lse_within_budget,
    assert_out_within_budget,
    bshd,
    data_of,
    draw_head_dim,
    goes_over_budget_unless,
    make_inputs,
    make_sinks,
    make_window,
    run_cases,
    score_noise,
    slice_of_bs3hd,
)
from helpers.memory import nan_filled_memory

E4M3 = torch.float8_e4m3fn

#: Cases a test without --fuzz-cases.
CASES_IN_CI = 1

#: What `pack` makes of V's descales: a kernel multiplies by one a head, or one a channel.
PACKED = {"heads": GIVEN, "channels": replace(GIVEN, v_scales="channel")}

#: Shapes of descales, by the name of what has one of its own. A "number" is a Python one, "all" is [].
Q_FORMS, K_FORMS = ("number", "all", "kv_heads", "heads", "rows"), ("number", "all", "kv_heads")
V_FORMS = {"heads": K_FORMS, "channels": ("channels",)}

#: Of a descale's size, in base 2: logits of up to some thousand.
EXPONENTS = st.integers(-4, 2)


@dataclasses.dataclass(frozen=True)
class Descales:
    """Of Q, K and V."""

    forms: tuple[str, str, str]
    exponents: tuple[int, int, int]


def specialisations(count: int) -> list[Specialisation]:
    """At random, the same every time."""
    rng = random.Random(0)
    drawn = []
    for i in range(count):
        D = draw_head_dim(rng) if i % 6 else rng.randint(257, MAX_D)
        D_v = D if i % 4 else rng.choice([draw_head_dim(rng), rng.randint(257, MAX_D)])
        layouts, out_dtype = [*LAYOUTS][i % 3], OUT_DTYPES[i % 4]
        recipe, splits = [*PACKED][i // 2 % 2], i // 3 % 3 == 1
        left, right, softcap, sinks = (rng.random() < 0.5 for _ in range(4))
        drawn.append(Specialisation(recipe, D, D_v, E4M3, out_dtype, layouts, left, right, softcap, sinks, splits))
    return drawn


SPECIALISATIONS = specialisations(12)


def descales_of(spec: Specialisation) -> st.SearchStrategy[Descales]:
    forms = st.tuples(st.sampled_from(Q_FORMS), st.sampled_from(K_FORMS), st.sampled_from(V_FORMS[spec.recipe]))
    return st.builds(Descales, forms=forms, exponents=st.tuples(EXPONENTS, EXPONENTS, EXPONENTS))


def make_descales(qkv: Tensors, descales: Descales, seed: int) -> list[float | torch.Tensor]:
    """As `pack` takes them."""
    (B, H, M, _), (H_kv, D_v) = qkv[0].shape, qkv[2].shape[1::2]
    sizes = {"all": (), "heads": (B, H), "kv_heads": (B, H_kv), "rows": (B, H, M), "channels": (B, H_kv, D_v)}
    generator = torch.Generator().manual_seed(seed)
    made: list[float | torch.Tensor] = []
    for form, exponent in zip(descales.forms, descales.exponents, strict=True):
        numbers = (0.5 + torch.rand(sizes.get(form, ()), generator=generator)) * 2.0**exponent
        made.append(numbers.item() if form == "number" else numbers.to(qkv[0].device))
    return made


def spread(descale: float | torch.Tensor, x: torch.Tensor, axis: int) -> torch.Tensor:
    """fp32, one for each head and index of `axis` of x [B, heads, S, D]."""
    B, heads, size = x.size(0), x.size(1), x.size(axis)
    wide = torch.as_tensor(descale, dtype=torch.float32, device=x.device)
    if wide.dim() >= 2:
        wide = wide.repeat_interleave(heads // wide.size(1), 1)
        wide = wide if wide.dim() == 3 else wide.unsqueeze(2)
    return wide.expand(B, heads, size)


@dataclasses.dataclass(frozen=True, eq=False)
class PackedCase(Case):
    """One whose numbers are those that it is given."""

    def rounded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing is rounded."""
        q, k, _ = self.qkv
        return q.double(), k.double()

    def budget(self, out_dtype: torch.dtype = torch.float32, splits: int = 1) -> float:
        """And what noise of the scores, and fp32's of sums and products, makes of P, and of V with it."""
        q, k, v = self.qkv
        weighed = ha.reference.attention(
            q, k, v.abs(), causal=self.causal, sm_scale=self.sm_scale, window=self.window, softcap=self.softcap,
            sinks=self.sinks,
        )  # fmt: skip
        noise = score_noise(self).unsqueeze(3) * weighed
        return super().budget(out_dtype, splits) + (noise.norm() / self.oracle.norm()).item()


def make_case(qkv: Tensors, descales: list[float | torch.Tensor], recipe: ha.Recipe, masks: dict[str, Any]) -> Case:
    """Of the numbers that e4m3 tensors and descales stand for; the model's `quantize` gives them as they are."""
    # [B, H, M], [B, H_kv, N], [B, H_kv, D_v]
    rows, keys, channels = (spread(descale, x, axis) for descale, x, axis in zip(descales, qkv, (2, 2, 3), strict=True))
    columns = rows.unsqueeze(3), keys.unsqueeze(3), channels.unsqueeze(2)
    q, k, v = (x.double() * scale.double() for x, scale in zip(qkv, columns, strict=True))
    q8, k8, v8 = (x.float() for x in qkv)
    given = rounding_model.RoundedQKV(
        q8,
        k8,
        v8,
        q_descale=rows,
        k_descale=keys,
        v_descale=channels,
        v_mean=torch.zeros_like(channels),
        k_mean=torch.zeros_like(k8[:, :, 0]),
        channel_factors=torch.ones_like(k8[:, :, 0]),
        lse_shift=torch.zeros_like(rows),
    )
    options: dict[str, Any] = masks | {"recipe": recipe, "out_dtype": torch.float32}
    with mock.patch.object(rounding_model, "quantize", return_value=given):
        model, model_lse = pair(ha.reference.fp8_attention(q, k, v, return_lse=True, **options))
    oracle, oracle_lse = ha.reference.attention(q, k, v, return_lse=True, **masks)
    answers = (oracle, oracle_lse, model, model_lse)
    causal, sm_scale, window, softcap, sinks = masks.values()
    return PackedCase((q, k, v), causal, sm_scale, recipe, *answers, None, window, softcap, sinks)


def check(spec: Specialisation, data: Data, descales: Descales, device: str) -> None:
    """One case."""
    qkv = make_inputs(spec, data, device)
    made = make_descales(qkv, descales, data.seed)
    masks: dict[str, Any] = {
        "causal": data.causal,
        "sm_scale": data.sm_scale,
        "window": make_window(spec, data.causal, data.left, data.right),
        "softcap": data.softcap if spec.has_softcap else None,
        "sinks": make_sinks(qkv[0].size(1), data.seed, device) if spec.has_sinks else None,
    }
    recipe = PACKED[spec.recipe]
    case = make_case(qkv, made, recipe, masks)
    given = qkv if data.layout == "bhsd" else [x.transpose(1, 2) for x in qkv]
    splits = data.splits if spec.has_splits else 1
    with nan_filled_memory(), mock.patch.object(scheduling, "key_splits", return_value=splits):
        q_descale, k_descale, v_descale = made
        packed = ha.pack(*given, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, layout=data.layout)
        assert packed.recipe == recipe
        out, lse = ha.attention_quantized(packed, return_lse=True, out_dtype=spec.out_dtype, **masks)
    out = out if data.layout == "bhsd" else out.transpose(1, 2)
    assert out.dtype == spec.out_dtype
    assert_out_within_budget(case, out, splits)
    assert_lse_within_budget(case, lse)


@pytest.mark.parametrize("spec", SPECIALISATIONS, ids=str)
def test_fuzz(spec: Specialisation, request: pytest.FixtureRequest) -> None:
    drawn = {"data": data_of(spec), "descales": descales_of(spec)}
    index = SPECIALISATIONS.index(spec)
    run_cases(request, functools.partial(check, spec), index, len(SPECIALISATIONS), CASES_IN_CI, **drawn)


MUTATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "none": lambda o: o,
    "q_descale_of_the_next_row": lambda o: o | {"q_descale": o["q_descale"].roll(1, 2)},
    "k_descale_of_another_head": lambda o: o | {"k_descale": o["k_descale"].roll(1, 1)},
    "v_descale_of_the_next_channel": lambda o: o | {"v_descale": o["v_descale"].roll(1, 2)},
    "v_descale_three_hundredths_more": lambda o: o | {"v_descale": o["v_descale"] * 1.03},
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_fails(mutation: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Specialisation("channels", 64, 64, E4M3, torch.float32, "dense", True, False, False, True, True)
    views = (bshd, slice_of_bs3hd, bshd)
    data = Data(1, 2, 1, 20, 150, "biased_v", 0, views, "bshd", False, 90, 5, None, 4.0, True, 2)
    descales = Descales(("rows", "kv_heads", "channels"), (0, 0, 0))
    pack: Any = ha.pack

    def mutated(*qkv: torch.Tensor, **options: Any) -> Any:
        return pack(*qkv, **MUTATIONS[mutation](options))

    monkeypatch.setattr(ha, "pack", mutated)
    with goes_over_budget_unless(mutation == "none"):
        check(spec, data, descales, device)


def test_specialisations_cover_every_choice() -> None:
    every: dict[str, Iterable[object]] = {"recipe": PACKED, "layouts": LAYOUTS, "out_dtype": OUT_DTYPES}
    for name, choices in every.items():
        assert {getattr(spec, name) for spec in SPECIALISATIONS} == set(choices), name
    for name in ("has_left", "has_right", "has_softcap", "has_sinks", "has_splits"):
        assert {getattr(spec, name) for spec in SPECIALISATIONS} == {False, True}, name
    assert any(max(spec.D, spec.D_v) > 512 for spec in SPECIALISATIONS)
    assert any(spec.D_v != spec.D for spec in SPECIALISATIONS)
