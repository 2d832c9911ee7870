"""The site's page of public names: the docstrings, as they are."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import helion_attn as ha

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("api")


def test_the_page_is_the_docstrings(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ha.attention, "__doc__", "Something else.")
    assert "Something else." in api.page()


def test_every_public_name_is_listed_once(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ha, "__all__", [*ha.__all__, "testing_name"])
    monkeypatch.setattr(ha, "testing_name", api.page, raising=False)
    with pytest.raises(ValueError, match="testing_name"):
        api.page()


@pytest.mark.parametrize("name", [name for name in ha.__all__ if inspect.isfunction(getattr(ha, name))])
def test_docstrings_say_what_is_raised_and_name_arguments(name: str) -> None:
    """Every public function's docstring has a summary, its arguments that exist, and what it raises."""
    function = getattr(ha, name)
    doc = inspect.getdoc(function) or ""
    parameters = inspect.signature(function).parameters
    assert doc.splitlines()[0].endswith((".", ":")), name
    if "\nArgs:" in doc:
        listed = [
            line.strip().partition(":")[0]
            for line in doc.split("\nArgs:")[1].split("\n\n")[0].splitlines()
            if line.startswith("    ") and not line.startswith("     ")
        ]
        assert set(listed) <= set(parameters), name
