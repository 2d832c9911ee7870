"""Loads that are moved: every block comes once, in time, and into a buffer that nobody reads."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

import helion_attn as ha
from helion_attn.compiler.passes import early_copies, single_k_buffer
from helion_attn.compiler.passes.ttgir import COPY, EXPECT, PRODUCT, VALUE, WAIT_FOR_PRODUCT
from helion_attn.configs import tile_config
from helpers.cases import IN_E4M3
from helpers.ir_machine import Machine, run
from helpers.offline import compile_attention, compile_decode, compile_shape, compile_tile, compile_varlen
from helpers.passes import operation, split_at_loop
from helpers.shared import shared_ir

# Kernels without a pass, which these tests leave out or which needs none, are no failure here.
pytestmark = pytest.mark.filterwarnings("ignore::helion_attn.compiler.slower.SlowerWarning")

ONE_LEVEL = replace(IN_E4M3, promote_every=0)

#: Kernels, and how their loops are to look, by letters of `LETTERS`.
KERNELS: dict[str, tuple[functools.partial[Any], str]] = {
    "two_level_2_stages": (functools.partial(compile_attention, 128, False), "WIBECCBFIF"),
    "two_level_3_stages": (functools.partial(compile_attention, 64, True, recipe=ha.BALANCED), "WIBECCBFIF"),
    "one_level_2_stages": (functools.partial(compile_attention, 128, True, recipe=ONE_LEVEL), "WIBECECBFWI"),
    "one_level_3_stages": (functools.partial(compile_attention, 256, False, recipe=ONE_LEVEL), "WIBECCBFI"),
    "halves_3_stages": (functools.partial(compile_attention, 256, False, recipe=ha.BALANCED), "WIBECCCBFIFIF"),
    "halves_2_stages": (
        functools.partial(compile_tile, dataclasses.replace(tile_config(256, True), num_stages=2)),
        "WIBECECCBFWIFIF",
    ),
    "pieces_pingpong": (
        functools.partial(compile_attention, 512, True, D_v=512, recipe=ha.BALANCED),
        "WIIBECCCCBFIFIF",
    ),
    "hybrid_2_stages": (functools.partial(compile_attention, 256, False, recipe=ha.HYBRID), "WIBECECBFWI"),
    "sequences": (functools.partial(compile_varlen, 256, True), "WIBECCCBFIFIF"),
    "many_keys_2_stages": (
        functools.partial(compile_shape, 1, 10000, 2**23 + 2**20, 256, True, recipe=ha.BF16),
        "WIBECECBFWI",
    ),
    "split": (functools.partial(compile_shape, 1, 64, 100000, 256, False, recipe=ha.BALANCED), "WIBECCCBFIFIF"),
    "single_k": (functools.partial(compile_attention, 192, False, D_v=128), "WIIFBECCCBIF"),
    "single_k_int8": (functools.partial(compile_attention, 192, True, D_v=128, recipe=ha.BALANCED), "WIIFBECCCBIF"),
    "pieces_2_stages": (
        functools.partial(compile_attention, 1024, False, D_v=1024, recipe=ha.BALANCED),
        "WIIIIBECCCCECCBFWIFIF",
    ),
    "more_pieces_of_v": (
        functools.partial(compile_attention, 640, True, D_v=640, recipe=ha.BALANCED),
        "WIIIBECCCECCCBFWIFIFIF",
    ),
}

#: Likewise, of kernels that walk a list of key blocks.
LISTS: dict[str, tuple[functools.partial[Any], str]] = {
    "list_2_stages": (functools.partial(compile_attention, 128, False, listed=True), "WIBECCBFIF"),
    "list_3_stages": (functools.partial(compile_attention, 64, False, listed=True), "WIBECCBFIF"),
    "list_pingpong": (
        functools.partial(compile_attention, 256, False, recipe=ha.BALANCED, listed=True),
        "WIBECCCBFIFIF",
    ),
    "list_stagger_v": (functools.partial(compile_attention, 128, False, recipe=ha.BF16, listed=True), "WIBECECBFWI"),
    "list_hybrid": (functools.partial(compile_attention, 256, True, recipe=ha.HYBRID, listed=True), "WIBECECBFWI"),
}

#: Likewise, of kernels whose key blocks are pages that a table lists.
PAGES: dict[str, tuple[functools.partial[Any], str]] = {
    "decode": (functools.partial(compile_decode, 64, 64, 64, 1, num_splits=1), "WIBECCBFIFIF"),
}

LETTERS = {
    "ttng.wait_barrier": "W",
    "ttng.warp_group_dot": "I",
    "ttng.warp_group_dot_wait": "F",
    "gpu.barrier": "B",
    "ttng.barrier_expect": "E",
    "ttng.async_tma_copy_global_to_local": "C",
}


@functools.cache
def texts(name: str) -> tuple[str, str]:
    """Triton's IR of a kernel, and what the pass makes of it."""
    before, after = shared_ir((KERNELS | LISTS | PAGES)[name][0])[0]
    assert after is not None
    return before, after


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", [*KERNELS, *LISTS, *PAGES])
def test_order(name: str) -> None:
    _, _, body = split_at_loop(texts(name)[1])
    order = "".join(LETTERS.get(operation(line)[1], "") for line in body)
    assert order == (KERNELS | LISTS | PAGES)[name][1]


