"""Attention over several ranks is that of one process: gloo, the interpreter, 2 and 4 ranks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.configs import packing
from helion_attn.distributed import collectives, header
from helion_attn.distributed.cut import Chunk, Cut, cut_of
from helion_attn.distributed.header import HEADER_BYTES, Header, decode
from helion_attn.numerics import SAMPLED_KEYS
from helion_attn.preprocess import rank_samples
from helion_attn.problem import NO_ROPE_ARGUMENTS, DescribeRankArgs, magic, magic_finds_chunks
from helion_attn.testing import relative_error
from helion_attn.types import Balance, Strategy
from helion_attn.validate.distributed import check_places
from helpers import ranks
from helpers.ranks import Problem, assert_as_one
from helpers.shared import once

STRATEGIES: tuple[Strategy, ...] = ("allgather", "ulysses", "ring")

RAGGED = Problem((260, 256), (260, 256), D=64, D_v=64, H=2)
CUT_ANYHOW = Problem((100, 33), (40, 216), H=8, causal=True, return_lse=True)
ZIGZAG = Problem((256, 256), (256, 256), H=1, causal=True, zigzag=True)
#: Of a length at which one process takes the sizes of channels from the same keys.
SHORT_ZIGZAG = Problem((268, 512), (268, 512), causal=True, zigzag=True, return_lse=True, has_rope=True)
EVEN = Problem((40, 40), (128, 128), causal=True)
FEW_ROWS = Problem((40, 40), (130, 126), H=2, causal=True)
PLAIN = Problem((40, 40), (128, 128), alike=True)
NOT_EQUALISED = replace(PLAIN, recipe=replace(ha.BALANCED, equalise=False))
LARGE = Problem((40, 40), (130, 126), H=4, H_kv=2, alike=True, large=30.0)

#: By name: a problem, and the strategies that solve it.
PROBLEMS: dict[str, tuple[Problem, tuple[Strategy, ...]]] = {
    "full": (RAGGED, ("allgather", "ulysses")),
    "causal": (replace(RAGGED, causal=True, recipe=ha.FAST), ("allgather", "ulysses")),
    "fewer queries": (replace(FEW_ROWS, return_lse=True), STRATEGIES),
    "any lengths": (CUT_ANYHOW, ("ring",)),
    "zigzag": (ZIGZAG, ("allgather", "ring")),
    "short zigzag, RoPE": (SHORT_ZIGZAG, ("allgather", "ulysses")),
    "window, sinks": (
        replace(FEW_ROWS, D_v=64, window=(70, 20), causal=False, has_sinks=True, return_lse=True),
        STRATEGIES,
    ),
    # Chunks of 256, of which the last is empty and the one before it short.
    "zigzag, an empty chunk": (
        replace(ZIGZAG, q_lengths=(256, 257), k_lengths=(256, 257), H=2, H_kv=2, has_rope=True, return_lse=True),
        STRATEGIES,
    ),
    "zigzag, more keys": (replace(ZIGZAG, q_lengths=(128, 200), k_lengths=(256, 300), B=2, H=2), STRATEGIES),
    "zigzag window": (replace(ZIGZAG, H=2, window=(150, 0)), ("allgather",)),
    "softcap": (replace(FEW_ROWS, softcap=5.0, H=4, H_kv=2), STRATEGIES),
    "batch, BSHD, RoPE": (replace(FEW_ROWS, B=2, H=4, H_kv=2, layout="bshd", has_rope=True), STRATEGIES),
    "8192 keys": (Problem((3, 3), (4224, 3968)), ("allgather", "ulysses")),
    **{
        f"recipe {name}": (replace(FEW_ROWS, q_lengths=(64, 64), H=4, H_kv=2, recipe=recipe), STRATEGIES)
        for name, recipe in {
            "fast": ha.FAST,
            "accurate": ha.ACCURATE,
            "hybrid": ha.HYBRID,
            "bf16": ha.BF16,
        }.items()
    },
    "large channels": (LARGE, STRATEGIES),
    "large channels, few queries": (replace(LARGE, q_lengths=(77, 3), causal=True), ("ring",)),
    # One process takes the sizes of channels from other keys.
    "large channels, short zigzag": (
        replace(LARGE, q_lengths=(220, 256), k_lengths=(220, 256), zigzag=True, causal=True),
        ("allgather",),
    ),
    "large channels, zigzag, more keys, RoPE": (
        replace(LARGE, q_lengths=(128, 200), k_lengths=(256, 300), zigzag=True, causal=True, has_rope=True),
        ("allgather",),
    ),
    "large channels, batch, BSHD, RoPE, fast": (
        replace(LARGE, k_lengths=(128, 128), B=2, layout="bshd", has_rope=True, recipe=ha.FAST),
        ("ulysses",),
    ),
    "four, ragged": (
        Problem((20, 20, 20, 8), (132, 132, 132, 120), H=4, H_kv=2, causal=True, return_lse=True),
        STRATEGIES,
    ),
    "four, zigzag, empty chunks": (
        replace(ZIGZAG, q_lengths=(256, 256, 256, 300), k_lengths=(256, 256, 256, 300), H=4, H_kv=2, return_lse=True),
        STRATEGIES,
    ),
    "four, zigzag": (replace(ZIGZAG, q_lengths=(250, 256, 256, 256), k_lengths=(250, 256, 256, 256)), ("allgather",)),
}

#: Whose factors of channels are those of one process: rows come to ranks in their own dtype, and so without RoPE.
EQUALISED = {
    "plain": PLAIN,
    "fewer queries": LARGE,
    "a rank of few queries": replace(LARGE, q_lengths=(77, 3)),
    "batch": replace(LARGE, B=2, H=2),
    # 22 queries of each, of which the last has 20 in the sample.
    "three heads, zigzag": replace(LARGE, q_lengths=(256, 256), k_lengths=(256, 256), H=3, H_kv=1, zigzag=True),
    "more heads than sampled rows": replace(LARGE, q_lengths=(3, 3), H=70, H_kv=1),
}

#: Causal, the recipe, and what channels of K are multiplied by. V in 8 bits wants biases that are alike: its mean is
#: that of all tokens, and of one process that of a sequence.
PACKED = {
    "full": (False, ha.BALANCED, 1.0),
    "causal": (True, ha.BALANCED, 1.0),
    "hybrid": (True, ha.HYBRID, 1.0),
    "large channels": (True, ha.BALANCED, 30.0),
}

#: How many times the error of one process packed sequences may have: their blocks are cut elsewhere, and hold others'.
PACKED_AS_ONE = 1.05

#: K and V of 8-bit presets, without padding: no more than this of bf16's bytes.
MOST_BYTES = 0.55
COUNTED = Problem((64, 64), (1024, 1024), H=2, H_kv=2, D=64, D_v=64)


def bytes_sent(strategy: Strategy, rank: int, group: dist.ProcessGroup) -> list[tuple[str, int]]:
    with ranks.Sent() as sent:
        ranks.attend(COUNTED, strategy, rank, group)
    return sent.found


def factors_of(problem: Problem, rank: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The factors of channels that a rank quantises with."""
    api = importlib.import_module("helion_attn.distributed.api")
    with mock.patch.dict(api.STRATEGIES, {"ring": lambda call, packed: (packed.channel_factors, None)}):
        factors, _ = ranks.attend(problem, "ring", rank, group)
    assert isinstance(factors, torch.Tensor)
    return factors


