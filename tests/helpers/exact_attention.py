"""The fp64 oracle in the place of the kernels that models of transformers call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.integrations import mask_tensors, transformers

#: How far models in fp32 are from their eager attention then.
EXACT = 1e-5


def with_oracle(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Exact attention in the kernel's place, with some of its arguments changed."""

    def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, recipe: Any, **options: Any) -> torch.Tensor:
        given = {name: value for name, value in changes.items() if options[name] is not None}
        return ha.reference.attention(q, k, v, **options | given).to(q.dtype).contiguous()

    def of_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = ha.reference.attention(q, k, v, **{x: y for x, y in options.items() if x != "recipe"})
        return out.to(q.dtype), lse.float()

    def of_padding(*tensors: torch.Tensor, recipe: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = ha.reference.attention_varlen(*tensors, **{x: y for x, y in options.items() if x != "return_lse"})
        return out.to(tensors[0].dtype), lse.float()

    monkeypatch.setattr(transformers, "attention", oracle)
    monkeypatch.setattr(mask_tensors, "attention", of_mask)
    monkeypatch.setattr(mask_tensors, "attention_varlen", of_padding)
