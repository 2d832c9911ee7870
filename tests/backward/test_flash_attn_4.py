"""What flash-attn-4's private function is called with, by a stand-in that computes what its documentation says."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.api import dense_problem
from helion_attn.backward import flash_attn_4, kernels
from helion_attn.compiler.slower import warn_slower
from helpers.gradients import errors, exact_gradients, inputs

CALLS: list[dict[str, Any]] = []


def scores_and_mask(
    q: torch.Tensor, k: torch.Tensor, softmax_scale: float, causal: bool, left: int | None, right: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of one sequence [M, heads, D], [heads, M, N], and which of them are hidden, bottom-right aligned."""
    M, N = q.size(0), k.size(0)
    from_diagonal = torch.arange(N) - (torch.arange(M).unsqueeze(1) + N - M)
    right = 0 if causal else right
    hidden = torch.zeros(M, N, dtype=torch.bool)
    hidden |= torch.zeros_like(hidden) if right is None else from_diagonal > right
    hidden |= torch.zeros_like(hidden) if left is None else from_diagonal < -left
    return softmax_scale * torch.einsum("mhd,nhd->hmn", q, k), hidden


def of_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, d_out: torch.Tensor, lse: torch.Tensor,
    d_lse: torch.Tensor | None, **options: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dQ, dK and dV of one sequence [S, heads, D]; lse [H, M]."""
    G = q.size(1) // k.size(1)
    q, k, v, out, d_out, lse = (x.double() for x in (q, k, v, out, d_out, lse))
    k_all, v_all = (x.repeat_interleave(G, 1) for x in (k, v))
    s, hidden = scores_and_mask(q, k_all, **options)
    p = torch.exp(s - lse.unsqueeze(2)).masked_fill(hidden, 0.0)
    less = (d_out * out).sum(2).T - (0.0 if d_lse is None else d_lse.double())
    d_s = p * (torch.einsum("mhd,nhd->hmn", d_out, v_all) - less.unsqueeze(2)) * options["softmax_scale"]
    dq = torch.einsum("hmn,nhd->mhd", d_s, k_all)
    dk, dv = torch.einsum("hmn,mhd->nhd", d_s, q), torch.einsum("hmn,mhd->nhd", p, d_out)
    return dq, *(x.unflatten(1, (-1, G)).sum(2) for x in (dk, dv))


def stand_in(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, d_out: torch.Tensor, lse: torch.Tensor, *,
    softmax_scale: float, causal: bool, window_size_left: int | None, window_size_right: int | None,
    cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None, dlse: torch.Tensor | None,
    deterministic: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    assert {x.dtype for x in (q, k, v, out, d_out)} == {q.dtype}
    assert q.dtype.itemsize == 2
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    CALLS.append({"deterministic": deterministic, "dlse": dlse})
    edges = {"left": window_size_left, "right": window_size_right}
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, **edges}
    found = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
    if cu_seqlens_q is None or cu_seqlens_k is None:
        for b in range(q.size(0)):
            d_lse = None if dlse is None else dlse[b]
            for x, y in zip(found, of_one(q[b], k[b], v[b], out[b], d_out[b], lse[b], d_lse, **options), strict=True):
                x[b] = y
    else:
        ends = (itertools.pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k))
        for rows, keys in zip(*((slice(*pair) for pair in pairs) for pairs in ends), strict=True):
            d_lse = None if dlse is None else dlse[:, rows]
            dq, dk, dv = of_one(q[rows], k[keys], v[keys], out[rows], d_out[rows], lse[:, rows], d_lse, **options)
            found[0][rows], found[1][keys], found[2][keys] = dq, dk, dv
    return tuple(x.to(q.dtype) for x in found)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in, also on a CPU."""
    module = ModuleType("flash_attn.cute.interface")
    module._flash_attn_bwd = stand_in  # type: ignore[attr-defined]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(flash_attn_4, "is_here", lambda: True)
    choose = kernels.choose
    monkeypatch.setattr(kernels, "choose", lambda case: choose(case._replace(is_cuda=True)))
    CALLS.clear()


def gradients(given: list[torch.Tensor], options: dict[str, Any], d_lse: bool) -> list[torch.Tensor]:
    q, k, v, d_out = given
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = ha.attention(*leaves, return_lse=True, **options)
    outputs, of_outputs = ([out, lse], [d_out, torch.cos(lse.detach())]) if d_lse else ([out], [d_out])
    return list(torch.autograd.grad(outputs, leaves, of_outputs))


