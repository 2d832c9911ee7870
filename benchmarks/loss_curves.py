"""Benchmarks training: loss curves of a small language model, by attention in 8 bits and by two 16-bit backends.

    python benchmarks/attention.py --suite loss_curves

A byte-level model with causal attention, of head dim 64, learns Python's reference manual (`pydoc_data.topics` of the
standard library) in bf16 autocast. At an equal seed every attention gets the same first weights and the same text. The
hard case multiplies Q by 16, so that softmaxes are peaked from the first step on.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from benchmarks.lib.checks import Check
from benchmarks.lib.harness import Loaded, Results, Row, result_row, synchronize
from benchmarks.lib.plots import grid, legend, line, log_axis
from benchmarks.lib.problem import workload
from benchmarks.lib.recipes import DEFAULT
from benchmarks.lib.suite import Block, Options, Plot, Suite, progress
from benchmarks.lib.tables import LABELS, Table, number, ratio, rows_of, series, series_in
from benchmarks.training import Attend, ours, pytorch

SEEDS = (0, 1, 2)

#: What Q is multiplied by, by case.
CASES = {"as it is": 1.0, "Q times 16": 16.0}

#: Steps, over the first of which the learning rate grows; then it falls as a cosine does, to a tenth.
STEPS, WARMUP, RATE = 300, 30, 1e-3

#: Steps that a table's last loss and a plot's point are the mean of.
WINDOW = 20

#: BALANCED's distance from bf16, over that between two bf16 backends, at most.
BOUND = 2.0

#: The attention that distances are from, and the one that says how far another in 16 bits is.
BASE, OTHER = "cudnn_bf16", "flash_bf16"

D, BYTES = 64, 256


@dataclass(frozen=True)
class Size:
    """Of the model and its batches: layers, heads of `D` channels, sequences of S tokens, and steps."""

    layers: int
    heads: int
    batch: int
    S: int
    steps: int


GPU_SIZE = Size(layers=4, heads=8, batch=8, S=1024, steps=STEPS)
CPU_SIZE = Size(layers=1, heads=1, batch=1, S=64, steps=2)

# --- the model ------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, heads: int, attend: Attend, q_factor: float) -> None:
        super().__init__()
        width = heads * D
        self.heads, self.attend, self.q_factor = heads, attend, q_factor
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of x [B, S, width]."""
        B, S, width = x.shape
        # [B, H, S, D] each
        q, k, v = self.qkv(F.rms_norm(x, (width,))).view(B, S, 3, self.heads, D).permute(2, 0, 3, 1, 4)
        attended = self.attend(self.q_factor * q, k, v, True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, S, width))
        return x + self.down(F.gelu(self.up(F.rms_norm(x, (width,)))))


class Model(nn.Module):
    """Logits of the next byte."""

    def __init__(self, size: Size, attend: Attend, q_factor: float) -> None:
        super().__init__()
        width = size.heads * D
        self.bytes, self.positions = nn.Embedding(BYTES, width), nn.Embedding(size.S, width)
        self.layers = nn.Sequential(*(Layer(size.heads, attend, q_factor) for _ in range(size.layers)))
        self.head = nn.Linear(width, BYTES, bias=False)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Of tokens [B, S]: [B, S, BYTES]."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.size(1)]
        x = self.layers(x)
        return self.head(F.rms_norm(x, x.shape[2:]))


def text(device: torch.device) -> Tensor:
    """The text's bytes, int64."""
    written = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(written), dtype=torch.uint8).long().to(device)


def rate(step: int, steps: int) -> float:
    """The learning rate over its largest."""
    warmup = min(WARMUP, steps)
    falling = (step - warmup) / max(1, steps - warmup)
    return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * max(0.0, falling)))


