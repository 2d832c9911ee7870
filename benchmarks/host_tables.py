"""The table of what calls cost the host."""

from __future__ import annotations

from tables import LABELS, Loaded, Table, number, rows_of, values_of

#: What was called, by (implementation, stage).
CALLS = {
    ("helion_attn", "kernel"): "`attention_quantized`",
    ("helion_attn", "preprocess"): "`quantize`",
    ("helion_attn", "e2e"): "`attention`",
    ("fa3_fp8", "e2e"): "FA3 FP8, from bf16",
}

LENGTHS = ("same", "by_turns", "new")


def call_name(impl: str, stage: str) -> str:
    """What was called."""
    return CALLS.get((impl, stage), LABELS.get(impl, impl))


def host_tables(loaded: Loaded) -> list[Table]:
    """Microseconds a call, by what was called and by whether its lengths were seen before."""
    rows = rows_of(loaded, "host")
    body = []
    for impl, stage in values_of(rows, "impl", "stage"):
        us = {row["lengths"]: row["host_us"] for row in rows if (row["impl"], row["stage"]) == (impl, stage)}
        body.append([call_name(impl, stage), *(number(us.get(lengths), ".0f") for lengths in LENGTHS)])
    headers = ["call", "same lengths", "two by turns", "new"]
    return [Table("Host time of a call, microseconds", headers, body)] if body else []
