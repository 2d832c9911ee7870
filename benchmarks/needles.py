"""Passkeys in long contexts, for suite `quality`: how often SmolLM2 finds one, by length, depth and attention.

A prompt is Python's reference manual with "The pass key is 12345." in it, and ends with "The pass key is ". One pass
reads the answer as well: greedy decoding gives it if each of its tokens is the likeliest after those before it.
"""

from __future__ import annotations

import functools
import importlib
import random
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.attends import BASE, BASE_LABEL, Attend, compare, measured
from benchmarks.lib.harness import Loaded, Results, Row
from benchmarks.lib.suite import Options
from benchmarks.lib.tables import LABELS, Table, series, series_in, values_of

STAGE = "needles"

NEEDLE, QUESTION, ANSWER = "\nThe pass key is {}.\n", "\nThe pass key is ", "{}"

#: Tokens of a prompt with its answer: SmolLM2 was trained for 8192.
GPU_LENGTHS, CPU_LENGTHS = (1024, 2048, 4096, 8192), (256,)

#: Where the key stands, as shares of the text, and keys in each place.
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
GPU_TRIALS, CPU_TRIALS = 20, 1

#: Tokens that are read together.
BATCH = 32768


def prompt(tokenizer: Any, text: Tensor, key: int, length: int, depth: float) -> tuple[list[int], int]:
    """A prompt and its answer, `length` tokens, and how many of them are the answer; text [at least `length`]."""
    needle, question, answer = (tokenizer(x.format(key)).input_ids for x in (NEEDLE, QUESTION, ANSWER))
    rest = text[: length - len(needle) - len(question) - len(answer)].tolist()
    at = round(depth * len(rest))
    return [*rest[:at], *needle, *rest[at:], *question, *answer], len(answer)


def prompts(tokenizer: Any, tokens: Tensor, length: int, trials: int) -> tuple[Tensor, int]:
    """int64 [len(DEPTHS) * trials, length], and the tokens of an answer. The text begins anywhere."""
    generator = random.Random(length)
    found, sizes = [], set()
    for depth in DEPTHS:
        for _ in range(trials):
            start = generator.randrange(len(tokens) - length)
            key = generator.randrange(10000, 100000)
            ids, size = prompt(tokenizer, tokens[start:], key, length, depth)
            found.append(ids)
            sizes.add(size)
    (size,) = sizes
    return torch.tensor(found, device=tokens.device), size


def right(model: Any, asked: Tensor, size: int, attend: Attend) -> Tensor:
    """Whether greedy decoding gives the last `size` tokens of each line of `asked`, bool [lines]."""
    example: Any = importlib.import_module("examples.language_model")
    example.attend_with(model, lambda q, k, v, sm_scale: attend(q, k, v, True, sm_scale))
    found = []
    for lines in asked.split(max(1, BATCH // asked.size(1))):
        # [lines, size]
        likeliest = model(lines, use_cache=False, logits_to_keep=size + 1).logits[:, :-1].argmax(-1)
        found.append((likeliest == lines[:, -size:]).all(1))
    return torch.cat(found)


def places(length: int, found: Tensor, base: Tensor) -> list[Row]:
    """A row for each depth: keys that were found, that the base alone finds, and that it does not find."""
    trials = len(found) // len(DEPTHS)
    return [
        {
            "length": length,
            "depth": depth,
            "trials": trials,
            "found": int(of.sum()),
            "lost": int((of_base & ~of).sum()),
            "gained": int((of & ~of_base).sum()),
        }
        for depth, of, of_base in zip(DEPTHS, found.split(trials), base.split(trials), strict=True)
    ]


def measure(
    options: Options, results: Results, attends: dict[str, Attend], model: Any, tokens: Tensor, tokenizer: Any
) -> None:
    """Rows for each length and attention."""
    on_gpu = options.device.type == "cuda"
    lengths, trials = (GPU_LENGTHS, GPU_TRIALS) if on_gpu else (CPU_LENGTHS, CPU_TRIALS)
    for length in lengths[: 1 if options.quick else None]:
        asked, size = prompts(tokenizer, tokens, length, trials)
        found = functools.partial(right, model, asked, size)
        compare(STAGE, attends, results, found, functools.partial(places, length))


def share(rows: list[Row]) -> str:
    """What of the keys was found, with the binomial standard error."""
    trials = sum(row["trials"] for row in rows)
    if not trials:
        return "-"
    found = sum(row["found"] for row in rows) / trials
    return f"{100 * found:.0f} ± {100 * (found * (1 - found) / trials) ** 0.5:.0f}%"


def tables(loaded: Loaded) -> list[Table]:
    """By length; then by depth as well."""
    found = measured(loaded, STAGE)
    if not found:
        return []
    lengths = [length for (length,) in values_of(found, "length")]
    names, body = series_in(found), []
    for name in names:
        mine = [row for row in found if series(row) == name]
        shares = [share([row for row in mine if row["length"] == length]) for length in lengths]
        beside = "-" if name == BASE else f"{sum(row['lost'] for row in mine)} / {sum(row['gained'] for row in mine)}"
        body.append([LABELS[name], *shares, beside])
    trials = found[0]["trials"] * len({row["depth"] for row in found})
    headers = ["attention", *(f"in {length} tokens" for length in lengths), f"lost / gained beside {BASE_LABEL}"]
    title = f"SmolLM2-135M: passkeys found in Python's reference manual, of {trials} a length, ± one standard error"
    whole = Table(title, headers, body)
    by_depth = [
        [
            str(length),
            f"{depth:.0%}",
            *(
                share([row for row in found if (row["length"], row["depth"], series(row)) == (length, depth, name)])
                for name in names
            ),
        ]
        for length, depth in values_of(found, "length", "depth")
    ]
    title = f"Passkeys found by depth, of {found[0]['trials']} in each place"
    return [whole, Table(title, ["tokens", "depth", *(LABELS[name] for name in names)], by_depth, keys=2)]
