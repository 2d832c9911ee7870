"""The preprocessing suites: `quantize` by recipe, and its stages one by one, against a copy; memory of `attention`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import helion_attn as ha
from benchmarks.lib.checks import Check
from benchmarks.lib.harness import (
    Loaded,
    Results,
    Row,
    copier,
    copy_bandwidth,
    gigabytes_per_second,
    nbytes,
    result_row,
    time_interleaved,
)
from benchmarks.lib.peers import helion_attn_e2e
from benchmarks.lib.problem import dry_workload, grid_workload
from benchmarks.lib.recipes import DEFAULT, PRESETS, RECIPES
from benchmarks.lib.suite import Block, Options, Suite, progress
from benchmarks.lib.tables import LABELS, Table, by_impl, labels, number, rows_of, values_of
from devtools.inputs import make_qkv
from devtools.workloads import Workload
from helion_attn import configs
from helion_attn.kernels.lib.norm import no_norms
from helion_attn.kernels.lib.rope import rope_tables as kernel_tables
from helion_attn.kernels.lib.strided import strided_qkv
from helion_attn.ops.quantize import all_tensors
from helion_attn.preprocess import pack, sample
from helion_attn.problem import rope_arguments
from helion_attn.validate.dense import MIN_D

#: The head dim at which the presets are also timed with RoPE.
ROPE_DIM = 128

#: The share of a copy's bandwidth that `quantize` and its stages are to reach.
COPY_FRACTION = 0.75

#: That of V packed alone.
COPY_FRACTION_OF_V = 0.65


def workloads(options: Options) -> list[Workload]:
    """16k tokens x hidden 2048 in long and in short sequences."""
    if options.device.type == "cpu":
        return [dry_workload(D) for D in options.dims]
    return [grid_workload(S, D) for D in options.dims for S in ((4096,) if options.quick else (4096, 16384))]


def rope_tables(S: int, D: int, device: torch.device) -> ha.Rope:
    """RoFormer's angles for S positions, all channels rotated."""
    frequency = 10000.0 ** (-torch.arange(0, D, 2, device=device) / D)
    angle = torch.arange(S, device=device)[:, None] * frequency  # [S, D / 2]
    return ha.Rope(angle.cos(), angle.sin())


def bytes_read(q: Tensor, k: Tensor, v: Tensor, rope: ha.Rope | None) -> int:
    """Bytes of the tensors; what a sample of some keys reads is left out."""
    return nbytes(q, k, v) + (0 if rope is None else nbytes(rope.cos, rope.sin))


def bytes_written(q: Tensor, k: Tensor, v: Tensor, recipe: ha.Recipe) -> int:
    """Bytes of the packed tensors, descales and means included."""
    packed = ha.quantize(q, k, v, recipe=recipe)
    return nbytes(*(x for x in vars(packed).values() if isinstance(x, Tensor)))


def run(options: Options, results: Results) -> None:
    """The suite."""
    for w in progress(workloads(options), "preprocess"):
        q, k, v = make_qkv("randn", w.B, w.H, w.H_kv, w.M, w.N, w.D, torch.bfloat16, options.device, seed=0)
        results.add(*_quantize_rows(w, q, k, v, options))
        if options.device.type == "cuda":
            results.add(_memory_row(w, q, k, v))
    if options.device.type == "cuda":
        results.meta["copy_gbs"] = copy_bandwidth(2**30, options.device)
        results.add()


