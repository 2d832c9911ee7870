"""What PyPI shows: the README without links that lead nowhere there, and what a search finds the package by."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.metadata.spec import DEFAULT_METADATA_VERSION, get_core_metadata_constructors
from hatchling.plugin.manager import PluginManager
from packaging.metadata import Metadata

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


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
    assert {"docs/masks.md", "comfyui/README.md"} <= set(targets(README))
    assert targets('![](a.png)\n[a]: b.md\n<img src="c.png"> <a href=d.md>') == ["a.png", "b.md", "c.png", "d.md"]
