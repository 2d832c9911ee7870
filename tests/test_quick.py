"""`--quick` leaves out tests that take long, and keeps some of each that has several parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.quick import dearest


def items_of(name: str, parameters: int, mark: pytest.Mark | None) -> list[Any]:
    """Tests as pytest collects them."""
    ids = [f"{name}[{i}]" for i in range(parameters)] or [name]
    return [cast(Any, Test(nodeid=x, get_closest_marker={"thorough": mark}.get)) for x in ids]


class Test(SimpleNamespace):
    """One test, known by its identity."""

    __test__ = False

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


@pytest.mark.parametrize(("but", "kept"), [(0, ""), (1, "0"), (2, "03"), (3, "024"), (7, "0123456"), (9, "0123456")])
def test_so_many_parameters_stay(but: int, kept: str) -> None:
    marked = items_of("f.py::test_a", 7, pytest.mark.thorough(but=but).mark)
    left_out = dearest([*items_of("f.py::test_b", 3, None), *marked])
    assert "".join(x.nodeid[-2] for x in marked if x not in left_out) == kept
    assert left_out <= set(marked)


def test_a_number_without_its_name_fails() -> None:
    """Otherwise it would keep nothing."""
    with pytest.raises(AssertionError, match=r"f.py::test_a\[0\]: thorough takes but=n"):
        dearest(items_of("f.py::test_a", 5, pytest.mark.thorough(3).mark))


def test_what_is_skipped_takes_no_place() -> None:
    mark = pytest.mark.thorough(but=1).mark
    skipped, first, second = items_of("f.py::test_a", 3, mark)
    skipped.get_closest_marker = {"thorough": mark, "skip": pytest.mark.skip.mark}.get
    assert dearest([skipped, first, second]) == {second}
