"""What is subtracted from all keys of a paged cache, and int8 keys."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.testing import error_budget, relative_error
from helion_attn.types import key_descales
from helpers.paged import make_cache

N = 300

#: Queries of two heads that share one of keys: for `fp8_attn_decode`, and for `fp8_attn_prefill`.
DECODED, PREFILLED = 3, 50

BOTH = pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=str)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def biased(device: str, D: int = 64, M: int = PREFILLED, H_kv: int = 1) -> Tensors:
    """Q, K, V and K's mean: 10 and more in half of the channels. Q's is 0.5, so scores without are 20 or so smaller."""
    q, k, v = make_qkv("randn", 1, 2 * H_kv, H_kv, M, N, D, torch.float32, device)
    mean = torch.zeros(H_kv, D, device=device)
    mean[:, : D // 2] = 10 + torch.arange(H_kv, device=device).unsqueeze(1)
    return q + 0.5, k + mean.unsqueeze(1), v, mean


def filled(
    k: torch.Tensor, v: torch.Tensor, recipe: ha.Recipe, k_mean: torch.Tensor | None, *cuts: int
) -> tuple[ha.PagedKVCache, torch.Tensor, torch.Tensor]:
    """A cache that keys up to each of `cuts` came to, and the rest."""
    lengths, H_kv, D = [k.size(2)], k.size(1), k.size(3)
    cache, table, seqlens = make_cache(lengths, H_kv, D, device=k.device.type, recipe=recipe, k_mean=k_mean)
    for first, end in itertools.pairwise([0, *cuts, k.size(2)]):
        start = torch.tensor([first], dtype=torch.int32, device=k.device)
        ha.append_kvcache(cache, k[:, :, first:end], v[:, :, first:end], table, start)
    return cache, table, seqlens


@pytest.mark.parametrize("D", [64, 80, 256, 400])
@BOTH
def test_what_is_stored(recipe: ha.Recipe, D: int, device: str) -> None:
    """Keys less the mean, within half a step of either format; int8 keys of a closed page within half a step more."""
    _, k, v, mean = biased(device, D, H_kv=2)
    cache, table, _ = filled(k, v, recipe, mean, 200)
    pages = table[0, : -(-N // cache.page_size)].tolist()
    descales = key_descales(cache.k_descale[pages])
    stored = (cache.k8[pages].float() * descales.unsqueeze(3)).transpose(0, 1).flatten(1, 2)[:, :N, :D]
    rest = k[0] - mean.unsqueeze(1)
    # [H_kv, N, 1], and what it was before the page closed
    descale = descales.transpose(0, 1).flatten(1)[:, :N, None]
    if recipe == ha.FAST:
        bound = torch.maximum(rest.abs() * 2.0**-4, descale * 2.0**-10)
        bound = bound + (stored.abs() <= descale * 2.0**-6) * descale * 2.0**-10
        assert torch.all((stored - rest).abs() <= bound * 1.01)
        return
    own = rest.abs().amax(2, keepdim=True) / 127
    full = N // cache.page_size * cache.page_size
    bound = 0.501 * own
    bound[:, :full] += 0.501 * descale[:, :full]
    assert torch.all((stored - rest).abs() <= bound)
    # Each key of an open page uses all of int8's range, and the largest of a closed one.
    largest = cache.k8[pages].transpose(0, 1).flatten(1, 2)[:, :N].abs().amax(2)
    assert torch.all(largest[:, full:] == 127)
    assert torch.all(largest[:, :full].unflatten(1, (-1, cache.page_size)).amax(2) == 127)


@pytest.mark.thorough(but=8)
@pytest.mark.parametrize(
    ("options", "D"),
    [({}, 64), ({"softcap": 50.0}, 64), ({"sinks": [22.0, 26.0]}, 64), ({}, 512)],
    ids=["lse", "softcap", "sinks", "d512"],
)
@pytest.mark.parametrize("M", [DECODED, PREFILLED])
@pytest.mark.parametrize("splits", [1, 2])
@BOTH
def test_what_the_mean_took_comes_back(
    recipe: ha.Recipe, options: dict[str, Any], D: int, M: int, splits: int, device: str
) -> None:
    """To scores under a softcap, beside sinks, and to the lse: without it, they are far off."""
    q, k, v, mean = biased(device, D, M)
    k = k * torch.linspace(0.5, 2, N, device=device)[:, None]
    if "sinks" in options:
        options = {"sinks": torch.tensor(options["sinks"], device=device)}
    cache, table, seqlens = filled(k, v, recipe, mean)
    oracle, oracle_lse = ha.reference.attention(q, k, v, causal=True, return_lse=True, **options)
    model, model_lse = ha.reference.fp8_attention_kvcache(q, k, v, recipe=recipe, k_mean=mean, **options)

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
    of_out, of_lse = excess(dataclasses.replace(cache, k_mean=None))
    assert of_lse > 1
    assert (of_out > 1) == bool(options)


@pytest.mark.parametrize("options", [{}, {"window": (100, 0)}, {"sm_scale": 0.3}], ids=["plain", "window", "scale"])
@BOTH
def test_a_mean_changes_nothing_of_a_softmax(recipe: ha.Recipe, options: dict[str, Any], device: str) -> None:
    """K with it, and a cache that takes it off, has the output of K without: all bits."""
    q, k, v, mean = biased(device)
    # As a cache subtracts it.
    rest = k - mean.unsqueeze(1)
    with_mean, table, seqlens = filled(k, v, recipe, mean)
    without, same_table, _ = filled(rest, v, recipe, None)
    assert torch.equal(table, same_table)
    found, found_lse = ha.attention_kvcache(q, with_mean, table, seqlens, return_lse=True, **options)
    expected, expected_lse = ha.attention_kvcache(q, without, table, seqlens, return_lse=True, **options)
    assert torch.equal(found, expected)
    scale = options.get("sm_scale", 0.125)
    assert torch.allclose(found_lse, expected_lse + scale * (q @ mean.T).squeeze(3), rtol=2.0**-20)


@BOTH
def test_how_keys_came_changes_nothing(recipe: ha.Recipe, device: str) -> None:
    """All that is stored, and what the last queries get."""
    q, k, v, mean = biased(device, M=DECODED)
    found = []
    for cuts in ((), (128,), (127, 128), (60, 128, 200), tuple(range(1, 131))):
        cache, table, seqlens = filled(k, v, recipe, mean, *cuts)
        pages = table[0, : -(-N // cache.page_size)].tolist()
        k8 = cache.k8.view(torch.uint8)[pages].transpose(0, 1).flatten(1, 2)[:, :N]
        rest = cache.v8.view(torch.uint8)[pages], cache.k_descale[pages], cache.v_descale[pages]
        out, lse = ha.attention_kvcache(q, cache, table, seqlens, num_splits=2, return_lse=True, softcap=50.0)
        found.append((k8, *rest, out, lse))
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(other, found[0], strict=True))


@BOTH
def test_sequences_share_a_prefix(recipe: ha.Recipe, device: str) -> None:
    """The second has the first's two pages and a third of its own, and what it would have alone."""
    q, k, v, mean = biased(device, M=DECODED)
    cache, table, seqlens = filled(k, v, recipe, mean)
    free = next(page for page in range(cache.k8.size(0)) if page not in table[0, :3].tolist())
    other = table.clone()
    other[0, 2] = free
    start = torch.full_like(seqlens, 2 * cache.page_size)
    tail = k[:, :, 256:] - 0.5, v[:, :, 256:]
    ha.append_kvcache(cache, *tail, other, start)
    alone, table_alone, _ = filled(torch.cat((k[:, :, :256], tail[0]), 2), v, recipe, mean)
    options: dict[str, Any] = {"return_lse": True, "softcap": 50.0, "num_splits": 1}
    both = ha.attention_kvcache(q.expand(2, -1, -1, -1), cache, torch.cat((table, other)), seqlens.repeat(2), **options)
    first = ha.attention_kvcache(q, filled(k, v, recipe, mean)[0], table, seqlens, **options)
    second = ha.attention_kvcache(q, alone, table_alone, seqlens, **options)
    for x, a, b in zip(both, first, second, strict=True):
        torch.testing.assert_close(x, torch.cat((a, b)), rtol=2.0**-20, atol=2.0**-20)  # a CPU's additions differ


