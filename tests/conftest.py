"""What every test file shares: the device, no ops, memory that starts as NaN, kernels, options, the fuzz's count."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from helion_attn import BlockMask, plans

pytest.register_assert_rewrite("helpers")

from helpers import shared  # noqa: E402
from helpers.fuzzing import FUZZ_CASES  # noqa: E402
from helpers.memory import nan_filled_memory  # noqa: E402
from helpers.no_ops import NoOps  # noqa: E402
from helpers.quick import QUICK, dearest  # noqa: E402
from helpers.repeated import three_times  # noqa: E402

ON_SM_90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores already

# At Python's own threshold, of 700 objects, the collector took an eighth of a compile test's time.
gc.set_threshold(200_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        dest=QUICK,
        action="store_true",
        help="leave out tests marked `thorough`, which take more than half of the time",
    )
    parser.addoption(
        "--fuzz-cases",
        dest=FUZZ_CASES,
        type=int,
        help="how many random cases each of test_fuzz*.py runs, at least; by default a few a test, the same every time",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker that has no more tests takes half of another's: some tests take a thousand times as long as others."""
    from xdist.scheduler import WorkStealingScheduling  # type: ignore[import-untyped]

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    properties = [p for report in reports if getattr(report, "when", None) == "call" for p in report.user_properties]
    if counts := [count for name, count in properties if name == FUZZ_CASES]:
        terminalreporter.write_line(f"fuzz: {sum(counts)} cases ran, in {len(counts)} specialisations")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not ON_SM_90:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA sm_90 device"))
    if config.getoption(QUICK):
        left_out = dearest(items)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def shared_kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A new folder for what this run compiles."""
    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    shared.FOLDER = run / "shared_kernels"
    shared.FOLDER.mkdir(exist_ok=True)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    # Imports Helion, which takes some seconds: pytest-xdist's own process needs none.
    from helpers import interpreter

    interpreter.install()


@pytest.fixture(autouse=True)
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU every call runs three times, but in tests that are marked: each must give the bits of the first."""
    plans.forget()
    if ON_SM_90 and not request.node.get_closest_marker("once"):
        monkeypatch.setattr(plans, "run", three_times(plans.run))


@pytest.fixture(autouse=True)
def native_attention() -> Iterator[None]:
    """diffusers keeps the backend that a model was given last: the next test begins with its own."""
    yield
    if (dispatch := sys.modules.get("diffusers.models.attention_dispatch")) is not None:
        dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops raise `Launched` instead of running."""
    monkeypatch.setattr(torch.ops, "helion_attn", NoOps())
    monkeypatch.setattr(plans, "key_of", lambda *_: None)


@pytest.fixture
def masks_made(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the masks that `BlockMask.from_dense` is given from here on."""
    made = []
    from_dense = BlockMask.from_dense

    def counted(mask: torch.Tensor, capacity: int | None = None) -> BlockMask:
        made.append(mask.shape)
        return from_dense(mask, capacity)

    monkeypatch.setattr(BlockMask, "from_dense", counted)
    return made


@pytest.fixture(scope="session")
def device() -> str:
    """Where the tests run: the GPU if there is one, else the CPU, on which Helion interprets the kernels."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def poisoned() -> Callable[[], AbstractContextManager[None]]:
    """Inside `with poisoned():` every uninitialised tensor, intermediates included, holds NaN."""
    return nan_filled_memory
