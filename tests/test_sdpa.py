"""`with ha.sdpa():` what scaled_dot_product_attention becomes, where, and what raises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as bound_before

import helion_attn as ha
from helion_attn.integrations.sdpa import HIDDEN, RULES
from helion_attn.testing import make_qkv, relative_error
from helpers.refused import refused

Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def qkv_on(device: str, M: int = 24, N: int = 24, H_kv: int = 2) -> Qkv:
    return make_qkv("randn", 1, 2, H_kv, M, N, 32, device=device)


def is_stock(out: torch.Tensor, qkv: Qkv) -> bool:
    return relative_error(out, ha.reference.attention(*qkv)) < 0.01


def test_scope(device: str) -> None:
    """Inside, FP8; after it, and after an exception, what it was; the innermost context counts."""
    qkv = qkv_on(device)
    fast, balanced = ha.attention(*qkv, recipe=ha.FAST), ha.attention(*qkv)
    assert not torch.equal(fast, balanced)
    stock = F.scaled_dot_product_attention
    with ha.sdpa():
        assert torch.equal(F.scaled_dot_product_attention(*qkv), balanced)
        with ha.sdpa(recipe=ha.FAST):
            assert torch.equal(F.scaled_dot_product_attention(*qkv), fast)
            with pytest.raises(NotImplementedError, match="dropout_p"):
                F.scaled_dot_product_attention(*qkv, dropout_p=0.5)
        with pytest.raises(ZeroDivisionError), ha.sdpa(recipe=ha.FAST):
            _ = 1 / 0
        assert torch.equal(F.scaled_dot_product_attention(*qkv), balanced)
        assert torch.equal(bound_before(*qkv), balanced)
    assert F.scaled_dot_product_attention is stock
    assert is_stock(F.scaled_dot_product_attention(*qkv), qkv)


def test_only_the_thread_that_entered(device: str) -> None:
    qkv = qkv_on(device)
    out: list[torch.Tensor] = []
    with ha.sdpa():
        thread = threading.Thread(target=lambda: out.append(F.scaled_dot_product_attention(*qkv)))
        thread.start()
        thread.join()
    assert is_stock(out[0], qkv)


def test_recipe_is_checked() -> None:
    with pytest.raises(TypeError, match="recipe is 8"):
        ha.sdpa(recipe=8)  # type: ignore[arg-type]


CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = {
    "full": ((24, 40, 2), {}, {}),
    "scale": ((24, 40, 2), {"scale": 0.5}, {"sm_scale": 0.5}),
    "causal": ((24, 24, 2), {"is_causal": True}, {"causal": True}),
    "gqa": ((24, 40, 1), {"enable_gqa": True}, {}),
    "lower_right": ((24, 40, 2), {"attn_mask": causal_lower_right(24, 40)}, {"causal": True}),
    "upper_left": ((24, 24, 2), {"attn_mask": causal_upper_left(24, 24)}, {"causal": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_means_what_it_means_to_pytorch(case: str, device: str) -> None:
    (M, N, H_kv), options, ours = CASES[case]
    qkv = qkv_on(device, M, N, H_kv)
    stock = F.scaled_dot_product_attention(*qkv, **options)
    with ha.sdpa():
        out = F.scaled_dot_product_attention(*qkv, **options)
    assert torch.equal(out, ha.attention(*qkv, **ours))
    assert 1e-4 < relative_error(out, stock) < 0.07


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.argument)
def test_unsupported_arguments_raise(rule: Any, device: str) -> None:
    with ha.sdpa(), pytest.raises(NotImplementedError, match=f"{rule.argument} is .*; it must be"):
        F.scaled_dot_product_attention(*qkv_on(device), **{rule.argument: refused(rule.argument)})


def test_top_left_causal_of_other_lengths_raises(device: str) -> None:
    """Decoding, too: to PyTorch one query with is_causal sees one key."""
    for M, N in ((1, 24), (24, 40), (40, 24)):
        qkv = qkv_on(device, M, N)
        for options in ({"is_causal": True}, {"attn_mask": causal_upper_left(M, N)}):
            with ha.sdpa(), pytest.raises(NotImplementedError, match="top-left"):
                F.scaled_dot_product_attention(*qkv, **options)


BAD: dict[str, tuple[Callable[[Qkv], tuple[Any, ...]], dict[str, Any], type[Exception], str]] = {
    "mask_of_other_lengths": (tuple, {"attn_mask": causal_lower_right(24, 25)}, ValueError, "24 and 25"),
    "two_masks": (tuple, {"attn_mask": causal_lower_right(24, 24), "is_causal": True}, ValueError, "is_causal"),
    "float64": (lambda qkv: tuple(x.double() for x in qkv), {}, TypeError, "float64"),
    "scale": (tuple, {"scale": -1.0}, ValueError, "scale is -1.0"),
    "value_of_rank_3": (lambda qkv: (*qkv[:2], qkv[2][0]), {}, ValueError, "value has shape"),
    "rank_3": (lambda qkv: tuple(x[0] for x in qkv), {}, ValueError, "4 dimensions"),
    "heads": (lambda qkv: (qkv[0], qkv[1][:, :1], qkv[2][:, :1]), {}, ValueError, "enable_gqa"),
    "head_dim": (lambda qkv: tuple(x[..., :8] for x in qkv), {}, ValueError, "head dim"),
    "meta": (lambda qkv: tuple(x.to("meta") for x in qkv), {}, NotImplementedError, "meta"),
    "grad": (lambda qkv: (qkv[0].clone().requires_grad_(), *qkv[1:]), {}, RuntimeError, "requires grad"),
    "typo": (tuple, {"dropout": 0.0}, TypeError, "dropout"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_raise(case: str, device: str) -> None:
    change, options, error, message = BAD[case]
    with ha.sdpa(), pytest.raises(error, match=message):
        F.scaled_dot_product_attention(*change(qkv_on(device)), **options)


def test_multihead_attention_raises(device: str) -> None:
    """Its call of scaled_dot_product_attention is not seen; it must not run in bf16 as if nothing was said."""
    x = torch.randn(1, 8, 32, device=device)
    attend = torch.nn.MultiheadAttention(32, 2, batch_first=True, device=device)
    for layer in (attend, torch.nn.TransformerEncoderLayer(32, 2, batch_first=True, device=device)):
        arguments = (x, x, x) if layer is attend else (x,)
        for module in (layer.train(), layer.eval()):
            with torch.no_grad(), ha.sdpa(), pytest.raises(NotImplementedError, match="MultiheadAttention"):
                module(*arguments)
    assert F.multi_head_attention_forward in HIDDEN


def test_autocast_is_as_in_pytorch(device: str) -> None:
    q, k, v = (x.float() for x in qkv_on(device))
    with torch.autocast(device, dtype=torch.bfloat16), ha.sdpa():
        out = F.scaled_dot_product_attention(q, k, v.bfloat16())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, ha.attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_around_a_compiled_function(device: str) -> None:
    """What was compiled outside is not what runs inside, nor the other way round."""
    qkv = qkv_on(device)
    function = compiled(attend)
    stock = function(*qkv)
    assert torch.equal(stock, attend(*qkv))
    for recipe in (ha.BALANCED, ha.FAST):
        with ha.sdpa(recipe=recipe):
            assert torch.equal(function(*qkv), attend(*qkv))
            assert not torch.equal(function(*qkv), stock)
    assert torch.equal(function(*qkv), stock)


def test_inside_a_compiled_function(device: str) -> None:
    def with_context(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with ha.sdpa(recipe=ha.FAST):
            return attend(q, k, v)

    qkv = qkv_on(device)
    out = compiled(with_context)(*qkv)
    assert torch.equal(out, with_context(*qkv))
    assert not torch.equal(out, attend(*qkv))
