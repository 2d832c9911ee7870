"""Run every kernel under NVIDIA's compute-sanitizer: memcheck, then racecheck, a process for each case.

    python scripts/sanitize.py --out sanitize.json                 needs a Hopper GPU, and compute-sanitizer on PATH
    python scripts/sanitize.py --out sanitize.json --sanitizer /usr/local/cuda/bin/compute-sanitizer
    python scripts/sanitize.py --case causal_d128                  one case, without the sanitizer; on a CPU too

Prints a table, writes it as JSON, and returns 1 if a case has a finding, or did not run to its end: a log without the
sanitizer's summary is no clean log. Cases also check their result against the rounding model's error.

memcheck sees loads and stores outside of allocations, and misaligned ones; racecheck sees hazards in shared memory.
What docs/trust.md says of their limits holds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import helion_attn as ha
from helion_attn.configs import packing
from helion_attn.testing import error_budget, make_qkv, relative_error

TOOLS = ("memcheck", "racecheck")

#: Lines of the log that are about the run, not about a kernel.
BANNERS = ("COMPUTE-SANITIZER", "Target application returned an error", "Error: process", "Error: Target application")


@dataclass(frozen=True)
class Case:
    """A small call; M and N are ragged, and more than a block each.

    Attributes:
        D: head dim; D_v, V's.
        recipe: and the rest, what `helion_attn.attention` takes.
        odd_strides: rows an odd number of elements apart: no wide loads.
        rope: rotate, by tables of random angles.
    """

    D: int
    D_v: int
    recipe: ha.Recipe = ha.BALANCED
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    has_sinks: bool = False
    odd_strides: bool = False
    rope: bool = False


MASKED: dict[str, Any] = {"window": (70, 9), "softcap": 5.0}

#: Every kernel, and every branch that adds loads or stores to one.
CASES = {
    **{f"full_d{D}": Case(D, D) for D in (64, 128, 256)},
    **{f"causal_d{D}": Case(D, D, options={"causal": True}) for D in (64, 128, 256)},
    **{f"masked_d{D}": Case(D, D, ha.ACCURATE, options=MASKED, has_sinks=True) for D in (64, 128, 256)},
    "fast_d128": Case(128, 128, ha.FAST),
    "tensor_scales": Case(64, 64, ha.Recipe(q_scales="tensor", k_scales="tensor", v_scales="tensor")),
    "blocks_of_q": Case(256, 256, ha.Recipe(q_scales="block", k_scales="block")),
    "padded_head_dim": Case(40, 40, options={"layout": "bshd", "causal": True}),
    "odd_strides": Case(72, 72, odd_strides=True),
    "fp32_hadamard": Case(64, 64, ha.ACCURATE, torch.float32),
    "rope": Case(64, 64, rope=True),
    "hybrid": Case(128, 128, ha.HYBRID),
    "bf16_masked": Case(40, 40, ha.BF16, options=MASKED, has_sinks=True),
    "large_d320": Case(320, 320, options={"causal": True}),
    "large_d512_masked": Case(512, 512, ha.ACCURATE, options=MASKED, has_sinks=True),
    "d192_128": Case(192, 128),
}

B, H, H_KV, M, N = 1, 4, 2, 150, 300


def run_case(case: Case, device: str) -> None:
    """The call, and its check."""
    q, k, v = make_qkv("biased_v", B, H, H_KV, M, N, case.D, case.dtype, device, D_v=case.D_v)
    if case.odd_strides:
        q, k, v = (torch.nn.functional.pad(x, (0, 1 - x.size(3) % 2))[..., : x.size(3)] for x in (q, k, v))
    angles = torch.linspace(0, 50, N * case.D // 2, device=device).view(N, -1)
    options = case.options | {
        "recipe": case.recipe,
        "rope": ha.Rope(angles.cos(), angles.sin()) if case.rope else None,
        "sinks": torch.linspace(-1, 1, H, device=device) if case.has_sinks else None,
    }
    given = [x.transpose(1, 2) for x in (q, k, v)] if options.get("layout") == "bshd" else [q, k, v]
    out = ha.attention(*given, **options)
    if not case.rope:
        exact = {name: value for name, value in options.items() if name not in ("recipe", "rope")}
        oracle = ha.reference.attention(*given, **exact)
        block_n = packing(case.D, case.D_v, case.recipe.bits).bn
        model = ha.reference.fp8_attention(*given, **options, block_n=block_n)
        budget = error_budget(relative_error(model, oracle), out.dtype, device=device, softcap=options.get("softcap"))
        error = relative_error(out, oracle)
        if not error <= budget:
            raise ValueError(f"error {error:.4g}, budget {budget:.4g}")
    elif not out.isfinite().all():
        raise ValueError("the output is not finite")


@dataclass(frozen=True)
class Finding:
    """What the sanitizer says, and of which kernel."""

    message: str
    kernel: str


@dataclass(frozen=True)
class Result:
    """Of one tool on one case. `count` is the sanitizer's own; None if it printed no summary."""

    tool: str
    case: str
    seconds: float
    returncode: int
    count: int | None
    findings: list[Finding]
    log_tail: str

    @property
    def clean(self) -> bool:
        """It ran to its end, and nothing was found."""
        return self.returncode == 0 and self.count == 0 and not self.findings


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


def sanitize(sanitizer: str, tool: str, name: str) -> Result:
    """One case in a process of its own: after a fault its CUDA context is of no use."""
    # The compiler's processes are left alone.
    options = ["--tool", tool, "--target-processes", "application-only", "--error-exitcode", "86"]
    command = [sanitizer, *options, sys.executable, __file__, "--case", name]
    # PyTorch hands out parts of large allocations, inside which memcheck sees no overrun. This turns that off.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin = time.perf_counter()
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    seconds = time.perf_counter() - begin
    return Result(tool, name, round(seconds, 1), done.returncode, *parse_log(done.stdout), done.stdout[-4000:])


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="write the results here, as JSON")
    what.add_argument("--case", choices=CASES, help="run this case, without the sanitizer")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program; by default as on PATH")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """See the module's docstring."""
    arguments = parse_arguments(argv)
    if arguments.case:
        run_case(CASES[arguments.case], "cuda" if torch.cuda.is_available() else "cpu")
        return 0
    sanitizer = shutil.which(arguments.sanitizer)
    if sanitizer is None:
        print(f"no program {arguments.sanitizer!r}; it comes with the CUDA toolkit: give its path by --sanitizer")
        return 2
    results = []
    print(f"{'tool':10} {'case':20} {'seconds':>8} {'found':>6}")
    for tool in TOOLS:
        for name in CASES:
            result = sanitize(sanitizer, tool, name)
            results.append(result)
            found = "failed" if result.count is None or (result.returncode and not result.count) else result.count
            print(f"{tool:10} {name:20} {result.seconds:8.1f} {found:>6}", flush=True)
            for finding in result.findings:
                print(f"    {finding.message} in {finding.kernel or 'an unnamed kernel'}")
    meta = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "sanitizer": subprocess.run(
            [sanitizer, "--version"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    rows = [asdict(result) for result in results]
    arguments.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    unclean = sum(not result.clean for result in results)
    print(f"{len(results) - unclean} of {len(results)} runs are clean")
    return 1 if unclean else 0


if __name__ == "__main__":
    sys.exit(main())
