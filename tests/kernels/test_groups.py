"""Heads whose programs come at once: every row is right, whatever their number, and the longest rows come first."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from devtools.inputs import make_qkv
from helion_attn.configs import scheduling
from helpers.cases import make_case
from helpers.ir_machine import Machine
from helpers.offline import compile_attention
from helpers.passes import split_at_loop
from helpers.sequences import assert_right, make_varlen_case, packed_qkv, tables
from helpers.shared import shared_ir

#: Programs of a group: fewer than a head has, some heads' (with one left over, of five), and all heads'.
GROUPS = [1, 7, 1000]


@pytest.fixture(params=GROUPS)
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """`scheduling.group_programs`, whatever the GPU."""
    monkeypatch.setattr(scheduling, "group_programs", lambda *_: request.param)
    scheduling.head_group.cache_clear()
    yield request.param
    scheduling.head_group.cache_clear()


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize(
    ("heads", "D", "D_v", "right"),
    [((6, 2), 64, 64, 5), ((5, 5), 128, 128, 0), ((6, 6), 192, 128, 0), ((4, 2), 512, 512, 0)],
)
def test_all_rows_are_right(
    heads: tuple[int, int],
    D: int,
    D_v: int,
    right: int,
    programs: int,
    device: str,
    poisoned: Callable[[], AbstractContextManager[None]],
) -> None:
    qkv = make_qkv("randn", 1, *heads, 140, 170, D, device=device, D_v=D_v)
    case = make_case(qkv, window=(-1, right))
    with poisoned():
        out, lse = case.run(torch.float32)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)


def test_heads_that_share_tiles(
    programs: int, device: str, poisoned: Callable[[], AbstractContextManager[None]]
) -> None:
    case = make_case(make_qkv("randn", 2, 24, 6, 40, 300, 64, device=device), causal=True)
    with poisoned():
        out, _ = case.run(torch.float32)
    case.assert_within_budget(out)


def test_packed_sequences(programs: int, device: str, poisoned: Callable[[], AbstractContextManager[None]]) -> None:
    batch = [(200, 200), (0, 3), (70, 300), (1, 1)]
    cu = tables(batch, device)
    case = make_varlen_case(packed_qkv(batch, device, H=5, H_kv=5), cu, causal=True)
    with poisoned():
        assert_right(case, cu)


class Program(Machine):
    """One of a kernel's: what it copies of Q."""

    def __init__(self, values: dict[str, int], program: int) -> None:
        super().__init__(values)
        self.program = program
        self.head_and_block: tuple[int, int] | None = None

    def step(self, op: str, rest: str, names: list[str], given: list[Any]) -> Any:
        if op == "tt.get_program_id":
            return self.program
        if "async_tma_copy" in op and names[0].startswith("%q8"):
            self.head_and_block = (given[1], given[2])
        return super().step(op, rest, names, given)


def order_of_programs(text: str, heads: int, blocks: int, head_group: int) -> list[tuple[int, int] | None]:
    """Head and query block of every program of a kernel, from its IR."""
    before, _, _ = split_at_loop(text)
    (function,) = [line for line in before if "tt.func " in line]
    sizes = {"%m_blocks": blocks, "%head_group": head_group}
    arguments = {name: sizes.get(name, 1) for name in re.findall(r"(%\w+): i(?:32|64)", function)}
    assert sizes.keys() <= arguments.keys()
    programs = [Program(arguments, i) for i in range(heads * blocks)]
    for program in programs:
        program.run(before)
    return [program.head_and_block for program in programs]


@pytest.mark.parametrize("head_group", [1, 2, 6])
def test_order(head_group: int) -> None:
    text, _ = shared_ir(functools.partial(compile_attention, 64, True))[0]
    order = order_of_programs(text, 6, 4, head_group)
    assert order == [
        (first + member, block)
        for first in range(0, 6, head_group)
        for block in (3, 2, 1, 0)
        for member in range(head_group)
    ]


def test_no_order_but_the_grids_without_a_mask() -> None:
    text, _ = shared_ir(functools.partial(compile_attention, 64, False))[0]
    assert "head_group" not in text
