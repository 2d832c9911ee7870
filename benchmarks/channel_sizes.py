"""Draw docs/large_channels.png: what few large channels of K do to 8 bits, and what equalising them does.

python benchmarks/channel_sizes.py

Errors are the rounding model's, on a CPU, seed 0: a minute.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

if __name__ == "__main__":  # a script's own folder is on the path; the package is found in the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

import helion_attn as ha
from benchmarks.lib.plots import COLOURS, PAGE_WIDTH, STYLE, log_axis, powers_axis, save
from benchmarks.lib.recipes import PRESETS
from benchmarks.lib.tables import LABELS
from devtools.inputs import make_qkv
from helion_attn.reference import rounding_model
from helion_attn.testing import relative_error

DRAWN = Path(__file__).resolve().parents[1] / "docs" / "large_channels.png"

#: Keys, query rows, head dim, large channels, how many times as large they are, and in the panels of sizes.
KEYS, QUERIES, D, COUNT, FACTORS, SHOWN = 2048, 64, 128, 3, (1, 2, 4, 8, 16, 32, 64, 128), 32

SEED = 0


def inputs(factor: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bf16 q, k, v: N(0, 1), but K's channels times `factor`, and Q's over its root."""
    q, k, v = make_qkv("randn", 1, 1, 1, QUERIES, KEYS, D, torch.float32, seed=SEED)
    large = torch.randperm(D, generator=torch.Generator().manual_seed(SEED))[:COUNT]
    q[..., large] /= factor**0.5
    k[..., large] *= factor
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def draw_sizes(ax: Axes, equalise: bool) -> None:
    """The root mean square of every channel of Q and K, as they are and as they are rounded but for the mixing."""
    q, k, v = inputs(SHOWN)
    recipe = dataclasses.replace(ha.BALANCED, equalise=equalise, reflect=False)
    found = rounding_model.transform(q, k, v, recipe, rope=None)
    for x, name, colour, width in ((found.k, "K", COLOURS["balanced"], 2.6), (found.q, "Q", COLOURS["fa3_fp8"], 1.0)):
        ax.plot(x.square().mean((0, 1, 2)).sqrt(), label=name, color=colour, drawstyle="steps-mid", linewidth=width)
    ax.set_yscale("log")
    ax.set_ylim(0.1, 60)
    ax.set_title("equalised" if equalise else f"{COUNT} channels of K x {SHOWN}")
    ax.set_xlabel("channel")


def draw_errors(ax: Axes) -> None:
    """Total error of each preset by size of the channels."""
    for equalise in (False, True):
        for name, preset in PRESETS.items():
            recipe = dataclasses.replace(preset, equalise=equalise)
            errors = []
            for factor in FACTORS:
                qkv = inputs(factor)
                model = ha.reference.fp8_attention(*qkv, recipe=recipe, out_dtype=torch.float32)
                errors.append(relative_error(model, ha.reference.attention(*qkv)))
            label = LABELS[name] if equalise else None
            ax.plot(FACTORS, errors, "-o" if equalise else "--", markersize=4, color=COLOURS[name], label=label)
    ax.plot([], [], "--", color="#666666", label="not equalised")
    log_axis(ax, (1.0, 2.0, 5.0))
    powers_axis(ax, list(FACTORS), str)
    ax.set_title("total error")
    ax.set_xlabel(f"size of {COUNT} channels of K")
    ax.legend(fontsize=8)


def draw(path: Path = DRAWN) -> None:
    """Write the figure."""
    with plt.rc_context(STYLE):
        figure, (before, after, errors) = plt.subplots(1, 3, figsize=(PAGE_WIDTH, 3.0), layout="constrained")
        draw_sizes(before, False)
        draw_sizes(after, True)
        before.set_ylabel("root mean square")
        before.legend()
        draw_errors(errors)
        save(figure, path)
        plt.close(figure)


if __name__ == "__main__":
    draw()
