"""Suite `quality`: what errors of attention do to what a model gives.

    python benchmarks/attention.py --suite quality
    python benchmarks/attention.py --suite quality --device cpu

Passkeys that SmolLM2 finds in long contexts (`needles.py`), greedy continuations (`greedy.py`), embeddings of MiniLM
(`embeddings.py`), and latents of video and image models with random weights (`divergence.py`): with every preset, FP8
peers, and bf16 by several kernels, beside PyTorch's FlashAttention-2. On a CPU attention is the rounding model, and
everything is smaller.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from benchmarks import divergence, embeddings, greedy, needles
from benchmarks.cells import compile_all
from benchmarks.lib.attends import OURS, Attend, attends_of
from benchmarks.lib.harness import Results, version_of
from benchmarks.lib.problem import workload
from benchmarks.lib.suite import Block, Options, Suite, console
from devtools.workloads import Workload

#: Of whose versions a result file tells as well.
PACKAGES = ("transformers", "diffusers", "sageattention")

#: Shapes that compile what the parts need: SmolLM2, MiniLM, and self-attention of the latents' models.
COMPILED: tuple[Workload, ...] = (
    *(
        dataclasses.replace(workload(needles.BATCH // S, 9, S, S, 64, True), H_kv=3)
        for S in (needles.GPU_LENGTHS[0], needles.GPU_LENGTHS[-1])
    ),
    workload(1, 12, 24, 24, 32),
    workload(embeddings.GPU_PASSAGES[0], 12, embeddings.GPU_PASSAGES[1], embeddings.GPU_PASSAGES[1], 32),
    *(model.workload for model in divergence.MODELS),
)


def of_language_model(options: Options, results: Results, attends: dict[str, Attend]) -> None:
    """The parts of SmolLM2."""
    example: Any = importlib.import_module("examples.language_model")
    model, tokens = example.load(options.device.type)
    needles.measure(options, results, attends, model, tokens, example.load_tokenizer())
    greedy.measure(options, results, attends, model, tokens)


#: What each part is, and what measures it.
PARTS: dict[str, Callable[[Options, Results, dict[str, Attend]], None]] = {
    "a language model": of_language_model,
    "embeddings": embeddings.measure,
    "latents": divergence.measure,
}


def run(options: Options, results: Results) -> None:
    """Every part whose models and libraries are installed."""
    results.meta |= {package: version_of(package) for package in PACKAGES}
    if "helion_attn" in options.impls:
        compile_all(COMPILED, list(OURS), options)
    attends = attends_of(options)
    for name, measure in PARTS.items():
        try:
            measure(options, results, attends)
        except ImportError as missing:
            console.print(f"[yellow]skipped {name}: {missing}")


SUITE = Suite(
    "quality",
    run,
    {
        "needles": Block("quality", needles.tables),
        "greedy": Block("quality", greedy.tables),
        "embeddings": Block("quality", embeddings.tables),
        "divergence": Block("quality", divergence.tables, (divergence.PLOT,)),
    },
)
