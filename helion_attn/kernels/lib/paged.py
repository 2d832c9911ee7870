"""Parts that both kernels of a paged cache have: open and closed pages, splits, sums, and the launch.

A query has the same bits from both, and whatever shares its tile: its splits are of the pages that it sees itself, a
page of which it sees nothing leaves its sums as they are, and numbers are added in an order that no layout decides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.compiler.runners import Runner
from helion_attn.configs import MAX_PIECE
from helion_attn.kernels.lib.block_max import update_block_max
from helion_attn.kernels.lib.inline_asm import fma, fma_up, maximum, tanh
from helion_attn.kernels.lib.keys import SplitLists, split_kv_range
from helion_attn.kernels.lib.scalars import Int, int32
from helion_attn.kernels.lib.specs import PagedSpec
from helion_attn.kernels.lib.steps import scores, scores_of_pieces
from helion_attn.kernels.lib.strided import common_unit, flat_memory, strided_rows
from helion_attn.kernels.merge_splits import merge_splits
from helion_attn.numerics import (
    E4M3_BITS_OF_ONE,
    E4M3_STEPS,
    FORMAT_MAX,
    FP32_TINY,
    INT8_SCORE_BIAS,
    MAX_FUSED_SCALE_LOG2,
    MAX_P_OFFSET_LOG2,
    MAX_PAGE_SCORE,
    MAX_PAGE_SCORE_LOG2,
    PAGE_REFERENCE_REACH_LOG2,
    takes_bits,
)
from helion_attn.options import ScoreScales
from helion_attn.problem import DecodeArgs, PackedBatch, pages_apart

#: Bytes of a descale.
FP32_BYTES = 4


def log2_of_power(x: torch.Tensor) -> torch.Tensor:
    """log2 of fp32 powers of two, exactly."""
    return ((x.view(torch.int32) >> 23) - 127).to(torch.float32)


def descales_of_page(
    k_descale: torch.Tensor,  # flat
    v_descale: torch.Tensor,  # flat
    page: torch.Tensor,  # [], int32
    page_step: int,  # bytes
    h: int,
    head_step: int,
    is_cuda: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A closed page's descales of K and V, []."""
    if is_cuda:
        like = hl.full([], 1.0, dtype=torch.float32), hl.full([], 1.0, dtype=torch.float32)
        return hl.inline_triton(
            DESCALES_OF_PAGE, args=(k_descale, v_descale, page, page_step, h, head_step), output_like=like
        )
    at = (page * page_step + h * head_step) // FP32_BYTES
    return hl.load(k_descale, [at]), hl.load(v_descale, [at])


#: `descales_of_page` on the GPU. Triton's own loads would pass through shared memory, and wait at a barrier. An address
#: is one instruction, also of a pool of more than 2**31 elements.
DESCALES_OF_PAGE = """tl.inline_asm_elementwise(
    asm='''
    {{
    .reg .b64 at, k_at, v_at;
    mul.wide.s32 at, $4, $5;
    mad.wide.s32 at, $6, $7, at;
    add.s64 k_at, at, $2;
    add.s64 v_at, at, $3;
    ld.global.nc.f32 $0, [k_at];
    ld.global.nc.f32 $1, [v_at];
    }}
    ''',
    constraints="=&f,=&f,l,l,r,r,r,r",
    args=[{0}, {1}, {2}, {3}, tl.cast({4}, tl.int32), {5}],
    dtype=(tl.float32, tl.float32),
    is_pure=False,
    pack=1,
)"""


def k_of_page(k8: torch.Tensor, page: Int, h: Int, spec: PagedSpec) -> list[torch.Tensor]:
    """A page of K: [bn, D_pad], or its halves."""
    whole = slice(None)
    if spec.d_in_halves:
        return [hl.load(k8, [page, h, 0, whole, whole]), hl.load(k8, [page, h, 1, whole, whole])]
    return [hl.load(k8, [page, h, whole, whole])]


