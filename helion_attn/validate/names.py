"""Arguments under the names that they have elsewhere: refused with the name that they have here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

from typing_extensions import ParamSpec

P = ParamSpec("P")
R = TypeVar("R")

#: What PyTorch, flash-attn, transformers, SageAttention, FlashInfer and vLLM call arguments of this package.
OTHER_NAMES = {
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


def named(function: Callable[P, R]) -> Callable[P, R]:
    """The function; an argument under another's name raises `TypeError`, naming the right one."""
    known = frozenset(inspect.signature(function).parameters)
    name = function.__name__

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for given in kwargs:
            if given not in known and OTHER_NAMES.get(given) in known:
                raise TypeError(
                    f"{name}() has no argument {given}, which is {OTHER_NAMES[given]} here: pass "
                    f"{OTHER_NAMES[given]}={_shown(given, kwargs[given])}"
                )
        return function(*args, **kwargs)

    return in_lines(call)


def _shown(given: str, value: object) -> str:
    """A value for the argument here, of one that was given under another name."""
    if given == "sliding_window" and value is not None:
        left = value - 1 if type(value) is int and value > 0 else "sliding_window - 1"
        return f"({left}, 0): a sliding_window counts the query's own key"
    return repr(value) if isinstance(value, (bool, int, float, str, tuple)) else "..."
