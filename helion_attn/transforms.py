"""Stages of quantising alone, in the input's dtype: RoPE, the rotation and the reflection."""

from __future__ import annotations

import torch

from helion_attn import ops
from helion_attn.names import reject_unknown_kwargs
from helion_attn.preprocess.lib import hadamard as preprocess_hadamard
from helion_attn.problem import NO_ROPE_ARGUMENTS, RopeArgs, TransformRowsArgs, rope_arguments
from helion_attn.types import Layout, Rope
from helion_attn.validate.dense import check_even, check_rope_of, check_seed, check_x


@reject_unknown_kwargs
def apply_rope(
    x: torch.Tensor, rope: Rope, *, positions: torch.Tensor | None = None, layout: Layout = "bhsd"
) -> torch.Tensor:
    """Rotate rows by their positions (RoFormer, arXiv:2104.09864), as `quantize` does it to Q and K before the cast.

    Computed in fp32 and rounded once. `helion_attn.reference.apply_rope` is the same in fp64.

    Args:
        x: [B, H, S, D], bf16, fp16 or fp32; D in 16..1024; with layout="bshd", [B, S, H, D]. Any strides, but the last
            dimension's must be 1, and of fp32 tensors the others multiples of 4.
        rope: tables and pairing; without `q_positions` and `k_positions`.
        positions: int32 or int64 [S]; by default row i is at i. A position outside the table makes NaN of its row.
        layout: "bhsd" or "bshd".

    Returns:
        Contiguous, of x's shape and dtype. A NaN or infinity reaches the other channel of its pair, and no more.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
        NotImplementedError: neither a CUDA device of compute capability 9.0 nor the CPU.
        RuntimeError: x requires grad, in grad mode, or has a tangent.

    Example:
        x = torch.randn(1, 2, 100, 64, dtype=torch.bfloat16)
        angles = torch.outer(torch.arange(100.0), 10000 ** (-torch.arange(32) / 32))
        y = ha.apply_rope(x, ha.Rope(angles.cos(), angles.sin()))
    """
    check_x(x, layout)
    rows = x.transpose(1, 2) if layout == "bshd" else x
    check_rope_of(rows, rope, positions)
    turned = rope_arguments(rope)._replace(q_positions=positions)
    return _transform(rows, rope=turned, bshd=layout == "bshd")


def _transform(
    x: torch.Tensor,
    *,
    rope: RopeArgs = NO_ROPE_ARGUMENTS,
    hadamard_seed: int | None = None,
    reflect: bool = False,
    bshd: bool = False,
) -> torch.Tensor:
    arguments = TransformRowsArgs(x=x, rope=rope, hadamard_seed=hadamard_seed, reflect=reflect, bshd=bshd)
    out: torch.Tensor = ops.transform_rows(arguments)
    return out


def hadamard(x: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
    """Rotate the last dimension by random signs and a Hadamard matrix (QuIP, arXiv:2307.13304), as `quantize` does it.

    `x @ hadamard_matrix(D, seed)`: as many channels are mixed as the largest power of two up to 128 that divides D.
    Sums are fp32, on the tensor core; x is one term of bf16 there or, if it is fp16 or fp32, two, which leaves an error
    of up to 2**-18 of a row's norm. `helion_attn.reference.hadamard` is it in fp64.

    Args:
        x: [B, H, S, D] or [B, S, H, D], bf16, fp16 or fp32; D even, in 16..1024. Any strides, but those of fp32 tensors
            must be 1 for the last dimension and multiples of 4 for the others.
        seed: of the signs; 0..2**63 - 1.

    Returns:
        Contiguous, of x's shape and dtype. A NaN or infinity makes NaN or infinity of the channels that it is mixed
        into, and may of the rest of its row.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `apply_rope`.

    Example:
        x = torch.randn(1, 2, 100, 64, dtype=torch.bfloat16)
        y = ha.hadamard(x)
    """
    check_x(x, "bhsd")
    check_even("x has head dim", x.size(3))
    check_seed(seed)
    return _transform(x, hadamard_seed=seed)


def hadamard_matrix(D: int, seed: int = 0) -> torch.Tensor:
    """The rotation as a matrix: `x @ hadamard_matrix(D)` is what `Recipe(hadamard=True)` makes of Q's and K's rows.

    Args:
        D: head dim, even.
        seed: of the signs; 0..2**63 - 1.

    Returns:
        fp32 [D, D] on the CPU, orthogonal.

    Raises:
        ValueError: D or `seed` is not accepted.

    Example:
        x = torch.randn(1, 2, 100, 64, dtype=torch.bfloat16)
        y = x.float() @ ha.hadamard_matrix(64)  # ha.hadamard(x), not rounded
    """
    check_even("D is", D)
    check_seed(seed)
    return preprocess_hadamard.hadamard_matrix(D, seed)


def reflect(x: torch.Tensor) -> torch.Tensor:
    """Subtract half of the sum of every four consecutive channels from each, as `quantize` does it.

    Computed in fp32 and rounded once. I - J/2, J all ones, is a Householder reflection, and for four channels a
    Hadamard transform: products of two tensors' rows do not change, and applied twice it gives x back. The last D % 4
    channels stay. `helion_attn.reference.reflect` is it in fp64.

    Args:
        x: as in `hadamard`.

    Returns:
        Contiguous, of x's shape and dtype. A NaN or infinity makes NaN or infinity of its four channels.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `apply_rope`.

    Example:
        x = torch.randn(1, 2, 100, 64, dtype=torch.bfloat16)
        y = ha.reflect(ha.reflect(x))  # x, but for rounding
    """
    check_x(x, "bhsd")
    return _transform(x, reflect=True)
