"""Pools of more than 2**31 elements, whose kernels have 64-bit indices: they store what those of small pools do."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import helion_attn as ha
from devtools.sm90 import Sm90Kernel, compile_for_sm90, fake_cuda
from helion_attn.compiler import runners
from helion_attn.compiler.linked_launch import Launch
from helion_attn.compiler.versions import MEASURED_SERIES
from helion_attn.kernels import decode, prefill
from helpers.offline import MEASURED, TORCH, launching, without
from helpers.ptx_machine import Bytes, Memory, PtxMachine

pytestmark = pytest.mark.skipif(not MEASURED, reason=f"instructions are of Triton {MEASURED_SERIES}, PyTorch {TORCH}")

H, H_KV, PAGE_SIZE = 9, 3, 128
#: New keys of each sequence, which are all that it has: two full pages, and one that is not.
SEQUENCES, KEYS, PAGES_OF_SEQUENCE = 4, 300, 3
TOKENS = SEQUENCES * KEYS
#: Pages that there are bytes of: the pool's first, which programs without keys read, and its last.
PAGES = 1 + SEQUENCES * PAGES_OF_SEQUENCE
#: Bytes before the last pages of a large pool: 2**32 descales.
LARGE = 2**34
#: Where the first part of memory begins, and how far apart the parts do.
APART = 2**40


def page_bytes(D: int) -> int:
    """Bytes of a page: K and V of 8 bits, and two descales a key."""
    return H_KV * PAGE_SIZE * (2 * D + 8)


def packed(qkv: torch.Tensor, D: int) -> tuple[torch.Tensor, ...]:
    """Q, K and V, side by side in one tensor."""
    return tuple(x.view(TOKENS, -1, D) for x in qkv.split([H * D, H_KV * D, H_KV * D], 1))


class Build(NamedTuple):
    """What a step launches before attention, for a pool of some size."""

    num_pages: int
    kernels: list[Sm90Kernel]
    launches: list[Launch]


def build(D: int, num_pages: int) -> Build:
    launches: list[Launch] = []

    def keep(host_fn: object, launched: list[tuple[Launch, object]], args: object) -> None:
        launches.extend(launch for launch, _ in launched)

    def step() -> None:
        with FakeTensorMode():
            qkv = torch.empty(TOKENS, (H + 2 * H_KV) * D, dtype=torch.bfloat16, device="cuda:0")
            pool = torch.empty(num_pages, page_bytes(D), dtype=torch.uint8, device="cuda:0")
            q, k, v = packed(qkv, D)
            cache = ha.PagedKVCache.from_buffer(pool, H_KV, D, recipe=ha.BALANCED)
        table, seqlens, cu_seqlens = (
            fake_cuda(*shape, dtype=torch.int32)
            for shape in ((SEQUENCES, PAGES_OF_SEQUENCE), (SEQUENCES,), (SEQUENCES + 1,))
        )
        with launching(), without(decode, prefill), mock.patch.object(runners, "link", keep):
            ha.kv_cache.step(q, k, v, cache, cu_seqlens, table, seqlens, max_seqlen_q=KEYS)

    return Build(num_pages, compile_for_sm90(step), launches)


class Inputs(NamedTuple):
    """What is in memory before a step; pages of the table are numbered as if there were `PAGES`."""

    qkv: torch.Tensor
    pool: torch.Tensor  # with stale bytes
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    cu_seqlens: torch.Tensor


def inputs(D: int) -> Inputs:
    g = torch.Generator().manual_seed(D)
    table = 1 + torch.randperm(PAGES - 1, generator=g).view(SEQUENCES, PAGES_OF_SEQUENCE)
    return Inputs(
        qkv=(torch.randn(TOKENS, (H + 2 * H_KV) * D, generator=g) * 3).bfloat16(),
        pool=torch.randint(0, 256, (PAGES, page_bytes(D)), dtype=torch.uint8, generator=g),
        block_table=table.int(),
        cache_seqlens=torch.full((SEQUENCES,), KEYS, dtype=torch.int32),
        cu_seqlens=torch.arange(SEQUENCES + 1, dtype=torch.int32) * KEYS,
    )


def bytes_of(x: torch.Tensor) -> Bytes:
    return x.contiguous().view(torch.uint8).view(-1).numpy()


def memory_of(argument: str) -> str:
    """The memory that an argument of a kernel points into."""
    in_pool = argument in ("k8", "v8", "k_descale", "v_descale")
    return "pool" if in_pool else "qkv" if argument in ("k", "v") else argument


def run(built: Build, given: Inputs) -> dict[str, Bytes]:
    """Every memory after the kernels of a build, by name."""
    page, first_there = given.pool.size(1), built.num_pages - PAGES + 1
    table = torch.where(given.block_table > 0, given.block_table - 1 + first_there, 0)
    parts = {name: bytes_of(x) for name, x in given._replace(block_table=table)._asdict().items()}
    pool = parts.pop("pool")
    for launch in built.launches:
        for name, x in zip(launch.kernel.arg_names, launch.args, strict=True):
            if name.startswith("open_"):
                # Pages in their other forms, which a step allocates.
                parts[name] = np.full(x.numel() * x.element_size(), 0x7F, np.uint8)
    begins = {name: (i + 1) * APART for i, name in enumerate([*parts, "pool"])}
    last_begin = begins["pool"] + first_there * page
    of_pool = {"first page": (begins["pool"], pool[:page]), "last pages": (last_begin, pool[page:])}
    memory = Memory({name: (begins[name], data) for name, data in parts.items()} | of_pool)
    for kernel, launch in zip(built.kernels, built.launches, strict=True):
        arguments: list[int] = [
            begins[memory_of(name)] + int(x.storage_offset()) * x.element_size() if isinstance(x, torch.Tensor) else x
            for name, x, parameter in zip(launch.kernel.arg_names, launch.args, launch.kernel.params, strict=True)
            if not parameter.is_constexpr
        ]
        machine = PtxMachine(kernel.ptx, kernel.shared_bytes)
        (programs,) = launch.grid
        for program in range(programs):
            # Behind the kernel's own are two of scratch memory, of which it has none.
            machine.run(program, [*arguments, 0, 0], memory)
    after = {name: memory[name] for name in parts if name != "block_table"}
    return after | {"pool": np.concatenate([memory["first page"], memory["last pages"]])}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("D", [64, 128])
def test_kernels_of_large_pools_store_the_same_bytes(D: int) -> None:
    given = inputs(D)
    small, large = (build(D, num_pages) for num_pages in (PAGES, LARGE // page_bytes(D) + PAGES))
    assert [kernel.name for kernel in small.kernels] == ["_helion_append_kv", "_helion_close_full_pages"]
    stored, stored_in_large = run(small, given), run(large, given)
    assert stored.keys() == stored_in_large.keys()
    assert [name for name, data in stored.items() if not np.array_equal(data, stored_in_large[name])] == []

    # What the interpreter stores: it rounds an int8 twice, and the machine once.
    pool = given.pool.clone()
    cache = ha.PagedKVCache.from_buffer(pool, H_KV, D, recipe=ha.BALANCED)
    q, k, v = packed(given.qkv, D)
    with without(decode, prefill):
        ha.kv_cache.step(q, k, v, cache, given.cu_seqlens, given.block_table, given.cache_seqlens, max_seqlen_q=KEYS)
    emulated = ha.PagedKVCache.from_buffer(torch.from_numpy(stored["pool"]).view_as(pool), H_KV, D, recipe=ha.BALANCED)
    assert torch.equal(pool[0], given.pool[0])
    for name, most in (("k8", 0.01), ("v8", 0.01), ("k_descale", 0), ("v_descale", 0)):
        ours, theirs = (getattr(x, name)[1:].view(torch.uint8) for x in (emulated, cache))
        assert (ours != theirs).float().mean().item() <= most, name
