"""Lengths are data: dozens take at most two compilations of any kernel; with GQA two each, keys split or not."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.sm90 import fake_cuda
from helion_attn.ops.choose import MAX_QUANTISED_D
from helion_attn.types import Layout
from helpers.calls import attend_alone
from helpers.offline import Compilations, compilations, fake_block_mask, fake_cache, fake_qkv

MOST = 2

#: Helion traces a kernel with descriptors anew where `out` has fewer rows than its widest box, 256, for each power of
#: two, and generates the same code: Triton compiles it once. Most of the lengths here have more.
MOST_TRACES = 3


def run_lengths(lengths: list[tuple[int, int]], D: int, causal: bool, layout: Layout = "bhsd") -> Compilations:
    """`attention` of 4 heads on every (M, N), each with the kernels that it must have, in their order."""
    with compilations() as seen:
        for M, N in lengths:
            before = len(seen.compiled)
            ha.attention(*fake_qkv(1, 4, 4, M, N, D, layout=layout), causal=causal, layout=layout)
            call = [kernel.metadata.name.removeprefix("_helion_") for kernel in seen.compiled[before:]]
            split = call[-1] == "merge_splits_kernel"
            packed_q = ["pack_q"] if split or D > MAX_QUANTISED_D else []
            merged = ["merge_splits_kernel"] if split else []
            assert call == ["sample", "pack_kv", *packed_q, "recentre", "fp8_attn_fwd", *merged]
    return seen


def attend_to_lengths(lengths: list[tuple[int, int]], H_kv: int = 4) -> Compilations:
    """Likewise at D 64 and with a causal mask, without the kernels in front of attention."""
    with compilations() as seen:
        for M, N in lengths:
            attend_alone(fake_qkv(1, 4, H_kv, M, N, 64), options={"causal": True})
    return seen


def random_lengths(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randint(1, 8192) for _ in range(count)]


def assert_few(seen: Compilations, specialisations: int = 1) -> None:
    assert max(seen.by_kernel().values()) <= MOST, seen.by_kernel()
    assert max(Counter(seen.traced).values()) <= specialisations * MOST_TRACES, Counter(seen.traced)


@pytest.mark.thorough
def test_many_lengths() -> None:
    # With keys split, and so Q packed, and not: two specialisations.
    lengths = [(S, S) for S in random_lengths(0, 30)]
    assert_few(run_lengths(lengths, 64, causal=False), 2)
    assert_few(attend_to_lengths(lengths), 2)


def test_block_masks() -> None:
    """Of many lengths, and of one or all sequences and heads."""
    sizes = zip(random_lengths(7, 12), random_lengths(8, 12), [1, 1, 4] * 4, strict=True)
    with compilations() as seen:
        for M, N, heads in sizes:
            attend_alone(fake_qkv(1, 4, 2, M, N, 64), options={"block_mask": fake_block_mask(1, heads, M, N)})
    assert_few(seen)


def test_numbers_of_splits_are_data() -> None:
    """Up to 8 runs are merged by one kernel, and more by another."""
    seen = attend_to_lengths([(1, 4500), (60, 20000), (130, 9000), (500, 100_000), (1500, 70_000), (64, 3_000_000)])
    assert_few(seen)
    attention = [kernel for kernel in seen.compiled if "fp8_attn_fwd" in kernel.metadata.name]
    assert len({id(kernel) for kernel in attention}) == 1
    assert sum("merge_splits" in kernel.metadata.name for kernel in seen.compiled) == len(attention) == 6


def test_windows_and_softcaps_are_data() -> None:
    edges, lengths = random_lengths(4, 6), random_lengths(5, 6)
    with compilations() as seen:
        for left, S in zip([0, 1, *edges], [128, 200, *lengths], strict=True):
            attend_alone(fake_qkv(1, 4, 4, S, S, 64), options={"window": (left, left // 2), "softcap": 1.0 + left})
    assert_few(seen)


@pytest.mark.thorough
def test_batches_pages_and_pools_are_data() -> None:
    with compilations() as seen:
        for B, pages, pool in ((1, 2, 2), (3, 7, 40), (64, 100, 3000), (64, 128, 9000), (17, 300, 10000)):
            cache = fake_cache(pool, 8, 128, 128, ha.FAST, k_mean=True)
            table, seqlens = fake_cuda(B, pages, dtype=torch.int32), fake_cuda(B, dtype=torch.int32)
            q, k, v = fake_qkv(B, 64, 8, 1, 1, 128)
            ha.append_kvcache(cache, k, v, table, seqlens)
            ha.attention_kvcache(q, cache, table, seqlens, num_splits=2, return_lse=True)
    assert set(seen.by_kernel().values()) == {1}
    assert len(seen.by_kernel()) == 4
    assert_few(seen)


@pytest.mark.thorough
def test_specialisations_in_turn() -> None:
    """A kernel object serves all that share its config, each with its own code, which it keeps."""
    calls: list[dict[str, Any]] = [
        {"softcap": 20.0, "sinks": True},
        {"layout": "bshd", "out_dtype": torch.float16},
        {"causal": True, "M": 1},
    ]

    def attend(M: int = 100, layout: Layout = "bhsd", sinks: bool = False, **options: Any) -> None:
        qkv = fake_qkv(1, 4, 2, M, 200, 64, layout=layout)
        attend_alone(qkv, ha.FAST, layout, options | {"sinks": fake_cuda(4) if sinks else None})

    alone = []
    for call in calls:
        with compilations() as seen:
            attend(**call)
        alone += seen.compiled
    with compilations() as seen:
        for call in calls * 2:
            attend(**call)
    assert len(seen.traced) == len(calls)
    assert [kernel.hash for kernel in seen.compiled] == [kernel.hash for kernel in alone] * 2
    assert len({kernel.hash for kernel in alone}) == len(calls)
