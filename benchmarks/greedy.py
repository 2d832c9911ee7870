"""Greedy continuations, for suite `quality`: how long an attention agrees with bf16's.

SmolLM2 continues parts of Python's reference manual with PyTorch's bf16 attention and a cache. Each attention then
reads a part with its continuation in one pass. Until the first token that is not its likeliest, the continuation is its
own, as it has read the same tokens. The base itself, in one pass, shows what prefill and decoding in bf16 differ by.
"""

from __future__ import annotations

import functools
import importlib
import statistics
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.attends import Attend, compare, measured
from benchmarks.lib.harness import Loaded, Results, Row
from benchmarks.lib.suite import Options, progress
from benchmarks.lib.tables import LABELS, Table, series, series_in

STAGE = "greedy"

#: Prompts, tokens of each, and of its continuation.
GPU_SIZES, CPU_SIZES = (96, 1024, 256), (4, 64, 8)

#: Prompts that are read together.
BATCH = 32


@torch.inference_mode()
def continued(model: Any, prompts: Tensor, steps: int) -> Tensor:
    """The prompts and what greedy decoding adds, int64 [prompts, length + steps]; nothing ends it."""
    model.set_attn_implementation("sdpa")
    tokens, cache = [prompts], None
    for _ in progress(range(steps), "generating"):
        out = model(tokens[-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        tokens.append(out.logits[:, -1:].argmax(-1))
    return torch.cat(tokens, 1)


def agreed(model: Any, lines: Tensor, steps: int, attend: Attend) -> list[int]:
    """Of each line's last `steps` tokens, how many come before the first that is not the likeliest."""
    example: Any = importlib.import_module("examples.language_model")
    example.attend_with(model, lambda q, k, v, sm_scale: attend(q, k, v, True, sm_scale))
    counts: list[int] = []
    for part in lines.split(BATCH):
        # [lines, steps]
        likeliest = model(part, use_cache=False, logits_to_keep=steps + 1).logits[:, :-1].argmax(-1)
        counts += (likeliest == part[:, -steps:]).int().cumprod(1).sum(1).tolist()
    return counts


def summary(length: int, steps: int, counts: list[int], base: list[int]) -> list[Row]:
    """The row of what `agreed` counts; the base is one of the contenders."""
    count = len(base)
    return [
        {
            "prompts": count,
            "length": length,
            "steps": steps,
            "tokens": statistics.mean(counts),
            "standard_error": statistics.stdev(counts) / count**0.5,
            "whole": counts.count(steps),
        }
    ]


def measure(options: Options, results: Results, attends: dict[str, Attend], model: Any, tokens: Tensor) -> None:
    """A row for each attention."""
    count, length, steps = GPU_SIZES if options.device.type == "cuda" else CPU_SIZES
    count = count // 2 if options.quick else count
    lines = continued(model, tokens[: count * length].view(count, length), steps)
    found = functools.partial(agreed, model, lines, steps)
    compare(STAGE, attends, results, found, functools.partial(summary, length, steps))


def tables(loaded: Loaded) -> list[Table]:
    """By attention."""
    found = measured(loaded, STAGE)
    if not found:
        return []
    body = []
    for name in series_in(found):
        (row,) = (row for row in found if series(row) == name)
        tokens = f"{row['tokens']:.0f} ± {row['standard_error']:.0f}"
        body.append([LABELS[name], tokens, f"{row['whole']} of {row['prompts']}"])
    row = found[0]
    title = (
        f"SmolLM2-135M: agreement with a greedy continuation of {row['steps']} tokens, SDPA's with a cache, "
        f"{row['prompts']} prompts of {row['length']}"
    )
    return [Table(title, ["attention, in one pass", "tokens before the first other", "all the same"], body)]
