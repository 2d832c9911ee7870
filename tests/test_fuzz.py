"""Random problems against the fp64 oracle, within what the rounding model allows.

A GPU compiles kernels for a *specialisation*, some seconds each, and takes everything else as data. So a test owns one
specialisation, drawn once from a fixed seed, and hypothesis varies the data: sizes, strides, masks' numbers, values.

    pytest tests/test_fuzz.py                          the same cases every time, as in CI
    pytest tests/test_fuzz.py -n 14 --fuzz-cases 5000  at least so many, other ones every time
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from cases import PRESETS, RECIPES, Case, Tensors, make_case
from conftest import FUZZ_CASES, nan_filled_memory

import helion_attn as ha
from helion_attn import configs
from helion_attn.configs import ALL_8_BIT, SUPPORTED_D
from helion_attn.numerics import LOG2E
from helion_attn.testing import INPUT_KINDS, TANH_ERROR, TENSOR_CORE_ERROR, error_budget, make_qkv
from helion_attn.validate import IN_DTYPES, OUT_DTYPES
from helion_attn.validate_varlen import VARLEN_SCALES

#: Cases without --fuzz-cases: less than a minute of two cores.
CASES_IN_CI = 198

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

    def __str__(self) -> str:
        dtypes = "_".join(str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.out_dtype))
        flags = [field.name[4:] for field in fields(self) if field.name[:4] == "has_" and getattr(self, field.name)]
        return "-".join([self.recipe, f"{self.D}_{self.D_v}", dtypes, self.layouts, *flags])


def specialisations(count: int) -> list[Specialisation]:
    """The presets and every recipe in turn; the rest at random, the same every time."""
    rng = random.Random(0)

    def head_dim() -> int:
        return rng.choice([rng.choice([32, 64, 128, 256]), rng.randint(16, 128), rng.randint(129, 256)])

    drawn = []
    recipes = [*PRESETS, *RECIPES]
    for i in range(count):
        dtype = rng.choice(IN_DTYPES)
        D = head_dim() if i % 8 else rng.randint(257, 576)
        D_v = D if i % 4 else rng.choice([head_dim(), 320])
        layouts = rng.choice(["dense", "dense", *LAYOUTS])
        if RECIPES[recipes[i % len(recipes)]].bits != ALL_8_BIT:
            D, D_v = min(D, SUPPORTED_D[-1]), min(D_v, SUPPORTED_D[-1])
        if dtype == torch.float32:
            D, D_v, layouts = D // 4 * 4, D_v // 4 * 4, "dense"
        out_dtype = rng.choice(OUT_DTYPES)
        flags = [*(rng.random() < 0.5 for _ in range(4)), i % 3 == 1]
        drawn.append(Specialisation(recipes[i % len(recipes)], D, D_v, dtype, out_dtype, layouts, *flags))
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


def make_inputs(spec: Specialisation, data: Data, device: str) -> Tensors:
    """BHSD views."""
    H, B = data.H_kv * data.group, data.B
    if device == "cuda":
        B *= -(-ROWS_ON_GPU // (B * H * data.M))
    kind = data.kind if data.kind in INPUT_KINDS else "randn"
    sizes = (B, H, data.H_kv, data.M, data.N, spec.D)
    qkv = make_qkv(kind, *sizes, spec.dtype, device, data.seed, D_v=spec.D_v)
    if data.kind in MADE_FROM_RANDN:
        qkv = MADE_FROM_RANDN[data.kind](*qkv)
    q, k, v = (view(x) for view, x in zip(data.views, qkv, strict=True))
    return q, k, v


def assert_lse_within_budget(case: Case, lse: torch.Tensor) -> None:
    """As `Case` has it, but of one row too, whose lse may be next to 0, or as exact as its scores.

    An lse is the sum of a maximum and a logarithm. Each has fp32's rounding, in base 2 and by `p_offset` apart, and so
    has the sum, which a sink alone may make; on a GPU every score has the tensor core's, of its sum of magnitudes, or
    the tanh's.
    """
    q, k, _ = case.qkv
    finite = case.oracle_lse > float("-inf")
    assert lse.dtype == torch.float32
    assert torch.all(lse[~finite] == float("-inf"))
    scale = q.size(3) ** -0.5 if case.sm_scale is None else case.sm_scale
    magnitudes = q.double().abs() @ k.double().abs().repeat_interleave(q.size(1) // k.size(1), 1).mT * scale
    # [B, H, M]
    largest = magnitudes.amax(3)
    total = torch.where(finite, case.oracle_lse.abs(), 0.0)
    noise = torch.finfo(torch.float32).eps * (LOG2E * largest + case.recipe.p_offset + math.log2(k.size(2)) + total)
    if lse.is_cuda:
        noise += TENSOR_CORE_ERROR * largest + TANH_ERROR * (case.softcap or 0.0)
    error, model_error = ((x - case.oracle_lse)[finite].norm() for x in (lse.double(), case.model_lse.double()))
    budget = error_budget(1.0, torch.float32) * model_error + noise[finite].norm()
    assert error <= budget, f"error {error:.4g} of lse, budget {budget:.4g}"


def check(spec: Specialisation, data: Data, device: str) -> None:
    """One case."""
    qkv = make_inputs(spec, data, device)
    window = None
    if spec.has_left or (spec.has_right and not data.causal):
        window = (data.left if spec.has_left else -1, data.right if spec.has_right else -1)
    sinks = None
    if spec.has_sinks:
        sinks = torch.randn(qkv[0].size(1), generator=torch.Generator().manual_seed(data.seed)).to(device) * 3
    recipe, softcap = RECIPES[spec.recipe], data.softcap if spec.has_softcap else None
    case = make_case(qkv, data.causal, data.sm_scale, recipe, window=window, softcap=softcap, sinks=sinks)
    given = qkv if data.layout == "bhsd" else [x.transpose(1, 2) for x in qkv]
    splits = data.splits if spec.has_splits else 1
    with nan_filled_memory(), mock.patch.object(configs, "key_splits", return_value=splits):
        result = ha.attention(
            *given,
            causal=data.causal,
            sm_scale=data.sm_scale,
            layout=data.layout,
            recipe=recipe,
            window=window,
            softcap=softcap,
            sinks=sinks,
            return_lse=data.return_lse,
            out_dtype=spec.out_dtype,
        )
    out = result[0] if isinstance(result, tuple) else result
    out = out if data.layout == "bhsd" else out.transpose(1, 2)
    assert out.dtype == spec.out_dtype
    assert out.shape == case.oracle.shape
    if case.oracle.norm() > 0:
        case.assert_within_budget(out, splits)
    else:
        assert torch.all(out.float() == 0)
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
    sinks = None
    if spec.has_sinks:
        sinks = torch.randn(q.size(1), generator=torch.Generator().manual_seed(data.seed)).to(device) * 3
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
    assert out.shape == oracle.shape
    if oracle.norm() > 0:
        case.assert_within_budget(out)
    else:
        assert torch.all(out.float() == 0)


#: Of the sequences of a batch.
SHORT = st.sampled_from([0, 0, 1, 1, 2, 63, 64, 65, 127, 128, 129, 150, *range(3, 60)])


@pytest.mark.parametrize("spec", VARLEN_SPECIALISATIONS, ids=str)
def test_fuzz_varlen(
    spec: Specialisation, device: str, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    asked = request.config.getoption(FUZZ_CASES)
    wanted = -(-(asked or 1) // len(SPECIALISATIONS))
    settings = hypothesis.settings(
        max_examples=wanted, database=None, deadline=None, phases=(hypothesis.Phase.generate,)
    )
    seed = VARLEN_SPECIALISATIONS.index(spec) if asked is None else random.getrandbits(64)
    ran = 0

    @hypothesis.seed(seed)
    @settings
    @hypothesis.given(data=data_of(spec), batch=st.lists(st.tuples(SHORT, SHORT), min_size=1, max_size=5))
    def one(data: Data, batch: list[tuple[int, int]]) -> None:
        nonlocal ran
        ran += 1
        check_varlen(spec, data, batch, device)

    try:
        one()
    finally:
        record_property(FUZZ_CASES, ran)
    assert ran >= wanted


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
def test_fuzz(
    spec: Specialisation, device: str, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    asked = request.config.getoption(FUZZ_CASES)
    wanted = -(-(asked or CASES_IN_CI) // len(SPECIALISATIONS))
    ran = 0

    # Cases are small already, and to shrink one further takes minutes.
    phases = (hypothesis.Phase.generate,)

    settings = hypothesis.settings(max_examples=wanted, database=None, deadline=None, phases=phases)
    # Not `derandomize`, whose seed would be the same for all specialisations.
    seed = SPECIALISATIONS.index(spec) if asked is None else random.getrandbits(64)

    @hypothesis.seed(seed)
    @settings
    @hypothesis.given(data=data_of(spec))
    def one(data: Data) -> None:
        nonlocal ran
        ran += 1
        check(spec, data, device)

    try:
        one()
    finally:
        record_property(FUZZ_CASES, ran)
    assert ran >= wanted


MUTATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "none": lambda o: o,
    "left_edge_one_more": lambda o: o | {"window": (o["window"][0] + 1, o["window"][1])},
    "right_edge_one_less": lambda o: o | {"window": (o["window"][0], o["window"][1] - 1)},
    "softcap": lambda o: o | {"softcap": 1.5 * o["softcap"]},
    "sinks": lambda o: o | {"sinks": o["sinks"].roll(1)},
    "sm_scale": lambda o: o | {"sm_scale": 1.2 * o["sm_scale"]},
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_fails(mutation: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Specialisation("balanced", 64, 64, torch.bfloat16, torch.bfloat16, "dense", True, True, True, True, True)
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
    assert any(D > 256 for D, _ in head_dims)
    assert any(D < 64 for D, _ in head_dims)