def _quantize_rows(w: Workload, q: Tensor, k: Tensor, v: Tensor, options: Options) -> list[Row]:
    rope = rope_tables(w.N, w.D, options.device)
    cases: dict[tuple[str, bool], ha.Rope | None] = {(name, False): None for name in RECIPES}
    if w.D == ROPE_DIM or options.device.type == "cpu":
        cases |= {(name, True): rope for name in PRESETS}
    runs: dict[tuple[str, bool], Callable[[], object]] = {
        (name, roped): functools.partial(ha.quantize, q, k, v, recipe=RECIPES[name], rope=given)
        for (name, roped), given in cases.items()
    }
    ms = time_interleaved({**runs, ("copy", False): copier(q, k, v)}, options.device, options.repeats)
    size, copy_ms = nbytes(q, k, v), ms.pop(("copy", False))
    copy_gbs = gigabytes_per_second(2 * size, copy_ms)
    rows = [result_row("copy", w, "preprocess", "randn", ms=copy_ms) | {"gbs": copy_gbs}]
    for (name, roped), given in cases.items():
        written = bytes_written(q, k, v, RECIPES[name])
        moved = bytes_read(q, k, v, given) + written
        gbs = gigabytes_per_second(moved, ms[name, roped])
        row = result_row("helion_attn", w, "preprocess", "randn", recipe=name, ms=ms[name, roped])
        row |= {
            "copy_ratio": ms[name, roped] / copy_ms,
            "gbs": gigabytes_per_second(size + written, ms[name, roped]),
            "moved_bytes": moved,
            "moved_gbs": gbs,
            "copy_fraction": gbs / copy_gbs,
        }
        rows.append(row | {"rope": True} if roped else row)
    return rows


def _memory_row(w: Workload, q: Tensor, k: Tensor, v: Tensor) -> Row:
    run = helion_attn_e2e(ha.BALANCED)(q, k, v, False, w.D**-0.5).run
    run()  # what is allocated once and kept is no part of the peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = run()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - nbytes(out)
    packed = bytes_written(q, k, v, ha.BALANCED)
    return result_row("helion_attn", w, "e2e", "randn", recipe=DEFAULT) | {
        "peak_extra_bytes": extra,
        "packed_bytes": packed,
    }


# --- stages ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stage:
    """What is timed: `run` reads `read` bytes and writes what it returns, each once."""

    part: str  # what it is called in result rows
    recipe: str | None  # a preset, or None for a stage that no recipe changes
    run: Callable[[], object]  # one launch
    read: int  # bytes, tables included

    def moved(self) -> int:
        """Bytes read and written."""
        out = self.run()
        return self.read + nbytes(*(out if isinstance(out, tuple) else (out,)))


def pack_launch(
    q: Tensor, k: Tensor, v: Tensor, recipe: ha.Recipe, rope: ha.Rope | None
) -> Callable[[], tuple[Tensor, ...]]:
    """The last launch of `quantize` alone: transform, scale, cast and pack. What it needs to know is computed here."""
    tile = configs.packing(q.size(3), v.size(3), recipe.bits)
    source = strided_qkv(q, k, v, tile)
    unused = q.new_empty(1, dtype=torch.float32)
    norms, tables = no_norms(unused), kernel_tables(rope_arguments(rope), source.D_row, unused)
    known = sample.launch(source, norms, tables, recipe)
    return lambda: all_tensors(
        pack.launch(source, norms, tables, known, tile.bm, tile.bn, recipe, needs_lse_shift=False)
    )


def stages(w: Workload, q: Tensor, k: Tensor, v: Tensor) -> list[Stage]:
    """Each stage alone, and the launch that does them all.

    One launch packs Q, K and V. For Q alone there is one key, and for K and V one query. V comes with K of the fewest
    channels, since both have the same keys.
    """
    rope = rope_tables(w.N, w.D, q.device)
    rope_16bit = dataclasses.replace(rope, cos=rope.cos.bfloat16(), sin=rope.sin.bfloat16())
    angles = nbytes(rope.cos, rope.sin)
    one_key, one_query, narrow_k = (k[:, :, :1], v[:, :, :1]), q[:, :, :1], k[..., :MIN_D].contiguous()
    found = [
        Stage("RoPE of Q", None, functools.partial(ha.apply_rope, q, rope), nbytes(q) + angles),
        Stage(
            "RoPE of Q, interleaved",
            None,
            functools.partial(ha.apply_rope, q, dataclasses.replace(rope, interleaved=True)),
            nbytes(q) + angles,
        ),
        Stage("Hadamard of Q", None, functools.partial(ha.hadamard, q), nbytes(q)),
        Stage("reflection of Q", None, functools.partial(ha.reflect, q), nbytes(q)),
    ]
    for name, recipe in PRESETS.items():
        rotated = dataclasses.replace(recipe, hadamard=True, reflect=False)
        inputs: dict[str, tuple[Tensor, Tensor, Tensor, ha.Recipe, ha.Rope | None]] = {
            "pack Q": (q, *one_key, recipe, None),
            "pack K and V": (one_query, k, v, recipe, None),
            "pack V": (one_query[..., :MIN_D], narrow_k, v, recipe, None),
            "pack": (q, k, v, recipe, None),
            "RoPE, Hadamard, pack": (q, k, v, rotated, rope),
            "RoPE (bf16 tables), Hadamard, pack": (q, k, v, rotated, rope_16bit),
        }
        if not recipe.hadamard:
            inputs |= {
                "RoPE, pack": (q, k, v, recipe, rope),
                "RoPE (bf16 tables), pack": (q, k, v, recipe, rope_16bit),
            }
        for part, given in inputs.items():
            tables = 0 if given[4] is None else nbytes(given[4].cos, given[4].sin)
            found.append(Stage(part, name, pack_launch(*given), nbytes(*given[:3]) + tables))
    return found


