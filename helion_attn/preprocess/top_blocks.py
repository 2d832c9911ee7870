"""The key blocks that hold most of a row block's probability, as the means of their queries and keys have it.

A row of scores is a row block's mean query times the mean keys. Scores are ordered by their bits, so that what is kept
is what passes a threshold, and the threshold is found bit by bit: the largest one that leaves as many blocks as are to
be kept, or as much of the probability. Of blocks at the threshold, the first are kept.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import Runner, compiled, interpreted
from helion_attn.configs import MASK_BLOCK
from helion_attn.kernels.lib.scalars import int32
from helion_attn.numerics import FP32_TINY
from helion_attn.preprocess import block_means
from helion_attn.problem import BlockMeansArgs, TopBlocksArgs

#: Row blocks of a program, key blocks of a product, and its channels.
ROWS, BLOCKS, CHANNELS = 16, 64, 64

#: Key blocks whose scores registers hold, at most, all of them or a step's; and of how many a warp has a share.
MOST_AT_ONCE, OF_A_WARP = 512, 64

#: A share of the blocks is a number of these.
SHARE_LOG2 = 40

#: What is added before a product of a share and a count is rounded down: what is 1e-6 above a whole number is that.
ROUND_UP = 2**SHARE_LOG2 - 1 - 2**SHARE_LOG2 // 10**6


class TopBlocksSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    rows: int  # row blocks of a program
    blocks: int  # key blocks of a product
    channels: int  # of it
    whole_channels: bool  # D is a multiple
    at_once: int  # key blocks whose scores registers hold
    all_at_once: bool  # there are no more
    causal: bool  # blocks behind the diagonal are not kept
    by_mass: bool  # a share of the probability is kept; otherwise one of the blocks
    is_cuda: bool  # the kernel is compiled; otherwise interpreted


def top_blocks(
    mean_q: torch.Tensor,  # [B * H * M_blocks, D]
    mean_k: torch.Tensor,  # [B * H_kv * N_blocks, D]
    scores: torch.Tensor,  # [B * H * M_blocks, N_blocks], written
    kept: torch.Tensor,  # [B * H * M_blocks, N_blocks], written
    heads: int,
    group: int,
    m_blocks: int,
    n_blocks: int,
    sink_blocks: int,
    local_blocks: int,
    enters: int,
    leaves: int,
    share: int,
    mass: float,
    scale: float,
    spec: hl.constexpr,  # TopBlocksSpec
) -> None:
    """Write 1 for each block that is kept, and 0 for others.

    The diagonal enters row block i at key block `i + enters`, and leaves it at `i + leaves`.
    """
    D = hl.specialize(mean_q.size(1))
    # Known strides make loads wide.
    hl.specialize((mean_q.stride(0), mean_q.stride(1), mean_k.stride(0), mean_k.stride(1)))
    for head, part in hl.grid([heads, (m_blocks + spec.rows - 1) // spec.rows]):
        # [rows]
        row = part * spec.rows + hl.arange(spec.rows)
        is_row = (row < m_blocks).unsqueeze(1)
        at = head * m_blocks + row
        first_key = head // group * n_blocks
        visible = hl.full([spec.rows], n_blocks, dtype=torch.int32)
        if spec.causal:
            visible = torch.clamp_min(torch.minimum(visible, (row + leaves + 1).to(torch.int32)), 0)
        visible = visible.unsqueeze(1)
        largest = hl.full([spec.rows], float("-inf"), dtype=torch.float32)
        for score_step in hl.grid((n_blocks + spec.blocks - 1) // spec.blocks):
            block = score_step * spec.blocks + hl.arange(spec.blocks)
            # [rows, blocks]
            s = hl.zeros([spec.rows, spec.blocks], dtype=torch.float32)
            for d_step in hl.grid((D + spec.channels - 1) // spec.channels):
                cols = d_step * spec.channels + hl.arange(spec.channels)
                q_mask, k_mask = is_row, (block < n_blocks).unsqueeze(1)
                # A mask of channels makes loads narrow.
                if not spec.whole_channels:
                    inside = (cols < D).unsqueeze(0)
                    q_mask, k_mask = q_mask & inside, k_mask & inside
                q = hl.load(mean_q, [at, cols], extra_mask=q_mask)
                k = hl.load(mean_k, [first_key + block, cols], extra_mask=k_mask)
                s = s + torch.matmul(q, k.transpose(0, 1))
            s = s * scale
            hl.store(scores, [at, block], s, extra_mask=is_row & (block < n_blocks).unsqueeze(0))
            seen = torch.where(block.unsqueeze(0) < visible, s, float("-inf"))
            largest = torch.maximum(largest, torch.amax(seen, 1))
        if spec.is_cuda:
            # All have written the scores.
            hl.inline_triton("tl.debug_barrier()", args=(), output_like=None)
        steps = (n_blocks + spec.at_once - 1) // spec.at_once
        if spec.all_at_once:
            all_keys, all_weights = keys_and_weights(scores, at, is_row, 0, n_blocks, visible, largest, spec)
        # [rows]: how much of what blocks weigh is kept.
        if spec.by_mass:
            total = hl.zeros([spec.rows, spec.at_once], dtype=torch.float32)
            for total_step in hl.grid(steps):
                keys, weights = keys_and_weights(scores, at, is_row, total_step, n_blocks, visible, largest, spec)
                total = total + torch.where(keys > LEAST, weights, 0.0)
            target = total.sum(1) * mass
        else:
            count = (visible.squeeze(1).to(torch.int64) * share + ROUND_UP) >> SHARE_LOG2
            target = torch.clamp_min(count, 1).to(torch.float32)
        threshold = hl.full([spec.rows], LEAST, dtype=torch.int32)
        for bit in hl.grid(32):
            higher = threshold ^ (int32(1) << int32(31 - bit))
            # [rows, at_once], summed once
            if spec.all_at_once:
                held = torch.where(all_keys >= higher.unsqueeze(1), all_weights, 0.0)
            else:
                held = hl.zeros([spec.rows, spec.at_once], dtype=torch.float32)
                for step in hl.grid(steps):
                    keys, weights = keys_and_weights(scores, at, is_row, step, n_blocks, visible, largest, spec)
                    held = held + torch.where(keys >= higher.unsqueeze(1), weights, 0.0)
            threshold = torch.where(held.sum(1) >= target, higher, threshold)
        over = hl.zeros([spec.rows, spec.at_once], dtype=torch.float32)
        for above_step in hl.grid(steps):
            keys, weights = keys_and_weights(scores, at, is_row, above_step, n_blocks, visible, largest, spec)
            over = over + torch.where(keys > threshold.unsqueeze(1), weights, 0.0)
        above = over.sum(1)
        for last_step in hl.grid(steps):
            keys, weights = keys_and_weights(scores, at, is_row, last_step, n_blocks, visible, largest, spec)
            equal = keys == threshold.unsqueeze(1)
            of_equal = torch.where(equal, weights, 0.0)
            before = above.unsqueeze(1) + hl.cumsum(of_equal, 1) - of_equal
            above = above + of_equal.sum(1)
            of_step = last_step * spec.at_once + hl.arange(spec.at_once)
            ahead = of_step.unsqueeze(0) - row.unsqueeze(1)
            keeps = (keys > threshold.unsqueeze(1)) | (equal & (before < target.unsqueeze(1)))
            keeps = keeps | (of_step < sink_blocks).unsqueeze(0)
            keeps = keeps | ((ahead > enters - local_blocks) & (ahead < leaves + local_blocks))
            keeps = keeps & (of_step.unsqueeze(0) < visible)
            hl.store(kept, [at, of_step], keeps.to(torch.uint8), extra_mask=is_row & (of_step < n_blocks).unsqueeze(0))


#: The key of what is not there: less than that of any score.
LEAST = -(2**31)


def ordered_bits(x: torch.Tensor) -> torch.Tensor:
    """Int32 in the order of fp32 numbers, a NaN of either sign last."""
    bits = x.view(torch.int32)
    # The bits of negative numbers, but for the sign, are in the opposite order.
    return torch.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


def keys_and_weights(
    scores: torch.Tensor,  # [B * H * M_blocks, N_blocks]
    at: torch.Tensor,  # [rows]
    is_row: torch.Tensor,  # [rows, 1]
    step: int,
    n_blocks: int,
    visible: torch.Tensor,  # [rows, 1]
    largest: torch.Tensor,  # [rows]
    spec: TopBlocksSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, int32 in the order of a step's scores, and weights, which add up to the target: [rows, at_once] both."""
    block = step * spec.at_once + hl.arange(spec.at_once)
    s = hl.load(scores, [at, block], extra_mask=is_row & (block < n_blocks).unsqueeze(0))
    keys = torch.where(block.unsqueeze(0) < visible, ordered_bits(s), LEAST)
    if spec.by_mass:
        return keys, torch.exp(s - largest.unsqueeze(1))
    return keys, hl.full([spec.rows, spec.at_once], 1.0, dtype=torch.float32)


