"""A step's metadata and a layer's attention: one `kv_cache.step`, whatever the batch holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import vllm.envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

from helion_attn.integrations.vllm.warm_up import LayerKind, compile_steps
from helion_attn.kv_cache import page_bytes, step, step_open_pages
from helion_attn.problem import open_page_count
from helion_attn.types import OpenPages, PagedKVCache, RecipeName

#: Keys of a page: one of vLLM's blocks.
PAGE = 128

#: The preset that a cache is of, by vLLM's name of its dtype.
RECIPES: dict[str, RecipeName] = {"int8_per_token_head": "balanced", "fp8_per_token_head": "fast"}


@dataclasses.dataclass
class HelionMetadata(AttentionMetadata):
    """One step's batch.

    Attributes:
        cu_seqlens: int32 [sequences + 1], where each sequence's new tokens begin.
        block_table: int32 [sequences, pages].
        seqlens: int32 [sequences], with the new tokens; 0 of a row that fills up a CUDA graph's batch.
        max_seqlen_q: the most new tokens of a sequence.
        max_seqlen_k: the most keys of a sequence.
        drafts: the last tokens of a sequence that may be rejected.
        open_pages: where layers attend to other layers' keys, the open pages that the latter wrote, by the address of
            their cache; otherwise None.
    """

    cu_seqlens: torch.Tensor
    block_table: torch.Tensor
    seqlens: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    drafts: int
    open_pages: dict[int, OpenPages] | None

    def open_pages_of(self, cache: PagedKVCache, tokens: int, appends: bool) -> OpenPages | None:
        """Memory for the open pages of a cache that several layers attend to; None where each has its own keys.

        A layer that does not append takes what the one that did has written, or else pages as the cache has them.
        """
        if self.open_pages is None:
            return None
        address = cache.k8.data_ptr()
        if not appends:
            return self.open_pages.get(address)
        if address not in self.open_pages:
            made = step_open_pages(cache, tokens, self.seqlens.size(0), drafts=self.drafts)
            self.open_pages[address] = made
        return self.open_pages[address]


def power_of_two(count: int) -> int:
    """The next power of two: a plan depends on it, and splits hardly do on what lies between."""
    return 1 << (count - 1).bit_length()


class HelionMetadataBuilder(AttentionMetadataBuilder[HelionMetadata]):
    """Makes the metadata of a step, once for all layers."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if vllm_config.cache_config.kv_sharing_fast_prefill:
            raise NotImplementedError("kv_sharing_fast_prefill is on; helion_attn attends to all tokens: leave it off")
        speculative = vllm_config.speculative_config
        self.drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
        layers = vllm_config.compilation_config.static_forward_context
        self.some_share = any(getattr(layers.get(x), "kv_sharing_target_layer_name", None) for x in layer_names)
        if device.type == "cuda":
            kinds = [layers[x].impl.kind for x in layer_names if x in layers]
            max_sequences = vllm_config.scheduler_config.max_num_seqs
            compile_steps(kinds, vllm_config.model_config.dtype, self.drafts, max_sequences, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> HelionMetadata:
        """Take what vLLM has; nothing is read on the host."""
        # A step of decodes alone launches no kernel for prompts.
        batch, decodes = common_attn_metadata, 1 + self.drafts
        return HelionMetadata(
            cu_seqlens=batch.query_start_loc,
            block_table=batch.block_table_tensor,
            seqlens=batch.seq_lens,
            max_seqlen_q=decodes if batch.max_query_len <= decodes else power_of_two(batch.max_query_len),
            max_seqlen_k=power_of_two(batch.max_seq_len),
            drafts=self.drafts,
            open_pages={} if self.some_share else None,
        )


class HelionImpl(AttentionImpl[HelionMetadata]):
    """A layer's attention."""

    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "int8_per_token_head",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Check what vLLM does not ask the backend, and keep the scores' options."""
        if alibi_slopes is not None:
            raise NotImplementedError("helion_attn has no ALiBi: choose another attention backend for this model")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type is {attn_type}; helion_attn attends in decoders alone")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.recipe = RECIPES[kv_cache_dtype]
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        #: Another layer appends the keys that this one attends to.
        self.shares_keys = kv_sharing_target_layer_name is not None
        self.window = None if sliding_window is None else (sliding_window - 1, 0)
        self.softcap = float(logits_soft_cap) if logits_soft_cap else None
        self.sinks = sinks
        self.max_sequences = get_current_vllm_config().scheduler_config.max_num_seqs
        # Fixed, no output depends on the batch.
        self.num_splits = 1 if vllm.envs.VLLM_BATCH_INVARIANT else None
        # vLLM clears an attribute of this name with the memory that it made to measure graphs.
        self._k_scale_cache: PagedKVCache | None = None

    def score_options(self) -> dict[str, Any]:
        """The options of `step` that say which scores there are."""
        return {"sm_scale": self.scale, "window": self.window, "softcap": self.softcap, "sinks": self.sinks}

    @property
    def kind(self) -> LayerKind:
        """What kernels are compiled for."""
        return LayerKind(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            recipe=self.recipe,
            window=self.window,
            softcap=self.softcap,
            has_sinks=self.sinks is not None,
            num_splits=self.num_splits,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the sinks as they were loaded."""
        if self.sinks is not None:
            self.sinks = self.sinks.detach().float()

    def cache_of(self, memory: torch.Tensor) -> PagedKVCache:
        """vLLM's memory of a layer, [pages, bytes of a page], as a cache."""
        cache = self._k_scale_cache
        if cache is None or cache.k8.data_ptr() != memory.data_ptr() or cache.k8.size(0) != memory.size(0):
            of_bytes = memory.view(torch.uint8)
            cache = PagedKVCache.from_buffer(of_bytes, self.num_kv_heads, self.head_size, recipe=self.recipe)
            self._k_scale_cache = cache
        return cache

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,  # [tokens, H, D]
        key: torch.Tensor,  # [tokens, H_kv, D]
        value: torch.Tensor,  # [tokens, H_kv, D]
        kv_cache: torch.Tensor,  # [pages, bytes of a page]
        attn_metadata: HelionMetadata | None,
        output: torch.Tensor,  # [tokens, H, D], written
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append the new keys, and attend to all."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("helion_attn gives no quantised output: leave fuse_attn_quant off")
        m = attn_metadata
        if m is None:  # vLLM measures memory: that of open pages too
            pages = open_page_count(query.size(0), self.max_sequences, PAGE, PAGE // 2)
            query.new_empty(pages * page_bytes(self.num_kv_heads, self.head_size), dtype=torch.uint8)
            return output.fill_(0)
        cache = self.cache_of(kv_cache)
        step(
            query,
            None if self.shares_keys else key,
            None if self.shares_keys else value,
            cache,
            m.cu_seqlens,
            m.block_table,
            m.seqlens,
            drafts=m.drafts,
            open_pages=m.open_pages_of(cache, query.size(0), not self.shares_keys),
            out=output,
            max_seqlen_q=m.max_seqlen_q,
            max_seqlen_k=m.max_seqlen_k,
            num_splits=self.num_splits,
            **self.score_options(),
        )
        return output
