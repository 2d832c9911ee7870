"""`ha.debug()`: what lies on the device is checked on the host, inside and only there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn import debug_state, plans
from helion_attn.validate import values


def ints(*numbers: int, device: str) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def varlen(device: str, *cu_seqlens: int) -> torch.Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in make_qkv("randn", 1, 2, 2, 30, 30, 32, device=device))
    table = ints(*cu_seqlens, device=device)
    return ha.attention_varlen(q, k, v, table, table)


class Cached:
    """A cache of 3 pages, and what appends to it and attends to it."""

    def __init__(self, device: str) -> None:
        self.cache = ha.paged_kv_cache(3, 2, 32, device=device)
        for x in (self.cache.k8, self.cache.v8, self.cache.k_descale, self.cache.v_descale):
            x.view(torch.uint8).zero_()
        self.q, self.k, self.v = make_qkv("randn", 2, 2, 2, 1, 1, 32, device=device)
        self.device = device

    def append(self, table: list[list[int]], lengths: list[int]) -> None:
        block_table = torch.tensor(table, dtype=torch.int32, device=self.device)
        ha.append_kvcache(self.cache, self.k, self.v, block_table, ints(*lengths, device=self.device))

    def attend(self, table: list[list[int]], lengths: list[int]) -> torch.Tensor:
        self.append([[0], [2]], [0, 0])  # so that their pages hold numbers
        block_table = torch.tensor(table, dtype=torch.int32, device=self.device)
        return ha.attention_kvcache(self.q, self.cache, block_table, ints(*lengths, device=self.device))

    def append_then_attend(self, lengths: list[int], counted: list[int], q: torch.Tensor | None = None) -> torch.Tensor:
        """Through pages 0 and 1, and 2."""
        table = [[0, 1], [2, 2]]
        self.append(table, lengths)
        block_table = torch.tensor(table, dtype=torch.int32, device=self.device)
        q = self.q if q is None else q
        return ha.attention_kvcache(q, self.cache, block_table, ints(*counted, device=self.device))


def swapped(device: str, M: int, H: int, keys: int = 4) -> torch.Tensor:
    """q [B, M, H, D] in the place of [B, H, M, D], after `keys` keys were appended."""
    cached = Cached(device)
    cached.k, cached.v = (x.expand(-1, -1, keys, -1) for x in (cached.k, cached.v))
    return cached.append_then_attend([0, 3], [keys, 3 + keys], torch.ones(2, M, H, 32, device=device).bfloat16())


def flash_attn_twice(device: str) -> torch.Tensor:
    """Which looks at its arguments before it appends."""
    cache = ha.paged_kv_cache(2, 2, 64, device=device)
    q, k, v = (x.transpose(1, 2) for x in make_qkv("randn", 1, 2, 2, 1, 1, 64, device=device))
    table, flash_attn_with_kvcache = ints(0, device=device).view(1, 1), cast(Any, ha.flash_attn_with_kvcache)
    for _ in range(2):
        out: torch.Tensor = flash_attn_with_kvcache(
            q, cache.k8, cache.v8, k, v, cache_seqlens=ints(0, device=device), page_table=table,
            k_descale=cache.k_descale, v_descale=cache.v_descale, causal=True,
        )  # fmt: skip
    return out


def rotated(device: str, positions: list[int]) -> torch.Tensor:
    angles = torch.arange(5.0, device=device)[:, None] * torch.arange(1, 17, device=device) / 16
    q, k, v = make_qkv("randn", 1, 2, 2, 3, 3, 32, device=device)
    at = ints(*positions, device=device)
    return ha.attention(q, k, v, rope=ha.Rope(angles.cos(), angles.sin(), False, at, at))


def descaled(device: str, value: float) -> Any:
    q, k, v = (x.transpose(1, 2).to(torch.float8_e4m3fn) for x in make_qkv("randn", 1, 2, 2, 3, 3, 32, device=device))
    flash_attn_func: Any = ha.flash_attn_func
    return flash_attn_func(q, k, v, k_descale=torch.full((1, 2), value, device=device))


def forgotten(device: str) -> torch.Tensor:
    """The key behind 128 others is forgotten with the last of these, in whose place another comes."""
    cached = Cached(device)
    cached.append_then_attend([128, 0], [129, 1])
    return cached.append_then_attend([127, 1], [128, 2])


def page_of_another(device: str) -> torch.Tensor:
    """Behind the last page of a sequence its table has one to which another's key went."""
    cached, table = Cached(device), [[0, 1], [2, 1]]
    cached.append(table, [128, 127])
    block_table = torch.tensor(table, dtype=torch.int32, device=device)
    return ha.attention_kvcache(cached.q, cached.cache, block_table, ints(129, 128, device=device))


def append_twice_to_a_page(device: str) -> None:
    """The same keys for both sequences: which is written last changes nothing."""
    cached = Cached(device)
    cached.k, cached.v = (x[:1].repeat(2, 1, 1, 1) for x in (cached.k, cached.v))
    cached.append([[2], [2]], [0, 0])


