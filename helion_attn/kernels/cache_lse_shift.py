"""What K's mean of a paged cache took from the scores of each row of Q, scaled: q mean^T * scale, in fp32.

Elsewhere `lse_shift` is the product alone.

A softmax of keys does not see it. `fp8_attn_decode` and `fp8_attn_prefill` give it back to a softcap's tanh, to a sink
and to the lse, of several splits `merge_splits` to the lse. A row that sees no key has 0. Neighbouring products are
added pair by pair, so that a row has the same bits in any chunk and batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import by_device
from helion_attn.kernels.lib.inline_asm import fma
from helion_attn.kernels.lib.strided import common_unit, strided_rows
from helion_attn.problem import DecodeArgs

#: Rows of a program.
ROWS = 16


class LseShiftSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    d: int  # head dim of Q
    d_step: int  # from a channel of Q to the next
    unit: int  # what Q's other steps are multiples of
    d_pad: int  # channels of a mean
    has_right: bool  # keys have a right edge
    packed: bool  # queries are a packed batch, and rows that see no key have theirs
    is_cuda: bool  # the kernel is compiled; otherwise interpreted


def sums_of_pairs(
    x: torch.Tensor,  # [ROWS, width]
    width: int,
) -> torch.Tensor:
    """The sum of each row, pair by pair, [ROWS]."""
    while width > 1:
        width //= 2
        x = x.reshape(ROWS, width, 2).sum(2)
    return x.reshape(ROWS)


def cache_lse_shift(
    q: torch.Tensor,  # flat
    k_mean: torch.Tensor,  # [means * D_pad]
    cache_seqlens: torch.Tensor,  # [B]
    lse_shift: torch.Tensor,  # [B * H * M], written
    means: int,
    heads: int,
    group: int,
    m_len: int,
    q_b_step: int,
    q_h_step: int,
    q_s_step: int,
    right: int,
    scale: float,
    spec: hl.constexpr,  # LseShiftSpec
) -> None:
    """The kernel; see the module's docstring."""
    hl.specialize((q.stride(0), k_mean.stride(0), cache_seqlens.stride(0), lse_shift.stride(0)))
    total_rows = lse_shift.size(0)
    for tile in hl.grid((total_rows + ROWS - 1) // ROWS):
        # [ROWS]
        r = tile * ROWS + hl.arange(ROWS)
        in_range = r < total_rows
        i, bh = r % m_len, r // m_len
        b, head, mean = bh // heads, bh % heads, bh // group % means
        # [ROWS, D_pad]
        cols = hl.arange(spec.d_pad)
        keep = in_range.unsqueeze(1) & (cols < spec.d).unsqueeze(0)
        row_offset = (b * q_b_step + head * q_h_step + i * q_s_step) * spec.unit
        x = hl.load(q, [row_offset.unsqueeze(1) + cols.unsqueeze(0) * spec.d_step], extra_mask=keep).to(torch.float32)
        of_mean = hl.load(k_mean, [mean.unsqueeze(1) * spec.d_pad + cols.unsqueeze(0)], extra_mask=keep)
        # Products that no addition takes in.
        product = fma(x, of_mean, hl.zeros([], dtype=torch.float32), spec.is_cuda)
        # [ROWS]
        shift = sums_of_pairs(product, spec.d_pad) * scale
        if not spec.packed:
            last = hl.load(cache_seqlens, [b], extra_mask=in_range) - 1
            if spec.has_right:
                last = torch.minimum(last, last + (i + right + 1 - m_len).to(torch.int32))
            shift = torch.where(last >= 0, shift, 0.0)
        hl.store(lse_shift, [r], shift, extra_mask=in_range)


kernel = by_device(cache_lse_shift, Config(num_warps=4, indexing="pointer"))


def launch(a: DecodeArgs, packed: bool) -> torch.Tensor | None:
    """Compute what the cache's mean took from each row's scores: fp32 [B * H * M].

    None if the cache has no mean, or neither a softcap, a sink nor the lse needs it. It is in natural log, or, with a
    softcap, in the unit of tanh's arguments. `packed`: queries are a packed batch.
    """
    # [H_kv, D_pad], or [H_kv, 1, D_pad] where pages are of one head
    k_mean = a.cache.k_mean
    if k_mean is None or not a.needs_lse_shift:
        return None
    (B, H, M, D), d_pad, unit = a.q.shape, k_mean.size(-1), common_unit(a.q)
    q = strided_rows(a.q, unit)
    lse_shift = k_mean.new_empty(B * H * M)
    kernel(a.q.is_cuda).run(
        {
            "q": q.flat,
            "k_mean": k_mean.view(-1),
            "cache_seqlens": a.cache_seqlens,
            "lse_shift": lse_shift,
            "means": k_mean.size(0),
            "heads": H,
            "group": H // a.cache.k8.size(1),
            "m_len": M,
            "q_b_step": q.b_step,
            "q_h_step": q.h_step,
            "q_s_step": q.s_step,
            # An edge further away hides nothing, and might not fit 32 bits.
            "right": min(a.scores.right, M),
            "scale": a.scores.scale / (1.0 if a.scores.softcap is None else a.scores.softcap),
            "spec": LseShiftSpec(
                d=D,
                d_step=q.d_step,
                unit=unit,
                d_pad=d_pad,
                has_right=a.scores.right >= 0,
                packed=packed,
                is_cuda=a.q.is_cuda,
            ),
        }
    )
    return lse_shift
