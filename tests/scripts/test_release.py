"""What `make release` adds to the wheel, the site and the Hub's folder: ComfyUI's pack, and a check of the wheel."""

from __future__ import annotations

import importlib
import re
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]

pytest.importorskip("material", reason="mkdocs-material is not installed")


@pytest.fixture(scope="module")
def release() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        return importlib.import_module("release")


def test_the_pack_is_one_folder_of_the_nodes_and_the_licence(release: ModuleType, tmp_path: Path) -> None:
    path = release.pack(tmp_path)
    assert re.fullmatch(r"comfyui-helion-attn-\d+\.\d+\.\d+\.zip", path.name)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "comfyui-helion-attn"
    found = {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    nodes = {Path(name) for name in ("__init__.py", "nodes.py", "pyproject.toml", "requirements.txt", "README.md")}
    assert nodes < {*found}
    assert found.pop(Path("LICENSE")) == (ROOT / "LICENSE").read_bytes()
    assert all(content == (ROOT / "comfyui" / name).read_bytes() for name, content in found.items())
    assert not any("__pycache__" in name.parts for name in found)


def test_nothing_is_overwritten(release: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        release.write(tmp_path)


@pytest.mark.thorough
def test_a_wheel_is_run_where_it_is_installed(
    release: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    release.check_installed(Path(built))
    assert "usage: python -m helion_attn" in capfd.readouterr().out


@pytest.mark.thorough
def test_a_wheel_without_the_package_fails(release: ModuleType, tmp_path: Path) -> None:
    """Though the environment that its dependencies come from has it."""
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    broken = tmp_path / "broken" / Path(built).name
    broken.parent.mkdir()
    with zipfile.ZipFile(built) as whole, zipfile.ZipFile(broken, "w") as archive:
        for name in whole.namelist():
            if ".dist-info/" in name:
                archive.writestr(name, whole.read(name))
    with pytest.raises(subprocess.CalledProcessError) as failed:
        release.check_installed(broken)
    assert "import helion_attn" in failed.value.cmd[-1]
