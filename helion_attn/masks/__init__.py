"""Patterns of masks that people use, as `BlockMask`s: packed documents, prefixes, neighbourhoods in video, top blocks.

What a pattern sees of most blocks, all or nothing, follows from its structure, so that no mask by scores is built:
75,600 tokens would have 5.7 GB of them. Blocks that are seen in part are evaluated. All but `top_blocks` wait for the
device once or twice: make them once and keep them.
"""

from helion_attn.masks.patterns import Reordered, documents, prefix, radial, sliding_tile, top_blocks

__all__ = ["Reordered", "documents", "prefix", "radial", "sliding_tile", "top_blocks"]
