"""P's bits from scores, and the maxima that P is relative to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import helion_attn as ha
from helion_attn import numerics
from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import compiled, interpreted
from helion_attn.kernels.lib import schraudolph, steps
from helion_attn.kernels.lib.block_max import update_block_max
from helion_attn.kernels.lib.inline_asm import e4m3_of_bits
from helion_attn.numerics import E4M3_BITS_OF_ONE, E4M3_STEPS, NO_KEY, REFERENCE_REACH_LOG2
from helion_attn.reference.rounding_model import e4m3_of_line
from helion_attn.testing import relative_error
from helpers.cases import IN_E4M3, Case, make_case
from helpers.specs import SPEC

INF, NAN = float("inf"), float("nan")

#: Bits of e4m3's largest number; those above are NaN.
LARGEST = 126

# ---------------------------------------------------------------------------------------------------------------------
# Scores to bits
# ---------------------------------------------------------------------------------------------------------------------


def halves() -> torch.Tensor:
    """Every fp16 number, in fp32, that is no more than e4m3's largest bits; and the NaN."""
    y = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    return torch.where(y > LARGEST, 0.0, y)


def between_halves() -> torch.Tensor:
    """fp32 numbers on, just above and just below what lies halfway between two fp16 numbers, or two integers."""
    y = halves()
    y = y[(y >= 0) & (y < LARGEST)].unique()
    middles = torch.cat([(y[1:] + y[:-1]) / 2, torch.arange(LARGEST) + 0.5])
    infinity = torch.tensor(INF)
    return torch.cat([middles, middles.nextafter(infinity), middles.nextafter(-infinity)])


