"""The backend for vLLM 0.33."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from vllm.v1.kv_cache_interface import KVCacheLayout, KVQuantMode

from helion_attn.integrations.vllm.common import Common
from helion_attn.integrations.vllm.layer import PAGE
from helion_attn.integrations.vllm.names_0_33 import BACKEND, DTYPES
from helion_attn.kv_cache import page_bytes


class HelionBackend(Common):
    """The backend under its own name, over caches of its own dtypes. A page has room for padded head dims."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(DTYPES)

    @staticmethod
    def get_name() -> str:
        """The name that vLLM looks up among its backends."""
        return BACKEND

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Head dims whose pages have 128 keys."""
        return 16 <= head_size <= 256

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The layer's spec with a page's bytes of each key and head: K, V and their descales."""
        if spec.kv_quant_mode != KVQuantMode.CUSTOM or spec.state_content_bytes is not None:
            return spec
        if spec.head_size_v != spec.head_size:
            raise NotImplementedError(f"V's head dim is {spec.head_size_v}; it must be K's, {spec.head_size}")
        of_head = page_bytes(1, spec.head_size)
        return dataclasses.replace(spec, state_content_bytes=of_head // PAGE)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Layouts in which a page's bytes are together, head by head."""
        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC
