"""What one test has compiled, found by all others of the run, in whichever process they are."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from helion_attn.compiler.slower import SlowerWarning, warn_slower
from helpers.passes import recorded

P = ParamSpec("P")
R = TypeVar("R")

#: A folder of this run, which the processes of pytest-xdist share; `conftest.py` makes it.
FOLDER: Path | None = None


@dataclass(frozen=True)
class Entry(Generic[R]):
    """One call of a function of `helpers.offline`."""

    result: R  # what it returned
    seen: list[tuple[str, str | None]]  # what `recorded` has of it
    said: list[str]  # what it warned of, of kernels without their passes


def _called(call: functools.partial[R]) -> Entry[R]:
    warn_slower.cache_clear()  # what was said in this process is said again
    with recorded() as seen, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SlowerWarning)
        result = call()
    return Entry(result, seen, [str(x.message) for x in caught if x.category is SlowerWarning])


def once(name: str, make: Callable[[], R]) -> R:
    """What `make` returns, of the first process of this run that asks for this name."""
    assert FOLDER is not None
    path = FOLDER / name
    # Another process that wants the same waits for the first.
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            written = path.with_suffix(".new")
            written.write_bytes(pickle.dumps(make()))
            written.rename(path)
    found: R = pickle.loads(path.read_bytes())
    return found


def _once(call: functools.partial[R]) -> Entry[R]:
    """The call, which warns in every test that finds it."""
    given = inspect.signature(call.func).bind(*call.args, **call.keywords)
    given.apply_defaults()
    key = hashlib.sha256(repr((call.func.__name__, given.arguments)).encode()).hexdigest()
    found = once(key, lambda: _called(call))
    for message in found.said:
        warnings.warn(message, SlowerWarning, stacklevel=3)
    return found


def shared(compile_: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """What `compile_`, one of `helpers.offline`, returns for these arguments.

    The first test of a run that asks compiles it. Nothing that it depends on may be patched meanwhile.
    """
    return shared_call(functools.partial(compile_, *args, **options))


def shared_call(call: functools.partial[R]) -> R:
    """`shared` of a call whose arguments are bound already."""
    return _once(call).result


def shared_ir(call: functools.partial[Any]) -> list[tuple[str, str | None]]:
    """What `recorded` has of a call that is shared."""
    return _once(call).seen
