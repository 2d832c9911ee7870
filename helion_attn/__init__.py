"""FP8 attention for NVIDIA Hopper, written in Helion: fast, and accurate on long contexts."""

from typing import TYPE_CHECKING

from helion_attn import kv_cache, masks, pages, reference
from helion_attn.api import (
    attention,
    attention_quantized,
    pack,
    quantize,
)
from helion_attn.check import check
from helion_attn.debugging import debug
from helion_attn.explain import explain, plan
from helion_attn.integrations.diffusers import register_diffusers
from helion_attn.integrations.diffusers_schedule import Schedule
from helion_attn.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from helion_attn.integrations.flash_attn_2 import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from helion_attn.integrations.fused.fuse_diffusers import fuse_diffusers
from helion_attn.integrations.fused.fuse_transformers import fuse_transformers
from helion_attn.integrations.fused.unfuse import unfuse
from helion_attn.integrations.sdpa import FallbackWarning, scaled_dot_product_attention, sdpa
from helion_attn.integrations.torch_flash import register_flash_attention
from helion_attn.integrations.transformers import register_transformers, transformers_cache
from helion_attn.kv_cache import append_kvcache, attention_kvcache, cache_constants, paged_kv_cache
from helion_attn.masks.blocks import BlockMask
from helion_attn.preprocess.dequantize import dequantize
from helion_attn.support import is_supported
from helion_attn.transforms import apply_rope, hadamard, hadamard_matrix, reflect
from helion_attn.types import (
    ACCURATE,
    BALANCED,
    BF16,
    FAST,
    HYBRID,
    OpenPages,
    PagedKVCache,
    QuantizedQKV,
    Recipe,
    RMSNorm,
    Rope,
)
from helion_attn.validate.dense import SwappedLayoutWarning
from helion_attn.varlen import attention_varlen
from helion_attn.version import __version__

if TYPE_CHECKING:
    from helion_attn import distributed

__all__ = [
    "ACCURATE",
    "BALANCED",
    "BF16",
    "FAST",
    "HYBRID",
    "BlockMask",
    "FallbackWarning",
    "OpenPages",
    "PagedKVCache",
    "QuantizedQKV",
    "RMSNorm",
    "Recipe",
    "Rope",
    "Schedule",
    "SwappedLayoutWarning",
    "__version__",
    "append_kvcache",
    "apply_rope",
    "attention",
    "attention_kvcache",
    "attention_quantized",
    "attention_varlen",
    "cache_constants",
    "check",
    "debug",
    "dequantize",
    "distributed",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "fuse_diffusers",
    "fuse_transformers",
    "hadamard",
    "hadamard_matrix",
    "is_supported",
    "kv_cache",
    "masks",
    "pack",
    "paged_kv_cache",
    "pages",
    "plan",
    "quantize",
    "reference",
    "reflect",
    "register_diffusers",
    "register_flash_attention",
    "register_transformers",
    "scaled_dot_product_attention",
    "sdpa",
    "transformers_cache",
    "unfuse",
]


if not TYPE_CHECKING:  # a checker would take any name for one of this module's

    def __getattr__(name: str) -> object:
        """`distributed`, which is imported on first use: it needs `torch.distributed`."""
        if name == "distributed":
            import importlib

            return importlib.import_module("helion_attn.distributed")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return __all__
