"""All-gather: every rank gets the packed keys of all, in one collective, and attends to them in one launch.

A rank receives `ranks - 1` times its own packed K and V. Queries and outputs stay where they are. Zigzag makes causal
work even: a rank's rows are two chunks, which see as many keys together as those of any other.
"""

from __future__ import annotations

import torch

from helion_attn.distributed import collectives
from helion_attn.distributed.buffer import buffer_for, mean_of_all, write_keys
from helion_attn.distributed.call import Call, RankKV, attend, empty_outputs
from helion_attn.problem import RankChunks
from helion_attn.types import PackedTensors


def run(
    call: Call, packed: PackedTensors, bounds: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of this rank's queries, each of which sees the keys within its `bounds`, if there are any."""
    b = buffer_for(call.B * call.H_kv, call.blocks, call.all_keys, call.packing, call.recipe)
    own = packed.k8.new_empty((1, b.size), dtype=torch.uint8)
    write_keys(own, b, packed)
    rows = collectives.gather(own[0], call.group)
    rank_kv = RankKV(
        rows,
        b,
        RankChunks(**call.own_rows(), **call.keys_of_all(b)),  # type: ignore[arg-type]
        call.k_cut.total,
        mean_of_all(rows, b, call.k_cut, packed.v_mean),
        bounds,
    )
    out, lse = empty_outputs(call, packed.q_descale, call.H, call.M, call.bshd)
    attend(call, packed, rank_kv, out, lse, call.bshd, call.scores.sinks)
    return out, lse
