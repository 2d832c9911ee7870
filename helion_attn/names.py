"""Arguments and layouts under the names that they have elsewhere: refused with the name that they have here."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import TypeVar

from typing_extensions import ParamSpec

from helion_attn.options import ScoreOptions

P = ParamSpec("P")
R = TypeVar("R")

#: What PyTorch, flash-attn, transformers, SageAttention, FlashInfer and vLLM call arguments of this package.
OTHER_NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "is_causal": "causal",
    "softmax_scale": "sm_scale",
    "scale": "sm_scale",
    "scaling": "sm_scale",
    "tensor_layout": "layout",
    "kv_layout": "layout",
    "window_size": "window",
    "sliding_window": "window",
    "logits_soft_cap": "softcap",
    "s_aux": "sinks",
    "learnable_sink": "sinks",
    "page_table": "block_table",
    "block_tables": "block_table",
    "seq_lens": "cache_seqlens",
    "kv_cache": "cache",
    "q_scale": "q_descale",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
    "descale_q": "q_descale",
    "descale_k": "k_descale",
    "descale_v": "v_descale",
    "return_attn_probs": "return_lse",
    "return_softmax_lse": "return_lse",
}

#: Arguments of others that have no place here, and what to do.
NOT_HERE = {
    "attn_mask": "pass causal=True, a window or a block_mask, or call helion_attn.scaled_dot_product_attention, which "
    "takes masks",
    "dropout_p": "leave it out: there is no dropout in inference",
    "block_mask": "helion_attn.attention and attention_quantized take it, on one GPU; to them sequences that follow "
    "each other are one, with the mask helion_attn.masks.documents(ids)",
    "sinks": "helion_attn.attention, attention_varlen and attention_kvcache take sinks",
    "enable_gqa": "leave it out: k and v may have fewer heads than q",
    "q_norm": "normalise q before; helion_attn.attention and quantize do it",
    "k_norm": "normalise k before; helion_attn.attention and quantize do it",
}

#: What FlashInfer and SageAttention, and TransformerEngine, call these.
OTHER_LAYOUTS = {"HND": "bhsd", "NHD": "bshd", "BHND": "bhsd", "BNHD": "bshd"}

#: Columns of a screen: the longest signature that is one line.
WIDTH = 100


class _Signature(inspect.Signature):
    """Prints a parameter a line where one line is too long, so that `help` fits a screen."""

    def __str__(self) -> str:
        line = super().__str__()
        if len(line) <= WIDTH:
            return line
        parts = []
        for parameter in self.parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
                parts.append("*")
            parts.append(str(parameter))
        body = "".join(f"    {part},\n" for part in parts)
        return f"(\n{body}) -> {inspect.formatannotation(self.return_annotation)}"


def in_lines(function: Callable[P, R]) -> Callable[P, R]:
    """The function; its signature is printed a parameter a line where it is long."""
    signature = inspect.signature(function)
    function.__signature__ = _Signature(  # type: ignore[attr-defined]
        list(signature.parameters.values()), return_annotation=signature.return_annotation
    )
    return function


def with_scores(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose signature has the fields of `ScoreOptions` for its `**options`."""
    signature = inspect.signature(function)
    parameters = [x.replace(kind=x.KEYWORD_ONLY) for x in inspect.signature(ScoreOptions).parameters.values()]
    parameters += [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
    parameters.sort(key=lambda x: x.kind)  # what is positional first; otherwise as they are
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return reject_unknown_kwargs(function)


def options_of(other: Callable[..., object], but: Collection[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a function that hands its options to `other`: its signature has the parameters of that.

    Args:
        other: the function whose parameters they are.
        but: names of parameters that it does not have.
    """
    parameters = [x for name, x in inspect.signature(other).parameters.items() if name not in but]

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name in but:
                    raise TypeError(f"{function.__name__}() has no argument {name}")
            return function(*args, **kwargs)

        taken = call if but else function
        returned = inspect.signature(function).return_annotation
        taken.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
        return taken

    return decorate


def reject_unknown_kwargs(function: Callable[P, R]) -> Callable[P, R]:
    """The function; an argument that it does not have raises `TypeError`, saying what to pass."""
    known = dict.fromkeys(inspect.signature(function).parameters)
    name, parts = function.__name__, function.__module__.split(".")
    if len(parts) > 1 and parts[1] in ("distributed", "reference"):
        name = f"{parts[1]}.{name}"

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            for given in kwargs:
                if given not in known:
                    raise TypeError(unknown_argument(name, known, given, kwargs[given])) from None
            raise

    return in_lines(call)


def unknown_argument(function: str, known: Collection[str], given: str, value: object) -> str:
    """Say that a function has no such argument, and which it has: the same by our name, the nearest, or all."""
    ours = OTHER_NAMES.get(given)
    no = f"{function}() has no argument {given}"
    if ours in known:
        return f"{no}, which is {ours} here: pass {ours}={_shown(given, value)}"
    if remedy := NOT_HERE.get(given) or NOT_HERE.get(ours or ""):
        return f"{no}: {remedy}"
    near = difflib.get_close_matches(given, known, n=1)
    return f"{no}: did you mean {near[0]}?" if near else f"{no}; it has {', '.join(known)}"


def _shown(given: str, value: object) -> str:
    """A value for the argument here, of one that was given under another name."""
    if given == "sliding_window" and value is not None:
        left = value - 1 if type(value) is int and value > 0 else "sliding_window - 1"
        return f"({left}, 0): a sliding_window counts the query's own key"
    if OTHER_NAMES[given] == "layout" and isinstance(value, str):
        return repr(OTHER_LAYOUTS.get(value.upper(), value))
    return repr(value) if value is None or isinstance(value, (bool, int, float, str, tuple)) else "..."
