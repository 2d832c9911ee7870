"""The passes are in the compilation of this package's kernels, and in no other; what they did is known, and said."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import threading
import time
import unittest
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import triton
from triton import knobs
from triton.runtime.jit import JITFunction

import helion_attn as ha
from devtools.sm90 import _offline_hopper
from helion_attn.compiler import slower, triton_hook
from helion_attn.compiler.passes import (
    computed_once,
    early_copies,
    hoist_q_scale,
    per_warpgroup_epilogue,
    pingpong,
    row_sums,
    shared_q,
)
from helion_attn.compiler.passes.expected import COSTS, expected_passes, missing
from helion_attn.compiler.passes.outcome import Outcome, Refused, only
from helion_attn.compiler.passes.ttgir import Loop, matched
from helion_attn.compiler.slower import SlowerWarning
from helion_attn.configs import (
    LARGE_TILE_CONFIGS,
    TILE_CONFIGS,
    LargeTileConfig,
    TileConfig,
    tile_config,
)
from helpers.cases import LADDER, LARGE_SHIPPED, SHIPPED, shipped_id
from helpers.offline import MEASURED, batch_for, compile_attention, compile_decode
from helpers.shared import shared, shared_ir


@contextlib.contextmanager
def installed(hook: Any) -> Iterator[None]:
    """A hook of somebody else's."""
    knobs.runtime.add_stages_inspection_hook = hook
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = None


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """What is found in Triton's cache is not compiled, and what was compiled in this process is compiled again."""
    with (
        mock.patch.object(triton_hook, "digest", return_value=f"{time.time_ns()}"),
        mock.patch.object(triton_hook, "_MADE", {}),
    ):
        slower.warn_slower.cache_clear()
        yield


@contextlib.contextmanager
def compiled() -> Iterator[list[Any]]:
    """What Triton compiled of this package's kernels."""
    seen: list[Any] = []
    compile_and_check = triton_hook.WithPasses.compile_and_check

    def recording(self: Any, source: Any, **options: Any) -> Any:
        seen.append(compile_and_check(self, source, **options))
        return seen[-1]

    with mock.patch.object(triton_hook.WithPasses, "compile_and_check", recording):
        yield seen


def test_the_hook_is_this_compilations() -> None:
    calls: list[Any] = []
    stages = {"ttgir": lambda module, metadata: module, "ptx": lambda module, metadata: module}

    def theirs(*args: Any) -> Any:
        calls.append(args)
        return ("key", "hash") if not args else None

    def compile_(source: Any, **options: Any) -> Any:
        hook = knobs.runtime.add_stages_inspection_hook
        assert hook is not None
        assert hook() == ("key", "hash")
        kept = stages["ttgir"]
        other = threading.Thread(target=lambda: hook(None, stages, None, None, None))
        other.start()
        other.join()
        assert stages["ttgir"] is kept
        hook(None, stages, None, None, None)
        assert stages["ttgir"] is not kept
        assert options["_env_vars"]["helion_attn_passes"]
        # Nested or not, further compilations are others' affair.
        assert knobs.runtime.add_stages_inspection_hook is theirs
        raise RuntimeError(source)

    with installed(theirs):
        with mock.patch.object(triton, "compile", compile_), pytest.raises(RuntimeError, match="a kernel"):
            triton_hook.compile_with_passes("a kernel")
        assert knobs.runtime.add_stages_inspection_hook is theirs
    assert [len(args) for args in calls] == [0, 5, 5]


# --- kernels of a class of this package's ---------------------------------------------------------


@triton.jit
def doubled(x):  # type: ignore[no-untyped-def]
    return x + x


def test_a_kernel_is_the_same_one_of_another_class() -> None:
    made = triton_hook.with_passes(doubled, ("a pass",))
    assert isinstance(made, triton_hook.WithPasses)
    assert made is triton_hook.with_passes(doubled, ("a pass",))
    assert made is not triton_hook.with_passes(doubled)
    assert (made.expected, triton_hook.with_passes(doubled).expected) == (("a pass",), ())
    assert type(doubled) is JITFunction
    assert made.fn is doubled.fn
    assert made.cache_key == doubled.cache_key


def test_triton_s_interpreter_is_left_alone() -> None:
    other = object()
    assert triton_hook.with_passes(other) is other


def test_fmas_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **options: asked.append(options))
    made = triton_hook.WithPasses.of(doubled)
    made.run(1, grid=(1,), warmup=False)
    made.run(1, grid=(1,), warmup=True, enable_fp_fusion=False)
    assert [options["enable_fp_fusion"] for options in asked] == [True, False]


