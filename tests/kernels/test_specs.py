"""Kernels take what they are compiled for as one NamedTuple, and integers that belong together as another."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from devtools.sm90 import compile_for_sm90, fake_cuda
from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import compiled, interpreted
from helpers.offline import compilations


class Inner(NamedTuple):
    factor: float


class Spec(NamedTuple):
    inner: Inner | None
    most: float
    dtype: torch.dtype
    flips: bool

    @property
    def scales(self) -> bool:
        return self.inner is not None


class Shifts(NamedTuple):
    first: int
    second: int


SPEC = Spec(Inner(2.0), float("inf"), torch.bfloat16, True)


def limited(x: torch.Tensor, spec: Spec) -> torch.Tensor:
    """A helper that takes the whole spec."""
    return torch.clamp(-x if spec.flips else x, max=spec.most).to(spec.dtype)


def with_spec(x: torch.Tensor, out: torch.Tensor, shifts: Shifts, spec: hl.constexpr) -> None:
    width = hl.specialize(x.size(1)) if spec.scales else 0
    for i in hl.grid(x.size(0)):
        row = x[i, :] + shifts.second + width
        if spec.scales:
            row = row * spec.inner.factor
        out[i, :] = limited(row, spec)


def without_spec(
    x: torch.Tensor,
    out: torch.Tensor,
    second: int,
    factor: hl.constexpr,
    most: hl.constexpr,
    dtype: hl.constexpr,
    flips: hl.constexpr,
) -> None:
    width = hl.specialize(x.size(1))
    for i in hl.grid(x.size(0)):
        row = (x[i, :] + second + width) * factor
        out[i, :] = torch.clamp(-row if flips else row, max=most).to(dtype)


CONFIG = Config(num_warps=1, indexing="pointer")


def launch_with_spec() -> None:
    compiled(with_spec, CONFIG)(fake_cuda(10, 64), fake_cuda(10, 64, dtype=torch.bfloat16), Shifts(3, 4), SPEC)


def launch_without_spec() -> None:
    args = (fake_cuda(10, 64), fake_cuda(10, 64, dtype=torch.bfloat16), 4, 2.0, float("inf"), torch.bfloat16, True)
    compiled(without_spec, CONFIG)(*args)


def test_compiles_to_the_same_as_arguments_of_their_own() -> None:
    ptx = []
    for launch in (launch_with_spec, launch_without_spec):
        (kernel,) = compile_for_sm90(launch)
        code, _, _ = kernel.ptx.partition(".section\t.debug")
        lines = [line for line in code.split("\n") if not line.lstrip().startswith((".loc", ".file", "//"))]
        ptx.append("\n".join(lines).replace("without_spec", "with_spec"))
    assert ptx[0] == ptx[1]


def running_sums(x: torch.Tensor, out: torch.Tensor, spec: hl.constexpr) -> None:
    width = hl.specialize(x.size(1))
    for i in hl.grid(out.size(0)):
        sums = zeros_of_two(width)
        for j in hl.grid(x.size(0)):
            sums = added(sums, x[j, :])
        out[i, :] = sums[0] + sums[1]


def zeros_of_two(width: int) -> tuple[torch.Tensor, ...]:
    return tuple([hl.zeros([width], dtype=torch.float32) for _ in [1, 2]])


def added(sums: tuple[torch.Tensor, ...], row: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple([x + row for x in sums])


def launch_running_sums() -> None:
    compiled(running_sums, CONFIG)(fake_cuda(10, 64), fake_cuda(10, 64), SPEC)


def test_a_loop_carries_a_tuple_of_tiles() -> None:
    (_,) = compile_for_sm90(launch_running_sums)
    x, out = torch.arange(640.0).view(10, 64), torch.empty(10, 64)
    interpreted(running_sums)(x, out, SPEC)
    assert torch.equal(out, (2 * x.sum(0)).expand(10, 64))


def test_constants_are_compiled_in_and_integers_are_data() -> None:
    kernel = compiled(with_spec, CONFIG)
    x, out = fake_cuda(10, 64), fake_cuda(10, 64, dtype=torch.bfloat16)
    with compilations() as seen:
        for shifts, spec, traces in [
            (Shifts(3, 4), SPEC, 1),
            (Shifts(3, 4), Spec(*SPEC), 1),
            (Shifts(70, 5), SPEC, 1),
            (Shifts(3, 4), SPEC._replace(flips=False), 2),
            (Shifts(3, 4), SPEC._replace(inner=Inner(3.0)), 3),
            (Shifts(3, 4), SPEC._replace(inner=None), 4),
        ]:
            kernel(x, out, shifts, spec)
            assert len(seen.traced) == traces, spec


def test_equal_constants_of_other_types_are_told_apart() -> None:
    """Of a bool Helion makes other code than of a number."""
    generated = compiled(with_spec, CONFIG)._generated
    x, out = fake_cuda(10, 64), fake_cuda(10, 64, dtype=torch.bfloat16)
    ones: list[Any] = [True, 1, 1.0]
    with compilations():
        bases = [generated.base((x, out, Shifts(3, 4), SPEC._replace(flips=one))) for one in ones]
    assert len({*bases}) == 3


@pytest.mark.parametrize("spec", [SPEC, SPEC._replace(inner=None, most=1.0, flips=False)])
def test_is_interpreted(spec: Spec) -> None:
    x = torch.linspace(-90, 90, 4 * 64).view(4, 64)
    out = torch.empty(4, 64, dtype=torch.bfloat16)
    interpreted(with_spec)(x, out, Shifts(3, 4), spec)
    shifted = -2.0 * (x + 4 + 64) if spec is SPEC else x + 4
    assert torch.equal(out, shifted.clamp(max=spec.most).bfloat16())
