"""The process that `startup.py` starts: H, S, D, mask and device in its arguments, JSON on its last line of output."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from typing import Any

#: What a first call would import otherwise.
KERNELS = ("preprocess.pipeline", "kernels.attention", "kernels.attention_large_d")

LATER_CALLS = 50


class Clock:
    """Measures steps that follow one another."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since it was last asked."""
        now = time.perf_counter()
        self.last, passed = now, now - self.last
        return passed


class Compilations:
    """What Triton says of every kernel that it is asked for."""

    def __init__(self) -> None:
        self.compiled = 0
        self.reused = 0
        self.seconds = 0.0

    def listen(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        """Triton calls this after each; its times are in microseconds."""
        self.compiled += not cache_hit
        self.reused += cache_hit
        self.seconds += times.total / 1e6


def start(H: int, S: int, D: int, causal: bool, device: str) -> dict[str, float]:
    """Import, call, and say how long each step took."""
    clock = Clock()
    torch = importlib.import_module("torch")
    said = {"import_torch_s": clock.lap()}
    ha = importlib.import_module("helion_attn")
    for name in KERNELS:
        importlib.import_module(f"helion_attn.{name}")
    said["import_s"] = clock.lap()

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    compilations = Compilations()
    importlib.import_module("triton").knobs.compilation.listener = compilations.listen
    q, k, v = torch.randn(3, 1, H, S, D, device=device).bfloat16()
    synchronize()
    said["context_s"] = clock.lap()

    def call() -> None:
        ha.attention(q, k, v, causal=causal)
        synchronize()

    call()
    said["first_s"] = clock.lap()
    said |= {"compiled": compilations.compiled, "reused": compilations.reused, "triton_s": compilations.seconds}
    later = []
    for _ in range(LATER_CALLS if device == "cuda" else 1):
        clock.lap()
        call()
        later.append(clock.lap())
    return said | {"later_ms": 1e3 * statistics.median(later)}


if __name__ == "__main__":
    heads, length, head_dim = map(int, sys.argv[1:4])
    print(json.dumps(start(heads, length, head_dim, sys.argv[4] == "causal", sys.argv[5])))
