"""The steps that are inline assembly on the GPU, against what they stand for."""

from __future__ import annotations

import pytest
import torch

from helion_attn.kernels.helion_compat import compiled, helion, hl, interpreted
from helion_attn.kernels.inline_asm import EXP2_CUBIC, exp2_partly_cubic

#: Of the polynomial, and of `ex2.approx.ftz.f32` (PTX ISA: 2**-22.5).
EXP2_ERROR = 1.02e-4


def powers(x: torch.Tensor, out: torch.Tensor, is_cuda: hl.constexpr) -> None:
    """out = 2**x, both [rows, 128]."""
    for row in hl.grid(x.size(0)):
        cols = hl.arange(128)
        hl.store(out, [row, cols], exp2_partly_cubic(hl.load(x, [row, cols]), is_cuda))


def run_powers(x: torch.Tensor) -> torch.Tensor:
    """Of fp32 [rows, 128]."""
    kernel = compiled(powers, helion.Config(num_warps=1, indexing="pointer")) if x.is_cuda else interpreted(powers)
    out = torch.full_like(x, float("nan"))
    kernel(x, out, x.is_cuda)
    return out


def test_the_cubic_polynomial() -> None:
    """In fp32, as the GPU computes it but for the FMAs."""
    f = torch.linspace(-0.5, 0.5, 2**20)
    c3, c2, c1 = (torch.tensor(c, dtype=torch.float32) for c in EXP2_CUBIC)
    power = 1 + f * (c1 + f * (c2 + f * c3))
    relative = power.double() / torch.exp2(f.double()) - 1
    assert 1.01e-4 < relative.abs().max() < EXP2_ERROR
    assert relative.mean().abs() < 5e-5
    # Other coefficients are worse.
    worse = 1 + f * (c1 + f * (c2 + 2**-10 + f * c3))
    assert (worse.double() / torch.exp2(f.double()) - 1).abs().max() > EXP2_ERROR


def test_exp2_partly_cubic(device: str) -> None:
    """Any x, also between and at the ends of what a P can be."""
    x = torch.linspace(-126, 15, 128 * 1024, device=device).view(-1, 128)
    expected = torch.exp2(x.double())
    assert torch.all((run_powers(x) / expected - 1).abs() <= EXP2_ERROR)
    whole = torch.arange(-126, 128, device=device, dtype=torch.float32).repeat_interleave(128).view(-1, 128)
    assert torch.all((run_powers(whole) / torch.exp2(whole.double()) - 1).abs() <= 2.0**-22)


@pytest.mark.parametrize("x", [-127.25, -150.0, -1e30, float("-inf")])
def test_the_power_of_next_to_nothing(x: float, device: str) -> None:
    out = run_powers(torch.full((1, 128), x, device=device))
    assert torch.all(out <= 2.0**-126)
    assert x > -150 or torch.all(out == 0)


def test_nan_stays_in_three_of_four(device: str) -> None:
    assert run_powers(torch.full((1, 128), float("nan"), device=device)).isnan().sum() >= 96
