"""The custom ops, by the name of the public function that each serves: what it takes, allocates and chooses.

Kernels are imported on the first call.
"""

from helion_attn.ops.attention import attention, attention_quantized
from helion_attn.ops.block_mask import mask_bits, mask_lists, top_blocks
from helion_attn.ops.kv_cache import append_kv, decode, step, top_pages
from helion_attn.ops.multi_rank import attention_multi_rank, describe_rank, merge_results, quantize_rank
from helion_attn.ops.quantize import pack, quantize
from helion_attn.ops.transform_rows import transform_rows
from helion_attn.ops.varlen import attention_varlen

__all__ = [
    "append_kv",
    "attention",
    "attention_multi_rank",
    "attention_quantized",
    "attention_varlen",
    "decode",
    "describe_rank",
    "mask_bits",
    "mask_lists",
    "merge_results",
    "pack",
    "quantize",
    "quantize_rank",
    "step",
    "top_blocks",
    "top_pages",
    "transform_rows",
]