#: What is wrong -> a call, and what the message says.
BAD: dict[str, tuple[Callable[[str], object], str]] = {
    "lengths": (lambda device: varlen(device, 12, 18), r"cu_seqlens_q is \[12, 18\], which add up to the 30 tokens"),
    "descends": (lambda device: varlen(device, 0, 20, 12), "cu_seqlens_q has 20 and 12 at 1 and 2; it must ascend"),
    "negative": (lambda device: varlen(device, -1, 12), "cu_seqlens_q has -1 and 12 at 0 and 1"),
    "past_the_end": (lambda device: varlen(device, 0, 31), r"cu_seqlens_q has 0 and 31 .* in 0\.\.30"),
    "page": (
        lambda device: Cached(device).attend([[0], [3]], [1, 1]),
        r"block_table\[1, 0\] is 3; .* in 0\.\.2",
    ),
    "length": (lambda device: Cached(device).attend([[0], [1]], [1, 129]), r"cache_seqlens\[1\] is 129; .* 0\.\.128"),
    "full": (lambda device: Cached(device).append([[0], [1]], [128, 0]), r"cache_seqlens\[0\] is 128; .* 0\.\.127"),
    "shared": (
        append_twice_to_a_page,
        "has page 2 for sequences 0 and 1",
    ),
    "not_raised_at_first": (
        lambda device: Cached(device).append_then_attend([0, 0], [0, 0]),
        r"cache_seqlens\[0\] is 0, and 1 keys were appended behind those, which it must count: add 1 to it",
    ),
    "not_raised": (
        lambda device: Cached(device).append_then_attend([128, 4], [129, 4]),
        r"cache_seqlens\[1\] is 4, and 1 keys were appended",
    ),
    "swapped_q": (
        lambda device: swapped(device, 4, 8),
        r"q has shape \(2, 4, 8, 32\), 4 heads and 8 tokens with .* 4 keys .* pass q\.transpose\(1, 2\)",
    ),
    "position": (lambda device: rotated(device, [0, 5, 1]), r"rope\.q_positions\[1\] is 5; it must lie in 0\.\.4"),
    "descale": (lambda device: descaled(device, -1.0), r"k_descale holds -1\.0"),
}

GOOD: dict[str, Callable[[str], object]] = {
    "varlen": lambda device: varlen(device, 0, 12, 12, 30),
    "tokens_of_no_sequence": lambda device: varlen(device, 3, 12),
    "attend": lambda device: Cached(device).attend([[0, 9], [2, 9]], [128, 1]),  # entries past the end are not read
    "append": lambda device: Cached(device).append([[0], [2]], [127, 0]),
    "raised": lambda device: Cached(device).append_then_attend([127, 4], [128, 5]),
    "as_many_tokens_as_keys": lambda device: swapped(device, 8, 4),
    "as_many_heads_as_tokens": lambda device: swapped(device, 4, 4),
    "one_token": lambda device: swapped(device, 4, 1),
    "flash_attn": flash_attn_twice,
    "forgotten": forgotten,
    "page_of_another": page_of_another,
    "shared_prefix": lambda device: Cached(device).append([[0, 1], [0, 2]], [128, 128]),
    "positions": lambda device: rotated(device, [0, 4, 1]),
    "descale": lambda device: descaled(device, 2.0),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_values_raise_inside(what: str, device: str) -> None:
    call, message = BAD[what]
    call(device)  # NaN, or nothing stored
    with ha.debug(), pytest.raises(ValueError, match=message):
        call(device)
    call(device)


@pytest.mark.parametrize("what", GOOD)
def test_good_values_pass(what: str, device: str) -> None:
    outside = GOOD[what](device)
    with ha.debug():
        inside = GOOD[what](device)
    if isinstance(outside, torch.Tensor):
        torch.testing.assert_close(inside, outside, rtol=0, atol=0, equal_nan=True)


def test_it_is_left_on_exceptions() -> None:
    with ha.debug():
        assert debug_state.debugging()
    with pytest.raises(ZeroDivisionError), ha.debug():
        _ = 1 / 0
    assert not debug_state.debugging()


def test_calls_inside_are_checked_before_they_take_a_plan() -> None:
    x = [torch.zeros(1)]
    assert plans.key_of("attention", x, ()) is not None
    with ha.debug():
        assert plans.key_of("attention", x, ()) is None


def test_compiled_code_is_not_checked(device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(ha.attention_varlen, fullgraph=True, backend="eager")
    x, table = torch.zeros(30, 2, 32, dtype=torch.bfloat16, device=device), ints(0, 20, 12, device=device)
    with ha.debug():
        assert compiled(x, x, x, table, table).isnan().all()


def test_fake_tensors_are_not_read() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), ha.debug():
        varlen("cpu", 0, 12)


def test_fields_of_a_rope_are_named() -> None:
    rope = ha.Rope(torch.rand(5, 16), torch.rand(5, 16), k_positions=torch.tensor([7]))
    with pytest.raises(ValueError, match=r"rope\.k_positions\[0\] is 7"):
        values.check_rope_positions(dataclasses.replace(rope))
