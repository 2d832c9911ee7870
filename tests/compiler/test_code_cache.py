"""What Helion generated is found on the disk by the next process, where it is the right code and nowhere else."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import stat
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
import torch.distributed._symmetric_memory as symmetric_memory
from torch._inductor.codecache import PyCodeCache

from devtools.sm90 import fake_cuda
from helion_attn.compiler import code_cache, facts, generated_code, stored_code
from helion_attn.compiler.helion_adapter import (
    Config,
    helion,
    helion_environment,
    helion_kernel,
    hl,
    imported,
    kernel_to_compile,
)
from helion_attn.compiler.runners import Compiled, compiled
from helion_attn.compiler.slower import SlowerWarning, warn_slower
from helpers.calls import (
    attend,
    attend_in_parts,
    attend_to_a_cache,
    attend_with_large_heads,
    preprocess,
)
from helpers.offline import compilations

# `compilations` leaves the disk alone.
READ, WRITE = stored_code.read, stored_code.write


@dataclass
class Process:
    """What a process did."""

    traced: list[str]  # names of the kernel functions that Helion traced
    ran: list[str] = field(default_factory=list)  # names of the code that was launched, which are digests of it


@contextlib.contextmanager
def process(reads: bool = True) -> Iterator[Process]:
    """The memory of a new process, on the disk as it is; Triton compiles nothing."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, **options: Any) -> None:
        seen.ran.append(self.fn.__code__.co_filename)

    with (
        compilations() as compiling,
        mock.patch.object(stored_code, "read", READ if reads else lambda key: []),
        mock.patch.object(stored_code, "write", WRITE),
        mock.patch.object(JITFunction, "run", run),
    ):
        seen = Process(compiling.traced)
        yield seen


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.thorough
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


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("call", [attend_to_a_cache, preprocess, attend_with_large_heads, attend_in_parts])
def test_every_kernel_is_found(call: Callable[[], None], disk: Path) -> None:
    with process() as first:
        call()
    with process() as second:
        call()
    assert first.traced
    assert not second.traced
    assert second.ran == first.ran
    sources = [
        entry["source"] for file in disk.glob(f"*/{stored_code.FILE}") for entry in stored_code.read(file.parent.name)
    ]
    assert len(sources) >= len({*first.traced})
    for source in sources:
        assert not re.findall(r"^(?:import|from) (?:helion|torch\._inductor)\b.*", source, re.MULTILINE)


