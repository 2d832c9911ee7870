"""`kv_cache.step` as a server calls it: views of one tensor, groups of three heads, long prompts, large pools."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.kv_cache import page_bytes
from helion_attn.testing import error_budget, relative_error

H, H_KV, D, PAGE = 9, 3, 64, 128


class Sequences:
    """A pool of pages, the keys that each sequence has, and pages that are free, from both ends of the pool."""

    def __init__(self, num_pages: int, table_width: int, bias: float, device: str) -> None:
        memory = torch.zeros(num_pages, page_bytes(H_KV, D), dtype=torch.uint8, device=device)
        self.cache = ha.PagedKVCache.from_buffer(memory, H_KV, D, recipe="balanced")
        ends = zip(range(1, num_pages), reversed(range(num_pages // 2, num_pages)), strict=False)
        self.free = itertools.chain.from_iterable(ends)
        self.generator = torch.Generator().manual_seed(0)
        # Of some channels, as trained models have them.
        self.bias = bias * torch.randn(H_KV, D, generator=self.generator) * (torch.arange(D) % 16 == 0)
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.pages: dict[int, list[int]] = {}
        self.width, self.device = table_width, device

    def step(self, new: dict[int, int]) -> None:
        """Append tokens by sequence, attend, and check each sequence against the oracle."""
        ends = [0, *itertools.accumulate(new.values())]
        qkv = torch.randn(ends[-1], (H + 2 * H_KV) * D, generator=self.generator)
        qkv[:, H * D : (H + H_KV) * D] += self.bias.flatten()
        parts = qkv.to(self.device, torch.bfloat16).split([H * D, H_KV * D, H_KV * D], 1)
        q, k, v = (x.view(ends[-1], -1, D) for x in parts)
        # Entries behind a sequence's pages are another's, as a server leaves them.
        table = torch.randint(1, 8, (len(new), self.width), generator=self.generator, dtype=torch.int32)
        for row, (b, begin, end) in enumerate(zip(new, ends, ends[1:], strict=False)):
            for of, x in ((self.keys, k), (self.values, v)):
                of[b] = torch.cat([of[b], x[begin:end]]) if b in of else x[begin:end]
            pages = self.pages.setdefault(b, [])
            pages += itertools.islice(self.free, -(-self.keys[b].size(0) // PAGE) - len(pages))
            table[row, : len(pages)] = torch.tensor(pages)
        lengths = [self.keys[b].size(0) for b in new]
        on_device: Any = (torch.tensor(x, dtype=torch.int32, device=self.device) for x in (ends, lengths))
        cu_seqlens, seqlens = on_device
        sizes = {"max_seqlen_q": max(new.values()), "max_seqlen_k": max(lengths)}
        step: Any = ha.kv_cache.step
        out = step(q, k, v, self.cache, cu_seqlens, table.to(self.device), seqlens, **sizes)
        for b, begin, end in zip(new, ends, ends[1:], strict=False):
            tokens = [x.transpose(0, 1).unsqueeze(0) for x in (q[begin:end], self.keys[b], self.values[b])]
            oracle = ha.reference.attention(*tokens, causal=True)
            model, _ = ha.reference.fp8_attention_kvcache(*tokens, recipe="balanced", own_pages_open=True)
            found = out[begin:end].transpose(0, 1).unsqueeze(0)
            budget = error_budget(relative_error(model, oracle), out.dtype, device=out.device)
            error = relative_error(found, oracle)
            assert error <= budget, (
                f"sequence {b}, {end - begin} of {len(self.keys[b])}: {error:.4g}, budget {budget:.4g}"
            )


@pytest.mark.parametrize("bias", [0.0, 12.0], ids=["plain", "biased"])
def test_views_of_one_tensor(bias: float, device: str) -> None:
    sequences = Sequences(30, 6, bias, device)
    sequences.step({0: 300, 1: 130, 2: 1})
    sequences.step({2: 1, 0: 1, 1: 1})
    sequences.step({3: 256, 2: 1, 1: 70})


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [0.0, 12.0], ids=["plain", "biased"])
@pytest.mark.parametrize("num_pages", [200, 42_000, 88_000], ids=["small_pool", "large_pool", "many_keys"])
def test_long_prompts(num_pages: int, bias: float, device: str) -> None:
    """Four prompts of 2,048 tokens in a step. A large pool has 2**31 bytes; of many keys K has as many elements."""
    assert (num_pages * page_bytes(H_KV, D) > 2**31) == (num_pages > 200)
    assert (num_pages * H_KV * PAGE * D > 2**31) == (num_pages == 88_000)
    sequences = Sequences(num_pages, 66, bias, device)
    sequences.step(dict.fromkeys(range(4), 2048))
    sequences.step(dict.fromkeys(range(4), 1))
    sequences.step({4: 1500, 1: 1, 5: 400, 2: 1})
