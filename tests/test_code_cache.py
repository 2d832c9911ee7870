"""What Helion generated is found on the disk by the next process, where it is the right code and nowhere else."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import helion_attn as ha
from helion_attn.compiler import code_cache
from helion_attn.compiler.helion_adapter import helion, hl
from helion_attn.compiler.kernels import Compiled, compiled
from helion_attn.testing import fake_cuda
from helpers.calls import (
    attend,
    attend_in_parts,
    attend_to_a_cache,
    attend_to_sequences,
    attend_with_large_heads,
    preprocess,
)
from helpers.offline import compilations

# `compilations` leaves the disk alone.
READ, WRITE = code_cache.read, code_cache.write


@dataclass
class Process:
    """What a process did.

    Attributes:
        traced: names of the kernel functions that Helion traced.
        ran: files of the code that was launched. Their names are digests of it.
    """

    traced: list[str]
    ran: list[str] = field(default_factory=list)


@contextlib.contextmanager
def process(reads: bool = True) -> Iterator[Process]:
    """The memory of a new process, on the disk as it is; Triton compiles nothing."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, **options: Any) -> None:
        seen.ran.append(self.fn.__code__.co_filename)

    with (
        compilations() as compiling,
        mock.patch.object(code_cache, "read", READ if reads else lambda key: []),
        mock.patch.object(code_cache, "write", WRITE),
        mock.patch.object(JITFunction, "run", run),
    ):
        seen = Process(compiling.traced)
        yield seen


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_other_lengths_are_found_and_have_this_code() -> None:
    with process() as first:
        attend()
    assert first.traced == ["fp8_attn_fwd"]
    # Of the last, `out` has too few rows for the widest box, and the code is the same by chance.
    lengths = [(65, 1), (20_000, 9000), (5, 7)]
    ran = []
    for reads in (True, False):
        with process(reads) as then:
            for M, N in lengths:
                attend(M, N)
        assert then.traced == ["fp8_attn_fwd"] * (1 if reads else len(then.traced))
        ran.append(then.ran)
    assert ran[0] == ran[1]
    assert len(then.traced) > 1


@pytest.mark.parametrize(
    "call", [preprocess, attend_to_a_cache, attend_to_sequences, attend_with_large_heads, attend_in_parts]
)
def test_every_kernel_is_found(call: Callable[[], None]) -> None:
    with process() as first:
        call()
    with process() as second:
        call()
    assert first.traced
    assert not second.traced
    assert second.ran == first.ran


def test_other_specialisations_are_as_if_nothing_were_there() -> None:
    changes: list[dict[str, Any]] = [
        {"causal": False},
        {"recipe": ha.ACCURATE},
        {"layout": "bshd", "out_dtype": torch.float16},
    ]
    with process():
        attend()
    for changed in changes:
        with process() as found:
            attend(**changed)
        with process(reads=False) as traced:
            attend(**changed)
        assert found.ran == traced.ran, changed


# --- a small kernel -------------------------------------------------------------------------------


