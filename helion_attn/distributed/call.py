"""A checked call over several ranks, as the strategies take it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from helion_attn import ops
from helion_attn.configs import Packing
from helion_attn.distributed.buffer import Buffer, descales_in_order
from helion_attn.distributed.cut import Cut
from helion_attn.ops.attention import empty_out_and_lse
from helion_attn.options import ScoreOptions
from helion_attn.problem import MultiRankArgs, RankChunks
from helion_attn.types import PackedTensors, Recipe
from helion_attn.validate.distributed import check_places


@dataclass(frozen=True, eq=False)  # of tensors
class Call:
    """A call on one rank."""

    group: dist.ProcessGroup  # of the ranks
    q_cut: Cut  # which queries they hold
    k_cut: Cut  # which keys
    B: int  # and H, H_kv, D, D_v: sizes
    H: int
    H_kv: int
    D: int
    D_v: int
    packing: Packing  # block sizes and padding
    recipe: Recipe  # and the rest, as in `AttentionArgs`
    scores: ScoreOptions
    bshd: bool
    out_dtype: torch.dtype
    return_lse: bool  # whether somebody sees `lse`
    all_keys: int  # that V's mean is corrected for, if they are many: of all ranks; 0 if rows do not see the same

    @property
    def rank(self) -> int:
        """This rank's."""
        return self.group.rank()

    @property
    def M(self) -> int:
        """Queries of this rank."""
        return self.q_cut.lengths[self.rank]

    @property
    def more_keys(self) -> int:
        """How much later a query's own position is among the keys than among the queries: bottom-right alignment."""
        return self.k_cut.total - self.q_cut.total

    @property
    def blocks(self) -> int:
        """Key blocks of a head for which every rank has room."""
        return -(-self.k_cut.room // self.packing.bn)

    def check_places(self, ranks: int) -> None:
        """Raise ValueError if a launch over the keys of so many ranks could not find them."""
        blocks = -(-self.k_cut.chunk_size // self.packing.bn)
        check_places(ranks * (2 if self.k_cut.zigzag else 1), blocks, self.k_cut.lengths)

    def own_rows(self) -> dict[str, int]:
        """Where this rank's rows lie, as `RankChunks` has it."""
        chunks = self.q_cut.chunks(self.rank)
        n = chunks[0].size
        return {
            "row_chunk_blocks": -(-n // self.packing.bm),
            "row_chunk_len": n,
            "row_first": chunks[0].begin + self.more_keys,
            "row_step": chunks[-1].begin - chunks[0].begin,
        }

    def keys_of_all(self, b: Buffer) -> dict[str, int | bool]:
        """Where the keys of all ranks lie in a buffer that was gathered."""
        n, ranks, zigzag = self.k_cut.chunk_size, self.k_cut.ranks, self.k_cut.zigzag
        return {
            "key_chunks": 2 * ranks if zigzag else ranks,
            "key_chunk_blocks": -(-n // self.packing.bn),
            "key_chunk_len": n,
            "key_step": n,
            "ranks": ranks,
            "zigzag": zigzag,
            **rank_steps(b),
        }


def rank_steps(b: Buffer) -> dict[str, int]:
    """How far apart consecutive ranks lie."""
    return {
        "head_blocks": b.blocks,
        "k_rank_step": b.size // b.k_block,
        "v_rank_step": b.size // b.v_block,
    }


class RankKV(NamedTuple):
    """Keys that one launch attends to, and the rows that do."""

    rows: torch.Tensor  # uint8 [ranks, size], a buffer of each rank
    buffer: Buffer  # what lies where
    chunks: RankChunks  # where keys and rows lie
    n_len: int  # the position where keys end
    v_mean: torch.Tensor  # [B, H_kv, D_v_pad], what V's dequantised entries are added to
    # Of rows and of blocks, as `MultiRankArgs` has them, or None.
    bounds: tuple[torch.Tensor, torch.Tensor] | None = None


def attend(
    call: Call,
    packed: PackedTensors,
    rank_kv: RankKV,
    out: torch.Tensor,
    lse: torch.Tensor,
    bshd: bool,
    sinks: torch.Tensor | None,
) -> None:
    """Write what `packed` gets of the keys of a `RankKV` into `out` and `lse`, as `MultiRankArgs` has them."""
    ops.attention_multi_rank(
        MultiRankArgs(
            q8=packed.q8,
            q_descale=packed.q_descale,
            lse_shift=packed.lse_shift,
            gathered=rank_kv.rows,
            k_descale=descales_in_order(rank_kv.rows, rank_kv.buffer, rank_kv.chunks, call.recipe),
            v_descale=packed.v_descale,
            v_mean=rank_kv.v_mean,
            out=out,
            lse=lse,
            row_bounds=None if rank_kv.bounds is None else rank_kv.bounds[0],
            block_bounds=None if rank_kv.bounds is None else rank_kv.bounds[1],
            chunks=rank_kv.chunks,
            v_offset=rank_kv.buffer.v_offset,
            n_len=rank_kv.n_len,
            d=call.D,
            d_v=call.D_v,
            scores=replace(call.scores, sinks=sinks),
            bshd=bshd,
            recipe=call.recipe,
        )
    )


def empty_outputs(
    call: Call, like: torch.Tensor, heads: int, rows: int, bshd: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out`, in the call's dtype, and `lse` for so many heads and rows."""
    return empty_out_and_lse(like, (call.B, heads, rows), call.D_v, bshd, call.out_dtype)
