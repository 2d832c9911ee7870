"""Attention kernels that quantise Q themselves: the same numbers as with Q packed, and the code that they become."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from devtools.sm90 import Sm90Kernel, compile_for_sm90, fake_cuda
from helion_attn.compiler.passes import early_copies, hoist_q_scale, shared_q
from helion_attn.compiler.passes.ttgir import FENCE
from helion_attn.configs import tile_config
from helion_attn.ops import choose
from helion_attn.preprocess import pack_kv, recentre, sample
from helion_attn.problem import NO_ROPE_ARGUMENTS, Choice, rope_arguments
from helion_attn.testing import error_budget, relative_error
from helpers.offline import assert_sound, fake_qkv, launching, without
from helpers.shared import shared

#: B, H, H_kv, M, N, D.
SHAPES = [(1, 2, 1, 17, 63, 64), (2, 4, 2, 200, 333, 64), (1, 2, 2, 111, 111, 48), (1, 3, 1, 65, 200, 32)]

RECIPES = [ha.FAST, ha.BALANCED]


def with_packed_q(*qkv: torch.Tensor, **options: Any) -> Any:
    """`attention` with Q packed first."""
    with mock.patch.object(choose, "quantises_q", return_value=False):
        return ha.attention(*qkv, **options)


@pytest.mark.thorough(but=7)
@pytest.mark.parametrize("recipe", RECIPES, ids=["fast", "balanced"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["randn", "qk_channels"])
def test_it_is_what_a_packed_q_gives(
    shape: tuple[int, int, int, int, int, int], recipe: ha.Recipe, kind: str, device: str
) -> None:
    qkv = make_qkv(kind, *shape, device=device)
    out = ha.attention(*qkv, causal=True, recipe=recipe)
    assert torch.equal(out, with_packed_q(*qkv, causal=True, recipe=recipe))
    ref = ha.reference.attention(*qkv, causal=True)
    model = ha.reference.fp8_attention(*qkv, causal=True, recipe=recipe)
    assert relative_error(out, ref) <= error_budget(relative_error(model, ref), out.dtype, device=device)


def test_a_row_that_is_not_finite_is_alone(device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 1, 80, 100, 64, device=device)
    q[0, 1, 5, 3], q[0, 0, 70, 0] = float("nan"), float("inf")
    out = ha.attention(q, k, v)
    lost = out.isnan().all(-1)
    assert lost.nonzero().tolist() == [[0, 0, 70], [0, 1, 5]]
    assert not out[~lost].isnan().any()


def test_where_it_is_not_done() -> None:
    q, no_rope = torch.empty(1, 2, 100, 64, dtype=torch.bfloat16), NO_ROPE_ARGUMENTS
    choice = Choice(tile_config(64, True), splits=1, pack_gqa=False)
    assert choose.quantises_q(q, no_rope, ha.BALANCED.resolved, choice)
    assert not choose.quantises_q(q, no_rope, ha.ACCURATE.resolved, choice)
    assert not choose.quantises_q(q, no_rope, ha.BF16.resolved, choice)
    assert not choose.quantises_q(q, no_rope, ha.HYBRID.resolved, choice)
    assert not choose.quantises_q(
        q, NO_ROPE_ARGUMENTS, ha.Recipe(qk_dtype=torch.float8_e4m3fn, q_scales="block"), choice
    )
    assert not choose.quantises_q(q, no_rope, ha.BALANCED.resolved, choice._replace(splits=2))
    assert not choose.quantises_q(q, no_rope, ha.BALANCED.resolved, choice._replace(pack_gqa=True))
    assert not choose.quantises_q(q, no_rope, ha.BALANCED.resolved, choice._replace(tile=tile_config(128, True)))
    # Rows that are no multiple of 16 bytes apart, and single elements.
    assert not choose.quantises_q(
        torch.empty(1, 2, 100, 65, dtype=q.dtype)[..., :64], NO_ROPE_ARGUMENTS, ha.BALANCED.resolved, choice
    )
    assert not choose.quantises_q(q.transpose(2, 3).contiguous().transpose(2, 3), no_rope, ha.BALANCED.resolved, choice)
    shifted = torch.empty(12801, dtype=q.dtype)[1:].view(1, 2, 100, 64)
    assert not choose.quantises_q(shifted, no_rope, ha.BALANCED.resolved, choice)
    of_all, of_half = (rope_arguments(ha.Rope(torch.ones(9, n), torch.ones(9, n))) for n in (32, 16))
    assert choose.quantises_q(q, of_all, ha.BALANCED.resolved, choice)
    assert not choose.quantises_q(q.float(), no_rope, ha.BALANCED.resolved, choice)
    assert not choose.quantises_q(q, of_half, ha.BALANCED.resolved, choice)


def compiled(recipe: ha.Recipe, causal: bool, dtype: torch.dtype, rotates: bool, return_lse: bool) -> Sm90Kernel:
    """The attention kernel of a call with head dim 64."""

    def launch() -> None:
        with launching():
            q, k, v = fake_qkv(4, 32, 32, 4096, 4096, 64, dtype)
            rope = ha.Rope(fake_cuda(4096, 32), fake_cuda(4096, 32)) if rotates else None
            with without(sample, pack_kv, recentre):
                ha.attention(q, k, v, causal=causal, recipe=recipe, rope=rope, return_lse=return_lse)

    (kernel,) = compile_for_sm90(launch)
    return kernel


def test_its_code() -> None:
    kernel = shared(compiled, ha.BALANCED, True, torch.float16, True, True)
    assert_sound(kernel)
    tile = tile_config(64, True)
    assert kernel.ctas_per_sm >= tile.ctas_per_sm
    applied = [x.name for x in kernel.passes if x.applied]
    assert {shared_q.NAME, hoist_q_scale.NAME, early_copies.NAME} <= {*applied}
    # Q K^T takes Q by a descriptor of shared memory, not from four registers.
    products = re.findall(r"wgmma\.mma_async[^;]*", kernel.ptx)
    assert any(re.search(r"\}, %rd\d+, %rd\d+,", product) for product in products)
    assert "fence.proxy.async" in kernel.ptx


# --- the passes, on text --------------------------------------------------------------------------

SHARED, DOT = "!ttg.memdesc<64x64xi8, #shared2, #smem>", "#ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 4}>"

STORED = f"""
    %q_tile = ttg.local_alloc %q : (tensor<64x64xi8, #linear>) -> {SHARED}
    %out = scf.for %j = %a to %b step %c iter_args(%s = %k) -> (f32)  : i32 {{
      %permute = ttg.memdesc_trans %k8 {{order = array<i32: 1, 0>}} : !ttg.memdesc<128x64xi8, #shared, #smem, mutable> -> !ttg.memdesc<64x128xi8, #shared7, #smem, mutable>
      %tile = ttg.local_load %q_tile : {SHARED} -> tensor<64x64xi8, {DOT}>
      %dot = ttng.warp_group_dot %tile, %permute, %zero : tensor<64x64xi8, {DOT}> * !ttg.memdesc<64x128xi8, #shared7, #smem, mutable> -> tensor<64x128xi32, #mma>
    }}
"""  # noqa: E501


def test_a_stored_tile_is_read_where_it_lies() -> None:
    found = shared_q.with_shared_q(STORED)
    assert found.applied
    assert "local_load" not in found.text
    assert "ttng.warp_group_dot %q_tile, %permute, %zero : !ttg.memdesc<64x64xi8, #shared, #smem> * " in found.text
    lines = [line.strip() for line in found.text.split("\n")]
    alloc = next(i for i, line in enumerate(lines) if "local_alloc" in line)
    assert lines[alloc].endswith("-> !ttg.memdesc<64x64xi8, #shared, #smem>")
    assert lines[alloc + 1].startswith(FENCE)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("ttg.local_load", "ttg.load_it", shared_q.COPIED),
        ("memdesc_trans", "memdesc_other", "is not transposed"),
        ("      %dot =", "      %more = arith.addi %tile, %tile : i8\n      %dot =", "warp_group_dot %tile"),
    ],
)
def test_other_tiles_stay(old: str, new: str, reason: str) -> None:
    found = shared_q.with_shared_q(STORED.replace(old, new))
    assert not found.applied
    assert reason in found.reason
    assert found.text == STORED.replace(old, new)


ROW, SCORE = (f"#ttg.slice<{{dim = 1, parent = #{of}}}>" for of in ("linear", "mma"))

CONVERTED = f"""
    %one = arith.constant dense<1.000000e+00> : tensor<64xf32, {ROW}>
    %q_scale = arith.mulf %amax, %one : tensor<64xf32, {ROW}>
    %out = scf.for %j = %a to %b step %c iter_args(%k_scale = %k) -> (f32)  : i32 {{
      %large = arith.cmpf ogt, %k_scale, %limit : f32
      %ks = tt.splat %k_scale : f32 -> tensor<64xf32, {ROW}>
      %both = arith.mulf %q_scale, %ks : tensor<64xf32, {ROW}>
      %is = tt.splat %large : i1 -> tensor<64xi1, {ROW}>
      %chosen = arith.select %is, %one, %both : tensor<64xi1, {ROW}>, tensor<64xf32, {ROW}>
      %scale = ttg.convert_layout %chosen : tensor<64xf32, {ROW}> -> tensor<64xf32, {SCORE}>
      %used = arith.mulf %m_i, %scale : tensor<64xf32, {SCORE}>
    }}
"""


def test_rows_are_converted_in_front_of_the_loop() -> None:
    found = hoist_q_scale.with_hoisted_q_scale(CONVERTED)
    assert found.applied
    before, loop = found.text.split("scf.for")
    conversions = re.findall(r"(\S+) = ttg\.convert_layout (\S+) :", before)
    assert [of for _, of in conversions] == ["%q_scale"]
    # Constants are made anew.
    assert re.search(rf"%one_in_mma = arith\.constant dense<1\.0+e\+00> : tensor<64xf32, {re.escape(SCORE)}", before)
    assert "convert_layout" not in loop
    names = {of: name for name, of in conversions}
    both, chosen = (
        re.search(rf"(\S+) = {op} .*, \S+ : tensor<64x\w+, {SCORE}", loop) for op in ("arith.mulf", "arith.select")
    )
    assert both is not None
    assert chosen is not None
    assert f"arith.mulf {names['%q_scale']}, " in loop
    assert f"%used = arith.mulf %m_i, {chosen.group(1)} :" in loop


@pytest.mark.parametrize("other", ["%k_scale", "%j"])
def test_what_a_loop_makes_is_converted_there(other: str) -> None:
    text = CONVERTED.replace("arith.mulf %q_scale, %ks", f'"tt.reduce"({other})')
    found = hoist_q_scale.with_hoisted_q_scale(text)
    assert not found.applied
    assert found.text == text
