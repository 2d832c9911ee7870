"""What README.md shows: small tables, one plot and one sentence, each from the results of another suite."""

from __future__ import annotations

import functools

from benchmarks import auto, channels, hard, models, serving, sparse, steps
from benchmarks.lib.harness import Loaded, Row
from benchmarks.lib.masked_peers import FA3_DOCUMENTS
from benchmarks.lib.suite import Block, Plot
from benchmarks.lib.tables import (
    BF16_PEERS,
    LABELS,
    OURS,
    Table,
    by_impl,
    by_series,
    error_text,
    impls_in,
    mask,
    number,
    ratio,
    rows_of,
    speed_text,
    values_of,
)
from benchmarks.speed import speedups

#: The head dim of the errors, the keys of those on N(0, 1), and of those on hard inputs.
D, S, LONG = 128, 4096, 131072

#: The length of the times by preset, full attention.
COST_LENGTH = 16384

#: What of Q, K, V and the probabilities P has 8 bits.
BITS = {
    "balanced": "Q, K int8; P, V e4m3",
    "fast": "all e4m3",
    "accurate": "as BALANCED, Q, K rotated",
    "hybrid": "Q, K int8",
    "sage2": "Q, K int8; P, V e4m3",
    "vllm_fa3": "all e4m3",
    "fa3_fp8": "all e4m3",
    "fa3_bf16": "none",
}

#: Peers that take e4m3 tensors and quantise none.
NOT_QUANTISING = ("fa3_fp8", "vllm_fa3")

#: The models of the figure.
DRAWN = (steps.WAN_SMALL, steps.WAN_720P, steps.FLUX, steps.LLAMA)

#: The models in the table of steps: videos, images, prompts. The page of whole calls has others like these.
STEPS = (
    steps.WAN_SMALL, steps.WAN_720P, steps.H3_10S.name, "HunyuanVideo 13B, 960 x 544, 129 frames", steps.FLUX,
    steps.LLAMA,
)  # fmt: skip

#: The tokens of a step of training.
TRAINED_LENGTH = 32768

#: The layer that two suites time.
LAYER = "Wan 2.1 1.3B"

#: Layers like others in the table of layers, which that page has too.
OTHER_LAYERS = ("CogVideoX", "Llama 70B")

#: Times of a step, by contender.
STEP_TIMES = {name: LABELS[name] for name in ("fa3_bf16", "sage2", "balanced")}
STEP_TIMES |= {"fused": "fused", "masked": "fused, 1/4 of the blocks"}

#: Models by heads, KV heads and mask.
NAMES = {(40, 40, False): "Wan 2.1 14B", (32, 8, True): "Llama 8B"}

#: What a front page shows of suite `sparse`: long sequences, and masks that somebody uses.
SPARSE_KEYS, RANDOM = 32768, ("random", "unequal")


def headline(loaded: Loaded) -> str | None:
    """What a default call makes of a whole step."""
    of_model = steps.by_model(loaded, "steps").get(steps.WAN_SMALL, {})
    whole = steps.speedup(of_model, "balanced")
    if whole is None:
        return None
    return (
        f"A denoising step of {steps.WAN_SMALL}, runs **{speed_text(whole)} times as fast** as with FlashAttention-3 "
        "(FA3) in bf16, at the default preset, BALANCED."
    )


def steps_of(loaded: Loaded) -> dict[str, dict[str, Row]]:
    """Rows of eager steps by model and contender."""
    return {model: rows for file in steps.EAGER for model, rows in steps.by_model(loaded, file).items()}


def step_tables(loaded: Loaded) -> list[Table]:
    """Milliseconds of whole steps."""
    eager = steps_of(loaded)
    body = []
    for model in STEPS:
        if (of_model := eager.get(model)) is None:
            continue
        times = (number(of_model.get(name, {}).get("ms"), ".0f") for name in STEP_TIMES)
        speeds = (speed_text(steps.speedup(of_model, name)) for name in steps.BALANCED)
        body.append([model, *times, " / ".join(speeds)])
    headers = ["a step of, ms", *STEP_TIMES.values(), "over FA3: BALANCED / fused"]
    return [Table("", headers, body)] if body else []