@functools.cache
def kernel(is_cuda: bool, at_once: int) -> Runner:
    """The kernel for the device."""
    if not is_cuda:
        return interpreted(top_blocks)
    return compiled(top_blocks, Config(num_warps=max(4, at_once // OF_A_WARP), indexing="pointer"))


def launch(a: TopBlocksArgs) -> torch.Tensor:
    """Return whether each block is kept: bool [B, H, M_blocks, N_blocks]."""
    B, H, M, D = a.q.shape
    H_kv, N = a.k.shape[1:3]
    kept = empty_blocks(a)
    m_blocks, n_blocks = kept.shape[2:]
    mean_q, mean_k = (block_means.launch(BlockMeansArgs(x)) for x in (a.q, a.k))
    at_once = min(MOST_AT_ONCE, max(BLOCKS, 1 << (n_blocks - 1).bit_length()))
    kernel(a.q.is_cuda, at_once).run(
        {
            "mean_q": mean_q.view(-1, D),
            "mean_k": mean_k.view(-1, D),
            "scores": mean_q.new_empty((B * H * m_blocks, n_blocks)),
            "kept": kept.view(torch.uint8).view(-1, n_blocks),
            "heads": B * H,
            "group": H // H_kv,
            "m_blocks": m_blocks,
            "n_blocks": n_blocks,
            "sink_blocks": min(a.sink_blocks, n_blocks),
            "local_blocks": min(a.local_blocks, m_blocks + n_blocks),
            # Where the diagonal enters the first row block and leaves it, if that is whole; a part has no keys after
            # its own.
            "enters": (N - M) // MASK_BLOCK,
            "leaves": (N - M + MASK_BLOCK - 1) // MASK_BLOCK,
            "share": round((1.0 if a.keep is None else a.keep) * 2**SHARE_LOG2),
            # Of none, the largest share would be too much.
            "mass": 1.0 if a.mass is None else max(a.mass, FP32_TINY),
            "scale": a.scale,
            "spec": TopBlocksSpec(
                rows=ROWS,
                blocks=BLOCKS,
                channels=CHANNELS,
                whole_channels=D % CHANNELS == 0,
                at_once=at_once,
                all_at_once=n_blocks <= at_once,
                causal=a.causal,
                by_mass=a.mass is not None,
                is_cuda=a.q.is_cuda,
            ),
        }
    )
    return kept


def empty_blocks(a: TopBlocksArgs) -> torch.Tensor:
    """Allocate what `launch` returns."""
    blocks = (-(-x.size(2) // MASK_BLOCK) for x in (a.q, a.k))
    return a.q.new_empty((a.q.size(0), a.q.size(1), *blocks), dtype=torch.bool)
