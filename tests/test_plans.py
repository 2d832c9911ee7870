"""A plan launches what its operation launches on tensors, and serves no other call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import helion_attn as ha
from devtools.sm90 import fake_cuda
from helion_attn import backward, ops, plans
from helion_attn.compiler import buffers, runners
from helion_attn.kv_cache import step_problem
from helion_attn.problem import StepArgs
from helion_attn.types import Layout
from helpers.offline import fake_cache
from helpers.planning import KEPT, LAUNCHED, planning
from helpers.repeated import three_times

Call = Callable[[], tuple[list[Tensor], Callable[[], object]]]

#: What is larger than any size, and so an address.
LEAST_ADDRESS = 2**36


def made(
    *,
    B: int = 2,
    H: int = 4,
    H_kv: int = 4,
    M: int = 300,
    N: int = 300,
    D: int = 64,
    D_v: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    layout: Layout = "bhsd",
) -> list[Tensor]:
    """q, k and v."""
    shapes = (B, H, M, D), (B, H_kv, N, D), (B, H_kv, N, D_v)
    if layout == "bshd":
        return [fake_cuda(b, s, h, d, dtype=dtype) for b, h, s, d in shapes]
    return [fake_cuda(*shape, dtype=dtype) for shape in shapes]


def dense(changes: Callable[[list[Tensor]], list[Tensor]] = list, sizes: Any = None, **options: Any) -> Call:
    """`attention` of new tensors in every call."""

    def call() -> tuple[list[Tensor], Callable[[], object]]:
        qkv = changes(made(**(sizes or {})))
        return qkv, lambda: ha.attention(*qkv, **options)

    return call


def with_sinks(dtype: torch.dtype = torch.float32) -> Call:
    def call() -> tuple[list[Tensor], Callable[[], object]]:
        q, k, v, sinks = *made(), fake_cuda(4, dtype=dtype)
        return [q, k, v, sinks], lambda: ha.attention(q, k, v, sinks=sinks)

    return call


def with_rope(positions: bool = False, interleaved: bool = False) -> Call:
    def call() -> tuple[list[Tensor], Callable[[], object]]:
        q, k, v, cos, sin = *made(), fake_cuda(512, 32), fake_cuda(512, 32)
        at = [fake_cuda(300, dtype=torch.int32) for _ in range(2)] if positions else []
        rope = ha.Rope(cos, sin, interleaved, *at)
        return [q, k, v, cos, sin, *at], lambda: ha.attention(q, k, v, rope=rope)

    return call


def quantized(recipe: ha.Recipe, **options: Any) -> Call:
    def call() -> tuple[list[Tensor], Callable[[], object]]:
        with mock.patch.object(plans, "key_of", return_value=None):
            packed = ha.quantize(*made(), recipe=recipe)
        tensors = [x for x in packed.tensors() if x is not None]
        return tensors, lambda: ha.attention_quantized(packed, **options)

    return call


def quantize(recipe: ha.Recipe, layout: Layout = "bhsd") -> Call:
    def call() -> tuple[list[Tensor], Callable[[], object]]:
        qkv = made(layout=layout)
        return qkv, lambda: ha.quantize(*qkv, recipe=recipe, layout=layout).tensors()

    return call


def sequences(**options: Any) -> Call:
    def call() -> tuple[list[Tensor], Callable[[], object]]:
        qkv = [fake_cuda(500, 4, 64, dtype=torch.bfloat16) for _ in range(3)]
        ends = [fake_cuda(4, dtype=torch.int32) for _ in range(2)]
        return [*qkv, *ends], lambda: ha.attention_varlen(*qkv, *ends, **options)

    return call


def cache(appends: bool, M: int = 1, **options: Any) -> Call:
    def call() -> tuple[list[Tensor], Callable[[], object]]:
        pages = fake_cache(8, 4, 64, 64, ha.FAST)
        q, k, v = made(M=M, N=M)
        table, lengths = fake_cuda(2, 4, dtype=torch.int32), fake_cuda(2, dtype=torch.int32)
        tensors = [pages.k8, pages.v8, pages.k_descale, pages.v_descale, table, lengths]
        if appends:
            return [*tensors, k, v], lambda: ha.append_kvcache(pages, k, v, table, lengths)
        return [*tensors, q], lambda: ha.attention_kvcache(q, pages, table, lengths, **options)

    return call


#: Each differs from one before in one property.
CALLS: dict[str, Call] = {
    "base": dense(),
    "causal": dense(causal=True),
    "sm_scale": dense(sm_scale=0.5),
    "layout": dense(sizes={"layout": "bshd"}, layout="bshd"),
    "as many rows as heads": dense(sizes={"M": 4, "N": 4}),
    "as many rows as heads, layout": dense(sizes={"M": 4, "N": 4}, layout="bshd"),
    "fast": dense(recipe=ha.FAST),
    "bf16": dense(recipe=ha.BF16),
    "a recipe of one's own": dense(recipe=dataclasses.replace(ha.BALANCED, center_v=False)),
    "hadamard": dense(recipe=dataclasses.replace(ha.FAST, reflect=False, hadamard=True)),
    "hadamard_seed": dense(recipe=dataclasses.replace(ha.FAST, reflect=False, hadamard=True, hadamard_seed=1)),
    "window": dense(window=(20, 3)),
    "window, other": dense(window=(20, 4)),
    "softcap": dense(softcap=30.0),
    "return_lse": dense(return_lse=True),
    "out_dtype": dense(out_dtype=torch.float32),
    "num_splits": dense(num_splits=2),
    "dtype": dense(sizes={"dtype": torch.float16}),
    "length": dense(sizes={"M": 299, "N": 299}),
    "batch": dense(sizes={"B": 3}),
    "heads of keys": dense(sizes={"H_kv": 2}),
    "head dim of v": dense(sizes={"D_v": 32}),
    "head dim": dense(sizes={"D": 320, "D_v": 320}),
    "few queries": dense(sizes={"M": 1, "N": 4096}),
    "strides": dense(lambda qkv: [x.new_empty(2, 300, 4, 64).transpose(1, 2) for x in qkv]),
    "stride of q": dense(lambda qkv: [qkv[0].new_empty(2, 4, 300, 128).narrow(3, 0, 64), *qkv[1:]]),
    "alignment": dense(lambda qkv: [x.new_empty(x.numel() + 4).narrow(0, 4, x.numel()).view_as(x) for x in qkv]),
    "k is v": dense(lambda qkv: [qkv[0], qkv[1], qkv[1]]),
    "q is k": dense(lambda qkv: [qkv[0], qkv[0], qkv[2]]),
    "all the same": dense(lambda qkv: [qkv[0]] * 3),
    "slices of one": dense(lambda qkv: [*qkv[0].new_empty(3, 2, 4, 300, 64).unbind()]),
    "sinks": with_sinks(),
    "rope": with_rope(),
    "rope, interleaved": with_rope(interleaved=True),
    "rope, positions": with_rope(positions=True),
    "quantized": quantized(ha.BALANCED),
    "quantized, causal": quantized(ha.BALANCED, causal=True),
    "quantized, accurate": quantized(ha.ACCURATE, return_lse=True),
    "quantize": quantize(ha.BALANCED),
    "quantize, bshd": quantize(ha.BALANCED, "bshd"),
    "sequences": sequences(),
    "sequences, causal": sequences(causal=True),
    "append": cache(appends=True),
    "decode": cache(appends=False),
    "decode, splits": cache(appends=False, num_splits=2, return_lse=True),
    "prefill": cache(appends=False, M=64),
}


@contextlib.contextmanager
def plannable() -> Iterator[None]:
    """Fake tensors, of which a mode of the dispatcher is part, can be planned."""
    plans.forget()
    with (
        planning(),
        mock.patch.object(plans, "is_plain", lambda x: isinstance(x, Tensor)),
        mock.patch.object(plans, "can_skip_dispatcher", return_value=True),
    ):
        yield
    plans.forget()


def seen(tensors: list[Tensor], launches: list[tuple[Any, ...]]) -> list[object]:
    """What was launched, with what was given by name, and what was made in the order in which it is met."""
    spans = [(x.data_ptr(), x) for x in tensors]
    names: dict[int, str] = {}

    def named(value: Any) -> object:
        if isinstance(value, tuple):
            return tuple(map(named, value))
        if type(value) is not int or value < LEAST_ADDRESS:
            return value
        for i, (begin, _) in enumerate(spans):
            if value == begin:
                return f"tensor {i}"
        return names.setdefault(value, f"made {len(names)}")

    return [named(values) for values in launches]


def launched(tensors: list[Tensor], run: Callable[[], object]) -> tuple[list[object], object]:
    """What a call launches, and what it returns."""
    LAUNCHED.clear()
    KEPT.clear()
    returned = run()
    return seen(tensors, LAUNCHED), returned


def layouts(returned: Any) -> list[object]:
    """Of what a call returned."""
    if isinstance(returned, ha.OpenPages):
        returned = returned.k8, returned.v8, returned.k_descale, returned.v_descale
    tensors = returned if isinstance(returned, tuple) else (returned,)
    return [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]


def unplanned(
    name: str, tensors: Sequence[Any], options: Sequence[Any], problem: Callable[[], tuple[Any, Any]], written: Any = ()
) -> Sequence[Tensor]:
    """In place of `plans.run`: the operation's launches on tensors, without a buffer."""
    operation, arguments = problem()
    returned: Sequence[Tensor] = operation._launch(arguments)
    return returned


