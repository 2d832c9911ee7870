"""`check` measures the errors that the whole outputs have, and names what makes tensors hard."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import LARGE_CHANNELS, make_qkv
from helion_attn.reference.rope import apply_rope_qk
from helion_attn.testing import relative_error
from helpers.cases import IN_E4M3

module: Any = inspect.getmodule(ha.check)

#: What `attention` has and `check` does not: none changes the error of interest.
LEFT_OUT = ("return_lse", "out_dtype", "num_splits")


def test_it_takes_what_attention_takes() -> None:
    of_attention = inspect.signature(ha.attention).parameters
    assert {**inspect.signature(ha.check).parameters} == {
        name: parameter for name, parameter in of_attention.items() if name not in LEFT_OUT
    }


angles = torch.arange(110)[:, None] * 100.0 ** -(torch.arange(16) / 16)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal_bshd": {"causal": True, "layout": "bshd"},
    "window_softcap": {"window": (20, 3), "softcap": 5.0, "sm_scale": 0.3},
    "rope": {"rope": True, "recipe": ha.FAST},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, float("-inf"), 3.0]), "causal": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_errors_are_those_of_the_whole_output(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows fit the sample; keys come in blocks of which the last is ragged."""
    monkeypatch.setattr(module, "KEYS_AT_ONCE", 48)
    monkeypatch.setattr(module, "COMPARED", {"BALANCED": ha.BALANCED})
    options = dict(OPTIONS[name])
    q, k, v = make_qkv("outlier", 1, 4, 2, 40, 110, 32)
    rotated = q, k
    if options.get("rope"):
        options["rope"] = ha.Rope(angles.cos(), angles.sin())
        rotated = apply_rope_qk(q, k, options["rope"])
    if options.get("layout") == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        rotated = q, k
    of_oracle = {name: x for name, x in options.items() if name not in ("rope", "recipe")}
    expected = ha.reference.attention(*rotated, v, **of_oracle)
    assert isinstance(expected, torch.Tensor)
    found = ha.check(q, k, v, **options)
    assert found.rows == 4 * 40
    for asked, recipe in ((found.asked, options.get("recipe", ha.BALANCED)), ("BALANCED", ha.BALANCED)):
        out = ha.attention(q, k, v, **{**options, "recipe": recipe})
        assert found.errors[asked].total == pytest.approx(relative_error(out, expected), rel=1e-6)
        off, size = (out.double() - expected).norm(dim=-1), expected.norm(dim=-1)
        assert found.errors[asked].worst_row == pytest.approx((off / size)[size > 0].max().item(), rel=1e-6)


