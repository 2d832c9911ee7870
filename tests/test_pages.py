"""Pages of every KV head, their mean keys, and those that queries need most."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn import plans
from helion_attn.preprocess import top_pages
from helpers.paged import NO_PAGE, append_all, make_cache, poison
from helpers.refused import assert_raises

H, H_KV, D = 4, 2, 64
LENGTHS = [600, 130]

Tables = tuple[ha.PagedKVCache, torch.Tensor, torch.Tensor]


def filled(device: str, M: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Tables]:
    """q [B, H, M, D], k and v, and a cache that has them: sequences of five pages and of two."""
    q, k, v = make_qkv("randn", len(LENGTHS), H, H_KV, M, max(LENGTHS), D, torch.bfloat16, device)
    cache, table, lengths = make_cache(LENGTHS, H_KV, D, device=device)
    append_all(cache, k, v, table, LENGTHS)
    return q, k, v, (cache, table, lengths)


def means_of(cache: ha.PagedKVCache, table: torch.Tensor) -> torch.Tensor:
    """The mean keys of a cache whose sequences have `LENGTHS` keys."""
    means = ha.pages.empty_means(cache)
    start = torch.zeros(1, dtype=torch.int32, device=table.device)
    for row, length in zip(table.split(1), LENGTHS, strict=True):
        ha.pages.update_means(means, cache, row.contiguous(), start, length)
    return means


def of_heads(table: torch.Tensor) -> torch.Tensor:
    """The same pages for every KV head."""
    return table.unsqueeze(1).expand(-1, H_KV, -1).contiguous()


def lengths_of_heads(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.unsqueeze(1).expand(-1, H_KV).contiguous()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_same_pages_for_every_head_are_one_table(layout: Any, device: str) -> None:
    q, _, _, (cache, table, lengths) = filled(device, M=3)
    q = q if layout == "bhsd" else q.transpose(1, 2).contiguous()
    options: dict[str, Any] = {"layout": layout, "num_splits": 1, "sm_scale": 0.2}
    out, lse = ha.attention_kvcache(q, cache, table, lengths, return_lse=True, **options)
    few = of_heads(table), lengths_of_heads(lengths)
    of_each, lse_of_each = ha.attention_kvcache(q, cache, *few, return_lse=True, **options)
    assert of_each.shape == out.shape
    assert torch.equal(of_each, out)
    assert torch.equal(lse_of_each, lse)
    assert torch.equal(ha.attention_kvcache(q, cache, *few, **options), out)


def test_each_head_sees_its_own_pages(device: str) -> None:
    q, k, v, (cache, table, _) = filled(device)
    page = cache.page_size
    kept = [[0, 2, 4], [1, 3, 4]]  # of the first sequence, by KV head; its last page has 88 keys
    few = torch.stack([table[0, of_head] for of_head in kept]).unsqueeze(0)
    keys = 2 * page + LENGTHS[0] % page
    lengths = torch.full((1, H_KV), keys, dtype=torch.int32, device=device)
    out = ha.attention_kvcache(q[:1], cache, few, lengths, num_splits=1)
    # As if the others had never been.
    places = [torch.cat([torch.arange(p * page, (p + 1) * page) for p in of_head])[:keys] for of_head in kept]
    k_few, v_few = (torch.stack([x[0, h, at] for h, at in enumerate(places)]).unsqueeze(0) for x in (k, v))
    alone, table_alone, length_alone = make_cache([keys], H_KV, D, device=device, seed=1)
    append_all(alone, k_few, v_few, table_alone, [keys])
    assert torch.equal(out, ha.attention_kvcache(q[:1], alone, table_alone, length_alone, num_splits=1))


@pytest.mark.parametrize("page", [-1, NO_PAGE, 2**31 - 1, "past the pool"])
def test_a_page_outside_of_the_pool_gives_nan(page: int | str, device: str) -> None:
    q, _, _, (cache, table, lengths) = filled(device)
    few = of_heads(table)
    few[0, 1, 2] = cache.k8.size(0) if isinstance(page, str) else page
    out = ha.attention_kvcache(q, cache, few, lengths_of_heads(lengths))
    nan = out.isnan().all(3)[:, :, 0]
    assert nan.tolist() == [[False, False, True, True], [False] * H]


def test_means_are_of_the_keys_that_are_there(device: str) -> None:
    _, k, v, (cache, table, _) = filled(device)
    means, whole, page = ha.pages.empty_means(cache), means_of(cache, table), cache.page_size
    for b, length in enumerate(LENGTHS):
        for i in range(-(-length // page)):
            keys = k[b, :, i * page : min(length, (i + 1) * page)].float()
            # A key in int8 is off by half a step of its descale, amax / 127; a mean in bf16 by 2**-9 of itself.
            bound = (keys.abs().amax(2) / 253).mean(1)[:, None] + 2**-8 * keys.mean(1).abs()
            assert ((whole[table[b, i]].float() - keys.mean(1)).abs() <= bound).all()
    # In chunks, into pages that held NaN.
    poison(cache)
    for start, end in ((0, 100), (100, 101), (101, 130)):
        first = torch.full((len(LENGTHS),), start, dtype=torch.int32, device=device)
        ha.append_kvcache(cache, k[:, :, start:end], v[:, :, start:end], table, first)
        ha.pages.update_means(means, cache, table, first, end - start)
    assert torch.equal(means[table[1, :2]], whole[table[1, :2]])


def test_what_has_no_page_changes_no_mean(device: str) -> None:
    _, _, _, (cache, table, lengths) = filled(device)
    means = ha.pages.empty_means(cache)
    for bad in (NO_PAGE, -1, cache.k8.size(0)):
        ha.pages.update_means(means, cache, torch.full_like(table, bad), lengths, 3)
    for length in (-5, table.size(1) * cache.page_size, 2**31 - 1):
        ha.pages.update_means(means, cache, table.clamp_min(0), torch.full_like(lengths, length), 3)
    assert not means[:-1].any()


def liked(q: torch.Tensor, k: torch.Tensor, pages: dict[int, int], page: int) -> None:
    """Give the keys of a page of each KV head, in the first sequence, a part of what its first query head asks for."""
    for h, i in pages.items():
        k[0, h, i * page : (i + 1) * page] += 0.3 * q[0, h * H // H_KV, 0]


def test_top_pages_are_what_queries_like(device: str) -> None:
    q, k, v = make_qkv("randn", 2, H, H_KV, 1, max(LENGTHS), D, torch.bfloat16, device)
    cache, table, lengths = make_cache(LENGTHS, H_KV, D, device=device)
    liked(q, k, {0: 2, 1: 1}, cache.page_size)
    append_all(cache, k, v, table, LENGTHS)
    means = means_of(cache, table)
    few, keys = ha.pages.top(q, means, cache, table, lengths, pages=3, local_pages=1)
    assert few[0].tolist() == [table[0, [0, 2, 4]].tolist(), table[0, [0, 1, 4]].tolist()]
    assert few[1, :, :2].tolist() == [table[1, :2].tolist()] * H_KV  # which has no more
    assert keys.tolist() == [[2 * 128 + 88] * H_KV, [130] * H_KV]
    assert few.dtype == keys.dtype == torch.int32
    ha.attention_kvcache(q, cache, few, keys)
    swapped = ha.pages.top(q.transpose(1, 2), means, cache, table, lengths, pages=3, local_pages=1, layout="bshd")
    assert all(torch.equal(a, b) for a, b in zip(swapped, (few, keys), strict=True))
    # All pages are the whole table.
    every, all_keys = ha.pages.top(q, means, cache, table, lengths, pages=100)
    assert torch.equal(all_keys, lengths_of_heads(lengths))
    assert [every[b, h, : -(-n // 128)].tolist() for b, n in enumerate(LENGTHS) for h in range(H_KV)] == [
        table[b, : -(-n // 128)].tolist() for b, n in enumerate(LENGTHS) for _ in range(H_KV)
    ]


@pytest.mark.parametrize(
    ("group", "M", "width", "pages"), [(1, 1, 300, 40), (4, 3, 70, 9), (20, 1, 33, 6), (5, 1, 5, 5)]
)
def test_top_pages_by_their_shares(group: int, M: int, width: int, pages: int, device: str) -> None:
    """Of random mean keys: no page is kept that has less of the probability than one that is not."""
    generator = torch.Generator().manual_seed(width)
    lengths = torch.tensor([width * 128, width * 64 + 1, 100])
    cache = ha.paged_kv_cache(3 * width, H_KV, D, device=device)
    means = torch.randn(3 * width + 1, H_KV, D, generator=generator).bfloat16().to(device)
    table = torch.randperm(3 * width, generator=generator).int().view(3, width).to(device)
    q = torch.randn(3, group * H_KV, M, D, generator=generator).bfloat16().to(device)
    few, keys = ha.pages.top(q, means, cache, table, lengths.int().to(device), pages=pages, local_pages=2)
    # [B, H_kv, width], fp64
    of_pages = means[table.long()].transpose(1, 2).double()
    scores = q.double().mean(2).unflatten(1, (H_KV, group)) @ of_pages.mT / D**0.5
    slot, count = torch.arange(width, device=device), -(-lengths // 128).to(device).view(3, 1, 1)
    share = scores.masked_fill(slot >= count.unsqueeze(3), -torch.inf).softmax(3).sum(2)
    share = share.masked_fill((slot < 1) | (slot >= count - 2), 9.0).masked_fill(slot >= count, -1.0)
    kept = (few.unsqueeze(3) == table[:, None, None]).any(2)
    assert torch.equal(kept.sum(2), torch.full((3, H_KV), pages, device=device))
    # In the order of their keys.
    places = (few.unsqueeze(3) == table[:, None, None]).int().argmax(3)
    assert torch.all(places.diff(dim=2) > 0)
    least, most = share.masked_fill(~kept, 99.0).amin(2), share.masked_fill(kept, -99.0).amax(2)
    assert torch.all(least >= most - 0.005 * most.abs())
    full = lengths.to(device) - (count.flatten() - pages).clamp_min(0) * 128
    assert torch.equal(keys, full.int().unsqueeze(1).expand(-1, H_KV))


def test_shares_that_are_read_in_several_steps(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_pages, "MOST_AT_ONCE", 128)
    plans.forget()
    test_top_pages_by_their_shares(1, 1, 300, 40, device)
    # Of pages that are alike the first, in whatever step they are, besides the last two.
    cache = ha.paged_kv_cache(300, H_KV, D, device=device)
    table = torch.arange(300, dtype=torch.int32, device=device).unsqueeze(0)
    lengths = torch.tensor([300 * 128], dtype=torch.int32, device=device)
    q = torch.zeros(1, H_KV, 1, D, dtype=torch.bfloat16, device=device)
    few, _ = ha.pages.top(q, ha.pages.empty_means(cache).zero_(), cache, table, lengths, pages=200)
    assert few[0].tolist() == [[*range(198), 298, 299]] * H_KV
    plans.forget()


def test_what_attention_makes_nan_of_stays_nan(device: str) -> None:
    q, _, _, (cache, table, lengths) = filled(device)
    means = means_of(cache, table)
    for bad in (-1, table.size(1) * cache.page_size + 1):
        wrong = torch.tensor([bad, LENGTHS[1]], dtype=torch.int32, device=device)
        out = ha.attention_kvcache(q, cache, *ha.pages.top(q, means, cache, table, wrong, pages=3))
        assert out[0].isnan().all()
        assert out[1].isfinite().all()
    means[table[0, 1]] = float("nan")  # as one of its keys has made it
    few, _ = ha.pages.top(q, means, cache, table, lengths, pages=4)
    assert few[0].tolist() == [table[0, [0, 1, 3, 4]].tolist()] * H_KV


@pytest.mark.gpu
@pytest.mark.once
def test_a_cuda_graph_follows_its_queries() -> None:
    q, _, _, (cache, table, lengths) = filled("cuda")
    means = means_of(cache, table)

    def step() -> torch.Tensor:
        ha.pages.update_means(means, cache, table, lengths - 1, 1)
        out: torch.Tensor = ha.attention_kvcache(q, cache, *ha.pages.top(q, means, cache, table, lengths, pages=3))
        return out

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(2):
        q.copy_(torch.randn_like(q))
        graph.replay()
        assert torch.equal(out, step())


def arguments() -> dict[str, Any]:
    cache = ha.paged_kv_cache(4, 2, 32)
    return {
        "q": torch.zeros(2, 4, 1, 32),
        "means": ha.pages.empty_means(cache),
        "cache": cache,
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "cache_seqlens": torch.zeros(2, dtype=torch.int32),
    }


WRONG: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "q": ({"q": torch.zeros(2, 4, 1, 64)}, ValueError, ["head dim 64", "32"]),
    "heads": ({"q": torch.zeros(2, 3, 1, 32)}, ValueError, ["3 heads", "2"]),
    "ints": ({"q": torch.zeros(2, 4, 1, 32).int()}, TypeError, ["q is", "int32", "floating-point"]),
    "means": ({"means": torch.zeros(4, 2, 32)}, ValueError, ["means is", "(4, 2, 32)", "(5, 2, 32)"]),
    "table": ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, ValueError, ["block_table", "(3, 2)"]),
    "pages": ({"pages": 0}, ValueError, ["pages is 0"]),
    "local": ({"pages": 2}, ValueError, ["local_pages is 2", "pages=2"]),
    "queries": ({"q": torch.zeros(2, 4, 130, 32)}, ValueError, ["local_pages is 2", "130 queries", "at least 3"]),
    "scale": ({"sm_scale": -1.0}, ValueError, ["sm_scale is -1.0"]),
    "layout": ({"layout": "bsdh"}, ValueError, ["layout is 'bsdh'"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_of_top(what: str) -> None:
    ha.pages.top(**arguments(), pages=3)
    wrong, error, says = WRONG[what]
    assert_raises(ha.pages.top, arguments() | {"pages": 3} | wrong, error, says)


def test_wrong_arguments_of_means() -> None:
    good = {name: x for name, x in arguments().items() if name != "q"}
    assert_raises(ha.pages.update_means, good | {"length": 0}, ValueError, ["length is 0"])
    flat = good | {"length": 1, "cache_seqlens": torch.zeros(2, 1, dtype=torch.int32)}
    assert_raises(ha.pages.update_means, flat, ValueError, ["cache_seqlens", "(2, 1)"])
    assert_raises(ha.pages.empty_means, {"cache": 3}, TypeError, ["cache is"])


def test_wrong_tables_of_heads() -> None:
    good = {name: x for name, x in arguments().items() if name != "means"}
    good |= {
        "block_table": torch.zeros(2, 2, 3, dtype=torch.int32),
        "cache_seqlens": good["cache_seqlens"].repeat(2, 1),
    }
    lengths = torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(2, 4, 3, dtype=torch.int32)
    assert_raises(ha.attention_kvcache, good | {"cache_seqlens": lengths}, ValueError, ["cache_seqlens", "(2, 2)"])
    assert_raises(ha.attention_kvcache, good | {"block_table": table}, ValueError, ["block_table", "(2, 2, pages"])
    assert_raises(ha.attention_kvcache, good | {"window": (5, 0)}, NotImplementedError, ["window", "None"])
    assert_raises(ha.attention_kvcache, good | {"sinks": torch.zeros(4)}, NotImplementedError, ["sinks", "None"])
    assert_raises(ha.attention_kvcache, good | {"num_splits": 0}, ValueError, ["num_splits is 0"])
