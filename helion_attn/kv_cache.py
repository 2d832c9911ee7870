"""A paged KV cache in 8 bits, what appends to it, and attention over it: decoding, and prompts in chunks.

A key may be less a constant of the cache. While its page fills, it has descales of its own, of K and of V, so that what
is there is not quantised anew; a page that is full is closed, with one of each for all of its keys. Descales of V, and
of e4m3 keys, are powers of two, so closing is an exact shift but for subnormals; int8 keys are rounded once more. The
price of descales is 8 bytes a key and KV head: 3% of the bytes at D 128.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, overload

import torch
from typing_extensions import Unpack

from helion_attn import ops, plans
from helion_attn.api import interleaved, rope_tensors, split_tensors
from helion_attn.configs import page_packing
from helion_attn.debug_state import debugging
from helion_attn.names import options_of, reject_unknown_kwargs
from helion_attn.numerics import MAX_CHANNEL_FACTOR_LOG2, SAMPLED_KEYS
from helion_attn.options import CacheOptions, ScoreOptions, StepOptions
from helion_attn.preprocess.lib.equalise import channel_factors_of
from helion_attn.problem import AppendArgs, DecodeArgs, OpenPagesArgs, StepArgs, open_page_count, rope_arguments
from helion_attn.types import CACHE_RECIPE, Layout, OpenPages, PagedKVCache, Recipe, RecipeName, Rope, as_cache_recipe
from helion_attn.validate.dense import check_count, described
from helion_attn.validate.kv_cache import (
    CONSTANTS,
    check_buffer,
    check_cache_constants,
    check_constant,
    check_drafts,
    check_kv_cache,
    check_kvcache_append,
    check_kvcache_attention,
    check_open_pages,
    check_page_head_dim,
    check_step,
)
from helion_attn.validate.pages import check_pages_of_heads
from helion_attn.validate.values import check_appended

#: What has no name in `helion_attn` itself.
__all__ = ["cache_from_buffer", "page_bytes", "step", "step_open_pages"]


def steady_mean(k: torch.Tensor, positions: int) -> torch.Tensor:
    """The means of keys [B, H_kv, N, D] in channels where they hardly move, fp32 [H_kv, D]; 0 in others."""
    N, D = k.shape[2:]
    half = max(N // 2, 1)
    # fp32 [H_kv, D]
    mean, first, last = (x.mean((0, 2), dtype=torch.float32) for x in (k, k[:, :, :half], k[:, :, N - half :]))
    moved = (last - first).abs() * max(positions / max(N - half, 1), 1.0)
    alone = moved
    if D % 2 == 0:  # RoPE pairs neighbours
        moved = moved.maximum(alone.unflatten(1, (-1, 2)).flip(2).flatten(1))
    for distance in (D // part for part in (2, 4, 8) if D % part == 0):  # or halves of all channels, or of the first
        moved = moved.maximum(alone.roll(distance, 1)).maximum(alone.roll(-distance, 1))
    return torch.where((moved <= mean.abs()) & moved.isfinite(), mean, 0.0)


def sampled_rows(x: torch.Tensor) -> torch.Tensor:
    """At most `SAMPLED_KEYS` rows of each sequence of [B, H, S, D], evenly spaced, in fp32."""
    count = min(x.size(2), SAMPLED_KEYS)
    return x[:, :, :: x.size(2) // count][:, :, :count].float()


def turning_sizes(x: torch.Tensor, rotary: int, interleaved: bool) -> torch.Tensor:
    """Return fourth powers of sizes of channels of [B, H, S, D], as `preprocess.lib.equalise` has them: [H, D].

    Those of a pair that RoPE turns have one, at any position.
    """
    fourth = x.square().square()
    size = torch.minimum(fourth[:, :, ::2].sum(2), fourth[:, :, 1::2].sum(2)).sum(0)
    pairs = size[:, :rotary].unflatten(1, (-1, 2) if interleaved else (2, -1))
    shared = pairs.mean(2 if interleaved else 1, keepdim=True).expand_as(pairs)
    return torch.cat((shared.flatten(1), size[:, rotary:]), 1)


@reject_unknown_kwargs
def cache_constants(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    rotary: int | None = None,
    interleaved: bool = False,
    positions: int = 16384,
    layout: Layout = "bhsd",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `k_mean` and `channel_factors` for `paged_kv_cache`, from a prompt's queries and keys.

    The mean: RoPE turns a bias with its position. At other positions, a mean of some would add to the keys. So a
    channel keeps its mean only if that would move by no more than its size over `positions`. The channels that RoPE may
    pair with it, D / 2, D / 4 or D / 8 away or its neighbour, must move by no more either. Other channels have 0. The
    mean of half of the prompt against that of the other half says how fast it moves. Noise looks like movement, by
    4 * positions / N**1.5 of a channel's spread: with 16,384 positions a bias of 6 spreads is seen in 512 keys. Longer
    sequences, and positions that do not grow by one a key, can lose accuracy.

    The factors: powers of two that give channels of Q and K like sizes, as `Recipe.equalise` has them, of at most 256
    queries and keys a sequence, evenly spaced; K's without the mean. RoPE mixes the two channels of a pair, so they
    share a factor. Of rows whose sizes are unknown, such as a sequence's only one, factors are 1.

    Args:
        q: [B, H, M, D], bf16, fp16 or fp32, any strides; with layout="bshd", H and M swapped; fp32 tensors as
            `quantize` has them. Rotated if the cache is to hold rotated keys.
        k: [B, H_kv, N, D], same dtype; H is a multiple of H_kv. Keys of a sequence are in order, without padding.
        rotary: channels that RoPE turns, the first of them; D by default, and 0 without RoPE.
        interleaved: RoPE pairs neighbours, as `Rope` has it.
        positions: to which sequences of the cache will grow.
        layout: "bhsd" or "bshd".

    Returns:
        fp32 [H_kv, D] twice. The mean is 0, and the factor 1, in channels that are not finite.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
        RuntimeError: q or k requires grad, in grad mode, or has a tangent.

    Example:
        k = torch.randn(1, 2, 1000, 64) + 9 * torch.randn(2, 1, 64)
        q = torch.randn(1, 8, 1000, 64)
        k_mean, channel_factors = ha.cache_constants(q, k)
        cache = ha.paged_kv_cache(num_pages=8, H_kv=2, D=64, k_mean=k_mean, channel_factors=channel_factors)
    """
    check_cache_constants(q, k, rotary, interleaved, positions, layout)
    if layout == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    H_kv, D = k.size(1), k.size(3)
    rotary = D - D % 2 if rotary is None else rotary
    mean = steady_mean(k, positions)
    k_size = turning_sizes(sampled_rows(k) - mean.unsqueeze(1), rotary, interleaved)
    # Of the group's heads together.
    q_size = turning_sizes(sampled_rows(q), rotary, interleaved).unflatten(0, (H_kv, -1)).sum(1)
    rows = q.size(0) * min(min(q.size(2), SAMPLED_KEYS) * q.size(1) // H_kv, min(k.size(2), SAMPLED_KEYS))
    return mean, channel_factors_of(k_size.mT, q_size.mT, torch.tensor(float(rows))).mT.contiguous()


def powers_of_two(x: torch.Tensor) -> torch.Tensor:
    """The power of two nearest to each number by its logarithm, fp32; 1 of what is not positive and finite."""
    known = (x > 0) & x.isfinite()
    exponent = torch.where(known, x, 1.0).float().log2().round()
    exponent = exponent.clamp(-MAX_CHANNEL_FACTOR_LOG2, MAX_CHANNEL_FACTOR_LOG2)
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


@reject_unknown_kwargs
def paged_kv_cache(
    num_pages: int,
    H_kv: int,
    D: int,
    *,
    D_v: int | None = None,
    device: torch.device | str | None = None,
    recipe: Recipe | RecipeName = CACHE_RECIPE,
    k_mean: torch.Tensor | None = None,
    channel_factors: torch.Tensor | None = None,
) -> PagedKVCache:
    """Memory for `num_pages` pages of keys and values, not initialised.

    A model's keys often have large biases, and channels larger than others. Both cost the rest its resolution:
    `k_mean` takes biases off, and `channel_factors` give Q and K channels of like sizes. `cache_constants` makes both
    from any long prompt. Scores, outputs and lse stay those of the whole queries and keys. Both are fixed before the
    first append, and the same for all sequences: they can share pages, and no other sequence, batch or chunk changes a
    bit of theirs.

    Args:
        num_pages: of the pool that all sequences share.
        H_kv: KV heads.
        D: head dim of Q and K; 16..512.
        D_v: head dim of V; 16..512; D by default.
        device: PyTorch's default device by default.
        recipe: BALANCED, keys in int8; or FAST, in e4m3: less exact, with faster prompts. Values are e4m3.
        k_mean: [H_kv, D], any floating-point dtype and device, subtracted from all keys after their RoPE.
        channel_factors: [H_kv, D], likewise: what channels of Q are multiplied by, and those of K, less its mean,
            divided by. Each is rounded to a power of two in 2**-32..2**32, which is exact for the channels. One that is
            not positive and finite counts as 1.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
        RuntimeError: `k_mean` or `channel_factors` requires grad, in grad mode, or has a tangent.

    Example:
        cache = ha.paged_kv_cache(num_pages=8, H_kv=2, D=64)
        block_table = torch.tensor([[5, 0], [2, 7]], dtype=torch.int32)  # two sequences of up to two pages
    """
    check_count("num_pages", num_pages)
    D_v = D if D_v is None else D_v
    key_dtype, mean, factors = cache_fields(H_kv, D, D_v, device, recipe, k_mean, channel_factors)
    tile = page_packing(D, D_v)

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_pages, H_kv, *shape, dtype=dtype, device=device)

    return PagedKVCache(
        empty(tile.page_size, tile.D_pad, dtype=key_dtype),
        empty(tile.D_v_pad, tile.page_size, dtype=torch.float8_e4m3fn),
        empty(tile.page_size, dtype=torch.float32),
        empty(tile.page_size, dtype=torch.float32),
        mean,
        factors,
        D,
        D_v,
    )


