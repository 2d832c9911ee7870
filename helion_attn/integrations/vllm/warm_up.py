"""The kernels of a server's steps, compiled before its first request: at a first start in several processes.

Much of a compilation is Python, of which a process runs one thread at a time. Later starts find what was compiled.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from helion_attn import ops, plans
from helion_attn.kv_cache import paged_kv_cache, step_problem
from helion_attn.types import RecipeName

#: vLLM shows what its own loggers say.
LOG = logging.getLogger("vllm.helion_attn")

#: Tokens of a prompt that kernels are compiled with: enough for the largest tiles.
PROMPT = 512

#: Sequences from which on kernels hold more of them (`problem.power_that_holds`), and so few that tensors are small.
BATCHES = (1, 2, 4, 8, 65, 513)

#: Processes that compile; each needs half a gigabyte of the GPU meanwhile.
MOST_PROCESSES = 12


class LayerKind(NamedTuple):
    """What kernels of a layer are compiled for.

    Attributes:
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_size: head dim.
        recipe: of the cache, its name.
        window: as `kv_cache.step` has it, and so softcap.
        softcap: likewise.
        has_sinks: whether there are sinks.
        num_splits: fixed, or None.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    recipe: RecipeName
    window: tuple[int, int] | None
    softcap: float | None
    has_sinks: bool
    num_splits: int | None


class Server(NamedTuple):
    """What a server compiles.

    Attributes:
        kinds: of its layers.
        dtype: of queries, its name in torch.
        drafts: the last tokens of a sequence that may be rejected.
        max_sequences: the most sequences of a step.
        device: a GPU.
    """

    kinds: list[LayerKind]
    dtype: str
    drafts: int
    max_sequences: int
    device: str


def compile_steps(
    kinds: Iterable[LayerKind], dtype: torch.dtype, drafts: int, max_sequences: int, device: torch.device
) -> None:
    """Compile what steps of such layers launch: prompts and decodes, in one split and in several.

    The arguments are those of `Server`.
    """
    server = Server([*dict.fromkeys(kinds)], str(dtype).removeprefix("torch."), drafts, max_sequences, str(device))
    found = plans_of(server)
    if not plans.are_stored(found):
        count = min(MOST_PROCESSES, os.cpu_count() or 1)
        LOG.info("compiling kernels in %d processes, for this model's first start", count)
        command = [sys.executable, "-m", __name__, json.dumps(server)]
        started = [subprocess.Popen([*command, str(part), str(count)]) for part in range(count)]
        for process in started:
            # What one fails to compile is compiled below, where an error is seen.
            process.wait()
    plans.compile_ahead(found)


def plans_of(server: Server) -> list[plans.Plan]:
    """Plans of steps that launch all kernels."""
    longest = 1 + server.drafts
    return [
        plan_of(kind, server, batch, tokens, max_seqlen_q, splits)
        for kind in server.kinds
        for batch in BATCHES
        if batch <= server.max_sequences
        for tokens, max_seqlen_q in ((batch * longest, longest), (batch + PROMPT, PROMPT))
        for splits in ((1, 2) if kind.num_splits is None else (kind.num_splits,))
    ]


def plan_of(kind: LayerKind, server: Server, batch: int, tokens: int, max_seqlen_q: int, num_splits: int) -> plans.Plan:
    """Plan a step of so many sequences and tokens."""
    device, dtype = torch.device(server.device), getattr(torch, server.dtype)
    heads = kind.num_heads, kind.num_kv_heads, kind.num_kv_heads
    q, k, v = (torch.empty(tokens, H, kind.head_size, dtype=dtype, device=device) for H in heads)
    table = torch.zeros(batch, 1 + PROMPT // 128, dtype=torch.int32, device=device)
    lengths = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    cache = paged_kv_cache(2, kind.num_kv_heads, kind.head_size, device=device, recipe=kind.recipe)
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