@pytest.mark.thorough(but=5)
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_else_changes(name: str) -> None:
    """Lines are moved; others are new, or no more: barriers, the index of the block, what V has of its own."""
    before, after = (Counter(operation(line)[1] for line in text.split("\n")) for text in texts(name))
    new = Counter({"gpu.barrier": 4})
    gone = Counter[str]()
    form = KERNELS[name][1]
    if form in ("WIBECCBFI", "WIBECCCBFIFIF", "WIIBECCCCBFIFIF"):
        new += Counter({"arith.constant": 2, "arith.addi": 2, "arith.cmpi": 2, "arith.andi": 1})
    if "WI" in form[1:]:  # V comes a block behind K
        new += Counter({"ttg.local_alloc": 1, "arith.constant": 3, "ttg.memdesc_index": 3})
        new += Counter(
            {"ttng.init_barrier": 2, "ttng.inval_barrier": 2, "ttng.barrier_expect": 1, "ttng.wait_barrier": 1}
        )
        # Where V is copied from.
        new += Counter({"arith.muli": 1, "arith.addi": 1} if form.count("C") > 2 else {})
        new += {"many_keys_2_stages": Counter({"arith.trunci": 1})}.get(name, Counter())
        # V of the first block comes in the loop.
        of_v, of_k = form[form.rindex("E") :].count("C"), form[: form.index("B")].count("I")
        gone = Counter({"ttng.async_tma_copy_global_to_local": of_v, "ttng.warp_group_dot_wait": of_k - 1})
    if form == "WIIBECCCCBFIFIF":
        gone = Counter({"ttng.warp_group_dot_wait": 1})
    if form == "WIIFBECCCBIF":
        new += Counter({"arith.constant": 1})
        gone = Counter({"ttng.warp_group_dot_wait": 1})
    assert (after - before, before - after) == (new, gone)


def assert_all_blocks(machine: Machine, first: int, end: int, tensors: int) -> None:
    """Products found, of every tensor, each block's own: coordinates are one factor times the block, and the part."""
    if first < end:
        assert len(machine.found) == tensors
    for coordinates in machine.found.values():
        assert list(coordinates) == list(range(first, end))
        steps = {coordinates[i + 1] - coordinates[i] for i in range(first, end - 1)}
        assert len(steps) <= 1
        assert 0 not in steps


@pytest.mark.thorough(but=5)
@pytest.mark.parametrize("name", KERNELS)
def test_blocks_and_buffers(name: str) -> None:
    """Products find each block, however many there are, and no buffer is written before all warps have read it."""
    after = texts(name)[1]
    copies = KERNELS[name][1].count("C")
    starts_at_0 = re.search(rf"scf\.for {VALUE} = %c0_i(32|64) ", after) is not None
    for first in (0,) if starts_at_0 else (0, 5):
        for end in range(first, first + 9):
            assert_all_blocks(run(after, first, end), first, end, copies)


def listed_block(place: int) -> int:
    return place * place + 3


def listed_entry(place: int) -> int:
    return listed_block(place) if place % 3 else -1 - listed_block(place)


