"""`block_mask=` of attention: against the fp64 oracle with the same mask, and against attention without one."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.masks import blocks
from helpers.cases import Tensors, make_case

#: What a mask may be, by blocks of 128: scores at random, blocks at random, both.
Mask = torch.Tensor


def random_blocks(B: int, H: int, M: int, N: int, density: float, seed: int = 0) -> Mask:
    """[B, H, M, N], by whole blocks."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.rand(B, H, -(-M // 128), -(-N // 128), generator=generator) < density
    return blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :M, :N]


def random_bits(B: int, H: int, M: int, N: int, density: float, seed: int = 0) -> Mask:
    return torch.rand(B, H, M, N, generator=torch.Generator().manual_seed(seed)) < density


def mixed(B: int, H: int, M: int, N: int) -> Mask:
    """Blocks that are unseen, whole and seen in part; rows of the last that see nothing."""
    part = random_blocks(B, H, M, N, 0.5, 1) & random_bits(B, H, M, N, 0.3)
    part[..., 5:6, :] = False
    return random_blocks(B, H, M, N, 0.3, 2) | part


def first_row_block_only(B: int, H: int, M: int, N: int) -> Mask:
    """The counts are as unequal as they can be: all, and none."""
    rows = torch.arange(M) < 128
    return rows.view(1, 1, M, 1).expand(B, H, M, N).clone()


def nothing(B: int, H: int, M: int, N: int) -> Mask:
    return torch.zeros(B, H, M, N, dtype=torch.bool)


MASKS: dict[str, Callable[[int, int, int, int], Mask]] = {
    "mixed": mixed,
    "bits": functools.partial(random_bits, density=0.2),
    "few_bits": functools.partial(random_bits, density=0.004),
    "blocks": functools.partial(random_blocks, density=0.4),
    "first_row_block_only": first_row_block_only,
    "nothing": nothing,
    "everything": lambda B, H, M, N: ~nothing(B, H, M, N),
}


def inputs(B: int, H: int, H_kv: int, M: int, N: int, D: int, device: str, D_v: int | None = None) -> Tensors:
    """V off centre, so that a mean that comes back wrongly shows."""
    return make_qkv("biased_v", B, H, H_kv, M, N, D, device=device, D_v=D_v)


def assert_like_oracle(qkv: Tensors, mask: ha.BlockMask, **options: Any) -> None:
    """Output and lse within their budgets; rows that see nothing exactly 0 and -inf."""
    case = make_case(qkv, block_mask=mask, **options)
    out, lse = case.run(torch.float32)
    if case.oracle.norm() > 0:
        case.assert_within_budget(out)
        case.assert_lse_within_budget(lse)
    sees_nothing = case.oracle_lse == float("-inf")
    if case.sinks is None:
        assert torch.all(out[sees_nothing] == 0)
        assert torch.all(lse[sees_nothing] == float("-inf"))


@pytest.mark.thorough(but=9)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("D", [64, 128])
def test_masks(name: str, D: int, device: str) -> None:
    mask = ha.BlockMask.from_dense(MASKS[name](1, 2, 200, 300).to(device))
    assert_like_oracle(inputs(1, 2, 1, 200, 300, D, device), mask)


#: B, H, H_kv, M, N, and B and H of the mask.
SIZES = {
    "one_query": (1, 2, 1, 1, 300, 1, 2),
    "half_a_row_block": (1, 2, 2, 60, 200, 1, 1),
    "an_odd_tile": (2, 3, 1, 129, 129, 2, 3),
    "of_batch": (3, 2, 2, 70, 260, 3, 1),
    "of_heads": (2, 4, 2, 70, 260, 1, 4),
    "more_queries": (1, 2, 1, 300, 70, 1, 2),
    "whole_blocks": (1, 1, 1, 256, 256, 1, 1),
}


@pytest.mark.thorough(but=7)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("D", [64, 256])
def test_sizes(name: str, D: int, device: str) -> None:
    """Tiles of 64 rows, which take a half of a row block each, and of 128."""
    B, H, H_kv, M, N, of_batch, of_heads = SIZES[name]
    mask = ha.BlockMask.from_dense(mixed(of_batch, of_heads, M, N).to(device))
    assert_like_oracle(inputs(B, H, H_kv, M, N, D, device), mask)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_quantised_before(D: int, layout: Any, device: str) -> None:
    qkv = inputs(1, 2, 1, 200, 300, D, device)
    mask = ha.BlockMask.from_dense(mixed(1, 2, 200, 300).to(device))
    case = make_case(qkv, block_mask=mask)
    given = qkv if layout == "bhsd" else [x.transpose(1, 2) for x in qkv]
    packed = ha.quantize(*given, layout=layout)
    out, lse = ha.attention_quantized(packed, block_mask=mask, return_lse=True, out_dtype=torch.float32)
    case.assert_within_budget(out if layout == "bhsd" else out.transpose(1, 2))
    case.assert_lse_within_budget(lse)


