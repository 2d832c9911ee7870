"""PyTorch's default dtype and device, as a program may set them, change no answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helpers.offline import compile_attention, forget
from helpers.shared import shared

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """As inference servers set it, to a model's. What was compiled before is forgotten."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    forget()
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        forget()


@DTYPES
def test_default_dtype_changes_nothing(dtype: torch.dtype, device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 1, 20, 30, 32, device=device)
    q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, v))

    def answers() -> list[torch.Tensor]:
        packed8 = ha.pack(q8, k8, v8, q_descale=0.5, k_descale=2.0, v_descale=1.0)
        quantized = ha.quantize(q, k, v, recipe=ha.ACCURATE)
        found = [ha.hadamard_matrix(32), *ha.dequantize(packed8), *ha.dequantize(quantized)]
        found += [ha.attention_quantized(packed8), ha.attention(q, k, v), ha.attention(q, k, v, recipe=ha.BF16)]
        return [*found, ha.flash_attn_func(q8.transpose(1, 2), k8.transpose(1, 2), v8.transpose(1, 2))]

    expected = answers()
    with default_dtype(dtype):
        found = answers()
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_default_dtype_changes_no_kernel() -> None:
    expected = shared(compile_attention, 64, True, recipe=ha.BALANCED)
    with default_dtype(torch.bfloat16):
        assert compile_attention(64, True, recipe=ha.BALANCED).sass == expected.sass


def test_rotation_is_made_on_the_cpu() -> None:
    x = torch.randn(1, 1, 4, 32, dtype=torch.float64)
    expected = ha.hadamard_matrix(32, 7), ha.reference.hadamard(x, 7)
    with torch.device("meta"):
        assert torch.equal(ha.hadamard_matrix(32, 7), expected[0])
        assert torch.equal(ha.reference.hadamard(x, 7), expected[1])
