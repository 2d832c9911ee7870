"""Write the documentation as a website: README.md, docs/, the public docstrings and what they link to.

python scripts/website.py [OUT]

The pages are copied with the folders that they are in, so that links between them stay. What else of the repository
they link to, code and folders, becomes pages too.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

import api
from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page for files in ("*", "docs/**/*", "benchmarks/results/*", "comfyui/*") for page in ROOT.glob(f"{files}.md")
)
PLOTS = sorted([*ROOT.glob("benchmarks/results/*.png"), *ROOT.glob("docs/*.png")])
STYLE = ROOT / "docs" / "site.css"

#: A link's text, target and anchor, or code, which has none of these.
LINK = re.compile(r"```.*?```|`[^`]*`|(?<!!)\[([^]]*)\]\(([^)\s#]+)(#[^)]*)?\)", re.DOTALL)

#: A file of code, or what is in a folder. A search would find little else if it looked into these.
SHOWN = """---
search:
  exclude: true
---

# `{name}`

{body}
"""


def slug(heading: str, separator: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def place(path: Path) -> Path:
    """Where the website's pages have a file or folder of the repository."""
    if path.is_dir():
        return path / "index.md"
    return path if path.suffix in (".md", ".png", ".json", ".css") else path.with_name(f"{path.name}.md")


def inside(link: re.Match[str]) -> bool:
    """Whether it leads to a file or folder of the repository."""
    return link[2] is not None and not link[2].startswith("https://")


def linked(page: Path) -> set[Path]:
    """What of the repository a page links to."""
    links = filter(inside, LINK.finditer(page.read_text()))
    return {target for link in links if (target := (page.parent / link[2]).resolve()).exists()}


def staged(page: Path) -> str:
    """A page with links to where the website has what they lead to."""

    def resolved(link: re.Match[str]) -> str:
        if not inside(link):
            return link[0]
        target = place((page.parent / link[2]).resolve())
        return f"[{link[1]}]({os.path.relpath(target, page.parent)}{link[3] or ''})"

    return LINK.sub(resolved, page.read_text())


def contents(path: Path) -> list[Path]:
    """The files of a folder; of a file, none."""
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []


def shown(path: Path) -> str:
    """A page that shows a file of code, or what is in a folder."""
    if path.is_dir():
        body = "\n".join(f"- [`{file.name}`]({place(file).name})" for file in contents(path))
    else:
        body = f"````{'python' if path.suffix == '.py' else 'text'}\n{path.read_text()}````"
    return SHOWN.format(name=path.relative_to(ROOT).as_posix(), body=body)


def write(out: Path) -> None:
    """Build the website into `out`.

    Raises:
        mkdocs.exceptions.Abort: a link leads nowhere, or a page is not in mkdocs.yml's navigation.
    """
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder)
        paths = [*PAGES, *PLOTS, STYLE]
        for path in paths:  # which grows by what pages link to
            copy = pages / place(path).relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                copy.write_text(staged(path))
                paths += sorted(linked(path).difference(paths))
            elif copy.suffix == ".md":
                copy.write_text(shown(path))
                paths += [file for file in contents(path) if file not in paths]
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
