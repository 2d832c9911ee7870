"""Run every kernel under NVIDIA's compute-sanitizer: memcheck, then racecheck, a process for each case.

    python scripts/sanitize.py --out sanitize.json                 needs a Hopper GPU, and compute-sanitizer on PATH
    python scripts/sanitize.py --out sanitize.json --sanitizer /usr/local/cuda/bin/compute-sanitizer
    python scripts/sanitize.py --case causal_d128                  one case, without the sanitizer; on a CPU too

Prints a table, writes it as JSON, and returns 1 if a case has a finding, but for races inside of PyTorch's own kernels,
or did not run to its end: a log without the sanitizer's summary is no clean log. Cases also check their result against
the rounding model's error.

memcheck sees loads and stores outside of allocations, and misaligned ones; racecheck sees hazards in shared memory.
Kernels with ping-pong have barriers at which a part of a program arrives without waiting. Three more programs show what
racecheck makes of such barriers: `arrives` has no race, and nothing may be found; `races` lacks a barrier, and must be
reported; `pingpong` has no race, and racechecks are known that report some. Where they do, a case with a report is run
once more with its kernels compiled without ping-pong, and what is found there counts. What docs/trust.md says of the
limits holds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":  # a script's own folder is on the path; devtools are found in the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn import plans
from helion_attn.compiler.passes import pingpong
from helion_attn.compiler.passes.outcome import Outcome
from helion_attn.configs import scheduling
from helion_attn.numerics import LN2, RECENTRED_KEYS
from helion_attn.testing import error_budget, relative_error

TOOLS = ("memcheck", "racecheck")

#: The exit code of a run with findings.
FOUND = 86

#: In the names of PyTorch's own kernels, which the cases' checks run. racecheck reports a race inside of its reduction
#: by maximum (torch 2.11, CUDA 13.0): printed and written, and not counted against this project's kernels.
PYTORCH = "at::native::"

#: Lines of the log that are about the run, not about a kernel.
BANNERS = ("COMPUTE-SANITIZER", "Target application returned an error", "Error: process", "Error: Target application")


B, H, H_KV, M, N = 1, 4, 2, 150, 300


def check(out: torch.Tensor, model: torch.Tensor, oracle: torch.Tensor, softcap: float | None = None) -> None:
    """`out` is within the budget that the rounding model's error leaves."""
    model_error = relative_error(model, oracle)
    budget = error_budget(model_error, out.dtype, device=str(out.device), softcap=softcap)
    error = relative_error(out, oracle)
    if not error <= budget:
        raise ValueError(f"error {error:.4g}, budget {budget:.4g}")


