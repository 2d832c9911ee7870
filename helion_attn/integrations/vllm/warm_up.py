"""The kernels of a server's steps, compiled before its first request: at a first start in several processes.

Much of a compilation is Python, of which a process runs one thread at a time. Later starts find what was compiled.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any, NamedTuple

import torch

from helion_attn import ops, plans
from helion_attn.configs import page_packing
from helion_attn.kernels.merge_splits import FEW_SPLITS
from helion_attn.kv_cache import page_bytes, step_problem
from helion_attn.types import PagedKVCache, RecipeName

#: vLLM shows what its own loggers say.
LOG = logging.getLogger("vllm.helion_attn")

#: Tokens of a prompt that kernels are compiled with: enough for the largest tiles.
PROMPT = 512

#: Sequences from which on kernels hold more of them (`problem.power_that_holds`), and so few that tensors are small.
BATCHES = (1, 2, 4, 8, 65, 513)

#: Pages of a sequence: few splits are merged at once, or many.
FEW_PAGES, MANY_PAGES = 16, 1024

#: Processes that compile, and what each needs of the GPU meanwhile besides a layer's memory, in bytes.
MOST_PROCESSES, PROCESS_BYTES = 12, 2**30

#: Elements from which on kernels have other indices.
MANY = 2**31


class LayerKind(NamedTuple):
    """The sizes and options of a layer that its kernels are compiled for."""

    num_heads: int  # query heads
    num_kv_heads: int  # KV heads
    head_size: int  # head dim
    recipe: RecipeName  # of the cache, its name
    window: tuple[int, int] | None  # as `kv_cache.step` has it
    softcap: float | None  # as `kv_cache.step` has it
    has_sinks: bool  # whether there are sinks
    num_splits: int | None  # fixed, or None
    has_constants: bool = False  # keys have a mean, and channels factors


class Server(NamedTuple):
    """A server's layers and sizes, of which its kernels follow."""

    kinds: list[LayerKind]  # of its layers
    dtype: str  # of queries, its name in torch
    drafts: int  # the last tokens of a sequence that may be rejected
    max_sequences: int  # the most sequences of a step
    num_pages: int  # of a layer
    device: str  # a GPU


def compile_steps(server: Server, ranks: int) -> None:
    """Compile what steps of a server's layers launch: prompts and decodes, in one split and in several.

    Of several ranks of a machine, each has its share of the processes.
    """
    found = plans_of(server)
    if not plans.are_stored(found):
        largest = max(pages_for(kind, server.num_pages) * page_bytes_of(kind) for kind in server.kinds)
        free, _ = torch.cuda.mem_get_info(torch.device(server.device))
        count = min(MOST_PROCESSES, (os.cpu_count() or 1) // ranks, free // 2 // (PROCESS_BYTES + largest))
        LOG.info("compiling kernels in %d processes, for this model's first start", max(count, 1))
        command = [sys.executable, "-m", __name__, json.dumps(server)]
        started = [subprocess.Popen([*command, str(part), str(count)]) for part in range(count)] if count > 1 else []
        if failed := sum(process.wait() != 0 for process in started):
            # What they did not compile is compiled below, where an error is seen.
            LOG.warning("%d of the processes failed: the rest is compiled one kernel after another", failed)
    plans.compile_ahead(found)


def plans_of(server: Server) -> list[plans.Plan]:
    """Plans of steps that launch all kernels."""
    longest, found = 1 + server.drafts, []
    for kind in server.kinds:
        given = kind.num_splits
        for batch in BATCHES:
            if batch > server.max_sequences:
                continue
            chosen = [(None, FEW_PAGES), (None, MANY_PAGES), (1, FEW_PAGES)]
            for splits, pages in chosen if given is None else [(given, FEW_PAGES)]:
                found.append(plan_of(kind, server, batch, batch * longest, longest, splits, pages))
            for splits in (1, 2, FEW_SPLITS + 1) if given is None else (given,):
                found.append(plan_of(kind, server, batch, batch + PROMPT, PROMPT, splits, FEW_PAGES))
    return found


def page_bytes_of(kind: LayerKind) -> int:
    """Bytes of a page of a layer."""
    return page_bytes(kind.num_kv_heads, kind.head_size)


def pages_for(kind: LayerKind, num_pages: int) -> int:
    """How many pages, as few as there may be, have kernels' indices of so many.

    Of a page counted are what descales lie apart, the elements of K, and all bytes.
    """
    elements = kind.num_kv_heads * kind.head_size * page_packing(kind.head_size, kind.head_size).page_size
    for of_page in (page_bytes_of(kind) // torch.float32.itemsize, elements, page_bytes_of(kind)):
        # A tensor of all pages ends in the last one.
        if (num_pages - 1) * of_page >= MANY:
            return -(-MANY // of_page) + 1
    return 2


def plan_of(
    kind: LayerKind,
    server: Server,
    batch: int,
    tokens: int,
    max_seqlen_q: int,
    num_splits: int | None,
    max_pages: int,
) -> plans.Plan:
    """Plan a step of so many sequences and tokens, of sequences of up to so many pages."""
    device, dtype = torch.device(server.device), getattr(torch, server.dtype)
    heads = kind.num_heads, kind.num_kv_heads, kind.num_kv_heads
    q, k, v = (torch.empty(tokens, H, kind.head_size, dtype=dtype, device=device) for H in heads)
    table = torch.zeros(batch, max_pages, dtype=torch.int32, device=device)
    lengths = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    constant = torch.ones(kind.num_kv_heads, kind.head_size) if kind.has_constants else None
    pages = torch.empty(pages_for(kind, server.num_pages), page_bytes_of(kind), dtype=torch.uint8, device=device)
    cache = PagedKVCache.from_buffer(
        pages,
        kind.num_kv_heads,
        kind.head_size,
        recipe=kind.recipe,
        k_mean=constant,
        channel_factors=constant,
    )
    arguments = step_problem(
        q,
        k,
        v,
        cache,
        lengths,
        table,
        lengths[1:].clone(),
        drafts=server.drafts,
        max_seqlen_q=max_seqlen_q,
        window=kind.window,
        softcap=kind.softcap,
        sinks=torch.zeros(kind.num_heads, device=device) if kind.has_sinks else None,
        num_splits=num_splits,
    )
    return ops.step.plan(arguments)


def main(described: str, part: str, parts: str) -> None:
    """Compile one of several parts."""
    given: list[Any] = json.loads(described)
    kinds = [LayerKind(*fields)._replace(window=fields[4] and (fields[4][0], fields[4][1])) for fields in given[0]]
    plans.compile_ahead(plans_of(Server(kinds, *given[1:])), int(part), int(parts))


if __name__ == "__main__":
    main(*sys.argv[1:])
