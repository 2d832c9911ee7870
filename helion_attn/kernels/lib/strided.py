"""How a preprocessing kernel reads tensors of any strides with wide loads, compiled once.

Triton proves a 16-byte load aligned from what it knows at compile time, and a stride is a run-time argument. So the
strides arrive divided by a constant `unit` and are multiplied back inside the kernel, where the constant is visible.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.configs import Packing
from helion_attn.kernels.lib.scalars import Int
from helion_attn.types import PagedKVCache

#: Bytes.
WIDEST_LOAD = 16


#: Of Q, K and V: the kernels' names of their steps.
STEP_NAMES = {x: tuple(f"{x}_{step}_step" for step in "bhs") for x in "qkv"}


class StridedRows(NamedTuple):
    """A [B, H, S, D] tensor as flat memory.

    Element (b, h, s, d) is `flat[(b * b_step + h * h_step + s * s_step) * unit + d * d_step]`.
    """

    flat: torch.Tensor
    b_step: int
    h_step: int
    s_step: int
    d_step: int


def common_unit(*tensors: torch.Tensor) -> int:
    """The widest power of two, at most 16 bytes of elements, that divides every stride but the last dimension's.

    1 if a stride needs 64 bits: a quotient that fits 32 would be multiplied back in 32, whatever the index's type.
    """
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    used = [stride for x in tensors for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    if max(used, default=0) >= 2**31:
        return 1
    return math.gcd(*strides, WIDEST_LOAD // tensors[0].itemsize)


def strided_rows(x: torch.Tensor, unit: int) -> StridedRows:
    """View `x` [B, H, S, D], of any strides, as flat memory. Copies nothing."""
    b, h, s, d = x.stride()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return StridedRows(x.as_strided((extent,), (1,)), b // unit, h // unit, s // unit, d)


def flat_memory(x: torch.Tensor) -> torch.Tensor:
    """View a tensor, from its first element to its last, as flat memory. Copies nothing."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((extent,), (1,))


class StridedQKV(NamedTuple):
    """Q, K and V as the kernels take them: see `StridedRows`."""

    flat: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of Q, K, V
    steps: tuple[int, ...]  # b, h and s steps of Q, of K, of V
    d_steps: tuple[int, int, int]  # of Q, K, V
    unit: int  # what the steps are multiples of
    B: int  # and H, H_kv, M, N, D, D_v: sizes
    H: int
    H_kv: int
    M: int
    N: int
    D: int
    D_v: int
    D_pad: int  # padded head dim of Q and K
    D_v_pad: int  # padded head dim of V
    D_row: int  # width of the kernels' tiles and of what they know of channels

    def arguments(self, of: str) -> dict[str, Any]:
        """Return the tensors `of` and their steps but `d_steps`, by the names of kernels' arguments."""
        found: dict[str, Any] = {}
        for i, x in enumerate("qkv"):
            if x in of:
                found[x] = self.flat[i]
                found |= zip(STEP_NAMES[x], self.steps[3 * i : 3 * i + 3], strict=True)
        return found

    @property
    def wide(self) -> bool:
        """Whether offsets need 64 bits."""
        return max(x.numel() for x in self.flat) >= 2**31


def strided_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing) -> StridedQKV:
    """View q [B, H, M, D], k [B, H_kv, N, D] and v [B, H_kv, N, D_v], of any strides. Copies nothing."""
    unit = common_unit(q, k, v)
    rows = [strided_rows(x, unit) for x in (q, k, v)]
    flat = (rows[0].flat, rows[1].flat, rows[2].flat)
    d_steps = (rows[0].d_step, rows[1].d_step, rows[2].d_step)
    steps = tuple(step for r in rows for step in (r.b_step, r.h_step, r.s_step))
    (B, H, M, D), (H_kv, N) = q.shape, k.shape[1:3]
    padded = (packing.D_pad, packing.D_v_pad, packing.D_row)
    return StridedQKV(flat, steps, d_steps, unit, B, H, H_kv, M, N, D, v.size(3), *padded)


def row_channels(d: hl.constexpr, d_at_run_time: int, d_step: hl.constexpr) -> int:
    """The channels of a row, for `load_rows` in `pack`. Inlined into kernels.

    As a constant it keeps loads wide. But where the last dimension is strided, Triton gives a thread channels of which
    it knows that they are padding, and of their equal zeros ptxas 12.8, Triton 3.6's, packs pairs with a register that
    nobody wrote: NaN in q8 (as, it seems, in Triton's issue 11111). Such loads are of single elements in any case.

    It was seen for strided rows alone. `test_constant_padding_makes_undefined_pairs` fails when it is gone.
    """
    if d_step == 1:
        return d
    return d_at_run_time


def load_rows(
    flat: torch.Tensor,
    head_offset: int,
    rows: torch.Tensor,  # [n]
    cols: torch.Tensor,  # [d_tile]
    row_step: int,
    d_step: int,
    size: int,
    d: int,
) -> torch.Tensor:
    """Rows of one head as fp32 [n, d_tile], zero outside `size` x `d`. Inlined into kernels."""
    offsets = head_offset + rows.unsqueeze(1) * row_step + cols.unsqueeze(0) * d_step
    keep = (rows < size).unsqueeze(1) & (cols < d).unsqueeze(0)
    return hl.load(flat, [offsets], extra_mask=keep).to(torch.float32)


class PageSteps(NamedTuple):
    """From a page of a cache to the next, and from a head to the next, in 16 bytes: of K, of V, and of descales."""

    k_page: int
    k_head: int
    v_page: int
    v_head: int
    descale_page: int
    descale_head: int


def page_steps(cache: PagedKVCache) -> PageSteps:
    """How far apart a cache's pages and heads lie."""
    tensors = cache.k8, cache.v8, cache.k_descale
    return PageSteps(*(step * x.itemsize // WIDEST_LOAD for x in tensors for step in x.stride()[:2]))


def page_begins(page: torch.Tensor, h: Int, steps: PageSteps) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where a head's K, V and descales of a page begin, [], in elements: multiples of 16 bytes, as Triton sees.

    In 64 bits: a pool may have more than 2**31 elements.
    """
    at = page.to(torch.int64)
    return (
        (at * steps.k_page + h * steps.k_head) * 16,
        (at * steps.v_page + h * steps.v_head) * 16,
        (at * steps.descale_page + h * steps.descale_head) * 4,
    )
