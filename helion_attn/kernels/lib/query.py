"""Q as the user has it, which the attention kernel quantises where no block of Q is packed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.configs import MASK_BLOCK, row_width
from helion_attn.kernels.lib.norm import NO_NORM
from helion_attn.kernels.lib.rope import rope_tables
from helion_attn.kernels.lib.row_layout import row_tile, rows_to_dtype
from helion_attn.kernels.lib.specs import AttentionSpec, QuerySpec, RowSpec
from helion_attn.kernels.lib.steps import to_descale
from helion_attn.kernels.lib.strided import StridedRows, common_unit, strided_rows
from helion_attn.numerics import reflected_channels
from helion_attn.problem import NO_ROPE_ARGUMENTS, AttentionArgs, RopeArgs


class Query(NamedTuple):
    """A Q that a launch quantises."""

    q: torch.Tensor  # [B, H, M, D]
    rope: RopeArgs  # rotates it first


def query_arguments(query: Query | None, a: AttentionArgs, bm: int) -> tuple[dict[str, Any], QuerySpec | None]:
    """Arguments of the kernel by name, and the spec of a Q that it quantises: None where Q is packed."""
    unused = a.packed.v_mean.view(-1)
    rows, k_mean, channel_factors, spec = StridedRows(unused, 0, 0, 0, 1), unused, unused, None
    tables = rope_tables(NO_ROPE_ARGUMENTS if query is None else query.rope, a.packed.k8.size(3), unused)
    # A tensor that is not read is another, whose view is there already.
    lse_shift = a.packed.q_descale.view(-1) if a.packed.lse_shift is None else a.packed.lse_shift.view(-1)
    if query is not None:
        unit = common_unit(query.q)
        rows = strided_rows(query.q, unit)
        if a.packed.lse_shift is not None and a.packed.k_mean is not None:
            # Where a program keeps that of its rows.
            whole = MASK_BLOCK if a.block_mask.block_sparse else bm
            rows_of_programs = a.packed.q8.size(0) * -(-a.m_len // whole) * whole
            lse_shift = unused.new_empty(rows_of_programs)
            k_mean = a.packed.k_mean.view(-1)
        if a.packed.channel_factors is not None:
            channel_factors = a.packed.channel_factors.view(-1)
        spec = QuerySpec(
            d=a.d,
            vector_row=row_width(a.packed.k8.size(3), a.packed.v_mean.size(-1)),
            unit=unit,
            largest=a.recipe.qk_largest(a.d, a.packed.v_mean.size(-1)),
            rows=RowSpec(
                d_row=a.packed.k8.size(3),
                d_step=rows.d_step,
                rotary=tables.rotary,
                pairing=tables.pairing,
                explicit_positions=tables.explicit[0],
                normed=NO_NORM,
                eps=1.0,
                has_lse_shift=a.packed.lse_shift is not None,
                subtract_mean=False,
                equalise=a.recipe.equalise,
                divide=False,
                vectors_first=False,
                hadamard=False,
                rotate_first=False,
                two_terms=False,
                reflected=reflected_channels(a.d) if a.recipe.reflect else 0,
                is_cuda=unused.is_cuda,
            ),
        )
    arguments = {
        "q": rows.flat,
        "q_b_step": rows.b_step,
        "q_h_step": rows.h_step,
        "q_s_step": rows.s_step,
        "k_mean": k_mean,
        "channel_factors": channel_factors,
        "lse_shift": lse_shift,
        "cos": tables.cos,
        "sin": tables.sin,
        "q_positions": tables.q_positions,
        "table_rows": tables.table_rows,
    }
    return arguments, spec


def quantised_rows(
    q: torch.Tensor,  # flat
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_positions: torch.Tensor,
    k_mean: torch.Tensor,  # flat, if has_lse_shift
    channel_factors: torch.Tensor,  # flat, if equalise
    kv: int,
    head_offset: int,
    rows: torch.Tensor,  # [bm]
    row_step: int,
    m_len: int,
    first_position: int,
    table_rows: int,
    bm: int,
    d_pad: int,
    dtype: torch.dtype,
    spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of a head in `dtype` [bm, D_pad], their descales [bm], and `lse_shift` [bm], 0 unless asked for."""
    of = spec.query
    assert of is not None
    no_vector = hl.zeros([d_pad], dtype=torch.float32)
    x, lse_shift, factor = row_tile(
        flat=q,
        cos=cos,
        sin=sin,
        positions=q_positions,
        means=k_mean,
        channel_factors=channel_factors,
        first_channel=kv * of.vector_row,
        mean=no_vector,
        channel_factor=no_vector,
        signs=q,
        matrix=q,
        weight=q,
        factors=q,
        head_offset=head_offset,
        first_weight=0,
        first_factor=0,
        rows=rows,
        row_step=row_step,
        size=m_len,
        d=of.d,
        first_position=first_position,
        table_rows=table_rows,
        norm=1.0,
        n=bm,
        side=1,
        spec=of.rows,
    )
    descale = to_descale(torch.amax(torch.abs(x), 1) * factor, of.largest)
    return rows_to_dtype(x, factor / descale, dtype, spec.is_cuda), descale, lse_shift
