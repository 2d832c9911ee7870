"""`python -m helion_attn`: what is installed, whether a GPU has verified it, what is lost if not, and a self-check.

`python -m helion_attn replay FILE`: a call that `helion_attn.debug(save=...)` wrote, again.
`python -m helion_attn sageattention -- SCRIPT ...`: a script for which `import sageattention` is this package.
`python -m helion_attn compare-video --model ID ...`: a seed in bf16 and by each preset.
`python -m helion_attn vllm-calibrate MODEL --prompt FILE --out FILE`: constants of a server's cache, of a prompt.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

import helion_attn as ha
from helion_attn.compiler.versions import MEASURED_SERIES, VERIFIED_TORCH, known_triton, series
from helion_attn.integrations import compare_video
from helion_attn.integrations.sageattention import run as run_as_sageattention
from helion_attn.integrations.vllm import constants
from helion_attn.types import PRESETS

#: What `--help` prints.
DESCRIPTION = (
    "Print versions, whether a GPU has verified them, and what is lost if not; then run a self-check: attention of "
    "every preset against fp64, in seconds on a CPU. The exit status is 1 if it fails."
)

#: What `replay --help` prints.
REPLAY = (
    "Make a call again that helion_attn.debug(save=FOLDER) wrote, on a GPU or else in the interpreter, and print its "
    "error against fp64 beside the recorded output's. The exit status is 1 if it is bad again."
)

#: What `sageattention --help` prints.
SAGEATTENTION = (
    "Run Python with the arguments behind --, so that `import sageattention` gives helion_attn's functions, there and "
    "in every Python that it starts: sageattention -- main.py --use-sage-attention, or sageattention -- -m PACKAGE."
)

#: The largest error of the self-check: of the presets, FAST has 0.046 on these tensors, and zeros have 1.
MAX_ERROR = 0.07


class SelfCheck(NamedTuple):
    """Attention of one problem, with every preset, against fp64.

    Attributes:
        device: where it ran.
        errors: ||out - ref|| / ||ref||, by preset; the worst of several kinds of attention.
        seconds: what it took, compiling included.
    """

    device: str
    errors: dict[str, float]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every error is small."""
        return all(error < MAX_ERROR for error in self.errors.values())  # NaN is not

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {error:.3f}" for name, error in self.errors.items())
        verdict = "passed" if self.passed else "FAILED"
        return f"{verdict} on {self.device} in {self.seconds:.1f} s, error against fp64, at most {MAX_ERROR}: {errors}"


def self_check(device: str) -> SelfCheck:
    """Dense causal attention, packed sequences and the cache, on a problem that the interpreter does in seconds."""
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 100, 64, generator=generator).to(device, torch.bfloat16)
    k, v = torch.randn(2, 1, 2, 100, 64, generator=generator).to(device, torch.bfloat16)
    reference = ha.reference.attention(q, k, v, causal=True)

    def error(out: torch.Tensor) -> float:
        return ((out.double() - reference).norm() / reference.norm()).item()

    errors = {name: error(ha.attention(q, k, v, causal=True, recipe=preset)) for name, preset in PRESETS.items()}
    cu_seqlens = torch.tensor([0, 100], dtype=torch.int32, device=device)
    q_tokens, k_tokens, v_tokens = (x[0].transpose(0, 1) for x in (q, k, v))
    out = ha.attention_varlen(q_tokens, k_tokens, v_tokens, cu_seqlens, cu_seqlens, causal=True)
    errors["packed sequences"] = error(out.transpose(0, 1).unsqueeze(0))
    cache, pages = ha.paged_kv_cache(1, 2, 64, device=device), cu_seqlens.new_zeros(1, 1)
    ha.append_kvcache(cache, k, v, pages, cu_seqlens[:1])
    errors["KV cache"] = error(ha.attention_kvcache(q, cache, pages, cu_seqlens[1:]))
    return SelfCheck(device, errors, time.perf_counter() - started)


def report() -> list[tuple[str, str]]:
    """Labels and what to say of each."""
    known = known_triton()
    if known is None:
        verified = "no: no GPU has run this Triton"
        lost = "the passes, which costs 3 to 23% more time, and repeated launches, which cost the host less"
    else:
        combined = series(torch.__version__) == VERIFIED_TORCH
        verified = f"{'yes' if combined else f'no, but with torch {VERIFIED_TORCH}'}: {known.verified}"
        lost = known.lost
    return [
        ("helion_attn", ha.__version__),
        ("Python", platform.python_version()),
        ("torch", torch.__version__),
        ("Triton", f"{triton.__version__} (figures are of {MEASURED_SERIES})"),
        ("Helion", importlib.metadata.version("helion")),
        ("supported", str(ha.is_supported())),
        ("verified", verified),
        ("lost", lost),
    ]


def usable_device() -> str:
    """Return "cuda" where there is a GPU that runs the kernels, otherwise "cpu"."""
    return "cuda" if torch.cuda.is_available() and ha.is_supported("cuda") else "cpu"


def main(arguments: Sequence[str] = ()) -> int:
    """Print the report, then the self-check, and return 1 if that fails; or do what a command says."""
    parser = argparse.ArgumentParser("python -m helion_attn", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("replay", help="a saved call", description=REPLAY)
    command.add_argument("file", help="that helion_attn.debug(save=FOLDER) wrote")
    sage = commands.add_parser("sageattention", help="a script that calls SageAttention", description=SAGEATTENTION)
    sage.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- ARGUMENTS", help="of Python")
    video = commands.add_parser("compare-video", help="a seed by each preset", description=compare_video.DESCRIPTION)
    compare_video.add_arguments(video)
    calibrate = commands.add_parser("vllm-calibrate", help="constants of a cache", description=constants.DESCRIPTION)
    constants.add_arguments(calibrate)
    given = parser.parse_args(arguments)
    if given.command == "compare-video":
        return compare_video.compare(video, given)
    if given.command == "vllm-calibrate":
        return constants.calibrate(calibrate, given)
    if given.command == "replay":
        return _replay(command, given.file)
    if given.command == "sageattention":
        run_as_sageattention(given.arguments[given.arguments[:1] == ["--"] :])
    rows = report()
    width = max(len(label) for label, _ in (*rows, ("self-check", "")))
    for label, text in rows:
        print(f"{label:<{width}}  {text}", flush=True)
    done = self_check(usable_device())
    print(f"{'self-check':<{width}}  {done}")
    return 0 if done.passed else 1


def _replay(command: argparse.ArgumentParser, file: str) -> int:
    from helion_attn.report import load, replay

    try:
        found = load(file)
    except ValueError as error:
        command.error(str(error))
    fault = replay(found, usable_device())
    print("it is as it should be here" if fault is None else f"again: {fault}")
    return 0 if fault is None else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
