"""Benchmarks run on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as pyplot
import pytest
import torch

import helion_attn as ha
from benchmarks import (
    ablation,
    accuracy,
    attention,
    auto,
    cells,
    channels,
    decode,
    distributed,
    drift,
    front,
    hard,
    host,
    ladder,
    language_model,
    large_d,
    models,
    norms,
    plane,
    report,
    same_token,
    sparse,
    speed,
    splits,
    startup,
    steps,
    varlen,
)
from benchmarks.lib import masked_peers, peers
from benchmarks.lib.checks import GOALS, Check, by_promise, goal_tables
from benchmarks.lib.harness import RESULTS, Loaded, Results, load, time_interleaved
from benchmarks.lib.plots import COLOURS
from benchmarks.lib.problem import problem_of, workload
from benchmarks.lib.recipes import PRESETS
from benchmarks.lib.suite import Options
from benchmarks.lib.tables import LABELS, MOST_COLUMNS, Table
from devtools.inputs import CHANNEL_KINDS, HARD_KINDS, INPUT_KINDS, OUTLIER_CHANNELS, SINK_SHARES, make_qkv
from helion_attn.compiler.helion_adapter import helion_config
from helion_attn.integrations.fused.fuse_diffusers import Processor
from helion_attn.integrations.fused.fuse_transformers import FusedAttention
from helion_attn.kernels import attention as attention_kernel
from helion_attn.numerics import takes_bits
from helion_attn.testing import relative_error
from helpers import ranks
from helpers.offline import MEASURED, SPILLED, launching

START = "Start-up and host time"


def dry_run(suite: str, out: Path) -> Loaded:
    """What a dry run writes."""
    options = ["--suite", suite, "--device", "cpu", "--quick", "--out", str(out), "--no-plots"]
    assert attention.main(options) == 0
    return load(out)


@pytest.fixture(autouse=True)
def restore_num_threads() -> Iterator[None]:
    threads = torch.get_num_threads()  # on the CPU, the benchmarks set it
    yield
    torch.set_num_threads(threads)


@pytest.mark.thorough
def test_accuracy(tmp_path: Path) -> None:
    names = ("accuracy", "hard", "preprocess", "stages")
    for suite in names:
        loaded = dry_run(suite, tmp_path)
    assert set(loaded) == {*names}
    rows = loaded["accuracy"]["rows"]
    assert not [row["error_message"] for row in rows if "error_message" in row]
    parts = {"rmse", "inputs", "long", "criterion", "cost"}
    assert {row["part"] for row in rows} - {"real"} == parts
    long = [(row["input"], row["recipe"]) for row in rows if row["part"] == "long"]
    presets = ("fast", "balanced", "accurate", "hybrid", "bf16")
    assert long == [(kind, preset) for kind in accuracy.KINDS for preset in presets]
    assert not [row["error_message"] for row in loaded["hard"]["rows"] if "error_message" in row]
    (inputs,), (large,), (drifts,) = hard.tables(loaded), channels.tables(loaded), drift.tables(loaded)
    forms = [*CHANNEL_KINDS, *(f"{kind}, {form}" for form in ("grouped", "causal") for kind in channels.EVERYWHERE)]
    assert sorted(line[1] for line in large.body) == sorted(forms)
    assert all(0 < float(x) < 0.5 for line in large.body for x in line[3:])
    both_masks = [name for kind in SINK_SHARES for name in (kind, f"{kind}, causal")]
    assert [line[0] for line in inputs.body] == [*(kind for kind in HARD_KINDS if kind not in SINK_SHARES), *both_masks]
    assert all(0 < float(x) < 0.5 for line in inputs.body for x in line[3:])
    assert [line[1:4] for line in drifts.body] == [
        [kind, "flat", "64"] for kind in sorted([*drift.PERIODS, drift.DECAY])
    ]
    assert all(0 < float(x) < 0.1 for line in drifts.body for x in line[4:])
    assert drift.plot(loaded) is not None
    pyplot.close("all")
    stages = loaded["stages"]["rows"]
    timed = {(row["part"], row["recipe"]) for row in stages if row["impl"] == "helion_attn"}
    assert {("RoPE of Q", None), ("Hadamard of Q", None), ("RoPE, Hadamard, pack", "balanced")} <= timed
    assert all(row["ms"] > 0 and row.get("copy_fraction", 1.0) > 0 for row in stages)


def test_norms(tmp_path: Path) -> None:
    """Each model has one norm, and it is the one that is held to the bound."""
    loaded = dry_run("norms", tmp_path)
    assert [row["fused"] for row in loaded["norms"]["rows"]] == ["none", "RoPE", "by head", "over heads"] * 2
    held = norms.checks(loaded)
    assert [check.cell for check in held] == ["Wan 2.1 1.3B, BALANCED", "Wan 2.1 1.3B, FAST"]
    assert [check.value for check in held] == [row["over_none"] for row in loaded["norms"]["rows"] if row["has_norm"]]
    (table,) = norms.tables(loaded)
    assert [line[-1].endswith("*") for line in table.body] == [True, True]


def test_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits that must be the same are, and what a KV cache or later keys change is of the size of the error."""
    monkeypatch.setattr(same_token, "CPU_KEYS", 96)
    found = same_token.rows(Options(torch.device("cpu"), True, 1, ["helion_attn"], (128,), 0), "balanced")
    by_part = {row["part"]: row for row in found}
    assert {*by_part} == {*same_token.PARTS}
    for part in ("decode", "batch", "batch, num_splits=1"):
        assert by_part[part]["same_bits"]
    assert 0.3 < by_part["cache"]["ratio"] < 5
    (table,) = same_token.tables({"same_token": {"rows": found}})
    assert [line[0] for line in table.body] == [*same_token.PARTS]


