"""How many splits of its pages each sequence has in `fp8_attn_decode`, chosen on the GPU from lengths as they are.

    more    = n / 2 times the programs that the GPU holds, n = 2, 3, ..., less one for each sequence
    splits  = 1 + more * pages of the sequence / pages of all, rounded down

Of several n the fastest by a model: rounds of programs that fill the GPU, the last one perhaps not, times what a
program takes, or what the longest one takes alone. Nothing is read on the host, and a CUDA graph that is replayed with
other lengths has other splits.

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

#: From more sequences on the program has 16 warps, and not 4.
MANY_SEQUENCES = 512


class DynamicSplitsSpec(NamedTuple):
    """Constants that the kernel is compiled for.

    Attributes:
        bn_log2: of the keys of a page.
        sequences: a power of two that holds all sequences.
        packed: queries are a packed batch.
        has_left: keys have a left edge.
        is_fixed: each sequence has `most_splits`.
    """

    bn_log2: int
    sequences: int
    packed: bool
    has_left: bool
    is_fixed: bool


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
            most = torch.clamp_min(quotient(pages, int32(MIN_PAGES)), 1)
            most = torch.minimum(most, int32(most_splits)) * has_queries
            # []
            all_pages, sequences = torch.clamp_min(pages.sum(0), 1).to(torch.int32), has_queries.sum(0).to(torch.int32)
            sms, resident = int32(multiprocessors), int32(multiprocessors * ctas_per_sm)
            splits = has_queries
            least = hl.full([], float("inf"), dtype=torch.float32)
            for half_rounds in hl.grid(2, 2 * most_rounds + 1):
                more = torch.clamp_min(quotient(int32(half_rounds) * resident, int32(2 * programs)) - sequences, 0)
                a_page = more.to(torch.float32) / all_pages.to(torch.float32)
                tried = torch.minimum((pages.to(torch.float32) * a_page).to(torch.int32) + has_queries, most)
                count = torch.clamp_min(tried.sum(0).to(torch.int32) * int32(programs), 1)
                rounds = quotient(count, resident)
                left_over = count - rounds * resident
                # Programs of a last round that is not full share an SM with fewer, and are faster.
                on_an_sm = quotient(left_over + sms - 1, sms).to(torch.float32)
                full_sm = FIRST_PROGRAM + int32(ctas_per_sm).to(torch.float32)
                last = torch.where(left_over > 0, (FIRST_PROGRAM + on_an_sm) / full_sm, 0.0)
                mean = all_pages.to(torch.float32) * int32(programs).to(torch.float32) / count.to(torch.float32)
                # The longest program may be alone at the end.
                longest = torch.amax(pages.to(torch.float32) / torch.clamp_min(tried, 1).to(torch.float32), 0)
                alone = (longest + PROGRAM_PAGES) * ((FIRST_PROGRAM + 1.0) / full_sm)
                time = torch.maximum((mean + PROGRAM_PAGES) * (rounds.to(torch.float32) + last), alone)
                splits = torch.where(time < least, tried, splits)
                least = torch.minimum(least, time)
        ends = hl.cumsum(splits, 0).to(torch.int32)
        hl.store(first_split, [b], ends - splits, extra_mask=b < B)
        hl.store(own_splits, [b], splits, extra_mask=b < B)
        for s in hl.grid(torch.amax(splits, 0)):
            hl.store(sequence_of_split, [ends - splits + s], b.to(torch.int32), extra_mask=s < splits)
        of_none = hl.full([spec.sequences], -1, dtype=torch.int32)
        for i in hl.grid((all_splits + spec.sequences - 1) // spec.sequences):
            at = i * spec.sequences + hl.arange(spec.sequences)
            behind = (at < all_splits) & (at >= torch.amax(ends, 0))
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
    kernel(a.q.is_cuda, 4 if holds <= MANY_SEQUENCES else 16).run(
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
