"""`attention` whose keys are split over programs: as accurate as in one, and the same but for rounding."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn import plans
from helion_attn.configs import packing, scheduling
from helion_attn.kernels import attention
from helion_attn.kernels.merge_splits import FEW_SPLITS, MANY_SPLITS, merge_splits
from helion_attn.testing import relative_error
from helpers.cases import PLAIN, Case, make_case

Force = Callable[[int], None]
Poisoned = Callable[[], AbstractContextManager[None]]

FP32_EPS = torch.finfo(torch.float32).eps


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    """Fixes the number of splits."""
    return lambda splits: monkeypatch.setattr(scheduling, "key_splits", lambda *_: splits)


def sinks_of(values: list[float], device: str) -> torch.Tensor:
    return torch.tensor(values, device=device)


def assert_split_is_as_good(case: Case, splits: int, force: Force, poisoned: Poisoned) -> None:
    """Within the budget of the rounding model, which knows of no splits, and as near to the unsplit answer."""
    force(1)
    one, one_lse = case.run(torch.float32)
    force(splits)
    with poisoned():
        out, lse = case.run(torch.float32)
    case.assert_within_budget(out)
    case.assert_lse_within_budget(lse)
    assert relative_error(out, one) <= 1.5 * case.budget()
    finite = one_lse > float("-inf")
    assert torch.equal(lse > float("-inf"), finite)
    # Each has fp32's rounding of a maximum and a sum; on a GPU, of an approximate exponential and logarithm.
    assert relative_error(lse[finite], one_lse[finite]) <= (32 if lse.is_cuda else 4) * FP32_EPS


#: (H, H_kv, M, N, D) and the masks.
PROBLEMS: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    "one_query": ((2, 2, 1, 1000, 64), {"causal": True}),
    "few_queries": ((2, 1, 5, 1000, 128), {"causal": True}),
    "two_blocks_of_queries": ((2, 1, 65, 1000, 64), {}),
    "d48": ((2, 1, 65, 1030, 48), {"causal": True}),
    "d256": ((2, 1, 130, 1025, 256), {"causal": True}),
    "square": ((2, 2, 300, 300, 64), {"causal": True}),
    "window": ((2, 1, 65, 1000, 64), {"window": (400, 70)}),
    "window_causal": ((2, 1, 5, 1000, 128), {"window": (300, -1), "causal": True}),
    "softcap": ((2, 2, 5, 1000, 64), {"softcap": 5.0}),
    "sinks": ((2, 1, 5, 500, 64), {"causal": True, "sinks": [-1.0, 3.0]}),
    "everything": (
        (4, 2, 5, 500, 64),
        {"causal": True, "window": (400, -1), "softcap": 5.0, "sinks": [0.5, 2.0, float("-inf"), -3.0]},
    ),
    # The first 130 rows see no key.
    "more_queries": ((2, 1, 330, 200, 64), {"causal": True, "sinks": [0.0, 1.0]}),
    "more_queries_without_sinks": ((2, 1, 330, 200, 64), {"causal": True}),
}


def problem(name: str, device: str, recipe: ha.Recipe = ha.BALANCED, kind: str = "biased_v") -> Case:
    (H, H_kv, M, N, D), masks = PROBLEMS[name]
    sinks = sinks_of(masks["sinks"], device) if "sinks" in masks else None
    qkv = make_qkv(kind, 1, H, H_kv, M, N, D, device=device)
    return make_case(qkv, recipe=recipe, **masks | {"sinks": sinks})


@pytest.mark.thorough(but=9)
@pytest.mark.parametrize("recipe", [ha.BALANCED, ha.HYBRID], ids=["balanced", "hybrid"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_problems(name: str, recipe: ha.Recipe, device: str, force: Force, poisoned: Poisoned) -> None:
    assert_split_is_as_good(problem(name, device, recipe), 3, force, poisoned)


@pytest.mark.parametrize(("name", "splits"), [("more_queries", FEW_SPLITS + 1), ("one_query", MANY_SPLITS + 5)])
def test_more_splits_than_key_blocks(name: str, splits: int, device: str, force: Force, poisoned: Poisoned) -> None:
    """Runs of no block, and more of them than a program of the merge reads at once."""
    assert_split_is_as_good(problem(name, device), splits, force, poisoned)


@pytest.mark.parametrize("recipe", [PLAIN, ha.BF16, ha.ACCURATE], ids=["plain", "bf16", "accurate"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_nothing_but_fp32_rounding(recipe: ha.Recipe, causal: bool, device: str, force: Force) -> None:
    """With q = 0 every P is a power of two, so that nothing is rounded below fp32: splits show there or not at all."""
    q, k, v = make_qkv("biased_v", 1, 4, 2, 5, 600, 32, device=device)
    sinks = sinks_of([0.0, 5.0, float("-inf"), 7.0], device)
    results = []
    for splits in (1, 5):
        force(splits)
        options: dict[str, Any] = {"causal": causal, "recipe": recipe, "sinks": sinks}
        results.append(ha.attention(q * 0, k, v, return_lse=True, out_dtype=torch.float32, **options))
    (one, one_lse), (out, lse) = results
    # A GPU's tensor core sums 16-bit products over key blocks.
    assert relative_error(out, one) <= (128 if out.is_cuda else 16) * FP32_EPS
    assert relative_error(lse, one_lse) <= (32 if out.is_cuda else 4) * FP32_EPS


def test_overflow_of_e4m3_is_nan(device: str, force: Force) -> None:
    q, k, v = make_qkv("biased_v", 1, 2, 2, 5, 600, 64, device=device)
    v[:, 0] *= 1000
    force(3)
    out = ha.attention(q, k, v, out_dtype=torch.float8_e4m3fn).float()
    assert out[:, 0].isnan().all()
    assert out[:, 1].isfinite().all()


@pytest.mark.thorough(but=8)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
@pytest.mark.parametrize("recipe", [ha.BALANCED, ha.ACCURATE, ha.BF16], ids=["balanced", "accurate", "bf16"])
def test_nonfinite_stays_so(recipe: ha.Recipe, name: str, value: float, device: str, force: Force) -> None:
    """Whatever split it is in; and other heads are as without."""
    inputs = dict(zip("qkv", make_qkv("randn", 1, 3, 3, 5, 300, 32, device=device), strict=True))
    inputs["sinks"] = torch.zeros(3, device=device)
    force(3)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return ha.attention(**inputs, causal=True, recipe=recipe, return_lse=True)  # type: ignore[call-overload]

    clean, clean_lse = run()
    inputs[name][{"q": (0, 1, 3, 7), "sinks": (1,)}.get(name, (0, 1, 10, 7))] = value
    out, lse = run()
    force(1)
    one, one_lse = run()
    assert not one.isfinite().all()
    assert torch.equal(out.isfinite(), one.isfinite())
    assert torch.equal(lse.isfinite(), one_lse.isfinite())
    assert torch.equal(out[:, ::2], clean[:, ::2])
    assert torch.equal(lse[:, ::2], clean_lse[:, ::2])


def test_a_run_left_out_exceeds_the_budget(device: str, force: Force, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the checks above can fail."""

    def without_the_last(parts: torch.Tensor, part_lse: torch.Tensor, *args: Any) -> None:
        merge_splits(parts[: -part_lse.size(1)], part_lse[:-1], *args)

    case = problem("few_queries", device, kind="randn")
    force(3)
    case.assert_within_budget(case.run(torch.float32)[0])
    monkeypatch.setattr("helion_attn.kernels.attention.merge_splits", without_the_last)
    plans.forget()
    with pytest.raises(AssertionError, match="budget"):
        case.assert_within_budget(case.run(torch.float32)[0])