def served(loaded: Loaded) -> str | None:
    """What a server gains; where none was measured, what attention of new tokens takes."""
    found = []
    for N, sequences in ((8192, 64), (32768, 16)):
        rows = serving.measured(loaded, model=serving.LLAMA, N=N, sequences=sequences, stage="decode")
        speed = by_impl(rows, "tokens_per_s")
        over = [ratio(speed.get("helion_attn"), speed.get(impl)) for impl in ("fa3_bf16", "fa3_fp8")]
        if None not in over:
            of_bf16, of_fp8 = (speed_text(x) for x in over)
            found.append(f"{sequences} sequences of {N:,} tokens **{of_bf16} times as fast** as with FA3, {of_fp8} ")
    if found:
        return f"{serving.LLAMA} decodes " + ", ".join(f"{x}times as with its FP8 cache" for x in found) + "."
    cell = by_impl(rows_of(loaded, "decode", stage="kernel", N=8192), "ms")
    ms = [number(cell.get(impl), ".2f") for impl in ("helion_attn", "fa3_bf16", "fa3_fp8")]
    if "helion_attn" not in cell:
        return None
    return (
        f"With 64 sequences of 8,192 keys and Llama 70B's heads, attention of a new token each takes **{ms[0]} ms**; "
        f"FA3 takes {ms[1]} in bf16 and {ms[2]} in FP8."
    )


def filmed(loaded: Loaded) -> str | None:
    """What fusing makes of a step of video."""
    eager = steps_of(loaded)
    wan, h3 = (steps.speedup(eager.get(model, {}), "fused") for model in (steps.WAN_SMALL, steps.H3_10S.name))
    if wan is None or h3 is None:
        return None
    return (
        f"Fused with norms and RoPE, a step of Wan 2.1 1.3B (720p) is **{speed_text(wan)} times as fast** as with FA3, "
        f"of MiniMax-H3 (10 s) {speed_text(h3)} times."
    )


def trained(loaded: Loaded) -> str | None:
    """What both passes gain over PyTorch's own call, and hold in between."""
    speeds, held = [], []
    for row in rows_of(loaded, "training", stage="both", impl="helion_attn", recipe="balanced"):
        same = {name: row[name] for name in ("D", "N", "causal")}
        peers = rows_of(loaded, "training", stage="both", impl="sdpa_bf16", **same)
        if row["N"] == TRAINED_LENGTH and row.get("ms") and peers:
            speeds.append(peers[0]["ms"] / row["ms"])
            held.append(row["bytes_held"] / peers[0]["bytes_held"])
    if not speeds:
        return None
    return (
        f"A forward and backward pass of {TRAINED_LENGTH:,} tokens is {speed_text(min(speeds))} to "
        f"**{speed_text(max(speeds))} times as fast** as PyTorch's bf16 attention, by head dim and mask, and keeps at "
        f"most {number(max(held), '.2f')} of its memory for the backward pass."
    )


def crossovers(loaded: Loaded) -> str | None:
    """From where on `auto` takes 8 bits, of which layers, and how far a peer's times lie apart."""
    found = [auto.from_length(faster) for faster in auto.speedups(rows_of(loaded, "auto")).values()]
    lengths = [length for length in found if length is not None]
    if not lengths or len(lengths) < len(found):
        return None
    rows = {name: cell[0] for name, cell in models.cells_of(loaded).items()}
    in_bf16 = [name for name, row in rows.items() if not auto.takes_8_bits(loaded, row)]
    taken = f"all layers below but {', '.join(in_bf16)}" if in_bf16 else "all layers below"
    return (
        f"8 bits become faster than PyTorch's bf16 attention at a length between {min(lengths)} and {max(lengths)}, by "
        f"head dim, mask and heads (8 or more). `auto` goes by that, not by FA3: it takes BALANCED for "
        f"{taken}.{apart(loaded)}"
    )


def apart(loaded: Loaded) -> str:
    """A sentence on FlashAttention-3's times of one layer in two suites, beside other kernels."""
    layer = models.MODELS[LAYER]
    shape = {"N": layer.N, "H": layer.H}
    found = [
        row["ms"]
        for suite in ("models", "sparse")
        for row in rows_of(loaded, suite, **shape, impl="fa3_bf16")
        if row.get("ms")
    ]
    ours = [row["ms"] for row in rows_of(loaded, "models", **shape, impl="helion_attn", stage="e2e")]
    if len(found) < 2 or not ours:
        return ""
    ends = min(found), max(found)
    least, most = (number(ms, ".0f") for ms in ends)
    slow, fast = (speed_text(ms / ours[0]) for ms in ends)
    return (
        f" FA3's clocks depend on what ran before: it takes {least} to {most} ms for {LAYER}, a speed-up of {slow} to "
        f"{fast}."
    )


