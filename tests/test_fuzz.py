"""Random problems against the fp64 oracle, within what the rounding model allows.

A GPU compiles kernels for a *specialisation*, some seconds each, and takes everything else as data. So a test owns one
specialisation, drawn once from a fixed seed, and hypothesis varies the data: sizes, strides, masks' numbers, values.

    pytest tests/test_fuzz.py                          the same cases every time, as in CI
    pytest tests/test_fuzz.py -n 14 --fuzz-cases 5000  at least so many, other ones every time

Tensors that are e4m3 already are drawn by `test_fuzz_pack.py`, KV caches by `test_fuzz_cache.py`, likewise.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.configs import ALL_8_BIT, MASK_BLOCK, SUPPORTED_D, packing, scheduling, uses_large_d
from helion_attn.validate.dense import IN_DTYPES, MAX_D, OUT_DTYPES
from helpers.cases import PRESETS, RECIPES, Case, make_case
from helpers.fuzzing import (
    LAYOUTS,
    ROWS_ON_GPU,
    Data,
    Rotation,
    Specialisation,
    assert_lse_within_budget,
    assert_out_within_budget,
    assert_rotations_cover_every_choice,
    bshd,
    data_of,
    draw_head_dim,
    draw_rotation,
    goes_over_budget_unless,
    make_block_mask,
    make_inputs,
    make_rope,
    make_sinks,
    make_window,
    run_cases,
    sbhd,
    slice_of_bs3hd,
    slice_of_bshd3,
)
from helpers.memory import nan_filled_memory

#: Cases a test without --fuzz-cases, here and of packed sequences: less than a minute of two cores.
CASES_IN_CI, VARLEN_CASES_IN_CI = 2, 1


def takes_block_masks(recipe: ha.Recipe, D: int, D_v: int) -> bool:
    """Whether the kernel's key blocks are those of a mask."""
    return not uses_large_d(D, D_v, recipe.bits) and packing(D, D_v, recipe.bits).bn == MASK_BLOCK


def specialisations(count: int) -> list[Specialisation]:
    """The presets and every recipe in turn; the rest at random, the same every time."""
    rng = random.Random(0)
    drawn = []
    recipes = [*PRESETS, *RECIPES]
    for i in range(count):
        dtype = rng.choice(IN_DTYPES)
        D = draw_head_dim(rng) if i % 8 else rng.randint(257, MAX_D)
        D_v = D if i % 4 else rng.choice([draw_head_dim(rng), rng.randint(257, MAX_D)])
        layouts = rng.choice(["dense", "dense", *LAYOUTS])
        if RECIPES[recipes[i % len(recipes)]].bits != ALL_8_BIT:
            D, D_v = min(D, SUPPORTED_D[-1]), min(D_v, SUPPORTED_D[-1])
        if RECIPES[recipes[i % len(recipes)]].hadamard:
            D -= D % 2
        if dtype == torch.float32:
            D, D_v, layouts = D // 4 * 4, D_v // 4 * 4, "dense"
        out_dtype = rng.choice(OUT_DTYPES)
        left, right, softcap, sinks = (rng.random() < 0.5 for _ in range(4))
        rotation: Rotation | None = draw_rotation(rng, D, (None, None, torch.int32, torch.int64))
        if layouts == "strided_d" or rng.random() < 0.5:
            rotation = None
        flags = (left, right, softcap, sinks, i % 3 == 1)
        recipe = recipes[i % len(recipes)]
        has_block_mask = i % 4 == 3 and takes_block_masks(RECIPES[recipe], D, D_v)
        has_tail = has_block_mask and i % 8 == 3
        choices = *flags, rotation, has_block_mask, has_tail
        drawn.append(Specialisation(recipe, D, D_v, dtype, out_dtype, layouts, *choices))
    return drawn


#: As many as let every recipe meet two or three.
SPECIALISATIONS = specialisations(66)


