"""Block masks with a tail: key blocks that are not visited count by their means, held against the fp64 oracle."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.reference.shapes import block_means
from helion_attn.testing import relative_error
from helpers.cases import LADDER, Tensors, make_case

#: B, H, H_kv, M, N, D, B and H of the mask.
SIZES = {
    "ragged": (1, 2, 1, 200, 500, 64, 1, 2),
    "more_queries": (1, 2, 2, 300, 140, 64, 1, 1),
    "whole_blocks": (2, 2, 1, 256, 384, 128, 2, 1),
    "one_query": (1, 2, 1, 1, 300, 128, 1, 1),
    "wide": (1, 1, 1, 130, 400, 256, 1, 1),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (150, 100)},
    "softcap": {"softcap": 3.0},
}


def with_tail(B: int, H: int, M: int, N: int, device: str, density: float = 0.4) -> ha.BlockMask:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.rand(B, H, -(-M // 128), -(-N // 128), generator=generator) < density
    return ha.BlockMask(blocks.to(device), M, N, tail=True)


def inputs(B: int, H: int, H_kv: int, M: int, N: int, D: int, device: str) -> Tensors:
    return make_qkv("biased_v", B, H, H_kv, M, N, D, device=device)


def assert_like_oracle(qkv: Tensors, mask: ha.BlockMask, **options: Any) -> None:
    case = make_case(qkv, block_mask=mask, **options)
    out, lse = case.run(torch.float32)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, options: dict[str, Any], device: str) -> None:
    *shape, of_batch, of_heads = SIZES[size]
    B, H, H_kv, M, N, D = shape
    assert_like_oracle(inputs(B, H, H_kv, M, N, D, device), with_tail(of_batch, of_heads, M, N, device), **options)


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("recipe", LADDER)
def test_recipes(recipe: str, device: str) -> None:
    mask = with_tail(1, 2, 300, 300, device)
    sinks = torch.tensor([0.5, 8.0], device=device)
    assert_like_oracle(inputs(1, 2, 1, 300, 300, 64, device), mask, recipe=LADDER[recipe], causal=True, sinks=sinks)


@pytest.mark.parametrize("splits", [2, 4])
def test_splits_of_a_list(splits: int, device: str) -> None:
    """A split may begin among the blocks of means, or end before them: there are two of them."""
    qkv = make_qkv("biased_v", 1, 1, 1, 2, 130 * 128, 64, device=device)
    blocks = torch.zeros(1, 1, 1, 130, dtype=torch.bool, device=device)
    blocks[..., ::50] = True
    case = make_case(qkv, block_mask=ha.BlockMask(blocks, 2, 130 * 128, tail=True))
    out, lse = ha.attention(
        *qkv, block_mask=case.block_mask, num_splits=splits, return_lse=True, out_dtype=torch.float32
    )
    case.assert_within_budget(out, splits)
    case.assert_lse_within_budget(lse)


def test_means_come_after_norms_and_rope(device: str) -> None:
    qkv = inputs(1, 2, 1, 200, 300, 64, device)
    angles = torch.outer(torch.arange(300.0), 10000 ** (-torch.arange(32) / 32)).to(device)
    rope = ha.Rope(angles.cos(), angles.sin())
    norm = ha.RMSNorm(torch.linspace(0.5, 2.0, 64, device=device))
    assert_like_oracle(qkv, with_tail(1, 1, 200, 300, device), rope=rope, k_norm=norm)


@pytest.mark.parametrize("causal", [False, True])
def test_equal_keys_lose_nothing(causal: bool, device: str) -> None:
    """Where the keys of a block are equal, and its values, all of it is what its means are."""
    q, k, v = make_qkv("biased_v", 1, 2, 1, 256, 512, 64, device=device)
    k, v = (x[:, :, ::128].repeat_interleave(128, 2) for x in (k, v))
    mask = with_tail(1, 2, 256, 512, device)
    if causal:
        # What is seen in part is visited.
        blocks = mask.blocks.clone()
        blocks[:, :, 0, 2] = blocks[:, :, 1, 3] = True
        mask = ha.BlockMask(blocks, 256, 512, tail=True)
    case = make_case((q, k, v), causal=causal)
    dense = ha.reference.attention(q, k, v, causal=causal, block_mask=mask)
    assert relative_error(dense, case.oracle) < 1e-12
    assert_like_oracle((q, k, v), mask, causal=causal)


@pytest.mark.parametrize(
    ("M", "N", "window"), [(5, 256, (1000, 0)), (65, 129, (300, 200)), (1, 1024, (600, 0)), (200, 512, (10**12, -1))]
)
def test_far_windows_of_ragged_queries(M: int, N: int, window: tuple[int, int], device: str) -> None:
    """The last row block has fewer queries than others: what each of them sees counts."""
    mask = ha.BlockMask(torch.zeros(1, 1, -(-M // 128), -(-N // 128), dtype=torch.bool, device=device), M, N, tail=True)
    assert_like_oracle(inputs(1, 1, 1, M, N, 64, device), mask, window=window)


def test_one_query_counts_what_it_sees() -> None:
    """By hand: of eight blocks those within 600 keys before the last one."""
    q, k, v = make_qkv("randn", 1, 1, 1, 1, 1024, 64)
    mask = ha.BlockMask(torch.zeros(1, 1, 1, 8, dtype=torch.bool), 1, 1024, tail=True)
    mean_k, mean_v = (block_means(x.double()) for x in (k, v))
    s = (q.double() @ mean_k.mT / 8)[..., 4:]
    expected = s.softmax(3) @ mean_v[:, :, 4:]
    assert relative_error(ha.reference.attention(q, k, v, block_mask=mask, window=(600, 0)), expected) < 1e-12


def test_check_counts_the_tail() -> None:
    qkv = make_qkv("biased_v", 1, 2, 1, 300, 512, 64)
    mask = with_tail(1, 2, 300, 512, "cpu")
    found = ha.check(*qkv, block_mask=mask, causal=True)
    exact, dense = (ha.reference.attention(*qkv, block_mask=of, causal=True) for of in (mask, None))
    assert found.errors["BALANCED"].total < 0.06
    assert found.pattern is not None
    assert abs(found.pattern.total - relative_error(exact, dense)) < 0.05 * found.pattern.total


def test_debug_takes_it_for_right(tmp_path: Path) -> None:
    qkv = make_qkv("biased_v", 1, 2, 1, 200, 384, 64)
    with ha.debug(save=tmp_path):
        ha.attention(*qkv, block_mask=with_tail(1, 2, 200, 384, "cpu"), causal=True)
    assert not list(tmp_path.iterdir())


def test_the_tail_decides(device: str) -> None:
    qkv = inputs(1, 2, 2, 200, 384, 64, device)
    mask = with_tail(1, 2, 200, 384, device)
    case = make_case(qkv, block_mask=mask)
    blocks = mask.blocks
    for wrong in (
        ha.BlockMask(blocks, 200, 384),
        ha.BlockMask(blocks.roll(1, 3), 200, 384, tail=True),
        ha.BlockMask(blocks.flip(1), 200, 384, tail=True),
    ):
        out = ha.attention(*qkv, block_mask=wrong, out_dtype=torch.float32)
        with pytest.raises(AssertionError, match="budget"):
            case.assert_within_budget(out)


def test_all_blocks_give_attention(device: str) -> None:
    """Blocks of means of which none counts change nothing but roundings of fp32: of references and their powers."""
    q, k, v = inputs(1, 2, 2, 300, 300, 128, device)
    mask = ha.BlockMask(torch.ones(1, 1, 3, 3, dtype=torch.bool, device=device), 300, 300, tail=True)
    found = ha.attention(q, k, v, block_mask=mask, return_lse=True, out_dtype=torch.float32)
    expected = ha.attention(q, k, v, num_splits=1, return_lse=True, out_dtype=torch.float32)
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) < 1e-6


def test_what_counts() -> None:
    blocks = torch.rand(2, 3, 4, 200, generator=torch.Generator().manual_seed(0)) < 0.3
    mask = ha.BlockMask(blocks, 500, 200 * 128, tail=True)
    assert torch.equal(mask.blocks, blocks)
    assert torch.equal(mask._tail_counts(), ~blocks)
    # A ragged last block is visited.
    ragged = ha.BlockMask(blocks, 500, 200 * 128 - 1, tail=True)
    assert torch.equal(ragged.blocks[..., :-1], blocks[..., :-1])
    assert ragged.blocks[..., -1].all()
    assert not ragged._tail_counts()[..., -1].any()
    fewer = mask._of_first_keys(150 * 128)
    assert fewer.N == 150 * 128
    assert torch.equal(fewer._tail_counts(), ~blocks[..., :150])
    assert torch.equal(mask._of_sequence(1)._tail_counts(), ~blocks[1:])
    assert not ha.BlockMask(blocks, 500, 200 * 128)._tail_counts().any()


def test_it_is_moved_saved_and_printed() -> None:
    mask = with_tail(1, 2, 300, 512, "cpu")
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    for other in (mask.to("cpu"), torch.load(file)):
        assert torch.equal(other._tail_counts(), mask._tail_counts())
    assert "of the blocks, the others by their means, 0.00% in part" in repr(mask)


def test_top_blocks() -> None:
    q, k, _ = make_qkv("randn", 1, 2, 1, 300, 512, 64)
    mask = ha.masks.top_blocks(q, k, keep=0.25, tail=True)
    assert torch.equal(mask.blocks, ha.masks.top_blocks(q, k, keep=0.25).blocks)
    assert torch.equal(mask._tail_counts(), ~mask.blocks)


def test_smooth_keys_gain() -> None:
    """A field that varies slowly: what is left out is like its means."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(3, 1, 1, 9, 64, generator=generator)
    q, k, v = torch.nn.functional.interpolate(coarse.flatten(0, 2).mT, 1024, mode="linear").mT.view(3, 1, 1, 1024, 64)
    exact = ha.reference.attention(q, k, v)
    with_and_without = [
        relative_error(
            ha.reference.attention(q, k, v, block_mask=ha.masks.top_blocks(q, k, keep=0.25, tail=tail)), exact
        )
        for tail in (True, False)
    ]
    assert with_and_without[0] < 0.6 * with_and_without[1]


