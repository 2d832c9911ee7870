"""Gradients of `attention_varlen`: each sequence's are those of fp64, and tokens of none get zeros."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.backward import flash_attn_4, kernels, varlen
from helion_attn.backward.varlen import attention_varlen_training
from helion_attn.varlen import varlen_problem
from helpers.gradients import errors, exact_gradients
from helpers.memory import nan_filled_memory

#: H, H_kv, D, ends of the sequences of Q and of K, options: lengths that differ, an empty one of either, and tokens
#: before the first and behind the last.
CASES: dict[str, tuple[int, int, int, list[int], list[int], dict[str, Any]]] = {
    "full": (4, 2, 64, [0, 130, 130, 330], [0, 200, 230, 300], {}),
    "causal_window": (2, 1, 64, [3, 100, 230], [5, 100, 235], {"causal": True, "window": (90, 0)}),
    "causal_128": (2, 2, 128, [0, 140, 240, 250], [0, 140, 240, 240], {"causal": True}),
    "softcap": (2, 2, 64, [0, 100, 200], [0, 100, 200], {"softcap": 50.0, "causal": True}),
    "sinks": (2, 1, 64, [0, 150, 300], [0, 150, 300], {"sinks": torch.tensor([0.5, 3.0])}),
}


def tokens(H: int, H_kv: int, D: int, M: int, N: int) -> tuple[torch.Tensor, ...]:
    """Q, K whose channels have a mean, V and dO, bf16 [tokens, heads, D]."""
    generator = torch.Generator().manual_seed(0)
    shapes = (M, H, D), (N, H_kv, D), (N, H_kv, D), (M, H, D), (1, H_kv, D)
    q, k, v, d_out, bias = (torch.randn(*shape, generator=generator) for shape in shapes)
    return tuple(x.to(torch.bfloat16) for x in (q, k + 3 * bias, v, d_out))


@pytest.mark.parametrize("name", CASES)
def test_errors(name: str) -> None:
    H, H_kv, D, ends_q, ends_k, options = CASES[name]
    q, k, v, d_out = tokens(H, H_kv, D, ends_q[-1] + 4, ends_k[-1] + 7)
    if "sinks" in options:  # whose gradient is a sum over rows: of one sign, it is no rest of rounding
        v, d_out = v + 1, d_out + 1
    given = [x.requires_grad_() for x in (q, k, v)]
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in (ends_q, ends_k))
    sinks = options.get("sinks")
    if sinks is not None:
        options = options | {"sinks": sinks.clone().requires_grad_()}
        given.append(options["sinks"])
    with nan_filled_memory():
        out = ha.attention_varlen(q, k, v, cu_q, cu_k, **options)
        d_q, d_k, d_v, *d_sinks = torch.autograd.grad(out, given, d_out)
    of_sinks = torch.zeros(H, dtype=torch.float64)
    for b in range(len(ends_q) - 1):
        rows, keys = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
        if rows.start == rows.stop:
            assert keys.start == keys.stop or d_k[keys].abs().max() == 0
            continue
        if keys.start == keys.stop:
            assert d_q[rows].abs().max() == 0
            continue
        alone = [x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[keys], v[keys], d_out[rows])]
        expected = exact_gradients(*alone, **options)
        found = [x.transpose(0, 1).unsqueeze(0) for x in (d_q[rows], d_k[keys], d_v[keys])]
        of_q, of_k, of_v = errors(found, expected[:3])
        assert max(of_q, of_k) < 0.036, (of_q, of_k)
        assert of_v < 0.014
        if sinks is not None:
            of_sinks += expected[3]
    if sinks is not None:
        assert errors(d_sinks, [of_sinks])[0] < 0.02
    for x, ends in ((d_q, ends_q), (d_k, ends_k), (d_v, ends_k)):
        assert x[: ends[0]].abs().sum() == x[ends[-1] :].abs().sum() == 0


def test_gradient_of_lse() -> None:
    """That of `attention`, of each sequence."""
    q, k, v, d_out = tokens(2, 1, 64, 200, 200)
    d_lse = torch.randn(2, 200, generator=torch.Generator().manual_seed(1))
    ends = torch.tensor([0, 120, 200], dtype=torch.int32)
    given = [x.requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(
        ha.attention_varlen(q, k, v, ends, ends, causal=True, return_lse=True), given, (d_out, d_lse)
    )
    for rows in (slice(0, 120), slice(120, 200)):
        alone = [x[rows].unsqueeze(0) for x in (q, k, v)]
        results = ha.attention(*alone, causal=True, layout="bshd", return_lse=True)
        expected = torch.autograd.grad(results, alone, (d_out[rows].unsqueeze(0), d_lse[None, :, rows]))
        assert max(errors([x[rows].unsqueeze(0) for x in found], [x.double() for x in expected])) < 0.01


@pytest.mark.parametrize(("M", "N"), [(0, 30), (30, 0), (0, 0)])
def test_no_queries_or_no_keys(M: int, N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of 0, and no kernel of others is called, on a GPU either."""
    choose = kernels.choose
    chosen: list[str] = []

    def as_on_a_gpu(case: kernels.Case) -> kernels.BackwardKernel:
        found = choose(case._replace(is_cuda=True))
        chosen.append(found.name)
        return found

    monkeypatch.setattr(flash_attn_4, "is_here", lambda: False)
    monkeypatch.setattr(kernels, "choose", as_on_a_gpu)
    monkeypatch.setattr(kernels, "_flash", None)
    q, k, v = given = [x.requires_grad_() for x in tokens(2, 1, 64, M, N)[:3]]
    cu_q, cu_k = (torch.tensor([0, size], dtype=torch.int32) for size in (M, N))
    with nan_filled_memory():
        found = torch.autograd.grad(ha.attention_varlen(q, k, v, cu_q, cu_k).sum(), given)
    assert chosen == ["flash"]
    for x, y in zip(found, given, strict=True):
        assert torch.equal(x, torch.zeros_like(y))


