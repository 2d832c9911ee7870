"""Timing, and result files with the metadata of their run."""

from __future__ import annotations

import json
import math
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from devtools.workloads import Workload

Row = dict[str, Any]

#: By name, the result files: {"meta": {...}, "rows": [...]} each.
Loaded = dict[str, Row]

Key = TypeVar("Key", bound=Hashable)

#: The folder of the result files, from the root of the repository.
RESULTS = Path("benchmarks/results")

#: `torch.cuda._sleep` counts SM cycles, and no Hopper SM clocks higher than this.
MAX_SM_HZ = 2.0e9

#: Longest head start of the host before a call, in seconds.
MAX_HEAD_START = 0.02

# --- timing ---------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Waits for the device, if it is one to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_interleaved(
    functions: Mapping[Key, Callable[[], object]],
    device: torch.device,
    repeats: int = 20,
    warmup: int = 2,
    align: Callable[[], object] | None = None,
) -> dict[Key, float]:
    """Median milliseconds of each function.

    All warm up; then, `repeats` times, each runs once, in a shuffled order, the same in every run. Clocks and
    temperature drift on a shared machine, and so they drift for all alike. Nor does one always follow the same other: a
    GPU at its power cap clocks higher for about a tenth of a second after a kernel that drew less. On a GPU the
    host is given a head start before each call, twice what the call took it before, so that a launch does not wait for
    Python; L2 is not flushed.

    Args:
        functions: what to time, by any key.
        device: where they run. On the CPU, a dry run, nothing warms up, and each call is timed with the host's clock.
        repeats: rounds.
        warmup: calls of each before the first round.
        align: runs on the GPU before each call, not timed. A small collective has all ranks begin together: otherwise a
            call's own collective waits for the rank that is behind.
    """
    keys = list(functions)
    if not keys:
        return {}
    for _ in range(warmup if device.type == "cuda" else 0):
        for key in keys:
            functions[key]()
    synchronize(device)
    generator = random.Random(0)
    orders = [generator.sample(keys, len(keys)) for _ in range(repeats)]

    if device.type != "cuda":
        times: dict[Key, list[float]] = {key: [] for key in keys}
        for order in orders:
            for key in order:
                started = time.perf_counter()
                functions[key]()
                times[key].append(1e3 * (time.perf_counter() - started))
        return {key: statistics.median(values) for key, values in times.items()}

    head_starts: dict[Key, int] = {}
    for key in keys:
        # A call that waits for the GPU is not to wait for the one before it.
        synchronize(device)
        started = time.perf_counter()
        functions[key]()
        head_starts[key] = int(min(2.0 * (time.perf_counter() - started), MAX_HEAD_START) * MAX_SM_HZ)
    synchronize(device)
    events = {key: [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)] for key in keys}
    for i, order in enumerate(orders):
        for key in order:
            begin, end = events[key][i]
            torch.cuda._sleep(head_starts[key])
            if align is not None:
                align()
            begin.record()
            functions[key]()
            end.record()
    synchronize(device)
    return {key: statistics.median(begin.elapsed_time(end) for begin, end in events[key]) for key in keys}


def copier(*tensors: Tensor) -> Callable[[], None]:
    """A function that copies `tensors` into memory allocated now: the yardstick for a memory-bound kernel."""
    targets = [torch.empty_like(x) for x in tensors]

    def copy() -> None:
        for target, x in zip(targets, tensors, strict=True):
            target.copy_(x)

    return copy


def nbytes(*tensors: Tensor) -> int:
    """Bytes that the elements of `tensors` occupy."""
    return sum(x.numel() * x.element_size() for x in tensors)


def gigabytes_per_second(moved: int, ms: float) -> float:
    """Bandwidth of moving `moved` bytes (read plus written) in `ms`."""
    return moved / ms / 1e6


