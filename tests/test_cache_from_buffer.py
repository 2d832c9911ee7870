"""`PagedKVCache.from_buffer`: a cache over a caller's memory, a page's bytes together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import helion_attn as ha

#: What bytes hold that are not the cache's.
OTHERS = 0x5A

SIZES = pytest.mark.parametrize(("D", "D_v", "recipe"), [(64, 64, "balanced"), (256, 128, "fast"), (300, 512, "fast")])


def filled(caches: list[ha.PagedKVCache], D: int, D_v: int, device: str) -> list[list[torch.Tensor]]:
    """Outputs of the same calls on each: prompts, decodes, and a step."""
    generator = torch.Generator().manual_seed(D)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    table = torch.tensor([[5, 2, 1], [0, 7, 3]], dtype=torch.int32, device=device)
    lengths, outs = torch.zeros(2, dtype=torch.int32, device=device), list[list[torch.Tensor]]([[] for _ in caches])
    for new in (62, 1, 70):
        q, k, v = normal(2, 4, new, D), normal(2, 2, new, D), normal(2, 2, new, D_v)
        for of_cache, cache in zip(outs, caches, strict=True):
            pages = ha.append_kvcache(cache, k, v, table, lengths)
            of_cache.append(ha.attention_kvcache(q, cache, table, lengths + new, open_pages=pages))
        lengths += new
    q, k, v = normal(8, 4, D), normal(8, 2, D), normal(8, 2, D_v)
    cu_seqlens = torch.tensor([0, 7, 8], dtype=torch.int32, device=device)
    for of_cache, cache in zip(outs, caches, strict=True):
        of_cache.append(ha.kv_cache.step(q, k, v, cache, cu_seqlens, table, lengths + cu_seqlens.diff()))
    return outs


@SIZES
def test_has_the_bits_of_a_cache_of_its_own(D: int, D_v: int, recipe: Any, device: str) -> None:
    """Beside other bytes, which stay."""
    size = ha.kv_cache.page_bytes(2, D, D_v)
    buffer = torch.full((8, 3 * size), OTHERS, dtype=torch.uint8, device=device)
    cache = ha.PagedKVCache.from_buffer(buffer[:, size : 2 * size], 2, D, D_v=D_v, recipe=recipe)
    own = ha.paged_kv_cache(8, 2, D, D_v=D_v, device=device, recipe=recipe)
    for x, y in zip(*filled([cache, own], D, D_v, device), strict=True):
        assert torch.equal(x, y)
    assert torch.all(buffer[:, :size] == OTHERS)
    assert torch.all(buffer[:, 2 * size :] == OTHERS)


def test_pages_of_every_head(device: str) -> None:
    """Where pages follow each other; otherwise the call raises."""
    size = ha.kv_cache.page_bytes(2, 64)
    buffer = torch.zeros(4, size, dtype=torch.uint8, device=device)
    cache, own = ha.PagedKVCache.from_buffer(buffer, 2, 64), ha.paged_kv_cache(4, 2, 64, device=device)
    table, start = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[3, 1]], [0]))
    q, k, v = torch.randn(3, 1, 2, 200, 64, generator=torch.Generator().manual_seed(0)).to(device)
    of_heads, lengths = (
        torch.stack((table, table[:, [1, 0]]), 1),
        torch.tensor([[128, 72]], dtype=torch.int32, device=device),
    )
    outs = []
    for x in (cache, own):
        ha.append_kvcache(x, k, v, table, start)
        outs.append(ha.attention_kvcache(q[:, :, -1:], x, of_heads, lengths))
    assert torch.equal(outs[0], outs[1])
    apart = ha.PagedKVCache.from_buffer(torch.zeros(4, 2 * size, dtype=torch.uint8, device=device), 2, 64)
    with pytest.raises(NotImplementedError, match=r"pages of the cache lie 69632 bytes apart; .* 34816 bytes apart"):
        ha.attention_kvcache(q[:, :, -1:], apart, of_heads, lengths)


def test_where_bytes_lie(device: str) -> None:
    """Of a head K, V, and descales of both."""
    buffer = torch.zeros(2, ha.kv_cache.page_bytes(2, 64), dtype=torch.uint8, device=device)
    cache = ha.PagedKVCache.from_buffer(buffer, 2, 64)
    k, v = torch.zeros(2, 1, 2, 1, 64, device=device)
    k[0, 1, 0, 5], v[0, 1, 0, 9] = 127.0, 448.0
    ha.append_kvcache(cache, k, v, torch.tensor([[1]], device=device).int(), torch.zeros(1, device=device).int())
    head = buffer[1].view(2, -1)[1]
    assert head.numel() == 128 * (64 + 64 + 8)
    assert int(head[5]) == 127
    assert float(head[8192 + 9 * 128 + 0].view(torch.float8_e4m3fn)) == 448.0
    assert head[16384:].view(torch.float32)[[0, 128]].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"buffer": 3}, TypeError, r"buffer is .* it must be a tensor of uint8 or int8"),
        ({"buffer": torch.zeros(2, 40000)}, TypeError, r"buffer is .* it must be a tensor of uint8 or int8"),
        ({"buffer": torch.zeros(2, 34815, dtype=torch.uint8)}, ValueError, r"at least 34816 bytes a page"),
        ({"buffer": torch.zeros(2, 34824, dtype=torch.uint8)}, ValueError, r"multiples of 16 bytes apart"),
        ({"H_kv": 0}, ValueError, r"H_kv is 0"),
        ({"D": 8}, ValueError, r"D is 8"),
    ],
)
def test_what_it_refuses(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"buffer": torch.zeros(2, 34816, dtype=torch.uint8), "H_kv": 2, "D": 64}
    with pytest.raises(error, match=message):
        ha.PagedKVCache.from_buffer(**{**given, **changed})
