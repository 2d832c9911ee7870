"""What the fuzz tests share: layouts, rotations, problems and how they are drawn, and what results are held to."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import helion_attn as ha
from devtools.inputs import INPUT_KINDS, make_qkv
from helion_attn.numerics import LOG2E
from helion_attn.reference.rope import apply_rope_qk
from helion_attn.testing import TANH_ERROR, TENSOR_CORE_ERROR, error_budget
from helion_attn.types import Layout
from helion_attn.validate.dense import IN_DTYPES, MIN_D
from helpers.cases import Case, Tensors
from helpers.rotations import tables

#: The option, and the property in which a test reports how many cases it ran.
FUZZ_CASES = "fuzz_cases"

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
    has_block_mask: bool = False
    has_tail: bool = False

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
    layout: Layout
    causal: bool
    left: int
    right: int
    sm_scale: float | None
    softcap: float
    return_lse: bool
    splits: int


def lengths_up_to(longest: int) -> st.SearchStrategy[int]:
    """Around block sizes as often as not."""
    around_blocks = [n for n in (1, 2, 63, 64, 65, 127, 128, 129, 257) if n <= longest]
    return st.sampled_from([*around_blocks * (longest // 20), *range(1, longest + 1)])


def data_of(spec: Specialisation) -> st.SearchStrategy[Data]:
    view = st.sampled_from(LAYOUTS[spec.layouts])
    # Of large head dims the interpreter takes seconds for what a GPU does at once.
    longest, most_heads = (260, 2) if max(spec.D, spec.D_v) <= 256 else (70, 1)
    # So it does of many rows whose splits are merged.
    most_queries = min(longest, 130) if spec.has_splits else longest
    return st.builds(
        Data,
        B=st.integers(1, 2),
        H_kv=st.integers(1, most_heads),
        group=st.integers(1, 3),
        M=lengths_up_to(most_queries),
        N=lengths_up_to(longest),
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


def make_block_mask(B: int, H: int, M: int, N: int, seed: int, tail: bool, device: str) -> ha.BlockMask:
    """Blocks that are unseen, whole, or seen in part at random; of every sequence and head, or the same for some.

    With a tail those of the last two kinds count by their means.
    """
    generator = torch.Generator().manual_seed(seed)
    heads = B if seed % 2 else 1, H if seed // 2 % 2 else 1
    blocks = torch.randint(0, 3, (*heads, -(-M // 128), -(-N // 128)), generator=generator)
    if tail:
        return ha.BlockMask((blocks == 1).to(device), M, N, tail=True)
    by_score = blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :M, :N]
    bits = torch.rand(*heads, M, N, generator=generator) < 0.02 + (seed % 10) / 10
    return ha.BlockMask.from_dense(((by_score == 1) | ((by_score == 2) & bits)).to(device))


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


def goes_over_budget_unless(right: bool) -> AbstractContextManager[object]:
    """What is checked inside fails by its budget, if it is not `right`."""
    return nullcontext() if right else pytest.raises(AssertionError, match="budget")


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
    @hypothesis.settings(
        max_examples=wanted,
        database=None,
        deadline=None,
        phases=phases,
        # Drawing waits for processes beside this one that compile.
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
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


def assert_rotations_cover_every_choice(rotations: Sequence[Rotation]) -> None:
    assert {rotation.interleaved for rotation in rotations} == {False, True}
    assert {rotation.dtype for rotation in rotations} == set(IN_DTYPES)
