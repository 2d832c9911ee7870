"""This package's passes over Triton's IR, in the compilation of its kernels and of no others.

Triton has no way to say in a kernel what they do, but a hook for compilers of one's own
(`knobs.runtime.add_stages_inspection_hook`), which is set while a kernel of this package's is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from helion_attn.compiler.passes import computed_once, delayed_v, early_copies, single_k_buffer, ttgir, warpgroup_turns

#: Whose IR this is, and whose way to launch `launches` repeats. Neither is an interface of Triton's: others compile and
#: launch as they do.
KNOWN_TRITONS = ("3.6.", "3.7.", "3.8.", "3.9.")


def _parsed(text: str, context: Any) -> Any:
    """The module that `text` is."""
    from triton._C.libtriton import ir

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "passed.ttgir"
        path.write_text(text)
        module = ir.parse_mlir_module(str(path), context)
    # As Triton does with what it parses.
    module.context = context
    return module


@functools.cache
def digest() -> str:
    """Of the passes."""
    sources = (
        __file__,
        computed_once.__file__,
        early_copies.__file__,
        delayed_v.__file__,
        single_k_buffer.__file__,
        ttgir.__file__,
        warpgroup_turns.__file__,
    )
    return hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()


#: Held while the hook, of which a process has one, is one of this module's.
_HOOKED = threading.Lock()


class _Hook:
    """Adds the passes to the next compilation of this thread, and takes itself away then.

    Other threads' compilations meanwhile are what they would be, though from Triton 3.7 on not found in its caches.
    """

    def __init__(self, turns: bool) -> None:
        self._turns = turns
        self._thread = threading.get_ident()
        _HOOKED.acquire()
        self._held = True
        self._earlier = knobs.runtime.add_stages_inspection_hook
        knobs.runtime.add_stages_inspection_hook = self

    def remove(self) -> None:
        """Put back the hook that was there before, once."""
        if self._held:
            self._held = False
            knobs.runtime.add_stages_inspection_hook = self._earlier
            _HOOKED.release()

    def __call__(self, *args: Any) -> Any:
        """What Triton adds to its keys; or, given the stages of a compilation, change them."""
        if not args:
            return ("", "") if self._earlier is None else self._earlier()
        if self._earlier is not None:
            self._earlier(*args)
        if threading.get_ident() == self._thread:
            _add_passes(args[1], self._turns)
            self.remove()
        return None


def _add_passes(stages: dict[str, Callable[..., Any]], turns: bool) -> None:
    make_ttgir, make_ptx = stages["ttgir"], stages["ptx"]

    def passed_ttgir(module: Any, metadata: dict[str, Any]) -> Any:
        module = make_ttgir(module, metadata)
        original = str(module)
        once = computed_once.with_one(original)
        moved = early_copies.rescheduled(once)
        in_turns = warpgroup_turns.with_turns(moved) if moved and turns else None
        text = in_turns or moved or once
        if text != original:
            with contextlib.suppress(RuntimeError):  # what does not verify stays as it was
                return _parsed(text, module.context)
        return module

    def passed_ptx(module: Any, metadata: dict[str, Any]) -> str:
        ptx = make_ptx(module, metadata)
        return warpgroup_turns.in_turns(ptx) if warpgroup_turns.has_turns(ptx) else ptx

    stages.update(ttgir=passed_ttgir, ptx=passed_ptx)


def compile_with_passes(source: Any, turns: bool = True, **options: Any) -> Any:
    """`triton.compile`, with the passes; without that of turns where Triton has put a barrier into the loop."""
    try:
        return _compile(source, turns, **options)
    except warpgroup_turns.BarrierInLoop:
        return _compile(source, turns=False, **options)


def _compile(source: Any, turns: bool, *, _env_vars: dict[str, str] | None = None, **options: Any) -> Any:
    from triton._C.libtriton import get_cache_invalidating_env_vars

    variables = get_cache_invalidating_env_vars() if _env_vars is None else _env_vars
    # Triton's cache must not take a kernel without the passes for this one.
    variables = {**variables, "helion_attn_passes": f"{digest()} {turns}"}
    hook = _Hook(turns)
    try:
        return triton.compile(source, _env_vars=variables, **options)
    finally:
        hook.remove()


class WithPasses(JITFunction[Any]):
    """A kernel that is compiled with the passes, on whatever device: Triton sets `compile` anew for each.

    Attributes:
        turns: whether warpgroups may take them.
    """

    turns = True

    @property
    def compile(self) -> Callable[..., Any]:
        """What Triton compiles it with."""
        return functools.partial(compile_with_passes, turns=self.turns)

    @compile.setter
    def compile(self, triton_compile: Callable[..., Any]) -> None:
        pass


def with_passes(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, a host function of Helion's, whose kernel is compiled with the passes from now on, if Triton is known."""
    kernel = run.__globals__[f"_helion_{run.__name__}"]
    # Triton's interpreter has kernels of another class.
    if triton.__version__.startswith(KNOWN_TRITONS) and isinstance(kernel, JITFunction):
        kernel.__class__ = WithPasses
    return run
