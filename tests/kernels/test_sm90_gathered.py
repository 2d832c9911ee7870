"""The attention kernel over gathered parts, compiled for sm_90: as sound, and nearly as short, as over one piece."""

from __future__ import annotations

import functools
import re

import pytest
import torch

import helion_attn as ha
from devtools.sm90 import Sm90Kernel, compile_for_sm90, fake_cuda
from helion_attn.compiler.passes.ttgir import COPY, EXPECT, VALUE, find, taken_out
from helion_attn.configs import attention_tile_config, varlen_packing
from helion_attn.kernels import attention
from helion_attn.kernels.lib.masks import Bounds
from helion_attn.options import ScoreOptions
from helion_attn.problem import AttentionArgs, Choice, RankChunks, magic
from helion_attn.types import PackedTensors
from helpers import offline
from helpers.ir_machine import run
from helpers.passes import operation, split_at_loop
from helpers.shared import shared_ir

#: How much longer the loop's way past its masks may be than over one piece, by head dim. D 256 lacks uniform registers.
#: It also finds two parts in an iteration, of the block that it copies and of one that comes later.
LONGER = {64: 1.03, 128: 1.03, 256: 1.055}

H, H_KV, M_BLOCKS, N_BLOCKS, RANKS = 32, 8, 64, 256, 8


def compile_parts(
    D: int, causal: bool, recipe: ha.Recipe, zigzag: bool | None, left: int = -1, packed: bool = False
) -> Sm90Kernel:
    """Over the parts of `RANKS` ranks; over one piece if `zigzag` is None."""

    def launch() -> None:
        p = varlen_packing(D, D, recipe.bits)
        blocks = (H_KV, N_BLOCKS) if zigzag is None else (1, H_KV * N_BLOCKS)
        v_block = (p.D_v_pad, p.bn) if recipe.pv_dtype.itemsize == 1 else (p.bn, p.D_v_pad)
        descales = N_BLOCKS if recipe.resolved.k_scales == "block" else 1
        tensors = PackedTensors(
            q8=fake_cuda(H, M_BLOCKS, p.bm, p.D_pad, dtype=recipe.qk_dtype),
            k8=fake_cuda(*blocks, p.bn, p.D_pad, dtype=recipe.qk_dtype),
            v8=fake_cuda(*blocks, *v_block, dtype=recipe.pv_dtype),
            q_descale=fake_cuda(1, H, M_BLOCKS, p.bm),
            k_descale=fake_cuda(1, H_KV, descales) if zigzag is None else fake_cuda(H_KV * N_BLOCKS),
            v_descale=fake_cuda(1, H_KV, p.D_v_pad),
            v_mean=fake_cuda(1, H_KV, p.D_v_pad),
            k_mean=None,
            channel_factors=None,
            lse_shift=None,
        )
        M, N = M_BLOCKS * p.bm, N_BLOCKS * p.bn
        scores = ScoreOptions(causal=causal, window=(left, -1)).resolved(D)
        a = AttentionArgs(tensors, M, N, D, D, scores, False, torch.bfloat16, recipe.resolved, None)
        part = N_BLOCKS // RANKS
        step = H_KV * part + 1
        parts = RankChunks(
            M_BLOCKS, M, N - M, 0, RANKS, part, part * p.bn, part * p.bn, RANKS, part, step, step, bool(zigzag)
        )
        bounds = None
        if packed:
            bounds = Bounds(fake_cuda(2, M, dtype=torch.int32), fake_cuda(M_BLOCKS, 4, dtype=torch.int32))
        with offline.launching():
            attention.launch(
                Choice(attention_tile_config(D, D, causal, recipe.bits)),
                a,
                fake_cuda(1, H, M, D, dtype=torch.bfloat16),
                fake_cuda(1, H, M),
                rank_chunks=None if zigzag is None else parts,
                bounds=bounds,
            )

    (kernel,) = compile_for_sm90(launch)
    return kernel