Found = dict[str, tuple[Any, Any, bool]]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Found:
    """By call: what it launches and returns, by its plan and without, all plans being there; and whether it had one.

    Calls that no test of this run asks about are not made: each takes seconds.
    """
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    calls = {name: call for name, call in CALLS.items() if name in asked}
    seen_of = {}
    with plannable():
        for call in calls.values():
            call()[1]()
        # Host functions run on buffers, of every kernel.
        known = [launch for plan in plans._PLANS.values() for launch in plan.launches]
        assert all(launch.kernel.linked(launch.args) is not None for launch in known)
        for name, call in calls.items():
            tensors, run = call()
            with mock.patch.object(plans.Plan, "_run_and_link", side_effect=AssertionError("it is not linked")):
                by_plan = launched(tensors, run)
            kept = len(plans._PLANS)
            with mock.patch.object(plans, "run", unplanned):
                run()  # a first launch of its kind is Triton's
                itself = launched(tensors, run)
            seen_of[name] = by_plan, itself, len(plans._PLANS) == kept
    return seen_of


@pytest.mark.thorough(but=6)
@pytest.mark.parametrize("name", CALLS)
def test_a_plan_launches_what_its_operation_launches(name: str, found: Found) -> None:
    (by_plan, planned_result), (itself, result), was_known = found[name]
    assert was_known
    assert by_plan == itself
    assert len(by_plan) >= 1
    assert layouts(planned_result) == layouts(result)


