"""How many splits each sequence of a paged cache has, chosen on the device from lengths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import helion_attn as ha
from helion_attn import plans
from helion_attn.configs.scheduling import BATCH_ROUNDS, MIN_PAGES, SplitLimits, split_limits
from helion_attn.kernels import dynamic_splits
from helion_attn.problem import PackedBatch
from helion_attn.testing import relative_error

#: Of an H200, with two programs an SM.
SMS, CTAS_PER_SM = 132, 2

PAGE = 128


def arguments(lengths: list[int], max_pages: int, device: str, left: int = -1) -> Any:
    """What `dynamic_splits.launch` reads of an operation's arguments: queries of one token each."""
    B = len(lengths)
    return SimpleNamespace(
        q=torch.empty(B, 8, 1, 64, device=device),
        cache=SimpleNamespace(page_size=PAGE),
        block_table=torch.empty(B, max_pages, dtype=torch.int32, device=device),
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
        scores=SimpleNamespace(left=left),
    )


def splits_of(
    lengths: list[int],
    device: str,
    heads: int = 8,
    max_pages: int = 1024,
    splits: int | None = None,
    left: int = -1,
    queries: list[int] | None = None,
    most_queries: int = 1,
    known_pages: int | None = None,
) -> tuple[list[int], SplitLimits]:
    """Each sequence's splits. `queries`: of a packed batch; `known_pages`: what the host takes for the longest."""
    a, batch = arguments(lengths, max_pages, device, left), None
    if queries is not None:
        cu_seqlens = torch.nn.functional.pad(torch.tensor(queries, device=device).cumsum(0), (1, 0)).to(torch.int32)
        batch = PackedBatch(cu_seqlens, max(queries), most_queries, few=True)
    limits = split_limits(len(lengths), heads, known_pages or max_pages, splits, SMS, CTAS_PER_SM)
    with plans.plain_kernels(a.cache_seqlens):
        lists = dynamic_splits.launch(a, limits, heads, batch)
    found, first, whose = (x.tolist() for x in (lists.own_splits, lists.first_split, lists.sequence_of_split))
    assert sum(found) <= limits.all_splits
    assert [b for b in whose if b < 0] == whose[sum(found) :]
    for b, count in enumerate(found):
        assert count == 0 or whose[first[b] : first[b] + count] == [b] * count
    assert sorted(whose[: sum(found)]) == [b for b, count in enumerate(found) for _ in range(count)]
    return found, limits


def order_of(lengths: list[int], device: str) -> list[int]:
    """The sequences by their first splits."""
    a = arguments(lengths, 1024, device)
    with plans.plain_kernels(a.cache_seqlens):
        lists = dynamic_splits.launch(a, split_limits(len(lengths), 8, 1024, None, SMS, CTAS_PER_SM), 8, None)
    whose = lists.sequence_of_split.tolist()
    return list(dict.fromkeys(b for b in whose if b >= 0))


def test_long_splits_come_first(device: str) -> None:
    """By powers of two, and of like ones in the order of the batch; all that are short together."""
    lengths = [100, 8000, 2000, 3000, 7000, 90, 500]
    assert order_of(lengths * 40, device)[: 2 * 40 : 2] == [7 * i + 1 for i in range(40)]
    order = order_of([128 * pages - 1 for pages in (1, 64, 16, 30, 33, 2, 4)] * 40, device)
    assert [b % 7 for b in order] == [1, 4] * 40 + [3] * 40 + [2] * 40 + [0, 5, 6] * 40


