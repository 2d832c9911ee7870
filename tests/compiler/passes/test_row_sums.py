"""Row sums of P from its product with V: ones that nothing overwrites, in every form of loop that asks for them."""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any
from unittest import mock

import pytest

import helion_attn as ha
from devtools.sm90 import Sm90Kernel
from helion_attn.compiler import triton_hook
from helion_attn.compiler.passes import row_sums
from helion_attn.compiler.passes.outcome import Outcome
from helion_attn.compiler.passes.ttgir import PRODUCT, VALUE, WAIT_FOR_PRODUCT
from helpers.ir_machine import Machine, run
from helpers.offline import compile_attention, compile_shape, compile_varlen
from helpers.passes import operation, recorded
from helpers.shared import shared_call, shared_ir

pytestmark = pytest.mark.filterwarnings("ignore::helion_attn.compiler.slower.SlowerWarning")

#: Kernels whose products make sums, and V's buffers and channels.
SUMS: dict[str, tuple[functools.partial[Any], int, int]] = {
    "fast_2_stages": (functools.partial(compile_attention, 128, False), 2, 128),
    "balanced": (functools.partial(compile_attention, 64, True, recipe=ha.BALANCED), 2, 64),
    "3_stages": (functools.partial(compile_attention, 64, False, recipe=ha.ACCURATE), 3, 64),
    "sequences": (functools.partial(compile_varlen, 64, True, ha.BALANCED), 2, 64),
    "split": (functools.partial(compile_shape, 1, 100, 16384, 64, True, recipe=ha.BALANCED), 2, 64),
}

KEYS, GROUP = 128, 8


@functools.cache
def kernel(name: str) -> Sm90Kernel:
    found = shared_call(SUMS[name][0])
    return found if isinstance(found, Sm90Kernel) else found[0]


@functools.cache
def texts(name: str) -> tuple[str, str]:
    """Triton's IR of a kernel with the other passes, and what this one makes of it."""
    given = shared_ir(SUMS[name][0])[0][0]
    before = triton_hook.passed(given, triton_hook.Refusals(sums="left out"))[-1].text
    found = row_sums.with_sums_of_products(before)
    assert found.applied, found.reason
    return before, found.text


def outcome(found: Sm90Kernel) -> Outcome:
    (of_sums,) = [x for x in found.passes if x.name == row_sums.NAME]
    return of_sums


# ---------------------------------------------------------------------------------------------------------------------
# Triton's IR
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", SUMS)
def test_nothing_else_changes(name: str) -> None:
    """P as fp32 and its sums are gone; V's buffers are found by their first group, and ones are written."""
    before, after = (Counter(op for line in text.split("\n") if (op := operation(line)[1])) for text in texts(name))
    stages = SUMS[name][1]
    of_v = len(re.findall(rf" = ttg\.memdesc_index {v_buffers(texts(name)[0])}\[", texts(name)[0]))
    assert before - after == Counter({"tt.fp_to_fp": 1, "tt.reduce": 1, "arith.addf": 1, "tt.reduce.return": 1})
    new = Counter({"tt.elementwise_inline_asm": 1, "ttng.fence_async_shared": 1, "arith.constant": 1})
    new += Counter({x: of_v for x in ("arith.constant", "arith.muli", "ttg.memdesc_reinterpret")})
    new += Counter({x: stages for x in ("arith.constant", "ttg.memdesc_index", "ttg.local_store")})
    assert after - before == new


def v_buffers(text: str) -> str:
    """The name of V's buffers."""
    (name,) = set(re.findall(r"(%v_block\w*) = ttg\.local_alloc : ", text))
    return str(name)