def test_outputs_are_tensors_of_their_own() -> None:
    with plannable():
        qkv = made()
        for _ in range(3):
            packed = [x for x in ha.quantize(*qkv).tensors() if x is not None and x.numel()]
            storages = [x.untyped_storage() for x in packed]
            assert len({x._cdata for x in storages}) == len(packed)
            assert [x.nbytes() for x in storages] == [x.numel() * x.element_size() for x in packed]


def test_a_call_has_one_plan() -> None:
    with plannable():
        known = []
        for _ in range(3):
            ha.attention(*made())
            (plan,) = plans._PLANS.values()
            known.append(plan)
    assert known == known[:1] * 3


def test_a_plan_depends_on_every_option() -> None:
    """On its value, or for what holds tensors on which of these there are."""
    q = torch.zeros(1, 2, 20, 32, dtype=torch.bfloat16)
    norm = ha.RMSNorm(torch.ones(32, dtype=torch.bfloat16))
    others: dict[str, Any] = {
        "causal": True,
        "sm_scale": 0.5,
        "window": (3, 0),
        "softcap": 30.0,
        "sinks": torch.zeros(2),
        "layout": "bshd",
        "recipe": ha.FAST,
        "rope": ha.Rope(torch.rand(20, 16), torch.rand(20, 16)),
        "q_norm": norm,
        "k_norm": norm,
        "block_mask": ha.BlockMask.from_dense(torch.rand(20, 20) < 0.5),
        "return_lse": True,
        "out_dtype": torch.float32,
        "num_splits": 1,
    }
    parameters = inspect.signature(ha.attention).parameters
    assert list(others) == [name for name, x in parameters.items() if x.kind is x.KEYWORD_ONLY]
    keys = []

    def run(name: str, tensors: Sequence[Any], options: Sequence[Any], problem: object) -> tuple[Tensor, Tensor]:
        keys.append((*options, *[x is None for x in tensors]))
        return q, q

    with mock.patch.object(plans, "run", run):
        for options in ({}, *[{name: x} for name, x in others.items()]):
            ha.attention(q, q, q, **options)
    assert all(key not in keys[:i] for i, key in enumerate(keys))


