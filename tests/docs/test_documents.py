"""The documents: snippets run, links resolve, sizes are kept, and every page says what it answers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helion_attn.testing import relative_error

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")), *DOCS]

#: Of README.md; of docs/ without what scripts write; of all pages with it. Tables are in benchmarks/results.
MOST_BYTES, MOST_TYPED, MOST_WORDS = 10_000, 19_000, 35_000

MOST_PLOTS = 8


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def typed(text: str) -> str:
    """What no script writes."""
    return re.sub(r"<!-- (\S+) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL)


def prose(text: str) -> str:
    """Without code, tables and drawings."""
    lines = re.sub(r"```.*?```", "", typed(text), flags=re.DOTALL).splitlines()
    return "\n".join(line for line in lines if not line.startswith(("|", "    ")))


def words(text: str) -> int:
    return sum(any(c.isalnum() for c in word) for word in text.split())


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)


def anchors(text: str) -> set[str]:
    seen: dict[str, int] = {}
    found = set()
    for each in map(slug, headings(text)):
        found.add(f"{each}-{seen[each]}" if each in seen else each)
        seen[each] = seen.get(each, 0) + 1
    return found


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c's\n[1](#a-b-cs) [2](#a) [3](other.md) [4](page.md#a-b-cs) [5](https://no.where)\n")
    assert broken_links(page) == ["#a", "other.md"]


def test_documents_named_in_code_exist() -> None:
    files = [path for folder in ("helion_attn", "devtools", "benchmarks", "scripts", "examples", "tests") for path in
             (ROOT / folder).rglob("*.py")]  # fmt: skip
    named = {(path, match) for path in files for match in re.findall(r"\bdocs/[\w/]+\.md", path.read_text())}
    assert len(named) > 10
    assert [(name(path), match) for path, match in named if not (ROOT / match).exists()] == []


def test_sizes() -> None:
    assert README.stat().st_size <= MOST_BYTES
    texts = {name(page): page.read_text() for page in PAGES}
    counted = {page: (words(typed(text)), words(text)) for page, text in texts.items()}
    assert sum(count for page, (count, _) in counted.items() if page.startswith("docs/")) <= MOST_TYPED, counted
    assert sum(count for _, count in counted.values()) <= MOST_WORDS, counted
    text = "<!-- results:x -->\n| 1 | 2 |\n<!-- /results:x -->\nthree words - here"
    assert (words(typed(text)), words(text)) == (3, 7)
    plots = [len(re.findall(r"!\[", page.read_text())) for page in DOCS]
    assert sum(plots) > 10
    assert max(plots) <= MOST_PLOTS


def sentences(text: str) -> set[str]:
    joined = " ".join(prose(text).split())
    return {sentence for sentence in re.split(r"(?<=[.:?!]) ", joined) if words(sentence) >= 6}


def test_no_sentence_stands_in_two_files() -> None:
    found = {page: sentences(page.read_text()) for page in PAGES}
    assert sum(map(len, found.values())) > 500
    shared = [(name(a), name(b), found[a] & found[b]) for a, b in itertools.combinations(found, 2)]
    assert [each for each in shared if each[2]] == []


def test_the_front_page_has_no_measured_figure_of_its_own() -> None:
    """Times, ratios and errors stand in blocks alone."""
    text = re.sub(r"```.*?```", "", typed(README.read_text()), flags=re.DOTALL)
    assert re.findall(r"\d+(?:\.\d+)? ?(?:%|(?:ms|us|s|TFLOP/s|times|x)\b)|\b[01]\.\d{2,}\b", text) == []


def test_messages_that_are_explained_exist() -> None:
    quoted = re.findall(
        r'^\| (?:an `ImportError` of )?"([^"]+)"', (ROOT / "docs" / "troubleshooting.md").read_text(), re.M
    )
    assert len(quoted) >= 4
    code = " ".join(path.read_text() for folder in ("helion_attn", "scripts") for path in (ROOT / folder).rglob("*.py"))
    joined = re.sub(r'"\s+f?"', "", code)
    assert [message for message in quoted if message not in joined] == []


# --- snippets -------------------------------------------------------------------------------------


def snippets(page: Path) -> dict[str, str]:
    """Python by the heading that it stands under."""
    found: dict[str, str] = {}
    heading = ""
    for part in re.split(r"(^#+ [^\n]*$|```python\n.*?```)", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        if part.startswith("#"):
            heading = part.lstrip("# ")
        elif part.startswith("```python\n"):
            assert heading not in found, "a heading has one snippet, which a test can name"
            found[heading] = part.removeprefix("```python\n").removesuffix("```")
    return found


#: The documents of docs/masks.md.
PARTS = (slice(0, 100), slice(100, 300))


def check_five_lines(names: dict[str, Any], printed: str) -> None:
    exact = names["ha"].reference.attention(*(names[x] for x in "qkv"), causal=True)
    assert 0.005 < relative_error(names["out"], exact) < 0.06
    assert "BALANCED" in printed
    assert "16 bits" in printed
    assert len([line for line in snippets(README)["Call it, or train with it"].splitlines() if line]) == 5


def check_which_recipe(names: dict[str, Any], printed: str) -> None:
    assert names["found"].asked == "FAST"
    assert "K has a channel whose mean" in printed


def check_masks(names: dict[str, Any], printed: str) -> None:
    alone = [names["ha"].attention(*(names[x][:, :, part] for x in "qkv"), causal=True) for part in PARTS]
    for part, own in zip(PARTS, alone, strict=True):
        assert relative_error(names["out"][:, :, part], own) < 0.08
    assert "M=300, N=300" in printed


def check_distributed(names: dict[str, Any], printed: str) -> None:
    assert torch.distributed.get_world_size() == 1
    torch.distributed.destroy_process_group()
    assert names["whole"].shape == (1, 2, 256, 64)
    assert torch.equal(names["whole"], names["out"])
    assert not names["out"].isnan().any()


def check_from_flex(names: dict[str, Any], printed: str) -> None:
    alone = [names["ha"].attention(*(names[x][:, :, part] for x in "qkv"), causal=True) for part in PARTS]
    assert relative_error(names["out"], torch.cat(alone, 2)) < 0.08


def check_training(names: dict[str, Any], printed: str) -> None:
    q, k, v = (names[x].detach().double().requires_grad_() for x in "qkv")
    names["ha"].reference.attention(q, k, v, causal=True).sum().backward()
    for name, x in (("q", q), ("k", k), ("v", v)):
        assert relative_error(names[name].grad, x.grad) < 0.05
    assert printed.strip()


#: What holds of the names that a snippet leaves, and of what it prints.
CHECKED: dict[tuple[str, str], Callable[[dict[str, Any], str], None]] = {
    ("README.md", "Call it, or train with it"): check_five_lines,
    ("docs/accuracy.md", "Check your tensors"): check_which_recipe,
    ("docs/distributed.md", "Example"): check_distributed,
    ("docs/masks.md", "An example"): check_masks,
    ("docs/migrating.md", "From FlexAttention"): check_from_flex,
    ("docs/training.md", "Training"): check_training,
}

#: `test_integrations.py` has those of these pages.
ELSEWHERE = {"docs/integrations.md", "docs/kv_cache.md"}


@pytest.mark.parametrize(("page", "heading"), CHECKED)
def test_snippets(page: str, heading: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    for variable in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    torch.manual_seed(0)
    exec(compile(snippets(ROOT / page)[heading], f"{page}: {heading}", "exec"), names)
    CHECKED[page, heading](names, capsys.readouterr().out)


def test_every_snippet_runs() -> None:
    pages = [page for page in PAGES if name(page) not in ELSEWHERE]
    assert {(name(page), heading) for page in pages for heading in snippets(page)} == set(CHECKED)