@pytest.mark.parametrize(
    ("sizes", "options", "d_lse"),
    [
        ((4, 2, 70, 90, 64), {"causal": True}, False),
        ((4, 2, 90, 70, 64), {"causal": True}, False),
        ((2, 2, 80, 80, 64), {"causal": True, "window": (20, 0)}, False),
        ((2, 1, 80, 100, 64), {"window": (20, 7)}, False),
        ((4, 2, 80, 80, 64), {}, True),
        ((4, 2, 80, 80, 64), {"causal": True, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, True),
    ],
)
def test_gradients_are_those_of_the_products_in_pytorch(
    sizes: tuple[int, int, int, int, int], options: dict[str, Any], d_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list(inputs("biased_k", *sizes, B=2))
    found = gradients(given, options, d_lse)
    assert len(CALLS) == 1
    assert (CALLS[0]["dlse"] is not None) == d_lse
    monkeypatch.setattr(kernels, "why_chunked", lambda case: "the test asks for it")
    warn_slower.cache_clear()
    with pytest.warns(match="backward pass"):
        expected = gradients(given, options, d_lse)
    # 16-bit Q, K, V and outputs.
    assert max(errors(found, [x.double() for x in expected])) < 0.008


def test_packed_sequences() -> None:
    q, k, v, d_out = (x[0].transpose(0, 1).contiguous() for x in inputs("biased_k", 4, 2, 150, 150, 64))
    ends = [0, 70, 70, 120, 149]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    out = ha.attention_varlen(given[0], given[1], given[2], cu_seqlens, cu_seqlens, causal=True, window=(40, 0))
    found = torch.autograd.grad(out, given, d_out)
    assert len(CALLS) == 1
    for begin, end in itertools.pairwise(ends):
        if begin < end:
            alone = [x[begin:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v, d_out)]
            mine = [x[begin:end].transpose(0, 1).unsqueeze(0) for x in found]
            d_q, d_k, d_v = errors(mine, exact_gradients(*alone, causal=True, window=(40, 0)))
            assert max(d_q, d_k) < 0.045
            assert d_v < 0.02
    assert all(x[ends[-1] :].abs().max() == 0 for x in found)


def test_deterministic_algorithms_are_handed_on() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        gradients(list(inputs("randn", 2, 2, 40, 40, 64)), {"causal": True}, False)
    finally:
        torch.use_deterministic_algorithms(before)
    assert CALLS[0]["deterministic"]


@pytest.fixture
def found_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Gives a version of the package that is installed, in the place of the stand-in."""
    monkeypatch.undo()

    def install(found: str) -> None:
        monkeypatch.setattr(flash_attn_4, "version", lambda name: found)
        flash_attn_4.installed_version.cache_clear()

    yield install
    flash_attn_4.installed_version.cache_clear()


def test_another_version_is_not_called(found_version: Callable[[str], None]) -> None:
    for found, expected in (("4.0.0b30", False), (flash_attn_4.VERSION, True)):
        found_version(found)
        assert flash_attn_4.is_here() == expected


def test_another_version_is_named_where_it_would_be_called(found_version: Callable[[str], None]) -> None:
    q = torch.zeros(1, 1, 40, 64, dtype=torch.bfloat16, requires_grad=True)
    k, wide = q.detach(), torch.zeros(1, 1, 40, 72, dtype=torch.bfloat16, requires_grad=True)
    case = kernels.Case(True, 40, 40, 64, 64, dense_problem(k, k, k).scores, False, True, False)
    text = f"; flash-attn-4 4.0.0b30 is installed, of which only {flash_attn_4.VERSION} is called"
    found_version("4.0.0b30")
    window: Any = {"causal": True, "window": (9, 0)}
    explained = ha.explain(q, k, k, **window).backward
    assert explained is not None
    assert explained.endswith(f"PyTorch hands cuDNN no window{text}")
    found = kernels.choose(case)
    assert found.name == "chunked"
    assert found.reason.endswith(text)
    # What cuDNN takes; what this version would not take either.
    others = [ha.explain(q, k, k).backward, ha.explain(q, k, k, softcap=5.0).backward]
    others += [ha.explain(wide, wide.detach(), wide.detach(), **window).backward]
    for other in others:
        assert other is not None
        assert "4.0.0b30" not in other
    found_version(flash_attn_4.VERSION)
    assert "is installed" not in str(ha.explain(q, k, k, **window).backward)
