"""`ha.is_supported`, and the self-check of `python -m helion_attn`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn import __main__ as main
from helion_attn.validate.dense import check_device


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of compute capability 9.0 and 8.9."""
    capabilities = [(9, 0), (8, 9)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: ["NVIDIA H200", "NVIDIA L4"][i])


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("device", "supported", "reason"),
    [
        (None, True, "NVIDIA H200, compute capability 9.0: compiled kernels"),
        ("cuda", True, "NVIDIA H200"),
        (0, True, "NVIDIA H200"),
        (torch.device("cuda", 1), False, "NVIDIA L4, compute capability 8.9: not supported, it must be 9.0"),
        ("cuda:2", False, "cuda:2 is asked for, and there are 2 CUDA devices"),
        ("cpu", True, "CPU tensors run in Helion's interpreter"),
        ("meta", False, "meta is neither the CPU nor a CUDA device of compute capability 9.0"),
    ],
    ids=str,
)
def test_is_supported(device: Any, supported: bool, reason: str) -> None:
    found = ha.is_supported(device)
    assert bool(found) is found.supported is supported
    assert reason in found.reason
    assert str(found) == f"{'yes' if supported else 'no'}: {found.reason}"


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ha.is_supported()
    found = ha.is_supported("cuda")
    assert not found
    assert f"torch {torch.__version__} finds no CUDA device" in found.reason


def test_is_what_the_checks_say(device: str) -> None:
    x = torch.zeros(1, device=device)
    if ha.is_supported(device):
        check_device("x", x)
    else:
        with pytest.raises(NotImplementedError):
            check_device("x", x)
    assert not ha.is_supported("meta")
    with pytest.raises(NotImplementedError):
        check_device("x", x.to("meta"))


def test_no_device() -> None:
    with pytest.raises(RuntimeError):
        ha.is_supported("gpu")


def test_self_check(device: str) -> None:
    done = main.self_check(device)
    assert done.passed
    assert set(done.errors) == {"FAST", "BALANCED", "ACCURATE", "HYBRID", "BF16", "packed sequences", "KV cache"}
    assert done.errors["BF16"] < done.errors["HYBRID"] < done.errors["BALANCED"] < done.errors["FAST"]


def test_self_check_fails(device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a mask that is off by one, and on NaN."""
    attention: Any = ha.attention
    monkeypatch.setattr(main, "PRESETS", {"FAST": ha.FAST})
    monkeypatch.setattr(ha, "attention", lambda q, k, v, causal, recipe: attention(q, k, v, window=(-1, 1)))
    assert not main.self_check(device).passed
    monkeypatch.setattr(ha, "attention", lambda q, k, v, causal, recipe: q * float("nan"))
    assert main.main() == 1
    assert "self-check   FAILED" in capsys.readouterr().out


@pytest.mark.thorough
def test_help() -> None:
    """It says what the command does, and runs nothing; an argument that there is not is an error."""
    command = [sys.executable, "-m", "helion_attn"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: python -m helion_attn [-h]")
    assert "self-check" in done.stdout
    assert "passed on" not in done.stdout
    assert subprocess.run([*command, "--what"], capture_output=True, check=False).returncode == 2
