"""`attention` against the fp64 oracle, within what the rounding model allows."""

from __future__ import annotations

import functools

import pytest
import torch

import helion_attn as ha
from devtools.inputs import INPUT_KINDS, make_qkv
from devtools.workloads import tagged
from helion_attn.testing import error_budget, relative_error
from helpers.cases import Case, workload_case

Problem = tuple[Case, torch.Tensor, torch.Tensor]

#: These see every kind of input; the rest of the table sees randn.
ALL_KINDS = {"ragged", "causal_more_keys", "gqa", "d80_causal", "d256"}
PROBLEMS = [(w.name, kind) for w in tagged("ci") for kind in INPUT_KINDS if kind == "randn" or w.name in ALL_KINDS]


@functools.lru_cache(maxsize=2)
def run(name: str, kind: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The fp32 output and the lse, once for all the tests of a problem."""
    return workload_case(name, kind, device).run(torch.float32)


@pytest.fixture(scope="module", params=PROBLEMS, ids=lambda problem: "-".join(problem))
def problem(request: pytest.FixtureRequest, device: str) -> Problem:
    """`(case, out, lse)`."""
    name, kind = request.param
    return workload_case(name, kind, device), *run(name, kind, device)


@pytest.mark.thorough(but=14)
def test_total_error(problem: Problem) -> None:
    case, out, _ = problem
    assert out.shape == case.oracle.shape
    case.assert_within_budget(out)


@pytest.mark.thorough(but=14)
def test_kernel_error(problem: Problem) -> None:
    case, out, _ = problem
    dequantized = ha.dequantize(ha.quantize(*case.qkv, recipe=case.recipe))
    ref = ha.reference.attention(*dequantized, causal=case.causal)
    assert relative_error(out, ref) <= error_budget(relative_error(case.model, ref), out.dtype, device=out.device)


@pytest.mark.thorough(but=14)
def test_lse(problem: Problem) -> None:
    case, _, lse = problem
    case.assert_lse_within_budget(lse)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_attention_is_quantize_then_attention_quantized(causal: bool, device: str) -> None:
    qkv = make_qkv("biased_v", 1, 4, 2, 70, 200, 64, torch.float16, device)
    expected, expected_lse = ha.attention(*qkv, causal=causal, sm_scale=0.2, return_lse=True)
    packed = ha.quantize(*qkv)
    out, lse = ha.attention_quantized(packed, causal=causal, sm_scale=0.2, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert torch.equal(ha.attention_quantized(packed, causal=causal, sm_scale=0.2), expected)


@pytest.mark.parametrize("name", ["gqa", "ragged_causal", "d256_causal"])
def test_two_runs_are_bitwise_equal(name: str, device: str) -> None:
    case = workload_case(name, "outlier", device)
    (out, lse), (out_again, lse_again) = case.run(), case.run()
    assert torch.equal(out, out_again)
    assert torch.equal(lse, lse_again)


def test_inputs_are_left_alone(device: str) -> None:
    qkv = make_qkv("biased_v", 1, 4, 2, 70, 200, 64, device=device)
    before = [x.clone() for x in qkv]
    ha.attention(*qkv)
    for x, x_before in zip(qkv, before, strict=True):
        assert torch.equal(x, x_before)


def test_requires_grad_is_accepted_under_no_grad(device: str) -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv("randn", 1, 2, 2, 5, 7, 32, device=device))
    with torch.no_grad():
        out = ha.attention(q, k, v)
    assert not out.requires_grad
    with torch.inference_mode():
        assert torch.equal(ha.attention(q, k, v), out)
