"""What GitHub and pre-commit read: it parses, and runs what the Makefile has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import helion_attn as ha

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
MAKEFILE = (ROOT / "Makefile").read_text()


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def recipe(target: str) -> list[str]:
    """A target's commands, as they run in the default environment."""
    match = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)
    assert match is not None, target
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in match[1].splitlines()]


def test_the_workflow_runs_the_two_commands() -> None:
    (job,) = parsed(GITHUB / "workflows" / "test.yml")["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["make test-all", "make demo"]
    assert all(recipe(command.removeprefix("make ")) for command in commands)
    supported = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert set(job["strategy"]["matrix"]["python"]) == {supported[0], supported[-1]}


def test_hooks_are_the_linters_of_make() -> None:
    (local,) = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    entries = [hook["entry"] for hook in local["hooks"]]
    linters = [line.removesuffix(" .") for line in recipe("lint")]
    assert entries == linters


def test_the_citations_agree() -> None:
    cited = parsed(ROOT / "CITATION.cff")
    entry = re.search(r"```bibtex\n@software\{(\w+),\n(.*?)^\}", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    assert entry is not None
    fields = dict(re.findall(r"^  (\w+) = \{+(.*?)\}+,$", entry[2], flags=re.M))
    assert entry[1] == "helion_attn"
    (author,) = cited["authors"]
    assert fields == {"title": cited["title"], "author": author["name"], "version": cited["version"]}
    assert cited["version"] == ha.__version__


@pytest.mark.parametrize("template", ["wrong", "slow", "request"])
def test_issue_templates(template: str) -> None:
    form = parsed(GITHUB / "ISSUE_TEMPLATE" / f"{template}.yml")
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] == "textarea"]
    assert fields
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)
    for called in re.findall(r"\bha\.(\w+)\(", (GITHUB / "ISSUE_TEMPLATE" / f"{template}.yml").read_text()):
        assert called in ha.__all__
