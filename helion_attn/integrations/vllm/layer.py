"""A step's metadata and a layer's attention: one `kv_cache.step`, whatever the batch holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import vllm.envs
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

from helion_attn.integrations.vllm import constants, names_0_33
from helion_attn.integrations.vllm.warm_up import LayerKind, Server, compile_steps
from helion_attn.kv_cache import page_bytes, step, step_open_pages
from helion_attn.problem import open_page_count
from helion_attn.types import OpenPages, PagedKVCache, RecipeName

#: Keys of a page: one of vLLM's blocks.
PAGE = 128

#: The preset that a cache is of, by vLLM's name of its dtype.
RECIPES: dict[str, RecipeName] = {"int8_per_token_head": "balanced", "fp8_per_token_head": "fast", **names_0_33.DTYPES}


@dataclasses.dataclass
class HelionMetadata(AttentionMetadata):
    """One step's batch."""

    cu_seqlens: torch.Tensor  # int32 [sequences + 1], where each sequence's new tokens begin
    block_table: torch.Tensor  # int32 [sequences, pages]
    seqlens: torch.Tensor  # int32 [sequences], with the new tokens; 0 of a row that fills up a CUDA graph's batch
    max_seqlen_q: int  # the most new tokens of a sequence
    max_seqlen_k: int  # the most keys of a sequence
    drafts: int  # the last tokens of a sequence that may be rejected
    shared: set[str]  # names of layers whose keys others attend to as well
    open_pages: dict[str, OpenPages]  # the open pages that they wrote, by name

    def open_pages_of(self, keys_of: str, cache: PagedKVCache, tokens: int, appends: bool) -> OpenPages | None:
        """Memory for the open pages of a layer whose keys others attend to; None of another.

        A layer that does not append takes what the one that did has written, or else pages as the cache has them.
        """
        if keys_of not in self.shared:
            return None
        if appends and keys_of not in self.open_pages:
            made = step_open_pages(cache, tokens, self.seqlens.size(0), drafts=self.drafts)
            self.open_pages[keys_of] = made
        return self.open_pages.get(keys_of)


def power_of_two(count: int) -> int:
    """The next power of two: a plan depends on it, and splits hardly do on what lies between."""
    return 1 << (count - 1).bit_length()


def drafts_of(vllm_config: Any) -> int:
    """The last tokens of a sequence that may be rejected."""
    speculative = vllm_config.speculative_config
    drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
    if drafts > PAGE // 2:
        raise NotImplementedError(f"num_speculative_tokens is {drafts}; helion_attn takes at most {PAGE // 2}")
    return drafts


def refuse(vllm_config: Any) -> None:
    """Raise for what vLLM does not ask the backend about when it chooses it."""
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        raise NotImplementedError("kv_sharing_fast_prefill is on; helion_attn attends to all tokens: leave it off")
    window = getattr(vllm_config.model_config, "rswa_window", None)
    if window is not None:
        raise NotImplementedError(
            f"rswa_window of the model is {window}; helion_attn has sliding windows alone, none that leave the prompt "
            "visible: choose another attention backend for this model"
        )
    drafts, transfer = drafts_of(vllm_config), vllm_config.kv_transfer_config
    # A connector saves a page when its last key is there, and with drafts it is closed in a later step.
    if drafts and transfer is not None:
        raise NotImplementedError(
            f"num_speculative_tokens is {drafts} and kv_connector is {transfer.kv_connector}; helion_attn takes drafts "
            "or a KV connector: leave out speculative_config or kv_transfer_config"
        )


