"""What pip would install resolves on an ordinary Linux machine, and the Makefile chooses the environment that fits."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from email.parser import HeaderParser
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from helion_attn.compiler import versions

ROOT = Path(__file__).parent.parent
#: Of environments with the package's dependencies; vllm.txt lists packages that are installed without theirs.
CONSTRAINTS = sorted(path for path in (ROOT / "constraints").glob("*.txt") if path.stem != "vllm")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    return Path(built)


def extras(wheel: Path) -> list[str]:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
    return HeaderParser().parsestr(archive.read(metadata).decode()).get_all("Provides-Extra", [])


def resolve(requirement: str, python: str, constraints: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What ordinary Linux would install, from the public index alone: no configuration or wheels of this machine."""
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "-", "--no-config", "--quiet", "--no-header", "--no-annotate"),
        *("--python", sys.executable, "--only-binary", ":all:"),
        *("--python-version", python, "--python-platform", "x86_64-manylinux_2_28"),
        *(("--constraints", str(constraints)) if constraints else ()),
    ]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    return subprocess.run(command, input=requirement, capture_output=True, text=True, env=plain, cwd=ROOT.anchor)


@functools.cache
def no_index_answers() -> bool:
    """Whether a package without dependencies does not resolve. CI has an index, and fails without one."""
    return "CI" not in os.environ and resolve("packaging", PYTHONS[0]).returncode != 0


# A string is evaluated when a test that has the mark is about to run.
needs_index = pytest.mark.skipif(
    "no_index_answers()", reason="the public index does not resolve `packaging`, and CI is not set"
)


def versions_of(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    pinned = (line.split(" ")[0].partition("==") for line in done.stdout.splitlines())
    return {name: version for name, _, version in pinned}


#: By whether there are extras, and by constraints: the versions that each of `PYTHONS` gets.
Resolved = dict[tuple[bool, Path | None], list[dict[str, str]]]


@pytest.fixture(scope="module")
def resolved(wheel: Path) -> Resolved:
    """The package alone and with all extras, resolved at once, since an index answers slowly."""
    alone, whole = f"helion_attn @ {wheel.as_uri()}", f"helion_attn[{','.join(extras(wheel))}] @ {wheel.as_uri()}"
    wanted = {(False, None): alone, **{(True, constraints): whole for constraints in (None, *CONSTRAINTS)}}
    with ThreadPoolExecutor(len(wanted) * len(PYTHONS)) as pool:
        done = {
            key: [pool.submit(resolve, requirement, python, key[1]) for python in PYTHONS]
            for key, requirement in wanted.items()
        }
        return {key: [versions_of(one.result()) for one in of_pythons] for key, of_pythons in done.items()}


@pytest.mark.thorough
@needs_index
def test_the_package_alone_takes_a_known_triton(resolved: Resolved) -> None:
    for found in resolved[False, None]:
        known = versions.known_triton(found["triton"])
        assert known is not None
        assert versions.series(found["torch"]) in known.torch.split(", ")


@pytest.mark.thorough
@needs_index
@pytest.mark.parametrize("constraints", [None, *CONSTRAINTS], ids=lambda path: path.stem if path else "newest")
def test_all_extras(constraints: Path | None, resolved: Resolved) -> None:
    """Each resolves alone if all do together."""
    for found in resolved[True, constraints]:
        for line in constraints.read_text().splitlines() if constraints else ():
            name, equals, version = line.partition("==")
            assert not equals or found[name] == version


def make(target: str, folder: Path, nvidia_smi: str | None, *variables: str) -> list[str]:
    """The lines that `make` would run with this in place of nvidia-smi."""
    if nvidia_smi is not None:
        stand_in = folder / "nvidia-smi"
        stand_in.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
        stand_in.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    command = ["make", "-n", target, f"VENV={folder / 'venv'}", *variables]
    # An outer make hands down its own flags and variables.
    inherited = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "CONSTRAINTS", "VENV", "VENV_FLAGS", "PYTHON")
    plain = {name: value for name, value in os.environ.items() if name not in inherited}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=plain | {"PATH": path})
    return done.stdout.splitlines()


#: What nvidia-smi does, and whether that is a Hopper GPU.
MACHINES = {
    "h100": ("echo 9.0", True),
    "two_gpus": ("echo 8.0; echo 9.0", True),
    "a100": ("echo 8.0", False),
    "b200": ("echo 10.0", False),
    "driver_alone": ("echo 'No devices were found'; exit 6", False),
    "broken_driver": ("echo 'NVIDIA-SMI has failed'; exit 9", False),
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("target", ["test", "demo"])
def test_make_installs_what_fits_the_machine(target: str, machine: str, tmp_path: Path) -> None:
    nvidia_smi, hopper = MACHINES[machine]
    lines = make(target, tmp_path, nvidia_smi)
    (install,) = (line for line in lines if "--editable" in line)
    assert f"--constraint constraints/{'hopper' if hopper else 'no_gpu'}.txt" in install
    assert [line.split()[-1] for line in lines if "--no-deps" in line] == ([] if hopper else ["triton==3.6.0"])
