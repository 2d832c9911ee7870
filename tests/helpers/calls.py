"""Calls on fake tensors that together launch every kernel of the package."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import helion_attn as ha
from devtools.sm90 import fake_cuda
from helion_attn.types import Layout
from helpers.offline import fake_cache, fake_qkv, fake_varlen


def attend_alone(
    qkv: tuple[torch.Tensor, ...],
    recipe: ha.Recipe = ha.BALANCED,
    layout: Layout = "bhsd",
    options: dict[str, Any] | None = None,
) -> None:
    """`attention`, of which only what comes behind preprocessing is launched; with options of `attention_quantized`."""
    with mock.patch.object(torch.ops, "helion_attn", torch.ops.helion_attn.ops):  # their fakes
        packed = ha.quantize(*qkv, recipe=recipe, layout=layout)
    ha.attention_quantized(packed, **(options or {}))


def attend(
    M: int = 100,
    N: int = 200,
    D: int = 64,
    causal: bool = True,
    recipe: ha.Recipe = ha.FAST,
    layout: Layout = "bhsd",
    out_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """The attention kernel alone."""
    attend_alone(
        fake_qkv(1, 4, 4, M, N, D, layout=layout), recipe, layout, options={"causal": causal, "out_dtype": out_dtype}
    )


def rope() -> ha.Rope:
    return ha.Rope(fake_cuda(4096, 32), fake_cuda(4096, 32))


def preprocess() -> None:
    norm = ha.RMSNorm(fake_cuda(4 * 64))
    ha.quantize(*fake_qkv(1, 4, 2, 100, 200, 64), recipe=ha.ACCURATE, rope=rope(), q_norm=norm)
    ha.apply_rope(fake_qkv(1, 4, 2, 100, 200, 64)[0], rope())


def attend_to_a_cache() -> None:
    table, seqlens = fake_cuda(64, 32, dtype=torch.int32), fake_cuda(64, dtype=torch.int32)
    q, k, v = fake_qkv(64, 64, 8, 1, 1, 128)
    cache = fake_cache(2048, 8, 128, 128, ha.FAST)
    ha.append_kvcache(cache, k, v, table, seqlens)
    ha.attention_kvcache(q, cache, table, seqlens, num_splits=2)


def attend_to_sequences() -> None:
    ha.attention_varlen(*fake_varlen(64, 64), causal=True)


def attend_with_large_heads() -> None:
    attend_alone(fake_qkv(4, 4, 2, 1000, 3000, 512), ha.FAST, options={"causal": True})


def attend_in_parts() -> None:
    attend_alone(fake_qkv(1, 4, 2, 130, 30_000, 64), options={"causal": True})