def check(spec: Specialisation, data: Data, device: str) -> None:
    """One case."""
    if spec.rotation is not None and spec.rotation.positions is None:
        data = dataclasses.replace(data, M=min(data.M, data.N))  # more queries than keys need positions
    qkv = make_inputs(spec, data, device)
    window = make_window(spec, data.causal, data.left, data.right)
    sinks = make_sinks(qkv[0].size(1), data.seed, device) if spec.has_sinks else None
    rope = make_rope(spec.rotation, data.M, data.N, data.seed, device) if spec.rotation else None
    recipe, softcap = RECIPES[spec.recipe], data.softcap if spec.has_softcap else None
    (B, H, M), N = qkv[0].shape[:3], data.N
    mask = make_block_mask(B, H, M, N, data.seed, spec.has_tail, device) if spec.has_block_mask else None
    case = make_case(qkv, data.causal, data.sm_scale, recipe, rope, window, softcap, sinks, mask)
    given = qkv if data.layout == "bhsd" else [x.transpose(1, 2) for x in qkv]
    splits = data.splits if spec.has_splits else 1
    # What a mask leaves of the keys is not known here, and they are split where that is asked for.
    asked = None if mask is None else min(splits, -(-N // MASK_BLOCK))
    with nan_filled_memory(), mock.patch.object(scheduling, "key_splits", return_value=splits):
        result = ha.attention(
            *given,
            causal=data.causal,
            sm_scale=data.sm_scale,
            layout=data.layout,
            recipe=recipe,
            rope=rope,
            window=window,
            softcap=softcap,
            sinks=sinks,
            block_mask=mask,
            num_splits=asked,
            return_lse=data.return_lse,
            out_dtype=spec.out_dtype,
        )
    out = result[0] if isinstance(result, tuple) else result
    out = out if data.layout == "bhsd" else out.transpose(1, 2)
    assert out.dtype == spec.out_dtype
    assert_out_within_budget(case, out, splits)
    if isinstance(result, tuple):
        assert_lse_within_budget(case, result[1])


@dataclasses.dataclass(frozen=True, eq=False)
class SequencesCase(Case):
    """Packed sequences: tensors are [tokens, heads, head dim], and the lse [H, tokens]."""

    cu_seqlens: tuple[torch.Tensor, ...] = ()

    def tie_noise(self) -> float:
        """Each sequence has noise of its own."""
        squares = 0.0
        q_ends, k_ends = (cu.tolist() for cu in self.cu_seqlens)
        for q_range, k_range in zip(itertools.pairwise(q_ends), itertools.pairwise(k_ends), strict=True):
            rows, keys = slice(*q_range), slice(*k_range)
            q, k, v, oracle = (
                x[at].transpose(0, 1).unsqueeze(0)
                for x, at in zip((*self.qkv, self.oracle), (rows, keys, keys, rows), strict=True)
            )
            lse = self.oracle_lse[:, rows].unsqueeze(0)
            if oracle.norm() > 0:
                answers = (oracle, lse, oracle, lse)
                one = Case(
                    (q, k, v),
                    self.causal,
                    self.sm_scale,
                    self.recipe,
                    *answers,
                    window=self.window,
                    softcap=self.softcap,
                )
                squares += (one.tie_noise() * oracle.norm().item()) ** 2
        return math.sqrt(squares) / self.oracle.norm().item()


#: Those that packed sequences take too; every recipe among them once.
VARLEN_SPECIALISATIONS = list(
    {spec.recipe: spec for spec in reversed(SPECIALISATIONS) if max(spec.D, spec.D_v) <= 256}.values()
)


def check_varlen(spec: Specialisation, data: Data, batch: list[tuple[int, int]], device: str) -> None:
    """One case of packed sequences, of (M, N) each."""
    rows = sum(m for m, _ in batch) * data.H_kv * data.group
    if device == "cuda" and rows:
        batch = batch * -(-ROWS_ON_GPU // rows)
    M, N = (max(1, sum(sizes)) for sizes in zip(*batch, strict=True))
    alone = dataclasses.replace(data, B=1, M=M, N=N)
    # [tokens, heads, head dim]
    q, k, v = (x[0].transpose(0, 1) for x in make_inputs(spec, alone, device))
    cu = [torch.tensor([0, *sizes], device=device).cumsum(0).to(torch.int32) for sizes in zip(*batch, strict=True)]
    q, k, v = q[: int(cu[0][-1])], k[: int(cu[1][-1])], v[: int(cu[1][-1])]
    right = 0 if data.causal else data.right
    sinks = make_sinks(q.size(1), data.seed, device) if spec.has_sinks else None
    masks: dict[str, Any] = {
        "causal": data.causal,
        "sm_scale": data.sm_scale,
        "window": (data.left, right if spec.has_right else -1) if spec.has_left else None,
        "softcap": data.softcap if spec.has_softcap else None,
        "sinks": sinks,
    }
    recipe = RECIPES[spec.recipe]
    oracle, oracle_lse = ha.reference.attention_varlen(q, k, v, *cu, **masks)
    model, model_lse = ha.reference.fp8_attention_varlen(q, k, v, *cu, recipe=recipe, **masks)
    answers = (oracle, oracle_lse, model, model_lse)
    case = SequencesCase(
        (q, k, v), data.causal, data.sm_scale, recipe, *answers, window=masks["window"], softcap=masks["softcap"],
        cu_seqlens=tuple(cu),
    )  # fmt: skip
    with nan_filled_memory():
        out = ha.attention_varlen(q, k, v, *cu, recipe=recipe, out_dtype=spec.out_dtype, **masks)
    assert_out_within_budget(case, out)


#: Of the sequences of a batch.
SHORT = st.sampled_from([0, 0, 1, 1, 2, 63, 64, 65, 127, 128, 129, 150, *range(3, 60)])


@pytest.mark.parametrize("spec", VARLEN_SPECIALISATIONS, ids=str)
def test_fuzz_varlen(spec: Specialisation, request: pytest.FixtureRequest) -> None:
    index, batch = VARLEN_SPECIALISATIONS.index(spec), st.lists(st.tuples(SHORT, SHORT), min_size=1, max_size=5)
    check_one = functools.partial(check_varlen, spec)
    drawn = {"data": data_of(spec), "batch": batch}
    run_cases(request, check_one, index, len(SPECIALISATIONS), VARLEN_CASES_IN_CI, **drawn)


def test_the_nan_that_was_found(device: str) -> None:
    """What the fuzz found, on a GPU: see `strided.row_channels`."""
    spec = Specialisation(
        "not_reflected", 147, 128, torch.float16, torch.float8_e4m3fn, "strided_d", True, True, False, True, False
    )
    views = (slice_of_bshd3, slice_of_bshd3, slice_of_bshd3)
    data = Data(2, 2, 2, 98, 79, "biased_v", 2923, views, "bshd", False, 22, 10, None, 26.5, False, 4)
    check_varlen(spec, data, [(45, 19), (29, 10)], device)


def test_the_merge_that_was_found(device: str) -> None:
    """What the fuzz found, in fewer heads: scores all equal, so that a run's weight is all that rounds.

    `Case.run_noise` allows that.
    """
    spec = Specialisation("hybrid", 256, 256, torch.bfloat16, torch.float32, "dense", True, False, False, False, True)
    views = (torch.Tensor.contiguous, torch.Tensor.contiguous, slice_of_bs3hd)
    sm_scale = 0.5243438379299711
    data = Data(1, 2, 1, 170, 257, "equal_scores", 185, views, "bhsd", False, 140, 11, sm_scale, 10.6, True, 2)
    check(spec, data, device)


@pytest.mark.thorough(but=22)
@pytest.mark.parametrize("spec", SPECIALISATIONS, ids=str)
def test_fuzz(spec: Specialisation, request: pytest.FixtureRequest) -> None:
    check_one = functools.partial(check, spec)
    run_cases(request, check_one, SPECIALISATIONS.index(spec), len(SPECIALISATIONS), CASES_IN_CI, data=data_of(spec))


MUTATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "none": lambda o: o,
    "left_edge_one_more": lambda o: o | {"window": (o["window"][0] + 1, o["window"][1])},
    "right_edge_one_less": lambda o: o | {"window": (o["window"][0], o["window"][1] - 1)},
    "softcap": lambda o: o | {"softcap": 1.5 * o["softcap"]},
    "sinks": lambda o: o | {"sinks": o["sinks"].roll(1)},
    "block_mask": lambda o: o | {"block_mask": ha.BlockMask.from_dense(o["block_mask"].to_dense().roll(1, 3))},
    "sm_scale": lambda o: o | {"sm_scale": 1.2 * o["sm_scale"]},
    "pairing": lambda o: o | {"rope": dataclasses.replace(o["rope"], interleaved=False)},
    "q_positions": lambda o: o | {"rope": dataclasses.replace(o["rope"], q_positions=o["rope"].q_positions.roll(1))},
    "k_positions": lambda o: o | {"rope": dataclasses.replace(o["rope"], k_positions=o["rope"].k_positions.roll(1))},
}


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_fails(mutation: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rotation = Rotation(True, torch.bfloat16, 48, torch.int64)
    bf16 = torch.bfloat16
    spec = Specialisation("balanced", 64, 64, bf16, bf16, "dense", True, True, True, True, True, rotation, True)
    views = (sbhd, slice_of_bs3hd, bshd)
    data = Data(1, 2, 2, 150, 200, "randn", 8, views, "bshd", False, 9, 5, 0.3, 4.0, True, 2)
    attention: Any = ha.attention

    def mutated(*qkv: torch.Tensor, **options: Any) -> Any:
        return attention(*qkv, **MUTATIONS[mutation](options))

    monkeypatch.setattr(ha, "attention", mutated)
    with goes_over_budget_unless(mutation == "none"):
        check(spec, data, device)


def test_specialisations_cover_every_choice() -> None:
    for field in fields(Specialisation):
        drawn = {getattr(spec, field.name) for spec in SPECIALISATIONS}
        choices: dict[str, set[object]] = {
            "recipe": set(RECIPES),
            "dtype": set(IN_DTYPES),
            "out_dtype": set(OUT_DTYPES),
            "layouts": set(LAYOUTS),
        }
        assert drawn >= choices.get(field.name, {False, True} if field.name.startswith("has_") else set()), field.name
    head_dims = {(spec.D, spec.D_v) for spec in SPECIALISATIONS}
    assert any(D_v != D for D, D_v in head_dims)
    assert any(D > 896 for D, _ in head_dims)
    assert any(D_v > 896 for _, D_v in head_dims)
    assert any(256 < D <= 640 for D, _ in head_dims)
    assert any(D < 64 for D, _ in head_dims)
    assert_rotations_cover_every_choice([spec.rotation for spec in SPECIALISATIONS if spec.rotation is not None])
    assert {spec.rotation.positions for spec in SPECIALISATIONS if spec.rotation} == {None, torch.int32, torch.int64}
    rotated = {(RECIPES[spec.recipe].bits, spec.D <= 256) for spec in SPECIALISATIONS if spec.rotation is not None}
    assert rotated == {((8, 8), True), ((8, 8), False), ((8, 16), True), ((16, 16), True)}


def test_noise_of_sequences_is_that_of_each() -> None:
    q, k, v = (x[0].transpose(0, 1) for x in make_qkv("randn", 1, 2, 1, 200, 200, 64, torch.float32))
    cu = (torch.tensor([0, 64, 64, 200], dtype=torch.int32),) * 2

    def noise(scale: float, first: int, recipe: ha.Recipe = ha.FAST, softcap: float | None = None) -> float:
        """Of the sequences from token `first` on, times the norm of their output."""
        given = q[first:] * scale, k[first:], v[first:]
        ends = tuple(torch.cat([x[:1], x[x > first] - first]) for x in cu)
        oracle, lse = ha.reference.attention_varlen(*given, *ends, softcap=softcap)
        answers = (oracle, lse, oracle, lse)
        case = SequencesCase(given, False, None, recipe, *answers, softcap=softcap, cu_seqlens=ends)
        return case.tie_noise() * oracle.norm().item()

    last, both = noise(1e4, 64), noise(1e4, 0)
    assert 0 < last < both
    assert noise(1.0, 0) == noise(1e4, 0, ha.BALANCED) == noise(1e4, 0, softcap=30.0) == 0
