"""Suite `language_model`: what 8-bit attention does to a trained language model, and to the speed of its generation.

    python benchmarks/attention.py --suite language_model
    python benchmarks/attention.py --suite language_model --device cpu

SmolLM2-135M reads 114688 tokens of Python's reference manual in parts of 2048 and 8192 (`examples/language_model.py`
says where both come from), with every preset, FlashAttention-3 in FP8 where it is installed, formats whose P comes from
exponentials in place of a score's bits (suite `plane`), and recipes that are broken on purpose: perplexity, how often
the same next token is likeliest as with bf16 attention, and tokens a second. So it does in chunks of a quarter, whose
later ones read the keys before them from a cache in 8 bits.
Then it generates, from prompts of 1k to 32k tokens, with bf16 attention and transformers' cache, and with this
package's and its cache in 8 bits. On a CPU attention is the rounding model, and nothing is generated.
"""

from __future__ import annotations

import importlib
import statistics
import time
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import helion_attn as ha
from benchmarks import plane
from benchmarks.lib.checks import Check
from benchmarks.lib.harness import Loaded, Results, Row
from benchmarks.lib.peers import fa3_fp8
from benchmarks.lib.recipes import PRESETS
from benchmarks.lib.suite import Block, Options, Suite, console, progress
from benchmarks.lib.tables import LABELS, Table, number, rows_of, values_of

#: Tokens that are read, and in parts of how many.
GPU_TOKENS, GPU_CONTEXTS = 114688, (2048, 8192)
CPU_TOKENS, CPU_CONTEXTS = 2048, (512,)

#: Prompts that are continued by so many tokens, so many times: the host decides, and its time varies by a third.
PROMPTS, STEPS, ROUNDS = (1024, 4096, 8192, 32768), 32, 5

#: Formats of suite `plane` that are read beside the presets, by the preset that has the same products.
EXPONENTIALS = {"fast": "e4m3, exponentials", "balanced": "int8, exponentials"}

#: Chunks of a part, where its keys go through a cache; and what that is called.
CHUNKS, CACHED = 4, "helion_attn, 8-bit cache"

#: What it may add to the relative loss of perplexity.
MOST_BY_CACHE = 0.001

#: What bf16 attention is called here: PyTorch's own choice among its backends.
BASE = "sdpa_bf16"


def by_exponentials(name: str) -> Any:
    """Causal attention in a format of suite `plane`, as the example calls it."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
        return plane.prepare(plane.FORMATS[name], q.contiguous(), k, v, True, sm_scale).run()

    return attend


@torch.inference_mode()
def score_in_chunks(example: Any, model: Any, tokens: torch.Tensor, context: int, recipe: ha.Recipe) -> Any:
    """`example.score`, of parts that come in chunks and whose keys go through a cache in 8 bits."""
    ha.register_transformers()
    model.set_attn_implementation("helion_fp8")
    losses, choices = [], []
    started = time.perf_counter()
    for part in tokens[: len(tokens) // context * context].view(-1, 1, context):
        cache = ha.transformers_cache(recipe=recipe)
        found = [model(x, past_key_values=cache, use_cache=True).logits[0] for x in part.split(context // CHUNKS, 1)]
        logits = torch.cat(found)[:-1].float()
        losses.append(cross_entropy(logits, part[0, 1:], reduction="none").cpu())
        choices.append(logits.argmax(1).cpu())
    return example.Scores(torch.stack(losses), torch.stack(choices), time.perf_counter() - started)


def reads(options: Options, results: Results, example: Any, model: Any, tokens: torch.Tensor) -> None:
    """Perplexity and agreement, by context and attention."""
    on_gpu = options.device.type == "cuda"
    count, contexts = (GPU_TOKENS, GPU_CONTEXTS) if on_gpu else (CPU_TOKENS, CPU_CONTEXTS)
    if options.quick:
        count, contexts = count // 4, contexts[:1]
    cases: list[tuple[str, str | None, Any]] = [(BASE, None, example.stock)]
    cases += [("helion_attn", name, example.fp8(name)) for name in example.BOUNDS]
    cases += [("broken", name, attend) for name, attend in example.BROKEN.items()]
    if on_gpu:
        cases += [("exponentials", recipe, by_exponentials(name)) for recipe, name in EXPONENTIALS.items()]
    if "fa3_fp8" in options.impls:

        def fa3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float) -> torch.Tensor:
            prepared = fa3_fp8(q, k, v, True, sm_scale)
            return prepared.output(prepared.run())

        cases.append(("fa3_fp8", None, fa3))
    cases += [(CACHED, name, None) for name in ("balanced", "fast") if on_gpu]

    def score(text: torch.Tensor, context: int, recipe: str | None, attend: Any) -> Any:
        if attend is None:
            return score_in_chunks(example, model, text, context, PRESETS[str(recipe)])
        return example.score(model, text, context, attend)

    for context in contexts:
        base = None
        for impl, recipe, attend in progress(cases, f"{context} tokens"):
            if on_gpu:  # what is compiled first is not timed
                score(tokens[:context], context, recipe, attend)
            scores = score(tokens[:count], context, recipe, attend)
            base = base or scores
            difference, error = scores.difference(base)
            results.add(
                {
                    "impl": impl,
                    "recipe": recipe,
                    "stage": "prefill",
                    "context": context,
                    "tokens": scores.losses.numel(),
                    "perplexity": scores.perplexity,
                    "difference": difference,
                    "standard_error": error,
                    "agreement": scores.agreement(base),
                    "tokens_per_second": scores.losses.numel() / scores.seconds,
                }
            )


def continued(model: Any, prompt: torch.Tensor, cached: bool, new: bool) -> tuple[float, float, int]:
    """Seconds to the first token, tokens a second after it, and the cache's bytes; what is `new` is not timed."""

    def run(steps: int) -> tuple[float, Any]:
        cache = ha.transformers_cache() if cached else None
        torch.cuda.synchronize()
        started = time.perf_counter()
        out = model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), past_key_values=cache, max_new_tokens=steps,
            min_new_tokens=steps, do_sample=False, return_dict_in_generate=True,
        )  # fmt: skip
        torch.cuda.synchronize()
        return time.perf_counter() - started, out.past_key_values

    if new:
        run(2)
    first, _ = run(1)
    both, cache = run(1 + STEPS)
    stored = 0
    for layer in cache.layers:
        paged = layer.cache if cached else None
        stored += layer.keys.nbytes + layer.values.nbytes if paged is None else paged.nbytes
    return first, STEPS / (both - first), stored


