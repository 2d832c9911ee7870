"""The backend for vLLM 0.25 and 0.26."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.v1.kv_cache_interface import AttentionSpec

from helion_attn.integrations.vllm.common import Common


class HelionBackend(Common):
    """The backend that vLLM calls CUSTOM.

    vLLM's own caches `int8_per_token_head` and `fp8_per_token_head` have a page's bytes, so vLLM's own spec is taken.
    """

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["int8_per_token_head", "fp8_per_token_head"]

    @staticmethod
    def get_name() -> str:
        """The name that vLLM looks up among its backends."""
        return "CUSTOM"

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head dims that are not padded: vLLM's spec has no bytes for padding."""
        return [64, 128, 256]

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Connectors of 0.25 copy pages without their descales: its specs do not say how many bytes both have."""
        return hasattr(AttentionSpec, "unpadded_page_size_bytes")

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """A layer's memory, in bytes: [pages, H_kv, keys of a page, bytes of a key]."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size + 8
