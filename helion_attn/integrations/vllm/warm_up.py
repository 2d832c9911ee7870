"""The kernels of a server's steps, compiled before its first request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from helion_attn import ops, plans
from helion_attn.compiler.notice import LOG
from helion_attn.kv_cache import paged_kv_cache, step_problem

if TYPE_CHECKING:
    from helion_attn.integrations.vllm.layer import HelionImpl

#: Tokens of a prompt that kernels are compiled with: enough for the largest tiles.
PROMPT = 512

#: Sequences from which on kernels hold more of them (`problem.power_that_holds`).
BATCHES = (1, 65, 513)


def compile_steps(
    layers: Iterable[HelionImpl], dtype: torch.dtype, drafts: int, max_sequences: int, device: torch.device
) -> None:
    """Compile what steps of these layers launch: prompts and decodes, in one split and in several.

    Args:
        layers: layers with the same heads and options are one.
        dtype: of queries.
        drafts: the last tokens of a sequence that may be rejected.
        max_sequences: the most sequences of a step.
        device: a GPU.
    """
    kinds = {layer.kind: layer for layer in layers}
    LOG.info("compiling kernels for %d kinds of layers; later starts find them", len(kinds))
    plans.compile_ahead(
        [
            plan_of(layer, dtype, drafts, batch, tokens, longest, splits, device)
            for layer in kinds.values()
            for batch in BATCHES
            if batch <= max_sequences
            for longest, tokens in ((1 + drafts, batch * (1 + drafts)), (PROMPT, batch + PROMPT))
            for splits in ((1, 2) if layer.num_splits is None else (layer.num_splits,))
        ]
    )


def plan_of(
    layer: HelionImpl,
    dtype: torch.dtype,
    drafts: int,
    batch: int,
    tokens: int,
    longest: int,
    splits: int,
    device: torch.device,
) -> plans.Plan:
    """Plan a step of so many sequences and tokens, of which one has up to `longest`."""
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    q, k, v = (torch.empty(tokens, H, layer.head_size, dtype=dtype, device=device) for H in heads)
    table = torch.zeros(batch, 2 + longest // 128, dtype=torch.int32, device=device)
    lengths = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    cache = paged_kv_cache(2, layer.num_kv_heads, layer.head_size, device=device, recipe=layer.recipe)
    arguments = step_problem(
        q, k, v, cache, lengths, table, lengths[1:].clone(), drafts=drafts, max_seqlen_q=longest, num_splits=splits,
        **layer.score_options(),
    )  # fmt: skip
    return ops.step.plan(arguments)
