"""How many splits of its pages each sequence has in `fp8_attn_decode`, chosen on the GPU from lengths as they are.

    rate    = n / 2 times the programs that the GPU holds, per page of all sequences, n = 1, 2, 3, ...
    splits  = rate * pages of the sequence, rounded down, at least 1

Of several n the fastest by a model: rounds of programs that fill the GPU, the last one perhaps not, times what a
program takes, or what the longest one takes alone. Programs start in the order of splits: longer ones come first, by
powers of two, so that short ones fill the end. Nothing is read on the host: a CUDA graph that is replayed with other
lengths has other splits.

The idea is that of `num_splits_dynamic` in FlashAttention-3.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import Runner, compiled, interpreted
from helion_attn.configs.scheduling import FIRST_PROGRAM, MIN_PAGES, SplitLimits
from helion_attn.kernels.lib.keys import SplitLists, keys_of_batch, queries_of_batch
from helion_attn.kernels.lib.scalars import int32, quotient
from helion_attn.problem import DecodeArgs, PackedBatch, power_that_holds

#: What a program takes to begin and to end, in pages: fitted to batches of 64 and 48 in docs/notes/paged_cache.md.
PROGRAM_PAGES = 2.0

#: Halves of rounds that are tried, a power of two.
CANDIDATES = 8

#: Programs of so many sizes come one after the other.
SIZES = 4

#: A warp of the program has so many sequences, but there are 16 at most.
SEQUENCES_OF_WARP = 64


class DynamicSplitsSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    bn_log2: int  # of the keys of a page
    sequences: int  # a power of two that holds all sequences
    packed: bool  # queries are a packed batch
    has_left: bool  # keys have a left edge
    is_fixed: bool  # each sequence has `most_splits`


def splits_of_fastest(
    pages: torch.Tensor,  # [sequences]
    most_splits: int,
    all_splits: int,
    most_rounds: int,
    programs: int,
    multiprocessors: int,
    ctas_per_sm: int,
) -> torch.Tensor:
    """The splits of each sequence that has pages, [sequences]: of those that there is room for, the fastest."""
    sms, resident = int32(multiprocessors), int32(multiprocessors * ctas_per_sm)
    # [candidates]
    half_rounds = hl.arange(CANDIDATES).to(torch.int32) + 1
    all_pages = torch.clamp_min(pages.sum(0), 1).to(torch.float32)
    work = all_pages * int32(2 * programs).to(torch.float32)
    rate = torch.clamp_max((half_rounds * resident).to(torch.float32) / work, 1.0 / MIN_PAGES)
    # [candidates, sequences]. What divides evenly shall do so.
    tried = (pages.to(torch.float32).unsqueeze(0) * rate.unsqueeze(1) + 0.001).to(torch.int32)
    # A sequence may have more pages than the host knows of. Of half a round there is room for all.
    tried = torch.clamp_max(tried, int32(most_splits))
    tried = torch.maximum(tried, (pages > 0).to(torch.int32).unsqueeze(0))
    longest = torch.amax(pages.to(torch.float32).unsqueeze(0) / torch.clamp_min(tried, 1).to(torch.float32), 1)
    # [candidates]
    count = tried.sum(1).to(torch.int32)
    fits = (half_rounds <= int32(2 * most_rounds)) & (count <= int32(all_splits))
    count = torch.clamp_min(count * int32(programs), 1)
    rounds = quotient(count, resident)
    left_over = count - rounds * resident
    # Programs of a last round that is not full share an SM with fewer, and are faster.
    on_an_sm = quotient(left_over + sms - 1, sms).to(torch.float32)
    full_sm = FIRST_PROGRAM + int32(ctas_per_sm).to(torch.float32)
    last = torch.where(left_over > 0, (FIRST_PROGRAM + on_an_sm) / full_sm, 0.0)
    mean = all_pages * int32(programs).to(torch.float32) / count.to(torch.float32)
    # The longest program may be alone at the end.
    alone = (longest + PROGRAM_PAGES) * ((FIRST_PROGRAM + 1.0) / full_sm)
    time = torch.maximum((mean + PROGRAM_PAGES) * (rounds.to(torch.float32) + last), alone)
    time = torch.where(fits, time, float("inf"))
    fastest = torch.amin(torch.where(time == torch.amin(time, 0), half_rounds, CANDIDATES), 0)
    return torch.where((half_rounds == fastest).unsqueeze(1), tried, 0).sum(0).to(torch.int32)


def dynamic_splits(
    cache_seqlens: torch.Tensor,  # [B]
    cu_seqlens: torch.Tensor,  # [B + 1] if packed
    sequence_of_split: torch.Tensor,  # [all_splits], written
    first_split: torch.Tensor,  # [B], written
    own_splits: torch.Tensor,  # [B], written
    max_pages: int,
    most_queries: int,
    left: int,
    most_splits: int,
    most_rounds: int,
    programs: int,
    multiprocessors: int,
    ctas_per_sm: int,
    spec: hl.constexpr,  # DynamicSplitsSpec
) -> None:
    """The kernel; see the module's docstring. A split of a sequence is `programs` programs.

    A sequence has `own_splits[b]` splits, from `first_split[b]` on. Behind the last one `sequence_of_split` is -1.
    """
    hl.specialize((cache_seqlens.stride(0), cu_seqlens.stride(0)))
    hl.specialize((sequence_of_split.stride(0), first_split.stride(0), own_splits.stride(0)))
    B, all_splits = cache_seqlens.size(0), sequence_of_split.size(0)
    for _ in hl.grid(1):
        # [sequences]
        b = hl.arange(spec.sequences)
        queries = torch.where(b < B, int32(most_queries), 0)
        if spec.packed:
            queries = queries_of_batch(cu_seqlens, cache_seqlens, B, spec.sequences)
            # Of others `fp8_attn_prefill` takes care.
            queries = torch.where(queries > int32(most_queries), 0, queries)
        has_queries = (queries > 0).to(torch.int32)
        keys = torch.clamp_min(keys_of_batch(cache_seqlens, B, spec.sequences), 0)
        pages = torch.clamp_max((keys >> spec.bn_log2) + 1, int32(max_pages))
        if spec.has_left:
            pages = torch.minimum(pages, ((int32(left) + queries) >> spec.bn_log2) + 2)
        pages = pages * has_queries
        splits = has_queries * int32(most_splits)
        if not spec.is_fixed:
            splits = splits_of_fastest(
                pages, most_splits, all_splits, most_rounds, programs, multiprocessors, ctas_per_sm
            )
        # Pages of a split, [sequences].
        size = pages.to(torch.float32) / torch.clamp_min(splits, 1).to(torch.float32)
        longest = torch.amax(size, 0)
        first, begin = torch.zeros_like(splits), int32(0)
        for i in hl.grid(SIZES):
            most = longest * torch.exp2(-int32(i).to(torch.float32))
            of_size = (size <= most) & ((size > 0.5 * most) | (int32(i) == SIZES - 1))
            here = torch.where(of_size, splits, 0)
            first = torch.where(of_size, begin + hl.cumsum(here, 0).to(torch.int32) - here, first)
            begin = begin + here.sum(0).to(torch.int32)
        hl.store(first_split, [b], first, extra_mask=b < B)
        hl.store(own_splits, [b], splits, extra_mask=b < B)
        for s in hl.grid(torch.amax(splits, 0)):
            hl.store(sequence_of_split, [first + s], b.to(torch.int32), extra_mask=s < splits)
        of_none = hl.full([spec.sequences], -1, dtype=torch.int32)
        for i in hl.grid((all_splits + spec.sequences - 1) // spec.sequences):
            at = i * spec.sequences + hl.arange(spec.sequences)
            behind = (at < all_splits) & (at >= begin)
            hl.store(sequence_of_split, [at], of_none, extra_mask=behind)


@functools.cache
def kernel(is_cuda: bool, num_warps: int) -> Runner:
    """The kernel for the device."""
    if not is_cuda:
        return interpreted(dynamic_splits)
    return compiled(dynamic_splits, Config(num_warps=num_warps, indexing="pointer"))


def launch(a: DecodeArgs, limits: SplitLimits, programs: int, batch: PackedBatch | None) -> SplitLists:
    """The lists that the kernel writes.

    Args:
        a: the operation's arguments.
        limits: of the splits.
        programs: of a split of a sequence.
        batch: if queries are packed.
    """
    B, holds = a.cache_seqlens.size(0), power_that_holds(a.cache_seqlens.size(0))
    lists = SplitLists(*(a.cache_seqlens.new_empty(n) for n in (limits.all_splits, B, B)))
    kernel(a.q.is_cuda, min(max(holds // SEQUENCES_OF_WARP, 1), 16)).run(
        {
            "cache_seqlens": a.cache_seqlens,
            "cu_seqlens": a.cache_seqlens if batch is None else batch.cu_seqlens,
            **lists._asdict(),
            "max_pages": a.block_table.size(1),
            "most_queries": a.q.size(2) if batch is None else batch.most_queries,
            "left": min(a.scores.left, a.block_table.size(1) * a.cache.page_size),
            "most_splits": limits.most_splits,
            "most_rounds": limits.most_rounds,
            "programs": programs,
            "multiprocessors": limits.multiprocessors,
            "ctas_per_sm": limits.ctas_per_sm,
            "spec": DynamicSplitsSpec(
                bn_log2=a.cache.page_size.bit_length() - 1,
                sequences=holds,
                packed=batch is not None,
                has_left=a.scores.left >= 0,
                is_fixed=limits.is_fixed,
            ),
        }
    )
    return lists
