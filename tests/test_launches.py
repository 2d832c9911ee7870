"""A plan launches what Helion's host function would, with the addresses of now."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from offline import launching
from test_code_cache import (
    attend,
    attend_in_parts,
    attend_to_a_cache,
    attend_to_sequences,
    attend_with_large_heads,
    preprocess,
)
from torch._subclasses.fake_tensor import FakeTensor
from triton import knobs
from triton.backends.nvidia import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from helion_attn import testing
from helion_attn.kernels import launches
from helion_attn.kernels.launches import Launch, Plan
from helion_attn.testing import fake_cuda

LAUNCH_FIRST = launches.launch_first


class FakeKernel:
    """What Triton compiled. Its launcher remembers what it is given."""

    function, packed_metadata = "function", "packed"

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.launched.append(args)

    def launch_metadata(self, grid: tuple[int, ...], stream: int, *args: Any) -> str:
        return "metadata"


@contextlib.contextmanager
def planning(stream: Callable[[int], int] = lambda device: 7) -> Iterator[list[tuple[Any, tuple[Any, ...], Any]]]:
    """Host functions that were called for the first time, their arguments, and what came of it."""
    made = []

    def launch_first(run: Any, args: tuple[Any, ...]) -> Any:
        made.append((run, args, LAUNCH_FIRST(run, args)))
        return made[-1][2]

    def launch(*args: Any, **options: Any) -> FakeKernel:
        return FakeKernel()

    with (
        testing._offline_hopper(),
        launching(),
        mock.patch.object(launches, "launch_first", launch_first),
        mock.patch.object(launches, "default_launcher", launch),
        mock.patch.object(FakeTensor, "data_ptr", lambda self: 512 * (id(self) % 2**40)),
        mock.patch.object(testing._OfflineDriver, "get_current_stream", lambda self, device: stream(device)),
    ):
        yield made


def elsewhere(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments at other addresses."""
    moved = {
        id(x): fake_cuda(1).new_empty_strided(x.shape, x.stride(), dtype=x.dtype)
        for x in args
        if isinstance(x, torch.Tensor)
    }
    return tuple(moved.get(id(x), x) for x in args)


def described(x: Any) -> Any:
    """An argument of a kernel, as the GPU sees it."""
    if isinstance(x, TensorDescriptor):
        return vars(x) | {"base": x.base.data_ptr()}
    return x.data_ptr() if isinstance(x, torch.Tensor) else (type(x), x)


@pytest.mark.parametrize(
    "call",
    [attend, preprocess, attend_to_a_cache, attend_to_sequences, attend_in_parts, attend_with_large_heads],
)
def test_what_is_launched(call: Callable[[], None]) -> None:
    with planning() as made:
        call()
        assert made
        for run, args, plan in made:
            assert isinstance(plan, Plan), run
            others = elsewhere(args)
            plan(*others)
            (launch,) = launches.recorded(run, others)
            (launched,) = plan._compiled.launched
            x, y, z, stream, *kernel, metadata, enter, leave = launched[:9]
            assert (x, y, z) == (*launch.grid, 1, 1)[:3]
            assert (stream, kernel, metadata, enter, leave) == (7, ["function", "packed"], None, None, None)
            addresses = {i for i, _ in plan._tensors}
            given = [x if i in addresses else described(x) for i, x in enumerate(launched[9:])]
            assert given == [described(x) for x in launch.args]


def small_launch(*kernel_args: Any, **options: Any) -> tuple[Any, FakeKernel]:
    kernel = SimpleNamespace(params=[None] * len(kernel_args))
    return Launch(kernel, (3,), kernel_args, options), FakeKernel()


def test_what_has_no_plan() -> None:
    x = torch.zeros(4, 32)
    launch, compiled = small_launch(x, 5, num_warps=4)
    Plan(launch, compiled, [x])
    for made, given in (
        (small_launch(x.view(-1)), compiled),
        (small_launch(x, torch.zeros(3)), compiled),
        (small_launch(TensorDescriptor.from_tensor(x.view(2, 64), [1, 32])), compiled),
        (small_launch(x, "text"), compiled),
        (small_launch(x, _remote_copy_signal_slots_per_program=1), compiled),
        (small_launch(x), None),
    ):
        with pytest.raises(ValueError):
            Plan(made[0], given, [x])

    def run(x: torch.Tensor, *, _launcher: Callable[..., Any]) -> None:
        _launcher(launch.kernel, (1,), x.clone(), 5)

    with mock.patch.object(launches, "default_launcher", return_value=compiled):
        assert LAUNCH_FIRST(run, [x]) is run
    with mock.patch.object(triton, "__version__", "3.7.0"), pytest.raises(ValueError, match=r"3\.7\.0"):
        Plan(launch, compiled, [x])


def test_hooks_and_streams_are_those_of_the_call() -> None:
    x = torch.zeros(4, 32)
    launch, compiled = small_launch(x, 5)
    plan = Plan(launch, compiled, [x])
    streams = [11, 12, 13]
    hook = lambda metadata: None  # noqa: E731
    active = SimpleNamespace(get_current_stream=lambda device: streams.pop(0))
    with mock.patch.object(triton.runtime.driver, "_active", active):
        plan(x)
        knobs.runtime.launch_enter_hook.add(hook)
        try:
            plan(x)
        finally:
            knobs.runtime.launch_enter_hook.remove(hook)
        plan(x[1:])
    assert [args[3] for args in compiled.launched] == [11, 12, 13]
    metadata = [args[6:9] for args in compiled.launched]
    assert metadata == [(None,) * 3, ("metadata", knobs.runtime.launch_enter_hook, None), (None,) * 3]
    assert [args[9] for args in compiled.launched] == [x.data_ptr(), x.data_ptr(), x.data_ptr() + 128]
    assert plan._values == [None, 5]


def test_triton_launches_like_this() -> None:
    """What a plan takes from Triton's sources, which no interface promises."""
    run = " ".join(inspect.getsource(JITFunction.run).split())
    assert (
        "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, "
        "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())"
    ) in run
    assert "if (PyLong_Check(obj)) {{" in inspect.getsource(driver.make_launcher)
    assert knobs.runtime.launch_enter_hook.calls == []