@pytest.mark.parametrize(("attention", "share"), [("flat", 1 / 32), ("peaked", 0.1), ("stretch", 0.98)])
def test_drifting_inputs(attention: str, share: float) -> None:
    """Where the probability lies, and that V and its mean are those of every head dim."""
    device, made = torch.device("cpu"), {}
    for D in (64, 256):
        generator = torch.Generator().manual_seed(3)
        mean = drift.mean_of("v_drifts", 3200, 0.25, device)
        made[D] = drift.inputs(D, 3200, 50, mean, attention, generator)
    assert torch.equal(made[64][2], made[256][2][..., 64:128])
    q, k, v = (x.double() for x in made[256])
    p = torch.softmax(q @ k.mT / 16, 3)[0, 0]
    stretch = p[:, 3200 // 3 : 3200 // 3 + 100].sum(1).mean()
    assert stretch == pytest.approx(share, rel=0.5 if attention != "stretch" else 0.05) or attention == "peaked"
    top = p.sort(1, descending=True).values[:, :400].sum(1).mean()
    assert top > {"flat": 0.2, "peaked": 0.7, "stretch": 0.98}[attention]
    signs = v[0, 0].mean(1).sign()
    assert (signs[:800] > 0).all()
    assert (signs[800:2400] < 0).all()


def test_a_drift_that_decays() -> None:
    mean = drift.mean_of(drift.DECAY, 800, 0.0, torch.device("cpu"))
    assert mean[0] == 3
    assert mean[100].item() == pytest.approx(3 / math.e)


def test_the_worst_phase_counts_and_a_nan_is_worse() -> None:
    rows = [{"impl": "helion_attn", "recipe": "fast", "error_total": x} for x in (0.1, 0.3, 0.2)]
    assert drift.worst(rows) == {"fast": 0.3}
    rows[0]["error_total"] = math.nan
    assert math.isnan(drift.worst(rows)["fast"])


def test_vllm_fa3_is_given_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its op, as its extension declares it, stood in for by the oracle on what it is given."""
    optional = "k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k"
    more = "page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale"
    schema = (
        f"fwd(Tensor q, Tensor k, Tensor v, {', '.join(f'Tensor? {name}' for name in optional.split())}, "
        f"int? max_seqlen_q, int? max_seqlen_k, {', '.join(f'Tensor? {name}' for name in more.split())}, "
        "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
        "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
        "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
    )

    def fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
        given = dict(zip([argument.name for argument in op._schema.arguments[3:]], rest, strict=True))
        ends, B = given["cu_seqlens_q"], given["q_descale"].size(0)
        assert ends.tolist() == [i * given["max_seqlen_q"] for i in range(B + 1)]
        heads = [x.unflatten(0, (B, -1)).transpose(1, 2).float() for x in (q, k, v)]
        descales = [given[f"{name}_descale"][:, :, None, None] for name in "qkv"]
        descales[0] = descales[0].repeat_interleave(q.size(1) // k.size(1), 1)
        q, k, v = (x * descale for x, descale in zip(heads, descales, strict=True))
        out = ha.reference.attention(q, k, v, causal=given["is_causal"], sm_scale=given["softmax_scale"])
        assert isinstance(out, torch.Tensor)
        return [out.transpose(1, 2).flatten(0, 1).bfloat16()]

    library = torch.library.Library("_vllm_fa3_stub", "DEF")
    library.define(schema)
    library.impl("fwd", fwd, "CPU")
    op = torch.ops._vllm_fa3_stub.fwd.default
    monkeypatch.setattr(peers, "_vllm_fa3", lambda: op)
    q, k, v = make_qkv("randn", 2, 4, 2, 30, 30, 64)
    prepared = peers.vllm_fa3(q, k, v, True, 0.125)
    out = prepared.output(prepared.run())
    assert prepared.dequantized is not None
    expected = ha.reference.attention(*prepared.dequantized(), causal=True)
    assert isinstance(expected, torch.Tensor)
    assert relative_error(out, expected) < 2**-8
    library._destroy()


def test_large_d(tmp_path: Path) -> None:
    rows = dry_run("large_d", tmp_path)["large_d"]["rows"]
    assert [(row["D"], row["D_v"]) for row in rows] == [(320, 320), (192, 128), (64, 128), (576, 512)]
    assert all(row["ms"] > 0 for row in rows)
    tables = large_d.tables({"large_d": {"rows": rows}})
    assert [table.title.split(",")[1].strip() for table in tables] == ["B 1", "D 192", "D 64", "D 576"]


def test_ladder(tmp_path: Path) -> None:
    loaded = dry_run("ladder", tmp_path)
    rows = loaded["ladder"]["rows"]
    assert [(row["recipe"], row["stage"]) for row in rows] == [
        *((recipe, "kernel") for recipe in ("balanced", "hybrid", "bf16")),
        ("hybrid", "e2e"),
    ]
    assert all(row["ms"] > 0 for row in rows)
    assert rows[0]["error_pv"] > 3 * rows[1]["error_pv"] > 0
    (table,) = ladder.speed_tables(loaded)
    assert len(table.body) == 1
    (table,) = ladder.rmse_tables(loaded)
    assert table.body == [["64", "64", *(f"{row['rmse']:.2e}" for row in rows[:3])]]
    assert all(plot.draw(loaded) is not None for block in ladder.SUITE.blocks.values() for plot in block.plots)


def test_split(tmp_path: Path) -> None:
    loaded = dry_run("split", tmp_path)
    rows = loaded["split"]["rows"]
    assert [(row["impl"], row.get("splits")) for row in rows] == [
        ("helion_attn", 2), ("one_run", None), ("paged", None), ("paged, fast", None),
    ]  # fmt: skip
    assert all(row["ms"] > 0 for row in rows)
    # A block's P does not depend on the run that the block is in; a page's rounds otherwise, by more than that.
    split, one_run, paged, paged_fast = (row["error_kernel"] for row in rows)
    assert split == pytest.approx(one_run, rel=1e-4)
    assert paged != pytest.approx(one_run, rel=1e-4)
    assert paged_fast != paged
    (table,) = splits.tables(loaded)
    assert len(table.body) == 1


def test_a_prompt_on_pages_is_judged_by_each_cell_and_the_mean() -> None:
    """Few queries are no prompt; a format that was not measured is not judged."""
    cells = {128: (1.0, 1.1), 512: (1.0, 1.0), 2048: (1.0, 1.25), 16: (1.0, 9.0)}
    rows: Any = [
        {"D": 128, "H": 32, "N": 16384, "M": M, "impl": impl, "ms": ms}
        for M, both in cells.items()
        for impl, ms in zip(("helion_attn", "paged"), both, strict=True)
    ]
    found = [*splits.prompt_checks(rows)]
    assert [check.verdict for check in found] == ["PASS", "PASS", "FAIL", "FAIL", *["not measured"] * 4]
    assert found[3].value == pytest.approx((1 / 1.1 / 1.25) ** (1 / 3))
    rows[5]["ms"] = 1.1
    assert [check.verdict for check in splits.prompt_checks(rows)][:4] == ["PASS"] * 4


def test_what_a_cache_adds_to_perplexity_is_judged() -> None:
    row: dict[str, Any] = {"stage": "prefill", "recipe": "balanced", "context": 2048}
    rows = [
        row | {"impl": "helion_attn", "difference": 0.0016},
        row | {"impl": language_model.CACHED, "difference": 0.0020},
        row | {"impl": language_model.CACHED, "difference": 0.02, "recipe": "fast"},
        row | {"impl": "helion_attn", "difference": 0.0016, "context": 8192},
    ]
    loaded: Any = {"language_model": {"meta": {}, "rows": rows}}
    assert [check.verdict for check in language_model.checks(loaded)] == ["PASS"]
    rows[1]["difference"] = 0.0030
    assert [check.verdict for check in language_model.checks(loaded)] == ["FAIL"]


@pytest.mark.thorough
def test_distributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "spawn", ranks.spawn)
    loaded = dry_run("distributed", tmp_path)
    rows = loaded["distributed"]["rows"]
    assert all(row["ms"] > 0 for row in rows)
    assert [(row["parts"], row["zigzag"]) for row in rows if row["scaling"] == "gathered"] == [
        (1, False), (2, False), (2, True),
    ] * 2  # fmt: skip
    stages = [(r["impl"], r["strategy"], r["stage"]) for r in rows if r["scaling"] == "strong" and r["H"] == 2]
    ways = [("helion_attn", "allgather"), ("helion_attn", "ulysses"), ("helion_attn", "ring"), ("fast", "allgather")]
    assert stages == [
        *(
            (*way, stage)
            for way in ways
            for stage in ("checked", "e2e", "compute", "collective")
            if stage != "compute" or "ring" in way
        ),
        ("sdpa_bf16", "allgather", "e2e"),
    ]
    recipes = {row["impl"]: row["recipe"] for row in rows if row["scaling"] == "strong"}
    assert recipes == {"helion_attn": "balanced", "fast": "fast", "sdpa_bf16": None}
    # One head is not for two ranks.
    assert "ulysses" not in [row["strategy"] for row in rows if row["H"] == 1]
    gathered, parts = distributed.tables(loaded)
    assert len(gathered.body) == 6
    assert [line[4] for line in parts.body] == [*["BALANCED"] * 3, "FAST", "BALANCED", "BALANCED", "FAST"]
    assert all(plot.draw(loaded) is not None for block in distributed.SUITE.blocks.values() for plot in block.plots)
    found = distributed.checks(loaded)
    unchecked = [row for row in rows if row["impl"] in ("helion_attn", "fast") and row["stage"] == "e2e"]
    assert [check.bound for check in found] == [1.03] * (4 + len(unchecked)) + [1.05] * 2
    assert all(check.value is not None for check in found)
    # Tables show what a default call takes, of the default preset.
    for row in (*unchecked, *(row for row in rows if row["impl"] == "fast")):
        row["ms"] = 1e-9
    cells = [cell for line in front.gpu_tables(loaded)[0].body for cell in line[1:]]
    assert cells
    assert all(float(cell.split()[1][1:-1]) < 1000 for cell in cells)


def test_decode(tmp_path: Path) -> None:
    loaded = dry_run("decode", tmp_path)
    rows = loaded["decode"]["rows"]
    assert [(row["impl"], row["stage"]) for row in rows] == [
        ("helion_attn", "kernel"),
        ("fast", "kernel"),
        ("helion_attn", "append"),
        ("helion_attn", "few_pages"),
        ("helion_attn", "chosen_pages"),
        ("helion_attn", "append_prompt"),
        ("helion_attn", "append_prompt_rope"),
        ("copy", "kernel"),
        ("helion_attn", "batch"),
        ("helion_attn", "batch_few_pages"),
        ("helion_attn", "batch_chosen_pages"),
        ("fast", "batch"),
        ("copy", "batch"),
    ]
    assert all(row["ms"] > 0 for row in rows)
    for row, copied in (*((rows[i], rows[7]) for i in (0, 1, 5, 6)), (rows[8], rows[12]), (rows[11], rows[12])):
        assert row["of_copy"] == pytest.approx(row["gb_per_s"] / copied["gb_per_s"], rel=1e-4)
    assert rows[8]["error_total"] < rows[11]["error_total"] < 0.1
    *_, batches = decode.tables(loaded)
    assert [(line[0], line[-1]) for line in batches.body] == [
        ("2 that differ", f"{rows[9]['ms']:.3f} ({rows[10]['ms']:.3f})")
    ]


def test_varlen(tmp_path: Path) -> None:
    loaded = dry_run("varlen", tmp_path)
    rows = loaded["varlen"]["rows"]
    assert {(row["batch"], row["impl"]) for row in rows} == {
        ("uniform", "helion_attn"),
        ("uniform", "helion_attn_fixed"),
        ("skewed", "helion_attn"),
    }
    assert all(row["ms"] > 0 and row["tflops"] > 0 for row in rows)
    full, causal = varlen.tables(loaded)
    assert len(full.body) == len(causal.body) == 2


def test_sparse(tmp_path: Path) -> None:
    loaded = dry_run("sparse", tmp_path)
    rows = loaded["sparse"]["rows"]
    assert all(row["ms"] > 0 for row in rows)
    cells = [(cell.mask, cell.density) for cell in sparse.cells_of(loaded)]
    assert cells == [("random", 0.5), ("random", 1.0), ("unequal", 0.5), ("documents", 0.75), ("top_blocks", 1.0),
                     ("tiles", 1.0)]  # fmt: skip
    whole, kernel, made = sparse.tables(loaded)
    assert len(whole.body) == len(kernel.body) == len(cells)
    assert [line[0] for line in made.body if line[4] != "-"] == [*["`from_dense`"] * 3, "`from_dense, capacity given`"]
    assert sparse.plot(loaded) is None, "it is over FlashAttention-3's"
    for row in [row for row in rows if row.get("mask") == "none"]:
        rows.append(row | {"impl": "fa3_bf16", "recipe": None, "stage": "e2e"})
    assert sparse.plot(loaded) is not None
    pyplot.close("all")
    assert sparse.checks(loaded)[-1].value == pytest.approx(made_row(rows, "masks.top_blocks")["of_attention"])


def test_steps(tmp_path: Path) -> None:
    loaded = dry_run("steps", tmp_path)
    rows = loaded["steps"]["rows"]
    assert not [row["error_message"] for row in rows if "error_message" in row]
    assert all(row["ms"] > row["attention_ms"] > 0 and row["rounds"] == 1 for row in rows)
    found = {model: set(of_model) for model, of_model in steps.by_model(loaded, "steps").items()}
    assert found == {
        "Wan": {"sdpa_bf16", "balanced", "fast", "auto", "fused", "masked"},
        "Llama": {"sdpa_bf16", "balanced", "fast", "auto", "fused"},
    }
    for row in rows:
        # On so few tokens `auto` is PyTorch's attention; a mask hides what a random model sees.
        low, high = {"sdpa_bf16": (0, 0), "auto": (0, 0), "masked": (0.01, 0.2)}.get(row["contender"], (1e-4, 0.03))
        assert low <= row["error_total"] <= high, row
    times, parts = steps.tables(loaded)
    assert [line[0] for line in times.body] == ["Wan", "Llama"]
    assert len(parts.body) == len(rows)
    assert steps.plot(loaded) is None, "it is over FlashAttention-3's"
    assert loaded["steps"]["meta"]["diffusers"]


@pytest.mark.parametrize("model", [model for model in steps.DRY if model.can_fuse], ids=lambda model: model.name)
def test_fused_steps(model: steps.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model that can be fused is: its attention is timed once a call, and gives what its own gives.

    A mask of a video's tokens is not one of its text's, which Wan attends across to and HunyuanVideo refines first.
    """
    torch.manual_seed(0)
    with steps.bf16_on(torch.device("cpu")):
        module, inputs = model.build(model)
    module.eval()
    processors = {} if model.is_causal else dict(module.attn_processors)  # type: ignore[arg-type]
    steps.register(["balanced"], model)
    outs: dict[str, torch.Tensor] = {}
    spans: dict[str, int] = {}
    tiles = steps.tiles_of(model, torch.device("cpu"))
    for name in ("sdpa_bf16", "balanced", "fused", *(["masked"] if tiles is not None else [])):
        steps.enter(name, model, module, processors, tiles)
        clock = steps.Clock(torch.device("cpu"))
        with clock.of_attention(model):
            outs[name] = steps.forward(module, inputs)
        spans[name] = len(clock.spans)
    errors = {name: relative_error(out, outs["sdpa_bf16"].double()) for name, out in outs.items()}
    assert 0 < errors["fused"] < 1.5 * errors["balanced"]
    assert spans["fused"] == spans["balanced"] == spans.get("masked", spans["fused"]) > 0
    assert tiles is None or 2 * errors["fused"] < errors["masked"] < 1
    kind = FusedAttention if model.is_causal else Processor
    monkeypatch.setattr(kind, "attend", None)
    with pytest.raises(TypeError, match="not callable"):
        steps.forward(module, inputs)
    steps.enter("sdpa_bf16", model, module, processors, None)
    assert torch.equal(steps.forward(module, inputs), outs["sdpa_bf16"])


@pytest.mark.thorough
def test_steps_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other kernels, stood in for by PyTorch's attention, get a model's windows and none of its padding."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sm_scale: float | None, left: int | None
    ) -> torch.Tensor:
        M, N = q.size(1), k.size(1)
        seen = torch.ones(M, N, dtype=torch.bool)
        seen = seen.tril() if causal else seen
        seen = seen if left is None else seen.triu(-left)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=sm_scale, enable_gqa=True)
        return out.transpose(1, 2)

    monkeypatch.setattr(steps, "OTHERS", {"fa3_bf16": attend, "sage2": steps.sage2})
    results = Results(tmp_path / "steps.json", {})
    steps.run(Options(torch.device("cpu"), False, 2, ["fa3_bf16", "sage2"], (64,), 0), results)
    loaded = load(tmp_path)
    models = steps.by_model(loaded, "steps")
    assert {*models} == {model.name for model in steps.DRY}
    for model, of_model in models.items():
        assert of_model["fa3_bf16"]["error_total"] < 0.01, model
        assert of_model["fa3_bf16"]["rounds"] == 2
    # What is not installed is a result, and not the end of the run.
    failed = [row["model"] for row in loaded["steps"]["rows"] if row["contender"] == "sage2" and "error_message" in row]
    assert failed == [*models]
    assert steps.plot(loaded) is not None
    pyplot.close("all")


