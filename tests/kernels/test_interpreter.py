"""The kernels on CPU tensors, also where there is a GPU: their arithmetic is the rounding model's, step for step."""

from __future__ import annotations

import inspect

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.compiler.helion_adapter import helion, hl
from helion_attn.compiler.runners import interpreted
from helion_attn.testing import relative_error
from helpers import interpreter
from helpers.cases import make_case, row_errors, workload_case


@pytest.mark.thorough(but=9)
@pytest.mark.parametrize("kind", ["randn", "outlier"])
@pytest.mark.parametrize(
    "name", ["one_token", "one_query", "block_more_one", "causal_more_queries", "gqa", "d16", "d80_causal", "d256"]
)
def test_matches_the_rounding_model(name: str, kind: str) -> None:
    case = workload_case(name, kind, "cpu")
    out, lse = case.run(torch.float32)
    # A score that differs in its last bit may take a P over a rounding boundary: that is one row in many.
    assert row_errors(out, case.model).quantile(0.98) < 1e-6
    sees_a_key = case.model_lse > float("-inf")
    # Which lse holds as well, up to D 128.
    off = (lse - case.model_lse)[sees_a_key].abs() / case.model_lse[sees_a_key].square().mean().sqrt()
    assert off.quantile(0.98) < 1e-6
    assert off.max() < 1e-3


@pytest.mark.parametrize("magnitude", [0.1, 1.0, 10.0, 60.0, 200.0, 1000.0])
def test_int8_scores_of_any_size(magnitude: float, device: str) -> None:
    """From scores that keep the bias to scores of 1e9."""
    q, _, v = make_qkv("randn", 1, 2, 2, 70, 70, 128, device=device)
    case = make_case((q * magnitude, q * magnitude, v), causal=True, recipe=ha.BALANCED)
    out, lse = case.run(torch.float32)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)
    # The bias, where it stays, moves an exponent by 0.0004 at most, and few P change their last bit.
    assert relative_error(out, case.model) < 2.0**-7


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gqa", "ragged_causal", "d80_causal", "d256"])
def test_agrees_with_the_compiled_kernel(name: str) -> None:
    on_cpu = workload_case(name, "randn", "cpu")
    out, lse = ha.attention(
        *(x.cuda() for x in on_cpu.qkv), causal=on_cpu.causal, return_lse=True, out_dtype=torch.float32
    )
    expected, expected_lse = on_cpu.run(torch.float32)
    # The tensor core keeps about 14 bits of a sum, which takes a few P in a thousand over a rounding boundary.
    assert row_errors(out.cpu(), expected).median() < 2.0**-6
    sees_a_key = expected_lse > float("-inf")
    assert relative_error(lse.cpu()[sees_a_key], expected_lse[sees_a_key]) < 2.0**-10


@pytest.mark.parametrize(
    "rows", [[[3, -1, 5], [3, -1, 5], [-2, 7, 0], [3, -2, 9]], [[0, 0]] * 3, [[2**40, 1], [0, 2**40]]]
)
def test_rows_are_unique_as_pytorch_has_them(rows: list[list[int]]) -> None:
    """What stands in for it in tests, where the interpreter looks for places that are stored twice."""
    x = torch.tensor(rows)
    assert torch.equal(interpreter.unique_rows(x, dim=0), torch.unique(x, dim=0))
    assert torch.equal(interpreter.unique_rows(x), torch.unique(x))
    assert torch.equal(interpreter.unique_rows(x[:0], dim=0), x[:0])


def attend() -> tuple[torch.Tensor, ...]:
    """The results of a kernel with most kinds of access: rows and keys that a tile has none of, a mask, sequences."""
    q, k, v = (x[0].transpose(0, 1) for x in make_qkv("biased_v", 1, 2, 1, 70, 90, 40))
    ends = [torch.tensor(at, dtype=torch.int32) for at in ([0, 3, 3, 70], [0, 40, 41, 90])]
    return ha.attention_varlen(q, k, v, *ends, causal=True, window=(30, 0), return_lse=True)


def test_what_is_done_faster_has_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    faster = attend()
    accesses = [(access, access._ref_fn.__wrapped__) for access in (hl.load, hl.store)]
    monkeypatch.setattr(interpreter.RefModeTorchFunctionMode, "__torch_function__", interpreter._torch_function)
    monkeypatch.setattr(interpreter.Tile, "_tiles_to_sizes", interpreter._tiles_to_sizes)
    monkeypatch.setattr(interpreter.QuickSignature, "bind", inspect.Signature.bind)
    for access, of_helion in accesses:
        monkeypatch.setattr(access, "_ref_fn", of_helion)
    assert all(torch.equal(x, y) for x, y in zip(faster, attend(), strict=True))


def test_stores_to_one_place_are_found() -> None:
    def store_twice(out: torch.Tensor) -> None:
        for _ in hl.grid(1):
            hl.store(out, [hl.arange(4) // 2], torch.ones(4), extra_mask=hl.arange(4) < 4)

    with pytest.raises(helion.exc.DuplicateStoreIndicesError):
        interpreted(store_twice)(torch.zeros(4))
