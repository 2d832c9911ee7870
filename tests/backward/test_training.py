"""Gradients under what PyTorch puts around a model: torch.compile, checkpoints, autocast, double backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import helion_attn as ha
from helpers.gradients import inputs

ENDS = torch.tensor([0, 25, 40], dtype=torch.int32)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ha.attention(q, k, v, causal=True)


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return ha.attention_varlen(q, k, v, ENDS.to(q.device), ENDS.to(q.device), causal=True)


@pytest.fixture
def qkv(device: str) -> list[torch.Tensor]:
    return [x.to(device).requires_grad_() for x in inputs("randn", 2, 1, 40, 40, 64)[:3]]


def gradients(call: Any, qkv: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(call(*qkv).float().square().sum(), qkv)


def same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize("call", [dense, varlen])
def test_compiled(call: Any, qkv: list[torch.Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = gradients(call, qkv)
    assert same(gradients(compiled, qkv), expected)
    with torch.no_grad():
        assert torch.equal(compiled(*qkv), call(*qkv))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool, qkv: list[torch.Tensor]) -> None:
    checkpoint(dense, *qkv, use_reentrant=reentrant).float().square().sum().backward()
    assert all(x.grad is not None for x in qkv)
    assert same(tuple(x.grad for x in qkv if x.grad is not None), gradients(dense, qkv))


def test_autocast(qkv: list[torch.Tensor]) -> None:
    expected = gradients(dense, qkv)
    with torch.autocast(qkv[0].device.type, torch.bfloat16):
        assert same(gradients(dense, qkv), expected)


@pytest.mark.parametrize("call", [dense, varlen])
def test_double_backward_raises(call: Any, qkv: list[torch.Tensor]) -> None:
    d_q, *_ = torch.autograd.grad(call(*qkv).float().square().sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        d_q.sum().backward()


def test_gradients_accumulate_over_two_uses(qkv: list[torch.Tensor]) -> None:
    """And a graph may be kept for another pass."""
    loss = dense(*qkv).float().square().sum()
    twice = (loss + loss, loss)
    first = torch.autograd.grad(twice[1], qkv, retain_graph=True)
    second = torch.autograd.grad(twice[0], qkv)
    for x, y in zip(first, second, strict=True):
        assert torch.equal(2 * x, y)