@pytest.mark.parametrize("model", steps.MODELS, ids=lambda model: model.name.split(",")[0])
def test_models_of_steps(model: steps.Model) -> None:
    """They have the parameters that their names say, and take their inputs, without memory for either."""
    with steps.bf16_on(torch.device("meta")):
        module, inputs = model.build(model)
    billions = float(re.findall(r"([\d.]+)B", model.name + " 12B")[0])
    parameters = list(module.parameters())
    assert sum(x.numel() for x in parameters) / 1e9 == pytest.approx(billions, rel=0.1)
    assert {x.dtype for x in parameters} == {torch.bfloat16}
    with steps.few_layers(module):
        out = steps.forward(module.eval(), inputs)
    if model.is_causal:
        assert out.shape == (1, 1, model.config["vocab_size"])
    else:
        assert out.numel() == inputs["hidden_states"].numel()
    assert sum(len(layers) for _, _, layers in steps.layers_of(module)) > steps.WARM_LAYERS, "all are back"


def test_bounds_of_steps() -> None:
    """A step of the default preset, the faster of plain and fused, over FA3's."""
    ms = {"fa3_bf16": 2000.0, "balanced": 1700.0, "fused": 1500.0, "masked": 1010.0}
    cell = {"model": steps.WAN_SMALL, "attention_ms": 1.0}
    loaded: Any = {"steps": {"meta": {}, "rows": [cell | {"contender": name, "ms": x} for name, x in ms.items()]}}
    loaded["steps"]["rows"] += [{"contender": name, "model": "another", "ms": 1.0} for name in ("fa3_bf16", "balanced")]
    loaded["steps"]["rows"].append({"contender": "fa3_bf16", "model": steps.LLAMA, "error_message": "OOM"})
    assert [(check.bound, check.value, check.verdict) for check in steps.checks(loaded)] == [
        (1.28, pytest.approx(4 / 3), "PASS"),
        (2.0, pytest.approx(2000 / 1010), "FAIL"),
        (1.0, 1.0, "PASS"),
    ]
    # What raised fails; what was not run is not measured.
    mine = [row for row in loaded["steps"]["rows"] if row["contender"] in ("balanced", "fused")]
    for row in mine:
        del row["ms"]
    assert [check.verdict for check in steps.checks(loaded)] == ["not measured", "FAIL", "not measured"]
    mine[0]["error_message"] = "OOM"
    assert [check.verdict for check in steps.checks(loaded)] == ["FAIL", "FAIL", "not measured"]


