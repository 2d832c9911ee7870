"""What `quantize` is to make of Q, K and V."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from helion_attn.numerics import REFLECTED_GROUP
from helion_attn.preprocess.lib.hadamard import hadamard_block


class Choices(NamedTuple):
    """`Recipe.quantize_options`: fields of `Recipe`, of which `hadamard_seed` is None without a rotation."""

    qk_dtype: torch.dtype
    pv_dtype: torch.dtype
    q_scales: str
    k_scales: str
    v_scales: str
    hadamard_seed: int | None
    reflect: bool
    smooth_k: bool
    center_v: bool

    def bound(self, D: int) -> float:
        """A head's largest magnitude times this bounds what the rotation or reflection makes of its rows."""
        if self.reflect:
            return math.sqrt(REFLECTED_GROUP)
        return 1.0 if self.hadamard_seed is None else math.sqrt(hadamard_block(D))
