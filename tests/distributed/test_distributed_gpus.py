"""Attention over two GPUs, NCCL, is that of one: what gloo and the interpreter cannot show."""

from __future__ import annotations

import os
import pickle
import signal
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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
    "zigzag, an empty chunk": replace(ZIGZAG, q_lengths=(256, 257), k_lengths=(256, 257)),
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


#: What rank 1 has of another kind, and what both must say.
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"causal": True}, "causal is false on rank 0 and true on rank 1"),
    "heads": ({"H": 4}, "H is 8 on rank 0 and 4 on rank 1"),
    "recipe": ({"recipe": ha.FAST}, "recipe is"),
    "head dim": ({"D_v": 64}, "D_v is 128 on rank 0 and 64 on rank 1"),
}


def said(problem: Problem, rank: int) -> str:
    """What a call raises."""
    with pytest.raises(ValueError) as raised:
        attend(problem, "allgather", rank)
    return str(raised.value)


def late(strategy: Strategy, rank: int) -> torch.Tensor:
    """Rank 1 comes two seconds after the other."""
    if rank == 1:
        time.sleep(2)
    out: torch.Tensor = attend(ZIGZAG, strategy, rank)[0]
    return out.cpu()


def join(rank: int, folder: str) -> None:
    """Begin to be a rank of two."""
    torch.cuda.set_device(rank)
    file = f"file://{folder}/rendezvous"
    dist.init_process_group("nccl", init_method=file, rank=rank, world_size=2, timeout=TIMEOUT)


def process(rank: int, folder: str) -> None:
    join(rank, folder)
    found: dict[Any, Any] = {}
    for name, problem in PROBLEMS.items():
        for strategy in STRATEGIES:
            out, lse = attend(problem, strategy, rank)
            found[name, strategy] = out.cpu(), None if lse is None else lse.cpu()
    found["ring again"] = torch.equal(attend(ZIGZAG, "ring", rank)[0].cpu(), found["zigzag", "ring"][0])
    for name, (changed, _) in OTHERS.items():
        found["other", name] = said(ranks.with_changes(FULL, rank, changed), rank)
    for strategy in STRATEGIES:
        found["late", strategy] = torch.equal(late(strategy, rank), found["zigzag", strategy][0])
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


@pytest.mark.parametrize("name", OTHERS)
def test_ranks_that_disagree_all_raise(name: str, found: list[dict[Any, Any]]) -> None:
    first, second = (of_rank["other", name] for of_rank in found)
    assert first == second
    assert OTHERS[name][1] in first


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_late_rank_is_waited_for(strategy: Strategy, found: list[dict[Any, Any]]) -> None:
    assert all(of_rank["late", strategy] for of_rank in found)


#: Seconds until NCCL gives up on a rank that is gone, and until the process must have ended by then.
GIVES_UP, ENDS = 10, 90


def attend_alone(rank: int, folder: str, blocking: str) -> None:
    """Rank 1 is killed after a first call; rank 0 writes what the second raises."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = blocking
    join(rank, folder)
    # A rank may wait for another that compiles.
    attend(FULL, "allgather", rank)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=GIVES_UP))
    dist.barrier(group)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ranks.attend(FULL, "allgather", rank, group, device="cuda")
        torch.cuda.synchronize()
    except RuntimeError as error:
        Path(folder, "raised").write_text(type(error).__name__)
        os._exit(3)


@pytest.mark.parametrize("blocking", ["0", "1"])
def test_a_rank_that_dies_ends_the_others(blocking: str, tmp_path: Path) -> None:
    """NCCL's watchdog ends the process, or the call raises with TORCH_NCCL_BLOCKING_WAIT=1."""
    context = mp.get_context("spawn")
    first, second = (context.Process(target=attend_alone, args=(rank, str(tmp_path), blocking)) for rank in range(2))
    first.start()
    second.start()
    second.join(TIMEOUT.total_seconds())
    assert second.exitcode == -signal.SIGKILL
    first.join(GIVES_UP + ENDS)
    ended = first.exitcode
    first.kill()
    assert ended not in (None, 0)
    if blocking == "1":
        assert (tmp_path / "raised").read_text() in ("DistBackendError", "RuntimeError")