@pytest.mark.parametrize("splits", [2, 3])
def test_a_list_in_runs(splits: int, device: str) -> None:
    """More runs than some lists have entries."""
    mask = ha.BlockMask.from_dense(mixed(1, 2, 200, 500).to(device))
    case = make_case(inputs(1, 2, 1, 200, 500, 64, device), block_mask=mask)
    out, lse = ha.attention(
        *case.qkv, block_mask=mask, num_splits=splits, return_lse=True, out_dtype=torch.float32
    )  # fmt: skip
    case.assert_within_budget(out, splits)
    case.assert_lse_within_budget(lse)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 20)}], ids=["full", "causal", "window"])
def test_all_blocks_give_the_bits_of_attention(D: int, options: dict[str, Any], device: str) -> None:
    """In the order of the keys: where the mask leaves blocks that no row sees anyway, they change nothing."""
    q, k, v = inputs(1, 2, 2, 300, 300, D, device)
    mask = ha.BlockMask(torch.ones(1, 1, 3, 3, dtype=torch.bool, device=device), 300, 300)
    found = ha.attention(q, k, v, block_mask=mask, return_lse=True, **options)
    expected = ha.attention(q, k, v, num_splits=1, return_lse=True, **options)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def test_unseen_keys_are_not_read(device: str) -> None:
    """NaN in their block would show, were it multiplied by 0."""
    q, k, v = inputs(1, 1, 1, 128, 384, 64, device)
    for x in (k, v):
        x[:, :, 128:256] = float("nan")
    blocks = torch.tensor([[[[True, False, True]]]], device=device)
    packed = ha.quantize(
        q, k, v, recipe=ha.Recipe(smooth_k=False, center_v=False, v_scales="none", pv_dtype=torch.bfloat16)
    )
    out = ha.attention_quantized(packed, block_mask=ha.BlockMask(blocks, 128, 384))
    assert torch.isfinite(out).all()


def test_the_mask_decides(device: str) -> None:
    """So that the tests above can fail: another bit, another head's lists."""
    qkv = inputs(1, 2, 2, 200, 300, 64, device)
    seen = mixed(1, 2, 200, 300).to(device)
    case = make_case(qkv, block_mask=ha.BlockMask.from_dense(seen))
    for wrong in (seen.roll(1, 3), seen.roll(1, 2), seen.flip(1), ~seen):
        out = ha.attention(*qkv, block_mask=ha.BlockMask.from_dense(wrong), out_dtype=torch.float32)
        with pytest.raises(AssertionError, match="budget"):
            case.assert_within_budget(out)


# --- how it is called ------------------------------------------------------------------------------


def test_a_mask_of_pytorch_is_converted_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (k % 3 != h)

    theirs = create_block_mask(rule, 1, 2, 200, 300, device=device)
    qkv = inputs(1, 2, 2, 200, 300, 64, device)
    rows, keys = torch.arange(200, device=device), torch.arange(300, device=device)
    heads = torch.arange(2, device=device).view(1, 2, 1, 1)
    seen = (rows.unsqueeze(1) >= keys) & (keys % 3 != heads)
    out = ha.attention(*qkv, block_mask=theirs)
    assert torch.equal(out, ha.attention(*qkv, block_mask=ha.BlockMask.from_dense(seen)))
    monkeypatch.setattr(ha.BlockMask, "from_flex", None)
    assert torch.equal(out, ha.attention(*qkv, block_mask=theirs))
    assert torch.isfinite(ha.attention_quantized(ha.quantize(*qkv), block_mask=theirs)).all()
    assert len(blocks._OF_FLEX) > 0
    del theirs
    gc.collect()
    assert not any(key for key, (mask, _) in blocks._OF_FLEX.items() if mask() is None)


