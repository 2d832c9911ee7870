"""Models that are trained by several processes, DDP and FSDP, get the gradients of one: gloo, two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import helion_attn as ha
from helpers import interpreter, ranks

RANKS, STEPS, S, WIDTH = 2, 2, 30, 32


class Block(nn.Module):
    """Attention of 2 heads on 1 KV head, which recomputes its forward pass, after a projection and before another."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (4, WIDTH)).split((2, 1, 1), 2)
        return self.out(ha.attention(q, k, v, layout="bshd", causal=True).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = checkpoint(self.attend, x, use_reentrant=False)
        return x + attended


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(1, S, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, parts: Callable[[int], list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Take steps with the mean loss of parts; the last step's gradients, and the weights."""
    if torch.cuda.is_available():  # what is first initialised inside a checkpoint is an error
        torch.cuda.init()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(x).square().mean() for x in parts(step)]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
    grads = [x.grad for x in model.parameters()]
    return [whole(x) for x in grads if x is not None], [whole(x) for x in model.parameters()]


def whole(x: Any) -> Tensor:
    """Of all ranks, where each holds a shard."""
    found: Tensor = (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()
    return found


def sharded(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train_as_rank(rank: int, rendezvous: str) -> None:
    interpreter.install()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    expected = train(copy.deepcopy(model), lambda step: [batch(of, step) for of in range(RANKS)])
    alone = train(copy.deepcopy(model), lambda step: [batch(rank, step)])
    assert len(expected[0]) == 4
    for wrap in (DistributedDataParallel, sharded):
        found = train(wrap(copy.deepcopy(model)), lambda step: [batch(rank, step)])
        for of_all, of_one, of_ranks in zip(expected, alone, found, strict=True):
            for x, y, z in zip(of_all, of_one, of_ranks, strict=True):
                torch.testing.assert_close(z, x, rtol=1e-5, atol=1e-7)
                assert not torch.allclose(y, x, rtol=1e-3, atol=1e-6)
    dist.destroy_process_group()


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    ranks.spawn(train_as_rank, (f"file://{tmp_path}/rendezvous",), RANKS)
