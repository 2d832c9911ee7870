"""What is kept of tensors, and when it is made again."""

from __future__ import annotations

import gc

import pytest
import torch

from helion_attn.integrations.tensor_memo import TensorMemo


def sum_of(tensors: tuple[torch.Tensor, ...], factor: int) -> float | None:
    """What is made; None of a negative factor."""
    calls.append(factor)
    return None if factor < 0 else factor * sum(float(x.sum()) for x in tensors)


calls: list[int] = []


@pytest.fixture
def kept() -> TensorMemo[float | None]:
    calls.clear()
    return TensorMemo(sum_of)


def test_it_is_made_once(kept: TensorMemo[float | None]) -> None:
    """For each of what it depends on; None is kept as well."""
    one, other = torch.ones(2, 3)
    for _ in range(2):
        assert kept.get((one, other), 2) == 12
        assert kept.get((other, one), 2) == 12
        assert kept.get((one,), 2) == 6
        assert kept.get((one, other), -1) is None
    assert calls == [2, 2, 2, -1]
    assert kept.find((one, other), 2) == 12
    assert kept.find((one, other), 3) is None
    assert calls == [2, 2, 2, -1]


def test_it_is_made_again_after_changes(kept: TensorMemo[float | None]) -> None:
    """Of any of the tensors: a write, other memory, or another shape of the same."""
    one, other = torch.ones(2, 2, 3).unbind(0)
    assert kept.get((one, other), 1) == 12
    other[0, 0] = 5
    assert kept.find((one, other), 1) is None
    assert kept.get((one, other), 1) == 16
    other.data = torch.zeros(2, 3)
    assert kept.get((one, other), 1) == 6
    one.data = one.data[:1]
    assert kept.get((one, other), 1) == 3
    assert len(kept) == 1


def test_it_goes_with_its_tensors(kept: TensorMemo[float | None]) -> None:
    one, other = torch.ones(3), torch.ones(3)
    for factor in range(3):
        kept.get((one, other), factor)
    kept.get((other,), 0)
    assert len(kept) == 4
    del one
    gc.collect()
    assert len(kept) == 1
    kept.drop((other,), 0)
    kept.drop((other,), 0)
    assert len(kept) == 0


def test_tensors_that_do_not_count_their_changes(kept: TensorMemo[float | None]) -> None:
    """One of several is enough."""
    ordinary = torch.ones(3)
    with torch.inference_mode():
        made_there = torch.ones(3)
        for value in (1, 2):
            made_there.fill_(value)
            assert kept.get((ordinary, made_there), 1) == 3 + 3 * value
        assert kept.get((ordinary,), 1) == 3
    assert len(kept) == 1


@pytest.mark.gpu
def test_streams_do_not_share(kept: TensorMemo[float | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What one made may not be there yet for another; and to find it asks for no stream object."""
    x, other = torch.ones(3, device="cuda"), torch.cuda.Stream()
    for _ in range(2):
        kept.get((x,), 1)
        with torch.cuda.stream(other):
            kept.get((x,), 1)
    assert len(calls) == len(kept) == 2

    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "current_stream", fail)
    assert kept.find((x,), 1) == 3
