"""The tests that `make test` leaves to `make test-all`."""

from __future__ import annotations

from collections import defaultdict

import pytest

#: Where pytest keeps the option.
QUICK = "quick"


def dearest(items: list[pytest.Item]) -> set[pytest.Item]:
    """Choose what `--quick` leaves out: tests marked `thorough`, without `but` parameters of each, evenly spread.

    What is skipped anyway takes no time, and no place among the parameters that stay.
    """
    marked: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("thorough") and not item.get_closest_marker("skip"):
            marked[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for alike in marked.values():
        mark = alike[0].get_closest_marker("thorough")
        assert mark is not None
        assert not mark.args, f"{alike[0].nodeid}: thorough takes but=n"
        kept = min(mark.kwargs.get("but", 0), len(alike))
        left_out.update(set(alike) - {alike[i * len(alike) // kept] for i in range(kept)})
    return left_out
