"""The warning that a kernel runs, right, and slower than this package's figures."""

from __future__ import annotations

import functools
import warnings


class SlowerWarning(RuntimeWarning):
    """Warning that a call takes longer than this package's figures say. Its result is right."""


@functools.cache
def warn_slower(message: str) -> None:
    """Warn of one thing once a process."""
    # Whoever called the public function is many frames away, and not always as many.
    warnings.warn(message, SlowerWarning, stacklevel=2)
