"""Warpgroups that end each by itself: no warp needs another's rows, and none writes what is still read."""

from __future__ import annotations

import functools
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.sm90 import Sm90Kernel
from helion_attn.compiler.passes import per_warpgroup_epilogue, pingpong
from helion_attn.compiler.passes.outcome import Outcome
from helion_attn.compiler.passes.ttgir import VALUE, Loop, defined
from helpers.offline import assert_sound, compile_attention, compile_shape, compile_varlen
from helpers.shared import shared_call, shared_ir

pytestmark = pytest.mark.filterwarnings("ignore::helion_attn.compiler.slower.SlowerWarning")

#: Kernels whose warpgroups end by themselves.
ENDS: dict[str, functools.partial[Any]] = {
    "fast": functools.partial(compile_attention, 256, False),
    "balanced": functools.partial(compile_attention, 256, True, recipe=ha.BALANCED),
    "accurate": functools.partial(compile_attention, 256, True, recipe=ha.ACCURATE),
    "sequences": functools.partial(compile_varlen, 256, True),
    "split": functools.partial(compile_shape, 1, 64, 100000, 256, False, recipe=ha.BALANCED),
    "pieces": functools.partial(compile_attention, 512, True, D_v=512, recipe=ha.BALANCED),
    "bf16_d128": functools.partial(compile_attention, 128, False, recipe=ha.BF16),
    # Rows of other bytes than 16 times a whole number are stored in layouts of their own.
    "fp16_of_143": functools.partial(compile_attention, 143, False, torch.float16),
    "fp32_of_154": functools.partial(compile_attention, 154, False, torch.float32),
    "e4m3_of_194": functools.partial(compile_attention, 194, False, torch.float8_e4m3fn, recipe=ha.BALANCED),
    "bf16_of_754": functools.partial(compile_attention, 651, False, D_v=754),
}

#: The stores of rows that are not whole numbers of 16 bytes.
WIDEST = {"fp16_of_143": ".b16", "fp32_of_154": ".v2.b32", "e4m3_of_194": ".b16", "bf16_of_754": ".b32"}


@functools.cache
def kernel(name: str) -> Sm90Kernel:
    found = shared_call(ENDS[name])
    return found if isinstance(found, Sm90Kernel) else found[0]


def outcome(found: Sm90Kernel) -> Outcome:
    (of_epilogue,) = [x for x in found.passes if x.name == per_warpgroup_epilogue.NAME]
    return of_epilogue


def behind_pingpong(ptx: str) -> str:
    return ptx[ptx.index("behind_turns: ") :]


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", ENDS)
def test_no_barrier_of_all_warps_behind_the_pingpong(name: str) -> None:
    found = kernel(name)
    assert outcome(found).applied
    assert_sound(found)
    end = behind_pingpong(found.ptx)
    assert re.search(r"\b(bar|barrier)(\.\w+)*\s+0[,;]|mbarrier", end) is None
    assert re.search(r"st\.shared.*(\n.*)*bar\.warp\.sync|shfl\.sync", end)
    # Stores are as wide as rows of the output allow.
    assert re.findall(r"st\.global((?:\.v\d)?\.b\d+)", end)[-1] == WIDEST.get(name, ".v4.b32")
    assert "bar.sync" in found.ptx.split("before_turns: ")[0]


def of_shared_memory(text: str) -> list[str]:
    """The operations that have places in it, in their order."""
    return [line for line in text.split("\n") if re.search(r" = ttg\.(local_alloc|convert_layout) ", line)]


def places(text: str) -> list[tuple[int, int] | None]:
    """Where each of these begins and ends, as Triton allocates; None where it needs none."""
    from triton._C.libtriton import ir, nvidia

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttgir"
        path.write_text(text)
        module = ir.parse_mlir_module(str(path), context)
    manager = ir.pass_manager(context)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 80)
    manager.run(module, "allocated")
    found: list[tuple[int, int] | None] = []
    for line in of_shared_memory(str(module)):
        at = re.search(r"allocation\.offset = (\d+) : i32", line)
        found.append((int(at[1]), int(at[1]) + size(line)) if at else None)
    return found


