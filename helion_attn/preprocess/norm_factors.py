"""Factors of an RMSNorm over all heads: one number a token of Q and of K, for which all heads are read.

    factor = 1 / sqrt(mean over heads and channels of x**2 + eps)

Norms by head need no such number: the kernels that pack a row have all of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import by_device
from helion_attn.kernels.lib.norm import BY_HEAD, OVER_HEADS, Norm, Norms, no_norms
from helion_attn.kernels.lib.strided import StridedQKV, load_rows
from helion_attn.problem import NormArgs

#: Elements of a step, 32 a thread, and heads whose loads are on their way.
STEP_ELEMENTS, STAGES = 4096, 3


class NormFactorsSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    q_d_step: int  # from a channel of Q to the next
    k_d_step: int  # of K
    unit: int  # what the other steps are multiples of
    d: int  # head dim
    d_row: int  # the power of two that holds a row
    n: int  # tokens of a program
    q_eps: float  # what is added to Q's means of squares
    k_eps: float  # to K's


def norm_factors(
    q: torch.Tensor,  # flat
    k: torch.Tensor,  # flat
    q_factors: torch.Tensor,  # [B * M], written
    k_factors: torch.Tensor,  # [B * N], written
    B: int,
    q_tiles: int,
    k_tiles: int,
    H: int,
    H_kv: int,
    M: int,
    N: int,
    q_b_step: int,
    q_h_step: int,
    q_s_step: int,
    k_b_step: int,
    k_h_step: int,
    k_s_step: int,
    q_share: float,
    k_share: float,
    spec: hl.constexpr,  # NormFactorsSpec
) -> None:
    """Write each token's factor; the steps are those of `StridedRows`. A share is 1 / (heads * D)."""
    hl.specialize((q.stride(0), k.stride(0), q_factors.stride(0), k_factors.stride(0)))
    for b, q_tile in hl.grid([B, q_tiles]):
        rows = q_tile * spec.n + hl.arange(spec.n)
        # [n, D_row]
        q_squares = hl.zeros([spec.n, spec.d_row], dtype=torch.float32)
        for h in hl.grid(H):
            offset = (b * q_b_step + h * q_h_step) * spec.unit
            x = load_rows(
                q, offset, rows, hl.arange(spec.d_row), q_s_step * spec.unit, spec.q_d_step, M, spec.d
            )  # fmt: skip
            q_squares = q_squares + x * x
        factor = torch.rsqrt(q_squares.sum(1) * q_share + spec.q_eps)
        hl.store(q_factors, [b * M + rows], factor, extra_mask=rows < M)

    for batch, k_tile in hl.grid([B, k_tiles]):
        keys = k_tile * spec.n + hl.arange(spec.n)
        # [n, D_row]
        k_squares = hl.zeros([spec.n, spec.d_row], dtype=torch.float32)
        for kv in hl.grid(H_kv):
            k_offset = (batch * k_b_step + kv * k_h_step) * spec.unit
            y = load_rows(
                k, k_offset, keys, hl.arange(spec.d_row), k_s_step * spec.unit, spec.k_d_step, N, spec.d
            )  # fmt: skip
            k_squares = k_squares + y * y
        k_factor = torch.rsqrt(k_squares.sum(1) * k_share + spec.k_eps)
        hl.store(k_factors, [batch * N + keys], k_factor, extra_mask=keys < N)


kernel = by_device(norm_factors, Config(num_warps=4, indexing="pointer", range_num_stages=[0, STAGES, 0, STAGES]))


def launch(source: StridedQKV, norm: NormArgs, unused: torch.Tensor) -> Norms:
    """Return norms as kernels take them, with the factors of those that are over heads.

    Args:
        source: Q, K and V.
        norm: of Q and K.
        unused: stands for tensors that are not read.
    """
    D, lengths = source.D, (source.M, source.N)
    weights = (norm.q_weight, norm.k_weight)
    over_heads = [weight is not None and weight.size(0) != D for weight in weights]
    factors = [unused.new_empty(source.B * S) if over else unused for S, over in zip(lengths, over_heads, strict=True)]
    found = [
        of if weight is None else Norm(weight, factor, OVER_HEADS if over else BY_HEAD, eps)
        for of, weight, factor, over, eps in zip(
            no_norms(unused), weights, factors, over_heads, (norm.q_eps, norm.k_eps), strict=True
        )
    ]
    if any(over_heads):
        n = max(1, STEP_ELEMENTS // source.D_row)
        tiles = [-(-S // n) if over else 0 for S, over in zip(lengths, over_heads, strict=True)]
        kernel(unused.is_cuda).run(
            {
                **source.arguments("qk"),
                "q_factors": factors[0],
                "k_factors": factors[1],
                "B": source.B,
                "q_tiles": tiles[0],
                "k_tiles": tiles[1],
                "H": source.H,
                "H_kv": source.H_kv,
                "M": source.M,
                "N": source.N,
                "q_share": 1.0 / (source.H * D),
                "k_share": 1.0 / (source.H_kv * D),
                "spec": NormFactorsSpec(
                    q_d_step=source.d_steps[0],
                    k_d_step=source.d_steps[1],
                    unit=source.unit,
                    d=D,
                    d_row=source.D_row,
                    n=n,
                    q_eps=norm.q_eps,
                    k_eps=norm.k_eps,
                ),
            }
        )
    return Norms(*found)