def twice(rank: int, group: dist.ProcessGroup) -> bool:
    first, again = (ranks.attend(FEW_ROWS, "ring", rank, group)[0] for _ in range(2))
    return torch.equal(first, again)


def with_other(changed: dict[str, Any], rank: int, group: dist.ProcessGroup) -> Any:
    """Rank 1 has another problem, or another strategy."""
    strategy: Strategy = changed.get("strategy", "allgather") if rank == 1 else "allgather"
    others = {name: value for name, value in changed.items() if name != "strategy"}
    return ranks.attend(ranks.with_changes(FEW_ROWS, rank, others), strategy, rank, group)


def with_other_rope(rank: int, group: dist.ProcessGroup) -> list[Any]:
    """Rank 1 has fewer rows of angles, then another pairing, then positions."""
    q = torch.ones(1, 2, 8, 32, dtype=torch.bfloat16)
    angles, at = torch.ones(40, 16), torch.arange(8, dtype=torch.int32)
    ropes = [ha.Rope(angles[:20], angles[:20]), ha.Rope(angles, angles, True), ha.Rope(angles, angles, False, at, at)]
    said = []
    for other in ropes:
        rope = other if rank else ha.Rope(angles, angles)
        with pytest.raises(ValueError, match=r"the ranks disagree: rope is ") as raised:
            ha.distributed.attention(q, q, q, group=group, rope=rope)
        said.append(str(raised.value))
    return said


def in_debug(rank: int, group: dist.ProcessGroup) -> list[Any]:
    """Sequences of the whole batch; then positions beyond the tables."""
    q = torch.ones(1, 2, 8, 32, dtype=torch.bfloat16)
    angles, at = torch.ones(40, 16), torch.full((8,), 40, dtype=torch.int32)
    with ha.debug():
        out, _ = attend_packed(False, ha.BALANCED, 1.0, rank, group)
        with pytest.raises(ValueError, match=r"rope\.q_positions\[0\] is 40; it must lie in 0\.\.39"):
            ha.distributed.attention(q, q, q, group=group, rope=ha.Rope(angles, angles, False, at, at))
    return [torch.equal(out.nan_to_num(9), attend_packed(False, ha.BALANCED, 1.0, rank, group)[0].nan_to_num(9))]