def cache_fields(
    H_kv: int,
    D: int,
    D_v: int,
    device: torch.device | str | None,
    recipe: Recipe | RecipeName,
    k_mean: torch.Tensor | None,
    channel_factors: torch.Tensor | None,
) -> tuple[torch.dtype, torch.Tensor | None, torch.Tensor | None]:
    """The dtype of keys, and the constants of a cache, padded; the arguments are checked."""
    int8_keys = as_cache_recipe(recipe).qk_dtype == torch.int8
    check_count("H_kv", H_kv)
    check_page_head_dim("D", D)
    check_page_head_dim("D_v", D_v)
    check_constant("k_mean", k_mean, H_kv, D)
    check_constant("channel_factors", channel_factors, H_kv, D)
    mean = factors = None
    padded = H_kv, page_packing(D, D_v).D_pad
    if k_mean is not None:
        mean = torch.zeros(padded, dtype=torch.float32, device=device)
        mean[:, :D] = k_mean
    if channel_factors is not None:
        factors = torch.ones(padded, dtype=torch.float32, device=device)
        factors[:, :D] = powers_of_two(channel_factors)
    return torch.int8 if int8_keys else torch.float8_e4m3fn, mean, factors


def page_bytes(H_kv: int, D: int, D_v: int | None = None) -> int:
    """Return the bytes of a page of a cache: of all its heads, K, V and their descales.

    page_size * H_kv * (D + D_v + 8), with D and D_v padded, as they are stored.

    Args:
        H_kv: KV heads.
        D: head dim of Q and K; 16..512.
        D_v: head dim of V; D by default.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.

    Example:
        assert ha.kv_cache.page_bytes(H_kv=8, D=128) == 128 * 8 * (128 + 128 + 8)
    """
    D_v = D if D_v is None else D_v
    check_count("H_kv", H_kv)
    check_page_head_dim("D", D)
    check_page_head_dim("D_v", D_v)
    tile = page_packing(D, D_v)
    return tile.page_size * H_kv * (tile.D_pad + tile.D_v_pad + 8)


