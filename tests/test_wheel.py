"""What `pip install` brings: all of the package, and nothing that its user's own folders may hold."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import helion_attn as ha

ROOT = Path(__file__).parent.parent


def test_wheel_has_the_package_and_nothing_else(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    package = {
        path.relative_to(ROOT)
        for path in ROOT.glob("helion_attn/**/*")
        if path.suffix in {".py", ".json", ".typed", ".egg-info"}
    }
    assert {Path("helion_attn/py.typed"), Path("helion_attn/configs/fp8_attn_fwd_sm90.json")} <= package
    assert {name for name in names if not name.parts[0].endswith(".dist-info")} == package
    # What only who works on the package needs.
    assert not {"devtools", "tune", "sm90.py", "workloads.py"} & {part for name in names for part in name.parts}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    return Path(built)


@pytest.mark.thorough
def test_installed_into_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """The wheel, beside the dependencies of this environment, which are not installed again, passes its self-check."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)  # what pip does with a wheel of Python files
    # Of this environment the folder alone: its own .pth files, such as that of an editable install, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": plain}
    where = subprocess.run([python, "-c", "import helion_attn; print(helion_attn.__file__)"], check=True, **options)  # type: ignore[call-overload]
    assert Path(where.stdout.strip()).is_relative_to(packages)
    done = subprocess.run([python, "-m", "helion_attn"], **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"helion_attn  {ha.__version__}" in done.stdout
    assert "self-check   passed" in done.stdout
