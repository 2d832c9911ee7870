"""Collectives of bytes between ranks: functional ones, which torch.compile traces, and a ring's sends and receives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None


def resolve(group: Group) -> dist.ProcessGroup:
    """The process group that is meant: of all ranks for None, of its one dimension for a mesh.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
        TypeError: neither of these.
        ValueError: a mesh of several dimensions; or this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a mesh of dimensions {group.mesh_dim_names or group.ndim}; it must have one: "
                f'slice it, as in mesh["cp"]'
            )
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group does not have this process; it must be one that this process is in")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is a {type(group).__name__}; it must be None, a ProcessGroup or a DeviceMesh")
    return group


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where its collectives are sure to be possible, the same on all ranks, whatever tensors they hold."""
    if "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`x` of all ranks, [ranks, *x.shape]: of one shape and dtype on all."""
    if group.size() == 1:
        return x.unsqueeze(0)
    sent = x.contiguous().view(-1).view(torch.uint8)
    found = torch.ops._c10d_functional.all_gather_into_tensor(sent, group.size(), group.group_name)
    found = torch.ops._c10d_functional.wait_tensor(found)
    return found.view(x.dtype).view(group.size(), *x.shape)


def exchange(x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Bytes for each rank, one rank's after another's, and from each.

    Args:
        x: uint8 [sum(sent)].
        sent: bytes for each rank.
        received: bytes from each.
        group: of them.
    """
    if group.size() == 1:
        return x
    found = torch.ops._c10d_functional.all_to_all_single(x, received, sent, group.group_name)
    found = torch.ops._c10d_functional.wait_tensor(found)
    return found


def pass_on(x: torch.Tensor, into: torch.Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Begin to send `x` to the next rank, and to receive `into` from the one before."""
    rank, size = group.rank(), group.size()
    after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    works: list[dist.Work] = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, into, before, group)]
    )
    return works