def test_rows_and_heads_are_sampled() -> None:
    q, k, v = make_qkv("randn", 2, 16, 4, 100, 130, 32)
    found = ha.check(q, k, v, causal=True)
    assert found.rows == module.HEADS * module.ROWS
    out, expected = ha.attention(q, k, v, causal=True), ha.reference.attention(q, k, v, causal=True)
    assert isinstance(expected, torch.Tensor)
    # 512 rows of 32 channels have the error of all 3200 within three standard deviations, taken from the rows' own.
    off, size = (out.double() - expected).norm(dim=-1), expected.norm(dim=-1)
    assert found.errors["BALANCED"].total == pytest.approx((off.norm() / size.norm()).item(), rel=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_beside(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model of one pass has it: P, at most 1, and the output are rounded."""
    monkeypatch.setattr(module, "COMPARED", {})
    q, k, v = make_qkv("randn", 1, 2, 2, 60, 90, 64, dtype)
    found = ha.check(q, k, v, recipe=ha.FAST)
    s = q.double() @ k.double().mT / math.sqrt(64)
    p = torch.exp(s - s.amax(3, keepdim=True))
    out = (p.to(dtype).double() @ v.double() / p.sum(3, keepdim=True)).to(dtype)
    expected = ha.reference.attention(q, k, v)
    assert isinstance(expected, torch.Tensor)
    assert found.sixteen_bits.total == pytest.approx(relative_error(out, expected), rel=1e-6)
    assert found.sixteen_bits.total < 0.2 * found.errors[found.asked].total


def hard(name: str, N: int = 1024, D: int = 32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = make_qkv("outlier_channel" if name == "outliers" else "randn", 1, 1, 1, 16, N, D)
    if name == "outliers":
        q[..., 3, 5] = 90
    if name == "k_bias":
        k[..., 7] += 20
    if name.startswith("k3x"):
        q, k, v = make_qkv(name, 1, 1, 1, 16, N, 64)
    if name == "drift":
        v += 3 * torch.sign(torch.sin(2 * math.pi * torch.arange(N) / N))[:, None]
    return q, k, v


@pytest.mark.parametrize(
    ("name", "recipe", "said"),
    [
        ("k_bias", IN_E4M3, "smooth_k=True subtracts it first"),
        ("k_bias", ha.ACCURATE, "it is subtracted first"),
        ("outliers", ha.BALANCED, "hadamard=True spreads it"),
        ("outliers", ha.ACCURATE, "hadamard spreads it"),
        ("drift", replace(IN_E4M3, promote_every=0), "promote_every=1 sums P V in fp32"),
        ("drift", ha.FAST, "P V is summed in fp32, which keeps it"),
    ],
)
def test_findings(name: str, recipe: ha.Recipe, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPARED", {})
    findings = [x for x in ha.check(*hard(name), recipe=recipe).findings if "median" not in x]
    assert len(findings) == (3 if name == "outliers" else 2), findings
    assert all(said in finding for finding in findings[:-1])
    assert findings[-1].startswith("No preset")


@pytest.mark.parametrize(("recipe", "said"), [(ha.BALANCED, "equalising leaves"), (IN_E4M3, "equalise=True leaves")])
@pytest.mark.parametrize("kind", ["k3x8q", "k3x30"])
def test_large_channels_are_named(kind: str, recipe: ha.Recipe, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their size, and what the root of the ratio of K's to Q's leaves of it, to a power of two."""
    monkeypatch.setattr(module, "COMPARED", {})
    finding = ha.check(*hard(kind), recipe=recipe).findings[0]
    found = re.fullmatch(
        rf"K has a channel ([\d.]+) times as large as its median one: {said} ([\d.]+) times\.", finding
    )
    assert found, finding
    _count, factor, power = LARGE_CHANNELS[kind]
    large, left = map(float, found.groups())
    assert large == pytest.approx(factor, rel=0.2)
    assert factor ** ((1 - power) / 2) / 2 < left < factor ** ((1 - power) / 2) * 2.2


def test_a_head_without_sizes_has_no_large_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one of zeros, nor a key that alone is large: the equaliser leaves both."""
    monkeypatch.setattr(module, "COMPARED", {})
    q, k, v = hard("none")
    huge = k.clone()
    huge[:, :, 0, 3] = 300
    for of_q, of_k in ((q * 0, k), (q, k * 0 + 1), (q, huge)):
        assert not any("median" in finding for finding in ha.check(of_q, of_k, v).findings)


def test_nothing_is_found_in_normal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPARED", {})
    assert len(ha.check(*hard("none")).findings) == 1


def test_what_is_more_accurate_is_named() -> None:
    found = ha.check(*hard("k_bias", 200), recipe=ha.FAST)
    assert found.asked == "FAST"
    assert [*found.errors] == ["FAST", "BALANCED", "ACCURATE", "HYBRID"]
    assert found.errors["HYBRID"].total < 0.8 * found.errors["FAST"].total
    assert "HYBRID 0." in found.findings[-1]
    text = str(found)
    assert "<- asked for" in text.splitlines()[2]
    assert text.splitlines()[6].startswith("16 bits")


def test_16_bit_presets_are_left_out_where_they_have_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPARED", {"FAST": ha.FAST, "HYBRID": ha.HYBRID})
    assert [*ha.check(*make_qkv("randn", 1, 1, 1, 8, 40, 264)).errors] == ["BALANCED", "FAST"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("q", math.nan, "q holds NaN"), ("k", -math.inf, "k holds inf"), ("v", math.nan, "v holds")],
)
def test_what_is_not_finite_shows(name: str, value: float, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both errors, and in a finding that names the input; nothing is said of presets then."""
    monkeypatch.setattr(module, "COMPARED", {"FAST": ha.FAST})
    q, k, v = make_qkv("randn", 1, 1, 1, 8, 40, 32)
    {"q": q, "k": k, "v": v}[name][..., 3, 3] = value
    found = ha.check(q, k, v)
    for error in (*found.errors.values(), found.sixteen_bits):
        assert math.isnan(error.total)
        assert math.isnan(error.worst_row)
    assert len(found.findings) == 1
    assert found.findings[0].startswith(said)


def test_presets_that_overflow_are_told_from_those_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 ends at 65504, which the fp64 result of finite tensors does not."""
    monkeypatch.setattr(module, "COMPARED", {"FAST": ha.FAST})
    q, k, v = make_qkv("randn", 1, 1, 1, 8, 40, 32)
    found = ha.check(q, k, v * 1e6, recipe=ha.Recipe(pv_dtype=torch.float16))
    assert not math.isfinite(found.errors["yours"].total)
    assert found.errors["FAST"].total < 0.1
    assert found.findings == ("yours gives NaN or inf here, and these do not, the fastest first: FAST.",)


@pytest.mark.thorough
def test_a_block_mask_is_told_apart(device: str) -> None:
    """What it leaves out is no error of 8 bits, and 8 bits none of what it leaves out."""
    q, k, v = make_qkv("randn", 2, 4, 2, 300, 500, 64, device=device)
    generator = torch.Generator().manual_seed(0)
    some = torch.rand(1, 4, 300, 500, generator=generator) < 0.5
    some[:, :, :128, 128:256], some[:, :, :128, 256:384] = False, True
    mask = ha.BlockMask.from_dense(some.to(device))
    found = ha.check(q, k, v, block_mask=mask)
    dense, masked = (ha.reference.attention(q, k, v, block_mask=x) for x in (None, mask))
    assert found.pattern is not None
    assert found.pattern.total == pytest.approx(relative_error(masked, dense), rel=0.1)
    error = relative_error(ha.attention(q, k, v, block_mask=mask), masked)
    assert found.errors[found.asked].total == pytest.approx(error, rel=0.1)
    assert error < 0.1 < found.pattern.total
    assert "block mask" in str(found)
    everything = ha.check(q, k, v, block_mask=ha.BlockMask.from_dense(torch.ones_like(some).to(device)))
    assert everything.pattern is not None
    assert everything.pattern.total < 1e-12
    assert ha.check(q, k, v).pattern is None


def test_rows_of_a_mask(device: str) -> None:
    some = torch.rand(2, 3, 300, 500, generator=torch.Generator().manual_seed(0)) < 0.5
    some[:, :, 128:256, :128], some[:, :, :128, 256:384] = False, True
    mask = ha.BlockMask.from_dense(some.to(device))
    rows = torch.tensor([0, 5, 127, 128, 200, 299], device=device)
    assert torch.equal(mask._seen_by(rows, mask._kinds()), mask.to_dense()[:, :, rows])
    assert torch.equal(mask._seen_by(rows, mask._kinds()[1, 2]), mask.to_dense()[1, 2, rows])
