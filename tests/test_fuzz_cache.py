"""Random KV caches against the fp64 oracle: appended to in parts, with RoPE or not, and attended to by few queries.

A test owns a specialisation, and hypothesis varies the data, as in `test_fuzz`: lengths, pages, where appends begin,
how many queries there are and how many of their heads share one of keys. (Tiles have 16 or 32
rows, or 64 and more: three kernels a test.)
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch

import helion_attn as ha
from devtools.inputs import INPUT_KINDS
from helion_attn.configs import MAX_PAGE_D
from helion_attn.reference.kv_cache import v_descales
from helion_attn.types import Layout
from helion_attn.validate.dense import IN_DTYPES
from helpers.cases import IN_E4M3, Case, Tensors
from helpers.fuzzing import (
    EDGES,
    LAYOUTS,
    MADE_FROM_RANDN,
    ROWS_ON_GPU,
    Rotation,
    assert_lse_within_budget,
    assert_out_within_budget,
    assert_rotations_cover_every_choice,
    bshd,
    draw_head_dim,
    draw_rotation,
    goes_over_budget_unless,
    make_rope,
    make_sinks,
    make_tensors,
    make_window,
    name_parts,
    run_cases,
    slice_of_bs3hd,
)
from helpers.memory import nan_filled_memory
from helpers.paged import make_cache

#: Cases a test without --fuzz-cases.
CASES_IN_CI = 1

#: The budget is a statistical one. The rounding model has one run of pages; where there are several, P is rounded
#: against another maximum: of fewer rows than this, one of them would show.
ROWS_IN_SPLITS = 32

MAX_QUERIES = 40


@dataclass(frozen=True)
class Specialisation:
    """What the kernels are compiled for that append and attend."""

    D: int
    D_v: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    layouts: str
    has_left: bool
    has_right: bool
    has_softcap: bool
    has_sinks: bool
    has_splits: bool
    rotation: Rotation | None
    recipe: ha.Recipe = ha.FAST

    def __str__(self) -> str:
        return "-".join(name_parts(self))


def specialisations(count: int) -> list[Specialisation]:
    """At random, the same every time."""
    rng, large = random.Random(0), random.Random(1)
    drawn = []
    for i in range(count):
        D = draw_head_dim(rng)
        D_v = D if i % 4 else draw_head_dim(rng)
        dtype, out_dtype = rng.choice(IN_DTYPES), rng.choice(IN_DTYPES)
        layouts = rng.choice(["dense", "dense", *LAYOUTS])
        if dtype == torch.float32:
            D, D_v, layouts = D // 4 * 4, D_v // 4 * 4, "dense"
        left, right, softcap, sinks = (rng.random() < 0.5 for _ in range(4))
        rotation: Rotation | None = draw_rotation(rng, D, [None])
        if layouts == "strided_d" or i % 2:
            rotation = None
        if i % 8 == 7:
            D, D_v = (large.choice([MAX_PAGE_D, 4 * large.randint(65, MAX_PAGE_D // 4)]) for _ in range(2))
        flags = (left, right, softcap, sinks, i % 3 == 1)
        # Of every four, and so with and without splits, other head dims of V, and a rotation.
        recipe = ha.BALANCED if i // 2 % 2 else ha.FAST
        drawn.append(Specialisation(D, D_v, dtype, out_dtype, layouts, *flags, rotation, recipe))
    return drawn


SPECIALISATIONS = specialisations(20)

#: Of sequences, in keys: around the ends of pages of 64 and 128, and short ones.
LENGTHS = st.sampled_from([0, 0, 1, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, *range(3, 60, 3)])


@dataclass(frozen=True)
class Data:
    """What changes from call to call and compiles nothing."""

    lengths: list[int]
    appended: int  # keys that come last, to all sequences that have as many at once
    H_kv: int
    group: int
    M: int
    kind: str
    seed: int
    views: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    layout: Layout
    causal: bool
    left: int
    right: int
    sm_scale: float | None
    softcap: float
    splits: int


def data_of(spec: Specialisation) -> st.SearchStrategy[Data]:
    view = st.sampled_from(LAYOUTS[spec.layouts])
    return st.builds(
        Data,
        lengths=st.lists(LENGTHS, min_size=1, max_size=4),
        appended=st.sampled_from([1, 1, 2, 15, 16, 17, 33]),
        H_kv=st.integers(1, 2),
        group=st.integers(1, 8),
        M=st.integers(1, MAX_QUERIES),
        kind=st.sampled_from([*INPUT_KINDS, *MADE_FROM_RANDN]),
        seed=st.integers(0, 2**31),
        views=st.tuples(view, view, view),
        layout=st.sampled_from(["bhsd", "bshd"]),
        causal=st.booleans() if spec.has_right else st.just(False),
        left=EDGES,
        right=EDGES,
        sm_scale=st.one_of(st.none(), st.floats(0, 1)),
        softcap=st.floats(0.1, 50),
        splits=st.integers(2, 5),
    )


def append(
    cache: ha.PagedKVCache,
    kv: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    lengths: list[int],
    data: Data,
    rope: ha.Rope | None,
) -> None:
    """Of each sequence first all but the last `data.appended` keys, if it has more; then these, to all at once."""

    def append_to(sequences: list[int], starts: list[int], count: int) -> None:
        def new(x: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            rows = [x[b : b + 1, :, start : start + count] for b, start in zip(sequences, starts, strict=True)]
            part = view(torch.cat(rows))
            return part if data.layout == "bhsd" else part.transpose(1, 2)

        k, v = (new(x, view) for x, view in zip(kv, data.views[1:], strict=True))
        at = torch.tensor(starts, dtype=torch.int32, device=table.device)
        ha.append_kvcache(cache, k, v, table[sequences], at, layout=data.layout, rope=rope)

    for length in sorted(set(lengths)):
        first = length if length < data.appended else length - data.appended
        if first:
            alike = [b for b, n in enumerate(lengths) if n == length]
            append_to(alike, [0] * len(alike), first)
    if long := [b for b, n in enumerate(lengths) if n >= data.appended]:
        append_to(long, [lengths[b] - data.appended for b in long], data.appended)


def make_case(
    qkv: Tensors,
    rotated: torch.Tensor,
    lengths: list[int],
    masks: dict[str, Any],
    out_dtype: torch.dtype,
    recipe: ha.Recipe,
    k_mean: torch.Tensor | None,
) -> Case:
    """With the answers for every sequence, those of sequences of one length at a time."""
    q, _, v = qkv
    B, H, M, _ = q.shape
    oracle = q.new_zeros(B, H, M, v.size(3), dtype=torch.float64)
    alone = float("-inf") if masks["sinks"] is None else masks["sinks"].double().view(1, H, 1)
    oracle_lse = torch.zeros_like(oracle[..., 0]) + alone
    model, model_lse = oracle.float(), oracle_lse.float()
    for length in set(lengths) - {0}:
        at = [b for b, n in enumerate(lengths) if n == length]
        keys = rotated[at, :, :length], v[at, :, :length]
        oracle[at], oracle_lse[at] = ha.reference.attention(q[at], *keys, return_lse=True, **masks)
        model[at], model_lse[at] = ha.reference.fp8_attention_kvcache(
            q[at], keys[0].float(), keys[1], recipe=recipe, k_mean=k_mean, **masks
        )
    answers = (oracle, oracle_lse, model.to(out_dtype).float(), model_lse)
    causal, sm_scale, window, softcap, sinks = masks.values()
    return Case((q, rotated, v), causal, sm_scale, IN_E4M3, *answers, None, window, softcap, sinks)


def sequence_weights(oracle: torch.Tensor) -> torch.Tensor:
    """[B, 1, 1, 1]: powers of two that make sequences of any length count alike; a short one's outputs are larger."""
    size = oracle.flatten(1).norm(dim=1)
    return torch.where(size > 0, torch.exp2(-torch.log2(size).round()), 1.0).view(-1, 1, 1, 1)


