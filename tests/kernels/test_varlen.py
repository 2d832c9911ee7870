"""attention_varlen: sequences of different lengths in one call, against the oracle, each other and `attention`."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.sm90 import fake_cuda
from helion_attn.configs import Q_FIELDS
from helion_attn.integrations.flash_attn_arguments import VARLEN_RULES
from helion_attn.numerics import E4M3_MAX, RECENTRED_KEYS
from helion_attn.ops import varlen
from helion_attn.testing import relative_error
from helion_attn.varlen import varlen_problem
from helpers.cases import GIVEN, PRESETS, Tensors
from helpers.memory import nan_filled_memory
from helpers.offline import compilations
from helpers.recorder import Recorder
from helpers.refused import refused
from helpers.sequences import assert_right, attention_varlen, make_varlen_case, packed_qkv, run, tables

FP32_EPS = torch.finfo(torch.float32).eps

flash_attn_varlen_func: Any = ha.flash_attn_varlen_func

#: Of flash-attn 3's flash_attn_varlen_func (hopper/flash_attn_interface.py), in order.
FLASH_ATTN_3 = """
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, softmax_scale, causal, qv,
    q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, num_splits, pack_gqa, deterministic,
    sm_margin, return_attn_probs
""".replace(",", " ").split()

#: (M, N) of each sequence. A query block has 64 rows, at D 256 128, and a key block 128.
BATCHES: dict[str, list[tuple[int, int]]] = {
    "ragged": [(5, 9), (130, 200), (70, 33), (1, 257)],
    "one_sequence": [(100, 150)],
    "length_1": [(1, 1)] * 5,
    "without_keys": [(40, 0), (70, 90), (3, 0)],
    "without_queries": [(0, 40), (70, 90), (0, 3)],
    "empty": [(0, 0), (70, 90), (0, 0), (0, 0), (20, 128), (0, 0)],
    "one_long_many_short": [(3, 5), (2, 2), (200, 400), *[(4, 4)] * 12],
    "whole_blocks": [(64, 128), (128, 256), (64, 128)],
    "more_queries": [(150, 20), (64, 1), (129, 128)],
}


@pytest.mark.thorough(but=6)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", BATCHES)
def test_batches(name: str, causal: bool, device: str, poisoned: Callable[[], AbstractContextManager[None]]) -> None:
    batch = BATCHES[name]
    cu = tables(batch, device)
    case = make_varlen_case(packed_qkv(batch, device), cu, causal=causal)
    with poisoned():
        assert_right(case, cu)


#: What a specialisation of the kernels may be, on one batch; the fuzz has every recipe.
OPTIONS: dict[str, dict[str, Any]] = {
    "d64": {"D": 64, "causal": True},
    "d96": {"D": 96},
    "d128": {"D": 128, "causal": True},
    "d256": {"D": 256},
    "d256_causal": {"D": 256, "causal": True},
    "d80_v48": {"D": 80, "D_v": 48},
    "d192_v128": {"D": 192, "D_v": 128, "causal": True},
    "mha": {"H": 3, "H_kv": 3},
    "gqa": {"H": 4, "H_kv": 2, "causal": True},
    "scale": {"sm_scale": 0.4},
    "window": {"window": (30, 10)},
    "window_causal": {"window": (50, -1), "causal": True},
    "window_left": {"window": (140, -1)},
    "window_right": {"window": (-1, 5)},
    "softcap": {"softcap": 2.0, "sm_scale": 0.5, "recipe": ha.ACCURATE},
    "sinks": {"sinks": [0.5, float("-inf")], "causal": True},
    "sinks_full": {"sinks": [2.0, 30.0], "recipe": ha.ACCURATE},
    "everything": {"window": (60, 3), "softcap": 2.0, "sinks": [0.5, -1.0], "recipe": ha.ACCURATE},
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32, "recipe": ha.ACCURATE, "causal": True},
    "outlier": {"kind": "outlier"},
}

#: All kinds of sequences, for `OPTIONS`.
MIXED = [(0, 12), (70, 150), (30, 0), (1, 140), (100, 60), (0, 0)]


@pytest.mark.thorough(but=12)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, device: str) -> None:
    options = dict(OPTIONS[name])
    if "sinks" in options:
        options["sinks"] = torch.tensor(options["sinks"], device=device)
    inputs: dict[str, Any] = {"H": 2, "H_kv": 1}
    inputs |= {key: options.pop(key) for key in ("D", "D_v", "H", "H_kv", "dtype", "kind") if key in options}
    cu = tables(MIXED, device)
    assert_right(make_varlen_case(packed_qkv(MIXED, device, **inputs), cu, **options), cu)


def sequence(b: int, qkv: Tensors, batch: list[tuple[int, int]]) -> Tensors:
    """Its tokens alone."""
    cu_q, cu_k = (x.tolist() for x in tables(batch, "cpu"))
    rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
    return qkv[0][rows], qkv[1][keys], qkv[2][keys]


@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
def test_is_attention_of_every_sequence(recipe: ha.Recipe, device: str) -> None:
    batch = [(130, 200), (5, 9), (0, 3), (1, 257)]
    qkv, cu = packed_qkv(batch, device), tables(batch, device)
    out, lse = attention_varlen(*qkv, *cu, causal=True, recipe=recipe, return_lse=True)
    # A GPU may sum V's channels in another order. A block of which a row sees nothing moves its reference, of which lse
    # has the rounding: fp32's, of up to 64.
    tolerance, of_lse = (0.0, 2.0**-19) if device == "cpu" else (0.01, 0.01)
    for b, (m, _) in enumerate(batch):
        if m:
            alone = (x.unsqueeze(0) for x in sequence(b, qkv, batch))
            expected, expected_lse = ha.attention(*alone, layout="bshd", causal=True, recipe=recipe, return_lse=True)
            rows = slice(int(cu[0][b]), int(cu[0][b + 1]))
            assert relative_error(out[rows], expected[0]) <= tolerance
            assert relative_error(lse[:, rows], expected_lse[0]) <= of_lse


@pytest.mark.parametrize("recipe", [ha.FAST, ha.ACCURATE, ha.HYBRID], ids=["fast", "accurate", "hybrid"])
def test_a_sequence_does_not_depend_on_its_neighbours(recipe: ha.Recipe, device: str) -> None:
    """Bit for bit; and a NaN stays where it is."""
    batch = [(10, 90), (70, 140), (3, 20)]
    qkv, cu = packed_qkv(batch, device, H=2, H_kv=1), tables(batch, device)
    clean = attention_varlen(*qkv, *cu, recipe=recipe)
    rows = slice(10, 80)
    others = torch.ones(len(clean), dtype=torch.bool, device=device)
    others[rows] = False
    alone = sequence(1, qkv, batch)
    assert torch.equal(attention_varlen(*alone, *tables([batch[1]], device), recipe=recipe), clean[rows])
    for i, first in ((0, 10), (1, 90), (2, 90)):
        hit = [x.clone() for x in qkv]
        hit[i][first] = float("nan")
        hit[i][first + 1] = float("inf")
        out = attention_varlen(*hit, *cu, recipe=recipe)
        assert torch.equal(out[others], clean[others])
        assert out[10 if i == 0 else rows].isnan().all()


def test_strided_inputs(device: str) -> None:
    batch = [(70, 70), (3, 3), (130, 130)]
    cu = tables(batch, device)
    qkv = torch.randn(203, 3, 4, 48, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    expected = attention_varlen(*(x.contiguous() for x in qkv.unbind(1)), *cu, causal=True)
    assert torch.equal(attention_varlen(*qkv.unbind(1), *cu, causal=True), expected)
    for view in (
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.cat((x, x[..., :3]), 2)[..., :48],
        lambda x: x.repeat_interleave(2, 0)[::2],
    ):
        q, k, v = (view(x) for x in qkv.unbind(1))
        assert not q.is_contiguous()
        assert torch.equal(attention_varlen(q, k, v, *cu, causal=True), expected)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_out_dtype(out_dtype: torch.dtype, device: str) -> None:
    cu = tables(BATCHES["ragged"], device)
    case = make_varlen_case(packed_qkv(BATCHES["ragged"], device), cu)
    out, _ = run(case, cu, out_dtype)
    assert out.dtype == out_dtype
    case.assert_within_budget(out)


@pytest.mark.parametrize("recipe", [ha.BALANCED, ha.ACCURATE], ids=["balanced", "accurate"])
def test_each_sequence_of_many_keys_keeps_the_mean_of_its_v(recipe: ha.Recipe, device: str) -> None:
    """Those of fewer have the mean that was subtracted, as `quantize` of each would."""
    batch = [(1, 3), (1, RECENTRED_KEYS), (0, 0), (2, 0), (1, RECENTRED_KEYS + 130), (1, RECENTRED_KEYS - 1)]
    q, k, v = packed_qkv(batch, device, D=32, kind="randn")
    cu = tables(batch, device)
    packed = varlen.quantize(varlen_problem(q, k, v, *cu, recipe=recipe))
    starts = cu[1].tolist()
    for b, (begin, end) in enumerate(itertools.pairwise(starts)):
        own = packed.v_mean[b]
        if begin == end:
            assert torch.all(own == 0)
            continue
        # [1, heads, tokens, head dim]
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q[:1], k[begin:end], v[begin:end]))
        alone = ha.reference.quantize(query, key, value, recipe)
        noise = 32 * FP32_EPS * v[begin:end].double().abs().mean(0)
        # A few keys may be rounded to the model's neighbour.
        step = alone.v_descale[0] * E4M3_MAX / 8
        assert torch.all((own - alone.v_mean[0]).abs() <= noise + step * 2**-10 * (end - begin >= RECENTRED_KEYS))


@pytest.mark.parametrize("recipe", [ha.BALANCED, ha.ACCURATE], ids=["balanced", "accurate"])
def test_v_beyond_the_room_of_its_sample(recipe: ha.Recipe, device: str) -> None:
    """Of a sequence, in a key that no sample has: it is not cut off, and other sequences are as without it."""
    batch = [(3, 90), (3, 600), (3, 600)]
    cu = tables(batch, device)
    q, k, v = packed_qkv(batch, device, D=32)
    clean = attention_varlen(q, k, v, *cu, sm_scale=0.01, recipe=recipe)
    v[90 + 7, 0, 3] = 1000.0
    out = attention_varlen(q, k, v, *cu, sm_scale=0.01, recipe=recipe)
    oracle, _ = ha.reference.attention_varlen(q, k, v, *cu, sm_scale=0.01)
    assert relative_error(out[3:6, :, 3], oracle[3:6, :, 3]) < 2.0**-4
    for rows in (slice(0, 3), slice(6, 9)):
        assert torch.equal(out[rows], clean[rows])


def test_the_mean_of_many_keys_does_not_touch_other_sequences(device: str) -> None:
    """A head of V with an infinity before, and after, the sequence that is long; the others are as if alone."""
    batch = [(2, 20), (2, RECENTRED_KEYS), (2, 20), (2, 20)]
    cu = tables(batch, device)
    q, k, v = packed_qkv(batch, device, D=16)
    clean = attention_varlen(q, k, v, *cu, recipe=ha.ACCURATE)
    v[3, 0], v[-1, 1] = float("inf"), float("nan")
    out = attention_varlen(q, k, v, *cu, recipe=ha.ACCURATE)
    poisoned = torch.zeros_like(out, dtype=torch.bool)
    poisoned[:2, :2], poisoned[6:, 2:] = True, True
    assert torch.all(out.isnan() == poisoned)
    assert torch.equal(out[~poisoned], clean[~poisoned])


def test_no_token_at_all(device: str) -> None:
    q, k, v = packed_qkv([(5, 7)], device)
    cu = tables([(0, 7), (0, 0)], device)
    out, lse = attention_varlen(q[:0], k, v, *cu, return_lse=True)
    assert out.shape == (0, 4, 32)
    assert lse.shape == (4, 0)
    cu = tables([(2, 0), (3, 0)], device)
    out, lse = attention_varlen(q, k[:0], v[:0], *cu, return_lse=True)
    assert torch.all(out == 0)
    assert torch.all(lse == float("-inf"))


def test_tokens_of_no_sequence_are_nan(device: str) -> None:
    """And no others; those of K and V are not read."""
    batch = [(70, 90), (30, 0), (20, 150)]
    q, k, v = packed_qkv([(9, 40), *batch, (7, 30)], device)
    k[:40] = k[280:] = v[:40] = v[280:] = float("nan")
    cu_q, cu_k = tables(batch, device)
    out, lse = attention_varlen(q, k, v, cu_q + 9, cu_k + 40, return_lse=True)
    expected, expected_lse = attention_varlen(q[9:129], k[40:280], v[40:280], *tables(batch, device), return_lse=True)
    assert not expected.isnan().any()
    assert torch.equal(out[9:129], expected)
    assert torch.equal(lse[:, 9:129], expected_lse)
    for tokens in (slice(0, 9), slice(129, None)):
        assert out[tokens].isnan().all()
        assert lse[:, tokens].isnan().all()


BAD_TABLES: dict[str, tuple[list[int], list[int]]] = {
    "q_descends": ([0, 80, 60, 100], [0, 50, 60, 200]),
    "k_descends": ([0, 60, 80, 100], [0, 60, 50, 200]),
    "q_negative": ([-3, 60, 80, 100], [0, 50, 60, 200]),
    "k_negative": ([0, 60, 80, 100], [-3, 50, 60, 200]),
    "q_too_many": ([0, 60, 80, 101], [0, 50, 60, 200]),
    "k_too_many": ([0, 60, 80, 100], [0, 50, 60, 201]),
    "k_huge": ([0, 60, 80, 100], [0, 50, 60, 2**31 - 1]),
    "q_wraps": ([2**31 - 1, -2, 80, 100], [0, 50, 60, 200]),
    "k_wraps": ([0, 60, 80, 100], [2**31 - 1, -2, 60, 200]),
    "lengths": ([60, 20, 20, 0], [50, 10, 140, 0]),
}


@pytest.mark.thorough(but=12)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", BAD_TABLES)
def test_tables_that_are_none_give_nan(name: str, causal: bool, sinks: bool, device: str) -> None:
    qkv = packed_qkv([(100, 200)], device)
    cu = (torch.tensor(x, dtype=torch.int32, device=device) for x in BAD_TABLES[name])
    logits = torch.zeros(4, device=device) if sinks else None
    out, lse = attention_varlen(*qkv, *cu, causal=causal, sinks=logits, return_lse=True)
    assert out.isnan().all()
    assert lse.isnan().all()


def described(cu_q: list[int], cu_k: list[int], M: int, N: int, bm: int, bn: int) -> list[list[int]]:
    """Rows of q_blocks that belong to tokens, from the definition."""
    begins, ends = [0, *cu_q], [*cu_q, M]
    keys = [-1, *(b - a for a, b in itertools.pairwise(cu_k)), -1]
    k_first = [sum(-(-max(n, 0) // bn) for n in keys[:s]) for s in range(len(keys))]
    rows: list[list[int]] = []
    for s in sorted(range(len(keys)), key=lambda s: -keys[s]):
        blocks = -(-(ends[s] - begins[s]) // bm)
        sequence = s - 1 if keys[s] >= 0 else 0
        row = [sequence, begins[s], ends[s] - begins[s], k_first[s], keys[s], len(rows), blocks]
        rows += [row] * blocks
    return rows


@pytest.mark.parametrize("B", [1, 127])
def test_where_sequences_lie(B: int, device: str) -> None:
    from helion_attn.preprocess import sequences

    rng = random.Random(B)
    lengths = [[rng.choice([0, 1, 3, 64, 65, 200, rng.randint(0, 600)]) for _ in range(B)] for _ in range(2)]
    cu_q, cu_k = ([sum(sizes[:b]) + 5 for b in range(B + 1)] for sizes in lengths)
    M, N, bm, bn = cu_q[-1] + 70, cu_k[-1], 64, 128
    given_q, given_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (cu_q, cu_k))
    table = sequences.launch(given_q, given_k, M, N, bm, bn)
    expected = described(cu_q, cu_k, M, N, bm, bn)
    q_blocks = table.q_blocks[:, :7].tolist()
    assert q_blocks[: len(expected)] == expected
    # The rest has no tokens, and programs take the longest first.
    assert all(row[2] == 0 and row[5] == len(expected) for row in q_blocks[len(expected) :])
    assert [row[4] for row in q_blocks] == sorted((row[4] for row in q_blocks), reverse=True)
    # Every key is in one block.
    k_blocks = [[b, cu_k[b] + i, n - i] for b, n in enumerate(lengths[1]) for i in range(0, n, bn)]
    assert table.k_blocks[: len(k_blocks), :3].tolist() == k_blocks
    assert torch.all(table.k_blocks[len(k_blocks) :, 2] <= 0)
    assert table.sequences[:, 1].tolist() == lengths[1]


@pytest.mark.parametrize("field", range(Q_FIELDS - 1))
def test_a_wrong_table_exceeds_the_budget(field: int, device: str) -> None:
    batch = [(70, 140), (60, 300), (30, 20)]
    qkv, cu = packed_qkv(batch, device), tables(batch, device)
    case = make_varlen_case(qkv, cu, causal=True)
    problem = varlen_problem(*qkv, *cu, causal=True, out_dtype=torch.float32)
    packed = varlen.quantize(problem)
    out, _ = varlen.attend(problem, packed)
    case.assert_within_budget(out)
    # Of the first sequence in order, with the most keys: its number, tokens, queries, key blocks, keys, blocks.
    wrong = {0: 0, 1: 69, 2: 59, 3: 1, 4: 200, 5: 1, 6: 2}[field]
    assert packed.q_blocks[0, field] != wrong
    packed.q_blocks[0, field] = wrong
    # A row that is not written must not hold what another launch left.
    with nan_filled_memory():
        out, _ = varlen.attend(problem, packed)
    with pytest.raises(AssertionError, match="budget"):
        case.assert_within_budget(out)


@pytest.mark.parametrize("which", [0, 1], ids=["q", "k"])
def test_cu_seqlens_off_by_one_exceed_the_budget(which: int, device: str) -> None:
    batch = [(7, 9), (6, 5)]
    cu = tables(batch, device)
    case = make_varlen_case(packed_qkv(batch, device), cu)
    assert_right(case, cu)
    cu[which][1] += 1
    with pytest.raises(AssertionError, match="budget"):
        case.assert_within_budget(run(case, cu)[0])


def test_window_and_causality_off_by_one_exceed_the_budget(device: str) -> None:
    batch = [(20, 30), (6, 15)]
    qkv, cu = packed_qkv(batch, device), tables(batch, device)
    case = make_varlen_case(qkv, cu, window=(4, 3))
    assert_right(case, cu)
    for window in ((5, 3), (4, 2)):
        with pytest.raises(AssertionError, match="budget"):
            case.assert_within_budget(attention_varlen(*qkv, *cu, window=window))


def test_two_runs_are_equal(device: str) -> None:
    qkv, cu = packed_qkv(MIXED, device), tables(MIXED, device)
    first, second = (attention_varlen(*qkv, *cu, causal=True, return_lse=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.thorough
def test_lengths_and_batches_are_data() -> None:
    """Two compilations of a kernel at most: Helion tells 1 from other sizes."""
    rng = random.Random(0)
    with compilations() as seen:
        for B in (2, 17, 500):
            M, N = rng.randint(1, 20000), rng.randint(1, 20000)
            q, k, v = (fake_cuda(S, H, 64, dtype=torch.bfloat16) for S, H in ((M, 4), (N, 2), (N, 2)))
            cu = (fake_cuda(B + 1, dtype=torch.int32) for _ in range(2))
            attention_varlen(q, k, v, *cu, causal=True)
    assert len(seen.by_kernel()) == 6
    assert max(seen.by_kernel().values()) <= 2, seen.by_kernel()


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def good() -> dict[str, Any]:
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    return {"q": zeros(5, 4, 32), "k": zeros(5, 2, 32), "v": zeros(5, 2, 32), "cu_seqlens_q": cu, "cu_seqlens_k": cu}


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q_list": ({"q": [1]}, TypeError, "q is a list; it must be a torch.Tensor"),
    "rank": ({"k": zeros(1, 5, 2, 32)}, ValueError, r"k has shape \(1, 5, 2, 32\); it must have 3 dimensions"),
    "dtype": ({"q": zeros(5, 4, 32, dtype=torch.float64)}, TypeError, "q has dtype torch.float64"),
    "e4m3": ({"q": zeros(5, 4, 32).to(torch.float8_e4m3fn)}, TypeError, "q has dtype torch.float8_e4m3fn"),
    "mixed": ({"v": zeros(5, 2, 32, dtype=torch.float16)}, TypeError, "v has dtype torch.float16 and q has"),
    "no_head": ({"q": zeros(5, 0, 32)}, ValueError, r"q has shape \(5, 0, 32\); every dimension but the first"),
    "heads": ({"q": zeros(5, 3, 32)}, ValueError, "q has 3 heads and k has 2; q's must be a multiple"),
    "kv_heads": ({"v": zeros(5, 1, 32)}, ValueError, "v has 1 heads and k has 2"),
    "tokens": ({"v": zeros(6, 2, 32)}, ValueError, "v has 6 tokens and k has 5"),
    "head_dims": ({"k": zeros(5, 2, 64)}, ValueError, "k has head dim 64 and q has 32"),
    "large_d": (
        {"q": zeros(5, 4, 320), "k": zeros(5, 2, 320)},
        NotImplementedError,
        r"q has head dim 320; .* must have one in 16\.\.256",
    ),
    "small_d_v": ({"v": zeros(5, 2, 8)}, NotImplementedError, "v has head dim 8"),
    "cu_list": ({"cu_seqlens_q": [0, 3, 5]}, TypeError, "cu_seqlens_q is a list; it must be an int32 tensor"),
    "cu_int64": ({"cu_seqlens_k": torch.tensor([0, 3, 5])}, TypeError, "cu_seqlens_k has dtype torch.int64"),
    "cu_rank": ({"cu_seqlens_q": torch.zeros(1, 3, dtype=torch.int32)}, ValueError, "cu_seqlens_q has shape"),
    "cu_of_none": (
        {"cu_seqlens_q": torch.zeros(1, dtype=torch.int32)},
        ValueError,
        r"cu_seqlens_q has shape \(1,\); it must be \[B \+ 1\]",
    ),
    "cu_sizes": ({"cu_seqlens_k": torch.zeros(4, dtype=torch.int32)}, ValueError, "they must be equal"),
    "cu_strided": (
        {"cu_seqlens_k": torch.zeros(6, dtype=torch.int32)[::2]},
        ValueError,
        r"cu_seqlens_k has strides \(2,\)",
    ),
    "recipe": ({"recipe": "quick"}, ValueError, "recipe is 'quick'"),
    "k_scales": ({"recipe": GIVEN}, ValueError, "recipe has k_scales='head'.*; to quantise it must be 'block'"),
    "causal": ({"causal": 2}, TypeError, "causal is 2"),
    "return_lse": ({"return_lse": None}, TypeError, "return_lse is None"),
    "sm_scale": ({"sm_scale": -1.0}, ValueError, "sm_scale is -1"),
    "window": ({"window": (-2, 0)}, ValueError, "window is"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap is 0.0"),
    "sinks": ({"sinks": torch.zeros(3)}, ValueError, r"sinks has shape \(3,\)"),
    "out_dtype": ({"out_dtype": torch.int8}, TypeError, "out_dtype is torch.int8"),
    "fp32_strides": (
        {name: zeros(5, 2, 64, dtype=torch.float32)[..., ::2] for name in "qkv"},
        ValueError,
        "q is float32 with strides",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_raise(name: str) -> None:
    arguments, error, message = BAD[name]
    with pytest.raises(error, match=message):
        attention_varlen(**(good() | arguments))


# ---------------------------------------------------------------------------------------------------------------------
# flash_attn_varlen_func
# ---------------------------------------------------------------------------------------------------------------------


def test_signature() -> None:
    parameters = inspect.signature(ha.flash_attn_varlen_func).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == FLASH_ATTN_3
    of_flash_attn_2 = ["dropout_p", "alibi_slopes", "block_table", "return_softmax_lse"]
    assert [name for name in parameters if name not in positional] == [*of_flash_attn_2, "recipe"]


FLASH_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "scale": ({"softmax_scale": 0.3}, {"sm_scale": 0.3}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (9, 5)}, {"window": (9, 5)}),
    "softcap": ({"softcap": 1.5, "softmax_scale": 0.5}, {"softcap": 1.5, "sm_scale": 0.5}),
}


@pytest.mark.parametrize("name", FLASH_OPTIONS)
def test_flash_attn_against_the_oracle(name: str, device: str) -> None:
    given, meant = FLASH_OPTIONS[name]
    batch = [(37, 70), (20, 40)]
    qkv, cu = packed_qkv(batch, device, kind="randn"), tables(batch, device)
    out, lse = flash_attn_varlen_func(*qkv, *cu, 37, 70, return_attn_probs=True, **given)
    assert lse.shape == (4, 57)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, ha.reference.attention_varlen(*qkv, *cu, **meant)[0]) < 0.07
    for _, other in FLASH_OPTIONS.values():
        if other != meant:
            assert relative_error(out, ha.reference.attention_varlen(*qkv, *cu, **other)[0]) > 0.1


def test_flash_attn_is_attention_varlen(device: str) -> None:
    qkv, cu = packed_qkv(BATCHES["ragged"], device), tables(BATCHES["ragged"], device)
    expected = attention_varlen(*qkv, *cu, causal=True, recipe=ha.FAST)
    given = flash_attn_varlen_func(
        *qkv, *cu, 130, 257, causal=True, num_splits=0, pack_gqa=True, deterministic=True, recipe=ha.FAST
    )
    assert torch.equal(given, expected)


@pytest.mark.parametrize("rule", VARLEN_RULES, ids=lambda rule: rule.argument)
def test_unsupported_arguments_raise(rule: Any, device: str) -> None:
    batch = BATCHES["one_sequence"]
    assert rule.argument in FLASH_ATTN_3
    assert rule.accepts(inspect.signature(ha.flash_attn_varlen_func).parameters[rule.argument].default)
    with pytest.raises(NotImplementedError, match=f"{rule.argument} is .*; it must be"):
        flash_attn_varlen_func(
            *packed_qkv(batch, device), *tables(batch, device), 100, 150, **{rule.argument: refused(rule.argument)}
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window_size": (-2, 0)}, ValueError, "window_size is"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0; it must be 0.0, for no cap"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale is -1"),
        ({"num_splits": True}, NotImplementedError, "num_splits is True; it must be 0 or 1"),
        ({"dropout_p": 0.1}, NotImplementedError, "dropout_p is 0.1; it must be 0.0"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_flash_attn_arguments_raise(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**good(), max_seqlen_q=3, max_seqlen_k=3, **options)


# ---------------------------------------------------------------------------------------------------------------------
# Under PyTorch's compiler and in graphs
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
def test_opcheck(recipe: ha.Recipe, device: str, poisoned: Callable[[], AbstractContextManager[None]]) -> None:
    qkv, cu = packed_qkv(BATCHES["ragged"], device, D=48), tables(BATCHES["ragged"], device)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    with Recorder() as recorder:
        ha.attention_varlen(*qkv, *cu, recipe=recipe, causal=True, out_dtype=torch.float16)
    # Blocks of no sequence are not written; filled, they are the same in both of opcheck's runs.
    with poisoned():
        torch.library.opcheck(*recorder.calls["helion_attn::attention_varlen"], test_utils=checks)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_torch_compile(dynamic: bool, device: str) -> None:
    """In one graph, which other lengths of as many tokens do not change."""
    torch._dynamo.reset()
    batch, other = [(37, 70), (0, 9), (20, 40)], [(30, 9), (17, 30), (10, 80)]
    qkv = packed_qkv(batch, device)
    graphs = 0

    def count(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return module.forward

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor) -> Any:
        return flash_attn_varlen_func(q * 2, k, v, cu_q, cu_k, 37, 80, causal=True, return_attn_probs=True)

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend=count)
    for sizes in (batch, other):
        cu = tables(sizes, device)
        for actual, expected in zip(compiled(*qkv, *cu), attend(*qkv, *cu), strict=True):
            assert torch.equal(
                actual,
                expected,
            )
    assert graphs == 1


def test_autocast_changes_nothing(device: str) -> None:
    qkv, cu = packed_qkv(BATCHES["ragged"], device), tables(BATCHES["ragged"], device)
    expected = attention_varlen(*qkv, *cu, recipe=ha.ACCURATE)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(attention_varlen(*qkv, *cu, recipe=ha.ACCURATE), expected)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """Lengths are the device's: a graph is replayed with others."""
    batch, other = [(37, 70), (0, 9), (200, 400)], [(150, 9), (17, 30), (70, 440)]
    qkv, cu = packed_qkv(batch, "cuda"), tables(batch, "cuda")
    attention_varlen(*qkv, *cu, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_varlen(*qkv, *cu, causal=True)
    for x, y in zip(cu, tables(other, "cuda"), strict=True):
        x.copy_(y)
    graph.replay()
    assert torch.equal(out, attention_varlen(*qkv, *cu, causal=True))