def made_row(rows: list[dict[str, Any]], made: str) -> dict[str, Any]:
    (row,) = (row for row in rows if row.get("made") == made)
    return row


def sparse_cases() -> list[sparse.Case]:
    """Masks that no head, row block or tile of shares with another, with those of a video whose tiles are no blocks."""
    device, S = torch.device("cpu"), 700
    ids, rule = sparse.documents(S, device)
    ids[300:500] += 7
    video = sparse.Video("tiles", (5, 12, 14), (2, 3, 4), (1, 3, 2), 2)
    return [
        sparse.Case("random", sparse.random_blocks(2, S, sparse.equal_counts(S, 30, device))),
        sparse.Case("unequal", sparse.random_blocks(2, S, sparse.unequal_counts(S, 50, device))),
        sparse.Case("documents", ha.masks.documents(ids, causal=True), rule),
        sparse.tiles(video, device),
    ]


@pytest.mark.parametrize("case", sparse_cases(), ids=lambda case: case.name)
def test_flex_attention_gets_the_same_mask(case: sparse.Case) -> None:
    seen = case.mask.to_dense()[0]
    if case.rule is not None:
        i = torch.arange(case.mask.M)
        assert torch.equal(case.rule(i[0], i[0], i[:, None], i), seen[0])
    assert torch.equal(ha.BlockMask.from_flex(masked_peers.flex_mask(case.mask, case.rule)).to_dense()[0], seen)


def test_random_blocks_are_as_many_as_asked() -> None:
    device = torch.device("cpu")
    equal = sparse.random_blocks(3, 4096, sparse.equal_counts(4096, 10, device)).blocks
    assert (equal.sum(3) == 4).all()
    assert not torch.equal(equal[0, 0], equal[0, 1])
    counts = sparse.random_blocks(3, 4096, sparse.unequal_counts(4096, 25, device)).blocks.sum(3)
    assert counts.double().mean() == 8
    assert (int(counts.min()), int(counts.max())) == (1, 15)
    assert not torch.equal(counts[0, 0], counts[0, 0].sort().values)


