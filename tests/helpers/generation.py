"""What transformers' `generate` calls its cache."""

from __future__ import annotations

from transformers.generation import utils

#: Versions before `cache` have the other name.
CACHE = "cache" if "cache" in utils.ALL_CACHE_NAMES else "past_key_values"