def numbers(y: torch.Tensor) -> torch.Tensor:
    """What e4m3 makes of the bits y, rounded as Python rounds: to fp16, then to an integer, of two to the even one."""
    bits = [0x7F if math.isnan(x) else round(max(x, 0.0)) for x in y.half().tolist()]
    return torch.tensor(bits, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, with the NaN in the same places."""
    assert torch.equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0))


@pytest.mark.parametrize("of", [halves, between_halves])
def test_bits_are_those_of_the_rounding_model(of: Callable[[], torch.Tensor]) -> None:
    y = of()
    model = e4m3_of_line(y)
    assert_equal(model, numbers(y))
    assert_equal(e4m3_of_bits(y, False).float(), model)
    assert len(model.nan_to_num(-1.0).unique()) == (LARGEST + 2 if of is halves else LARGEST + 1)


def bits_of(y: torch.Tensor, out: torch.Tensor) -> None:
    """A kernel of the instructions alone."""
    for tile in hl.tile(y.size(0)):
        out[tile] = e4m3_of_bits(y[tile], True)


@pytest.mark.gpu
@pytest.mark.parametrize("of", [halves, between_halves])
def test_instructions_give_the_same_bits(of: Callable[[], torch.Tensor]) -> None:
    y = of()
    out = torch.empty(len(y), dtype=torch.float8_e4m3fn, device="cuda")
    compiled(bits_of, Config(block_sizes=[1024], num_warps=4))(y.cuda(), out)
    assert_equal(out.float().cpu(), e4m3_of_line(y))


def test_the_line_is_right_on_average() -> None:
    """Of 2**x the logarithm has no bias, and neither has the sum, of which the line's share is 4%."""
    x = torch.linspace(-4, 4, 2**16 + 1)[:-1]
    found = e4m3_of_line(E4M3_STEPS * x + E4M3_BITS_OF_ONE).double()
    off = found.log2() - x.double()
    assert abs(off.mean()) < 2e-3
    # Half a step of the mantissa, and the line's largest distance.
    assert off.abs().max() < math.log2(1 + 1 / 16) + 0.0573
    assert abs((found / x.double().exp2()).mean() - 1) < 2e-3


def test_the_largest_p_is_exact() -> None:
    """At every offset."""
    for offset in range(9):
        y = torch.tensor(E4M3_STEPS * offset + E4M3_BITS_OF_ONE)
        assert e4m3_of_line(y) == 2.0**offset


BM, BN = 4, 32


def p_of_block(
    s: torch.Tensor,  # [BM, BN]
    scale_log2: torch.Tensor,  # [BM] or []
    wide: torch.Tensor,  # []
    p: torch.Tensor,  # [BM, BN], written
    scale: torch.Tensor,  # as scale_log2, written
    reference: torch.Tensor,  # [BM], written
    spec: hl.constexpr,  # AttentionSpec
) -> None:
    """A kernel of what makes it, of a first block."""
    bm, bn = s.size(0), s.size(1)
    for _ in hl.grid(1):
        steps_of_scale = schraudolph.in_fp16_steps(scale_log2, False) if spec.half_scores else scale_log2
        largest = schraudolph.largest_scores(s, bm, bn, spec)
        m_run = hl.full([bm], NO_KEY, dtype=torch.float32)
        top = largest * steps_of_scale - spec.p_offset_log2
        _, m_i = update_block_max(top, m_run, False)
        if wide > 0:
            s = schraudolph.wide_scores(s, steps_of_scale, largest, top, m_i, bm, bn, spec)
        p8, m_i = schraudolph.p_of_scores(s, steps_of_scale, m_i, wide, bm, bn, spec)
        p.copy_(p8)
        scale.copy_(steps_of_scale)
        reference.copy_(m_i)


def block_of_scores(masked: bool) -> torch.Tensor:
    s = 40 * torch.randn(BM, BN, generator=torch.Generator().manual_seed(0))
    if masked:
        s[0], s[1, ::2] = -INF, -INF
    return s


@pytest.mark.thorough(but=9)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("of_rows", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_p_of_a_block(half: bool, wide: bool, of_rows: bool, masked: bool) -> None:
    """In V's order of keys, against its largest score, whichever way y is computed."""
    s = block_of_scores(masked)
    scale_log2 = torch.linspace(0.01, 0.02, BM) if of_rows else torch.tensor(0.015)
    if half:
        s = s.half()
    p = torch.empty(BM, BN, dtype=torch.float8_e4m3fn)
    scale, reference = torch.empty_like(scale_log2), torch.empty(BM)
    spec = SPEC._replace(q_row_descales=of_rows, half_scores=half)
    interpreted(p_of_block)(s, scale_log2, torch.tensor(int(wide)), p, scale, reference, spec)
    assert (scale - scale_log2).abs().max() <= (2.0**-11 * 0.02 if half else 0.0)
    y = (s.float() * schraudolph.columns(scale, of_rows) - reference.unsqueeze(1)) * E4M3_STEPS + E4M3_BITS_OF_ONE
    expected = steps.interleave_keys(e4m3_of_line(y), BM, BN)
    # fp32 may round y otherwise: to the next integer, where it lies on the middle of two.
    assert (p.view(torch.uint8).int() - expected.to(p.dtype).view(torch.uint8).int()).abs().max() <= 1
    # Wide scores in fp16 have steps of 2**-7 octaves.
    assert (p.float() != expected).float().mean() < (0.1 if half and wide else 0.02)
    assert torch.equal(schraudolph.row_sums(p), p.float().sum(1))
    seen = (s > -INF).any(1)
    assert torch.equal(p.float().amax(1)[seen], torch.full_like(reference[seen], 256.0))
    assert not p.float()[~seen].any()


# ---------------------------------------------------------------------------------------------------------------------
# Own references
# ---------------------------------------------------------------------------------------------------------------------

REACH = REFERENCE_REACH_LOG2

#: The largest scores of a row's blocks, and what P is relative to in each.
TOPS: dict[str, tuple[list[float], list[float]]] = {
    "falls": ([5.0, -100.0, -500.0], [5.0, 5.0 - REACH, 5.0 - REACH]),
    "falls a little": ([5.0, -3.0, -20.0], [5.0, -3.0, -20.0]),
    "rises": ([5.0, 100.0, 99.0], [5.0, 100.0, 99.0]),
    "falls from the maximum, not from the block before": ([0.0, -30.0, -60.0, -39.0], [0.0, -30.0, -REACH, -39.0]),
    "masked in between": ([5.0, -INF, 4.0], [5.0, 5.0 - REACH, 4.0]),
    "masked at first": ([-INF, -INF, 4.0], [NO_KEY, NO_KEY, 4.0]),
    "infinite": ([5.0, INF, 4.0], [5.0, INF, INF]),
    "no number": ([5.0, NAN, 4.0], [5.0, NAN, NAN]),
}


@pytest.mark.parametrize("name", TOPS)
def test_references_of_blocks(name: str) -> None:
    tops, expected = TOPS[name]
    m_run = torch.tensor([NO_KEY])
    for i, (top, reference) in enumerate(zip(tops, expected, strict=True)):
        m_run, m_i = update_block_max(torch.tensor([top]), m_run, False)
        assert_equal(m_i, torch.tensor([reference]))
        assert_equal(m_run, torch.tensor([NO_KEY, *tops[: i + 1]]).amax(0, keepdim=True))


#: int8 with nothing mixed or smoothed: integers up to 127, 127 among them, are exact, and so are V's in e4m3.
EXACT = replace(IN_E4M3, qk_dtype=torch.int8, center_v=False)

BLOCK = 128

#: The largest scale that is none of wide scores.
SM_SCALE = numerics.MAX_FUSED_SCALE_LOG2[torch.int8] / numerics.LOG2E

#: Levels of the scores of blocks of keys; with `SM_SCALE`, octaves.
LEVELS = {
    "fall": [120, 60, 0, -60, -120],
    "fall_at_once": [127, -127, -127, -127, -127],
    "fall_a_little": [40, 20, 0, -20, -40],
    "rise": [-120, -60, 0, 60, 120],
    "fall_and_rise": [0, 100, -100, 100, 0],
    "low_in_between": [0, -127, 0, -127, 0],
    # Largest scores near -32, where fp32's steps change: offset and score are not summed exactly.
    "alike": [-36] * 5,
}

#: With a window of either kind some rows of a tile see no key of a block, before those that they see and after.
MASKS: dict[str, tuple[bool, tuple[int, int] | None]] = {
    "full": (False, None),
    "causal": (True, None),
    "window": (False, (70, 30)),
    "left": (False, (200, -1)),
}


def leveled(levels: list[int], mask: str, device: str, scale: float = 1.0, M: int = 150) -> Case:
    """Blocks of keys whose scores lie at levels; all that is rounded is P. V differs from block to block."""
    generator = torch.Generator().manual_seed(0)
    N, D = BLOCK * len(levels) - 20, 32

    def integers(largest: int, *shape: int) -> torch.Tensor:
        return torch.randint(-largest, largest + 1, shape, generator=generator).float()

    q, k, v = integers(60, 1, 1, M, D), integers(60, 1, 1, N, D), integers(7, 1, 1, N, D)
    # 16 channels times 127 are a level; and what makes the descales 1.
    q[..., :16], q[..., 16] = 127.0, 0.0
    k[..., :16], k[..., 16] = torch.tensor(levels).repeat_interleave(BLOCK)[:N, None].float(), 127.0
    v[:, :, ::BLOCK] = 7.0
    causal, window = MASKS[mask]
    return make_case((q.to(device), k.to(device), v.to(device)), causal, SM_SCALE * scale, EXACT, window=window)


def assert_right(case: Case) -> None:
    out, lse = case.run(torch.float32)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)
    # P alone is rounded: half a step of its mantissa at worst, and what a line is off.
    assert relative_error(out, case.oracle) < 2.0**-4


@pytest.mark.thorough(but=9)
@pytest.mark.parametrize(
    ("name", "mask"),
    [*((name, "window") for name in LEVELS), *zip(LEVELS, [*MASKS, "left", "full", "full"], strict=True)],
)
def test_levels_of_blocks(name: str, mask: str, device: str) -> None:
    assert_right(leveled(LEVELS[name], mask, device))


def test_rows_without_a_key(device: str) -> None:
    case = leveled([20, 0], "causal", device, M=400)
    out, lse = case.run(torch.float32)
    without = 400 - case.qkv[1].size(2)
    assert without > 0
    assert not out[:, :, :without].any()
    assert (lse[:, :, :without] == -INF).all()
    assert_right(case)


@pytest.mark.thorough(but=7)
@pytest.mark.parametrize("scale", [1.01, 1e3, 1e7])
@pytest.mark.parametrize(
    ("name", "mask"),
    [("fall", "full"), ("fall_a_little", "window"), ("low_in_between", "causal"), ("alike", "full")],
)
def test_wide_scores(name: str, mask: str, scale: float, device: str) -> None:
    """Up to 1e9: then each row has what its largest score has, one key or the mean of some."""
    assert_right(leveled(LEVELS[name], mask, device, scale))


@pytest.mark.parametrize("what", [INF, NAN], ids=str)
@pytest.mark.parametrize("position", [0, 300])
def test_scores_that_are_no_numbers(what: float, position: int, device: str) -> None:
    """A row of K makes those rows NaN that see it, whatever comes before and behind."""
    case = leveled(LEVELS["fall_and_rise"], "full", device)
    q, k, v = case.qkv
    k = k.clone()
    k[0, 0, position, 5] = what
    out, lse = ha.attention(q, k, v, sm_scale=SM_SCALE, recipe=EXACT, return_lse=True)
    assert out.isnan().all()
    assert lse.isnan().all()


def behind_a_sink(share: float, device: str) -> Case:
    """Key 0 holds so much of the probability, and has no value; 4095 others share the rest."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.zeros(1, 1, 16, 32), torch.zeros(1, 1, 4096, 32)
    v = torch.randn(1, 1, 4096, 32, generator=generator) + 1
    q[..., 0], k[:, :, 0, 0], v[:, :, 0] = 127.0, 127.0, 0.0
    logit = math.log(share / (1 - share) * 4095)
    return make_case((q.to(device), k.to(device), v.to(device)), False, logit / 127**2, EXACT)


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_what_lies_behind_a_sink_keeps_its_bits(share: float, device: str) -> None:
    case = behind_a_sink(share, device)
    out, _ = case.run(torch.float32)
    case.assert_within_budget(out)
    assert relative_error(out, case.oracle) < 2.0**-4


def test_a_running_maximum_would_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    monkeypatch.setattr(update_block_max, "__defaults__", (0.0,))
    case = behind_a_sink(0.99, "cpu")
    out, _ = case.run(torch.float32)
    assert relative_error(out, case.oracle) > 0.2
    with pytest.raises(AssertionError, match="budget"):
        case.assert_within_budget(out)


def test_without_a_reach_sums_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block far below the maximum would have sums that fp32 does not hold."""
    monkeypatch.setattr(update_block_max, "__defaults__", (INF,))
    out, _ = leveled(LEVELS["fall_at_once"], "full", "cpu").run(torch.float32)
    assert not out.isfinite().all()


def test_who_takes_which() -> None:
    """Of P's dtype and the larger head dim."""
    assert numerics.takes_bits(torch.float8_e4m3fn, numerics.MAX_BITS_D)
    assert not numerics.takes_bits(torch.float8_e4m3fn, numerics.MAX_BITS_D + 1)
    assert not numerics.takes_bits(torch.float8_e5m2, 64)
    assert not numerics.takes_bits(torch.bfloat16, 64)