@dataclass(frozen=True)
class Attend:
    """A small call of `attention`; M and its keys are ragged, and more than a block each."""

    D: int  # head dim; D_v, V's
    D_v: int
    recipe: ha.Recipe = ha.BALANCED  # and the rest, what `helion_attn.attention` takes
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    has_sinks: bool = False
    splits: int = 1  # of the keys
    odd_strides: bool = False  # rows an odd number of elements apart: no wide loads
    rope: bool = False  # rotate, by tables of random angles
    normed: bool = False  # normalise Q by head and K over all heads
    keys: int = N  # N
    # By how much, in base 2, scores of the last keys lie above those of the first block for every other query, and
    # below for the rest.
    rise: float = 0.0
    # With a block mask, of blocks that are unseen, seen in part and whole, and of a row that sees nothing.
    listed: bool = False
    # With a block mask of half of the blocks, of which the rest count by their means.
    tail: bool = False

    def __call__(self, device: str) -> None:
        """The call, and its check."""
        q, k, v = make_qkv("biased_v", B, H, H_KV, M, self.keys, self.D, self.dtype, device, D_v=self.D_v)
        if self.rise:
            q[..., 0], k[..., 0] = 8.0, 0.0
            q[:, :, 1::2, 0] = -8.0
            k[:, :, 200:, 0] = self.rise * LN2 * self.D**0.5 / 8.0
        if self.odd_strides:
            q, k, v = (torch.nn.functional.pad(x, (0, 1 - x.size(3) % 2))[..., : x.size(3)] for x in (q, k, v))
        angles = torch.linspace(0, 50, self.keys * self.D // 2, device=device).view(self.keys, -1)
        options = self.options | {
            "recipe": self.recipe,
            "rope": ha.Rope(angles.cos(), angles.sin()) if self.rope else None,
            "sinks": torch.linspace(-1, 1, H, device=device) if self.has_sinks else None,
        }
        if self.normed:
            weights = (torch.linspace(0.5, 2, n, device=device) for n in (self.D, H_KV * self.D))
            options |= zip(("q_norm", "k_norm"), map(ha.RMSNorm, weights), strict=True)
        if self.listed:
            seen = torch.arange(H * M * self.keys, device=device).view(H, M, self.keys) % 7 > 2
            seen[0, :128, :128], seen[1, :, :128], seen[0, 3] = True, False, False
            options["block_mask"] = ha.BlockMask.from_dense(seen)
        if self.tail:
            blocks = torch.arange(H * 2 * 3, device=device).view(1, H, 2, 3) % 2 == 0
            options["block_mask"] = ha.BlockMask(blocks, M, self.keys, tail=True)
        given = [x.transpose(1, 2) for x in (q, k, v)] if options.get("layout") == "bshd" else [q, k, v]
        plans.forget()  # a plan would keep another case's splits
        with mock.patch.object(scheduling, "key_splits", return_value=self.splits):
            out = ha.attention(*given, **options)
        if not self.rope and not self.normed:
            exact = {name: value for name, value in options.items() if name not in ("recipe", "rope")}
            oracle = ha.reference.attention(*given, **exact)
            check(out, ha.reference.fp8_attention(*given, **options), oracle, options.get("softcap"))
        elif not out.isfinite().all():
            raise ValueError("the output is not finite")


@dataclass(frozen=True)
class Decode:
    """Append to a paged cache, and attend to it; the keys in `splits` runs."""

    D: int  # head dim
    splits: int  # of `helion_attn.attention_kvcache`
    options: dict[str, Any] = field(default_factory=dict)  # what else it takes, and the references do
    has_sinks: bool = False  # likewise
    rope: bool = False  # rotate keys as they come, those of the queries in an append of their own
    keys: int = N  # of the longest sequence
    queries: int = 3  # of each; with many the kernel for prompts runs
    recipe: ha.Recipe = ha.FAST  # of the cache
    has_constants: bool = False  # its cache has a mean of K and factors of channels

    def __call__(self, device: str) -> None:
        """The calls, and their check."""
        lengths, queries = (self.keys, 0, self.keys - 123), self.queries
        q, k, v = make_qkv("biased_v", len(lengths), H, H_KV, queries, self.keys, self.D, device=device)
        options = {"causal": True} | self.options
        if self.has_sinks:
            options["sinks"] = torch.linspace(-1, 1, H, device=device)
        constants = {}
        if self.has_constants:
            factors = torch.exp2(torch.arange(self.D, device=device) % 5 - 2.0).expand(H_KV, -1)
            constants = {"k_mean": k.float().mean((0, 2)), "channel_factors": factors}
        num_pages = len(lengths) * self.keys
        cache = ha.paged_kv_cache(num_pages, H_KV, self.D, device=device, recipe=self.recipe, **constants)
        pages = -(-self.keys // cache.page_size)
        table = torch.arange(len(lengths) * pages, dtype=torch.int32, device=device).flip(0).view(-1, pages)
        seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
        nothing = torch.zeros_like(seqlens)
        if self.rope:
            angles = torch.linspace(0, 50, self.keys * self.D // 2, device=device).view(self.keys, -1)
            rope, old = ha.Rope(angles.cos(), angles.sin()), self.keys - queries
            ha.append_kvcache(cache, k[:, :, :old], v[:, :, :old], table, nothing, rope=rope)
            ha.append_kvcache(cache, k[:, :, old:], v[:, :, old:], table, nothing + old, rope=rope)
            k = ha.reference.apply_rope(k, rope.cos, rope.sin).float()
        else:
            ha.append_kvcache(cache, k, v, table, nothing)
        out = ha.attention_kvcache(q, cache, table, seqlens, num_splits=self.splits, **options)
        for b, length in enumerate(lengths):
            one = (q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length])
            if length:
                model, _ = ha.reference.fp8_attention_kvcache(*one, recipe=self.recipe, **constants, **options)
                check(out[b : b + 1], model, ha.reference.attention(*one, **options), options.get("softcap"))
            elif out[b].any():
                raise ValueError("a sequence without keys does not give 0")


@dataclass(frozen=True)
class Packed:
    """A small call of `attention_varlen`: ragged sequences, without queries, without keys, and tokens of none."""

    D: int  # head dim
    recipe: ha.Recipe = ha.BALANCED  # and options, what `helion_attn.attention_varlen` takes
    options: dict[str, Any] = field(default_factory=dict)
    keys: int = N  # of the longest sequence

    def __call__(self, device: str) -> None:
        """The call, and its check."""
        lengths = [(M, self.keys), (0, 5), (3, 0), (20, 140)]
        q, k, v = make_qkv("biased_v", B, H, H_KV, 2 * M, self.keys + N, self.D, device=device)
        given = [x[0].transpose(0, 1) for x in (q, k, v)]
        given += [
            torch.tensor([0, *sizes], device=device).cumsum(0).to(torch.int32) for sizes in zip(*lengths, strict=True)
        ]
        out, tokens = ha.attention_varlen(*given, recipe=self.recipe, **self.options), sum(m for m, _ in lengths)
        oracle, _ = ha.reference.attention_varlen(*given, **self.options)
        model, _ = ha.reference.fp8_attention_varlen(*given, recipe=self.recipe, **self.options)
        check(out[:tokens], model[:tokens], oracle[:tokens], self.options.get("softcap"))
        if not out[tokens:].isnan().all():
            raise ValueError("a token of no sequence does not give NaN")


def pack(device: str) -> None:
    """e4m3 tensors with a descale a row of Q, a head of K and a channel of V."""
    q, k, v = (x.to(torch.float8_e4m3fn) for x in make_qkv("biased_v", B, H, H_KV, M, N, 72, device=device))
    numbers = torch.linspace(0.5, 1.5, B * H * M, device=device)
    q_descale, k_descale, v_descale = (
        numbers[: math.prod(x)].view(x) for x in (q.shape[:3], k.shape[:2], (B, H_KV, 72))
    )
    packed = ha.pack(q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    out = ha.attention_quantized(packed, causal=True)
    scales = (q_descale.unsqueeze(3), k_descale[:, :, None, None], v_descale.unsqueeze(2))
    exact = [x.double() * scale for x, scale in zip((q, k, v), scales, strict=True)]
    error = relative_error(out, ha.reference.attention(*exact, causal=True))
    # P alone is rounded, by at most 2**-4 of each, and averaged over keys.
    if not error <= 2.0**-5:
        raise ValueError(f"error {error:.4g}")


def stages(device: str) -> None:
    """The stage functions."""
    x = make_qkv("randn", B, H, H, M, M, 64, device=device)[0]
    angles = torch.linspace(0, 50, M * 32, device=device).view(M, 32)
    tables = (angles.cos(), angles.sin())
    rotated, transformed = ha.reference.apply_rope(x, *tables), ha.reference.hadamard(x)
    check(ha.apply_rope(x, ha.Rope(*tables)), rotated.bfloat16(), rotated)
    check(ha.hadamard(x), transformed.bfloat16(), transformed)
    reflected = ha.reference.reflect(x)
    check(ha.reflect(x), reflected.bfloat16(), reflected)


def bits_of_masks(device: str) -> None:
    """Masks by scores, whose rows begin at multiples of 16 bytes, of 4, and at any."""
    for keys in (384, 300, 301):
        dense = torch.arange(2 * M * keys, device=device).view(2, 1, M, keys) % 7 > 2
        dense[0, :, :128, :128] = True
        if not torch.equal(ha.BlockMask.from_dense(dense).to_dense(), dense):
            raise ValueError(f"the mask of {keys} keys is another")


def top_blocks(device: str) -> None:
    """Blocks that the means of ragged Q and K choose: all of them, whose lists are made as others are."""
    q, k = (x.bfloat16() for x in torch.randn(2, 1, 2, M, 40, device=device))
    if not bool(ha.masks.top_blocks(q, k, keep=1.0).to_dense().all()):
        raise ValueError("a block is missing")


def top_pages(device: str) -> None:
    """Pages that means choose for two groups of heads: all of a sequence, of three and of none."""
    cache = ha.paged_kv_cache(8, H_KV, 40, device=device)
    table = torch.arange(6, dtype=torch.int32, device=device).flip(0).view(2, 3)
    lengths = torch.tensor([N, 0], dtype=torch.int32, device=device)
    q, means = torch.randn(2, H, 3, 40, device=device).bfloat16(), ha.pages.empty_means(cache).normal_()
    few, keys = ha.pages.top(q, means, cache, table, lengths, pages=3)
    if not torch.equal(few[0], table[0].expand(H_KV, 3)) or keys.tolist() != [[N] * H_KV, [0] * H_KV]:
        raise ValueError("a page is missing")


#: e4m3, blocks of K, nothing mixed, smoothed or equalised.
PLAIN = replace(ha.FAST, equalise=False, reflect=False, smooth_k=False)

MASKED: dict[str, Any] = {"window": (70, 9), "softcap": 5.0}

#: Every kernel, and every branch that adds loads or stores to one. A case is called with the device.
CASES: dict[str, Callable[[str], None]] = {
    **{f"full_d{D}": Attend(D, D) for D in (64, 128, 256)},
    **{f"causal_d{D}": Attend(D, D, options={"causal": True}) for D in (64, 128, 256)},
    **{f"masked_d{D}": Attend(D, D, ha.ACCURATE, options=MASKED, has_sinks=True) for D in (64, 128, 256)},
    **{f"listed_d{D}": Attend(D, D, listed=True) for D in (64, 128, 256)},
    "listed_masked": Attend(128, 128, ha.ACCURATE, options=MASKED, has_sinks=True, listed=True),
    "listed_hybrid": Attend(128, 128, ha.HYBRID, listed=True),
    "tail": Attend(128, 128, options={"causal": True}, tail=True),
    "tail_hybrid": Attend(64, 64, ha.HYBRID, tail=True),
    "split_d128": Attend(128, 128, options={"causal": True, "layout": "bshd"}, splits=2),
    "split_masked_d64": Attend(64, 64, ha.ACCURATE, options=MASKED, has_sinks=True, splits=9),
    "fast_d128": Attend(128, 128, ha.FAST),
    "blocks_of_q": Attend(256, 256, replace(PLAIN, q_scales="block")),
    "padded_head_dim": Attend(40, 40, options={"layout": "bshd", "causal": True}),
    "odd_strides": Attend(72, 72, odd_strides=True),
    "fp32_hadamard": Attend(64, 64, ha.ACCURATE, torch.float32),
    "rope": Attend(64, 64, rope=True),
    "norms": Attend(80, 80, rope=True, normed=True),
    "hybrid": Attend(128, 128, ha.HYBRID),
    "hybrid_d256": Attend(256, 256, ha.HYBRID),
    # A row whose sum passes MAX_ROW_SUM is walked again.
    "hybrid_walked_again": Attend(128, 128, ha.HYBRID, rise=300.0),
    "bf16_d256": Attend(256, 256, ha.BF16, options={"causal": True}),
    "bf16_masked": Attend(40, 40, ha.BF16, options=MASKED, has_sinks=True),
    "many_keys": Attend(32, 32, keys=RECENTRED_KEYS + 70),
    "bits_of_masks": bits_of_masks,
    "top_blocks": top_blocks,
    "top_pages": top_pages,
    "packed": Packed(128, options={"causal": True}),
    "packed_masked": Packed(64, ha.ACCURATE, options=MASKED),
    "packed_fast": Packed(256, ha.FAST),
    "packed_hybrid": Packed(128, ha.HYBRID),
    "packed_many_keys": Packed(32, keys=RECENTRED_KEYS + 70),
    "large_d320": Attend(320, 320, options={"causal": True}),
    "large_d512_masked": Attend(512, 512, ha.ACCURATE, options=MASKED, has_sinks=True),
    "d192_128": Attend(192, 128),
    "d192_128_causal": Attend(192, 128, options={"causal": True}),
    **{f"kv_cache_d{D}_{splits}_splits": Decode(D, splits) for D in (64, 128) for splits in (1, 3)},
    "kv_cache_d256": Decode(256, 2, keys=140),
    "kv_cache_masked": Decode(128, 3, {"window": (140, -1), "softcap": 5.0}, has_sinks=True),
    "kv_cache_rope": Decode(80, 1, rope=True),
    "kv_cache_prefill_d64": Decode(64, 1, queries=40),
    "kv_cache_prefill_masked": Decode(128, 2, {"window": (140, -1), "softcap": 5.0}, has_sinks=True, queries=40),
    "kv_cache_prefill_d256": Decode(256, 1, queries=70),
    "kv_cache_d512": Decode(512, 2, keys=140),
    "kv_cache_prefill_d512": Decode(512, 1, keys=140, queries=70),
    "kv_cache_int8": Decode(128, 2, has_sinks=True, rope=True, recipe=ha.BALANCED, has_constants=True),
    "kv_cache_int8_prefill": Decode(128, 2, has_sinks=True, queries=40, recipe=ha.BALANCED, has_constants=True),
    "kv_cache_int8_masked": Decode(
        128, 1, {"window": (140, -1), "softcap": 5.0}, queries=40, recipe=ha.BALANCED, has_constants=True
    ),
    "kv_cache_int8_d320": Decode(320, 2, keys=140, recipe=ha.BALANCED, has_constants=True),
    "pack": pack,
    "stages": stages,
}

#: Two warpgroups pass named barriers, at which one of them only arrives; then all exchange numbers, behind barriers of
#: all.
EXCHANGE = """
extern "C" __global__ void NAME(int* out) {
    __shared__ int numbers[256];
    int thread = threadIdx.x, second = thread / 128;
    BARRIERS
    __syncthreads();
    for (int i = 0; i < 4; ++i) {
        numbers[thread] = thread + i;
        ALL_WAIT
        out[256 * blockIdx.x + thread] = numbers[(thread + 128) % 256];
        __syncthreads();
    }
}
"""

#: One warpgroup waits, once.
ARRIVES = 'if (second) asm volatile("bar.arrive 1, 256;"); else asm volatile("bar.sync 1, 256;");'

#: The barriers of `compiler/passes/pingpong.py` over 32 key blocks, in which warps take different times.
TURNS = """
    int mine = 1 + second, other = 2 - second;
    if (second) asm volatile("bar.arrive 3, 256; bar.sync 2, 256;" ::: "memory");
    for (int block = 0; block < 32; ++block) {
        long long begin = clock64(), cycles = 20 * ((thread / 32 * 37 + block * 11 + blockIdx.x * 5) % 64);
        while (clock64() - begin < cycles);
        if (!second) asm volatile("bar.sync 3, 256;" ::: "memory");
        asm volatile("bar.arrive %0, 256;" :: "r"(other) : "memory");
        while (clock64() - begin < 3 * cycles);
        if (second) asm volatile("bar.arrive 3, 256;" ::: "memory");
        asm volatile("bar.sync %0, 256;" :: "r"(mine) : "memory");
    }
    if (!second) asm volatile("bar.arrive 2, 256; bar.sync 3, 256;" ::: "memory");
"""


def exchange(device: str, name: str, barriers: str, all_wait: str, programs: int = 1) -> None:
    """`EXCHANGE`, compiled by PyTorch."""
    code = EXCHANGE
    for word, text in {"NAME": name, "BARRIERS": barriers, "ALL_WAIT": all_wait}.items():
        code = code.replace(word, text)
    kernel = torch.cuda._compile_kernel(code, name)
    out = torch.empty(programs, 256, dtype=torch.int32, device=device)
    kernel((programs, 1, 1), (256, 1, 1), (out,))
    # Waits for the kernel: of one that still runs at the end of the process nothing is reported.
    found = out.cpu()
    if all_wait:
        assert found.equal(((torch.arange(256, dtype=torch.int32) + 128) % 256 + 3).expand(programs, -1))


#: What racecheck must find something in, and what shows whether it can be believed about ping-pong.
RACES, UNEVEN_PINGPONG = "races", "pingpong"

#: What shows how far racecheck follows barriers.
CONTROLS: dict[str, Callable[[str], None]] = {
    "arrives": functools.partial(exchange, name="arrives", barriers=ARRIVES, all_wait="__syncthreads();"),
    UNEVEN_PINGPONG: functools.partial(
        exchange, name=UNEVEN_PINGPONG, barriers=TURNS, all_wait="__syncthreads();", programs=528
    ),
    RACES: functools.partial(exchange, name=RACES, barriers=ARRIVES, all_wait=""),
}


def without_pingpong(text: str) -> Outcome:
    """In the place of the pass that makes ping-pong."""
    return Outcome(pingpong.NAME, False, "scripts/sanitize.py left them out", text)


@dataclass(frozen=True)
class Finding:
    """What the sanitizer says, and of which kernel."""

    message: str
    kernel: str

    @property
    def in_pytorch(self) -> bool:
        """It is a race inside of a kernel of PyTorch's own."""
        return "Race reported" in self.message and PYTORCH in self.message


@dataclass(frozen=True)
class Result:
    """Of one tool on one case. `count` is the sanitizer's own, None if it printed no summary; no log of a clean run."""

    tool: str
    case: str
    pingpong: bool
    seconds: float
    returncode: int
    count: int | None
    findings: list[Finding]
    log_tail: str

    @property
    def has_reported_pingpong(self) -> bool:
        """It found a race in the ping-pong that has none."""
        return self.case == UNEVEN_PINGPONG and any(
            f" at {UNEVEN_PINGPONG}+" in finding.message for finding in self.findings
        )

    @property
    def clean(self) -> bool:
        """It ran to its end, and nothing was found but in PyTorch, or where something must or may be found."""
        if self.case == RACES:
            return self.returncode == FOUND and any(RACES in finding.message for finding in self.findings)
        ended = self.returncode == (FOUND if self.count else 0) and self.count == len(self.findings)
        return ended and (self.has_reported_pingpong or all(finding.in_pytorch for finding in self.findings))


def parse_log(log: str) -> tuple[int | None, list[Finding]]:
    """The number of errors or hazards in the summary, None without one, and what was printed of them."""
    count = None
    findings: list[Finding] = []
    for line in log.splitlines():
        if not line.startswith("========="):
            continue
        text = line.removeprefix("=========")
        if summary := re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text):
            count = (count or 0) + int(summary.group(1))
        elif text.startswith("     ") and (at := re.match(r"\s+at (?:0x[0-9a-f]+ in )?([\w.$]+)", text)):
            if findings and not findings[-1].kernel:
                findings[-1] = Finding(findings[-1].message, at.group(1))
        elif re.match(r" \S", text) and not text[1:].startswith(BANNERS):
            findings.append(Finding(text.strip(), ""))
    return count, findings


def sanitize(sanitizer: str, tool: str, name: str, pingpong: bool = True) -> Result:
    """One case in a process of its own: after a fault its CUDA context is of no use."""
    # The compiler's processes are left alone.
    options = ["--tool", tool, "--target-processes", "application-only", "--error-exitcode", str(FOUND)]
    command = [sanitizer, *options, sys.executable, __file__, "--case", name]
    command += [] if pingpong else ["--without-pingpong"]
    # PyTorch hands out parts of large allocations, inside which memcheck sees no overrun. This turns that off.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        # Triton's cache does not know what was left out.
        environment |= {} if pingpong else {"TRITON_CACHE_DIR": folder}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    seconds = time.perf_counter() - begin
    result = Result(
        tool, name, pingpong, round(seconds, 1), done.returncode, *parse_log(done.stdout), done.stdout[-4000:]
    )
    return replace(result, log_tail="") if result.clean and not result.findings else result


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="write the results here, as JSON")
    what.add_argument("--case", choices=[*CASES, *CONTROLS], help="run this case, without the sanitizer")
    parser.add_argument("--without-pingpong", action="store_true", help="compile a case's kernels without ping-pong")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program; by default as on PATH")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time, which share the GPU; 1 by default")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """See the module's docstring."""
    arguments = parse_arguments(argv)
    if arguments.case:
        with contextlib.ExitStack() as stack:
            if arguments.without_pingpong:
                stack.enter_context(mock.patch.object(pingpong, "with_pingpong", without_pingpong))
            (CASES | CONTROLS)[arguments.case]("cuda" if torch.cuda.is_available() else "cpu")
        return 0
    sanitizer = shutil.which(arguments.sanitizer)
    if sanitizer is None:
        print(f"no program {arguments.sanitizer!r}; it comes with the CUDA toolkit: give its path by --sanitizer")
        return 2
    meta = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "sanitizer": subprocess.run(
            [sanitizer, "--version"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    results: list[Result] = []

    def run(tools: Iterable[str], names: Iterable[str], pingpong: bool = True) -> list[Result]:
        """The results of cases, which are printed and written as they come: an interrupted run keeps what it found."""
        begin = len(results)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for result in pool.map(functools.partial(sanitize, sanitizer, pingpong=pingpong), tools, names):
                results.append(result)
                rows = [asdict(result) for result in results]
                arguments.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
                found = "failed" if result.count is None or (result.returncode and not result.count) else result.count
                note = "" if pingpong else "  without ping-pong"
                print(f"{result.tool:10} {result.case:22} {result.seconds:8.1f} {found:>6}{note}", flush=True)
                for finding in result.findings:
                    print(f"    {finding.message} in {finding.kernel or 'an unnamed kernel'}")
        return results[begin:]

    print(f"{'tool':10} {'case':22} {'seconds':>8} {'found':>6}")
    runs = *itertools.product(TOOLS, CASES), *itertools.product(["racecheck"], CONTROLS)
    first = run(*zip(*runs, strict=True))
    unclean = [(result.tool, result.case) for result in first if not result.clean]
    if any(result.has_reported_pingpong for result in first):
        reported = [case for tool, case in unclean if tool == "racecheck" and case in CASES]
        again = run(itertools.repeat("racecheck"), reported, pingpong=False)
        excused = [(result.tool, result.case) for result in again if result.clean]
        unclean = [pair for pair in unclean if pair not in excused]
    print(f"{len(first) - len(unclean)} of {len(first)} runs are clean")
    return 1 if unclean else 0


if __name__ == "__main__":
    sys.exit(main())
