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
    """What the command line chose.

    Attributes:
        device: that is measured.
        quick: a few cells only.
        repeats: timed rounds per cell.
        impls: of `peers.IMPLS`, those that can run and were asked for.
        dims: head dims.
        workers: processes beside this one that measure errors, or compile ahead; 0 for none.
        qkv: where `real_qkv.py` saved Q, K and V of a trained model, if not to run the model here.
        model_qkv: files that `model_channels.py` saved, if not to run its models here.
    """

    device: torch.device
    quick: bool
    repeats: int
    impls: list[str]
    dims: tuple[int, ...]
    workers: int
    qkv: Path | None = None
    model_qkv: Sequence[Path] = ()


@dataclass(frozen=True)
class Plot:
    """A plot of a results block.

    Attributes:
        name: of its file.
        alt: the alternative text.
        draw: the figure, or None where nothing was measured.
    """

    name: str
    alt: str
    draw: Callable[[Loaded], Figure | None]


@dataclass(frozen=True)
class Block:
    """What was measured of one subject. A document shows some of it, `results/FILE.md` all.

    Attributes:
        file: name of the result file.
        tables: made from the results.
        plots: a document shows them above its tables.
        sentence: above both, with figures, or None where nothing was measured.
        shown: how many tables a document shows; None for all.
        beside: other result files whose figures are in them.
    """

    file: str
    tables: Callable[[Loaded], list[Table]]
    plots: tuple[Plot, ...] = ()
    sentence: Callable[[Loaded], str | None] = lambda _: None
    shown: int | None = 0
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """What `--suite` takes.

    Attributes:
        file: name of its result file.
        measure: adds rows to that file.
        blocks: what documents show of it, by the name in their marks.
    """

    file: str
    measure: Callable[[Options, Results], None]
    blocks: dict[str, Block] = field(default_factory=dict)


# Where output is a file there is no width to ask for, and tables would be cut at 80.
console = Console(width=None if sys.stdout.isatty() else 160)


def progress(cells: Iterable[Cell], what: str, total: int | None = None) -> Iterable[Cell]:
    """Shows how many cells are done."""
    cells = cells if total is not None else list(cells)
    return track(cells, f"{what:<10}", total=total, console=console, transient=True)
