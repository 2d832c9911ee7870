"""`mask_bits`: a mask by scores, as bits and kinds of blocks."""

from __future__ import annotations

import torch

from helion_attn.ops.declare import Operation
from helion_attn.preprocess.mask_bits import MaskBitsProblem, empty_bits, launch


def _launch(a: MaskBitsProblem) -> tuple[torch.Tensor, ...]:
    return launch(a)


# It may copy the mask, which no plan does.
mask_bits = Operation("mask_bits", MaskBitsProblem, 3, _launch, empty_bits, planned=False)