@pytest.mark.parametrize("M", [DECODED, PREFILLED])
@BOTH
def test_a_row_without_keys_has_no_product(recipe: ha.Recipe, M: int, device: str) -> None:
    """However large it were: 0, and -inf or the sink."""
    q, k, v, mean = biased(device, M=M)
    cache, table, seqlens = filled(k, v, recipe, mean)
    q[:, :, 0] *= 1e6
    sinks = torch.tensor([3.0, -4.0], device=device)
    for splits, given in itertools.product((1, 2), (None, sinks)):
        out, lse = ha.attention_kvcache(
            q, cache, table, torch.full_like(seqlens, M - 1), num_splits=splits, return_lse=True, sinks=given
        )
        assert torch.all(out[:, :, 0] == 0)
        alone = torch.full_like(sinks, float("-inf")) if given is None else sinks
        torch.testing.assert_close(lse[0, :, 0], alone)


#: Base of RoPE's angles, and pairs of channels, of 32, that have a bias.
TURNING = {"none": (None, range(26, 30)), "slow": (1e6, range(26, 30)), "fast": (1e4, range(18, 22))}

KEYS = 4096


def rotated_keys(base: float | None, pairs: range, keys: int, seed: int) -> torch.Tensor:
    """Keys [1, 1, keys, 64] with biases of 20 in both channels of some pairs, rotated by halves."""
    k = torch.randn(1, 1, keys, 64, generator=torch.Generator().manual_seed(seed))
    k[..., [*pairs, *(pair + 32 for pair in pairs)]] += 20
    if base is None:
        return k
    angles = torch.outer(torch.arange(float(keys)), base ** (-torch.arange(32) / 32))
    return ha.reference.apply_rope(k, angles.cos(), angles.sin()).float()


