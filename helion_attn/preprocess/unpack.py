"""The packed format of dense tensors to 16-bit rows, for a backward pass: rows of Q and K, and V in the order of keys.

Descales, channel factors and the reflection are undone in fp32, and rounded once; means of K stay away, V's is added.
What is rotated goes through `dequantize.unpack`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import by_device
from helion_attn.kernels.lib.reflect import reflect_rows
from helion_attn.numerics import reflected_channels
from helion_attn.types import PackedTensors, Recipe

#: Elements of a tile of rows.
TILE = 8192


class UnpackSpec(NamedTuple):
    """Constants that the kernel of rows is compiled for.

    Attributes:
        n: rows of a tile; they divide those of a block.
        shared: rows of a descale.
        reflected: channels whose reflection is undone.
        factors: 1 to multiply by channel factors, as of K, -1 to divide by them, as of Q; 0 for none.
    """

    n: int
    shared: int
    reflected: int
    factors: int


def unpack_rows(
    x8: torch.Tensor,  # [heads * padded, D_pad]
    descale: torch.Tensor,  # [heads * padded / shared]
    channel_factors: torch.Tensor,  # [kv_heads * D_row]
    out: torch.Tensor,  # [B * H * S, D], written
    heads: int,
    tiles: int,
    padded: int,
    group: int,
    factor_step: int,
    H: int,
    S: int,
    out_b_rows: int,
    out_h_rows: int,
    out_s_rows: int,
    spec: hl.constexpr,  # UnpackSpec
) -> None:
    """Write rows of Q or K, of 16 bits."""
    d = hl.specialize(out.size(1))
    d_pad = hl.specialize(x8.size(1))
    hl.specialize((descale.stride(0), channel_factors.stride(0)))
    hl.specialize((x8.stride(0), x8.stride(1), out.stride(0), out.stride(1)))
    for bh, tile in hl.grid([heads, tiles]):
        rows = tile * spec.n + hl.arange(spec.n)
        cols = hl.arange(d_pad)
        # [n, D_pad]
        x = hl.load(x8, [bh * padded + rows, cols]).to(torch.float32)
        scale = hl.load(descale, [(bh * padded + rows) // spec.shared])
        x = x * scale.unsqueeze(1)
        if spec.reflected > 0:
            x = reflect_rows(x, spec.n, d_pad, spec.reflected)
        if spec.factors != 0:
            factor = hl.load(channel_factors, [(bh // group) * factor_step + cols]).unsqueeze(0)
            if spec.factors > 0:
                x = x * factor
            else:
                x = x / factor
        first = (bh // H) * out_b_rows + (bh % H) * out_h_rows
        inside = (rows < S).unsqueeze(1) & (cols < d).unsqueeze(0)
        hl.store(out, [first + rows * out_s_rows, cols], x.to(out.dtype), extra_mask=inside)


class ValuesSpec(NamedTuple):
    """Constants that the kernel of V is compiled for.

    Attributes:
        d_pad: channels of a block.
    """

    d_pad: int


def unpack_values(
    v8: torch.Tensor,  # [heads * blocks * D_v_pad, bn]
    descale: torch.Tensor,  # [heads * D_v_pad]
    mean: torch.Tensor,  # [heads * D_v_pad]
    out: torch.Tensor,  # [B * H_kv * N, D_v], written
    heads: int,
    blocks: int,
    H: int,
    S: int,
    out_b_rows: int,
    out_h_rows: int,
    out_s_rows: int,
    spec: hl.constexpr,  # ValuesSpec
) -> None:
    """Write V in the order of its keys, of 16 bits."""
    d = hl.specialize(out.size(1))
    bn = hl.specialize(v8.size(1))
    hl.specialize((descale.stride(0), mean.stride(0)))
    hl.specialize((v8.stride(0), v8.stride(1), out.stride(0), out.stride(1)))
    for bh, block in hl.grid([heads, blocks]):
        cols = hl.arange(spec.d_pad)
        stored = hl.arange(bn)
        # [D_v_pad, bn]
        x = hl.load(v8, [(bh * blocks + block) * spec.d_pad + cols, stored]).to(torch.float32)
        x = x * hl.load(descale, [bh * spec.d_pad + cols]).unsqueeze(1)
        x = x + hl.load(mean, [bh * spec.d_pad + cols]).unsqueeze(1)
        # [bn]: at 4t + 2a + b lies key 8a + 2t + b of 16.
        in_16 = stored % 16
        keys = block * bn + stored - in_16 + in_16 // 2 % 2 * 8 + in_16 // 4 * 2 + in_16 % 2
        first = (bh // H) * out_b_rows + (bh % H) * out_h_rows
        inside = (keys < S).unsqueeze(1) & (cols < d).unsqueeze(0)
        hl.store(out, [first + keys * out_s_rows, cols], x.to(out.dtype).permute(1, 0), extra_mask=inside)


rows_kernel = by_device(unpack_rows, Config(num_warps=4, indexing="pointer"))
values_kernel = by_device(unpack_values, Config(num_warps=8, indexing="pointer"))


def takes(packed: PackedTensors, recipe: Recipe) -> bool:
    """Whether the kernels take it: 8 bits, not rotated, blocks as wide as a power of two."""
    widths = packed.q8.size(3), packed.v8.size(2)
    return recipe.bits == (8, 8) and not recipe.hadamard and all(width & (width - 1) == 0 for width in widths)


def launch(
    packed: PackedTensors, M: int, N: int, D: int, D_v: int, recipe: Recipe, dtype: torch.dtype, bshd: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v as 16-bit rows, of tensors that the kernels take.

    Returns:
        q [B, H, M, D], k [B, H_kv, N, D] less its mean, and v [B, H_kv, N, D_v] with its own, of `dtype`; contiguous,
        or as [B, S, heads, head dim] if `bshd`.
    """
    (B, H), H_kv = packed.q_descale.shape[:2], packed.k_descale.size(1)
    is_cuda = packed.q8.is_cuda

    def empty(heads: int, S: int, width: int) -> tuple[torch.Tensor, dict[str, int]]:
        shape = (B, S, heads, width) if bshd else (B, heads, S, width)
        b_rows, h_rows, s_rows = (S * heads, 1, heads) if bshd else (heads * S, S, 1)
        steps = {"out_b_rows": b_rows, "out_h_rows": h_rows, "out_s_rows": s_rows, "H": heads, "S": S}
        return packed.q8.new_empty(shape, dtype=dtype), steps

    def rows(x8: torch.Tensor, descale: torch.Tensor, heads: int, S: int, factors: int) -> torch.Tensor:
        out, steps = empty(heads, S, D)
        _, blocks, block, width = x8.shape
        padded, n = blocks * block, min(block, TILE // width)
        unused = packed.v_mean if packed.channel_factors is None else packed.channel_factors
        rows_kernel(is_cuda).run(
            {
                "x8": x8.view(-1, width),
                "descale": descale.view(-1),
                "channel_factors": unused.view(-1),
                "out": out.view(-1, D),
                "heads": B * heads,
                "tiles": -(-S // n),
                "padded": padded,
                "group": heads // H_kv,
                "factor_step": unused.size(2),
                **steps,
                "spec": UnpackSpec(
                    n=n,
                    shared=B * heads * padded // descale.numel(),
                    reflected=reflected_channels(D) if recipe.reflect else 0,
                    factors=0 if packed.channel_factors is None else factors,
                ),
            }
        )
        return out.transpose(1, 2) if bshd else out

    v, steps = empty(H_kv, N, D_v)
    _, blocks, d_pad, bn = packed.v8.shape
    values_kernel(is_cuda).run(
        {
            "v8": packed.v8.view(-1, bn),
            "descale": packed.v_descale.view(-1),
            "mean": packed.v_mean.view(-1),
            "out": v.view(-1, D_v),
            "heads": B * H_kv,
            "blocks": blocks,
            **steps,
            "spec": ValuesSpec(d_pad=d_pad),
        }
    )
    q = rows(packed.q8, packed.q_descale, H, M, -1)
    k = rows(packed.k8, packed.k_descale, H_kv, N, 1)
    return q, k, v.transpose(1, 2) if bshd else v
