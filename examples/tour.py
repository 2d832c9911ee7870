"""A tour of helion_attn: quantise, compare errors by preset, ask what a call launches, check tensors, plot.

Runs on a Hopper GPU or, on small tensors in Helion's interpreter, on a CPU in seconds:

    python examples/tour.py [--device cuda] [--length 4096] [--plot errors.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import helion_attn as ha
from helion_attn.check import Check
from helion_attn.testing import make_qkv, relative_error
from helion_attn.types import RecipeName

#: Of `make_qkv`, by what is hard about them.
INPUTS = {"randn": "N(0, 1)", "outlier": "outliers", "k_channels": "K has biased channels"}

PRESETS: tuple[RecipeName, ...] = ("fast", "balanced", "accurate", "hybrid", "bf16")

#: No preset is further from fp64 on any of these inputs; a wrong output is off by 1 or so.
ERROR_BOUND = 0.15

HEADS, D = 1, 64

console = Console()


def say(text: str) -> None:
    """Prints it as it is."""
    console.print(text, markup=False, highlight=False)


def quantise(device: str, length: int) -> float:
    """Step 1: pack once, attend twice. Returns how far that is from one call of `attention`."""
    q, k, v = make_qkv("randn", 1, HEADS, HEADS, length, length, D, device=device)
    qkv = ha.quantize(q, k, v)
    say(f"1. Quantised: q8 {tuple(qkv.q8.shape)} {qkv.q8.dtype}, v8 {tuple(qkv.v8.shape)} {qkv.v8.dtype}")
    full, causal = ha.attention_quantized(qkv), ha.attention_quantized(qkv, causal=True)
    assert isinstance(full, torch.Tensor)
    assert isinstance(causal, torch.Tensor)
    together = ha.attention(q, k, v, causal=True)
    assert isinstance(together, torch.Tensor)
    return max(relative_error(causal, together), relative_error(full[:, :, -1:], causal[:, :, -1:]))


def errors(device: str, length: int) -> dict[str, dict[str, float]]:
    """Step 2: the error against fp64 by input and preset."""
    found: dict[str, dict[str, float]] = {}
    for kind in INPUTS:
        q, k, v = make_qkv(kind, 1, HEADS, HEADS, length, length, D, device=device)
        exact = ha.reference.attention(q, k, v)
        assert isinstance(exact, torch.Tensor)
        outs = {preset: ha.attention(q, k, v, recipe=preset) for preset in PRESETS}
        found[kind] = {name: relative_error(out, exact) for name, out in outs.items() if isinstance(out, torch.Tensor)}
    return found


def show(found: dict[str, dict[str, float]]) -> None:
    """Prints the errors as a table."""
    table = Table("input", *(preset.upper() for preset in PRESETS), title="2. Errors by preset")
    for kind, by_preset in found.items():
        table.add_row(INPUTS[kind], *(f"{by_preset[preset]:.4f}" for preset in PRESETS))
    console.print(table)


def explain_and_check(device: str, length: int) -> Check:
    """Steps 3 and 4: what a call launches, and what makes tensors hard."""
    q, k, v = make_qkv("k_channels", 1, HEADS, HEADS, length, length, D, device=device)
    say(f"3. What a call launches:\n{ha.explain(q, k, v, causal=True)}")
    found = ha.check(q, k, v, recipe="fast")
    say(f"4. What K's biased channels cost:\n{found}")
    return found


def plot(found: dict[str, dict[str, float]], path: Path) -> None:
    """Step 5: bars of the errors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
    for i, preset in enumerate(PRESETS):
        at = [x + (i - 2) * 0.16 for x in range(len(found))]
        ax.bar(at, [by_preset[preset] for by_preset in found.values()], 0.15, label=preset.upper())
    ax.set_xticks(range(len(found)), [INPUTS[kind] for kind in found])
    ax.set_yscale("log")
    ax.set_ylabel("error against fp64")
    ax.legend(ncols=len(PRESETS), fontsize=8)
    figure.savefig(path)
    plt.close(figure)
    say(f"5. Plotted: {path}")


def main(argv: list[str] | None = None) -> int:
    """The tour; 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if ha.is_supported("cuda") else "cpu")
    parser.add_argument("--length", type=int, help="queries and keys (default 4096, on the CPU 128)")
    parser.add_argument("--plot", type=Path, help="write a plot of the errors there; needs matplotlib")
    args = parser.parse_args(argv)
    length = args.length or (128 if args.device == "cpu" else 4096)
    apart = quantise(args.device, length)
    found = errors(args.device, length)
    show(found)
    explain_and_check(args.device, length)
    if args.plot:
        plot(found, args.plot)
    worst = max(apart, *(error for by_preset in found.values() for error in by_preset.values()))
    good = worst <= ERROR_BOUND  # not so for NaN
    say(f"{'ok' if good else 'WRONG'}: no result is further off than {worst:.3f}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
