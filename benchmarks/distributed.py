"""Benchmarks attention over several GPUs, from one to all there are: strong and weak scaling, bytes, and what overlaps.

    python benchmarks/attention.py --suite distributed [--quick]

From bf16 to bf16, quantising included, one sequence: BALANCED with every strategy, FAST with all-gather. A process a
GPU, NCCL (gloo on CPUs, a dry run). Beside it the same tokens in bf16 in the same processes: K and V gathered by the
same collective, then FlashAttention-3 or PyTorch's SDPA. A time is that of the slowest rank. Stages:

    checked     a default call of `helion_attn.distributed.attention`, in which ranks first tell each other of it
    e2e         the same with check=False, or a call of the bf16 attention
    compute     ring: the call without its exchange, on keys that are there
    collective  the large collective alone, of as many bytes

And on one GPU `gathered`: the launch over the parts of several ranks, made here of one sequence's blocks, beside the
same keys in one piece. Both have the same bits.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode

import helion_attn as ha
from benchmarks.lib.checks import Check
from benchmarks.lib.harness import Loaded, Results, Row, result_row, time_interleaved
from benchmarks.lib.plots import grid, legend, line, powers_axis
from benchmarks.lib.suite import Block, Options, Plot, Suite, progress
from benchmarks.lib.tables import LABELS, OURS, Table, error_text, mask, number, ratio, rows_of, values_of
from devtools.workloads import Workload
from helion_attn import ops
from helion_attn.api import quantize
from helion_attn.configs import varlen_packing
from helion_attn.distributed import collectives
from helion_attn.distributed.buffer import buffer_for, section
from helion_attn.distributed.call import rank_steps
from helion_attn.distributed.cut import Cut, cut_of
from helion_attn.options import ScoreOptions
from helion_attn.problem import MultiRankArgs, RankChunks
from helion_attn.testing import relative_error
from helion_attn.types import Balance, QuantizedQKV, RecipeName, Strategy

STRATEGIES: tuple[Strategy, ...] = ("allgather", "ulysses", "ring")

#: What is measured of this package: the preset, by its name in rows, and the strategy.
WAYS: tuple[tuple[str, Strategy], ...] = (
    *(("helion_attn", strategy) for strategy in STRATEGIES),
    ("fast", "allgather"),
)

#: Rows that each rank checks, its last; of the heads of one KV head.
CHECKED_ROWS = 16

#: Total error (randn) above which a preset's time is not worth reporting: some 1.5 times what it has on one GPU.
ERROR_BUDGETS = {"helion_attn": 0.06, "fast": 0.085}

#: A launch over gathered parts is at most so many times slower than over one piece; a ring, than its compute alone; a
#: default call, than one with check=False.
GATHERED_BOUND, HIDDEN_BOUND, CHECK_BOUND = 1.03, 1.05, 1.03

#: From so many FLOPs a rank on, fewer rounds are timed.
LONG_FLOPS, LONG_REPEATS = 1e14, 3

#: Seconds that ranks wait for each other, for example while one of them compiles.
TIMEOUT = 300


class Cell(NamedTuple):
    """One problem on so many GPUs."""

    scaling: str  # "strong", one problem for all numbers of GPUs; or "weak", so many tokens a GPU
    N: int  # tokens of all
    H: int  # query heads
    H_kv: int  # KV heads
    causal: bool  # zigzag if it is, otherwise each rank has one run
    D: int = 128  # head dim

    @property
    def balance(self) -> Balance:
        """How it is cut."""
        return "zigzag" if self.causal else None

    def flops(self) -> float:
        """Of all ranks."""
        return 4.0 * self.N * self.N * self.D * self.H / (2 if self.causal else 1)


def cells_of(world: int, options: Options) -> list[Cell]:
    """What is measured on `world` GPUs."""
    if options.device.type == "cpu":
        return [Cell("strong", 512, 1, 1, True, 32), Cell("strong", 64, 2, 2, False, 32)]
    strong = [Cell("strong", 32768, 32, 8, True), Cell("strong", 32760, 40, 40, False)]
    if not options.quick:
        strong += [Cell("strong", 131072, 32, 8, True), Cell("strong", 75600, 40, 40, False)]
        strong += [Cell("strong", 524288, 32, 8, True)] if world >= 2 else []
    return [*strong, Cell("weak", 32768 * world, 32, 8, True)]


# --- one GPU: gathered parts and one piece --------------------------------------------------------


def gathered_call(
    qkv: QuantizedQKV, ranks: int, zigzag: bool, causal: bool, out: Tensor, lse: Tensor
) -> Callable[[], None]:
    """The launch over the blocks of `qkv` as if `ranks` ranks had sent them; whole blocks only."""
    p = varlen_packing(qkv.D, qkv.D_v, qkv.recipe.bits)
    cut = Cut((qkv.N // ranks,) * ranks, zigzag)
    heads, blocks = qkv.k8.size(0), qkv.N // ranks // p.bn
    b = buffer_for(heads, blocks, 0, p, qkv.recipe)
    rows = qkv.k8.new_zeros((ranks, b.size), dtype=torch.uint8)
    for rank in range(ranks):
        own = torch.cat([torch.arange(r.begin // p.bn, (r.begin + r.size) // p.bn) for r in cut.chunks(rank)]).to(
            rows.device
        )
        row = rows[rank : rank + 1]
        k8, v8 = (x.view(torch.uint8)[:, own].flatten(2) for x in (qkv.k8, qkv.v8))
        section(row, 0, heads, blocks, b.k_block)[0] = k8
        section(row, b.v_offset, heads, blocks, b.v_block)[0] = v8
    n = cut.chunk_size
    chunks = RankChunks(
        row_chunk_blocks=qkv.q8.size(1),
        row_chunk_len=qkv.M,
        row_first=qkv.N - qkv.M,
        row_step=0,
        key_chunks=2 * ranks if zigzag else ranks,
        key_chunk_blocks=n // p.bn,
        key_chunk_len=n,
        key_step=n,
        ranks=ranks,
        zigzag=zigzag,
        **rank_steps(b),
    )
    arguments = MultiRankArgs(
        q8=qkv.q8,
        q_descale=qkv.q_descale,
        lse_shift=qkv.lse_shift,
        gathered=rows,
        k_descale=qkv.k_descale.view(-1),
        v_descale=qkv.v_descale,
        v_mean=qkv.v_mean,
        out=out,
        lse=lse,
        row_bounds=None,
        block_bounds=None,
        chunks=chunks,
        v_offset=b.v_offset,
        n_len=qkv.N,
        d=qkv.D,
        d_v=qkv.D_v,
        scores=ScoreOptions(causal=causal).resolved(qkv.D),
        bshd=False,
        recipe=qkv.recipe,
    )
    return partial(ops.attention_multi_rank, arguments)


def measure_gathered(options: Options) -> list[Row]:
    """A row for each number of parts, and for one piece."""
    on_cpu = options.device.type == "cpu"
    N, H, H_kv, D = (512, 1, 1, 32) if on_cpu else (32768, 32, 8, 128)
    rows = []
    g = torch.Generator(options.device).manual_seed(0)
    q, k, v = (
        torch.randn((1, heads, N, D), generator=g, device=options.device, dtype=torch.bfloat16)
        for heads in (H, H_kv, H_kv)
    )
    qkv = quantize(q, k, v)
    for causal in (True, False):
        w = Workload("gathered", 1, H, H_kv, N, N, D, causal, frozenset())
        one = ha.attention_quantized(qkv, causal=causal)
        runs: dict[tuple[int, bool], Callable[[], object]] = {
            (1, False): partial(ha.attention_quantized, qkv, causal=causal, num_splits=1)
        }
        for ranks, zigzag in ((2, False), (2, True)) if on_cpu else ((2, False), (8, False), (2, True), (8, True)):
            out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
            run = gathered_call(qkv, ranks, zigzag, causal, out, lse)
            run()
            # The same blocks in the same order.
            if not torch.equal(out, one):
                raise AssertionError(f"{ranks} parts, zigzag {zigzag}, causal {causal}: not the bits of one piece")
            runs[ranks, zigzag] = run
        for (ranks, zigzag), ms in time_interleaved(runs, options.device, options.repeats).items():
            row = result_row("helion_attn", w, "kernel", "randn", recipe="balanced", ms=ms)
            rows.append(row | {"parts": ranks, "zigzag": zigzag, "world": 1, "scaling": "gathered", "strategy": None})
    return rows


# --- several GPUs ---------------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """Counts the bytes that are given to collectives, and to other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        name = str(func)
        if name.startswith(("_c10d_functional", "c10d.send")) and "wait" not in name:
            x = args[0][0] if isinstance(args[0], list) else args[0]
            self.bytes += x.numel() * x.element_size()
        return func(*args, **(kwargs or {}))


