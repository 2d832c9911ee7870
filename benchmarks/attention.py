"""Benchmarks FP8 attention against its peers: speed, masks, packed sequences, decoding, accuracy, preprocessing, start.

    python benchmarks/attention.py                          # all suites, on the GPU
    python benchmarks/attention.py --suite speed --quick    # a few cells
    python benchmarks/attention.py --device cpu --quick     # a dry run in the interpreter, this package only

Each suite writes `<out>/<suite>.json` (`speed` attention.json) as it goes: an interrupted run keeps what it measured.
The tables come last. `report.py` turns the files into plots and the tables of the documents.
"""

from __future__ import annotations

import ablation
import accuracy
import cells
import decode
import host
import ladder
import large_d
import masks
import speed
import splits
import startup
import varlen
from command import Suite, run_command

SUITES: dict[str, tuple[str, Suite]] = {
    "speed": ("attention", speed.run_speed),
    "cells": ("cells", cells.run_cells),
    "ablation": ("ablation", ablation.run_ablation),
    "masks": ("masks", masks.run_masks),
    "ladder": ("ladder", ladder.run_ladder),
    "split": ("split", splits.run_split),
    "varlen": ("varlen", varlen.run_varlen),
    "decode": ("decode", decode.run_decode),
    "large_d": ("large_d", large_d.run_large_d),
    "startup": ("startup", startup.run_startup),
    "host": ("host", host.run_host),
    **accuracy.SUITES,
}

if __name__ == "__main__":
    raise SystemExit(run_command(__doc__, SUITES))
