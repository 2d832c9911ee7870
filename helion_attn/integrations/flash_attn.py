"""flash-attn's functions under their own names and arguments, so that replacing the import replaces the attention.

Arguments are flash-attn 3's. Calls in the order of flash-attn 2 are recognised (`flash_attn_arguments`).
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, overload

import torch
from typing_extensions import Unpack

from helion_attn.api import attention, attention_quantized, pack_unread
from helion_attn.debug_state import debugging
from helion_attn.integrations.flash_attn_arguments import check_unsupported, takes_flash_attn_2
from helion_attn.kv_cache import append_kvcache, attention_kvcache
from helion_attn.names import reject_unknown_kwargs
from helion_attn.options import ScoreOptions
from helion_attn.types import BALANCED, Auto, PagedKVCache, Recipe, RecipeName, as_choice
from helion_attn.validate.dense import (
    check_descale,
    check_descale_form,
    check_flag,
    check_inputs,
    check_qkv,
    check_sm_scale,
    check_softcap,
    check_window,
    described,
)
from helion_attn.validate.derivatives import needs_gradient
from helion_attn.validate.kv_cache import check_kvcache_append, check_kvcache_attention
from helion_attn.varlen import attention_varlen


class FlashOptions(TypedDict, total=False):
    """Keywords of `flash_attn_func` that its overloads do not name."""

    qv: torch.Tensor | None
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    window_size: tuple[int, int]
    attention_chunk: int
    softcap: float
    num_splits: int
    pack_gqa: bool | None
    deterministic: bool
    sm_margin: int
    dropout_p: float
    alibi_slopes: torch.Tensor | None
    recipe: Recipe | RecipeName | Auto


#: What `flash_attn_with_kvcache` calls the fields of a `PagedKVCache` and its block table.
KVCACHE_NAMES = {
    "k8": "k_cache",
    "v8": "v_cache",
    "k_descale": "k_descale",
    "v_descale": "v_descale",
    "k_mean": "k_mean",
    "channel_factors": "channel_factors",
    "D": "q.size(3)",
    "D_v": "v_cache.size(2)",
    "block_table": "page_table",
}


def _scores(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None] | None,
    softcap: float,
) -> ScoreOptions:
    """Flash-attn's options of scores, checked under its names, as this package's."""
    if softmax_scale is not None:
        check_sm_scale(softmax_scale, "softmax_scale")
        if softmax_scale == 0:
            raise ValueError(
                f"softmax_scale is {softmax_scale}; it must be None or positive: a scale of 0 gives every key the same "
                f"weight"
            )
    window: Any = window_size
    if isinstance(window_size, (tuple, list)):
        window = tuple(-1 if edge is None else edge for edge in window_size)
    check_window(window, "window_size")
    check_softcap(softcap, no_cap=0.0)
    return ScoreOptions(
        causal=causal,
        sm_scale=softmax_scale,
        window=None if window == (-1, -1) else window,
        softcap=None if softcap == 0.0 else softcap,
    )


def check_deterministic(entry_point: str, deterministic: object, *tensors: torch.Tensor | None) -> None:
    """Raise where gradients of tensors shall be deterministic, and PyTorch's switch does not say so.

    The forward pass always is. The backward kernels go by that switch, which is also read after this call.
    """
    if not deterministic or torch.are_deterministic_algorithms_enabled():
        return
    if needs_gradient(*(x for x in tensors if isinstance(x, torch.Tensor))):
        raise NotImplementedError(
            f"{entry_point}: deterministic is {deterministic!r} and an input requires grad; it must be False, or "
            f"PyTorch asked for it in both passes, by torch.use_deterministic_algorithms(True)"
        )


@overload
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    return_attn_probs: Literal[False] = False,
    **options: Unpack[FlashOptions],
) -> torch.Tensor: ...
@overload
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    return_attn_probs: Literal[True],
    **options: Unpack[FlashOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *by_place: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    **options: Unpack[FlashOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@takes_flash_attn_2  # type: ignore[misc]  # not any number by place
@reject_unknown_kwargs
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    recipe: Recipe | RecipeName | Auto = BALANCED,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """FP8 attention with the names, the order and the meaning of flash-attn 3's arguments.

    It takes flash-attn 2's calls too: with a number in fourth place that can only be its `dropout_p` (0, or followed by
    a scale), all that follow are in its order. A number between 0 and 1 there that nothing follows may be a dropout or
    a scale, and raises.

    bf16, fp16 and fp32 tensors are quantised by `recipe`, as in `helion_attn.attention`. e4m3 tensors are taken as
    they are, with descales; `recipe` does not matter to them. Nothing is cast under `torch.autocast`, as in flash-attn.

    Args:
        q: [B, M, H, D]; bf16, fp16, fp32 or float8_e4m3fn; D in 16..1024.
        k: [B, N, H_kv, D], of q's dtype; H is a multiple of H_kv.
        v: [B, N, H_kv, D_v], of q's dtype; D_v in 16..1024.
        softmax_scale: multiplies q k^T; 1 / sqrt(D) by default; positive, at most 2**64.
        causal: row i sees keys j <= i + N - M (bottom-right aligned). A row that sees none gives 0, and lse -inf.
        qv: not supported.
        q_descale: fp32 [B, H_kv], multiplies e4m3 q; 1 by default. Its values are not read on the host: one that is
            not finite and positive makes NaN of its heads. Likewise k's and v's.
        k_descale: fp32 [B, H_kv].
        v_descale: fp32 [B, H_kv].
        window_size: (left, right), row i sees keys i + N - M - left .. i + N - M + right; -1 is unlimited. With
            `causal`, right is 0 whatever it says.
        attention_chunk: 0.
        softcap: scaled scores s become `softcap * tanh(s / softcap)`; 0 for no cap.
        num_splits: 0 or 1.
        pack_gqa: for flash-attn's scheduling; it changes no result and is not looked at.
        deterministic: the forward pass always is. With gradients, True needs
            `torch.use_deterministic_algorithms(True)`, which the backward pass goes by.
        sm_margin: 0.
        return_attn_probs: also return lse, as flash-attn 3 does; flash-attn 2 returns a third value.
        dropout_p: 0.
        alibi_slopes: None.
        return_softmax_lse: as `return_attn_probs`.
        recipe: how bf16, fp16 and fp32 tensors become 8-bit numbers, or "auto", as `helion_attn.attention` has it:
            `flash_attn_func(q, k, v, causal=True, recipe="auto")`; flash-attn has no such argument.

    Returns:
        out [B, M, H, D_v], of q's dtype, or bf16 for e4m3 tensors; and fp32 lse [B, H, M], natural log, if asked for.

    Raises:
        NotImplementedError: an argument that is not supported, see docs/integrations.md; an unsupported device.
        TypeError, ValueError: naming the argument, its value and what is accepted.
        RuntimeError: as `helion_attn.attention`; e4m3 tensors or descales require grad.

    Example:
        q, k, v = torch.randn(3, 1, 100, 2, 64, dtype=torch.bfloat16)  # [B, S, H, D]
        out = ha.flash_attn_func(q, k, v, causal=True, window_size=(32, 0))
    """
    check_unsupported(
        "flash_attn_func", qv=qv, attention_chunk=attention_chunk, num_splits=num_splits, sm_margin=sm_margin,
        dropout_p=dropout_p, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    recipe = as_choice(recipe)
    check_flag(return_softmax_lse, "return_softmax_lse")
    return_lse = return_attn_probs or return_softmax_lse
    scores = _scores(softmax_scale, causal, window_size, softcap)
    check_flag(return_lse, "return_attn_probs")
    check_deterministic("flash_attn_func", deterministic, q, k, v)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if not isinstance(q, torch.Tensor) or q.dtype != torch.float8_e4m3fn:
        for name, descale in descales.items():
            if descale is not None:
                raise ValueError(
                    f"{name} is given and q is not float8_e4m3fn; only tensors of that dtype have descales"
                )
        return attention(q, k, v, layout="bshd", recipe=recipe, return_lse=return_lse, **scores.kwargs())

    check_qkv(q, k, v, "bshd", dtypes=(torch.float8_e4m3fn,))
    shape = (q.size(0), k.size(2))
    q_scale, k_scale, v_scale = (_descale(name, descale, shape, q.device) for name, descale in descales.items())
    qkv = pack_unread(q, k, v, q_scale, k_scale, v_scale, "bshd", torch.bfloat16)
    return attention_quantized(qkv, return_lse=return_lse, **scores.kwargs())


@takes_flash_attn_2
@reject_unknown_kwargs
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    recipe: Recipe | RecipeName = BALANCED,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """FP8 attention of packed sequences, with the names, the order and the meaning of flash-attn 3's arguments.

    With a number in eighth place, which is flash-attn 2's `dropout_p`, all that follow are in its order.

    Tensors are quantised by `recipe`, as in `helion_attn.attention_varlen`, every sequence by itself.

    Args:
        q: [tokens, H, D], bf16, fp16 or fp32; D in 16..256. e4m3, which flash-attn takes, is not supported.
        k: [tokens, H_kv, D], of q's dtype; H is a multiple of H_kv.
        v: [tokens, H_kv, D_v], of q's dtype; D_v in 16..256.
        cu_seqlens_q: int32 [B + 1], contiguous: sequence b has tokens `cu_seqlens_q[b]` up to `cu_seqlens_q[b + 1]`.
            Not read on the host. Tokens of no sequence, which flash-attn leaves unwritten, get NaN.
        cu_seqlens_k: int32 [B + 1], of K and V.
        max_seqlen_q: the longest sequence in flash-attn; not looked at, since nothing depends on it here.
        max_seqlen_k: likewise.
        seqused_q: not supported; and so the other arguments that docs/integrations.md lists.
        block_table: None.
        softmax_scale: and all others as in `flash_attn_func`, with M and N of each sequence.

    Returns:
        out [tokens, H, D_v], of q's dtype; and fp32 lse [H, tokens], natural log, if asked for. A row without a key
        has 0, and lse -inf.

    Raises:
        NotImplementedError: an argument that is not supported, see docs/integrations.md; an unsupported device.
        TypeError, ValueError: naming the argument, its value and what is accepted.
        RuntimeError: as `helion_attn.attention_varlen`.

    Example:
        q, k, v = torch.randn(3, 50, 2, 64, dtype=torch.bfloat16)
        cu_seqlens = torch.tensor([0, 30, 50], dtype=torch.int32)  # 30 tokens and 20
        out = ha.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 30, 30, causal=True)
    """
    check_unsupported(
        "flash_attn_varlen_func", seqused_q=seqused_q, seqused_k=seqused_k, qv=qv, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk, num_splits=num_splits,
        sm_margin=sm_margin, dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table,
    )  # fmt: skip
    check_flag(return_softmax_lse, "return_softmax_lse")
    return_lse = return_attn_probs or return_softmax_lse
    scores = _scores(softmax_scale, causal, window_size, softcap)
    check_flag(return_lse, "return_attn_probs")
    check_deterministic("flash_attn_varlen_func", deterministic, q, k, v)
    return attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, recipe=recipe, return_lse=return_lse, **scores.kwargs()
    )


def _descale(name: str, descale: torch.Tensor | None, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    if descale is None:
        return torch.ones(shape, dtype=torch.float32, device=device)
    check_descale_form(name, descale, (shape,), device)
    if debugging():
        check_descale(name, descale, (shape,), device)
    # Reading the values, as `pack` does, would stall the stream, and fail in CUDA graphs and torch.compile. The kernel
    # relies on positive ones: the others must not give an answer.
    return torch.where(descale.isfinite() & (descale > 0), descale, float("nan"))


@takes_flash_attn_2
@reject_unknown_kwargs
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_mean: torch.Tensor | None = None,
    channel_factors: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over a paged cache in 8 bits, with the names, the order and the meaning of flash-attn 3's arguments.

    The cache is in this package's packed format: `k_cache`, `v_cache`, `k_descale`, `v_descale`, `k_mean` and
    `channel_factors` are the fields `k8`, `v8`, `k_descale`, `v_descale`, `k_mean` and `channel_factors` of a
    `PagedKVCache`. A cache in flash-attn's own format raises.

    Args:
        q: [B, M, H, D], bf16, fp16 or fp32; D is a power of two, 32 to 512, so that the
            cache pads nothing.
        k_cache: float8_e4m3fn or int8 [num_pages, H_kv, page_size, D].
        v_cache: float8_e4m3fn [num_pages, H_kv, D_v, page_size], transposed and interleaved; D_v is a power of
            two, 64 to 512.
        k: [B, L, H_kv, D], new keys, or None: quantised and stored at cache_seqlens and up, before the attention.
        v: [B, L, H_kv, D_v], likewise; given if k is.
        qv: not supported; and so the other arguments that docs/integrations.md lists.
        cache_seqlens: int32 [B], or an int for all: keys in the cache, without the new ones, which attention sees too.
            flash-attn's None, for a full cache, is not supported.
        page_table: int32 [B, pages of a sequence], contiguous.
        k_descale: fp32 [num_pages, H_kv, page_size], written where k is.
        v_descale: fp32 [num_pages, H_kv, page_size], written where v is.
        rotary_interleaved: not looked at without rotary_cos.
        num_splits: splits of a sequence's pages; 0 to choose.
        pack_gqa: not looked at; heads that share a KV head always share a tile.
        block_table: flash-attn 2's name of `page_table`.
        k_mean: of the cache, [H_kv, D]; must be given if `paged_kv_cache` was given one.
        channel_factors: likewise.
        softmax_scale: and all others as in `flash_attn_func`; N counts the new keys.

    Returns:
        out [B, M, H, D_v], of q's dtype; and fp32 lse [B, H, M], natural log, if asked for.

    Raises:
        NotImplementedError: an argument that is not supported, see docs/integrations.md; an unsupported device.
        TypeError, ValueError: naming the argument, its value and what is accepted.
        RuntimeError: an input requires grad, in grad mode, or has a tangent.

    Example:
        cache = ha.paged_kv_cache(num_pages=2, H_kv=2, D=64)
        q = torch.randn(2, 1, 4, 64, dtype=torch.bfloat16)
        k, v = torch.randn(2, 2, 1, 2, 64, dtype=torch.bfloat16)
        out = ha.flash_attn_with_kvcache(
            *(q, cache.k8, cache.v8, k, v),
            k_descale=cache.k_descale,
            v_descale=cache.v_descale,
            cache_seqlens=torch.zeros(2, dtype=torch.int32),
            page_table=torch.tensor([[1], [0]], dtype=torch.int32),
            causal=True,
        )
    """
    check_unsupported(
        "flash_attn_with_kvcache", qv=qv, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q, rotary_seqlens=rotary_seqlens,
        q_descale=q_descale, attention_chunk=attention_chunk, scheduler_metadata=scheduler_metadata,
        sm_margin=sm_margin, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    check_inputs({"q": q}, "bshd")
    if block_table is not None:
        if page_table is not None:
            raise ValueError("block_table and page_table are both given; one of them must be None: they are the same")
        page_table = block_table
    for name, field, x, dtypes in (
        ("k_cache", "k8", k_cache, (torch.float8_e4m3fn, torch.int8)),
        ("v_cache", "v8", v_cache, (torch.float8_e4m3fn,)),
    ):
        if not isinstance(x, torch.Tensor) or x.dtype not in dtypes:
            raise TypeError(
                f"{name} is {described(x)}; it must be {field} of a helion_attn.PagedKVCache, made by paged_kv_cache "
                f"and filled by append_kvcache: {' or '.join(map(str, dtypes))} in pages"
            )
    if cache_seqlens is None or page_table is None or k_descale is None or v_descale is None:
        needed = (cache_seqlens, page_table, k_descale, v_descale)
        names = ("cache_seqlens", "page_table", "k_descale", "v_descale")
        missing = next(name for name, x in zip(names, needed, strict=True) if x is None)
        raise ValueError(f"{missing} is None; a cache of packed pages, helion_attn.PagedKVCache, needs it")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be k8 or v8 of a helion_attn.PagedKVCache, of 4 dimensions"
            )
    if q.size(3) != k_cache.size(3):
        raise ValueError(
            f"q has head dim {q.size(3)} and k_cache {k_cache.size(3)}; they must be equal (helion_attn."
            f"attention_kvcache takes caches that pad theirs)"
        )
    constants = k_mean, channel_factors
    cache = PagedKVCache(k_cache, v_cache, k_descale, v_descale, *constants, q.size(3), v_cache.size(2))
    if isinstance(cache_seqlens, int):
        new = k.size(1) if isinstance(k, torch.Tensor) and k.dim() == 4 else 0
        if page_table.dim() == 2:
            room = page_table.size(1) * k_cache.size(2)
            if isinstance(cache_seqlens, bool) or not 0 <= cache_seqlens <= room - new:
                raise ValueError(
                    f"cache_seqlens is {cache_seqlens!r}, and k has {new} new keys; page_table holds {room} keys"
                )
        cache_seqlens = torch.full((q.size(0),), cache_seqlens, dtype=torch.int32, device=q.device)
    scores = _scores(softmax_scale, causal, window_size, softcap)
    check_flag(return_softmax_lse, "return_softmax_lse")
    splits = None if num_splits == 0 else num_splits
    # Everything is checked before the cache is written.
    check_kvcache_attention(
        q, cache, page_table, cache_seqlens, "bshd", scores, return_softmax_lse, splits, None, KVCACHE_NAMES
    )
    if (k is None) != (v is None):
        missing, other = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing} is None and {other} is not; new keys and values come together")
    open_pages = None
    if k is not None and v is not None:
        check_kvcache_append(cache, k, v, page_table, cache_seqlens, "bshd", None, names=KVCACHE_NAMES)
        open_pages = append_kvcache(cache, k, v, page_table, cache_seqlens, layout="bshd")
        cache_seqlens = cache_seqlens + k.size(1)
    return attention_kvcache(
        q, cache, page_table, cache_seqlens, layout="bshd", open_pages=open_pages, num_splits=splits,
        return_lse=return_softmax_lse, **scores.kwargs(),
    )  # fmt: skip
