"""The process that `serving.py` starts: a server of vLLM, and JSON of what it measured on its last line of output.

It measures the speed of a model with random weights; of one with trained ones, quality, or whether tokens are the same
again.
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

#: Tokens that each sequence generates, and new prompts beside sequences that decode, and their tokens.
NEW, PROMPTS, MIXED_TOKENS = 64, 4, 8192


class Client:
    """What asks a server, which is in this process.

    Attributes:
        llm: vLLM's.
        start_s: what its start took.
    """

    def __init__(self, given: dict[str, Any], most_tokens: int) -> None:
        from vllm import LLM

        sequences = given["sequences"]
        began = time.perf_counter()
        self.llm = LLM(
            given["model"],
            load_format=given["weights"],
            skip_tokenizer_init=True,
            max_model_len=most_tokens,
            max_num_seqs=sequences + PROMPTS,
            max_num_batched_tokens=8192,
            enable_prefix_caching=True,
            gpu_memory_utilization=0.92,
            disable_log_stats=True,
            compilation_config={
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sorted({1, 2, 4, 8, 16, 32, sequences, sequences + PROMPTS}),
            },
            **given["options"],
        )
        self.start_s = time.perf_counter() - began
        if given["weights"] == "dummy":
            self.llm.apply_model(fill_weights)

    def prompts(self, count: int, tokens: int, seed: int) -> list[Any]:
        """Random tokens."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        found = torch.randint(10, 100_000, (count, tokens), generator=generator)
        return [{"prompt_token_ids": x} for x in found.tolist()]

    def seconds(self, prompts: list[Any], new: int) -> tuple[float, list[list[int]]]:
        """How long a batch takes, and the tokens that it gets: as many for everyone."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        found = self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began, [list(x.outputs[0].token_ids) for x in found]


def fill_weights(model: Any) -> None:
    """Give a model weights of a trained one's sizes: vLLM's own dummies are so small that all tokens tie."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            weight.data.fill_(1.0 if "norm" in name else 0.0)
        else:
            weight.data.normal_(0.0, 1.0 if "embed" in name else weight.shape[-1] ** -0.5, generator=generator)


def cache_tokens(client: Client) -> int:
    """How many tokens a server's cache holds."""
    cache = client.llm.llm_engine.vllm_config.cache_config
    tokens: int = cache.num_gpu_blocks * cache.block_size
    return tokens


def measure(given: dict[str, Any]) -> dict[str, Any]:
    """Start a server, and measure its speed."""
    N, sequences = given["N"], given["sequences"]
    client = Client(given, max(N, MIXED_TOKENS) + 256)
    said: dict[str, Any] = {"start_s": client.start_s, "cache_tokens": cache_tokens(client)}
    # Prompts that are new to the server, after two that warm it up.
    count = max(2, min(16, 262144 // N))
    client.seconds(client.prompts(2, N, seed=2), 1)
    took, _ = client.seconds(client.prompts(count, N, seed=3), 1)
    said["prefill"] = {"tokens_per_s": count * N / took, "ms": 1e3 * took}
    if said["cache_tokens"] < sequences * (N + NEW + 128) + PROMPTS * (MIXED_TOKENS + 256):
        return said
    batch = client.prompts(sequences, N, seed=4)
    client.seconds(batch, 1)
    client.seconds(batch, 4)
    # Prompts are in the prefix cache now, but for their last block.
    one = min(client.seconds(batch, 1)[0] for _ in range(2))
    took = min(client.seconds(batch, 1 + NEW)[0] for _ in range(2)) - one
    said["decode"] = {"tokens_per_s": sequences * NEW / took, "ms": 1e3 * took / NEW}
    took, _ = client.seconds([*batch, *client.prompts(PROMPTS, MIXED_TOKENS, seed=5)], NEW)
    tokens = sequences * NEW + PROMPTS * (MIXED_TOKENS + NEW)
    said["mixed"] = {"tokens_per_s": tokens / took, "ms": 1e3 * took}
    return said


def measure_quality(given: dict[str, Any]) -> dict[str, Any]:
    """Start a server, and measure what it makes of a text: perplexities, passkeys that it finds, and continuations."""
    from vllm import SamplingParams

    with open(given["texts"]) as file:
        texts = json.load(file)
    client = Client(given, given["N"])
    said: dict[str, Any] = {"cache_tokens": cache_tokens(client), "perplexity": {}}
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    for length, prompts in texts["read"].items():
        logprobs: list[float] = []
        for out in client.llm.generate([{"prompt_token_ids": x} for x in prompts], params, use_tqdm=False):
            tokens = zip(out.prompt_token_ids, out.prompt_logprobs, strict=True)
            logprobs += [found[token].logprob for token, found in tokens if found is not None]
        said["perplexity"][length] = math.exp(-sum(logprobs) / len(logprobs))
    asked, answers = texts["asked"], texts["answers"]
    _, found = client.seconds([{"prompt_token_ids": x} for x in asked], len(answers[0]))
    said["passkeys"] = sum(x == answer for x, answer in zip(found, answers, strict=True)) / len(answers)
    _, said["continuations"] = client.seconds([{"prompt_token_ids": x} for x in texts["continued"]], NEW)
    return said


def measure_again(given: dict[str, Any]) -> dict[str, Any]:
    """Start a server, and measure the share of prompts that have the same tokens again, from the prefix cache."""
    with open(given["texts"]) as file:
        prompts = [{"prompt_token_ids": x} for x in json.load(file)["continued"]]
    client = Client(given, given["N"])
    first, again = (client.seconds(prompts, NEW)[1] for _ in range(2))
    return {"again": sum(x == y for x, y in zip(first, again, strict=True)) / len(again)}


#: By what a process is asked for.
MEASURES = {"speed": measure, "quality": measure_quality, "again": measure_again}

if __name__ == "__main__":
    described = json.loads(sys.argv[1])
    print(json.dumps(MEASURES[described["measures"]](described)))