def run_stages(options: Options, results: Results) -> None:
    """The suite of stages."""
    for w in progress(workloads(options), "stages"):
        q, k, v = make_qkv("randn", w.B, w.H, w.H_kv, w.M, w.N, w.D, torch.bfloat16, options.device, seed=0)
        timed = {(stage.part, stage.recipe): stage for stage in stages(w, q, k, v)}
        runs: dict[tuple[str, str | None], Callable[[], object]] = {key: stage.run for key, stage in timed.items()}
        ms = time_interleaved({**runs, ("copy", None): copier(q, k, v)}, options.device, options.repeats)
        copy_ms = ms.pop(("copy", None))
        copy_gbs = gigabytes_per_second(2 * nbytes(q, k, v), copy_ms)
        rows = [result_row("copy", w, "preprocess", "randn", ms=copy_ms) | {"gbs": copy_gbs}]
        for key, stage in timed.items():
            moved = stage.moved()
            gbs = gigabytes_per_second(moved, ms[key])
            row = result_row("helion_attn", w, "preprocess", "randn", recipe=stage.recipe, ms=ms[key])
            row |= {"part": stage.part, "moved_bytes": moved, "moved_gbs": gbs, "copy_fraction": gbs / copy_gbs}
            rows.append(row)
        results.add(*rows)


# --- tables ---------------------------------------------------------------------------------------


def unroped_default(rows: Iterable[Row]) -> list[Row]:
    """Preprocessing with the default recipe and without RoPE, and the rows without a recipe."""
    return [row for row in rows if row["recipe"] in (None, DEFAULT) and not row.get("rope")]


def tables(loaded: Loaded) -> list[Table]:
    """Time of `quantize` and memory of `attention`."""
    rows = unroped_default(rows_of(loaded, "preprocess"))
    body = []
    for D, S in values_of(rows, "D", "N"):
        cell = [row for row in rows if (row["D"], row["N"]) == (D, S)]
        ms, gbs = (by_impl((row for row in cell if row["stage"] == "preprocess"), name) for name in ("ms", "gbs"))
        ratio = by_impl(cell, "copy_ratio").get("helion_attn")
        extra, packed = (by_impl(cell, name).get("helion_attn") for name in ("peak_extra_bytes", "packed_bytes"))
        body.append(
            [
                str(D),
                str(S),
                number(ms.get("helion_attn"), ".3f"),
                number(ms.get("copy"), ".3f"),
                number(ratio, ".2f"),
            ]
            + [number(gbs.get(impl), ".0f") for impl in ("helion_attn", "copy")]
            + [number(None if x is None else x / 2**20, ".1f") for x in (extra, packed)]
        )
    headers = ["D", "S", "quantize, ms", "copy, ms", "ratio", "quantize, GB/s", "copy, GB/s"]
    headers += ["attention's extra memory, MiB", "packed Q, K, V, MiB"]
    return [Table("Preprocessing Q, K and V", headers, body)] if body else []


