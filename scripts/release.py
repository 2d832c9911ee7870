"""Write all that a release publishes, and check it: wheel, sdist, website, the Hub's repository, ComfyUI's pack.

python scripts/release.py OUT
"""

from __future__ import annotations

import argparse
import site
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

import hub
import website
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).parents[1]
PACK = ROOT / "comfyui"


def pack(out: Path) -> Path:
    """Write ComfyUI's pack into `out`, as a zip to unpack in `custom_nodes`."""
    metadata = ProjectMetadata(str(PACK), PluginManager())
    path = out / f"{metadata.name}-{metadata.version}.zip"
    files = [file for file in sorted(PACK.rglob("*")) if file.is_file() and "__pycache__" not in file.parts]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(file, Path(metadata.name) / file.relative_to(PACK))
        archive.write(ROOT / "LICENSE", Path(metadata.name) / "LICENSE")
    return path


def check_installed(wheel: Path) -> None:
    """Install a wheel into a new environment, which takes its dependencies from this one, and run its command.

    Raises:
        subprocess.CalledProcessError: it does not install, or the command fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=False)
        python = Path(folder) / "bin" / "python"
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
        subprocess.run([*install, wheel], check=True)
        (packages,) = Path(folder).glob("lib/python*/site-packages")
        # The folders alone: their own .pth files, such as that of an editable install, are not read.
        (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
        # Isolated from PYTHONPATH and from the folder that this runs in.
        where = "import helion_attn; print(helion_attn.__file__)"
        found = subprocess.run([python, "-I", "-c", where], check=True, stdout=subprocess.PIPE, text=True).stdout
        assert Path(found.strip()).is_relative_to(packages), found
        subprocess.run([python, "-I", "-m", "helion_attn", "--help"], check=True)


def write(out: Path) -> None:
    """Write everything into `out`, a folder that does not exist or is empty, and check it.

    Raises:
        FileExistsError: something is in `out`.
        subprocess.CalledProcessError: a check failed.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(out), versions=["standard"])
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(out), versions=["standard"])
    website.write(out / "site")
    hub.write(out / "hub")
    pack(out)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], check=True)
    check_installed(Path(wheel))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder that does not exist or is empty")
    write(parser.parse_args().out.resolve())
