"""Q as the user has it, which the attention kernel quantises where no block of Q is packed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.configs import row_width
from helion_attn.kernels.lib.arguments import AttentionArguments
from helion_attn.kernels.lib.steps import to_descale
from helion_attn.preprocess.lib.arguments import NO_ROPE_ARGUMENTS, RopeArguments
from helion_attn.preprocess.lib.reflect import reflected_channels
from helion_attn.preprocess.lib.rope import rope_tables
from helion_attn.preprocess.lib.row_layout import row_tile, rows_to_dtype
from helion_attn.preprocess.lib.strided import StridedRows, common_unit, strided_rows


class Query(NamedTuple):
    """What a launch quantises.

    Attributes:
        q: [B, H, M, D].
        rope: rotates it first.
    """

    q: torch.Tensor
    rope: RopeArguments


def query_arguments(query: Query | None, a: AttentionArguments, bm: int) -> dict[str, Any]:
    """What the kernel takes of `query`, or of its absence."""
    unused = a.packed.v_mean.view(-1)
    rows, unit, k_mean = StridedRows(unused, 0, 0, 0, 1), 1, unused
    rope = NO_ROPE_ARGUMENTS if query is None else query.rope
    tables = rope_tables(rope, a.packed.k8.size(3), unused).arguments()
    # A tensor that is not read is another, whose view is there already.
    lse_shift = a.packed.q_descale.view(-1) if a.packed.lse_shift is None else a.packed.lse_shift.view(-1)
    if query is not None:
        unit = common_unit(query.q)
        rows = strided_rows(query.q, unit)
        if a.packed.lse_shift is not None and a.packed.k_mean is not None:
            # Where a program keeps the shifts of its rows.
            rows_of_programs = a.packed.q8.size(0) * -(-a.m_len // bm) * bm
            lse_shift = unused.new_empty(rows_of_programs)
            k_mean = a.packed.k_mean.view(-1)
    return {
        "q": rows.flat,
        "q_b_step": rows.b_step,
        "q_h_step": rows.h_step,
        "q_s_step": rows.s_step,
        "q_d_step": rows.d_step,
        "unit": unit,
        "k_mean": k_mean,
        "lse_shift": lse_shift,
        **{name: x for name, x in tables.items() if "k_positions" not in name},
        "reflected": reflected_channels(a.d) if a.recipe.reflect else 0,
        "d_row": row_width(a.packed.k8.size(3), a.packed.v_mean.size(-1)),
        "d": a.d,
        "q_largest": a.recipe.qk_largest(a.d, a.packed.v_mean.size(-1)),
        "quantises_q": query is not None,
    }


def quantised_rows(
    q: torch.Tensor,  # flat
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_positions: torch.Tensor,
    mean: torch.Tensor,  # [D_pad], of K
    head_offset: int,
    rows: torch.Tensor,  # [bm]
    row_step: int,
    q_d_step: int,
    m_len: int,
    d: int,
    first_position: int,
    table_rows: int,
    bm: int,
    d_pad: int,
    rotary: int,
    q_largest: float,
    dtype: torch.dtype,
    pairing: hl.constexpr,
    explicit_q_positions: hl.constexpr,
    shift_lse: hl.constexpr,
    reflected: hl.constexpr,
    is_cuda: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of a head in `dtype` [bm, D_pad], their descales [bm], and if shift_lse products with the mean [bm]."""
    x, product = row_tile(
        q, cos, sin, q_positions, mean, q, q, head_offset, rows, row_step, q_d_step, m_len, d, first_position,
        table_rows, 1.0, bm, d_pad, rotary, 1, pairing, explicit_q_positions, False, shift_lse, False,
        False, False, reflected, is_cuda,
    )  # fmt: skip
    descale = to_descale(torch.amax(torch.abs(x), 1), q_largest)
    return rows_to_dtype(x, 1.0 / descale, dtype, is_cuda), descale, product
