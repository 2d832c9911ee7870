"""Benchmarks FP8 attention against its peers: speed, masks, splits, accuracy, preprocessing.

    python benchmarks/attention.py                          # all suites, on the GPU
    python benchmarks/attention.py --suite speed --quick    # a few cells
    python benchmarks/attention.py --device cpu --quick     # a dry run in the interpreter, this package only

Each suite writes `<out>/{attention,cells,ablation,masks,ladder,split,accuracy,preprocess,stages}.json` as it goes: an
interrupted run keeps what it measured. The tables come last. `report.py` turns the files into plots and the tables of
the documents.
"""

from __future__ import annotations

import ablation
import accuracy
import cells
import ladder
import masks
import speed
import splits
from command import Suite, run_command

SUITES: dict[str, tuple[str, Suite]] = {
    "speed": ("attention", speed.run_speed),
    "cells": ("cells", cells.run_cells),
    "ablation": ("ablation", ablation.run_ablation),
    "masks": ("masks", masks.run_masks),
    "ladder": ("ladder", ladder.run_ladder),
    "split": ("split", splits.run_split),
    **accuracy.SUITES,
}

if __name__ == "__main__":
    raise SystemExit(run_command(__doc__, SUITES))