def test_nan_of_a_sequence_stays_there() -> None:
    """Not with a gradient of lse either, for which K's mean comes into dQ."""
    q, k, v, d_out = tokens(2, 1, 64, 60, 60)
    k[5] = math.nan
    q, k, v = given = [x.requires_grad_() for x in (q, k, v)]
    ends = torch.tensor([0, 20, 50], dtype=torch.int32)
    out, lse = ha.attention_varlen(q, k, v, ends, ends, return_lse=True)
    found = torch.autograd.grad((out, lse), given, (d_out, torch.ones_like(lse)))
    assert found[0][:20].isnan().all()
    for x in found:
        assert x[20:50].isfinite().all()
        assert torch.equal(x[50:], torch.zeros_like(x[50:]))


def test_tokens_of_the_packed_format_are_found() -> None:
    """To the bit: what is dequantised is within an 8-bit rounding of what was packed."""
    q, k, v, _ = tokens(2, 1, 64, 334, 307)
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 130, 130, 330], [0, 200, 230, 300]))
    a = varlen_problem(q, k, v, cu_q, cu_k)
    asked = varlen._kept(a, attention_varlen_training(a))
    queries, keys = varlen.query_tokens(asked), varlen.key_tokens(asked)
    q2, k2, v2 = varlen.dequantised(asked, queries, keys)
    assert asked.packed.k_mean is not None
    k2 = k2 + asked.packed.k_mean[:, :, :64][keys.sequence]
    for x, y, at in ((q2, q, queries), (k2, k, keys), (v2, v, keys)):
        assert errors([x[at.inside]], [y[at.inside].double()])[0] < 0.03
        assert at.inside.sum() in (330, 300)


def test_opcheck() -> None:
    q, k, v, _ = (x.requires_grad_() for x in tokens(2, 1, 64, 40, 40))
    ends = torch.tensor([0, 30, 40], dtype=torch.int32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for recipe in ("balanced", "bf16"):
        a = varlen_problem(q, k, v, ends, ends, causal=True, return_lse=True, recipe=recipe)
        values = attention_varlen_training.values(a)
        torch.library.opcheck(torch.ops.helion_attn.attention_varlen_training, values, test_utils=checks)
    asked = varlen._kept(a, attention_varlen_training(a))._replace(d_lse=None)
    detached = tuple(
        x.detach() if isinstance(x, torch.Tensor) else x for x in varlen.attention_varlen_backward.values(asked)
    )
    torch.library.opcheck(torch.ops.helion_attn.attention_varlen_backward, detached)


@pytest.mark.parametrize("options", [{}, {"softcap": 20.0, "causal": True}], ids=["linear", "softcap"])
@pytest.mark.parametrize("table", [[0, 60, 40], [-5, 20, 40], [0, 30, 60]], ids=["descends", "negative", "past"])
@pytest.mark.parametrize("of_keys", [False, True])
def test_gradients_of_a_table_that_is_none_are_nan(of_keys: bool, table: list[int], options: dict[str, Any]) -> None:
    """As its outputs are: no kernel is given it, which would read and write elsewhere."""
    q, k, v, d_out = tokens(2, 2, 64, 40, 40)
    tables = [torch.tensor(x, dtype=torch.int32) for x in ([0, 20, 40], [0, 20, 40])]
    tables[of_keys] = torch.tensor(table, dtype=torch.int32)
    given = [x.requires_grad_() for x in (q, k, v)]
    out, lse = ha.attention_varlen(*given, *tables, return_lse=True, **options)
    assert out.isnan().all()
    for found in (torch.autograd.grad(out, given, d_out, retain_graph=True), torch.autograd.grad(lse.sum(), given)):
        assert all(x.isnan().all() for x in found)
