"""The paged KV cache with `num_splits` given: what a query gets depends on itself and the keys that it sees, alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.kernels import cache_lse_shift, decode, prefill
from helion_attn.kernels.lib import paged
from helion_attn.kernels.lib.paged import line_of_page
from helpers.paged import append_all, make_cache

H, H_KV = 2, 1

BOTH = pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=str)

#: Of the sequence that is looked at, and of those that come along.
KEYS, OTHERS = 300, [129, 500]
LONGEST = 500

#: Queries that come at once, up to the last key that there is then, and whether other sequences come along: of
#: `fp8_attn_decode` up to 31, then of `fp8_attn_prefill`; some see another page than the last of their tile.
CHUNKS = [
    *((1, 129, False), (1, 300, True), (7, 131, True), (16, 264, False), (31, 257, False)),
    *((128, 250, True), (129, 287, False)),
]


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """A sequence among others, and its answers when all of its queries come at once, and alone."""

    q: torch.Tensor  # [3, H, N, D]
    cache: ha.PagedKVCache
    table: torch.Tensor
    options: dict[str, Any]

    def run(self, count: int, end: int, others: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """`(out, lse)`, fp32, of queries `end - count .. end` with `end` keys, with the other sequences or not."""
        b = 3 if others else 1
        seqlens = torch.tensor([end, *OTHERS][:b], dtype=torch.int32, device=self.q.device)
        q, table = self.q[:b, :, end - count : end], self.table[:b].contiguous()
        options: Any = {"return_lse": True, "out_dtype": torch.float32} | self.options
        out, lse = ha.attention_kvcache(q, self.cache, table, seqlens, **options)
        return out[:1], lse[:1]

    def changed(self) -> list[tuple[int, int, bool]]:
        """The chunks whose bits differ, if any."""
        whole, whole_lse = self.run(KEYS, KEYS, False)
        found = []
        for count, end, others in CHUNKS:
            out, lse = self.run(count, end, others)
            rows = slice(end - count, end)
            if not torch.equal(out, whole[:, :, rows]) or not torch.equal(lse, whole_lse[:, :, rows]):
                found.append((count, end, others))
        return found


def served(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    recipe: ha.Recipe,
    constants: dict[str, Any],
    **options: Any,
) -> Served:
    lengths = [KEYS, *OTHERS]
    sizes = H_KV, k.size(3), v.size(3)
    cache, table, _ = make_cache(lengths, *sizes, device=q.device.type, recipe=recipe, **constants)
    append_all(cache, k, v, table, lengths)
    return Served(q, cache, table, options)


def exact(D: int, device: str, recipe: ha.Recipe = ha.FAST, D_v: int | None = None, **options: Any) -> Served:
    """Of numbers whose products and their sums are exact in fp32: a CPU's order of additions depends on shapes.

    The cache's mean and factors give back what K and Q would be without. Each row at a scale of its own, their numbers
    become multiples of 64 up to 448, and V's 256 or 0: times P, which has steps of 2**-9 and ends at 2**8, they add up
    to 24 bits in a page of 128. A CPU's tanh is not exact.
    """
    generator = torch.Generator().manual_seed(D)

    def rows(heads: int, largest: int, width: int = D) -> torch.Tensor:
        x = torch.randint(-largest, largest + 1, (3, heads, LONGEST, width), generator=generator).float()
        x[..., 0] = largest
        return (x * torch.exp2(torch.randint(-2, 3, (3, heads, LONGEST, 1), generator=generator))).to(device)

    q, k, v = rows(H, 7), rows(H_KV, 7), rows(H_KV, 1, D_v or D)
    k_mean = torch.arange(D, device=device).expand(H_KV, D) % 7.0
    factors = torch.exp2(torch.arange(D, device=device) % 5 - 2.0).expand(H_KV, D)
    constants = {"k_mean": k_mean, "channel_factors": factors}
    # Scores of a standard deviation of 3 or so.
    return served(q / factors, k * factors + k_mean, v, recipe, constants, sm_scale=0.08 / D**0.5, **options)


def masked(name: str, device: str) -> dict[str, Any]:
    masks: dict[str, dict[str, Any]] = {
        "none": {},
        "window": {"window": (150, 0)},
        "softcap": {"softcap": 5.0},
        "sinks": {"sinks": torch.tensor([3.0, float("-inf")], device=device)},
    }
    return masks[name]


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize(
    ("D", "splits", "mask"),
    [
        *((64, 1, "none"), (64, 1, "window"), (64, 3, "none"), (64, 2, "window"), (64, 2, "sinks")),
        *((128, 2, "none"), (256, 1, "none"), (512, 1, "none")),
    ],
)
@BOTH
def test_chunks_and_batches_change_nothing(D: int, splits: int, mask: str, recipe: ha.Recipe, device: str) -> None:
    assert exact(D, device, recipe, num_splits=splits, **masked(mask, device)).changed() == []


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("D", "D_v"), [(64, 256), (256, 64)])
def test_chunks_and_batches_change_nothing_where_v_has_other_channels(D: int, D_v: int, device: str) -> None:
    assert exact(D, device, ha.BALANCED, D_v=D_v, num_splits=2).changed() == []


def rounded_in_first_row(x: torch.Tensor, mean: torch.Tensor, *_: Any) -> torch.Tensor:
    return x * mean * torch.where(torch.arange(cache_lse_shift.ROWS) == 0, 1 + 2.0**-20, 1.0).unsqueeze(1)


def test_the_check_of_means_can_fail(monkeypatch: Any) -> None:
    """Where a row's place in its tile changes its product with K's mean."""
    monkeypatch.setattr(cache_lse_shift, "fma", rounded_in_first_row)
    assert exact(64, "cpu", ha.BALANCED, num_splits=1).changed()


def rounded_where_nothing_is_seen(*args: Any) -> Any:
    m_run, m_i, scale, offset, top = line_of_page(*args)
    return m_run, torch.where(top == float("-inf"), m_i - 0.3, m_i), scale, offset, top


def in_another_order(p: torch.Tensor, bn: int, rows: int) -> torch.Tensor:
    return p.reshape(bn // 64, 4, 2, 4, 2, rows).sum(2).sum(3).sum(0)


def of_the_tile(visible: Any, *args: Any) -> Any:
    return visible


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("name", "mutation", "D", "splits"),
    [
        ("line_of_page", rounded_where_nothing_is_seen, 64, 1),
        ("sums_of_page", in_another_order, 256, 1),
        ("in_split_of_query", of_the_tile, 64, 3),
    ],
)
def test_the_check_can_fail(name: str, mutation: Callable[..., Any], D: int, splits: int, monkeypatch: Any) -> None:
    """Where a page that a row does not see rounds its sums; a kernel adds in its own order; rows share a run."""
    assert getattr(paged, name) is getattr(decode, name)
    monkeypatch.setattr(prefill, name, mutation)
    assert exact(D, "cpu", num_splits=splits).changed()


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["none", "window", "softcap", "sinks"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("D", [64, 128, 256, 512])
@BOTH
def test_tensor_cores_add_in_one_order(D: int, splits: int, mask: str, recipe: ha.Recipe) -> None:
    q, k, v = make_qkv("outlier", 3, H, H_KV, LONGEST, LONGEST, D, device="cuda")
    factors = torch.exp2(torch.arange(D) % 5 - 2.0).expand(H_KV, D)
    constants = {"k_mean": torch.linspace(-5, 5, D).expand(H_KV, D), "channel_factors": factors}
    assert served(q, k, v, recipe, constants, num_splits=splits, **masked(mask, "cuda")).changed() == []
