"""The heat map of speed by head dim and length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb

from benchmarks.lib.plots import COLOURS, heat_maps
from benchmarks.speed import heat_plot


def rows(D: int, N: int, causal: bool, ms: float, bf16: float) -> list[dict[str, Any]]:
    cell = {"D": D, "N": N, "causal": causal}
    return [
        {**cell, "impl": "helion_attn", "stage": "e2e", "ms": ms},
        {**cell, "impl": "fa3_bf16", "stage": "kernel", "ms": bf16},
        {**cell, "impl": "cudnn_bf16", "stage": "kernel", "ms": 2 * bf16},
    ]


def test_figures_and_colours() -> None:
    """A cell has the speed-up over the fastest bf16 kernel; 1 is white, and twice as fast as far from it as half."""
    cells = [(64, 512, 2.0), (64, 4096, 1.0), (128, 512, 4.0), (128, 4096, 0.5)]
    found = [
        row for D, N, ms in cells for causal in (False, True) for row in rows(D, N, causal, ms, 2.0 if causal else 1.0)
    ]
    figure = heat_plot({"attention": {"meta": {}, "rows": found}})
    assert figure is not None
    try:
        full, causal = figure.axes[:2]
        assert [text.get_text() for text in full.texts] == ["0.50", "1.00", "0.25", "2.00"]
        assert [text.get_text() for text in causal.texts] == ["1.00", "2.00", "0.50", "4.00"]
        assert [label.get_text() for label in full.get_xticklabels()] == ["512", "4k"]
        assert [label.get_text() for label in full.get_yticklabels()] == ["64", "128"]
        (image,) = full.images
        half, one, twice = image.to_rgba(np.array([0.5, 1.0, 2.0]))[:, :3]
        assert one == pytest.approx(np.ones(3), abs=0.01)
        assert half == pytest.approx(to_rgb(COLOURS["fa3_bf16"]))
        assert twice == pytest.approx(to_rgb(COLOURS["helion_attn"]))
    finally:
        plt.close(figure)


def test_a_cell_that_was_not_measured_is_empty() -> None:
    figure = heat_maps({"a": {"64": {"512": 1.0, "1k": 1.5}, "128": {"512": 0.9}}}, "D", "length", "ratio")
    try:
        assert [text.get_text() for text in figure.axes[0].texts] == ["1.00", "1.50", "0.90", "-"]
    finally:
        plt.close(figure)


def test_nothing_measured() -> None:
    assert heat_plot({}) is None