@reject_unknown_kwargs
def cache_from_buffer(
    buffer: torch.Tensor,
    H_kv: int,
    D: int,
    *,
    D_v: int | None = None,
    recipe: Recipe | RecipeName = CACHE_RECIPE,
    k_mean: torch.Tensor | None = None,
    channel_factors: torch.Tensor | None = None,
) -> PagedKVCache:
    """Return a cache that lies in a caller's memory; `PagedKVCache.from_buffer` is the same.

    A page's bytes are together: of each head K, V, the descales of K and those of V. Nothing is written.

    Args:
        buffer: uint8 or int8 [num_pages, at least `page_bytes` bytes], pages any multiple of 16 bytes apart, so that
            layers can share it; on the device of the cache.
        H_kv: and D, D_v, recipe, k_mean, channel_factors, as `paged_kv_cache` has them.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.

    Example:
        buffer = torch.zeros(8, ha.kv_cache.page_bytes(H_kv=2, D=64), dtype=torch.uint8)
        cache = ha.kv_cache.cache_from_buffer(buffer, H_kv=2, D=64)
    """
    D_v = D if D_v is None else D_v
    device = buffer.device if isinstance(buffer, torch.Tensor) else None
    key_dtype, mean, factors = cache_fields(H_kv, D, D_v, device, recipe, k_mean, channel_factors)
    check_buffer(buffer, page_bytes(H_kv, D, D_v), H_kv)
    tile = page_packing(D, D_v)
    # [num_pages, H_kv, bytes of a head]
    of_head = page_bytes(1, D, D_v)
    heads = buffer.narrow(1, 0, H_kv * of_head).unflatten(1, (H_kv, of_head))
    sizes = [tile.page_size * tile.D_pad, tile.D_v_pad * tile.page_size, 4 * tile.page_size, 4 * tile.page_size]
    k8, v8, k_descale, v_descale = heads.split(sizes, 2)
    return PagedKVCache(
        k8.view(key_dtype).unflatten(2, (tile.page_size, tile.D_pad)),
        v8.view(torch.float8_e4m3fn).unflatten(2, (tile.D_v_pad, tile.page_size)),
        k_descale.view(torch.float32),
        v_descale.view(torch.float32),
        mean,
        factors,
        D,
        D_v,
    )