def steady_mean(k: torch.Tensor, **options: Any) -> torch.Tensor:
    """Of `cache_constants`."""
    return ha.cache_constants(k, k, **options)[0]


@pytest.mark.parametrize("kind", TURNING)
def test_a_steady_mean_is_of_what_rope_does_not_turn(kind: str) -> None:
    base, pairs = TURNING[kind]
    k = rotated_keys(base, pairs, 1024, 1)
    mean = steady_mean(k)
    turns = torch.ones(64, dtype=torch.bool)
    if kind != "fast":
        turns[[*pairs, *(pair + 32 for pair in pairs)]] = False
        torch.testing.assert_close(mean[0, ~turns], k.mean(2)[0, 0, ~turns])
    assert not mean[0, turns].any()
    assert torch.equal(mean, steady_mean(k.transpose(1, 2), layout="bshd"))


@pytest.mark.parametrize("kind", TURNING)
def test_a_steady_mean_of_a_short_prompt_serves_a_long_one(kind: str) -> None:
    """No error is larger than without, and where biases stay it is that of keys without biases."""
    base, pairs = TURNING[kind]
    k, short = rotated_keys(base, pairs, KEYS, 0), rotated_keys(base, pairs, 512, 1)
    g = torch.Generator().manual_seed(2)
    q, v = torch.randn(1, 1, 64, 64, generator=g), torch.randn(1, 1, KEYS, 64, generator=g)
    q[..., [*pairs, *(pair + 32 for pair in pairs)]] *= 0.2
    oracle = ha.reference.attention(q, k, v, causal=True)

    def error(k_mean: torch.Tensor | None) -> float:
        return relative_error(ha.reference.fp8_attention_kvcache(q, k, v, k_mean=k_mean)[0], oracle)

    steady, without, plain = (error(x) for x in (steady_mean(short), None, short.mean((0, 2))))
    assert steady <= 1.02 * without
    if kind == "fast":
        assert plain > 1.1 * steady, "the plain mean of 512 keys"
    else:
        assert steady <= 1.1 * error(k.mean((0, 2)))
        assert without > 1.3 * steady


def test_a_mean_is_steady_for_so_many_positions() -> None:
    """Biases that turn half way in 8,192 positions are steady over the 2,000 of the prompt."""
    k = rotated_keys((8192 / torch.pi) ** (32 / 28), range(28, 29), 2000, 0)
    assert not steady_mean(k).any()
    assert steady_mean(k, positions=2000)[0, [28, 60]].abs().amax() > 10
    with pytest.raises(ValueError, match="positions is 0; it must"):
        steady_mean(k, positions=0)


@pytest.mark.parametrize("rotary", [64, 32, 16])
@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("phase", [0.0, 0.5], ids=["first", "second"])
def test_a_pair_turns_together(phase: float, neighbours: bool, rotary: int) -> None:
    """A bias that is all in one channel, which alone looks steady at the top of its cosine."""
    g, pair, half = torch.Generator().manual_seed(0), 6, rotary // 2
    places = [2 * pair, 2 * pair + 1] if neighbours else [pair, pair + half]
    k = torch.randn(1, 1, 512, 64, generator=g)
    turned = torch.arange(512) * 2e-4 + phase * torch.pi
    k[..., places] += 60 * torch.stack([turned.cos(), turned.sin()], 1)
    assert not steady_mean(k)[0, places].any()


@pytest.mark.parametrize(("moves", "stays"), [(0.8, True), (1.3, False)])
def test_how_far_a_steady_mean_moves(moves: float, stays: bool) -> None:
    """By so many times itself over 4,096 positions; and between halves that are further apart than positions."""
    k = (1 + torch.arange(1024.0) * moves / (4096 - 511.5 * moves)).view(1, 1, -1, 1).repeat(1, 1, 1, 16)
    assert bool(steady_mean(k, positions=4096).all()) == stays
    far = torch.tensor([-moves / 2, moves / 2]).repeat_interleave(500).view(1, 1, -1, 1) + torch.ones(16)
    assert bool(steady_mean(far, positions=100).all()) == stays
