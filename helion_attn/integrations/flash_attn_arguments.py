"""Arguments of flash-attn's functions, of both versions: one table, by function.

They are flash-attn 3's. Some positions are others in flash-attn 2, which the types of a call's arguments tell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from typing_extensions import ParamSpec

from helion_attn.integrations.rules import Rule, check_supported, is_none, is_zero
from helion_attn.names import in_lines

P = ParamSpec("P")
R = TypeVar("R")

QV = Rule("qv", is_none, "None")
CHUNK = Rule("attention_chunk", is_zero, "0")
# A bool passes for an int, and is what `pack_gqa` or `deterministic` takes: arguments that slipped by one place.
SPLITS = Rule("num_splits", lambda splits: type(splits) is int and splits in (0, 1), "0 or 1: the package chooses")
MARGIN = Rule("sm_margin", is_zero, "0: the kernels take every SM")

#: Arguments of `flash_attn_func` that change the result, or promise something, and that are not supported.
RULES = (QV, CHUNK, SPLITS, MARGIN)

#: Likewise of `flash_attn_varlen_func`.
VARLEN_RULES = (
    Rule("seqused_q", is_none, "None: cu_seqlens_q says where sequences end"),
    Rule("seqused_k", is_none, "None"),
    QV,
    Rule("q_descale", is_none, "None: q, k and v are bf16, fp16 or fp32"),
    Rule("k_descale", is_none, "None"),
    Rule("v_descale", is_none, "None"),
    *(CHUNK, SPLITS, MARGIN),
)

#: Likewise of `flash_attn_with_kvcache`.
KVCACHE_RULES = (
    QV,
    Rule("rotary_cos", is_none, "None: rotate Q, and append K with `append_kvcache(rope=...)`"),
    Rule("rotary_sin", is_none, "None"),
    Rule("cache_batch_idx", is_none, "None: choose rows of page_table"),
    Rule("cache_leftpad", is_none, "None"),
    Rule("cu_seqlens_q", is_none, "None: q is [B, M, H, D]"),
    Rule("cu_seqlens_k_new", is_none, "None: k is [B, L, H_kv, D]"),
    Rule("max_seqlen_q", is_none, "None"),
    Rule("rotary_seqlens", is_none, "None"),
    Rule("q_descale", is_none, "None: q is bf16, fp16 or fp32"),
    CHUNK,
    Rule("scheduler_metadata", is_none, "None"),
    MARGIN,
)

#: Arguments that flash-attn 2 alone has.
DROPOUT = Rule("dropout_p", is_zero, "0.0, as in inference (an argument of flash-attn 2)")
ALIBI = Rule("alibi_slopes", is_none, "None (an argument of flash-attn 2)")
BLOCK_TABLE = Rule(
    "block_table", is_none, "None: K and V in pages are for `flash_attn_with_kvcache` (an argument of flash-attn 2)"
)

#: flash-attn 2's arguments after the tensors, in order, of all its functions but that of a cache.
ORDER_2 = (
    *("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic"),
    "return_attn_probs",
)


def is_number(value: object) -> bool:
    """Return whether it is an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _has_dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the fourth argument is `dropout_p`.

    So it is where it is 0, or a scale follows, by name or in the place of `causal`.
    """
    if not is_number(args[3]):
        return False
    if args[3] == 0 or "softmax_scale" in kwargs:
        return True
    if len(args) > 4:
        return not isinstance(args[4], bool)
    if 0 < args[3] < 1 and "dropout_p" not in kwargs:
        raise TypeError(
            f"flash_attn_func: the fourth argument is {args[3]!r}, dropout_p to flash-attn 2 and softmax_scale to "
            f"flash-attn 3; pass softmax_scale={args[3]!r} or dropout_p={args[3]!r} by name"
        )
    return False


def _has_lengths(args: tuple[Any, ...], _: dict[str, Any]) -> bool:
    """Return whether the eighth argument is `cache_seqlens`, where flash-attn 3 has a table of sines."""
    lengths = args[7] if len(args) > 7 else None
    return is_number(lengths) or (isinstance(lengths, torch.Tensor) and not lengths.is_floating_point())


class Arguments(NamedTuple):
    """The arguments of a function of flash-attn."""

    rules: tuple[Rule, ...]  # what is accepted of arguments that are not supported
    first: int  # the place from which flash-attn 2 has other arguments than flash-attn 3
    # Whether a call, of more positional arguments than that, is flash-attn 2's.
    is_2: Callable[[tuple[Any, ...], dict[str, Any]], bool]
    order_2: tuple[str, ...]  # flash-attn 2's arguments from there on


ARGUMENTS = {
    "flash_attn_func": Arguments((*RULES, DROPOUT, ALIBI), 3, _has_dropout, ORDER_2),
    "flash_attn_varlen_func": Arguments(
        (*VARLEN_RULES, DROPOUT, ALIBI, BLOCK_TABLE), 7, lambda args, _: is_number(args[7]), (*ORDER_2, "block_table")
    ),
    "flash_attn_with_kvcache": Arguments(
        (*KVCACHE_RULES, ALIBI),
        5,
        _has_lengths,
        (
            *("rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table"),
            *("softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved", "alibi_slopes"),
            *("num_splits", "return_softmax_lse"),
        ),
    ),
}


def check_unsupported(function: str, **values: object) -> None:
    """Raise `NotImplementedError` for the first value that a rule of a function does not accept."""
    check_supported(function, ARGUMENTS[function].rules, values)


def takes_flash_attn_2(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function with flash-attn 3's arguments that takes flash-attn 2's order too."""
    _, first, is_2, names = ARGUMENTS[function.__name__]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given: dict[str, Any] = kwargs
        positional: tuple[Any, ...] = args
        if len(positional) > first and is_2(positional, given):
            rest = positional[first:]
            twice = [name for name in names[: len(rest)] if name in given]
            if twice or len(rest) > len(names):
                what = f"{twice[0]} comes twice" if twice else f"there are {len(rest) - len(names)} too many"
                raise TypeError(
                    f"{function.__name__}: in the order of flash-attn 2, which {names[0]}={rest[0]!r} at place "
                    f"{first} means, {what}"
                )
            positional, given = positional[:first], {**dict(zip(names, rest, strict=False)), **given}
        return function(*positional, **given)

    return in_lines(call)
