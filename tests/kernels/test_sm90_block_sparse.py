"""The attention kernel that walks lists of key blocks, compiled for sm_90a without a GPU, beside the dense one."""

from __future__ import annotations

from collections import Counter

import pytest

import helion_attn as ha
from devtools.sm90 import Sm90Kernel, compile_for_sm90
from helion_attn.compiler.passes.expected import expected_passes, missing
from helion_attn.configs import tile_config
from helion_attn.preprocess import pack_kv, recentre, sample
from helpers.cases import LADDER
from helpers.offline import (
    LONGER_LOOP,
    MEASURED,
    SPILLED_IN_LOOP,
    assert_sound,
    compile_attention,
    compile_listed,
    fake_block_mask,
    fake_qkv,
    instructions_of_whole_block,
    launching,
    loop_of,
    products_in_flight,
    without,
)
from helpers.shared import shared

#: Instructions that a list may add to a block all of whose scores are seen, by head dim. D 256 is bound by the tensor
#: core, and has too few uniform registers.
OF_LIST = {64: 15, 128: 15, 256: 30}

#: Instructions around the loop for registers that it does not leave: what is known of the rows, stored and loaded once.
AROUND_LOOP = 8


def barriers(instructions: list[str]) -> Counter[str]:
    return Counter(x.split(".")[0] for x in instructions if x.startswith(("BAR", "SYNCS", "WARPSYNC", "SHFL")))


def assert_like_dense(listed: Sm90Kernel, dense: Sm90Kernel, D: int) -> None:
    """All that the dense kernel has: its passes, barriers, occupancy; and few instructions more."""
    assert_sound(listed, AROUND_LOOP)
    in_loop = loop_of(listed)
    # A row's diagonal, at D 256 with a causal mask.
    assert in_loop.count("STL") == 0 or not MEASURED
    assert in_loop.count("LDL") + in_loop.count("STL") <= (1 if MEASURED else SPILLED_IN_LOOP), "the loop spills"
    assert in_loop.count("LDS") == loop_of(dense).count("LDS"), "entries come through shared memory"
    assert products_in_flight(listed), "ptxas waits for each product"
    assert listed.ctas_per_sm == dense.ctas_per_sm
    assert listed.num_warps == dense.num_warps
    of_dense = [x.name for x in dense.passes if x.applied]
    assert not missing(listed.passes, of_dense)
    whole, of_dense_block = instructions_of_whole_block(listed), instructions_of_whole_block(dense)
    assert barriers(whole) == barriers(of_dense_block)
    more = OF_LIST[D] if MEASURED else OF_LIST[D] + int((LONGER_LOOP - 1) * len(of_dense_block))
    assert len(whole) <= len(of_dense_block) + more


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(("recipe", "causal"), [("fast", True), ("balanced", False)])
def test_a_list_costs_little(D: int, recipe: str, causal: bool) -> None:
    chosen = LADDER[recipe]
    listed = shared(compile_attention, D, causal, recipe=chosen, listed=True)
    assert_like_dense(listed, shared(compile_attention, D, causal, recipe=chosen), D)
    assert listed.registers <= tile_config(D, causal).max_registers


@pytest.mark.thorough
def test_16_bits_keep_their_turns() -> None:
    listed = shared(compile_attention, 128, False, recipe=ha.BF16, listed=True)
    dense = shared(compile_attention, 128, False, recipe=ha.BF16)
    assert_sound(listed)
    assert not missing(listed.passes, [x.name for x in dense.passes if x.applied])
    assert products_in_flight(listed)


@pytest.mark.thorough
def test_a_16_bit_p_is_computed_once() -> None:
    """It takes the running maximum, for no block is the first that all rows see."""
    kernel = shared(compile_attention, 128, False, recipe=ha.HYBRID, listed=True)
    assert_sound(kernel, AROUND_LOOP)
    tile = tile_config(128, False, ha.HYBRID.bits)
    assert not missing(kernel.passes, tile.passes)
    assert loop_of(kernel).count("MUFU") <= 2 + tile.bm * tile.bn // (32 * tile.num_warps)


def compile_dense(D: int, H: int) -> Sm90Kernel:
    """The attention kernel of `attention`."""

    def launch() -> None:
        with launching():
            q, k, v = fake_qkv(4, H, H, 4096, 4096, D)
            with without(sample, pack_kv, recentre):
                ha.attention(q, k, v, return_lse=True, block_mask=fake_block_mask(4, H, 4096, 4096))

    (kernel,) = compile_for_sm90(launch)
    return kernel


#: Instructions that a tail may add to a block all of whose scores are seen: what the branch for others leaves.
OF_TAIL = {64: 16, 128: 16, 256: 32}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(("recipe", "causal"), [("fast", False), ("balanced", True)])
def test_a_tail_costs_little(D: int, recipe: str, causal: bool) -> None:
    *of_means, attention = compile_listed(D, causal, LADDER[recipe], tail=True)
    (listed,) = compile_listed(D, causal, LADDER[recipe], tail=False)
    for kernel in (*of_means, attention):
        assert_sound(kernel, AROUND_LOOP)
    in_loop = loop_of(attention)
    assert in_loop.count("LDL") + in_loop.count("STL") <= (0 if MEASURED else SPILLED_IN_LOOP), "the loop spills"
    assert not missing(attention.passes, [x.name for x in listed.passes if x.applied])
    assert attention.ctas_per_sm == listed.ctas_per_sm
    whole, of_listed = instructions_of_whole_block(attention), instructions_of_whole_block(listed)
    assert barriers(whole) == barriers(of_listed)
    assert len(whole) <= len(of_listed) + OF_TAIL[D] * (1 if MEASURED else LONGER_LOOP)


@pytest.mark.thorough
def test_q_quantised_in_the_kernel() -> None:
    kernel = shared(compile_dense, 64, 32)
    assert_sound(kernel, AROUND_LOOP)
    assert not missing(kernel.passes, expected_passes(tile_config(64, False), True, quantises_q=True))
    assert kernel.ctas_per_sm >= tile_config(64, False).ctas_per_sm