def train(size: Size, attend: Attend, q_factor: float, seed: int, data: Tensor) -> list[float]:
    """The loss of every step, in nats a byte."""
    torch.manual_seed(seed)
    model = Model(size, attend, q_factor).to(data.device)  # its weights are drawn on the CPU
    starts = torch.randint(len(data) - size.S, (size.steps, size.batch, 1)).to(data.device)
    offsets = torch.arange(size.S + 1, device=data.device)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), fused=True)
    losses = []
    for step in range(size.steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * rate(step, size.steps)
        tokens = data[starts[step] + offsets]  # [B, S + 1]
        with torch.autocast(data.device.type, torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found: list[float] = torch.stack(losses).tolist()
    return found


# --- measurement ----------------------------------------------------------------------------------


def contenders(device: torch.device) -> dict[tuple[str, str | None], Attend]:
    """What is measured, by impl and recipe; a CPU has no cuDNN."""
    found: dict[tuple[str, str | None], Attend] = {(OTHER, None): pytorch(SDPBackend.FLASH_ATTENTION)}
    if device.type == "cuda":
        found[BASE, None] = pytorch(SDPBackend.CUDNN_ATTENTION)
    return found | {("helion_attn", recipe): ours(recipe) for recipe in (DEFAULT, "fast")}


def run(options: Options, results: Results) -> None:
    """Every case with every attention and seed."""
    on_gpu = options.device.type == "cuda"
    size, data = GPU_SIZE if on_gpu else CPU_SIZE, text(options.device)
    seeds = SEEDS[:1] if options.quick else SEEDS
    cells = [*itertools.product(CASES, seeds, contenders(options.device).items())]
    for case, seed, ((impl, recipe), attend) in progress(cells, "loss_curves"):
        synchronize(options.device)
        started = time.perf_counter()
        losses = train(size, attend, CASES[case], seed, data)
        ms = 1e3 * (time.perf_counter() - started) / size.steps
        w = workload(size.batch, size.heads, size.S, size.S, D, True)
        row = result_row(impl, w, "step", "text", recipe=recipe, ms=ms) | {"tflops": None}
        # JSON has no NaN.
        rounded = [float(f"{loss:.5g}") if math.isfinite(loss) else None for loss in losses]
        results.add(row | {"case": case, "seed": seed, "losses": rounded})


# --- what it says ---------------------------------------------------------------------------------


def by_case(loaded: Loaded) -> dict[str, list[Row]]:
    """The rows of each case that was measured."""
    found = {case: rows_of(loaded, "loss_curves", case=case) for case in CASES}
    return {case: rows for case, rows in found.items() if rows}


def curve(row: Row) -> list[float]:
    """The losses of a row, NaN where they were not finite."""
    return [math.nan if loss is None else loss for loss in row["losses"]]


def gaps(rows: Iterable[Row], name: str) -> list[float]:
    """By step: how far the losses of a series are from those of `BASE` at an equal seed, mean over seeds."""
    curves = {(series(row), row["seed"]): curve(row) for row in rows}
    seeds = sorted({seed for of, seed in curves if (BASE, seed) in curves and of == name})
    apart = [[abs(x - y) for x, y in zip(curves[name, s], curves[BASE, s], strict=True)] for s in seeds]
    return [statistics.fmean(of_step) for of_step in zip(*apart, strict=True)]


def distance(rows: Iterable[Row], name: str) -> float | None:
    """The mean of `gaps` over steps; None where it was not measured."""
    found = gaps(rows, name)
    return statistics.fmean(found) if found else None


def tables(loaded: Loaded) -> list[Table]:
    """The last loss and the distance from cuDNN's curves, by case."""
    body = []
    for case, of_case in by_case(loaded).items():
        between = distance(of_case, OTHER)
        for name in series_in(of_case):
            mine = [row for row in of_case if series(row) == name]
            last = [statistics.fmean(curve(row)[-WINDOW:]) for row in mine]
            apart = None if name == BASE else distance(of_case, name)
            figures = [number(statistics.fmean(last), ".4f"), f"{min(last):.4f} to {max(last):.4f}"]
            figures += [number(apart, ".5f"), number(ratio(apart, between), ".2f")]
            body.append([case, LABELS[name], *figures, number(statistics.median(row["ms"] for row in mine), ".1f")])
    headers = ["scores", "attention", "last loss", "of seeds", f"from {LABELS[BASE]}", "times FA2's", "ms a step"]
    return [Table("Losses of a small language model, nats a byte", headers, body, keys=2)] if body else []


def checks(loaded: Loaded) -> list[Check]:
    """The default's distance from bf16, over that between two bf16 backends."""
    found = []
    for case, of_case in by_case(loaded).items():
        apart = ratio(distance(of_case, DEFAULT), distance(of_case, OTHER))
        found.append(Check("distance of loss curves from bf16's / between two bf16 backends", case, apart, BOUND))
    return found


def smooth(values: list[float]) -> dict[int, float]:
    """Means of `WINDOW` steps, by the last of them."""
    return {i + WINDOW: statistics.fmean(values[i : i + WINDOW]) for i in range(0, len(values) - WINDOW + 1, WINDOW)}


def plot(loaded: Loaded) -> Figure | None:
    """Losses above, distances from cuDNN's below, a column a case; means over seeds."""
    cases = by_case(loaded)
    if not cases:
        return None
    figure, axes = grid(2, len(cases))
    for (case, of_case), losses, apart in zip(cases.items(), *axes, strict=True):
        for name in series_in(of_case):
            curves = [curve(row) for row in of_case if series(row) == name]
            line(losses, name, smooth([statistics.fmean(of_step) for of_step in zip(*curves, strict=True)]), float)
            if name != BASE:
                line(apart, name, smooth(gaps(of_case, name)), float)
        log_axis(apart, (1.0, 2.0, 5.0))
        losses.set_title(case)
        apart.set_xlabel("step")
    axes[0][0].set_ylabel("loss, nats a byte")
    axes[1][0].set_ylabel(f"distance from {LABELS[BASE]}")
    legend(figure, axes[0])
    return figure


SUITE = Suite(
    "loss_curves",
    run,
    {
        "loss_curves": Block(
            "loss_curves",
            tables,
            (Plot("loss_curves", "Loss curves of a small language model by attention, and their distances", plot),),
            shown=1,
        )
    },
)