def copy_bandwidth(size: int, device: torch.device, repeats: int = 20) -> float:
    """GB/s, read plus written, of copying `size` bytes within the device."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    ms = time_interleaved({"copy": copier(source)}, device, repeats)["copy"]
    return gigabytes_per_second(2 * size, ms)


def attention_flops(workload: Workload) -> float:
    """2 M N (D + D_v) H B: two products, a multiply and an add each; half of it is masked away when causal."""
    w = workload
    return 2.0 * w.M * w.N * (w.D + (w.D_v or w.D)) * w.H * w.B / (2 if w.causal else 1)


# --- results --------------------------------------------------------------------------------------


def result_row(
    impl: str,
    workload: Workload,
    stage: str,
    kind: str,
    *,
    recipe: str | None = None,
    ms: float | None = None,
    error_kernel: float | None = None,
    error_total: float | None = None,
) -> Row:
    """The fields that every row of a result file has; a suite adds its own, such as `note` or `error_message`.

    Args:
        impl: a key of `peers.IMPLS`.
        workload: the shape.
        stage: "kernel", "preprocess", "e2e" or, of a KV cache, "append".
        kind: of input, as in `devtools.inputs.make_qkv`.
        recipe: how the inputs became FP8, where that is a choice.
        ms: median time, None when it was not taken or must not be reported.
        error_kernel: relative error against the fp64 oracle on what the kernel was given.
        error_total: the same on the unquantised inputs.
    """
    w = workload
    timed = ms is not None and stage != "preprocess"
    return {
        "impl": impl,
        "recipe": recipe,
        **{name: getattr(w, name) for name in ("B", "H", "H_kv", "M", "N", "D")},
        "D_v": w.D_v or w.D,
        "causal": w.causal,
        "stage": stage,
        "ms": ms,
        "tflops": attention_flops(w) / ms / 1e9 if timed and ms is not None else None,
        "input": kind,
        "error_kernel": error_kernel,
        "error_total": error_total,
    }


def _json_value(value: Any) -> Any:
    """Six digits. JSON has no NaN or inf: as text they stay visible, where null would pass for "not measured"."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


@dataclass
class Results:
    """One result file, `{"meta": {...}, "rows": [...]}`, rewritten after every step so that no crash loses it."""

    path: Path
    meta: Row
    rows: list[Row] = field(default_factory=list)

    def add(self, *rows: Row) -> None:
        """Appends `rows` and writes the file."""
        self.rows.extend(rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        clean = [{name: _json_value(value) for name, value in row.items()} for row in self.rows]
        # One row per line: a diff of two runs is then readable.
        lines = ",\n  ".join(json.dumps(row, allow_nan=False) for row in clean)
        meta = json.dumps(self.meta, indent=1).replace("\n", "\n ")
        self.path.write_text(f'{{\n "meta": {meta},\n "rows": [\n  {lines}\n ]\n}}\n')


def load(folder: Path) -> Loaded:
    """The result files in `folder`, by name."""
    loaded: Loaded = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        for row in content["rows"]:
            for name in ("error_kernel", "error_total", "rmse", "max_error", "ratio", "cosine", "least"):
                if isinstance(row.get(name), str):  # "nan" and "inf", which JSON cannot hold as numbers
                    row[name] = float(row[name])
        loaded[path.stem] = content
    return loaded


def version_of(package: str) -> str | None:
    """Its version, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _cudnn_version() -> str | None:
    packed = torch.backends.cudnn.version()  # 91900 is 9.19.0
    return None if packed is None else f"{packed // 10000}.{packed % 10000 // 100}.{packed % 100}"


def describe_run(device: torch.device, commit: str | None = None) -> Row:
    """The `meta` of a result file: where, when and with which versions it was measured.

    Args:
        device: that was measured.
        commit: of this repository; by default what git says, where there is git.
    """
    on_gpu = device.type == "cuda"
    here = Path(__file__).resolve().parent
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "helion": version_of("helion"),
        "cudnn": _cudnn_version() if on_gpu else None,
        "cudnn_frontend": version_of("nvidia-cudnn-frontend"),
        "fa3": version_of("fa3-fwd"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit or _output_of("git", "-C", str(here), "rev-parse", "--short=12", "HEAD"),
    }