def assert_blocks_of_list(text: str, first: int, end: int, tensors: int) -> None:
    """Products find the block of each place, or a half of it."""
    machine = run(text, first, end, {"%entries_size_0": 1000}, {"%entries": listed_entry})
    if first < end:
        assert len(machine.found) == tensors
    for coordinates in machine.found.values():
        whole = {place: listed_block(place) for place in range(first, end)}
        halves = [{place: 2 * block + half for place, block in whole.items()} for half in range(2)]
        assert coordinates in (whole, *halves)


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", LISTS)
def test_blocks_of_a_list(name: str) -> None:
    """Likewise of a list, whose places begin anywhere."""
    for first in (0, 5):
        for end in range(first, first + 9):
            assert_blocks_of_list(texts(name)[1], first, end, LISTS[name][1].count("C"))


@pytest.mark.parametrize("name", PAGES)
def test_pages_of_a_table(name: str) -> None:
    """Products find the page that the table has for each place."""
    for end in range(9):
        machine = run(texts(name)[1], 0, end, {"%num_pages": 1000}, {"%block_table": listed_block}, axis=0)
        assert len(machine.found) == (2 if end else 0)
        for pages in machine.found.values():
            assert pages == {place: listed_block(place) for place in range(end)}


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", LISTS)
def test_the_next_entry_is_loaded_behind_the_issue_of_q_k(name: str) -> None:
    """And before P V. Triton has its load at the end of the iteration, right before it is used."""
    for text, early in zip(texts(name), (False, True), strict=True):
        body = split_at_loop(text)[2]
        (of_entry,) = (i for i, line in enumerate(body) if "tt.addptr %entries" in line)
        products = [i for i, line in enumerate(body) if PRODUCT in line]
        assert (products[0] < of_entry < products[-1]) == early


@pytest.mark.thorough(but=5)
@pytest.mark.parametrize("name", KERNELS)
def test_the_wait_for_q_comes_last(name: str) -> None:
    """Behind all first copies, if TMA brings it."""
    before, _loop, _body = split_at_loop(texts(name)[1])
    ops = [operation(line)[1] for line in before]
    assert ops[-1] == "gpu.barrier"
    if "ttng.wait_barrier" in ops:
        assert ops[-3:-1] == ["ttng.wait_barrier", "ttng.inval_barrier"]
        assert ops.count("ttng.wait_barrier") == 1
    else:
        assert name == "split" or name.startswith(("single_k", "pieces", "more_pieces"))


def changed(text: str, pattern: str, replacement: str, which: int = 0) -> str:
    """`text` with another thing at the `which`th place that has `pattern`."""
    places = list(re.finditer(pattern, text))
    place = places[which]
    return text[: place.start()] + place.expand(replacement) + text[place.end() :]


COPY_OF_V = rf"(copy_global_to_local %v\w*\[{VALUE}, )({VALUE})"


@pytest.mark.thorough(but=8)
@pytest.mark.parametrize(
    ("name", "pattern", "replacement", "which"),
    [
        ("one_level_3_stages", r" +gpu\.barrier.*\n", "", 1),  # before the copies
        ("two_level_2_stages", r" +gpu\.barrier.*\n", "", 1),
        ("one_level_3_stages", COPY_OF_V, r"\1%c0_i32", -1),  # V of another block
        ("one_level_3_stages", COPY_OF_V, r"\1%early_first", -1),
        ("two_level_2_stages", COPY_OF_V, r"\1%c1_i32", -1),
        ("two_level_2_stages", rf".*{COPY_OF_V}.*\n", "", -1),  # none
        ("pieces_2_stages", COPY_OF_V, r"\1%c0_i32", -1),
        ("pieces_pingpong", COPY_OF_V, r"\1%c0_i32", -1),
        ("pieces_pingpong", r"%early_stages = arith.constant 1", "%early_stages = arith.constant 2", 0),
        ("halves_3_stages", COPY_OF_V, r"\1%c0_i32", -1),
        ("halves_2_stages", COPY_OF_V, r"\1%c0_i32", -1),
        ("halves_2_stages", r".*wait_barrier %stagger_v_mine.*\n", "", 0),
        ("single_k", r" +gpu\.barrier.*\n", "", 1),
        ("single_k", r".*warp_group_dot_wait.*\n", "", 0),  # Q K^T still reads K
        ("single_k", COPY_OF_V, r"\1%c0_i32", -1),
        ("hybrid_2_stages", COPY_OF_V, r"\1%c0_i32", -1),
        ("hybrid_2_stages", r" +gpu\.barrier.*\n", "", 1),
        ("hybrid_2_stages", r".*wait_barrier %stagger_v_mine.*\n", "", 0),
        ("hybrid_2_stages", r"wait_barrier %stagger_v_mine, %\w+", "wait_barrier %stagger_v_mine, %c0_i32", 0),
        ("one_level_2_stages", r"(%stagger_v_mine = ttg.memdesc_index %stagger_v\[)%\w+", r"\1%c0_i32", 0),
        ("one_level_3_stages", rf"(%k_block\w* = ttg.memdesc_index %k_block\[){VALUE}", r"\1%c0_i32", -1),
        ("one_level_3_stages", r"%early_stages = arith.constant 1", "%early_stages = arith.constant 2", 0),
        ("one_level_3_stages", r"%early_one = arith.constant 1", "%early_one = arith.constant 0", 0),
    ],
)
def test_the_machine_can_fail(name: str, pattern: str, replacement: str, which: int) -> None:
    wrong = changed(texts(name)[1], pattern, replacement, which)
    with pytest.raises(AssertionError):
        assert_all_blocks(run(wrong, 0, 7), 0, 7, KERNELS[name][1].count("C"))


