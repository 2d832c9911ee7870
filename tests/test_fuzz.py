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
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from cases import PRESETS, RECIPES, Case, Tensors, make_case
from conftest import FUZZ_CASES, nan_filled_memory
from test_rope import tables

import helion_attn as ha
from helion_attn.configs import ALL_8_BIT, SUPPORTED_D, scheduling
from helion_attn.numerics import LOG2E
from helion_attn.reference.rope import apply_rope_qk
from helion_attn.testing import INPUT_KINDS, TANH_ERROR, TENSOR_CORE_ERROR, error_budget, make_qkv
from helion_attn.validate import IN_DTYPES, MAX_D, MIN_D, OUT_DTYPES
from helion_attn.validate_varlen import VARLEN_SCALES

#: Cases a test without --fuzz-cases, here and of packed sequences: less than a minute of two cores.
CASES_IN_CI, VARLEN_CASES_IN_CI = 3, 1

#: The budget is a statistical one. On a GPU, where a score is off by the tensor core's rounding, some P in a thousand
#: round the other way: of fewer rows than this, one of them would show.
ROWS_ON_GPU = 64


def empty(*shape: int, like: torch.Tensor) -> torch.Tensor:
    """What a view leaves out holds NaN, so that a stray read shows."""
    return like.new_full(shape, float("nan"))


def bshd(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sbhd(x: torch.Tensor) -> torch.Tensor:
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def slice_of_bs3hd(x: torch.Tensor) -> torch.Tensor:
    B, H, S, D = x.shape
    view = empty(B, S, 3, H, D, like=x)[:, :, 1].transpose(1, 2)
    return view.copy_(x)


def same_heads(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1].contiguous().expand_as(x)


def same_batch_and_rows(x: torch.Tensor) -> torch.Tensor:
    return x[:1, :, :1].contiguous().expand_as(x)


def odd_rows(x: torch.Tensor) -> torch.Tensor:
    B, H, S, D = x.shape
    view = empty(B, H, S, D + 1 + D % 2, like=x)[..., 1 : D + 1]
    return view.copy_(x)


def odd_rows_bshd(x: torch.Tensor) -> torch.Tensor:
    return odd_rows(x.transpose(1, 2)).transpose(1, 2)


def slice_of_bshd3(x: torch.Tensor) -> torch.Tensor:
    view = empty(*x.transpose(1, 2).shape, 3, like=x)[..., 2].transpose(1, 2)
    return view.copy_(x)


#: Views of [B, H, S, D], by what the kernels specialise on: the power of two that divides all strides (here that of D,
#: or 1), and the last dimension's stride.
LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    "dense": (torch.Tensor.contiguous, bshd, sbhd, slice_of_bs3hd, same_heads, same_batch_and_rows),
    "odd": (odd_rows, odd_rows_bshd),
    "strided_d": (slice_of_bshd3,),
}


@dataclass(frozen=True)
class Rotation:
    """What a kernel that rotates is compiled for, besides its tensors."""

    interleaved: bool
    dtype: torch.dtype  # of the tables
    rotary: int
    positions: torch.dtype | None = None  # of those that Q and K are given, if they are

    def __str__(self) -> str:
        dtypes = [str(x).removeprefix("torch.") for x in (self.dtype, self.positions) if x is not None]
        return "_".join(["interleaved" if self.interleaved else "halves", str(self.rotary), *dtypes])


def draw_rotation(rng: random.Random, D: int, positions: Sequence[torch.dtype | None]) -> Rotation:
    """Of all channels, or of some."""
    rotary = D // 2 * 2 if rng.random() < 0.5 else 2 * rng.randint(1, D // 2)
    return Rotation(rng.random() < 0.5, rng.choice(IN_DTYPES), rotary, rng.choice(positions))


def make_rope(rotation: Rotation, M: int, N: int, seed: int, device: str) -> ha.Rope:
    """For M queries and N keys. Positions of their own are in any order, and a query's may be a key's."""
    generator = torch.Generator().manual_seed(seed)
    norm = (1.0, 1.4)[seed % 2]
    rows = max(M, N) + seed % 5
    rope = tables(
        rows, rotation.rotary, norm=norm, dtype=rotation.dtype, interleaved=rotation.interleaved, device=device
    )
    if rotation.positions is None:
        return rope
    at = (torch.randint(0, rows, (size,), generator=generator).to(device, rotation.positions) for size in (M, N))
    return dataclasses.replace(rope, q_positions=next(at), k_positions=next(at))


