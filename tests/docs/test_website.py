"""`make site`: every page is in it, links lead somewhere, and a browser asks nobody else for anything."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

pytest.importorskip("mkdocs", reason="mkdocs is not installed")


@pytest.fixture(scope="module")
def website() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        return importlib.import_module("website")


@pytest.fixture(scope="module")
def site(website: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    website.write(folder)
    return folder


def html(path: Path) -> str:
    """Where mkdocs puts a page; a README is a folder's index."""
    return path.relative_to(ROOT).with_suffix(".html").as_posix().replace("README.html", "index.html")


def test_every_page_is_there(site: Path) -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    pages += (ROOT / "benchmarks" / "results").glob("*.md")
    assert [page for page in pages if not (site / html(page)).exists()] == []
    assert 'id="haattention_varlen"' in (site / "docs" / "api.html").read_text()
    assert "<table>" in (site / "docs" / "benchmarks" / "overheads.html").read_text()
    assert (site / "benchmarks" / "results" / "heat.png").exists()


@pytest.mark.parametrize("link", ["[x](missing.md)", "[x](accuracy.md#missing)"])
def test_a_broken_link_fails(link: str, website: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = website.staged

    def broken(page: Path, repository: str | None) -> str:
        text = str(staged(page, repository))
        return f"{text}\n{link}\n" if page.name == "choosing.md" else text

    monkeypatch.setattr(website, "staged", broken)
    with pytest.raises(SystemExit):
        website.write(tmp_path)
