"""`transform_rows`: stages of quantising alone, in the input's dtype."""

from __future__ import annotations

import torch

from helion_attn.ops.declare import Operation
from helion_attn.problem import TransformRowsArgs


def empty_rows(a: TransformRowsArgs) -> torch.Tensor:
    """Allocate the operation's output."""
    B, H, S, D = a.x.shape
    return a.x.new_empty((B, S, H, D) if a.bshd else (B, H, S, D))


def _launch(a: TransformRowsArgs) -> torch.Tensor:
    from helion_attn.preprocess.transform_rows import launch

    out = empty_rows(a)
    launch(a, out)
    return out


transform_rows = Operation("transform_rows", TransformRowsArgs, 1, _launch, empty_rows)
