"""Print the page of public names, with their signatures and docstrings; the website has it as "API".

python scripts/api.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import helion_attn as ha

#: Every name of `helion_attn.__all__` but the modules, in the order of the page.
GROUPS: dict[str, tuple[str, ...]] = {
    "Attention": ("attention", "quantize", "attention_quantized", "pack", "dequantize", "attention_varlen"),
    "KV cache": ("paged_kv_cache", "cache_constants", "append_kvcache", "attention_kvcache"),
    "Recipes and types": (
        *("Recipe", "FAST", "BALANCED", "ACCURATE", "HYBRID", "BF16", "Rope", "RMSNorm", "BlockMask"),
        *("QuantizedQKV", "PagedKVCache", "OpenPages"),
    ),
    "Under others' names": (
        *("scaled_dot_product_attention", "sdpa", "register_flash_attention", "register_transformers"),
        *("fuse_transformers", "transformers_cache", "register_diffusers", "fuse_diffusers", "Schedule", "unfuse"),
        *("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "flash_attn_qkvpacked_func"),
        *("flash_attn_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func"),
    ),
    "Warnings": ("FallbackWarning", "SwappedLayoutWarning"),
    "Looking into it": ("check", "explain", "plan", "debug", "is_supported"),
    "Stages of quantising": ("apply_rope", "hadamard", "hadamard_matrix", "reflect"),
}

#: Modules of public functions, by title.
MODULES: dict[str, ModuleType] = {
    "Masks": ha.masks,
    "A cache of an engine": ha.kv_cache,
    "Pages of a cache": ha.pages,
    "Reference": ha.reference,
}

INTRODUCTION = """# Public functions and types

What does each function compute, take and raise? The docstrings of `import helion_attn as ha` follow.
In signatures `Layout` is `"bhsd"` or `"bshd"`, `RecipeName` the name of a preset, and `Auto` `"auto"`. Examples begin
with `import torch` and `import helion_attn as ha`. They run on a CPU; with `device="cuda"` their tensors are on a GPU.
"""


def contents() -> str:
    """Links to every name, a line a group."""
    lines = []
    for title, names in [*GROUPS.items(), *((title, ()) for title in MODULES)]:
        links = (f"[`{name}`](#ha{name.lower()})" for name in names)
        lines.append(
            f"- [{title}](#{re.sub('[^a-z -]', '', title.lower()).replace(' ', '-')}){': ' if names else ''}"
            + ", ".join(links)
        )
    return "\n".join(lines) + "\n"


def shown(default: object) -> str:
    """A default as the code has it."""
    return f'"{default}"' if isinstance(default, str) else repr(default)


def signature(name: str, function: Any) -> str:
    """One parameter a line where one line is too long, alike under every Python."""
    parts, starred = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        default = "" if parameter.default is parameter.empty else f" = {shown(parameter.default)}"
        parts.append(f"{parameter.name}: {parameter.annotation}{default}")
    returned = inspect.signature(function).return_annotation
    line = f"{name}({', '.join(parts)}) -> {returned}"
    return (
        line if len(line) <= 100 else "\n".join([f"{name}(", *(f"    {part}," for part in parts), f") -> {returned}"])
    )


def plain(text: str) -> str:
    """Without emphasis where `**` is a power; what is between backticks stays."""
    parts = text.split("`")
    return "`".join(part if i % 2 else part.replace("*", r"\*") for i, part in enumerate(parts))


def paragraphs(doc: str) -> Iterator[str]:
    """A docstring as markdown: its sections' entries are lists, and its example, which comes last, is code."""
    text, _, example = inspect.cleandoc(doc).partition("\n\nExample:\n")
    entries = False
    for line in plain(text).splitlines():
        if re.fullmatch(r"(Args|Returns|Raises|Attributes):", line):
            entries = line in ("Args:", "Raises:", "Attributes:")
            yield f"**{line.removesuffix(':')}**"
            yield ""
        elif not line.startswith(" "):
            entries = entries and not line
            yield line
        elif entries and (entry := re.fullmatch(r"    (\w[\w, ]*): (.*)", line)):
            yield f"- `{entry[1]}`: {entry[2]}"
        else:
            yield f"  {line.strip()}" if entries else line.strip()
    if example:
        yield from ("", "**Example**", "", "```python", *textwrap.dedent(example).splitlines(), "```")


def section(name: str, value: Any, prefix: str = "ha") -> str:
    """A name's heading, signature and docstring."""
    title = f"### {prefix}.{name}"
    if isinstance(value, ha.Recipe):
        changed = [f for f in dataclasses.fields(value) if getattr(value, f.name) != f.default]
        fields = ", ".join(f"{f.name}={shown(getattr(value, f.name))}" for f in changed)
        return f"{title}\n\n`Recipe({fields})`\n"
    body = "\n".join(paragraphs(value.__doc__))
    if dataclasses.is_dataclass(value):
        defaults = {f.name: "" if _no_default(f) else f" = {shown(f.default)}" for f in dataclasses.fields(value)}
        lines = [f"{f.name}: {f.type}{defaults[f.name]}" for f in dataclasses.fields(value)]
        return f"{title}\n\n```python\n{chr(10).join(lines)}\n```\n\n{body}\n"
    if inspect.isclass(value) and "__init__" not in vars(value):
        return f"{title}\n\n```python\nclass {name}({value.__base__.__name__})\n```\n\n{body}\n"
    return f"{title}\n\n```python\n{signature(name, value)}\n```\n\n{body}\n"


def _no_default(field: Any) -> bool:
    return field.default is dataclasses.MISSING


def page() -> str:
    """All of it.

    Raises:
        ValueError: a public name is in no group, or in two.
    """
    listed = [name for names in GROUPS.values() for name in names]
    public = {name for name in ha.__all__ if not isinstance(getattr(ha, name), ModuleType) and name != "__version__"}
    if wrong := public ^ set(listed) or {name for name in listed if listed.count(name) > 1}:
        raise ValueError(f"GROUPS has other names than helion_attn.__all__: {sorted(wrong)}")
    parts = [INTRODUCTION, contents()]
    for title, names in GROUPS.items():
        parts += [f"## {title}\n", *(section(name, getattr(ha, name)) for name in names)]
    for title, module in MODULES.items():
        members = {name: getattr(module, name) for name in module.__all__}
        parts.append(f"## {title}\n\n{inspect.cleandoc(module.__doc__ or '')}\n")
        shown_here = {name: x for name, x in members.items() if inspect.isfunction(x) or inspect.isclass(x)}
        parts += [section(name, x, module.__name__.replace("helion_attn", "ha")) for name, x in shown_here.items()]
    return "\n".join(parts)


if __name__ == "__main__":
    print(page())
