"""The passes that the kernel of a config must have: without one of them it is slower than the tables say."""

from __future__ import annotations

from collections.abc import Iterable

from helion_attn.compiler.passes import (
    computed_once,
    early_copies,
    hoist_q_scale,
    per_warpgroup_epilogue,
    pingpong,
    row_sums,
    shared_q,
)
from helion_attn.compiler.passes.outcome import Outcome
from helion_attn.configs import LargeTileConfig, TileConfig

#: What a kernel loses without a pass (docs/notes/passes.md, kernels.md).
COSTS = {
    computed_once.NAME: "every exponential of a block twice",
    shared_q.NAME: "loads of Q in every key block, and spilled registers",
    hoist_q_scale.NAME: "two barriers in every key block",
    early_copies.NAME: "up to 17% more time, and 30% at head dims beyond 256",
    pingpong.NAME: "7 to 23% more time",
    per_warpgroup_epilogue.NAME: "up to 6% more time on short sequences",
    row_sums.NAME: "60 to 80% more time",
    pingpong.BARRIER_AFTER_P: "3 to 8% more time",
}


def expected_passes(tile: TileConfig | LargeTileConfig, two_level: bool, quantises_q: bool = False) -> tuple[str, ...]:
    """Names of the passes that must apply to the kernel of a config.

    None where the recipe asks for other sums of P V than the config was timed with. `quantises_q`: the kernel quantises
    Q, which takes two more than the kernel that was timed.
    """
    if two_level != tile.two_level or not tile.passes:
        return ()
    return (shared_q.NAME, hoist_q_scale.NAME, *tile.passes) if quantises_q else tile.passes


def missing(outcomes: Iterable[Outcome], expected: Iterable[str]) -> list[Outcome]:
    """The expected passes that did not apply."""
    by_name = {x.name: x for x in outcomes}
    found = [by_name.get(name, Outcome(name, False, "it was not tried", "")) for name in expected]
    not_needed = (*computed_once.NOT_NEEDED, row_sums.NOT_ASKED, hoist_q_scale.NOTHING)
    lost = [x for x in found if not x.applied and x.reason not in not_needed]
    # Without ping-pong these have nothing to change, and that there are none is said already.
    pingpong_lost = any(x.name == pingpong.NAME for x in lost)
    of_pingpong = (per_warpgroup_epilogue.NAME, pingpong.BARRIER_AFTER_P)
    return [x for x in lost if not (pingpong_lost and x.name in of_pingpong)]