def recipe_tables(loaded: Loaded) -> list[Table]:
    """`quantize` by recipe against a copy."""
    rows = rows_of(loaded, "preprocess", impl="helion_attn", stage="preprocess")
    rows = [row for row in rows if "copy_fraction" in row]
    body = [
        [
            *labels([row["recipe"]]),
            "yes" if row.get("rope") else "",
            str(row["D"]),
            str(row["N"]),
            f"{row['ms']:.3f}",
            f"{row['moved_bytes'] / 2**20:.0f}",
            f"{row['moved_gbs']:.0f}",
            f"{row['copy_fraction']:.2f}",
            f"{row['copy_ratio']:.2f}",
        ]
        for row in sorted(rows, key=_preprocess_order)
    ]
    headers = ["recipe", "RoPE", "D", "S", "ms", "MiB moved", "GB/s", "GB/s / a copy's", "ms / a copy's"]
    return [Table("`quantize`, 16k tokens x 2048", headers, body)] if body else []


def _preprocess_order(row: Row) -> tuple[int, int, bool]:
    return row["D"], row["N"], bool(row.get("rope"))


def stage_tables(loaded: Loaded) -> list[Table]:
    """Each stage of preprocessing, and all in one launch, against a copy."""
    rows = rows_of(loaded, "stages", impl="helion_attn")
    body = [
        [
            row["part"],
            *(labels([row["recipe"]]) if row["recipe"] else ["any"]),
            str(row["D"]),
            str(row["N"]),
            f"{row['ms']:.3f}",
            f"{row['moved_bytes'] / 2**20:.0f}",
            f"{row['moved_gbs']:.0f}",
            f"{row['copy_fraction']:.2f}",
        ]
        for row in sorted(rows, key=lambda row: (row["D"], row["N"]))
    ]
    headers = ["launch", "recipe", "D", "S", "ms", "MiB moved", "GB/s", "GB/s / a copy's"]
    return [Table("Stages of preprocessing, 16k tokens x 2048", headers, body)] if body else []


# --- bounds ---------------------------------------------------------------------------------------


def default_checks(loaded: Loaded) -> list[Check]:
    """Time and memory with the default recipe."""
    found = []
    for row in unroped_default(rows_of(loaded, "preprocess", impl="helion_attn")):
        where = f"S {row['N']}, D {row['D']}"
        if row["stage"] == "preprocess":
            found.append(Check("preprocessing, time / a copy's", where, row["copy_ratio"], 2.5))
        else:
            extra = row["peak_extra_bytes"] / row["packed_bytes"]
            # 5%: partial sums of the preprocessing, and the allocator's rounding.
            found.append(Check("peak extra memory / packed copies", where, extra, 1.05))
    return found


def bandwidth_checks(loaded: Loaded) -> list[Check]:
    """Bandwidth of `quantize` beside a copy's."""
    found, rows = [], rows_of(loaded, "preprocess", impl="helion_attn", stage="preprocess")
    for preset in PRESETS:
        for rope in (None, True):
            for row in rows:
                if row["recipe"] == preset and row.get("rope") == rope and "copy_fraction" in row:
                    where = f"{LABELS[preset]}{', RoPE' if rope else ''}, S {row['N']}, D {row['D']}"
                    name = "quantize, bandwidth / a copy's"
                    found.append(Check(name, where, row["copy_fraction"], COPY_FRACTION, at_least=True))
    return found


def stage_checks(loaded: Loaded) -> list[Check]:
    """Bandwidth of each stage beside a copy's."""
    found = []
    for row in rows_of(loaded, "stages", impl="helion_attn"):
        alone = row["part"] == "pack V"
        name = f"{'V packed alone' if alone else 'a stage'}, bandwidth / a copy's"
        preset = f", {LABELS[row['recipe']]}" if row["recipe"] else ""
        where = f"{row['part']}{preset}, S {row['N']}, D {row['D']}"
        found.append(
            Check(name, where, row["copy_fraction"], COPY_FRACTION_OF_V if alone else COPY_FRACTION, at_least=True)
        )
    return found


SUITE = Suite(
    "preprocess",
    run,
    {
        "preprocess": Block("preprocess", tables),
        "preprocess_recipes": Block("preprocess", recipe_tables),
    },
)

STAGES = Suite("stages", run_stages, {"stages": Block("stages", stage_tables)})
