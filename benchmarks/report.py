"""Turns benchmarks/results/*.json into tables, plots, and the results blocks of the documents.

    python benchmarks/report.py                     # tables, plots, documents, and what holds
    python benchmarks/report.py --documents         # leave the documents alone

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

from accuracy_tables import (
    biased_v_tables,
    cost_tables,
    criterion_tables,
    input_tables,
    long_tables,
    pareto_tables,
    preprocess_recipe_tables,
    real_tables,
    recipe_tables,
    rmse_tables,
    stage_tables,
)
from cells_tables import ablation_tables, cells_tables, roofline_tables
from checks import CHECKED_SUITES, all_checks, other_check_tables, promise_tables, recipe_check_tables
from decode_tables import decode_tables
from host_tables import host_tables
from ladder_tables import ladder_rmse_tables, ladder_tables, large_d_tables
from mask_tables import mask_tables
from rich.console import Console
from split_tables import split_tables
from startup_tables import startup_tables
from tables import Loaded, Row, Table, e2e_tables, load, preprocess_tables, speed_tables
from varlen_tables import varlen_tables

# --- documents ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """What one results block shows.

    Attributes:
        suite: the result file.
        plots: file name and alternative text of each.
        tables: made from the results.
        shown: tables that are not folded away; None for all.
        beside: other suites whose figures are in them.
    """

    suite: str
    plots: dict[str, str]
    tables: Callable[[Loaded], list[Table]]
    shown: int | None = None
    beside: tuple[str, ...] = ()


BLOCKS = {
    "speed": Block("attention", {"speed": "TFLOP/s by sequence length"}, speed_tables),
    "e2e": Block("attention", {"e2e": "Milliseconds from bf16 to bf16"}, e2e_tables),
    "accuracy": Block("accuracy", {"accuracy": "Relative error by kind of input"}, input_tables),
    "long_context": Block("accuracy", {"long_context": "Relative error by number of keys"}, biased_v_tables),
    "roofline": Block("attention", {"roofline": "Speed over a GEMM's, by sequence length"}, roofline_tables, 0),
    "cells": Block("cells", {"cells": "Speed over a GEMM's, by cell"}, cells_tables),
    "ablation": Block("ablation", {"ablation": "Speed with one step undone / the shipped kernel's"}, ablation_tables),
    "startup": Block("startup", {"startup": "Seconds of a first call"}, startup_tables),
    "host": Block("host", {"host": "Host time of a call"}, host_tables),
    "preprocess": Block("preprocess", {"preprocess": "Time of quantize and of a copy"}, preprocess_tables),
    "masks": Block("masks", {"masks": "Milliseconds by mask and score"}, mask_tables),
    "split": Block("split", {"split": "Speed with keys split and in one run / FA3 FP8's"}, split_tables),
    "ladder": Block("ladder", {"ladder": "TFLOP/s by sequence length, from 8 bits to 16"}, ladder_tables),
    "ladder_rmse": Block("ladder", {"ladder_rmse": "RMSE by sequence length, from 8 bits to 16"}, ladder_rmse_tables),
    "large_d": Block("large_d", {"large_d": "TFLOP/s by head dim"}, large_d_tables),
    "decode": Block("decode", {"decode": "Bandwidth of decoding / a copy's"}, decode_tables),
    "varlen": Block("varlen", {"varlen": "Speed on packed sequences / FA3 FP8's"}, varlen_tables),
    "checks": Block(
        CHECKED_SUITES[0],
        {"checks": "The worst cell of each figure that must hold / its bound"},
        promise_tables,
        beside=CHECKED_SUITES[1:],
    ),
    "other_checks": Block(CHECKED_SUITES[0], {}, other_check_tables, 0, beside=CHECKED_SUITES[1:]),
    "recipes": Block("accuracy", {}, recipe_tables),
    "pareto": Block("accuracy", {"pareto": "RMSE on outliers against end-to-end time, by recipe"}, pareto_tables),
    "cost": Block("accuracy", {"cost": "End-to-end time by recipe, as a multiple of FAST's"}, cost_tables),
    "rmse": Block("accuracy", {"rmse": "RMSE on outliers, by implementation and recipe"}, rmse_tables),
    "long": Block(
        "accuracy",
        {
            "long_total": "Total error by number of keys and kind of input",
            "long_kernel": "Kernel error by number of keys and kind of input",
        },
        long_tables,
        0,
    ),
    "criterion": Block(
        "accuracy", {"criterion": "Error over what FA3's test allows, by head dim"}, criterion_tables, 1
    ),
    "real": Block("accuracy", {"real": "Relative error by layer of a trained model"}, real_tables),
    "preprocess_recipes": Block(
        "preprocess", {"preprocess_recipes": "Bandwidth of quantize / a copy's"}, preprocess_recipe_tables, 0
    ),
    "stages": Block("stages", {"stages": "Bandwidth of each stage / a copy's"}, stage_tables, 0),
    "recipe_checks": Block("accuracy", {}, recipe_check_tables, beside=("attention", "preprocess", "stages")),
}


def older_rows(rows: list[Row]) -> str:
    """The cells that are of another commit than the run, such as those that it did not reach."""
    cells: dict[tuple[str, int, str], set[int]] = {}
    for row in rows:
        if "commit" in row:
            mask = "causal" if row["causal"] else "full"
            cells.setdefault((row["commit"], row["D"], mask), set()).add(row["N"])
    return "".join(
        f"; of commit {commit}: D {D} {mask}, S {', '.join(map(str, sorted(lengths)))}"
        for (commit, D, mask), lengths in sorted(cells.items())
    )


def run_of(suite: Row) -> str:
    """When, by what and at which commit a suite was run; and cells that are not of that run."""
    meta = suite["meta"]
    return (
        f"{str(meta.get('date', ''))[:10]}, `{meta.get('command')}` at {meta.get('commit')}{older_rows(suite['rows'])}"
    )


def caption(block: Block, loaded: Loaded) -> str:
    """Where the figures come from, in a line."""
    meta = loaded[block.suite]["meta"]
    names = {"driver": "driver", "cuda": "CUDA", "torch": "PyTorch", "triton": "Triton", "helion": "Helion"}
    names |= {"cudnn": "cuDNN", "fa3": "fa3-fwd"}
    versions = ", ".join(f"{label} {meta[name]}" for name, label in names.items() if meta.get(name))
    runs = [run_of(loaded[suite]) for suite in (block.suite, *block.beside) if suite in loaded]
    return f"{meta.get('gpu') or 'CPU'}, {versions}; {'; and '.join(runs)}"


def block_markdown(name: str, loaded: Loaded, image_folder: str) -> str | None:
    """The content of one block, or None where nothing was measured."""
    block = BLOCKS[name]
    tables = block.tables(loaded) if block.suite in loaded else []
    if not tables:
        return None
    parts = [f"![{alt}]({image_folder}/{plot}.png)" for plot, alt in block.plots.items()]
    shown = len(tables) if block.shown is None else block.shown
    parts += [table.markdown() for table in tables[:shown]]
    for table in tables[shown:]:
        parts.append(f"<details>\n<summary>{table.title}</summary>\n\n{table.markdown()}\n\n</details>")
    parts.append(f"<sub>{caption(block, loaded)}</sub>")
    return "\n\n".join(parts)


def rewrite(document: Path, loaded: Loaded, folder: Path) -> list[str]:
    """Fills the blocks of a document; returns what was done with each."""
    text, done = document.read_text(), []
    images = Path(os.path.relpath(folder.resolve(), document.resolve().parent)).as_posix()
    for name in BLOCKS:
        opening, closing = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
        if opening not in text or closing not in text:
            continue
        content = block_markdown(name, loaded, images)
        if content is None:
            done.append(f"{document}, {name}: nothing measured, left as it was")
        else:
            pattern = re.escape(opening) + r".*?" + re.escape(closing)
            replacement = f"{opening}\n\n{content}\n\n{closing}"
            text = re.sub(pattern, lambda _, new=replacement: new, text, flags=re.DOTALL)  # type: ignore[misc]
            done.append(f"{document}, {name}: written")
    document.write_text(text)
    return done


# --- command line ---------------------------------------------------------------------------------


def print_tables(loaded: Loaded, console: Console, failing_only: bool = False) -> None:
    """Every table that has rows, every failure, and what holds (`failing_only`: what does not)."""
    for name, block in BLOCKS.items():
        if name not in ("checks", "other_checks", "recipe_checks") and block.suite in loaded:
            for table in block.tables(loaded)[: block.shown]:
                console.print(table.rich())
    rows = [row for content in loaded.values() for row in content["rows"]]
    remarks = Counter(
        (row["impl"], row["stage"], row["D"], row.get("error_message") or row.get("note")) for row in rows
    )
    for (impl, stage, D, remark), count in remarks.items():
        if remark is not None:
            line = f"{impl}, {stage}, D {D}, {count} cells: {remark}"
            console.print(line, style="yellow", markup=False, highlight=False)
    found = [check for check in all_checks(loaded) if check.verdict != "not measured"]
    for check in found:
        if failing_only and check.verdict == "PASS":
            continue
        style = "green" if check.verdict == "PASS" else "red"
        console.print(
            f"{check.verdict} {check.name}: {check.value:.4g} ({check.relation})", style=style, highlight=False
        )
    passed = sum(check.verdict == "PASS" for check in found)
    console.print(f"{passed} of {len(found)} measured figures hold", highlight=False)


def draw_plots(loaded: Loaded, folder: Path) -> None:
    """The plots, where matplotlib is installed."""
    try:
        import accuracy_plots
        import cells_plots
        import feature_plots
        import ladder_plots
        import plots
    except ModuleNotFoundError as error:
        print(f"no plots: package {error.name} is not installed")
        return
    for module in (plots, cells_plots, accuracy_plots, ladder_plots, feature_plots):
        plots.draw_all(module.PLOTS, loaded, folder)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder of the result files")
    parser.add_argument(
        "--documents",
        type=Path,
        nargs="*",
        default=[Path("README.md"), *(Path(f"docs/{name}.md") for name in ("accuracy", "performance", "kv_cache"))],
        help="files whose results blocks are rewritten (default README.md and docs/{accuracy,performance,kv_cache}.md)",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a measured figure fails its bound")
    args = parser.parse_args()

    console = Console(width=None if sys.stdout.isatty() else 160)
    loaded = load(args.results)
    if not loaded:
        parser.error(f"no result files in {args.results}")
    print_tables(loaded, console)
    draw_plots(loaded, args.results)
    for document in args.documents:
        if not document.exists():
            console.print(f"no {document} to rewrite")
            continue
        for line in rewrite(document, loaded, args.results):
            console.print(line, highlight=False)
    if args.strict and any(check.verdict == "FAIL" for check in all_checks(loaded)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