PagedKVCache.from_buffer = staticmethod(cache_from_buffer)


def cache_tensors(cache: PagedKVCache) -> tuple[Any, ...]:
    """The tensors of a cache; what is none is checked later."""
    if not isinstance(cache, PagedKVCache):
        return (cache,)
    return cache.k8, cache.v8, cache.k_descale, cache.v_descale, cache.k_mean, cache.channel_factors


def cache_sizes(cache: PagedKVCache) -> tuple[int, ...]:
    """Head dims of a cache, its fields that are no tensors."""
    return (cache.D, cache.D_v) if isinstance(cache, PagedKVCache) else ()


@reject_unknown_kwargs
def append_kvcache(
    cache: PagedKVCache,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    layout: Layout = "bhsd",
    rope: Rope | None = None,
    drafts: int = 0,
) -> OpenPages:
    """Quantise new keys and values and store them behind those of each sequence; `cache_seqlens` is not advanced.

    Key i of sequence b goes to position t = cache_seqlens[b] + i, that is slot t % page_size of page
    block_table[b, t // page_size]. The two tables stay on the device and are not read on the host. A key whose position
    or page they cannot have (a negative length, a position past the table, a page outside of the pool) is not stored;
    `attention_kvcache` gives NaN for such a sequence.

    A sequence's keys must be appended in order: the append that fills slot 0 of a page also clears the slots past its
    own last key. A page that is full is closed: rewritten, so that one descale serves all of its keys and one all of
    its values. Sequences may share closed pages. Where a sequence goes on from inside of one, it opens again, and must
    be the sequence's own; the keys that stay keep what closing has made of them.

    Args:
        cache: written.
        k: [B, H_kv, L, D], bf16, fp16 or fp32, any strides; with layout="bshd", H_kv and L swapped; v likewise. fp32
            tensors as `quantize` has them. A key that becomes int8 is NaN if it has a magnitude above 127 * 2**93.
        v: [B, H_kv, L, D_v]. A key of it with a NaN, an infinity, or a magnitude above 448 * 2**26, becomes NaN.
        block_table: int32 [B, pages of a sequence], contiguous. Sequences do not share a page that is appended to.
        cache_seqlens: int32 [B], keys that each sequence has already.
        layout: "bhsd" or "bshd".
        rope: rotate K by position first. Its tables must reach all positions: one outside makes NaN of its key. It must
            not have positions of its own; and k must have a last-dimension stride of 1.
        drafts: how many of each sequence's new keys, the last ones, may still be rejected, up to half of a page. Pages
            that hold some of them stay open until the next append.

    Returns:
        The pages that it touched in the form that they do not have in the cache, for `attention_kvcache` of the
        queries of the new keys.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
        NotImplementedError: neither a CUDA device of compute capability 9.0 nor the CPU.
        RuntimeError: an input requires grad, in grad mode, or has a tangent.

    Example:
        cache = ha.paged_kv_cache(num_pages=2, H_kv=2, D=64)
        block_table = torch.tensor([[1], [0]], dtype=torch.int32)
        cache_seqlens = torch.zeros(2, dtype=torch.int32)
        k, v = torch.randn(2, 2, 2, 10, 64, dtype=torch.bfloat16)  # ten tokens for each of two sequences
        ha.append_kvcache(cache, k, v, block_table, cache_seqlens)
        cache_seqlens += 10
    """

    def problem() -> tuple[Any, AppendArgs]:
        check_kvcache_append(cache, k, v, block_table, cache_seqlens, layout, rope, drafts)
        swapped = layout == "bshd"
        return ops.append_kv, AppendArgs(
            k=k.transpose(1, 2) if swapped else k,
            v=v.transpose(1, 2) if swapped else v,
            cache=cache,
            block_table=block_table,
            cache_seqlens=cache_seqlens,
            drafts=drafts,
            rope=rope_arguments(rope),
        )

    in_cache = cache_tensors(cache)
    tensors = k, v, *in_cache, block_table, cache_seqlens, *rope_tensors(rope)
    options = layout, *cache_sizes(cache), interleaved(rope), drafts
    k8, v8, k_descale, v_descale = plans.run("append_kvcache", tensors, options, problem, in_cache[:4])
    return OpenPages(k8, v8, k_descale, v_descale, k.size(2 if layout == "bhsd" else 1), drafts)