def unshard_others(rank: int, group: dist.ProcessGroup) -> list[str]:
    """What `unshard` says where rank 1 has another dtype, width, dimension, balance, or calls `attention`."""
    x = torch.zeros(1, 2, 256, 32, dtype=torch.bfloat16)
    own = functools.partial(ha.distributed.unshard, x, 2, group)
    others: list[Callable[[], object]] = [
        lambda: ha.distributed.unshard(x.float(), 2, group),
        lambda: ha.distributed.unshard(x[..., :16], 2, group),
        lambda: ha.distributed.unshard(x, 1, group),
        lambda: ha.distributed.unshard(x, 2, group, balance="zigzag"),
        lambda: ha.distributed.unshard(x, 5, group),
        lambda: ha.distributed.attention(x, x, x, group=group),
    ]
    said = []
    for other in others:
        with pytest.raises((ValueError, IndexError)) as raised:
            (other if rank else own)()
        said.append(str(raised.value))
    return said


def late(strategy: Strategy, check: bool, rank: int, group: dist.ProcessGroup) -> Any:
    """Rank 1 comes two seconds after the others."""
    if rank == 1:
        time.sleep(2)
    return ranks.attend(EVEN, strategy, rank, group, check=check)


def with_a_bad_argument(rank: int, group: dist.ProcessGroup) -> Any:
    q = torch.zeros(1, 2, 8, 32, dtype=torch.bfloat16)
    return ha.distributed.attention(q, q, q.int() if rank else q, group=group)


def without_check(rank: int, group: dist.ProcessGroup) -> tuple[Any, Any]:
    with ranks.Sent() as sent:
        out, _ = ranks.attend(EVEN, "allgather", rank, group, check=False)
    return out, sent.found


def cut_and_whole(rank: int, group: dist.ProcessGroup) -> list[bool]:
    found = []
    cuts: list[tuple[int, Balance]] = [(2, None), (257, None), (700, None), (512, "zigzag"), (500, "zigzag")]
    cuts += [(513, "zigzag"), (256, "zigzag")]
    for length, balance in cuts:
        x = torch.arange(2.0 * length).view(2, length)
        part = ha.distributed.shard(x, 1, group, balance=balance)
        at = ha.distributed.positions(length, group, balance=balance)
        whole = ha.distributed.unshard(part, 1, group, balance=balance)
        found += [torch.equal(part, x[:, at]), torch.equal(whole, x)]
    return found


def said_once(rank: int, group: dist.ProcessGroup) -> list[bool]:
    """A `Sharding` is the functions with its group and balance."""
    s = ha.distributed.sharding(group, balance="zigzag")
    x = torch.randn(1, 2, 512, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    part = s.shard(x, 2)
    shared: dict[str, Any] = {"group": group, "balance": "zigzag"}
    found = [
        torch.equal(part, ha.distributed.shard(x, 2, **shared)),
        torch.equal(s.unshard(part, 2), x),
        torch.equal(s.positions(512), ha.distributed.positions(512, **shared)),
    ]
    others: list[dict[str, Any]] = [{"balance": None}, {"group": None}]
    for other in others:
        with pytest.raises(TypeError, match="multiple values for keyword argument"):
            s.attention(part, part, part, **other)
    with mock.patch("helion_attn.distributed.api.attention") as attention:
        s.attention(part, part, part, causal=True)
    return [*found, attention.call_args.kwargs == {**shared, "causal": True}]


def with_another_balance(rank: int, group: dist.ProcessGroup) -> list[str]:
    """What each function says of parts that were cut for zigzag and are given to it without."""
    x = torch.zeros(1, 1, 512, 32, dtype=torch.bfloat16)
    s, ends = ha.distributed.sharding(group, balance="zigzag"), torch.tensor([0, 512], dtype=torch.int32)
    calls: list[Callable[[torch.Tensor], object]] = [
        lambda x: ha.distributed.attention(x, x, x, group=group),
        lambda x: ha.distributed.attention_varlen(
            x[0, 0, :, None], x[0, 0, :, None], x[0, 0, :, None], ends, ends, group=group
        ),
        lambda x: ha.distributed.unshard(x, 2, group),
    ]
    said = []
    for call in calls:
        with ha.debug(), pytest.raises(ValueError) as raised:
            call(s.shard(x, 2))
        said.append(str(raised.value))
    with ha.debug():
        ha.distributed.unshard(ha.distributed.shard(x, 2, group), 2, group)
        s.unshard(s.shard(x, 2), 2)
    return said


def with_derivatives(rank: int, group: dist.ProcessGroup) -> None:
    """Rank 1 waits for a derivative, and all raise."""
    x = torch.ones(1, 2, 8, 32, dtype=torch.bfloat16)
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda y: ha.distributed.attention(x, y, x, group=group),
        lambda y: ha.distributed.unshard(y, 2, group),
    ]
    for call in calls:
        if rank == 0:
            with pytest.raises(ValueError, match=r"rank 1: RuntimeError: [kx] has a tangent"):
                call(x)
        else:
            with pytest.raises(RuntimeError, match="has a tangent"):
                torch.func.jvp(call, (x,), (x,))