def test_a_new_length_is_linked_to_what_is_compiled() -> None:
    """Nothing runs through Triton, which takes milliseconds."""
    with plannable():
        for causal in (False, True):
            ha.attention(*made(B=8, M=3000, N=3000), causal=causal)
        with mock.patch.object(plans.Plan, "_run_and_link", side_effect=AssertionError("it is not linked")):
            for length in (1, 2999, 4096, 2999):
                for causal in (False, True):
                    ha.attention(*made(B=8, M=3000, N=length), causal=causal)
        # Another dtype is another kernel.
        with (
            mock.patch.object(plans.Plan, "_run_and_link", side_effect=NotImplementedError),
            pytest.raises(NotImplementedError),
        ):
            ha.attention(*made(B=8, M=3000, N=3000, dtype=torch.float16))


def test_a_new_length_launches_what_its_operation_launches() -> None:
    """Also where kernels were linked for tensors of which two are the same."""

    def call(length: int, alias: bool) -> tuple[list[Tensor], Callable[[], object]]:
        q, k, v = made(B=8, M=length, N=length)
        qkv = [q, k, k if alias else v]
        return qkv, lambda: ha.attention(*qkv, causal=True, return_lse=True)

    with plannable():
        for alias in (True, False):
            call(3000, alias)[1]()
        for length in (2000, 2999, 4096):
            for alias in (True, False):
                tensors, run = call(length, alias)
                with mock.patch.object(plans.Plan, "_run_and_link", side_effect=AssertionError("it is not linked")):
                    by_plan, _ = launched(tensors, run)
                with mock.patch.object(plans, "run", unplanned):
                    run()  # a first launch of its kind is Triton's
                    itself, _ = launched(tensors, run)
                assert by_plan == itself


REFUSED: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"causal": 2}, TypeError),
    ({"sm_scale": "0.125"}, TypeError),
    ({"window": (20, True)}, TypeError),
    ({"num_splits": True}, TypeError),
    ({"return_lse": 2}, TypeError),
    ({"layout": "hbsd"}, ValueError),
    ({"recipe": "best"}, ValueError),
    ({"rope": 5}, TypeError),
    ({"sinks": [0.0] * 4}, TypeError),
]


def test_a_plan_accepts_what_checks_accept() -> None:
    with plannable():
        qkv = made()
        accepted: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (20, 1)}, {"num_splits": 1}]
        for options in accepted:
            for _ in range(3):
                ha.attention(*qkv, **options)
        for options, error in REFUSED:
            with pytest.raises(error):
                ha.attention(*qkv, **options)
        for x in (qkv[0].select(0, 0), qkv[0].to(torch.float64), None, "q"):
            with pytest.raises((TypeError, ValueError)):
                ha.attention(cast(Any, x), *qkv[1:])
        learned = qkv[0].detach().requires_grad_()
        with mock.patch.object(backward, "attention_with_gradients", return_value=(learned, None)) as trains:
            ha.attention(learned, *qkv[1:])
        trains.assert_called_once()
        with torch.no_grad():
            ha.attention(learned, *qkv[1:])


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Calling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_nothing_is_planned_where_others_listen() -> None:
    assert plans.can_skip_dispatcher()
    for mode in (Dispatching(), Calling()):
        with mode:
            assert not plans.can_skip_dispatcher()
    heard = []

    def note(x: Tensor) -> Tensor:
        heard.append(plans.can_skip_dispatcher())
        return x * 1

    torch.vmap(note)(torch.ones(2))
    torch.jit.trace(note, torch.ones(2), check_trace=False)
    assert heard == [False, False]


def test_a_default_device_does_not_listen() -> None:
    with torch.device("cpu"):
        assert plans.can_skip_dispatcher()
        with Calling():
            assert not plans.can_skip_dispatcher()


def test_no_tensors_and_sparse_ones_are_checked_first() -> None:
    nothing: Any = None
    with pytest.raises(TypeError, match="q is a NoneType"):
        ha.attention(nothing, nothing, nothing)
    sparse = torch.eye(4).to_sparse()
    assert not plans.is_plain(sparse)


def test_compiled_kernels_are_of_one_device() -> None:
    """A GPU's function is none of another's."""
    with plannable():
        ha.attention(*made())
        (plan,) = plans._PLANS.values()
        for launch in plan.launches:
            kernel = launch.kernel
            assert kernel.linked(launch.args) is not None
            there = [key for key in kernel._of_kernels if key[0] == torch.device("cuda:0")]
            assert len(there) == len(kernel._of_kernels)
            with mock.patch.object(buffers.Buffer, "device", torch.device("cuda:1")):
                assert kernel.linked(launch.args) is None


