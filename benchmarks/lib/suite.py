"""What a suite is: what it is given, what it measures, and what a document shows of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from benchmarks.lib.harness import Loaded, Results
from benchmarks.lib.tables import Table

Cell = TypeVar("Cell")

#: Head dims that are measured by default.
DIMS = (64, 128, 256)


@dataclass(frozen=True)
class Options:
    """What the command line chose."""

    device: torch.device  # that is measured
    quick: bool  # a few cells only
    repeats: int  # timed rounds per cell
    impls: list[str]  # of `peers.IMPLS`, those that can run and were asked for
    dims: tuple[int, ...]  # head dims
    workers: int  # processes beside this one that measure errors, or compile ahead; 0 for none
    qkv: Path | None = None  # where `real_qkv.py` saved Q, K and V of a trained model, if not to run the model here
    model_qkv: Sequence[Path] = ()  # files that `model_channels.py` saved, if not to run its models here


@dataclass(frozen=True)
class Plot:
    """A plot of a results block."""

    name: str  # of its file
    alt: str  # the alternative text
    draw: Callable[[Loaded], Figure | None]  # the figure, or None where nothing was measured


@dataclass(frozen=True)
class Block:
    """What was measured of one subject. A document shows some of it, `results/FILE.md` all."""

    file: str  # name of the result file
    tables: Callable[[Loaded], list[Table]]  # made from the results
    plots: tuple[Plot, ...] = ()  # a document shows them above its tables
    # Above both, with figures, or None where nothing was measured.
    sentence: Callable[[Loaded], str | None] = lambda _: None
    shown: int | None = 0  # how many tables a document shows; None for all
    beside: tuple[str, ...] = ()  # other result files whose figures are in them


@dataclass(frozen=True)
class Suite:
    """What `--suite` takes."""

    file: str  # name of its result file
    measure: Callable[[Options, Results], None]  # adds rows to that file
    blocks: dict[str, Block] = field(default_factory=dict)  # what documents show of it, by the name in their marks


# Where output is a file there is no width to ask for, and tables would be cut at 80.
console = Console(width=None if sys.stdout.isatty() else 160)


def progress(cells: Iterable[Cell], what: str, total: int | None = None) -> Iterable[Cell]:
    """Shows how many cells are done."""
    cells = cells if total is not None else list(cells)
    return track(cells, f"{what:<10}", total=total, console=console, transient=True)
