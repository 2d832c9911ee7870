"""Checks of the arguments of `kv_cache`: a cache, its page tables, and what is appended or attends to it."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from helion_attn.configs import MAX_PAGE_D, page_packing
from helion_attn.debug_state import debugging
from helion_attn.options import ScoreOptions
from helion_attn.problem import open_page_count
from helion_attn.types import OpenPages, PagedKVCache, Rope
from helion_attn.validate.dense import (
    IN_DTYPES,
    MAX_COUNT,
    MIN_D,
    check_count,
    check_device,
    check_flag,
    check_inputs,
    check_no_grad,
    check_options,
    check_rope_tables,
    check_rotatable,
    check_table,
    check_tensors,
    described,
)
from helion_attn.validate.values import check_cache_values, check_step_values, note_append
from helion_attn.validate.varlen import MAX_TOKENS

#: Fields of a cache that it may have none of: constants of its heads and channels.
CONSTANTS = ("k_mean", "channel_factors")

#: What messages call the fields of a cache and its block table.
CACHE_NAMES = {name: f"cache.{name}" for name in ("k8", "v8", "k_descale", "v_descale", *CONSTANTS, "D", "D_v")}
CACHE_NAMES["block_table"] = "block_table"


def check_page_head_dim(name: str, D: int) -> None:
    """16..512."""
    if type(D) is not int:
        raise TypeError(f"{name} is a {type(D).__name__}; it must be an int")
    if not MIN_D <= D <= MAX_PAGE_D:
        raise ValueError(f"{name} is {D}; in a KV cache it must lie in {MIN_D}..{MAX_PAGE_D}")


def check_constant(name: str, x: torch.Tensor | None, H_kv: int, D: int) -> None:
    """None, or a number a head and channel."""
    if x is None:
        return
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} is {described(x)}; it must be None or a floating-point tensor")
    if tuple(x.shape) != (H_kv, D):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {(H_kv, D)}, H_kv and D")
    check_no_grad(name, x)


def check_cache_constants(
    q: torch.Tensor, k: torch.Tensor, rotary: int | None, interleaved: bool, positions: int, layout: str
) -> None:
    """The arguments of `cache_constants`."""
    check_inputs({"q": q, "k": k}, layout)
    heads = 1 if layout == "bhsd" else 2
    H, H_kv, D = q.size(heads), k.size(heads), k.size(3)
    if q.size(0) != k.size(0) or q.size(3) != D or H % H_kv:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; with layout={layout!r} they must have the same "
            f"batch and head dim, and q's heads must be a multiple of k's"
        )
    check_flag(interleaved, "interleaved")
    if rotary is not None and (type(rotary) is not int or not 0 <= rotary <= D or rotary % 2):
        raise ValueError(f"rotary is {rotary!r}; it must be None or an even int in 0..{D}, the head dim")
    check_count("positions", positions)


def check_kv_cache(cache: PagedKVCache, names: dict[str, str] = CACHE_NAMES) -> None:
    """The fields of a `PagedKVCache`."""
    if not isinstance(cache, PagedKVCache):
        raise TypeError(
            f"cache is {described(cache)}; it must be a helion_attn.PagedKVCache, made by paged_kv_cache and filled by "
            f"append_kvcache"
        )
    check_page_head_dim(names["D"], cache.D)
    check_page_head_dim(names["D_v"], cache.D_v)
    tile = page_packing(cache.D, cache.D_v)
    if not isinstance(cache.k8, torch.Tensor):
        raise TypeError(f"{names['k8']} is a {type(cache.k8).__name__}; it must be a torch.Tensor")
    if cache.k8.dim() != 4 or cache.k8.numel() == 0:
        raise ValueError(
            f"{names['k8']} has shape {tuple(cache.k8.shape)}; it must be [num_pages, H_kv, page_size, D_pad], as "
            f"helion_attn.paged_kv_cache makes it"
        )
    check_device(names["k8"], cache.k8)
    pages = cache.k8.shape[:2]
    given = {name: getattr(cache, name) for name in CONSTANTS if getattr(cache, name) is not None}
    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    expected = {
        "k8": ((*pages, tile.page_size, tile.D_pad), fp8, torch.int8),
        "v8": ((*pages, tile.D_v_pad, tile.page_size), fp8),
        "k_descale": ((*pages, tile.page_size), fp32),
        "v_descale": ((*pages, tile.page_size), fp32),
    }
    for name, x in given.items():
        # `attention_of_heads` has pages of one head, and the constants of all.
        per_head = pages[1] == 1 and isinstance(x, torch.Tensor) and x.dim() == 3
        expected[name] = ((x.size(0), 1, tile.D_pad) if per_head else (pages[1], tile.D_pad), fp32)
    for name, (shape, *dtypes) in expected.items():
        x = getattr(cache, name)
        if not isinstance(x, torch.Tensor):
            accepted = "None or a torch.Tensor" if name in CONSTANTS else "a torch.Tensor"
            raise TypeError(f"{names[name]} is a {type(x).__name__}; it must be {accepted}")
        # Pages and heads may lie anywhere; what is inside of them is contiguous.
        inside = (x.size(3), 1) if x.dim() == 4 else (1,)
        whole = x.is_contiguous() if name in CONSTANTS else x.stride()[2:] == inside
        if tuple(x.shape) != shape or x.dtype not in dtypes or not whole or x.device != cache.k8.device:
            raise ValueError(
                f"{names[name]} is {x.dtype} {tuple(x.shape)} on {x.device}; for D={cache.D}, D_v={cache.D_v} it must "
                f"be contiguous {' or '.join(map(str, dtypes))} {shape} on {cache.k8.device}, as "
                f"helion_attn.paged_kv_cache makes it"
            )
        if name not in CONSTANTS and any(stride * x.itemsize % 16 for stride in x.stride()[:2]):
            raise ValueError(
                f"{names[name]} has strides {x.stride()}; pages and heads must be multiples of 16 bytes apart"
            )
        check_no_grad(names[name], x)
        # What a tensor descriptor needs. A fake tensor has no address, and torch.compile cannot trace one.
        if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
            continue
        if past := x.data_ptr() % 16:
            raise ValueError(
                f"{names[name]} is at an address {past} bytes past a multiple of 16; it must be at a multiple, as "
                f"helion_attn.paged_kv_cache makes it"
            )
    if (step := cache.k_descale.stride(0) * 4) >= 2**31:
        raise ValueError(f"pages of the cache lie {step} bytes apart; they must lie less than 2**31 bytes apart")
    if cache.k_descale.stride() != cache.v_descale.stride():
        raise ValueError(
            f"{names['k_descale']} has strides {cache.k_descale.stride()} and {names['v_descale']} "
            f"{cache.v_descale.stride()}; they must be equal"
        )


def check_buffer(buffer: torch.Tensor, num_bytes: int, H_kv: int) -> None:
    """The memory of a cache: pages of bytes."""
    check_count("H_kv", H_kv)
    if not isinstance(buffer, torch.Tensor) or buffer.dtype not in (torch.uint8, torch.int8):
        raise TypeError(f"buffer is {described(buffer)}; it must be a tensor of uint8 or int8")
    if buffer.dim() != 2 or buffer.numel() == 0 or buffer.size(1) < num_bytes or buffer.stride(1) != 1:
        raise ValueError(
            f"buffer has shape {tuple(buffer.shape)} and strides {buffer.stride()}; it must be [num_pages, bytes] with "
            f"at least {num_bytes} bytes a page, page_bytes, which follow each other"
        )
    if buffer.stride(0) % 16 and buffer.size(0) > 1:
        raise ValueError(f"buffer has strides {buffer.stride()}; pages must be multiples of 16 bytes apart")
    if not isinstance(buffer, FakeTensor) and (past := buffer.data_ptr() % 16):
        raise ValueError(f"buffer is at an address {past} bytes past a multiple of 16; it must be at a multiple")
    check_no_grad("buffer", buffer)


def check_page_tables(
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    B: int,
    device: torch.device,
    table_name: str,
    lengths_name: str = "cache_seqlens",
) -> None:
    """All of a block table and of lengths but their values."""
    for name, x, ndim in ((table_name, block_table, 2), (lengths_name, cache_seqlens, 1)):
        check_table(name, x, device)
        if x.dim() != ndim or x.size(0) != B or x.numel() == 0:
            shape = f"({B}, pages of a sequence)" if ndim == 2 else f"({B},)"
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {shape}")
    # Positions are 32-bit in the kernels, and a page has up to 128.
    check_count(f"the width of {table_name}", block_table.size(1), MAX_COUNT - 1)


def check_heads_of_cache(name: str, cache: PagedKVCache, x: torch.Tensor, D: int) -> None:
    """The device and head dim of a tensor that goes with a cache."""
    if x.device != cache.k8.device:
        raise ValueError(f"{name} is on {x.device} and the cache on {cache.k8.device}; they must be on the same device")
    if x.size(3) != D:
        raise ValueError(f"{name} has head dim {x.size(3)}; the cache's is {D}")


def check_query_heads(q: torch.Tensor, cache: PagedKVCache, layout: str) -> int:
    """The heads of queries, which those of the cache divide."""
    H, H_kv = q.size(1 if layout == "bhsd" else 2), cache.k8.size(1)
    if H % H_kv:
        raise ValueError(f"q has {H} heads and the cache {H_kv}; q's must be a multiple of the cache's")
    return H


def check_kvcache_append(
    cache: PagedKVCache,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    layout: str,
    rope: Rope | None,
    drafts: int = 0,
    names: dict[str, str] = CACHE_NAMES,
) -> None:
    """The arguments of `append_kvcache`."""
    check_kv_cache(cache, names)
    check_inputs({"k": k, "v": v}, layout)
    check_heads_of_cache("k", cache, k, cache.D)
    check_heads_of_cache("v", cache, v, cache.D_v)
    if layout == "bshd":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    B, H_kv, L = k.shape[:3]
    if tuple(v.shape[:3]) != (B, H_kv, L):
        raise ValueError(f"v has batch, heads and length {tuple(v.shape[:3])} and k {(B, H_kv, L)}; they must be equal")
    if cache.k8.size(1) != H_kv:
        raise ValueError(f"k has {H_kv} heads; the cache has {cache.k8.size(1)}")
    check_page_tables(block_table, cache_seqlens, B, k.device, names["block_table"])
    pages, page_size = block_table.size(1), cache.page_size
    if type(drafts) is not int or not 0 <= drafts <= min(L, page_size // 2):
        raise ValueError(
            f"drafts is {drafts!r}; it must be an int in 0..{min(L, page_size // 2)}: at most the new keys of a "
            f"sequence, and half of a page"
        )
    if pages * page_size < L:
        raise ValueError(
            f"k has {L} keys; {pages} pages of {page_size}, the width of {names['block_table']}, cannot hold them"
        )
    if rope is not None:
        check_rope_of_append(rope, cache, k.device)
        check_rotatable("k", k)
    if debugging():
        check_cache_values(cache, block_table, cache_seqlens, names["block_table"], L)
        note_append(cache, block_table, cache_seqlens, L)


def check_rope_of_append(rope: Rope, cache: PagedKVCache, device: torch.device) -> None:
    """Tables of RoPE, without positions."""
    check_rope_tables(rope, cache.D, device)
    for name in ("q_positions", "k_positions"):
        if getattr(rope, name) is not None:
            raise ValueError(f"rope.{name} is given; it must be None: lengths of sequences say where keys are")


def check_open_pages(pages: OpenPages | None, cache: PagedKVCache, block_table: torch.Tensor) -> None:
    """None, or what `append_kvcache` returned for such a cache and as many sequences."""
    if pages is not None:
        sequences = block_table.size(0)
        width = (pages.keys + 2 * cache.page_size - 2) // cache.page_size
        made_by = f"append_kvcache returns it of {pages.keys} new keys of {sequences} sequences"
        check_shapes_of_open_pages(pages, cache, sequences * width, made_by)


def check_shapes_of_open_pages(pages: OpenPages, cache: PagedKVCache, count: int, made_by: str) -> None:
    """So many pages as those of the cache."""
    for name in ("k8", "v8", "k_descale", "v_descale"):
        x, of_cache = getattr(pages, name), getattr(cache, name)
        shape = (count, *of_cache.shape[1:])
        if x.shape != shape or x.dtype != of_cache.dtype or x.device != of_cache.device or not x.is_contiguous():
            raise ValueError(
                f"open_pages.{name} is {x.dtype} {tuple(x.shape)} on {x.device}; it must be contiguous "
                f"{of_cache.dtype} {shape} on {of_cache.device}, as {made_by}"
            )


def check_kvcache_attention(
    q: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    layout: str,
    scores: ScoreOptions,
    return_lse: bool,
    num_splits: int | None,
    out_dtype: torch.dtype | None,
    names: dict[str, str] = CACHE_NAMES,
) -> None:
    """The arguments of `attention_kvcache`."""
    check_kv_cache(cache, names)
    check_inputs({"q": q}, layout)
    check_heads_of_cache("q", cache, q, cache.D)
    H = check_query_heads(q, cache, layout)
    check_page_tables(block_table, cache_seqlens, q.size(0), q.device, names["block_table"])
    check_options(scores, return_lse, out_dtype, H, q.device, IN_DTYPES)
    if num_splits is not None:
        check_count("num_splits", num_splits)
    if debugging():
        check_cache_values(cache, block_table, cache_seqlens, names["block_table"])


def check_drafts(drafts: int, cache: PagedKVCache) -> None:
    """Up to half of a page."""
    if type(drafts) is not int or not 0 <= drafts <= cache.page_size // 2:
        raise ValueError(f"drafts is {drafts!r}; it must be an int in 0..{cache.page_size // 2}, half of a page")


def check_step(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache: PagedKVCache,
    cu_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    seqlens: torch.Tensor,
    drafts: int,
    open_pages: OpenPages | None,
    out: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scores: ScoreOptions,
    num_splits: int | None,
    return_lse: bool,
    rope: Rope | None,
) -> None:
    """The arguments of `step`."""
    check_kv_cache(cache)
    if (k is None) != (v is None):
        missing, other = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing} is None and {other} is not; new keys and values come together")
    new = {} if k is None or v is None else {"k": k, "v": v}
    check_tensors({"q": q, **new}, "[tokens, heads, head dim]")
    heads = {"q": (q.size(1), cache.D), "k": (cache.k8.size(1), cache.D), "v": (cache.k8.size(1), cache.D_v)}
    for name, x in {"q": q, **new}.items():
        H, D = heads[name]
        if tuple(x.shape) != (q.size(0), H, D) or x.device != cache.k8.device:
            raise ValueError(
                f"{name} is {tuple(x.shape)} on {x.device}; with this cache and {q.size(0)} tokens of q it must be "
                f"{(q.size(0), H, D)} on {cache.k8.device}"
            )
    if q.size(1) % cache.k8.size(1):
        raise ValueError(f"q has {q.size(1)} heads and the cache {cache.k8.size(1)}; q's must be a multiple of these")
    if q.size(0) > MAX_TOKENS:
        raise ValueError(f"q has {q.size(0)} tokens; it must have at most {MAX_TOKENS}")
    check_table("cu_seqlens", cu_seqlens, q.device)
    if cu_seqlens.dim() != 1 or cu_seqlens.size(0) < 2:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be [B + 1], of at least one sequence"
        )
    check_page_tables(block_table, seqlens, cu_seqlens.size(0) - 1, q.device, "block_table", "seqlens")
    check_drafts(drafts, cache)
    for name, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k), ("num_splits", num_splits)):
        if most is not None:
            check_count(name, most)
    check_options(scores, return_lse, None, q.size(1), q.device, IN_DTYPES)
    if out is not None:
        shape = (q.size(0), q.size(1), cache.D_v)
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"out is {described(out)}; it must be None or a torch.Tensor")
        good = tuple(out.shape) == shape and out.dtype in IN_DTYPES and out.device == q.device
        if not good or not out.is_contiguous():
            raise ValueError(
                f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()} on {out.device}; it must be bf16, "
                f"fp16 or fp32, contiguous, {shape} on {q.device}"
            )
        check_no_grad("out", out)
    if open_pages is not None:
        if not isinstance(open_pages, OpenPages):
            raise TypeError(f"open_pages is {described(open_pages)}; it must be None or made by step_open_pages")
        if open_pages.drafts != drafts:
            raise ValueError(f"open_pages.drafts is {open_pages.drafts}; it must be {drafts}, as drafts is")
        count = open_page_count(q.size(0), cu_seqlens.size(0) - 1, cache.page_size, drafts)
        check_shapes_of_open_pages(
            open_pages, cache, count, "step_open_pages makes it for as many tokens and sequences"
        )
    if rope is not None:
        check_rope_of_append(rope, cache, q.device)
        if k is None:
            raise ValueError("rope is given, and k is None; it rotates new keys alone")
        check_rotatable("k", k.unsqueeze(0))
    if debugging():
        check_step_values(cache, cu_seqlens, block_table, seqlens, q.size(0), max_seqlen_q, appends=k is not None)
