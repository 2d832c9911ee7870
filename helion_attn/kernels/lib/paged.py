"""What the two kernels of a paged cache share: descales that are powers of two, runs of pages, sums, and their launch.

A query has the same bits from both, and whatever shares its tile: its runs are of the pages that it sees itself, a page
of which it sees nothing leaves its sums as they are, and numbers are added in an order that no layout decides.
"""

from __future__ import annotations

from typing import Any

import torch

from helion_attn.compiler.kernels import Runner
from helion_attn.kernels.lib.inline_asm import tanh
from helion_attn.kernels.lib.keys import run_of_key_blocks
from helion_attn.kernels.lib.references import own_references
from helion_attn.kernels.lib.scalars import Int, int32
from helion_attn.kernels.lib.specs import PagedSpec
from helion_attn.kernels.lib.strided import common_unit, strided_rows
from helion_attn.kernels.merge_splits import merge_splits
from helion_attn.numerics import E4M3_MAX, MAX_P_OFFSET_LOG2, PAGE_REFERENCE_REACH_LOG2
from helion_attn.problem import DecodeProblem, ScoreScales


def log2_of_power(x: torch.Tensor) -> torch.Tensor:
    """log2 of fp32 powers of two, exactly."""
    return ((x.view(torch.int32) >> 23) - 127).to(torch.float32)


def inverse_of_power(x: torch.Tensor) -> torch.Tensor:
    """1 / x of fp32 powers of two, exactly: the biased exponent e becomes 254 - e."""
    return (0x7F000000 - x.view(torch.int32)).view(torch.float32)


def page_scores(
    s: torch.Tensor,  # [bn, rows] or [rows, bn]
    q_scale_log2: torch.Tensor,  # [1, rows] or [rows, 1]
    v_scale: torch.Tensor,  # [bn, 1] or [1, bn]
    scales: ScoreScales,
    spec: PagedSpec,
) -> torch.Tensor:
    """Scores of a page in base 2, and the logarithm of their keys' V descales: `t` of the kernels' docstrings."""
    s = s * q_scale_log2
    if spec.has_softcap:
        s = tanh(s, spec.is_cuda) * scales.tanh_scale
    return s + log2_of_power(v_scale)


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
        return run_of_key_blocks(first, stop, run, splits)
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
    """`own_references`, or `m_i` where a row sees nothing of the page: 2 to a difference would round its sums."""
    m_run, m_new = own_references(top, m_run, spec.is_cuda, PAGE_REFERENCE_REACH_LOG2)
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
    a: DecodeProblem,
    tile_rows: int,
    in_halves: bool,
    splits: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    own: dict[str, torch.Tensor],
) -> None:
    """Write `out` and `lse`, in parts that are merged if there are several runs of pages.

    Args:
        kernel: `fp8_attn_decode` or `fp8_attn_prefill`.
        a: the operation's arguments.
        tile_rows: query rows of a tile.
        in_halves: whether P V is two products.
        splits: runs of pages, a program each.
        out: contiguous [B, H, M, D_v], or [B, M, H, D_v] when `a.bshd`; bf16, fp16 or fp32.
        lse: fp32 [B, H, M], natural log.
        own: V and the descales, in the form that this kernel takes.
    """
    (B, H, M, D), (H_kv, page_size), max_pages = a.q.shape, a.cache.k8.shape[1:3], a.block_table.size(1)
    unit = common_unit(a.q)
    q = strided_rows(a.q, unit)
    in_parts = splits > 1
    D_v = out.size(3)
    # Parts are always BHSD.
    parts = out.new_empty((splits * B * H * M, D_v), dtype=torch.float32) if in_parts else out.view(-1, D_v)
    part_lse = lse.new_empty(splits * B * H * M) if in_parts else lse.view(-1)
    swapped = a.bshd and not in_parts
    spec = PagedSpec(
        rows=tile_rows,
        bn_log2=page_size.bit_length() - 1,
        in_halves=in_halves,
        in_runs=in_parts,
        d=D,
        d_step=q.d_step,
        unit=unit,
        q_largest=E4M3_MAX,
        p_offset_log2=float(MAX_P_OFFSET_LOG2[a.cache.v8.dtype]),
        **a.softmax.choices(),
        has_sinks=a.softmax.sinks is not None,
        is_cuda=a.q.is_cuda,
    )
    kernel.run(
        {
            "q": q.flat,
            "k8": a.cache.k8,
            "block_table": a.block_table.view(-1),
            "cache_seqlens": a.cache_seqlens,
            "sinks": part_lse if a.softmax.sinks is None else a.softmax.sinks,
            "out": parts,
            "lse": part_lse,
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
            # An edge further away hides nothing, and might not fit 32 bits.
            "left": min(a.softmax.left, max_pages * page_size),
            "right": min(a.softmax.right, M),
            "scales": a.softmax.scales(),
            "spec": spec,
            **own,
        }
    )
    if in_parts:
        merge_splits(parts, part_lse.view(splits, -1), out, lse, a.bshd)