def main_path(kernel: Sm90Kernel) -> int:
    """Instructions of the loop over key blocks, without those that only blocks at an edge run, or of wide scores."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in kernel.sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
    jumps = [
        (i, labels[target[1]])
        for i, text in enumerate(instructions)
        if "BRA" in text and (target := re.search(r"`\((\.L_x_\d+)\)", text))
    ]
    loops = [(to, i) for i, to in jumps if to <= i and any("GMMA" in x for x in instructions[to:i])]
    begin, end = min(loops, key=lambda loop: loop[1] - loop[0])
    ahead = sorted(((to - i, i, to) for i, to in jumps if begin < i < to < end), reverse=True)
    longest, first, last = ahead[0]
    second = next((n for n, i, to in ahead if to <= first or last <= i), 0)
    return end - begin - longest - second


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("D", "causal", "zigzag"), [(64, True, True), (128, False, False), (256, False, True)])
def test_gathered_parts(D: int, causal: bool, zigzag: bool) -> None:
    one = compile_parts(D, causal, ha.BALANCED, None)
    kernel = compile_parts(D, causal, ha.BALANCED, zigzag)
    offline.assert_sound(kernel)
    assert kernel.ctas_per_sm == one.ctas_per_sm
    assert [(x.name, x.applied) for x in kernel.passes] == [(x.name, x.applied) for x in one.passes]
    # A block's place is some multiplications, and no barrier.
    assert kernel.opcodes["BAR"] <= one.opcodes["BAR"]
    assert main_path(kernel) <= LONGER[D] * main_path(one)


PARTS_OF, BLOCKS_OF, STEP = 3, 2, 100


def with_moved_copies(D: int, causal: bool, recipe: ha.Recipe, zigzag: bool) -> tuple[str, str, int, dict[str, int]]:
    """Triton's IR before and after the pass over loads, the parts, and arguments for `PARTS_OF` ranks."""
    ((before, after),) = shared_ir(functools.partial(compile_parts, D, causal, recipe, zigzag))
    assert after is not None
    parts = 2 * PARTS_OF if zigzag else PARTS_OF
    sizes = {
        "key_chunks": parts,
        "key_chunk_blocks": BLOCKS_OF,
        "ranks": PARTS_OF,
        "k_rank_step": STEP,
        "v_rank_step": STEP,
    }
    arguments = {"%key_magic": magic(BLOCKS_OF), **{f"%parts_attr_{x}": n for x, n in sizes.items()}}
    return before, after, parts, arguments


#: One order for the 16-bit V.
orders_and_copies = pytest.mark.parametrize(
    ("D", "causal", "recipe", "zigzag"),
    [
        (128, True, ha.HYBRID, True),
        *((256, causal, ha.BALANCED, zigzag) for causal in (True, False) for zigzag in (False, True)),
    ],
    ids=[
        "V a block behind, zigzag",
        *(f"halves, {how}, {order}" for how in ("later", "V a block behind") for order in ("contiguous", "zigzag")),
    ],
)


@pytest.mark.thorough
@orders_and_copies
def test_copies_are_of_their_blocks(D: int, causal: bool, recipe: ha.Recipe, zigzag: bool) -> None:
    """K's and V's, wherever the passes move them: also those of a part's first and last block."""
    _, text, parts, arguments = with_moved_copies(D, causal, recipe, zigzag)
    machine = run(text, 0, parts * BLOCKS_OF, arguments)
    # Where zigzag has part c: of rank c, or behind it of the rank as far from the end.
    firsts = [c * STEP if c < PARTS_OF else (parts - 1 - c) * STEP + BLOCKS_OF for c in range(parts)]
    places = [first + i for first in firsts for i in range(BLOCKS_OF)]
    assert len(machine.found) == 2 + (D > 128)
    for name, coordinates in machine.found.items():
        unit = 2 if D > 128 and "k_block" not in name else 1
        assert [coordinates[j] - coordinates[0] for j in range(parts * BLOCKS_OF)] == [unit * place for place in places]


def without_copies(text: str) -> str:
    """Without products and barriers too: Triton places those of `before` later."""
    return "\n".join(line for line in text.split("\n") if not operation(line)[1].startswith("ttng."))


@pytest.mark.thorough(but=1)
@orders_and_copies
def test_moving_copies_changes_no_other_index(D: int, causal: bool, recipe: ha.Recipe, zigzag: bool) -> None:
    """Those of K's descales and of masks, some of which the loop carries from where copies are made."""
    before, after, parts, arguments = with_moved_copies(D, causal, recipe, zigzag)
    _, _, body = split_at_loop(before)
    _, rest = taken_out(body, [*find(body, EXPECT), *find(body, COPY)], 0)
    machines = [run(without_copies(text), 0, parts * BLOCKS_OF, arguments) for text in (before, after)]
    names = {name for line in rest for name in re.findall(VALUE, line)}
    compared = 0
    for j in range(parts * BLOCKS_OF):
        (was, now) = ({x: n for x, n in m.history[j].items() if x in names} for m in machines)
        assert now == was
        compared += len(was)
    assert compared > 10 * parts * BLOCKS_OF


def test_signs_that_ptxas_loses_are_found() -> None:
    lines = ["neg.s32 %r2, %r1;", "max.s32 %r4, %r3, %r2;", "max.s32 %r6, %r4, %r5;"]
    assert offline.negated_maxima("\n".join(lines)) == ["max %r6"]
    for fine in (lines[:2], [lines[0], lines[1], "min.s32 %r6, %r4, %r5;"], lines[1:]):
        assert offline.negated_maxima("\n".join(fine)) == []