@pytest.mark.thorough
def test_a_process_group_changes_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch cannot say which tensors are symmetric memory, either: up to 2.11."""
    with process(reads=False) as alone:
        attend()
    monkeypatch.delattr(symmetric_memory, "is_symm_mem_tensor", raising=False)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with process(reads=False) as in_a_group, mock.patch.object(stored_code, "write"):
            attend()
        assert in_a_group.traced == alone.traced
        assert in_a_group.ran == alone.ran
        with process() as then:
            attend()
        assert not then.traced
    finally:
        torch.distributed.destroy_process_group()


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
    return compiled(small, Config(num_warps=num_warps, indexing="pointer"))


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
        args = fake_cuda(4), fake_cuda(4), fake_cuda(4), True
        generated.find(generated.base(args), args)

    monkeypatch.setattr(code_cache.Generated, "_trace", trace)
    several = [small_kernel(num_warps)._generated for num_warps in (2, 4)]
    with process(), ThreadPoolExecutor(2) as pool:
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
    assert len(kernel._launches) == 4


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


@pytest.mark.thorough(but=1)
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
    (file,) = disk.glob(f"*/{stored_code.FILE}")
    whole = file.read_text()
    file.write_text(damage(whole))
    assert file.read_text() != whole
    assert traces()
    assert file.read_text() == whole
    assert not traces()


def stored(disk: Path) -> Path:
    """The only file of generated code."""
    (file,) = disk.glob(f"*/{stored_code.FILE}")
    return file


@contextlib.contextmanager
def owned_by(path: Path, user: int) -> Iterator[None]:
    """An open file or folder is told to be this user's, which root alone could make it."""
    fstat, inode = os.fstat, path.stat().st_ino

    def told(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        fields = list(status)
        if status.st_ino == inode:
            fields[stat.ST_UID] = user
        return os.stat_result(fields)

    with mock.patch.object(os, "fstat", told):
        yield


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("of", ["file", "folder"])
@pytest.mark.parametrize("how", ["foreign", "group", "others"])
def test_what_others_could_have_written_is_not_executed(disk: Path, of: str, how: str) -> None:
    assert traces()
    path = stored(disk) if of == "file" else stored(disk).parent
    mode = path.stat().st_mode
    path.chmod(mode | {"foreign": 0, "group": 0o020, "others": 0o002}[how])
    with owned_by(path, 12345 if how == "foreign" else os.geteuid()):
        warn_slower.cache_clear()
        with pytest.warns(SlowerWarning, match=re.escape(f"Generated code in {disk} is not used")):
            assert traces()
    path.chmod(mode)
    assert not traces()


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("how", ["foreign", "group", "others"])
def test_a_folder_that_others_may_write_to_is_left_alone(disk: Path, how: str) -> None:
    """Also one without a file, of which reading says nothing."""
    assert traces()
    file = stored(disk)
    file.unlink()
    folder, mode = file.parent, 0o755 | {"foreign": 0, "group": 0o020, "others": 0o002}[how]
    folder.chmod(mode)
    warn_slower.cache_clear()
    with (
        owned_by(folder, 12345 if how == "foreign" else os.geteuid()),
        pytest.warns(SlowerWarning, match=re.escape(f"Generated code in {disk} is not used")),
    ):
        assert traces()
    assert not list(folder.iterdir())
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    folder.chmod(0o755)
    assert traces()
    assert not traces()


def test_roots_files_are_taken(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert traces()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with owned_by(stored(disk), 0), owned_by(stored(disk).parent, 0):
        assert not traces()


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_a_file_is_read(disk: Path, kind: str) -> None:
    assert traces()
    file = stored(disk)
    whole = file.rename(disk / "elsewhere")
    if kind == "link":
        file.symlink_to(whole)
    elif kind == "pipe":
        os.mkfifo(file, 0o600)
    else:
        file.mkdir()
    assert stored_code.read(file.parent.name) == []


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_nobody_else_can_write_to_what_is_written(disk: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert traces()
    finally:
        os.umask(before)
    file = stored(disk)
    assert not (file.stat().st_mode | file.parent.stat().st_mode) & 0o022
    assert [*file.parent.iterdir()] == [file]
    assert not traces()


def test_code_of_another_key_is_not_used(disk: Path) -> None:
    """As in a folder that was renamed or copied."""
    assert traces(width=128)
    other = stored(disk)
    text = other.read_text()
    assert traces(width=64, dtype=torch.bfloat16)
    (file,) = set(disk.glob(f"*/{stored_code.FILE}")) - {other}
    file.write_text(text)
    assert stored_code.read(other.parent.name)
    assert stored_code.read(file.parent.name) == []


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("source", lambda _: "import nothing_of_this_name"),
        ("source", lambda _: "def another(): pass"),
        ("source", lambda source: source + "\n)"),
        ("facts", lambda found: [[["a_fact_of_later", 0], 1], *found]),
    ],
    ids=["does not import", "lacks the function", "is no Python", "unknown fact"],
)
def test_stale_code_is_made_anew(disk: Path, part: str, change: Callable[[Any], Any]) -> None:
    """Whole, and written here, and still not what this process can use."""
    assert traces()
    key = stored(disk).parent.name
    (entry,) = stored_code.read(key)
    stored_code.write(key, [entry | {part: change(entry[part])}])
    assert traces()
    assert not traces()


def test_a_folder_that_cannot_be_written_is_not_needed(disk: Path) -> None:
    with mock.patch("tempfile.mkstemp", side_effect=PermissionError):
        assert traces()
    assert not list(disk.glob("*/*"))
    assert traces()
    assert not traces()


def test_triton_has_the_key_of_helions_own_module(disk: Path) -> None:
    """What it compiled of the one it finds for the other: the same text, from the same line on, calling the same."""
    generated: list[str] = []

    def linked(source: str) -> str:
        generated.append(source)
        return generated_code.linked(source)

    with process(), mock.patch.object(code_cache, "linked", linked):
        attend()
    (source,) = generated
    assert "from torch._inductor.runtime import triton_helpers\n" in source
    check = re.compile(r"^ +torch\._check\(", re.MULTILINE)  # which may import sympy
    assert check.search(source)
    assert not check.search(generated_code.linked(source))
    ours = generated_code.load(generated_code.linked(source), "fp8_attn_fwd")
    kernels = [vars(PyCodeCache.load(source))["_helion_fp8_attn_fwd"], ours.__globals__["_helion_fp8_attn_fwd"]]
    assert kernels[0].cache_key == kernels[1].cache_key
    assert kernels[0].starting_line_number == kernels[1].starting_line_number


@pytest.mark.thorough
def test_helion_asks_for_these_facts() -> None:
    """Before boxes are known, a fact is the value of Helion's own extractor."""
    asked = 0
    fact_of = facts._fact

    def compare(extractor: Any, args: Any) -> Any:
        nonlocal asked
        fact = fact_of(extractor, args)
        own = extractor(args)
        own = own[1] if fact[0] == "multiprocessors" else own
        if fact[0] == "descriptor":
            (contiguous, aligned), extents, fits = own
            own = [contiguous, list(aligned), list(extents), fits]
        is_equal = not fact[0].startswith("has_") or extractor.extractor.equal
        assert (facts.value(fact, args) == own) == is_equal
        asked += 1
        return fact

    with process(), mock.patch.object(facts, "_fact", compare):
        attend_to_a_cache()
    assert asked > 20


def test_facts_are_helions() -> None:
    """Over layouts that TMA takes and does not, the values that Helion's own functions give."""
    caps = [1, 2, 64, 256]
    base = torch.zeros(2**14, dtype=torch.uint8)
    layouts = [((3, 5), (16, 1)), ((1, 1), (1, 1)), ((0, 64), (64, 1)), ((63, 64, 65), (1, 16, 32)), ((7,), (3,))]
    for (shape, strides), dtype, offset in itertools.product(layouts, (torch.uint8, torch.float32), (0, 1, 4)):
        x = base.view(dtype).as_strided(shape, strides, offset)
        most = (caps * 2)[: x.dim()]
        contiguous, aligned = helion_environment.tensor_descriptor_layout_signature_from_strides(strides, x.itemsize)
        extents = [helion_kernel._tensor_descriptor_extent_class(*pair) for pair in zip(shape, most, strict=True)]
        assert facts.value(["descriptor", 0, most], [x]) == [contiguous, list(aligned), extents, True]
        is_aligned = helion_environment._concrete_tensor_satisfies_alignment_guard(x, False)
        assert facts.value(["aligned", 0], [x]) == is_aligned
    assert not facts.value(["aligned", 0], [fake_cuda(64)])


def test_what_helions_key_tells_apart_is_told_apart() -> None:
    """Calls that Helion may generate other code for; of its key, only the GPU's product name is left out."""
    x, y, marked = fake_cuda(10, 64), fake_cuda(10, 64), fake_cuda(10, 64)
    vars(marked)["_dynamo_static_indices"] = {1}  # as `torch._dynamo.mark_static` does
    calls: list[tuple[Any, ...]] = [(x, y, fake_cuda(10, 64), flag) for flag in (False, True, 1, 1.0, 2)]
    calls += [(x, x, y, True), (x, y, y, True), (y, x, y, True), (marked, x, y, True), (fake_cuda(10), x, y, True)]
    calls += [(fake_cuda(10, 64, dtype=torch.int8), x, y, True), (fake_cuda(7, 9), x, y, True)]
    calls += [(fake_cuda(2**16, size), x, y, True) for size in (2**15 - 1, 2**15, 2**15 + 1)]
    generated = small_kernel()._generated
    with process():
        kernel = kernel_to_compile(small, generated._config)
        theirs, ours = ([key(args) for args in calls] for key in (kernel._base_specialization_key, generated.base))
    for i, j in itertools.combinations(range(len(calls)), 2):
        if theirs[i] != theirs[j]:
            assert ours[i] != ours[j], (calls[i], calls[j])
    assert ours[1] == ours[11]
    assert len({*ours}) > 8


def test_variables_that_helion_reads_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that its settings and its compiler name, but for those of what this package does not use."""
    root = Path(str(imported(helion_kernel).__file__)).parents[1]
    sources = [root / "runtime" / "settings.py", *sorted((root / "_compiler").rglob("*.py"))]
    text = "\n".join(path.read_text() for path in sources if "cute" not in path.parts and "pallas" not in path.parts)
    read = set(
        re.findall(r"""(?:environ|getenv|_env_\w+|_parse_env\w+)[^"']{0,30}["']([A-Z][A-Z0-9_]{3,})["']""", text)
    )
    assert {"HELION_INDEX_DTYPE", "TRITON_F32_DEFAULT"} < read
    unused = {name for name in read if name.startswith(("HELION_CUTE_", "CUTE_", "JAX_", "EXPECTTEST"))}
    changes = {name for name in read - unused if not name.startswith(code_cache.CHANGE_NO_CODE)}
    before = code_cache.options()
    for name in sorted(changes - {"CUDA_VISIBLE_DEVICES", "TRITON_CACHE_DIR"}):
        with monkeypatch.context() as patch:
            patch.setenv(name, "another")
            assert code_cache.options() != before, name
    assert code_cache.options() == before


@pytest.mark.parametrize(
    "folders", [{}, {"TORCHINDUCTOR_CACHE_DIR": "inductor"}, {"HELION_CACHE_DIR": "helion"}], ids=str
)
def test_the_cache_folder_is_helions(folders: dict[str, str], disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HELION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, folder in folders.items():
        monkeypatch.setenv(name, str(disk / folder))
    expected = helion.autotuner.local_cache.helion_triton_cache_dir(3)
    code_cache.set_cache_folder(3)
    assert os.environ["TRITON_CACHE_DIR"] == expected
    monkeypatch.setenv("TRITON_CACHE_DIR", str(disk))
    code_cache.set_cache_folder(3)
    assert os.environ["TRITON_CACHE_DIR"] == str(disk)


def test_options_that_change_between_calls(disk: Path) -> None:
    """What is traced under one default dtype is stored under no other."""
    run = small_kernel()
    seen = []
    with process():
        for dtype, width in ((torch.float32, 64), (torch.bfloat16, 128), (torch.float32, 256)):
            with mock.patch("torch.get_default_dtype", return_value=dtype):
                run(*(fake_cuda(10, width) for _ in range(3)), True)
            entries = [json.loads(file.read_text())["entries"] for file in disk.glob(f"*/{stored_code.FILE}")]
            seen.append(sorted(map(len, entries)))
    assert seen == [[1], [1, 1], [1, 2]]


def test_what_cannot_be_described_is_not_kept(disk: Path) -> None:
    from helion_attn.compiler import linked_launch

    recorded = linked_launch.recorded
    with mock.patch.object(facts, "recorded", lambda *args: recorded(*args) * 2):
        assert traces()
    assert not list(disk.glob(f"*/{stored_code.FILE}"))
    assert traces()
    assert not traces()
