"""Beyond inputs and output there are the packed copies, and nothing that grows with M * N; views are not copied."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

import helion_attn as ha
from devtools import sm90
from devtools.inputs import make_qkv
from devtools.sm90 import fake_cuda
from helion_attn.ops.choose import MAX_QUANTISED_D
from helion_attn.preprocess.lib.tiling import PACK_CHANNELS
from helion_attn.types import Layout
from helpers.offline import fake_qkv, launching


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operations return for the first time."""

    def __init__(self, known: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.bytes = 0
        self.storages = {x.untyped_storage()._cdata: x for x in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.storages:
                self.storages[x.untyped_storage()._cdata] = x
                self.bytes += x.untyped_storage().nbytes()
        return result


def allocated(*make_qkv: Callable[[], tuple[torch.Tensor, ...]], layout: Layout = "bhsd") -> list[int]:
    """Bytes that each call of `attention` allocates in all, with its kernels traced already; Triton compiles none."""
    found = []
    with sm90._offline_hopper(keep_generated=True), launching(), mock.patch.object(JITFunction, "run"):
        for make in make_qkv:
            qkv = make()
            ha.attention(*qkv, layout=layout)
            with Allocations(qkv) as allocations:
                ha.attention(*qkv, layout=layout)
            found.append(allocations.bytes)
    return found


def needed(H: int, H_kv: int, S: int, D: int) -> int:
    """Bytes of the packed copies, the bf16 output and the lse; S a whole number of blocks, D a supported head dim."""
    packed_q = H * S * D if D > MAX_QUANTISED_D else 0
    return packed_q + 2 * H_kv * S * D + H * S * D * 2 + H * S * 4


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("D", [64, 128])
def test_only_the_packed_copies(D: int) -> None:
    small, large = allocated(*(functools.partial(fake_qkv, 1, 4, 2, S, S, D) for S in (4096, 8192)))
    assert needed(4, 2, 8192, D) <= large <= needed(4, 2, 8192, D) * 1.05
    # From 8192 keys on pack notes what rounding took from V, 4 bytes a channel of a block.
    assert large <= 2 * small + 4 * 2 * 8192 // 128 * D * 2


def test_parts_of_split_keys_do_not_grow_with_them() -> None:
    """Past the launch that fills the GPU with programs."""
    extra = []
    for N in (2**16, 2**18):
        packed = 4 * 128 * 64 + 2 * 2 * N * 64 + 4 * 128 * 64 * 2 + 4 * 128 * 4
        (peak,) = allocated(functools.partial(fake_qkv, 1, 4, 2, 128, N, 64))
        extra.append(peak - packed)
    in_flight = 4 * 132 * 64 * (64 + 1) * 4
    # K's descales grow with N, and what rounding took from V: 4 bytes a channel of a block.
    notes = 4 * 2 * 2**18 // 128 * 64
    assert extra[0] <= extra[1] <= extra[0] + notes + 2**18
    assert in_flight // 2 <= extra[1] <= in_flight + notes + 2**20


def fake(*shape: int) -> torch.Tensor:
    return fake_cuda(*shape, dtype=torch.bfloat16)


#: [B, S, H, D] = [2, 1024, 4, 128], and how many tiles of a block's V make a note of their largest entry, 4 bytes: one
#: of all channels, and where loads are narrow those of 64.
VIEWS: dict[str, tuple[Callable[[], tuple[torch.Tensor, ...]], int]] = {
    "slice_of_packed_bs3hd": (lambda: fake(2, 1024, 3, 4, 128).unbind(2), 1),
    "transposed_d": (lambda: (fake(2, 128, 4, 1024).transpose(1, 3),) * 3, 128 // PACK_CHANNELS),
    "odd_row_stride": (lambda: (fake(2, 1024, 4, 131).narrow(3, 3, 128),) * 3, 128 // PACK_CHANNELS),
    "expanded_heads": (lambda: (fake(2, 1024, 1, 128).expand(2, 1024, 4, 128),) * 3, 1),
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("views", [list(VIEWS)[:2], list(VIEWS)[2:]], ids="-".join)
def test_views_are_not_copied(views: list[str]) -> None:
    contiguous = functools.partial(fake_qkv, 2, 4, 4, 1024, 1024, 128, layout="bshd")
    plain, *in_place = allocated(contiguous, *(VIEWS[view][0] for view in views), layout="bshd")
    blocks = 2 * 4 * 1024 // 128
    assert in_place == [plain + 4 * blocks * (VIEWS[view][1] - 1) for view in views]


@pytest.mark.gpu
@pytest.mark.once  # an output that is kept is memory
@pytest.mark.parametrize("planned", [False, True], ids=["second_call", "planned_call"])
@pytest.mark.parametrize("D", [64, 256])
def test_peak(D: int, planned: bool) -> None:
    qkv = make_qkv("randn", 1, 8, 8, 8192, 8192, D, device="cuda")
    for _ in range(3 if planned else 1):
        ha.attention(*qkv)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = ha.attention(*qkv)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert out.isfinite().all()
    assert peak <= needed(8, 8, 8192, D) * 1.05 + 2**20
