"""Attention for transformers: an attention function and the mask function that goes with it, under a name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from helion_attn.api import attention
from helion_attn.integrations.flash_attn import check_deterministic
from helion_attn.integrations.graphs import graph_break
from helion_attn.integrations.inputs import NAMES, autocast_inputs, check_name, check_scale
from helion_attn.integrations.mask_tensors import attend_to_visible, check_visible, read_mask
from helion_attn.integrations.rules import Rule, check_supported, is_none, is_zero
from helion_attn.integrations.transformers_masks import MaskTensor, VisibleKeys, what_is_seen
from helion_attn.integrations.transformers_models import refuse_own_attention
from helion_attn.options import ScoreOptions
from helion_attn.types import BALANCED, CACHE_RECIPE, Auto, Recipe, RecipeName, as_cache_recipe, as_choice
from helion_attn.validate.dense import check_options, check_qkv, check_sinks

#: What the attention function accepts of what models pass.
RULES = (
    Rule(
        "attention_mask",
        lambda mask: mask is None or isinstance(mask, VisibleKeys | torch.Tensor),
        "None, or, as the model's forward takes it, [batch, keys], or with 4 dimensions: bool, or of 0 and -inf, or "
        "its dtype's lowest number, or -1e4 and below in a row that sees some key",
    ),
    Rule("dropout", is_zero, "0"),
    Rule("output_attentions", lambda wanted: not wanted, "False: there are no attention weights"),
    Rule("position_bias", is_none, "None"),
    Rule("cache", is_none, "None, of the attention function: no continuous batching"),
    Rule("cu_seq_lens_q", is_none, "None: no packed sequences"),
    Rule("cu_seq_lens_k", is_none, "None: no packed sequences"),
)

#: Further arguments that models pass through to attention and that cannot change its result.
IGNORED = {
    "position_ids": "the model has applied them",
    "cache_position": "the model has applied them",
    "use_cache": "the model has updated its cache",
    "output_hidden_states": "for the model's output",
    "logits_to_keep": "for the model's output",
    "output_router_logits": "for the model's output",
    "return_dict": "for the model's output",
    "num_items_in_batch": "for the loss",
    "deterministic": "`check_deterministic` looks at it",
}


def register_transformers(name: str = "helion_fp8", *, recipe: Recipe | RecipeName | Auto = BALANCED) -> None:
    """Make `attn_implementation=name` FP8 attention in transformers (5.x).

    For decoders, with GQA, sliding windows, softcaps and sinks, and a cache that grows (transformers' default), in
    prefill and decode; and for encoders. Queries, keys and values are quantised on every call, the cached ones too: the
    cache itself stays as it is.

    Padding at the start or the end of sequences is exact: one call for each sequence, on what is not padding. Rows of
    padding give 0 in causal attention; in encoders they see the keys that are not padding, as other rows do. Unpadded
    batches are one call. A mask that ends before the new tokens of a cache, or in zeros, hides keys alone: the tokens
    attend to those that it leaves.

    Other masks are made as bool tensors, once a forward pass, and read as `helion_attn.sdpa` says: packed documents,
    prefixes, chunked attention, holes in a mask of keys, and what a model or a caller makes with four dimensions.

    Under `torch.autocast` inputs are cast as `scaled_dot_product_attention` does it.

    Args:
        name: what models are given as `attn_implementation`. Registering a name again replaces it.
        recipe: how the tensors become 8-bit numbers, a preset's name, or "auto": `register_transformers(recipe="auto")`
            leaves to PyTorch's attention what that is faster at, as `helion_attn.attention` says.

    Raises:
        ImportError: transformers is not installed.
        TypeError, ValueError: `recipe` is no Recipe; `name` is not a name, or one of transformers' own.

    The models' forward passes raise what `helion_attn.attention` does, and NotImplementedError for what
    docs/integrations.md lists as not supported, such as static caches.

    Example:
        ha.register_transformers(recipe="auto")
        options = {"attn_implementation": "helion_fp8", "dtype": torch.bfloat16}  # of from_pretrained
    """
    recipe = as_choice(recipe)
    check_name(name)
    from transformers import AttentionInterface, AttentionMaskInterface

    if name == "eager" or (name in AttentionInterface() and not is_registered(name)):
        raise ValueError(f"name is {name!r}, which transformers uses for another attention; it must be another")
    AttentionInterface.register(name, functools.partial(attention_forward, recipe=recipe))
    # Without a mask function of the same name, transformers passes no mask: padding would be ignored.
    AttentionMaskInterface.register(name, mask_of_model)
    refuse_own_attention(is_registered)


def is_registered(name: str | None) -> bool:
    """Return whether `register_transformers` has made this `attn_implementation`."""
    from transformers import AttentionInterface

    return getattr(AttentionInterface().get(name), "func", None) is attention_forward


def transformers_cache(*, recipe: Recipe | RecipeName = CACHE_RECIPE) -> Any:
    """A cache in 8 bits for `model.generate(..., cache=...)`, a `transformers.Cache`.

    Keys and values are quantised once, when they arrive, and stay in the pages of a `PagedKVCache`: about half the
    memory of a cache in bf16, with D padded to a power of two. A prompt is attended to as without it; later tokens by
    `attention_kvcache`. V is not centred. A layer has the constants that `cache_constants` makes of the tokens that
    come first, if a sequence has at least 32: for up to 16,384 tokens, whose positions grow by one. So a sequence's
    bits depend on its batch; a `PagedKVCache` of one's own has none of that.

    It is for models whose `attn_implementation` is one that `register_transformers` made, with causal attention, GQA,
    sliding windows, softcaps, sinks, and padding at the start of sequences, which is not stored. Beam search works:
    beams get pages of their own. It grows as it is needed; torch.compile of the model is not supported, nor are
    encoder-decoder models. Make one for each batch.

    Args:
        recipe: of the cache, as `paged_kv_cache` has it.

    Raises:
        ImportError: transformers is not installed.
        TypeError, ValueError: naming `recipe`, its value and what is accepted.

    The model's forward passes raise NotImplementedError for padding at the end of sequences and for encoder-decoder
    models, TypeError for another attention, and what `helion_attn.append_kvcache` and `helion_attn.attention_kvcache`
    raise, such as for head dims beyond 16..512.

    Example:
        ha.register_transformers()  # and a model with attn_implementation="helion_fp8"
        cache = ha.transformers_cache()  # model.generate(tokens, cache=cache)
    """
    preset = as_cache_recipe(recipe)
    from helion_attn.integrations.transformers_cache import PagedCache

    return PagedCache(preset)


@graph_break
def _mask_tensor(seen: VisibleKeys | torch.Tensor, dtype: torch.dtype, device: torch.device | str) -> MaskTensor:
    """A `MaskTensor`, whose constructor Dynamo would compile by itself behind a graph break."""
    return MaskTensor(seen, dtype, device)


def mask_of_model(
    *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", **options: Any
) -> MaskTensor | VisibleKeys | torch.Tensor:
    """The mask function: `visible_keys`, as a tensor for a model that looks at its mask.

    torch.compile of a whole model makes no tensors of this class: there it is what attention reads.
    """
    seen = visible_keys(device=device, **options)
    return seen if torch.compiler.is_compiling() else _mask_tensor(seen, dtype, device)


def visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,  # what else transformers tells every mask function: what may be skipped, the config
) -> VisibleKeys | torch.Tensor:
    """Return a description of the mask, causality included, or, where there is none, the mask by scores.

    Never None: that would leave causality to the module's `is_causal`, which may say otherwise.

    `mask_function(batch, head, q, k)` says whether the query at position q sees the key at k. It is recognised by being
    what transformers itself makes for the masks that the kernel has. Of any other, and of padding between keys that are
    seen, transformers' own bool [batch, 1, queries, keys] is returned.

    Raises:
        NotImplementedError: for a static cache.
    """
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        sdpa_mask,
        sliding_window_causal_mask_function,
    )

    def by_scores() -> torch.Tensor:
        # In inference mode a tensor does not count its changes, and every layer would read it.
        with torch.inference_mode(False), torch.no_grad():
            return sdpa_mask(
                batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
                mask_function=mask_function or causal_mask_function, attention_mask=attention_mask,
                allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
            )  # fmt: skip

    left, is_other = None, False
    if mask_function is None or mask_function is causal_mask_function:
        causal = True
    elif mask_function is bidirectional_mask_function:
        causal = False
    elif local_size is not None and _same(mask_function, sliding_window_causal_mask_function(local_size)):
        causal, left = True, earlier_keys(local_size, kv_length)
    else:
        causal, is_other = False, True
    is_static = isinstance(q_offset, torch.Tensor)
    if (is_other and is_static) or (causal and (is_static or kv_length - q_length != q_offset - kv_offset)):
        raise NotImplementedError(
            f"helion_attn needs the last query at the last key; here {q_length} queries start at {q_offset} and "
            f"{kv_length} keys at {kv_offset}: use a cache that grows (DynamicCache), not a static one"
        )
    if is_other:
        return by_scores()

    spans = ((0, kv_length),) * batch_size
    if attention_mask is not None:
        kept = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        kept = torch.nn.functional.pad(kept, (0, kv_length - kept.size(1)))  # as transformers' own: short is hidden
        found = _spans(kept)
        if found is None:
            return by_scores()
        spans = found
    return VisibleKeys(spans, q_length, kv_length, causal, left)


def earlier_keys(window: int | None, N: int) -> int | None:
    """How many earlier keys a query sees in a window, which counts the query's own; None for all of N.

    Below 0 for a window of 0, of which some models make a mask that no layer is given.
    """
    return None if window is None or window >= N else window - 1


@graph_break
def _spans(kept: torch.Tensor) -> tuple[tuple[int, int], ...] | None:
    """Where, in [B, N] booleans, each row's True begin and end; None if those of a row do not lie together."""
    N = kept.size(1)
    at = torch.arange(N, device=kept.device)
    starts = torch.where(kept, at, N).amin(1)
    stops = torch.where(kept, at + 1, 0).amax(1)
    spans = []
    for start, stop, count in torch.stack([starts, stops, kept.sum(1)], 1).tolist():  # the one read from the device
        if count == 0:
            start = stop = 0
        if stop - start != count:
            return None
        spans.append((start, stop))
    return tuple(spans)


def _same(a: Any, b: Any) -> bool:
    """Whether two functions have the same code and the same values in their closures."""
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
        return a is b or (a.__code__ is b.__code__ and _same(tuple(cells[0]), tuple(cells[1])))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and isinstance(a, int) and a == b


def changes_nothing(argument: str, value: object) -> bool:
    """Whether attention gives the same without an argument of the model's forward that it was handed."""
    if argument == "deterministic" and value and torch.is_grad_enabled():
        return torch.are_deterministic_algorithms_enabled()
    is_accepted = any(rule.argument == argument and rule.accepts(value) for rule in RULES)
    return value is None or argument in IGNORED or is_accepted


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: VisibleKeys | torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    *,
    recipe: Recipe | Auto = BALANCED,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: q [B, H, M, D], k and v [B, H_kv, N, D] give ([B, M, H, D], None).

    transformers hands it, in `kwargs`, whatever a model's forward was called with: see `RULES` and `IGNORED`; anything
    else that is not None raises.
    """
    attention_mask = what_is_seen(attention_mask)
    given = {"attention_mask": attention_mask, "dropout": dropout, **kwargs}
    check_supported("helion_attn", RULES, {rule.argument: given.get(rule.argument) for rule in RULES})
    for name, extra in kwargs.items():
        if extra is not None and name not in IGNORED and not any(rule.argument == name for rule in RULES):
            raise NotImplementedError(f"helion_attn: {name} is given, of which this attention knows nothing")

    check_scale(scaling, "scaling")
    layer: Any = None
    if getattr(type(key), "is_of_paged_layer", False):
        config = getattr(module, "config", None)
        for name in ("is_encoder_decoder", "add_cross_attention"):
            if getattr(config, name, False):
                raise NotImplementedError(
                    f"helion_attn: the model's config has {name}=True; with a cache in 8 bits it must be False: pass "
                    f"encoder-decoder models no transformers_cache()"
                )
        new: tuple[Any, Any] = key, value
        layer, key, value = new[0].layer, new[0].states, new[1].states
    query, key, value = autocast_inputs(query, key, value)
    check_deterministic("helion_attn", kwargs.get("deterministic"), query, key, value, s_aux)
    (B, H, M, _D), N = query.shape, key.size(2) + (0 if layer is None else layer.tokens)
    check_sinks(s_aux, H, query.device, "s_aux", differentiable=True)
    left = earlier_keys(sliding_window, N)
    if isinstance(attention_mask, torch.Tensor):
        # It says all: causality, and the window.
        if layer is not None:
            raise NotImplementedError(
                f"helion_attn: with a cache in 8 bits attention must be causal, with padding at the start of sequences "
                f"alone; here attention_mask is a mask of shape {tuple(attention_mask.shape)}"
            )
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        check_qkv(q, k, v, "bshd", names=NAMES, differentiable=True)
        visible = read_mask(attention_mask, B, H, M, N, "helion_attn: attention_mask", lowest_hides=True)
        if not visible.whole:
            check_visible("helion_attn", visible, q, v, recipe, "attention_mask")
            return attend_to_visible(q, k, v, visible, recipe, sm_scale=scaling, softcap=softcap, sinks=s_aux)[0], None
        attention_mask, left = VisibleKeys(((0, N),) * B, M, N, visible.causal, None), None
    if attention_mask is None:
        # The model made no mask at all, so that its module's word is all there is.
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and M not in (1, N):
            # transformers' SDPA aligns such a mask to the top left, flash-attn to the bottom right.
            raise NotImplementedError(f"helion_attn: causal attention of {M} queries and {N} keys came without a mask")
        if left is not None and not causal:
            raise NotImplementedError(
                f"helion_attn: sliding_window is {sliding_window} and the attention is not causal"
            )
        spans: tuple[tuple[int, int], ...] = ((0, N),) * B
    else:
        mask = attention_mask
        if (len(mask.spans), mask.M, mask.N) != (B, M, N):
            raise ValueError(
                f"attention_mask is for {len(mask.spans)} sequences of {mask.M} queries and {mask.N} keys; q has "
                f"{(B, M)} and k {N}"
            )
        # A model may leave the window to its mask, but the two must not contradict each other.
        if left is not None and left != mask.left:
            of_mask = None if mask.left is None else mask.left + 1
            raise ValueError(f"sliding_window is {sliding_window} and the mask's is {of_mask}; they must agree")
        causal, left, spans = mask.causal, mask.left, mask.spans
    if left is not None and left < 0:
        raise ValueError(f"sliding_window is {left + 1}; it must be None, for no window, or at least 1")

    scores = ScoreOptions(
        causal=causal,
        sm_scale=scaling,
        window=None if left is None else (left, 0),
        softcap=softcap,
        sinks=s_aux,
    )
    if layer is not None:
        if causal and any(start == stop for start, stop in spans):
            raise NotImplementedError(
                f"helion_attn: attention_mask hides all of the first {N} tokens of a sequence; with a cache in 8 bits "
                f"the first chunk must hold a token of each: pass a larger prefill_chunk_size"
            )
        if not causal or any(stop != N for _, stop in spans):
            raise NotImplementedError(
                f"helion_attn: with a cache in 8 bits attention must be causal, with padding at the start of sequences "
                f"alone; here causal is {causal}, and sequences of {N} keys begin and end at {list(spans)}"
            )
        is_prompt = layer.tokens == 0
        # What raises must do so before the cache has the keys.
        check_options(scores, False, None, H, query.device)
        layer.append(query, key, value, [start for start, _ in spans])
        if not is_prompt:
            return layer.attend(query, **scores.kwargs()), None

    options: dict[str, Any] = {**scores.kwargs(), "recipe": recipe, "layout": "bshd"}
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if all(span == (0, N) for span in spans):
        return attention(q, k, v, **options), None
    out = q.new_zeros(B, M, H, v.size(-1))
    for b, (start, stop) in enumerate(spans):
        # In causal attention query i stands at key N - M + i. Rows that stand at hidden keys are padding in a prompt;
        # later they are tokens, which attend to the keys that are left.
        rows = slice(max(start - (N - M), 0), stop if M == N else M) if causal else slice(0, M)
        if start < stop and rows.start < rows.stop:
            one, hidden = slice(b, b + 1), N - stop if causal and M < N else 0
            seen = options | _behind(left, hidden) if hidden else options
            out[one, rows] = attention(q[one, rows], k[one, start:stop], v[one, start:stop], **seen)
    return out, None


def _behind(left: int | None, hidden: int) -> dict[str, Any]:
    """The options of causal attention whose last query stands `hidden` keys behind the last one that it may see."""
    if left is not None and left < hidden:
        raise NotImplementedError(
            f"helion_attn: attention_mask hides the last {hidden} keys, and the last query sees no other in its "
            f"sliding_window of {left + 1}; extend attention_mask with the tokens"
        )
    return {"causal": False, "window": (-1 if left is None else left - hidden, hidden)}
