"""The errors that the README states, on the inputs that it states them for; on the CPU with fewer rows and heads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import CHANNEL_KINDS, INPUT_KINDS, SINK_SHARES, drift, make_qkv
from helion_attn.numerics import MAX_BITS_D
from helion_attn.reference import kv_cache, rounding_model
from helion_attn.testing import error_budget, relative_error
from helion_attn.types import PRESETS
from helpers.paged import append_all, make_cache

KEYS = 4096


def kernel_error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> float:
    """The fp32 output against the oracle on the dequantised inputs."""
    packed = ha.quantize(q, k, v)
    out = ha.attention_quantized(packed, causal=causal, out_dtype=torch.float32)
    return relative_error(out, ha.reference.attention(*ha.dequantize(packed), causal=causal))


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_randn(D: int, causal: bool, device: str) -> None:
    H, M = (8, KEYS) if device == "cuda" else (1, 64)
    # Up to `MAX_BITS_D` P's bits are a line of the score.
    bound = 0.027 if D <= MAX_BITS_D else 0.026
    assert kernel_error(*make_qkv("randn", 1, H, H, M, KEYS, D, device=device), causal=causal) <= bound


@pytest.mark.parametrize("keys", [4096, pytest.param(131072, marks=pytest.mark.gpu)])
def test_positive_v_does_not_drift(keys: int, device: str) -> None:
    H, M = (8, 64) if device == "cuda" else (1, 4)
    assert kernel_error(*make_qkv("biased_v", 1, H, H, M, keys, 128, device=device)) <= 0.003


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("D", "D_v", "recipe"),
    [
        pytest.param(64, 64, ha.HYBRID, id="hybrid-64"),
        pytest.param(128, 128, ha.HYBRID, id="hybrid-128"),
        pytest.param(256, 256, ha.HYBRID, id="hybrid-256"),
        pytest.param(128, 128, ha.BF16, id="bf16-128"),
        pytest.param(128, 128, ha.BALANCED, id="balanced-128"),
        pytest.param(192, 128, ha.BALANCED, id="balanced-192-128"),
        pytest.param(512, 512, ha.BALANCED, id="balanced-512"),
        pytest.param(1024, 1024, ha.BALANCED, id="balanced-1024", marks=pytest.mark.gpu),
    ],
)
def test_positive_v_does_not_drift_in_any_kernel(D: int, D_v: int, recipe: ha.Recipe, device: str) -> None:
    """The packed blocks of 4096 keys, 32 times: the answer is that of 4096.

    In the interpreter, which takes long for large heads, 8 times: its sums in fp32 are those of the other head dims.
    """
    times = 32 if device == "cuda" or D_v <= 256 else 8
    H, M = (8, 64) if device == "cuda" else (1, 4)
    packed = ha.quantize(*make_qkv("biased_v", 1, H, H, M, KEYS, D, D_v=D_v, device=device), recipe=recipe)
    per_block = packed.k_descale.size(2) > 1
    many = dataclasses.replace(
        packed,
        k8=packed.k8.repeat(1, times, 1, 1),
        v8=packed.v8.repeat(1, times, 1, 1),
        k_descale=packed.k_descale.repeat(1, 1, times) if per_block else packed.k_descale,
        N=times * KEYS,
    )
    out = ha.attention_quantized(many, out_dtype=torch.float32)
    assert relative_error(out, ha.reference.attention(*ha.dequantize(packed))) <= 0.003


@pytest.mark.gpu
@pytest.mark.parametrize("D", [160, 192, 256, 320, 384, 512, 576, 640, 768, 1024])
@pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=["fast", "balanced"])
@pytest.mark.parametrize("period", [131072, 16384, 3000])
def test_a_v_that_drifts(period: int, recipe: ha.Recipe, D: int) -> None:
    """No kernel loses more of a V whose mean changes along the keys than the two-level one of D 128 does.

    The interpreter sums in fp32: it cannot show what a tensor core loses.
    """
    errors = []
    same_v = make_qkv("randn", 1, 1, 1, 1, 131072, 128, device="cuda")[2]
    same_v = same_v + drift(131072, period, 1 / 17, "cuda")[:, None].bfloat16()
    for d in (128, D):
        q, k, _ = make_qkv("randn", 1, 1, 1, 256, 131072, d, D_v=16, device="cuda")
        v = same_v.repeat(1, 1, 1, -(-d // 128))[..., :d]
        out = ha.attention(q, k, v, recipe=recipe)
        errors.append(relative_error(out, ha.reference.attention(q, k, v)))
    assert errors[1] <= 1.25 * errors[0], errors


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    "recipe",
    [
        # Its V is packed as that of BALANCED.
        pytest.param(ha.FAST, id="fast", marks=pytest.mark.gpu),
        pytest.param(ha.BALANCED, id="balanced"),
        pytest.param(ha.ACCURATE, id="accurate"),
    ],
)
def test_total_error_does_not_grow_with_the_keys(recipe: ha.Recipe, device: str) -> None:
    """Of V in bf16, N(0, 1), whose mean comes to lie below the steps between its numbers."""
    H, M = (8, 64) if device == "cuda" else (1, 64)
    errors = []
    for keys in (4096, 131072):
        qkv = make_qkv("randn", 1, H, H, M, keys, 32, device=device)
        errors.append(relative_error(ha.attention(*qkv, recipe=recipe), ha.reference.attention(*qkv)))
    # By the mean that was subtracted, 1.35 to 1.6 times.
    assert errors[1] <= 1.1 * errors[0], errors


@pytest.mark.parametrize(
    ("keys", "D", "causal"),
    [
        (KEYS, 64, False),
        *(
            pytest.param(keys, D, causal, marks=pytest.mark.gpu)
            for keys in (KEYS, 32768, 131072)
            for D in (64, 128, 256, 512)
            for causal in (False, True)
            if (keys, D, causal) != (KEYS, 64, False)
        ),
    ],
)
@pytest.mark.parametrize("kind", SINK_SHARES)
def test_a_sink_costs_what_lies_behind_it_nothing(kind: str, keys: int, D: int, causal: bool, device: str) -> None:
    """The total error beside that of the same input without the sink; of 4096 keys a causal mask has all rows."""
    on_gpu = device == "cuda"
    H, M = (2, KEYS) if on_gpu else (1, 64)
    q, k, v = make_qkv(kind, 1, H, H, M, keys, D, device=device)
    q = q[:, :, 1:]  # with a causal mask the first row may see the sink alone
    for recipe in PRESETS.values() if on_gpu and D <= 256 else (ha.FAST, ha.BALANCED):
        errors = []
        for qkv in ((q, k[:, :, 1:], v[:, :, 1:]), (q, k, v)):
            out = ha.attention(*qkv, causal=causal, recipe=recipe, out_dtype=torch.float32)
            errors.append(relative_error(out, ha.reference.attention(*qkv, causal=causal)))
        assert errors[1] <= 1.5 * errors[0], (recipe, errors)


def total_error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> float:
    """Of the kernels; on a CPU, whose interpreter takes long for many keys, of their rounding model."""
    attend: Any = ha.attention if q.is_cuda else ha.reference.fp8_attention
    options["out_dtype"] = torch.float32
    oracle = {name: x for name, x in options.items() if name not in ("recipe", "out_dtype")}
    return relative_error(attend(q, k, v, **options), ha.reference.attention(q, k, v, **oracle))


@functools.cache
def mean_error(kind: str, D: int, keys: int, causal: bool, device: str) -> float:
    """BALANCED's total error, of two query heads for each KV head, over draws: wide scores give few keys the weight."""
    shape = (1, 4, 2, 256, keys, D) if device == "cuda" else (1, 2, 1, 64, keys // 4, D)
    draws = (make_qkv(kind, *shape, device=device, seed=seed) for seed in range(3))
    return sum(total_error(*qkv, causal=causal) for qkv in draws) / 3


@pytest.mark.thorough(but=15)
@pytest.mark.parametrize("kind", CHANNEL_KINDS)
@pytest.mark.parametrize(
    ("D", "keys", "causal"),
    [
        *((D, KEYS, causal) for D in (64, 128, 256) for causal in (False, True) if D == 64 or not causal),
        *(pytest.param(D, keys, False, marks=pytest.mark.gpu) for D in (64, 128, 256, 576) for keys in (16384, 131072)),
        *(pytest.param(D, KEYS, True, marks=pytest.mark.gpu) for D in (128, 256, 576)),
    ],
)
def test_few_large_channels_cost_nothing(D: int, keys: int, causal: bool, kind: str, device: str) -> None:
    """Beside the error of N(0, 1), or of few weights where large channels make scores wide."""
    errors = [mean_error(x, D, keys, causal, device) for x in ("randn", kind)]
    # Fewer rows are sampled of wide heads, so factors of theirs are rougher.
    wide = 0.045 if D <= 256 else 0.05
    makes_wide_scores = kind.endswith("b") or kind in ("k_pairs", "k_lognormal")
    assert errors[1] <= max(1.06 * errors[0], wide * makes_wide_scores), errors


@pytest.mark.thorough(but=12)
@pytest.mark.parametrize("size", ["all", "one"])
@pytest.mark.parametrize("kind", ["randn", "k3x8q", "k3x30", "k2x100q", "k8x10"])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("recipe", [ha.BALANCED, ha.FAST], ids=str)
def test_a_huge_key_decides_no_factor(recipe: ha.Recipe, D: int, kind: str, size: str, device: str) -> None:
    """Rows that see no key of its block err as without it, over draws: key 0, a sink, is in every sample."""
    blocks = torch.ones(1, 1, 1, 8, dtype=torch.bool, device=device)
    blocks[..., 0] = False
    options: Any = {"recipe": recipe, "block_mask": ha.BlockMask(blocks, 128, 1024)}
    without = found = 0.0
    for seed in range(3):
        q, k, v = make_qkv(kind, 1, 2, 1, 128, 1024, D, device=device, seed=seed)
        without += total_error(q, k, v, **options)
        if size == "all":
            k[:, :, 0] *= 30
        else:
            k[:, :, 0, 11] *= 300
        found += total_error(q, k, v, **options)
    assert found <= 1.05 * without


@pytest.mark.parametrize("D", [64, 160])
def test_outside_of_its_page_a_sink_hides_nothing(D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """P relative to its own block's maximum; behind the running one, 99 times all others, it has no bits left."""

    def errors(model: Callable[..., torch.Tensor]) -> float:
        """The mean over inputs: each has one sink, and most of the error is that of its score."""
        found = []
        for seed in range(6):
            q, k, v = make_qkv("sink_v_small_99", 1, 1, 1, 64, KEYS, D, seed=seed)
            # All but the first channel are of keys behind the sink's block. It gives the sink a descale like theirs.
            v[:, :, :128, 1:] = 0
            v[:, :, 0, 0] = 4
            oracle = ha.reference.attention(q, k, v)
            found.append(relative_error(model(q, k, v)[..., 1:], oracle[..., 1:]))
        return sum(found) / len(found)

    models: dict[ModuleType, Callable[..., torch.Tensor]] = {
        rounding_model: functools.partial(ha.reference.fp8_attention, out_dtype=torch.float32),
        kv_cache: lambda q, k, v: ha.reference.fp8_attention_kvcache(q, k, v, causal=False, recipe=ha.FAST)[0],
    }
    own = {module: errors(model) for module, model in models.items()}
    assert own[rounding_model] <= 0.06
    assert own[kv_cache] <= 0.15  # of e4m3's score of the sink itself
    monkeypatch.setattr(rounding_model, "REFERENCE_REACH_LOG2", 0)
    monkeypatch.setattr(kv_cache, "PAGE_REFERENCE_REACH_LOG2", 0)
    for module, model in models.items():
        assert errors(model) > 2 * own[module]


#: N(0, 1), biases of K's channels, sinks, drifts, and wide scores.
CACHED = ["randn", "k_channels", "sink", *SINK_SHARES, "v_drifts", "wide"]


@pytest.mark.thorough(but=12)
@pytest.mark.parametrize("modelled", [True, False], ids=["model", "kernel"])
@pytest.mark.parametrize("kind", CACHED)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=str)
def test_a_cache_has_the_errors_of_dense_attention(
    recipe: ha.Recipe, D: int, kind: str, modelled: bool, device: str
) -> None:
    """Up to a tenth more, with the same preset; and a mean of another prompt, whose K has the same biases."""
    # A sink is one key, whose rounding may cost a fifth. A CPU has no time for many, and no other numbers each time.
    draws = 3 if device == "cuda" and kind != "k_channels" else 1
    B = 4 if kind != "k_channels" and (modelled or device == "cuda") else 1
    of_dense, of_cache = [], []
    for seed in range(draws):
        q, k, v = make_qkv(kind, B, 4, 2, 64, 2048, D, device=device, seed=seed)
        k_mean = None
        if kind == "k_channels":
            q, k, v = make_qkv(kind, B, 4, 2, 64, 4096, D, device=device)
            (k, other), v = k.split(2048, 2), v[:, :, :2048]
            k_mean = other.float().mean((0, 2))
        oracle = ha.reference.attention(q, k, v, causal=True)
        if modelled:
            dense: Any = ha.reference.fp8_attention(q, k, v, causal=True, recipe=recipe)
            cached, _ = ha.reference.fp8_attention_kvcache(q, k, v, recipe=recipe, k_mean=k_mean)
        else:
            dense = ha.attention(q, k, v, causal=True, recipe=recipe)
            cache, table, seqlens = make_cache([2048] * B, 2, D, device=device, recipe=recipe, k_mean=k_mean)
            append_all(cache, k, v, table, [2048] * B)
            cached = ha.attention_kvcache(q, cache, table, seqlens)
        of_dense.append(relative_error(dense, oracle))
        of_cache.append(relative_error(cached, oracle))
    assert sum(of_cache) <= 1.1 * sum(of_dense)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("keys", [32768, 131072])
@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_long_contexts_stay_within_the_budget(kind: str, keys: int, D: int) -> None:
    qkv = make_qkv(kind, 1, 2, 2, 64, keys, D, device="cuda")
    ref = ha.reference.attention(*qkv)
    model = ha.reference.fp8_attention(*qkv, out_dtype=torch.float32)
    assert isinstance(model, torch.Tensor)
    out = ha.attention(*qkv, out_dtype=torch.float32)
    assert relative_error(out, ref) <= error_budget(relative_error(model, ref), torch.float32, device=out.device)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 2, 3, 4])
def test_few_queries_at_131072_keys(M: int) -> None:
    qkv = make_qkv("randn", 1, 4, 4, M, 131072, 128, device="cuda")
    ref = ha.reference.attention(*qkv, causal=True)
    model = ha.reference.fp8_attention(*qkv, causal=True, out_dtype=torch.float32)
    assert isinstance(model, torch.Tensor)
    out = ha.attention(*qkv, causal=True, out_dtype=torch.float32)
    assert relative_error(out, ref) <= error_budget(relative_error(model, ref), torch.float32, device=out.device)
