"""`BlockMask`, made every way, against the mask by scores."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

import helion_attn as ha
from helion_attn.configs import MASK_BLOCK
from helion_attn.preprocess import list_order, mask_bits, mask_lists


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


def test_many_blocks(device: str) -> None:
    """More row blocks than are compared at once, and more key blocks than are read at once; some are seen in part."""
    torch.manual_seed(0)
    for shape in ((2, 1, list_order.COMPARED + 3, 5), (1, 2, 3, mask_lists.MOST_AT_ONCE + 70)):
        kinds = torch.randint(mask_bits.UNSEEN, 3, shape, dtype=torch.int32, device=device)
        tiles = torch.zeros(3, MASK_BLOCK, 4, dtype=torch.int32, device=device)
        M, N = (size * MASK_BLOCK for size in shape[2:])
        mask = ha.BlockMask._of_kinds(M, N, kinds, tiles)
        check_lists(mask.to("cpu"))
        assert torch.equal(mask._kinds(), kinds.long())
        whole = ha.BlockMask(kinds != mask_bits.UNSEEN, M, N)
        check_lists(whole.to("cpu"))
        assert torch.equal(whole.blocks, kinds != mask_bits.UNSEEN)


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


def random_mask(B: int, H: int, M: int, N: int, device: str = "cpu") -> torch.Tensor:
    """Bits at random, and some blocks whole, some empty, and some rows of scores empty."""
    torch.manual_seed(0)
    blocks = torch.randint(3, (B, H, -(-M // MASK_BLOCK), -(-N // MASK_BLOCK)))
    blocks = blocks.repeat_interleave(MASK_BLOCK, 2).repeat_interleave(MASK_BLOCK, 3)[:, :, :M, :N]
    mask = (blocks == 0) | ((blocks == 1) & (torch.rand(B, H, M, N) < 0.5))
    mask[:, :, M // 2] = False
    return mask.to(device)


#: Rows that begin at multiples of 16 bytes, of 4, and at any byte.
SHAPES = [(1, 1, 128, 256), (2, 1, 300, 400), (1, 2, 129, 260), (2, 2, 200, 301), (1, 1, 1, 1), (1, 1, 257, 3)]


@pytest.mark.parametrize(("B", "H", "M", "N"), SHAPES)
def test_from_dense(B: int, H: int, M: int, N: int, device: str) -> None:
    dense = random_mask(B, H, M, N, device)
    for capacity in (None, 40):
        mask = ha.BlockMask.from_dense(dense, capacity)
        assert torch.equal(mask.to_dense(), dense)
        assert (mask.B, mask.H, mask.M, mask.N) == (B, H, M, N)
        if capacity is None:
            check_lists(mask.to("cpu"))
        else:
            assert mask.tiles.size(0) == capacity
            assert not bool(mask.tiles[int(mask.tile_of.max()) + 1 :].any())


@pytest.mark.parametrize("capacity", [None, 40])
@pytest.mark.parametrize("kind", ["mixed", "whole", "of all"])
def test_one_sequence_of_a_batch(kind: str, capacity: int | None) -> None:
    """Also where no block is seen in part, and where sequences share the mask."""
    dense = random_mask(1 if kind == "of all" else 3, 2, 200, 301)
    if kind == "whole":
        dense = (torch.arange(3) < torch.tensor([[1], [2], [3]])).repeat_interleave(MASK_BLOCK, 1)[:, None, None, :301]
        dense = dense.expand(3, 2, 200, 301).contiguous()
    mask = ha.BlockMask.from_dense(dense, capacity)
    for b in range(3):
        one = mask._of_sequence(b)
        assert one.B == 1
        assert torch.equal(one.to_dense(), dense[b % mask.B][None])
        for x in (one.lists, one.entries, one.tile_of, one.tiles):
            assert x.is_contiguous()


@pytest.mark.parametrize("all_", [True, False])
@pytest.mark.parametrize(("M", "N"), [(128, 128), (200, 301), (300, 260)])
def test_all_or_nothing_is_no_tile(all_: bool, M: int, N: int, device: str) -> None:
    """A last block that is not full is whole if all that exist are seen."""
    dense = torch.full((M, N), all_, device=device)
    mask = ha.BlockMask.from_dense(dense)
    check_lists(mask.to("cpu"))
    assert torch.equal(mask.to_dense()[0, 0], dense)
    assert not bool((mask.entries < 0).any())
    assert bool((mask.lists[..., 1] == (mask.entries.size(3) if all_ else 0)).all())
    # With room for tiles, there is a number beside each entry.
    assert torch.equal(ha.BlockMask.from_dense(dense, 1).to_dense()[0, 0], dense)


def test_equal_blocks_are_stored_once(device: str) -> None:
    torch.manual_seed(0)
    a, b = torch.rand(2, MASK_BLOCK, MASK_BLOCK, device=device) < 0.5
    rows = [torch.cat(row, 1) for row in ([a, b, a], [b, b, torch.ones_like(a)], [a, a.clone().fill_(False), b])]
    dense = torch.cat(rows)
    mask = ha.BlockMask.from_dense(dense)
    assert mask.tiles.size(0) == 2
    assert torch.equal(mask.to_dense()[0, 0], dense)
    assert ha.BlockMask.from_dense(dense, 2).tiles.size(0) == 2


def test_blocks_that_differ_in_one_score_are_two(device: str) -> None:
    """In every place of a word, and in words and rows far apart."""
    places = [(r, c) for r, c in ((0, 0), (0, 31), (0, 32), (5, 127), (64, 63), (127, 0), (127, 127))]
    dense = torch.zeros(MASK_BLOCK, MASK_BLOCK * len(places), dtype=torch.bool, device=device)
    for i, (r, c) in enumerate(places):
        dense[r, MASK_BLOCK * i + c] = True
    mask = ha.BlockMask.from_dense(torch.cat([dense, ~dense]))
    assert mask.tiles.size(0) == 2 * len(places)


def test_hashes_of_patterns_differ() -> None:
    """4096 tiles whose rows are all or nothing, which is where sums over words without a bijection would meet."""
    torch.manual_seed(0)
    rows = torch.rand(4096, MASK_BLOCK).lt(0.5).unique(dim=0)
    words = (rows.int() * -1).unsqueeze(2).expand(-1, -1, 4)
    place = torch.arange(MASK_BLOCK * 4, dtype=torch.int32).view(MASK_BLOCK, 4)
    for salt in (1, 2):
        of_32_bits = mask_bits.mixed(words, (2 * place + salt).expand_as(words)).sum((1, 2)).to(torch.int32)
        # Of 2**32 numbers, 4096 random ones have two alike once in 500 times.
        assert of_32_bits.unique().numel() == rows.size(0)


def test_too_many_tiles_are_an_error() -> None:
    dense = random_mask(1, 1, 300, 512)
    enough = ha.BlockMask.from_dense(dense).tiles.size(0)
    assert torch.equal(ha.BlockMask.from_dense(dense, enough).to_dense(), dense)
    with pytest.raises(RuntimeError, match=f"more than capacity={enough - 1} different blocks"):
        ha.BlockMask.from_dense(dense, enough - 1)


def test_in_torch_compile() -> None:
    """With a capacity, without a break of the graph; and without one, an error that says so."""
    dense = random_mask(1, 2, 200, 300)

    def fields(capacity: int | None) -> list[torch.Tensor]:
        mask = ha.BlockMask.from_dense(dense, capacity)
        return [mask.lists, mask.entries, mask.tile_of, mask.tiles]

    compiled = torch.compile(fields, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(compiled(20), fields(20), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(Exception, match="capacity is None"):
        compiled(None)


TABLE = torch.arange(1000) // 77

RULES = {
    "causal": lambda b, h, q, k: q >= k,
    "of heads": lambda b, h, q, k: (q + 40 * h >= k) & (k > 100 * b),
    "nothing": lambda b, h, q, k: k < 0,
    "everything": lambda b, h, q, k: k >= 0,
    "of a table": lambda b, h, q, k: TABLE[q] == TABLE[k],
    "of queries alone": lambda b, h, q, k: q % 3 == 0,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("M", "N"), [(300, 403), (256, 256)])
def test_from_flex(rule: str, M: int, N: int) -> None:
    theirs = create_block_mask(RULES[rule], 2, 3, M, N, device="cpu")
    mask = ha.BlockMask.from_flex(theirs)
    check_lists(mask)
    assert (mask.B, mask.H, mask.M, mask.N) == (2, 3, M, N)
    assert torch.equal(mask.to_dense(), create_mask(RULES[rule], 2, 3, M, N, device="cpu"))


@pytest.mark.parametrize("size", [256, 64, 32, 96, (128, 64), (64, 384)])
def test_blocks_of_other_sizes(size: int | tuple[int, int]) -> None:
    rule = RULES["of heads"]
    theirs = create_block_mask(rule, None, 2, 300, 500, device="cpu", BLOCK_SIZE=size)
    mask = ha.BlockMask.from_flex(theirs)
    check_lists(mask)
    assert torch.equal(mask.to_dense(), create_mask(rule, None, 2, 300, 500, device="cpu"))


@pytest.mark.parametrize("size", [128, 64])
def test_lists_of_flex_decide_before_its_rule(size: int) -> None:
    """A block that is listed as whole is not evaluated, and one that is not listed is not seen."""
    n_blocks = 512 // size
    torch.manual_seed(0)
    kinds = torch.randint(3, (1, 1, n_blocks, n_blocks))
    counts = [(kinds == i).sum(3).int() for i in (0, 1)]
    lists = [(kinds == i).int().argsort(stable=True, dim=3, descending=True).int() for i in (0, 1)]
    theirs = BlockMask.from_kv_blocks(counts[0], lists[0], counts[1], lists[1], size, lambda b, h, q, k: q > k)
    by_score = kinds.repeat_interleave(size, 2).repeat_interleave(size, 3)
    causal = torch.ones(512, 512, dtype=torch.bool).tril(-1)
    assert torch.equal(ha.BlockMask.from_flex(theirs).to_dense(), ((by_score == 0) & causal) | (by_score == 1))
    without = BlockMask.from_kv_blocks(counts[0], lists[0], BLOCK_SIZE=size, mask_mod=lambda b, h, q, k: q > k)
    assert torch.equal(ha.BlockMask.from_flex(without).to_dense(), (by_score == 0) & causal)


@pytest.mark.parametrize(
    ("mask", "capacity", "error", "says"),
    [
        (torch.ones(4, 4), None, TypeError, "mask is a Tensor of torch.float32"),
        (torch.ones(4, dtype=torch.bool), None, ValueError, r"mask has shape \(4,\)"),
        (torch.ones(0, 4, dtype=torch.bool), None, ValueError, r"mask has shape \(0, 4\)"),
        (torch.ones(4, 4, dtype=torch.bool), 0, ValueError, "capacity is 0"),
        (torch.ones(4, 4, dtype=torch.bool), True, ValueError, "capacity is True"),
        (torch.ones(4, 4, dtype=torch.bool, device="meta"), None, NotImplementedError, "mask is on meta"),
    ],
)
def test_wrong_masks(mask: torch.Tensor, capacity: int | None, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ha.BlockMask.from_dense(mask, capacity)


def test_wrong_masks_of_flex() -> None:
    with pytest.raises(TypeError, match=r"mask is a Tensor of torch.bool .*; it must be a torch.nn.attention.flex"):
        ha.BlockMask.from_flex(torch.ones(4, 4, dtype=torch.bool))  # type: ignore[arg-type]
    few = create_block_mask(RULES["causal"], 1, 1, 256, 256, device="cpu")
    few.seq_lengths = (300, 256)
    with pytest.raises(ValueError, match=r"seq_lengths \(300, 256\), BLOCK_SIZE \(128, 128\) and 2 row blocks"):
        ha.BlockMask.from_flex(few)


@pytest.mark.parametrize("at", [(0,), (slice(None), 0), (slice(None), slice(None), slice(0, 1))], ids=str)
def test_a_slice_of_pytorchs_mask_is_refused(at: tuple[Any, ...]) -> None:
    """It has the whole's lengths, and a `mask_mod` that raises."""
    whole = create_block_mask(RULES["causal"], 1, 1, 300, 300, device="cpu")
    with pytest.raises(ValueError, match=r"mask is a slice of .* it must be whole, from create_block_mask"):
        ha.BlockMask.from_flex(whole[at])
