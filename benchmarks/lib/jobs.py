"""Jobs of a suite that measures errors alone: spread over processes, since most of their time is compilation."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from benchmarks.lib.harness import Results, Row
from benchmarks.lib.suite import Options, console, progress

#: Measures the rows of a head dim.
Part = Callable[[Options, int], Iterator[Row]]


def measured(part: Part, options: Options, D: int) -> list[Row]:
    """Return the rows of a job, in a process."""
    return list(part(options, D))


def run_jobs(name: str, jobs: Sequence[tuple[Part, int]], options: Options, results: Results) -> None:
    """Add the rows of all jobs to the results, each in a process of its own where the options have workers.

    Args:
        name: of the suite, for the progress bar.
        jobs: parts and head dims, those that take longest first.
        options: of the run.
        results: get the rows of each job as it ends.
    """
    pending = list(jobs)
    if options.workers:
        # Each process needs a CUDA context of its own, hence no fork.
        with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(measured, part, options, D): (part, D) for part, D in jobs}
            for future in progress(as_completed(futures), name, len(futures)):
                if (error := future.exception()) is None:
                    results.add(*future.result())
                    pending.remove(futures[future])
                else:
                    console.print(f"[red]a process failed, measuring D {futures[future][1]} in this one: {error!r}")
    for part, D in progress(pending, name):
        results.add(*measured(part, options, D))
