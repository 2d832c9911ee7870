"""The files in which generated code is kept, beside what Triton makes of it in its cache folder.

What is read here is executed. So a file is taken only if it and its folder belong to this user or root, and nobody else
may write to either; if it is whole; and if it was written under the key that it is read under. Any other is passed
over, as if it were not there. What is written can be written to by nobody else, whatever the process's umask; a folder
that others may write to is not written to, and stays as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from triton import knobs

from helion_attn.compiler.facts import FACTS
from helion_attn.compiler.slower import warn_slower

#: File name of an entry.
FILE = "generated.json"

#: Write permission of others than a file's owner.
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

#: Code, and the facts that it holds for: "source", and "facts", each with its value.
Entry = dict[str, Any]


def _path(key: str) -> Path:
    return Path(knobs.cache.dir, key, FILE)


def _is_ours(descriptor: int) -> bool:
    """Return whether only this user and root can have written to an open file or folder."""
    status = os.fstat(descriptor)
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & OTHERS_WRITE


def _warn_not_used(path: Path) -> None:
    warn_slower(
        f"Generated code in {path.parent.parent} is not used, and kernels are traced anew in every process, which "
        f"takes seconds: a folder there, or {FILE} in it, does not belong to this user or root, or others may write to "
        "it, and what is read there is executed. Change owner and permissions, or set TRITON_CACHE_DIR."
    )


def _text(path: Path) -> str | None:
    """Read a file; None if others can have written it.

    Permissions come from the open file, so that no other file can take its place in between.
    """
    with contextlib.ExitStack() as opened:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        opened.callback(os.close, folder)
        # Nothing but a file of this folder: a link is refused, and a pipe is not waited for.
        descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        opened.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        if _is_ours(folder) and _is_ours(descriptor):
            with open(descriptor, encoding="utf-8", closefd=False) as file:
                return file.read()
    _warn_not_used(path)
    return None


def _checksum(key: str, entries: list[Entry]) -> str:
    return hashlib.sha256(json.dumps([key, entries]).encode()).hexdigest()


def read(key: str) -> list[Entry]:
    """The entries under `key`; none if its file is not there, not whole, of another key, or not to be trusted."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        text = _text(_path(key))
        if text is not None:
            stored = json.loads(text)
            entries = list(stored["entries"])
            facts_known = all(fact[0] in FACTS for entry in entries for fact, _ in entry["facts"])
            if facts_known and stored["sha256"] == _checksum(key, entries):
                return entries
    return []


def write(key: str, entries: list[Entry]) -> None:
    """Store `entries` under `key`, in place of what is there.

    A folder that cannot be written to is left out, and so is one that others may write to, with a warning.
    """
    path = _path(key)
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o777 & ~OTHERS_WRITE)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        opened.callback(os.close, folder)
        if not _is_ours(folder):
            _warn_not_used(path)
            return
        # Whoever reads has all of the file or none of it.
        descriptor, written = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"sha256": _checksum(key, entries), "entries": entries}, file)
                os.fchmod(file.fileno(), 0o644)
            os.replace(written, path)
        except OSError:
            os.unlink(written)
            raise
