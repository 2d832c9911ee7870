"""One sequence over several processes: checked against fp64, and on Hopper GPUs timed beside bf16.

    torchrun --nproc-per-node=2 examples/long_context.py                  # a GPU a process, or without any the CPU
    python examples/long_context.py --nproc 2                             # the same, without torchrun

Causal, zigzag, every strategy. Each rank makes its own part, sees its last rows' answer in fp64, and fails if the error
exceeds its bound. On GPUs 262,144 tokens; in Helion's interpreter 512.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, spawn
from torch.nn.attention.bias import causal_lower_right

import helion_attn as ha
from helion_attn.testing import relative_error
from helion_attn.types import Strategy

#: (tokens, H, H_kv, D)
SHAPE_GPU = (262144, 32, 8, 128)
SHAPE_CPU = (512, 2, 2, 32)

#: As in fp8_attention.py; BALANCED has the scores in int8, which errs less.
ERROR_BOUND = 0.07

#: Calls that are timed.
ROUNDS = 5

#: Rows that a rank checks, its last.
CHECKED_ROWS = 16


def make_part(x_seed: int, heads: int, tokens: int, D: int, device: torch.device) -> torch.Tensor:
    """This rank's part of a random tensor [1, heads, tokens, D], whose chunks each have a seed of their own."""
    ranks = dist.get_world_size()
    at = ha.distributed.positions(tokens, balance="zigzag")
    n = tokens // (2 * ranks)
    chunks = [int(at[i]) // n for i in range(0, len(at), n)]
    return torch.cat([make_chunk(x_seed, chunk, heads, n, D, device) for chunk in chunks], 2)


def make_chunk(x_seed: int, chunk: int, heads: int, n: int, D: int, device: torch.device) -> torch.Tensor:
    """Chunk `chunk` of that tensor."""
    g = torch.Generator(device).manual_seed(1000 * x_seed + chunk)
    return torch.randn((1, heads, n, D), generator=g, device=device, dtype=torch.bfloat16)


def attend_bf16(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same in bf16: the same collective, and FlashAttention-3 or PyTorch's SDPA on each chunk of this rank."""
    ranks, rank, n = dist.get_world_size(), dist.get_rank(), q.size(2) // 2
    own = torch.stack([k, v])
    parts = own.new_empty((ranks, *own.shape))
    dist.all_gather_into_tensor(parts, own.contiguous())
    first, second = parts.chunk(2, 4)
    k, v = torch.cat([*first, *second.flip(0)], 3)
    outs = []
    for i, chunk in enumerate((rank, 2 * ranks - 1 - rank)):
        rows, end = q[:, :, i * n : i * n + n], (chunk + 1) * n
        try:
            from fa3_fwd_interface import flash_attn_func
        except ImportError:
            outs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    rows, k[:, :, :end], v[:, :, :end], attn_mask=causal_lower_right(n, end), enable_gqa=True
                )
            )
        else:
            out = flash_attn_func(*(x.transpose(1, 2) for x in (rows, k[:, :, :end], v[:, :, :end])), causal=True)
            outs.append((out[0] if isinstance(out, tuple) else out).transpose(1, 2))
    return torch.cat(outs, 2)


def worst(value: float, device: torch.device) -> float:
    """The largest of all ranks; NaN if one is."""
    values = torch.tensor([value], device=device)
    found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values)
    return float(torch.cat(found).max())


def milliseconds(attend: Callable[[], object]) -> float:
    """The median of `ROUNDS` calls, as many on every rank."""
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        attend()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def bytes_sent(strategy: Strategy, tokens: int, H: int, H_kv: int, D: int) -> float:
    """Of a rank, without descales: docs/distributed.md has the model."""
    P = dist.get_world_size()
    own = tokens / P * D
    if strategy == "ulysses":
        # Q, K and V in 8 bits, the output in 16.
        return (3 * H + 2 * max(H_kv, P)) * own * (P - 1) / P
    return 2 * H_kv * own * (P - 1 if strategy == "ring" else 1)


