"""The tritonbench plugin, against a stand-in for the few names of tritonbench that it uses."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.integrations import tritonbench as plugin
from helion_attn.testing import relative_error

SM_SCALE = 0.3


class Tritonbench:
    """The stand-in: its registries, its operator class, and what its command line was called with."""

    def __init__(self) -> None:
        self.benchmarks: dict[str, dict[str, SimpleNamespace]] = defaultdict(dict)
        self.metrics: dict[str, list[str]] = defaultdict(list)
        self.Operator: Any = type("Operator", (), {"causal": False, "sm_scale": SM_SCALE})
        self.ran_with: list[str] | None = None

    def register_benchmark(
        self, operator_name: str, func_name: str, label: str, fwd_only: bool
    ) -> Callable[[Any], Any]:
        def decorator(function: Any) -> Any:
            backend = SimpleNamespace(name=func_name, label=label, fwd_only=fwd_only)
            self.benchmarks[operator_name][func_name] = backend
            return lambda *args: function(*args)

        return decorator

    def run(self, argv: list[str]) -> None:
        self.ran_with = argv

    def measure(self, name: str, qkv: tuple[torch.Tensor, ...]) -> float:
        """The plugin's metric of a backend, called as tritonbench does."""
        operator = self.Operator()
        fn = getattr(operator, name)(*qkv)
        fn._name = name
        return getattr(operator, plugin.METRIC)(fn, qkv, None)

    def add_backend(self, name: str, attention: Callable[..., torch.Tensor]) -> None:
        """Add a backend that returns attention(q, k, v, causal=..., sm_scale=...)."""

        def method(operator: Any, *qkv: torch.Tensor) -> Callable[[], torch.Tensor]:
            return lambda: attention(*qkv, causal=operator.causal, sm_scale=operator.sm_scale)

        setattr(self.Operator, name, method)


@pytest.fixture
def tritonbench(monkeypatch: pytest.MonkeyPatch) -> Tritonbench:
    fake = Tritonbench()
    contents: dict[str, dict[str, Any]] = {
        "tritonbench": {},
        "tritonbench.operators": {},
        "tritonbench.operators.fp8_attention": {},
        "tritonbench.operators.fp8_attention.operator": {"Operator": fake.Operator},
        "tritonbench.utils": {},
        "tritonbench.utils.triton_op": {
            "REGISTERED_METRICS": fake.metrics,
            "register_benchmark": fake.register_benchmark,
        },
        "tritonbench.utils.path_utils": {},
        "tritonbench.utils.run_utils": {"tritonbench_run": fake.run},
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return fake


def make_qkv() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    # Inputs as the operator makes them: fp16, and requiring grad although nothing runs backward.
    return tuple(torch.randn(1, 2, 70, 32, dtype=torch.float16, requires_grad=True) for _ in range(3))


def test_register_twice_is_register_once(tritonbench: Tritonbench) -> None:
    plugin.register()
    plugin.register()
    assert list(tritonbench.benchmarks) == ["fp8_attention"]
    assert list(tritonbench.benchmarks["fp8_attention"]) == ["helion_attn"]
    assert tritonbench.benchmarks["fp8_attention"]["helion_attn"].fwd_only
    assert tritonbench.metrics == {"fp8_attention": ["helion_attn_error"]}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_backend(tritonbench: Tritonbench, causal: bool) -> None:
    plugin.register()
    tritonbench.Operator.causal = causal
    q, k, v = make_qkv()
    fn = tritonbench.Operator().helion_attn(q, k, v)
    ref = ha.reference.attention(q.detach(), k.detach(), v.detach(), causal=causal, sm_scale=SM_SCALE)
    with torch.no_grad():
        q.zero_()  # quantised by now: what is timed does not read it
    out = fn()
    assert out.dtype == torch.float16
    assert relative_error(out, ref) < 0.08
    assert tritonbench.measure("helion_attn", make_qkv()) == pytest.approx(relative_error(out, ref))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_metric(tritonbench: Tritonbench, causal: bool) -> None:
    plugin.register()
    tritonbench.Operator.causal = causal
    qkv = make_qkv()

    def zeros(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.zeros_like(q)

    def nan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.full_like(q, torch.nan)

    def wrong_mask(*args: torch.Tensor, causal: bool, sm_scale: float) -> torch.Tensor:
        return ha.reference.attention(*args, causal=not causal, sm_scale=sm_scale)

    def fp8_output(*args: torch.Tensor, causal: bool, sm_scale: float) -> torch.Tensor:
        return ha.reference.attention(*args, causal=causal, sm_scale=sm_scale).to(torch.float8_e4m3fn)

    tritonbench.add_backend("oracle", ha.reference.attention)
    tritonbench.add_backend("zeros", zeros)
    tritonbench.add_backend("nan", nan)
    tritonbench.add_backend("wrong_mask", wrong_mask)
    tritonbench.add_backend("fp8_output", fp8_output)
    assert tritonbench.measure("oracle", qkv) < 1e-12
    assert tritonbench.measure("zeros", qkv) == pytest.approx(1.0)
    assert not tritonbench.measure("nan", qkv) < torch.inf
    assert tritonbench.measure("wrong_mask", qkv) > 0.1
    assert 0.01 < tritonbench.measure("fp8_output", qkv) < 0.05


def test_main(tritonbench: Tritonbench) -> None:
    plugin.main(["--op", "fp8_attention"])
    assert tritonbench.ran_with == ["--op", "fp8_attention"]
    assert "helion_attn" in tritonbench.benchmarks["fp8_attention"]


def test_main_of_an_older_checkout(tritonbench: Tritonbench, tmp_path: Path) -> None:
    ran_with = tmp_path / "ran_with"
    (tmp_path / "run.py").write_text(f"def run(args):\n    open({str(ran_with)!r}, 'w').write(' '.join(args))\n")
    del sys.modules["tritonbench.utils.run_utils"].tritonbench_run
    vars(sys.modules["tritonbench.utils.path_utils"])["REPO_PATH"] = tmp_path
    plugin.main(["--op", "fp8_attention"])
    assert ran_with.read_text() == "--op fp8_attention"
