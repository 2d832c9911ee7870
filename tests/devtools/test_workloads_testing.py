"""The shared tables and helpers: workloads, inputs, error measure, budget."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from devtools.inputs import LARGE_CHANNELS, SINK_SHARES, make_qkv
from devtools.sm90 import Sm90Kernel
from helion_attn.testing import error_budget, relative_error


def test_kinds_are_what_they_say() -> None:
    shape = (2, 4, 2, 1000, 1000, 32)
    q, k, v = make_qkv("outlier", *shape, torch.float32)
    for x in (q, k, v):
        assert x.abs().max() > 8
        assert x.median().abs() < 0.1
    _, _, v = make_qkv("biased_v", *shape, torch.float32)
    assert v.min() >= 0.5
    q, k, _ = make_qkv("sink", *shape, torch.float32)
    s = q @ k.repeat_interleave(2, 1).mT / 32**0.5
    assert torch.softmax(s, 3)[..., 0].median() > 0.5


@pytest.mark.parametrize(("kind", "share"), SINK_SHARES.items())
@pytest.mark.parametrize(("N", "D"), [(1000, 128), (8192, 64)])
def test_a_sink_holds_what_it_says(N: int, D: int, kind: str, share: float) -> None:
    q, k, v = make_qkv(kind, 2, 4, 2, 10, N, D)
    s = q.double() @ k.double().repeat_interleave(2, 1).mT / D**0.5
    assert torch.allclose(torch.softmax(s, 3)[..., 0], torch.tensor(share).double(), rtol=0, atol=0.2 * (1 - share))
    assert 0.04 < v[:, :, 0].std() / v[:, :, 1:].std() < 0.06


def test_hard_kinds_are_what_they_say() -> None:
    shape = (2, 4, 2, 1000, 1000, 128)
    q, k, v = make_qkv("k_channels", *shape, torch.float32)
    biased = k.mean(2).abs() > 15
    assert 0.01 < biased.double().mean() < 0.06
    assert torch.allclose(k.std(2), torch.ones(()), atol=0.2)
    wide_q, same_k, same_v = make_qkv("qk_channels", *shape, torch.float32)
    assert torch.equal(same_k, k)
    assert torch.equal(same_v, v)
    assert torch.equal(wide_q, torch.where(biased.repeat_interleave(2, 1).unsqueeze(2), 3 * q, q))
    plain = make_qkv("randn", *shape, torch.float32)
    wide = make_qkv("wide", *shape, torch.float32)
    assert [torch.equal(x, n * y) for x, y, n in zip(wide, plain, (3, 3, 1), strict=True)] == [True] * 3
    v = make_qkv("v_drifts", *shape, torch.float32)[2] - plain[2]
    assert torch.allclose(v[:, :, :500], torch.tensor(3.0), atol=1e-5)
    assert torch.allclose(v[:, :, 500:], torch.tensor(-3.0), atol=1e-5)


@pytest.mark.parametrize("kind", LARGE_CHANNELS)
def test_large_channels_are_what_they_say(kind: str) -> None:
    shape = (2, 4, 2, 200, 300, 128)
    (q, k, v), plain = make_qkv(kind, *shape, torch.float32), make_qkv("randn", *shape, torch.float32)
    count, factor, power = LARGE_CHANNELS[kind]
    large = (k != plain[1]).any(2).all(0).all(0)
    assert large.sum() == count
    assert torch.equal(k, torch.where(large, plain[1] * factor, plain[1]))
    assert torch.allclose(q, torch.where(large, plain[0] / factor**power, plain[0]))
    assert torch.equal(v, plain[2])


def test_models_large_channels_are_what_they_say() -> None:
    """Pairs stay large in every row, and rotated scores are those of the distance."""
    q, k, _ = make_qkv("k_pairs", 1, 2, 1, 100, 300, 64, torch.float32)
    sizes = k.square().mean((0, 1, 2)).sqrt()
    large = sizes.topk(4).indices.sort().values
    assert torch.equal(large[:2] + 32, large[2:])
    assert (sizes[large] > 20).all()
    assert sizes.sort().values[:-4].max() < 2
    assert q[..., large].std() < 0.3 < 0.8 < q.std()
    sizes = make_qkv("k_lognormal", 1, 1, 1, 100, 2000, 256, torch.float32)[1].std(2)
    assert 0.8 < sizes.log().std() < 1.2


def test_relative_error() -> None:
    ref = torch.tensor([3.0, 4.0])
    assert relative_error(ref, ref) == 0
    assert relative_error(torch.zeros(2), ref) == 1
    assert relative_error(torch.tensor([3.0, 4.5]), ref) == pytest.approx(0.1)
    assert relative_error(ref.to(torch.float8_e4m3fn), ref) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_relative_error_of_nonfinite_fails_every_budget(value: float) -> None:
    ref, broken = torch.ones(3), torch.tensor([1.0, value, 1.0])
    assert not relative_error(broken, ref) <= 1e30
    assert math.isnan(relative_error(ref, broken)) or value == float("inf")


def test_error_budget() -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
    budgets = [error_budget(0.05, dtype) for dtype in dtypes]
    assert budgets == sorted(budgets), "a coarser output may err more"
    for dtype in dtypes:
        assert error_budget(0.0, dtype) == torch.finfo(dtype).eps
        assert error_budget(0.05, dtype) < error_budget(0.06, dtype)
        assert error_budget(0.05, dtype, factor=1.0) < error_budget(0.05, dtype, factor=2.0)
        assert 0.05 < error_budget(0.05, dtype) < 1, "zeros, whose error is 1, never pass"


@pytest.mark.parametrize(
    ("registers", "shared_kib", "num_warps", "ctas"),
    [(168, 72, 4, 3), (169, 72, 4, 2), (128, 72, 4, 3), (128, 56, 4, 4), (255, 224, 8, 1), (256, 227, 8, 1)],
)
def test_occupancy(registers: int, shared_kib: int, num_warps: int, ctas: int) -> None:
    kernel = Sm90Kernel("kernel", registers, shared_kib * 1024, num_warps, Counter(), ptx="", sass="")
    assert kernel.ctas_per_sm == ctas