class HelionMetadataBuilder(AttentionMetadataBuilder[HelionMetadata]):
    """Makes the metadata of a step, once for all layers."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse(vllm_config)
        self.drafts = drafts_of(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        mine = {name: layers[name].impl for name in layer_names if name in layers}
        # Constants of another model raise here, before a request has come.
        for name, impl in mine.items():
            impl.constants_of(impl.keys_of or name)
        #: Layers whose keys others attend to as well.
        targets = (getattr(x, "kv_sharing_target_layer_name", None) for x in layers.values())
        self.shared = {str(x) for x in targets if x is not None}
        self.seqlens = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)
        if device.type == "cuda" and (num_pages := vllm_config.cache_config.num_gpu_blocks):
            kinds = [*dict.fromkeys(impl.kind for impl in mine.values())]
            dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
            server = Server(kinds, dtype, self.drafts, self.seqlens.size(0), num_pages, str(device))
            compile_steps(server, vllm_config.parallel_config.world_size)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> HelionMetadata:
        """Take what vLLM has; nothing is read on the host."""
        # A step of decodes alone launches no kernel for prompts.
        batch, decodes = common_attn_metadata, 1 + self.drafts
        # Sequences whose tokens are not to be stored are padding, whatever their length and pages say: steps that other
        # ranks have, and drafts past the end. CUDA graphs read the same memory in every step.
        sequences = batch.seq_lens.size(0)
        if self.seqlens.size(0) < sequences:
            self.seqlens = batch.seq_lens.new_zeros(sequences)
        first = batch.query_start_loc[:-1].clamp(max=max(batch.slot_mapping.size(0) - 1, 0)).long()
        torch.mul(batch.seq_lens, batch.slot_mapping[first] >= 0, out=self.seqlens[:sequences])
        return HelionMetadata(
            cu_seqlens=batch.query_start_loc,
            block_table=batch.block_table_tensor,
            seqlens=self.seqlens[:sequences],
            max_seqlen_q=decodes if batch.max_query_len <= decodes else power_of_two(batch.max_query_len),
            max_seqlen_k=power_of_two(batch.max_seq_len),
            drafts=self.drafts,
            shared=self.shared,
            open_pages={},
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
        self.kv_cache_dtype, self.recipe = kv_cache_dtype, RECIPES[kv_cache_dtype]
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        #: Another layer appends the keys that this one attends to.
        self.shares_keys = kv_sharing_target_layer_name is not None
        self.window = None if sliding_window is None else (sliding_window - 1, 0)
        self.softcap = float(logits_soft_cap) if logits_soft_cap else None
        #: As the model has them, which may load them again, and in fp32.
        self.sinks, self.fp32_sinks = sinks, None if sinks is None else sinks.detach().float()
        config = get_current_vllm_config()
        self.max_sequences, self.drafts = config.scheduler_config.max_num_seqs, drafts_of(config)
        #: Where K's mean and factors of channels are; None if keys have none.
        self.constants: str | None = config.additional_config.get(constants.CONFIG_KEY)
        if self.constants is not None:
            constants.load(self.constants)
        #: Of the layer whose keys this one attends to; None for its own.
        self.keys_of = kv_sharing_target_layer_name
        # Fixed, no output depends on the batch.
        self.num_splits = 1 if vllm.envs.VLLM_BATCH_INVARIANT else None
        # vLLM clears an attribute of this name with the memory that it made to measure graphs.
        self._k_scale_cache: PagedKVCache | None = None

    def score_options(self) -> dict[str, Any]:
        """The options of `step` that say which scores there are."""
        return {"sm_scale": self.scale, "window": self.window, "softcap": self.softcap, "sinks": self.fp32_sinks}

    @property
    def kind(self) -> LayerKind:
        """The sizes and options that kernels are compiled for."""
        return LayerKind(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            recipe=self.recipe,
            window=self.window,
            softcap=self.softcap,
            has_sinks=self.sinks is not None,
            num_splits=self.num_splits,
            has_constants=self.constants is not None,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the sinks as they were loaded, where CUDA graphs find them."""
        if self.sinks is not None and self.fp32_sinks is not None:
            if self.fp32_sinks.device != self.sinks.device:
                self.fp32_sinks = self.sinks.detach().float()
            self.fp32_sinks.copy_(self.sinks.detach())

    def constants_of(self, keys_of: str) -> constants.Constants | tuple[None, None]:
        """K's mean and factors of channels of a layer, by vLLM's name of it; None if keys have none."""
        if self.constants is None:
            return None, None
        return constants.of_layer(
            self.constants,
            keys_of,
            get_tensor_model_parallel_rank(),
            get_tensor_model_parallel_world_size(),
            (self.num_kv_heads, self.head_size),
            drafting=self.drafts > 0,
        )

    def cache_of(self, keys_of: str, memory: torch.Tensor) -> PagedKVCache:
        """vLLM's memory of a layer, pages of bytes, as a cache."""
        cache = self._k_scale_cache
        if cache is None or cache.k8.data_ptr() != memory.data_ptr() or cache.k8.size(0) != memory.size(0):
            # [pages, bytes of a page]
            of_bytes = memory.flatten(1).view(torch.uint8)
            k_mean, factors = self.constants_of(keys_of)
            cache = PagedKVCache.from_buffer(
                of_bytes,
                self.num_kv_heads,
                self.head_size,
                recipe=self.recipe,
                k_mean=k_mean,
                channel_factors=factors,
            )
            self._k_scale_cache = cache
        return cache

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,  # [tokens, H, D]
        key: torch.Tensor,  # [tokens, H_kv, D]
        value: torch.Tensor,  # [tokens, H_kv, D]
        kv_cache: torch.Tensor,  # [pages, bytes of a page], or [pages, H_kv, 128, bytes of a key]
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
            pages = open_page_count(query.size(0), self.max_sequences, PAGE, self.drafts)
            query.new_empty(pages * page_bytes(self.num_kv_heads, self.head_size), dtype=torch.uint8)
            return output.fill_(0)
        keys_of = layer.layer_name if self.keys_of is None else self.keys_of
        cache = self.cache_of(keys_of, kv_cache)
        step(
            query,
            None if self.shares_keys else key,
            None if self.shares_keys else value,
            cache,
            m.cu_seqlens,
            m.block_table,
            m.seqlens,
            drafts=m.drafts,
            open_pages=m.open_pages_of(keys_of, cache, query.size(0), not self.shares_keys),
            out=output,
            max_seqlen_q=m.max_seqlen_q,
            max_seqlen_k=m.max_seqlen_k,
            num_splits=self.num_splits,
            **self.score_options(),
        )
        return output
