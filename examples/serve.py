"""A language model in vLLM, with 8-bit attention and an 8-bit cache.

Four questions share a long beginning, which the server reads once and keeps. Says how many tokens fit the cache, and
how many a second are written. Where vLLM or a Hopper GPU is missing, it says so.

    pip install vllm==0.26.0
    python examples/serve.py MODEL        # a name on the Hub, or a folder
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import time
from typing import Any

import helion_attn as ha
from helion_attn.integrations.vllm import GENERATIONS, generation_of

#: vLLM's options, by the generation of its interface.
OPTIONS = {
    "vllm_0_26": {"attention_backend": "CUSTOM", "kv_cache_dtype": "int8_per_token_head"},
    "vllm_0_33": {"attention_backend": "HELION", "kv_cache_dtype": "helion_int8"},
}

BEGINNING = "The rules of a small library. " + " ".join(
    f"Shelf {i} holds books on subject {i % 17}." for i in range(300)
)

QUESTIONS = [f" Question: what does shelf {shelf} hold? Answer:" for shelf in (3, 50, 120, 299)]


def why_not() -> str | None:
    """What is missing, in words, or None."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed: pip install vllm==0.26.0"
    version = importlib.metadata.version("vllm")
    if generation_of(version) is None:
        return f"vLLM is {version}; helion_attn knows {', '.join(GENERATIONS)}"
    supported = ha.is_supported()
    return None if supported else supported.reason


def main(argv: list[str] | None = None) -> int:
    """Parse `argv`, or the command line, answer the questions, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name on the Hub, or a folder")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer (default 32)")
    args = parser.parse_args(argv)
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = OPTIONS[generation_of(importlib.metadata.version("vllm")) or ""]
    server = LLM(args.model, **options)
    cache = server.llm_engine.vllm_config.cache_config
    print(f"{cache.num_gpu_blocks * cache.block_size:,} tokens fit the cache")
    sampling = SamplingParams(temperature=0.0, max_tokens=args.new)
    server.generate([BEGINNING], sampling)  # kept for the questions
    began = time.perf_counter()
    answers = server.generate([BEGINNING + question for question in QUESTIONS], sampling)
    took = time.perf_counter() - began
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(question.strip(), answer.outputs[0].text.strip())
    print(f"{sum(len(x.outputs[0].token_ids) for x in answers) / took:.0f} tokens a second")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
