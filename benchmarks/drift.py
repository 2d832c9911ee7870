"""Part `drifts` of suite `hard`: a V whose mean changes along the keys, which a sum in the tensor core loses.

Every head dim is measured on the same V and phases as head dim 128, whose two-level kernel is the yardstick: a drift of
every period and of random phases, one that decays, and three forms of attention. What counts is the worst phase.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.lib.harness import Loaded, Row
from benchmarks.lib.plots import grid, legend, line, log_axis, powers_axis
from benchmarks.lib.problem import check, others, ours, problem_of, workload
from benchmarks.lib.suite import Options
from benchmarks.lib.tables import Table, error_text, labels, rows_of, series, series_in, values_of
from devtools.inputs import drift

#: Head dims, the yardstick first; the long ones have no bf16 or hybrid kernel.
DIMS = (128, 64, 160, 256, 320, 512, 1024)

#: Keys, and query rows, few of which are enough for an error.
LENGTHS, QUERIES = (32768, 131072), 256

#: Keys of a period. None is the length itself; 3,000 and 25,000 are multiples of no key block.
PERIODS: dict[str, int | None] = {
    "v_drifts": None,
    "v_drifts_16k": 16384,
    "v_drifts_2k": 2048,
    "v_drifts_3000": 3000,
    "v_drifts_25000": 25000,
}

#: A mean of 3 that decays to 1/e within an eighth of the keys.
DECAY = "v_decays"

PHASES = 8

#: Flat: scores are N(0, 1). Peaked: a random eighth of the keys has scores larger by 3. Stretch: a run of 1 in 32 keys
#: has scores larger by 8.
ATTENTIONS = ("flat", "peaked", "stretch")

RECIPES = ("fast", "balanced")
PEERS = ("fa3_fp8", "vllm_fa3", "fa3_bf16")


def mean_of(name: str, N: int, phase: float, device: torch.device) -> Tensor:
    """V's mean by key, fp32 [N]."""
    if name == DECAY:
        return 3 * torch.exp(-torch.arange(N, device=device) / (N / 8))
    return drift(N, PERIODS[name] or N, phase, device)


def inputs(
    D: int, N: int, M: int, mean: Tensor, attention: str, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 q, k, v of one head."""
    device = generator.device

    def randn(*shape: int) -> Tensor:
        return torch.randn(1, 1, *shape, device=device, generator=generator)

    # V and the choice of keys do not depend on the head dim: V's channels repeat.
    v = randn(N, 64).repeat(1, 1, 1, -(-D // 64))[..., :D] + mean[:, None]
    start = N // 3
    larger = torch.zeros(N, device=device)
    if attention == "peaked":
        larger = 3.0 * (torch.rand(N, device=device, generator=generator) < 1 / 8)
    elif attention == "stretch":
        larger[start : start + N // 32] = 8.0
    q, k = randn(M, D), randn(N, D)
    # One more direction, of which every query has sqrt(D) and a key what its score gains.
    u = torch.full((D,), D**-0.5, device=device)
    q = q + u * D**0.25
    k = k + larger[:, None] * u * D**0.25
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def largest(found: list[Row]) -> Row:
    """The row with the largest total error; a NaN, or an error that kept it from running, is larger."""

    def key(row: Row) -> float:
        error = row.get("error_total")
        return math.inf if error is None or math.isnan(error) else error

    return max(found, key=key)


def rows(options: Options, D: int) -> Iterator[Row]:
    """Every form at a head dim: of each the phase with the largest error."""
    small = options.device.type == "cpu" or options.quick
    lengths, queries = ((256,), 16) if options.device.type == "cpu" else (LENGTHS, QUERIES)
    phases = [i / PHASES + 1 / 17 for i in range(1 if small else PHASES)]
    for N, name, attention in itertools.product(lengths, (*PERIODS, DECAY), ATTENTIONS[:1] if small else ATTENTIONS):
        found: dict[tuple[str, str | None], list[Row]] = {}
        for seed, phase in enumerate(phases if name in PERIODS else phases[:1]):
            generator = torch.Generator(options.device).manual_seed(seed)
            mean = mean_of(name, N, phase, options.device)
            problem = problem_of(
                workload(1, 1, queries, N, D), name, *inputs(D, N, queries, mean, attention, generator)
            )
            for contender in (*ours(options, list(RECIPES)), *others(options, list(PEERS))):
                row = check(contender, problem)[0] | {"part": "drifts", "attention": attention, "phase": phase}
                found.setdefault((row["impl"], row["recipe"]), []).append(row)
        for of_contender in found.values():
            yield largest(of_contender)


def worst(found: list[Row]) -> dict[str, float]:
    """The largest total error by series, over phases. A NaN is the largest."""
    errors: dict[str, float] = {}
    for row in found:
        if (error := row.get("error_total")) is not None:
            before = errors.get(series(row), 0.0)
            errors[series(row)] = error if math.isnan(error) or error > before else before
    return errors


def tables(loaded: Loaded) -> list[Table]:
    """The worst phase of every form, by head dim."""
    cases = rows_of(loaded, "hard", part="drifts")
    names = series_in(cases)
    body = []
    for N, kind, attention in values_of(cases, "N", "input", "attention"):
        for (D,) in values_of(cases, "D"):
            cell = [r for r in cases if (r["N"], r["input"], r["attention"], r["D"]) == (N, kind, attention, D)]
            found = worst(cell)
            body.append([str(N), kind, attention, str(D), *(error_text(found.get(name)) for name in names)])
    headers = ["keys", "V", "attention", "D", *labels(names)]
    return [Table("Total error where V drifts, the worst phase", headers, body, keys=4)] if body else []


def plot(loaded: Loaded) -> Figure | None:
    """The worst total error of every form by head dim, a panel for each length."""
    cases = rows_of(loaded, "hard", part="drifts")
    if not cases:
        return None
    lengths = [N for (N,) in values_of(cases, "N")]
    figure, axes = grid(1, len(lengths))
    for N, ax in zip(lengths, axes[0], strict=True):
        panel = [row for row in cases if row["N"] == N]
        dims = [D for (D,) in values_of(panel, "D")]
        by_dim = {D: worst([row for row in panel if row["D"] == D]) for D in dims}
        for name in series_in(panel):
            line(ax, name, {D: by_dim[D][name] for D in dims if name in by_dim[D]}, float)
        log_axis(ax)
        powers_axis(ax, dims, lambda D: "" if D & (D - 1) else str(D))
        ax.set_title(f"{N} keys")
        ax.set_xlabel("head dim")
    axes[0][0].set_ylabel("total error, worst case")
    legend(figure, axes[0])
    return figure
