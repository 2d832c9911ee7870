"""FP8 attention for NVIDIA Hopper, written in Helion: fast, and accurate on long contexts."""

from helion_attn import reference
from helion_attn.api import attention, attention_quantized, quantize
from helion_attn.preprocess.dequantize import dequantize
from helion_attn.types import BALANCED, FAST, QuantizedQKV, Recipe

__all__ = [
    "BALANCED",
    "FAST",
    "QuantizedQKV",
    "Recipe",
    "attention",
    "attention_quantized",
    "dequantize",
    "quantize",
    "reference",
]
