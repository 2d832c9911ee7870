"""Turns benchmarks/results/*.json into tables, plots, the results blocks of the documents, and `recipe="auto"`'s table.

    python benchmarks/report.py                     # tables, plots, documents, and what holds
    python benchmarks/report.py --documents         # leave the documents alone
    python benchmarks/report.py --strict            # write nothing, exit with 1 if a page or a plot is old

A block is what stands between `<!-- results:NAME -->` and `<!-- /results:NAME -->`, NAME a key of `BLOCKS`. It has the
plots and `shown` tables. Every table of FILE.json is in FILE.md next to it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # a script's own folder is on the path; the package is found in the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import (
    accuracy,
    auto,
    cells,
    decode,
    distributed,
    fa3_criterion,
    front,
    host,
    ladder,
    language_model,
    large_d,
    loss_curves,
    masks,
    model_channels,
    models,
    norms,
    preprocess,
    sparse,
    speed,
    splits,
    startup,
    steps,
    training,
    tritonbench,
    varlen,
)
from benchmarks.lib.checks import Check, goal_tables, on_gpu
from benchmarks.lib.harness import RESULTS, Loaded, Row, load
from benchmarks.lib.plots import draw_all
from benchmarks.lib.suite import Block, console
from benchmarks.lib.tables import mask
from benchmarks.suites import SUITES

# --- what must hold -------------------------------------------------------------------------------

#: What says which figures must hold, by subject, in the order of the documents.
CHECKS: dict[str, tuple[Callable[[Loaded], list[Check]], ...]] = {
    "Speed, error and memory of the default": (
        accuracy.error_checks,
        speed.kernel_checks,
        speed.e2e_checks,
        models.checks,
        auto.checks,
        cells.colfax_checks,
        preprocess.default_checks,
    ),
    "The recipes": (
        accuracy.rmse_checks,
        accuracy.long_checks,
        model_channels.checks,
        fa3_criterion.checks,
        accuracy.cost_checks,
        preprocess.bandwidth_checks,
        preprocess.stage_checks,
    ),
    "Whole models": (steps.checks, norms.checks),
    "16 bits, and large head dims": (ladder.checks, large_d.checks),
    "Masks, packed sequences, grouped queries, split keys, decoding": (
        masks.checks,
        sparse.checks,
        varlen.checks,
        cells.grouped_checks,
        splits.checks,
        decode.checks,
        language_model.checks,
    ),
    "Training": (training.checks, auto.training_checks, loss_curves.checks),
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
        "sparse",
        "varlen",
        "split",
    ),
    *("decode", "language_model", "model_channels", "startup", "host", "distributed", "auto", "norms"),
    *("steps", "steps_new", "steps_compiled"),
    *("training", "loss_curves"),
)


def checks_of(subject: str, loaded: Loaded) -> list[Check]:
    """The figures of one subject; a run on the CPU shows none of them."""
    return [check for checks in CHECKS[subject] for check in checks(on_gpu(loaded))]


def all_checks(loaded: Loaded) -> list[Check]:
    """Every figure."""
    return [check for subject in CHECKS for check in checks_of(subject, loaded)]


CHECK_BLOCKS = {
    "checks": Block(CHECKED_FILES[0], lambda loaded: goal_tables(all_checks(loaded)), beside=CHECKED_FILES[1:], shown=1)
}

# --- documents ------------------------------------------------------------------------------------

#: By the name in a document's marks.
BLOCKS = (
    front.BLOCKS
    | {name: block for suite in SUITES.values() for name, block in suite.blocks.items()}
    | CHECK_BLOCKS
    | {"tritonbench": tritonbench.BLOCK}
)

#: The blocks of each page of tables, by its name: a result file's, and the goals. Those of the front page are in none.
PAGES: dict[str, list[str]] = {}
for _name, _block in BLOCKS.items():
    if _name not in front.BLOCKS:
        PAGES.setdefault("goals" if _name in CHECK_BLOCKS else _block.file, []).append(_name)

#: What has blocks.
DOCUMENTS = (
    Path("README.md"),
    *(Path(f"docs/{name}.md") for name in ("accuracy", "benchmarks", "integrations", "masks", "training")),
    *(Path(f"docs/benchmarks/{name}.md") for name in ("kernels", "overheads", "serving", "whole_calls")),
)


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
    """Where the figures come from: GPU, versions, and every run with its command."""
    meta = loaded[block.file]["meta"]
    names = {"driver": "driver", "cuda": "CUDA", "torch": "PyTorch", "triton": "Triton", "helion": "Helion"}
    names |= {"cudnn": "cuDNN", "fa3": "fa3-fwd", "sageattention": "SageAttention"}
    names |= {name: name for name in ("diffusers", "transformers")}
    versions = ", ".join(f"{label} {meta[name]}" for name, label in names.items() if meta.get(name))
    runs = []
    for suite in (block.file, *block.beside):
        if suite in loaded:
            other = loaded[suite]["meta"].get("gpu") or "CPU"
            runs.append(run_of(loaded[suite]) + ("" if other == (meta.get("gpu") or "CPU") else f" on {other}"))
    return f"{meta.get('gpu') or 'CPU'}, {versions}; {'; and '.join(runs)}"


def brief_caption(block: Block, loaded: Loaded, shown: str) -> str:
    """GPU, dates and commits; `shown` is what stands above them."""
    by_gpu: dict[str, dict[str, dict[str, None]]] = {}
    kept: dict[str, None] = {}
    for file in (block.file, *block.beside):
        if file in loaded:
            found = loaded[file]["meta"]
            # "NVIDIA H100 80GB HBM3" is "H100".
            gpu = (found.get("gpu") or "CPU").removeprefix("NVIDIA ").partition(" 80GB")[0]
            days = by_gpu.setdefault(gpu, {})
            days.setdefault(str(found.get("date", ""))[:10], {})[str(found.get("commit"))[:7]] = None
            # Rows of an earlier run are named behind the command: "NAME: where from".
            if earlier := re.search(r" \((.*)\)$", found.get("command") or ""):
                kept |= dict.fromkeys(x for x in earlier[1].split("; ") if x.partition(":")[0] in shown)
    runs_of_gpu = (
        ", ".join([gpu, *(f"{day} at {' and '.join(commits)}" for day, commits in days.items())])
        for gpu, days in by_gpu.items()
    )
    return "; ".join([*runs_of_gpu, *kept])


def block_markdown(name: str, loaded: Loaded, folder: str) -> str | None:
    """What a document shows of a block, or None where nothing was measured; `folder` is that of the results."""
    block = BLOCKS[name]
    if block.file not in loaded:
        return None
    tables, sentence = block.tables(loaded), block.sentence(loaded)
    if not tables and not block.plots and sentence is None:
        return None
    parts = [] if sentence is None else [sentence]
    parts += [f"![{plot.alt}]({folder}/{plot.name}.png)" for plot in block.plots]
    parts += [table.markdown() for table in tables[: block.shown]]
    source = brief_caption(block, loaded, "".join(parts))
    pages = [page for page, blocks in PAGES.items() if name in blocks and tables]
    what = "All tables" if parts else tables[0].title
    parts.append(f"<sub>{''.join(f'[{what}]({folder}/{page}.md#{name}): ' for page in pages)}{source}</sub>")
    return "\n\n".join(parts)


def table_pages(loaded: Loaded) -> dict[str, str]:
    """The pages of tables that have any, by name."""
    found = {}
    for page, blocks in PAGES.items():
        parts = []
        for name in blocks:
            block = BLOCKS[name]
            if block.file in loaded and (tables := block.tables(loaded)):
                parts += [f"## {name}", *(table.markdown() for table in tables), f"<sub>{caption(block, loaded)}</sub>"]
        if parts:
            found[page] = "\n\n".join([f"# Tables: {page}", "`benchmarks/report.py` writes this page.", *parts]) + "\n"
    return found


@dataclass(frozen=True)
class Filled:
    """A document with its blocks filled."""

    text: str  # what it should be
    written: list[str]  # blocks that were filled
    unmeasured: list[str]  # blocks without results, left as they were


def filled(document: Path, loaded: Loaded, folder: Path) -> Filled:
    """What a document should be."""
    text = document.read_text()
    found = Filled(text, [], [])
    images = Path(os.path.relpath(folder.resolve(), document.resolve().parent)).as_posix()
    for name in BLOCKS:
        opening, closing = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
        if opening not in text or closing not in text:
            continue
        content = block_markdown(name, loaded, images)
        if content is None:
            found.unmeasured.append(name)
            continue
        replacement = f"{opening}\n\n{content}\n\n{closing}"
        pattern = re.escape(opening) + r".*?" + re.escape(closing)
        text = re.sub(pattern, lambda _, new=replacement: new, text, flags=re.DOTALL)  # type: ignore[misc]
        found.written.append(name)
    return dataclasses.replace(found, text=text)


def stale(documents: Iterable[Path], loaded: Loaded, folder: Path) -> list[str]:
    """Pages whose tables are not those of the results, and plots that no document shows or that are missing."""
    found = []
    pages = {folder / f"{name}.md": text for name, text in table_pages(loaded).items()}
    for page in sorted({*pages, *folder.glob("*.md")}):
        if not page.exists() or pages.get(page) != page.read_text():
            found.append(f"{page} is old")
    shown: set[str] = set()
    for document in documents:
        what = filled(document, loaded, folder)
        if what.text != document.read_text():
            found.append(f"{document} is old")
        shown |= {plot.name for name in what.written for plot in BLOCKS[name].plots}
    drawn = {path.stem for path in folder.glob("*.png")}
    found += [f"no plot {name}.png" for name in sorted(shown - drawn)]
    found += [f"{name}.png is in no document" for name in sorted(drawn - shown)]
    return found


# --- command line ---------------------------------------------------------------------------------


def print_tables(loaded: Loaded, failing_only: bool = False) -> None:
    """Every table that has rows, every failure, and what holds (`failing_only`: what does not)."""
    for name, block in BLOCKS.items():
        if name not in CHECK_BLOCKS and block.file in loaded:
            for table in block.tables(loaded):
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
    draw_all({plot.name: plot for block in BLOCKS.values() for plot in block.plots}.values(), loaded, folder)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument(
        "--documents",
        type=Path,
        nargs="*",
        default=list(DOCUMENTS),
        help="files whose results blocks are rewritten (default README.md and those of docs/ that have any)",
    )
    parser.add_argument("--strict", action="store_true", help="write nothing; exit with 1 if anything is old")
    args = parser.parse_args()

    loaded = load(args.results)
    if not loaded:
        parser.error(f"no result files in {args.results}")
    documents = [document for document in args.documents if document.exists()]
    crossovers = auto.CONFIG.read_text()
    if args.strict:
        old = stale(documents, loaded, args.results)
        if auto.config(loaded, crossovers) != crossovers:
            old.append(f"{auto.CONFIG} is old")
        for line in old:
            console.print(f"{line}: run python benchmarks/report.py", highlight=False)
        raise SystemExit(bool(old))
    print_tables(loaded)
    draw_plots(loaded, args.results)
    auto.CONFIG.write_text(auto.config(loaded, crossovers))
    for name, text in table_pages(loaded).items():
        (args.results / f"{name}.md").write_text(text)
    for document in documents:
        what = filled(document, loaded, args.results)
        document.write_text(what.text)
        for name in what.unmeasured:
            console.print(f"{document}, {name}: nothing measured, left as it was", highlight=False)


if __name__ == "__main__":
    main()
