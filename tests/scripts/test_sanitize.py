"""scripts/sanitize.py, as far as it runs without compute-sanitizer: its cases, its reading of logs, its exit code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from helion_attn.kernels.lib import steps

SCRIPT = Path(__file__).parents[2] / "scripts" / "sanitize.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitize", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sanitize"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


script = load()


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize("name", script.CASES)
def test_case(name: str, device: str) -> None:
    script.CASES[name](device)


def test_a_case_walks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that its result would not be finite."""
    monkeypatch.setattr(steps, "MAX_ROW_SUM", float("inf"))
    with pytest.raises(ValueError, match="error nan, budget"):
        script.CASES["hybrid_walked_again"]("cpu")
