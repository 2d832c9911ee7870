"""Timings on disk, each as soon as it is known, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import helion_attn
from devtools.tune import trial
from devtools.tune.candidates import Tile
from devtools.tune.trial import launch_parameters
from devtools.workloads import Workload

#: What a timing depends on beside candidate and workload: one of another is not taken up.
MACHINE = ("gpu", "sm_count", "torch", "triton", "helion", "source")


@dataclass(frozen=True)
class Timing:
    """A candidate on a workload. `provenance` is `machine()` and `run_description()` at the time."""

    tile: Tile
    workload: Workload
    registers: int
    spills: int
    ms: float
    provenance: dict[str, Any]


def source_hash() -> str:
    """A digest of the kernels, of what orders their programs, and of what times them."""
    package = Path(helion_attn.__file__).parent
    others = ("configs/__init__.py", "configs/scheduling.py", "numerics.py")
    files = [*sorted((package / "kernels").glob("*.py")), *(package / name for name in others), Path(trial.__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def machine() -> dict[str, Any]:
    """The GPU, the versions and the source: `MACHINE`."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "sm_count": torch.cuda.get_device_properties(0).multi_processor_count,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "helion": importlib.metadata.version("helion"),
        "source": source_hash(),
    }


def run_description(command: str, commit: str | None) -> dict[str, Any]:
    """When and how. `commit` is asked of git unless it is given."""
    if commit is None:
        here = Path(helion_attn.__file__).parent
        git = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        try:
            commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            commit = "unknown"
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit, "command": command}


def workload_fields(w: Workload) -> dict[str, Any]:
    """`w` as a row of the table has it."""
    return {name: x for name, x in asdict(w).items() if name not in ("name", "tags", "causal")}


def _key(config: dict[str, Any], workload: dict[str, Any], provenance: dict[str, Any]) -> str:
    # A candidate has no occupancy yet.
    known = {name: value for name, value in config.items() if name != "ctas_per_sm"}
    return json.dumps([known, workload, {name: provenance[name] for name in MACHINE}], sort_keys=True)


class Journal:
    """Timings in a file, one a line."""

    def __init__(self, path: Path) -> None:
        """Read `path`, if it is there. A last line that was not finished is removed."""
        self.path = path
        self._found: dict[str, dict[str, Any]] = {}
        if not path.exists():
            return
        text = path.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole)
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                self._found[_key(entry["config"], entry["workload"], entry["provenance"])] = entry
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}, is not a timing: {line[:80]!r}") from error

    def find(self, tile: Tile, w: Workload, now: dict[str, Any]) -> Timing | None:
        """The timing of a candidate on the `machine()` of now."""
        entry = self._found.get(_key(launch_parameters(tile), workload_fields(w), now))
        if entry is None:
            return None
        known = {name: entry[name] for name in ("registers", "spills", "ms", "provenance")}
        return Timing(type(tile)(**entry["config"], passes=tuple(entry["passes"])), w, **known)

    def append(self, timing: Timing) -> None:
        """Write it to the file."""
        entry = {
            "config": launch_parameters(timing.tile),
            "workload": workload_fields(timing.workload),
            "registers": timing.registers,
            "spills": timing.spills,
            "passes": timing.tile.passes,
            "ms": timing.ms,
            "provenance": timing.provenance,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