def layer_tables(loaded: Loaded) -> list[Table]:
    """Attention of a layer: times, and speeds over the fastest bf16 kernel."""
    body = []
    for name, cell in models.cells_of(loaded).items():
        if name in OTHER_LAYERS:
            continue
        row, faster = cell[0], speedups(cell)
        heads = str(row["H"]) if row["H"] == row["H_kv"] else f"{row['H']}/{row['H_kv']}"
        shape = f"{row['B']} x {row['N']}, {heads} heads, {mask(row['causal'])}, D {row['D']}"
        ours = by_impl((r for r in cell if r["stage"] == "e2e"), "ms").get("helion_attn")
        speeds = (speed_text(faster.get(impl)) for impl in ("helion_attn", "sage2"))
        body.append([name, shape, number(ours, ".2f"), *speeds])
    headers = ["layer", "batch x length", "BALANCED, ms", "its speed-up", "SageAttention 2's speed-up"]
    return [Table("", headers, body)] if body else []


def perplexity(row: Row) -> str:
    """What a language model loses, with the standard error."""
    return f"{100 * row['difference']:+.2f} ± {100 * row['standard_error']:.2f}%"


def error_tables(loaded: Loaded) -> list[Table]:
    """Errors of each preset and peer, on N(0, 1) and on hard inputs, and what they cost."""
    inputs = rows_of(loaded, "accuracy", part="inputs", D=D, causal=False, input="randn")
    # The rungs of 16 bits are in a suite of their own.
    errors = [by_series(rows_of(loaded, "ladder", stage="kernel", D=D, N=S), "error_total")]
    errors[0] |= by_series(inputs, "error_total")
    for kind in hard.PLOTTED:
        errors.append(by_series(rows_of(loaded, "hard", part="hard", input=kind, D=D, N=LONG), "error_total"))
    columns = [*hard.PLOTTED.values()]
    if few := channels.front_errors(loaded, D, LONG):
        errors.append(few)
        columns.append("K in few channels")
    read = [row for row in rows_of(loaded, "language_model", stage="prefill") if row["impl"] in ("helion_attn", *BITS)]
    longest = max((row["context"] for row in read), default=None)
    lost = {row["recipe"] or row["impl"]: perplexity(row) for row in read if row["context"] == longest}
    # Of two suites, each over its own BALANCED: what is in both is of the grid's.
    presets = by_series(rows_of(loaded, "accuracy", part="cost", stage="e2e", D=D, N=COST_LENGTH), "ms")
    cell = rows_of(loaded, "attention", D=D, N=COST_LENGTH, causal=False)
    times = {name: ratio(ms, presets.get("balanced")) for name, ms in presets.items()}
    times |= {impl: 1 / speed for impl, speed in over_balanced(cell).items()}
    body = [
        [
            f"{LABELS[name]} ({bits})",
            *(error_text(of.get(name)) for of in errors),
            lost.get(name, "-"),
            number(times.get(name), ".2f"),
        ]
        for name, bits in BITS.items()
    ]
    headers = ["preset or peer (what has 8 bits)", "N(0, 1)", *columns, "perplexity", "time"]
    return [Table("", headers, body)] if inputs else []


def over_balanced(cell: list[Row]) -> dict[str, float]:
    """Speeds over the default's from bf16 to bf16; of `NOT_QUANTISING` the kernel alone."""
    kernel, e2e = (by_impl((row for row in cell if row["stage"] == stage), "ms") for stage in ("kernel", "e2e"))
    ms = {impl: x for impl, x in kernel.items() if impl in (*BF16_PEERS, *NOT_QUANTISING)} | e2e
    return {impl: e2e["helion_attn"] / x for impl, x in ms.items() if "helion_attn" in e2e}


def sparse_tables(loaded: Loaded) -> list[Table]:
    """Times with block masks, over FlashAttention-3 and FlexAttention: documents over its packed sequences."""
    body = []
    for cell in sparse.cells_of(loaded):
        if cell.D == D and cell.N >= SPARSE_KEYS and cell.mask not in RANDOM:
            fa3 = FA3_DOCUMENTS if (FA3_DOCUMENTS, None, "e2e") in cell.rows else "fa3_bf16"
            ms = number(cell.rows.get(sparse.WHOLE[0], {}).get("ms"), ".1f")
            faster = (speed_text(cell.times_faster(impl)) for impl in (fa3, "flex"))
            body.append([f"{cell.mask}, {cell.N} tokens", f"{cell.density:.0%}", ms, *faster])
    headers = ["mask", "blocks seen", "BALANCED, ms", "speed-up over FA3 bf16", "over FlexAttention"]
    return [Table("", headers, body)] if body else []


