"""What `scripts/hub.py` writes: `kernels` loads it where nothing else has the package, and it computes attention."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
from pathlib import Path

import torch
from kernels import get_local_kernel

folder = Path(sys.argv[1])
loaded = get_local_kernel(folder)
import helion_attn
from helion_attn.testing import error_budget, relative_error

torch.manual_seed(0)
q, k, v = (torch.randn(1, heads, 70, 64, dtype=torch.bfloat16) for heads in (2, 1, 1))
exact = loaded.reference.attention(q, k, v, causal=True)
model = relative_error(loaded.reference.fp8_attention(q, k, v, causal=True), exact)
error = relative_error(loaded.attention(q, k, v, causal=True), exact)
assert 0.005 < error < error_budget(model, q.dtype), (error, model)

assert Path(helion_attn.__file__).is_relative_to(folder), helion_attn.__file__
assert loaded.attention is helion_attn.attention
assert loaded.distributed is helion_attn.distributed
assert set(dir(loaded)) == set(helion_attn.__all__)
assert get_local_kernel(folder) is loaded
print("loaded")
"""


@pytest.fixture(scope="module")
def hub() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        return importlib.import_module("hub")


@pytest.fixture(scope="module")
def repository(hub: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    hub.write(folder)
    return folder


def without_the_package(folder: Path) -> Path:
    """A Python that finds what this one does, but no helion_attn."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path and not Path(path).is_relative_to(ROOT / "tests")]
    others = [path for path in others if not (Path(path) / "helion_attn").exists()]
    (packages / "others.pth").write_text("\n".join(others))
    return folder / "bin" / "python"


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="`kernels` is not installed")
def test_kernels_loads_it(repository: Path, tmp_path: Path) -> None:
    python = without_the_package(tmp_path / "environment")
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Nothing is asked of the Hub.
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": plain | {"HF_HUB_OFFLINE": "1"}}
    missing = subprocess.run([python, "-c", "import helion_attn"], **options)  # type: ignore[call-overload]
    assert "No module named 'helion_attn'" in missing.stderr
    done = subprocess.run([python, "-c", PROGRAM, repository], **options)  # type: ignore[call-overload]
    assert done.stdout == "loaded\n", done.stderr


def test_files(repository: Path, hub: ModuleType) -> None:
    variant = repository / hub.VARIANT
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["id"].isidentifier()
    written = {path.relative_to(variant).as_posix() for path in variant.rglob("*") if path.is_file()}
    package = {
        f"helion_attn/{p.relative_to(ROOT / 'helion_attn').as_posix()}" for p in ROOT.glob("helion_attn/**/*.py")
    }
    assert package < written
    assert not any("__pycache__" in name for name in written)
    assert set(metadata["digest"]["files"]) == written - {"metadata.json"}
    assert hub.digests(variant / "helion_attn")["api.py"] == metadata["digest"]["files"]["helion_attn/api.py"]
    assert (repository / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_nothing_is_overwritten(repository: Path, hub: ModuleType) -> None:
    with pytest.raises(FileExistsError, match="not empty"):
        hub.write(repository)
