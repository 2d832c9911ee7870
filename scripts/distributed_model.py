"""Writes the tables of docs/distributed.md's model on paper between its marks.

python scripts/distributed_model.py
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "distributed.md"
BEGIN, END = "<!-- model -->", "<!-- /model -->"

#: FLOP/s of a GPU, bytes/s within a machine and between machines, and of copying: the document says where from.
RATE, NVLINK, NETWORK, COPY = 850e12, 360e9, 45e9, 3e12

#: Seconds of a collective within a machine, and for each doubling of GPUs beyond it.
LATENCY, LATENCY_BEYOND = 20e-6, 5e-6

MACHINE = 8


class Problem(NamedTuple):
    """One sequence: tokens, heads and mask; D 128."""

    name: str
    S: int
    H: int
    H_kv: int
    causal: bool
    D: int = 128


PROBLEMS = (
    Problem("video, 40/40 heads, 32,760 tokens, full", 32760, 40, 40, False),
    Problem("video, 40/40 heads, 75,600 tokens, full", 75600, 40, 40, False),
    Problem("LLM, 64/8 heads, 128k tokens, causal", 131072, 64, 8, True),
    Problem("LLM, 64/8 heads, 1M tokens, causal", 2**20, 64, 8, True),
    Problem("LLM, 64/8 heads, 10M tokens, causal", 10 * 2**20, 64, 8, True),
)
GPUS = (2, 8, 16, 64, 512)


def milliseconds(p: Problem, P: int, bits: int) -> dict[str, float | None]:
    """Compute, and each strategy, of a rank; None where heads cannot be shared out."""
    e = bits / 8
    own, link = p.S / P * p.D, NVLINK if P <= MACHINE else NETWORK
    latency = LATENCY + LATENCY_BEYOND * max(0.0, math.log2(P / MACHINE))
    compute = 4 * p.S**2 * p.D * p.H / (2 if p.causal else 1) / P / RATE
    keys = own * p.H_kv * 2 * e
    # A byte comes into a machine once, over the links of all its GPUs.
    gather = max((P - 1) * keys / NVLINK, max(0, P - MACHINE) * keys / (MACHINE * NETWORK))
    heads = (P - 1) / P * own * (p.H * e + 2 * max(p.H_kv, P) * e + 2 * p.H) / link
    merges = (P - 1) * 16 * own * p.H / COPY
    shared = p.H % P == 0 and (p.H_kv % P == 0 or P % p.H_kv == 0)
    found = {
        "compute": compute,
        "allgather": compute + gather + latency,
        "ulysses": compute + heads + 2 * latency if shared else None,
        "ring": max(compute, (P - 1) * (keys / link + latency)) + merges,
    }
    return {name: None if seconds is None else 1e3 * seconds for name, seconds in found.items()}


def table(p: Problem) -> str:
    """A row for each number of GPUs: times in 8 bits, the fastest in bold, and all-gather's in 16 bits."""
    lines = [
        f"**{p.name}** (ms a rank)",
        "",
        "| GPUs | compute | allgather | ulysses | ring | K and V in bf16, allgather |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for P in GPUS:
        if p.S // P < 128:
            continue
        of = milliseconds(p, P, 8)
        fastest = min((ms, name) for name, ms in of.items() if ms is not None and name != "compute")[1]
        cells = [
            "-" if (ms := of[name]) is None else f"**{ms:.3g}**" if name == fastest else f"{ms:.3g}"
            for name in ("compute", "allgather", "ulysses", "ring")
        ]
        sixteen = milliseconds(p, P, 16)["allgather"]
        lines.append(f"| {P} | {' | '.join(cells)} | {sixteen:.3g} |")
    return "\n".join(lines)


def tables() -> str:
    """What stands between the marks."""
    return "\n\n".join(table(p) for p in PROBLEMS)


def with_tables(text: str) -> str:
    """The document, with the tables between the marks."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Write them."""
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
