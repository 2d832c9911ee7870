"""The rotary position embedding (RoFormer, arXiv:2104.09864), in fp64."""

from __future__ import annotations

import torch

from helion_attn.types import Rope


def apply_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate channel pair i of the row at position t by the angle whose cosine is `cos[t, i]` and sine `sin[t, i]`.

    y[a] = x[a] cos - x[b] sin and y[b] = x[b] cos + x[a] sin for the pair (a, b); channels past the pairs are kept.

    Args:
        x: [..., S, D], any floating dtype and device.
        cos: [table positions, R / 2]; the first R channels are rotated.
        sin: same shape.
        interleaved: pair i is channels (2i, 2i + 1); by default (i, i + R / 2).
        positions: int [S]; by default 0, 1, .... One outside the table makes its row NaN.

    Returns:
        fp64, shaped as x.

    Raises:
        ValueError: R is more than D; or positions is None and S is more than the table has.

    Example:
        x = torch.randn(1, 2, 100, 64)
        angles = torch.outer(torch.arange(100.0), 10000 ** (-torch.arange(32) / 32))
        y = ha.reference.apply_rope(x, angles.cos(), angles.sin())
    """
    (S, D), (table_size, pairs) = x.shape[-2:], cos.shape
    if 2 * pairs > D:
        raise ValueError(f"cos has {pairs} columns and x head dim {D}; there must be at most half as many")
    if positions is None:
        if table_size < S:
            raise ValueError(f"cos has {table_size} positions and x {S} rows; it must have at least as many")
        positions = torch.arange(S, device=x.device)
    # [S, R / 2]
    c, s = (table.double()[positions.clamp(0, table_size - 1)] for table in (cos, sin))
    if interleaved:
        a, b = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        a, b = slice(0, pairs), slice(pairs, 2 * pairs)
    x = x.double()
    y = x.clone()
    y[..., a] = x[..., a] * c - x[..., b] * s
    y[..., b] = x[..., b] * c + x[..., a] * s
    in_table = (positions >= 0) & (positions < table_size)
    return y.masked_fill(~in_table.unsqueeze(1), float("nan"))


def apply_rope_qk(q: torch.Tensor, k: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
    """Q [B, H, M, D] and K [B, H_kv, N, D] rotated by `rope`, in fp64.

    Without positions of its own key j is at j and query i at N - M + i, as causality aligns them.

    Raises:
        ValueError: as `apply_rope`; or M is more than N and `rope` has no `q_positions`.
    """
    M, N = q.size(2), k.size(2)
    q_positions = rope.q_positions
    if q_positions is None:
        if M > N:
            raise ValueError(f"rope.q_positions is None, M is {M} and N {N}; without positions M must be at most N")
        if rope.cos.size(0) < N:
            raise ValueError(
                f"rope.q_positions is None, rope.cos has {rope.cos.size(0)} positions and the last query is at "
                f"{N - 1}; the table must hold it"
            )
        q_positions = torch.arange(N - M, N, device=q.device)
    return (
        apply_rope(q, rope.cos, rope.sin, rope.interleaved, q_positions),
        apply_rope(k, rope.cos, rope.sin, rope.interleaved, rope.k_positions),
    )
