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
from pathlib import Path

if __name__ == "__main__":  # a script's own folder is on the path; the package is found in the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import (
    ablation,
    accuracy,
    cells,
    decode,
    diffusion,
    distributed,
    fa3_criterion,
    hard,
    host,
    ladder,
    language_model,
    large_d,
    masks,
    models,
    preprocess,
    same_token,
    speed,
    splits,
    startup,
    varlen,
)
from benchmarks.lib.checks import Check, every_table, margins, on_gpu, worst_table
from benchmarks.lib.harness import RESULTS, Loaded, Row, load
from benchmarks.lib.plots import draw_all
from benchmarks.lib.suite import Block, Plot, Suite, console
from benchmarks.lib.tables import Table, mask

#: By the name that --suite takes, in the order of a run of all.
SUITES: dict[str, Suite] = {
    "speed": speed.SUITE,
    "cells": cells.SUITE,
    "models": models.SUITE,
    "ablation": ablation.SUITE,
    "masks": masks.SUITE,
    "ladder": ladder.SUITE,
    "split": splits.SUITE,
    "varlen": varlen.SUITE,
    "decode": decode.SUITE,
    "distributed": distributed.SUITE,
    "large_d": large_d.SUITE,
    "startup": startup.SUITE,
    "host": host.SUITE,
    "accuracy": accuracy.SUITE,
    "hard": hard.SUITE,
    "same_token": same_token.SUITE,
    "language_model": language_model.SUITE,
    "diffusion": diffusion.SUITE,
    "preprocess": preprocess.SUITE,
    "stages": preprocess.STAGES,
}

# --- what must hold -------------------------------------------------------------------------------

#: Accuracy of the recipes, and what they cost: a subject of `CHECKS` with a block of its own.
RECIPES = "The recipes"

#: What says which figures must hold, by subject, in the order of the documents.
CHECKS: dict[str, tuple[Callable[[Loaded], list[Check]], ...]] = {
    "Speed, error and memory of the default": (
        accuracy.error_checks,
        speed.kernel_checks,
        speed.e2e_checks,
        models.checks,
        cells.colfax_checks,
        preprocess.default_checks,
    ),
    RECIPES: (
        accuracy.rmse_checks,
        accuracy.long_checks,
        fa3_criterion.checks,
        accuracy.cost_checks,
        preprocess.bandwidth_checks,
        preprocess.stage_checks,
    ),
    "16 bits, and large head dims": (ladder.checks, large_d.checks),
    "Masks, packed sequences, grouped queries, split keys, decoding": (
        masks.checks,
        varlen.checks,
        cells.grouped_checks,
        splits.checks,
        decode.checks,
    ),
    "Several GPUs": (distributed.checks,),
    "Start-up and host time": (startup.checks, host.checks),
}

#: The result files that these figures are of.
CHECKED_FILES = (
    *(
        "attention",
        "cells",
        "models",
        "accuracy",
        "preprocess",
        "stages",
        "ladder",
        "large_d",
        "masks",
        "varlen",
        "split",
    ),
    *("decode", "startup", "host", "distributed"),
)


def checks_of(subject: str, loaded: Loaded) -> list[Check]:
    """The figures of one subject; a run on the CPU shows none of them."""
    return [check for checks in CHECKS[subject] for check in checks(on_gpu(loaded))]


def all_checks(loaded: Loaded) -> list[Check]:
    """Every figure."""
    return [check for subject in CHECKS for check in checks_of(subject, loaded)]


def promise_tables(loaded: Loaded) -> list[Table]:
    """A row for each promise."""
    return worst_table("What must hold", all_checks(loaded))


def recipe_check_tables(loaded: Loaded) -> list[Table]:
    """Every cell of the figures of the recipes."""
    return every_table("What must hold of the recipes", checks_of(RECIPES, loaded))


def other_check_tables(loaded: Loaded) -> list[Table]:
    """Every cell of all the others, a table for each subject."""
    return [table for name in CHECKS if name != RECIPES for table in every_table(name, checks_of(name, loaded))]


