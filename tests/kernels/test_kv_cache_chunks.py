"""A cache that is appended to and attended to in turn: however its tokens come, a query's bits are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.testing import relative_error
from helpers.paged import make_cache

#: Tokens of the sequence that is looked at.
N = 300

BOTH = pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=str)

#: Tokens that come at once, and how many of them are drafts that are rejected.
CHUNKS: dict[str, list[tuple[int, int]]] = {
    "ones": [(126, 0), *[(1, 0)] * 4, (125, 0), *[(1, 0)] * 2, (43, 0)],
    "fives": [(120, 0), *[(5, 0)] * 3, (165, 0)],
    "sixteens": [(112, 0), (16, 0), (16, 0), (156, 0)],
    "128": [(128, 0), (128, 0), (44, 0)],
    "129": [(129, 0), (129, 0), (42, 0)],
    "drafts": [(120, 0), *[(12, 9)] * 4, (124, 0), (12, 3), (12, 12), (35, 0)],
    "many_drafts": [(100, 0), (70, 40), (70, 64), (164, 0)],
}


def sequence(D: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V of numbers whose products and their sums are exact in fp32: a CPU's order of additions is none."""
    generator = torch.Generator().manual_seed(D)

    def rows(heads: int, largest: int) -> torch.Tensor:
        x = torch.randint(-largest, largest + 1, (1, heads, N, D), generator=generator).float()
        x[..., 0] = largest
        return x

    q, k, v = rows(2, 7), rows(1, 7), rows(1, 1)
    k = k * torch.exp2(torch.randint(-2, 2, (1, 1, N, 1), generator=generator))
    # Within a page V's descales are one, or its numbers times P would have more bits than fp32.
    v = v * torch.exp2(torch.arange(N) // 128 * 3.0)[:, None]
    return q.to(device), k.to(device), v.to(device)


def served(
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    chunks: list[tuple[int, int]],
    recipe: ha.Recipe,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of all queries that stay."""
    q, k, v = tokens
    cache, table, _ = make_cache([N + 64], 1, k.size(3), device=q.device.type, recipe=recipe)
    outs, lses, at = [], [], 0
    for count, drafts in chunks:
        stays = count - drafts
        new = [torch.cat((x[:, :, at : at + stays], 3 * x[:, :, :drafts]), 2) for x in (q, k, v)]
        start = torch.tensor([at], dtype=torch.int32, device=q.device)
        open_pages = ha.append_kvcache(cache, new[1], new[2], table, start, drafts=drafts)
        out, lse = ha.attention_kvcache(
            new[0], cache, table, start + count, open_pages=open_pages, return_lse=True, sm_scale=0.01,
            out_dtype=torch.float32, **options,
        )  # fmt: skip
        outs.append(out[:, :, :stays])
        lses.append(lse[:, :, :stays])
        at += stays
    assert at == N
    return torch.cat(outs, 2), torch.cat(lses, 2)


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize(("D", "splits"), [(64, 1), (64, 2), (256, 1)])
@BOTH
def test_chunks_change_nothing(D: int, splits: int, name: str, recipe: ha.Recipe, device: str) -> None:
    tokens = sequence(D, device)
    out, lse = served(tokens, CHUNKS[name], recipe, num_splits=splits)
    expected, expected_lse = served(tokens, [(N, 0)], recipe, num_splits=splits)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("options", [{}, {"window": (150, 0)}, {"softcap": 5.0}], ids=lambda x: "-".join(x) or "none")
@BOTH
def test_a_query_sees_its_own_page_open(options: dict[str, Any], recipe: ha.Recipe, device: str) -> None:
    q, k, v = sequence(64, device)
    out, lse = served((q, k, v), CHUNKS["drafts"], recipe, num_splits=1, **options)
    model: Any = ha.reference.fp8_attention_kvcache
    expected, expected_lse = model(q, k, v, recipe=recipe, sm_scale=0.01, own_pages_open=True, **options)
    closed, _ = model(q, k, v, recipe=recipe, sm_scale=0.01, **options)
    bound = 2.0**-8 if out.is_cuda else 1e-4
    assert relative_error(out, expected) < bound
    assert relative_error(lse, expected_lse) < bound
    # e4m3 keys, whose descales are powers of two, hardly lose by it.
    assert out.is_cuda or recipe == ha.FAST or relative_error(closed, expected) > 10 * bound


def test_open_pages_of_another_call_raise() -> None:
    cache, table, start = make_cache([128], 1, 64)
    k = torch.randn(1, 1, 128, 64)
    pages = ha.append_kvcache(cache, k, k, table, start * 0)
    other, _, _ = make_cache([128], 2, 64)
    with pytest.raises(ValueError, match=r"open_pages\.k8 is .* it must be contiguous"):
        ha.attention_kvcache(k.repeat(1, 2, 1, 1), other, table, start, open_pages=pages)
    wrong: Any = k
    with pytest.raises(TypeError, match=r"open_pages is .* it must be None or what append_kvcache returned"):
        ha.attention_kvcache(k, cache, table, start, open_pages=wrong)
    for drafts in (-1, 65, 129):
        with pytest.raises(ValueError, match=rf"drafts is {drafts}; it must be an int in 0\.\.64"):
            ha.append_kvcache(cache, k, k, table, start, drafts=drafts)


def test_what_sequences_share_stays(device: str) -> None:
    """A full page is closed once; two sequences that go on behind it, in one launch, read it and leave it."""
    _, k, v = sequence(64, device)
    cache, table, _ = make_cache([128, 128], 1, 64, device=device)
    start = torch.zeros(1, dtype=torch.int32, device=device)
    ha.append_kvcache(cache, k[:, :, :128], v[:, :, :128], table[:1].contiguous(), start)
    shared = table.clone()
    shared[1, 0] = table[0, 0]
    shared[:, 1] = torch.tensor([i for i in range(5) if i not in table[:, 0].tolist()][:2], dtype=torch.int32)
    page = int(table[0, 0])
    before = [x[page].clone().view(torch.uint8) for x in (cache.k8, cache.v8, cache.k_descale, cache.v_descale)]
    ends = torch.full((2,), 128, dtype=torch.int32, device=device)
    for drafts in (0, 3):
        new_k, new_v = (x[:, :, 128:133].repeat(2, 1, 1, 1) for x in (k, v))
        ha.append_kvcache(cache, new_k, new_v, shared, ends, drafts=drafts)
    after = [x[page].view(torch.uint8) for x in (cache.k8, cache.v8, cache.k_descale, cache.v_descale)]
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x, y)
    assert torch.all(cache.k_descale[page, :, 1] < 0)