def size(line: str) -> int:
    """Bytes of a buffer, or what a conversion exchanges at most."""
    shape, element = re.findall(r"(?:memdesc|tensor)<((?:\d+x)+)(\w+)", line)[-1]
    bits = {"f8E4M3FN": 8, "i8": 8, "f16": 16, "bf16": 16, "f32": 32, "i64": 64}[element]
    return math.prod(int(n) for n in shape.split("x")[:-1]) * bits // 8


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", ["fast", "balanced", "pieces", "bf16_d128", "fp16_of_143"])
def test_what_is_exchanged_comes_into_no_buffer_that_is_read(name: str) -> None:
    """V's, and the mbarriers, which the other warpgroup may still wait for."""
    without = shared_ir(ENDS[name])[0][1]
    text = per_warpgroup_epilogue.with_per_warpgroup_epilogue(pingpong.with_pingpong(str(without)).text).text
    _, _, behind = text.partition("behind_turns: ")
    freed_at_the_end = re.findall(rf"ttg\.local_dealloc ({VALUE}) :", behind[behind.rindex("tt.store") :])
    found = dict(zip(of_shared_memory(text), places(text), strict=True))
    kept = [place for line, place in found.items() if defined(line) in freed_at_the_end]
    exchanged = [place for line, place in found.items() if line in behind and place]
    loop = Loop.of(text)
    of_v, mbarriers = per_warpgroup_epilogue._allocations_of_v(loop), per_warpgroup_epilogue._mbarriers(loop)
    assert of_v
    assert mbarriers
    assert of_v | mbarriers == {*freed_at_the_end}
    assert len(kept) == len(freed_at_the_end)
    assert exchanged
    assert all(a is not None and (a[1] <= b[0] or b[1] <= a[0]) for a in kept for b in exchanged)


def test_ptx_in_which_warps_exchange_rows_is_refused() -> None:
    mark, store, load = "behind_turns: x;", "\tst.shared.v4.b32 \t[%r1], {%r2};", "\tld.shared.b32 \t%r3, [%r4];"
    of_warp, of_all = "\tbar.warp.sync \t-1;", "\tbar.sync \t0;"
    exchange = [store, of_warp, load]
    found = per_warpgroup_epilogue.without_epilogue_barriers(
        "\n".join([of_all, mark, *exchange, of_all, *exchange, of_all])
    )
    assert found == "\n".join([of_all, mark, *exchange, of_warp, *exchange, of_warp])
    elsewhere = [store.replace("r1", "r5"), of_warp, load]
    for wrong in (
        [mark, store, of_all, load],  # another warp's
        [mark, store, load],
        [mark, load, of_all, store],
        [mark, *exchange, *elsewhere],
        [mark, *exchange, of_all, *elsewhere],
        [mark, *exchange, "\tred.shared.add.u32 \t[%r1], 1;"],
        [mark, "\t@!%p1 st.shared.b32 \t[%r1], %r2;", of_all, load],
        [mark, *exchange, "\tbar.red.popc.u32 \t%r1, 0, %p1;"],
        exchange,
    ):
        with pytest.raises(per_warpgroup_epilogue.EpilogueIsShared):
            per_warpgroup_epilogue.without_epilogue_barriers("\n".join(wrong))


def test_a_second_loop_keeps_warps_in_step() -> None:
    text = pingpong.with_pingpong(str(shared_ir(ENDS["balanced"])[0][1])).text
    stored = next(line for line in reversed(text.split("\n")) if "tt.store" in line)
    second = text.replace(stored, f"    scf.for %i = %c0_i32 to %c1_i32 step %c1_i32  : i32 {{\n    }}\n{stored}")
    found = per_warpgroup_epilogue.with_per_warpgroup_epilogue(second)
    assert not found.applied
    assert found.reason == "scf. stands after it"
    assert found.text == second


def test_other_code_stays() -> None:
    without = str(shared_ir(ENDS["balanced"])[0][1])
    for text, reason in (
        ("module {\n}", "there is no loop"),
        (without, "there are 0 of the marks of its ping-pong's end, in place of one"),
    ):
        assert per_warpgroup_epilogue.with_per_warpgroup_epilogue(text) == Outcome(
            per_warpgroup_epilogue.NAME, False, reason, text
        )
