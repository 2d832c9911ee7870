"""Who called this package: what a warning points to, and what its advice depends on."""

from __future__ import annotations

import sys
from types import CodeType, FrameType


def _is_of(frame: FrameType | None, *packages: str) -> bool:
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in packages


def outermost() -> tuple[CodeType, int]:
    """The code of this package's function that others called, and the `stacklevel` of a warning at their line.

    `warnings.warn` is to be called where this is. It passes over PyTorch's lines, where users have nothing to change.
    """
    frame: FrameType | None = sys._getframe(1)
    level, code = 1, sys._getframe(1).f_code
    while frame is not None and _is_of(frame, "helion_attn"):
        # Wrappers, such as `names.reject_unknown_kwargs`, have this name.
        code = code if frame.f_code.co_name == "call" else frame.f_code
        frame, level = frame.f_back, level + 1
    while frame is not None and _is_of(frame, "torch"):
        frame, level = frame.f_back, level + 1
    return code, level
