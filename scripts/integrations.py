"""Write the tables of docs/integrations.md, from the rules that the code checks.

python scripts/integrations.py
"""

from __future__ import annotations

import re
from pathlib import Path

from helion_attn import support
from helion_attn.flash_attn import KVCACHE_RULES as KVCACHE
from helion_attn.flash_attn import RULES as FLASH_ATTN
from helion_attn.flash_attn import VARLEN_RULES as VARLEN
from helion_attn.sdpa import RULES as SDPA
from helion_attn.transformers import RULES as TRANSFORMERS

PAGE = Path(__file__).parents[1] / "docs" / "integrations.md"
TABLES = {
    "flash_attn": FLASH_ATTN,
    "flash_attn_varlen": VARLEN,
    "flash_attn_kvcache": KVCACHE,
    "sdpa": SDPA,
    "transformers": TRANSFORMERS,
}


def with_tables(page: str) -> str:
    """The page with its tables as the code has them."""
    for name, rules in TABLES.items():
        begin, end = f"<!-- unsupported:{name} -->\n", f"\n<!-- /unsupported:{name} -->"
        block = f"{begin}\n{support.table(rules)}\n{end}"
        page, found = re.subn(
            re.escape(begin) + ".*?" + re.escape(end), lambda _, new=block: new, page, flags=re.DOTALL
        )
        if found != 1:
            raise ValueError(f"{PAGE.name} has {found} blocks {name}; it must have 1")
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
