"""Run tritonbench's `fp8_attention` on this machine's GPU, with this package as a backend, and keep what it prints.

    python benchmarks/tritonbench.py CLONE

CLONE is a folder with tritonbench's repository. Head dims 64 and 128, tritonbench's default lengths. Nothing is
downloaded. Writes `<out>/tritonbench.json`, whose table is in docs/integrations.md.
"""

from __future__ import annotations

import argparse
import csv
import itertools
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

from benchmarks.lib.harness import RESULTS, Loaded, Results, Row, describe_run  # noqa: E402
from benchmarks.lib.suite import Block  # noqa: E402
from benchmarks.lib.tables import Table, error_text, number, rows_of, values_of  # noqa: E402
from helion_attn.integrations.tritonbench import BACKEND, METRIC, OPERATOR  # noqa: E402

DIMS = (64, 128)

#: Those of its backends that this machine can have, each in a run of its own: one that cannot be compiled ends a run.
BACKENDS = ("triton_flash_v2", "triton_flash_v2_tma", BACKEND)

#: The least of tritonbench's lengths, each twice the one before.
LEAST = 128

#: `--embedding-dim`, heads times head dim.
EMBEDDING = 3072


def measured(clone: Path, D: int, backend: str) -> list[dict[str, str]]:
    """What tritonbench writes of a backend, a line a length: names of columns to text."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output.csv")
        options = ["--op", OPERATOR, "--metrics", f"latency,tflops,{METRIC}", "--output", str(output)]
        options += ["--only", backend, "--d-head", str(D), "--n-heads", str(EMBEDDING // D), "--fwd-no-grad"]
        path = os.pathsep.join([str(clone), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run(
            [sys.executable, "-m", "helion_attn.tritonbench", *options],
            check=True,
            cwd=clone,
            env=os.environ | {"PYTHONPATH": path},
        )
        with output.open() as file:
            return list(csv.DictReader(file, delimiter=";"))


def read(lines: list[dict[str, str]], D: int, backend: str) -> list[Row]:
    """A row for each length."""
    rows: list[Row] = []
    for line in lines:
        # A count of lengths, a length, or (batch, heads, length, head dim); and the average.
        sizes = [int(x) for x in re.findall(r"\d+", next(iter(line.values())))]
        values = [line.get(f"{backend}-{metric}") for metric in ("latency", "tflops", METRIC)]
        if not sizes or not all(values):
            continue
        first = sizes[2] if len(sizes) == 4 else sizes[0]
        ms, tflops, error = (float(str(x).split()[0]) for x in values)
        row: Row = {
            "impl": backend,
            "stage": "kernel",
            "D": D,
            "H": EMBEDDING // D,
            "N": first if first >= LEAST else LEAST << first,
        }
        rows.append(row | {"ms": ms, "tflops": tflops, "error_total": error})
    return rows


def tables(loaded: Loaded) -> list[Table]:
    """TFLOP/s and error by backend and length, a table a head dim."""
    rows = rows_of(loaded, "tritonbench")
    found = []
    for (D,) in values_of(rows, "D"):
        of_head_dim = [row for row in rows if row["D"] == D]
        lengths = sorted({row["N"] for row in of_head_dim})
        body = []
        for (impl,) in values_of(of_head_dim, "impl"):
            by_length = {row["N"]: row for row in of_head_dim if row["impl"] == impl}
            speeds = [number(by_length[N]["tflops"] if N in by_length else None, ".0f") for N in lengths]
            body.append([impl, *speeds, error_text(by_length[max(by_length)]["error_total"])])
        headers = ["TFLOP/s by length", *map(str, lengths), f"error at {lengths[-1]}"]
        found.append(Table(f"tritonbench, D {D}, {EMBEDDING // D} heads, full", headers, body))
    return found


BLOCK = Block("tritonbench", tables, shown=1)


def main(argv: list[str] | None = None) -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    results = Results(args.out / "tritonbench.json", describe_run(torch.device("cuda")))
    for D, backend in track([*itertools.product(DIMS, BACKENDS)], description="tritonbench"):
        rows = read(measured(args.clone.resolve(), D, backend), D, backend)
        if not rows:
            print(f"{backend} at head dim {D}: nothing was measured")
        results.add(*rows)


if __name__ == "__main__":
    main()