# --- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("programs", "key_blocks", "ctas_per_sm", "splits"),
    [
        (8, 1024, 3, 49),  # as many as fill the GPU
        (8, 128, 3, 16),  # but splits of 8 key blocks
        (198, 1024, 3, 2),
        (256, 1024, 3, 3),  # twice
        (256, 128, 3, 1),  # of splits so short that merging costs more
        (512, 1024, 3, 3),  # four times, where one and a third take as long as one and a half
        (512, 256, 3, 1),
        (1024, 1024, 3, 1),
        (66, 1024, 1, 2),
        (100, 1024, 1, 5),
        (1, 32, 3, 4),
        (1, 31, 3, 1),  # too short
        (1, 10**6, 1, 132),
        (45, 10**6, 1, 11),
        (10**6, 10**6, 4, 1),
    ],
)
def test_key_splits(programs: int, key_blocks: int, ctas_per_sm: int, splits: int) -> None:
    assert scheduling.key_splits(programs, key_blocks, 132, ctas_per_sm) == splits


@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (500, -1), (0, 0), (500, 0), (500, 70), (10**12, 0)])
def test_visible_key_blocks(left: int, right: int) -> None:
    """At least what any block of rows sees, and at most one more than the most."""
    bm, bn, key_blocks = 64, 128, 20
    most = 0
    for diagonal in range(key_blocks * bn - bm + 1):
        first = max(0, diagonal - left) // bn if left >= 0 else 0
        end = min(key_blocks, (diagonal + right + bm - 1) // bn + 1) if right >= 0 else key_blocks
        most = max(most, end - first)
    assert most <= scheduling.visible_key_blocks(key_blocks, left, right, bm, bn) <= most + 1


def test_who_is_asked(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op asks with what it launches, and a window shortens its splits."""
    asked: list[tuple[int, ...]] = []

    def record(*args: int) -> int:
        asked.append(args)
        return 1

    monkeypatch.setattr(scheduling, "key_splits", record)
    q, k, v = make_qkv("randn", 2, 4, 2, 70, 2000, 64, device=device)
    tile = packing(64, 64)
    for window in (None, (100, 0)):
        ha.attention(q, k, v, window=window)
    # A group's heads share tiles.
    programs = 2 * 2 * -(-2 * 70 // tile.bm)
    # On a GPU a call is made several times.
    of_windows = [args[:2] for args in dict.fromkeys(asked)]
    assert of_windows == [(programs, -(-2000 // tile.bn)), (programs, (98 + tile.bm) // tile.bn + 2)]


def test_variable_lengths_do_not_split(device: str, force: Force) -> None:
    q, k, v = (x[0].transpose(0, 1) for x in make_qkv("randn", 1, 2, 2, 5, 300, 64, device=device))
    cu = [torch.tensor([0, len(x)], dtype=torch.int32, device=device) for x in (q, k)]
    one = ha.attention_varlen(q, k, v, *cu)
    force(3)
    assert torch.equal(ha.attention_varlen(q, k, v, *cu), one)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_num_splits_is_taken(splits: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is given it, with quantised tensors and from 16 bits."""
    q, k, v = make_qkv("biased_v", 1, 2, 1, 5, 600, 64, device=device)
    given = []
    launch = attention.launch

    def recording(*args: Any, **options: Any) -> None:
        given.append(args[0].splits)
        launch(*args, **options)

    monkeypatch.setattr(attention, "launch", recording)
    out = ha.attention(q, k, v, causal=True, num_splits=splits)
    again = ha.attention_quantized(ha.quantize(q, k, v), causal=True, num_splits=splits)
    assert set(given) == {splits}
    assert torch.equal(out, again)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("recipe", [ha.FAST, ha.ACCURATE, ha.HYBRID], ids=["fast", "accurate", "hybrid"])
def test_a_sequence_does_not_depend_on_the_batch(recipe: ha.Recipe, splits: int, device: str) -> None:
    """Nor on what is beside it, whatever else the batch would have the keys split into: bit for bit."""
    # A GPU would split the keys of one such sequence, and not those of all.
    batch = make_qkv("outlier", 3 if device == "cpu" else 300, 2, 1, 5, 520, 64, device=device)
    options: dict[str, Any] = {"causal": True, "recipe": recipe, "num_splits": splits, "return_lse": True}
    out, lse = ha.attention(*batch, **options)
    for b in (0, 2):
        alone, its_lse = ha.attention(*(x[b : b + 1] for x in batch), **options)
        assert torch.equal(out[b], alone[0])
        assert torch.equal(lse[b], its_lse[0])


def test_num_splits_that_raise() -> None:
    q, k, v = make_qkv("randn", 1, 2, 1, 5, 600, 64)
    for wrong in (0, 6, -1):
        with pytest.raises(ValueError, match=rf"num_splits is {wrong}; it must lie in 1\.\.5"):
            ha.attention(q, k, v, num_splits=wrong)
    with pytest.raises(TypeError, match="num_splits is a float"):
        ha.attention_quantized(ha.quantize(q, k, v), num_splits=2.0)  # type: ignore[call-overload]
    large = make_qkv("randn", 1, 1, 1, 5, 70, 320)
    with pytest.raises(ValueError, match="num_splits is 2; with D 320 and D_v 320 it must be 1 or None"):
        ha.attention(*large, num_splits=2)
    assert ha.attention(*large, num_splits=1).shape == (1, 1, 5, 320)
