"""`helion_attn.masks`: each pattern against the same rule evaluated for all scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn import plans
from helion_attn.configs import MASK_BLOCK
from helion_attn.masks.blocks import Rule
from helion_attn.preprocess import block_means as of_means
from helion_attn.preprocess import top_blocks
from helion_attn.preprocess.mask_bits import IN_PART
from helion_attn.problem import BlockMeansArgs


def check(mask: ha.BlockMask, dense: torch.Tensor) -> None:
    """The scores are these, and a block is seen in part only if it is."""
    assert torch.equal(mask.to_dense(), dense)
    missing = [-size % MASK_BLOCK for size in dense.shape[:1:-1]]
    some = torch.nn.functional.pad(dense, (0, missing[0], 0, missing[1]), value=False)
    whole = torch.nn.functional.pad(dense, (0, missing[0], 0, missing[1]), value=True)
    some, whole = (x.unflatten(3, (-1, MASK_BLOCK)).unflatten(2, (-1, MASK_BLOCK)) for x in (some, whole))
    assert torch.equal(mask.blocks, some.amax((3, 5)))
    assert int((mask.entries < 0).sum()) == int((some.amax((3, 5)) & ~whole.amin((3, 5))).sum())


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks are evaluated, by mask."""
    counts: list[int] = []
    of_rule = ha.BlockMask._of_rule.__func__  # type: ignore[attr-defined]

    def counting(cls: Any, M: int, N: int, kinds: torch.Tensor, rule: Rule) -> ha.BlockMask:
        counts.append(int(torch.eq(kinds, IN_PART).sum()))
        made: ha.BlockMask = of_rule(cls, M, N, kinds, rule)
        return made

    monkeypatch.setattr(ha.BlockMask, "_of_rule", classmethod(counting))
    return counts


def in_part(mask: ha.BlockMask) -> int:
    return int((mask.entries < 0).sum())


