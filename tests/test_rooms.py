"""Rooms of the package import one another in one direction."""

from __future__ import annotations

import ast
from pathlib import Path

import helion_attn


def imported_by(room: str) -> dict[str, set[str]]:
    """The modules of the package that each file of a room imports, also inside functions."""
    root = Path(helion_attn.__file__).parent
    found = {}
    for path in (root / room).rglob("*.py"):
        imports = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.ImportFrom)]
        found[path.name] = {x.module or "" for x in imports}
    return found


def test_attention_kernels_take_nothing_of_preprocessing() -> None:
    modules = imported_by("kernels")
    assert not {name for name, of in modules.items() if any("preprocess" in x for x in of)}
    assert any("kernels.lib" in x for of in imported_by("preprocess").values() for x in of)
