"""The README as PyPI shows it, where relative links lead nowhere: pyproject.toml names this file as a hook of hatch.

With `[project.urls] Repository` in pyproject.toml they lead there. Without it their text stays, pictures go, and so
does the section that has links alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: A link or a picture: `!` or nothing, the text, the target. Text may hold code, but no link.
LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)\s]+)\)")
LINKS_ALONE = re.compile(r"\n## Links\n.*?(?=\n## |\Z)", re.DOTALL)


def long_description(readme: str, repository: str | None) -> str:
    """The text for PyPI.

    Args:
        readme: README.md.
        repository: where its relative links lead, as "https://github.com/OWNER/NAME"; None for nowhere.
    """

    def resolved(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        if target.startswith(("https://", "http://")):
            return link[0]
        # PyPI gives headings no anchors.
        if repository is None or target.startswith("#"):
            return "" if picture else text
        return f"{picture}[{text}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/HEAD/{target})"

    text = re.sub(r"^<!-- .* -->\n\n?", "", readme, flags=re.MULTILINE)
    if repository is None:
        text = LINKS_ALONE.sub("", text)
    text = LINK.sub(resolved, text)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


class LongDescription(MetadataHookInterface):
    """Has hatch take the README so."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`."""
        text = long_description((Path(self.root) / "README.md").read_text(), metadata.get("urls", {}).get("Repository"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