def run(device: torch.device, tokens: int, H: int, H_kv: int, D: int) -> bool:
    """Check, and on GPUs time, every strategy; whether all errors are within their bound."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    q, k, v = (make_part(seed, heads, tokens, D, device) for seed, heads in enumerate((H, H_kv, H_kv)))
    # The last rows of this rank see all keys up to the end of their chunk.
    last = 2 * ranks - 1 - rank
    n = tokens // (2 * ranks)
    group = H // H_kv
    keys, values = (
        torch.cat([make_chunk(seed, chunk, H_kv, n, D, device)[:, :1] for chunk in range(last + 1)], 2)
        for seed in (1, 2)
    )
    expected = ha.reference.attention(q[:, :group, -CHECKED_ROWS:], keys, values, causal=True)
    flops = 2.0 * tokens * tokens * H * D / ranks
    ok = True
    runs: dict[Strategy | Literal["bf16"], Callable[[], torch.Tensor]] = {}
    strategies: tuple[Strategy, ...] = ("allgather", "ulysses", "ring")
    for strategy in strategies:
        if strategy == "ulysses" and (H % ranks or (H_kv % ranks and ranks % H_kv)):
            continue

        def attend(strategy: Strategy = strategy) -> torch.Tensor:
            out: torch.Tensor = ha.distributed.attention(q, k, v, strategy=strategy, balance="zigzag", causal=True)
            return out

        runs[strategy] = attend
    if device.type == "cuda":
        runs["bf16"] = lambda: attend_bf16(q, k, v)
    for name, call in runs.items():
        error = worst(relative_error(call()[:, :group, -CHECKED_ROWS:], expected), device)
        ok &= error <= ERROR_BOUND
        line = f"{name:>9}: error {error:.4f} {'ok' if error <= ERROR_BOUND else 'FAILED'}"
        if name != "bf16":
            line += f", {bytes_sent(name, tokens, H, H_kv, D) / 1e6:.3g} MB sent a rank"
        if device.type == "cuda":
            ms = worst(milliseconds(call), device)
            line += f", {ms:.1f} ms, {flops / ms / 1e9:.0f} TFLOP/s a GPU"
        if rank == 0:
            print(line, flush=True)
    return ok


def attend_as_rank(rank: int, ranks: int, local_rank: int, rendezvous: str, device_type: str, tokens: int) -> bool:
    """One rank, from the first collective to the last; whether all errors are within their bound."""
    on_gpu = device_type == "cuda"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # the interpreter's tiles are so small that threads only get in its way
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    _, H, H_kv, D = SHAPE_GPU if on_gpu else SHAPE_CPU
    if rank == 0:
        print(f"{tokens} tokens over {ranks} ranks ({device_type}), causal zigzag, {H}/{H_kv} heads, D {D}", flush=True)
    ok = run(device, tokens, H, H_kv, D)
    dist.destroy_process_group()
    return ok


def started(rank: int, *rest: Any) -> None:
    """`attend_as_rank` in a process of its own, which fails if it does."""
    ranks, rendezvous, device_type, tokens = rest
    raise SystemExit(0 if attend_as_rank(rank, ranks, rank, rendezvous, device_type, tokens) else 1)


def main(argv: list[str] | None = None) -> int:
    """Run as one of torchrun's ranks, or start the ranks; return 1 if an error exceeds its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nproc", type=int, help="start so many ranks, in place of torchrun")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="a multiple of 256 times the number of ranks")
    args = parser.parse_args(argv)
    if not args.nproc and "WORLD_SIZE" not in os.environ:
        parser.error("start it by torchrun, or with --nproc")
    ranks: int = args.nproc or int(os.environ["WORLD_SIZE"])
    least: int = SHAPE_GPU[0] if args.device == "cuda" else SHAPE_CPU[0]
    tokens: int = args.tokens or max(least, 256 * ranks)
    if tokens % (256 * ranks):
        parser.error(f"--tokens is {tokens}; it must be a multiple of {256 * ranks}")
    if not args.nproc:
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        return 0 if attend_as_rank(rank, ranks, local_rank, "env://", args.device, tokens) else 1
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(started, (ranks, f"file://{folder}/ranks", args.device, tokens), ranks)
        except ProcessExitedException:
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