def test_an_iteration_too_early() -> None:
    """In one-level accumulation, P V still reads the buffer of the block before."""
    with mock.patch.object(early_copies, "_an_iteration_later", lambda loop, copies, rest, stages: copies):
        too_early = early_copies.rescheduled(texts("one_level_3_stages")[0])
    assert too_early.applied
    with pytest.raises(AssertionError, match="written while it is read"):
        run(too_early.text, 0, 6)


@pytest.mark.parametrize("name", ["single_k", "single_k_int8"])
def test_k_has_one_buffer(name: str) -> None:
    """Each of its two pieces has, which makes room for a third program; V and the barriers have two."""
    kernel = KERNELS[name][0]()
    assert kernel.ctas_per_sm == 3
    arrays = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d)x", texts(name)[1])
    assert sorted(arrays) == ["1", "1", "2", "2"]


def test_other_waits_stay() -> None:
    """Between products whose sum is read before the last, or that are not added."""
    before, _ = texts("single_k")
    body = split_at_loop(before)[2]
    waits = [i for i, line in enumerate(body) if WAIT_FOR_PRODUCT in line]
    assert len(single_k_buffer.with_one_wait(body)) == len(body) - 1
    (result,) = re.findall(rf"({VALUE}):", body[waits[0]])
    read = [*body[: waits[0] + 1], f"%read = arith.negf {result}#0 : f32", *body[waits[0] + 1 :]]
    assert single_k_buffer.with_one_wait(read) == read
    # With a wait between the products, K is still to be read when the first is done: no copies behind that.
    line = body[waits[0]]
    with_both = before.replace(line, read[waits[0]] + "\n" + read[waits[0] + 1])
    assert "waits 3 times" in early_copies.rescheduled(with_both).reason
    not_added = [line.replace(f"{result}#0", "%other") for line in body]
    assert single_k_buffer.with_one_wait(not_added) == not_added


def test_other_loops_stay() -> None:
    before, after = texts("two_level_2_stages")
    for text, reason in (
        ("module {\n}", "there is no loop"),
        (after, "its copies do not come after its products"),
        (before.replace("pendings = 0", "pendings = 1"), "it waits for some of its products only"),
        (before.replace(EXPECT, "ttng.something_else "), "there are 0 of its barriers of copies"),
        (before.replace("tt.num_stages", "tt.something_else"), "num_stages"),
        (before.replace("tt.num_stages = 2", "tt.num_stages = 3"), "other numbers of buffers than its 3 stages"),
        (re.sub(r"(arith\.addi %\w+, )%c1_i32", r"\1%c7_i32", before), "does not copy the block that is 1 ahead"),
        ("\n".join(line for line in before.split("\n") if COPY not in line), "TMA copies nothing"),
    ):
        outcome = early_copies.rescheduled(text)
        assert not outcome.applied
        assert outcome.text == text
        assert reason in outcome.reason


@pytest.mark.thorough
@pytest.mark.parametrize(
    "compile_",
    [
        functools.partial(compile_decode, 256, 256, 64, 1, num_splits=2),
        functools.partial(compile_attention, 384, True, D_v=384, recipe=ONE_LEVEL),
    ],
    ids=["decode", "d384"],
)
def test_these_kernels_stay(compile_: functools.partial[Any]) -> None:
    """Decoding at D 256, whose loop waits for products three times; pieces of Q in three stages."""
    seen = shared_ir(compile_)
    assert [after for _, after in seen] == [None] * len(seen) != []
