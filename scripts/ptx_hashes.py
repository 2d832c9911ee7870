"""Compare the PTX of shipped kernels with the hashes in the repository, or write these anew.

python scripts/ptx_hashes.py            # compare; exit 1 if a kernel differs
python scripts/ptx_hashes.py --write    # after a change that should change kernels

Compiles 164 cases for sm_90, without a GPU, in some ten minutes on two cores. The hashes are of Triton 3.6.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers import ptx


def _hashes(name: str) -> list[str]:
    return ptx.hashes(ptx.cases()[name])


def main(argv: list[str] | None = None) -> int:
    """Compare or write; return 1 if a kernel differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the hashes anew")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    args = parser.parse_args(argv)
    names = list(ptx.cases())
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        results = track(pool.map(_hashes, names), "Compiling", total=len(names))
        found = dict(zip(names, results, strict=True))
    if args.write:
        ptx.HASHES.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    differ = [name for name, lines in found.items() if ptx.stored().get(name) != lines]
    for name in differ:
        print(f"differs: {name}")
    print(f"{len(found) - len(differ)} of {len(found)} cases have the PTX of the hashes")
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
