"""A linked launch does what Helion's host function would, with the addresses of now."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from devtools.sm90 import fake_cuda
from helion_attn.compiler import linked_launch
from helion_attn.compiler.linked_launch import Launch, LinkedLaunch, NotLinked
from helion_attn.compiler.slower import SlowerWarning, warn_slower
from helpers.calls import (
    attend,
    attend_in_parts,
    attend_to_a_cache,
    attend_to_sequences,
    attend_with_large_heads,
    preprocess,
)
from helpers.planning import ENCODED, ONE_FOR_ALL, FakeKernel, in_c_of, planning


def elsewhere(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments at other addresses."""
    moved = {
        id(x): fake_cuda(1).new_empty_strided(x.shape, x.stride(), dtype=x.dtype)
        for x in args
        if isinstance(x, torch.Tensor)
    }
    return tuple(moved.get(id(x), x) for x in args)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    "call",
    [attend, preprocess, attend_to_a_cache, attend_to_sequences, attend_in_parts, attend_with_large_heads],
)
def test_what_is_launched(call: Callable[[], None]) -> None:
    with planning() as made:
        call()
        assert made
        for run, args, linked in made:
            assert isinstance(linked, LinkedLaunch), run
            others = elsewhere(args)
            launch_at(linked, others)
            (launch,) = linked_launch.recorded(run, others)
            grid = (*launch.grid, 1, 1)[:3]
            linked.compiled.run(*grid, 7, "function", "packed", None, None, None, *launch.args)
            by_plan, by_triton = linked.compiled.launched
            assert by_plan == by_triton
            assert [*map(type, by_plan)] == [*map(type, by_triton)]


def test_descriptors_are_encoded_once_an_address() -> None:
    with planning() as made:
        attend()
        _, args, linked = made[-1]
        descriptors = [box.by_address for box in linked._boxes]
        boxes = len(descriptors)
        assert boxes > 1
        ENCODED.clear()
        others = elsewhere(args)
        for given, encoded in ((others, boxes), (others, boxes), (args, 2 * boxes), (others, 2 * boxes)):
            launch_at(linked, given)
            assert len(ENCODED) == encoded
        assert linked.compiled.launched[0] == linked.compiled.launched[3] != linked.compiled.launched[2]
        for _ in range(linked_launch.MAX_ENCODED + 3):
            launch_at(linked, elsewhere(args))
        assert all(len(x) <= linked_launch.MAX_ENCODED for x in descriptors)


def small_launch(*kernel_args: Any, **options: Any) -> tuple[Any, FakeKernel]:
    kernel = SimpleNamespace(params=[None] * len(kernel_args), launch_metadata=None)
    return Launch(kernel, (3,), kernel_args, options), FakeKernel(kernel_args)


def linked_to(launch: Launch, kernel: Any, args: list[torch.Tensor]) -> LinkedLaunch:
    """The launch, by what the kernel says."""
    with mock.patch.object(linked_launch, "in_c", in_c_of):
        return LinkedLaunch(launch, kernel, args)


def launch_at(linked: LinkedLaunch, args: Sequence[Any]) -> None:
    """Launch it on these arguments of the host function."""
    linked.at([args[i].data_ptr() for i in linked.reads])


def test_what_is_not_linked() -> None:
    x = torch.zeros(4, 32)
    launch, compiled = small_launch(x, 5, num_warps=4)
    linked_to(launch, compiled, [x])
    box = TensorDescriptor.from_tensor(x, [1, 32])
    not_tma, allocates, told = (small_launch(box), small_launch(x), small_launch(x))
    not_tma[1].metadata.tensordesc_meta = None
    allocates[1].run.global_scratch_size = 8
    told[0].kernel.launch_metadata = print
    linked_to(*small_launch(box), [x])
    of_view = small_launch(TensorDescriptor.from_tensor(x.view(2, 64), [1, 32]))
    for made, given, why in (
        (not_tma, not_tma[1], "not TMA's"),
        (allocates, allocates[1], "allocates"),
        (told, told[1], "hooks are given"),
        (of_view, of_view[1], "makes a tensor"),
        (small_launch(x.view(-1)), compiled, "makes a tensor"),
        (small_launch(x, torch.zeros(3)), compiled, "makes a tensor"),
        (small_launch(x, "text"), compiled, "'text' is neither"),
        (small_launch(x, _remote_copy_signal_slots_per_program=1), compiled, "adds arguments"),
        (small_launch(x), None, "kept it from launching"),
    ):
        with pytest.raises(NotLinked, match=why):
            linked_to(made[0], given, [x])
    with mock.patch.object(triton, "__version__", "3.10.0"), pytest.raises(NotLinked, match=r"3\.10\.0"):
        LinkedLaunch(launch, compiled, [x])