def open_page_fields(pages: OpenPages | None) -> tuple[Any, ...]:
    """The fields of `OpenPagesArgs`."""
    if pages is None:
        return None, None, None, None, 0, 0
    if not isinstance(pages, OpenPages):
        raise TypeError(f"open_pages is {described(pages)}; it must be None or what append_kvcache returned")
    return pages.k8, pages.v8, pages.k_descale, pages.v_descale, pages.keys, pages.drafts


def decode_problem(
    q: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    open_pages: OpenPages | None = None,
    causal: bool = True,
    sm_scale: float | None = None,
    layout: Layout = "bhsd",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> DecodeArgs:
    """The arguments of `attention_kvcache`, checked, as its operation takes them."""
    scores = ScoreOptions(causal=causal, sm_scale=sm_scale, window=window, softcap=softcap, sinks=sinks)
    check_kvcache_attention(q, cache, block_table, cache_seqlens, layout, scores, return_lse, num_splits, out_dtype)
    check_open_pages(open_pages, cache, block_table)
    if debugging():  # not in a check that flash-attn's function makes before it appends
        check_appended(q, cache, block_table, cache_seqlens, layout)
    scores = scores.resolved(cache.D)
    return DecodeArgs(
        q=q.transpose(1, 2) if layout == "bshd" else q,
        cache=cache,
        open_pages=OpenPagesArgs(*open_page_fields(open_pages)),
        block_table=block_table,
        cache_seqlens=cache_seqlens,
        splits=num_splits,
        scores=scores,
        needs_lse_shift=scores.needs_lse_shift(return_lse),
        bshd=layout == "bshd",
        out_dtype=q.dtype if out_dtype is None else out_dtype,
    )


def attention_of_heads(
    q: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    return_lse: bool,
    **options: Unpack[CacheOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention_kvcache` with pages of every KV head: each is a sequence of its own, and a page's heads are pages."""
    layout = options.pop("layout", "bhsd")
    if options.pop("open_pages", None) is not None:
        raise NotImplementedError("open_pages is given; with a block table of every KV head it must be None")
    check_pages_of_heads(q, cache, block_table, cache_seqlens, layout, options.get("window"), options.get("sinks"))
    swapped = layout == "bshd"
    q = q.transpose(1, 2) if swapped else q
    (B, H, M, D), (num_pages, H_kv) = q.shape, cache.k8.shape[:2]
    if cache.k8.stride(0) != H_kv * cache.k8.stride(1):
        raise NotImplementedError(
            f"pages of the cache lie {cache.k8.stride(0)} bytes apart; with a block table of every KV head they must "
            f"follow each other, {H_kv * cache.k8.stride(1)} bytes apart: give from_buffer rows of page_bytes"
        )
    per_head: dict[str, Any] = {name: x.view(-1, 1, *x.shape[2:]) for name, x in cache._tensors().items()}
    # Sequence b * H_kv + h has the constants of head h.
    per_head |= {name: x.unsqueeze(1) for name, x in cache._tensors().items() if name in CONSTANTS}
    # A page outside of the pool stays outside.
    first = block_table.clamp(-1, num_pages) * H_kv
    pages = first + torch.arange(H_kv, dtype=torch.int32, device=q.device).unsqueeze(1)
    found = attention_kvcache(
        q.reshape(B * H_kv, H // H_kv, M, D),
        dataclasses.replace(cache, **per_head),
        pages.flatten(0, 1),
        cache_seqlens.flatten(),
        return_lse=return_lse,
        **options,
    )
    out, lse = found if isinstance(found, tuple) else (found, None)
    out = out.view(B, H, M, -1)
    out = out.transpose(1, 2) if swapped else out
    return out if lse is None else (out, lse.view(B, H, M))


@overload
def attention_kvcache(
    q: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[CacheOptions],
) -> torch.Tensor: ...
@overload
def attention_kvcache(
    q: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[CacheOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention_kvcache(
    q: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    return_lse: bool,
    **options: Unpack[CacheOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@reject_unknown_kwargs
@options_of(decode_problem)
def attention_kvcache(
    q: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[CacheOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * sm_scale) v over the first `cache_seqlens[b]` keys of each sequence, in 8 bits.

    The heads that share a KV head, times M, are the rows of tiles. Below 64 rows, `fp8_attn_decode` has tiles of up to
    32. From 64 on, `fp8_attn_prefill` has tiles of 64 or 128: for a prompt in chunks, or drafts of several tokens. A
    tile's pages are split over programs where tiles are few. Q is quantised on the way, one descale a row. A NaN or
    infinity makes NaN of the rows that see its key; in V, and in K of int8 where its page is closed, also of others
    whose tile reads its page. With N for cache_seqlens[b], masks and results are those of `attention`.

    Args:
        q: [B, H, M, D], bf16, fp16 or fp32, any strides; with layout="bshd", H and M swapped. H is a multiple of the
            cache's H_kv. fp32 tensors as `quantize` has them.
        cache: from `paged_kv_cache`, filled by `append_kvcache`.
        block_table: int32 [B, pages of a sequence], contiguous: the pages of each sequence. Entries past a sequence's
            end are not read. Or [B, H_kv, pages], for each KV head the pages that its queries see, such as `pages.top`
            chooses; then `cache_seqlens` is [B, H_kv], `causal` counts keys as
            they are listed, and `window` and `sinks` are not supported.
        open_pages: what `append_kvcache` returned of the keys that these queries came with. A causal query at position
            i then sees the page of its own key open, as it was before it was full, whatever came with it, and all
            earlier pages closed. Without, queries see pages as the cache has them: full ones closed.
        cache_seqlens: int32 [B], the keys of each sequence, those of the queries included. Neither table is read on the
            host. A length that is negative or exceeds the block table makes NaN of the sequence's output, and a page
            outside of the pool of the rows that see it, at least.
        causal: row i sees keys j <= i + N - M (bottom-right aligned). A row that sees none gives 0, and lse -inf.
        sm_scale: multiplies q k^T; 1 / sqrt(D) by default; in 0..2**64.
        layout: "bhsd" or "bshd", of q and the output.
        window: (left, right), as `attention` has it. Pages outside of it are not read.
        softcap: as `attention` has it.
        sinks: [H], as `attention` has it.
        num_splits: splits into which the pages that a query sees are split; chosen by default: a prompt's from shapes
            and GPU, those of few queries on the GPU, from the lengths of all sequences of the batch. The results of two
            choices differ in their rounding. If it is given, and no more than the width of the block table, a query's
            out and lse have bits that depend on the query, the keys that it sees as the cache stores them, and this
            number alone: in a chunk of any length, in any batch, on any pages; with `open_pages`, on the keys alone,
            however they were appended and with whatever drafts, unless a sequence went on from inside of a closed
            page. A NaN or infinity is an exception, as above.
        return_lse: also return the log-sum-exp of the scores.
        out_dtype: bf16, fp16 or fp32; q's by default.

    Returns:
        out, shaped as q with D_v for D, and fp32 lse [B, H, M], natural log, if asked for.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
        NotImplementedError: neither a CUDA device of compute capability 9.0 nor the CPU.
        RuntimeError: q requires grad, in grad mode, or has a tangent.

    Example:
        cache = ha.paged_kv_cache(num_pages=2, H_kv=2, D=64)
        block_table = torch.tensor([[1], [0]], dtype=torch.int32)
        cache_seqlens = torch.tensor([0, 0], dtype=torch.int32)
        k, v = torch.randn(2, 2, 2, 10, 64, dtype=torch.bfloat16)
        ha.append_kvcache(cache, k, v, block_table, cache_seqlens)
        q = torch.randn(2, 4, 1, 64, dtype=torch.bfloat16)  # each sequence's newest token
        out = ha.attention_kvcache(q, cache, block_table, cache_seqlens + 10)
    """

    def problem() -> tuple[Any, DecodeArgs]:
        return ops.decode, decode_problem(q, cache, block_table, cache_seqlens, return_lse=return_lse, **options)

    if isinstance(block_table, torch.Tensor) and block_table.dim() == 3:
        return attention_of_heads(q, cache, block_table, cache_seqlens, return_lse, **options)
    more, of_sinks = split_tensors(sinks=options.get("sinks"))
    rest = {name: x for name, x in options.items() if name not in ("sinks", "open_pages")}
    opened = open_page_fields(options.get("open_pages"))
    tensors = q, *cache_tensors(cache), *opened[:4], block_table, cache_seqlens, *more
    given = *cache_sizes(cache), *opened[4:], return_lse, *rest, *rest.values(), *of_sinks
    out, lse = plans.run("attention_kvcache", tensors, given, problem)
    return (out, lse) if return_lse else out


def step_open_pages(cache: PagedKVCache, tokens: int, sequences: int, *, drafts: int = 0) -> OpenPages:
    """Memory for the open pages of a `step` of so many tokens and sequences; not initialised.

    Layers whose keys are others' read there what the layer that appended them wrote: `step(open_pages=)`.

    Args:
        cache: of the layer that appends.
        tokens: rows of `step`'s q.
        sequences: rows of its block table.
        drafts: as `step` has it.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.

    Example:
        cache = ha.paged_kv_cache(num_pages=2, H_kv=2, D=64)
        open_pages = ha.kv_cache.step_open_pages(cache, tokens=8, sequences=2)
    """
    check_kv_cache(cache)
    check_count("tokens", tokens)
    check_count("sequences", sequences)
    check_drafts(drafts, cache)
    count = open_page_count(tokens, sequences, cache.page_size, drafts)
    k8, v8, k_descale, v_descale = (
        x.new_empty((count, *x.shape[1:])) for x in (cache.k8, cache.v8, cache.k_descale, cache.v_descale)
    )
    return OpenPages(k8, v8, k_descale, v_descale, tokens, drafts)


def step_problem(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache: PagedKVCache,
    cu_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    drafts: int = 0,
    open_pages: OpenPages | None = None,
    out: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = True,
    sm_scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    rope: Rope | None = None,
) -> StepArgs:
    """The arguments of `step`, checked, as its operation takes them."""
    scores = ScoreOptions(causal=causal, sm_scale=sm_scale, window=window, softcap=softcap, sinks=sinks)
    check_step(
        q, k, v, cache, cu_seqlens, block_table, seqlens, drafts, open_pages, out, max_seqlen_q, max_seqlen_k, scores,
        num_splits, return_lse, rope,
    )  # fmt: skip
    resolved = scores.resolved(cache.D)
    opened = OpenPagesArgs(*open_page_fields(open_pages))._replace(keys=0, drafts=drafts)
    return StepArgs(
        q=q,
        k=k,
        v=v,
        cache=cache,
        open_pages=opened,
        cu_seqlens=cu_seqlens,
        block_table=block_table,
        seqlens=seqlens,
        out=q.new_empty((q.size(0), q.size(1), cache.D_v)) if out is None else out,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        splits=num_splits,
        scores=resolved,
        needs_lse_shift=resolved.needs_lse_shift(return_lse),
        rope=rope_arguments(rope),
    )


@overload
def step(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache: PagedKVCache,
    cu_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[StepOptions],
) -> torch.Tensor: ...
@overload
def step(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache: PagedKVCache,
    cu_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[StepOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@reject_unknown_kwargs
@options_of(step_problem)
def step(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache: PagedKVCache,
    cu_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[StepOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Append new keys and values to a paged cache, and attend to it: a step of an engine, in one call.

    Tokens of all sequences follow each other, as many of each as there are: prompts, chunks of them and decodes. A
    query sees its own key and the earlier ones of its sequence, as the cache stores them: the page of its own key open,
    and all earlier ones closed, as `attention_kvcache` has it with `open_pages`.

    Nothing is read on the host. Lengths and pages are values of tensors, so a CUDA graph serves any batch of as many
    tokens and rows. `fp8_attn_decode` takes sequences of as few queries as fill the tiles of one new token and
    its drafts, `fp8_attn_prefill` those of more.

    Args:
        q: [tokens, H, D], bf16, fp16 or fp32, any strides. H is a multiple of the cache's H_kv.
        k: [tokens, H_kv, D], same dtype, any strides; or None, as v: then nothing is appended.
        v: [tokens, H_kv, D_v].
        cache: from `paged_kv_cache`; written if k is given.
        cu_seqlens: int32 [B + 1], contiguous: sequence b has tokens `cu_seqlens[b]` up to `cu_seqlens[b + 1]`, at least
            0 and no more than there are. Tokens behind the last sequence are of none.
        block_table: int32 [B, pages of a sequence], contiguous: the pages of each sequence. Sequences do not share a
            page that is appended to. One may begin behind pages that another fills in this step; such a page is
            closed for the other's own queries as well, where `drafts` would keep it open. Entries behind a window may
            be any.
        seqlens: int32 [B], contiguous: the keys of each sequence, those of its tokens here included. A sequence of 0 or
            less is padding: its keys are not stored, and its rows of the output not written. One that exceeds the block
            table gives NaN.
        drafts: how many of each sequence's new tokens, the last ones, may still be rejected, up to half of a page.
            Pages that hold some of them stay open until the next step.
        open_pages: from `step_open_pages`. With k, memory for pages in the form that the cache does not have, in place
            of the call's own. Without k, what a step of the same batch wrote there: then queries see what
            that step's see. Without both they see pages as the cache has them.
        out: [tokens, H, D_v], contiguous, bf16, fp16 or fp32, written; made by default, of q's dtype.
        max_seqlen_q: the most tokens of a sequence, at least: all of them by default. Rows of a sequence with more may
            stay unwritten. Where none has more than a few, one kernel is launched less.
        max_seqlen_k: the most keys of a sequence, which choose splits; a call that exceeds them is right, and slower.
        causal: as `attention_kvcache` has it.
        sm_scale: as `attention_kvcache` has it.
        window: as `attention_kvcache` has it.
        softcap: as `attention_kvcache` has it.
        sinks: as `attention_kvcache` has it.
        num_splits: as `attention_kvcache` has it.
        return_lse: also return the log-sum-exp of the scores.
        rope: rotate K by position first, as `append_kvcache` has it.

    Returns:
        out, and fp32 lse [H, tokens], natural log, if asked for. Rows of padding, and of no sequence, are not written.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
        NotImplementedError: neither a CUDA device of compute capability 9.0 nor the CPU.
        RuntimeError: an input requires grad, in grad mode, or has a tangent.

    Example:
        cache = ha.paged_kv_cache(num_pages=2, H_kv=2, D=64)
        block_table = torch.tensor([[1], [0]], dtype=torch.int32)
        cu_seqlens = torch.tensor([0, 7, 8], dtype=torch.int32)  # a prompt of seven tokens, and one of one
        seqlens = torch.tensor([7, 1], dtype=torch.int32)
        q = torch.randn(8, 4, 64, dtype=torch.bfloat16)
        k, v = torch.randn(2, 8, 2, 64, dtype=torch.bfloat16)
        out = ha.kv_cache.step(q, k, v, cache, cu_seqlens, block_table, seqlens)
    """
    out: Any = options.pop("out", None)
    if out is None and isinstance(q, torch.Tensor) and q.dim() == 3 and isinstance(cache, PagedKVCache):
        out = q.new_empty((q.size(0), q.size(1), cache.D_v))
    opened = options.pop("open_pages", None)

    def problem() -> tuple[Any, StepArgs]:
        given: dict[str, Any] = {**options, "out": out, "open_pages": opened, "return_lse": return_lse}
        return ops.step, step_problem(q, k, v, cache, cu_seqlens, block_table, seqlens, **given)

    more, of_tensors = split_tensors(rope=options.get("rope"), sinks=options.get("sinks"))
    rest = {name: x for name, x in options.items() if name not in ("sinks", "rope")}
    in_cache, pages = cache_tensors(cache), open_page_fields(opened)[:4]
    tensors = q, k, v, *in_cache, *pages, cu_seqlens, block_table, seqlens, out, *more
    key = *cache_sizes(cache), return_lse, *rest, *rest.values(), *of_tensors
    written = [out] if k is None else [out, *in_cache[:4], *(x for x in pages if x is not None)]
    returned = plans.run("kv_cache.step", tensors, key, problem, written)
    # One tensor, or a plan's.
    lse = returned if isinstance(returned, torch.Tensor) else returned[0]
    return (out, lse) if return_lse else out
