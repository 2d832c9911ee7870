"""Factors of channels in a paged cache: what Q's channels are multiplied by, and K's divided by."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.testing import error_budget, relative_error
from helpers.paged import make_cache

N = 300

#: Queries of two heads that share one of keys: for `fp8_attn_decode`, and for `fp8_attn_prefill`.
DECODED, PREFILLED = 3, 50

BOTH = pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=str)
OF_KERNELS = pytest.mark.parametrize("M", [DECODED, PREFILLED])

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def large(keys: int, D: int, channels: list[int], times: float, M: int = 64, H: int = 2, seed: int = 0) -> Tensors:
    """Q, K, V of N(0, 1) for one KV head, but some channels of K so many times as large, and Q's by the root less."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, S, D, generator=g) for heads, S in ((H, M), (1, keys), (1, keys)))
    q[..., channels] /= times**0.5
    k[..., channels] *= times
    return q, k, v


def filled(
    k: torch.Tensor, v: torch.Tensor, recipe: ha.Recipe, constants: dict[str, Any], *cuts: int
) -> tuple[ha.PagedKVCache, torch.Tensor, torch.Tensor]:
    """A cache that keys up to each of `cuts` came to, and the rest."""
    sizes = k.size(1), k.size(3), v.size(3)
    cache, table, seqlens = make_cache([k.size(2)], *sizes, device=k.device.type, recipe=recipe, **constants)
    for first, end in itertools.pairwise([0, *cuts, k.size(2)]):
        start = torch.tensor([first], dtype=torch.int32, device=k.device)
        ha.append_kvcache(cache, k[:, :, first:end], v[:, :, first:end], table, start)
    return cache, table, seqlens


def powers(H_kv: int, D: int, device: str) -> torch.Tensor:
    """[H_kv, D], other ones of each head."""
    exponents = torch.randint(-3, 4, (H_kv, D), generator=torch.Generator().manual_seed(D))
    return torch.exp2(exponents.float()).to(device)


@pytest.mark.thorough(but=7)
@pytest.mark.parametrize(("D", "D_v"), [(64, 64), (80, 64), (512, 64)])
@OF_KERNELS
@BOTH
def test_factors_are_exact(recipe: ha.Recipe, M: int, D: int, D_v: int, device: str) -> None:
    """A cache with factors has all bits of one without, for a Q and K that have them already."""
    q, k, v = make_qkv("randn", 1, 4, 2, M, N, D, torch.float32, device)
    v = v[..., :D_v].contiguous()
    mean, factors = torch.full((2, D), 0.5, device=device), powers(2, D, device)
    cache, table, seqlens = filled(k, v, recipe, {"k_mean": mean, "channel_factors": factors})
    equalised_q = q * factors.repeat_interleave(2, 0).unsqueeze(1)
    equalised_k = (k - mean.unsqueeze(1)) / factors.unsqueeze(1)
    without, _, _ = filled(equalised_k, v, recipe, {})
    for name in ("k8", "v8", "k_descale", "v_descale"):
        x, y = (getattr(of, name)[table[0, :3].long()].view(torch.uint8) for of in (cache, without))
        assert torch.equal(x, y)
    found, lse = ha.attention_kvcache(q, cache, table, seqlens, num_splits=2, return_lse=True)
    expected, lse_without = ha.attention_kvcache(equalised_q, without, table, seqlens, num_splits=2, return_lse=True)
    assert torch.equal(found, expected)
    of_mean = (q.unflatten(1, (2, 2)) * mean.view(2, 1, 1, D)).sum(4).flatten(1, 2) * D**-0.5
    torch.testing.assert_close(lse, lse_without + of_mean, rtol=2.0**-18, atol=2.0**-18)
    wrong = dataclasses.replace(cache, channel_factors=None)
    assert not torch.equal(ha.attention_kvcache(q, wrong, table, seqlens, num_splits=2), expected)


@pytest.mark.parametrize("options", [{}, {"softcap": 50.0}], ids=["plain", "softcap"])
@OF_KERNELS
@BOTH
def test_the_rounding_model_has_them(recipe: ha.Recipe, M: int, options: dict[str, Any], device: str) -> None:
    q, k, v = (x.to(device) for x in large(N, 64, [5, 17, 40], 30, M))
    k = k + 2
    factors = torch.ones(1, 64, device=device)
    factors[:, [5, 17, 40]] = 8
    constants: dict[str, Any] = {"k_mean": k.mean((0, 2)), "channel_factors": factors}
    cache, table, seqlens = filled(k, v, recipe, constants)
    oracle, oracle_lse = ha.reference.attention(q, k, v, causal=True, return_lse=True, **options)
    model, model_lse = ha.reference.fp8_attention_kvcache(q, k, v, recipe=recipe, **constants, **options)
    out, lse = ha.attention_kvcache(q, cache, table, seqlens, return_lse=True, **options)
    for x, of_model, of_oracle in ((out, model, oracle), (lse, model_lse, oracle_lse)):
        budget = error_budget(
            relative_error(of_model, of_oracle), torch.float32, device=device, softcap=options.get("softcap")
        )
        assert relative_error(x, of_oracle) <= budget
    plain, _ = ha.reference.fp8_attention_kvcache(q, k, v, recipe=recipe, k_mean=constants["k_mean"], **options)
    # Numbers of e4m3 keep their resolution beside larger ones.
    assert recipe == ha.FAST or relative_error(plain, oracle) > 1.5 * relative_error(model, oracle)


