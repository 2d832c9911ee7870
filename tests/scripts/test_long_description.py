"""What PyPI shows: the README without links that lead nowhere there, and what a search finds the package by."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.metadata.spec import DEFAULT_METADATA_VERSION, get_core_metadata_constructors
from hatchling.plugin.manager import PluginManager
from packaging.metadata import Metadata

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        return importlib.import_module("long_description")


@pytest.fixture(scope="module")
def metadata() -> Metadata:
    built = get_core_metadata_constructors()[DEFAULT_METADATA_VERSION](ProjectMetadata(str(ROOT), PluginManager()))
    return Metadata.from_email(built, validate=True)


def targets(text: str) -> list[str]:
    """Of links, pictures, link definitions and HTML."""
    return [
        *re.findall(r"\]\(([^)\s]*)", text),
        *re.findall(r"^\[[^]]+\]: *(\S+)", text, flags=re.MULTILINE),
        *re.findall(r"(?:href|src)=[\"']?([^\"' >]+)", text),
    ]


def test_every_link_resolves(metadata: Metadata) -> None:
    assert metadata.description
    assert metadata.description_content_type == "text/markdown"
    found = targets(metadata.description)
    assert "https://github.com/pytorch/helion" in found
    assert [link for link in found if not link.startswith("https://")] == []


def test_relative_links_are_found() -> None:
    """So the test above can fail."""
    assert {"docs/masks.md", "#integrations"} <= set(targets(README))
    assert targets('![](a.png)\n[a]: b.md\n<img src="c.png"> <a href=d.md>') == ["a.png", "b.md", "c.png", "d.md"]


def test_nothing_else_is_lost(metadata: Metadata, script: ModuleType) -> None:
    shown = metadata.description or ""
    assert "<!--" not in shown
    assert "\n\n\n" not in shown
    expected = script.LINKS_ALONE.sub("", README)
    assert expected.endswith("}\n```\n"), "what comes after it stays"
    for heading in re.findall(r"^#+ .*$", expected, flags=re.MULTILINE):
        assert f"{heading}\n" in shown
    for line in expected.splitlines():
        if "](" not in line and not line.startswith("<!--"):
            assert line in shown


def test_links_into_a_repository(script: ModuleType) -> None:
    shown = script.long_description(README, "https://example.org/a/b/")
    found = targets(shown)
    base = re.compile(r"https://example\.org/a/b/(blob|raw)/HEAD/([^#]+)")
    there = {match[2]: match[1] for link in found if (match := base.match(link))}
    assert {link.partition("#")[0] for link in targets(README) if not link.startswith(("https://", "#"))} == set(there)
    for path, kind in there.items():
        assert (ROOT / path).exists()
        assert kind == ("raw" if path.endswith(".png") else "blob")
    assert script.LINKS_ALONE.search(shown)
    assert [link for link in found if not link.startswith("https://")] == []


def test_what_a_search_finds(metadata: Metadata) -> None:
    """The hatch that builds it knows PyPI's classifiers, and refuses others."""
    assert {"attention", "Hopper", "FP8"} <= set(metadata.keywords or [])
    assert "Topic :: Scientific/Engineering :: Artificial Intelligence" in (metadata.classifiers or [])


def test_one_repository_is_named(metadata: Metadata) -> None:
    cited = re.search(r"^repository-code: (\S+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert (metadata.project_urls or {}).get("Repository") == (cited[1].strip("\"'") if cited else None)