def generates(options: Options, results: Results, model: Any, tokens: torch.Tensor) -> None:
    """Tokens a second and the cache's bytes, by prompt."""
    ha.register_transformers()
    cases = (
        (BASE, "sdpa", False),
        ("helion_attn", "helion_fp8", False),
        (CACHED, "helion_fp8", True),
    )
    for length in PROMPTS[: 2 if options.quick else None]:
        prompt = tokens[:length]
        found: dict[str, list[tuple[float, float, int]]] = {}
        for i in progress(range(ROUNDS), f"from {length}"):
            for impl, implementation, cached in cases:
                model.set_attn_implementation(implementation)
                found.setdefault(impl, []).append(continued(model, prompt, cached, new=i == 0))
        for impl, of_rounds in found.items():
            first, speed, stored = map(statistics.median, zip(*of_rounds, strict=True))
            results.add(
                {
                    "impl": impl,
                    "recipe": "balanced" if impl != BASE else None,
                    "stage": "generate",
                    "context": length,
                    "first_token_ms": 1e3 * first,
                    "tokens_per_second": speed,
                    "cache_bytes": stored,
                }
            )


def run(options: Options, results: Results) -> None:
    """The suite; nothing where the model or what reads it is not installed."""
    try:
        example: Any = importlib.import_module("examples.language_model")
        model, tokens = example.load(options.device.type)
    except ImportError as missing:
        console.print(f"[yellow]skipped language_model: {missing} (make language-model installs what it needs)")
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, 2))  # no kernel is interpreted here
    try:
        reads(options, results, example, model, tokens)
        if options.device.type == "cuda":
            generates(options, results, model, tokens)
    finally:
        torch.set_num_threads(threads)


def name_of(row: Row) -> str:
    """What a line of the table stands for."""
    if row["impl"] == BASE:
        return "SDPA bf16"
    if row["impl"] == "broken":
        return f"broken: {row['recipe']}"
    name: str = row["recipe"] or row["impl"]
    label = LABELS.get(name, name)
    if row["impl"] == CACHED:
        return f"8-bit cache, {label}"
    return f"{label}'s products, exponentials" if row["impl"] == "exponentials" else label


def tables(loaded: Loaded) -> list[Table]:
    """Perplexities by context, and generation by prompt."""
    found = []
    read = rows_of(loaded, "language_model", stage="prefill")
    headers = ["attention", "perplexity", "beside bf16's", "same next token", "tokens/s"]
    for (context,) in values_of(read, "context"):
        rows = [row for row in read if row["context"] == context]
        body = [
            [
                name_of(row),
                f"{row['perplexity']:.4f}",
                f"{100 * row['difference']:+.3f} ± {100 * row['standard_error']:.3f}%",
                f"{100 * row['agreement']:.2f}%",
                number(row["tokens_per_second"], ".0f"),
            ]
            for row in rows
        ]
        title = f"SmolLM2-135M, {rows[0]['tokens']} tokens of Python's reference manual, {context} at a time"
        found.append(Table(title, headers, body))
    made = rows_of(loaded, "language_model", stage="generate")
    if made:
        names: dict[str, str] = {BASE: "SDPA bf16"}
        body = [
            [
                str(row["context"]),
                names.get(row["impl"], str(row["impl"])),
                number(row["first_token_ms"], ".1f"),
                number(row["tokens_per_second"], ".1f"),
                f"{row['cache_bytes'] / 2**20:.1f}",
            ]
            for row in made
        ]
        headers = ["prompt", "attention", "first token, ms", "tokens/s", "cache, MiB"]
        found.append(Table("SmolLM2-135M, generate", headers, body))
    return found


def checks(loaded: Loaded) -> list[Check]:
    """What the default cache adds to the default preset's perplexity, read in chunks."""
    read = rows_of(loaded, "language_model", stage="prefill", recipe="balanced")
    found = []
    for (context,) in values_of(read, "context"):
        lost = {row["impl"]: row["difference"] for row in read if row["context"] == context}
        if CACHED in lost:
            more = lost[CACHED] - lost["helion_attn"]
            found.append(Check("perplexity with a cache, beside without", f"{context} tokens", more, MOST_BY_CACHE))
    return found


SUITE = Suite("language_model", run, {"language_model": Block("language_model", tables)})
