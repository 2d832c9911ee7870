"""Helion's functions that generated code calls, as submodules of this one: importing Helion takes some seconds.

Modules in `helion/runtime/triton` are found here too, under this package's name. They import nothing else of Helion:
it writes launcher and helpers into code that it exports.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.find_spec("helion")
if _spec is None or _spec.origin is None:
    raise ModuleNotFoundError("No module named 'helion'", name="helion")

__path__ = [str(Path(_spec.origin).parent / "runtime" / "triton")]
