"""flash_attn_func: flash-attn 3's names, order and meaning, on FP8 attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.integrations.flash_attn_arguments import RULES
from helion_attn.testing import relative_error
from helpers.refused import refused

#: Its result is a tensor or a pair, by a bool.
flash_attn_func: Any = ha.flash_attn_func


def bshd(device: str, dtype: torch.dtype = torch.bfloat16, B: int = 1) -> tuple[torch.Tensor, ...]:
    qkv = make_qkv("randn", B, 4, 2, 37, 70, 32, device=device)
    return tuple(x.transpose(1, 2).contiguous().to(dtype) for x in qkv)


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ha.reference.attention(q, k, v, **options).transpose(1, 2)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "scale": ({"softmax_scale": 0.3}, {"sm_scale": 0.3}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (9, 5)}, {"window": (9, 5)}),
    "causal_window": ({"causal": True, "window_size": (9, 5)}, {"causal": True, "window": (9, 0)}),
    "softcap": ({"softcap": 1.5, "softmax_scale": 0.5}, {"softcap": 1.5, "sm_scale": 0.5}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_against_the_oracle(case: str, device: str) -> None:
    given, meant = OPTIONS[case]
    qkv = bshd(device)
    out = flash_attn_func(*qkv, **given)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, oracle(*qkv, **meant)) < 0.07
    for others in OPTIONS.values():
        if others[1] != meant:
            assert relative_error(out, oracle(*qkv, **others[1])) > 0.1


def test_is_attention_of_the_same_arguments(device: str) -> None:
    qkv = bshd(device)
    out, lse = flash_attn_func(*qkv, None, True, recipe=ha.FAST, return_attn_probs=True)
    expected, expected_lse = ha.attention(*qkv, causal=True, layout="bshd", recipe=ha.FAST, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert lse.shape == (1, 4, 37)


def fp8(device: str) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    descales = {f"{x}_descale": (torch.rand(2, 2, generator=generator) + 0.5).to(device) for x in "qkv"}
    return bshd(device, torch.float8_e4m3fn, B=2), descales


def test_fp8_with_descales(device: str) -> None:
    """Rows of q of one KV head share its descale."""
    qkv, descales = fp8(device)
    out = flash_attn_func(*qkv, causal=True, **descales)
    assert out.dtype == torch.bfloat16

    def dequantised(names: str) -> list[torch.Tensor]:
        tensors = []
        for name, x in zip(names, qkv, strict=True):
            descale = descales[f"{name}_descale"]
            tensors.append(x.float() * descale.repeat_interleave(x.size(2) // 2, 1)[:, None, :, None])
        return tensors

    assert relative_error(out, oracle(*dequantised("qkv"), causal=True)) < 0.05
    assert relative_error(out, oracle(*dequantised("qvk"), causal=True)) > 0.1
    pack: Any = ha.pack
    assert torch.equal(out, ha.attention_quantized(pack(*qkv, layout="bshd", **descales), causal=True))


def test_fp8_without_descales_is_as_with_ones(device: str) -> None:
    qkv, descales = fp8(device)
    ones = {name: torch.ones_like(x) for name, x in descales.items()}
    assert torch.equal(flash_attn_func(*qkv), flash_attn_func(*qkv, **ones))


@pytest.mark.parametrize(
    ("name", "bad"),
    [("q_descale", -1.0), ("q_descale", 0.0), ("k_descale", -1.0), ("k_descale", float("inf")), ("v_descale", -1.0)],
)
def test_bad_descale_values_make_nan_of_their_heads(name: str, bad: float, device: str) -> None:
    """They are not read on the host, as a CUDA graph could not, and must not give an answer."""
    qkv, descales = fp8(device)
    expected = flash_attn_func(*qkv, **descales)
    descales[name] = descales[name].clone()
    descales[name][1, 0] = bad
    out = flash_attn_func(*qkv, **descales)
    assert out[1, :, :2].isnan().all()
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1, :, 2:], expected[1, :, 2:])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.argument)
def test_unsupported_arguments_raise(rule: Any, device: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{rule.argument} is .*; it must be"):
        flash_attn_func(*bshd(device), **{rule.argument: refused(rule.argument)})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"q_descale": torch.ones(2, 2)}, ValueError, "q_descale is given and q is not"),
        ({"window_size": (-2, 0)}, ValueError, "window_size is"),
        ({"window_size": 3}, TypeError, "window_size is 3"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0; it must be 0.0, for no cap"),
        ({"softcap": float("nan")}, ValueError, "softcap is nan; it must be 0.0, for no cap"),
        ({"softcap": None}, TypeError, "softcap is a NoneType; it must be a float"),
        ({"softcap": False}, TypeError, "softcap is a bool; it must be a float"),
        ({"return_attn_probs": "no"}, TypeError, "return_attn_probs is 'no'; it must be a bool"),
        ({"num_splits": True}, NotImplementedError, "num_splits is True; it must be 0 or 1"),
        ({"num_splits": 1.0}, NotImplementedError, "num_splits is 1.0; it must be 0 or 1"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale is -1"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale is 0.0; it must be None or positive"),
        ({"recipe": "best"}, ValueError, "recipe is 'best'"),
        ({"dropout_p": 0.1}, NotImplementedError, r"dropout_p is 0\.1; it must be 0\.0.*flash-attn 2"),
        ({"alibi_slopes": torch.ones(4)}, NotImplementedError, r"alibi_slopes is a Tensor .*flash-attn 2"),
        ({"return_softmax_lse": "no"}, TypeError, "return_softmax_lse is 'no'; it must be a bool"),
        ({"window_size": (None, -2)}, ValueError, r"window_size is \(-1, -2\)"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_arguments_raise(options: dict[str, Any], error: type[Exception], message: str, device: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn_func(*bshd(device), **options)


@pytest.mark.parametrize(("recipe", "error"), [("best", ValueError), (8, TypeError)])
def test_recipe_is_checked_of_e4m3_tensors(recipe: Any, error: type[Exception], device: str) -> None:
    """To them it does not matter: a wrong one would go unnoticed until the tensors are bf16."""
    with pytest.raises(error, match=f"recipe is {recipe!r}"):
        flash_attn_func(*bshd(device, torch.float8_e4m3fn), recipe=recipe)


def test_bad_descales_raise(device: str) -> None:
    qkv, _ = fp8(device)
    for descale, error in ((torch.ones(2, 4), ValueError), (torch.ones(2, 2).double(), TypeError), (1.0, TypeError)):
        given = descale.to(device) if isinstance(descale, torch.Tensor) else descale
        with pytest.raises(error, match="k_descale"):
            flash_attn_func(*qkv, k_descale=given)
    with pytest.raises(RuntimeError, match="v_descale requires grad"):
        flash_attn_func(*qkv, v_descale=torch.ones(2, 2, device=device, requires_grad=True))


def test_gradients_are_those_of_attention(device: str) -> None:
    for i in range(3):
        learned, ours = ([x.detach().requires_grad_(i == j) for j, x in enumerate(bshd(device))] for _ in range(2))
        flash_attn_func(*learned, causal=True).float().square().sum().backward()
        ha.attention(*ours, causal=True, layout="bshd").float().square().sum().backward()
        found, expected = ([x.grad for x in given] for given in (learned, ours))
        assert [x is None for x in found] == [i != j for j in range(3)]
        torch.testing.assert_close(found[i], expected[i], rtol=0, atol=0)