def test_means_of_blocks() -> None:
    x = torch.arange(300.0).unsqueeze(1)
    assert block_means(x).flatten().tolist() == [63.5, 191.5, sum(range(256, 300)) / 128]


def test_tail_is_a_bool() -> None:
    with pytest.raises(TypeError, match=r"tail is .yes.; it must be a bool"):
        ha.BlockMask(torch.ones(1, 1, 3, 4, dtype=torch.bool), 300, 512, tail="yes")  # type: ignore[arg-type]


def test_it_has_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv("randn", 1, 2, 1, 300, 512, 64))
    with pytest.raises(ValueError, match="block_mask has a tail; where an input requires grad it must have none"):
        ha.attention(q, k, v, block_mask=with_tail(1, 2, 300, 512, "cpu"))
    with pytest.raises(ValueError, match="block_mask has a tail"):
        ha.explain(q, k, v, block_mask=with_tail(1, 2, 300, 512, "cpu"))


def test_packed_tensors_have_no_means() -> None:
    qkv = ha.quantize(*make_qkv("randn", 1, 2, 1, 300, 512, 64))
    with pytest.raises(ValueError, match="block_mask has a tail; of attention_quantized"):
        ha.attention_quantized(qkv, block_mask=with_tail(1, 2, 300, 512, "cpu"))
