"""What functions must refuse: a value for every argument of other libraries that is not supported, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

#: By argument; of all others, any tensor.
REFUSED: dict[str, Any] = {
    "attention_chunk": 128,
    "attention_mask": "causal",
    "attn_mask": torch.eye(24),
    "cache": "a paged cache",
    "dropout": 0.1,
    "dropout_p": 0.1,
    "max_seqlen_q": 1,
    "num_splits": 2,
    "output_attentions": True,
    "sm_margin": 8,
}


def refused(argument: str) -> Any:
    return REFUSED.get(argument, torch.zeros(1))


def assert_raises(
    call: Callable[..., object], arguments: dict[str, Any], error: type[Exception], parts: list[str]
) -> None:
    """`call` raises that error and no subclass of it, with every one of `parts` in the message."""
    with pytest.raises(error) as raised:
        call(**arguments)
    assert type(raised.value) is error
    for part in parts:
        assert part in str(raised.value)
