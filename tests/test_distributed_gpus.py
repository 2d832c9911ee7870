"""Attention over two GPUs, NCCL, is that of one: what gloo and the interpreter cannot show."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import helion_attn as ha
from helion_attn.distributed import header
from helion_attn.distributed.header import Header
from helion_attn.types import Strategy
from helpers import ranks
from helpers.ranks import Problem, assert_as_one

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

TIMEOUT = timedelta(seconds=300)

STRATEGIES: tuple[Strategy, ...] = ("allgather", "ulysses", "ring")

FULL = Problem((1500, 1500), (2048, 2000), H=8, H_kv=2, D=128, D_v=128)
ZIGZAG = Problem((1920, 2048), (1920, 2048), H=8, H_kv=2, D=128, D_v=128, causal=True, zigzag=True, return_lse=True)

PROBLEMS = {
    "full": FULL,
    "full, fast, D 64": replace(FULL, D=64, D_v=64, recipe=ha.FAST),
    "zigzag": ZIGZAG,
    "zigzag, D 256, RoPE": replace(ZIGZAG, D=256, D_v=256, has_rope=True),
    "zigzag, accurate": replace(ZIGZAG, recipe=ha.ACCURATE),
    "zigzag, hybrid": replace(ZIGZAG, recipe=ha.HYBRID),
    "window, sinks": replace(FULL, window=(700, 100), has_sinks=True, return_lse=True),
    "BSHD, softcap": replace(FULL, B=2, layout="bshd", softcap=20.0, causal=True),
}


def attend(problem: Problem, strategy: Strategy, rank: int) -> Any:
    assert dist.group.WORLD is not None
    return ranks.attend(problem, strategy, rank, dist.group.WORLD, device="cuda")


def compiled(strategy: Strategy, rank: int) -> bool:
    """Whether torch.compile gives the bits of eager."""
    q, k, v = (x[:, :, rank * 1024 : (rank + 1) * 1024] for x in Problem((1024, 1024), (1024, 1024)).tensors("cuda"))
    call = partial(ha.distributed.attention, strategy=strategy, causal=True, check=False)
    return torch.equal(torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v))


def seconds_of_a_header() -> float:
    """How long the host waits for it, while the GPU has a second's work."""
    assert dist.group.WORLD is not None
    header.exchange(Header(1, 1, False, "{}"), dist.group.WORLD)
    torch.cuda.synchronize()
    torch.cuda._sleep(2 * 10**9)
    started = time.perf_counter()
    header.exchange(Header(1, 1, False, "{}"), dist.group.WORLD)
    seconds = time.perf_counter() - started
    torch.cuda.synchronize()
    return seconds


def process(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    file = f"file://{folder}/rendezvous"
    dist.init_process_group("nccl", init_method=file, rank=rank, world_size=2, timeout=TIMEOUT)
    found: dict[Any, Any] = {}
    for name, problem in PROBLEMS.items():
        for strategy in STRATEGIES:
            out, lse = attend(problem, strategy, rank)
            found[name, strategy] = out.cpu(), None if lse is None else lse.cpu()
    found["ring again"] = torch.equal(attend(ZIGZAG, "ring", rank)[0].cpu(), found["zigzag", "ring"][0])
    found["seconds of a header"] = seconds_of_a_header()
    found["compiled"] = [compiled(strategy, rank) for strategy in ("allgather", "ulysses")]
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each rank got."""
    folder = tmp_path_factory.mktemp("ranks")
    spawn(process, (str(folder),), 2)
    return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(2)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_is_as_one_gpu(name: str, strategy: Strategy, found: list[dict[Any, Any]]) -> None:
    assert_as_one(
        PROBLEMS[name], [[x if x is None else x.cuda() for x in of_rank[name, strategy]] for of_rank in found], "cuda"
    )


def test_the_check_does_not_wait_for_the_gpu(found: list[dict[Any, Any]]) -> None:
    assert all(of_rank["seconds of a header"] < 0.3 for of_rank in found)


def test_a_ring_repeats_itself(found: list[dict[Any, Any]]) -> None:
    assert all(of_rank["ring again"] for of_rank in found)


def test_compiles(found: list[dict[Any, Any]]) -> None:
    assert [of_rank["compiled"] for of_rank in found] == [[True, True]] * 2