CHECK_BLOCKS = {
    "checks": Block(
        CHECKED_FILES[0],
        promise_tables,
        (
            Plot(
                "checks",
                "The worst cell of each figure that must hold / its bound",
                lambda loaded: margins("What must hold", all_checks(loaded)),
            ),
        ),
        beside=CHECKED_FILES[1:],
    ),
    "other_checks": Block(CHECKED_FILES[0], other_check_tables, shown=0, beside=CHECKED_FILES[1:]),
    "recipe_checks": Block("accuracy", recipe_check_tables, beside=("attention", "preprocess", "stages")),
}

# --- documents ------------------------------------------------------------------------------------

#: By the name in a document's marks.
BLOCKS = {name: block for suite in SUITES.values() for name, block in suite.blocks.items()} | CHECK_BLOCKS


def older_rows(rows: list[Row]) -> str:
    """The cells that are of another commit than the run, such as those that it did not reach."""
    found: dict[tuple[str, int, str], set[int]] = {}
    for row in rows:
        if "commit" in row:
            found.setdefault((row["commit"], row["D"], mask(row["causal"])), set()).add(row["N"])
    return "".join(
        f"; of commit {commit}: D {D} {masked}, S {', '.join(map(str, sorted(lengths)))}"
        for (commit, D, masked), lengths in sorted(found.items())
    )


def run_of(suite: Row) -> str:
    """When, by what and at which commit a suite was run; and cells that are not of that run."""
    meta = suite["meta"]
    return (
        f"{str(meta.get('date', ''))[:10]}, `{meta.get('command')}` at {meta.get('commit')}{older_rows(suite['rows'])}"
    )


def caption(block: Block, loaded: Loaded) -> str:
    """Where the figures come from, in a line."""
    meta = loaded[block.file]["meta"]
    names = {"driver": "driver", "cuda": "CUDA", "torch": "PyTorch", "triton": "Triton", "helion": "Helion"}
    names |= {"cudnn": "cuDNN", "fa3": "fa3-fwd"}
    versions = ", ".join(f"{label} {meta[name]}" for name, label in names.items() if meta.get(name))
    runs = [run_of(loaded[suite]) for suite in (block.file, *block.beside) if suite in loaded]
    return f"{meta.get('gpu') or 'CPU'}, {versions}; {'; and '.join(runs)}"


def block_markdown(name: str, loaded: Loaded, image_folder: str) -> str | None:
    """The content of one block, or None where nothing was measured."""
    block = BLOCKS[name]
    tables = block.tables(loaded) if block.file in loaded else []
    if not tables:
        return None
    parts = [f"![{plot.alt}]({image_folder}/{plot.name}.png)" for plot in block.plots]
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


def print_tables(loaded: Loaded, failing_only: bool = False) -> None:
    """Every table that has rows, every failure, and what holds (`failing_only`: what does not)."""
    for name, block in BLOCKS.items():
        if name not in CHECK_BLOCKS and block.file in loaded:
            for table in block.tables(loaded)[: block.shown]:
                console.print(table.rich())
    rows = [row for content in loaded.values() for row in content["rows"]]
    remarks = Counter(
        (row["impl"], row["stage"], row.get("D"), row.get("error_message") or row.get("note")) for row in rows
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
    """Every plot that has data, as a file in `folder`."""
    draw_all((plot for block in BLOCKS.values() for plot in block.plots), loaded, folder)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument(
        "--documents",
        type=Path,
        nargs="*",
        default=[
            Path("README.md"),
            *(Path(f"docs/{name}.md") for name in ("accuracy", "performance", "kv_cache", "distributed")),
        ],
        help="files whose results blocks are rewritten (default README.md and those of docs/ that have any)",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a measured figure fails its bound")
    args = parser.parse_args()

    loaded = load(args.results)
    if not loaded:
        parser.error(f"no result files in {args.results}")
    print_tables(loaded)
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
