"""Choose the attention kernels' configs on this GPU, and write the tables that the package ships.

    python -m devtools.tune --out helion_attn/configs

Candidates are compiled in parallel, which gives registers and spills and needs no GPU, then timed one after the other.
Every timing goes to FOLDER/tune.jsonl at once; run the command again and it times what is missing. --compile-only lists
the candidates with what the compiler says of them, on any machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit("devtools.tune needs rich: pip install 'helion_attn[bench]'") from error

from devtools.tune import table
from devtools.tune.candidates import HEAD_DIMS, RECIPES, Tile, bits_of, candidates, table_of, workloads
from devtools.tune.journal import Journal, Timing, machine, run_description
from devtools.tune.trial import Compiled, as_compiled, measure, precompile
from helion_attn.configs import LargeTileConfig

#: The pairs, as the command line has them.
BITS = {f"{qk_bits}/{pv_bits}": (qk_bits, pv_bits) for qk_bits, pv_bits in RECIPES}

JOURNAL = "tune.jsonl"

# Where output is a file there is no width to ask for, and the table would be cut at 80.
console = Console(width=None if sys.stdout.isatty() else 160)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[Tile]]:
    """The arguments, and the candidates that they ask for. Ends the program if there is something wrong with them."""
    parser = argparse.ArgumentParser(
        prog="python -m devtools.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the tables; needed unless --compile-only")
    parser.add_argument(
        "--d", type=int, nargs="+", default=HEAD_DIMS, choices=HEAD_DIMS, metavar="D", help=f"of {HEAD_DIMS}"
    )
    parser.add_argument("--bits", nargs="+", default=list(BITS), choices=BITS, help="of Q and K, and of P and V")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="compiling processes")
    parser.add_argument("--compile-only", action="store_true", help="list the candidates; time and write nothing")
    parser.add_argument("--commit", help="commit to record, where there is no git to ask")
    args = parser.parse_args(argv)

    wanted = [tile for tile in candidates() if tile.D_pad in args.d and bits_of(tile) in {BITS[b] for b in args.bits}]
    if not wanted:
        parser.error(f"no candidates of {', '.join(args.bits)} bits have a head dim of {', '.join(map(str, args.d))}")
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}; it must be at least 1")
    if args.compile_only:
        return args, wanted
    if args.out is None:
        parser.error("--out is needed: where the tables go")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out is {args.out}, which is not a folder")
    if not torch.cuda.is_available():
        parser.error("timing needs a Hopper GPU, and there is no CUDA device; --compile-only does without")
    if (capability := torch.cuda.get_device_capability()) != (9, 0):
        name = torch.cuda.get_device_name()
        parser.error(f"timing needs a Hopper GPU (compute capability 9.0); {name} has {capability[0]}.{capability[1]}")
    return args, wanted


def one_process() -> ProcessPoolExecutor:
    """A pool of its own for every compiling process: where one is killed, only its candidate is lost."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def precompile_in(pools: SimpleQueue[ProcessPoolExecutor], tile: Tile) -> Compiled:
    """`precompile` in a pool that is free, or in the place of one that a candidate breaks, a new one for the next."""
    pool = pools.get()
    try:
        return pool.submit(precompile, tile).result()
    except BrokenProcessPool:
        pool = one_process()
        return Compiled(error="the compiling process was killed; for want of memory?")
    finally:
        pools.put(pool)


def compile_all(tiles: list[Tile], jobs: int, advance: Callable[[], None]) -> dict[Tile, Compiled]:
    """`precompile`, in processes of its own; `advance` after each."""
    found = {}
    jobs = min(jobs, len(tiles))
    pools: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()
    for _ in range(jobs):
        pools.put(one_process())
    threads = ThreadPoolExecutor(jobs)
    try:
        tile_of = {threads.submit(precompile_in, pools, tile): tile for tile in tiles}
        for future in as_completed(tile_of):
            found[tile_of[future]] = future.result()
            advance()
    finally:
        threads.shutdown(cancel_futures=True)
        for _ in range(jobs):
            pools.get().shutdown()
    return {tile: found[tile] for tile in tiles}