def in_groups(rank: int, group: dist.ProcessGroup) -> Any:
    """Two groups of two, of a mesh of four; each has a problem of its own. Then the mesh itself, which raises."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    problem = replace(FEW_ROWS, H=2 * (1 + rank // 2))
    found = ranks.attend(problem, "allgather", rank % 2, mesh["cp"])
    with pytest.raises(ValueError, match=r"group is a mesh of dimensions \('dp', 'cp'\)"):
        ranks.attend(problem, "allgather", rank % 2, mesh)
    return found


def packed_batch(large: float) -> tuple[torch.Tensor, ...]:
    """Q, K and V of sequences that are cut anywhere, [tokens, heads, D]; tokens of no sequence at the end."""
    problem = Problem((130, 90), (130, 126), H=4, H_kv=2, alike=True, large=large)
    q, k, v = (x[0].transpose(0, 1) for x in problem.tensors())
    cu_q = torch.tensor([0, 3, 3, 100, 140, 215], dtype=torch.int32)
    cu_k = torch.tensor([0, 30, 40, 180, 180, 250], dtype=torch.int32)
    return q, k, v, cu_q, cu_k


def attend_packed(causal: bool, recipe: ha.Recipe, large: float, rank: int, group: dist.ProcessGroup) -> Any:
    q, k, v, cu_q, cu_k = packed_batch(large)
    rows, keys = (slice(0, 130), slice(130, None))[rank], (slice(0, 130), slice(130, None))[rank]
    return ha.distributed.attention_varlen(
        q[rows], k[keys], v[keys], cu_q, cu_k, group=group, causal=causal, recipe=recipe, return_lse=True
    )


def compiled(rank: int, group: dist.ProcessGroup) -> list[bool]:
    q, k, v = (torch.randn(1, 2, n, 32).bfloat16() for n in (40, 128, 128))
    found = []
    ways: list[tuple[Strategy, str]] = [("allgather", "aot_eager"), ("ulysses", "eager")]
    for strategy, backend in ways:
        call = functools.partial(ha.distributed.attention, group=group, strategy=strategy, causal=True, check=False)
        found.append(torch.equal(torch.compile(call, fullgraph=True, backend=backend)(q, k, v), call(q, k, v)))
    ring = functools.partial(ha.distributed.attention, group=group, strategy="ring", check=False)
    with pytest.raises(Exception, match=r"torch\.compile traces 'allgather' and 'ulysses'"):
        torch.compile(ring, fullgraph=True, backend="eager")(q, k, v)
    return found


#: Each waits two seconds.
LATE: list[tuple[Strategy, bool]] = [("allgather", False), ("ulysses", False), ("ring", False), ("ring", True)]

#: What ranks disagree on, and what all of them must say.
DISAGREEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "strategy": ({"strategy": "ring"}, 'strategy is "allgather" on rank 0 and "ring" on rank 1'),
    "recipe": ({"recipe": ha.FAST}, 'recipe is "BALANCED" on rank 0 and "FAST" on rank 1'),
    "shape": ({"D_v": 64}, "D_v is 32 on rank 0 and 64 on rank 1"),
    "causal": ({"causal": False}, "causal is true on rank 0 and false on rank 1"),
    "heads": ({"H": 4}, "H is 2 on rank 0 and 4 on rank 1"),
    "batch": ({"B": 2}, "B is 1 on rank 0 and 2 on rank 1"),
    "window": ({"window": (5, 5)}, "window is null on rank 0 and [5, 5] on rank 1"),
    "sinks": ({"has_sinks": True}, "sinks is false on rank 0 and true on rank 1"),
    "return_lse": ({"return_lse": True}, "return_lse is false on rank 0 and true on rank 1"),
}


def solved(problems: dict[str, tuple[Problem, tuple[Strategy, ...]]]) -> dict[str, ranks.Work]:
    return {
        f"{name} {strategy}": ranks.Work(len(problem.q_lengths), functools.partial(ranks.attend, problem, strategy))
        for name, (problem, strategies) in problems.items()
        for strategy in strategies
    }


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What ranks got, by the name of their work; of `PROBLEMS`, those that tests of this run ask about."""
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    of_two: dict[str, Callable[[int, dist.ProcessGroup], Any]] = {
        **{f"bytes {strategy}": functools.partial(bytes_sent, strategy) for strategy in STRATEGIES},
        **{f"other {name}": functools.partial(with_other, changed) for name, (changed, _) in DISAGREEMENTS.items()},
        "other rope": with_other_rope,
        "in debug": in_debug,
        "unshard others": unshard_others,
        **{f"late {strategy} {check}": functools.partial(late, strategy, check) for strategy, check in LATE},
        "bad argument": with_a_bad_argument,
        "bad lengths": functools.partial(ranks.attend, CUT_ANYHOW, "allgather"),
        "bad heads": functools.partial(ranks.attend, replace(FEW_ROWS, H=3), "ulysses"),
        "twice": twice,
        "said once": said_once,
        "another balance": with_another_balance,
        "derivatives": with_derivatives,
        "without check": without_check,
        "cut and whole": cut_and_whole,
        **{f"packed {name}": functools.partial(attend_packed, *options) for name, options in PACKED.items()},
        **{f"factors {name}": functools.partial(factors_of, problem) for name, problem in EQUALISED.items()},
        "plain": functools.partial(ranks.attend, PLAIN, "ring"),
        "plain, not equalised": functools.partial(ranks.attend, NOT_EQUALISED, "ring"),
        "compiled": compiled,
    }
    works = {
        **{name: work for name, work in solved(PROBLEMS).items() if name in asked},
        **{name: ranks.Work(2, do) for name, do in of_two.items()},
        "in groups": ranks.Work(4, in_groups),
        "die": ranks.Work(4, ranks.die),
    }
    return once("ranks", lambda: ranks.run(tmp_path_factory.mktemp("ranks"), works))


