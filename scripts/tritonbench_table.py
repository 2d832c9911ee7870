"""Run tritonbench's `fp8_attention` on this machine's GPU, with this package as a backend, and keep what it prints.

python scripts/tritonbench_table.py CLONE

CLONE is a folder with tritonbench's repository. Head dims 64 and 128, tritonbench's default lengths. Nothing is
downloaded. Writes benchmarks/results/tritonbench.json, of which scripts/integrations.py makes the table in
docs/integrations.md.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks.lib.harness import RESULTS, Results, Row, describe_run  # noqa: E402
from helion_attn.integrations.tritonbench import METRIC, OPERATOR  # noqa: E402

DIMS = (64, 128)

#: `--embedding-dim`, heads times head dim.
EMBEDDING = 3072


def measured(clone: Path, D: int) -> list[dict[str, str]]:
    """What tritonbench writes, a line a length: names of columns to text."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output.csv")
        options = ["--op", OPERATOR, "--metrics", f"latency,tflops,{METRIC}", "--output", str(output)]
        options += ["--d-head", str(D), "--n-heads", str(EMBEDDING // D), "--fwd-no-grad"]
        path = os.pathsep.join([str(clone), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run(
            [sys.executable, "-m", "helion_attn.tritonbench", *options],
            check=True,
            cwd=clone,
            env=os.environ | {"PYTHONPATH": path},
        )
        with output.open() as file:
            return list(csv.DictReader(file, delimiter=";"))


def rows_of(lines: list[dict[str, str]], D: int) -> list[Row]:
    """A row for each backend and length."""
    rows: list[Row] = []
    for line in lines:
        first, *columns = line
        # A length, or (batch, heads, length, head dim).
        sizes = [int(x) for x in re.findall(r"\d+", line[first])]
        if not sizes:  # the average
            continue
        for backend in dict.fromkeys(column.removesuffix("-latency") for column in columns if "-latency" in column):
            ms, tflops, error = (line.get(f"{backend}-{metric}") for metric in ("latency", "tflops", METRIC))
            rows.append(
                {
                    "impl": backend,
                    "D": D,
                    "H": EMBEDDING // D,
                    "N": sizes[2] if len(sizes) == 4 else sizes[0],
                    "ms": float(ms.split()[0]) if ms else None,
                    "tflops": float(tflops) if tflops else None,
                    "error_total": float(error) if error else None,
                }
            )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    results = Results(args.out / "tritonbench.json", describe_run(torch.device("cuda")))
    for D in track(DIMS, description="head dims"):
        results.add(*rows_of(measured(args.clone.resolve(), D), D))


if __name__ == "__main__":
    main()
