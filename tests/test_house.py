"""The structure of the package: how many functions of it a call enters, in how many files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import pytest

import helion_attn as ha
from helion_attn import plans
from helpers.offline import fake_qkv
from helpers.planning import planning

PACKAGE = Path(ha.__file__).parent

#: The most functions of the package that `attention` enters, and the most files that they are in.
FIRST_CALL = 168, 35
LATER_CALL = 22, 10


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
        mock.patch.object(plans, "nothing_listens", asked(plans.nothing_listens)),
    ):
        ha.attention(*fake_qkv(1, 16, 16, 3000, 3000, 128), causal=True)
        qkv = fake_qkv(1, 16, 16, 2999, 2999, 128)
        first, later = (entered(lambda: ha.attention(*qkv, causal=True)) for _ in range(2))
    assert later < first
    assert ha.attention.__code__ in later
    for found, (functions, files) in ((first, FIRST_CALL), (later, LATER_CALL)):
        assert len(found) <= functions, sorted(code.co_name for code in found)
        assert len({code.co_filename for code in found}) <= files
