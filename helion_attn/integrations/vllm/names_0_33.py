"""Names that vLLM 0.33 lets a plugin register: of the backend, and of the dtypes of its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from helion_attn.types import RecipeName

#: `vllm serve --attention-backend`.
BACKEND = "HELION"

#: `--kv-cache-dtype`, and the preset of its keys.
DTYPES: dict[str, RecipeName] = {"helion_int8": "balanced", "helion_e4m3": "fast"}


class Bytes:
    """A dtype of a cache as vLLM asks for it: bytes, which the backend alone understands."""

    def torch_dtype(self) -> torch.dtype:
        """Return the dtype of the cache's memory."""
        return torch.uint8

    def quant_mode(self) -> Any:
        """The mode of backends that have kernels of their own."""
        from vllm.v1.kv_cache_interface import KVQuantMode

        return KVQuantMode.CUSTOM


def register(path: str) -> None:
    """Register the names, once a process; `path` is the backend's class."""
    from vllm.config.cache import register_kv_cache_dtype
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if BACKEND in AttentionBackendEnum.__members__:
        return
    backend = AttentionBackendEnum.register(BACKEND, path)
    # Enum pickles a value, which a process has no member of before its plugins are loaded.
    backend.__reduce_ex__ = lambda protocol: (registered, (path,))
    for name in DTYPES:
        register_kv_cache_dtype(name)(type("Bytes", (Bytes,), {"name": name}))


def registered(path: str) -> Any:
    """Return vLLM's member of the backend, which is registered if it is not yet: how another process unpickles it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register(path)
    return AttentionBackendEnum[BACKEND]
