"""Packed sequences over several ranks: all-gather, and for every row the positions from and up to which it sees keys.

The tokens of a batch are one long sequence to the ranks, cut anywhere: `preprocess.sequences` would begin a block with
every sequence, and a rank then could not tell by arithmetic where another's blocks lie. So a block may hold keys of
several sequences, and a query block rows of several; a launch walks the key blocks that any of its rows sees, and masks
those that not all do. What is subtracted from K and V is that of all tokens of the batch, and so are the factors of
channels.
"""

from __future__ import annotations

import torch

from helion_attn.distributed.call import Call


def bounds_of_rows(
    call: Call, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(row_bounds, block_bounds, in_sequence)` of this rank's rows; `in_sequence` [M], those that are of a sequence.

    The host reads nothing. Where a table descends, or leaves the range of tokens, no row is of any sequence.
    """
    (first, M), bm = call.q_cut.chunks(call.rank)[0], call.packing.bm
    tables = ((cu_seqlens_q, call.q_cut.total), (cu_seqlens_k, call.k_cut.total))
    valid = torch.stack([(t.diff() >= 0).all() & (t[0] >= 0) & (t[-1] <= total) for t, total in tables]).all()
    # Rows beyond the last see what that sees. [M_blocks * bm]
    rows = first + torch.arange(-(-M // bm) * bm, device=cu_seqlens_q.device, dtype=torch.int32).clamp_max(M - 1)
    sequence = torch.searchsorted(cu_seqlens_q, rows, right=True) - 1
    in_sequence = (sequence >= 0) & (sequence < cu_seqlens_q.size(0) - 1) & valid
    sequence = torch.where(in_sequence, sequence, 0)
    begin, end = cu_seqlens_k[sequence], cu_seqlens_k[sequence + 1]
    if causal:
        # Bottom-right: the last row sees the last key.
        end = torch.maximum(begin, torch.minimum(end, end - cu_seqlens_q[sequence + 1] + rows + 1))
    bounds = torch.where(in_sequence, torch.stack([begin, end]), 0)
    of_blocks = bounds.view(2, -1, bm)
    least, most = of_blocks.amin(2), of_blocks.amax(2)
    block_bounds = torch.stack(
        [
            blocks_before(call, least[0], 0),
            blocks_before(call, most[0], call.packing.bn - 1),
            blocks_before(call, least[1], 0),
            blocks_before(call, most[1], call.packing.bn - 1),
        ],
        1,
    )
    return bounds.to(torch.int32), block_bounds.to(torch.int32), in_sequence[:M]


def blocks_before(call: Call, positions: torch.Tensor, round_up: int) -> torch.Tensor:
    """Blocks of keys before each position, as `kernels.lib.rank_chunks.blocks_before` counts them in a kernel."""
    n, bn = call.k_cut.chunk_size, call.packing.bn
    chunk = (positions // n).clamp_max(call.k_cut.ranks - 1)
    chunk_blocks = -(-n // bn)
    return chunk * chunk_blocks + ((positions - chunk * n + round_up) // bn).clamp_max(chunk_blocks)
