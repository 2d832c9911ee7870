"""Parts that both kernels of a paged cache have: descales and what they mean, runs of pages, sums, and the launch.

A query has the same bits from both, and whatever shares its tile: its runs are of the pages that it sees itself, a page
of which it sees nothing leaves its sums as they are, and numbers are added in an order that no layout decides.
"""

from __future__ import annotations

from typing import Any

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.compiler.runners import Runner
from helion_attn.configs import MAX_PIECE
from helion_attn.kernels import cache_lse_shift
from helion_attn.kernels.lib.block_max import update_block_max
from helion_attn.kernels.lib.inline_asm import fma, fma_up, maximum, minimum, tanh
from helion_attn.kernels.lib.keys import split_kv_range
from helion_attn.kernels.lib.scalars import Int, int32
from helion_attn.kernels.lib.schraudolph import largest_scores
from helion_attn.kernels.lib.specs import PagedSpec
from helion_attn.kernels.lib.strided import common_unit, strided_rows
from helion_attn.kernels.merge_splits import merge_splits
from helion_attn.numerics import (
    BEYOND_FP16_LOG2,
    E4M3_BITS_OF_ONE,
    E4M3_STEPS,
    FP16_LARGE,
    FP16_TINY,
    FP32_TINY,
    INT8_SCORE_BIAS,
    LEAST_HALF_PAGE_REFERENCE,
    MAX_HALF_PAGE_SCORE_LOG2,
    MAX_P_OFFSET_LOG2,
    MAX_PAGE_SCORE,
    MAX_PAGE_SCORE_LOG2,
    NO_KEY,
    PAGE_REFERENCE_REACH_LOG2,
    largest_q_of_cache,
    takes_bits,
    takes_half_scores,
)
from helion_attn.options import ScoreScales
from helion_attn.problem import DecodeArgs


def log2_of_power(x: torch.Tensor) -> torch.Tensor:
    """log2 of fp32 powers of two, exactly."""
    return ((x.view(torch.int32) >> 23) - 127).to(torch.float32)


