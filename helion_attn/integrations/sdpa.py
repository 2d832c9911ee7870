"""`torch.nn.functional.scaled_dot_product_attention` in FP8: as a context, a decorator, and a function."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from helion_attn.api import attention
from helion_attn.caller import outermost
from helion_attn.integrations.inputs import check_arguments, check_tensors, checked_inputs
from helion_attn.integrations.mask_tensors import ACCEPTED, Visible, attend_to_visible, check_visible, read_mask
from helion_attn.integrations.rules import NO_DROPOUT, Rule, is_none_or_tensor
from helion_attn.names import reject_unknown_kwargs
from helion_attn.types import BALANCED, Auto, Recipe, RecipeName, as_choice, preset_of
from helion_attn.validate.dense import check_recipe

Function = TypeVar("Function", bound=Callable[..., Any])

#: PyTorch's own, also where somebody has put another function in its place.
STOCK = F.scaled_dot_product_attention

#: What `fallback` may be.
Fallback: TypeAlias = Literal["raise", "warn", "silent"]
FALLBACKS = get_args(Fallback)


class FallbackWarning(UserWarning):
    """Warning that PyTorch's attention ran in the place of this package's, as `fallback="warn"` asked for.

    Example:
        import warnings

        warnings.simplefilter("error", ha.FallbackWarning)  # tests then find what runs elsewhere
    """


def _is_causal_bias(mask: Any) -> bool:
    from torch.nn.attention.bias import CausalBias  # imports triton

    return isinstance(mask, CausalBias)


#: What is accepted of the arguments of `scaled_dot_product_attention`; the values of a mask are looked at later.
RULES = (
    Rule(
        "attn_mask",
        is_none_or_tensor,
        f"None, made by torch.nn.attention.bias.causal_lower_right or causal_upper_left, or a tensor: {ACCEPTED}",
    ),
    NO_DROPOUT,
)

#: Functions of torch that compute attention where the mode does not see it.
FUSED = (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)


class _SdpaMode(TorchFunctionMode):
    """Takes the calls of `scaled_dot_product_attention` of this thread.

    A mode, not another function in the place of `F.scaled_dot_product_attention`: it also sees calls through names that
    were bound before (`from torch.nn.functional import scaled_dot_product_attention`), leaves other threads alone,
    nests and is popped on exceptions, and torch.compile guards on it, so that what was compiled outside is compiled
    again inside, and the other way round. It costs about 1 us for every call of a torch function inside.

    While a mode runs a function it is off. `F.multi_head_attention_forward`, which torch hands to it as a whole, would
    call the stock attention: a copy of it that calls this one runs in its place. `FUSED` functions, of which there is
    no copy, raise.
    """

    def __init__(self, recipe: Recipe | Auto, fallback: str) -> None:
        super().__init__()
        self.recipe = recipe
        self.fallback = fallback

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is STOCK:
            return _attention(*args, **(kwargs or {}), recipe=self.recipe, fallback=self.fallback)
        if func is F.multi_head_attention_forward:
            return self._multi_head_attention(*args, **(kwargs or {}))
        if func in FUSED:
            refusal = NotImplementedError(
                f"helion_attn.sdpa: {func.__name__} is not supported; call scaled_dot_product_attention on the "
                f"projected tensors"
            )
            return _fall_back(self.fallback, refusal, func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _multi_head_attention(self, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
        refusal = None
        if given.get("need_weights", True):
            refusal = "need_weights is True; it must be False: there are no attention weights"
        elif torch.compiler.is_compiling():
            refusal = "it is compiled by torch.compile; it must run eagerly, with what is around it compiled"
        if refusal is not None:
            error = NotImplementedError(f"helion_attn.sdpa: in torch.nn.MultiheadAttention {refusal}")
            return _fall_back(self.fallback, error, F.multi_head_attention_forward, *args, **kwargs)
        attend = functools.partial(_attention, recipe=self.recipe, fallback=self.fallback)
        return _multi_head_attention_with(attend)(*args, **kwargs)

    def __call__(self, function: Function) -> Function:
        """The function, with the context around each of its calls.

        Raises:
            TypeError: it is a generator or a coroutine, whose body runs after the call: the context would hold for
                whoever runs in between.
        """
        for is_later in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction):
            if is_later(function):
                raise TypeError(
                    f"{function} is a generator or a coroutine; it must be an ordinary function: decorate those that "
                    f"it calls, and leave `with helion_attn.sdpa():` in its body before each yield or await"
                )

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with _SdpaMode(self.recipe, self.fallback):
                return function(*args, **kwargs)

        return cast(Function, inside)


def _multi_head_attention_with(attend: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """PyTorch's own `multi_head_attention_forward`, with another attention in it."""
    original = F.multi_head_attention_forward
    names = {**vars(F), "scaled_dot_product_attention": attend, "has_torch_function": lambda _: False}
    copy = types.FunctionType(original.__code__, names, original.__name__, original.__defaults__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy


def _check_fallback(fallback: str) -> None:
    if fallback not in FALLBACKS:
        raise ValueError(f"fallback is {fallback!r}; it must be one of {FALLBACKS}")


def _fall_back(fallback: str, refusal: Exception, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """PyTorch's function in the place of what was refused, or the refusal, which says how to have that."""
    if fallback == "raise":
        raise type(refusal)(f'{refusal}; or pass fallback="warn", which hands such calls to PyTorch') from None
    if fallback == "warn":
        _, level = outermost()
        warnings.warn(f"PyTorch's attention runs, as {refusal}", FallbackWarning, stacklevel=level)
    return function(*args, **kwargs)


def sdpa(*, recipe: Recipe | RecipeName | Auto = BALANCED, fallback: Fallback = "raise") -> _SdpaMode:
    """`with helion_attn.sdpa():` runs `torch.nn.functional.scaled_dot_product_attention` in FP8.

    It holds for calls from the thread that entered the context, until it is left, however that happens. Contexts nest;
    the innermost one counts. It works around and inside functions compiled by torch.compile. Calls of
    `torch.ops.aten.scaled_dot_product_attention` and its backends, and other attention functions, are left alone.
    `@helion_attn.sdpa()` puts the context around every call of a function. Leave it before a `yield` or an `await`: it
    would hold for what runs meanwhile.

    Checkpointed layers run again in the backward pass, where the context is left: PyTorch's attention would run there.
    Put `@helion_attn.sdpa()` on the function that `torch.utils.checkpoint.checkpoint` is given; or pass it
    `use_reentrant=False` and `context_fn=lambda: (contextlib.nullcontext(), helion_attn.sdpa())`.

    `torch.nn.MultiheadAttention` (with `need_weights=False`), `torch.nn.TransformerEncoderLayer` and what is built on
    them run in FP8 too, but not where torch.compile traces them.

    The arguments mean what they mean to PyTorch:

    - `query` [B, H, M, D], `key` [B, H_kv, N, D], `value` [B, H_kv, N, D_v]; bf16, fp16 or fp32; D and D_v in
      16..1024. H_kv other than H needs `enable_gqa=True`. Under `torch.autocast` they are cast to its dtype first, as
      PyTorch does.
    - `is_causal=True`: PyTorch aligns the mask to the top left, and helion_attn to the bottom right. They agree for
      M = N; other lengths raise. `attn_mask=torch.nn.attention.bias.causal_lower_right(M, N)` is right for any
      lengths; rows that see no key give 0.
    - `attn_mask`, a tensor: bool, or of 0 and -inf, or -1e4 and below in a row that sees some key. A row that sees no
      key gives 0. One that hides nothing, keys after the diagonal of the first or the last key, padding, or the last
      two, alike for all heads, is read on the host on every call; padding needs D and D_v up to 256. Any other becomes
      a `BlockMask`, for which the host waits as well, once: it is kept as long as the tensor, and made again when
      PyTorch has written to that. What other kernels write is not noticed, and of a tensor that `torch.inference_mode`
      made nothing is kept. It needs head dims that block masks have. `dropout_p`: 0; `scale`: in 0..2**64.

    Args:
        recipe: how the tensors become 8-bit numbers, a preset's name, or "auto": `with ha.sdpa(recipe="auto"):` leaves
            to PyTorch's attention what that is faster at, as `helion_attn.attention` says.
        fallback: what becomes of a call that cannot run here: "raise"; "warn", which warns (`FallbackWarning`) and has
            PyTorch's attention run; or "silent", which has it run.

    Raises:
        TypeError, ValueError: `recipe` is no Recipe, `fallback` another word.

    With fallback="raise", calls inside the context raise what `helion_attn.attention` does, and NotImplementedError for
    what docs/integrations.md lists as not supported.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        with ha.sdpa(recipe="fast"):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    """
    _check_fallback(fallback)
    return _SdpaMode(as_choice(recipe), fallback)


@reject_unknown_kwargs
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recipe: Recipe | RecipeName | Auto = BALANCED,
    fallback: Fallback = "raise",
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` in FP8, with its arguments and their meaning.

    Args:
        query: [B, H, M, D]; this and all others as `helion_attn.sdpa` says.
        key: [B, H_kv, N, D].
        value: [B, H_kv, N, D_v].
        attn_mask: None, or what hides keys: bool, or of 0 and -inf.
        dropout_p: 0.
        is_causal: only with M = N.
        scale: 1 / sqrt(D) by default.
        enable_gqa: H_kv may be less than H.
        recipe: how the tensors become 8-bit numbers, a preset's name, or "auto": `with ha.sdpa(recipe="auto"):` leaves
            to PyTorch's attention what that is faster at, as `helion_attn.attention` says.
        fallback: "raise", "warn" or "silent", as `helion_attn.sdpa` says.

    Returns:
        [B, H, M, D_v], of the query's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `helion_attn.sdpa` says.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        out = ha.scaled_dot_product_attention(q, k, v, is_causal=True)
    """
    _check_fallback(fallback)
    return _attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
        recipe=as_choice(recipe), fallback=fallback,
    )  # fmt: skip


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recipe: Recipe | Auto,
    fallback: str,
) -> torch.Tensor:
    check_tensors(query, key, value)
    try:
        (q, k, v), causal, visible = _understood(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, recipe
        )
    except (NotImplementedError, TypeError, ValueError, RuntimeError) as refusal:
        return _fall_back(
            fallback, refusal, STOCK,
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
    if visible is None:
        return attention(q, k, v, causal=causal, sm_scale=scale, recipe=recipe)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, _ = attend_to_visible(q, k, v, visible, recipe, sm_scale=scale)
    return out.transpose(1, 2)


def _understood(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    recipe: Recipe | Auto,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], bool, Visible | None]:
    """Return a call in this package's terms, or raise for arguments that are not supported.

    Returns:
        Q, K and V as autocast has them; whether it is causal, with the last query at the last key; and what a mask
        leaves of that, if it hides more.
    """
    check_arguments("helion_attn.sdpa", RULES, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    q, k, v = checked_inputs(query, key, value, "bhsd")
    check_recipe(preset_of(recipe), q.size(3), v.size(3))
    M, N = query.size(2), key.size(2)
    if attn_mask is not None and is_causal:
        raise ValueError("is_causal is True and attn_mask is given; it must be one of them")
    if query.size(1) != key.size(1) and not enable_gqa:
        raise ValueError(
            f"query has {query.size(1)} heads and key has {key.size(1)}; they must be equal without enable_gqa=True"
        )
    top_left, causal, visible = is_causal, is_causal, None
    if attn_mask is not None and _is_causal_bias(attn_mask):
        from torch.nn.attention.bias import CausalVariant

        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (M, N):
            raise ValueError(
                f"attn_mask is for lengths {attn_mask.seq_len_q} and {attn_mask.seq_len_kv}; it must be for {M} and {N}"
            )
        top_left, causal = attn_mask.variant == CausalVariant.UPPER_LEFT, True
    elif attn_mask is not None:
        visible = read_mask(attn_mask, query.size(0), query.size(1), M, N)
        if visible.whole:
            causal, visible = visible.causal, None
        else:
            check_visible("helion_attn.sdpa", visible, query, value, recipe)
    if top_left and M != N:
        raise NotImplementedError(
            f"helion_attn.sdpa: the causal mask is aligned top-left with M = {M} and N = {N}; helion_attn has only "
            f"bottom-right: pass attn_mask=torch.nn.attention.bias.causal_lower_right(M, N) if that is meant"
        )
    return (q, k, v), causal, visible
