"""Write the tables of docs/integrations.md, from the rules that the code checks and from transformers' models, and the
example in docs/kv_cache.md.

python scripts/integrations.py
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from helion_attn.integrations.diffusers import OWN_CALLS
from helion_attn.integrations.diffusers import RULES as DIFFUSERS
from helion_attn.integrations.flash_attn_arguments import KVCACHE_RULES as KVCACHE
from helion_attn.integrations.flash_attn_arguments import RULES as FLASH_ATTN
from helion_attn.integrations.flash_attn_arguments import VARLEN_RULES as VARLEN
from helion_attn.integrations.fused.fuse_diffusers import FUSED
from helion_attn.integrations.fused.fuse_transformers import KINDS
from helion_attn.integrations.rules import table
from helion_attn.integrations.sageattention import RULES as SAGEATTENTION
from helion_attn.integrations.sdpa import RULES as SDPA
from helion_attn.integrations.transformers import RULES as TRANSFORMERS
from helion_attn.integrations.transformers_models import INTERFACE, TABLE, has_own_attention

ROOT = Path(__file__).parents[1]
PAGE, CACHE_PAGE = ROOT / "docs" / "integrations.md", ROOT / "docs" / "kv_cache.md"
TABLES = {
    "flash_attn": FLASH_ATTN,
    "flash_attn_varlen": VARLEN,
    "flash_attn_kvcache": KVCACHE,
    "sageattention": SAGEATTENTION,
    "sdpa": SDPA,
    "transformers": TRANSFORMERS,
    "diffusers": DIFFUSERS,
}


def with_blocks(page: str, blocks: dict[str, str]) -> str:
    """The page with what stands between `<!-- NAME -->` and `<!-- /NAME -->` replaced, by name."""
    for name, block in blocks.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        new = f"{begin}\n{block}\n{end}"
        page, found = re.subn(re.escape(begin) + ".*?" + re.escape(end), lambda _, new=new: new, page, flags=re.DOTALL)
        if found != 1:
            raise ValueError(f"the page has {found} blocks {name}; it must have 1")
    return page


def with_tables(page: str) -> str:
    """The page with its tables as the code has them."""
    blocks = {f"unsupported:{name}": table(rules) for name, rules in TABLES.items()}
    models = [f"| {models} | {', '.join(f'`{name}`' for name in names)} |" for models, names in OWN_CALLS.items()]
    blocks["own_calls:diffusers"] = "\n".join(["| run inside `ha.sdpa()` | what calls it |", "|---|---|", *models])
    fused = [
        f"| `{function}` | {kind.model} | {kind.parts} |"
        for function, kinds in (("ha.fuse_transformers", KINDS), ("ha.fuse_diffusers", FUSED))
        for kind in kinds
    ]
    blocks["fused:models"] = "\n".join(["| function | model | fused |", "|---|---|---|", *fused])
    return with_blocks(page, blocks)


#: What models hand to attention functions that this package's refuses, by the argument.
HANDED = {"position_bias": "position biases", "indices": "sparse indices", "block_indices": "sparse indices"}

#: Models whose masks it refuses: they are biases.
MASKS_OF_BIASES = ("beit", "doge", "esmfold2", "granite_speech5", "nemotron_asr_streaming", "parakeet", "swin")


def kinds_of_models() -> dict[str, list[str]]:
    """The folders of transformers' models with attention in them, by what they do with an attention function."""
    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    kinds: dict[str, list[str]] = {"take it": []}
    for folder in sorted(Path(found.origin).with_name("models").iterdir()):
        source = "\n".join(file.read_text() for file in sorted(folder.glob("modeling_*.py")))
        handed = ["masks of biases"] if folder.name in MASKS_OF_BIASES else []
        calls = re.findall(r"attention_interface\((.*?)\n\s*\)\n", source, re.DOTALL)
        handed += [what for name, what in HANDED.items() if any(re.search(rf"\b{name}=", call) for call in calls)]
        if has_own_attention(source) or TABLE.search(source):
            kind = "compute attention themselves"
        elif INTERFACE not in source:
            continue
        else:
            kind = f"hand it {handed[0]}, which raise" if handed else "take it"
        kinds.setdefault(kind, []).append(folder.name)
    return kinds


def with_models(page: str) -> str:
    """The page with transformers' models as the installed version has them."""
    from transformers import __version__

    rows = [f"| {kind} | {', '.join(names)} |" for kind, names in kinds_of_models().items()]
    head = f"| with the attention function | models of transformers {__version__} |"
    return with_blocks(page, {"models:transformers": "\n".join([head, "|---|---|", *rows])})


def with_example(page: str) -> str:
    """The page of the cache with examples/serving_loop.py."""
    code = (ROOT / "examples" / "serving_loop.py").read_text()
    return with_blocks(page, {"example:serving_loop": f"```python\n{code}```"})


if __name__ == "__main__":
    CACHE_PAGE.write_text(with_example(CACHE_PAGE.read_text()))
    PAGE.write_text(with_models(with_tables(PAGE.read_text())))