@dataclass(frozen=True)
class Specialisation:
    """What a kernel is compiled for."""

    recipe: str
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
    rotation: Rotation | None = None

    def __str__(self) -> str:
        return "-".join([self.recipe, *name_parts(self)])


def name_parts(spec: Any) -> list[str]:
    """What names tell of a specialisation of any kind."""
    dtypes = "_".join(str(dtype).removeprefix("torch.") for dtype in (spec.dtype, spec.out_dtype))
    flags = [field.name[4:] for field in fields(spec) if field.name[:4] == "has_" and getattr(spec, field.name)]
    return [f"{spec.D}_{spec.D_v}", dtypes, spec.layouts, *flags, *([str(spec.rotation)] if spec.rotation else [])]


def draw_head_dim(rng: random.Random) -> int:
    """Up to 256, one that is not padded as often as not."""
    return rng.choice([rng.choice([32, 64, 128, 256]), rng.randint(MIN_D, 128), rng.randint(129, 256)])


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
        drawn.append(Specialisation(recipes[i % len(recipes)], D, D_v, dtype, out_dtype, layouts, *flags, rotation))
    return drawn


#: As many as let every recipe meet two or three.
SPECIALISATIONS = specialisations(66)


def zeros(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def equal_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    return q, k[:, :, :1].expand_as(k), v


def equal_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    # V varies: were it equal too, the answer would be exact, and its error the order of fp32 sums. So do channels: a
    # rotation of equal ones gives whole numbers, of which many lie halfway between two of e4m3.
    return q[:, :, :1].expand_as(q), k[:, :, :1].expand_as(k), v


def large_logits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    return q * 30, k, v


#: What becomes of N(0, 1), besides the `INPUT_KINDS` of `make_qkv`.
MADE_FROM_RANDN = {f.__name__: f for f in (zeros, equal_scores, equal_rows, large_logits)}

#: Of windows. Here and for lengths, a choice of a list: `st.integers` would draw its ends most of the time.
EDGES = st.sampled_from([*range(30), *range(30, 260, 10), 10**12])


@dataclass(frozen=True)
class Data:
    """What changes from call to call and compiles nothing."""

    B: int
    H_kv: int
    group: int
    M: int
    N: int
    kind: str
    seed: int
    views: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    layout: str
    causal: bool
    left: int
    right: int
    sm_scale: float | None
    softcap: float
    return_lse: bool
    splits: int


def data_of(spec: Specialisation) -> st.SearchStrategy[Data]:
    view = st.sampled_from(LAYOUTS[spec.layouts])
    # Of large head dims the interpreter takes seconds for what a GPU does at once.
    longest, most_heads = (260, 2) if max(spec.D, spec.D_v) <= 256 else (70, 1)
    around_blocks = [n for n in (1, 2, 63, 64, 65, 127, 128, 129, 257) if n <= longest]
    lengths = st.sampled_from([*around_blocks * (longest // 20), *range(1, longest + 1)])
    return st.builds(
        Data,
        B=st.integers(1, 2),
        H_kv=st.integers(1, most_heads),
        group=st.integers(1, 3),
        M=lengths,
        N=lengths,
        kind=st.sampled_from([*INPUT_KINDS, *MADE_FROM_RANDN]),
        seed=st.integers(0, 2**31),
        views=st.tuples(view, view, view),
        layout=st.sampled_from(["bhsd", "bshd"]),
        causal=st.booleans() if spec.has_right else st.just(False),
        left=EDGES,
        right=EDGES,
        sm_scale=st.one_of(st.none(), st.floats(0, 1)),
        softcap=st.floats(0.1, 50),
        return_lse=st.booleans(),
        splits=st.integers(2, 4),
    )


#: B, H, H_kv, M, N, D.
Sizes = tuple[int, int, int, int, int, int]


def make_tensors(kind: str, sizes: Sizes, dtype: torch.dtype, device: str, seed: int, D_v: int) -> Tensors:
    """As `make_qkv` has it, of one kind more each of `MADE_FROM_RANDN`."""
    qkv = make_qkv(kind if kind in INPUT_KINDS else "randn", *sizes, dtype, device, seed, D_v)
    return MADE_FROM_RANDN[kind](*qkv) if kind in MADE_FROM_RANDN else qkv


def make_inputs(spec: Specialisation, data: Data, device: str) -> Tensors:
    """BHSD views."""
    H, B = data.H_kv * data.group, data.B
    if device == "cuda":
        B *= -(-ROWS_ON_GPU // (B * H * data.M))
    sizes = (B, H, data.H_kv, data.M, data.N, spec.D)
    # PyTorch has no products of 8-bit numbers.
    made_in = torch.float32 if spec.dtype.itemsize == 1 else spec.dtype
    qkv = make_tensors(data.kind, sizes, made_in, device, data.seed, spec.D_v)
    q, k, v = (view(x.to(spec.dtype)) for view, x in zip(data.views, qkv, strict=True))
    return q, k, v


def make_sinks(H: int, seed: int, device: str) -> torch.Tensor:
    """[H]."""
    return torch.randn(H, generator=torch.Generator().manual_seed(seed)).to(device) * 3


def make_window(spec: Any, causal: bool, left: int, right: int) -> tuple[int, int] | None:
    """The edges that a specialisation of any kind has; the right one may be that of `causal` already."""
    if spec.has_left or (spec.has_right and not causal):
        return left if spec.has_left else -1, right if spec.has_right else -1
    return None


def score_noise(case: Case, v_descale_log2: float = 0.0) -> torch.Tensor:
    """By how much the scores of a row, and their maximum, may be off besides the model's rounding: [B, H, M].

    In base 2 each has fp32's rounding, and they are up to `p_offset` apart, and the logarithm of a sum; of a KV cache
    by up to `v_descale_log2` more. On a GPU every score has the tensor core's rounding, of its sum of magnitudes, or
    the tanh's.
    """
    q, k, _ = case.qkv
    if case.rope is not None:
        q, k = apply_rope_qk(q, k, case.rope)
    scale = q.size(3) ** -0.5 if case.sm_scale is None else case.sm_scale
    magnitudes = q.double().abs() @ k.double().abs().repeat_interleave(q.size(1) // k.size(1), 1).mT * scale
    # [B, H, M]
    largest = magnitudes.amax(3)
    apart = case.recipe.p_offset + v_descale_log2 + math.log2(k.size(2))
    noise = torch.finfo(torch.float32).eps * (LOG2E * largest + apart)
    if q.is_cuda:
        noise += TENSOR_CORE_ERROR * largest + TANH_ERROR * (case.softcap or 0.0)
    return noise


def assert_lse_within_budget(case: Case, lse: torch.Tensor, v_descale_log2: float = 0.0) -> None:
    """As `Case` has it, but of one row too, whose lse may be next to 0, or as exact as its scores.

    An lse is the sum of a maximum and a logarithm, which have `score_noise`, and has fp32's rounding itself: a sink
    alone may make it.
    """
    finite = case.oracle_lse > float("-inf")
    assert lse.dtype == torch.float32
    assert torch.all(lse[~finite] == float("-inf"))
    total = torch.where(finite, case.oracle_lse.abs(), 0.0)
    noise = score_noise(case, v_descale_log2) + torch.finfo(torch.float32).eps * total
    error, model_error = ((x - case.oracle_lse)[finite].norm() for x in (lse.double(), case.model_lse.double()))
    budget = error_budget(1.0, torch.float32) * model_error + noise[finite].norm()
    assert error <= budget, f"error {error:.4g} of lse, budget {budget:.4g}"


def assert_out_within_budget(case: Case, out: torch.Tensor, splits: int = 1) -> None:
    """As `Case` has it; exactly 0, if no row sees a key."""
    assert out.shape == case.oracle.shape
    if case.oracle.norm() > 0:
        case.assert_within_budget(out, splits)
    else:
        assert torch.all(out.float() == 0)


def check(spec: Specialisation, data: Data, device: str) -> None:
    """One case."""
    if spec.rotation is not None and spec.rotation.positions is None:
        data = dataclasses.replace(data, M=min(data.M, data.N))  # more queries than keys need positions
    qkv = make_inputs(spec, data, device)
    window = make_window(spec, data.causal, data.left, data.right)
    sinks = make_sinks(qkv[0].size(1), data.seed, device) if spec.has_sinks else None
    rope = make_rope(spec.rotation, data.M, data.N, data.seed, device) if spec.rotation else None
    recipe, softcap = RECIPES[spec.recipe], data.softcap if spec.has_softcap else None
    case = make_case(qkv, data.causal, data.sm_scale, recipe, rope, window, softcap, sinks)
    given = qkv if data.layout == "bhsd" else [x.transpose(1, 2) for x in qkv]
    splits = data.splits if spec.has_splits else 1
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
            return_lse=data.return_lse,
            out_dtype=spec.out_dtype,
        )
    out = result[0] if isinstance(result, tuple) else result
    out = out if data.layout == "bhsd" else out.transpose(1, 2)
    assert out.dtype == spec.out_dtype
    assert_out_within_budget(case, out, splits)
    if isinstance(result, tuple):
        assert_lse_within_budget(case, result[1])


#: Those that packed sequences take too; every recipe among them once.
VARLEN_SPECIALISATIONS = list(
    {
        spec.recipe: spec
        for spec in reversed(SPECIALISATIONS)
        if max(spec.D, spec.D_v) <= 256
        and all(getattr(RECIPES[spec.recipe], name) in accepted for name, accepted in VARLEN_SCALES.items())
    }.values()
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
    case = Case((q, k, v), data.causal, data.sm_scale, recipe, *answers, softcap=masks["softcap"])
    with nan_filled_memory():
        out = ha.attention_varlen(q, k, v, *cu, recipe=recipe, out_dtype=spec.out_dtype, **masks)
    assert_out_within_budget(case, out)


#: Of the sequences of a batch.
SHORT = st.sampled_from([0, 0, 1, 1, 2, 63, 64, 65, 127, 128, 129, 150, *range(3, 60)])


def run_cases(
    request: pytest.FixtureRequest,
    check_one: Callable[..., None],
    index: int,
    tests: int,
    in_ci: int,
    **drawn: st.SearchStrategy[Any],
) -> None:
    """Draw the cases of one of `tests` tests and check each: `in_ci` cases, or its share of --fuzz-cases."""
    asked = request.config.getoption(FUZZ_CASES)
    wanted = -(-asked // tests) if asked else in_ci
    # Cases are small already, and to shrink one further takes minutes.
    phases = (hypothesis.Phase.generate,)
    device = request.getfixturevalue("device")
    ran = 0

    # Not `derandomize`, whose seed would be the same for all specialisations.
    @hypothesis.seed(random.getrandbits(64) if asked else index)
    @hypothesis.settings(max_examples=wanted, database=None, deadline=None, phases=phases)
    @hypothesis.given(**drawn)
    def one(**case: Any) -> None:
        nonlocal ran
        ran += 1
        check_one(**case, device=device)

    try:
        one()
    finally:
        request.node.user_properties.append((FUZZ_CASES, ran))
    assert ran >= wanted


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
    """What the fuzz found: scores all equal, so that a run's weight is all that rounds (`Case.run_noise`)."""
    spec = Specialisation("hybrid", 256, 256, torch.bfloat16, torch.float32, "dense", True, False, False, False, True)
    views = (torch.Tensor.contiguous, torch.Tensor.contiguous, slice_of_bs3hd)
    sm_scale = 0.5243438379299711
    data = Data(2, 2, 3, 170, 257, "equal_scores", 185, views, "bhsd", False, 140, 11, sm_scale, 10.6, True, 2)
    check(spec, data, device)


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
    "sm_scale": lambda o: o | {"sm_scale": 1.2 * o["sm_scale"]},
    "pairing": lambda o: o | {"rope": dataclasses.replace(o["rope"], interleaved=False)},
    "q_positions": lambda o: o | {"rope": dataclasses.replace(o["rope"], q_positions=o["rope"].q_positions.roll(1))},
    "k_positions": lambda o: o | {"rope": dataclasses.replace(o["rope"], k_positions=o["rope"].k_positions.roll(1))},
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_fails(mutation: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rotation = Rotation(True, torch.bfloat16, 48, torch.int64)
    bf16 = torch.bfloat16
    spec = Specialisation("balanced", 64, 64, bf16, bf16, "dense", True, True, True, True, True, rotation)
    views = (sbhd, slice_of_bs3hd, bshd)
    data = Data(1, 2, 2, 150, 200, "randn", 0, views, "bshd", False, 9, 5, 0.3, 4.0, True, 2)
    attention: Any = ha.attention

    def mutated(*qkv: torch.Tensor, **options: Any) -> Any:
        return attention(*qkv, **MUTATIONS[mutation](options))

    monkeypatch.setattr(ha, "attention", mutated)
    if mutation == "none":
        check(spec, data, device)
    else:
        with pytest.raises(AssertionError, match="budget"):
            check(spec, data, device)


def assert_rotations_cover_every_choice(rotations: Sequence[Rotation]) -> None:
    assert {rotation.interleaved for rotation in rotations} == {False, True}
    assert {rotation.dtype for rotation in rotations} == set(IN_DTYPES)


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
