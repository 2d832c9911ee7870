"""The custom ops, one kind a file: what each takes, allocates and chooses. Kernels are imported on the first call."""

from helion_attn.ops.attention import attention
from helion_attn.ops.block_mask import block_means, mask_bits, mask_lists
from helion_attn.ops.dense import attention_dense
from helion_attn.ops.kv_cache import append_kv, decode, step
from helion_attn.ops.multi_rank import attention_gathered, describe_rank, merge_results, quantize_rank
from helion_attn.ops.quantize import pack_qkv, quantize_qkv
from helion_attn.ops.transform_rows import transform_rows
from helion_attn.ops.varlen import attention_varlen

__all__ = [
    "append_kv",
    "attention",
    "attention_dense",
    "attention_gathered",
    "attention_varlen",
    "block_means",
    "decode",
    "describe_rank",
    "mask_bits",
    "mask_lists",
    "merge_results",
    "pack_qkv",
    "quantize_qkv",
    "quantize_rank",
    "step",
    "transform_rows",
]
