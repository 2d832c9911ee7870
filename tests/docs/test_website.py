"""`make site`: every page is in it, links lead somewhere, and a browser asks nobody else for anything."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

pytest.importorskip("material", reason="mkdocs-material is not installed")


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
    pages = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "comfyui/README.md"))]
    pages += (ROOT / "docs").rglob("*.md")
    pages += (ROOT / "benchmarks" / "results").glob("*.md")
    assert [page for page in pages if not (site / html(page)).exists()] == []
    assert 'id="haattention_varlen"' in (site / "docs" / "api.html").read_text()
    assert "<table>" in (site / "docs" / "benchmarks" / "overheads.html").read_text()
    assert (site / "benchmarks" / "results" / "heat.png").exists()


def test_code_that_is_linked_is_a_page(site: Path) -> None:
    assert 'href="examples/tour.py.html"' in (site / "index.html").read_text()
    assert '<span class="kn">import</span>' in (site / "examples" / "tour.py.html").read_text()
    folder = site / "helion_attn" / "configs"
    links = re.findall(r'href="([^"]*)"><code>', (folder / "index.html").read_text())
    assert {"__init__.py.html", "auto.json"} <= {*links}
    assert [link for link in links if not (folder / link).exists()] == []


def test_code_in_a_page_stays(website: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`x[i](y.py)` [`a`](b.py) [c](d.md#e)\n```\nx[i](y.py)\n```\n")
    assert website.staged(page) == "`x[i](y.py)` [`a`](b.py.md) [c](d.md#e)\n```\nx[i](y.py)\n```\n"


def test_a_browser_asks_nobody_else(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    elsewhere = re.compile(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="?(?:https?:)?//')
    assert [page for page in pages if elsewhere.search(page.read_text())] == []
    imported = re.compile(r"(?:@import|url\()[\s\"']*(?:https?:)?//")
    assert [style for style in site.rglob("*.css") if imported.search(style.read_text())] == []


@pytest.mark.parametrize("link", ["[x](missing.md)", "[x](accuracy.md#missing)"])
def test_a_broken_link_fails(link: str, website: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = website.staged

    def broken(page: Path) -> str:
        text = str(staged(page))
        return f"{text}\n{link}\n" if page.name == "choosing.md" else text

    monkeypatch.setattr(website, "staged", broken)
    with pytest.raises(SystemExit):
        website.write(tmp_path)
