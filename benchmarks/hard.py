"""Suite `hard`: total errors on the inputs that cost 8-bit attention most.

    python benchmarks/attention.py --suite hard

Parts, in each row's `part`: `hard`, biased channels of K, also with the same channels large in Q, a V that drifts,
wide scores, and a sink whose V is small, also with a causal mask; `drifts`, a V that drifts in every period, phase and
form of attention (drift.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from matplotlib.figure import Figure

from benchmarks import drift
from benchmarks.lib.harness import Loaded, Results, Row
from benchmarks.lib.jobs import Part, run_jobs
from benchmarks.lib.plots import grid, legend, length, line, log_axis, powers_axis
from benchmarks.lib.problem import check, make_problem, others, ours, workload
from benchmarks.lib.recipes import PRESETS, RUNGS
from benchmarks.lib.suite import Block, Options, Plot, Suite
from benchmarks.lib.tables import (
    ACCURATE_PEERS,
    FP8_PEERS,
    SHOWN,
    Table,
    by_series,
    error_text,
    labels,
    rows_of,
    series,
    series_in,
    values_of,
)
from devtools.inputs import HARD_KINDS, SINK_SHARES
from helion_attn.configs import SUPPORTED_D

#: Head dims, and numbers of keys.
DIMS, LENGTHS = (64, 128, 256, 512), (4096, 32768, 131072)


def rows(options: Options, D: int) -> Iterator[Row]:
    """Every hard input at a head dim: as many queries as fit, the last ones of a long context.

    Behind a sink also with a causal mask, from the first row on.
    """
    lengths = (64,) if options.device.type == "cpu" else LENGTHS[:1] if options.quick else LENGTHS
    kinds = [*((kind, False) for kind in HARD_KINDS), *((kind, True) for kind in SINK_SHARES)]
    for N, (kind, causal) in itertools.product(lengths, kinds):
        problem = make_problem(workload(1, 2, N if causal else min(N, 1024), N, D, causal), kind, options)
        recipes = [*PRESETS, *RUNGS] if SUPPORTED_D[-1] >= D else list(PRESETS)
        for contender in (*ours(options, recipes), *others(options)):
            yield check(contender, problem)[0] | {"part": "hard"}


def jobs(options: Options) -> list[tuple[Part, int]]:
    """Parts and head dims, those that take longest first."""
    if options.quick or options.device.type == "cpu":
        return [(part, D) for part in (rows, drift.rows) for D in options.dims]
    dims = {drift.rows: sorted(drift.DIMS, reverse=True), rows: DIMS[::-1]}
    return [(part, D) for part in dims for D in dims[part]]


def run(options: Options, results: Results) -> None:
    """The suite."""
    run_jobs("hard", jobs(options), options, results)


def tables(loaded: Loaded) -> list[Table]:
    """Total error on the hard inputs."""
    found = rows_of(loaded, "hard", part="hard")
    names = series_in(found, SHOWN)
    axes = ("input", "causal", "D", "N")
    order = sorted(values_of(found, *axes), key=lambda cell: (HARD_KINDS.index(cell[0]), *cell[1:]))
    body = []
    for kind, causal, D, N in order:
        cell = by_series((row for row in found if [row[axis] for axis in axes] == [kind, causal, D, N]), "error_total")
        title = f"{kind}, causal" if causal else kind
        body.append([title, str(D), str(N), *(error_text(cell.get(name)) for name in names)])
    return [Table("Total error on hard inputs", ["input", "D", "keys", *labels(names)], body, keys=3)] if body else []


#: What the plot shows of them.
PLOTTED_D, PLOTTED = 128, {"k_channels": "K has biased channels", "v_drifts": "V drifts", "wide": "wide scores"}


def plot(loaded: Loaded) -> Figure | None:
    """Total error by number of keys on some of the inputs."""
    found = rows_of(loaded, "hard", part="hard", D=PLOTTED_D)
    if not found:
        return None
    figure, (panels,) = grid(1, len(PLOTTED), height=3.0)
    for (kind, title), ax in zip(PLOTTED.items(), panels, strict=True):
        panel = [row for row in found if row["input"] == kind and row["error_total"] is not None]
        for name in series_in(panel, (*PRESETS, *FP8_PEERS, *ACCURATE_PEERS, "fa3_bf16")):
            line(ax, name, {row["N"]: row["error_total"] for row in panel if series(row) == name}, float)
        log_axis(ax)
        powers_axis(ax, [N for (N,) in values_of(panel, "N")], length)
        ax.set_title(f"{title}, D = {PLOTTED_D}")
        ax.set_xlabel("keys")
    panels[0].set_ylabel("total error")
    legend(figure, panels, columns=5)
    return figure


PLOT = Plot("keys", "Total error by number of keys", plot)

SUITE = Suite(
    "hard",
    run,
    {
        "hard": Block("hard", tables, (PLOT,)),
        "drifts": Block("hard", drift.tables, (Plot("drifts", "Total error where V drifts, by head dim", drift.plot),)),
    },
)