@pytest.mark.parametrize(("version", "says"), [(triton.__version__, True), ("3.10.0", False)])
def test_what_is_not_linked_goes_through_triton_and_says_so(version: str, says: bool) -> None:
    """Of an unknown Triton its compilation has warned."""
    x = torch.zeros(4, 32)
    launch, compiled = small_launch(x, 5)
    launched: list[Any] = []

    def launcher(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        launched.append((kernel, grid, args, options))
        return compiled

    def run(x: torch.Tensor, *, _launcher: Callable[..., Any]) -> None:
        _launcher(launch.kernel, (1,), x.clone(), 5, num_warps=4)

    warn_slower.cache_clear()
    with (
        mock.patch.object(triton, "__version__", version),
        mock.patch.object(linked_launch, "default_launcher", launcher),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            assert linked_launch.link(run, linked_launch.through_triton(run, [x], ()), [x]) is None
    assert [x[1:] for x in launched] == [((1,), (mock.ANY, 5), {"num_warps": 4})] * 3
    assert [x.category for x in said] == [SlowerWarning] * says
    for warning in said:
        for part in (f"Triton {version}", "the host function makes a tensor"):
            assert part in str(warning.message)


def test_both_ways_to_launch() -> None:
    """In C, whichever Triton is installed."""
    launched: list[tuple[Any, ...]] = []
    common = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False, "launch_pdl": True}
    of_each = SimpleNamespace(**common, launch=lambda *args: launched.append(args))
    of_all = SimpleNamespace(**vars(of_each), arg_annotations="annotations", kernel_signature=b"signature")
    metadata = SimpleNamespace(tensordesc_meta=None)
    for launcher in (of_each, of_all):
        launch = linked_launch.to_c(SimpleNamespace(run=launcher, metadata=metadata))
        launch((3, 2, 1), 7, "function", ("packed", "metadata", "enter", "leave"), [11, 12])
    begin = (3, 2, 1, 7, "function", False, True)
    hooks = ("packed", "metadata", "enter", "leave")
    assert launched == [
        (*begin, None, None, *hooks, 11, 12),
        (*begin, *hooks, None, None, "annotations", b"signature", [11, 12]),
    ]
    with pytest.raises(NotLinked, match="instrumented"):
        linked_launch.to_c(SimpleNamespace(run=SimpleNamespace(**vars(of_all), gsan_enabled=True), metadata=metadata))


def test_the_function_in_c_of_a_kernel_with_descriptors() -> None:
    """From 3.7 on the driver's; under 3.6 what its launcher wraps."""
    kernel = FakeKernel((TensorDescriptor.from_tensor(torch.zeros(4, 32), [1, 32]), 5))
    active = SimpleNamespace(utils=SimpleNamespace(launch="of all"))
    with mock.patch.object(triton.runtime.driver, "_active", active):
        assert linked_launch.in_c(kernel) == "of all"
        if ONE_FOR_ALL:
            return
        del active.utils.launch
        assert linked_launch.in_c(kernel) == kernel.in_c
        wrapped = kernel.run.launch
        for other in (lambda *args: wrapped(*args), print):
            kernel.run.launch = other
            with pytest.raises(NotLinked, match=r"not where Triton 3\.6 has it"):
                linked_launch.in_c(kernel)


def test_hooks_and_streams_are_those_of_the_call() -> None:
    x = torch.zeros(4, 32)
    launch, compiled = small_launch(x, 5)
    linked = linked_to(launch, compiled, [x])
    streams = [11, 12, 13, 14]
    hook = lambda metadata: None  # noqa: E731
    active = SimpleNamespace(get_current_stream=lambda device: streams.pop(0))
    with mock.patch.object(triton.runtime.driver, "_active", active):
        launch_at(linked, [x])
        knobs.runtime.launch_enter_hook.add(hook)
        try:
            launch_at(linked, [x])
        finally:
            knobs.runtime.launch_enter_hook.remove(hook)
        knobs.runtime.launch_exit_hook.add(hook)
        try:
            launch_at(linked, [x])
        finally:
            knobs.runtime.launch_exit_hook.remove(hook)
        launch_at(linked, [x[1:]])
    assert [args[3] for args in compiled.launched] == [11, 12, 13, 14]
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    metadata = [args[10:13] for args in compiled.launched]
    assert metadata == [(None,) * 3, ("metadata", enter, None), ("metadata", None, leave), (None,) * 3]
    assert [args[13] - x.data_ptr() for args in compiled.launched] == [0, 0, 0, 128]
    assert linked._values == [None, 5]