def changed_by(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0


def by_three(x: torch.Tensor) -> torch.Tensor:
    return x * 3.0


def small(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, flag: hl.constexpr) -> None:
    width = hl.specialize(x.size(1))
    for i in hl.grid(x.size(0)):
        out[i, :] = changed_by(x[i, :]) + y[i, :] + width if flag else x[i, :]


def small_kernel(num_warps: int = 4) -> Compiled:
    return compiled(small, helion.Config(num_warps=num_warps, indexing="pointer"))


def run_small(
    rows: int = 10, width: int = 64, dtype: torch.dtype = torch.float32, alias: bool = False, flag: bool = True
) -> None:
    x, y, out = (fake_cuda(rows, width, dtype=dtype) for _ in range(3))
    small_kernel()(x, x if alias else y, out, flag)


def traces(*args: Any, **options: Any) -> bool:
    """Whether a new process traces the small kernel."""
    with process() as seen:
        run_small(*args, **options)
    assert len(seen.ran) == 1
    return seen.traced == ["small"]


def test_threads_trace_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels, as `test_two_threads` has them on a GPU; both were once traced at the same time, and one failed."""
    start, tracing = threading.Barrier(2), []

    def trace(self: Any, *args: Any) -> Callable[[], None]:
        tracing.append(self)
        time.sleep(0.1)
        assert tracing[-1] is self, "another thread traces"
        return lambda: None

    def find(generated: code_cache.Generated) -> None:
        start.wait()
        generated.find((fake_cuda(4), fake_cuda(4), fake_cuda(4), True))

    monkeypatch.setattr(code_cache.Generated, "_trace", trace)
    several = [small_kernel(num_warps)._generated for num_warps in (2, 4)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(find, several))
    assert len(tracing) == 2


def test_what_the_small_kernel_depends_on() -> None:
    assert traces()
    assert not traces()
    assert not traces(rows=1)
    assert not traces(rows=100_000)
    for other in ({"width": 128}, {"dtype": torch.bfloat16}, {"alias": True}, {"flag": False}, {"rows": 2**26}):
        assert traces(**other), other
        assert not traces(**other), other
    assert not traces()


def test_which_arguments_are_the_same_tensor_is_part_of_the_key() -> None:
    """A launch that is repeated fills in addresses by place."""
    a, b, c = (fake_cuda(10, 64) for _ in range(3))
    kernel = small_kernel()
    with process():
        for args in ((a, a, b), (a, b, b), (b, a, b), (a, b, c), (b, b, c), (c, a, b)):
            kernel(*args, True)
    assert len(kernel._found) == 4


def test_code_that_was_changed_in_memory() -> None:
    assert traces()
    with mock.patch.object(sys.modules[__name__], "changed_by", by_three):
        assert traces()
    assert not traces()


def test_other_versions_configs_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert traces()
    with process() as seen:
        small_kernel(num_warps=8)(*(fake_cuda(10, 64) for _ in range(3)), True)
    assert seen.traced
    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert traces()
    with mock.patch.object(code_cache, "versions", return_value="others"):
        assert traces()
    assert not traces()
    monkeypatch.setenv("HELION_INDEX_DTYPE", "int64")
    assert traces()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("* tmp", "+ tmp").replace("2.0", "4.0"),
        lambda _: "",
    ],
    ids=["cut", "changed", "empty"],
)
def test_damaged_files_are_not_used(disk: Path, damage: Callable[[str], str]) -> None:
    assert traces()
    (file,) = disk.glob(f"*/{code_cache.FILE}")
    whole = file.read_text()
    file.write_text(damage(whole))
    assert file.read_text() != whole
    assert traces()
    assert file.read_text() == whole
    assert not traces()


def test_a_folder_that_cannot_be_written_is_not_needed(disk: Path) -> None:
    with mock.patch("triton.runtime.cache.FileCacheManager.put", side_effect=PermissionError):
        assert traces()
    assert traces()


def test_what_is_stored_is_what_ran(disk: Path) -> None:
    with process() as seen:
        run_small()
    (file,) = disk.glob(f"*/{code_cache.FILE}")
    (entry,) = json.loads(file.read_text())["entries"]
    (ran,) = seen.ran
    assert entry["source"] == Path(ran).read_text()


def test_facts_of_tensors() -> None:
    x = torch.zeros(4, 2, 64, 64, dtype=torch.float8_e4m3fn)
    box = ["descriptor", 0, [1, 1, 64, 64]]
    known = code_cache.value(box, [x])
    assert known == json.loads(json.dumps(known))
    assert code_cache.value(box, [x.new_zeros(9, 300, 64, 64)]) == known
    others = [x[:, :, :32], x[:0], x.transpose(2, 3), x.new_zeros(4, 2, 64, 72)[..., :64], x.new_zeros(4, 2, 64, 128)]
    values = [code_cache.value(box, [other]) for other in others]
    assert values[0] != known
    assert values[1] != known
    assert values[2] != known
    assert values[3] != known
    assert values[4] == known
    flat = x.view(-1)
    aligned = [code_cache.value(["aligned", 0], [flat[n:]]) for n in (0, 16, 1, 8)]
    assert aligned == [flat.data_ptr() % 16 == 0, flat.data_ptr() % 16 == 0, False, False]
    assert code_cache.value(["has_size", 0, 2, 64], [x])
    assert not code_cache.value(["has_size", 0, 1, 64], [x])
    assert code_cache.value(["stride", 0, 1], [x]) == 64 * 64


def test_helion_asks_for_these_facts() -> None:
    """Before boxes are known, a fact is the value of Helion's own extractor."""
    asked = 0
    fact_of = code_cache._fact

    def compare(extractor: Any, args: Any) -> Any:
        nonlocal asked
        fact = fact_of(extractor, args)
        own = extractor(args)
        own = own[1] if fact[0] == "multiprocessors" else own
        if fact[0] == "descriptor":
            (contiguous, aligned), extents, fits = own
            own = [contiguous, list(aligned), list(extents), fits]
        is_equal = not fact[0].startswith("has_") or extractor.extractor.equal
        assert (code_cache.value(fact, args) == own) == is_equal
        asked += 1
        return fact

    with process(), mock.patch.object(code_cache, "_fact", compare):
        attend_to_a_cache()
    assert asked > 20


def test_options_that_change_between_calls(disk: Path) -> None:
    """What is traced under one default dtype is stored under no other."""
    run = small_kernel()
    seen = []
    with process():
        for dtype, width in ((torch.float32, 64), (torch.bfloat16, 128), (torch.float32, 256)):
            with mock.patch("torch.get_default_dtype", return_value=dtype):
                run(*(fake_cuda(10, width) for _ in range(3)), True)
            entries = [json.loads(file.read_text())["entries"] for file in disk.glob(f"*/{code_cache.FILE}")]
            seen.append(sorted(map(len, entries)))
    assert seen == [[1], [1, 1], [1, 2]]


def test_what_cannot_be_described_is_not_kept(disk: Path) -> None:
    from helion_attn.compiler import launch_plans

    recorded = launch_plans.recorded
    with mock.patch.object(code_cache, "recorded", lambda *args: recorded(*args) * 2):
        assert traces()
    assert not list(disk.glob(f"*/{code_cache.FILE}"))
    assert traces()
    assert not traces()


def shipped_fingerprints() -> list[str]:
    """Of this package's kernels, in short."""
    from helion_attn.kernels import attention, attention_large_d, decode, merge_splits
    from helion_attn.preprocess import append, first_pass, means, pack, recentre, sequences, transform_rows

    kernels: list[Callable[..., Any]] = [
        *(attention.fp8_attn_fwd, attention_large_d.fp8_attn_fwd_large_d, decode.fp8_attn_decode),
        *(merge_splits.merge_splits_kernel, pack.pack, append.append_kv, transform_rows.transform),
        *(first_pass.first_pass, means.means, means.sequence_means, sequences.describe, recentre.recentre),
    ]
    prints = [code_cache.fingerprint(compiled(fn, helion.Config())._generated._kernel) for fn in kernels]
    return [hashlib.sha256(text.encode()).hexdigest() for text in prints]


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import test_code_cache
print("traced" if test_code_cache.traces() else "found")
print(*test_code_cache.shipped_fingerprints())
"""


def test_processes(tmp_path: Path) -> None:
    """In fact, with hashes of strings that differ."""
    here = Path(__file__).parent
    said = []
    for seed in ("1", "2"):
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([str(here.parent), *sys.path]),
        }
        command = [sys.executable, "-c", SCRIPT, str(here)]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    (first, *prints), (second, *same_prints) = said
    assert [first, second] == ["traced", "found"]
    assert prints == same_prints
    assert len(set(prints)) == len(prints) > 10
