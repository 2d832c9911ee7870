"""Benchmarks run on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as pyplot
import pytest
import torch

import helion_attn as ha
from benchmarks import (
    ablation,
    attention,
    auto,
    distributed,
    front,
    host,
    models,
    plane,
    report,
    same_token,
    sparse,
    splits,
    startup,
    steps,
)
from benchmarks.lib import masked_peers, peers
from benchmarks.lib.checks import GOALS, Check, by_promise, goal_tables
from benchmarks.lib.harness import RESULTS, Loaded, Results, Row, load, time_interleaved
from benchmarks.lib.plots import COLOURS
from benchmarks.lib.problem import problem_of, workload
from benchmarks.lib.recipes import PRESETS
from benchmarks.lib.suite import Options
from benchmarks.lib.tables import LABELS, MOST_COLUMNS, Table
from benchmarks.suites import SUITES
from devtools.inputs import make_qkv
from helion_attn.compiler.helion_adapter import helion_config
from helion_attn.integrations.fused.fuse_diffusers import Processor
from helion_attn.integrations.fused.fuse_transformers import FusedAttention
from helion_attn.kernels import attention as attention_kernel
from helion_attn.numerics import takes_bits
from helion_attn.testing import relative_error
from helpers import ranks
from helpers.offline import MEASURED, SPILLED, launching


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


#: They take longer than `make test` has; those that have tests of their own, and what compiles models.
LONG = ("accuracy", "hard", "distributed", "startup", "masks", "ablation")
ELSEWHERE = ("same_token", "language_model", "model_channels", "quality", "steps_compiled")

#: What says that a number format errs more than another, by suite: of its rows, in their order.
ORDERS: dict[str, Callable[[list[Row]], bool]] = {
    "ladder": lambda rows: rows[0]["error_pv"] > 3 * rows[1]["error_pv"] > 0,
    "split": lambda rows: rows[0]["error_kernel"] == pytest.approx(rows[1]["error_kernel"], rel=1e-4),
    "decode": lambda rows: rows[8]["error_total"] < rows[11]["error_total"] < 0.1,
    "plane": lambda rows: (
        len({row["error_total"] for row in rows if row.get("input") == "randn"}) == len(plane.FORMATS)
    ),
}


@pytest.mark.parametrize(
    "suite",
    [pytest.param(s, marks=pytest.mark.thorough if s in LONG else ()) for s in SUITES if s not in ELSEWHERE],
)
def test_dry_run(suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fails, every time and error is one, tables and plots are made of them, and no goal is of a CPU."""
    monkeypatch.setattr(distributed, "spawn", ranks.spawn)
    # On the CPU nothing is compiled, and a warm process is a cold one.
    monkeypatch.setattr(startup, "run_process", functools.cache(startup.run_process))
    for name, value in (("SAME", 5), ("TURNS", 6), ("FIRST_NEW", 7), ("ROUNDS", 1)):
        monkeypatch.setattr(host, name, value)
    loaded = dry_run(suite, tmp_path)
    rows = loaded[SUITES[suite].file]["rows"]
    assert not [row["error_message"] for row in rows if "error_message" in row]
    numbers = {name: [row[name] for row in rows if row.get(name) is not None] for name in ("ms", "error_total")}
    assert all(ms > 0 for ms in numbers["ms"])
    assert all(0 <= error < 0.6 for error in numbers["error_total"])
    assert suite not in ORDERS or ORDERS[suite](rows)
    blocks = SUITES[suite].blocks.values()
    assert all(table.body for block in blocks for table in block.tables(loaded))
    assert any(block.tables(loaded) for block in blocks)
    for plot in (plot for block in blocks for plot in block.plots):
        plot.draw(loaded)
    pyplot.close("all")
    assert {check.verdict for check in report.all_checks(loaded)} <= {"not measured"}


def test_a_wrong_variant_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V in order for a kernel that takes it interleaved: what the error is there to show."""
    wrong = {"shipped": ablation.variants(64)["shipped"], "wrong": ablation.Variant(interleaved=False)}
    monkeypatch.setattr(ablation, "variants", lambda D: wrong)
    shipped, mistaken = dry_run("ablation", tmp_path)["ablation"]["rows"]
    assert shipped["ms"] > 0
    assert mistaken["ms"] is None
    assert "not timed" in mistaken["note"]


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


def test_rounds_are_shuffled() -> None:
    """What runs before a call decides at what clock it runs."""
    called: list[int] = []
    functions = {i: functools.partial(called.append, i) for i in range(9)}
    time_interleaved(functions, torch.device("cpu"), repeats=5, warmup=0)
    assert [sorted(called[i : i + 9]) for i in range(0, 45, 9)] == [list(range(9))] * 5
    followed = Counter(itertools.pairwise(called))
    assert max(followed.values()) <= 3, "in most rounds one runs behind another"


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


def test_split(tmp_path: Path) -> None:
    loaded = dry_run("split", tmp_path)
    rows = loaded["split"]["rows"]
    assert [(row["impl"], row.get("splits")) for row in rows] == [
        ("helion_attn", 2), ("one_run", None), ("paged", None), ("paged, fast", None),
    ]  # fmt: skip
    assert all(row["ms"] > 0 for row in rows)
    # A block's P does not depend on the run that the block is in; a page's rounds otherwise.
    split, one_run, paged, paged_fast = (row["error_kernel"] for row in rows)
    assert split == pytest.approx(one_run, rel=1e-4)
    assert paged != pytest.approx(one_run, rel=1e-3)
    assert paged_fast != paged
    (table,) = splits.tables(loaded)
    assert len(table.body) == 1


def test_every_promise_has_one_bound() -> None:
    root = Path(__file__).parents[2]
    loaded = load(root / RESULTS)
    assert set(report.CHECKED_FILES) <= {block.file for block in report.BLOCKS.values()}
    assert set(report.CHECKED_FILES) <= set(loaded)
    found = by_promise(report.all_checks(loaded))
    assert all(len({check.relation for check in promise.checks}) == 1 for promise in found)
    names = [check.name for promise in found for check in promise.checks]
    assert len(names) == len(set(names))


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