def compile_with_progress(tiles: list[Tile], jobs: int) -> dict[Tile, Compiled]:
    """`compile_all`, shown."""
    if not tiles:
        return {}
    with progress() as bars:
        bar = bars.add_task("compiling", total=len(tiles))
        return compile_all(tiles, jobs, lambda: bars.advance(bar))


def progress() -> Progress:
    """A bar, how many are done of how many, and for how long."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def show(compiled: dict[Tile, Compiled]) -> None:
    """What the compiler says of every candidate."""
    listed = Table(title="candidates")
    for column in ("bits", "D", "V tile", "mask", "bm", "bn", "warps", "stages", "max regs", "regs"):
        listed.add_column(column)
    for column in ("spills", "CTAs/SM", "error"):
        listed.add_column(column)
    for tile, report in compiled.items():
        v_tile = tile.v_tile if isinstance(tile, LargeTileConfig) else tile.D_pad
        listed.add_row(
            "/".join(map(str, bits_of(tile))),
            *(str(x) for x in (tile.D_pad, v_tile, "causal" if tile.has_right else "full", tile.bm, tile.bn)),
            *(str(x) for x in (tile.num_warps, tile.num_stages)),
            *(str(x) for x in (tile.max_registers, report.registers, report.spills, report.ctas_per_sm)),
            report.error or "",
        )
    console.print(listed)


def time_all(tiles: list[Tile], journal: Journal, jobs: int, now: dict[str, Any], run: dict[str, Any]) -> list[Timing]:
    """Timings of the usable `tiles` on their workloads: those in `journal`, then the others.

    Args:
        tiles: candidates.
        journal: takes up every timing as it comes.
        jobs: compiling processes.
        now: `machine()`.
        run: `run_description()`.
    """
    trials = [(tile, w) for tile in tiles for w in workloads(tile)]
    known = {trial: timing for trial in trials if (timing := journal.find(*trial, now)) is not None}
    console.print(f"{len(known)} of {len(trials)} timings are in {journal.path} already")
    compiled = compile_with_progress(list(dict.fromkeys(tile for tile, w in trials if (tile, w) not in known)), jobs)
    for tile, report in compiled.items():
        if not report.usable:
            console.print(f"left out: {tile}: {report}")
    pending = [(tile, w) for tile, w in trials if (tile, w) not in known and compiled[tile].usable]
    timings = list(known.values())
    with progress() as bars:
        for tile, w in bars.track(pending, description="timing"):
            report = compiled[tile]
            # The occupancy has a say in the order of programs.
            ms = measure(tile := as_compiled(tile, report), w)
            timing = Timing(tile, w, report.registers, report.spills, ms, now | run)
            journal.append(timing)
            timings.append(timing)
    return timings


def show_chosen(rows: list[dict[str, Any]], name: str) -> None:
    """The new rows, with the first of the runners-up."""
    listed = Table(title=name)
    for column in ("config", "query blocks/SM", "ms", "TFLOP/s", "next best, ms", "which differs in"):
        listed.add_column(column)
    for row in rows:
        config = " ".join(f"{name}={value}" for name, value in row["config"].items())
        limit = row.get("max_query_blocks_per_sm")
        rest = dict(row["runners_up"][0]) if row["runners_up"] else {}
        second = str(rest.pop("ms", ""))
        numbers = (f"{row['ms']:.3f}", f"{row['tflops']:.0f}")
        listed.add_row(config, "any" if limit is None else f"up to {limit}", *numbers, second, str(rest or ""))
    console.print(listed)


def main(argv: list[str] | None = None) -> int:
    """Tune, print, write."""
    args, tiles = parse(argv)
    if args.compile_only:
        show(compile_with_progress(tiles, args.jobs))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    journal = Journal(args.out / JOURNAL)
    command = " ".join(["python -m devtools.tune", *(sys.argv[1:] if argv is None else argv)])
    try:
        timings = time_all(tiles, journal, args.jobs, machine(), run_description(command, args.commit))
    except KeyboardInterrupt:
        console.print(f"stopped; what was timed is in {journal.path}, and the same command goes on from there")
        return 130
    for name in dict.fromkeys(table_of(tile) for tile in tiles):
        chosen = table.choose([timing for timing in timings if table_of(timing.tile) == name])
        table.write(args.out / name, chosen)
        show_chosen(chosen, name)
        console.print(f"written: {args.out / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
