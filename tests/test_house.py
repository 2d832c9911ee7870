"""The structure of the package: imports go down and make no circle, and a call enters few functions in few files."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import pytest

import helion_attn as ha
from helion_attn import plans
from helpers.offline import fake_qkv
from helpers.planning import planning

ROOT = Path(__file__).parents[1]
PACKAGE = Path(ha.__file__).parent

#: Files and folders of the package, a floor a line, from the top: each imports of its own floor and of those below.
FLOORS = (
    "__init__ __main__ tritonbench",
    "integrations",
    "debugging report check explain",
    "distributed",
    "api varlen kv_cache pages transforms auto",
    "backward",
    "reference",
    "masks",
    "ops",
    "preprocess",
    "kernels",
    "plans",
    "compiler",
    "validate names public_calls problem options types configs numerics caller support debug_state testing version",
)

#: The most functions of the package that `attention` enters, and the most files that they are in.
FIRST_CALL = 133, 29
LATER_CALL = 16, 5


def modules_of(folder: Path) -> dict[str, Path]:
    """The modules of a package, by name."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path) -> Iterator[str]:
    """Names that a file imports, wherever: for a checker of types alone, or in a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports(*folders: Path) -> dict[str, set[str]]:
    """What each module of some packages imports of them."""
    modules = {name: path for folder in folders for name, path in modules_of(folder).items()}
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for full in imported(path):
            # Of a name that is no module, the module that it is in.
            graph[name] |= {full if full in modules else full.rpartition(".")[0]} & {*modules}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty if none do."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """What the modules of the repository's packages import of them."""
    return imports(PACKAGE, ROOT / "devtools", ROOT / "benchmarks")


def test_imports_make_no_circle(graph: dict[str, set[str]]) -> None:
    assert circle(graph) == []


@pytest.mark.parametrize(
    "closing",
    [
        *("import pack.a", "from pack import a", "from pack.a import x", "def f():\n    from pack.a import x"),
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.a import x",
    ],
)
def test_a_circle_is_found(closing: str, tmp_path: Path) -> None:
    (folder := tmp_path / "pack").mkdir()
    for name, text in (("__init__", ""), ("a", "from pack.b import y\nx = 1"), ("b", "y = 1")):
        (folder / f"{name}.py").write_text(text)
    assert circle(imports(folder)) == []
    (folder / "b.py").write_text(f"{closing}\ny = 1")
    assert {*circle(imports(folder))} == {"pack.a", "pack.b"}


def room(module: str) -> str:
    """The file or folder in the package that a module is, or is in."""
    return module.split(".")[1] if "." in module else "__init__"


def test_imports_go_down(graph: dict[str, set[str]]) -> None:
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()}
    package = modules_of(PACKAGE)
    assert {room(name) for name in package} == {*floor_of}
    found = [(name, other) for name in package for other in graph[name]]
    assert len(found) > 500
    assert [pair for pair in found if pair[1] not in package] == []
    assert [(name, other) for name, other in found if floor_of[room(other)] < floor_of[room(name)]] == []


def entered(call: Callable[[], object]) -> set[CodeType]:
    """Find the functions of the package that a call enters. What a comprehension runs belongs to its function."""
    found: set[CodeType] = set()

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            found.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    named = (code for code in found if not code.co_name.startswith("<") or code.co_name == "<lambda>")
    return {code for code in named if Path(code.co_filename).is_relative_to(PACKAGE)}


def asked(question: Callable[..., bool]) -> Callable[..., bool]:
    """The question, whose answer is yes."""
    return lambda *args: question(*args) or True


@pytest.mark.once
def test_a_call_enters_few_functions() -> None:
    """On a GPU's tensors, whose kernels are compiled: a first call of its lengths makes a plan, a later one runs it."""
    with (
        planning(),
        # A fake tensor is not plain, and the mode that made it listens; a call asks both.
        mock.patch.object(plans, "is_plain", asked(plans.is_plain)),
        mock.patch.object(plans, "can_skip_dispatcher", asked(plans.can_skip_dispatcher)),
    ):
        ha.attention(*fake_qkv(1, 16, 16, 3000, 3000, 128), causal=True)
        qkv = fake_qkv(1, 16, 16, 2999, 2999, 128)
        first, later = (entered(lambda: ha.attention(*qkv, causal=True)) for _ in range(2))
    assert later < first
    assert ha.attention.__code__ in later
    for found, (functions, files) in ((first, FIRST_CALL), (later, LATER_CALL)):
        assert len(found) <= functions, sorted(code.co_name for code in found)
        assert len({code.co_filename for code in found}) <= files
