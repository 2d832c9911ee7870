"""A value for every argument of other libraries that is not supported: the functions must not accept it."""

from __future__ import annotations

from typing import Any

import torch

#: By argument; of all others, any tensor.
REFUSED: dict[str, Any] = {
    "attention_chunk": 128,
    "attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool),
    "attn_mask": torch.ones(4, 4, dtype=torch.bool),
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
