"""A process's first call: it tunes nothing, prints and warns of nothing, and imports little."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helion_attn.compiler import notice

CALL = """
import sys
import torch
import helion_attn as ha
q = torch.randn(1, 2, 70, 64, device=sys.argv[1])
out, lse = ha.attention(q, q, q, causal=True, return_lse=True)
assert out.isfinite().all() and lse.isfinite().all()
"""


def test_a_first_call_says_nothing(device: str) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", CALL, device], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


IMPORTS = """
import importlib, pathlib, sys
import helion_attn
root = pathlib.Path(helion_attn.__file__).parent
for folder in ("ops", "kernels", "preprocess", "compiler", "configs"):
    for path in root.joinpath(folder).rglob("*.py"):
        if path.stem != "__main__":
            importlib.import_module(".".join(["helion_attn", *path.relative_to(root).with_suffix("").parts]))
from helion_attn.compiler.helion_runtime import helpers, launcher
from helion_attn.compiler.inductor_runtime import cache_dir_utils, triton_compat, triton_helpers
assert triton_helpers.div_floor_integer and triton_helpers.math and triton_compat.libdevice
assert cache_dir_utils.cache_dir
assert launcher.default_launcher and launcher.set_triton_allocator and helpers.max_propagate_nan
print(*{name.split(".")[0] if name.startswith("helion.") else name for name in sys.modules})
"""

#: What takes a second or more to import.
HEAVY = {"helion", "torch._inductor", "torch._dynamo", "sympy"}


def test_importing_the_package_imports_nothing_heavy() -> None:
    """Nor do the modules of Inductor and Helion that generated code imports."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert not HEAVY & {*done.stdout.split()}


OFFLINE_CALL = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)
import triton
import helion_attn as ha
from devtools.sm90 import _offline_hopper
from helpers.offline import fake_qkv, launching
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
with _offline_hopper(keep_generated=True), launching():
    ha.attention(*fake_qkv(1, 2, 2, 100, 100, 64))
print(json.dumps({"helion": "helion" in sys.modules, "found": hits}))
"""


@pytest.mark.thorough
def test_a_warm_first_call_does_without_helion(tmp_path: Path) -> None:
    """Triton finds compiled what the first process compiled of the code that Helion generated."""
    folders = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    said: list[dict[str, Any]] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", OFFLINE_CALL], env=os.environ | folders, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout) | {"log": done.stderr})
    cold, warm = said
    assert cold["helion"]
    assert len(cold["found"]) > 2
    assert not any(cold["found"])
    assert cold["log"].count("INFO:helion_attn:compiling ") == 1
    assert "INFO:helion_attn:" not in warm["log"]
    assert not warm["helion"]
    assert warm["found"] == [True] * len(cold["found"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def compile_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "PATIENCE", 0.2)
    monkeypatch.setattr(notice._Spell, "ended", float("-inf"))
    for kernel, seconds in (("quick", 0.0), ("slow", 0.4), ("next", 0.1)):
        with notice.compiling(kernel):
            time.sleep(seconds)


def test_compiling_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it has taken a while, with the kernel that does."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    notice.LOG.addHandler(handler)
    notice.LOG.setLevel(logging.INFO)
    try:
        compile_three(monkeypatch)
    finally:
        notice.LOG.removeHandler(handler)
        notice.LOG.setLevel(logging.NOTSET)
    (line,) = lines.getvalue().splitlines()
    assert line.startswith("compiling slow, for a first call")


@pytest.mark.parametrize("terminal", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_a_terminal_shows_what_compiles(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, which is gone at the end; a file gets nothing."""
    monkeypatch.setattr(sys, "stderr", terminal)
    compile_three(monkeypatch)
    text = terminal.getvalue()
    if terminal.isatty():
        assert "compiling slow" in text
        assert "compiling next" in text
        assert text.endswith("\r\x1b[K")
    assert "quick" not in text
    assert "\n" not in text
    assert bool(text) == terminal.isatty()


#: Seconds of a first call with a warm cache, with all imports but PyTorch's and without the CUDA context.
WARM_SECONDS = 2.0

GPU_CALL = """
import json, sys, time
import torch
q, k, v = torch.randn(3, 1, 16, 1024, 128, device="cuda").bfloat16()
torch.cuda.synchronize()
begin = time.perf_counter()
import helion_attn as ha
out = ha.attention(q, k, v, causal=True)
torch.cuda.synchronize()
print(json.dumps([time.perf_counter() - begin, "helion" in sys.modules, out.isfinite().all().item()]))
"""


@pytest.mark.gpu
def test_a_warm_first_call_on_a_gpu(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    for is_cold in (True, False):
        done = subprocess.run(
            [sys.executable, "-c", GPU_CALL], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        seconds, has_helion, is_finite = json.loads(done.stdout)
        assert is_finite
        assert has_helion == is_cold
    assert seconds <= WARM_SECONDS
