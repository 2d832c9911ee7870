"""scripts/sanitize.py, as far as it runs without compute-sanitizer: its cases, its reading of logs, its exit code."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from helion_attn.compiler.passes import pingpong
from helion_attn.compiler.passes.outcome import Outcome
from helion_attn.kernels.lib import steps

SCRIPT = Path(__file__).parents[2] / "scripts" / "sanitize.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitize", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sanitize"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


script = load()


@pytest.mark.thorough(but=8)
@pytest.mark.parametrize("name", script.CASES)
def test_case(name: str, device: str) -> None:
    script.CASES[name](device)


def test_a_case_walks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that its result would not be finite."""
    monkeypatch.setattr(steps, "MAX_ROW_SUM", float("inf"))
    with pytest.raises(ValueError, match="error nan, budget"):
        script.CASES["hybrid_walked_again"]("cpu")


# The form of the logs is that of the compute-sanitizer manual's examples.
CLEAN = "========= COMPUTE-SANITIZER\nanything\n========= ERROR SUMMARY: 0 errors\n"
OUT_OF_BOUNDS = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at _helion_pack+0x50 in pack.py:74
=========     by thread (1,0,0) in block (0,0,0)
=========     Address 0x7f0000000003 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
========= ERROR SUMMARY: 1 error
"""
HAZARD = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _helion_fp8_attn_fwd+0x150
=========     and Read access at _helion_fp8_attn_fwd+0x220 [6 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
IN_PYTORCH = HAZARD.replace("_helion_fp8_attn_fwd", "void at::native::reduce_kernel<(int)512>(T3)")
IN_CONTROL = HAZARD.replace("_helion_fp8_attn_fwd", "races")
IN_PINGPONG = HAZARD.replace("_helion_fp8_attn_fwd", "pingpong")
BAD_READ_IN_PYTORCH = OUT_OF_BOUNDS.replace("_helion_pack", "at::native::reduce_kernel")


def write_program(folder: Path, log: str, exit_code: int, control_log: str, control_code: int) -> Path:
    """In the sanitizer's place: it prints a log, another one for what has a race."""
    program = folder / "sanitizer"
    program.write_text(
        f"#!/bin/sh\ncase \"$*\" in *{script.RACES}*)\ncat <<'END'\n{control_log}\nEND\nexit {control_code}\nesac\n"
        f"cat <<'END'\n{log}\nEND\nexit {exit_code}\n"
    )
    program.chmod(0o755)
    return program


def test_logs_are_read() -> None:
    assert script.parse_log(CLEAN) == (0, [])
    assert script.parse_log("the program stopped\n") == (None, [])
    (finding,) = script.parse_log(OUT_OF_BOUNDS)[1]
    assert finding == script.Finding("Invalid __global__ write of size 4 bytes", "_helion_pack")
    count, (hazard,) = script.parse_log(HAZARD)
    assert count == 1
    assert "Race reported between Write access at _helion_fp8_attn_fwd" in hazard.message


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize(
    ("log", "exit_code", "expected"),
    [
        (CLEAN, 0, 0),
        (CLEAN, 1, 1),
        (OUT_OF_BOUNDS, 86, 1),
        (HAZARD, 86, 1),
        (IN_PYTORCH, 86, 0),
        (IN_PYTORCH, 1, 1),
        (BAD_READ_IN_PYTORCH, 86, 1),
        ("no summary", 0, 1),
    ],
    ids=[
        "clean",
        "case_failed",
        "memcheck",
        "racecheck",
        "race_in_pytorch",
        "race_in_pytorch_and_case_failed",
        "memcheck_in_pytorch",
        "no_summary",
    ],
)
def test_exit_code(log: str, exit_code: int, expected: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a program in the sanitizer's place that prints a log and runs nothing."""
    program = write_program(tmp_path, log, exit_code, IN_CONTROL, script.FOUND)
    out = tmp_path / "sanitize.json"
    assert script.main(["--out", str(out), "--sanitizer", str(program)]) == expected
    rows = json.loads(out.read_text())["rows"]
    cases = [(t, c) for t in script.TOOLS for c in script.CASES]
    controls = [("racecheck", name) for name in script.CONTROLS]
    assert [(row["tool"], row["case"]) for row in rows] == [*cases, *controls]
    assert {row["returncode"] for row in rows[:-1]} == {exit_code}
    assert ("_helion_pack" in capsys.readouterr().out) == (log == OUT_OF_BOUNDS)


@pytest.mark.parametrize(
    ("of_pingpong", "without", "expected"),
    [(IN_PINGPONG, CLEAN, 0), (IN_PINGPONG, HAZARD, 1), (CLEAN, CLEAN, 1)],
    ids=["only_with_pingpong", "without_too", "pingpong_is_followed"],
)
def test_reports_are_repeated_without_pingpong(of_pingpong: str, without: str, expected: int, tmp_path: Path) -> None:
    """Four cases have a report under racecheck. It is excused where racecheck reports ping-pong that has no race."""
    program = tmp_path / "sanitizer"
    logs = {
        f"*{script.RACES}": IN_CONTROL,
        "*--without-pingpong": without,
        f"*{script.UNEVEN_PINGPONG}": of_pingpong,
        "*racecheck*hybrid|*racecheck*bf16_d256": HAZARD,
        "*": CLEAN,
    }
    arms = (
        f"{pattern})\ncat <<'END'\n{log}\nEND\nexit {script.FOUND if 'Race' in log else 0};;\n"
        for pattern, log in logs.items()
    )
    program.write_text(f'#!/bin/sh\ncase "$*" in {"".join(arms)}esac\n')
    program.chmod(0o755)
    out = tmp_path / "sanitize.json"
    assert script.main(["--out", str(out), "--sanitizer", str(program)]) == expected
    again = [row["case"] for row in json.loads(out.read_text())["rows"] if not row["pingpong"]]
    assert again == ([] if of_pingpong == CLEAN else ["listed_hybrid", "hybrid", "bf16_d256", "packed_hybrid"])


def test_pingpong_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script.CASES, "full_d64", lambda device: seen.append(pingpong.with_pingpong("IR")))
    seen: list[Outcome] = []
    assert script.main(["--case", "full_d64", "--without-pingpong"]) == 0
    assert seen == [Outcome(pingpong.NAME, False, "scripts/sanitize.py left them out", "IR")]


@pytest.mark.parametrize(("log", "exit_code"), [(CLEAN, 0), ("no summary", 86), (IN_CONTROL, 1), (IN_PYTORCH, 86)])
def test_the_race_must_be_found(log: str, exit_code: int, tmp_path: Path) -> None:
    program = write_program(tmp_path, CLEAN, 0, log, exit_code)
    assert script.main(["--out", str(tmp_path / "x.json"), "--sanitizer", str(program)]) == 1
