"""`mask_bits`, `mask_lists` and `top_blocks`: what block masks are made by."""

from __future__ import annotations

from helion_attn.ops.declare import Operation
from helion_attn.preprocess import mask_bits as of_bits
from helion_attn.preprocess import mask_lists as of_lists
from helion_attn.preprocess import top_blocks as of_top
from helion_attn.problem import MaskBitsArgs, MaskListsArgs, TopBlocksArgs

# It may copy the mask, which no plan does.
mask_bits = Operation("mask_bits", MaskBitsArgs, 3, of_bits.launch, of_bits.empty_bits, planned=False)
mask_lists = Operation("mask_lists", MaskListsArgs, 3, of_lists.launch, of_lists.empty_lists)
top_blocks = Operation("top_blocks", TopBlocksArgs, 1, of_top.launch, of_top.empty_blocks)