def test_the_peers_with_masks_are_given_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their functions, as their sources declare them, stood in for by the oracle on what it is given."""
    q, k, v = make_qkv("randn", 1, 2, 2, 700, 700, 64, torch.float32)

    def block_sparse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask_id: Any = None, scale: Any = None) -> Any:
        assert mask_id.is_contiguous()
        seen = mask_id.repeat_interleave(64, 2).repeat_interleave(128, 3)[:, :, :700, :700]
        return ha.reference.attention(q, k, v, sm_scale=scale, block_mask=ha.BlockMask.from_dense(seen))

    def flex(q: Any, k: Any, v: Any, block_mask: Any, scale: float) -> Any:
        return ha.reference.attention(q, k, v, sm_scale=scale, block_mask=block_mask)

    def sliding_tile(q: Any, k: Any, v: Any, window_size: Any, text_length: int, has_text: bool, seq_shape: str) -> Any:
        return window_size, text_length, has_text, seq_shape

    monkeypatch.setitem(sys.modules, "spas_sage_attn", SimpleNamespace(block_sparse_sage2_attn_cuda=block_sparse))
    monkeypatch.setitem(sys.modules, "fastvideo_kernel", SimpleNamespace(sliding_tile_attention=sliding_tile))
    case = sparse_cases()[0]
    problem = problem_of(workload(1, 2, 700, 700, 64), "randn", q, k, v, None, case.mask)
    monkeypatch.setattr(masked_peers, "_compiled_flex", lambda: flex)
    for prepare in (masked_peers.flex(case.mask, None), masked_peers.sparge(case.mask)):
        prepared = prepare(q, k, v, False, 0.125)
        assert problem.errors(prepared, prepared.run())["error_total"] < 1e-12
    lengths = [1, 300, 399]
    ids = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    problem = problem_of(
        w := workload(1, 2, 700, 700, 64), "randn", q, k, v, None, ha.masks.documents(ids, causal=True)
    )

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        assert (options["max_seqlen_q"], options["max_seqlen_k"]) == (399, 399)
        tables = options["cu_seqlens_q"], options["cu_seqlens_k"]
        scale, causal = options["softmax_scale"], options["causal"]
        return ha.reference.attention_varlen(q, k, v, *tables, causal=causal, sm_scale=scale)[0]

    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", SimpleNamespace(flash_attn_varlen_func=packed))
    prepared = masked_peers.fa3_documents(lengths)(q, k, v, w.causal, 0.125)
    assert problem.errors(prepared, prepared.run())["error_total"] < 1e-12
    given: Any = masked_peers.sta((30, 48, 80), (3, 3, 5), 256)(q, k, v, False, 0.125).run()
    assert given == ([(3, 3, 5)] * 2, 256, True, "30x48x80")


def test_bounds_of_block_masks() -> None:
    """Each bound is for the cells that it names."""
    series: dict[Any, float] = {
        ("helion_attn", name, stage): 1.0 for name in ("fast", "balanced") for stage in ("kernel", "e2e")
    }
    dense: dict[Any, float] = {("helion_attn", "fast", "kernel"): 3.9, ("helion_attn", "balanced", "kernel"): 3.7}
    dense |= {("fa3_bf16", None, "e2e"): 3.5}

    def rows_at(N: int, mask: str, density: float, ms: dict[Any, float]) -> list[dict[str, Any]]:
        cell = {"D": 128, "N": N, "mask": mask, "density": density}
        return [cell | {"impl": i, "recipe": r, "stage": s, "ms": time} for (i, r, s), time in ms.items()]

    def found(N: int, mask: str, density: float) -> list[tuple[float, str]]:
        rows = [*rows_at(N, "none", 1.0, dense), *rows_at(N, mask, density, series | {("flex", None, "e2e"): 2.5})]
        loaded: Any = {"sparse": {"meta": {}, "rows": rows}}
        return [(check.bound, check.verdict) for check in sparse.checks(loaded)]

    # FAST's block takes 1 / (3.9 * 0.25) of the dense kernel's, BALANCED's 1 / (3.7 * 0.25).
    per_block = [(1.05, "PASS"), (1.05, "FAIL")]
    assert found(8192, "random", 0.25) == found(32768, "unequal", 0.25) == per_block
    assert found(32768, "random", 0.25) == [*per_block, (3.0, "PASS"), (2.0, "PASS")]
    assert found(32768, "tiles", 0.24) == [(1.10, "PASS"), (1.10, "FAIL")]
    assert found(32768, "random", 0.05) == found(2048, "random", 0.25) == []
    assert found(8192, "random", 1.0) == [(1.03, "PASS"), (1.03, "PASS")]


def test_cells(tmp_path: Path) -> None:
    loaded = dry_run("cells", tmp_path)
    rows = loaded["cells"]["rows"]
    assert [(row["impl"], row["stage"]) for row in rows] == [
        *((impl, stage) for stage in ("kernel", "e2e") for impl in ("helion_attn", "fast"))
    ]
    assert all(row["ms"] > 0 and (row["part"], row["H"], row["H_kv"]) == ("GQA", 4, 1) for row in rows)
    kernel, e2e, roofline = cells.tables(loaded)
    assert [line[:2] for table in (kernel, e2e, roofline) for line in table.body] == [
        ["GQA", "D 64, 1 x 128, 4:1 heads, causal"]
    ] * 3
    peak = loaded["cells"]["meta"]["gemm_tflops"]["e4m3"]
    fractions = speed.gemm_fractions(loaded, "cells", rows)
    assert fractions["fast"] == pytest.approx(rows[1]["tflops"] / peak)


def test_auto(tmp_path: Path) -> None:
    loaded = dry_run("auto", tmp_path)
    rows = loaded["auto"]["rows"]
    assert [(row["impl"], row["N"]) for row in rows] == [
        (impl, S) for S in (64, 128) for impl in ("helion_attn", "sdpa_bf16", "auto")
    ]
    assert all(row["ms"] > 0 for row in rows)
    (table,) = auto.tables(loaded)
    assert [line[:2] for line in table.body] == [["64, full", "4"]]
    assert [float(x) for line in table.body for x in line[2:4]] == [
        pytest.approx(by["sdpa_bf16"] / by["helion_attn"], abs=0.006)
        for by in ({row["impl"]: row["ms"] for row in rows if row["N"] == S} for S in (64, 128))
    ]


def test_a_crossover_loses_the_least_time() -> None:
    lengths = (512, 1024, 2048, 4096)

    def crossing(*faster: float) -> int | None:
        return auto.from_length(dict(zip(lengths, faster, strict=True)))

    assert crossing(1.1, 1.2, 1.3, 1.4) == 512
    assert crossing(0.5, 0.6, 0.7, 0.9) is None
    # Half way between, in logarithms: 2048 times the root of two.
    assert crossing(0.5, 0.6, 0.8, 1.25) == 2944
    assert crossing(0.5, 0.99, 1.5, 1.6) == 1152
    # One cell of noise moves nothing.
    assert crossing(1.01, 0.7, 1.2, 1.6) == 1664
    assert crossing(0.5, 1.2, 0.99, 1.6) == 896
    row = {"D": 64, "causal": True, "group": 1, "heads": 8}
    times = {512: (2.0, 1.0), 1024: (1.0, 1.0), 2048: (1.0, 0.95), 4096: (1.0, 1.5)}
    rows = [
        row | {"N": S, "impl": impl, "ms": ms}
        for S, both in times.items()
        for impl, ms in zip(("helion_attn", "sdpa_bf16"), both, strict=True)
    ]

    def judged() -> list[Check]:
        return [check for check in auto.checks({"auto": {"rows": rows}}) if check.promise.startswith("what")]

    assert [(check.value, check.verdict) for check in judged()] == [(1.0, "PASS")] * 4
    rows[-1]["ms"] = 0.9
    assert [check.verdict for check in judged()] == ["PASS"] * 4
    rows[-1]["ms"], rows[1]["ms"] = 1.5, 3.0
    assert [check.verdict for check in judged()] == ["PASS", "PASS", "FAIL", "PASS"]
    rows += [row | {"N": 512, "impl": "auto", "ms": 2.08}, row | {"N": 1024, "impl": "auto", "ms": 1.02}]
    called = [check for check in auto.checks({"auto": {"rows": rows}}) if check.promise.startswith("a call")]
    assert [check.verdict for check in called] == ["FAIL", "PASS", "not measured", "not measured"]


def test_crossovers_of_a_card_are_replaced(results: Loaded) -> None:
    """What recipe="auto" reads is what the results say, and of other cards stays."""
    before = auto.CONFIG.read_text()
    assert auto.config(results, before) == before, "run python benchmarks/report.py"
    kinds = [{"D": 64, "causal": False, "group": 1, "heads": heads} for heads in (8, 16)]
    rows = [
        kind | {"N": S, "impl": impl, "ms": ms}
        for kind, times in zip(kinds, ((1.0, 2.0), (3.0, 4.0)), strict=True)
        for S in (512, 1024)
        for impl, ms in zip(("helion_attn", "sdpa_bf16"), times, strict=True)
    ]
    for row in rows[4:]:
        if row["impl"] == "sdpa_bf16":
            row["ms"] = 1.0
    meta = {"gpu": "NVIDIA H20", "commit": "abc", "torch": "2.11"}
    after = auto.config({"auto": {"meta": meta, "rows": rows}}, before)
    assert json.loads(after)["measured"][-1] == meta | dict.fromkeys(("cudnn", "date", "command"))
    new = [
        {"gpu": "NVIDIA H20", **kind, "from_length": length} for kind, length in zip(kinds, (512, None), strict=True)
    ]
    assert json.loads(after)["rows"] == [*json.loads(before)["rows"], *new]
    meta["commit"], rows = "def", rows[:4]
    again = json.loads(auto.config({"auto": {"meta": meta, "rows": rows}}, after))
    assert again["rows"][-1:] == new[:1]
    assert [row["commit"] for row in again["measured"] if row["gpu"] == "NVIDIA H20"] == ["def"]
    assert auto.config({"auto": {"meta": {"gpu": None}, "rows": rows}}, before) == before


def test_cells_are_those_of_the_issue() -> None:
    options = Options(torch.device("cuda"), False, 20, [], (64, 128, 256), 0)
    found = {
        part: [(w.B, w.H, w.H_kv, w.N, w.D, w.causal) for w in workloads]
        for part, workloads in cells.workloads(options).items()
    }
    assert found == {
        "GQA": [(1, H, 8, S, 128, causal) for causal in (False, True) for H in (32, 64) for S in (8192, 32768)],
        "lengths": [(1, 16, 16, S, 128, False) for S in (4096, 4097, 8192, 8191, 75648, 75600)],
        "128k": [(1, 16, 16, 131072, 128, True), (1, 8, 8, 131072, 256, True)],
        "Colfax": [(4, 8, 8, 8448, 256, False), (2, 8, 8, 16896, 256, False)],
    }


def test_roofline_is_of_the_run() -> None:
    cell = {"stage": "kernel", "D": 64, "N": 512, "causal": False}
    rows = [
        {"impl": "helion_attn", "recipe": "balanced", "tflops": 500.0, **cell},
        {"impl": "fa3_bf16", "recipe": None, "tflops": 300.0, **cell},
        {"impl": "flash_bf16", "recipe": None, "tflops": 100.0, **cell},
    ]
    loaded = {"attention": {"meta": {"gemm_tflops": {"e4m3": 1000.0, "bf16": 600.0}}, "rows": rows}}
    (table,) = speed.roofline_tables(loaded)
    assert table.body == [["full", "64", "512", "0.50", "-", "-", "-", "0.50"]]
    assert speed.roofline_plot(loaded) is not None
    # A run without its own GEMMs has none, whatever another measured.
    loaded = {"attention": {"meta": {}, "rows": rows}, "cells": loaded["attention"] | {"rows": []}}
    assert speed.roofline_tables(loaded) == []
    assert speed.roofline_plot(loaded) is None


def test_ablation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # V in order for a kernel that takes it interleaved: what the error is there to show.
    wrong = ablation.variants(64) | {"wrong": ablation.Variant(interleaved=False)}
    monkeypatch.setattr(ablation, "variants", lambda D: wrong)
    loaded = dry_run("ablation", tmp_path)
    rows = {row["variant"]: row for row in loaded["ablation"]["rows"]}
    assert list(rows) == list(wrong)
    mistaken = rows.pop("wrong")
    assert mistaken["ms"] is None
    assert "not timed" in mistaken["note"]
    assert all(row["ms"] > 0 for row in rows.values())
    errors = {name: row["error_kernel"] for name, row in rows.items() if name != "P not scaled"}
    # P's bits and its exponentials round otherwise.
    numbers = ("P by exponentials", "one-level P V", "scores in fp32")
    for name, error in errors.items():
        assert error == pytest.approx(errors["shipped"], rel=0.25 if name in numbers else 0.01), name
    assert rows["P not scaled"]["error_kernel"] > rows["shipped"]["error_kernel"]
    (table,) = ablation.tables(loaded)
    assert [line[1:4:2] for line in table.body[:1] + table.body[-1:]] == [["shipped", "1.00"], ["wrong", "-"]]


def test_plane(tmp_path: Path) -> None:
    loaded = dry_run("plane", tmp_path)
    speed_rows, inputs = ([r for r in loaded["plane"]["rows"] if r["part"] == part] for part in ("speed", "inputs"))
    assert [row["format"] for row in speed_rows] == list(plane.FORMATS)
    assert all(row["ms"] > 0 for row in speed_rows)
    errors = {(row["format"], row["input"]): row["error_total"] for row in inputs}
    assert len(errors) == len(plane.FORMATS) * len(INPUT_KINDS)
    # Other numbers, all the same: int8 rounds less, and bits are no exponentials.
    on_randn = {name: errors[name, "randn"] for name in plane.FORMATS}
    assert on_randn["int8, exponentials"] < on_randn["e4m3, exponentials"]
    assert len(set(on_randn.values())) == len(on_randn)
    found = plane.points(loaded, 64)
    assert {name: error for name, (_, error) in found.items()} == on_randn
    tflops, totals = plane.tables(loaded)
    assert [table.headers[-len(plane.FORMATS) :] for table in (tflops, totals)] == [list(plane.FORMATS)] * 2
    assert {line[1] for line in totals.body} == set(INPUT_KINDS)
    assert all(plot.draw(loaded) is not None for block in plane.SUITE.blocks.values() for plot in block.plots)


def test_plane_compiles_other_code() -> None:
    """A kernel's exponentials are not found in place of another's bits, nor the other way round."""
    kernels = {plane.kernels_of(format_) for format_ in plane.FORMATS.values()}
    assert len(kernels) == len(plane.FORMATS)
    plane.prepare(plane.FORMATS["int8, exponentials"], *make_qkv("randn", 1, 1, 1, 64, 64, 64), False, 0.125).run()
    assert vars(attention_kernel)["takes_bits"] is takes_bits


@pytest.mark.parametrize("D", [64, 128, 256])
def test_ablation_changes_something(D: int) -> None:
    shipped = ablation.shipped_tile(D)
    for name, variant in ablation.variants(D).items():
        tile, recipe = dataclasses.replace(shipped, **variant.tile), dataclasses.replace(ha.FAST, **variant.recipe)
        assert tile == shipped or name in ablation.TILES[D]
        summed = recipe.promote_every is not None and bool(recipe.promote_every) != shipped.two_level
        numbers = (summed, recipe.p_offset != ha.FAST.p_offset, recipe.half_scores != ha.FAST.half_scores)
        changed = (tile != shipped, *numbers, variant.step is not None)
        assert sum(changed) == (name != "shipped")
    assert ablation.heads_fastest(shipped)["loop_orders"] != helion_config(shipped)["loop_orders"]


@pytest.mark.thorough
def test_ablation_compiles_other_code() -> None:
    names = ("shipped", "V's keys in order", "P by exponentials", "3 programs an SM")
    steps = [variant.step[:2] for variant in ablation.variants(64).values() if variant.step is not None]
    before = [getattr(module, name) for module, name in (*steps, (attention_kernel, "compiled_kernel"))]
    with launching():
        shipped, in_order, exponentials, fewer = (ablation.figures(64, name) for name in names)
    assert shipped["shuffles"] < exponentials["shuffles"] < in_order["shuffles"]
    assert shipped["ctas_per_sm"] == 4
    assert fewer["ctas_per_sm"] == 3
    assert shipped["spills"] <= (0 if MEASURED else SPILLED["_helion_fp8_attn_fwd"])
    after = [getattr(module, name) for module, name in (*steps, (attention_kernel, "compiled_kernel"))]
    assert after == before, "the steps are put back"


@pytest.mark.thorough
def test_startup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On the CPU nothing is compiled, and a warm process is a cold one.
    monkeypatch.setattr(startup, "run_process", functools.cache(startup.run_process))
    loaded = dry_run("startup", tmp_path)
    rows = loaded["startup"]["rows"]
    assert [row["cache"] for row in rows] == ["cold", "warm"]
    assert all(row[name] > 0 for row in rows for name in ("import_torch_s", "import_s", "first_s", "later_ms"))
    (table,) = startup.tables(loaded)
    assert table.body[0][:2] == ["64", "causal"]
    assert table.body[0][3] == f"{rows[1]['import_s'] + rows[1]['first_s']:.2f}"
    assert report.checks_of(START, loaded) == [], "a run on the CPU shows nothing"
    loaded["startup"]["meta"]["gpu"] = "a GPU"
    rows[0]["first_s"] = 5.0
    rows[1]["import_s"] = 1.0
    for seconds, verdict in ((0.9, "PASS"), (1.1, "FAIL"), (None, "FAIL")):
        rows[1]["first_s"] = seconds
        (check,) = report.checks_of(START, loaded)
        assert check.verdict == verdict


def test_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SAME", 5), ("TURNS", 6), ("FIRST_NEW", 7), ("ROUNDS", 1)):
        monkeypatch.setattr(host, name, value)
    loaded = dry_run("host", tmp_path)
    lengths = [S for i in range(len(host.CALLED)) for part in host.new_lengths(i, 20) for S in part]
    assert len(set(lengths) - {host.SAME, host.TURNS}) == 2 * 20 * len(host.CALLED)
    # What compiles has sizes that are multiples of 16, and others, as what is timed has.
    assert all({S % 16 == 0 for S in part} == {True, False} for part in host.new_lengths(0, 20))
    rows = loaded["host"]["rows"]
    assert all(row["host_us"] > 0 for row in rows)
    (table,) = host.tables(loaded)
    names = ['`attention`, `recipe="auto"`', "`attention`", "`attention_quantized`", "`quantize`", "SDPA bf16"]
    assert [line[0] for line in table.body] == names
    assert report.checks_of(START, loaded) == [], "a run on the CPU shows nothing"
    loaded["host"]["meta"]["gpu"] = "a GPU"
    ours = next(row for row in rows if (row["stage"], row["lengths"]) == ("kernel", "same"))
    rows.append(ours | {"impl": "fa3_fp8", "host_us": 2 * ours["host_us"]})
    assert [check.verdict for check in report.checks_of(START, loaded)] == ["PASS", "not measured", "not measured"]
    rows.append(ours | {"impl": "fa3_bf16", "host_us": 0.01})
    assert [check.verdict for check in report.checks_of(START, loaded)] == ["PASS", "not measured", "FAIL"]


def test_costs_are_those_of_the_worst_shape() -> None:
    shape = {"stage": "e2e", "B": 1, "H": 2, "H_kv": 1, "M": 100, "N": 100, "D": 64}
    calls = [shape | {"peak_extra_bytes": share * 2 * 64 * 400} for share in (0.25, 0.5)]
    hosts = [
        {"impl": "helion_attn", "stage": "e2e", "lengths": lengths, "host_us": us}
        for lengths, us in (("same", 60.0), ("new", 2700.0))
    ]
    loaded: Any = {"preprocess": {"meta": {}, "rows": calls}, "host": {"meta": {}, "rows": hosts}}
    (table,) = front.cost_tables(loaded)
    costs = dict(table.body)
    assert costs["memory besides inputs and output"] == "0.50 of Q, K and V"
    assert costs["host time, lengths seen before"].startswith("60 us")
    assert costs["host time, new lengths"].startswith("2700 us")


def test_a_process_that_fails_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    cold, warm = startup.measure([workload(1, 1, 64, 64, 64)], torch.device("cpu"), tmp_path)
    assert cold["error_message"] == warm["error_message"] == "no message"


def test_rounds_are_shuffled() -> None:
    """What runs before a call decides at what clock it runs."""
    called: list[int] = []
    functions = {i: functools.partial(called.append, i) for i in range(9)}
    time_interleaved(functions, torch.device("cpu"), repeats=5, warmup=0)
    assert [sorted(called[i : i + 9]) for i in range(0, 45, 9)] == [list(range(9))] * 5
    followed = Counter(itertools.pairwise(called))
    assert max(followed.values()) <= 3, "in most rounds one runs behind another"


def test_outlier_channels() -> None:
    q, k, v = make_qkv("outlier_channel", 2, 4, 2, 1000, 1000, 64, torch.float32)
    large = []
    for x in (q, k):
        deviation = x.std(dim=(0, 1, 2))
        large.append({i for i, d in enumerate(deviation.tolist()) if d > 5})
        assert len(large[-1]) == OUTLIER_CHANNELS
        assert all(9 < deviation[i] < 31 for i in large[-1])
    assert not large[0] & large[1]
    assert v.std(dim=(0, 1, 2)).max() < 1.2


def grid_of_speed(faster: dict[tuple[int, bool, int], float | None]) -> dict[str, Any]:
    """Results of suite `speed`, with our speed over both FP8 peers' by (D, causal, S)."""
    rows = []
    for (D, causal, S), times in faster.items():
        cell = {"stage": "kernel", "D": D, "causal": causal, "N": S, "recipe": None, "error_kernel": 0.02}
        ms = None if times is None else 1 / times
        rows += [cell | {"impl": impl, "ms": 1.0} for impl in ("fa3_fp8", "cudnn_fp8")]
        rows.append(cell | {"impl": "helion_attn", "recipe": "balanced", "ms": ms})
    return {"attention": {"meta": {"gpu": "a GPU"}, "rows": rows}}


