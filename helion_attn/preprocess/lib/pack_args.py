"""What `pack_kv` and `pack_q` are both given."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from helion_attn.kernels.lib.norm import Norm, Norms
from helion_attn.kernels.lib.reflect import reflected_channels
from helion_attn.kernels.lib.rope import RopeTables
from helion_attn.kernels.lib.specs import RowSpec
from helion_attn.kernels.lib.strided import StridedQKV
from helion_attn.preprocess.lib.hadamard import rotation
from helion_attn.preprocess.lib.tiling import Tiling
from helion_attn.preprocess.sample import Sampled
from helion_attn.preprocess.sequences import Sequences
from helion_attn.types import Recipe


class PackArgs(NamedTuple):
    """Q, K and V, and how they are packed.

    Attributes:
        source: Q, K and V.
        norms: of rows of Q and K.
        rope: rotations by position.
        stats: the sample's: means, channel factors, V's largest.
        bm: rows of a block of Q.
        bn: keys of a block of K and V.
        recipe: how numbers become 8 or 16 bits.
        tiling: how the kernels cut their work.
        sequences: where those of a packed batch lie, or None. Then Q, K and V are [1, heads, tokens, head dim], and
            `stats` has every sequence's.
    """

    source: StridedQKV
    norms: Norms
    rope: RopeTables
    stats: Sampled
    bm: int
    bn: int
    recipe: Recipe
    tiling: Tiling
    sequences: Sequences | None

    @property
    def is_cuda(self) -> bool:
        """Whether kernels are compiled."""
        return self.stats.v_mean.is_cuda

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor where Q, K and V are."""
        return self.stats.v_mean.new_empty(shape, dtype=dtype)

    def grid(self, heads: int, length: int, block: int, table: str) -> tuple[torch.Tensor, int, int, int]:
        """The blocks' table, and what is packed: heads, blocks of each, rows. Of sequences each block is a head."""
        if self.sequences is None:
            return self.empty(1, 1, dtype=torch.int32), self.source.B * heads, -(-length // block), length
        blocks: torch.Tensor = getattr(self.sequences, table)
        return blocks, heads * blocks.size(0), 1, block

    def arguments(self) -> dict[str, Any]:
        """Arguments of both kernels, by name."""
        source, rope, stats, recipe = self.source, self.rope, self.stats, self.recipe
        signs, matrix, norm = self.empty(1), self.empty(1, 1), 1.0
        if recipe.hadamard:
            signs, matrix, norm = rotation(source.D, source.D_row, recipe.hadamard_seed, stats.v_mean.device)
        return {
            "cos": rope.cos,
            "sin": rope.sin,
            "table_rows": rope.table_rows,
            "k_mean": stats.k_mean.view(-1),
            "channel_factors": stats.channel_factors.view(-1),
            "signs": signs,
            "rotation_matrix": matrix,
            "H_kv": source.H_kv,
            "d_at_run_time": source.D,
            "norm": norm,
        }

    def spec_fields(self) -> dict[str, Any]:
        """Fields of both kernels' specs, by name."""
        return {
            "unit": self.source.unit,
            "d": self.source.D,
            "qk_largest": self.recipe.qk_largest(self.source.D, self.source.D_v),
            "varlen": self.sequences is not None,
            "wide": self.sequences is not None and self.source.wide,
        }

    def row_spec(self, norm: Norm, d_step: int, explicit_positions: bool) -> RowSpec:
        """What is done to rows of Q and K alike."""
        source, rope, recipe = self.source, self.rope, self.recipe
        return RowSpec(
            d_row=source.D_row,
            d_step=d_step,
            rotary=rope.rotary,
            pairing=rope.pairing,
            explicit_positions=explicit_positions,
            normed=norm.normed,
            eps=norm.eps,
            dot_mean=False,
            subtract_mean=False,
            equalise=recipe.equalise,
            divide=False,
            vectors_first=False,
            hadamard=recipe.hadamard,
            rotate_first=False,
            two_terms=self.tiling.two_terms,
            reflected=reflected_channels(source.D) if recipe.reflect else 0,
            is_cuda=self.is_cuda,
        )