def attend_bf16(impl: str, q: Tensor, k: Tensor, v: Tensor, cut: Cut, causal: bool) -> Tensor:
    """K and V gathered in bf16, and attended to by each of the rank's runs; all [1, heads, S, D]."""
    group = collectives.resolve(None)
    # The last part may be shorter.
    longest = max(cut.lengths)
    own = k.new_zeros((2, *k.shape[:2], longest, k.size(3)))
    own[0, :, :, : k.size(2)], own[1, :, :, : k.size(2)] = k, v
    gathered = collectives.gather(own, group)
    runs = sorted(
        (run.begin, rank, sum(r.size for r in cut.chunks(rank)[:i]), run.size)
        for rank in range(cut.ranks)
        for i, run in enumerate(cut.chunks(rank))
    )
    k, v = torch.cat([gathered[rank, :, :, :, at : at + size] for _, rank, at, size in runs], 3)
    outs, at = [], 0
    for begin, size in cut.chunks(group.rank()):
        rows = q[:, :, at : at + size]
        end = begin + size if causal else k.size(2)
        if impl == "fa3_bf16":
            from fa3_fwd_interface import flash_attn_func

            bshd = (x.transpose(1, 2) for x in (rows, k[:, :, :end], v[:, :, :end]))
            found = flash_attn_func(*bshd, causal=causal)
            outs.append((found[0] if isinstance(found, tuple) else found).transpose(1, 2))
        else:
            bias: Any = causal_lower_right(size, end) if causal else None
            outs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    rows, k[:, :, :end], v[:, :, :end], attn_mask=bias, enable_gqa=q.size(1) != k.size(1)
                )
            )
        at += size
    return torch.cat(outs, 2)


