"""Which passes a shipped config was timed with: without one of them its kernel is slower than the tables say.

Found by compiling every shipped config under the Triton that the figures are of; `tests/test_triton_passes.py` does so
again.
"""

from __future__ import annotations

from collections.abc import Iterable

from helion_attn.compiler.passes import (
    computed_once,
    early_copies,
    row_sums,
    rows_ahead,
    separate_ends,
    shared_q,
    warpgroup_turns,
)
from helion_attn.compiler.passes.outcome import Outcome
from helion_attn.configs import LARGE_TILE_CONFIGS, TILE_CONFIGS, LargeTileConfig, TileConfig
from helion_attn.numerics import MAX_BITS_D, MAX_REFERENCE_D

#: What a kernel loses without a pass (docs/notes/loads_and_turns.md, sixteen_bits.md).
COSTS = {
    computed_once.NAME: "every exponential of a block twice",
    shared_q.NAME: "loads of Q in every key block, and spilled registers",
    rows_ahead.NAME: "two barriers in every key block",
    early_copies.NAME: "up to 17% more time, and 30% at head dims beyond 256",
    warpgroup_turns.NAME: "7 to 23% more time",
    separate_ends.NAME: "up to 6% more time on short sequences",
    row_sums.NAME: "60 to 80% more time",
    warpgroup_turns.PART_OF_P: "3 to 8% more time",
}


def expected_passes(tile: TileConfig | LargeTileConfig, two_level: bool, quantises_q: bool = False) -> tuple[str, ...]:
    """Names of the passes that must apply to the kernel of a config.

    None of a config that is not shipped, or where the recipe asks for other sums of P V than the config was timed with.
    `quantises_q`: the kernel quantises Q.
    """
    if (tile not in TILE_CONFIGS and tile not in LARGE_TILE_CONFIGS) or two_level != tile.two_level:
        return ()
    names = [shared_q.NAME, rows_ahead.NAME] if quantises_q else []
    names.append(early_copies.NAME)
    if isinstance(tile, TileConfig) and tile.bits == (8, 16) and tile.D_pad <= MAX_REFERENCE_D:
        names.append(computed_once.NAME)
    if isinstance(tile, TileConfig) and tile.bits == (8, 8) and tile.D_pad <= MAX_BITS_D:
        names.append(row_sums.NAME)
    # Two warpgroups, each with half of the rows.
    if tile.num_warps == 8:
        names.append(warpgroup_turns.NAME)
        if _ends_are_separate(tile):
            names.append(separate_ends.NAME)
        # With two stages V's wait holds the turn where it belongs.
        if tile.num_stages > 2:
            names.append(warpgroup_turns.PART_OF_P)
    return tuple(names)


def _ends_are_separate(tile: TileConfig | LargeTileConfig) -> bool:
    """Whether no warp needs what another has behind the loop."""
    if isinstance(tile, LargeTileConfig):
        # A piece of V is one tensor, whose exchanges have the same places as another's.
        return tile.v_tile & (tile.v_tile - 1) == 0
    if tile.bits == (8, 16):
        # Up to D 128 there is a second loop; beyond, warps exchange V's mean.
        return False
    return tile.bits == (8, 8) or tile.D_pad <= 128


def missing(outcomes: Iterable[Outcome], expected: Iterable[str]) -> list[Outcome]:
    """The expected passes that did not apply."""
    by_name = {x.name: x for x in outcomes}
    found = [by_name.get(name, Outcome(name, False, "it was not tried", "")) for name in expected]
    not_needed = (*computed_once.NOT_NEEDED, row_sums.NOT_ASKED, rows_ahead.NOTHING)
    lost = [x for x in found if not x.applied and x.reason not in not_needed]
    # Without turns these have nothing to change, and that there are none is said already.
    turns_lost = any(x.name == warpgroup_turns.NAME for x in lost)
    of_turns = (separate_ends.NAME, warpgroup_turns.PART_OF_P)
    return [x for x in lost if not (turns_lost and x.name in of_turns)]