@pytest.mark.thorough(but=28)
@pytest.mark.parametrize("name", list(solved(PROBLEMS)))
def test_is_as_one_process(found: dict[str, list[Any]], name: str) -> None:
    assert_as_one(PROBLEMS[name.rpartition(" ")[0]][0], found[name])


@pytest.mark.parametrize("name", list(EQUALISED))
def test_channels_have_the_factors_of_one_process(found: dict[str, list[Any]], name: str) -> None:
    problem = EQUALISED[name]
    one = ha.quantize(*problem.tensors(), recipe=problem.recipe).channel_factors
    assert one is not None
    for factors in found[f"factors {name}"]:
        assert torch.equal(factors, one)
    changed = (one != 1).sum(2)
    assert (changed == 0).all() if problem.large == 1.0 else (changed >= 3).all()


def test_plain_inputs_have_the_bits_without_factors(found: dict[str, list[Any]]) -> None:
    for (out, _), (expected, _) in zip(found["plain"], found["plain, not equalised"], strict=True):
        assert torch.equal(out, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_sent(found: dict[str, list[Any]], strategy: Strategy) -> None:
    p = COUNTED
    for sent in found[f"bytes {strategy}"]:
        operations = ["all_gather_into_tensor", "all_gather_into_tensor"]
        operations += {
            "allgather": ["all_gather_into_tensor"],
            "ulysses": ["all_to_all_single", "all_to_all_single"],
            "ring": ["send"],
        }[strategy]
        assert [name.split(".")[1] for name, _ in sent] == operations
        of_header, kv_sample, large, *output = [size for _, size in sent]
        assert of_header == HEADER_BYTES
        bf16 = 2 * p.k_lengths[0] * p.H_kv * (p.D + p.D_v)
        if strategy == "ulysses":
            bf16 += 2 * p.q_lengths[0] * p.H * p.D
            assert output == [2 * p.q_lengths[0] * p.H * p.D_v]
        assert large <= MOST_BYTES * bf16
        # 128 sampled keys of the rank's 1024, and 32 queries, in 16 bits.
        assert kv_sample <= 0.16 * bf16


def test_a_sharding_says_group_and_balance_once(found: dict[str, list[Any]]) -> None:
    assert found["said once"] == [[True] * 4] * 2


def test_debug_finds_another_balance(found: dict[str, list[Any]]) -> None:
    for said in found["another balance"]:
        assert len(said) == 3, said
        for message in said:
            assert "balance is None, and this rank's part of 256 tokens was cut with balance='zigzag'" in message


def test_derivatives_raise(found: dict[str, list[Any]]) -> None:
    assert found["derivatives"] == [None, None]


def test_a_ring_is_bitwise_equal_run_to_run(found: dict[str, list[Any]]) -> None:
    assert found["twice"] == [True, True]


@pytest.mark.parametrize("name", list(DISAGREEMENTS))
def test_ranks_that_disagree_all_raise(found: dict[str, list[Any]], name: str) -> None:
    for kind, message, *_ in found[f"other {name}"]:
        assert kind == "ValueError"
        assert "the ranks disagree" in message
        assert DISAGREEMENTS[name][1] in message


def test_ranks_that_unshard_otherwise_all_raise(found: dict[str, list[Any]]) -> None:
    first, second = found["unshard others"]
    assert first[:4] == second[:4]
    for said, expected in zip(
        first,
        [
            'dtype is "torch.bfloat16" on rank 0 and "torch.float32" on rank 1',
            "shape is [1, 2, null, 32] on rank 0 and [1, 2, null, 16] on rank 1",
            "shape is [1, 2, null, 32] on rank 0 and [1, null, 256, 32] on rank 1",
            'balance is null on rank 0 and "zigzag" on rank 1',
            f"other ranks refuse their arguments: rank 1: IndexError: {second[4]}",
            'strategy is "unshard" on rank 0 and "allgather" on rank 1',
        ],
        strict=True,
    ):
        assert expected in said
    assert "the ranks disagree" in second[5]


@pytest.mark.parametrize(("strategy", "check"), LATE)
def test_a_late_rank_is_waited_for(found: dict[str, list[Any]], strategy: Strategy, check: bool) -> None:
    assert_as_one(EVEN, found[f"late {strategy} {check}"])


def test_a_rank_that_refuses_makes_others_raise(found: dict[str, list[Any]]) -> None:
    (others_kind, others_message, *_), (kind, message, *_) = found["bad argument"]
    assert (others_kind, kind) == ("ValueError", "TypeError")
    assert "v has dtype torch.int32" in message
    assert "other ranks refuse" in others_message
    assert f"rank 1: TypeError: {message}" in others_message


def test_lengths_that_are_not_found_by_arithmetic_raise(found: dict[str, list[Any]]) -> None:
    for kind, message, *_ in found["bad lengths"]:
        assert kind == "ValueError"
        assert "N are [40, 216]" in message
        assert "strategy='ring' takes any" in message


def test_heads_that_cannot_be_shared_out_raise(found: dict[str, list[Any]]) -> None:
    for kind, message, *_ in found["bad heads"]:
        assert kind == "ValueError"
        assert "q has 3 heads" in message


def test_without_check_there_is_no_header(found: dict[str, list[Any]]) -> None:
    assert_as_one(EVEN, [(out, None) for out, _ in found["without check"]])
    for _, sent in found["without check"]:
        assert HEADER_BYTES not in [size for _, size in sent]
        assert len(sent) == 2


def test_a_rank_that_dies_makes_others_raise(found: dict[str, list[Any]]) -> None:
    first, dead, *others = found["die"]
    assert dead is None
    for kind, _, seconds, _ in (first, *others):
        assert kind in ("RuntimeError", "DistBackendError")
        assert seconds < ranks.TIMEOUT + 5


def die_inside(strategy: Strategy, rank: int, group: dist.ProcessGroup) -> Any:
    """Rank 1 is killed after ranks agreed on the call, before the large collective."""
    api = importlib.import_module("helion_attn.distributed.api")
    dies = {strategy: lambda call, packed: os.kill(os.getpid(), signal.SIGKILL)}
    with mock.patch.dict(api.STRATEGIES, dies if rank == 1 else {}):
        return ranks.attend(replace(EVEN, q_lengths=(40,) * 4, k_lengths=(128,) * 4, H=4), strategy, rank, group)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_dies_inside_a_call(strategy: Strategy, tmp_path: Path) -> None:
    works = {"die": ranks.Work(4, functools.partial(die_inside, strategy))}
    found = ranks.run(tmp_path, works)
    for name in works:
        first, dead, *others = found[name]
        assert dead is None
        for kind, _, seconds, _ in (first, *others):
            assert kind in ("RuntimeError", "DistBackendError")
            assert seconds < ranks.TIMEOUT + 5


@pytest.mark.parametrize("name", list(PACKED))
def test_packed_sequences(found: dict[str, list[Any]], name: str) -> None:
    causal, recipe, large = PACKED[name]
    q, k, v, cu_q, cu_k = packed_batch(large)
    (first, first_lse), (second, second_lse) = found[f"packed {name}"]
    out, lse = torch.cat([first, second]), torch.cat([first_lse, second_lse], 1)
    one, one_lse = ha.attention_varlen(q, k, v, cu_q, cu_k, causal=causal, recipe=recipe, return_lse=True)
    oracle, oracle_lse = ha.reference.attention_varlen(q, k, v, cu_q, cu_k, causal=causal)
    known = slice(0, int(cu_q[-1]))
    assert torch.equal(out.isnan(), one.isnan())
    assert torch.equal(lse.isnan(), one_lse.isnan())
    # Sequence 3 has no key.
    assert torch.equal(lse.isneginf(), one_lse.isneginf())
    assert lse.isneginf().sum() >= 4 * 40
    assert relative_error(out[known], oracle[known]) <= PACKED_AS_ONE * relative_error(one[known], oracle[known])
    finite = one_lse.isfinite()
    one_error = relative_error(one_lse[finite], oracle_lse[finite])
    # With large channels ranks have the factors of all tokens, one process has each sequence's: scores round elsewhere.
    as_one = ranks.LSE_AS_ONE if large == 1.0 else 1.0 + 2 * (ranks.LSE_AS_ONE - 1.0)
    assert relative_error(lse[finite], oracle_lse[finite]) <= as_one * one_error


def test_ropes_that_differ(found: dict[str, list[Any]]) -> None:
    first, second = found["other rope"]
    assert first == second
    assert (
        '"40 x 16, halves, with no positions" on rank 0 and "20 x 16, halves, with no positions" on rank 1' in first[0]
    )
    assert '"40 x 16, interleaved, with no positions" on rank 1' in first[1]
    assert '"40 x 16, halves, with q_positions and k_positions" on rank 1' in first[2]


def test_debug(found: dict[str, list[Any]]) -> None:
    assert found["in debug"] == [[True]] * 2


@pytest.mark.parametrize("scales", ["head", "channel"])
def test_ranks_know_entries_of_v_that_the_sample_missed(scales: str, device: str) -> None:
    """Each of two ranks has one beyond the room of what they sampled, in a channel of its own."""
    recipe, N = replace(ha.BALANCED, v_scales=scales, equalise=False).resolved, 2 * SAMPLED_KEYS
    q, k, v = make_qkv("biased_v", 1, 2, 2, 3, N, 32, device=device)
    v[0, 1, 7, 3], v[0, 1, N - 1, 9] = 1000.0, -500.0
    tile, cut = packing(32, 32), Cut((N // 2, N // 2), zigzag=False)
    samples = [cut.sample(rank, SAMPLED_KEYS) for rank in range(2)]
    parts = [(x.chunk(2, 2)) for x in (k, v)]
    kv_sample = torch.stack(
        [
            rank_samples.describe(
                DescribeRankArgs(q, own_k, own_v, NO_ROPE_ARGUMENTS, recipe, sample.size, 0, sample, sample)
            )
            for own_k, own_v, sample in zip(*parts, samples, strict=True)
        ]
    )
    largest = rank_samples.v_largest(kv_sample, 32, 32)
    assert torch.equal(largest, v.abs().amax(2))
    known = rank_samples.of_all_ranks(kv_sample[:, :-1].flatten(0, 1), None, largest, 32, 32, tile, recipe)
    # Of the sample alone: of no entry that is larger.
    room = rank_samples.of_all_ranks(kv_sample[:, :-1].flatten(0, 1), None, 0 * largest, 32, 32, tile, recipe).v_amax
    hit = torch.zeros_like(room, dtype=torch.bool)
    hit[1, slice(None) if scales == "head" else [3, 9]] = True
    assert torch.equal(known.v_amax[~hit], room[~hit])
    bounds = largest[0, 1].float() + known.v_mean[1, :32].abs()
    assert torch.equal(known.v_amax[1][hit[1]], bounds.amax().expand(32) if scales == "head" else bounds[[3, 9]])


@pytest.mark.parametrize("parts", [2, 3, 16, 1024])
def test_parts_are_told_apart(parts: int) -> None:
    """The multiplication in place of a division is right as far as it says, and no further for a power of two."""

    def right(blocks: int) -> bool:
        factor = magic(blocks) % 2**32
        firsts = [part * blocks for part in range(parts)]
        return all((j + 1) * factor >> 32 == j // blocks for first in firsts for j in (first, first + blocks - 1))

    most = max(n for n in range(2**16 + 1) if magic_finds_chunks(parts, n))
    assert all(right(n) for n in (1, 2, 3, 127, most // 2, most - 1, most))
    power = 2 ** math.ceil(math.log2(most + 1))
    assert not right(power)
    with pytest.raises(ValueError, match=rf"{power} key blocks in each of {parts} parts; .* take more ranks"):
        check_places(parts, power, (power,) * parts)


def test_compiles(found: dict[str, list[Any]]) -> None:
    assert found["compiled"] == [[True, True]] * 2


def test_shard_and_unshard(found: dict[str, list[Any]]) -> None:
    assert found["cut and whole"] == [[True] * 14] * 2


def test_groups_of_a_mesh(found: dict[str, list[Any]]) -> None:
    of_ranks = found["in groups"]
    assert_as_one(FEW_ROWS, of_ranks[:2])
    assert_as_one(replace(FEW_ROWS, H=4), of_ranks[2:])


@pytest.mark.parametrize(
    ("total", "count", "zigzag", "lengths"),
    [
        (1000, 4, False, (256, 256, 256, 232)),
        (9, 4, False, (3, 3, 3, 0)),
        (10, 4, False, (3, 3, 3, 1)),
        (1000, 4, True, (128 + 104, 256, 256, 256)),
        (512, 2, True, (256, 256)),
        (513, 2, True, (256, 257)),
        (16400, 8, True, (1152, 1152 + 272) + (2304,) * 6),
        (2049, 8, True, (256,) * 7 + (257,)),
        (1024, 8, True, (128,) * 8),
        (75600, 8, False, (9472,) * 7 + (9296,)),
    ],
)
def test_cuts(total: int, count: int, zigzag: bool, lengths: tuple[int, ...]) -> None:
    if 0 in lengths:
        with pytest.raises(ValueError, match="the length is 9; 4 ranks need 4 parts, none of them empty"):
            cut_of(total, count, zigzag)
        return
    cut = cut_of(total, count, zigzag)
    assert cut.lengths == lengths
    cut.check("N", equal=True)
    held = sorted(
        x for rank in range(count) for run in cut.chunks(rank) for x in range(run.begin, run.begin + run.size)
    )
    assert held == list(range(total))
    # As one process samples them.
    n = min(total, 256)
    assert sum(cut.sample(rank, 256).size for rank in range(count)) == n


@pytest.mark.parametrize(
    ("lengths", "zigzag", "accepted"),
    [
        ((128, 100, 128), False, "all must be equal, but for the last"),
        ((256, 200), True, r"they must be \[200, 256\], as helion_attn\.distributed\.shard cuts 456 tokens"),
        ((200, 200), True, r"they must be \[144, 256\]"),
        ((256, 128), True, r"they must be \[128, 256\]"),
        ((100, 128), True, "together they must be at least 256, 128 a rank"),
    ],
)
def test_lengths_that_raise(lengths: tuple[int, ...], zigzag: bool, accepted: str) -> None:
    with pytest.raises(ValueError, match=rf"the ranks' N are \[.*{accepted}"):
        Cut(lengths, zigzag).check("N", equal=True)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_zigzag_cuts_any_length(count: int) -> None:
    """Every token is in one run, and a rank's first run is a whole chunk."""
    least = 128 * count
    with pytest.raises(ValueError, match=f"length is {least - 1}; with balance='zigzag' it must be at least {least}"):
        cut_of(least - 1, count, True)
    for total in (*range(least, 8 * least, 61), 10 * least, 16400, 75600, 131072 + 1):
        cut = cut_of(total, count, True)
        cut.check("N", equal=True)
        n = cut.chunk_size
        assert n % 128 == 0
        assert 2 * count * n - total < 2 * count * 128
        held: list[Chunk] = []
        for rank in range(count):
            runs = cut.chunks(rank)
            assert runs[0] == (rank * n, n)
            assert runs[1:] in ((), (((2 * count - 1 - rank) * n, cut.lengths[rank] - n),))
            held += runs
        end = 0
        for run in sorted(held):
            assert run.begin == end
            end += run.size
        assert end == total
        assert sum(cut.sample(rank, 256).size for rank in range(count)) == min(total, 256)


def test_a_header_is_what_it_was() -> None:
    one = Header(3, 5, False, '{"a": 1}')
    assert len(one.encode()) == HEADER_BYTES
    assert decode(bytes(one.encode())) == one
    assert len(Header(0, 0, True, "x" * 2 * HEADER_BYTES).encode()) == HEADER_BYTES
    with pytest.raises(ValueError, match="bytes of text"):
        Header(0, 0, False, "x" * HEADER_BYTES).encode()


def test_a_header_is_exchanged_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has no stream to itself for it otherwise, and idles while the host waits for all that was launched."""
    inside: list[bool] = []

    @contextlib.contextmanager
    def aside(device: torch.device) -> Iterator[None]:
        inside.append(True)
        yield
        inside.append(False)

    def gather(x: torch.Tensor, group: Any) -> torch.Tensor:
        assert inside == [True]
        return torch.stack([x, x])

    monkeypatch.setattr(header, "aside", aside)
    monkeypatch.setattr(collectives, "gather", gather)
    monkeypatch.setattr(collectives, "device_of", lambda group: torch.device("cpu"))
    own = Header(3, 5, False, "{}")
    assert header.exchange(own, mock.Mock()) == [own, own]
    assert inside == [True, False]


def test_the_model_on_paper_is_in_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "scripts"))
    model = importlib.import_module("distributed_model")
    page = (root / "docs" / "distributed.md").read_text()
    assert page == model.with_tables(page), "run scripts/distributed_model.py"


def test_it_asks_for_torch_distributed() -> None:
    q = torch.zeros(1, 1, 8, 32, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised"):
        ha.distributed.attention(q, q, q)
