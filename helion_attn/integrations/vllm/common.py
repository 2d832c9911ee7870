"""The part of the backend that all releases of vLLM with a known interface share."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend

from helion_attn.integrations.vllm.layer import PAGE, HelionImpl, HelionMetadataBuilder


class Common(AttentionBackend):
    """Attention over pages of 128 keys in 8 bits."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    # Pages are closed by the call that attends.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[HelionImpl]:
        """A layer's attention."""
        return HelionImpl

    @staticmethod
    def get_builder_cls() -> type[HelionMetadataBuilder]:
        """Return the class that makes a step's metadata."""
        return HelionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Keys of a page."""
        return [PAGE]

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows are left edges of what is visible."""
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
