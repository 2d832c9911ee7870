"""The packed format to 16-bit rows, for a backward pass: rows of Q and K, and V in the order of keys.

Descales, channel factors and the reflection are undone in fp32, and rounded once; means of K stay away, V's is added.
What is rotated goes through `dequantize.unpack`. Of packed sequences lists say where each token lies.
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


class TokenLists(NamedTuple):
    """Where tokens of packed sequences lie in the packed format, int32; all None for dense tensors."""

    q_row: torch.Tensor | None  # [M], of a token of Q its row among those of all blocks
    q_sequence: torch.Tensor | None  # [M], and its sequence
    k_row: torch.Tensor | None  # [N], of K
    k_sequence: torch.Tensor | None  # [N], of K
    k_token: torch.Tensor | None  # [N_blocks * bn], of a row of K and V its token; -1 of none
    k_block_sequence: torch.Tensor | None  # [N_blocks], of a block of K and V its sequence


NO_LISTS = TokenLists(None, None, None, None, None, None)


class UnpackSpec(NamedTuple):
    """Constants that the kernel of rows is compiled for."""

    n: int  # rows of a tile; they divide those of a block
    shared: int  # rows of a descale
    reflected: int  # channels whose reflection is undone
    factors: int  # 1 to multiply by channel factors, as of K, -1 to divide by them, as of Q; 0 for none
    listed: bool  # tokens are of packed sequences


def unpack_rows(
    x8: torch.Tensor,  # [heads * padded, D_pad]
    descale: torch.Tensor,  # [heads * padded / shared]
    channel_factors: torch.Tensor,  # [kv_heads * D_row], if listed of all sequences
    row_of: torch.Tensor,  # [S] if listed
    sequence_of: torch.Tensor,  # [S] if listed
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
    hl.specialize((descale.stride(0), channel_factors.stride(0), row_of.stride(0), sequence_of.stride(0)))
    hl.specialize((x8.stride(0), x8.stride(1), out.stride(0), out.stride(1)))
    for bh, tile in hl.grid([heads, tiles]):
        rows = tile * spec.n + hl.arange(spec.n)
        cols = hl.arange(d_pad)
        if spec.listed:
            source = hl.load(row_of, [rows], extra_mask=rows < S)
        else:
            source = rows + 0
        # [n, D_pad]
        x = hl.load(x8, [bh * padded + source, cols]).to(torch.float32)
        scale = hl.load(descale, [(bh * padded + source) // spec.shared])
        x = x * scale.unsqueeze(1)
        if spec.reflected > 0:
            x = reflect_rows(x, spec.n, d_pad, spec.reflected)
        if spec.factors != 0:
            if spec.listed:
                # [n, D_pad]
                sequence = hl.load(sequence_of, [rows], extra_mask=rows < S)
                head = sequence * (heads // group) + bh // group
                factor = hl.load(channel_factors, [(head * factor_step).unsqueeze(1) + cols.unsqueeze(0)])
            else:
                factor = hl.load(channel_factors, [(bh // group) * factor_step + cols]).unsqueeze(0)
            if spec.factors > 0:
                x = x * factor
            else:
                x = x / factor
        first = (bh // H) * out_b_rows + (bh % H) * out_h_rows
        inside = (rows < S).unsqueeze(1) & (cols < d).unsqueeze(0)
        hl.store(out, [first + rows * out_s_rows, cols], x.to(out.dtype), extra_mask=inside)


class ValuesSpec(NamedTuple):
    """Constants that the kernel of V is compiled for."""

    d_pad: int  # channels of a block
    listed: bool  # tokens are of packed sequences, whose blocks have descales each


def unpack_values(
    v8: torch.Tensor,  # [heads * blocks * D_v_pad, bn]
    descale: torch.Tensor,  # [heads * D_v_pad], if listed [heads * blocks * D_v_pad]
    mean: torch.Tensor,  # [heads * D_v_pad], if listed of all sequences
    token_of: torch.Tensor,  # [blocks * bn] if listed
    sequence_of_block: torch.Tensor,  # [blocks] if listed
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
    hl.specialize((descale.stride(0), mean.stride(0), token_of.stride(0), sequence_of_block.stride(0)))
    hl.specialize((v8.stride(0), v8.stride(1), out.stride(0), out.stride(1)))
    for bh, block in hl.grid([heads, blocks]):
        cols = hl.arange(spec.d_pad)
        stored = hl.arange(bn)
        # [D_v_pad, bn]
        x = hl.load(v8, [(bh * blocks + block) * spec.d_pad + cols, stored]).to(torch.float32)
        if spec.listed:
            of_descales = bh * blocks + block
            of_mean = hl.load(sequence_of_block, [block]) * heads + bh
        else:
            of_descales = bh + 0
            of_mean = bh + 0
        x = x * hl.load(descale, [of_descales * spec.d_pad + cols]).unsqueeze(1)
        x = x + hl.load(mean, [of_mean * spec.d_pad + cols]).unsqueeze(1)
        # [bn]: at 4t + 2a + b lies key 8a + 2t + b of 16.
        in_16 = stored % 16
        keys = block * bn + stored - in_16 + in_16 // 2 % 2 * 8 + in_16 // 4 * 2 + in_16 % 2
        if spec.listed:
            keys = hl.load(token_of, [keys])
        first = (bh // H) * out_b_rows + (bh % H) * out_h_rows
        inside = ((keys >= 0) & (keys < S)).unsqueeze(1) & (cols < d).unsqueeze(0)
        hl.store(out, [first + keys * out_s_rows, cols], x.to(out.dtype).permute(1, 0), extra_mask=inside)


rows_kernel = by_device(unpack_rows, Config(num_warps=4, indexing="pointer"))
values_kernel = by_device(unpack_values, Config(num_warps=8, indexing="pointer"))


def takes(packed: PackedTensors, recipe: Recipe) -> bool:
    """Whether the kernels take it: 8 bits, not rotated, blocks as wide as a power of two."""
    widths = packed.q8.size(3), packed.v8.size(2)
    return recipe.bits == (8, 8) and not recipe.hadamard and all(width & (width - 1) == 0 for width in widths)


def launch(
    packed: PackedTensors,
    M: int,
    N: int,
    D: int,
    D_v: int,
    recipe: Recipe,
    dtype: torch.dtype,
    bshd: bool,
    lists: TokenLists = NO_LISTS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v as 16-bit rows, of tensors that the kernels take.

    Returns:
        q [B, H, M, D], k [B, H_kv, N, D] less its mean, and v [B, H_kv, N, D_v] with its own, of `dtype`; contiguous,
        or as [B, S, heads, head dim] if `bshd`. Of packed sequences B is 1; of tokens of none V is 0, Q and K finite.
    """
    (B, H), H_kv = packed.q_descale.shape[:2], packed.k_descale.size(1)
    is_cuda, listed = packed.q8.is_cuda, lists.q_row is not None

    def empty(heads: int, S: int, width: int) -> tuple[torch.Tensor, dict[str, int]]:
        shape = (B, S, heads, width) if bshd else (B, heads, S, width)
        b_rows, h_rows, s_rows = (S * heads, 1, heads) if bshd else (heads * S, S, 1)
        steps = {"out_b_rows": b_rows, "out_h_rows": h_rows, "out_s_rows": s_rows, "H": heads, "S": S}
        return packed.q8.new_empty(shape, dtype=dtype), steps

    def rows(
        x8: torch.Tensor,
        descale: torch.Tensor,
        heads: int,
        S: int,
        factors: int,
        row_of: torch.Tensor | None,
        sequence_of: torch.Tensor | None,
    ) -> torch.Tensor:
        out, steps = empty(heads, S, D)
        _, blocks, block, width = x8.shape
        padded, n = blocks * block, min(block, TILE // width)
        unused = packed.v_mean if packed.channel_factors is None else packed.channel_factors
        rows_kernel(is_cuda).run(
            {
                "x8": x8.view(-1, width),
                "descale": descale.view(-1),
                "channel_factors": unused.view(-1),
                "row_of": unused.view(-1) if row_of is None else row_of,
                "sequence_of": unused.view(-1) if sequence_of is None else sequence_of,
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
                    listed=listed,
                ),
            }
        )
        return out.transpose(1, 2) if bshd else out

    v, steps = empty(H_kv, N, D_v)
    if listed:
        # A kernel may read those of tokens of no sequence, and multiply them by 0.
        v = v.new_zeros(v.shape)
    _, blocks, d_pad, bn = packed.v8.shape
    unused = packed.v_mean.view(-1)
    values_kernel(is_cuda).run(
        {
            "v8": packed.v8.view(-1, bn),
            "descale": packed.v_descale.view(-1),
            "mean": packed.v_mean.view(-1),
            "token_of": unused if lists.k_token is None else lists.k_token,
            "sequence_of_block": unused if lists.k_block_sequence is None else lists.k_block_sequence,
            "out": v.view(-1, D_v),
            "heads": B * H_kv,
            "blocks": blocks,
            **steps,
            "spec": ValuesSpec(d_pad=d_pad, listed=listed),
        }
    )
    q = rows(packed.q8, packed.q_descale, H, M, -1, lists.q_row, lists.q_sequence)
    k = rows(packed.k8, packed.k_descale, H_kv, N, 1, lists.k_row, lists.k_sequence)
    return q, k, v.transpose(1, 2) if bshd else v
