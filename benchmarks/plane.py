"""Benchmarks what presets trade: the formats of scores by the two ways to P, on speed and error.

    python benchmarks/attention.py --suite plane

Scores are e4m3 products summed in fp16, e4m3 products, or int8 products; P's e4m3 numbers come from a score's bits or
from exponentials. fp16 sums come with bits alone. As in suite `ablation`, what no recipe has is the kernel's source
with another function in the place of one of its steps. Parts, in each row's `part`: `speed`, the kernel alone, and
`inputs`, errors on the inputs of suite `accuracy`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple
from unittest import mock

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

import helion_attn as ha
from benchmarks import ablation
from benchmarks.lib.harness import Loaded, Results, synchronize
from benchmarks.lib.peers import Prepared
from benchmarks.lib.plots import COLOURS, PAGE_WIDTH
from benchmarks.lib.problem import (
    CHECKED_ROWS,
    Contender,
    check,
    dry_workload,
    grid_workload,
    make_problem,
    measure,
    workload,
)
from benchmarks.lib.recipes import PRESETS
from benchmarks.lib.suite import Block, Options, Plot, Suite, console, progress
from benchmarks.lib.tables import Table, error_text, mask, number, rows_of, values_of
from devtools.inputs import INPUT_KINDS, make_qkv
from helion_attn.compiler.runners import Compiled
from helion_attn.configs import tile_config
from helion_attn.kernels import attention
from helion_attn.numerics import MAX_BITS_D


class Format(NamedTuple):
    """A format of scores, and how P comes from them."""

    recipe: str  # key of the preset that has such products
    half_scores: bool  # they are summed in fp16
    by_bits: bool  # P's numbers come from a score's bits

    @property
    def fields(self) -> ha.Recipe:
        """The recipe."""
        return dataclasses.replace(PRESETS[self.recipe], half_scores=self.half_scores)


FORMATS = {
    "e4m3 in fp16, bits": Format("fast", True, True),
    "e4m3, bits": Format("fast", False, True),
    "e4m3, exponentials": Format("fast", False, False),
    "int8, bits": Format("balanced", False, True),
    "int8, exponentials": Format("balanced", False, False),
}

#: Lengths that are timed, and keys that errors are of.
LENGTHS, ERROR_KEYS = (4096, 16384), 4096


def prepare(format_: Format, q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
    """The kernel of a format, with the tile of a large launch."""
    tile, recipe = tile_config(q.size(3), causal), format_.fields
    kernels = kernels_of(format_)
    with torch.inference_mode():  # as inside an op: Helion does not take a tensor together with a view of it
        qkv = ha.quantize(q, k, v, recipe=recipe)
        packed = ablation.repacked(qkv, tile, interleaved=True)

    @torch.inference_mode()
    def run() -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        with contextlib.ExitStack() as stack:
            if not format_.by_bits:
                stack.enter_context(mock.patch.object(attention, "takes_bits", ablation.by_exponentials))
            stack.enter_context(mock.patch.object(attention, "compiled_kernel", kernels))
            ablation.launch(tile, packed, out, lse, sm_scale, recipe, causal)
        return out

    return Prepared(run, lambda out: out, lambda: ha.dequantize(qkv))


@functools.cache
def kernels_of(format_: Format) -> Callable[..., Compiled]:
    """Compiled kernels of a format's own, the same in every cell."""
    return ablation.own_kernels()


def contenders() -> list[Contender]:
    """All formats."""
    return [
        Contender("helion_attn", functools.partial(prepare, format_), format_.recipe, model=format_.fields)
        for format_ in FORMATS.values()
    ]


def dims_of(options: Options) -> list[int]:
    """Head dims at which bits are taken."""
    return [D for D in options.dims if D <= MAX_BITS_D]


def compile_ahead(name: str, D: int, N: int, causal: bool, device: torch.device) -> None:
    """Compile what a cell needs into Triton's disk cache."""
    q, k, v = make_qkv("randn", 1, 1, 1, N, N, D, torch.bfloat16, device, 0)
    prepare(FORMATS[name], q, k, v, causal, D**-0.5).run()
    synchronize(device)


