"""Gradients under what PyTorch puts around a model: torch.compile, checkpoints, autocast, double backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import helion_attn as ha
from helion_attn.integrations.transformers import attention_forward, changes_nothing
from helpers.gradients import inputs

ENDS = torch.tensor([0, 25, 40], dtype=torch.int32)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ha.attention(q, k, v, causal=True)


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return ha.attention_varlen(q, k, v, ENDS.to(q.device), ENDS.to(q.device), causal=True)


def with_prologue(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A norm of Q whose weight learns, of K whose weight does not, and RoPE at positions of its own."""
    angles = torch.outer(torch.arange(30.0, device=q.device), 1 + torch.arange(24.0, device=q.device))
    rope = ha.Rope(angles.cos(), angles.sin(), True, torch.arange(40, device=q.device) % 25, None)
    norms = ha.RMSNorm(q[0, :, 0].float().flatten()), ha.RMSNorm(torch.full((64,), 0.5, device=q.device))
    return ha.attention(q, k[:, :, :25], v[:, :, :25], rope=rope, q_norm=norms[0], k_norm=norms[1])


@pytest.fixture
def qkv(device: str) -> list[torch.Tensor]:
    return [x.to(device).requires_grad_() for x in inputs("randn", 2, 1, 40, 40, 64)[:3]]


def with_switch(call: Any, *args: Any, **options: Any) -> Any:
    """What a call gives where PyTorch is asked for deterministic algorithms."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        return call(*args, **options)
    finally:
        torch.use_deterministic_algorithms(before)


def gradients(call: Any, qkv: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(call(*qkv).float().square().sum(), qkv)


def same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize("call", [dense, varlen, with_prologue])
def test_compiled(call: Any, qkv: list[torch.Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = gradients(call, qkv)
    assert same(gradients(compiled, qkv), expected)
    with torch.no_grad():
        assert torch.equal(compiled(*qkv), call(*qkv))


# A reentrant checkpoint's first pass is one of inference, which fuses norms and RoPE and does not round their results.
@pytest.mark.parametrize(("call", "reentrant"), [(dense, False), (dense, True), (with_prologue, False)])
def test_checkpoints(call: Any, reentrant: bool, qkv: list[torch.Tensor]) -> None:
    checkpoint(call, *qkv, use_reentrant=reentrant).float().square().sum().backward()
    assert all(x.grad is not None for x in qkv)
    assert same(tuple(x.grad for x in qkv if x.grad is not None), gradients(call, qkv))


def test_autocast(qkv: list[torch.Tensor]) -> None:
    expected = gradients(dense, qkv)
    with torch.autocast(qkv[0].device.type, torch.bfloat16):
        assert same(gradients(dense, qkv), expected)


def of_model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, deterministic: bool) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attention_forward(torch.nn.Module(), q, k, v, None, is_causal=True, deterministic=deterministic)[0]


def packed_calls() -> dict[str, Any]:
    """Functions that have flash-attn's `deterministic`, of q, k and v [1, S, heads, D]."""
    ends = ENDS, ENDS
    lengths = *ends, 25, 25
    return {
        "flash_attn_func": ha.flash_attn_func,
        "flash_attn_varlen_func": lambda q, k, v, **options: ha.flash_attn_varlen_func(
            q[0], k[0], v[0], *lengths, **options
        ),
        "flash_attn_qkvpacked_func": lambda q, k, v, **options: ha.flash_attn_qkvpacked_func(
            torch.stack([q[:, :, :1], k, v], 2), **options
        ),
        "flash_attn_kvpacked_func": lambda q, k, v, **options: ha.flash_attn_kvpacked_func(
            q, torch.stack([k, v], 2), **options
        ),
        "flash_attn_varlen_qkvpacked_func": lambda q, k, v, **options: ha.flash_attn_varlen_qkvpacked_func(
            torch.stack([q[0, :, :1], k[0], v[0]], 1), ENDS, 25, **options
        ),
        "flash_attn_varlen_kvpacked_func": lambda q, k, v, **options: ha.flash_attn_varlen_kvpacked_func(
            q[0], torch.stack([k[0], v[0]], 1), *lengths, **options
        ),
        "transformers": of_model,
    }


@pytest.mark.parametrize("name", packed_calls())
def test_deterministic_asks_for_pytorch_s_switch(name: str) -> None:
    """Which alone the backward kernels go by."""
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in inputs("randn", 2, 1, 40, 40, 64)[:3])
    call = packed_calls()[name]
    match = r"deterministic is True .* must be False, or .* torch\.use_deterministic_algorithms\(True\)"
    for learned in range(3):
        given = [x.detach().requires_grad_(i == learned) for i, x in enumerate((q, k, v))]
        with pytest.raises(NotImplementedError, match=match):
            call(*given, deterministic=True)
    out = with_switch(call, q, k, v, deterministic=True)
    assert all(x is not None for x in torch.autograd.grad(out.float().sum(), (q, k, v)))
    assert torch.equal(out, call(q, k, v, deterministic=False))
    with torch.no_grad():
        call(q, k, v, deterministic=True)
    call(q.detach(), k.detach(), v.detach(), deterministic=True)


def test_a_fused_model_leaves_deterministic_to_attention() -> None:
    """Fused attention has no such argument."""
    assert not changes_nothing("deterministic", True)
    assert with_switch(changes_nothing, "deterministic", True)
    for value in (False, None):
        assert changes_nothing("deterministic", value)
    with torch.no_grad():
        assert changes_nothing("deterministic", True)


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