def own_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, cut: Cut, causal: bool) -> float:
    """Of the last rows of a rank, to fp64 on all keys; of the heads of one KV head."""
    begin, size = cut.chunks(dist.get_rank())[-1]
    rows, heads = min(CHECKED_ROWS, size), q.size(1) // k.size(1)
    end = begin + size if causal else k.size(2)
    oracle = ha.reference.attention(q[:, :heads, -rows:], k[:, :1, :end], v[:, :1, :end], causal=causal)
    return relative_error(out[:, :heads, -rows:], oracle)


def collective_alone(strategy: Strategy, sent: int, device: torch.device) -> Callable[[], object]:
    """The large collective of a strategy, of so many bytes a rank."""
    group = collectives.resolve(None)
    P = group.size()
    size = max(1, sent // P) * P
    x = torch.zeros(size, dtype=torch.uint8, device=device)
    if strategy == "ulysses":
        return lambda: collectives.exchange(x, [size // P] * P, [size // P] * P, group)
    if strategy == "allgather":
        return lambda: collectives.gather(x, group)
    into = torch.empty_like(x[: max(1, size // max(1, P - 1))])

    def ring() -> None:
        for _ in range(P - 1):
            for work in collectives.pass_on(x[: into.numel()], into, group):
                work.wait()

    return ring


def measure_cell(cell: Cell, device: torch.device, repeats: int, peer: str) -> list[Row]:
    """The rows of a cell, the same on all ranks. No time for a wrong answer of ours."""
    world, rank = dist.get_world_size(), dist.get_rank()
    cut = cut_of(cell.N, world, cell.causal and world > 1)
    g = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn((1, heads, cell.N, cell.D), generator=g, device=device, dtype=torch.bfloat16)
        for heads in (cell.H, cell.H_kv, cell.H_kv)
    )
    own = [torch.cat([x[:, :, r.begin : r.begin + r.size] for r in cut.chunks(rank)], 2) for x in (q, k, v)]
    equal = len(set(cut.lengths)) == 1
    w = Workload("distributed", 1, cell.H, cell.H_kv, cell.N, cell.N, cell.D, cell.causal, frozenset())
    described: Row = {"world": world, "scaling": cell.scaling}
    rows: dict[tuple[str, str, str], Row] = {}
    runs: dict[tuple[str, str, str], Callable[[], object]] = {}
    for impl, strategy in WAYS:
        if world == 1 and strategy != "allgather":
            continue
        if strategy == "ulysses" and (cell.H % world or (cell.H_kv % world and world % cell.H_kv)):
            continue
        recipe: RecipeName = "fast" if impl == "fast" else "balanced"
        attend = partial(
            ha.distributed.attention,
            *own,
            strategy=strategy,
            balance=cell.balance,
            causal=cell.causal,
            recipe=recipe,
        )
        with Sent() as sent:
            out = attend()
        error = torch.tensor(own_error(out, own[0], k, v, cut, cell.causal), device=device)
        errors = collectives.gather(error, collectives.resolve(None))
        worst = float(errors.amax()) if not bool(errors.isnan().any()) else float("nan")
        described_so = described | {"strategy": strategy, "bytes": sent.bytes}
        stages: dict[str, Callable[[], object]] = {"checked": attend}
        if equal:
            stages["e2e"] = partial(attend, check=False)
        if strategy == "ring":

            def compute(attend: Callable[..., object] = attend) -> None:
                with mock.patch.object(collectives, "pass_on", return_value=[]):
                    attend(check=not equal)

            stages["compute"] = compute
        if world > 1:
            stages["collective"] = collective_alone(strategy, sent.bytes, device)
        for stage, run in stages.items():
            row = result_row(impl, w, stage, "randn", recipe=recipe, error_total=worst) | described_so
            rows[impl, strategy, stage] = row
            # "not <=": a NaN is over budget too.
            if not worst <= ERROR_BUDGETS[impl]:
                row["note"] = f"not timed: error over {ERROR_BUDGETS[impl]}"
            else:
                runs[impl, strategy, stage] = run
    q_own, k_own, v_own = own
    bf16 = partial(attend_bf16, peer, q_own, k_own, v_own, cut, cell.causal)
    # K and V of the longest part.
    sent_bf16 = 4 * max(cut.lengths) * cell.H_kv * cell.D if world > 1 else 0
    described |= {"strategy": "allgather", "bytes": sent_bf16}
    rows[peer, "allgather", "e2e"] = result_row(peer, w, "e2e", "randn") | described
    runs[peer, "allgather", "e2e"] = bf16
    rounds = LONG_REPEATS if cell.flops() / world > LONG_FLOPS else repeats
    # By a group of its own: in one group a call's check would wait until all ranks begin.
    align = partial(dist.all_reduce, torch.zeros(1, device=device), group=dist.new_group())
    times = time_interleaved(runs, device, rounds, align=align)
    slowest = torch.tensor([times[key] for key in runs], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    for key, ms in zip(runs, slowest.tolist(), strict=True):
        rows[key]["ms"] = ms
        # Of a GPU.
        rows[key]["tflops"] = cell.flops() / world / ms / 1e9 if key[2] in ("e2e", "checked") else None
    return list(rows.values())


def process(rank: int, world: int, folder: str, options: Options, peer: str) -> None:
    """A rank: every cell; rank 0 writes each cell's rows to a line of a file."""
    device = torch.device(options.device.type, rank) if options.device.type == "cuda" else options.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous_{world}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT),
    )
    with Path(folder, f"rows_{world}").open("a") as file:
        for cell in cells_of(world, options):
            rows = measure_cell(cell, device, options.repeats, peer)
            if rank == 0:
                file.write(json.dumps(rows) + "\n")
                file.flush()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    dist.destroy_process_group()


def run(options: Options, results: Results) -> None:
    """Gathered parts on one GPU; then every cell on 1, 2, 4, ... GPUs."""
    results.add(*measure_gathered(options))
    worlds = [world for world in (1, 2, 4, 8) if world <= torch.cuda.device_count()]
    if options.device.type == "cpu":
        worlds = [2]
    peer = "fa3_bf16" if "fa3_bf16" in options.impls else "sdpa_bf16"
    for world in progress(worlds, "distributed"):
        with tempfile.TemporaryDirectory() as folder:
            spawn(process, (world, folder, options, peer), world)
            for text in Path(folder, f"rows_{world}").read_text().splitlines():
                results.add(*json.loads(text))


# --- as tables and as a plot ----------------------------------------------------------------------


def tables(loaded: Loaded) -> list[Table]:
    """Gathered parts; times, bytes and errors of every cell."""
    rows = rows_of(loaded, "distributed")
    body = []
    for causal, parts, zigzag in values_of(
        [r for r in rows if r["scaling"] == "gathered"], "causal", "parts", "zigzag"
    ):
        cell = rows_of(loaded, "distributed", scaling="gathered", causal=causal)
        one = next(r["ms"] for r in cell if r["parts"] == 1)
        (row,) = (r for r in cell if (r["parts"], r["zigzag"]) == (parts, zigzag))
        kind = "one piece" if parts == 1 else f"{parts} ranks{', zigzag' if zigzag else ''}"
        body.append([mask(causal), kind, number(row["ms"], ".3f"), number(ratio(row["ms"], one), ".3f")])
    found = [Table("Kernel over gathered parts, one GPU", ["mask", "keys", "ms", "/ one piece"], body)] if body else []
    body = []
    keys = ("scaling", "N", "H", "H_kv", "causal", "world")
    for values in values_of([r for r in rows if r["scaling"] != "gathered"], *keys):
        cell = [r for r in rows if all(r[key] == value for key, value in zip(keys, values, strict=True))]
        bf16 = next((r["ms"] for r in cell if r["impl"] not in OURS), None)
        for impl, strategy in WAYS:
            stages = {r["stage"]: r for r in cell if (r["impl"], r["strategy"]) == (impl, strategy)}
            if "checked" in stages:
                ms = {stage: row["ms"] for stage, row in stages.items()}
                mine = ms["checked"]
                body.append(
                    [
                        values[0],
                        f"{values[1]} tokens, {values[2]}:{values[3]} heads, {mask(values[4])}",
                        str(values[5]),
                        strategy,
                        LABELS[impl],
                        *(number(ms.get(stage), ".3f") for stage in ("checked", "e2e", "compute", "collective")),
                        number(cell_flops(values) / mine / 1e9 if mine else None, ".0f"),
                        number(ratio(bf16, mine), ".2f"),
                        number(stages["checked"]["bytes"] / 1e6, ".2f"),
                        error_text(stages["checked"]["error_total"]),
                    ]
                )
    headers = ["scaling", "problem", "GPUs", "strategy", "preset", "ms", "check=False"]
    headers += ["compute", "collective"]
    headers += ["TFLOP/s a GPU", "speed / bf16's", "MB a rank gives to collectives", "error"]
    return [*found, Table("From bf16 to bf16, D 128", headers, body, keys=5)] if body else found


def cell_flops(values: tuple[Any, ...]) -> float:
    """FLOPs a GPU of a cell: scaling, N, H, H_kv, causal, world. D is 128."""
    _, N, H, H_kv, causal, world = values
    return Cell("", N, H, H_kv, causal).flops() / world


def plot(loaded: Loaded) -> Figure | None:
    """TFLOP/s a GPU over the number of GPUs, a panel a problem."""
    rows = [
        r
        for r in rows_of(loaded, "distributed")
        if r["scaling"] != "gathered" and r["stage"] == ("checked" if r["impl"] in OURS else "e2e")
    ]
    problems = values_of([r for r in rows if r["scaling"] == "strong"], "N", "H", "causal")
    if not problems:
        return None
    figure, axes = grid(1, len(problems))
    for ax, (N, H, causal) in zip(axes[0], problems, strict=True):
        ax.set_title(f"{N} tokens\n{H} heads, {mask(causal)}")
        ax.set_xlabel("GPUs")
        cell = [r for r in rows if (r["N"], r["H"], r["causal"], r["scaling"]) == (N, H, causal, "strong")]
        for impl, strategy in values_of(cell, "impl", "strategy"):
            points = {
                r["world"]: r["tflops"] for r in cell if (r["impl"], r["strategy"]) == (impl, strategy) and r["tflops"]
            }
            line(ax, strategy if impl == "helion_attn" else impl, points, float)
        powers_axis(ax, [world for (world,) in values_of(cell, "world")], str)
    axes[0][0].set_ylabel("TFLOP/s a GPU")
    axes[0][0].margins(y=0.1)
    axes[0][0].set_ylim(bottom=0)
    legend(figure, axes[0])
    return figure


def checks(loaded: Loaded) -> list[Check]:
    """What gathered parts cost, and a check; and whether a ring hides its exchange."""
    found = []
    gathered = rows_of(loaded, "distributed", scaling="gathered")
    for causal in (True, False):
        cell = [r for r in gathered if r["causal"] == causal]
        one = next((r["ms"] for r in cell if r["parts"] == 1), None)
        for r in cell:
            if r["parts"] > 1:
                where = f"{r['parts']} ranks{', zigzag' if r['zigzag'] else ''}, {'causal' if causal else 'full'}"
                found.append(Check("gathered parts / one piece, time", where, ratio(r["ms"], one), GATHERED_BOUND))
    keys = ("N", "H", "causal", "world", "strategy", "scaling", "impl")
    default, unchecked = (
        {
            tuple(r[key] for key in keys): r
            for impl in OURS
            for r in rows_of(loaded, "distributed", impl=impl, stage=stage)
        }
        for stage in ("checked", "e2e")
    )
    for key, row in unchecked.items():
        N, H, causal, world, strategy, scaling, impl = key
        where = f"{scaling}, {N} tokens, {H} heads, {mask(causal)}, {world} GPUs, {strategy}, {LABELS[impl]}"
        found.append(
            Check("a default call / check=False, time", where, ratio(default[key]["ms"], row["ms"]), CHECK_BOUND)
        )
    rings = [r for r in rows_of(loaded, "distributed", strategy="ring") if r["impl"] == "helion_attn"]
    for scaling, N, H, causal, world in values_of(rings, "scaling", "N", "H", "causal", "world"):
        key = (scaling, N, H, causal, world)
        ms = {r["stage"]: r["ms"] for r in rings if (r["scaling"], r["N"], r["H"], r["causal"], r["world"]) == key}
        whole = ms.get("e2e", ms.get("checked"))
        where = f"{scaling}, {N} tokens, {H} heads, {'causal' if causal else 'full'}, {world} GPUs"
        found.append(Check("ring / its compute alone, time", where, ratio(whole, ms.get("compute")), HIDDEN_BOUND))
    return found


SUITE = Suite(
    "distributed",
    run,
    {
        "distributed": Block(
            "distributed", tables, (Plot("distributed", "TFLOP/s a GPU over the number of GPUs", plot),)
        )
    },
)
