"""What the kernels are held to: the fp64 oracle, the rounding model, and `torch._scaled_mm` as a baseline."""

from helion_attn.reference.oracle import attention
from helion_attn.reference.rounding_model import fp8_attention
from helion_attn.reference.scaled_mm import scaled_mm_attention

__all__ = ["attention", "fp8_attention", "scaled_mm_attention"]
