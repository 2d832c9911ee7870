"""Several ranks on one machine, gloo and the interpreter: one start of processes for many cases."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import start_processes
from torch.utils._python_dispatch import TorchDispatchMode

import helion_attn as ha
from helion_attn.distributed.collectives import Group
from helion_attn.testing import relative_error
from helion_attn.types import Balance, Layout, Recipe, Strategy

#: How many times the error of one process several may have.
AS_ONE = 1.02

#: The same of lse, whose error is the noise of P's rounding: other blocks of keys draw it anew, of few rows here.
LSE_AS_ONE = 1.1

#: Seconds until a collective gives up.
TIMEOUT = 20


@dataclass(frozen=True)
class Problem:
    """Attention over a whole sequence, and how it is cut: tokens of each rank, or as `shard` does for zigzag.

    Biases of K and means of V are other for the keys of each rank, of which N(0, 1) would know nothing; with `alike`
    those of rank 0 are those of all. `large`: what three channels of K, others in each head, are multiplied by.
    """

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    H: int = 2
    H_kv: int = 1
    D: int = 32
    D_v: int = 32
    B: int = 1
    zigzag: bool = False
    recipe: Recipe = ha.BALANCED
    causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float | None = None
    has_sinks: bool = False
    return_lse: bool = False
    has_rope: bool = False
    layout: Layout = "bhsd"
    alike: bool = False
    large: float = 1.0

    def chunks(self, lengths: tuple[int, ...]) -> list[list[tuple[int, int]]]:
        """Begin and end of the runs of each rank."""
        P = len(lengths)
        ends = [sum(lengths[: r + 1]) for r in range(P)]
        if not self.zigzag:
            return [[(end - n, end)] for end, n in zip(ends, lengths, strict=True)]
        total = ends[-1]
        n = math.ceil(total / (2 * P * 128)) * 128
        # From where tokens end on, chunks are empty.
        return [[(min(total, c * n), min(total, c * n + n)) for c in (r, 2 * P - 1 - r)] for r in range(P)]

    def tensors(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, K and V of the whole sequence, BHSD."""
        g = torch.Generator().manual_seed(1)
        M, N = sum(self.q_lengths), sum(self.k_lengths)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g)

        q = 0.5 * randn(self.B, self.H, M, self.D)
        k, v = randn(self.B, self.H_kv, N, self.D), randn(self.B, self.H_kv, N, self.D_v)
        hit = torch.rand(self.B, self.H_kv, 1, self.D, generator=g) < 0.1
        for rank, runs in enumerate(self.chunks(self.k_lengths)):
            if not (rank and self.alike):
                k_bias, v_mean = randn(self.B, self.H_kv, 1, self.D), randn(self.B, self.H_kv, 1, self.D_v)
            for begin, end in runs:
                k[:, :, begin:end] += hit * (10 + 5 * k_bias)
                v[:, :, begin:end] += 2 * v_mean
        if self.large != 1.0:
            for head in range(self.H_kv):
                k[:, head, :, torch.randperm(self.D, generator=g)[:3]] *= self.large
        q, k, v = (x.bfloat16().to(device) for x in (q, k, v))
        return q, k, v

    def options(self, device: str = "cpu") -> dict[str, Any]:
        """Those of `attention`, of one process or of several."""
        angles = torch.outer(torch.arange(sum(self.k_lengths)), 100.0 ** -torch.arange(0, 1, 2 / self.D))
        return {
            "recipe": self.recipe,
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": torch.linspace(-1, 2, self.H, device=device) if self.has_sinks else None,
            "rope": ha.Rope(angles.cos().to(device), angles.sin().to(device)) if self.has_rope else None,
            "return_lse": self.return_lse,
        }

    def part(self, x: torch.Tensor, lengths: tuple[int, ...], rank: int) -> torch.Tensor:
        """What a rank holds of [B, H, S, D]."""
        return torch.cat([x[:, :, begin:end] for begin, end in self.chunks(lengths)[rank]], 2)

    def whole(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """[B, H, M, ...] of the ranks' parts."""
        out = parts[0].new_empty((*parts[0].shape[:2], sum(self.q_lengths), *parts[0].shape[3:]))
        for part, runs in zip(parts, self.chunks(self.q_lengths), strict=True):
            at = 0
            for begin, end in runs:
                out[:, :, begin:end] = part[:, :, at : at + end - begin]
                at += end - begin
        return out


@dataclass
class Sent(TorchDispatchMode):
    """Counts what is given to collectives: operation and bytes."""

    found: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(("_c10d_functional", "c10d.send")) and "wait" not in name:
            x = args[0][0] if isinstance(args[0], list) else args[0]
            self.found.append((name, x.numel() * x.element_size()))
        return func(*args, **(kwargs or {}))


def attend(
    problem: Problem, strategy: Strategy, rank: int, group: Group, *, device: str = "cpu", check: bool = True
) -> Any:
    """What a rank gets, BHSD."""
    q, k, v = problem.tensors(device)
    parts = [problem.part(q, problem.q_lengths, rank)] + [problem.part(x, problem.k_lengths, rank) for x in (k, v)]
    if problem.layout == "bshd":
        parts = [x.transpose(1, 2) for x in parts]
    balance: Balance = "zigzag" if problem.zigzag else None
    options = problem.options(device)
    q, k, v = parts
    found = ha.distributed.attention(
        q, k, v, strategy=strategy, balance=balance, layout=problem.layout, group=group, check=check, **options
    )
    out, lse = found if problem.return_lse else (found, None)
    return out.transpose(1, 2) if problem.layout == "bshd" else out, lse


class Work(NamedTuple):
    """What ranks do together."""

    ranks: int  # how many: all `WORLD`, or two
    do: Callable[[int, dist.ProcessGroup], Any]  # given the rank in the group, and the group; its result is pickled


#: Processes: one group of four, and two of two, which work side by side.
WORLD = 4
PAIRS = ([0, 1], [2, 3])


#: Helion's interpreter asks a GPU what it can do, which a fork of a process that has asked cannot.
START = "spawn" if torch.cuda.is_available() else "forkserver"


def server() -> Any:
    """Processes; without a GPU, of a server that imports once what takes seconds, and forks without other threads."""
    context = mp.get_context(START)
    context.set_forkserver_preload(
        ["torch.distributed", "helion.language", "helion.runtime.ref_mode", "helion_attn.distributed.api"]
    )
    return context


def spawn(fn: Callable[..., Any], args: tuple[Any, ...], nprocs: int, said: Path | None = None) -> None:
    """`torch.multiprocessing.spawn`, with processes of `server`; what they print goes to the file `said`, if given."""
    server()
    start_processes(_saying, (said, fn, args), nprocs, start_method=START)


def _saying(rank: int, said: Path | None, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if said is not None:
        with said.open("a") as file:
            os.dup2(file.fileno(), 1)
    torch.set_num_threads(1)
    fn(rank, *args)


def _run(rank: int, folder: str, works: dict[str, Work]) -> None:
    from helpers import interpreter

    torch.set_num_threads(1)
    interpreter.install()
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD, timeout=timeout
    )
    pairs = [dist.new_group(pair, timeout=timeout) for pair in PAIRS]
    found: dict[str, Any] = {}
    for i, (name, work) in enumerate(works.items()):
        group = dist.group.WORLD if work.ranks == WORLD else pairs[i % 2]
        if work.ranks < WORLD and rank not in PAIRS[i % 2]:
            continue
        assert group is not None
        started = time.monotonic()
        try:
            found[name] = work.do(group.rank(), group)
        except Exception as error:
            found[name] = (type(error).__name__, str(error), time.monotonic() - started, traceback.format_exc())
        Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))


