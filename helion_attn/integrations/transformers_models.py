"""Models of transformers that compute attention themselves, and so take no attention function."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

#: How transformers' models name their attention, and what those that take a function look it up in.
ATTENTION = re.compile(r"^class \w*Attention\w*\((torch\.)?nn\.Module\):", re.MULTILINE)
INTERFACE = "ALL_ATTENTION_FUNCTIONS"

#: A table of a model's own classes by implementation, after whose first words the models that look into it are named.
TABLE = re.compile(r"^(\w+?)(?:_SELF)?_ATTENTION_CLASSES = ", re.MULTILINE)


def has_own_attention(source: str) -> bool:
    """Return whether a model's file defines attention and never looks up an attention function."""
    return INTERFACE not in source and ATTENTION.search(source) is not None


@functools.cache
def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # a class of a notebook: transformers will see
        return ""


def computes_attention(model: Any) -> bool:
    """Return whether a model computes attention itself; of one that holds others, whether it looks into a table."""
    source, name = _source(type(model).__module__), type(model).__name__.upper()
    if any(name.startswith(words.replace("_", "")) for words in TABLE.findall(source)):
        return True
    return not model.config.sub_configs and has_own_attention(source)


def refuse_own_attention(is_of_this_package: Callable[[str | None], bool]) -> None:
    """Have models that compute attention themselves raise where they are made with a name of this package.

    Else they would run their own attention, or fail at the mask or at the name. Of a model that holds others the parts
    are checked.
    """
    from transformers import PreTrainedModel

    resolve = PreTrainedModel.get_correct_attn_implementation
    if hasattr(resolve, "of_helion_attn"):
        return

    @functools.wraps(resolve)
    def checked(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if is_of_this_package(requested_attention) and computes_attention(self):
            raise NotImplementedError(
                f"helion_attn: attn_implementation is {requested_attention!r}, and {type(self).__name__} computes "
                f'attention itself; it must be "eager" or "sdpa", whose calls of scaled_dot_product_attention '
                f"ha.sdpa() replaces. As a part of another model it has its own: "
                f"attn_implementation={{'': {requested_attention!r}, 'NAME_OF_ITS_CONFIG': 'eager'}}"
            )
        found: str = resolve(self, requested_attention, *args, **kwargs)
        return found

    checked.of_helion_attn = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = checked