def transposed(pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each piece with its axes swapped."""
    return [x.transpose(0, 1) for x in pieces]


def products(
    a_pieces: list[torch.Tensor],  # [m, D_pad], or its halves
    b_pieces: list[torch.Tensor],  # [D_pad, n]
    m: int,
    n: int,
    spec: PagedSpec,
) -> torch.Tensor:
    """Products of queries and keys, fp32 [m, n]; of int8 `spec.s_bias` too large."""
    if spec.d_in_halves:
        return scores_of_pieces(a_pieces, b_pieces, spec.is_cuda)
    return scores(a_pieces[0], b_pieces[0], m, n, False, spec.is_cuda)


def v_of_page(v8: torch.Tensor, page: Int, h: Int, v_part: Int, half: hl.constexpr, spec: PagedSpec) -> torch.Tensor:
    """A program's channels of a page of V, or half of them: [d_v_tile, bn]."""
    whole = slice(None)
    if spec.split_v:
        return hl.load(v8, [page, h, v_part * 2 + half, whole, whole])
    if spec.v_parts > 1:
        return hl.load(v8, [page, h, v_part, whole, whole])
    return hl.load(v8, [page, h, whole, whole])


def descales_by_form(
    k_descale: torch.Tensor,  # flat
    v_descale: torch.Tensor,  # flat
    first: Int,
    bn: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Descales of a page that may be open: of its keys' K and V, [bn], and of all of it, []; and 1 if it is open."""
    slots = first + hl.arange(bn)
    # Not "open", since a NaN is no mark.
    closed = (hl.load(k_descale, [first + 1]) < 0.0).to(torch.int32)
    of_page = hl.load(k_descale, [first]), hl.load(v_descale, [first])
    return hl.load(k_descale, [slots]), hl.load(v_descale, [slots]), *of_page, 1 - closed


def page_scores(
    s: torch.Tensor,  # [bn, rows] or [rows, bn]
    scale_log2: torch.Tensor,  # [rows]: K's descale and all else
    shift: torch.Tensor,  # [rows]
    scales: ScoreScales,
    keys_axis: hl.constexpr,
    spec: PagedSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of a closed page, `spec.line_bias` too large, and their factors, [rows], which are never 0."""
    scale_log2 = maximum(scale_log2, hl.full([], FP32_TINY, dtype=torch.float32), spec.is_cuda)
    if spec.scores.has_softcap:
        s = s - spec.s_bias
        if spec.scores.lse_shift_in_scores:
            s = fma(s, scale_log2.unsqueeze(keys_axis), shift.unsqueeze(keys_axis), spec.is_cuda)
        else:
            s = s * scale_log2.unsqueeze(keys_axis)
        s = tanh(s, spec.is_cuda)
        # [rows], also of NaN: tanh would have it
        scale_log2 = scale_log2 * 0.0 + scales.tanh_scale
    return s, scale_log2


def may_be_wide(
    largest_q_scale_log2: torch.Tensor,  # []
    k_descale: torch.Tensor,  # []
    scales: ScoreScales,
    spec: PagedSpec,
) -> torch.Tensor:
    """1 if some row's scale of a closed page may pass `spec.max_fused_scale`, or 0 if none does."""
    scale_log2 = largest_q_scale_log2 * k_descale
    if spec.scores.has_softcap:
        scale_log2 = hl.full([], scales.tanh_scale, dtype=torch.float32)
    # Not "large", since a NaN is not within.
    return 1 - (scale_log2 <= spec.max_fused_scale).to(torch.int32)


def largest_of(s: torch.Tensor, keys_axis: hl.constexpr, bias: hl.constexpr) -> torch.Tensor:
    """The largest score of each row, [rows], `bias` too large as they are."""
    if bias:
        # Positive, and so in the order of their bits: of integers, an instruction compares three.
        return torch.amax(s.view(torch.int32), keys_axis).view(torch.float32)
    return torch.amax(s, keys_axis)


def line_of_page(
    largest: torch.Tensor,  # [rows]
    bias: torch.Tensor,  # []
    scale_log2: torch.Tensor,  # [rows]
    v_log2: torch.Tensor,  # []
    m_run: torch.Tensor,  # [rows]
    m_i: torch.Tensor,  # [rows]
    spec: PagedSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(m_run, m_i, scale, offset, top)`, [rows]: references, and the line from a score to log2 of its P.

    Scores, and the largest of each row, are `bias` too large. In steps of e4m3 if P's bits are to come from it.
    """
    offset = hl.full([], -spec.p_offset_log2, dtype=torch.float32)
    top = fma_up(largest - bias, scale_log2, offset, spec.is_cuda) + v_log2
    m_run, m_i = page_references(top, m_run, m_i, spec)
    scale = scale_log2 * spec.p_steps
    offset = spec.p_one - (m_i - v_log2) * spec.p_steps
    if spec.line_bias:
        # One instruction in both kernels, or compilers may round it once or twice.
        offset = fma(scale, -bias, offset, spec.is_cuda)
    return m_run, m_i, scale, offset, top


def open_sums(
    line: torch.Tensor,  # [bn, rows], of weights
    v_descale: torch.Tensor,  # [bn]
    bn: int,
    rows: int,
) -> torch.Tensor:
    """The sums of an open page's probabilities, [4, 4, rows] of lanes: P over V's descales, with no least number.

    Of P's bits, rounded: e4m3's steps are those of the fourth bit of fp32.
    """
    # Rounded as `e4m3_of_bits` does, of 1.5 * 2**23 to the integer in the low bits.
    steps = torch.clamp_min(line, -4096.0).to(torch.float16).to(torch.float32) + 12582912.0
    of_v = ((v_descale.view(torch.int32) >> 23) - 127) * 8
    steps = steps.view(torch.int32) - 0x4B400000 - of_v.unsqueeze(1)
    p = (torch.clamp_min(steps + (127 - 7) * 8, 0) << 20).view(torch.float32)
    return sums_of_page(torch.where(line == line, p, float("nan")), bn, rows)


def wide_line(
    s: torch.Tensor,  # [bn, rows] or [rows, bn]
    scale_log2: torch.Tensor,  # [rows]
    v_log2: torch.Tensor,  # []
    m_i: torch.Tensor,  # [rows]
    scale: torch.Tensor,  # [rows]
    offset: torch.Tensor,  # [rows]
    largest: torch.Tensor,  # [rows]
    bias: torch.Tensor,  # []
    top: torch.Tensor,  # [rows]
    keys_axis: hl.constexpr,
    spec: PagedSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(s, scale, offset)`, other ones of rows whose scale passes `spec.max_fused_scale`.

    One FMA would lose P there: scores are taken from what they are below their row's largest, as in `wide_scores`. Only
    the row itself says so, whatever shares its tile.
    """
    # [rows]
    wide = scale_log2 > spec.max_fused_scale
    known = torch.where(largest == float("-inf"), 0.0, largest)
    above = fma(known - bias, scale_log2, v_log2 - top, spec.is_cuda)
    above = torch.clamp_max(torch.clamp_min(above, 0.0), spec.p_offset_log2) + (top - m_i)
    below = fma(
        s - known.unsqueeze(keys_axis), scale_log2.unsqueeze(keys_axis), above.unsqueeze(keys_axis), spec.is_cuda
    )
    s = torch.where(wide.unsqueeze(keys_axis), below, s)
    return s, torch.where(wide, spec.p_steps, scale), torch.where(wide, spec.p_one, offset)


def split_of_query(
    on_diagonal: torch.Tensor,  # [] or [n]: the key that a query has on its diagonal
    n_len: torch.Tensor,  # []
    left: int,
    right: int,
    split: Int,
    splits: Int,
    spec: PagedSpec,
) -> tuple[Any, Any]:
    """The pages of a query's split, from one up to another. Both grow with the query."""
    first, keys = int32(0), n_len
    if spec.scores.has_left:
        first = torch.clamp_min(on_diagonal - int32(left), 0) >> spec.bn_log2
    if spec.scores.has_right:
        keys = torch.clamp_min(torch.minimum(n_len, on_diagonal + int32(right) + 1), 0)
    stop = (keys + (1 << spec.bn_log2) - 1) >> spec.bn_log2
    if spec.is_split_kv:
        return split_kv_range(first, stop, split, splits)
    return first, stop


def in_split_of_query(
    visible: torch.Tensor,  # [rows, bn] or [1, bn]
    j: Int,
    on_diagonal: torch.Tensor,  # [rows]
    n_len: torch.Tensor,  # []
    left: int,
    right: int,
    split: Int,
    splits: Int,
    spec: PagedSpec,
) -> torch.Tensor:
    """`visible` of page j, or nothing where it lies in another of the query's splits."""
    if spec.is_split_kv and (spec.scores.has_left or spec.scores.has_right):
        begin, stop = split_of_query(on_diagonal, n_len, left, right, split, splits, spec)
        return visible & ((begin <= int32(j)) & (int32(j) < stop)).unsqueeze(1)
    return visible


def closed_pages(n_len: torch.Tensor, drafts: int, spec: PagedSpec) -> torch.Tensor:
    """How many first pages of a sequence are closed for certain: without an append at hand, drafts may be any."""
    may_go = drafts if spec.has_open_pages else 1 << (spec.bn_log2 - 1)
    return torch.clamp_min(n_len - int32(may_go), 0) >> spec.bn_log2


def own_page_of(
    on_diagonal: torch.Tensor,  # [] or [n]: the key that a query has on its diagonal
    n_len: torch.Tensor,  # []
    right: int,
    spec: PagedSpec,
) -> torch.Tensor:
    """The page that a query sees open: that of its own key; with a right edge beyond that, the one that is not full."""
    last = (n_len >> spec.bn_log2) + 0 * on_diagonal
    if spec.scores.has_right:
        return torch.where(int32(right) > 0, last, on_diagonal >> spec.bn_log2)
    return last


def in_open_pages(
    j: Int,
    own_page: torch.Tensor,  # [rows]
    n_len: torch.Tensor,  # []
    new_keys: Int,
    drafts: int,
    spec: PagedSpec,
) -> torch.Tensor:
    """Whether queries see page j as `OpenPages` has it, [rows], and not as the cache does.

    A page that is closed in the cache is there open, for its own queries. One that drafts keep open is there closed,
    for queries of the next page; these see that next page there as well, which comes behind it.
    """
    begin, end = int32(j) << spec.bn_log2, int32(j + 1) << spec.bn_log2
    first = n_len - int32(new_keys)
    kept = torch.maximum(n_len - int32(drafts), first)
    own_there = (end <= kept) | ((end > n_len) & (begin > kept) & (begin > first))
    earlier_there = (end <= n_len) & (end > kept)
    return (end > first) & (((own_page == int32(j)) & own_there) | ((own_page > int32(j)) & earlier_there))


def range_of_open_pages(
    first_own_page: torch.Tensor,  # [], of the first query
    n_begin: Int,
    n_end: Int,
    n_len: torch.Tensor,  # []
    new_keys: Int,
    drafts: int,
    spec: PagedSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first page of `OpenPages`, and from where up to where some query of a tile may read one there."""
    first = torch.clamp_min(n_len - int32(new_keys), 0)
    kept = torch.maximum(n_len - int32(drafts), first)
    full_end = (n_len >> spec.bn_log2) << spec.bn_log2
    follows = ((full_end < n_len) & (full_end > kept) & (full_end > first)).to(torch.int32)
    first_page = first >> spec.bn_log2
    begin = torch.maximum(torch.minimum(first_own_page, kept >> spec.bn_log2), first_page)
    return (
        first_page,
        torch.maximum(begin, int32(n_begin)),
        torch.minimum((n_len >> spec.bn_log2) + follows, int32(n_end)),
    )


def scores_by_form(
    s: torch.Tensor,  # [bn, rows] or [rows, bn]
    q_scale_log2: torch.Tensor,  # [rows]
    k_descale: torch.Tensor,  # [bn]
    v_descale: torch.Tensor,  # [bn]
    page_k: torch.Tensor,  # []
    page_v: torch.Tensor,  # []
    is_open: torch.Tensor,  # []
    shift: torch.Tensor,  # [rows]
    scales: ScoreScales,
    keys_axis: hl.constexpr,
    spec: PagedSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(s, scale_log2, v_log2, bias)`: `page_scores`, with log2 of V's descale, and how much too large scores are.

    Of an open page s is log2 of the weights of its keys, and the rest is 1, 0 and 0. Both take the same operations,
    whose factors are 1 and terms 0 where a form has none: one tile of scores, and no bit of a closed page's changes.
    """
    opened = is_open > 0
    bias = torch.where(opened, 0.0, spec.line_bias)
    if spec.line_bias:
        s = s - torch.where(opened, spec.line_bias, 0.0)
    page_scale = maximum(q_scale_log2 * page_k, hl.full([], FP32_TINY, dtype=torch.float32), spec.is_cuda)
    of_row = torch.where(opened, q_scale_log2, page_scale if spec.scores.has_softcap else 1.0)
    factors = of_row.unsqueeze(keys_axis) * torch.where(opened, k_descale, 1.0).unsqueeze(1 - keys_axis)
    if spec.scores.has_softcap:
        s = s - spec.s_bias
        if spec.scores.lse_shift_in_scores:
            s = fma(s, factors, shift.unsqueeze(keys_axis), spec.is_cuda)
        else:
            s = s * factors
        s = tanh(s, spec.is_cuda)
        # [rows], also of NaN, as in `page_scores`
        page_scale = page_scale * 0.0 + scales.tanh_scale
        factors = torch.where(opened, scales.tanh_scale, 1.0)
    v_log2 = torch.where(opened, log2_of_power(v_descale), 0.0).unsqueeze(1 - keys_axis)
    s = fma(s, factors, v_log2, spec.is_cuda)
    return s, torch.where(opened, 1.0, page_scale), torch.where(opened, 0.0, log2_of_power(page_v)), bias


def page_references(
    top: torch.Tensor,  # [rows]
    m_run: torch.Tensor,  # [rows]
    m_i: torch.Tensor,  # [rows]
    spec: PagedSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`update_block_max`, or `m_i` where a row sees nothing of the page: 2 to a difference would round its sums."""
    m_run, m_new = update_block_max(top, m_run, spec.is_cuda, PAGE_REFERENCE_REACH_LOG2)
    return m_run, torch.where(top == float("-inf"), m_i, m_new)


def sums_of_page(p: torch.Tensor, bn: int, rows: int) -> torch.Tensor:
    """[bn, rows] to [4, 4, rows]: key 64 a + 16 i + 8 b + 2 j + c goes to (i, j).

    Pair by pair, since the order of a longer sum depends on who holds what. WGMMA's accumulators have b in a thread, a
    in a thread or another warp, and c in a thread of `fp8_attn_prefill` or a lane of `fp8_attn_decode`.
    """
    return p.reshape(bn // 64, 4, 2, 4, 2, rows).sum(2).sum(0).sum(2)


def total_of_lanes(l_i: torch.Tensor, rows: int) -> torch.Tensor:
    """The sum of [4, 4, rows], pair by pair: [rows]."""
    return l_i.reshape(2, 2, 2, 2, rows).sum(3).sum(2).sum(1).sum(0)


def max_fused_scale(k_dtype: torch.dtype, d_in_halves: bool, has_softcap: bool) -> float:
    """The largest scale of a page's scores up to which one FMA takes them to P."""
    if has_softcap:
        return MAX_PAGE_SCORE_LOG2
    if k_dtype == torch.int8 and not d_in_halves:
        return MAX_FUSED_SCALE_LOG2[k_dtype]
    return MAX_PAGE_SCORE_LOG2 / (MAX_PAGE_SCORE[k_dtype] * (1 + d_in_halves))


class PagedGrid(NamedTuple):
    """The programs of a launch."""

    rows: int  # query rows of a tile
    m_tiles: int  # tiles of a KV head and sequence; of a packed batch `fp8_attn_prefill` has those of all sequences
    splits: int  # of the pages that a query sees, a program each; with `lists` of all sequences
    split_rows: int  # rows of out and lse that a split has
    is_split_kv: bool  # whether results are splits', which are merged
    lists: SplitLists | None = None  # where sequences have splits of their own


def launch_paged(
    kernel: Runner,
    a: DecodeArgs,
    grid: PagedGrid,
    split_v: bool,
    v_parts: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    batch: PackedBatch | None,
    shift: torch.Tensor | None,
    own: dict[str, Any],
) -> None:
    """Write `out` and `lse`; splits of pages are merged if there are several.

    Args:
        kernel: `fp8_attn_decode` or `fp8_attn_prefill`.
        a: the operation's arguments.
        grid: its programs.
        split_v: whether P V is two products.
        v_parts: parts of V's channels, a program each.
        out: contiguous [B, H, M, D_v], or [B, M, H, D_v] when `a.bshd`; bf16, fp16 or fp32.
        lse: fp32 [B, H, M], natural log.
        batch: if queries are packed; then B is 1 in q, out and lse.
        shift: `lse_shift`, from `cache_lse_shift`.
        own: arguments that the other kernel does not have.
    """
    (_, H, M, D), (H_kv, page_size), max_pages = a.q.shape, a.cache.k8.shape[1:3], a.block_table.size(1)
    B, splits, is_split_kv = a.cache_seqlens.size(0), grid.splits, grid.is_split_kv
    unit, k8, v8 = common_unit(a.q), a.cache.k8, a.cache.v8
    d_in_halves, v_pieces = k8.size(3) > MAX_PIECE, v_parts * (1 + split_v)
    q = strided_rows(a.q, unit)
    D_v = out.size(3)
    # Splits are always BHSD.
    split_out, split_lse = out.view(-1, D_v), lse.view(-1)
    if is_split_kv:
        split_out = out.new_empty((splits * grid.split_rows, D_v), dtype=torch.float32)
        split_lse = lse.new_empty(splits * grid.split_rows)
    swapped = a.bshd and not is_split_kv
    k_dtype, scales = k8.dtype, a.scores.scales()
    opened = a.open_pages
    # Without any, a page that is not read. Not one of the cache: Helion has no descriptors of memory that comes twice.
    open_k8 = k8.new_empty((2, *k8.shape[1:])) if opened.k8 is None else opened.k8
    open_v8 = v8.new_empty((2, *v8.shape[1:])) if opened.v8 is None else opened.v8
    open_k_descale = a.cache.k_descale if opened.k_descale is None else opened.k_descale
    open_v_descale = a.cache.v_descale if opened.v_descale is None else opened.v_descale

    def k_view(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(3, (2, MAX_PIECE)).transpose(2, 3) if d_in_halves else x

    def v_view(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (v_pieces, x.size(2) // v_pieces)) if v_pieces > 1 else x

    schraudolph_exp2 = takes_bits(v8.dtype, max(k8.size(3), v8.size(2)))
    factors = a.cache.channel_factors
    spec = PagedSpec(
        rows=grid.rows,
        bn_log2=page_size.bit_length() - 1,
        split_v=split_v,
        d_in_halves=d_in_halves,
        v_parts=v_parts,
        is_split_kv=is_split_kv,
        has_open_pages=opened.k8 is not None,
        # Only programs of prompts look for their sequence among all.
        batch=0 if batch is None else 1 if batch.few else batch.size,
        d=D,
        d_step=q.d_step,
        unit=unit,
        equalise=factors is not None,
        q_largest=FORMAT_MAX[k_dtype],
        s_bias=INT8_SCORE_BIAS if k_dtype == torch.int8 and a.q.is_cuda and not d_in_halves else 0.0,
        max_fused_scale=max_fused_scale(k_dtype, d_in_halves, a.scores.softcap is not None),
        may_be_wide=a.scores.softcap is None or scales.tanh_scale > MAX_PAGE_SCORE_LOG2,
        p_offset_log2=float(MAX_P_OFFSET_LOG2[v8.dtype]),
        schraudolph_exp2=schraudolph_exp2,
        p_steps=E4M3_STEPS if schraudolph_exp2 else 1.0,
        p_one=E4M3_BITS_OF_ONE if schraudolph_exp2 else 0.0,
        scores=a.scores.spec(has_lse_shift=shift is not None),
        is_cuda=a.q.is_cuda,
    )
    kernel.run(
        {
            "q": q.flat,
            "k8": k_view(k8),
            "v8": v_view(v8),
            "k_descale": flat_memory(a.cache.k_descale),
            "v_descale": flat_memory(a.cache.v_descale),
            "open_k8": k_view(open_k8),
            "open_v8": v_view(open_v8),
            "open_k_descale": flat_memory(open_k_descale),
            "open_v_descale": flat_memory(open_v_descale),
            "page_step": a.cache.k_descale.stride(0) * FP32_BYTES,
            "head_step": a.cache.k_descale.stride(1) * FP32_BYTES,
            "open_width": open_k8.size(0) // B if batch is None else pages_apart(opened.drafts),
            "new_keys": opened.keys,
            "drafts": opened.drafts,
            "block_table": a.block_table.view(-1),
            "cache_seqlens": a.cache_seqlens,
            "cu_seqlens": a.cache_seqlens if batch is None else batch.cu_seqlens,
            "sinks": split_lse if a.scores.sinks is None else a.scores.sinks,
            "out": split_out,
            "lse": split_lse,
            "lse_shift": split_lse if shift is None else shift,
            "channel_factors": split_lse if factors is None else factors.view(-1),
            "m_tiles": grid.m_tiles,
            "max_pages": max_pages,
            "group": H // H_kv,
            "m_len": M,
            "most_queries": M if batch is None else batch.most_queries,
            "q_b_step": q.b_step if batch is None else 0,
            "q_h_step": q.h_step,
            "q_s_step": q.s_step,
            "out_head_step": 1 if swapped else M,
            "out_row_step": H if swapped else 1,
            "factor_rows": 1 if factors is None else factors.size(0),
            # An edge further away hides nothing, and might not fit 32 bits.
            "left": min(a.scores.left, max_pages * page_size),
            "right": min(a.scores.right, M),
            "scales": scales,
            "spec": spec,
            **own,
        }
    )
    if is_split_kv:
        # Splits lack it, so that their weights do not depend on whether the lse is returned.
        in_lse = shift if spec.scores.lse_shift_in_lse else None
        partial_lse = split_lse.view(splits, -1)
        merge_splits(split_out, partial_lse, out, lse, a.bshd, None, in_lse, batch, a.cache_seqlens, grid.lists)
