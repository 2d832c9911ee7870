"""The kernels that give a backward pass its 16-bit tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from devtools.sm90 import compile_for_sm90, fake_cuda
from helion_attn.backward import dense, varlen
from helion_attn.configs import packing, row_width
from helion_attn.preprocess import unpack
from helion_attn.preprocess.dequantize import unpack as expected_of
from helion_attn.types import PackedTensors
from helion_attn.varlen import varlen_problem
from helpers.memory import nan_filled_memory
from helpers.offline import assert_sound, launching, widths

#: Preset, head dim, layout.
CASES = [("balanced", 64, False), ("fast", 50, True), ("balanced", 128, True)]


@pytest.mark.parametrize(("recipe", "D", "bshd"), CASES)
def test_values(recipe: Any, D: int, bshd: bool, device: str) -> None:
    """To the last bit of fp32 but for the order of a sum of four."""
    q, k, v = make_qkv("outlier_channel", 2, 2, 1, 70, 150, D, device=device)
    qkv = ha.quantize(q, k, v, recipe=recipe)
    assert unpack.takes(qkv, qkv.recipe)
    sizes = 70, 150, D, D, qkv.recipe
    asked = dense.DequantizeRowsArgs(qkv, *sizes, torch.float32, bshd)
    for x, y in zip(dense.dequantize_rows(asked), expected_of(qkv, *sizes), strict=True):
        assert (x.transpose(1, 2) if bshd else x).is_contiguous()
        assert ((x - y).norm() / y.norm()).item() < 2**-22
    halves = asked._replace(dtype=torch.bfloat16)
    assert {x.dtype for x in dense.dequantize_rows(halves)} == {torch.bfloat16}
    op = torch.ops.helion_attn.dequantize_rows
    torch.library.opcheck(op, dense.dequantize_rows.values(halves), test_utils="test_faketensor")


@pytest.mark.parametrize(("recipe", "D"), [("balanced", 64), ("fast", 50), ("balanced", 128)])
def test_packed_sequences(recipe: Any, D: int, device: str) -> None:
    """The same of tokens of sequences; an empty one of either, and tokens before the first and behind the last."""
    q, k, v = (x[0].transpose(0, 1) for x in make_qkv("outlier_channel", 1, 4, 2, 340, 310, D, device=device))
    cu_q, cu_k = (
        torch.tensor(ends, dtype=torch.int32, device=device) for ends in ([3, 130, 130, 330], [0, 200, 230, 300])
    )
    a = varlen_problem(q, k, v, cu_q, cu_k, recipe=recipe)
    kept = varlen._kept(a, varlen._launch(a))
    assert kept.packed.channel_factors is not None
    assert unpack.takes(kept.packed, kept.recipe)
    queries, keys = varlen.query_tokens(kept), varlen.key_tokens(kept)
    lists = varlen.lists_of(kept, queries, keys)
    asked = dense.DequantizeRowsArgs(
        kept.packed, q.size(0), k.size(0), D, D, kept.recipe, torch.float32, bshd=True, lists=lists
    )
    with nan_filled_memory():
        found = [x.squeeze(0).transpose(0, 1) for x in dense.dequantize_rows(asked)]
    assert all(bool(x.isfinite().all()) for x in found)
    inside = queries.inside, keys.inside, keys.inside
    for x, y, there in zip(found, varlen.dequantised(kept, queries, keys), inside, strict=True):
        assert x.is_contiguous()
        assert ((x - y)[there].norm() / y[there].norm()).item() < 2**-22
    op = torch.ops.helion_attn.dequantize_rows
    torch.library.opcheck(op, dense.dequantize_rows.values(asked), test_utils="test_faketensor")


def test_what_kernels_do_not_take() -> None:
    q, k, v = make_qkv("randn", 1, 1, 1, 20, 20, 64)
    for recipe in (ha.ACCURATE, ha.HYBRID, ha.BF16):
        assert not unpack.takes(ha.quantize(q, k, v, recipe=recipe), recipe.resolved)


@pytest.mark.parametrize("listed", [False, True], ids=["dense", "packed_sequences"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_machine_code(D: int, listed: bool) -> None:
    """No spills, and rows are written 16 bytes at a time."""
    p, recipe = packing(D, D), ha.BALANCED.resolved
    m_blocks, n_blocks = -(-1000 // p.bm), -(-3000 // p.bn)
    # Of packed sequences, five, B is 1 in what tokens have, and blocks of V have descales each.
    B, sequences, v_width = (1, 5, n_blocks * D) if listed else (2, 2, D)

    def launch() -> None:
        sizes = 1000, 1000, 3000, 3000, n_blocks * p.bn, n_blocks
        lists = unpack.TokenLists(*(fake_cuda(n, dtype=torch.int32) for n in sizes)) if listed else unpack.NO_LISTS
        packed = PackedTensors(
            q8=fake_cuda(4 * B, m_blocks, p.bm, D, dtype=torch.int8),
            k8=fake_cuda(2 * B, n_blocks, p.bn, D, dtype=torch.int8),
            v8=fake_cuda(2 * B, n_blocks, D, p.bn, dtype=torch.float8_e4m3fn),
            q_descale=fake_cuda(B, 4, m_blocks, p.bm),
            k_descale=fake_cuda(B, 2, n_blocks),
            v_descale=fake_cuda(B, 2, v_width),
            v_mean=fake_cuda(sequences, 2, D),
            k_mean=fake_cuda(sequences, 2, row_width(D, D)),
            channel_factors=fake_cuda(sequences, 2, row_width(D, D)),
            lse_shift=None,
        )
        with launching():
            unpack.launch(packed, 1000, 3000, D, D, recipe, torch.bfloat16, listed, lists)

    kernels = compile_for_sm90(launch)
    assert [kernel.name for kernel in kernels] == ["_helion_unpack_values", *["_helion_unpack_rows"] * 2]
    for kernel in kernels:
        assert_sound(kernel)
        assert 16 in widths(kernel, "STG")
