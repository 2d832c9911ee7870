"""This package's passes over Triton's IR, in the compilation of its kernels and of no others.

Triton has no way to say in a kernel what they do, but a hook for compilers of one's own
(`knobs.runtime.add_stages_inspection_hook`), which is set while a kernel of this package's is compiled. What each pass
did, or why it did not apply, is kept in the kernel's metadata, and so on the disk beside its code.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from helion_attn.compiler import passes
from helion_attn.compiler.notice import compiling
from helion_attn.compiler.passes import (
    computed_once,
    early_copies,
    hoist_q_scale,
    per_warpgroup_epilogue,
    pingpong,
    row_sums,
    shared_q,
)
from helion_attn.compiler.passes.expected import COSTS, missing
from helion_attn.compiler.passes.outcome import Outcome
from helion_attn.compiler.slower import warn_slower
from helion_attn.compiler.versions import KNOWN_TRITONS, MEASURED_SERIES, series, triton_is_known

#: Says at level DEBUG what each pass did to a kernel, or what it was refused for.
_LOG = logging.getLogger("helion_attn")

#: Key in a kernel's metadata: a list of name, whether it was applied, and reason, for each pass.
OUTCOMES = "helion_attn_outcomes"

#: In the order in which they run.
PASSES = (
    computed_once.NAME,
    shared_q.NAME,
    hoist_q_scale.NAME,
    early_copies.NAME,
    pingpong.NAME,
    per_warpgroup_epilogue.NAME,
    row_sums.NAME,
    pingpong.BARRIER_AFTER_P,
)

#: Why a kernel has no ping-pong that was asked for none.
SWITCHED_OFF = "switched off"

#: Why a pass does not apply that is for kernels with ping-pong.
NO_PINGPONG = "there is no ping-pong"


class Refusals(NamedTuple):
    """Reasons why warpgroups do not ping-pong, share the epilogue, or products make no row sums; None if they do."""

    pingpong: str | None = None
    epilogue: str | None = None
    sums: str | None = None


def _parsed(text: str, context: Any) -> Any:
    """The module that `text` is; RuntimeError if it does not verify."""
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
    """Hash of the passes' sources."""
    sources = [Path(__file__), *sorted(Path(passes.__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


#: Held while the hook, of which a process has one, is one of this module's.
_HOOKED = threading.Lock()


class _Hook:
    """Adds the passes to the next compilation of this thread, and takes itself away then.

    Other threads' compilations meanwhile are what they would be, though from Triton 3.7 on not found in its caches.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
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
        """Return what Triton adds to its keys; or, given the stages of a compilation, change them."""
        if not args:
            return ("", "") if self._earlier is None else self._earlier()
        if self._earlier is not None:
            self._earlier(*args)
        if threading.get_ident() == self._thread:
            _add_passes(args[1], self._refusals)
            self.remove()
        return None


def passed(text: str, refusals: Refusals = Refusals()) -> list[Outcome]:  # noqa: B008
    """Run the passes over Triton's GPU IR of a module, in their order."""
    once = computed_once.with_one(text)
    shared = shared_q.with_shared_q(once.text)
    rows = (
        hoist_q_scale.with_hoisted_q_scale(shared.text)
        if shared.applied
        else Outcome(hoist_q_scale.NAME, False, shared_q.COPIED, shared.text)
    )
    copies = early_copies.rescheduled(rows.text)
    if shared.applied and copies.applied:
        copies = replace(copies, text=shared_q.with_keys_on_their_way(copies.text))
    no_pingpong = refusals.pingpong
    if no_pingpong is None and not copies.applied:
        no_pingpong = "the copies of its loop were not moved"
    if no_pingpong is not None:
        pingponged = Outcome(pingpong.NAME, False, no_pingpong, copies.text)
    else:
        pingponged = pingpong.with_pingpong(copies.text)
    if not pingponged.applied or refusals.epilogue is not None:
        epilogue = Outcome(per_warpgroup_epilogue.NAME, False, refusals.epilogue or NO_PINGPONG, pingponged.text)
    else:
        epilogue = per_warpgroup_epilogue.with_per_warpgroup_epilogue(pingponged.text)
    if refusals.sums is not None:
        sums = Outcome(row_sums.NAME, False, refusals.sums, epilogue.text)
    else:
        sums = row_sums.with_sums_of_products(epilogue.text)
    return [once, shared, rows, copies, pingponged, epilogue, sums]


def _add_passes(stages: dict[str, Callable[..., Any]], refusals: Refusals) -> None:
    make_ttgir, make_ptx = stages["ttgir"], stages["ptx"]

    def passed_ttgir(module: Any, metadata: dict[str, Any]) -> Any:
        module = make_ttgir(module, metadata)
        original = str(module)
        outcomes = passed(original, refusals)
        text = outcomes[-1].text
        if text != original:
            try:
                module = _parsed(text, module.context)
            except RuntimeError as error:
                done = {x.name for x in outcomes if x.applied}
                if row_sums.NAME in done:
                    raise row_sums.NoSums(f"the IR does not verify: {error}") from error
                if per_warpgroup_epilogue.NAME in done:
                    raise per_warpgroup_epilogue.EpilogueIsShared(f"the IR does not verify: {error}") from error
                reason = f"the IR with the passes does not verify: {error}"
                outcomes = [replace(x, applied=False, reason=reason) if x.applied else x for x in outcomes]
        metadata[OUTCOMES] = [[x.name, x.applied, x.reason] for x in outcomes]
        return module

    def passed_ptx(module: Any, metadata: dict[str, Any]) -> str:
        ptx: str = make_ptx(module, metadata)
        # Said by the stage before: PTX of a kernel with ping-pong that does not show them must not be run.
        applied = {name for name, applied, _ in metadata[OUTCOMES] if applied}
        if pingpong.NAME in applied:
            outcome = pingpong.pingpong_ptx(ptx)
        else:
            outcome = Outcome(pingpong.BARRIER_AFTER_P, False, NO_PINGPONG, ptx)
        if per_warpgroup_epilogue.NAME in applied:
            outcome = replace(outcome, text=per_warpgroup_epilogue.without_epilogue_barriers(outcome.text))
        if row_sums.NAME in applied:
            outcome = replace(outcome, text=row_sums.summed(outcome.text))
        metadata[OUTCOMES].append([outcome.name, outcome.applied, outcome.reason])
        return outcome.text

    stages.update(ttgir=passed_ttgir, ptx=passed_ptx)


def compile_with_passes(source: Any, no_pingpong: str | None = None, **options: Any) -> Any:
    """`triton.compile`, with the passes; without those whose barriers would have warps wait forever, or for nobody.

    Args:
        source: of the kernel, as Triton has it.
        no_pingpong: why warpgroups are not to ping-pong, or None if they are to.
        options: of `triton.compile`.
    """
    refusals = Refusals(no_pingpong)
    # What was refused follows from these: the kernel is found again under them, and not refused in every process.
    asked = f"{digest()} {no_pingpong}"
    while True:
        try:
            return _compile(source, asked, refusals, **options)
        except pingpong.BarrierInLoop as barrier:
            refusals = refusals._replace(pingpong=str(barrier))
        except per_warpgroup_epilogue.EpilogueIsShared as barrier:
            refusals = refusals._replace(epilogue=str(barrier))
        except row_sums.NoSums as missing_sums:
            refusals = refusals._replace(sums=str(missing_sums))


def _compile(
    source: Any, asked: str, refusals: Refusals, *, _env_vars: dict[str, str] | None = None, **options: Any
) -> Any:
    from triton._C.libtriton import get_cache_invalidating_env_vars

    variables = get_cache_invalidating_env_vars() if _env_vars is None else _env_vars
    # Triton's cache must not take a kernel without the passes for this one.
    variables = {**variables, "helion_attn_passes": asked}
    hook = _Hook(refusals)
    try:
        return triton.compile(source, _env_vars=variables, **options)
    finally:
        hook.remove()


def outcomes(kernel: Any) -> tuple[Outcome, ...]:
    """Outcomes of the passes for a compiled kernel, also of one that an earlier process compiled."""
    found = getattr(kernel.metadata, OUTCOMES, None)
    if found is None:
        reason = f"it was compiled without: Triton {triton.__version__} is not known"
        return tuple(Outcome(name, False, reason) for name in PASSES)
    return tuple(Outcome(name, applied, reason) for name, applied, reason in found)


class WithPasses(JITFunction[Any]):
    """A kernel that is compiled with the passes, if Triton is known.

    Attributes:
        pingpong: whether warpgroups may ping-pong.
        expected: names of the passes without which it is slower than this package's figures.
    """

    pingpong = True
    expected: tuple[str, ...] = ()

    @classmethod
    def of(cls, kernel: JITFunction[Any], expected: tuple[str, ...] = ()) -> WithPasses:
        """The same kernel, of this class."""
        made = cls(
            kernel.fn,
            version=kernel.version,
            do_not_specialize=kernel.do_not_specialize,
            do_not_specialize_on_alignment=kernel.do_not_specialize_on_alignment,
            debug=kernel.debug,
            noinline=kernel.noinline,
            repr=kernel._repr,
            launch_metadata=kernel.launch_metadata,
        )
        made.expected = expected
        return made

    def create_binder(self) -> Any:
        """Make what Triton makes for each device; it sets `compile` to its own then."""
        made = super().create_binder()
        self.compile = compiling(kernel_name(self.fn.__name__))(self.compile_and_check)
        return made

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """Launch it. These kernels count on FMAs, which Triton 3.9 warns of where nobody asks for them."""
        options.setdefault("enable_fp_fusion", True)
        return super().run(*args, grid=grid, warmup=warmup, **options)

    def compile_and_check(self, source: Any, **options: Any) -> Any:
        """Compile it for a specialisation, in place of `triton.compile`; say what is missing."""
        if not triton_is_known():
            warn_slower(
                f"Triton {triton.__version__} is not one that was run on a GPU with this package: its kernels are "
                "compiled without the passes over Triton's IR, which costs 3 to 23% of their time, and are launched "
                f"through Triton, which costs the host some microseconds each. Install Triton {known_series()}."
            )
            return triton.compile(source, **options)
        kernel = compile_with_passes(source, None if self.pingpong else SWITCHED_OFF, **options)
        name = kernel_name(self.fn.__name__)
        for outcome in outcomes(kernel):
            _LOG.debug(
                "%s (%d warps, %d stages): %s", name, kernel.metadata.num_warps, kernel.metadata.num_stages, outcome
            )
        lost = [x.name for x in missing(outcomes(kernel), self.expected) if x.reason != SWITCHED_OFF]
        if lost:
            warn_slower(
                f"{name} gives right results and is slower than this package's figures: it takes "
                f"{'; '.join(COSTS[x] for x in lost)}. {_advice()}"
            )
        return kernel


def _advice() -> str:
    """Advice about a kernel that was compiled without a pass."""
    report = 'what logging.getLogger("helion_attn") says at level DEBUG'
    if series(triton.__version__) == MEASURED_SERIES:
        return f"Report it, with the call and {report}."
    return f"Triton is {triton.__version__}: install {MEASURED_SERIES}, or report it, with the call and {report}."


def kernel_name(name: str) -> str:
    """The name of the function in this package of which Helion made a kernel of that name."""
    return name.removeprefix("_helion_")


def known_series() -> str:
    """The Tritons that take the passes, for a message."""
    return ", ".join(known.series for known in KNOWN_TRITONS)


#: Made so far, by function: a `JITFunction` hashes its source.
_MADE: dict[tuple[Any, tuple[str, ...]], WithPasses] = {}


def with_passes(kernel: Any, expected: tuple[str, ...] = ()) -> Any:
    """A kernel of Helion's that is compiled with the passes; Triton's interpreter has kernels of another class."""
    if not isinstance(kernel, JITFunction):
        return kernel
    made = _MADE.get((kernel.fn, expected))
    if made is None:
        made = _MADE.setdefault((kernel.fn, expected), WithPasses.of(kernel, expected))
    return made
