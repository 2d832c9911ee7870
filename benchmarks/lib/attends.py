"""Attention functions for whole models: PyTorch's, the peers', and this package's presets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import helion_attn as ha
from benchmarks.lib.harness import Loaded, Results, Row
from benchmarks.lib.peers import IMPLS, Prepare, sdpa
from benchmarks.lib.problem import first_line
from benchmarks.lib.recipes import PRESETS
from benchmarks.lib.suite import Options, progress
from benchmarks.lib.tables import LABELS, rows_of

T = TypeVar("T")

#: Attention of q [B, H, M, D] to k and v [B, H_kv, N, D], bf16: causal, sm_scale; bf16 [B, H, M, D].
Attend = Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]

#: What all others are compared with.
BASE = "flash_bf16"

#: What tables call it.
BASE_LABEL = LABELS[BASE]

#: Other bf16 kernels: how far two of them differ.
KERNELS = ("cudnn_bf16", "fa3_bf16")

#: This package's.
OURS = PRESETS | {"hybrid": ha.HYBRID}

#: Others in 8 bits. cuDNN would build a graph each call.
FP8 = ("fa3_fp8", "sage2", "vllm_fa3")


def peer(prepare: Prepare) -> Attend:
    """One of `peers.IMPLS`, its quantising included."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
        prepared = prepare(q, k, v, causal, sm_scale)
        return prepared.output(prepared.run()).to(q.dtype)

    return attend


def preset(recipe: ha.Recipe) -> Attend:
    """This package's kernels on a GPU. On a CPU it is their rounding model: the interpreter would take hours."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
        function = ha.attention if q.is_cuda else ha.reference.fp8_attention
        out = function(q, k, v, causal=causal, sm_scale=sm_scale, recipe=recipe)
        assert isinstance(out, Tensor)
        return out

    return attend


def attends_of(options: Options) -> dict[str, Attend]:
    """By `series`, what can run and was asked for, `BASE` first. On a CPU PyTorch's plain kernel is the other one."""
    if options.device.type == "cuda":
        kernels = {name: IMPLS[name] for name in KERNELS if name in options.impls}
    else:
        kernels = {"math_bf16": functools.partial(sdpa, SDPBackend.MATH, "math_bf16")}
    found = {name: peer(prepare) for name, prepare in ({BASE: IMPLS[BASE]} | kernels).items()}
    if "helion_attn" in options.impls:
        found |= {name: preset(recipe) for name, recipe in OURS.items()}
    return found | {name: peer(IMPLS[name]) for name in FP8 if name in options.impls}


def compare(
    stage: str,
    attends: dict[str, Attend],
    results: Results,
    measure: Callable[[Attend], T],
    rows: Callable[[T, T], list[Row]],
) -> None:
    """Measure every contender, and add its rows beside the base, or one that says why it has none.

    Args:
        stage: the part of the suite.
        attends: what `attends_of` gives.
        results: where rows go.
        measure: of one contender.
        rows: of what was measured of one, and of the base.
    """
    base: list[T] = []
    for name, attend in progress(attends.items(), stage):
        ours = name in PRESETS
        row = {"impl": "helion_attn" if ours else name, "recipe": name if ours else None, "stage": stage}
        try:
            with torch.inference_mode():
                found = measure(attend)
                base += [found] if name == BASE else []
                results.add(*(row | of for of in rows(found, base[0])))
        except Exception as error:  # one that fails is a result, not the end of the run
            results.add(row | {"error_message": first_line(error)})


def measured(loaded: Loaded, stage: str) -> list[Row]:
    """The rows of a part of the suite that have figures."""
    return [row for row in rows_of(loaded, "quality", stage=stage) if "error_message" not in row]