def assert_ones_stay(text: str, stages: int, channels: int) -> None:
    """They lie behind every buffer that V is copied to and read from, and in none of them, within what is allocated."""
    machine: Machine = run(text, 0, 9)
    name, groups = v_buffers(text), channels // GROUP
    written = [at for of, at in machine.content if of == name]
    stored = re.findall(rf"ttg\.local_store %row_sums_ones, ({VALUE}) ", text)
    ones = [machine.values[x][1] for x in stored]
    assert len(written) == stages
    assert sorted(ones) == sorted(at + groups for at in written)
    assert not set(ones) & {at + i for at in written for i in range(groups)}
    (size,) = re.findall(rf"{name} = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x{GROUP}x{KEYS}xf8E4M3FN", text)
    assert max(ones) < int(size)
    # Each block is found still.
    assert [list(found.values()) for found in machine.found.values()] == [list(range(9))] * 2


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", SUMS)
def test_no_buffer_of_v_overlaps_the_ones(name: str) -> None:
    assert_ones_stay(texts(name)[1], *SUMS[name][1:])


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"(_groups = arith\.constant )\d+", r"\g<1>8"),  # buffers without a place for ones in between
        (r"(%row_sums_at_1 = arith\.constant )\d+", r"\g<1>9"),
        (r"(local_alloc : \(\) -> !ttg\.memdesc<)18x8", r"\g<1>16x8"),
        (r".*local_store %row_sums_ones, %row_sums_of_1 .*\n", ""),
    ],
)
def test_the_check_of_their_place_can_fail(pattern: str, replacement: str) -> None:
    text = texts("balanced")[1]
    wrong = re.sub(pattern, replacement, text)
    assert wrong != text
    with pytest.raises(AssertionError):
        assert_ones_stay(wrong, *SUMS["balanced"][1:])


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", SUMS)
def test_ones_are_there_before_the_loop(name: str) -> None:
    """Written, fenced for the tensor core, and all warps know: nothing comes in between."""
    lines = texts(name)[1].split("\n")
    loop = next(i for i, line in enumerate(lines) if " scf.for " in line)
    ops = [operation(line)[1] for line in lines[:loop]]
    assert ops[-2:] == ["ttng.fence_async_shared", "gpu.barrier"]
    assert ops[-3] == "ttg.local_store"


def test_other_loops_stay() -> None:
    before, after = texts("balanced")
    widened = next(line for line in before.split("\n") if "tt.fp_to_fp" in line and "f8E4M3FN" in line)
    (p,) = re.findall(rf"({VALUE}) = tt\.fp_to_fp", widened)
    sums, of_p = re.findall(rf'({VALUE}) = ("tt\.reduce"\({p}\))', before)[0]
    added = next(line for line in before.split("\n") if re.search(rf"arith\.addf {VALUE}, {sums} :", line))
    reduced = before[before.index(f"{sums} = ") :]
    waits = [line for line in before.split("\n") if WAIT_FOR_PRODUCT in line]
    name = v_buffers(before)
    for text, reason in (
        ("module {\n}", "there is no loop"),
        (after, row_sums.NOT_ASKED),
        (before.replace(widened, f"{widened}\n{widened.replace(p, '%other')}"), "2 of its conversions of P to fp32"),
        (before.replace(of_p, '"tt.reduce"(%other)'), "0 of its sums of P"),
        (before.replace(reduced, reduced.replace("arith.addf", "arith.maximumf", 1)), "are not sums"),
        (before.replace(added, f"{added}\n{added}"), "2 of the uses of P's row sums"),
        (before.replace(added, added.replace(" : tensor<", " : !other<")), "used otherwise"),
        (before.replace(waits[-1], waits[-1].replace(WAIT_FOR_PRODUCT, "ttng.something_else ")), "after the wait"),
        (before.replace(f"{name} = ttg.local_alloc", f"{name} = ttg.something_else"), "is not of ttg.local_alloc"),
        (re.sub(r"(2x64x)128(xf8)", r"\g<1>64\2", before), "64 channels of 64 keys, in place of 128"),
        (re.sub(r"(2x)64(x128xf8)", r"\g<1>60\2", before), "60 channels of 128 keys"),
        (before.replace('"ttg.num-warps" = 4', '"ttg.num-warps" = 8'), "two warpgroups"),
        (before.replace("f8E4M3FN, #ttg.dot_op<", "f8E5M2, #ttg.dot_op<"), "0 of its products of P"),
    ):
        found = row_sums.with_sums_of_products(text)
        assert not found.applied
        assert found.text == text
        assert reason in found.reason, found.reason
    assert PRODUCT in before