def bases_of_page(
    k_descale: torch.Tensor,  # [num_pages * H_kv * bn]
    v_descale: torch.Tensor,  # [num_pages * H_kv * bn]
    first: Int,
    bn: hl.constexpr,
    int8_keys: hl.constexpr,
    is_cuda: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The descales of a page's first key, of K and V, and 1 if another key of it has others, else 0.

    Of int8 keys the largest descale in the place of K's first, and V's alone are compared.

    Every warp looks at all descales of the page, four keys a lane: so all warps know, with no barrier and no flag in
    memory that someone would have to keep.
    """
    if is_cuda:
        like = hl.full([], 1.0, dtype=torch.float32), hl.full([], 1.0, dtype=torch.float32), int32(0)
        code = BASES_OF_INT8_PAGE if int8_keys else BASES_OF_PAGE
        if bn == 64:
            code = code.replace(*LANES_OF_64)
        return hl.inline_triton(code, args=(k_descale, v_descale, first), output_like=like)
    at = first + hl.arange(bn)
    k, v = hl.load(k_descale, [at]), hl.load(v_descale, [at])
    # Bits, of which those of a NaN are equal.
    if int8_keys:
        others = v.view(torch.int32) != v[0].view(torch.int32)
        return torch.amax(k, 0), v[0], torch.amax(others.to(torch.int32), 0)
    others = (k.view(torch.int32) != k[0].view(torch.int32)) | (v.view(torch.int32) != v[0].view(torch.int32))
    return k[0], v[0], torch.amax(others.to(torch.int32), 0)


#: `bases_of_page` on the GPU, of two tensors and an index.
BASES_OF_PAGE = """tl.inline_asm_elementwise(
    asm='''
    {{
    // while products run
    .reg .b32 lane, k<4>, v<4>, others;
    .reg .b64 offset, of_k, of_v;
    .reg .pred other;
    mov.u32 lane, %laneid;
    mul.wide.u32 offset, lane, 16;
    add.s64 of_k, $3, offset;
    add.s64 of_v, $4, offset;
    ld.global.nc.v4.b32 {{k0, k1, k2, k3}}, [of_k];
    ld.global.nc.v4.b32 {{v0, v1, v2, v3}}, [of_v];
    shfl.sync.idx.b32 $0, k0, 0, 31, 0xffffffff;
    shfl.sync.idx.b32 $1, v0, 0, 31, 0xffffffff;
    xor.b32 others, k0, $0;
    lop3.b32 others, k1, $0, others, 0xBE;
    lop3.b32 others, k2, $0, others, 0xBE;
    lop3.b32 others, k3, $0, others, 0xBE;
    lop3.b32 others, v0, $1, others, 0xBE;
    lop3.b32 others, v1, $1, others, 0xBE;
    lop3.b32 others, v2, $1, others, 0xBE;
    lop3.b32 others, v3, $1, others, 0xBE;
    setp.ne.b32 other, others, 0;
    vote.sync.any.pred other, other, 0xffffffff;
    selp.b32 $2, 1, 0, other;
    }}
    ''',
    constraints="=&f,=&f,=&r,l,l",
    args=[{0} + ({2}), {1} + ({2})],
    dtype=(tl.float32, tl.float32, tl.int32),
    is_pure=False,
    pack=1,
)"""

#: What becomes of it for a page of 64 keys, where two lanes look at the same four.
LANES_OF_64 = ("%laneid;", "%laneid;\n    and.b32 lane, lane, 15;")

#: Of int8 keys. Descales are not negative, and a NaN's bits are larger than any.
BASES_OF_INT8_PAGE = BASES_OF_PAGE.replace(
    """    shfl.sync.idx.b32 $0, k0, 0, 31, 0xffffffff;
""",
    """    max.u32 k0, k0, k1;
    max.u32 k2, k2, k3;
    max.u32 k0, k0, k2;
    redux.sync.max.u32 k0, k0, 0xffffffff;
    mov.b32 $0, k0;
""",
).replace(
    """    xor.b32 others, k0, $0;
    lop3.b32 others, k1, $0, others, 0xBE;
    lop3.b32 others, k2, $0, others, 0xBE;
    lop3.b32 others, k3, $0, others, 0xBE;
    lop3.b32 others, v0, $1, others, 0xBE;
""",
    """    xor.b32 others, v0, $1;
""",
)


def class_of_slot(
    k_descale: torch.Tensor,  # [num_pages * H_kv * bn]
    v_descale: torch.Tensor,  # [num_pages * H_kv * bn]
    first: Int,
    slot: torch.Tensor,  # []
    bn: hl.constexpr,
    int8_keys: hl.constexpr,
    is_cuda: hl.constexpr,
) -> tuple[torch.Tensor, ...]:
    """The keys of a page that have the descales of a slot, its class; of int8 keys V's alone.

    Returns:
        1 if the slot is the first of them, else 0; the two descales; and four words for `keys_of_class`, which have a
        bit a key on the GPU.
    """
    if is_cuda:
        one, none = hl.full([], 1.0, dtype=torch.float32), int32(0)
        like = none, one, one, none, none, none, none
        code = CLASS_OF_SLOT_OF_64 if bn == 64 else CLASS_OF_SLOT
        args = (v_descale if int8_keys else k_descale, v_descale, first, slot)
        return hl.inline_triton(code, args=args, output_like=like)
    at = first + hl.arange(bn)
    k, v = hl.load(v_descale if int8_keys else k_descale, [at]), hl.load(v_descale, [at])
    same = (k.view(torch.int32) == k[slot].view(torch.int32)) & (v.view(torch.int32) == v[slot].view(torch.int32))
    keys = same.to(torch.int32)
    return (keys.argmax() == slot).to(torch.int32), k[slot], v[slot], keys, keys, keys, keys


#: `class_of_slot` on the GPU, of two tensors and two indices.
CLASS_OF_SLOT = """tl.inline_asm_elementwise(
    asm='''
    {{
    .reg .b32 lane, k<4>, v<4>, word, place, bit;
    .reg .b64 offset, of_k, of_v;
    .reg .pred same, earlier;
    mul.wide.u32 offset, $9, 4;
    add.s64 of_k, $7, offset;
    add.s64 of_v, $8, offset;
    ld.global.nc.b32 $1, [of_k];
    ld.global.nc.b32 $2, [of_v];
    mov.u32 lane, %laneid;
    mul.wide.u32 offset, lane, 4;
    add.s64 of_k, $7, offset;
    add.s64 of_v, $8, offset;
    ld.global.nc.b32 k0, [of_k];
    ld.global.nc.b32 k1, [of_k + 128];
    ld.global.nc.b32 k2, [of_k + 256];
    ld.global.nc.b32 k3, [of_k + 384];
    ld.global.nc.b32 v0, [of_v];
    ld.global.nc.b32 v1, [of_v + 128];
    ld.global.nc.b32 v2, [of_v + 256];
    ld.global.nc.b32 v3, [of_v + 384];
    xor.b32 k0, k0, $1;
    xor.b32 k1, k1, $1;
    xor.b32 k2, k2, $1;
    xor.b32 k3, k3, $1;
    lop3.b32 k0, v0, $2, k0, 0xBE;
    lop3.b32 k1, v1, $2, k1, 0xBE;
    lop3.b32 k2, v2, $2, k2, 0xBE;
    lop3.b32 k3, v3, $2, k3, 0xBE;
    setp.eq.b32 same, k0, 0;
    vote.sync.ballot.b32 $3, same, 0xffffffff;
    setp.eq.b32 same, k1, 0;
    vote.sync.ballot.b32 $4, same, 0xffffffff;
    setp.eq.b32 same, k2, 0;
    vote.sync.ballot.b32 $5, same, 0xffffffff;
    setp.eq.b32 same, k3, 0;
    vote.sync.ballot.b32 $6, same, 0xffffffff;
    // The first of them: the lowest bit of the first word that is not 0.
    setp.ne.b32 earlier, $5, 0;
    selp.b32 word, $5, $6, earlier;
    selp.b32 place, 64, 96, earlier;
    setp.ne.b32 earlier, $4, 0;
    selp.b32 word, $4, word, earlier;
    selp.b32 place, 32, place, earlier;
    setp.ne.b32 earlier, $3, 0;
    selp.b32 word, $3, word, earlier;
    selp.b32 place, 0, place, earlier;
    brev.b32 word, word;
    clz.b32 bit, word;
    add.s32 place, place, bit;
    setp.eq.s32 same, place, $9;
    selp.b32 $0, 1, 0, same;
    }}
    ''',
    constraints="=&r,=&f,=&f,=&r,=&r,=&r,=&r,l,l,r",
    args=[{0} + ({2}), {1} + ({2}), {3}],
    dtype=(tl.int32, tl.float32, tl.float32, tl.int32, tl.int32, tl.int32, tl.int32),
    is_pure=False,
    pack=1,
)"""

#: The same of a page of 64 keys, whose words come twice.
CLASS_OF_SLOT_OF_64 = CLASS_OF_SLOT.replace(" + 256]", "]").replace(" + 384]", " + 128]")


def keys_of_class(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, bn: hl.constexpr, is_cuda: hl.constexpr
) -> torch.Tensor:
    """int32 [bn]: not 0 for the keys of a `class_of_slot`."""
    if not is_cuda:
        return a
    keys = hl.arange(bn)
    # A thread's keys differ in the bits of 25, which are then known when it is compiled.
    words = torch.where(keys < 64, torch.where(keys < 32, a, b), torch.where(keys < 96, c, d))
    return (words >> (keys & 6)) & (hl.full([], 1, dtype=torch.int32) << (keys & 25))


def descales_of_keys(
    k_descale: torch.Tensor,  # [num_pages * H_kv * bn]
    first: Int,
    bn: hl.constexpr,
    keys_axis: hl.constexpr,
    is_cuda: hl.constexpr,
) -> torch.Tensor:
    """K's descales of a page, [bn], for scores with their keys on this axis.

    Each thread loads those of its scores when it needs them, and has no registers for them before: they are in the
    cache since `bases_of_page`.
    """
    if is_cuda:
        like = hl.zeros([bn], dtype=torch.float32)
        code = (KEYS_APART, KEYS_BY_TWOS)[keys_axis].replace("PAIRS", str(bn // 2)).replace("KEYS", str(bn))
        return hl.inline_triton(code, args=(k_descale, first), output_like=like)
    return hl.load(k_descale, [first + hl.arange(bn)])


#: `descales_of_keys` on the GPU, of a tensor and an index, and of `KEYS` or `PAIRS` of them, where a thread has keys
#: eight apart.
KEYS_APART = """tl.inline_asm_elementwise(
    asm="ld.global.nc.f32 $0, [$1];",
    constraints="=f,l",
    args=[{0} + ({1}) + tl.arange(0, KEYS)],
    dtype=tl.float32,
    is_pure=True,
    pack=1,
)"""

#: And where it has two neighbours.
KEYS_BY_TWOS = """tl.reshape(
    tl.join(
        *tl.inline_asm_elementwise(
            asm="ld.global.nc.v2.f32 {{$0, $1}}, [$2];",
            constraints="=f,=f,l",
            args=[{0} + ({1}) + 2 * tl.arange(0, PAIRS)],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    ),
    [KEYS],
)"""


def times_descales(
    s: torch.Tensor,  # [bn, rows] or [rows, bn]
    k_descale: torch.Tensor,  # [bn]
    keys_axis: hl.constexpr,
    spec: PagedSpec,
) -> torch.Tensor:
    """Scores of int8 keys times their keys' descales, in one FMA: a descale's product with the bias is exact."""
    k_descale = k_descale.unsqueeze(1 - keys_axis)
    if spec.s_bias:
        return fma(s, k_descale, k_descale * -spec.s_bias, spec.is_cuda)
    return s * k_descale


def base_scores(
    s: torch.Tensor,  # [bn, rows] or [rows, bn]
    q_scale_log2: torch.Tensor,  # [rows]
    k_base: torch.Tensor,  # []
    shift: torch.Tensor,  # [rows]
    scales: ScoreScales,
    keys_axis: hl.constexpr,
    spec: PagedSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of keys that have their page's base, and their factors, [rows], which are never 0 in fp32.

    Scores of int8 keys are times their descales already.
    """
    if spec.half_scores:
        steps = minimum(q_scale_log2 * k_base * E4M3_STEPS, hl.full([], FP16_LARGE, dtype=torch.float32), spec.is_cuda)
        tiny = hl.full([], FP16_TINY, dtype=torch.float32)
        return s, maximum(steps.to(torch.float16).to(torch.float32), tiny, spec.is_cuda)
    scale_log2 = q_scale_log2
    if not spec.int8_keys:
        scale_log2 = scale_log2 * k_base
    scale_log2 = maximum(scale_log2, hl.full([], FP32_TINY, dtype=torch.float32), spec.is_cuda)
    if spec.has_softcap:
        if spec.shifts_scores:
            s = fma(s, scale_log2.unsqueeze(keys_axis), shift.unsqueeze(keys_axis), spec.is_cuda)
        else:
            s = s * scale_log2.unsqueeze(keys_axis)
        s = tanh(s, spec.is_cuda)
        # [rows], also of NaN: tanh would have it
        scale_log2 = scale_log2 * 0.0 + scales.tanh_scale
    return s, scale_log2


def bases_are_wide(
    largest_q_scale_log2: torch.Tensor,  # []
    k_base: torch.Tensor,  # []
    scales: ScoreScales,
    spec: PagedSpec,
) -> torch.Tensor:
    """1 if some score may pass `MAX_PAGE_SCORE_LOG2`, 0 if none does."""
    largest = largest_q_scale_log2 * k_base * spec.largest_score
    if spec.has_softcap:
        largest = hl.full([], scales.tanh_scale, dtype=torch.float32)
    # Not "large", since a NaN is not within.
    return 1 - (largest <= MAX_PAGE_SCORE_LOG2).to(torch.int32)


def line_of_page(
    s: torch.Tensor,  # [bn, rows] or [rows, bn]; with half_scores `pack_half2` if rows come first
    scale_log2: torch.Tensor,  # [rows]
    v_base: torch.Tensor,  # []
    m_run: torch.Tensor,  # [rows]
    m_i: torch.Tensor,  # [rows]
    keys_axis: hl.constexpr,
    spec: PagedSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(m_run, m_i, scale, offset, largest, top)`, [rows]: references, and the line from a score to log2 of its P.

    In steps of e4m3 if P's bits are to come from it.
    """
    if spec.half_scores:
        return half_line_of_page(s, scale_log2, v_base, m_run, m_i, keys_axis, spec)
    v_log2 = log2_of_power(v_base)
    largest = torch.amax(s, keys_axis)
    offset = hl.full([], -spec.p_offset_log2, dtype=torch.float32)
    top = fma_up(largest, scale_log2, offset, spec.is_cuda) + v_log2
    m_run, m_i = page_references(top, m_run, m_i, spec)
    return m_run, m_i, scale_log2 * spec.p_steps, spec.p_one - (m_i - v_log2) * spec.p_steps, largest, top


def half_line_of_page(
    s: torch.Tensor,  # [bn, rows], or [rows, bn] `pack_half2`
    scale: torch.Tensor,  # [rows], of steps of e4m3
    v_base: torch.Tensor,  # []
    m_run: torch.Tensor,  # [rows]
    m_i: torch.Tensor,  # [rows]
    keys_axis: hl.constexpr,
    spec: PagedSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`line_of_page` of scores in fp16. Their line's numbers are fp16, and the reference is that of its offset."""
    v_log2 = log2_of_power(v_base)
    if keys_axis == 1:
        largest = largest_scores(s, spec.rows, 1 << spec.bn_log2, spec)
    else:
        largest = torch.amax(s.to(torch.float32), keys_axis)
    # Where fp16 has no such scale, `has_all_again` is to see it.
    offset = torch.where(scale < FP16_LARGE, -spec.p_offset_log2, BEYOND_FP16_LOG2)
    top = fma_up(largest, scale * (1.0 / E4M3_STEPS), offset, spec.is_cuda) + v_log2
    m_run, m_new = update_block_max(top, m_run, spec.is_cuda, PAGE_REFERENCE_REACH_LOG2)
    m_new = maximum(m_new, hl.full([], LEAST_HALF_PAGE_REFERENCE, dtype=torch.float32), spec.is_cuda)
    one = spec.p_one + v_log2 * spec.p_steps
    exact = one - m_new * spec.p_steps
    offset = exact.to(torch.float16).to(torch.float32)
    # A row that sees nothing keeps its bits.
    m_i = torch.where(top == float("-inf"), m_i, m_new + (exact - offset) * (1.0 / E4M3_STEPS))
    return m_run, m_i, scale, offset, largest, top


def has_all_again(m_run: torch.Tensor) -> torch.Tensor:
    """Whether a row's largest score lies too far from 0 for fp16, [rows]; not where it has seen no key, or is NaN."""
    return (torch.abs(m_run) > MAX_HALF_PAGE_SCORE_LOG2) & (m_run > NO_KEY)


def wide_line(
    s: torch.Tensor,  # [bn, rows] or [rows, bn]
    scale_log2: torch.Tensor,  # [rows]
    v_base: torch.Tensor,  # []
    m_i: torch.Tensor,  # [rows]
    scale: torch.Tensor,  # [rows]
    offset: torch.Tensor,  # [rows]
    largest: torch.Tensor,  # [rows]
    top: torch.Tensor,  # [rows]
    keys_axis: hl.constexpr,
    spec: PagedSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(s, scale, offset)`, other ones of rows whose largest score passes `MAX_PAGE_SCORE_LOG2`.

    One FMA would lose P there: scores are taken from what they are below their row's largest, as in `wide_scores`. Only
    the row itself says so, whatever shares its tile.
    """
    # [rows]
    wide = torch.abs(top) > MAX_PAGE_SCORE_LOG2
    known = torch.where(largest == float("-inf"), 0.0, largest)
    above = fma(known, scale_log2, log2_of_power(v_base) - top, spec.is_cuda)
    above = torch.clamp_max(torch.clamp_min(above, 0.0), spec.p_offset_log2) + (top - m_i)
    below = fma(
        s - known.unsqueeze(keys_axis), scale_log2.unsqueeze(keys_axis), above.unsqueeze(keys_axis), spec.is_cuda
    )
    s = torch.where(wide.unsqueeze(keys_axis), below, s)
    return s, torch.where(wide, spec.p_steps, scale), torch.where(wide, spec.p_one, offset)


def run_of_query(
    on_diagonal: torch.Tensor,  # [] or [n]: the key that a query has on its diagonal
    n_len: torch.Tensor,  # []
    left: int,
    right: int,
    run: int,
    splits: int,
    spec: PagedSpec,
) -> tuple[Any, Any]:
    """The pages of a query's run, from one up to another. Both grow with the query."""
    first, keys = int32(0), n_len
    if spec.has_left:
        first = torch.clamp_min(on_diagonal - int32(left), 0) >> spec.bn_log2
    if spec.has_right:
        keys = torch.clamp_min(torch.minimum(n_len, on_diagonal + int32(right) + 1), 0)
    stop = (keys + (1 << spec.bn_log2) - 1) >> spec.bn_log2
    if spec.in_runs:
        return split_kv_range(first, stop, run, splits)
    return first, stop


def in_run_of_query(
    visible: torch.Tensor,  # [rows, bn] or [1, bn]
    j: Int,
    on_diagonal: torch.Tensor,  # [rows]
    n_len: torch.Tensor,  # []
    left: int,
    right: int,
    run: int,
    splits: int,
    spec: PagedSpec,
) -> torch.Tensor:
    """`visible` of page j, or nothing where it lies in another of the query's runs."""
    if spec.in_runs and (spec.has_left or spec.has_right):
        begin, stop = run_of_query(on_diagonal, n_len, left, right, run, splits, spec)
        return visible & ((begin <= int32(j)) & (int32(j) < stop)).unsqueeze(1)
    return visible


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


def launch_paged(
    kernel: Runner,
    a: DecodeArgs,
    tile_rows: int,
    in_halves: bool,
    v_parts: int,
    splits: int,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write `out` and `lse`, in parts that are merged if there are several runs of pages.

    Args:
        kernel: `fp8_attn_decode` or `fp8_attn_prefill`.
        a: the operation's arguments.
        tile_rows: query rows of a tile.
        in_halves: whether P V is two products.
        v_parts: parts of V's channels, a program each.
        splits: runs of pages, a program each.
        out: contiguous [B, H, M, D_v], or [B, M, H, D_v] when `a.bshd`; bf16, fp16 or fp32.
        lse: fp32 [B, H, M], natural log.
    """
    (B, H, M, D), (H_kv, page_size), max_pages = a.q.shape, a.cache.k8.shape[1:3], a.block_table.size(1)
    unit, k8, v8 = common_unit(a.q), a.cache.k8, a.cache.v8
    d_in_halves, v_pieces = k8.size(3) > MAX_PIECE, v_parts * (1 + in_halves)
    q = strided_rows(a.q, unit)
    in_parts = splits > 1
    D_v = out.size(3)
    # Parts are always BHSD.
    parts = out.new_empty((splits * B * H * M, D_v), dtype=torch.float32) if in_parts else out.view(-1, D_v)
    part_lse = lse.new_empty(splits * B * H * M) if in_parts else lse.view(-1)
    swapped = a.bshd and not in_parts
    k_dtype, scales = k8.dtype, a.scores.scales()
    int8_keys, larger_d = k_dtype == torch.int8, max(k8.size(3), v8.size(2))
    shift = cache_lse_shift.launch(a, q, unit)
    p_bits, half = takes_bits(v8.dtype, larger_d), takes_half_scores(k_dtype, larger_d, a.scores.softcap is not None)
    factors = a.cache.channel_factors
    spec = PagedSpec(
        rows=tile_rows,
        bn_log2=page_size.bit_length() - 1,
        in_halves=in_halves,
        d_in_halves=d_in_halves,
        v_parts=v_parts,
        in_runs=in_parts,
        d=D,
        d_step=q.d_step,
        unit=unit,
        equalise=factors is not None,
        q_largest=largest_q_of_cache(k_dtype, D, half),
        int8_keys=int8_keys,
        s_bias=INT8_SCORE_BIAS if int8_keys and a.q.is_cuda and not d_in_halves else 0.0,
        largest_score=MAX_PAGE_SCORE[k_dtype] * (1 + d_in_halves),
        may_be_wide=a.scores.softcap is None or scales.tanh_scale > MAX_PAGE_SCORE_LOG2,
        shift_lse=shift is not None,
        p_offset_log2=float(MAX_P_OFFSET_LOG2[v8.dtype]),
        p_bits=p_bits,
        half_scores=half,
        p_steps=E4M3_STEPS if p_bits else 1.0,
        p_one=E4M3_BITS_OF_ONE if p_bits else 0.0,
        has_left=a.scores.left >= 0,
        has_right=a.scores.right >= 0,
        has_softcap=a.scores.softcap is not None,
        has_sinks=a.scores.sinks is not None,
        is_cuda=a.q.is_cuda,
    )
    kernel.run(
        {
            "q": q.flat,
            "k8": k8.view(*k8.shape[:3], 2, MAX_PIECE).transpose(2, 3) if d_in_halves else k8,
            "v8": v8.view(v8.size(0), -1, v8.size(2) // v_pieces, v8.size(3)) if v_pieces > 1 else v8,
            "k_descale": a.cache.k_descale.view(-1),
            "v_descale": a.cache.v_descale.view(-1),
            "block_table": a.block_table.view(-1),
            "cache_seqlens": a.cache_seqlens,
            "sinks": part_lse if a.scores.sinks is None else a.scores.sinks,
            "out": parts,
            "lse": part_lse,
            "lse_shift": part_lse if shift is None else shift,
            "channel_factors": part_lse if factors is None else factors.view(-1),
            "splits": splits,
            "m_tiles": -(-H // H_kv * M // tile_rows),
            "max_pages": max_pages,
            "group": H // H_kv,
            "m_len": M,
            "q_b_step": q.b_step,
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
        }
    )
    if in_parts:
        # Parts lack it, so that their weights do not depend on whether somebody sees it.
        merge_splits(parts, part_lse.view(splits, -1), out, lse, a.bshd, None, shift if spec.shifts_lse else None)
