"""Turns benchmarks/results/*.json into tables, plots, and the results blocks of the README.

    python benchmarks/report.py                     # tables, plots, README, and what holds
    python benchmarks/report.py --readme none       # leave the README alone

A block is what stands between `<!-- results:NAME -->` and `<!-- /results:NAME -->`, NAME a key of `BLOCKS`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from tables import (
    BF16_PEERS,
    FP8_PEERS,
    Loaded,
    Row,
    Table,
    accuracy_tables,
    by_impl,
    e2e_tables,
    fastest,
    load,
    long_context_tables,
    number,
    preprocess_tables,
    rows_of,
    speed_tables,
)

# --- what must hold -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One promise, and what was measured of it (None: nothing)."""

    name: str
    value: float | None
    bound: float
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """PASS, FAIL, or that there is nothing to judge."""
        if self.value is None:
            return "not measured"
        # Comparisons with NaN are false, hence a NaN fails.
        return "PASS" if (self.value >= self.bound if self.at_least else self.value <= self.bound) else "FAIL"


SPEED_BOUNDS = {64: 1.0, 128: 0.93, 256: 0.80}


def checks(loaded: Loaded) -> list[Check]:
    """Every figure that this benchmark is to show. A run on the CPU shows none of them."""
    loaded = {suite: content for suite, content in loaded.items() if content["meta"].get("gpu")}
    found: list[Check] = []
    for D in SPEED_BOUNDS:
        for causal in (False, True):
            rows = rows_of(loaded, "accuracy", impl="helion_attn", D=D, causal=causal, input="randn", M=4096, N=4096)
            name = f"kernel error, randn, S 4096, D {D}, {_mask(causal)}"
            found.append(Check(name, by_impl(rows, "error_kernel").get("helion_attn"), 0.026))
    rows = rows_of(loaded, "accuracy", impl="helion_attn", D=128, input="biased_v", N=131072)
    found.append(
        Check(
            "kernel error, positive V, 131072 keys, D 128",
            by_impl(rows, "error_kernel").get("helion_attn"),
            0.003,
        )
    )
    for causal, lengths in ((False, (4096, 16384)), (True, (4096,))):
        for S in lengths:
            for D, bound in SPEED_BOUNDS.items():
                ms = by_impl(rows_of(loaded, "attention", stage="kernel", D=D, N=S, causal=causal), "ms")
                # The bound is on the faster of both: with one missing there is nothing to judge.
                peer = fastest(ms, FP8_PEERS) if all(impl in ms for impl in FP8_PEERS) else None
                ratio = peer / ms["helion_attn"] if peer is not None and "helion_attn" in ms else None
                found.append(
                    Check(f"speed / faster FP8 peer, S {S}, D {D}, {_mask(causal)}", ratio, bound, at_least=True)
                )
    for causal in (False, True):
        for S in (4096, 8192, 16384):
            for D in SPEED_BOUNDS:
                cell = rows_of(loaded, "attention", D=D, N=S, causal=causal)
                ours = by_impl((row for row in cell if row["stage"] == "e2e"), "ms").get("helion_attn")
                best = fastest(by_impl((row for row in cell if row["stage"] == "kernel"), "ms"), BF16_PEERS)
                speedup = best / ours if best is not None and ours is not None else None
                found.append(
                    Check(
                        f"end to end / fastest bf16, S {S}, D {D}, {_mask(causal)}",
                        speedup,
                        1.0,
                        at_least=True,
                    )
                )
    for row in rows_of(loaded, "preprocess", impl="helion_attn", stage="preprocess"):
        found.append(Check(f"preprocessing / copy, S {row['N']}, D {row['D']}", row["copy_ratio"], 2.5))
    for row in rows_of(loaded, "preprocess", impl="helion_attn", stage="e2e"):
        ratio = row["peak_extra_bytes"] / row["packed_bytes"]
        # 5%: partial sums of the preprocessing, and the allocator's rounding.
        found.append(Check(f"peak extra memory / packed copies, S {row['N']}, D {row['D']}", ratio, 1.05))
    return found


def _mask(causal: bool) -> str:
    return "causal" if causal else "full"


def check_table(loaded: Loaded) -> list[Table]:
    """`checks` as a table."""
    body = [
        [c.name, number(c.value, ".4g"), f"{'>=' if c.at_least else '<='} {c.bound:g}", c.verdict]
        for c in checks(loaded)
    ]
    return [Table("What must hold", ["figure", "measured", "bound", ""], body)]


# --- README ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """What one results block of the README shows."""

    suite: str
    plot: str | None
    alt: str
    tables: Callable[[Loaded], list[Table]]


