"""Says that a first call compiles, where it takes a while: in the log, or in a line of the terminal that goes again."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

LOG = logging.getLogger("helion_attn")

#: Seconds of compiling until it is said.
PATIENCE = 2.0


class _Spell:
    """Compilations of which each begins soon after the last, as in a first call."""

    began = 0.0
    ended = float("-inf")
    logged = False


def _say(kernel: str) -> None:
    text = f"compiling {kernel}, for a first call of these dtypes, head dims and options; later processes find it"
    if not LOG.isEnabledFor(logging.INFO) and sys.stderr.isatty():
        print(f"\r\x1b[Khelion_attn: {text}", end="", file=sys.stderr, flush=True)
    elif not _Spell.logged:
        _Spell.logged = True
        LOG.info("%s", text)


@contextlib.contextmanager
def compiling(kernel: str) -> Iterator[None]:
    """Around a compilation: says so once its spell has lasted for `PATIENCE`.

    The log gets a line a spell at level INFO. A terminal that would not see it gets one that names each kernel in turn.
    """
    started = time.monotonic()
    if started - _Spell.ended > PATIENCE:
        _Spell.began, _Spell.logged = started, False
    timer = threading.Timer(max(0.0, _Spell.began + PATIENCE - started), _say, [kernel])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        said = timer.finished.is_set()
        timer.cancel()
        _Spell.ended = time.monotonic()
        if said and sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