def test_one_sequence_fills_the_gpu_once(device: str) -> None:
    assert splits_of([131072], device)[0] == [SMS * CTAS_PER_SM // 8]
    # Each split has a few pages, of the sequence as it is now.
    assert splits_of([PAGE * MIN_PAGES * 3 + 5], device)[0] == [3]
    assert splits_of([1], device)[0] == [1]


def test_a_batch_that_fills_the_gpu_is_not_split(device: str) -> None:
    """64 sequences of 8 KV heads fill 264 places 1.94 times; those of 16 do so in two splits each."""
    assert splits_of([8192] * 64, device)[0] == [1] * 64
    assert splits_of([32768] * 16, device)[0] == [2] * 16


def test_a_long_sequence_is_split_and_short_ones_are_not(device: str) -> None:
    for short in (31, 63, 127, 500):
        found, _ = splits_of([1000] * short + [131072], device)
        assert found[:-1] == [1] * short
        # No program has many more pages than the mean of those that fill the GPU once.
        assert 1025 / found[-1] <= 1.5 * (short * 8 + 1025) * 8 / (SMS * CTAS_PER_SM)


def test_a_window_leaves_few_pages(device: str) -> None:
    """A long sequence has no more pages that a query sees than a short one."""
    assert splits_of([65536, 2000], device, left=1023)[0] == [2, 2]


def test_sequences_of_the_other_kernel_have_none(device: str) -> None:
    found, _ = splits_of([3000, 3000, 0, 3000], device, queries=[1, 40, 0, 4], most_queries=4)
    assert found[1] == found[2] == 0
    assert found[0] == found[3] >= 1


def test_given_splits_are_each_sequences(device: str) -> None:
    assert splits_of([1, 5000, 131072], device, splits=7)[0] == [7, 7, 7]


def test_a_length_that_the_table_cannot_have_counts_as_a_page_or_as_all(device: str) -> None:
    """Its rows are NaN, which a program has to write."""
    found, _ = splits_of([-5, 2**31 - 1, 5000], device, max_pages=64)
    assert min(found) >= 1


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 200_000), min_size=1, max_size=130),
    heads=st.integers(1, 300),
    max_pages=st.integers(1, 2000),
    known_pages=st.none() | st.integers(1, 60),
    left=st.just(-1) | st.integers(0, 10_000),
)
@example(lengths=[131072], heads=8, max_pages=1024, known_pages=8, left=-1)
@example(lengths=[8192, 8192], heads=8, max_pages=64, known_pages=11, left=1279)
def test_all_splits_have_a_program(
    lengths: list[int], heads: int, max_pages: int, known_pages: int | None, left: int
) -> None:
    """No more than the launch has room for, whatever the host knows; none of fewer than `MIN_PAGES` pages, but one."""
    found, limits = splits_of(
        lengths,
        "cpu",
        heads=heads,
        max_pages=max_pages,
        known_pages=min(known_pages or max_pages, max_pages),
        left=left,
    )
    for length, splits in zip(lengths, found, strict=True):
        pages = min(length // PAGE + 1, max_pages)
        assert 1 <= splits <= max(1, min(pages // MIN_PAGES, limits.most_splits))


def test_limits() -> None:
    """A sequence's splits in one round that is full; a batch's in several; never so many that one is a few pages."""
    for programs in (1, 8, 64, 512, 4096):
        for max_pages in (1, 7, 64, 512):
            alone, batched = (split_limits(n, programs, max_pages, None, SMS, CTAS_PER_SM) for n in (1, 4))
            assert 1 <= alone.most_splits <= batched.most_splits <= max(1, max_pages // MIN_PAGES)
            assert alone.all_splits == alone.most_splits
            assert alone.most_splits == 1 or programs * alone.most_splits <= SMS * CTAS_PER_SM
            assert batched.most_splits == 1 or programs * batched.most_splits <= BATCH_ROUNDS * SMS * CTAS_PER_SM
    given = split_limits(4, 8, 100, 3, SMS, CTAS_PER_SM)
    assert (given.most_splits, given.all_splits, given.is_fixed) == (3, 12, True)


def filled(sequences: int, device: str, k_mean: torch.Tensor | None = None) -> tuple[ha.PagedKVCache, torch.Tensor]:
    """A cache with 20 pages of random keys of each sequence, and its block table."""
    torch.manual_seed(0)
    cache = ha.paged_kv_cache(20 * sequences, 2, 64, k_mean=k_mean, device=device)
    table = torch.arange(20 * sequences, dtype=torch.int32, device=device).view(sequences, 20)
    k, v = torch.randn(2, sequences, 2, 20 * PAGE, 64, dtype=torch.bfloat16, device=device).unbind(0)
    k = k if k_mean is None else k + k_mean[:, None].bfloat16()
    ha.append_kvcache(cache, k, v, table, torch.zeros(sequences, dtype=torch.int32, device=device))
    return cache, table


@pytest.mark.parametrize("splits", [None, 3])
def test_a_query_is_the_same_whatever_lengths_others_have(
    splits: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fixed splits in bits, otherwise but for the order of sums."""
    monkeypatch.setattr("helion_attn.ops.kv_cache.sm_count", lambda x: SMS)
    cache, table = filled(2, device)
    q = torch.randn(2, 4, 1, 64, dtype=torch.bfloat16, device=device)
    outs = []
    for other in (1, 5 * PAGE, 20 * PAGE):
        lengths = torch.tensor([17 * PAGE + 3, other], dtype=torch.int32, device=device)
        out = ha.attention_kvcache(q, cache, table, lengths, out_dtype=torch.float32, num_splits=splits)
        outs.append(out[0])
    for out in outs[1:]:
        if splits is None:
            torch.testing.assert_close(out, outs[0], rtol=1e-2, atol=2e-3)
        else:
            assert torch.equal(out, outs[0])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_sequence_of_one_split_has_the_bits_of_one(layout: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged alone, with what a sink and a mean of K add."""
    monkeypatch.setattr("helion_attn.ops.kv_cache.sm_count", lambda x: SMS)
    cache, table = filled(2, device, torch.linspace(-2, 2, 64, device=device).expand(2, 64))
    q = torch.randn(2, 4, 1, 64, dtype=torch.bfloat16, device=device)
    q = q.transpose(1, 2) if layout == "bshd" else q
    lengths = torch.tensor([3 * PAGE, 20 * PAGE], dtype=torch.int32, device=device)
    sinks = torch.tensor([2.0, 0.0, float("-inf"), 1.0], device=device)

    def run(splits: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        options: dict[str, Any] = {"sinks": sinks, "return_lse": True, "layout": layout, "out_dtype": torch.float32}
        return ha.attention_kvcache(q, cache, table, lengths, num_splits=splits, **options)

    (out, lse), (of_one, lse_of_one) = run(None), run(1)
    assert torch.equal(out[0], of_one[0])
    assert torch.equal(lse[0], lse_of_one[0])
    torch.testing.assert_close(out[1], of_one[1], rtol=2e-2, atol=4e-3)
    torch.testing.assert_close(lse[1], lse_of_one[1], rtol=1e-3, atol=1e-3)
    # It has several.
    assert not torch.equal(out[1], of_one[1])


@pytest.mark.parametrize("window", [None, (1279, 0), (1280, 0), (1791, 0)])
def test_windows_and_sequences_longer_than_the_host_knows(
    window: tuple[int, int] | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window and the last key may lie in a page more than the host counts; `max_seqlen_k` may be too small."""
    monkeypatch.setattr("helion_attn.ops.kv_cache.sm_count", lambda x: SMS)
    cache, table = filled(1, device)
    q = torch.randn(1, 2, 64, dtype=torch.bfloat16, device=device)
    cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device=device)
    for keys in (1407, 1408, 2048, 2300):
        lengths = torch.tensor([keys], dtype=torch.int32, device=device)
        for known in (1024, keys):
            outs = []
            for splits in (None, 1):
                options: dict[str, Any] = {"max_seqlen_k": known, "num_splits": splits, "window": window}
                outs.append(ha.kv_cache.step(q, None, None, cache, cu_seqlens, table, lengths, **options))
            assert relative_error(*outs) < 0.02, (keys, known)
        outs = [
            ha.attention_kvcache(q[:, :, None], cache, table, lengths, num_splits=splits, window=window)
            for splits in (None, 1)
        ]
        assert relative_error(*outs) < 0.02, keys
