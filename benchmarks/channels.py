"""Suite `channels`: total errors where K's size lies in few channels of either sign, so that no mean takes it away.

    python benchmarks/attention.py --suite channels

Every input at 4096 keys; some with more keys, with a causal mask, and with grouped queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.lib.harness import Loaded, Results, Row
from benchmarks.lib.jobs import run_jobs
from benchmarks.lib.problem import check, make_problem, others, ours, workload
from benchmarks.lib.recipes import PRESETS, RUNGS
from benchmarks.lib.suite import Block, Options, Suite
from benchmarks.lib.tables import SHOWN, Table, by_series, error_text, labels, rows_of, series_in, values_of
from devtools.inputs import CHANNEL_KINDS
from devtools.workloads import Workload

#: Head dims; numbers of keys, of which the first has every input; query rows; query heads on `KV_HEADS` if grouped.
DIMS, LENGTHS, QUERIES, GROUPED, KV_HEADS = (64, 128, 256), (4096, 16384, 131072), 1024, 8, 2

#: The inputs that are measured in every form.
EVERYWHERE = ("k3x30", "k2x100q", "k_pairs", "k_lognormal")


def forms(D: int, lengths: tuple[int, ...]) -> Iterator[tuple[Workload, tuple[str, ...]]]:
    """Shapes, and the inputs of each."""
    N, M = lengths[0], min(lengths[0], QUERIES)
    plain = workload(1, KV_HEADS, M, N, D)
    yield plain, CHANNEL_KINDS
    yield replace(plain, causal=True), EVERYWHERE
    yield replace(plain, H=GROUPED), EVERYWHERE
    for N in lengths[1:]:
        yield replace(plain, N=N), EVERYWHERE


def rows(options: Options, D: int) -> Iterator[Row]:
    """Every form at a head dim."""
    lengths = (64,) if options.device.type == "cpu" else LENGTHS[:1] if options.quick else LENGTHS
    for w, kinds in forms(D, lengths):
        for kind in kinds:
            problem = make_problem(w, kind, options)
            for contender in (*ours(options, [*PRESETS, *RUNGS]), *others(options)):
                yield check(contender, problem)[0]


def run(options: Options, results: Results) -> None:
    """The suite."""
    dims = options.dims if options.quick or options.device.type == "cpu" else DIMS
    run_jobs("channels", [(rows, D) for D in sorted(dims, reverse=True)], options, results)


def tables(loaded: Loaded) -> list[Table]:
    """Total error by input, form and head dim."""
    found = rows_of(loaded, "channels")
    names = series_in(found, SHOWN)
    axes = ("N", "causal", "H", "input", "D")
    order = sorted(values_of(found, *axes), key=lambda cell: (*cell[:3], CHANNEL_KINDS.index(cell[3]), cell[4]))
    body = []
    for N, causal, H, kind, D in order:
        cell = [row for row in found if [row[axis] for axis in axes] == [N, causal, H, kind, D]]
        errors = by_series(cell, "error_total")
        title = ", ".join([kind, *["causal"] * causal, *["grouped"] * (H > KV_HEADS)])
        body.append([str(N), title, str(D), *(error_text(errors.get(name)) for name in names)])
    title = "Total error where K has few large channels"
    return [Table(title, ["keys", "input", "D", *labels(names)], body, keys=3)] if body else []


def front_errors(loaded: Loaded, D: int, N: int) -> dict[str, float]:
    """Total error by series on 3 channels times 30, full attention; empty where it was not measured."""
    where = {"input": "k3x30", "causal": False, "H": KV_HEADS, "D": D, "N": N}
    return by_series(rows_of(loaded, "channels", **where), "error_total")


SUITE = Suite("channels", run, {"channels": Block("channels", tables)})
