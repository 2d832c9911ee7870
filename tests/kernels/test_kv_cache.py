"""The paged KV cache: appending to it, and attention over it, against the fp64 oracle and the rounding model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.kernels.merge_splits import MANY_SPLITS
from helion_attn.numerics import E4M3_MAX
from helion_attn.testing import TANH_ERROR, error_budget, relative_error
from helion_attn.types import CACHE_RECIPE, key_descales
from helpers.cases import row_errors
from helpers.packing import stored_at
from helpers.paged import NO_PAGE, append_all, make_cache

Poisoned = Callable[[], AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True, eq=False)
class Decoding:
    """Sequences of several lengths in a cache, queries, and the right answers for each sequence."""

    q: torch.Tensor  # [B, H, M, D]
    k: torch.Tensor  # [B, H_kv, N, D]
    v: torch.Tensor  # [B, H_kv, N, D_v]
    lengths: list[int]
    cache: ha.PagedKVCache
    table: torch.Tensor
    seqlens: torch.Tensor
    causal: bool = True
    masks: dict[str, Any] = dataclasses.field(default_factory=dict)  # window, softcap, sinks
    recipe: ha.Recipe = CACHE_RECIPE
    k_mean: torch.Tensor | None = None

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 `(out, lse)`."""
        options = {"out_dtype": torch.float32, "causal": self.causal, "return_lse": True} | self.masks | options
        attend: Any = ha.attention_kvcache
        return attend(self.q, self.cache, self.table, self.seqlens, **options)

    def sequence(self, b: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, K and V of one."""
        n = self.lengths[b]
        return self.q[b : b + 1], self.k[b : b + 1, :, :n], self.v[b : b + 1, :, :n]

    def model(self, b: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What the rounding model makes of one sequence."""
        return ha.reference.fp8_attention_kvcache(*self.sequence(b), recipe=self.recipe, k_mean=self.k_mean, **options)

    def check(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Every sequence within its budget; those without keys give 0, and -inf or their sinks."""
        sinks, softcap = self.masks.get("sinks"), self.masks.get("softcap")
        for b, n in enumerate(self.lengths):
            if n == 0:
                alone = torch.full_like(lse[b], float("-inf")) if sinks is None else sinks[:, None].expand_as(lse[b])
                assert torch.all(out[b] == 0)
                assert torch.allclose(lse[b], alone)
                continue
            options = {"causal": self.causal} | self.masks
            oracle, oracle_lse = ha.reference.attention(*self.sequence(b), **options, return_lse=True)
            model, model_lse = self.model(b, **options)
            error = relative_error(out[b : b + 1], oracle)
            budget = error_budget(relative_error(model, oracle), out.dtype, device=out.device, softcap=softcap)
            assert error <= budget, f"sequence {b}: error {error:.4g}, budget {budget:.4g}"
            finite = oracle_lse > float("-inf")
            assert torch.all(lse[b : b + 1][~finite] == float("-inf"))
            if finite.any():
                error = relative_error(lse[b : b + 1][finite], oracle_lse[finite])
                model_error = relative_error(model_lse[finite], oracle_lse[finite])
                budget = error_budget(model_error, torch.float32, device=out.device)
                if out.is_cuda and softcap:
                    budget += softcap * TANH_ERROR / oracle_lse[finite].abs().mean().item()
                assert error <= budget


def make_decoding(
    kind: str,
    lengths: list[int],
    H: int,
    H_kv: int,
    M: int,
    D: int,
    device: str,
    D_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    scale: float = 1.0,
    recipe: ha.Recipe = CACHE_RECIPE,
) -> Decoding:
    q, k, v = make_qkv(kind, len(lengths), H, H_kv, M, max(lengths), D, dtype, device, D_v=D_v)
    # As many queries as make_qkv was asked for, of sequences of any length.
    q, k = q * scale, k * scale
    k_mean = k.float().mean((0, 2)) if kind == "k_channels" else None
    cache, table, seqlens = make_cache(lengths, H_kv, D, D_v, device, recipe=recipe, k_mean=k_mean)
    append_all(cache, k, v, table, lengths)
    return Decoding(q, k, v, lengths, cache, table, seqlens, causal, recipe=recipe, k_mean=k_mean)


RAGGED = [300, 0, 1, 128, 129, 17]

BOTH = pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=str)

#: Of these two, the second has keys with a mean that the cache takes off.
KIND = {ha.FAST: "randn", ha.BALANCED: "k_channels"}

#: Behind a first key with 90% of the probability.
BEHIND_A_SINK = "sink_v_small_90"

#: So many queries, of two heads each, are rows for `fp8_attn_prefill`: two tiles, of which the second is not full.
PREFILLED = 50


@pytest.mark.thorough(but=6)
@pytest.mark.parametrize(
    ("kind", "splits", "M"),
    [
        # 5 are more than the pages
        *(("randn", None, 2), ("outlier", 1, 2), ("biased_v", 2, 2), ("sink", 5, 2)),
        *(("outlier", None, PREFILLED), ("biased_v", 5, PREFILLED)),
        *((BEHIND_A_SINK, 2, 2), (BEHIND_A_SINK, 1, PREFILLED)),
    ],
)
@BOTH
def test_ragged_lengths(
    kind: str, splits: int | None, M: int, recipe: ha.Recipe, device: str, poisoned: Poisoned
) -> None:
    case = make_decoding(kind, RAGGED, 4, 2, M, 64, device, recipe=recipe)
    with poisoned():
        out, lse = case.run(num_splits=splits)
    case.check(out, lse)


def test_more_splits_than_are_merged_at_once(device: str) -> None:
    lengths = [(MANY_SPLITS + 2) * 128, 1]
    case = make_decoding("randn", lengths, 8, 1, 4, 32, device)
    out, lse = case.run(num_splits=MANY_SPLITS + 2)
    case.check(out, lse)


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize(("splits", "M"), [(1, 2), (3, 2), (2, PREFILLED)])
@BOTH
def test_pages_outside_the_window_are_not_read(splits: int, M: int, recipe: ha.Recipe, device: str) -> None:
    case = make_decoding(KIND[recipe], [700, 390], 4, 2, M, 64, device, recipe=recipe)
    case = dataclasses.replace(case, masks={"window": (100, 0)})
    expected = case.run(num_splits=splits)
    table = case.table.clone()
    for b, n in enumerate(case.lengths):
        table[b, : (n - M - 100) // case.cache.page_size] = NO_PAGE
    for actual, wanted in zip(dataclasses.replace(case, table=table).run(num_splits=splits), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize(("scale", "D"), [(0.03, 64), (5.0, 64), (30.0, 64), (30.0, 512)])
@BOTH
def test_scores_of_any_size(scale: float, D: int, recipe: ha.Recipe, device: str) -> None:
    """Logits of up to some 0.005, 150 and 5000, of both signs."""
    case = make_decoding("randn", [300 if D == 64 else 70], 4, 2, 2, D, device, scale=scale, recipe=recipe)
    case.check(*case.run(num_splits=2))


@pytest.mark.thorough(but=9)
@pytest.mark.parametrize(
    ("kind", "M", "D", "N"),
    [
        ("randn", 3, 64, 300),
        ("outlier", 3, 64, 300),
        ("biased_v", 3, 64, 300),
        ("outlier", PREFILLED, 64, 300),
        *((BEHIND_A_SINK, M, 64, 300) for M in (3, PREFILLED)),
        *(("outlier", M, 512, 100) for M in (3, PREFILLED)),
        ("k_channels", 3, 64, 300),
    ],
)
@BOTH
def test_matches_the_rounding_model(kind: str, M: int, D: int, N: int, recipe: ha.Recipe) -> None:
    case = make_decoding(kind, [N], 4, 2, M, D, "cpu", recipe=recipe)
    out, lse = case.run(num_splits=1)
    model, model_lse = case.model(0)
    # A score that differs in its last bit may take a P over a rounding boundary: that is one row in many.
    assert row_errors(out, model).median() < 1e-6
    assert row_errors(out, model).max() < 2.0**-7
    assert relative_error(lse, model_lse) < 1e-6


@pytest.mark.parametrize("scale", [1.0, 5.0])
@BOTH
def test_a_query_has_the_same_bits_in_both_kernels(scale: float, recipe: ha.Recipe, device: str) -> None:
    """Alone, in `fp8_attn_decode`, and among many, in `fp8_attn_prefill`, with P of each page against the same."""
    many = make_decoding(BEHIND_A_SINK, [400, 129], 4, 2, PREFILLED, 64, device, scale=scale, recipe=recipe)
    alone = dataclasses.replace(many, q=many.q[:, :, -1:].contiguous())
    (out, lse), (expected, expected_lse) = (x.run(num_splits=1, out_dtype=torch.bfloat16) for x in (alone, many))
    assert torch.equal(out, expected[:, :, -1:])
    assert torch.allclose(lse, expected_lse[:, :, -1:], rtol=4 * torch.finfo(torch.float32).eps, atol=0)


def of_one_direction(case: Decoding, of_q: torch.Tensor, of_k: torch.Tensor) -> Decoding:
    """With scores of q k^T / sqrt(D) besides, of numbers [M] and [N], from one channel."""
    q, k = case.q.clone(), case.k.clone()
    q[..., 0], k[..., 0] = of_q, of_k * q.size(3) ** 0.5
    append_all(case.cache, k, case.v, case.table, case.lengths)
    return dataclasses.replace(case, q=q, k=k)


#: What a row's scores have besides, by query, and by page.
FAR_FROM_ZERO: dict[str, tuple[list[float], list[float]]] = {
    "large": ([1.0, 1.0, 60.0], [8.0, 30.0, 30.0, 8.0]),
    "negative": ([1.0, 1.0, -60.0], [30.0, 25.0, 30.0, 30.0]),
    "rising": ([1.0, 1.0, 60.0], [-40.0, -40.0, -1.0, -2.0]),
    "far_below": ([1.0, 1.0, 60.0], [-40.0, 0.0, -40.0, 0.0]),
}


@pytest.mark.parametrize("M", [3, PREFILLED])
@pytest.mark.parametrize("name", FAR_FROM_ZERO)
def test_rows_with_scores_far_from_zero(name: str, M: int, device: str) -> None:
    """Every third query, up to some 1800 from 0; the others are as they are without them."""
    of_queries, of_pages = (torch.tensor(x, device=device) for x in FAR_FROM_ZERO[name])
    of_q, of_k = of_queries.repeat(-(-M // 3))[:M], of_pages.repeat_interleave(128)[:500]
    case = of_one_direction(make_decoding("randn", [500], 4, 2, M, 64, device), of_q, of_k)
    out, lse = case.run(num_splits=1)
    oracle, oracle_lse = ha.reference.attention(case.q, case.k, case.v, causal=True, return_lse=True)
    model, _ = case.model(0)
    calm = of_one_direction(case, of_q.clamp(0, 1), of_k)
    calm_out, calm_lse = calm.run(num_splits=1)
    calm_rows = of_q == 1
    assert torch.equal(calm_out[:, :, calm_rows], out[:, :, calm_rows])
    assert torch.equal(calm_lse[:, :, calm_rows], lse[:, :, calm_rows])
    if out.is_cuda:
        calm.check(calm_out, calm_lse)
        # A tensor core adds 32 products with 13 bits below the largest: two such sums lose so much of a score.
        lost = 2.0**-12 * oracle_lse.abs().max()
        far, expected, modelled = (x[:, :, ~calm_rows] for x in (out, oracle, model))
        assert (lse - oracle_lse)[:, :, ~calm_rows].abs().max() <= lost + 0.1
        budget = error_budget(relative_error(modelled, expected), out.dtype, device=out.device)
        assert relative_error(far, expected) <= budget + lost
    else:
        case.check(out, lse)
        assert row_errors(out, model).median() < 1e-6
    alone = dataclasses.replace(case, q=case.q[:, :, -1:].contiguous())
    assert torch.equal(alone.run(num_splits=1, out_dtype=torch.bfloat16)[0], out[:, :, -1:].bfloat16())


@pytest.mark.parametrize("M", [2, PREFILLED])
@pytest.mark.parametrize("splits", [1, 2])
def test_scores_that_fall_from_page_to_page(splits: int, M: int, device: str) -> None:
    """By 12 and by 60 octaves: within the reach of P's reference, and beyond it."""
    case = make_decoding("randn", [500], 4, 2, M, 64, device, recipe=ha.FAST)
    # [N]: octaves that a score loses to the direction that all queries share.
    fall = torch.tensor([0.0, 12.0, 72.0, 72.0], device=device).repeat_interleave(128)[:500]
    q, k = case.q.clone(), case.k.clone()
    q[..., 0], k[..., 0] = 8, -fall * math.log(2)
    append_all(case.cache, k, case.v, case.table, case.lengths)
    case = dataclasses.replace(case, q=q, k=k, causal=False)
    out, lse = case.run(num_splits=splits)
    case.check(out, lse)
    model, _ = ha.reference.fp8_attention_kvcache(q, k, case.v, causal=False, recipe=ha.FAST)
    assert splits > 1 or row_errors(out, model).median() < (2.0**-10 if out.is_cuda else 1e-6)


def tensors_of(cache: ha.PagedKVCache) -> dict[str, torch.Tensor]:
    """What appends write."""
    return {name: getattr(cache, name) for name in ("k8", "v8", "k_descale", "v_descale")}


def dequantised(cache: ha.PagedKVCache, pages: list[int], n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one sequence, fp32 [H_kv, n, D], by the documented formulas."""
    in_order = cache.v8[pages].float()[..., stored_at(torch.arange(cache.page_size, device=cache.v8.device))].mT
    k = cache.k8[pages].float() * key_descales(cache.k_descale[pages]).unsqueeze(3)
    k = k if cache.k_mean is None else k + cache.k_mean.unsqueeze(1)
    k = k.transpose(0, 1).flatten(1, 2)
    v = (in_order * key_descales(cache.v_descale[pages]).unsqueeze(3)).transpose(0, 1).flatten(1, 2)
    return k[:, :n, : cache.D], v[:, :n, : cache.D_v]


@pytest.mark.parametrize("kind", ["outlier", "biased_v"])
def test_what_is_stored(kind: str, device: str) -> None:
    """Every element within half a unit of e4m3; a descale is a power of two, of its key or the largest of its page."""
    case = make_decoding(kind, [300], 2, 2, 1, 80, device, D_v=64, recipe=ha.FAST)
    k, v = case.k[0].float(), case.v[0].float()
    k[:, 130:134] *= 2.0**-8
    k[:, 20:22] *= 30.0
    v[:, 260:264] *= 2.0**-7
    append_all(case.cache, k[None], v[None], case.table, [300])
    pages = case.table[0, :3].tolist()
    of_cache = case.cache.k_descale, case.cache.v_descale
    for x, stored, descales in zip((k, v), dequantised(case.cache, pages, 300), of_cache, strict=True):
        assert (descales[pages, :, 1] < 0).tolist() == [[True, True], [True, True], [False, False]]
        descale = key_descales(descales[pages]).transpose(0, 1).flatten(1)[:, :300, None]
        assert torch.all(torch.log2(descale) == torch.log2(descale).round())
        # Half of 2**-3 relative; below e4m3's normal numbers, half of 2**-9 of the descale.
        bound = torch.maximum(x.abs() * 2.0**-4, descale * 2.0**-10)
        # What becomes subnormal is rounded twice.
        bound = bound + (stored.abs() <= descale * 2.0**-6) * descale * 2.0**-10
        assert torch.all((stored - x).abs() <= bound * 1.001)
        own = x.abs().amax(2, keepdim=True) / descale
        own[:, :256] = own[:, :256].unflatten(1, (2, 128)).amax(2).repeat_interleave(128, 1)
        assert torch.all((own > E4M3_MAX / 2) & (own <= E4M3_MAX))


@BOTH
def test_a_page_that_is_appended_to_again_opens(recipe: ha.Recipe, device: str) -> None:
    """From its closed form: keys that stay keep their bytes, and the mark goes."""
    k, v = make_qkv("randn", 1, 1, 1, 1, 256, 64, device=device)[1:]
    for n in (1, 2, 100):
        cache, table, _ = make_cache([256], 1, 64, device=device, recipe=recipe)
        append_all(cache, k, v, table, [256])
        page = [int(table[0, 1])]
        before_k, before_v = dequantised(cache, page, 128)
        at = torch.tensor([128 + n], dtype=torch.int32, device=device)
        ha.append_kvcache(cache, k[:, :, :5], v[:, :, :5], table, at)
        after_k, after_v = dequantised(cache, page, n + 5)
        assert torch.equal(before_k[:, :n], after_k[:, :n])
        assert torch.equal(before_v[:, :n], after_v[:, :n])
        assert torch.all(cache.k_descale[page] >= 0)
        # As the same keys at the front of another cache.
        expected = dequantised(*stored_alone(k[:, :, :5], v[:, :, :5], recipe, device), 5)
        assert torch.equal(after_k[:, n:], expected[0])
        assert torch.equal(after_v[:, n:], expected[1])
        assert not cache.v8.float()[page][..., stored_at(torch.arange(n + 5, 128, device=device))].any()


def stored_alone(k: torch.Tensor, v: torch.Tensor, recipe: ha.Recipe, device: str) -> tuple[ha.PagedKVCache, list[int]]:
    """A cache with these keys alone, and their page."""
    cache, table, _ = make_cache([k.size(2)], k.size(1), k.size(3), device=device, recipe=recipe)
    append_all(cache, k, v, table, [k.size(2)])
    return cache, [int(table[0, 0])]


def test_appending_one_by_one_is_appending_at_once(device: str) -> None:
    """Over the end of a page, to sequences at different places."""
    lengths = [0, 100, 127]
    q, k, v = make_qkv("outlier", 3, 2, 2, 1, 300, 64, device=device)
    at_once, table, seqlens = make_cache([n + 60 for n in lengths], 2, 64, device=device)
    step_by_step, _, _ = make_cache([n + 60 for n in lengths], 2, 64, device=device)
    before = torch.tensor(lengths, dtype=torch.int32, device=device)
    for cache in (at_once, step_by_step):
        append_all(cache, k, v, table, lengths)
    ha.append_kvcache(at_once, k[:, :, 200:260], v[:, :, 200:260], table, before)
    for i in range(60):
        one = slice(200 + i, 201 + i)
        ha.append_kvcache(step_by_step, k[:, :, one], v[:, :, one], table, before + i)
    outs = [ha.attention_kvcache(q, cache, table, seqlens) for cache in (at_once, step_by_step)]
    assert torch.equal(*outs)
    assert not outs[0].isnan().any()
    for b, n in enumerate(lengths):
        pages = table[b, : -(-(n + 60) // at_once.page_size)].tolist()
        for x, y in zip(*(dequantised(cache, pages, n + 60) for cache in (at_once, step_by_step)), strict=True):
            assert torch.equal(x, y)


@BOTH
def test_appending_changes_nothing_else(recipe: ha.Recipe, device: str) -> None:
    case = make_decoding("randn", [100, 130], 2, 2, 1, 64, device, recipe=recipe)
    before = {name: x.clone() for name, x in tensors_of(case.cache).items()}
    k, v = case.k[:1, :, :3] * 100, case.v[:1, :, :3] * 100
    ha.append_kvcache(case.cache, k, v, case.table[:1].contiguous(), case.seqlens[:1].contiguous())
    page, size = int(case.table[0, 0]), case.cache.page_size
    new = torch.zeros(size, dtype=torch.bool, device=device)
    new[100:103] = True
    new_in_v = torch.zeros_like(new)
    new_in_v[stored_at(torch.arange(100, 103, device=device))] = True
    for name, x in tensors_of(case.cache).items():
        old = before[name]
        changed = x.view(torch.uint8) != old.view(torch.uint8)
        assert not changed[torch.arange(x.size(0), device=device) != page].any(), name
        kept = ~new_in_v if name == "v8" else ~new
        axis = 3 if name == "v8" else 2
        unchanged = x[page : page + 1].movedim(axis, 0)[kept], old[page : page + 1].movedim(axis, 0)[kept]
        assert torch.equal(*(y.contiguous().view(torch.uint8) for y in unchanged)), name


def test_pages_behind_a_tile_are_not_read(device: str) -> None:
    """Queries 0..31 are a tile of 64 rows, and see keys 0..171."""
    case = make_decoding("randn", [260], 4, 2, 120, 64, device)
    expected, _ = case.run(num_splits=1)
    table = case.table.clone()
    table[0, 2] = NO_PAGE
    out, _ = dataclasses.replace(case, table=table).run(num_splits=1)
    assert torch.equal(out[:, :, :32], expected[:, :, :32])
    assert out[:, :, -1].isnan().all()


def test_a_large_value_of_little_weight_costs_the_others_nothing(device: str) -> None:
    """One key's V is 2**20 times the others', and its probability 2**-60: folded into P, it would flush them to 0."""
    q, k, v = make_qkv("randn", 1, 1, 1, 1, 100, 64, device=device)
    cache, table, seqlens = make_cache([100], 1, 64, device=device)
    k[0, 0, 50] = -q[0, 0, 0] * (60 * 0.69 * 8 / q.float().square().sum())
    v[0, 0, 50] = v[0, 0, 50] * 2.0**20
    append_all(cache, k, v, table, [100])
    out = ha.attention_kvcache(q, cache, table, seqlens, out_dtype=torch.float32)
    oracle = ha.reference.attention(q, k, v)
    others = torch.cat((k[:, :, :50], k[:, :, 51:]), 2), torch.cat((v[:, :, :50], v[:, :, 51:]), 2)
    model, _ = ha.reference.fp8_attention_kvcache(q, *others)
    without = relative_error(model, ha.reference.attention(q, *others))
    assert relative_error(out, oracle) <= error_budget(without, torch.float32, device=device)


def test_keys_without_value_take_probability(device: str) -> None:
    """A sink: V is 0, and so is its amax; the output is the rest's share."""
    q, k, v = make_qkv("biased_v", 1, 2, 2, 1, 40, 64, device=device)
    v[:, :, 0] = 0
    k[:, :, 0] = q[:, :, 0]
    cache, table, seqlens = make_cache([40], 2, 64, device=device)
    append_all(cache, k, v, table, [40])
    Decoding(q, k, v, [40], cache, table, seqlens).check(
        *ha.attention_kvcache(q, cache, table, seqlens, return_lse=True, out_dtype=torch.float32)
    )


@pytest.mark.parametrize("magnitude", [1e-25, 1e-8, 1e9])
def test_values_of_any_size(magnitude: float, device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 1, 40, 64, torch.float32, device)
    v = v * magnitude
    cache, table, seqlens = make_cache([40], 2, 64, device=device)
    append_all(cache, k, v, table, [40])
    out = ha.attention_kvcache(q, cache, table, seqlens)
    # At 2**-26 descales stop, and elements are known to half of 2**-9 of it.
    assert (out - ha.reference.attention(q, k, v)).abs().max() <= max(0.07 * magnitude, 2.0**-36)


@pytest.mark.thorough(but=6)
@pytest.mark.parametrize(
    ("bad", "H", "M", "where"),
    [
        *((float("nan"), H, M, where) for H, M in ((2, 1), (4, PREFILLED)) for where in "qkv"),
        *((float("inf"), 2, 1, "k"), (2.0**70, 2, 1, "k"), (2.0**70, 2, 1, "v")),
    ],
)
@BOTH
def test_what_is_not_finite_stays_within_its_sequence(
    bad: float, H: int, M: int, where: str, recipe: ha.Recipe, device: str
) -> None:
    """And leaves with it: a page that another sequence takes over is clean."""
    case = make_decoding(KIND[recipe], [140, 140], H, 2, M, 64, device, recipe=recipe)
    expected, expected_lse = case.run(num_splits=2)
    x = {"q": case.q, "k": case.k, "v": case.v}[where]
    kept = x.clone()
    if where == "q":
        x[0, :, 0, 7] = bad
    else:
        x[0, :, 139, 7] = bad
    append_all(case.cache, case.k, case.v, case.table, [140])
    out, lse = case.run(num_splits=2)
    finite = bad == 2.0**70 and where != "v"
    assert out[0].isnan().any() == (not finite)
    # Rows that do not see it are as they were.
    assert where != "q" or torch.equal(out[0, :, 1:], expected[0, :, 1:])
    assert where != "k" or torch.equal(out[0, :, :-1], expected[0, :, :-1])
    assert where != "v" or out[0, :, -1].isnan().all()
    # V's descale rides on the exponent, and rounds it differently.
    assert where != "v" or torch.allclose(lse, expected_lse, rtol=4 * torch.finfo(torch.float32).eps, atol=0)
    assert torch.equal(out[1], expected[1])
    assert torch.equal(lse[1], expected_lse[1])
    x.copy_(kept)
    # 130 keys of another sequence: slots 2..11 of its second page held the bad one's keys.
    append_all(case.cache, case.k, case.v, case.table, [130])
    seqlens = torch.tensor([130, 140], dtype=torch.int32, device=device)
    again = dataclasses.replace(case, lengths=[130, 140], seqlens=seqlens)
    again.check(*again.run())


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize(("length", "H", "M"), [(-1, 2, 1), (385, 2, 1), (2**31 - 1, 2, 1), (385, 4, PREFILLED)])
@BOTH
def test_a_length_that_the_table_cannot_have_gives_nan(
    length: int, H: int, M: int, recipe: ha.Recipe, device: str
) -> None:
    case = make_decoding(KIND[recipe], [140, 140], H, 2, M, 64, device, recipe=recipe)
    expected, _ = case.run()
    seqlens = torch.tensor([length, 140], dtype=torch.int32, device=device)
    for splits in (1, 3):
        out, lse = dataclasses.replace(case, seqlens=seqlens).run(num_splits=splits)
        assert out[0].isnan().all()
        assert lse[0].isnan().all()
    assert torch.equal(dataclasses.replace(case, seqlens=seqlens).run()[0][1], expected[1])


@pytest.mark.parametrize(("page", "H", "M"), [(-1, 2, 1), (1000, 2, 1), (1000, 4, 40)])
@BOTH
def test_a_page_outside_of_the_pool(page: int, H: int, M: int, recipe: ha.Recipe, device: str) -> None:
    """Is not written, and read as NaN by the rows that see it, of either kernel."""
    case = make_decoding(KIND[recipe], [170, 170], H, 2, M, 64, device, recipe=recipe)
    expected, _ = case.run()
    case.table[0, 1] = page
    before = {name: x.clone() for name, x in tensors_of(case.cache).items()}
    ha.append_kvcache(case.cache, case.k[:, :, :1], case.v[:, :, :1], case.table[:1].repeat(2, 1), case.seqlens)
    for name, x in tensors_of(case.cache).items():
        assert torch.equal(x.view(torch.uint8), before[name].view(torch.uint8)), name
    out, _ = case.run()
    assert out[0].isnan().all()
    assert torch.equal(out[1], expected[1])


@BOTH
def test_keys_past_the_table_are_not_stored(recipe: ha.Recipe, device: str) -> None:
    case = make_decoding("randn", [140], 2, 2, 1, 64, device, recipe=recipe)
    before = {name: x.clone() for name, x in tensors_of(case.cache).items()}
    for start in (-1, case.table.size(1) * case.cache.page_size, 2**31 - 1):
        at = torch.tensor([start], dtype=torch.int32, device=device)
        ha.append_kvcache(case.cache, case.k[:, :, :2], case.v[:, :, :2], case.table, at)
    for name, x in tensors_of(case.cache).items():
        assert torch.equal(x.view(torch.uint8), before[name].view(torch.uint8)), name


def replacing(**fields: Callable[[Decoding], torch.Tensor]) -> Callable[[Decoding], Decoding]:
    """The same problem with other fields of the cache."""

    def mutate(case: Decoding) -> Decoding:
        changed: dict[str, Any] = {name: make(case) for name, make in fields.items()}
        return dataclasses.replace(case, cache=dataclasses.replace(case.cache, **changed))

    return mutate


def rolled(x: torch.Tensor, dim: int) -> torch.Tensor:
    """One further along `dim`; also of e4m3."""
    return x.view(torch.int8).roll(1, dim).view(x.dtype) if x.element_size() == 1 else x.roll(1, dim)


def without_interleave(case: Decoding) -> torch.Tensor:
    position = stored_at(torch.arange(case.cache.page_size, device=case.cache.v8.device))
    return case.cache.v8.view(torch.int8)[..., position].view(case.cache.v8.dtype)


MUTATIONS: dict[str, Callable[[Decoding], Decoding]] = {
    "k_descale_of_the_next_key": replacing(k_descale=lambda x: rolled(x.cache.k_descale, 2)),
    "k_descale_of_another_head": replacing(k_descale=lambda x: rolled(x.cache.k_descale, 1)),
    "v_descale_of_the_next_key": replacing(v_descale=lambda x: rolled(x.cache.v_descale, 2)),
    "v_descale_left_out": replacing(v_descale=lambda x: torch.ones_like(x.cache.v_descale)),
    "v_not_interleaved": replacing(v8=without_interleave),
    "keys_off_by_one": replacing(k8=lambda x: rolled(x.cache.k8, 2)),
    "kv_head_of_another_group": replacing(k8=lambda x: rolled(x.cache.k8, 1), v8=lambda x: rolled(x.cache.v8, 1)),
    "pages_swapped": lambda x: dataclasses.replace(x, table=x.table.flip(1).contiguous()),
    "a_key_too_few": lambda x: dataclasses.replace(x, seqlens=x.seqlens - 1),
    "not_causal": lambda x: dataclasses.replace(x, causal=False),
    "a_window": lambda x: dataclasses.replace(x, masks={"window": (2, -1)}),
    "a_softcap": lambda x: dataclasses.replace(x, masks={"softcap": 5.0}),
    "a_sink": lambda x: dataclasses.replace(x, masks={"sinks": torch.full((4,), 25.0, device=x.q.device)}),
}


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_budget_is_exceeded(mutation: str, device: str) -> None:
    """So the checks above can fail."""
    q, k, v = make_qkv("biased_v", 1, 4, 2, 4, 140, 64, torch.float32, device)
    # Keys and values of unequal magnitude, of which the last four, where the diagonal is, count the most.
    magnitude = torch.linspace(0.25, 2, 140, device=device)[:, None]
    magnitude[-4:] = 4
    q, k, v = q * 2, k * magnitude, v * magnitude * magnitude
    # A head unlike the other, and keys with descales of their own.
    k[:, 1] *= 0.5
    v[:, 1] *= 2
    k[:, :, 3::16] *= 2.0**-7
    v[:, :, 3::16] *= 2.0**-7
    cache, table, seqlens = make_cache([140], 2, 64, device=device)
    append_all(cache, k, v, table, [140])
    healthy = Decoding(q, k, v, [140], cache, table[:, :2].contiguous(), seqlens)
    healthy.check(*healthy.run())
    mutated = MUTATIONS[mutation](healthy).run()
    with pytest.raises(AssertionError):
        healthy.check(*mutated)


def test_what_a_page_held_before_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, a poisoned pool shows."""
    from helion_attn.preprocess import append
    from helion_attn.preprocess.lib.v_layout import key_stored_at

    # Of a whole page, which two programs have keys of; of a program's keys it stays.
    monkeypatch.setattr(append, "key_stored_at", lambda place: key_stored_at(place) - (place.numel() // 128) * 10**6)
    case = make_decoding("randn", [30], 2, 2, 1, 64, "cpu")
    out, _ = case.run()
    assert out.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("D", "H", "M", "splits"),
    [
        *((64, 2, 1, 3), (128, 16, 1, 1), (128, 8, 16, 2), (256, 4, 2, 2), (256, 4, 70, 1), (64, 4, 70, 2)),
        *((512, 4, 2, 2), (512, 16, 4, 1), (512, 4, 70, 1)),
    ],
)
def test_agrees_with_the_compiled_kernel(D: int, H: int, M: int, splits: int) -> None:
    q, k, v = make_qkv("outlier", 3, H, 2, M, 400, D)
    outs = []
    for device in ("cpu", "cuda"):
        cache, table, seqlens = make_cache([400, 0, 129], 2, D, device=device)
        append_all(cache, k.to(device), v.to(device), table, [400, 0, 129])
        outs.append(ha.attention_kvcache(q.to(device), cache, table, seqlens, num_splits=splits, return_lse=True))
    assert relative_error(outs[1][0].cpu(), outs[0][0]) < 2.0**-6
    finite = outs[0][1] > float("-inf")
    assert relative_error(outs[1][1].cpu()[finite], outs[0][1][finite]) < 2.0**-10