DOCUMENTS = {
    "lengths": torch.arange(4).repeat_interleave(torch.tensor([100, 156, 300, 7])),
    "padding": torch.tensor([0, 1, -1]).repeat_interleave(torch.tensor([200, 120, 100])),
    "all padding": torch.full((200,), -1),
    "one": torch.zeros(300, dtype=torch.int64),
    "apart": torch.arange(390) // 40 % 3,
    "batch": torch.stack([torch.arange(300) // 90, torch.arange(300) // 128]),
    "int32": (torch.arange(200) // 100).int(),
    "one token": torch.zeros(1, dtype=torch.int64),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name: str, causal: bool, evaluated: list[int]) -> None:
    ids = DOCUMENTS[name]
    mask = ha.masks.documents(ids, causal=causal)
    rows = ids.view(-1, 1, ids.size(-1))
    dense = (rows.mT == rows) & (rows >= 0)
    check(mask, (dense.tril() if causal else dense).unsqueeze(1))
    assert mask.H == 1
    if name != "apart":
        assert evaluated == [in_part(mask)]


@pytest.mark.parametrize(("M", "N"), [(300, 300), (129, 400), (400, 129), (256, 256)])
@pytest.mark.parametrize("n", [0, 1, 128, 200, 1000])
def test_prefix(n: int, M: int, N: int, evaluated: list[int]) -> None:
    mask = ha.masks.prefix(n, M, N)
    dense = torch.ones(M, N, dtype=torch.bool).tril(N - M) | (torch.arange(N) < n)
    check(mask, dense[None, None])
    assert evaluated == [in_part(mask)]


def test_prefix_of_each_sequence() -> None:
    n = torch.tensor([3, 150, 260])
    mask = ha.masks.prefix(n, 200)
    dense = torch.ones(200, 200, dtype=torch.bool).tril() | (torch.arange(200) < n[:, None, None])
    check(mask, dense.unsqueeze(1))


TILES = [
    ((4, 8, 8), (2, 8, 8), (1, 1, 1), 0, 0),
    ((6, 16, 16), (2, 8, 8), (3, 1, 2), 0, 0),
    ((5, 7, 9), (2, 3, 4), (1, 3, 2), 3, 0),
    ((5, 7, 9), (2, 3, 4), (3, 3, 3), 0, 20),
    ((4, 8, 12), (2, 4, 4), (1, 1, 3), 20, 130),
    ((1, 1, 1), (1, 1, 1), (1, 1, 1), 0, 0),
]


@pytest.mark.parametrize(("grid", "tile", "window", "before", "text"), TILES)
def test_sliding_tile(
    grid: Sequence[int], tile: Sequence[int], window: Sequence[int], before: int, text: int, evaluated: list[int]
) -> None:
    mask, order, inverse = ha.masks.sliding_tile(grid, tile, window, before=before, text=text)
    video = math.prod(grid)
    assert torch.equal(order[inverse], torch.arange(before + video + text))
    places = [*itertools.product(*map(range, grid))]
    tiles = [-(-size // of) for size, of in zip(grid, tile, strict=True)]
    dense = torch.ones(video, video, dtype=torch.bool)
    # In the order of the grid, token by token.
    for i, of_query in enumerate(places):
        for j, of_key in enumerate(places):
            seen = True
            for x, y, size, wide, count in zip(of_query, of_key, tile, window, tiles, strict=True):
                first = min(max(x // size - wide // 2, 0), count - wide)
                seen &= first <= y // size < first + wide
            dense[i, j] = seen
        if video > 400 and i > 40:
            break
    rows = min(video, 41) if video > 400 else video
    back = mask.to_dense()[0, 0][inverse][:, inverse]
    of_video = slice(before, before + video)
    assert torch.equal(back[of_video, of_video][:rows], dense[:rows])
    for others in (slice(before), slice(before + video, None)):
        assert bool(back[others].all())
        assert bool(back[:, others].all())
    check(mask, mask.to_dense())
    assert evaluated == [in_part(mask)]
    # Tokens of a tile lie together.
    of_tile = [tuple(x // size for x, size in zip(places[i - before], tile, strict=True)) for i in order[:video]]
    assert [x for x, _ in itertools.groupby(of_tile)] == sorted(set(of_tile))


def test_tiles_of_whole_blocks_are_not_seen_in_part() -> None:
    mask = ha.masks.sliding_tile((6, 16, 16), (2, 8, 8), (3, 1, 2)).mask
    assert in_part(mask) == 0


RADIAL = [
    (5, 70, 1.0, 1, 0, 0),
    (9, 40, 1.0, 1, 1, 0),
    (9, 40, 0.5, 16, 1, 30),
    (17, 20, 1.0, 128, 0, 0),
    (3, 300, 0.2, 128, 2, 100),
    (1, 50, 1.0, 1, 0, 0),
    (40, 3, 1.0, 1, 0, 5),
]


@pytest.mark.parametrize(("frames", "tokens", "decay", "narrowest", "sinks", "text"), RADIAL)
def test_radial(
    frames: int, tokens: int, decay: float, narrowest: int, sinks: int, text: int, evaluated: list[int]
) -> None:
    mask = ha.masks.radial(frames, tokens, decay=decay, narrowest=narrowest, sink_frames=sinks, text=text)
    video = frames * tokens
    dense = torch.ones(video + text, video + text, dtype=torch.bool)
    place = torch.arange(tokens)
    apart = (place.unsqueeze(1) - place).abs()
    for i, j in itertools.product(range(frames), repeat=2):
        d = abs(i - j)
        width = float(tokens) if d < 2 else decay * tokens / 2 ** math.floor(math.log2(d))
        least = min(narrowest, tokens)
        if j < sinks:
            seen = torch.ones_like(apart, dtype=torch.bool)
        elif width >= least:
            seen = apart < width
        else:
            seen = (apart < least) if d % math.ceil(least / width) == 0 else torch.zeros_like(apart).bool()
        dense[i * tokens : (i + 1) * tokens, j * tokens : (j + 1) * tokens] = seen
    check(mask, dense[None, None])
    assert evaluated == [in_part(mask)]


def test_radial_decays_as_the_paper_has_it() -> None:
    """The paper's formula: frames at distance 2 to 3 have half of the width, at 4 to 7 a quarter."""
    dense = ha.masks.radial(8, 64, narrowest=1, sink_frames=0).to_dense()[0, 0]
    middle = dense[32].view(8, 64).sum(1).tolist()
    assert middle == [64, 64, 63, 63, 31, 31, 31, 31]


def block_means(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.double().mean(2) for part in x.split(MASK_BLOCK, 2)], 2)


OF_MEANS = {
    "bf16": lambda: torch.randn(2, 3, 300, 64).bfloat16(),
    "fp16 of 96 channels": lambda: torch.randn(1, 2, 129, 96).half(),
    "fp32 transposed": lambda: torch.randn(2, 140, 3, 40).transpose(1, 2),
    "fp64 of strided channels": lambda: torch.randn(1, 2, 256, 30).double()[..., ::3],
    "e4m3 of few rows": lambda: torch.randn(1, 1, 5, 1024).to(torch.float8_e4m3fn),
    "expanded": lambda: torch.randn(2, 1, 200, 64).expand(-1, 4, -1, -1),
}


@pytest.mark.parametrize("case", OF_MEANS)
def test_block_means(case: str, device: str) -> None:
    """Of 128 numbers or fewer an fp32 mean has at most so many roundings of their mean magnitude."""
    torch.manual_seed(0)
    x = OF_MEANS[case]().to(device)
    means = of_means.launch(BlockMeansArgs(x))
    assert means.dtype == torch.float32
    error = (means.double() - block_means(x.double())).abs()
    assert bool((error <= (MASK_BLOCK + 1) * 2**-24 * block_means(x.double().abs())).all())


def qk(M: int, N: int, H: int = 4, H_kv: int = 2, D: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Of block means that differ."""
    torch.manual_seed(0)
    q, k = torch.randn(2, H, M, D), torch.randn(2, H_kv, N, D)
    q += 2 * torch.randn(2, H, -(-M // MASK_BLOCK), D).repeat_interleave(MASK_BLOCK, 2)[:, :, :M]
    k += 2 * torch.randn(2, H_kv, -(-N // MASK_BLOCK), D).repeat_interleave(MASK_BLOCK, 2)[:, :, :N]
    return q, k


def probabilities(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    """Of blocks, fp64 [B, H, M_blocks, N_blocks]."""
    M, N = q.size(2), k.size(2)
    k = k.repeat_interleave(q.size(1) // k.size(1), 1)
    scores = block_means(q) @ block_means(k).mT / math.sqrt(q.size(3))
    if causal:
        last = (torch.arange(scores.size(2)) * MASK_BLOCK + MASK_BLOCK - 1).clamp(max=M - 1) + N - M
        first = torch.arange(scores.size(3)) * MASK_BLOCK
        scores = scores.masked_fill(first > last.unsqueeze(1), -math.inf)
    return scores.softmax(3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("M", "N"), [(1280, 1280), (700, 1000), (300, 129)])
def test_top_blocks_by_mass(M: int, N: int, causal: bool) -> None:
    q, k = qk(M, N)
    mask = ha.masks.top_blocks(q, k, mass=0.9, sink_blocks=0, local_blocks=0, causal=causal)
    p = probabilities(q, k, causal)
    # Rows above the diagonal's beginning see nothing.
    empty = p.isnan().all(3)
    assert torch.equal(mask.blocks.any(3), ~empty)
    held = (p.nan_to_num() * mask.blocks).sum(3) + empty
    assert bool((held >= 0.9 - 1e-5).all())
    # Without the least of them it would be less.
    least = p.nan_to_num().masked_fill(~mask.blocks, math.inf).amin(3)
    assert bool((held - least < 0.9 + 1e-5).all())
    assert bool((p.nan_to_num().masked_fill(mask.blocks, -math.inf).amax(3) <= least).all())
    assert in_part(mask) == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keep", [0.1, 0.25, 0.3, 1.0, 1e-9])
def test_top_blocks_by_share(keep: float, causal: bool) -> None:
    q, k = qk(1280, 1200)
    mask = ha.masks.top_blocks(q, k, keep=keep, sink_blocks=0, local_blocks=0, causal=causal)
    p = probabilities(q, k, causal)
    wanted = [max(1, math.ceil(round(keep * n, 6))) for n in (p[0, 0] > 0).sum(1).tolist()]
    assert torch.equal(mask.blocks.sum(3), torch.tensor(wanted).expand(2, 4, -1))
    least = p.masked_fill(~mask.blocks, math.inf).amin(3)
    assert bool((p.masked_fill(mask.blocks, -math.inf).amax(3) <= least).all())


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("how", [{"keep": 0.6}, {"mass": 0.8, "causal": True}], ids=["keep", "mass"])
def test_blocks_that_are_read_in_several_steps(
    how: dict[str, Any], alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of blocks that are alike the first are kept, in whatever step they are."""
    q, k = qk(300, 128 * 300)
    if alike:
        q, k = torch.ones_like(q), torch.ones_like(k)
    at_once = ha.masks.top_blocks(q, k, **how).blocks
    monkeypatch.setattr(top_blocks, "MOST_AT_ONCE", 128)
    plans.forget()
    assert torch.equal(ha.masks.top_blocks(q, k, **how).blocks, at_once)
    plans.forget()


@pytest.mark.parametrize("causal", [False, True])
def test_of_blocks_that_are_alike_as_many_are_kept(causal: bool) -> None:
    q = torch.ones(1, 2, 1280, 64)
    mask = ha.masks.top_blocks(q, q, keep=0.25, sink_blocks=0, local_blocks=0, causal=causal)
    wanted = [math.ceil((i + 1) / 4) if causal else 3 for i in range(10)]
    assert mask.blocks.sum(3).tolist() == [[wanted, wanted]]


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_that_are_always_kept(causal: bool) -> None:
    """The first key blocks, and those around the diagonal, which ends at the last query and key."""
    q, k = qk(640, 1280)
    bare = ha.masks.top_blocks(q, k, keep=0.1, sink_blocks=0, local_blocks=0, causal=causal).blocks
    mask = ha.masks.top_blocks(q, k, keep=0.1, sink_blocks=2, local_blocks=2, causal=causal).blocks
    i, j = torch.arange(5).unsqueeze(1) + 5, torch.arange(10)
    always = (j < 2) | ((i - j).abs() < 2)
    assert torch.equal(mask, bare | ((always & (j <= i)) if causal else always))


def test_top_blocks_of_the_other_layout_dtypes_and_nan() -> None:
    q, k = (x.bfloat16() for x in qk(500, 700))
    mask = ha.masks.top_blocks(q, k, keep=0.3)
    other = ha.masks.top_blocks(q.transpose(1, 2), k.transpose(1, 2), keep=0.3, layout="bshd")
    assert torch.equal(mask.blocks, other.blocks)
    q[1, 2, 130] = math.nan
    # What is NaN is to be seen.
    assert bool(ha.masks.top_blocks(q, k, mass=0.5, sink_blocks=0, local_blocks=0).blocks[1, 2, 1].all())


@pytest.mark.parametrize("nan", [math.nan, -math.nan])
def test_a_block_with_nan_is_kept(nan: float) -> None:
    q, k = qk(500, 700)
    k[:, :, 300] = torch.tensor(nan)
    assert math.copysign(1.0, nan) == math.copysign(1.0, k[0, 0, 300, 0].item())
    assert bool(ha.masks.top_blocks(q, k, keep=0.2, sink_blocks=0, local_blocks=0).blocks[..., 2].all())


def test_the_least_mass_keeps_a_block() -> None:
    q, k = qk(500, 700)
    mask = ha.masks.top_blocks(q, k, mass=1e-50, sink_blocks=0, local_blocks=0)
    assert bool((mask.blocks.sum(3) == 1).all())


X = torch.ones(1, 2, 200, 64)

WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: ha.masks.documents([0, 1]), TypeError, "ids is a list"),  # type: ignore[arg-type]
    (lambda: ha.masks.documents(torch.zeros(3)), TypeError, "ids is a Tensor of torch.float32"),
    (lambda: ha.masks.documents(torch.zeros(1, 1, 3).long()), ValueError, r"ids has shape \(1, 1, 3\)"),
    (lambda: ha.masks.documents(torch.zeros(3).long(), causal="no"), TypeError, "causal is 'no'"),  # type: ignore[arg-type]
    (lambda: ha.masks.prefix(-1, 10), ValueError, "n is -1"),
    (lambda: ha.masks.prefix(torch.zeros(2, 2).int(), 10), ValueError, r"n has shape \(2, 2\)"),
    (lambda: ha.masks.prefix(1, 0), ValueError, "M is 0"),
    (lambda: ha.masks.prefix(1, 1, 0), ValueError, "N is 0"),
    (lambda: ha.masks.sliding_tile((4, 4), (2, 2), (1, 1)), ValueError, r"grid is \(4, 4\); it must be 3 ints"),
    (lambda: ha.masks.sliding_tile((4, 4, 4), (5, 2, 2), (1, 1, 1)), ValueError, r"tile is .* up to 4, 4, 4"),
    (lambda: ha.masks.sliding_tile((4, 4, 4), (2, 2, 2), (3, 1, 1)), ValueError, r"window is .* up to 2, 2, 2"),
    (lambda: ha.masks.sliding_tile((4, 4, 4), (2, 2, 2), (1, 1, 1), text=-1), ValueError, "text is -1"),
    (lambda: ha.masks.sliding_tile((4, 4, 4), (2, 2, 2), (1, 1, 1), before=-1), ValueError, "before is -1"),
    (lambda: ha.masks.radial(0, 4), ValueError, "frames is 0"),
    (lambda: ha.masks.radial(4, 0), ValueError, "tokens is 0"),
    (lambda: ha.masks.radial(4, 4, decay=0), ValueError, "decay is 0; it must be a finite number above 0"),
    (lambda: ha.masks.radial(4, 4, narrowest=0), ValueError, "narrowest is 0"),
    (lambda: ha.masks.radial(4, 4, sink_frames=5), ValueError, "sink_frames is 5"),
    (lambda: ha.masks.top_blocks(X, X), ValueError, "keep is None and mass is None"),
    (lambda: ha.masks.top_blocks(X, X, keep=0.5, mass=0.5), ValueError, "keep is 0.5 and mass is 0.5"),
    (lambda: ha.masks.top_blocks(X, X, keep=0.0), ValueError, "keep is 0.0"),
    (lambda: ha.masks.top_blocks(X, X, mass=1.5), ValueError, "mass is 1.5"),
    (lambda: ha.masks.top_blocks(X[0], X, keep=0.5), ValueError, r"q has shape \(2, 200, 64\)"),
    (lambda: ha.masks.top_blocks(X, X.expand(1, 2, 200, 64)[..., :32], keep=0.5), ValueError, "k has shape"),
    (lambda: ha.masks.top_blocks(X, X[:, :1].expand(1, 3, 200, 64), keep=0.5), ValueError, "divides 2"),
    (lambda: ha.masks.top_blocks(X.int(), X, keep=0.5), TypeError, "q is a Tensor of torch.int32"),
    (lambda: ha.masks.top_blocks(X, X, keep=0.5, layout="hnd"), ValueError, "layout is 'hnd'"),  # type: ignore[arg-type]
    (lambda: ha.masks.top_blocks(X, X, keep=0.5, local_blocks=-1), ValueError, "local_blocks is -1"),
    (lambda: ha.masks.top_blocks(X, X, keep=0.5, sm_scale=-1.0), ValueError, r"sm_scale is -1.0; it must lie in 0..2"),
    (lambda: ha.masks.top_blocks(X, X, mass=0.5, sm_scale=math.nan), ValueError, "sm_scale is nan"),
    (lambda: ha.masks.top_blocks(X, X, keep=0.5, sm_scale=True), TypeError, "sm_scale is a bool; it must be a float"),
    (lambda: ha.masks.top_blocks(X, X, keep=0.5, sm_scale="x"), TypeError, "sm_scale is a str"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "error", "says"), WRONG)
def test_wrong_arguments(call: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()
