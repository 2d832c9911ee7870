"""NaN and infinity: where SDPA gives NaN, so does this; heads that hold none are as without."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helpers.cases import LADDER, Tensors, make_case

B, H, H_KV, M, N, D = 1, 4, 2, 70, 200, 32
VALUES = {"nan": float("nan"), "inf": float("inf"), "minus_inf": float("-inf")}


def sdpa(causal: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    rows, keys = torch.arange(M, device=q.device)[:, None], torch.arange(N, device=q.device)[None, :]
    mask = keys <= rows + (N - M if causal else N)
    k64, v64 = (x.double().repeat_interleave(H // H_KV, 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k64, v64, attn_mask=mask)


def inputs(head_dims: tuple[int, int], device: str) -> Tensors:
    D, D_v = head_dims
    return make_qkv("randn", B, H, H_KV, M, N, D, device=device, D_v=D_v)


@functools.cache
def clean_answer(
    recipe: ha.Recipe, head_dims: tuple[int, int], causal: bool, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of finite inputs."""
    return ha.attention(*inputs(head_dims, device), causal=causal, recipe=recipe, return_lse=True)


NAMES = pytest.mark.parametrize("name", ["q", "k", "v"])


def assert_never_finite(
    recipe: ha.Recipe, head_dims: tuple[int, int], name: str, value: str, causal: bool, row: int, device: str
) -> None:
    """One element of Q, K or V is no number: what PyTorch makes of it is none here, and other heads do not change."""
    qkv = dict(zip("qkv", inputs(head_dims, device), strict=True))
    clean, clean_lse = clean_answer(recipe, head_dims, causal, device)
    head = 1
    qkv[name][0, head, row, 5] = VALUES[value]
    out, lse = ha.attention(*qkv.values(), causal=causal, recipe=recipe, return_lse=True)

    expected = sdpa(causal, *qkv.values())
    assert not expected.isfinite().all()
    assert not out[~expected.isfinite()].isfinite().any()
    assert out[expected.isnan()].isnan().all()

    hit = torch.zeros(H, dtype=torch.bool, device=device)
    hit[head if name == "q" else slice(head * H // H_KV, (head + 1) * H // H_KV)] = True
    assert torch.equal(out[:, ~hit], clean[:, ~hit])
    assert torch.equal(lse[:, ~hit], clean_lse[:, ~hit])
    if name != "v":
        assert lse[0, head if name == "q" else 2].isnan().any()


@pytest.mark.thorough(but=13)
@pytest.mark.parametrize(
    ("value", "causal", "row"), [("nan", False, 0), ("nan", True, 69), ("inf", False, 0), ("minus_inf", True, 69)]
)
@NAMES
@pytest.mark.parametrize("recipe", LADDER.values(), ids=LADDER)
def test_never_becomes_finite(recipe: ha.Recipe, name: str, value: str, causal: bool, row: int, device: str) -> None:
    assert_never_finite(recipe, (D, D), name, value, causal, row, device)


@pytest.mark.thorough(but=9)
@pytest.mark.parametrize(
    ("value", "causal", "row", "name", "head_dims"),
    [
        *(
            (*what, name, head_dims)
            for what in (("nan", False, 0), ("minus_inf", True, 69))
            for name in "qkv"
            for head_dims in ((64, 64), (128, 128), (256, 256), (192, 128))
        ),
        # The interpreter takes seconds for these.
        *((*("minus_inf", True, 69), name, (512, 320)) for name in "qkv"),
    ],
    ids=str,
)
def test_never_becomes_finite_in_other_kernels(
    value: str, causal: bool, row: int, name: str, head_dims: tuple[int, int], device: str
) -> None:
    assert_never_finite(ha.BALANCED, head_dims, name, value, causal, row, device)


@pytest.mark.parametrize(("name", "causal"), [(name, i % 2 == 1) for i, name in enumerate(LADDER)])
def test_every_element_nonfinite(name: str, causal: bool, device: str) -> None:
    for value in VALUES.values():
        q, k, v = make_qkv("randn", B, H, H_KV, M, N, D, device=device)
        for poisoned in ((q.fill_(value), k, v), (q, k.fill_(value), v), (q, k, v.fill_(value))):
            assert ha.attention(*poisoned, causal=causal, recipe=LADDER[name]).isnan().all()


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize(
    ("name", "D", "magnitude", "causal"),
    [
        *(
            (name, 32, magnitude, causal)
            for name, causal in (("balanced", False), ("accurate", True))
            for magnitude in (1.0, 200.0, 1e6)
        ),
        *(("balanced", 32, 1.0, True), ("balanced", 320, 1.0, False), ("balanced", 320, 1e6, True)),
    ],
)
def test_neighbours_of_large_int8_scores(name: str, D: int, magnitude: float, causal: bool, device: str) -> None:
    """Rows of one block of queries, whose scale the kernel looks at as one, with descales from 1e-38 to NaN."""
    q, k, v = make_qkv("randn", B, H, H_KV, M, N, D, device=device)
    q[:, :, ::3] *= magnitude
    q[:, :, 1::9] = 0
    clean = make_case((q, k, v), causal, recipe=LADDER[name])
    zeroed, zeroed_lse = clean.run(torch.float32)
    hit = torch.zeros(M, dtype=torch.bool, device=device)
    hit[1::9] = True
    kept = {name: getattr(clean, name)[:, :, ~hit] for name in ("oracle", "oracle_lse", "model", "model_lse")}
    others = dataclasses.replace(clean, **kept)
    for value in VALUES.values():
        q[:, :, 1::9, 5] = value
        out, lse = clean.run(torch.float32)
        assert out[:, :, hit].isnan().all()
        assert lse[:, :, hit].isnan().all()
        others.assert_within_budget(out[:, :, ~hit])
        others.assert_lse_within_budget(lse[:, :, ~hit])
        if math.isnan(value):
            # An infinity is a large scale besides, of which the kernel's exponents round otherwise.
            assert torch.equal(out[:, :, ~hit], zeroed[:, :, ~hit])
            assert torch.equal(lse[:, :, ~hit], zeroed_lse[:, :, ~hit])


@pytest.mark.parametrize("value", VALUES)
def test_survives_every_out_dtype(value: str, device: str) -> None:
    q, k, v = make_qkv("randn", B, H, H_KV, M, N, D, device=device)
    k[:, :, 3, 3] = VALUES[value]
    for out_dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn):
        assert ha.attention(q, k, v, out_dtype=out_dtype).float().isnan().all()
