"""The fp64 oracle, the rounding model of the kernels, and `torch._scaled_mm` as a baseline."""

from helion_attn.reference.hadamard import hadamard, hadamard_matrix
from helion_attn.reference.kv_cache import fp8_attention_kvcache
from helion_attn.reference.norm import rms_norm
from helion_attn.reference.oracle import attention
from helion_attn.reference.reflect import reflect
from helion_attn.reference.rope import apply_rope
from helion_attn.reference.rounding_model import RoundedQKV, fp8_attention, quantize
from helion_attn.reference.scaled_mm import scaled_mm_attention
from helion_attn.reference.varlen import attention_varlen, fp8_attention_varlen

__all__ = [
    "RoundedQKV",
    "apply_rope",
    "attention",
    "attention_varlen",
    "fp8_attention",
    "fp8_attention_kvcache",
    "fp8_attention_varlen",
    "hadamard",
    "hadamard_matrix",
    "quantize",
    "reflect",
    "rms_norm",
    "scaled_mm_attention",
]