def test_its_plan_is_for_its_lengths(device: str) -> None:
    """Masks of as many blocks and of other lengths are not taken for each other."""
    q, k, v = inputs(1, 1, 1, 200, 300, 64, device)
    blocks = torch.ones(1, 1, 2, 3, dtype=torch.bool, device=device)
    right, wrong = ha.BlockMask(blocks, 200, 300), ha.BlockMask(blocks, 201, 300)
    ha.attention(q, k, v, block_mask=right)
    with pytest.raises(
        ValueError, match="block_mask is of 201 queries and 300 keys; it must be of M = 200 and N = 300"
    ):
        ha.attention(q, k, v, block_mask=wrong)
    again = ha.plan(q, k, v, block_mask=right)(q, k, v, block_mask=right)
    assert isinstance(again, torch.Tensor)
    assert torch.equal(ha.attention(q, k, v, block_mask=right), again)
    with pytest.raises(ValueError, match="the plan is for a call with block_mask, and block_mask is None"):
        ha.plan(q, k, v, block_mask=right)(q, k, v)


def test_explain(device: str) -> None:
    q, k, v = inputs(1, 4, 1, 1, 300, 64, device)
    mask = ha.BlockMask(torch.ones(1, 1, 1, 3, dtype=torch.bool, device=device), 1, 300)
    assert ha.explain(q, k, v).shares_tiles
    found = ha.explain(q, k, v, block_mask=mask)
    assert found.lists_keys
    assert not found.shares_tiles
    assert found.splits == 1
    assert "those that the block mask lists" in str(found)
    assert "a block mask may differ" in str(found)


def sizes(**changed: Any) -> Tensors:
    B, H, M, N, D, D_v = ({"B": 2, "H": 2, "M": 200, "N": 300, "D": 64, "D_v": 64} | changed).values()
    q, k, v = (torch.zeros(B, H, S, d, dtype=torch.bfloat16) for S, d in ((M, D), (N, D), (N, D_v)))
    return q, k, v


def ones(B: int = 1, H: int = 1, M: int = 200, N: int = 300) -> ha.BlockMask:
    return ha.BlockMask(torch.ones(B, H, -(-M // 128), -(-N // 128), dtype=torch.bool), M, N)


@pytest.mark.parametrize(
    ("qkv", "options", "error", "message"),
    [
        (sizes(), {"block_mask": torch.ones(200, 300, dtype=torch.bool)}, TypeError, "block_mask is a? ?.*from_dense"),
        (sizes(), {"block_mask": ones(M=199)}, ValueError, "block_mask is of 199 queries"),
        (sizes(), {"block_mask": ones(N=301)}, ValueError, "block_mask is of 200 queries and 301 keys"),
        (sizes(), {"block_mask": ones(B=3)}, ValueError, "block_mask has B = 3 and H = 1; B must be 1 or 2"),
        (sizes(), {"block_mask": ones(H=4)}, ValueError, "block_mask has B = 1 and H = 4"),
        (sizes(), {"block_mask": ones().to("meta")}, ValueError, "block_mask is on meta; it must be on cpu"),
        (sizes(D=300), {"block_mask": ones()}, ValueError, "block_mask is given with D 300"),
        (sizes(D=192, D_v=128), {"block_mask": ones()}, ValueError, "block_mask is given with D 192 and D_v 128"),
        (sizes(D=256), {"block_mask": ones(), "recipe": "bf16"}, ValueError, "block_mask is given with D 256"),
        (sizes(), {"block_mask": ones(), "num_splits": 4}, ValueError, "num_splits is 4"),
    ],
)
def test_errors(qkv: Tensors, options: dict[str, Any], error: type[Exception], message: str, no_launch: None) -> None:
    with pytest.raises(error, match=message):
        ha.attention(*qkv, **options)


def test_others_say_where_masks_are_taken() -> None:
    q = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    attend: Any = ha.attention_varlen
    with pytest.raises(TypeError, match=r"no argument block_mask: helion_attn.attention and .*masks.documents"):
        attend(q, q, q, cu, cu, block_mask=ones())


@pytest.mark.gpu
@pytest.mark.once
def test_a_cuda_graph() -> None:
    """Its replay takes what the mask's tensors hold then."""
    q, k, v = inputs(1, 2, 1, 500, 700, 64, "cuda")
    masks = [ha.BlockMask.from_dense(random_bits(1, 2, 500, 700, 0.2, seed).cuda()) for seed in range(2)]
    expected = [ha.attention(q, k, v, block_mask=mask) for mask in masks]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ha.attention(q, k, v, block_mask=masks[0])
    for name in ("lists", "entries", "tile_of", "tiles"):
        getattr(masks[0], name).copy_(getattr(masks[1], name))
    graph.replay()
    assert torch.equal(out, expected[1])
