"""`BlockMask`, made every way, against the mask by scores."""

from __future__ import annotations

import io

import pytest
import torch

import helion_attn as ha
from helion_attn.configs import MASK_BLOCK


def by_scores(blocks: torch.Tensor, M: int, N: int) -> torch.Tensor:
    """Whole blocks as a mask by scores."""
    return blocks.repeat_interleave(MASK_BLOCK, 2).repeat_interleave(MASK_BLOCK, 3)[:, :, :M, :N]


def check_lists(mask: ha.BlockMask) -> None:
    """What the kernel relies on: orders are permutations, the longest first, and entries ascend up to their count."""
    order, counts = mask.lists.unbind(3)
    m_blocks, n_blocks = mask.entries.shape[2:]
    assert torch.equal(order.sort(2).values, torch.arange(m_blocks, dtype=torch.int32).expand_as(order))
    assert torch.equal(counts, mask.blocks.sum(3).gather(2, order.long()))
    # Row blocks of as many entries stay in their order.
    place = counts.long() * m_blocks + (m_blocks - 1 - order)
    assert bool((place.diff(dim=2) < 0).all())
    by_row = torch.empty_like(counts).scatter_(2, order.long(), counts)
    block = torch.where(mask.entries < 0, -1 - mask.entries, mask.entries)
    listed = torch.arange(n_blocks) < by_row.unsqueeze(3)
    assert bool((mask.entries[~listed] == 0).all())
    assert bool((block.diff(dim=3) > 0)[listed[..., 1:]].all())
    for x in (mask.lists, mask.entries, mask.tile_of, mask.tiles):
        assert x.dtype == torch.int32
        assert x.is_contiguous()
    assert mask.tiles.shape[1:] == (MASK_BLOCK, 4)
    if bool((mask.entries < 0).any()):
        assert mask.tile_of.shape == mask.entries.shape
        assert 0 <= int(mask.tile_of.min()) <= int(mask.tile_of.max()) < mask.tiles.size(0)
    else:
        assert mask.tile_of.tolist() == [[[[0]]]]


@pytest.mark.parametrize(("B", "H", "M", "N"), [(1, 1, 128, 128), (2, 1, 300, 700), (1, 3, 129, 640), (2, 2, 1, 1)])
def test_blocks(B: int, H: int, M: int, N: int) -> None:
    torch.manual_seed(0)
    blocks = torch.rand(B, H, -(-M // MASK_BLOCK), -(-N // MASK_BLOCK)) < 0.5
    mask = ha.BlockMask(blocks, M, N)
    check_lists(mask)
    assert (mask.B, mask.H, mask.M, mask.N) == (B, H, M, N)
    assert torch.equal(mask.blocks, blocks)
    assert torch.equal(mask.to_dense(), by_scores(blocks, M, N))


def test_it_is_moved_saved_and_printed() -> None:
    blocks = torch.zeros(1, 2, 3, 4, dtype=torch.bool)
    blocks[:, :, 0, :3] = True
    mask = ha.BlockMask(blocks, 300, 512)
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    for other in (mask.to("cpu"), torch.load(file)):
        assert torch.equal(other.to_dense(), mask.to_dense())
    assert mask.device == torch.device("cpu")
    assert mask.nbytes == 4 * (1 * 2 * 3 * 2 + 1 * 2 * 3 * 4 + 1 + 128 * 4)
    assert repr(mask) == (
        f"BlockMask(B=1, H=2, M=300, N=512: 25.00% of the blocks, 0.00% in part, 1 tiles, {mask.nbytes} bytes on cpu)"
    )
    with pytest.raises(AttributeError):
        mask.M = 1  # type: ignore[misc]


BLOCKS = torch.ones(1, 1, 3, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("blocks", "M", "N", "error", "says"),
    [
        (BLOCKS.int(), 300, 512, TypeError, "blocks is a Tensor of torch.int32"),
        ([True], 300, 512, TypeError, "blocks is a list"),
        (BLOCKS, 100, 512, ValueError, r"blocks has shape \(1, 1, 3, 4\); for M = 100 .* 1, 4\]"),
        (BLOCKS[0], 300, 512, ValueError, r"blocks has shape \(3, 4\)|\(1, 3, 4\)"),
        (BLOCKS[:0], 300, 512, ValueError, "blocks has shape"),
        (BLOCKS, 0, 512, ValueError, "M is 0; it must be an int in 1"),
        (BLOCKS, 300, 512.0, ValueError, "N is 512.0; it must be an int in 1"),
        (BLOCKS.to("meta"), 300, 512, NotImplementedError, "blocks is on meta"),
    ],
)
def test_wrong_blocks(blocks: torch.Tensor, M: int, N: int, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ha.BlockMask(blocks, M, N)