BLOCKS = {
    "speed": Block("attention", "speed.png", "TFLOP/s by sequence length", speed_tables),
    "e2e": Block("attention", "e2e.png", "Milliseconds from bf16 to bf16", e2e_tables),
    "accuracy": Block("accuracy", "accuracy.png", "Relative error by kind of input", accuracy_tables),
    "long_context": Block("accuracy", "long_context.png", "Relative error by number of keys", long_context_tables),
    "preprocess": Block("preprocess", "preprocess.png", "Time of quantize and of a copy", preprocess_tables),
    "checks": Block("attention", None, "", check_table),
}


def caption(meta: Row) -> str:
    """Where the figures come from, in a line."""
    names = {"driver": "driver", "cuda": "CUDA", "torch": "PyTorch", "triton": "Triton", "helion": "Helion"}
    names |= {"cudnn": "cuDNN", "fa3": "fa3-fwd"}
    versions = ", ".join(f"{label} {meta[name]}" for name, label in names.items() if meta.get(name))
    return f"{meta.get('gpu') or 'CPU'}, {versions}; {str(meta.get('date', ''))[:10]}, `{meta.get('command')}`"


def block_markdown(name: str, loaded: Loaded, image_folder: str) -> str | None:
    """The content of one block, or None where nothing was measured."""
    block = BLOCKS[name]
    tables = block.tables(loaded) if block.suite in loaded else []
    if not tables:
        return None
    parts = [f"![{block.alt}]({image_folder}/{block.plot})"] if block.plot else []
    parts += [table.markdown() for table in tables]
    parts.append(f"<sub>{caption(loaded[block.suite]['meta'])}</sub>")
    return "\n\n".join(parts)


def rewrite_readme(readme: Path, loaded: Loaded, folder: Path) -> list[str]:
    """Fills the README's blocks; returns what was done with each."""
    text, done = readme.read_text(), []
    images = Path(os.path.relpath(folder.resolve(), readme.resolve().parent)).as_posix()
    for name in BLOCKS:
        opening, closing = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
        content = block_markdown(name, loaded, images)
        if opening not in text or closing not in text:
            done.append(f"{name}: no block in {readme}")
        elif content is None:
            done.append(f"{name}: nothing measured, left as it was")
        else:
            pattern = re.escape(opening) + r".*?" + re.escape(closing)
            replacement = f"{opening}\n\n{content}\n\n{closing}"
            text = re.sub(pattern, lambda _, new=replacement: new, text, flags=re.DOTALL)  # type: ignore[misc]
            done.append(f"{name}: written")
    readme.write_text(text)
    return done


# --- command line ---------------------------------------------------------------------------------


def print_tables(loaded: Loaded, console: Console, failing_only: bool = False) -> None:
    """Every table that has rows, every failure, and what holds (`failing_only`: what does not)."""
    for name, block in BLOCKS.items():
        if name != "checks":
            for table in block.tables(loaded):
                console.print(table.rich())
    rows = [row for content in loaded.values() for row in content["rows"]]
    remarks = Counter(
        (row["impl"], row["stage"], row["D"], row.get("error_message") or row.get("note")) for row in rows
    )
    for (impl, stage, D, remark), count in remarks.items():
        if remark is not None:
            line = f"{impl}, {stage}, D {D}, {count} cells: {remark}"
            console.print(line, style="yellow", markup=False, highlight=False)
    found = [check for check in checks(loaded) if check.verdict != "not measured"]
    for check in found:
        if failing_only and check.verdict == "PASS":
            continue
        style = "green" if check.verdict == "PASS" else "red"
        bound = f"{'>=' if check.at_least else '<='} {check.bound:g}"
        console.print(f"{check.verdict} {check.name}: {check.value:.4g} ({bound})", style=style, highlight=False)
    passed = sum(check.verdict == "PASS" for check in found)
    console.print(f"{passed} of {len(found)} measured figures hold", highlight=False)


def draw_plots(loaded: Loaded, folder: Path) -> None:
    """The plots, where matplotlib is installed."""
    try:
        from plots import draw_all
    except ModuleNotFoundError as error:
        print(f"no plots: package {error.name} is not installed")
        return
    draw_all(loaded, folder)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder of the result files")
    parser.add_argument("--readme", default="README.md", help='the file whose blocks are rewritten, or "none"')
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a measured figure fails its bound")
    args = parser.parse_args()

    console = Console(width=None if sys.stdout.isatty() else 160)
    loaded = load(args.results)
    if not loaded:
        parser.error(f"no result files in {args.results}")
    print_tables(loaded, console)
    draw_plots(loaded, args.results)
    if args.readme != "none" and not Path(args.readme).exists():
        console.print(f"no {args.readme} to rewrite")
    elif args.readme != "none":
        for line in rewrite_readme(Path(args.readme), loaded, args.results):
            console.print(line, highlight=False)
    if args.strict and any(check.verdict == "FAIL" for check in checks(loaded)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