def test_goals_name_their_worst_cell() -> None:
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    cells: dict[tuple[int, bool, int], float | None]
    cells = {(D, causal, S): 1.2 for D in (64, 128, 256) for causal in (False, True) for S in lengths}
    holds, fails, partly, unmeasured = (
        GOALS[verdict] for verdict in ("PASS", "FAIL", "not all measured", "not measured")
    )

    def lines() -> dict[str, list[str]]:
        tables = goal_tables(report.all_checks(grid_of_speed(cells)))
        return {line[0]: [table.title, *line[1:]] for table in tables for line in table.body}

    every = "kernel speed / faster FP8 peer's, S 1024 to 16384"
    mean = "kernel speed / faster FP8 peer's, geometric mean of these 30 cells"
    assert lines()[every] == [holds, ">= 1", "1.2", "S 1024, D 64, full", "30 of 30"]
    assert lines()[mean] == [holds, ">= 1.1", "1.2", "-", "1 of 1"]
    # Below S 1024 nothing is promised.
    cells[64, False, 512], cells[128, True, 2048] = 0.5, 0.9
    assert lines()[every] == [fails, ">= 1", "0.9", "S 2048, D 128, causal", "29 of 30"]
    assert lines()[mean][0] == holds
    # One that ran and has no time was wrong; what was not run is no failure, and no mean either.
    cells[128, True, 2048] = None
    assert lines()[every] == [fails, ">= 1", "nan", "S 2048, D 128, causal", "29 of 30"]
    assert lines()[mean][0] == fails
    del cells[128, True, 2048]
    assert lines()[every][::4] == [partly, "29 of 30, 1 not measured"]
    assert lines()[mean] == [unmeasured, ">= 1.1", "-", "-", "0 of 1, 1 not measured"]