def check(spec: Specialisation, data: Data, device: str) -> None:
    """One case."""
    H, lengths = data.H_kv * data.group, data.lengths
    rows = ROWS_ON_GPU if device == "cuda" else ROWS_IN_SPLITS if spec.has_splits else 1
    lengths = lengths * -(-rows // (len(lengths) * H * data.M))
    N = max(1, *lengths)
    sizes = (len(lengths), H, data.H_kv, data.M, N, spec.D)
    tensors = make_tensors(data.kind, sizes, spec.dtype, device, data.seed, spec.D_v)
    q, k, v = (view(x) for view, x in zip(data.views, tensors, strict=True))
    rope = make_rope(spec.rotation, 1, N, data.seed, device) if spec.rotation else None
    rotated = k if rope is None else ha.reference.apply_rope(k, rope.cos, rope.sin, rope.interleaved)
    masks: dict[str, Any] = {
        "causal": data.causal,
        "sm_scale": data.sm_scale,
        "window": make_window(spec, data.causal, data.left, data.right),
        "softcap": data.softcap if spec.has_softcap else None,
        "sinks": make_sinks(H, data.seed, device) if spec.has_sinks else None,
    }
    k_mean = rotated.float().mean((0, 2)) if data.seed % 2 else None
    case = make_case((q, k, v), rotated, lengths, masks, spec.out_dtype, spec.recipe, k_mean)
    cache, table, seqlens = make_cache(lengths, data.H_kv, spec.D, spec.D_v, device, data.seed, spec.recipe, k_mean)
    given = q if data.layout == "bhsd" else q.transpose(1, 2)
    splits = data.splits if spec.has_splits else 1
    with nan_filled_memory():
        append(cache, (k, v), table, lengths, data, rope)
        out, lse = ha.attention_kvcache(
            given,
            cache,
            table,
            seqlens,
            layout=data.layout,
            num_splits=splits,
            return_lse=True,
            out_dtype=spec.out_dtype,
            **masks,
        )
    out = out if data.layout == "bhsd" else out.transpose(1, 2)
    assert out.dtype == spec.out_dtype
    weights = sequence_weights(case.oracle)
    weighted = Case(
        case.qkv, case.causal, case.sm_scale, case.recipe, case.oracle * weights, case.oracle_lse,
        case.model * weights.float(), case.model_lse, None, case.window, case.softcap, case.sinks,
    )  # fmt: skip
    assert_out_within_budget(weighted, (out.double() * weights).to(out.dtype), splits)
    assert_lse_within_budget(case, lse, v_descales(v).log2().abs().max().item())


@pytest.mark.parametrize("spec", SPECIALISATIONS, ids=str)
def test_fuzz(spec: Specialisation, request: pytest.FixtureRequest) -> None:
    index, drawn = SPECIALISATIONS.index(spec), {"data": data_of(spec)}
    run_cases(request, functools.partial(check, spec), index, len(SPECIALISATIONS), CASES_IN_CI, **drawn)


Arguments = dict[str, Any]

#: Of which function, and what becomes of its arguments.
MUTATIONS: dict[str, tuple[str, Callable[[Arguments], Arguments]]] = {
    "none": ("attention_kvcache", lambda o: o),
    "not_rotated": ("append_kvcache", lambda o: o | {"rope": None}),
    "place_of_the_next_key": ("append_kvcache", lambda o: o | {"cache_seqlens": o["cache_seqlens"] + 1}),
    "values_of_the_next_key": ("append_kvcache", lambda o: o | {"v": o["v"].roll(1, 2)}),
    "pages_in_reverse": ("attention_kvcache", lambda o: o | {"block_table": o["block_table"][:, [1, 0, 2, 3]]}),
    "a_key_too_few": ("attention_kvcache", lambda o: o | {"cache_seqlens": o["cache_seqlens"] - 1}),
    "window": ("attention_kvcache", lambda o: o | {"window": (o["window"][0] - 1, -1)}),
    "softcap": ("attention_kvcache", lambda o: o | {"softcap": 1.5 * o["softcap"]}),
    "sinks": ("attention_kvcache", lambda o: o | {"sinks": o["sinks"].roll(1)}),
}


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_fails(mutation: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fp32 = torch.float32
    rotation = Rotation(False, fp32, 64)
    spec = Specialisation(64, 64, fp32, fp32, "dense", True, True, True, True, True, rotation)
    views = (torch.Tensor.contiguous, bshd, slice_of_bs3hd)
    data = Data([300, 131, 140], 3, 2, 2, 4, "biased_v", 0, views, "bhsd", True, 9, 0, 0.4, 4.0, 2)
    name, mutate = MUTATIONS[mutation]
    function: Any = getattr(ha, name)

    def mutated(*given: Any, **options: Any) -> Any:
        return function(**mutate(inspect.signature(function).bind(*given, **options).arguments))

    monkeypatch.setattr(ha, name, mutated)
    with goes_over_budget_unless(mutation == "none"):
        check(spec, data, device)


def test_specialisations_cover_every_choice() -> None:
    for name, choices in {"dtype": IN_DTYPES, "out_dtype": IN_DTYPES, "layouts": LAYOUTS}.items():
        assert {getattr(spec, name) for spec in SPECIALISATIONS} == set(choices), name
    for name in ("has_softcap", "has_sinks", "has_splits"):
        for recipe in (ha.FAST, ha.BALANCED):
            assert {getattr(spec, name) for spec in SPECIALISATIONS if spec.recipe == recipe} == {False, True}, name
    for name in ("has_left", "has_right"):
        assert {getattr(spec, name) for spec in SPECIALISATIONS} == {False, True}, name
    assert any(spec.D_v != spec.D for spec in SPECIALISATIONS)
    for least in (0, 128, 256):
        assert any(least < spec.D <= (2 * least or 128) for spec in SPECIALISATIONS)
    assert_rotations_cover_every_choice([spec.rotation for spec in SPECIALISATIONS if spec.rotation is not None])