def run(folder: Path, works: dict[str, Work]) -> dict[str, list[Any]]:
    """What each rank got of each work, in order; a tuple of four for what it raised. A rank may die in the last."""
    context = server()
    processes = [context.Process(target=_run, args=(rank, str(folder), works)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    files = [Path(folder, f"{rank}.pickle") for rank in range(WORLD)]
    found = [pickle.loads(file.read_bytes()) if file.exists() else {} for file in files]
    members = {name: range(WORLD) if w.ranks == WORLD else PAIRS[i % 2] for i, (name, w) in enumerate(works.items())}
    return {name: [found[rank].get(name) for rank in ranks] for name, ranks in members.items()}


def die(rank: int, group: dist.ProcessGroup) -> Any:
    """Rank 1 is killed; the others attend."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    q = torch.zeros(1, 1, 8, 32, dtype=torch.bfloat16)
    return ha.distributed.attention(q, q, q, group=group)


def with_changes(problem: Problem, rank: int, changed: dict[str, Any]) -> Problem:
    """`problem`, on rank 1 with other values."""
    return dataclasses.replace(problem, **changed) if rank == 1 else problem


@dataclass(frozen=True)
class One:
    """What one process gets of a problem, and the oracle."""

    out: torch.Tensor
    lse: torch.Tensor | None
    oracle: torch.Tensor
    oracle_lse: torch.Tensor


@functools.cache
def one_process(problem: Problem, device: str = "cpu") -> One:
    """Its result, of the whole sequence."""
    q, k, v = problem.tensors(device)
    options = problem.options(device)
    found = ha.attention(q, k, v, **options)
    out, lse = found if problem.return_lse else (found, None)
    rope = options.pop("rope")
    del options["recipe"], options["return_lse"]
    if rope is not None:
        positions = torch.arange(q.size(2), device=device) + k.size(2) - q.size(2)
        q = ha.reference.apply_rope(q, rope.cos, rope.sin, positions=positions)
        k = ha.reference.apply_rope(k, rope.cos, rope.sin)
    oracle, oracle_lse = ha.reference.attention(q, k, v, return_lse=True, **options)
    return One(out, lse, oracle, oracle_lse)


def assert_as_one(problem: Problem, found: list[Any], device: str = "cpu") -> None:
    """The error of several ranks is at most `AS_ONE` times that of one process."""
    for of_rank in found:
        assert len(of_rank) == 2, of_rank
    one = one_process(problem, device)
    out = problem.whole([out for out, _ in found])
    assert out.dtype == one.out.dtype
    assert relative_error(out, one.oracle) <= AS_ONE * relative_error(one.out, one.oracle)
    if one.lse is not None:
        lse = problem.whole([lse for _, lse in found])
        assert relative_error(lse, one.oracle_lse) <= LSE_AS_ONE * relative_error(one.lse, one.oracle_lse) + 1e-6
