"""The torch, Triton and Helion that this package runs with, and what a GPU has shown of each Triton.

The passes edit Triton's IR, and launches repeat what its launcher does: neither is an interface of Triton's. So a
version counts as known once a Hopper GPU has run the tests of attention, copies and ping-pong under it. With an
unknown one kernels compile without the passes and launch through Triton, which is right, slower, and said.
"""

from __future__ import annotations

from typing import NamedTuple

import triton


class KnownTriton(NamedTuple):
    """A Triton that was run on a Hopper GPU."""

    series: str  # the first two numbers of its version
    torch: str  # releases whose ordinary Linux wheel requires it
    verified: str  # the run, under `VERIFIED_TORCH`: GPU, date, and what of it passed
    lost: str  # what is lost compared with the Triton that the figures are of


#: Newest last. docs/trust.md has the runs.
KNOWN_TRITONS = (
    KnownTriton("3.6", "2.11", "H100 and H200, all suites and benchmarks", "nothing: the figures are of it"),
    KnownTriton(
        "3.7",
        "2.12, 2.13",
        "H200, 2026-11-23: 613 of 614 tests of attention, copies and ping-pong",
        "HYBRID at D 256, causal: one register spills in the loop",
    ),
    KnownTriton(
        "3.8",
        "2.14",
        "H200, 2026-11-23: 612 of 614 tests of attention, copies and ping-pong",
        "1 to 9% of the kernel's speed at D 64, 1 to 6% at D 128, up to 2% at D 256 (S 4096)",
    ),
    KnownTriton(
        "3.9",
        "2.15",
        "H200, 2026-11-23: 612 of 614 tests of attention, copies and ping-pong",
        "about as much as under 3.8; at D 64 one to five registers spill in the loop",
    ),
)

#: The torch that all runs on a GPU had.
VERIFIED_TORCH = "2.11"

#: The Triton that the tables' figures and the compile tests' bounds are of.
MEASURED_SERIES = KNOWN_TRITONS[0].series


def series(version: str = triton.__version__) -> str:
    """The first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def known_triton(version: str | None = None) -> KnownTriton | None:
    """Return the record of a Triton, by default the installed one; None if it has run on no GPU."""
    wanted = series(triton.__version__ if version is None else version)
    return next((known for known in KNOWN_TRITONS if known.series == wanted), None)


def triton_is_known() -> bool:
    """Return whether the passes and the launches are used with the Triton that is installed."""
    return known_triton() is not None
