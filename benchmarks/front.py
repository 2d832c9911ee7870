"""What README.md shows: small tables and two plots, each from the results of another suite."""

from __future__ import annotations

from benchmarks import hard, models
from benchmarks.lib.harness import Loaded, Row
from benchmarks.lib.suite import Block
from benchmarks.lib.tables import (
    ACCURATE_PEERS,
    FP8_PEERS,
    LABELS,
    OURS,
    Table,
    by_impl,
    by_series,
    error_text,
    mask,
    number,
    ratio,
    rows_of,
    speed_text,
    values_of,
)
from benchmarks.speed import speedups

#: The cell of every figure that is of one: head dim, length, full attention.
D, S = 128, 4096

#: The number of keys of every error on a hard input.
LONG = 131072

#: preset -> (what has 8 bits, when to take it).
CHOICES = {
    "fast": ("Q, K, P, V in e4m3", "speed first"),
    "balanced": ("Q, K in int8; P, V in e4m3", "the default"),
    "accurate": ("as BALANCED, Q and K rotated", "outlier channels"),
    "hybrid": ("Q, K in int8", "accuracy first"),
    "bf16": ("none", "to compare with"),
}


def when_tables(loaded: Loaded) -> list[Table]:
    """The default's speed over bf16's by head dim, mask and length."""
    rows = rows_of(loaded, "attention")
    lengths = [N for (N,) in values_of(rows, "N")]
    body = []
    for head_dim, causal in values_of(rows, "D", "causal"):
        cells = ([r for r in rows if (r["D"], r["causal"], r["N"]) == (head_dim, causal, N)] for N in lengths)
        body.append([f"D {head_dim}, {mask(causal)}", *(speed_text(speedups(c).get("helion_attn")) for c in cells)])
    return [Table("", ["speed-up by length", *map(str, lengths)], body)] if body else []


def perplexity(row: Row) -> str:
    """What a language model loses, with the standard error."""
    return f"{100 * row['difference']:+.2f} ± {100 * row['standard_error']:.2f}%"


def preset_tables(loaded: Loaded) -> list[Table]:
    """What each preset has in 8 bits, its error and its speed."""
    # The rungs of 16 bits are in a suite of their own.
    rungs = rows_of(loaded, "ladder", stage="kernel", D=D, N=S)
    inputs = rows_of(loaded, "accuracy", part="inputs", D=D, causal=False, input="randn")
    errors = by_series(rungs, "error_total") | by_series(inputs, "error_total")
    hard_errors = by_series(rows_of(loaded, "hard", part="hard", input="k_channels", D=D, N=LONG), "error_total")
    ms = by_series(rows_of(loaded, "accuracy", part="cost", stage="e2e", D=D, N=16384), "ms")
    read = rows_of(loaded, "language_model", stage="prefill", impl="helion_attn")
    longest = max((row["context"] for row in read), default=None)
    lost = {row["recipe"]: perplexity(row) for row in read if row["context"] == longest}
    body = [
        [
            f"`ha.{LABELS[name]}`",
            bits,
            error_text(errors.get(name)),
            error_text(hard_errors.get(name)),
            lost.get(name, "-"),
            number(ratio(ms.get(name), ms.get("balanced")), ".2f"),
            when,
        ]
        for name, (bits, when) in CHOICES.items()
    ]
    headers = ["preset", "8 bits", "error, N(0, 1)", "error, K biased", "perplexity", "time", "when"]
    return [Table("", headers, body)] if errors else []


def peer_tables(loaded: Loaded) -> list[Table]:
    """This package beside the FP8 peers: speed of the kernel, and errors on hard inputs."""
    names = ("balanced", "fast", *ACCURATE_PEERS, *FP8_PEERS)
    impl_of = {"balanced": "helion_attn"}
    tflops = by_impl(rows_of(loaded, "attention", stage="kernel", D=D, N=S, causal=False), "tflops")
    errors = {
        kind: by_series(rows_of(loaded, "hard", part="hard", input=kind, D=D, N=LONG), "error_total")
        for kind in hard.PLOTTED
    }
    body = []
    for name in names:
        speed = number(tflops.get(impl_of.get(name, name)), ".0f")
        body.append([LABELS[name], speed, *(error_text(of.get(name)) for of in errors.values())])
    headers = ["", "kernel, TFLOP/s", *(f"error, {title}" for title in hard.PLOTTED.values())]
    return [Table("", headers, body)] if tflops else []


def decode_tables(loaded: Loaded) -> list[Table]:
    """Milliseconds a token."""
    rows = rows_of(loaded, "decode", stage="kernel")
    body = []
    for (N,) in values_of(rows, "N"):
        ms = by_impl((row for row in rows if row["N"] == N), "ms")
        times = [ms.get(impl) for impl in ("helion_attn", "fa3_fp8", "fa3_bf16")]
        body.append([str(N), *(number(x, ".2f") for x in times), speed_text(ratio(times[2], times[0]))])
    headers = ["keys", "helion_attn, ms", "FA3 FP8, ms", "FA3 bf16, ms", "speed-up over FA3 bf16"]
    return [Table("", headers, body)] if body else []


