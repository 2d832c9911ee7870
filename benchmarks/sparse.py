"""Benchmarks block masks: attention that visits a share of the key blocks, and what making a mask costs.

    python benchmarks/attention.py --suite sparse

Full attention of 16k or 32k tokens x hidden 2048 with random blocks, as many in every row block or not, packed
documents, and the blocks that `top_blocks` keeps; and Sliding Tile Attention (arXiv:2502.04507) on the tokens of Wan
2.1 and HunyuanVideo at 720p. All masks of a shape, the dense kernel and dense FlashAttention-3 in bf16 run interleaved.
Then `top_blocks` with a tail and without on smooth fields, and what making masks costs.

`tflops` are those of dense attention over the time. `density` is the share of the blocks that are visited. Errors are
to fp64 with the same mask.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

import helion_attn as ha
from benchmarks.lib.checks import Check
from benchmarks.lib.harness import (
    Loaded,
    Results,
    Row,
    copier,
    gigabytes_per_second,
    nbytes,
    result_row,
    time_interleaved,
)
from benchmarks.lib.masked_peers import (
    CUDNN_SPARSE_BF16,
    CUDNN_SPARSE_FP8,
    FA3_DOCUMENTS,
    MASKED,
    MaskMod,
    cudnn_sparse,
    fa3_documents,
    flex,
    flex_mask,
    sparge,
    sta,
)
from benchmarks.lib.peers import IMPLS, available, helion_attn_e2e, helion_attn_with
from benchmarks.lib.plots import grid, legend, length, line, log_axis, powers_axis
from benchmarks.lib.problem import CHECKED_ROWS, Contender, checked, problem_of, timed, workload
from benchmarks.lib.recipes import DEFAULT, PRESETS
from benchmarks.lib.suite import Block, Options, Plot, Suite, console, progress
from benchmarks.lib.tables import LABELS, Table, error_text, number, ratio, rows_of, speed_text
from benchmarks.varlen import lognormal
from devtools.inputs import make_qkv
from devtools.workloads import BENCH_HIDDEN, BENCH_TOKENS, Workload
from helion_attn.configs import MASK_BLOCK
from helion_attn.testing import relative_error

#: Shares of the blocks, in percent, and that of the case in which row blocks have different numbers of them.
PERCENTS, QUICK_PERCENTS, PERCENT_UNEQUAL = (5, 10, 25, 50, 100), (25, 100), 25

#: What `top_blocks` keeps.
KEEP = 0.25

#: The tokens of a smooth field, Wan 2.1's at 480p, how many lie between its knots, what `top_blocks` keeps of its
#: blocks, and the standard deviations of its logits.
FIELD, DRY_FIELD, FIELD_SCALE = (21, 30, 52), (4, 8, 16), 4
TAIL_KEEPS, TAIL_SPREADS = (0.05, 0.1, 0.25, 0.5), (1.0, 2.0)

#: Bounds on a tail: error and time over those without.
TAIL_ERROR, TAIL_TIME = 0.6, 1.05

#: Documents: their median length, and the standard deviation of its logarithm.
DOCUMENT, SPREAD = 2000, 1.0

#: Lengths by head dim.
LENGTHS = {64: (16384,), 128: (8192, 32768), 256: (16384,)}

#: Of the cells that bounds on making masks and on the speed beside others' are for.
LONG = 32768

#: Presets that run.
RECIPES = ("fast", DEFAULT)

#: Bounds on the time of a visited block over the dense kernel's, from these shares of the blocks on.
PER_BLOCK = {0.25: 1.05, 0.10: 1.10}
PER_BLOCK_OF_ALL = 1.03

#: Fewest blocks of a row that these are for.
FEWEST_BLOCKS = 32

#: Bounds at a quarter of the blocks, 32k tokens and D 128: on the speed over dense FA3 bf16's and over FlexAttention's.
OVER_PEERS = {"fa3_bf16": 3.0, "flex": 2.0}

#: The same over cuDNN's block-sparse FP8, at every share of the blocks.
CUDNN_BOUND = 1.1

#: Bounds on making masks: the bandwidth of `from_dense` over a copy's, `top_blocks` over dense attention's time.
FROM_DENSE, TOP_BLOCKS = 0.60, 0.02

# --- masks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Video:
    """Tokens of a video, and what they see."""

    name: str  # of the case
    grid: tuple[int, int, int]  # frames, height and width in tokens
    tile: tuple[int, int, int]  # of them
    window: tuple[int, int, int]  # in tiles
    heads: int  # that run
    text: int = 0  # tokens behind the video's
    in_sta: bool = True  # whether FastVideo's kernel has the shape

    @property
    def tokens(self) -> int:
        """All of them."""
        return math.prod(self.grid) + self.text


#: At 720p. The first is of 81 frames as they are, in tiles of 120 tokens, so that blocks are seen in part. FastVideo
#: rounds frames and heights to tiles of 384 tokens, three whole blocks. A third of HunyuanVideo's 24 heads run.
VIDEOS = (
    Video("tiles, Wan", (21, 45, 80), (3, 5, 8), (3, 5, 5), 12, in_sta=False),
    Video("tiles, Wan, FastVideo's", (18, 48, 80), (6, 8, 8), (3, 3, 5), 12),
    Video("tiles, Hunyuan, FastVideo's", (30, 48, 80), (6, 8, 8), (3, 3, 3), 8, text=256),
)
DRY_VIDEO = Video("tiles", (4, 6, 8), (2, 3, 4), (1, 1, 1), 1, in_sta=False)


@dataclass(frozen=True)
class Case:
    """A mask, and how others are told of it."""

    name: str  # in result rows
    mask: ha.BlockMask  # as this package takes it
    rule: MaskMod | None = None  # what the blocks that are seen in part show, if there are any
    video: Video | None = None  # whose tiles it has, if it has
    lengths: list[int] | None = None  # of causal documents, if it has them


def random_blocks(H: int, S: int, counts: Tensor) -> ha.BlockMask:
    """Whole blocks, others for each head: in a row block as many as `counts` says, int64 [row blocks]."""
    n = -(-S // MASK_BLOCK)
    generator = torch.Generator(counts.device).manual_seed(0)
    # [1, H, row blocks, key blocks]: in each row a permutation.
    order = torch.rand((1, H, n, n), generator=generator, device=counts.device).argsort(dim=3)
    return ha.BlockMask(order < counts[:, None], S, S)


def equal_counts(S: int, percent: int, device: torch.device) -> Tensor:
    """As many blocks in every row block."""
    n = -(-S // MASK_BLOCK)
    return torch.full((n,), math.ceil(n * percent / 100), device=device)


def unequal_counts(S: int, percent: int, device: torch.device) -> Tensor:
    """From one block to twice the share, in no order."""
    n = -(-S // MASK_BLOCK)
    counts = torch.linspace(1, 2 * n * percent / 100 - 1, n).round().long().clamp_min(1)
    return counts[torch.randperm(n, generator=torch.Generator().manual_seed(0))].to(device)


def documents(S: int, device: torch.device) -> tuple[Tensor, MaskMod]:
    """The document of each token, int64 [S], and causal attention within documents as FlexAttention's rule."""
    lengths = torch.tensor(lognormal(max(1, 4 * S // DOCUMENT), DOCUMENT, SPREAD))
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)[:S].to(device)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[q] == ids[k]) & (k <= q)

    return ids, rule


def tiles(video: Video, device: torch.device) -> Case:
    """What a video's tokens see, in their new order."""
    made = ha.masks.sliding_tile(video.grid, video.tile, video.window, text=video.text, device=device)
    whole_blocks = math.prod(video.tile) % MASK_BLOCK == 0 and video.text % MASK_BLOCK == 0
    return Case(video.name, made.mask, None if whole_blocks else tile_rule(video, made.order), video)


def tile_rule(video: Video, order: Tensor) -> MaskMod:
    """The tiles that a token sees as FlexAttention's rule. It is for videos without text."""
    (_, height, width), at = video.grid, []
    for of_dim, size, tile, window in zip(
        (order // (height * width), order // width % height, order % width),
        video.grid,
        video.tile,
        video.window,
        strict=True,
    ):
        own = of_dim // tile
        at.append((own, (own - window // 2).clamp(0, -(-size // tile) - window), window))

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = q >= 0
        for own, first, window in at:
            seen = seen & (own[k] >= first[q]) & (own[k] < first[q] + window)
        return seen

    return rule


def token_cases(q: Tensor, k: Tensor, quick: bool) -> list[Case]:
    """The masks of a sequence of tokens; those of documents and of `top_blocks` where there are 32k."""
    (_, H, S, _), device = q.shape, q.device
    percents = [percent for percent in PERCENTS if not quick or percent in QUICK_PERCENTS]
    cases = [Case("random", random_blocks(H, S, equal_counts(S, percent, device))) for percent in percents]
    cases.append(Case("unequal", random_blocks(H, S, unequal_counts(S, PERCENT_UNEQUAL, device))))
    if S == LONG or device.type == "cpu":
        ids, rule = documents(S, device)
        lengths = ids.unique_consecutive(return_counts=True)[1].tolist()
        cases.append(Case("documents", ha.masks.documents(ids, causal=True), rule, lengths=lengths))
        cases.append(Case("top_blocks", ha.masks.top_blocks(q, k, keep=KEEP)))
    return cases


# --- measurement ----------------------------------------------------------------------------------


def shapes(options: Options) -> list[tuple[Workload, Video | None]]:
    """What is measured: tokens, then videos."""
    if options.device.type == "cpu":
        return [
            (workload(1, 1, 256, 256, 64), None),
            (workload(1, DRY_VIDEO.heads, DRY_VIDEO.tokens, DRY_VIDEO.tokens, 64), DRY_VIDEO),
        ]
    found: list[tuple[Workload, Video | None]] = [
        (workload(max(1, BENCH_TOKENS // S), BENCH_HIDDEN // D, S, S, D), None)
        for D in options.dims
        for S in LENGTHS.get(D, ())
        if not options.quick or S == LONG
    ]
    if 128 in options.dims and not options.quick:
        found += [(workload(1, video.heads, video.tokens, video.tokens, 128), video) for video in VIDEOS]
    return found


def contenders_of(case: Case, D: int, names: list[str]) -> list[Contender]:
    """The kernel alone, and whatever runs from bf16 to bf16, with a mask."""
    found = [Contender("helion_attn", helion_attn_with(PRESETS[name], case.mask), name) for name in RECIPES]
    found += [Contender("helion_attn", helion_attn_e2e(PRESETS[name], case.mask), name, "e2e") for name in RECIPES]
    if FA3_DOCUMENTS in names and case.lengths is not None:
        found.append(Contender(FA3_DOCUMENTS, fa3_documents(case.lengths), stage="e2e"))
    if "flex" in names:
        found.append(Contender("flex", flex(case.mask, case.rule), stage="e2e"))
    if "sparge" in names and case.rule is None:
        found.append(Contender("sparge", sparge(case.mask), stage="e2e"))
    if case.name == "random" and D == 128 and not case.mask.N % MASK_BLOCK:
        found += [
            Contender(name, cudnn_sparse(case.mask, fp8=name == CUDNN_SPARSE_FP8), stage="e2e")
            for name in (CUDNN_SPARSE_FP8, CUDNN_SPARSE_BF16)
            if name in names
        ]
    if "sta" in names and case.video is not None and case.video.in_sta:
        video = case.video
        found.append(Contender("sta", sta(video.grid, video.window, video.text), stage="e2e"))
    return found


def measure(w: Workload, video: Video | None, names: list[str], options: Options) -> list[Row]:
    """All masks of one shape, and dense attention."""
    q, k, v = make_qkv("randn", w.B, w.H, w.H_kv, w.M, w.N, w.D, torch.bfloat16, options.device, seed=0)
    dense = [Contender("helion_attn", helion_attn_with(PRESETS[name]), name) for name in RECIPES]
    if "fa3_bf16" in options.impls:
        dense.append(Contender("fa3_bf16", IMPLS["fa3_bf16"], stage="e2e"))
    found = [
        (row | {"mask": "none", "density": 1.0}, run)
        for row, run in checked(problem_of(w, "randn", q, k, v, CHECKED_ROWS), dense)
    ]
    for case in [tiles(video, q.device)] if video is not None else token_cases(q, k, options.quick):
        problem = problem_of(w, "randn", q, k, v, CHECKED_ROWS, case.mask)
        described = {"mask": case.name, "density": case.mask.blocks.double().mean().item()}
        found += [(row | described, run) for row, run in checked(problem, contenders_of(case, w.D, names))]
    return timed(w, found, options)


def making(options: Options) -> list[Row]:
    """What making masks of 32k tokens costs, next to a copy of a mask by scores and to dense attention."""
    S, H = (256, 2) if options.device.type == "cpu" else (LONG, BENCH_HIDDEN // 128)
    w, device = workload(1, H, S, S, 128), options.device
    q, k, v = make_qkv("randn", 1, H, H, S, S, 128, torch.bfloat16, device, seed=0)
    ids, rule = documents(S, device)
    of_documents, of_blocks = ha.masks.documents(ids, causal=True), random_blocks(1, S, equal_counts(S, 25, device))
    scores = {
        "documents": of_documents.to_dense(),
        "random blocks": of_blocks.to_dense(),
        "random bits": torch.rand((S, S), generator=torch.Generator(device).manual_seed(0), device=device) < 0.25,
    }
    capacity = of_documents.tiles.size(0)
    flex_given, video = flex_mask(of_documents, rule), DRY_VIDEO if device.type == "cpu" else VIDEOS[0]
    runs: dict[tuple[str, str], Callable[[], object]] = {
        **{("from_dense", name): functools.partial(ha.BlockMask.from_dense, x) for name, x in scores.items()},
        ("from_dense, capacity given", "documents"): functools.partial(
            ha.BlockMask.from_dense, scores["documents"], capacity
        ),
        ("from_flex", "documents"): functools.partial(ha.BlockMask.from_flex, flex_given),
        ("BlockMask(blocks)", "random blocks"): functools.partial(ha.BlockMask, of_blocks.blocks, S, S),
        ("masks.documents", "documents"): functools.partial(ha.masks.documents, ids, causal=True),
        ("masks.sliding_tile", video.name): functools.partial(
            ha.masks.sliding_tile, video.grid, video.tile, video.window, device=device
        ),
        ("masks.top_blocks", f"keep={KEEP}"): functools.partial(ha.masks.top_blocks, q, k, keep=KEEP),
    }
    beside: dict[tuple[str, str], Callable[[], object]] = {
        ("copy", ""): copier(scores["random bits"]),
        ("attention", ""): functools.partial(ha.attention, q, k, v),
    }
    ms = time_interleaved({**runs, **beside}, device, options.repeats)
    copy_gbs = gigabytes_per_second(2 * nbytes(scores["random bits"]), ms["copy", ""])
    rows = []
    for made, of in runs:
        row = result_row("helion_attn", w, "preprocess", "randn", ms=ms[made, of]) | {"made": made, "mask": of}
        if made.startswith("from_dense"):
            gbs = gigabytes_per_second(nbytes(scores[of]), ms[made, of])
            row |= {"gbs": gbs, "copy_fraction": gbs / copy_gbs}
        rows.append(row | {"of_attention": ms[made, of] / ms["attention", ""]})
    return rows


def field(grid: tuple[int, int, int], channels: int, scale: int, seed: int, device: torch.device) -> Tensor:
    """Numbers of unit variance that vary slowly over a video's tokens, [channels, tokens]; `scale`: tokens apart."""
    generator = torch.Generator(device).manual_seed(seed)
    coarse = [-(-size // scale) + 1 for size in grid]
    noise = torch.randn((1, channels, *coarse), generator=generator, device=device)
    smooth = torch.nn.functional.interpolate(noise, grid, mode="trilinear", align_corners=True)[0].flatten(1)
    return smooth / smooth.std()


def smooth_qkv(spread: float, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V of one video, bf16 [1, H, tokens, D], whose logits have a standard deviation of some `spread`."""
    dry = options.device.type == "cpu"
    grid, H, D = (DRY_FIELD, 1, 64) if dry else (FIELD, BENCH_HIDDEN // 128, 128)
    q, k, v = (field(grid, H * D, FIELD_SCALE, seed, options.device).unflatten(0, (H, D)).mT for seed in range(3))
    q, k, v = (x.bfloat16().contiguous().unsqueeze(0) for x in (q * spread, k, v))
    return q, k, v


def tails(options: Options) -> list[Row]:
    """What a tail takes from the error of a mask, to dense attention in fp32, and adds to its time."""
    rows = []
    for spread in TAIL_SPREADS:
        q, k, v = smooth_qkv(spread, options)
        attend = torch.nn.functional.scaled_dot_product_attention
        dense = torch.stack([attend(q[:, h].float(), k[:, h].float(), v[:, h].float()) for h in range(q.size(1))], 1)
        for keep in TAIL_KEEPS:
            masks = {tail: ha.masks.top_blocks(q, k, keep=keep, tail=tail) for tail in (False, True)}
            calls = {tail: functools.partial(ha.attention, q, k, v, block_mask=mask) for tail, mask in masks.items()}
            ms = time_interleaved(calls, options.device, options.repeats)
            error = {tail: relative_error(call(), dense) for tail, call in calls.items()}
            w = workload(1, q.size(1), q.size(2), q.size(2), q.size(3))
            for tail, mask in masks.items():
                row = result_row("helion_attn", w, "e2e", "field", recipe=DEFAULT, ms=ms[tail])
                density = mask.blocks.double().mean().item()
                rows.append(row | {"spread": spread, "density": density, "tail": tail, "error_of_mask": error[tail]})
    return rows


def run(options: Options, results: Results) -> None:
    """Every mask of every shape; then tails, and making masks."""
    names, skipped = available(options.device, MASKED)
    for name in skipped:
        console.print(f"[yellow]skipped {name}: {skipped[name]}")
    for w, video in progress(shapes(options), "sparse"):
        results.add(*measure(w, video, names, options))
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
    results.add(*tails(options))
    results.add(*making(options))


# --- tables ---------------------------------------------------------------------------------------

#: (impl, recipe, stage) of a figure.
Series = tuple[str, str | None, str]

#: What is shown from bf16 to bf16.
WHOLE: tuple[Series, ...] = (
    ("helion_attn", DEFAULT, "e2e"),
    ("helion_attn", "fast", "e2e"),
    ("flex", None, "e2e"),
    ("sparge", None, "e2e"),
    ("sta", None, "e2e"),
    (CUDNN_SPARSE_FP8, None, "e2e"),
    (CUDNN_SPARSE_BF16, None, "e2e"),
    (FA3_DOCUMENTS, None, "e2e"),
)


@dataclass(frozen=True)
class Cell:
    """One mask of one shape, in the results."""

    D: int  # D, N: the shape
    N: int
    mask: str  # the name of the case
    density: float  # the share of the blocks that is visited
    rows: dict[Series, Row]  # by series
    dense: dict[Series, Row]  # the rows of dense attention by series

    @property
    def where(self) -> str:
        """The cell in words."""
        return f"{self.mask}, {self.density:.1%}, D {self.D}, {self.N} tokens"

    @property
    def fa3_ms(self) -> float | None:
        """Dense FlashAttention-3's time in bf16."""
        return self.dense.get(("fa3_bf16", None, "e2e"), {}).get("ms")

    def per_block(self, recipe: str) -> float | None:
        """The kernel's time for a visited block over the dense kernel's."""
        key = ("helion_attn", recipe, "kernel")
        share = ratio(figure(self.rows, key, "ms"), self.dense.get(key, {}).get("ms"))
        return ratio(share, self.density)

    def times_faster(self, impl: str) -> float | None:
        """The default's speed from bf16 to bf16 over another's, which is dense if it takes no mask."""
        rows = self.rows if impl in MASKED else self.dense
        return ratio(rows.get((impl, None, "e2e"), {}).get("ms"), figure(self.rows, WHOLE[0], "ms"))


def by_key(rows: list[Row]) -> dict[Series, Row]:
    """Rows of one mask by series."""
    return {(row["impl"], row["recipe"], row["stage"]): row for row in rows}


def figure(rows: dict[Series, Row], key: Series, name: str) -> float | None:
    """One figure: NaN, which fails, where it ran and raised or was wrong."""
    if key not in rows:
        return None
    measured: float | None = rows[key].get(name)
    return math.nan if measured is None else measured


def cells_of(loaded: Loaded) -> list[Cell]:
    """The cells that have a mask."""
    rows = [row for row in rows_of(loaded, "sparse") if "made" not in row and "tail" not in row]
    found: dict[tuple[int, int, str, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row["D"], row["N"], row["mask"], row["density"]), []).append(row)
    return [
        Cell(*key, by_key(of), by_key(found.get((*key[:2], "none", 1.0), [])))
        for key, of in found.items()
        if key[2] != "none"
    ]


def tables(loaded: Loaded) -> list[Table]:
    """Times from bf16 to bf16, the kernel alone, and making masks."""
    cells = cells_of(loaded)
    shown = [key for key in WHOLE if any(cell.rows.get(key, {}).get("ms") for cell in cells)]
    whole, kernel = [], []
    for cell in cells:
        name = [str(cell.D), str(cell.N), cell.mask, f"{cell.density:.1%}"]
        ms = (number(cell.rows.get(key, {}).get("ms"), ".3f") for key in shown)
        faster = (speed_text(cell.times_faster(impl)) for impl in OVER_PEERS)
        error = error_text(cell.rows.get(WHOLE[0], {}).get("error_total"))
        whole.append([*name, *ms, number(cell.fa3_ms, ".3f"), *faster, error])
        figures = []
        for recipe in (DEFAULT, "fast"):
            row = cell.rows.get(("helion_attn", recipe, "kernel"), {})
            tflops = row.get("tflops")
            figures.append(number(row.get("ms"), ".3f"))
            figures.append(number(tflops, ".0f"))
            figures.append(number(None if tflops is None else tflops * cell.density, ".0f"))
            figures.append(number(cell.per_block(recipe), ".3f"))
        error = error_text(cell.rows.get(("helion_attn", DEFAULT, "kernel"), {}).get("error_kernel"))
        kernel.append([*name, *figures, error])
    if not cells:
        return []
    headers = ["D", "tokens", "mask", "blocks"]
    labels = [LABELS[recipe or impl] for impl, recipe, _ in shown]
    ours = [
        f"{LABELS[recipe]}{of}"
        for recipe in (DEFAULT, "fast")
        for of in (", ms", ", TFLOP/s", ", of visited", ", a block / dense")
    ]
    found = [
        Table(
            "From bf16 to bf16 with a block mask, ms",
            [*headers, *labels, "dense FA3 bf16", "dense FA3 / BALANCED", "FlexAttention / BALANCED", "total error"],
            whole,
            keys=4,
        ),
        Table("The kernel with a block mask", [*headers, *ours, "kernel error"], kernel, keys=4),
    ]
    return [*found, *tail_tables(loaded), *making_tables(loaded)]


def tail_pairs(loaded: Loaded) -> list[tuple[Row, Row]]:
    """Rows of the same mask without a tail and with one."""
    rows = [row for row in rows_of(loaded, "sparse") if "tail" in row]
    return list(zip(rows[::2], rows[1::2], strict=True))


def tail_tables(loaded: Loaded) -> list[Table]:
    """Errors and times without a tail and with one."""
    body = [
        [
            number(bare["spread"], ".0f"),
            f"{bare['density']:.1%}",
            *(error_text(row["error_of_mask"]) for row in (bare, tailed)),
            number(ratio(tailed["error_of_mask"], bare["error_of_mask"]), ".2f"),
            *(number(row["ms"], ".3f") for row in (bare, tailed)),
            number(ratio(tailed["ms"], bare["ms"]), ".3f"),
        ]
        for bare, tailed in tail_pairs(loaded)
    ]
    headers = ["logits' deviation", "blocks", "error", "with a tail", "ratio", "ms", "with a tail", "ratio"]
    title = "top_blocks on a smooth field of 32,760 tokens, to dense attention in fp32"
    return [Table(title, headers, body, keys=2)] if body else []


def making_tables(loaded: Loaded) -> list[Table]:
    """What making masks costs."""
    body = [
        [
            f"`{row['made']}`",
            row["mask"],
            number(row["ms"], ".3f"),
            number(row.get("gbs"), ".0f"),
            number(row.get("copy_fraction"), ".2f"),
            number(row["of_attention"], ".3f"),
        ]
        for row in rows_of(loaded, "sparse")
        if "made" in row
    ]
    headers = ["made by", "mask", "ms", "GB/s of scores", "GB/s / a copy's", "ms / dense attention's"]
    return [Table("Making a mask of 32k tokens", headers, body)] if body else []


# --- plot -----------------------------------------------------------------------------------------


def plot(loaded: Loaded) -> Figure | None:
    """Time over dense FA3 bf16's by density, of random blocks."""
    cells = [cell for cell in cells_of(loaded) if cell.mask == "random" and cell.fa3_ms is not None]
    if not cells:
        return None
    panels = sorted({(cell.D, cell.N) for cell in cells})
    figure, (axes,) = grid(1, len(panels))
    for (D, N), ax in zip(panels, axes, strict=True):
        of_panel = [cell for cell in cells if (cell.D, cell.N) == (D, N)]
        for impl, recipe, stage in WHOLE:
            points = {}
            for cell in of_panel:
                ms = cell.rows.get((impl, recipe, stage), {}).get("ms")
                if (share := ratio(ms, cell.fa3_ms)) is not None:
                    points[100 * cell.density] = share
            if points:
                line(ax, recipe or impl, points, float)
        ax.axhline(1.0, color="#666666", linestyle="--", linewidth=1.2)
        ax.set_title(f"D = {D}, {length(N)} tokens")
        powers_axis(ax, list(PERCENTS), str)
        log_axis(ax, (1.0, 2.0, 5.0))
        ax.set_xlabel("blocks, %")
    axes[0].set_ylabel("time / dense FA3 bf16's")
    legend(figure, axes)
    return figure


# --- bounds ---------------------------------------------------------------------------------------


def checks(loaded: Loaded) -> list[Check]:
    """A visited block beside the dense kernel's, speed beside others', and the time of making masks."""
    every, of_all, faster, made = [], [], [], []
    for cell in cells_of(loaded):
        if -(-cell.N // MASK_BLOCK) < FEWEST_BLOCKS:
            continue
        for recipe in RECIPES:
            where, over = f"{cell.where}, {LABELS[recipe]}", cell.per_block(recipe)
            if cell.mask == "random" and cell.density == 1:
                of_all.append(Check("all blocks listed, time / the dense kernel's", where, over, PER_BLOCK_OF_ALL))
                continue
            for least, bound in PER_BLOCK.items():
                if cell.density >= least:
                    name = f"a visited block's time / the dense kernel's, from {least:.0%} of the blocks on"
                    every.append(Check(name, where, over, bound))
                    break
        if (cell.D, cell.N, cell.mask, cell.density) == (128, LONG, "random", 0.25):
            for impl, bound in OVER_PEERS.items():
                other = LABELS[impl] if impl in MASKED else f"dense {LABELS[impl]}"
                name = f"a quarter of the blocks, speed from bf16 / {other}'s"
                faster.append(Check(name, cell.where, cell.times_faster(impl), bound, at_least=True))
        if cell.D == 128 and cell.mask == "random" and (CUDNN_SPARSE_FP8, None, "e2e") in cell.rows:
            name = f"random blocks, speed from bf16 / {LABELS[CUDNN_SPARSE_FP8]}'s"
            faster.append(Check(name, cell.where, cell.times_faster(CUDNN_SPARSE_FP8), CUDNN_BOUND, at_least=True))
    for row in rows_of(loaded, "sparse"):
        if row.get("made") == "from_dense":
            name = "from_dense, bandwidth over the scores / a copy's"
            made.append(Check(name, row["mask"], row["copy_fraction"], FROM_DENSE, at_least=True))
        if row.get("made") == "masks.top_blocks":
            made.append(
                Check("top_blocks, time / dense attention's", f"{LONG} tokens", row["of_attention"], TOP_BLOCKS)
            )
    for bare, tailed in tail_pairs(loaded):
        where = f"smooth field, logits of deviation {bare['spread']:.0f}, {bare['density']:.1%}"
        error = ratio(tailed["error_of_mask"], bare["error_of_mask"])
        made.append(Check("a tail, error / that without", where, error, TAIL_ERROR))
        made.append(Check("a tail, time / that without", where, ratio(tailed["ms"], bare["ms"]), TAIL_TIME))
    return [*every, *of_all, *faster, *made]


SUITE = Suite(
    "sparse",
    run,
    {"sparse": Block("sparse", tables, (Plot("sparse", "Time over dense bf16's, by share of blocks", plot),), shown=1)},
)
