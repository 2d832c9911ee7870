"""Lengths are data: 50 of them take at most two compilations of any kernel."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from offline import compilations, fake_qkv

import helion_attn as ha

MOST = 2


def compilations_by_kernel(
    lengths: list[tuple[int, int]], D: int, causal: bool, layout: str = "bhsd"
) -> dict[str, int]:
    """How often `attention` has each kernel compiled, Helion's tracing and Triton's cache taken together."""
    with compilations() as compiled:
        for M, N in lengths:
            ha.attention(*fake_qkv(1, 4, 2, M, N, D, layout=layout), causal=causal, layout=layout)
    distinct: dict[str, set[int]] = defaultdict(set)
    for kernel in compiled:
        distinct[kernel.metadata.name].add(id(kernel))
    assert len(compiled) % len(lengths) == 0
    return {name: len(kernels) for name, kernels in distinct.items()}


def random_lengths(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randint(1, 8192) for _ in range(count)]


def assert_few(counts: dict[str, int]) -> None:
    assert any("fp8_attn_fwd" in name for name in counts)
    assert {name: count for name, count in counts.items() if count > MOST} == {}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_fifty_lengths(causal: bool) -> None:
    lengths = [(S, S) for S in random_lengths(0, 50)]
    assert_few(compilations_by_kernel(lengths, 64, causal))


@pytest.mark.parametrize("D", [128, 256])
def test_other_head_dims(D: int) -> None:
    lengths = [(S, S) for S in random_lengths(1, 12)]
    assert_few(compilations_by_kernel(lengths, D, True))


def test_query_and_key_lengths_differ() -> None:
    lengths = list(zip(random_lengths(2, 20), random_lengths(3, 20), strict=True))
    assert_few(compilations_by_kernel(lengths, 64, False, "bshd"))


def test_a_change_of_head_dim_is_counted() -> None:
    """So the count can exceed one: it is of compilations, not of names."""
    with compilations() as compiled:
        for D in (64, 128):
            ha.attention(*fake_qkv(1, 4, 2, 100, 200, D))
    attention = [kernel for kernel in compiled if "fp8_attn_fwd" in kernel.metadata.name]
    assert len({id(kernel) for kernel in attention}) == 2