# ---------------------------------------------------------------------------------------------------------------------
# PTX
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", SUMS)
def test_the_product_is_wider_and_read_behind_its_wait(name: str) -> None:
    found = kernel(name)
    assert outcome(found).applied
    lines = found.ptx.split("\n")
    n = SUMS[name][2] + GROUP
    uses = [i for i, line in enumerate(lines) if "%row_sum" in line]
    products = [i for i in uses if f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3" in lines[i]]
    declared, mark = uses[0], uses[-1]
    assert lines[declared].startswith("\t.reg .b32")
    assert uses == [declared, *products, mark]
    # A block's keys, 32 a product.
    assert len(products) == KEYS // 32
    assert "// row sums of P V" in lines[mark]
    assert [re.findall(r"%row_sum\d", lines[i]) for i in products] == [[f"%row_sum{i}" for i in range(4)]] * 4
    assert all(re.search(r"%row_sum3\}, \{", lines[i]) for i in products)
    # The first columns of both rows, which the first product overwrites.
    assert re.findall(r"%row_sum\d", lines[mark]) == ["%row_sum0", "%row_sum2"]
    waits = [i for i in range(products[-1], mark) if "wgmma.wait_group" in lines[i]]
    assert len(waits) == 1


REGISTERS = "\t.reg .b32 \t%r<20>;"
MARK = "\tmov.b32 %r1, %r9; mov.b32 %r2, %r9; // row sums of P V"
WAIT = "\twgmma.wait_group.sync.aligned 0;"


def product(out: str = "%r3,%r4", n: int = 64, types: str = "f32.e4m3.e4m3", of: str = "{%r5,%r6,%r7,%r8}") -> str:
    return f"\twgmma.mma_async.sync.aligned.m64n{n}k32.{types} {{{out}}}, {of}, %rd1, 1, 1, 1;"


def test_ptx() -> None:
    of_k = product(types="s32.s8.s8", of="%rd2")
    found = row_sums.summed("\n".join([REGISTERS, of_k, WAIT, product(), product(), WAIT, MARK]))
    wider = product("%r3,%r4,%row_sum0,%row_sum1,%row_sum2,%row_sum3", 72)
    assert found.split("\n") == [
        "\t.reg .b32 \t%row_sum0, %row_sum1, %row_sum2, %row_sum3;",
        REGISTERS,
        of_k,
        WAIT,
        wider,
        wider,
        WAIT,
        "\tmov.b32 %r1, %row_sum0; mov.b32 %r2, %row_sum2; // row sums of P V",
    ]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([product(), WAIT], "0 row sums are marked"),
        ([product(), WAIT, MARK, MARK], "2 row sums are marked"),
        ([WAIT, MARK], "0 products of P in registers"),
        ([product(of="%rd2"), WAIT, MARK], "0 products of P in registers"),
        ([product(types="f32.e5m2.e5m2"), WAIT, MARK], "0 products of P in registers"),
        ([product(), product("%r10,%r11"), WAIT, MARK], "2 products of P in registers"),
        ([product(), MARK, WAIT], "0 waits"),
        ([product(), WAIT, WAIT, MARK], "2 waits"),
        ([product(), WAIT, MARK.replace("%r9", "7")], "are not two moves"),
    ],
)
def test_other_ptx_is_refused(lines: list[str], reason: str) -> None:
    with pytest.raises(row_sums.NoSums, match=reason):
        row_sums.summed("\n".join([REGISTERS, *lines]))


# ---------------------------------------------------------------------------------------------------------------------
# Where it does not apply
# ---------------------------------------------------------------------------------------------------------------------


def test_without_it_the_kernel_adds_up_p() -> None:
    """PTX of another form: the kernel is compiled again, with sums of its own and all other passes."""
    another = mock.patch.object(row_sums, "summed", side_effect=row_sums.NoSums("the PTX is another"))
    # Found by nobody else: `recorded` leaves caches alone.
    with recorded(), another:
        found = compile_attention(64, True, recipe=ha.BALANCED)
    assert outcome(found) == Outcome(row_sums.NAME, False, "the PTX is another", "")
    others = [(x.name, x.applied) for x in found.passes if x.name != row_sums.NAME]
    assert others == [(x.name, x.applied) for x in kernel("balanced").passes if x.name != row_sums.NAME]
    assert "row_sum" not in found.ptx
    assert "m64n72k32" not in found.ptx
    assert "m64n64k32.f32.e4m3.e4m3" in found.ptx
