"""Pages of a KV cache whose keys have descales unlike each other's: open and closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.testing import error_budget, relative_error
from helpers.cases import row_errors
from helpers.paged import NO_PAGE, append_all, make_cache

#: Keys, which end within a page.
N = 300

#: Queries of two heads that share one of keys: for `fp8_attn_decode`, and for `fp8_attn_prefill`.
DECODED, PREFILLED = 3, 50

BOTH = pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=str)


def first_of_pages(x: torch.Tensor, factor: float) -> None:
    x[:, :, ::128] *= factor


def growing(x: torch.Tensor, octaves: float) -> None:
    place = torch.arange(N, device=x.device) % 128
    x *= torch.exp2(place * (octaves / 127)).view(1, 1, N, 1)


def some(x: torch.Tensor, *factors: float) -> None:
    for i, factor in enumerate(factors):
        x[:, :, 7 + i :: 31] *= factor


def some_of_both(k: torch.Tensor, v: torch.Tensor) -> None:
    some(k, 2.0**-7)
    some(v, 2.0**9, 2.0**-9)


def zeros(k: torch.Tensor, v: torch.Tensor) -> None:
    k[:, :, 3::5] = 0
    v[:, :, 4::5] = 0


#: What becomes of K and of V.
CASES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "first_k_tiny": lambda k, v: first_of_pages(k, 2.0**-20),
    "first_k_huge": lambda k, v: first_of_pages(k, 64.0),
    "first_k_zero": lambda k, v: first_of_pages(k, 0.0),
    "first_v_tiny": lambda k, v: first_of_pages(v, 2.0**-20),
    "first_v_huge": lambda k, v: first_of_pages(v, 2.0**12),
    "first_v_zero": lambda k, v: first_of_pages(v, 0.0),
    "growing_v": lambda k, v: growing(v, 20),
    "falling_v": lambda k, v: growing(v, -20),
    "growing_k": lambda k, v: growing(k, -20),
    "some_of_both": some_of_both,
    "zeros": zeros,
}


OTHER_DIMS = [("some_of_both", 128), ("growing_v", 256), ("some_of_both", 512), ("growing_k", 512)]


def make_case(name: str, D: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = make_qkv("randn", 1, 2, 1, PREFILLED, N, D, torch.float32, device)
    CASES[name](k, v)
    return q, k, v


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: ha.Recipe = ha.FAST
) -> tuple[torch.Tensor, torch.Tensor]:
    cache, table, seqlens = make_cache([N], 1, k.size(3), device=q.device.type, recipe=recipe)
    append_all(cache, k, v, table, [N])
    return ha.attention_kvcache(q, cache, table, seqlens, num_splits=1, return_lse=True, out_dtype=torch.float32)


@pytest.mark.thorough(but=10)
@pytest.mark.parametrize("M", [DECODED, PREFILLED])
@pytest.mark.parametrize(("name", "D"), [*((name, 64) for name in CASES), *OTHER_DIMS])
@BOTH
def test_keys_of_any_size_stay_within_the_budget(name: str, D: int, M: int, recipe: ha.Recipe, device: str) -> None:
    q, k, v = make_case(name, D, device)
    q = q[:, :, -M:]
    out, lse = attend(q, k, v, recipe)
    oracle, oracle_lse = ha.reference.attention(q, k, v, causal=True, return_lse=True)
    model, model_lse = ha.reference.fp8_attention_kvcache(q, k, v, recipe=recipe)
    budget = error_budget(relative_error(model, oracle), torch.float32, device=out.device)
    assert relative_error(out, oracle) <= budget
    # Of logits of some 500, e4m3 has errors of several.
    assert name == "first_k_huge" or relative_error(model, oracle) < 0.08
    budget = error_budget(relative_error(model_lse, oracle_lse), torch.float32, device=out.device)
    assert relative_error(lse, oracle_lse) <= budget
    assert row_errors(out, model).median() < (2.0**-8 if out.is_cuda else 1e-6)


@pytest.mark.thorough(but=5)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("of_v", [False, True])
@pytest.mark.parametrize("M", [DECODED, PREFILLED])
@BOTH
def test_a_first_key_that_is_not_finite(of_v: bool, bad: float, M: int, recipe: ha.Recipe, device: str) -> None:
    """It makes NaN of the rows that see it."""
    q, k, v = make_case("some_of_both", 64, device)
    (v if of_v else k)[:, :, 256, 5] = bad
    out, _ = attend(q[:, :, -M:], k, v, recipe)
    seen = out[:, :, -DECODED:]
    assert (seen[..., 5] if of_v else seen).isnan().all()


@BOTH
def test_padding_closes_and_keeps_no_page(recipe: ha.Recipe, device: str) -> None:
    """The table of a sequence of negative length may list anything, such as the pages of another."""
    k, v = (torch.randn(1, 2, 150, 64, generator=torch.Generator().manual_seed(seed)).to(device) for seed in (0, 1))
    caches = []
    for of_padding in (NO_PAGE, 0):
        cache = ha.paged_kv_cache(4, 2, 64, device=device, recipe=recipe)
        table = torch.tensor([[0, 1], [of_padding, of_padding]], dtype=torch.int32, device=device)
        for first in range(0, 150, 3):
            new_k, new_v = (x[:, :, first : first + 3].expand(2, -1, -1, -1) for x in (k, v))
            lengths = torch.tensor([first, -1], dtype=torch.int32, device=device)
            ha.append_kvcache(cache, new_k, new_v, table, lengths, drafts=2)
        assert torch.all(cache.k_descale[0, :, 1] < 0)
        caches.append(cache)
    for name in ("k8", "v8", "k_descale", "v_descale"):
        x, y = (getattr(cache, name)[:1].view(torch.uint8) for cache in caches)
        assert torch.equal(x, y), name