def test_compile_is_this_class_s_on_every_device() -> None:
    made: Any = triton_hook.WithPasses.of(doubled)
    with _offline_hopper():
        for device in (0, 1):
            _ = made.device_caches[device]
            assert made.compile.__wrapped__ == made.compile_and_check


@pytest.mark.parametrize(("version", "known"), [("3.6.0", True), ("3.9.1", True), ("3.10.0", False), ("4.0.0", False)])
def test_unknown_tritons_compile_as_they_do_and_say_so(version: str, known: bool) -> None:
    kernel = SimpleNamespace(metadata=SimpleNamespace(num_warps=8, num_stages=3))
    slower.warn_slower.cache_clear()
    with (
        mock.patch.object(triton, "__version__", version),
        mock.patch.object(triton, "compile", return_value=kernel),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        made = triton_hook.WithPasses.of(doubled)
        for _ in range(2):
            with mock.patch.object(triton_hook, "compile_with_passes", return_value="with passes"):
                found = made.compile_and_check("source") if not known else "with passes"
        assert found == ("with passes" if known else kernel)
        outcomes = triton_hook.outcomes(kernel)
    assert [x.applied for x in outcomes] == [False] * len(triton_hook.PASSES)
    assert f"Triton {version} is not known" in outcomes[0].reason
    assert [str(x.message) for x in said if version in str(x.message)] == [str(x.message) for x in said]
    assert len(said) == (0 if known else 1)
    assert all(x.category is SlowerWarning and "3.6, 3.7, 3.8, 3.9" in str(x.message) for x in said)


# --- what the passes say --------------------------------------------------------------------------


def test_the_hot_loop_is_the_first_that_holds_no_other() -> None:
    """What it defines is not taken from a loop after it, where names may come again."""
    first, again = "    %x:2 = ttg.memdesc_index %a[%j] : i32", "  %x = arith.addi %j, %j : i32"
    outer, inner, second = (f"{indent}scf.for %{j} = %b to %e" for indent, j in (("", "i"), ("  ", "j"), ("", "j")))
    lines = [outer, inner, first, "  }", "}", second, again, "}"]
    loop = Loop.of("\n".join(lines))
    assert loop == Loop([outer], inner, [first], lines[3:])
    assert (loop.lines, loop.j, loop.indent) == (lines, "%j", "  ")
    assert loop.buffer("%x") == first


def test_what_is_not_as_a_pass_expects_is_said() -> None:
    for refuse, reason in (
        (lambda: only([], "its loops"), "there are 0 of its loops, in place of one"),
        (lambda: Loop([], "", ["%a = one"], []).definition("%b"), "%b is not of an operation"),
        (lambda: matched("a line", "(word)"), "'(word)' is not in 'a line'"),
    ):
        with pytest.raises(Refused) as refused:
            refuse()
        assert str(refused.value) == reason
    assert str(Outcome("name", True, "so", "text")) == "name: applied, so"
    assert str(Outcome("name", False, "so")) == "name: refused, so"


def test_outcomes_are_kept_with_the_kernel() -> None:
    """Also where another process compiled it."""
    with anew(), compiled() as first:
        compile_attention(256, True, recipe=ha.BALANCED)
        with (
            mock.patch.object(triton_hook, "_MADE", {}),
            compiled() as second,
            mock.patch.object(early_copies, "rescheduled", side_effect=AssertionError("it is compiled again")),
        ):
            compile_attention(256, True, recipe=ha.BALANCED)
    outcomes = triton_hook.outcomes(first[0])
    assert triton_hook.outcomes(second[0]) == outcomes
    assert [(x.name, x.applied) for x in outcomes] == [
        (computed_once.NAME, False),
        (shared_q.NAME, False),
        (hoist_q_scale.NAME, False),
        (early_copies.NAME, True),
        (pingpong.NAME, True),
        (per_warpgroup_epilogue.NAME, True),
        (row_sums.NAME, False),
        (pingpong.BARRIER_AFTER_P, True),
    ]
    assert outcomes[0].reason == computed_once.UNMARKED
    assert re.fullmatch(r"the barrier for P V waits for \d+ of \d+ registers of P", outcomes[-1].reason)


def outcomes_of(compile_: Callable[[], Any]) -> dict[str, Outcome]:
    """By pass."""
    with anew(), compiled() as kernels:
        compile_()
    return {x.name: x for x in triton_hook.outcomes(kernels[0])}


@pytest.mark.filterwarnings("ignore::helion_attn.compiler.slower.SlowerWarning")
def test_what_does_not_verify_stays_and_is_said() -> None:
    wrong = Outcome(early_copies.NAME, True, "moved", "module {")
    with mock.patch.object(early_copies, "rescheduled", return_value=wrong):
        found = outcomes_of(lambda: compile_attention(64, False))
    assert not found[early_copies.NAME].applied
    assert "does not verify" in found[early_copies.NAME].reason
    assert found[computed_once.NAME].reason == computed_once.UNMARKED


#: What refuses a pass once its text is PTX, or IR that Triton does not verify, and where the next compilation has why.
REFUSED_LATER = pytest.mark.parametrize(
    ("name", "error", "of"),
    [
        (row_sums.NAME, row_sums.NoSums, "sums"),
        (per_warpgroup_epilogue.NAME, per_warpgroup_epilogue.EpilogueIsShared, "epilogue"),
    ],
)


@REFUSED_LATER
def test_ir_that_does_not_verify_keeps_the_other_passes(name: str, error: type[Exception], of: str) -> None:
    """The compilation is asked for again, without this pass alone."""
    stages = {"ttgir": lambda module, metadata: module, "ptx": lambda module, metadata: ""}
    outcomes = [Outcome("pingpong", True, "so", "taken"), Outcome(name, True, "so", "wrong")]
    triton_hook._add_passes(stages, triton_hook.Refusals())
    with (
        mock.patch.object(triton_hook, "passed", return_value=outcomes),
        mock.patch.object(triton_hook, "_parsed", side_effect=RuntimeError("a type is another")),
        pytest.raises(error, match="does not verify: a type is another"),
    ):
        stages["ttgir"](mock.Mock(), {})


@REFUSED_LATER
def test_what_is_refused_later_is_compiled_without(name: str, error: type[Exception], of: str) -> None:
    """Again, under the same key, and with the reason."""
    asked: list[triton_hook.Refusals] = []
    keys: set[str] = set()

    def compiling(source: str, key: str, refusals: triton_hook.Refusals) -> str:
        asked.append(refusals)
        keys.add(key)
        if getattr(refusals, of) is None:
            raise error("of a reason")
        return source

    with mock.patch.object(triton_hook, "_compile", compiling):
        assert triton_hook.compile_with_passes("source") == "source"
    assert asked == [triton_hook.Refusals(), triton_hook.Refusals(**{of: "of a reason"})]
    assert len(keys) == 1
    call = functools.partial(compile_attention, 64, True, recipe=ha.BALANCED)
    found = {x.name: x for x in triton_hook.passed(shared_ir(call)[0][0], asked[1])}
    assert not found[name].applied
    assert found[name].reason == "of a reason"


@pytest.mark.thorough(but=1)
@pytest.mark.filterwarnings("ignore::helion_attn.compiler.slower.SlowerWarning")
@pytest.mark.parametrize("lost", ["before_turns: ", "behind_turns: "])
def test_ptx_that_lacks_the_marks_of_pingpong_is_not_run(lost: str) -> None:
    """Named barriers beside those of all warps are a deadlock: it is compiled again, without ping-pong."""
    pingpong_ptx = pingpong.pingpong_ptx
    with (
        mock.patch.object(pingpong, "pingpong_ptx", lambda ptx: pingpong_ptx(ptx.replace(lost, ""))),
        anew(),
        compiled() as kernels,
    ):
        found = compile_attention(256, True)
        # Another process finds it, and does not try again.
        with (
            mock.patch.object(triton_hook, "_MADE", {}),
            mock.patch.object(early_copies, "rescheduled", side_effect=AssertionError("it is compiled again")),
        ):
            assert compile_attention(256, True).ptx == found.ptx
    assert "bar.arrive" not in found.ptx
    (refused,) = [x for x in triton_hook.outcomes(kernels[0]) if x.name == pingpong.NAME]
    assert not refused.applied
    assert "marks of ping-pong are not in the PTX" in refused.reason


def test_a_kernel_that_is_asked_for_no_pingpong(recwarn: pytest.WarningsRecorder) -> None:
    with mock.patch.object(triton_hook.WithPasses, "pingpong", False):
        found = outcomes_of(lambda: compile_attention(256, True))
    assert found[pingpong.NAME].reason == triton_hook.SWITCHED_OFF
    assert not [x for x in recwarn if x.category is SlowerWarning]


def test_other_loops_say_why() -> None:
    found = outcomes_of(lambda: compile_decode(512, 512, 64, 1, 2))
    assert not any(x.applied for x in found.values())
    assert found[early_copies.NAME].reason
    assert found[pingpong.NAME].reason == "the copies of its loop were not moved"


# --- shipped configs ------------------------------------------------------------------------------


def test_which_passes_a_config_is_expected_to_have() -> None:
    """The row's; Q's as well where the kernel quantises it; none under another recipe than the timed one."""
    assert COSTS.keys() == {*triton_hook.PASSES}
    tiles: list[TileConfig | LargeTileConfig] = [*TILE_CONFIGS, *LARGE_TILE_CONFIGS]
    for tile in tiles:
        assert early_copies.NAME in tile.passes
        assert COSTS.keys() >= {*tile.passes}
        assert expected_passes(tile, tile.two_level) == tile.passes
        of_q = {*expected_passes(tile, tile.two_level, quantises_q=True)} - {*tile.passes}
        assert of_q == {shared_q.NAME, hoist_q_scale.NAME}
        assert expected_passes(tile, not tile.two_level, quantises_q=True) == ()
    unmeasured = dataclasses.replace(tile_config(64, True), passes=())
    assert expected_passes(unmeasured, unmeasured.two_level, quantises_q=True) == ()


#: Head dims of V that configs are for, where they are not D.
D_V = {(192, 128): 128, (576, 256): 512}


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize(
    ("tile", "recipe"), [pytest.param(tile, name, id=f"{shipped_id(tile)}-{name}") for tile, name in SHIPPED]
)
def test_shipped_configs_have_their_passes(tile: TileConfig, recipe: str) -> None:
    kernel = shared(compile_attention, tile.D_pad, tile.has_right, recipe=LADDER[recipe], B=batch_for(tile))
    assert missing(kernel.passes, tile.passes) == []
    needed = [x.name for x in kernel.passes if x.applied or (not MEASURED and x.reason in computed_once.NOT_NEEDED[1:])]
    assert needed == [*tile.passes]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("tile", "recipe"), [pytest.param(tile, name, id=f"{shipped_id(tile)}-{name}") for tile, name in LARGE_SHIPPED]
)
def test_shipped_configs_of_large_head_dims_have_their_passes(tile: LargeTileConfig, recipe: str) -> None:
    D_v = D_V.get((tile.D_pad, tile.v_tile), tile.D_pad)
    kernel = shared(compile_attention, tile.D_pad, tile.has_right, D_v=D_v, recipe=LADDER[recipe], B=batch_for(tile))
    assert missing(kernel.passes, tile.passes) == []
    assert [x.name for x in kernel.passes if x.applied] == [*tile.passes]


