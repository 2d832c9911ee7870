"""The arguments of the attention operations, and what the launchers of their kernels make of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.numerics import LOG2E
from helion_attn.types import PackedTensors, PagedKVCache, Recipe


class RopeArguments(NamedTuple):
    """The fields of a `Rope`, or its absence, as operations take it."""

    cos: torch.Tensor | None
    sin: torch.Tensor | None
    q_positions: torch.Tensor | None
    k_positions: torch.Tensor | None
    interleaved: bool


NO_ROPE_ARGUMENTS = RopeArguments(cos=None, sin=None, q_positions=None, k_positions=None, interleaved=False)


class AttentionArguments(NamedTuple):
    """Attention over packed tensors: which scores there are, how they are scaled, and where their output goes.

    Attributes:
        packed: Q, K and V.
        sinks: fp32 [H], or None.
        m_len: M, the true query length; of packed sequences, of all.
        n_len: N, the true key length; likewise.
        d: head dim of the unpadded Q and K.
        d_v: head dim of the unpadded V, and of the output.
        left: row i sees keys j >= i + N - M - left; all of them if it is negative.
        right: row i sees keys j <= i + N - M + right; likewise. Causal: 0.
        sm_scale: multiplies q k^T; not negative.
        softcap: scores become `softcap * tanh(score / softcap)`, unless it is None.
        bshd: the layout of the output.
        out_dtype: of the output.
        recipe: how the tensors were quantised, and P is.
        num_splits: runs of the keys, a program each, whose results are merged; None to choose.
    """

    packed: PackedTensors
    sinks: torch.Tensor | None
    m_len: int
    n_len: int
    d: int
    d_v: int
    left: int
    right: int
    sm_scale: float
    softcap: float | None
    bshd: bool
    out_dtype: torch.dtype
    recipe: Recipe
    num_splits: int | None

    def sizes(self) -> dict[str, int]:
        """Lengths, heads, and how the rows of the output lie, as the kernels take them."""
        H, H_kv = self.packed.q_descale.size(1), self.packed.v_mean.size(1)
        return {
            "m_len": self.m_len,
            "n_len": self.n_len,
            "heads": H,
            "group": H // H_kv,
            "out_head_step": 1 if self.bshd else self.m_len,
            "out_row_step": H if self.bshd else 1,
            # An edge further away hides nothing, and might not fit 32 bits.
            "left": min(self.left, self.n_len),
            "right": min(self.right, self.m_len),
        }

    def choices(self) -> dict[str, bool]:
        """Which specialisation of the mask, the softcap and the descales it takes."""
        return {
            "q_row_descales": self.recipe.q_scales == "token",
            "k_block_descales": self.recipe.k_scales == "block",
            "v_channel_descales": self.recipe.v_scales == "channel",
            "shift_lse": self.packed.lse_shift is not None,
            "has_left": self.left >= 0,
            "has_right": self.right >= 0,
            "has_softcap": self.softcap is not None,
        }

    @property
    def rows_differ(self) -> bool:
        """Whether the mask leaves some rows many more keys than others, as that of causal attention does.

        A window to the left is taken to leave most rows as many.
        """
        return self.right >= 0 and self.left < 0


class GatheredParts(NamedTuple):
    """Where keys and rows lie whose parts come from several ranks, as `kernels.lib.gathered` has it.

    Attributes:
        row_part_blocks: query blocks of a part of the rows.
        row_part_len: its rows.
        row_first: the first row's position.
        row_step: from the first row of a part to that of the next, in positions.
        key_parts: parts of the keys.
        key_part_blocks: key blocks of a part.
        key_part_len: its keys.
        key_step: from the first key of a part to that of the next, in positions.
        ranks: whose keys there are.
        head_blocks: blocks of a head on a rank.
        k_rank_step: from a rank's blocks of K to those of the next, in blocks; and so `v_rank_step`.
        v_rank_step: likewise of V.
        mirrored: a rank has part r and part `2 * ranks - 1 - r`, in place of part r alone; kernels have it in
            their spec.
    """

    row_part_blocks: int
    row_part_len: int
    row_first: int
    row_step: int
    key_parts: int
    key_part_blocks: int
    key_part_len: int
    key_step: int
    ranks: int
    head_blocks: int
    k_rank_step: int
    v_rank_step: int
    mirrored: bool


#: Of a launch that has no parts.
NO_PARTS = GatheredParts(1, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 0, False)


def magic(divisor: int) -> int:
    """The int32 that `part_of_block` multiplies by, in place of a division (Robison, ARITH 2005).

    The quotient is right up to where `parts_are_told_apart` says.
    """
    factor = (2**32 - 1) // divisor
    return factor - 2**32 if factor >= 2**31 else factor


def parts_are_told_apart(parts: int, blocks: int) -> bool:
    """Whether every block of `parts` parts of `blocks` blocks is found in its own part, by `magic`.

    Least where it is tightest, at the first block of a part q: (q n + 1) ((2**32 - 1) // n) >= 2**32 q, for n blocks.
    """
    return (parts - 1) * blocks**2 + blocks <= 2**32


class GatheredArguments(NamedTuple):
    """Attention over keys of several ranks, into tensors that are there.

    Attributes:
        q8: [B * H, M_blocks, bm, D_pad], and so q_descale and lse_shift, of `QuantizedQKV`.
        q_descale: [B, H, M_blocks, bm].
        lse_shift: [B, H, M_blocks, bm], or None.
        gathered: uint8 [ranks, bytes], a rank's packed K and V each, as `distributed.buffer` lays them.
        k_descale: fp32 [B * H_kv * key blocks] in the order of the parts, or [B * H_kv], of all ranks.
        v_descale: [B, H_kv, D_v_pad], of all ranks.
        v_mean: [B, H_kv, D_v_pad], likewise.
        sinks: fp32 [H], or None.
        out: contiguous [B, H, M, D_v], or [B, M, H, D_v] if `bshd`, written; M the rows of all parts.
        lse: fp32 [B, H, M], written.
        row_bounds: int32 [2, M_blocks * bm], from and up to which position each row sees keys, or None.
        block_bounds: int32 [M_blocks, 4], with `row_bounds`: of each query block, from which key block on any row sees
            a key, from which on and up to which all rows see all keys, and up to which any row sees one.
        parts: where keys and rows lie.
        v_offset: bytes of a rank's row before V.
        n_len: the position where keys end.
        d: and the rest, as in `AttentionArguments`.
    """

    q8: torch.Tensor
    q_descale: torch.Tensor
    lse_shift: torch.Tensor | None
    gathered: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    v_mean: torch.Tensor
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    row_bounds: torch.Tensor | None
    block_bounds: torch.Tensor | None
    parts: GatheredParts
    v_offset: int
    n_len: int
    d: int
    d_v: int
    left: int
    right: int
    sm_scale: float
    softcap: float | None
    bshd: bool
    recipe: Recipe


class MergeArguments(NamedTuple):
    """Two results over different keys, into one.

    Attributes:
        parts: fp32 [2, B, H, M, D_v].
        part_lse: fp32 [2, B, H, M].
        sinks: fp32 [H], or None.
        out: contiguous [B, H, M, D_v], or [B, M, H, D_v] if `bshd`, written.
        lse: fp32 [B, H, M], written.
        bshd: the layout of `out`.
    """

    parts: torch.Tensor
    part_lse: torch.Tensor
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    bshd: bool


class DecodeArguments(NamedTuple):
    """Attention over a paged cache.

    Attributes:
        q: [B, H, M, D], bf16, fp16 or fp32, any strides.
        cache: keys and values.
        block_table: int32 [B, max_pages].
        cache_seqlens: int32 [B].
        sinks: fp32 [H], or None.
        splits: runs of a sequence's pages; None for the choice by shapes and GPU.
        left: and the rest, as in `AttentionArguments`.
    """

    q: torch.Tensor
    cache: PagedKVCache
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    sinks: torch.Tensor | None
    splits: int | None
    left: int
    right: int
    sm_scale: float
    softcap: float | None
    bshd: bool
    out_dtype: torch.dtype


def score_scales(sm_scale: float, softcap: float | None) -> dict[str, float]:
    """What scores are multiplied by: dequantised, times `qk_scale`, they are in base 2.

    With a softcap, `tanh` of them times `softcap_log2` is.
    """
    if softcap is None:
        return {"qk_scale": sm_scale * LOG2E, "softcap_log2": 1.0}
    return {"qk_scale": sm_scale / softcap, "softcap_log2": softcap * LOG2E}