def gpu_tables(loaded: Loaded) -> list[Table]:
    """A default call, all-gather, next to bf16 on as many GPUs, the same problem on more and more."""
    rows = rows_of(loaded, "distributed", scaling="strong", strategy="allgather")
    worlds = [world for (world,) in values_of(rows, "world")]
    body = []
    for N, H, causal in values_of(rows, "N", "H", "causal"):
        texts = []
        for world in worlds:
            cell = [r for r in rows if (r["N"], r["H"], r["causal"], r["world"]) == (N, H, causal, world)]
            mine = next((r["ms"] for r in cell if (r["impl"], r["stage"]) == ("helion_attn", "checked")), None)
            bf16 = next((r["ms"] for r in cell if r["impl"] not in OURS), None)
            texts.append(f"{number(mine, '.1f')} ({speed_text(ratio(bf16, mine))})" if mine else "-")
        body.append([f"{N} tokens, {H} heads, {mask(causal)}", *texts])
    headers = ["ms (speed-up)", *(f"{world} GPU{'s' if world > 1 else ''}" for world in worlds)]
    return [Table("", headers, body)] if body else []


def cost_tables(loaded: Loaded) -> list[Table]:
    """What a call costs besides attention, at most: in the worst of the shapes and presets that were measured."""
    quantise = [row for row in rows_of(loaded, "preprocess", stage="preprocess") if "copy_ratio" in row]
    copies = {
        name: max(
            (row["copy_ratio"] for row in quantise if row["recipe"] == name and not row.get("rope")), default=None
        )
        for name in ("balanced", "accurate")
    }
    host = {(r["impl"], r["stage"], r["lengths"]): r["host_us"] for r in rows_of(loaded, "host")}
    starts = [row for row in rows_of(loaded, "startup") if row.get("first_s") is not None]

    def seconds(cache: str) -> float | None:
        return max((row["import_s"] + row["first_s"] for row in starts if row["cache"] == cache), default=None)

    def microseconds(lengths: str) -> str:
        ours, fa3 = (
            number(host.get((*call, lengths)), ".0f") for call in (("helion_attn", "e2e"), ("fa3_bf16", "kernel"))
        )
        return f"{ours} us (FA3 in bf16: {fa3})"

    used = [
        # Of Q, K and V in bf16, with as many channels in V.
        row["peak_extra_bytes"] / (2 * row["D"] * (row["H"] * row["M"] + 2 * row["H_kv"] * row["N"]) * row["B"])
        for row in rows_of(loaded, "preprocess", stage="e2e")
        if "peak_extra_bytes" in row
    ]
    body = [
        ["memory during a call", f"{number(max(used, default=None), '.2f')} of Q, K and V"],
        [
            "quantising, without RoPE",
            f"{number(copies['balanced'], '.2f')} of a copy's time (ACCURATE: {number(copies['accurate'], '.2f')})",
        ],
        ["host time, lengths seen before", microseconds("same")],
        ["host time, new lengths", microseconds("new")],
        ["a process's first call, nothing compiled", f"{number(seconds('cold'), '.0f')} s"],
        ["the same, compiled before", f"{number(seconds('warm'), '.1f')} s"],
    ]
    return [Table("", ["cost", "at most"], body)] if host else []


def model_tables(loaded: Loaded) -> list[Table]:
    """Speed-ups of the plot as numbers."""
    cells = models.cells_of(loaded)
    impls = [impl for impl in (*OURS, "sage2") if any(speedups(cell).get(impl) for cell in cells.values())]
    body = []
    for name, cell in cells.items():
        row, faster = cell[0], speedups(cell)
        heads = str(row["H"]) if row["H"] == row["H_kv"] else f"{row['H']}/{row['H_kv']}"
        shape = f"{row['B']} x {row['N']}, {heads} heads, {mask(row['causal'])}, D {row['D']}"
        body.append([name, shape, *(speed_text(faster.get(impl)) for impl in impls)])
    headers = ["attention of a layer", "batch x length", *(LABELS[impl] for impl in impls)]
    return [Table("", headers, body)] if body else []


def no_tables(loaded: Loaded) -> list[Table]:
    """A block of a plot alone."""
    return []


#: By the name in README's marks.
BLOCKS = {
    "when": Block("attention", when_tables, brief=True),
    "presets": Block("accuracy", preset_tables, beside=("ladder", "hard", "language_model"), brief=True),
    "front_models": Block("models", model_tables, (models.PLOT,), brief=True),
    "front_errors": Block("hard", no_tables, (hard.PLOT,), brief=True),
    "peers": Block("attention", peer_tables, beside=("hard",), brief=True),
    "front_decode": Block("decode", decode_tables, brief=True),
    "front_gpus": Block("distributed", gpu_tables, brief=True),
    "costs": Block("host", cost_tables, beside=("preprocess", "startup"), brief=True),
}
