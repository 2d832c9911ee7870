"""Ring: packed keys go round, while those that came last are attended to; results over different keys are merged.

Rank r has the keys of rank r - i in step i: RingAttention (Liu et al., arXiv:2310.01889). A rank holds the keys of two
others at a time, besides its own, whatever the number of ranks. Results are merged in fp32 by their lse; with causal
masks and windows, keys that none of a rank's rows sees are passed on and not attended to. The order of steps is fixed,
so that results are bitwise equal run to run.

Every rank's keys may be of any length, and its mean of V the one that its own rounding has.
"""

from __future__ import annotations

import torch

from helion_attn import ops
from helion_attn.distributed import collectives
from helion_attn.distributed.buffer import Buffer, buffer_for, mean_of_all, write_keys
from helion_attn.distributed.call import Call, RankKV, attend, empty_outputs, rank_steps
from helion_attn.distributed.cut import Cut
from helion_attn.problem import MergeArgs, RankChunks
from helion_attn.types import PackedTensors


def sees(call: Call, source: int) -> bool:
    """Whether any of this rank's rows sees a key of rank `source`."""
    for rows in call.q_cut.chunks(call.rank):
        first = rows.begin + call.more_keys
        last = first + rows.size - 1
        for keys in call.k_cut.chunks(source):
            before_right = call.scores.right < 0 or keys.begin <= last + call.scores.right
            after_left = call.scores.left < 0 or keys.begin + keys.size - 1 >= first - call.scores.left
            if before_right and after_left:
                return True
    return False


def rank_kv_of(call: Call, source: int, rows: torch.Tensor, own_mean: torch.Tensor) -> RankKV:
    """The keys of rank `source`, whose buffer `rows` [1, size] is."""
    b = buffer_of(call)
    of_source = call.k_cut.chunks(source)
    first, n = of_source[0]
    own_rows = call.own_rows()
    own_rows["row_first"] -= first
    chunks = RankChunks(
        **own_rows,
        key_chunks=2 if call.k_cut.zigzag else 1,
        key_chunk_blocks=-(-n // call.packing.bn),
        key_chunk_len=n,
        key_step=max(of_source[-1].begin - first, n),
        ranks=1,
        zigzag=call.k_cut.zigzag,
        **rank_steps(b),
    )
    mean = mean_of_all(rows, b, Cut((call.k_cut.lengths[source],), False), own_mean)
    return RankKV(rows, b, chunks, of_source[-1].begin + of_source[-1].size - first, mean)


def buffer_of(call: Call) -> Buffer:
    """The layout of a rank's buffer."""
    return buffer_for(call.B * call.H_kv, call.blocks, call.all_keys, call.packing, call.recipe)


def run(call: Call, packed: PackedTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of this rank's queries."""
    rank, ranks = call.rank, call.group.size()
    # This rank's own keys come first, seen or not: a row that sees none has a result, too.
    sources = [(rank - i) % ranks for i in range(ranks)]
    seen = [source for i, source in enumerate(sources) if i == 0 or sees(call, source)]
    b = buffer_of(call)
    held = packed.k8.new_empty((1, b.size), dtype=torch.uint8)
    write_keys(held, b, packed)
    received = [torch.empty_like(held) for _ in range(min(ranks - 1, 2))]
    out, lse = empty_outputs(call, packed.q_descale, call.H, call.M, call.bshd)
    if len(seen) == 1:
        both, both_lse = out, lse
    else:
        # The result so far, and that of the next keys.
        both = lse.new_empty((2, *lse.shape, call.D_v))
        both_lse = lse.new_empty((2, *lse.shape))
    for i, source in enumerate(sources):
        works = []
        if i + 1 < ranks:
            into = received[i % 2]
            works = collectives.pass_on(held, into, call.group)
        if source in seen:
            rank_kv = rank_kv_of(call, source, held, packed.v_mean)
            if len(seen) == 1:
                attend(call, packed, rank_kv, out, lse, call.bshd, call.scores.sinks)
            else:
                slot = min(i, 1)
                attend(call, packed, rank_kv, both[slot], both_lse[slot], False, None)
                if slot:
                    both, both_lse = merged(call, both, both_lse, out, lse, source == seen[-1])
        for work in works:
            work.wait()
        if works:
            held = into
    return out, lse


def merged(
    call: Call, both: torch.Tensor, both_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, last: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results merged: into the first of two that it returns, or into `out` and `lse` if it is the last."""
    if last:
        ops.merge_results(MergeArgs(both, both_lse, call.scores.sinks, out, lse, call.bshd))
        return both, both_lse
    following, following_lse = torch.empty_like(both), torch.empty_like(both_lse)
    ops.merge_results(MergeArgs(both, both_lse, None, following[0], following_lse[0], False))
    return following, following_lse
