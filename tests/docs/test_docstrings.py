"""Every public function and type has an example in its docstring, which runs on a CPU."""

from __future__ import annotations

import ast
import inspect
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import helion_attn as ha

MODULES: dict[str, ModuleType] = {"ha": ha, "ha.masks": ha.masks, "ha.pages": ha.pages, "ha.reference": ha.reference}
MODULES |= {"ha.distributed": ha.distributed, "ha.kv_cache": ha.kv_cache}

PUBLIC: dict[str, Any] = {
    f"{prefix}.{name}": getattr(module, name)
    for prefix, module in MODULES.items()
    for name in module.__all__
    if inspect.isfunction(getattr(module, name)) or inspect.isclass(getattr(module, name))
}

#: Other libraries that examples import.
NEEDED = {
    "ha.register_transformers": "transformers",
    "ha.transformers_cache": "transformers",
    "ha.register_diffusers": "diffusers",
    "ha.fuse_diffusers": "diffusers",
    "ha.fuse_transformers": "transformers",
    "ha.unfuse": "diffusers",
}

#: Seconds, with others' imports done. The first call of a kind takes longest.
MOST_SECONDS = 60.0


def example(documented: Any) -> str:
    """The code, or nothing."""
    return textwrap.dedent((inspect.getdoc(documented) or "").partition("\nExample:\n")[2])


def names_in(code: str) -> set[str]:
    """What is called or looked up by attributes, as it is written."""
    return {ast.unparse(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}


@pytest.fixture
def group(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """A group of this process, for what needs one."""
    if not request.node.callspec.params["name"].startswith("ha.distributed."):
        yield
        return
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_examples_are_looked_for() -> None:
    assert len(PUBLIC) > 60
    assert {"ha.attention", "ha.Recipe", "ha.masks.documents", "ha.distributed.shard"} <= set(PUBLIC)
    assert example(test_examples_are_looked_for) == ""


def on_gpu(name: str) -> Any:
    """A case of `test_example`, marked if the example's tensors are on a GPU."""
    return pytest.param(name, marks=[pytest.mark.gpu] if '"cuda"' in example(PUBLIC[name]) else [])


@pytest.mark.parametrize("name", map(on_gpu, PUBLIC))
@pytest.mark.usefixtures("group")
def test_example(name: str) -> None:
    """It is there, names what it is an example of, and runs."""
    code = example(PUBLIC[name])
    assert code, f"{name} has no example"
    made_by = {"ha.PagedKVCache": "ha.paged_kv_cache", "ha.OpenPages": "ha.append_kvcache"}
    assert {name, made_by.get(name, name)} & names_in(code), f"the example does not name {name}"
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    torch.manual_seed(0)
    names: dict[str, Any] = {"torch": torch, "ha": ha}
    begin = time.perf_counter()
    with warnings.catch_warnings():
        exec(compile(code, f"example of {name}", "exec"), names)
    assert time.perf_counter() - begin < MOST_SECONDS
    outs = [x for key in ("out", "near", "model", "exact", "y") if isinstance(x := names.get(key), torch.Tensor)]
    assert not any(x.isnan().any() for x in outs)
