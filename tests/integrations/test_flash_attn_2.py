"""flash-attn 2's calls: its order of arguments, and its functions for packed Q, K and V."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.testing import relative_error
from helpers.refused import assert_raises

flash_attn_func: Any = ha.flash_attn_func
flash_attn_varlen_func: Any = ha.flash_attn_varlen_func
flash_attn_with_kvcache: Any = ha.flash_attn_with_kvcache

#: Of flash-attn 2's functions (flash_attn/flash_attn_interface.py, 2.8), behind the tensors and lengths, in order.
OPTIONS = """
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
""".replace(",", " ").split()

TENSORS: dict[Callable[..., Any], list[str]] = {
    ha.flash_attn_qkvpacked_func: ["qkv"],
    ha.flash_attn_kvpacked_func: ["q", "kv"],
    ha.flash_attn_varlen_qkvpacked_func: ["qkv", "cu_seqlens", "max_seqlen"],
    ha.flash_attn_varlen_kvpacked_func: ["q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
}


def bshd(device: str, H_kv: int = 2) -> list[torch.Tensor]:
    return [x.transpose(1, 2).contiguous() for x in make_qkv("randn", 1, 4, H_kv, 40, 40, 32, device=device)]


@pytest.mark.parametrize("function", TENSORS, ids=lambda f: f.__name__)
def test_signatures(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [*TENSORS[function], *OPTIONS, "recipe"]
    assert parameters["recipe"].kind is inspect.Parameter.KEYWORD_ONLY


#: Calls of flash-attn 2 -> what they mean to flash-attn 3.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    "dropout": ((0.0,), {}, {}),
    "dropout_int": ((0,), {"causal": True}, {"causal": True}),
    "scale": ((0.0, 0.3), {}, {"softmax_scale": 0.3}),
    "scale_none": ((0.0, None, True), {}, {"causal": True}),
    "all": (
        (0.0, 0.3, True, (9, 0), 1.5, None, True),
        {},
        {"softmax_scale": 0.3, "causal": True, "window_size": (9, 0), "softcap": 1.5},
    ),
    "scale_by_name": ((0.0,), {"softmax_scale": 0.3, "causal": True}, {"softmax_scale": 0.3, "causal": True}),
    "by_name": ((), {"dropout_p": 0.0, "alibi_slopes": None, "causal": True}, {"causal": True}),
    "flash_attn_3": ((0.3, True), {}, {"softmax_scale": 0.3, "causal": True}),
    "flash_attn_3_scale": ((0.3,), {"dropout_p": 0.0}, {"softmax_scale": 0.3}),
    "flash_attn_3_none": ((None, True), {}, {"causal": True}),
    "unlimited": ((), {"window_size": (None, None)}, {}),
    "left_alone": ((), {"window_size": (9, None)}, {"window_size": (9, -1)}),
}


@pytest.mark.thorough(but=7)
@pytest.mark.parametrize("case", CALLS)
def test_order(case: str, device: str) -> None:
    args, kwargs, meant = CALLS[case]
    qkv = bshd(device)
    out = flash_attn_func(*qkv, *args, **kwargs)
    assert torch.equal(out, flash_attn_func(*qkv, **meant))
    if meant:
        assert not torch.equal(out, flash_attn_func(*qkv))


def test_order_with_a_cache(device: str) -> None:
    """cache_seqlens is where flash-attn 3 has a table of sines."""
    cache = ha.paged_kv_cache(2, 2, 64, device=device)
    q, k, v = (x.transpose(1, 2) for x in make_qkv("randn", 2, 4, 2, 3, 3, 64, device=device))
    table = torch.tensor([[1], [0]], dtype=torch.int32, device=device)
    descales = {"k_descale": cache.k_descale, "v_descale": cache.v_descale}
    named = {"cache_seqlens": 0, "causal": True, "softmax_scale": 0.3, **descales}
    expected = flash_attn_with_kvcache(q, cache.k8, cache.v8, k, v, page_table=table, **named)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    for given in (0, lengths):
        out = flash_attn_with_kvcache(
            q, cache.k8, cache.v8, k, v, None, None, given, None, None, table, 0.3, True, **descales
        )
        assert torch.equal(out, expected)
    del named["cache_seqlens"]
    out = flash_attn_with_kvcache(q, cache.k8, cache.v8, k, v, cache_seqlens=0, block_table=table, **named)
    assert torch.equal(out, expected)


BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "dropout": ((0.1,), {"softmax_scale": 0.3}, NotImplementedError, r"dropout_p is 0\.1.*flash-attn 2"),
    "dropout_and_scale": ((0.1, 0.3), {}, NotImplementedError, r"dropout_p is 0\.1.*flash-attn 2"),
    "dropout_or_scale": ((0.1,), {"causal": True}, TypeError, r"0\.1, dropout_p to .* softmax_scale=0\.1 or"),
    "alibi": ((0.0, None, True, (-1, -1), 0.0, torch.ones(4)), {}, NotImplementedError, "alibi_slopes.*flash-attn 2"),
    "twice": ((0.0, 0.3), {"softmax_scale": 0.3}, TypeError, "in the order of flash-attn 2.*softmax_scale comes twice"),
    "too_many": ((0.0,) * 9, {}, TypeError, "in the order of flash-attn 2.*there are 1 too many"),
    "causal": ((0.0, None, "yes"), {}, TypeError, "causal is 'yes'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_calls(case: str) -> None:
    args, kwargs, error, message = BAD[case]
    with pytest.raises(error, match=message):
        flash_attn_func(*bshd("cpu"), *args, **kwargs)


def test_block_table_of_packed_sequences() -> None:
    q, k, v = (x[0] for x in bshd("cpu"))
    table = torch.tensor([0, 40], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"block_table is .*flash_attn_with_kvcache"):
        flash_attn_varlen_func(q, k, v, table, table, 40, 40, block_table=table)


def test_return_softmax_lse(device: str) -> None:
    qkv = bshd(device)
    out, lse = flash_attn_func(*qkv, return_softmax_lse=True)
    expected = flash_attn_func(*qkv, return_attn_probs=True)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("packed", ["qkv", "kv"])
def test_packed(packed: str, device: str) -> None:
    q, k, v = bshd(device, H_kv=4 if packed == "qkv" else 2)
    options: dict[str, Any] = {"causal": True, "window_size": (9, -1), "softmax_scale": 0.3, "softcap": 2.0}
    function: Any
    tensors: tuple[Any, ...]
    if packed == "qkv":
        function, tensors = ha.flash_attn_qkvpacked_func, (torch.stack([q, k, v], 2),)
    else:
        function, tensors = ha.flash_attn_kvpacked_func, (q, torch.stack([k, v], 2))
    out, lse, probabilities = function(*tensors, 0.0, 0.3, True, (9, -1), 2.0, None, False, True, recipe="accurate")
    expected, expected_lse = flash_attn_func(q, k, v, **options, return_attn_probs=True, recipe=ha.ACCURATE)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert probabilities is None
    oracle = ha.reference.attention(
        *(x.transpose(1, 2) for x in (q, k, v)), causal=True, window=(9, -1), sm_scale=0.3, softcap=2.0
    )
    assert relative_error(out.transpose(1, 2), oracle) < 0.07
    assert torch.equal(function(*tensors), flash_attn_func(q, k, v))
    arguments = dict(zip(TENSORS[function], tensors, strict=True)) | {"dropout_p": 0.3}
    parts = [f"{function.__name__}: dropout_p is 0.3", "order of flash-attn 2", "pass softmax_scale by name"]
    assert_raises(function, arguments, NotImplementedError, parts)


@pytest.mark.parametrize("function", TENSORS, ids=lambda f: f.__name__)
def test_slopes_are_refused_by_the_function_called(function: Callable[..., Any]) -> None:
    count = 3 if "qkv" in TENSORS[function] else 2
    tokens = (4,) if "varlen" in function.__name__ else (1, 4)
    packed = torch.zeros(*tokens, count, 2, 32)
    arguments: dict[str, Any] = {**dict.fromkeys(TENSORS[function]), "qkv" if count == 3 else "kv": packed}
    parts = [f"{function.__name__}: alibi_slopes is a Tensor (2,)", "it must be None"]
    assert_raises(function, {**arguments, "alibi_slopes": torch.zeros(2)}, NotImplementedError, parts)


@pytest.mark.parametrize("packed", ["qkv", "kv"])
def test_packed_sequences(packed: str, device: str) -> None:
    q, k, v = (x[0] for x in bshd(device, H_kv=4 if packed == "qkv" else 2))
    cu_seqlens = torch.tensor([0, 13, 40], dtype=torch.int32, device=device)
    function: Any
    tensors: tuple[Any, ...]
    if packed == "qkv":
        function, tensors = ha.flash_attn_varlen_qkvpacked_func, (torch.stack([q, k, v], 1), cu_seqlens, 27)
    else:
        function = ha.flash_attn_varlen_kvpacked_func
        tensors = (q, torch.stack([k, v], 1), cu_seqlens, cu_seqlens, 27, 27)
    expected = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 27, 27, softmax_scale=0.3, causal=True)
    assert torch.equal(function(*tensors, 0.0, 0.3, True), expected)
    with pytest.raises(NotImplementedError, match="pass softmax_scale by name"):
        function(*tensors, 0.3)


@pytest.mark.parametrize("function", [ha.flash_attn_qkvpacked_func, ha.flash_attn_varlen_qkvpacked_func])
def test_bad_packed_tensors(function: Any) -> None:
    lengths = () if function is ha.flash_attn_qkvpacked_func else (torch.zeros(2, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match=r"qkv has shape \(1, 4, 2, 4, 32\); it must be \[.*, 3, heads, head dim\]"):
        function(torch.zeros(1, 4, 2, 4, 32), *lengths)
    with pytest.raises(TypeError, match="qkv is a list"):
        function([1.0], *lengths)