def run(options: Options, results: Results) -> None:
    """Every format in every cell."""
    on_cpu, dims = options.device.type == "cpu", dims_of(options)
    lengths = LENGTHS[:1] if options.quick else LENGTHS
    masks = (False,) if options.quick else (False, True)
    cells = [grid_workload(S, D, causal) for D in dims for S in lengths for causal in masks]
    if on_cpu:
        cells = [dry_workload(D, causal) for D in dims for causal in masks]
    if options.workers:
        # Each process needs a CUDA context of its own, hence no fork.
        with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
            jobs = [pool.submit(compile_ahead, x, w.D, w.N, w.causal, options.device) for w in cells for x in FORMATS]
            for job in progress(jobs, "compiling"):
                if (error := job.exception()) is not None:  # it comes again below, as a row
                    console.print(f"[yellow]not compiled ahead: {error!r}")
    for w in progress(cells, "plane"):
        rows = measure(make_problem(w, "randn", options, CHECKED_ROWS), contenders(), options)
        results.add(*(row | {"part": "speed", "format": name} for name, row in zip(FORMATS, rows, strict=True)))
    for D in dims:
        w = dry_workload(D) if on_cpu else workload(1, 2, ERROR_KEYS, ERROR_KEYS, D)
        for kind in progress(INPUT_KINDS, "errors"):
            problem = make_problem(w, kind, options)
            rows = [check(contender, problem)[0] for contender in contenders()]
            results.add(*(row | {"part": "inputs", "format": name} for name, row in zip(FORMATS, rows, strict=True)))


def tables(loaded: Loaded) -> list[Table]:
    """TFLOP/s of the kernel by cell and format, and total errors by input and format."""
    found = []
    for title, part, axes, value, text in (
        ("Kernel, TFLOP/s", "speed", ("D", "N", "causal"), "tflops", whole),
        ("Total error", "inputs", ("D", "input"), "error_total", error_text),
    ):
        rows = rows_of(loaded, "plane", part=part)
        body = []
        for cell in values_of(rows, *axes):
            here = dict(zip(axes, cell, strict=True))
            figures = {row["format"]: row.get(value) for row in rows_of(loaded, "plane", part=part, **here)}
            names = [mask(x) if isinstance(x, bool) else str(x) for x in cell]
            body.append([*names, *(text(figures.get(name)) for name in FORMATS)])
        if rows:
            found.append(Table(title, [*("mask" if axis == "causal" else axis for axis in axes), *FORMATS], body))
    return found


def whole(tflops: float | None) -> str:
    """A whole number."""
    return number(tflops, ".0f")


def points(loaded: Loaded, D: int) -> dict[str, tuple[float, float]]:
    """By format: the geometric mean of the cells' TFLOP/s, and the total error on N(0, 1)."""
    found = {}
    for name in FORMATS:
        own = {"format": name, "D": D}
        tflops = [row["tflops"] for row in rows_of(loaded, "plane", part="speed", **own) if row["tflops"]]
        errors = [row["error_total"] for row in rows_of(loaded, "plane", part="inputs", input="randn", **own)]
        if tflops and errors and errors[0]:
            found[name] = (math.prod(tflops) ** (1 / len(tflops)), errors[0])
    return found


def plot(loaded: Loaded) -> Figure | None:
    """Error against speed, a point a format, a panel a head dim."""
    dims = [D for (D,) in values_of(rows_of(loaded, "plane", part="inputs"), "D")]
    if not dims:
        return None
    figure, (panels,) = plt.subplots(1, len(dims), figsize=(PAGE_WIDTH, 3.2), layout="constrained", squeeze=False)
    for D, ax in zip(dims, panels, strict=True):
        for name, at in points(loaded, D).items():
            shape, colour = ("o" if FORMATS[name].by_bits else "X"), COLOURS[FORMATS[name].recipe]
            ax.plot(*at, shape, color=colour, markersize=8)
            ax.annotate(name, at, (6, 4), textcoords="offset points", fontsize=8)
        ax.margins(x=0.3, y=0.2)
        ax.set_title(f"Lower right is better: D = {D}")
        ax.set_xlabel("kernel, TFLOP/s, geometric mean")
    panels[0].set_ylabel("total error, N(0, 1)")
    return figure


SUITE = Suite(
    "plane",
    run,
    {"plane": Block("plane", tables, (Plot("plane", "Error against speed by format of scores and P", plot),))},
)
