"""Write the documentation as a website: README.md, docs/, the public docstrings and what they link to.

python scripts/website.py [OUT]

The pages are copied with the folders that they are in, so that links between them stay. Links to code lead into the
repository that pyproject.toml names. Without one their text stays.
"""

from __future__ import annotations

import argparse
import logging
import re
import shutil
import tempfile
from pathlib import Path

import api
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).parents[1]
PAGES = sorted(page for folder in ("*", "docs/**/*", "benchmarks/results/*") for page in ROOT.glob(f"{folder}.md"))
PLOTS = sorted([*ROOT.glob("benchmarks/results/*.png"), *ROOT.glob("docs/*.png")])
LINK = re.compile(r"(?<!!)\[([^]]*)\]\(([^)\s#]+)(#[^)]*)?\)")


def slug(heading: str, separator: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def staged(page: Path, repository: str | None) -> str:
    """A page with links that the website has."""

    def resolved(link: re.Match[str]) -> str:
        target = (page.parent / link[2]).resolve()
        if link[2].startswith("https://") or target in PAGES or target in PLOTS:
            return link[0]
        if repository is None:
            return link[1]
        return f"[{link[1]}]({repository.rstrip('/')}/blob/HEAD/{target.relative_to(ROOT).as_posix()})"

    return LINK.sub(resolved, page.read_text())


def write(out: Path) -> None:
    """Build the website into `out`.

    Raises:
        mkdocs.exceptions.Abort: a link leads nowhere, or a page is not in mkdocs.yml's navigation.
    """
    repository = (ProjectMetadata(str(ROOT), PluginManager()).core.urls or {}).get("Repository")
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder)
        for path in (*PAGES, *PLOTS):
            copy = pages / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path in PAGES:
                copy.write_text(staged(path, repository))
            else:
                shutil.copy(path, copy)
        (pages / "docs" / "api.md").write_text(api.page())
        config = load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(pages), site_dir=str(out), strict=True)
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
        config.plugins.on_shutdown()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "build" / "site")
    write(parser.parse_args().out.resolve())
