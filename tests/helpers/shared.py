"""What one test has compiled, found by all others of the run, in whichever process they are."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from helpers.passes import recorded

P = ParamSpec("P")
R = TypeVar("R")

#: A folder of this run, which the processes of pytest-xdist share; `conftest.py` makes it.
FOLDER: Path | None = None


def _once(call: functools.partial[R]) -> tuple[R, list[tuple[str, str | None]]]:
    """What the call returns, and what `recorded` has of it."""
    given = inspect.signature(call.func).bind(*call.args, **call.keywords)
    given.apply_defaults()
    key = hashlib.sha256(repr((call.func.__name__, given.arguments)).encode()).hexdigest()
    assert FOLDER is not None
    path = FOLDER / key
    # Another process that wants the same waits for the first.
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with recorded() as seen:
                result = call()
            written = path.with_suffix(".new")
            written.write_bytes(pickle.dumps((result, seen)))
            written.rename(path)
    found: tuple[R, list[tuple[str, str | None]]] = pickle.loads(path.read_bytes())
    return found


def shared(compile_: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """What `compile_`, one of `helpers.offline`, returns for these arguments.

    The first test of a run that asks compiles it. Nothing that it depends on may be patched meanwhile.
    """
    return shared_call(functools.partial(compile_, *args, **options))


def shared_call(call: functools.partial[R]) -> R:
    """`shared` of a call whose arguments are bound already."""
    return _once(call)[0]


def shared_ir(call: functools.partial[Any]) -> list[tuple[str, str | None]]:
    """What `recorded` has of a call that is shared."""
    return _once(call)[1]
