"""What `pip install` brings: all of the package, and nothing that its user's own folders may hold."""

from __future__ import annotations

import zipfile
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent


def test_wheel_has_the_package_and_nothing_else(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    package = {
        path.relative_to(ROOT) for path in ROOT.glob("helion_attn/**/*") if path.suffix in {".py", ".json", ".typed"}
    }
    assert {Path("helion_attn/py.typed"), Path("helion_attn/configs/fp8_attn_fwd_sm90.json")} <= package
    assert {name for name in names if not name.parts[0].endswith(".dist-info")} == package
