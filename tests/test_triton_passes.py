"""The passes are in the compilation of this package's kernels, and in no other."""

from __future__ import annotations

import contextlib
import threading
import time
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import triton
from triton import knobs

from helion_attn.compiler import triton_hook
from helion_attn.compiler.passes import early_copies
from helpers.offline import compile_attention


@contextlib.contextmanager
def installed(hook: Any) -> Iterator[None]:
    """A hook of somebody else's."""
    knobs.runtime.add_stages_inspection_hook = hook
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = None


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


@pytest.mark.parametrize(("version", "known"), [("3.6.0", True), ("3.9.1", True), ("3.10.0", False), ("4.0.0", False)])
def test_unknown_tritons_compile_as_they_do(version: str, known: bool) -> None:
    class Kernel: ...

    class Other: ...

    kernel = Kernel()
    host = types.FunctionType((lambda: None).__code__, {"_helion_host": kernel}, "host")
    replaced = type("Replaced", (Kernel,), {})
    interpreted = types.FunctionType((lambda: None).__code__, {"_helion_host": (other := Other())}, "host")
    with (
        mock.patch.object(triton, "__version__", version),
        mock.patch.object(triton_hook, "JITFunction", Kernel),
        mock.patch.object(triton_hook, "WithPasses", replaced),
    ):
        assert triton_hook.with_passes(host) is host
        triton_hook.with_passes(interpreted)
    assert isinstance(kernel, replaced) is known
    assert type(other) is Other


def test_what_does_not_verify_stays() -> None:
    with (
        mock.patch.object(early_copies, "rescheduled", return_value="module {"),
        mock.patch.object(triton_hook, "digest", return_value=f"{time.time_ns()}"),
    ):
        kernel = compile_attention(64, False)
    assert kernel.opcodes["QGMMA"] > 0
