"""The constant of a sequence that is subtracted from its keys in a paged cache, and int8 keys."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.kernels import decode, prefill
from helion_attn.testing import error_budget, make_qkv, relative_error
from helpers.paged import append_all, make_cache

N = 300

#: Queries of two heads that share one of keys: for `fp8_attn_decode`, and for `fp8_attn_prefill`.
DECODED, PREFILLED = 3, 50

BOTH = pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=str)


def biased(device: str, D: int = 64, M: int = PREFILLED) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Half of K's channels have a mean of 10, and Q's a mean of 0.5: scores without K's mean are 20 or so smaller."""
    q, k, v = make_qkv("randn", 1, 2, 1, M, N, D, torch.float32, device)
    k[..., : D // 2] += 10
    return q + 0.5, k, v


def filled(
    k: torch.Tensor, v: torch.Tensor, recipe: ha.Recipe, *cuts: int
) -> tuple[ha.PagedKVCache, torch.Tensor, torch.Tensor]:
    """A cache that keys up to each of `cuts` came to, and the rest."""
    cache, table, seqlens = make_cache([k.size(2)], k.size(1), k.size(3), device=k.device.type, recipe=recipe)
    at = [0, *cuts, k.size(2)]
    for first, end in itertools.pairwise(at):
        start = torch.tensor([first], dtype=torch.int32, device=k.device)
        ha.append_kvcache(cache, k[:, :, first:end], v[:, :, first:end], table, start)
    return cache, table, seqlens


def pages_of(cache: ha.PagedKVCache, table: torch.Tensor) -> list[int]:
    return table[0, : -(-N // cache.page_size)].tolist()


def means(cache: ha.PagedKVCache, table: torch.Tensor) -> torch.Tensor:
    """[pages, H_kv, D_pad]."""
    return cache.k_mean[pages_of(cache, table)].float()


@pytest.mark.parametrize("D", [64, 80, 256])
@BOTH
def test_what_is_stored(recipe: ha.Recipe, D: int, device: str) -> None:
    """The mean of the first page where it stands out, in all pages but that; int8 keys within half a step."""
    _, k, v = biased(device, D)
    cache, table, _ = filled(k, v, recipe, 200)
    mean, pages = means(cache, table), pages_of(cache, table)
    assert mean[0].count_nonzero() == 0
    assert torch.equal(mean[2], mean[1])
    first = cache.k8[pages[0]].float() * cache.k_descale[pages[0]].unsqueeze(2)
    assert torch.allclose(mean[1, :, : D // 2], first[..., : D // 2].mean(1), rtol=2.0**-8)
    assert (mean[1, :, D // 2 :] == 0).float().mean() > 0.9
    k8 = cache.k8[pages].float() * cache.k_descale[pages].unsqueeze(3)
    stored = (k8 + mean.unsqueeze(2)).transpose(0, 1).flatten(1, 2)[:, :N, :D]
    rest = k[0] - mean[..., :D].repeat_interleave(128, 0)[:N].transpose(0, 1)
    if recipe == ha.FAST:
        # Of later pages, as N(0, 1), whose descales are a page's base.
        assert (cache.k_descale[pages][1:] == cache.k_descale[pages][1:, :, :1]).float().mean() > 0.9
        descale = cache.k_descale[pages].transpose(0, 1).flatten(1)[:, :N, None]
        assert torch.all((stored - k[0]).abs() <= torch.maximum(rest.abs() * 2.0**-4, descale * 2.0**-10) * 1.01)
        return
    step = rest.abs().amax(2, keepdim=True) / 127
    assert torch.all((stored - k[0]).abs() <= step * 0.501)
    # Each key uses all of int8's range.
    largest = cache.k8[pages].transpose(0, 1).flatten(1, 2)[:, :N].abs().amax(2)
    assert torch.all(largest == 127)


@pytest.mark.parametrize("count", [100, 128])
@BOTH
def test_one_page_has_no_mean(recipe: ha.Recipe, count: int, device: str) -> None:
    """Its queries have the bits that they have beside those of later pages."""
    q, k, v = biased(device, M=N)
    options: dict[str, Any] = {"num_splits": 1, "return_lse": True}
    cache, table, seqlens = filled(k, v, recipe)
    whole = ha.attention_kvcache(q, cache, table, seqlens, **options)
    alone = ha.attention_kvcache(q[:, :, :count], cache, table, torch.full_like(seqlens, count), **options)
    oracle = ha.reference.attention(*(x[:, :, :count] for x in (q, k, v)), causal=True, return_lse=True)
    model = ha.reference.fp8_attention_kvcache(*(x[:, :, :count] for x in (q, k, v)), recipe=recipe)
    for x, y, modelled, expected in zip(alone, whole, model, oracle, strict=True):
        if device != "cpu":
            assert torch.equal(x, y[:, :, :count])  # a CPU's order of additions depends on shapes
        torch.testing.assert_close(x, y[:, :, :count], rtol=2.0**-9, atol=2.0**-9)
        budget = error_budget(relative_error(modelled, expected), torch.float32, device=device)
        assert relative_error(x, expected) <= budget


@BOTH
def test_listed_pages_have_their_own_means(recipe: ha.Recipe, device: str) -> None:
    """With the first page among them or not, and only one of either kind."""
    q, k, v = biased(device, M=1)
    cache, table, _ = filled(k, v, recipe)
    for chosen in ((0, 2), (1, 2), (2,), (0,)):
        keys = torch.cat([torch.arange(place * 128, min(place * 128 + 128, N)) for place in chosen]).to(device)
        few = table[:, list(chosen)].unsqueeze(1).contiguous()
        lengths = torch.full((1, 1), keys.numel(), dtype=torch.int32, device=device)
        for softcap in (None, 50.0):
            out, lse = ha.attention_kvcache(q, cache, few, lengths, return_lse=True, softcap=softcap)
            given = q, k[:, :, keys], v[:, :, keys]
            oracle, oracle_lse = ha.reference.attention(*given, causal=True, return_lse=True, softcap=softcap)
            assert relative_error(out, oracle) < (0.25 if recipe == ha.FAST else 0.08)
            assert relative_error(lse, oracle_lse) < 0.01


@BOTH
def test_sequences_that_share_a_prefix_share_its_mean(recipe: ha.Recipe, device: str) -> None:
    """The second has its own third page; and a page that begins another sequence has another mean."""
    _, k, v = biased(device)
    cache, table, _ = filled(k, v, recipe)
    size = cache.page_size
    free = next(page for page in range(cache.k8.size(0)) if page not in pages_of(cache, table))
    other = table.clone()
    other[0, 2] = free
    start = torch.tensor([2 * size], dtype=torch.int32, device=device)
    ha.append_kvcache(cache, k[:, :, :9], v[:, :, :9], other, start)
    assert torch.equal(means(cache, other), means(cache, table))
    ha.append_kvcache(cache, -k, v, table, torch.zeros_like(start))
    mean = means(cache, table)
    assert torch.all(mean[1:, 0, :32] < 0)
    assert torch.equal(mean[1], mean[2])


@BOTH
def test_first_pages_may_be_given_away(recipe: ha.Recipe, device: str) -> None:
    """Where a window hides them: the later ones have the mean, for what is appended and for what attends."""
    q, k, v = biased(device)
    cache, table, seqlens = filled(k, v, recipe, 280)
    options: dict[str, Any] = {"window": (20, 0), "softcap": 30.0, "return_lse": True}
    expected = ha.attention_kvcache(q[:, :, :DECODED], cache, table, seqlens, **options)
    given, taken = filled(k, v, recipe, 280)[:2]
    append_all(given, k, v, taken, [280])
    given.k_mean[int(taken[0, 0])] = float("nan")
    given.k_mean[int(taken[0, 1])] = float("nan")
    taken[0, :2] = -1
    start = torch.tensor([280], dtype=torch.int32, device=device)
    ha.append_kvcache(given, k[:, :, 280:], v[:, :, 280:], taken, start)
    for x, wanted in zip(
        ha.attention_kvcache(q[:, :, :DECODED], given, taken, seqlens, **options), expected, strict=True
    ):
        assert torch.equal(x, wanted)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0**99])
@pytest.mark.parametrize("M", [DECODED, PREFILLED])
@BOTH
def test_a_key_of_the_first_page_costs_the_others_nothing(recipe: ha.Recipe, bad: float, M: int, device: str) -> None:
    """It makes NaN of its rows if it must, and its channel has no mean."""
    q, k, v = biased(device, M=M)
    k[:, :, 5, 40] = bad
    cache, table, seqlens = filled(k, v, recipe)
    assert means(cache, table)[..., 40].count_nonzero() == 0
    # Queries that do not see it.
    options: dict[str, Any] = {"window": (100, 0)}
    out = ha.attention_kvcache(q, cache, table, seqlens, **options)
    k = torch.where(k == bad, 0.0, k.nan_to_num(0, 0))
    oracle = ha.reference.attention(q, k, v, causal=True, **options)
    model, _ = ha.reference.fp8_attention_kvcache(q, k, v, recipe=recipe, **options)
    assert relative_error(out, oracle) <= error_budget(relative_error(model, oracle), torch.float32, device=device)
    whole = ha.attention_kvcache(q, cache, table, seqlens)
    assert whole.isnan().all() == (bad != 2.0**99)


@pytest.mark.parametrize("magnitude", [2.0**-100, 2.0**60])
@BOTH
def test_keys_of_any_size(recipe: ha.Recipe, magnitude: float, device: str) -> None:
    q, k, v = biased(device, M=DECODED)
    cache, table, seqlens = filled(k * magnitude, v, recipe)
    oracle = ha.reference.attention(q, k, v, causal=True)
    out = ha.attention_kvcache(q, cache, table, seqlens, sm_scale=0.125 / magnitude if magnitude > 1 else 2.0**60)
    if magnitude > 1:
        model, _ = ha.reference.fp8_attention_kvcache(q, k, v, recipe=recipe)
        assert relative_error(out, oracle) <= error_budget(relative_error(model, oracle), torch.float32, device=device)
    else:
        # Scores of nothing.
        assert relative_error(out, v.mean(2, keepdim=True).expand_as(out)) < 1.5


Mutation = Callable[[ha.PagedKVCache], dict[str, Any]]

#: What may go wrong, and whether every option shows it.
MUTATIONS: dict[str, tuple[Mutation, bool]] = {
    "no_mean": (lambda cache: {"k_mean": torch.zeros_like(cache.k8[:, :, 0], dtype=torch.bfloat16)}, False),
    "descales_of_the_next_key": (lambda cache: {"k_descale": cache.k_descale.roll(1, 2)}, True),
}


@pytest.mark.parametrize("options", [{"softcap": 50.0}, {"sinks": [22.0, 26.0]}, {}], ids=["softcap", "sinks", "lse"])
@pytest.mark.parametrize("M", [DECODED, PREFILLED])
@pytest.mark.parametrize("splits", [1, 2])
@BOTH
def test_what_the_mean_took_comes_back(
    recipe: ha.Recipe, options: dict[str, Any], M: int, splits: int, device: str
) -> None:
    """To scores under a softcap, beside sinks, and to the lse: without it, they are far off."""
    q, k, v = biased(device, M=M)
    k = k * torch.linspace(0.5, 2, N, device=device)[:, None]
    if "sinks" in options:
        options = {"sinks": torch.tensor(options["sinks"], device=device)}
    cache, table, seqlens = filled(k, v, recipe)
    oracle, oracle_lse = ha.reference.attention(q, k, v, causal=True, return_lse=True, **options)
    model, model_lse = ha.reference.fp8_attention_kvcache(q, k, v, recipe=recipe, **options)

    def excess(cache: ha.PagedKVCache) -> tuple[float, float]:
        out, lse = ha.attention_kvcache(
            q, cache, table, seqlens, num_splits=splits, return_lse=True, out_dtype=torch.float32, **options
        )
        alone = ha.attention_kvcache(q, cache, table, seqlens, num_splits=splits, out_dtype=torch.float32, **options)
        assert torch.equal(alone, out)
        softcap = options.get("softcap")
        budget = error_budget(relative_error(model, oracle), torch.float32, device=device, softcap=softcap)
        lse_budget = error_budget(relative_error(model_lse, oracle_lse), torch.float32, device=device, softcap=softcap)
        return relative_error(out, oracle) / budget, relative_error(lse, oracle_lse) / lse_budget

    assert max(excess(cache)) <= 1
    for name, (mutation, always) in MUTATIONS.items():
        if recipe == ha.FAST and name != "no_mean":
            continue  # most keys have the same descale
        of_out, of_lse = excess(dataclasses.replace(cache, **mutation(cache)))
        assert of_lse > 1
        assert not (always or options) or of_out > 1


@pytest.mark.parametrize("kernel", [decode, prefill])
def test_escapes_beside_int8_keys(kernel: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """V's descales alone make classes of a page's keys; without the second pass, which can fail, keys are missing."""
    M = DECODED if kernel is decode else PREFILLED
    q, k, v = biased(device, M=M)
    v[:, :, 7::31] *= 2.0**9
    k[:, :, 3::5] *= 2.0**-9
    cache, table, seqlens = filled(k, v, ha.BALANCED)
    oracle = ha.reference.attention(q, k, v, causal=True)
    model, _ = ha.reference.fp8_attention_kvcache(q, k, v, recipe=ha.BALANCED)
    out = ha.attention_kvcache(q, cache, table, seqlens, num_splits=1)
    assert relative_error(out, oracle) <= error_budget(relative_error(model, oracle), torch.float32, device=device)
    if device == "cpu":
        monkeypatch.setattr(kernel, "keys_of_class", lambda a, *_: torch.zeros_like(a))
        missing = ha.attention_kvcache(q, cache, table, seqlens, num_splits=1)
        assert not relative_error(missing, oracle) <= 2 * relative_error(model, oracle)