def test_every_promise_has_one_bound() -> None:
    root = Path(__file__).parents[2]
    loaded = load(root / RESULTS)
    assert set(report.CHECKED_FILES) <= {block.file for block in report.BLOCKS.values()}
    assert set(report.CHECKED_FILES) <= set(loaded)
    found = by_promise(report.all_checks(loaded))
    assert all(len({check.relation for check in promise.checks}) == 1 for promise in found)
    names = [check.name for promise in found for check in promise.checks]
    assert len(names) == len(set(names))


def test_a_preset_without_a_figure_is_a_dash() -> None:
    row = {"impl": "helion_attn", "part": "long", "input": "randn", "D": 64, "M": 128}
    row |= {"error_kernel": 0.02, "error_total": 0.03}
    rows = [row | {"recipe": "fast", "N": N} for N in (4096, 32768)] + [row | {"recipe": "hybrid", "N": 32768}]
    (table,) = accuracy.long_tables({"accuracy": {"rows": rows}})
    both = "0.0200 / 0.0300"
    assert table.headers == ["D", "keys", "FAST", "HYBRID"]
    assert table.body == [["64", "4096", both, "- / -"], ["64", "32768", both, both]]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Loaded:
    monkeypatch.chdir(Path(__file__).parents[2])
    return load(RESULTS)


def test_documents_show_the_results(results: Loaded) -> None:
    assert report.stale(report.DOCUMENTS, results, RESULTS) == [], "run python benchmarks/report.py"