def decode_tables(loaded: Loaded) -> list[Table]:
    """Milliseconds a token."""
    rows = rows_of(loaded, "decode", stage="kernel")
    impls = [impl for impl in impls_in(rows) if impl != "copy"]
    body = []
    for (N,) in values_of(rows, "N"):
        ms = by_impl((row for row in rows if row["N"] == N), "ms")
        speed_up = speed_text(ratio(ms.get("fa3_bf16"), ms.get("helion_attn")))
        body.append([str(N), *(number(ms.get(impl), ".2f") for impl in impls), speed_up])
    headers = ["keys", *(f"{LABELS[impl]}, ms" for impl in impls), "speed-up over FA3 bf16"]
    return [Table("", headers, body)] if body else []


def gpu_tables(loaded: Loaded) -> list[Table]:
    """A default call, all-gather, next to bf16 on as many GPUs, the same problem on more and more."""
    rows = rows_of(loaded, "distributed", scaling="strong", strategy="allgather")
    worlds = [world for (world,) in values_of(rows, "world")]
    body = []
    for H, H_kv, causal, N in values_of(rows, "H", "H_kv", "causal", "N"):
        texts = []
        for world in worlds:
            cell = [r for r in rows if (r["N"], r["H"], r["H_kv"], r["world"]) == (N, H, H_kv, world)]
            mine = next((r["ms"] for r in cell if (r["impl"], r["stage"]) == ("helion_attn", "checked")), None)
            bf16 = next((r["ms"] for r in cell if r["impl"] not in OURS), None)
            texts.append(f"{number(mine, '.1f')} ({speed_text(ratio(bf16, mine))})" if mine else "-")
        body.append([f"{NAMES.get((H, H_kv, causal), mask(causal))}, {N} tokens", *texts])
    headers = ["ms (speed-up)", *(f"{world} GPU{'s' * (world > 1)}" for world in worlds)]
    return [Table("", headers, body)] if max(worlds, default=1) > 1 else []


def cost_tables(loaded: Loaded) -> list[Table]:
    """What a call costs besides attention, at most: in the worst of the shapes and presets that were measured."""
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
        ["memory besides inputs and output", f"{number(max(used, default=None), '.2f')} of Q, K and V"],
        ["host time, lengths seen before", microseconds("same")],
        ["host time, new lengths", microseconds("new")],
        ["first call, nothing compiled", f"{number(seconds('cold'), '.0f')} s"],
        ["first call, compiled before", f"{number(seconds('warm'), '.1f')} s"],
    ]
    return [Table("", ["cost", "at most"], body)] if host else []


def no_tables(loaded: Loaded) -> list[Table]:
    """A block of a plot alone."""
    return []


#: By the name in README's marks.
BLOCKS = {
    "headline": Block(
        "steps",
        no_tables,
        (
            Plot(
                "front",
                "A step's time by attention, over FlashAttention-3's",
                functools.partial(steps.plot, models=DRAWN),
            ),
        ),
        sentence=headline,
        shown=None,
    ),
    "door_serve": Block("decode", no_tables, sentence=served, beside=("vllm",), shown=None),
    "door_video": Block("steps", no_tables, sentence=filmed, beside=("steps_new",), shown=None),
    "door_train": Block("training", no_tables, sentence=trained, shown=None),
    "front_layers": Block("models", layer_tables, sentence=crossovers, beside=("auto", "sparse"), shown=None),
    "front_steps": Block("steps", step_tables, beside=("steps_new",), shown=None),
    "front_errors": Block(
        "hard", error_tables, beside=("channels", "accuracy", "ladder", "language_model", "attention"), shown=None
    ),
    "costs": Block("host", cost_tables, beside=("preprocess", "startup"), shown=None),
    "front_sparse": Block("sparse", sparse_tables, shown=None),
    "front_decode": Block("decode", decode_tables, shown=None),
    "front_gpus": Block("distributed", gpu_tables, shown=None),
}