def test_other_tensors_are_not_planned() -> None:
    x = torch.ones(2)
    assert plans.is_plain(x)
    for other in (None, 3, "x", torch._neg_view(x), x.as_subclass(type("Other", (Tensor,), {}))):
        assert not plans.is_plain(cast(Any, other))


def test_plans_are_bounded() -> None:
    with plannable(), mock.patch.object(plans, "MAX_PLANS", 3):
        for length in range(300, 308):
            ha.attention(*made(M=length, N=length))
            assert len(plans._PLANS) <= 3


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED, ha.ACCURATE, ha.HYBRID, ha.BF16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True, "return_lse": True}, {"window": (100, 0)}], ids=str)
def test_a_plan_returns_what_its_call_returns(recipe: ha.Recipe, options: dict[str, Any]) -> None:
    """The same bits, of the kernels that a GPU runs: also on another stream and in a CUDA graph."""
    plans.forget()
    for _ in range(4):
        qkv = [torch.randn(2, 8, 700, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        planned = ha.attention(*qkv, recipe=recipe, **options)
        with mock.patch.object(plans, "run", unplanned):
            itself = ha.attention(*qkv, recipe=recipe, **options)
        for a, b in zip(*[x if isinstance(x, tuple) else (x,) for x in (planned, itself)], strict=True):
            assert torch.equal(a, b)
    assert all(plan.compiled() for plan in plans._PLANS.values())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        elsewhere = ha.attention(*qkv, recipe=recipe, **options)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ha.attention(*qkv, recipe=recipe, **options)
    graph.replay()
    torch.cuda.synchronize()
    for again in (elsewhere, captured):
        for a, b in zip(*[x if isinstance(x, tuple) else (x,) for x in (again, itself)], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("third", [1.0, 2.0, float("nan")])
def test_a_third_call_with_other_bits_is_noticed(third: float) -> None:
    """As every test on a GPU makes them (`conftest.py`)."""
    results = iter([[torch.tensor([x])] for x in (1.0, 5.0, third)])
    call = three_times(lambda *_: next(results))
    with (
        mock.patch.object(plans, "key_of", return_value="a key"),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        contextlib.nullcontext() if third == 1.0 else pytest.raises(AssertionError, match="third call of attention"),
    ):
        assert call("attention", [], (), list)[0] == 1.0
    assert next(results, None) is None


def step_arguments(device: str, tokens: int, sequences: int) -> StepArgs:
    make: Any = fake_cuda if device == "fake" else functools.partial(torch.zeros, device=device)
    cache = fake_cache(2, 2, 64, 64, ha.BALANCED) if device == "fake" else ha.paged_kv_cache(2, 2, 64, device=device)
    q, k = (make(tokens, H, 64, dtype=torch.bfloat16) for H in (4, 2))
    ends, table, seqlens = (
        make(*shape, dtype=torch.int32) for shape in ((sequences + 1,), (sequences, 4), (sequences,))
    )
    return step_problem(q, k, k, cache, ends, table, seqlens, num_splits=2)


def test_kernels_are_compiled_ahead_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several plans, each kernel runs, on zeros of which it makes nothing; of two parts each in one."""
    ran: list[str] = []
    call = runners.Interpreted.__call__

    def noted(self: Any, *args: Any) -> None:
        ran.append(self.name)
        call(self, *args)

    monkeypatch.setattr(runners.Interpreted, "__call__", noted)
    found = [ops.step.plan(step_arguments("cpu", tokens, 2)) for tokens in (2, 200)]
    launched = {launch.kernel.name for plan in found for launch in plan.launches}
    assert {"append_kv", "fp8_attn_decode", "fp8_attn_prefill"} <= launched
    plans.compile_ahead(found)
    assert {*ran} == launched
    ran.clear()
    plans.compile_ahead(found, 0, 2)
    first = {*ran}
    ran.clear()
    plans.compile_ahead(found, 1, 2)
    assert first | {*ran} == launched
    assert not first & {*ran}


def test_what_is_compiled_ahead_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do other lengths."""
    monkeypatch.setattr(plans, "is_elsewhere", lambda device: False)
    monkeypatch.setattr(plans, "_zeros_like", lambda x, large: fake_cuda(*x.shape, dtype=x.dtype))
    with planning():
        plans.compile_ahead([ops.step.plan(step_arguments("fake", tokens, 30)) for tokens in (60, 600)])
        for tokens, sequences in ((40, 20), (640, 17)):
            arguments = step_arguments("fake", tokens, sequences)
            assert ops.step.plan(arguments)._link(len(ops.step.tensors(arguments)))
