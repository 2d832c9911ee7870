"""Every public call three times, as users make it, on what memory held before: each has the bits of the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from helion_attn import plans

Run = Callable[..., Sequence[torch.Tensor | None]]


def bits(x: torch.Tensor | None) -> torch.Tensor:
    """The bytes of a tensor, in which NaN is equal to itself; none of an lse that there is not."""
    return torch.empty(0, dtype=torch.uint8) if x is None else x.contiguous().view(-1).view(torch.uint8)


def three_times(run: Run) -> Run:
    """`plans.run`, of which no plan outlives the call: a test may change anything in between."""

    def call(
        name: str,
        tensors: Sequence[Any],
        options: Sequence[Any],
        problem: Callable[[], Any],
        written: Sequence[torch.Tensor] = (),
    ) -> Sequence[torch.Tensor | None]:
        # What is no tensor, the call refuses.
        before = [x.clone() if isinstance(x, torch.Tensor) else x for x in written]
        returned = run(name, tensors, options, problem, written)
        given = [x for x in tensors if x is not None]
        if plans.key_of(name, given, ()) is None or torch.cuda.is_current_stream_capturing():
            return returned
        if any(isinstance(x, FakeTensor) for x in (*(returned or ()), *written)):
            return returned
        # Of the open pages, and of a step's lse, a call writes what its tokens have.
        compared = [] if name in ("append_kvcache", "kv_cache.step") else list(returned)
        first = [*compared, *(x.clone() for x in written)]
        for _ in range(2):
            # A page that an append closed would open again from its closed form.
            for x, held in zip(written, before, strict=True):
                x.copy_(held)
            again = run(name, tensors, options, problem, written)
        plans.forget()
        after = [*again[: len(compared)], *written]
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(first, after, strict=True)), (
            f"the third call of {name} has other bits than the first"
        )
        return returned

    return call