def test_a_shipped_config_without_its_passes_is_said_once() -> None:
    """In words, whatever its config is; the log has the pass, and what it was refused for."""
    form = "its use of shared memory after the loop is SSSSBLLLL"
    slower.warn_slower.cache_clear()
    made = triton_hook.WithPasses.of(doubled, (early_copies.NAME, per_warpgroup_epilogue.NAME))
    with (
        warnings.catch_warnings(record=True) as said,
        unittest.TestCase().assertLogs("helion_attn", "DEBUG") as logged,
    ):
        warnings.simplefilter("always")
        for warps in (4, 8):
            kernel = SimpleNamespace(metadata=SimpleNamespace(num_warps=warps, num_stages=3))
            outcomes = (
                Outcome(early_copies.NAME, True, "so"),
                Outcome(per_warpgroup_epilogue.NAME, False, f"{form} {warps}"),
            )
            with (
                mock.patch.object(triton_hook, "compile_with_passes", return_value=kernel),
                mock.patch.object(triton_hook, "outcomes", return_value=outcomes),
            ):
                assert made.compile_and_check("source") is kernel
    (warning,) = said
    assert warning.category is SlowerWarning
    message = str(warning.message)
    for part in (
        "doubled gives right results",
        COSTS[per_warpgroup_epilogue.NAME],
        'logging.getLogger("helion_attn")',
        "eport it",
    ):
        assert part in message
    assert "SSSS" not in message
    assert per_warpgroup_epilogue.NAME not in message
    assert f"doubled (8 warps, 3 stages): {per_warpgroup_epilogue.NAME}: refused, {form} 8" in [
        x.getMessage() for x in logged.records
    ]


@pytest.mark.parametrize(("version", "advice"), [("3.6.0", "Report it"), ("3.8.1", "Triton is 3.8.1: install 3.6")])
def test_what_to_do_about_a_slower_kernel(version: str, advice: str) -> None:
    with mock.patch.object(triton, "__version__", version):
        assert triton_hook._advice().startswith(advice)
