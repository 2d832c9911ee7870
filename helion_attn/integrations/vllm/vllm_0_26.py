"""What vLLM 0.25 and 0.26 ask of a backend before they run it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend

from helion_attn.integrations.vllm.layer import PAGE, RECIPES, HelionImpl, HelionMetadataBuilder
from helion_attn.kv_cache import page_bytes


class HelionBackend(AttentionBackend):
    """Attention over pages of 128 keys in 8 bits.

    vLLM's own caches `int8_per_token_head` and `fp8_per_token_head` have a page's bytes, so vLLM's own spec is taken.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(RECIPES)
    # Pages are closed by the call that attends.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The name that vLLM looks up among its backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[HelionImpl]:
        """A layer's attention."""
        return HelionImpl

    @staticmethod
    def get_builder_cls() -> type[HelionMetadataBuilder]:
        """What makes a step's metadata."""
        return HelionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """Keys of a page."""
        return [PAGE]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head dims that are not padded: vLLM's spec has no bytes for padding."""
        return [64, 128, 256]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """A layer's memory, in bytes: [pages, bytes of a page]."""
        return num_blocks, page_bytes(num_kv_heads, head_size)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows are right edges and left edges of what is visible."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """A sink is one more logit of a head."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """A page's bytes are together."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """With the number of splits fixed, no output depends on the batch."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Hopper."""
        return tuple(capability) == (9, 0)