def test_old_documents_are_found(results: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that was typed, a result that changed, plots too many and too few, and a page of tables likewise."""
    page = tmp_path / "docs" / "masks.md"
    page.parent.mkdir()
    for name, text in report.table_pages(results).items():
        (tmp_path / f"{name}.md").write_text(text)
    page.write_text(Path("docs/masks.md").read_text())
    (tmp_path / "other.png").touch()
    page.write_text(report.filled(page, results, tmp_path).text)
    old = report.stale([page], results, tmp_path)
    assert old == ["no plot sparse.png", "other.png is in no document"]
    tables = tmp_path / "sparse.md"
    text = tables.read_text()
    for wrong in (text + "more", None):
        tables.write_text(wrong) if wrong else tables.unlink()
        assert report.stale([page], results, tmp_path) == [f"{tables} is old", *old]
    tables.write_text(text)
    (tmp_path / "unknown.md").touch()
    assert report.stale([page], results, tmp_path)[0] == f"{tmp_path / 'unknown.md'} is old"
    (tmp_path / "unknown.md").unlink()
    page.write_text(page.read_text().replace(" random |", " typed |", 1))
    assert report.stale([page], results, tmp_path)[0] == f"{page} is old"
    page.write_text(report.filled(page, results, tmp_path).text)
    for row in results["sparse"]["rows"]:
        row["rmse"] = 1.0  # no table has it
    assert report.stale([page], results, tmp_path) == old
    for row in results["sparse"]["rows"]:
        if row["impl"] == "helion_attn" and row["ms"]:
            row["ms"] *= 2
    assert {f"{page} is old", f"{tables} is old"} <= {*report.stale([page], results, tmp_path)}
    monkeypatch.setattr(sys, "argv", ["report.py", "--strict", "--documents", str(page)])
    before = page.read_text()
    with pytest.raises(SystemExit) as status:
        report.main()
    assert status.value.code == 1
    assert page.read_text() == before


def test_every_plot_is_drawn_and_small(results: Loaded) -> None:
    blocks = list(report.BLOCKS.values())
    plots = {plot.name: plot for block in blocks for plot in block.plots}
    for name, plot in plots.items():
        assert plot.draw(results) is not None, name
        pyplot.close("all")
        assert (RESULTS / f"{name}.png").stat().st_size < 60_000, name


def test_a_colour_stands_for_one_thing() -> None:
    named: dict[str, set[str]] = {}
    for name, colour in COLOURS.items():
        named.setdefault(colour, set()).add(LABELS[name])
    assert [names for names in named.values() if len(names) > 1] == []


def test_axes_hold_their_lines(results: Loaded) -> None:
    for name in ("speed", "e2e", "roofline", "ladder", "distributed", "decode"):
        (plot,) = {p.name: p for block in report.BLOCKS.values() for p in block.plots if p.name == name}.values()
        figure = plot.draw(results)
        assert figure is not None
        for ax in figure.axes:
            low, high = ax.get_ylim()
            drawn: list[Any] = [y for line in ax.lines for y in list(line.get_ydata())]  # type: ignore[arg-type]
            assert drawn, name
            assert all(low <= y <= high for y in drawn), (name, ax.get_title())
        pyplot.close("all")


def test_wide_tables_are_broken_into_narrow_ones(results: Loaded) -> None:
    headers = ["D", "S", *(f"column {i}" for i in range(13))]
    table = Table("a title", headers, [[*map(str, range(15))]], keys=2)
    assert table.columns() == [[0, 1, *range(2, 9)], [0, 1, *range(9, 15)]]
    shown = [line.strip("|").split("|") for line in table.markdown().splitlines() if "column" in line]
    assert [[*map(str.strip, line)] for line in shown] == [[headers[i] for i in part] for part in table.columns()]
    for name, block in report.BLOCKS.items():
        for shown_table in block.tables(results) if block.file in results else ():
            lines = shown_table.markdown().splitlines()
            assert max((line.count("|") - 1 for line in lines), default=0) <= MOST_COLUMNS, name


def test_every_block_is_in_a_document_and_its_tables_on_a_page(results: Loaded) -> None:
    for page, text in report.table_pages(results).items():
        for name in report.PAGES[page]:
            block = report.BLOCKS[name]
            assert all(table.markdown() in text for table in block.tables(results) if block.file in results), name
    assert sorted([*front.BLOCKS, *(name for names in report.PAGES.values() for name in names)]) == sorted(
        report.BLOCKS
    )
    texts = [path.read_text() for path in report.DOCUMENTS]
    assert [name for name in report.BLOCKS if not any(f"<!-- results:{name} -->" in text for text in texts)] == []


def test_the_front_page_has_the_accurate_peers_and_every_8_bit_preset(results: Loaded) -> None:
    (errors,) = front.error_tables(results)
    names = [line[0] for line in errors.body]
    assert set(names) == {*map(str.upper, {*PRESETS, "hybrid"}), "SageAttention 2", "vLLM's FA3", "FA3 FP8", "FA3 bf16"}
    assert names[0] == "BALANCED"
    assert errors.body[0][-1] == "1.00"
    assert "-" not in [figure for line in errors.body for figure in line[2:6]]


def test_the_front_page_has_large_channels_once_they_are_measured(results: Loaded) -> None:
    hard_rows = results["hard"]["rows"]
    without = {**results, "hard": results["hard"] | {"rows": [row for row in hard_rows if row["part"] != "channels"]}}
    (row,) = [
        row
        for row in hard_rows
        if (row["part"], row["input"], row["recipe"], row["D"], row["N"]) == ("hard", "wide", "balanced", 128, 131072)
    ]
    row = row | {"part": "channels", "input": "k3x30", "H": channels.KV_HEADS, "error_total": 0.0321}
    loaded = {**results, "hard": results["hard"] | {"rows": [*without["hard"]["rows"], row]}}
    (before,), (after,) = front.error_tables(without), front.error_tables(loaded)
    assert "K in few channels" not in before.headers
    at = after.headers.index("K in few channels")
    assert {line[0]: line[at] for line in after.body if line[at] != "-"} == {"BALANCED": "0.0321"}
    assert [[*line[:at], *line[at + 1 :]] for line in after.body] == before.body
    (table,) = channels.tables(loaded)
    assert table.body == [["131072", "k3x30", "128", "0.0321"]]


def test_a_time_of_the_front_page_is_over_the_default() -> None:
    times = {
        ("fa3_bf16", "kernel"): 3.0,
        ("fa3_fp8", "kernel"): 4.0,
        ("sage2", "kernel"): 1.0,
        ("sage2", "e2e"): 8.0,
        ("helion_attn", "kernel"): 1.0,
        ("helion_attn", "e2e"): 2.0,
        ("fast", "e2e"): 1.0,
    }
    found = front.over_balanced([{"impl": impl, "stage": stage, "ms": ms} for (impl, stage), ms in times.items()])
    expected = {"fa3_bf16": 2 / 3, "fa3_fp8": 1 / 2, "sage2": 1 / 4, "helion_attn": 1.0, "fast": 2.0}
    assert found == pytest.approx(expected)


def test_the_front_page_says_what_auto_takes(results: Loaded) -> None:
    assert re.search(r"between \d+ and \d+, .*BALANCED for all layers below", front.crossovers(results) or "")
    results["models"]["rows"] += [
        row | {"model": "short", "M": 64, "N": 64} for row in results["models"]["rows"] if row["model"] == "Llama 8B"
    ]
    assert re.search(r"BALANCED for all layers below but (.*, )?short\.", front.crossovers(results) or "")
    for row in results["auto"]["rows"]:
        if row["impl"] == "helion_attn":
            row["ms"] = 1e9
    assert front.crossovers(results) is None, "8 bits are faster at no length"


def test_the_front_page_says_how_far_times_lie_apart() -> None:
    of_fa3 = {"impl": "fa3_bf16", "N": 75600, "H": 12}
    loaded: Loaded = {name: {"meta": {}, "rows": [of_fa3 | {"ms": ms}]} for name, ms in (("models", 5), ("sparse", 4))}
    assert front.apart(loaded) == "", "the default has no time"
    loaded["models"]["rows"].append(of_fa3 | {"impl": "helion_attn", "stage": "e2e", "ms": 2})
    assert re.search(r"4 to 5 ms .* a speed-up of 2\.00 to 2\.50\.$", front.apart(loaded))
    assert front.apart({"models": loaded["models"]}) == ""


def whole_steps(**ms: float) -> Loaded:
    """Results of suite `steps`, with the milliseconds of each contender, half of them attention."""
    row = {"model": steps.WAN_SMALL, "peak_memory": 2**30, "error_total": 0.01}
    rows = [row | {"contender": name, "ms": x, "attention_ms": x / 2} for name, x in ms.items()]
    return {"steps": {"meta": {"gpu": "a GPU", "date": "2026-01-01", "commit": "abc"}, "rows": rows}}


def test_a_brief_caption_names_rows_of_earlier_runs(results: Loaded) -> None:
    for suite, note in (("hard", "a peer: of a card"), ("accuracy", "its inputs: at abc; a peer: of a card")):
        meta = results[suite]["meta"] | {"command": f"python benchmarks/attention.py --suite {suite} ({note})"}
        results[suite] = results[suite] | {"meta": meta}
    caption = report.brief_caption(report.BLOCKS["front_errors"], results, "|a peer|0.05|")
    assert caption.count("a peer: of a card") == 1
    assert "its inputs" not in caption, "it names rows that are not shown"


def test_the_headline_is_of_the_default(results: Loaded) -> None:
    loaded = results | whole_steps(sdpa_bf16=40.0, fa3_bf16=30.0, balanced=20.0, fused=10.0, masked=5.0)
    text = report.block_markdown("headline", loaded, "images")
    assert text is not None
    assert [part[:20] for part in text.split("\n\n")] == [
        "A denoising step of ",
        "![A step's time by a",
        "<sub>a GPU, 2026-01-",
    ]
    assert "**1.50 times as fast**" in text
    loaded |= {"steps_compiled": whole_steps(fa3_bf16=30.0, balanced=25.0, fused=24.0)["steps"]}
    (table,) = front.step_tables(loaded)
    assert table.body == [[steps.WAN_SMALL, "40", "30", "-", "20", "10", "5", "1.50 / 3.00", "1.20 / 1.25"]]
    assert front.BLOCKS["headline"].plots[0].draw(loaded) is not None
    assert report.block_markdown("headline", {}, "images") is None


def test_the_front_page_has_room_for_whole_steps(results: Loaded) -> None:
    """All models of the suites in as many digits as they take."""
    loaded = results | whole_steps(sdpa_bf16=1e4, fa3_bf16=1e4, sage2=1e4, balanced=1e4, fused=1e4, masked=1e4)
    (wan, *_), rows = loaded["steps"]["rows"], loaded["steps"]["rows"]
    others = [model.name for model in steps.MODELS if model.name != wan["model"]]
    rows += [row | {"model": model} for model in others for row in rows[:6]]
    measured = results["models"]["rows"]
    missing = models.MODELS.keys() - {row["model"] for row in measured}
    measured += [row | {"model": model} for model in missing for row in measured if row["model"] == "Llama 8B"]
    filled = report.filled(report.DOCUMENTS[0], loaded, RESULTS)
    assert {"headline", "front_steps"} <= set(filled.written)
    assert len(filled.text.encode()) <= 10_000