@BOTH
def test_pages_of_heads_have_the_factors_of_their_heads(recipe: ha.Recipe, device: str) -> None:
    q, k, v = make_qkv("randn", 2, 4, 2, 1, N, 64, torch.float32, device)
    factors = powers(2, 64, device)
    cache, table, seqlens = make_cache([N, N], 2, 64, device=device, recipe=recipe, channel_factors=factors)
    ha.append_kvcache(cache, k, v, table, torch.zeros_like(seqlens))
    few, lengths = table.unsqueeze(1).expand(-1, 2, -1).contiguous(), seqlens.unsqueeze(1).expand(-1, 2).contiguous()
    found = ha.attention_kvcache(q, cache, few, lengths, num_splits=1)
    torch.testing.assert_close(
        found, ha.attention_kvcache(q, cache, table, seqlens, num_splits=1), rtol=2.0**-20, atol=2.0**-20
    )


# --- cache_constants ------------------------------------------------------------------------------------------------


def factors_of(q: torch.Tensor, k: torch.Tensor, **options: Any) -> torch.Tensor:
    return ha.cache_constants(q, k, **options)[1]


@pytest.mark.parametrize(("channels", "times"), [([5, 17, 40], 30.0), ([5, 40], 100.0), ([*range(8)], 10.0)], ids=str)
def test_a_cache_has_the_errors_of_dense_attention(channels: list[int], times: float) -> None:
    """With another prompt's factors; and without, 1.6 times as large ones and more."""
    q, k, v = large(1024, 64, channels, times)
    other_q, other_k, _ = large(512, 64, channels, times, 512, seed=1)
    oracle = ha.reference.attention(q, k, v, causal=True)
    dense = ha.reference.fp8_attention(q, k, v, causal=True)
    assert isinstance(dense, torch.Tensor)
    factors = factors_of(other_q, other_k, rotary=0)
    cached, _ = ha.reference.fp8_attention_kvcache(q, k, v, channel_factors=factors)
    without, _ = ha.reference.fp8_attention_kvcache(q, k, v)
    # Two channels of K's own set its descales, so that a second rounding of int8 keys counts fully.
    bound = 1.2 if channels == [5, 40] else 1.12
    assert relative_error(cached, oracle) <= bound * relative_error(dense, oracle)
    assert relative_error(without, oracle) > 1.6 * relative_error(cached, oracle)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("base", [1e2, 1e4, 1e7])
def test_factors_serve_at_other_positions(base: float, interleaved: bool) -> None:
    """RoPE turns channels that are large before it; factors are those of 256 keys, and queries see later ones."""
    q, k, v = large(2048, 64, [7, 30, 61], 30)
    short_q, short_k, _ = large(256, 64, [7, 30, 61], 30, 256, seed=1)
    at = torch.arange(16384.0)
    angles = torch.outer(at, base ** (-torch.arange(32) / 32))
    cos, sin = angles.cos(), angles.sin()

    def rotated(x: torch.Tensor, first: int) -> torch.Tensor:
        here = slice(first, first + x.size(2))
        return ha.reference.apply_rope(x, cos[here], sin[here], interleaved=interleaved).float()

    q, k = rotated(q, 16384 - 64), rotated(k, 16384 - 2048)
    oracle = ha.reference.attention(q, k, v, causal=True)
    factors = factors_of(rotated(short_q, 0), rotated(short_k, 0), interleaved=interleaved)
    found, _ = ha.reference.fp8_attention_kvcache(q, k, v, channel_factors=factors)
    without, _ = ha.reference.fp8_attention_kvcache(q, k, v)
    assert relative_error(found, oracle) <= 0.55 * relative_error(without, oracle)


@pytest.mark.parametrize(
    ("options", "partner"),
    [({}, 37), ({"interleaved": True}, 4), ({"rotary": 32}, 21), ({"rotary": 32, "interleaved": True}, 4)],
    ids=str,
)
def test_a_pair_shares_a_factor(options: dict[str, Any], partner: int) -> None:
    q, k, _ = large(256, 64, [5], 64, 256)
    factors = factors_of(q, k, **options)
    others = [c for c in range(64) if c not in (5, partner)]
    assert factors[0, 5] == factors[0, partner] == 8
    assert torch.all(factors[0, others] == 1)
    alone = factors_of(q, k, rotary=4)
    assert alone[0, 5] == 16
    assert alone[0, partner] == 1


def test_factors_of_groups_and_heads() -> None:
    """A KV head's own channels, by all queries of its group."""
    (q, k, _), (q_other, k_other, _) = large(300, 32, [3, 19], 16, 100, 3), large(300, 32, [8, 24], 16, 100, 3)
    q, k = torch.cat((q, q_other), 1), torch.cat((k, k_other), 1)
    factors = factors_of(q, k)
    assert (factors.dtype, tuple(factors.shape)) == (torch.float32, (2, 32))
    expected = torch.ones(2, 32)
    expected[[0, 0, 1, 1], [3, 19, 8, 24]] = 8
    assert torch.equal(factors, expected)
    assert torch.equal(factors, factors_of(q.transpose(1, 2), k.transpose(1, 2), layout="bshd"))
    assert torch.equal(factors, factors_of(q.half(), k.half()))


def test_what_changes_no_factor() -> None:
    """Sizes that are alike; one huge key; what K loses; and rows that are too few."""
    q, k, _ = large(300, 32, [], 1, 300)
    assert torch.all(factors_of(q, k) == 1)
    sink = k.clone()
    sink[:, :, 0, 4] = 1e4
    assert torch.all(factors_of(q, sink) == 1)
    assert torch.all(factors_of(q, k + 100) == 1)
    assert torch.all(factors_of(q[:, :, :1], k) == 1)
    assert torch.all(factors_of(q, k[:, :, :1]) == 1)
    unknown = k.clone()
    unknown[:, :, 5, [2, 9]] = torch.tensor([float("nan"), float("inf")])
    unknown[..., 3] = 0
    assert torch.all(factors_of(q, unknown, rotary=0) == 1)
