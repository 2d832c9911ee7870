"""Suite `same_token`: whether a token gets the answer that it has in another call.

    python benchmarks/attention.py --suite same_token

`decode`: a row of a causal prefill beside the same row alone, on the keys that it sees. `cache`: that row read from an
8-bit KV cache, whose keys have a descale each. `later keys`: a causal row beside itself where as many keys
follow. `batch`: a sequence alone and beside two others. `decode` and `batch` have `num_splits` chosen and fixed.
"""

from __future__ import annotations

import torch
from torch import Tensor

import helion_attn as ha
from benchmarks.lib.harness import Loaded, Results, Row
from benchmarks.lib.recipes import PRESETS, RUNGS
from benchmarks.lib.suite import Block, Options, Suite, progress
from benchmarks.lib.tables import LABELS, Table, error_text, rows_of
from devtools.inputs import make_qkv
from helion_attn.testing import relative_error

#: Keys on a GPU and in the interpreter, head dim, heads; and rows that are compared.
GPU_KEYS, CPU_KEYS, D, H, ROWS = 4096, 512, 128, 4, 8

PARTS = ("decode", "decode, num_splits=1", "cache", "later keys", "batch", "batch, num_splits=1")


def row(part: str, recipe: str, keys: int, a: Tensor, b: Tensor, error: float) -> Row:
    """How far `b` is from `a`, which has a total error of `error`."""
    same = torch.equal(a, b)
    ratio = relative_error(b, a) / error
    ours = {"impl": "helion_attn", "recipe": recipe, "stage": "kernel", "N": keys, "D": D}
    return ours | {"part": part, "same_bits": same, "ratio": ratio}


def cached(q: Tensor, k: Tensor, v: Tensor, recipe: ha.Recipe) -> Tensor:
    """The last rows, q [1, H, ROWS, D], from a cache that holds k and v, its keys as the recipe has them."""
    keys = k.size(2)
    size = ha.paged_kv_cache(1, H, D, device=q.device).page_size
    pages = -(-keys // size)
    cache_recipe = ha.FAST if recipe.qk_dtype == torch.float8_e4m3fn else ha.BALANCED
    cache = ha.paged_kv_cache(pages, H, D, device=q.device, recipe=cache_recipe)
    table = torch.arange(pages, dtype=torch.int32, device=q.device)[None]
    ha.append_kvcache(cache, k, v, table, torch.zeros(1, dtype=torch.int32, device=q.device))
    lengths = torch.full((1,), keys, dtype=torch.int32, device=q.device)
    return ha.attention_kvcache(q, cache, table, lengths, causal=True)


def rows(options: Options, name: str) -> list[Row]:
    """Every part with a recipe."""
    recipe, keys = (PRESETS | RUNGS)[name], CPU_KEYS if options.device.type == "cpu" else GPU_KEYS
    q, k, v = make_qkv("biased_v", 3, H, H, 2 * keys, 2 * keys, D, device=options.device)
    k, v = k + 2 * k[:, :, :1], v + 1
    one, rows_of_one = slice(0, 1), slice(keys - ROWS, keys)
    seen = [x[one, :, :keys] for x in (q, k, v)]
    prefill = ha.attention(*seen, causal=True, recipe=recipe)[:, :, rows_of_one]
    error = relative_error(prefill, ha.reference.attention(seen[0][:, :, rows_of_one], *seen[1:], causal=True))
    last, query = prefill[:, :, -1:], seen[0][:, :, -1:]
    later = ha.attention(q[one], k[one], v[one], causal=True, recipe=recipe)[:, :, rows_of_one]
    found = [row("later keys", name, keys, prefill, later, error)]
    for part, splits in (("decode", None), ("decode, num_splits=1", 1)):
        alone = ha.attention(query, *seen[1:], causal=True, recipe=recipe, num_splits=splits)
        found.append(row(part, name, keys, last, alone, error))
    if name in PRESETS:
        from_cache = cached(seen[0][:, :, rows_of_one], seen[1], seen[2], recipe)
        found.append(row("cache", name, keys, prefill, from_cache, error))
    for part, splits in (("batch", None), ("batch, num_splits=1", 1)):
        few = q[:, :, :ROWS]
        own = ha.attention(few[one], k[one], v[one], recipe=recipe, num_splits=splits)
        beside = ha.attention(few, k, v, recipe=recipe, num_splits=splits)[one]
        found.append(row(part, name, keys, own, beside, error))
    return found


def run(options: Options, results: Results) -> None:
    """The suite."""
    for name in progress([*PRESETS, *RUNGS], "same token"):
        results.add(*rows(options, name))


def tables(loaded: Loaded) -> list[Table]:
    """By recipe, the same bits, or the difference as a share of the total error."""
    found = rows_of(loaded, "same_token")
    body = []
    for part in PARTS:
        of_part = {r["recipe"]: r for r in found if r["part"] == part}
        cells = [of_part.get(name) for name in (*PRESETS, *RUNGS)]
        texts = ["" if r is None else "same bits" if r["same_bits"] else error_text(r["ratio"]) for r in cells]
        body.append([part, *texts])
    headers = ["beside", *(LABELS[name] for name in (*PRESETS, *RUNGS))]
    return [Table("Difference of a token's outputs, over their total error", headers, body)] if found else []


SUITE = Suite("same_token", run, {"same_token": Block("same_token", tables)})
